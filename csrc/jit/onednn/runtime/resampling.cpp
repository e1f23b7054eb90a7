#include "jit/onednn/runtime/resampling.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "jit/onednn/runtime/tasks.h"
#include "jit/onednn/runtime/transposition.h"

namespace llga {
namespace {

// Of float32 as PyTorch computes them (area_pixel_compute_source_index), so that places between
// which it jumps are the same.
std::vector<vector_loops::Sample> samplesOf(int64_t size, int64_t result, bool align_corners) {
  float step = 0;
  if (!align_corners) {
    step = static_cast<float>(size) / static_cast<float>(result);
  } else if (result > 1) {
    step = static_cast<float>(size - 1) / static_cast<float>(result - 1);
  }
  std::vector<vector_loops::Sample> samples;
  for (int64_t i = 0; i < result; ++i) {
    const auto at = static_cast<float>(i);
    const auto place = align_corners ? step * at : std::max(0.F, step * (at + 0.5F) - 0.5F);
    const auto first = std::min(static_cast<int64_t>(place), size - 1);
    const auto share = std::clamp(place - static_cast<float>(first), 0.F, 1.F);
    samples.push_back({{first, std::min(first + 1, size - 1)}, {1 - share, share}});
  }
  return samples;
}

}  // namespace

Resampling::Resampling(Type type, const Sizes& sizes, bool align_corners)
    : type_(type), sizes_(sizes) {
  for (const size_t i : {0, 1}) {
    samples_[i] = samplesOf(sizes.size[i], sizes.result_size[i], align_corners);
  }
}

void Resampling::run(const void* from, Order order, void* to, Order result_order) const {
  if (type_ == Type::float32) {
    runAs(static_cast<const float*>(from), order, static_cast<float*>(to), result_order);
  } else {
    runAs(static_cast<const Bfloat16*>(from), order, static_cast<Bfloat16*>(to), result_order);
  }
}

// Rows of one image that a thread has resized last: some pixels of them, which stay in the first
// level of cache.
template <typename T>
class Resampling::Rows {
 public:
  // `memory`: room for floats().
  Rows(const Resampling& resampling, int64_t channels, int64_t columns, bool transposes,
       float* memory)
      : samples_(resampling.samples_[1]),
        width_(resampling.sizes_.size[1]),
        channels_(channels),
        transposes_(transposes),
        rows_{memory, memory + columns * channels},
        pixels_(memory + 2 * columns * channels) {}

  static int64_t floats(int64_t columns, int64_t channels, bool transposes) {
    return columns * channels * (transposes ? 3 : 2);
  }

  struct Columns {
    int64_t first;
    int64_t count;

    bool operator==(const Columns&) const = default;
  };

  // These columns of both rows of an image, resized: (column, channel), or transposed.
  std::array<const float*, 2> of(const T* image, const Columns& columns, const int64_t* rows) {
    if (image != image_ || columns != columns_) {
      image_ = image;
      columns_ = columns;
      known_ = {-1, -1};
    }
    const auto in = [&](int64_t row, size_t otherwise) {
      return known_[0] == row ? size_t{0} : known_[1] == row ? size_t{1} : otherwise;
    };
    const auto at = in(rows[0], 1 - in(rows[1], 1));
    const auto* const found = resized(rows[0], at);
    return {found, rows[0] == rows[1] ? found : resized(rows[1], 1 - at)};
  }

 private:
  const float* resized(int64_t row, size_t at) {
    if (known_[at] != row) {
      auto* to = transposes_ ? pixels_ : rows_[at];
      vector_loops::functions<T>().blendPixels(image_ + row * width_ * channels_,
                                               samples_.data() + columns_.first, columns_.count,
                                               channels_, to);
      if (transposes_) {
        transpose(to, columns_.count, channels_, channels_, rows_[at], columns_.count);
      }
      known_[at] = row;
    }
    return rows_[at];
  }

  const std::vector<vector_loops::Sample>& samples_;
  const int64_t width_;
  const int64_t channels_;
  const bool transposes_;
  const T* image_ = nullptr;
  Columns columns_{0, 0};
  std::array<int64_t, 2> known_{-1, -1};
  const std::array<float*, 2> rows_;
  float* const pixels_;
};

template <typename T>
void Resampling::runAs(const T* from, Order order, T* to, Order result_order) const {
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  // Of a row: two of them stay in the first level of cache. Of planes a thread writes a piece of
  // each at a time, which had better be long.
  constexpr int64_t kAtOnce = 1 << 12;
  constexpr int64_t kAtOnceOfPlanes = 1 << 16;
  // Planes are images of one channel.
  const bool last = order == Order::channels_last;
  const auto images = last ? sizes_.images : sizes_.images * sizes_.channels;
  const auto channels = last ? sizes_.channels : 1;
  const bool transposes = last && result_order == Order::planes && channels > 1;
  const auto& rows = samples_[0];
  const auto height = static_cast<int64_t>(rows.size());
  const auto width = static_cast<int64_t>(samples_[1].size());
  const auto at_once = (transposes ? kAtOnceOfPlanes : kAtOnce) / channels;
  const auto parts = at::ceil_div(width, std::max<int64_t>(1, at_once));
  const auto columns = at::ceil_div(width, parts);
  const auto of_image = sizes_.size[0] * sizes_.size[1] * channels;
  const auto blend = vector_loops::functions<T>().blend;
  const auto floats = Rows<T>::floats(columns, channels, transposes);
  forTasksOf(
      images * parts * height, floats * static_cast<int64_t>(sizeof(float)),
      [&](void* memory) {
        return [&, resized =
                       Rows<T>(*this, channels, columns, transposes, static_cast<float*>(memory))](
                   int64_t unit, int64_t end) mutable {
          for (; unit < end; ++unit) {
            const auto y = unit % height;
            const auto image = unit / height / parts;
            const auto column = unit / height % parts * columns;
            const auto count = std::min(columns, width - column);
            const auto& sample = rows[static_cast<size_t>(y)];
            const auto [a, b] = resized.of(from + image * of_image, {column, count}, sample.at);
            if (!transposes) {
              const auto pixel = (image * height + y) * width + column;
              blend(a, b, sample.share, count * channels, to + pixel * channels);
              continue;
            }
            for (int64_t c = 0; c < channels; ++c) {
              blend(a + c * count, b + c * count, sample.share, count,
                    to + ((image * channels + c) * height + y) * width + column);
            }
          }
        };
      },
      std::max<int64_t>(1, images * height * width * channels / kForOne));
}

}  // namespace llga
