#include "jit/onednn/runtime/group_norm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/moments.h"
#include "jit/onednn/runtime/reduction.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kScaled = 32;
constexpr int64_t kBlock = 4096;  // numbers that stay in the first level of cache

}  // namespace

// What is done to one of them.
template <typename T>
class GroupNorm::Image {
 public:
  // `parts`: threads that are worth it. `memory`: room for floats().
  Image(const GroupNorm& norm, int64_t parts, float* memory)
      : norm_(norm),
        parts_(parts),
        width_(norm.channels / norm.groups),
        scale_(memory),
        shift_(memory + norm.channels),
        columns_(memory + 2 * norm.channels) {}

  static int64_t floats(const GroupNorm& norm, int64_t parts) {
    return norm.channels * (2 + (norm.channels_last ? 2 * parts : 0));
  }

  void run(const T* from, const float* weight, const float* bias, T* to) {
    moments_.assign(static_cast<size_t>(norm_.groups), {});
    if (norm_.channels_last) {
      addColumns(from);
      toLines(0, norm_.groups, weight, bias);
      at::parallel_for(0, parts_, 1, [&](int64_t first, int64_t last) {
        const auto [begin, end] = std::pair(pixelOf(first), pixelOf(last));
        normalizeRows(from + begin * norm_.channels, end - begin, to + begin * norm_.channels);
      });
      return;
    }
    if (norm_.groups < parts_) {
      addPlanes(from);
      toLines(0, norm_.groups, weight, bias);
      at::parallel_for(
          0, norm_.channels, at::divup(norm_.channels, parts_),
          [&](int64_t first, int64_t last) { normalizePlanes(from, first, last, to); });
      return;
    }
    // One group behind the other, as its numbers may still be in a cache.
    const auto count = width_ * norm_.pixels;
    at::parallel_for(0, norm_.groups, at::divup(norm_.groups, parts_),
                     [&](int64_t first, int64_t last) {
                       for (auto g = first; g < last; ++g) {
                         moments_[static_cast<size_t>(g)] = momentsOf(from + g * count, count);
                         toLines(g, g + 1, weight, bias);
                         normalizePlanes(from, g * width_, (g + 1) * width_, to);
                       }
                     });
  }

 private:
  int64_t pixelOf(int64_t part) const { return norm_.pixels * part / parts_; }

  void addColumns(const T* from) {
    const auto& n = norm_;
    at::parallel_for(0, parts_, 1, [&](int64_t first, int64_t last) {
      for (auto part = first; part < last; ++part) {
        const auto begin = pixelOf(part);
        auto* means = columns_ + 2 * part * n.channels;
        loops_.momentsOfRows(from + begin * n.channels, pixelOf(part + 1) - begin, n.channels,
                             means, means + n.channels);
      }
    });
    for (int64_t part = 0; part < parts_; ++part) {
      const auto rows = pixelOf(part + 1) - pixelOf(part);
      const auto* means = columns_ + 2 * part * n.channels;
      for (int64_t g = 0; g < n.groups; ++g) {
        const auto* group = means + g * width_;
        moments_[static_cast<size_t>(g)].add(joined(group, group + n.channels, width_, rows));
      }
    }
  }

  // Of few groups: several threads for each.
  void addPlanes(const T* from) {
    const auto count = width_ * norm_.pixels;
    std::vector<Moments> found(static_cast<size_t>(norm_.groups * parts_));
    at::parallel_for(0, norm_.groups * parts_, norm_.groups, [&](int64_t first, int64_t last) {
      for (auto i = first; i < last; ++i) {
        const auto begin = count * (i % parts_) / parts_;
        const auto end = count * (i % parts_ + 1) / parts_;
        found[static_cast<size_t>(i)] = momentsOf(from + i / parts_ * count + begin, end - begin);
      }
    });
    for (int64_t i = 0; i < norm_.groups * parts_; ++i) {
      moments_[static_cast<size_t>(i / parts_)].add(found[static_cast<size_t>(i)]);
    }
  }

  // Of the channels of these groups.
  void toLines(int64_t first, int64_t last, const float* weight, const float* bias) {
    for (auto c = first * width_; c < last * width_; ++c) {
      const auto& [count, mean, squares] = moments_[static_cast<size_t>(c / width_)];
      const auto scale =
          (weight != nullptr ? weight[c] : 1.0) / std::sqrt(squares / count + norm_.epsilon);
      scale_[c] = static_cast<float>(scale);
      shift_[c] = static_cast<float>((bias != nullptr ? bias[c] : 0.0) - mean * scale);
    }
  }

  void normalizeRows(const T* from, int64_t rows, T* to) const {
    const auto columns = norm_.channels;
    const auto some = std::max<int64_t>(1, kBlock / columns);
    for (int64_t row = 0; row < rows; row += some) {
      const auto count = std::min(some, rows - row);
      loops_.affineRows(from + row * columns, to + row * columns,
                        {count, columns, columns, columns, scale_, shift_, norm_.least});
      activate(to + row * columns, count * columns);
    }
  }

  // Of these channels.
  void normalizePlanes(const T* from, int64_t first, int64_t last, T* to) const {
    const auto some = std::max<int64_t>(1, kBlock / norm_.pixels);
    for (auto begin = first; begin < last; begin += some) {
      const auto end = std::min(begin + some, last);
      for (auto c = begin; c < end; ++c) {
        normalizePlane(from + c * norm_.pixels, scale_[c], shift_[c], to + c * norm_.pixels);
      }
      activate(to + begin * norm_.pixels, (end - begin) * norm_.pixels);
    }
  }

