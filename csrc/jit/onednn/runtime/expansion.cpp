#include "jit/onednn/runtime/expansion.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <xmmintrin.h>

#include <algorithm>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/depthwise_blocks.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/row_blocks.h"
#include "jit/onednn/runtime/tasks.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Channels that are expanded at a time: a few rows of them stay in the first level of cache.
constexpr int64_t kChunk = 64;

// Channels that one thread computes.
struct Part {
  int64_t first_channel;
  int64_t channels;
  void* result;  // of all images: what these channels add to it, where they are projected
};

int64_t rowsAtOnce(const Expansion& e, int64_t rows) {
  return llga::rowsAtOnce(rows, e.size[1], e.stride, e.outputs != 0 ? e.result_size[1] : 0);
}

// Of a pixel of the result without a projection.
int64_t numbersOfPixel(const Expansion& e) {
  return e.keeps_expanded ? 2 * e.channels : e.channels;
}

// Those with wider vectors can't take fewer channels than one holds.
const depthwise::Kernels& depthwiseKernels(const Expansion& e) {
  const auto& widest = depthwise::kernels();
  return e.channels < widest.width ? depthwise::avx2 : widest;
}

int64_t rowsUnder(const Expansion& e, int64_t rows) {
  return llga::rowsUnder(rows, e.window, e.stride);
}

// Of the image, that a first convolution reads for rows of what is expanded.
int64_t rowsUnder(const Expansion::First& first, int64_t rows) {
  return llga::rowsUnder(rows, first.window, first.stride);
}

// Of an image, for the threads that it has.
struct Division {
  int64_t channels = 1;  // parts
  int64_t rows = 1;
};

// What the largest part takes, in the time of a product.
int64_t costOf(const Expansion& e, const Division& division) {
  constexpr int64_t kDepthwise = 2;  // its products take longer
  constexpr int64_t kRead = 20;      // a weight, or what another thread left
  constexpr int64_t kJoin = 1 << 18;
  const auto panel = Linear::kernels().panel;
  const auto panels = at::ceil_div(e.channels, panel);
  const auto channels = std::min(at::ceil_div(panels, division.channels) * panel, e.channels);
  const auto rows = at::ceil_div(e.result_size[0], division.rows);
  const auto under = std::min(rowsUnder(e, rows), e.size[0]);
  const auto of_pixel = channels * (kDepthwise * e.window * e.window + e.outputs);
  const auto products =
      under * e.size[1] * channels * e.inputs + rows * e.result_size[1] * of_pixel;
  const auto weights = channels * (e.inputs + e.outputs);
  if (division.channels == 1) {
    return products + kRead * weights;
  }
  // Half of each pixel is in another core's cache, for what reads the result.
  const bool joins = e.outputs != 0;
  const auto numbers =
      e.result_size[0] * e.result_size[1] * (joins ? e.outputs : numbersOfPixel(e));
  return products + kRead * (weights + numbers) + (joins ? kJoin : 0);
}

// Dividing the channels expands none twice, and no thread reads all weights; but a projection is a
// sum over all channels then, and there may be few. Dividing the rows expands some of them twice.
Division divided(const Expansion& e, int64_t parts) {
  Division best{1, std::min(parts, e.result_size[0])};
  // No part has fewer channels than a vector holds.
  const bool whole = e.channels % depthwise::kernels().width == 0;
  const bool sums = e.type == Expansion::Type::float32 && e.last == Rectifier::none;
  const bool may = whole && (e.outputs == 0 || sums);
  const auto most = may ? std::min(parts, at::ceil_div(e.channels, Linear::kernels().panel)) : 1;
  auto least = most > 1 ? costOf(e, best) : 0;
  for (int64_t channels = 2; channels <= most; ++channels) {
    const Division other{channels, std::min(parts / channels, e.result_size[0])};
    if (const auto cost = costOf(e, other); cost < least) {
      best = other;
      least = cost;
    }
  }
  return best;
}

