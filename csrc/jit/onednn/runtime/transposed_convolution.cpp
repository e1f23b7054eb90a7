#include "jit/onednn/runtime/transposed_convolution.h"

#include <algorithm>

#include "jit/onednn/runtime/tasks.h"

namespace llga {
namespace {

float rectified(float number, Rectifier rectifier) {
  switch (rectifier) {
    case Rectifier::relu:
      return std::max(number, 0.0F);
    case Rectifier::relu6:
      return std::clamp(number, 0.0F, 6.0F);
    case Rectifier::hardswish:
      return number * std::clamp(number + 3, 0.0F, 6.0F) / 6;
    default:
      return number;
  }
}

}  // namespace

bool TransposedConvolution::pays() const {
  constexpr int64_t kFew = 8;                // a vector of AVX2
  constexpr int64_t kMostScratch = 1 << 22;  // what caches hold
  return outputs < kFew && scratch() <= kMostScratch;
}

Linear TransposedConvolution::product() const {
  return {images * size[0] * size[1], channels, window[0] * span(), Rectifier::none};
}

int64_t TransposedConvolution::scratch() const {
  const auto linear = product();
  return linear.rows * linear.outputs;
}

int64_t TransposedConvolution::width() const {
  return std::max((size[1] - 1) * stride[1] + window[1], result_size[1] + padding[1]);
}

// The sums of a row of the result.
void TransposedConvolution::makeRow(const Data& data, int64_t image, int64_t y, float* sums) const {
  for (int64_t x = 0; x < width(); ++x) {
    for (int64_t c = 0; c < outputs; ++c) {
      sums[x * outputs + c] = data.bias != nullptr ? data.bias[c] : 0;
    }
  }
  const auto numbers = span();
  for (int64_t k = (y + padding[0]) % stride[0]; k < window[0]; k += stride[0]) {
    const auto row = (y + padding[0] - k) / stride[0];
    if (y + padding[0] < k || row >= size[0]) {
      continue;
    }
    const auto* products =
        data.scratch + (image * size[0] + row) * size[1] * window[0] * numbers + k * numbers;
    for (int64_t x = 0; x < size[1]; ++x, products += window[0] * numbers) {
      auto* to = sums + x * stride[1] * outputs;
      for (int64_t i = 0; i < numbers; ++i) {
        to[i] += products[i];
      }
    }
  }
}

void TransposedConvolution::write(const float* sums, int64_t image, int64_t y,
                                  float* result) const {
  const auto pixels = result_size[1];
  const auto* from = sums + padding[1] * outputs;
  if (!planes || outputs == 1) {
    auto* to = result + (image * result_size[0] + y) * pixels * outputs;
    std::transform(from, from + pixels * outputs, to,
                   [this](float number) { return rectified(number, rectifier); });
    return;
  }
  for (int64_t c = 0; c < outputs; ++c) {
    auto* to = result + ((image * outputs + c) * result_size[0] + y) * pixels;
    for (int64_t x = 0; x < pixels; ++x) {
      to[x] = rectified(from[x * outputs + c], rectifier);
    }
  }
}

void TransposedConvolution::run(const Data& data) const {
  product().run({data.source, data.weight, nullptr, nullptr, data.scratch});
  const auto bytes = width() * outputs * static_cast<int64_t>(sizeof(float));
  constexpr int64_t kRows = 4;  // worth a task
  const auto blocks = (result_size[0] + kRows - 1) / kRows;
  forTasks(images * blocks, bytes, [&](int64_t i, void* memory) {
    auto* sums = static_cast<float*>(memory);
    const auto first = i % blocks * kRows;
    for (auto y = first; y < std::min(first + kRows, result_size[0]); ++y) {
      makeRow(data, i / blocks, y, sums);
      write(sums, i / blocks, y, data.result);
    }
  });
  if (activation) {
    activate(*activation, data.result, data.result,
             images * result_size[0] * result_size[1] * outputs);
  }
}

}  // namespace llga
