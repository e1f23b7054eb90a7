#include "jit/onednn/runtime/depthwise_convolution.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/depthwise_blocks.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/row_blocks.h"
#include "jit/onednn/runtime/tasks.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kChunk = 64;  // channels of the image at a time: what is read stays in the caches

}  // namespace

namespace depthwise {

const Kernels& kernels() { return &Linear::kernels() == &gemm::avx512 ? avx512 : avx2; }

}  // namespace depthwise

// Some rows of the result, of some channels of the image.
struct DepthwiseConvolution::Task {
  const void* source;  // of the image
  const float* weight;
  const float* bias;
  void* result;  // of the image
  int64_t first_channel;
  int64_t channels;
  int64_t row;
  int64_t rows;
};

bool DepthwiseConvolution::isSupported() const {
  const auto width = depthwise::kernels().width;
  const bool interleaved = multiplier >= 2 && multiplier <= 4;  // vector_loops has these
  return interleaved && channels % width == 0 && depthwise::kernels().find(window, stride);
}

const char* DepthwiseConvolution::isa() { return Linear::kernels().name; }

void DepthwiseConvolution::runTask(const Task& task, float* memory) const {
  const auto& loops = vector_loops::kernels();
  const auto run_row = depthwise::kernels().find(window, stride);
  const auto top = task.row * stride - padding;
  const auto first = std::max<int64_t>(0, top);
  const auto last = std::max(first, std::min(size[0], top + rowsUnder(task.rows, window, stride)));
  const auto at_first = first * size[1] * channels + task.first_channel;
  auto pixel_stride = channels;
  const float* under = nullptr;
  if (!narrow) {
    under = static_cast<const float*>(task.source) + at_first;
  } else {
    loops.widenRows(static_cast<const Bfloat16*>(task.source) + at_first, (last - first) * size[1],
                    task.channels, channels, memory);
    under = memory;
    pixel_stride = task.channels;
    memory += (last - first) * size[1] * task.channels;
  }
  const auto width = result_size[1];
  const auto part = width * task.channels;  // of a row of the result
  auto* pixels = memory + multiplier * part;
  for (auto y = task.row; y < task.row + task.rows; ++y) {
    depthwise::Row row{{},      size[1], pixel_stride,  task.channels, nullptr, channels,
                       nullptr, nullptr, task.channels, width,         padding, rectifier};
    for (int64_t k = 0; k < window; ++k) {
      const auto from = y * stride - padding + k;
      const bool inside = from >= 0 && from < size[0];
      row.source[k] = inside ? under + (from - first) * size[1] * pixel_stride : nullptr;
    }
    for (int64_t m = 0; m < multiplier; ++m) {
      row.weight = task.weight + m * window * window * channels + task.first_channel;
      row.bias = task.bias != nullptr ? task.bias + m * channels + task.first_channel : nullptr;
      row.result = memory + m * part;
      run_row(row);
    }
    const auto all = channels * multiplier;
    const auto at = y * width * all + task.first_channel * multiplier;
    for (int64_t x = 0; x < width; ++x) {
      auto* to = narrow ? pixels + x * task.channels * multiplier
                        : static_cast<float*>(task.result) + at + x * all;
      loops.interleave(memory + x * task.channels, multiplier, part, task.channels, sizeof(float),
                       to);
    }
    if (narrow) {
      loops.narrowRows(pixels, width, task.channels * multiplier,
                       static_cast<Bfloat16*>(task.result) + at, all);
    }
  }
}

void DepthwiseConvolution::run(const void* source, const float* weight, const float* bias,
                               void* result) const {
  constexpr int64_t kMostRows = 8;  // rows of the image that two tasks read are widened twice
  const auto chunks = at::ceil_div(channels, kChunk);
  const auto wanted = at::ceil_div(int64_t{2} * at::get_num_threads(), images * chunks);
  const auto blocks =
      std::min(result_size[0], std::max(wanted, at::ceil_div(result_size[0], kMostRows)));
  const auto rows = at::ceil_div(result_size[0], blocks);
  const auto most = std::min(kChunk, channels);
  const auto widened =
      narrow ? std::min(size[0], rowsUnder(rows, window, stride)) * size[1] * most : 0;
  const auto made = result_size[1] * most * multiplier * 2;
  const auto item = static_cast<int64_t>(narrow ? sizeof(Bfloat16) : sizeof(float));
  const auto bytes = (widened + made) * static_cast<int64_t>(sizeof(float));
  forTasks(images * chunks * blocks, bytes, [&](int64_t i, void* memory) {
    const auto image = i / (chunks * blocks);
    const auto channel = i / blocks % chunks * kChunk;
    const auto row = result_size[0] * (i % blocks) / blocks;
    const auto end = result_size[0] * (i % blocks + 1) / blocks;
    const auto of_image = size[0] * size[1] * channels * item;
    const auto of_result = result_size[0] * result_size[1] * channels * multiplier * item;
    runTask({static_cast<const char*>(source) + image * of_image, weight, bias,
             static_cast<char*>(result) + image * of_result, channel,
             std::min(kChunk, channels - channel), row, end - row},
            static_cast<float*>(memory));
  });
}

}  // namespace llga
