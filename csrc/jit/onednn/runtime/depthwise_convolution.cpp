#include "jit/onednn/runtime/depthwise_convolution.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/row_blocks.h"
#include "jit/onednn/runtime/tasks.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Channels of the image at a time: what is read stays in the caches.
constexpr int64_t kChunk = 64;
constexpr int64_t kLongChunk = 32;

// Numbers that lie side by side in each row, one row behind the other.
void copyRows(const float* from, int64_t rows, int64_t numbers, int64_t stride, float* to) {
  for (int64_t i = 0; i < rows; ++i, from += stride, to += numbers) {
    std::copy_n(from, numbers, to);
  }
}

}  // namespace

namespace depthwise {

const Kernels& kernels() { return &Linear::kernels() == &gemm::avx512 ? avx512 : avx2; }

}  // namespace depthwise

// Some rows of the result, of some channels of the image; pixels of every `phases`-th image that
// the dilation makes of one, from `phase` on.
struct DepthwiseConvolution::Task {
  const void* source;  // of the image
  const float* weight;
  const float* bias;
  void* result;  // of the image
  int64_t first_channel;
  int64_t channels;
  int64_t row;
  int64_t rows;
  int64_t phase;
  int64_t phases;
};

bool DepthwiseConvolution::isSupported() const {
  const auto width = depthwise::kernels().width;
  const bool has_gaps = dilation[0] > 1 || dilation[1] > 1;
  const bool interleaved = multiplier >= 2 && multiplier <= 4;  // vector_loops has these
  constexpr int64_t kSmall = 1 << 17;  // products that take less time than oneDNN's call does
  constexpr int64_t kAvx512 = 16;      // numbers of a vector
  // oneDNN's kernels widen each number of bfloat16 once for each column of the window.
  const bool widens = narrow && stride == 1 && window[0] >= 5 && width == kAvx512;
  const bool pays = has_gaps || isLong() || widens || products() <= kSmall;
  return (interleaved || (multiplier == 1 && pays)) && (dilation[1] == 1 || stride == 1) &&
         channels % width == 0 && depthwise::kernels().find(window[0], window[1], stride);
}

int64_t DepthwiseConvolution::products() const {
  return images * result_size[0] * result_size[1] * channels * multiplier * window[0] * window[1];
}

const char* DepthwiseConvolution::isa() { return Linear::kernels().name; }

// One row of the result, which is at `result`, from pixel to pixel as far as `row` says.
void DepthwiseConvolution::runRow(depthwise::Row row, const Task& task) const {
  const auto run_row = depthwise::kernels().find(window[0], window[1], stride);
  const auto apart = dilation[1];
  const auto all = row;
  row.source_stride *= apart;
  row.result_stride *= apart;
  for (auto phase = task.phase; phase < apart; phase += task.phases) {
    // The windows of the result's pixels from `x` on, every so many, begin at pixels like `phase`.
    const auto x = (phase + padding[1]) % apart;
    if (x >= result_size[1]) {
      continue;
    }
    for (int64_t k = 0; k < window[0]; ++k) {
      row.source[k] =
          all.source[k] != nullptr ? all.source[k] + phase * all.source_stride : nullptr;
    }
    row.width = size[1] > phase ? at::ceil_div(size[1] - phase, apart) : 0;
    row.padding = (phase + padding[1] - x) / apart;
    row.result = all.result + x * all.result_stride;
    row.result_width = at::ceil_div(result_size[1] - x, apart);
    run_row(row);
  }
}