  void normalizePlane(const T* from, float scale, float shift, T* to) const {
    float scales[kScaled];
    float shifts[kScaled];
    std::fill_n(scales, kScaled, scale);
    std::fill_n(shifts, kScaled, shift);
    const auto normalize = [&](int64_t at, int64_t rows, int64_t columns) {
      loops_.affineRows(from + at, to + at,
                        {rows, columns, columns, columns, scales, shifts, norm_.least});
    };
    const auto rest = norm_.pixels % kScaled;
    normalize(0, norm_.pixels / kScaled, kScaled);
    normalize(norm_.pixels - rest, 1, rest);
  }

  void activate(T* numbers, int64_t count) const {
    if (norm_.activation) {
      loops_.activate(*norm_.activation, numbers, numbers, count);
    }
  }

  const GroupNorm& norm_;
  const vector_loops::Functions<T>& loops_ = vector_loops::functions<T>();
  const int64_t parts_;
  const int64_t width_;  // channels of a group
  // By channel: numbers times scale, and shift.
  float* const scale_;
  float* const shift_;
  float* const columns_;          // of each part: means, and sums of squares
  std::vector<Moments> moments_;  // by group
};

void GroupNorm::run(const void* from, const float* weight, const float* bias, void* to) const {
  if (type == Type::float32) {
    runAs(static_cast<const float*>(from), weight, bias, static_cast<float*>(to));
  } else {
    runAs(static_cast<const Bfloat16*>(from), weight, bias, static_cast<Bfloat16*>(to));
  }
}

template <typename T>
void GroupNorm::runAs(const T* from, const float* weight, const float* bias, T* to) const {
  // Each thread takes images of its own where there are enough.
  const auto grain = images >= at::get_num_threads() ? 1 : images;
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    const auto parts = std::min(reductionParts(pixels, channels), pixels);
    const auto floats = Image<T>::floats(*this, parts);
    const auto memory = arena()->allocate(static_cast<size_t>(floats) * sizeof(float));
    Image<T> image(*this, parts, static_cast<float*>(memory.get()));
    for (auto i = first; i < last; ++i) {
      const auto offset = i * pixels * channels;
      image.run(from + offset, weight, bias, to + offset);
    }
  });
}

namespace {

// Rows of which a thread takes no fewer.
int64_t fewestRows(int64_t columns) {
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  return std::max<int64_t>(1, kForOne / columns);
}

void normalize(const float* from, int64_t rows, const vector_loops::RowNorm& norm, float* to) {
  vector_loops::kernels().normalizeEachRow(from, rows, norm, to);
}

void normalize(const float* from, int64_t rows, const vector_loops::RowNorm& norm, Bfloat16* to) {
  vector_loops::kernels().normalizeEachRowToNarrow(from, rows, norm, to);
}

void normalize(const Bfloat16* from, int64_t rows, const vector_loops::RowNorm& norm,
               Bfloat16* to) {
  vector_loops::kernels().normalizeEachNarrowRow(from, rows, norm, to);
}

void normalize(const Bfloat16* from, int64_t rows, const vector_loops::RowNorm& norm, float* to) {
  vector_loops::kernels().normalizeEachNarrowRowToWide(from, rows, norm, to);
}

void store(const float* from, int64_t count, Bfloat16* to) {
  vector_loops::kernels().narrowRows(from, 1, count, to, count);
}

}  // namespace

void layerNormRowsToBytes(const float* from, int64_t rows, int64_t columns, float epsilon,
                          const float* scale, const float* shift, uint8_t* to) {
  at::parallel_for(0, rows, fewestRows(columns), [&](int64_t first, int64_t last) {
    vector_loops::kernels().centreEachRow(from + first * columns, last - first, columns, epsilon,
                                          scale, shift, to + first * columns);
  });
}

void NormOfRows::run(const void* from, const float* weight, const float* bias, void* to) const {
  const auto with = [&]<typename T>(T) {
    const auto* data = static_cast<const T*>(from);
    to_narrow ? runAs(data, weight, bias, static_cast<Bfloat16*>(to))
              : runAs(data, weight, bias, static_cast<float*>(to));
  };
  from_narrow ? with(Bfloat16{}) : with(float{});
}

template <typename T, typename R>
void NormOfRows::runAs(const T* from, const float* weight, const float* bias, R* to) const {
  const vector_loops::RowNorm norm{kind, columns, epsilon, weight, bias, least};
  at::parallel_for(0, rows, fewestRows(columns), [&](int64_t first, int64_t last) {
    if (!activation) {
      return normalize(from + first * columns, last - first, norm, to + first * columns);
    }
    // Some rows at a time, whose numbers stay in float32 until all is computed.
    const auto some = std::max<int64_t>(1, kBlock / columns);
    const auto memory = arena()->allocate(static_cast<size_t>(some * columns) * sizeof(float));
    for (auto row = first; row < last; row += some) {
      const auto count = std::min(some, last - row);
      float* numbers = static_cast<float*>(memory.get());
      if constexpr (std::is_same_v<R, float>) {
        numbers = to + row * columns;
      }
      normalize(from + row * columns, count, norm, numbers);
      vector_loops::functions<float>().activate(*activation, numbers, numbers, count * columns);
      if constexpr (!std::is_same_v<R, float>) {
        store(numbers, count * columns, to + row * columns);
      }
    }
  });
}

}  // namespace llga