// Results of matrix products: of what is expanded, in float32, and of what is projected.
void multiply(const gemm::Problem& problem) {
  Linear::kernels().run(problem, {0, problem.rows, 0, problem.outputs});
}
void multiply(const gemm::ProblemOf<Bfloat16, float>& problem) {
  NarrowLinear::kernels().toWide(problem, {0, problem.rows, 0, problem.outputs});
}
void multiply(const gemm::ProblemOf<Bfloat16, Bfloat16>& problem) {
  NarrowLinear::kernels().toNarrow(problem, {0, problem.rows, 0, problem.outputs});
}

// While it lives, subnormal numbers are zeros for this thread, as they always are for matrix units:
// other instructions take a hundred cycles for each one.
class SubnormalsAreZero {
 public:
  explicit SubnormalsAreZero(bool on) : before_(on ? _mm_getcsr() : 0), on_(on) {
    constexpr unsigned kFlushes = 0x8040;  // read or written
    if (on_) {
      _mm_setcsr(before_ | kFlushes);
    }
  }
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;
  ~SubnormalsAreZero() {
    if (on_) {
      _mm_setcsr(before_);
    }
  }

 private:
  unsigned before_;
  bool on_;
};

// Computes what one thread takes, block of rows by block of rows, up to `step` of the result at
// once. T: of data and weights.
template <typename T>
class Worker {
 public:
  static constexpr bool kNarrow = sizeof(T) != sizeof(float);

  Worker(const Expansion& e, const Expansion::Data& data, const Part& part, int64_t step,
         float* memory)
      : e_(e),
        data_(data),
        part_(part),
        rows_(rowsUnder(e, step)),
        width_(e.outputs != 0 ? part.channels : numbersOfPixel(e)),
        memory_(memory),
        wide_(memory + rows_ * e.size[1] * part.channels),
        copied_(wide_ + wideNumbers(e, step)),
        lines_(reinterpret_cast<T*>(copied_ + copiedNumbers(e, rows_))) {}

  // float32 numbers of working memory.
  static int64_t scratch(const Expansion& e, int64_t step, int64_t channels) {
    const auto under = rowsUnder(e, step);
    return under * e.size[1] * channels + wideNumbers(e, step) + copiedNumbers(e, under) +
           (e.outputs != 0 ? step * e.result_size[1] * channels : 0);
  }

  void run(const RowBlocks::Block& block) {
    const SubnormalsAreZero zeros(kNarrow && usesAmx());
    made_.begin(block);
    if (block.first_row < block.end_row) {
      runBlock(block.first_row, block.end_row);
    }
  }

 private:
  // What the depthwise convolution makes of a chunk, before it is rounded.
  static int64_t wideNumbers(const Expansion& e, int64_t step) {
    return kNarrow ? step * e.result_size[1] * kChunk : 0;
  }

  // What a first convolution reads for so many rows, whole lines of a cache.
  static int64_t copiedNumbers(const Expansion& e, int64_t rows) {
    constexpr int64_t kLine = 16;
    return e.first ? at::round_up(rowsUnder(*e.first, rows) * rowOf(*e.first), kLine) : 0;
  }

  static int64_t rowOf(const Expansion::First& first) {
    return first.rows.width * first.rows.channels;
  }

  // Of those that are left; no fewer than a vector holds, neither here nor behind.
  static int64_t channelsAtOnce(int64_t left) {
    const auto behind = left - kChunk;
    const bool few = behind > 0 && behind < depthwise::kernels().width;
    return few ? kChunk / 2 : std::min(kChunk, left);
  }