void DepthwiseConvolution::runTask(const Task& task, float* memory) const {
  const auto& loops = vector_loops::kernels();
  const auto top = task.row * stride - padding[0];
  const auto first = std::max<int64_t>(0, top);
  const auto last = std::max(first, std::min(size[0], top + rowsUnder(task.rows, reach(), stride)));
  const auto at_first = first * size[1] * channels + task.first_channel;
  auto pixel_stride = channels;
  const float* under = nullptr;
  if (!isGathered()) {
    under = static_cast<const float*>(task.source) + at_first;
  } else {
    const auto pixels = (last - first) * size[1];
    if (narrow) {
      loops.widenRows(static_cast<const Bfloat16*>(task.source) + at_first, pixels, task.channels,
                      channels, memory);
    } else {
      copyRows(static_cast<const float*>(task.source) + at_first, pixels, task.channels, channels,
               memory);
    }
    under = memory;
    pixel_stride = task.channels;
    memory += pixels * task.channels;
  }
  auto weight_stride = channels;
  const float* weights = task.weight + task.first_channel;
  if (isLong()) {
    copyRows(weights, multiplier * window[1], task.channels, channels, memory);
    weights = memory;
    weight_stride = task.channels;
    memory += multiplier * window[1] * task.channels;
  }
  const auto width = result_size[1];
  const auto part = width * task.channels;  // of a row of the result
  const auto all = channels * multiplier;
  const bool in_place = multiplier == 1 && !narrow;
  auto* pixels = memory + multiplier * part;
  for (auto y = task.row; y < task.row + task.rows; ++y) {
    const auto at = y * width * all + task.first_channel * multiplier;
    depthwise::Row row{{},      size[1],   pixel_stride,  task.channels, nullptr,    weight_stride,
                       nullptr, nullptr,   task.channels, width,         padding[1], rectifier,
                       stride,  window[1], slope};
    for (int64_t k = 0; k < window[0]; ++k) {
      const auto from = y * stride - padding[0] + k * dilation[0];
      const bool inside = from >= 0 && from < size[0];
      row.source[k] = inside ? under + (from - first) * size[1] * pixel_stride : nullptr;
    }
    for (int64_t m = 0; m < multiplier; ++m) {
      row.weight = weights + m * window[0] * window[1] * weight_stride;
      row.bias = task.bias != nullptr ? task.bias + m * channels + task.first_channel : nullptr;
      row.result = memory + m * part;
      if (in_place) {
        row.result = static_cast<float*>(task.result) + at;
        row.result_stride = channels;
      }
      runRow(row, task);
    }
    if (in_place) {
      continue;
    }
    for (int64_t x = 0; multiplier > 1 && x < width; ++x) {
      auto* to = narrow ? pixels + x * task.channels * multiplier
                        : static_cast<float*>(task.result) + at + x * all;
      loops.interleave(memory + x * task.channels, multiplier, part, task.channels, sizeof(float),
                       to);
    }
    if (narrow) {
      loops.narrowRows(multiplier > 1 ? pixels : memory, width, task.channels * multiplier,
                       static_cast<Bfloat16*>(task.result) + at, all);
    }
  }
}

void DepthwiseConvolution::run(const void* source, const float* weight, const float* bias,
                               void* result) const {
  constexpr int64_t kMostRows = 8;      // rows of the image that two tasks read are widened twice
  constexpr int64_t kForOne = 1 << 16;  // products that are not worth a second thread
  const auto chunk = isLong() ? kLongChunk : kChunk;
  const auto chunks = at::ceil_div(channels, chunk);
  const auto wanted = at::ceil_div(int64_t{2} * at::get_num_threads(), images * chunks);
  const auto blocks =
      std::min(result_size[0], std::max(wanted, at::ceil_div(result_size[0], kMostRows)));
  const auto rows = at::ceil_div(result_size[0], blocks);
  // Where all pixels of a row are widened or interleaved at once, one task computes them.
  const bool apart = multiplier == 1 && !narrow;
  const auto phases = apart ? std::min(dilation[1], at::ceil_div(wanted, blocks)) : 1;
  const auto most = std::min(chunk, channels);
  const auto gathered =
      isGathered() ? std::min(size[0], rowsUnder(rows, reach(), stride)) * size[1] * most : 0;
  const auto weights = isLong() ? multiplier * window[1] * most : 0;
  const auto made = result_size[1] * most * multiplier * 2;
  const auto item = static_cast<int64_t>(narrow ? sizeof(Bfloat16) : sizeof(float));
  const auto bytes = (gathered + weights + made) * static_cast<int64_t>(sizeof(float));
  forTasks(
      images * chunks * blocks * phases, bytes,
      [&](int64_t i, void* memory) {
        const auto phase = i % phases;
        i /= phases;
        const auto image = i / (chunks * blocks);
        const auto channel = i / blocks % chunks * chunk;
        const auto row = result_size[0] * (i % blocks) / blocks;
        const auto end = result_size[0] * (i % blocks + 1) / blocks;
        const auto of_image = size[0] * size[1] * channels * item;
        const auto of_result = result_size[0] * result_size[1] * channels * multiplier * item;
        runTask({static_cast<const char*>(source) + image * of_image, weight, bias,
                 static_cast<char*>(result) + image * of_result, channel,
                 std::min(chunk, channels - channel), row, end - row, phase, phases},
                static_cast<float*>(memory));
      },
      std::max<int64_t>(1, products() / kForOne));
}

}  // namespace llga