  void runBlock(int64_t row, int64_t end) {
    const auto top = row * e_.stride - e_.padding;
    const auto first = std::max({int64_t{0}, top, made_.end()});  // that is not there yet
    const auto last = std::min(e_.size[0], top + rowsUnder(e_, end - row));
    const auto pixel = (made_.image() * e_.result_size[0] + row) * e_.result_size[1];
    const auto pixels = (end - row) * e_.result_size[1];
    const bool projects = e_.outputs != 0;
    auto* result = static_cast<T*>(part_.result);  // but for a wide one
    auto* kept = result + pixel * width_ + part_.first_channel;
    auto* lines = projects ? lines_ : e_.keeps_expanded ? kept + e_.channels : kept;
    if (e_.first && first < last) {
      copy(*e_.first, first, last);
    }
    int64_t channels = 0;
    for (int64_t c = 0; c < part_.channels; c += channels) {
      channels = channelsAtOnce(part_.channels - c);
      auto* chunk = memory_ + c * rows_ * e_.size[1];
      expand(first, last, c, channels, chunk);
      if (e_.keeps_expanded) {
        keep(row, end, channels, chunk, kept + c);
      }
      for (auto y = row; y < end; ++y) {
        const auto at = (y - row) * e_.result_size[1];
        if constexpr (kNarrow) {
          depthwise(y, c, channels, chunk, wide_ + at * channels, channels);
        } else {
          depthwise(y, c, channels, chunk, lines + at * width_ + c, width_);
        }
      }
      if constexpr (kNarrow) {
        if (e_.outer.activation) {
          activate(*e_.outer.activation, wide_, pixels * channels);
        }
        if (e_.outer.slopes) {
          vector_loops::kernels().slopeRows(wide_, pixels, channels, channels,
                                            data_.outer_slopes + part_.first_channel + c);
        }
        vector_loops::kernels().narrowRows(wide_, pixels, channels, lines + c, width_);
      }
    }
    made_.makeUpTo(last);
    if constexpr (!kNarrow) {
      if (e_.outer.activation) {
        const bool dense = part_.channels == width_;
        for (int64_t i = 0; i < (dense ? 1 : pixels); ++i) {
          activate(*e_.outer.activation, lines + i * width_, part_.channels * (dense ? pixels : 1));
        }
      }
      if (e_.outer.slopes) {
        vector_loops::kernels().slopeRows(lines, pixels, part_.channels, width_,
                                          data_.outer_slopes + part_.first_channel);
      }
    }
    if constexpr (kNarrow) {
      if (e_.wide_result) {
        return projectWide(lines, pixel, pixels);
      }
    }
    if (projects) {
      const bool first_part = part_.first_channel == 0;  // whose sums all that is added joins
      const auto* addend = first_part ? static_cast<const T*>(data_.addend) : nullptr;
      const auto* bias = first_part ? data_.projection_bias : nullptr;
      const auto at = pixel * e_.outputs;
      const auto panel = Linear::kernels().panel;
      const auto* weight = static_cast<const T*>(data_.projection) + part_.first_channel * panel;
      multiply(gemm::ProblemOf<T, T>{pixels, part_.channels, e_.outputs, e_.last, lines,
                                     part_.channels, weight, e_.channels * panel, bias,
                                     addend != nullptr ? addend + at : nullptr, result + at});
    }
  }

  // Of all channels, which bfloat16 does not divide.
  void projectWide(const Bfloat16* lines, int64_t pixel, int64_t pixels) const {
    const auto at = pixel * e_.outputs;
    auto* to = static_cast<float*>(part_.result) + at;
    const auto* addend = static_cast<const float*>(data_.addend);
    multiply(gemm::ProblemOf<Bfloat16, float>{
        pixels, e_.channels, e_.outputs, e_.last, lines, e_.channels,
        static_cast<const Bfloat16*>(data_.projection), e_.channels * Linear::kernels().panel,
        data_.projection_bias, addend != nullptr ? addend + at : nullptr, to});
  }

  // Row `y` of what is expanded: so many rows are kept, the last ones.
  float* rowOf(float* chunk, int64_t y, int64_t channels) const {
    return chunk + y % rows_ * e_.size[1] * channels;
  }

  // What a first convolution reads for the rows [first, end).
  void copy(const Expansion::First& f, int64_t first, int64_t end) const {
    const auto* source = static_cast<const float*>(data_.source);
    f.rows.copy(source + made_.image() * f.rows.strides[0], first * f.stride - f.padding,
                rowsUnder(f, end - first), copied_);
  }

  // Expands the rows [first, end).
  void expand(int64_t first, int64_t end, int64_t c, int64_t channels, float* chunk) const {
    const auto panel = Linear::kernels().panel;
    const auto channel = part_.first_channel + c;
    const auto* bias = data_.pointwise_bias;
    gemm::ProblemOf<T, float> problem{0,
                                      e_.inputs,
                                      channels,
                                      e_.inner.rectifier,
                                      static_cast<const T*>(data_.source),
                                      e_.inputs,
                                      static_cast<const T*>(data_.pointwise) + channel * e_.inputs,
                                      panel * e_.inputs,
                                      bias != nullptr ? bias + channel : nullptr,
                                      nullptr,
                                      nullptr};
    auto together = rows_;
    auto row_stride = e_.size[1] * e_.inputs;
    if (!e_.first) {
      problem.source += (made_.image() * e_.size[0] + first) * row_stride;
    } else {  // each number from a window of what copy() left
      together = 1;
      problem.source = reinterpret_cast<const T*>(copied_);
      problem.source_stride = e_.first->stride * e_.first->rows.channels;
      problem.pieces = e_.first->window;
      problem.piece_stride = rowOf(*e_.first);
      row_stride = e_.first->stride * problem.piece_stride;
    }
    int64_t rows = 0;
    for (auto y = first; y < end; y += rows) {
      rows = std::min({together, end - y, rows_ - y % rows_});  // that lie one behind the other
      problem.rows = rows * e_.size[1];
      problem.result = rowOf(chunk, y, channels);
      multiply(problem);
      if (e_.inner.activation) {
        activate(*e_.inner.activation, problem.result, problem.rows * channels);
      }
      if (e_.inner.slopes) {
        vector_loops::kernels().slopeRows(problem.result, problem.rows, channels, channels,
                                          data_.inner_slopes + channel);
      }
      problem.source += rows * row_stride;
    }
  }

  // The rows [row, end) of what is expanded, in the result.
  void keep(int64_t row, int64_t end, int64_t channels, float* chunk, T* to) const {
    const auto& loops = vector_loops::kernels();
    const auto pixels = e_.size[1];
    for (; row < end; ++row, to += pixels * width_) {
      const auto* from = rowOf(chunk, row, channels);
      if constexpr (kNarrow) {
        loops.narrowRows(from, pixels, channels, to, width_);
      } else {
        loops.copyRows(from, pixels, channels, channels, to, width_);
      }
    }
  }

  // Row `y` of the result.
  void depthwise(int64_t y, int64_t c, int64_t channels, float* chunk, float* to,
                 int64_t stride) const {
    const auto channel = part_.first_channel + c;
    const auto* bias = data_.depthwise_bias;
    depthwise::Row row{{},
                       e_.size[1],
                       channels,
                       channels,
                       data_.depthwise + channel,
                       e_.channels,
                       bias != nullptr ? bias + channel : nullptr,
                       to,
                       stride,
                       e_.result_size[1],
                       e_.padding,
                       e_.outer.rectifier};
    for (int64_t k = 0; k < e_.window; ++k) {
      const auto under = y * e_.stride - e_.padding + k;
      const bool inside = under >= 0 && under < e_.size[0];
      row.source[k] = inside ? rowOf(chunk, under, channels) : nullptr;
    }
    depthwiseKernels(e_).find(e_.window, e_.window, e_.stride)(row);
  }

  static void activate(Activation activation, float* numbers, int64_t count) {
    vector_loops::functions<float>().activate(activation, numbers, numbers, count);
  }

  const Expansion& e_;
  const Expansion::Data& data_;
  Part part_;
  int64_t rows_;   // of the image that a block reads
  int64_t width_;  // of a pixel of what the depthwise convolution leaves
  float* memory_;
  float* wide_;
  float* copied_;  // rows of the image for a first convolution
  T* lines_;       // what is projected
  MadeRows made_;
};

}  // namespace

bool Expansion::isSupported() const {
  const bool known =
      type == Type::float32 || (usesAvx512Bf16() && inputs % 2 == 0 && channels % 2 == 0);
  const bool enough = channels >= depthwiseKernels(*this).width;
  const bool keeps = stride == 1 && size == result_size && outputs == 0 && !first;
  constexpr int64_t kMostRows = 5;  // of a window; others were not measured
  return known && enough && (keeps || !keeps_expanded) && window <= kMostRows &&
         depthwise::kernels().find(window, window, stride) != nullptr;
}

bool Expansion::pays() const {
  if (keeps_expanded) {  // what is left out is a concatenation
    return true;
  }
  const auto pixels = size[0] * size[1];
  if (type == Type::bfloat16 && usesAmx()) {
    constexpr int64_t kMostOfAll = 1 << 19;  // then oneDNN is as fast, where it has the activations
    return outputs != 0 || inner.isSlow() || outer.isSlow() ||
           (stride == 1 && images * pixels * channels <= kMostOfAll);
  }
  constexpr int64_t kSmallest = 40;  // pixels; each image reads the weights
  // A few rows after the other read all weights, which a product that takes more rows reads once.
  constexpr int64_t kMostWeights = 1 << 21;  // bytes
  const auto item = type == Type::float32 ? sizeof(float) : sizeof(Bfloat16);
  const auto weights = channels * (inputs + outputs) * static_cast<int64_t>(item);
  if (usesAvx512() && channels < 2 * inputs && weights > kMostWeights) {
    return false;
  }
  // For a thread: reading the weights is most of it, where oneDNN's kernels are good.
  const bool good = usesAmx() || (type == Type::bfloat16 && usesAvx512());
  const int64_t few = good ? 96 : 24;
  return pixels >= kSmallest && images * pixels >= few * at::get_num_threads();
}

const char* Expansion::isa() const {
  return type == Type::float32 ? Linear::kernels().name : NarrowLinear::kernels().name;
}

std::vector<int64_t> Expansion::panelSizes(int64_t inputs, int64_t outputs) const {
  const auto panel = Linear::kernels().panel;
  const int64_t together = type == Type::float32 ? 1 : 2;
  return {at::ceil_div(outputs, panel), inputs / together, panel * together};
}

void Expansion::run(const Data& data) const {
  if (type == Type::float32) {
    runAs<float>(data);
  } else {
    runAs<Bfloat16>(data);
  }
}

template <typename T>
void Expansion::runAs(const Data& data) const {
  const auto threads = int64_t{at::get_num_threads()};
  const auto panel = Linear::kernels().panel;
  const auto panels = panelSizes(inputs, channels)[0];
  const auto [by_channel, by_row] = divided(*this, at::ceil_div(threads, images));
  const auto most = std::min(at::ceil_div(panels, by_channel) * panel, channels);
  const auto rows = rowsAtOnce(*this, at::ceil_div(result_size[0], by_row));
  const auto floats = Worker<T>::scratch(*this, rows, most);
  // What the first channels are projected to is the result, to which the others' is added.
  const auto results = images * result_size[0] * result_size[1] * outputs;
  const auto apart = (by_channel - 1) * results;
  const auto sums =
      apart != 0 ? arena()->allocate(static_cast<size_t>(apart) * sizeof(float)) : at::DataPtr();
  auto* others = static_cast<float*>(sums.get());
  const auto bytes = floats * static_cast<int64_t>(sizeof(float));
  const RowBlocks blocks(result_size[0], by_row, rows);
  const auto partOf = [&](int64_t c) -> Part {
    const auto channel = panels * c / by_channel * panel;
    return {channel, std::min(panels * (c + 1) / by_channel * panel, channels) - channel,
            c > 0 && apart != 0 ? others + (c - 1) * results : data.result};
  };
  if (by_channel == 1) {
    forTasksOf(images * blocks.ofImage(), bytes, [&](void* memory) {
      return
          [&blocks, worker = Worker<T>(*this, data, partOf(0), rows, static_cast<float*>(memory))](
              int64_t first, int64_t last) mutable {
            for (; first < last; ++first) {
              worker.run(blocks.at(first));
            }
          };
    });
    return;
  }
  // Channels are not divided further: a thread reads the weights of its own.
  const auto each = blocks.ofImage() / by_row;
  forTasks(images * by_channel * by_row, bytes, [&](int64_t i, void* memory) {
    Worker<T> worker(*this, data, partOf(i % by_channel), rows, static_cast<float*>(memory));
    for (auto block = i / by_channel * each; block < (i / by_channel + 1) * each; ++block) {
      worker.run(blocks.at(block));
    }
  });
  if (apart != 0) {
    constexpr int64_t kForOne = 1 << 12;  // numbers
    at::parallel_for(0, results, kForOne, [&](int64_t first, int64_t last) {
      for (int64_t i = 0; i < by_channel - 1; ++i) {
        vector_loops::kernels().add(others + i * results + first,
                                    static_cast<float*>(data.result) + first, last - first);
      }
    });
  }
}

}  // namespace llga
