#include "jit/onednn/runtime/quantized_linear.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

#include "jit/onednn/runtime/band_blocks.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/shares.h"

namespace llga {
namespace {

using quantized::kTogether;
using quantized::kWidth;

void multiply(const quantized::ProductOf<uint8_t>& product) {
  QuantizedLinear::kernels().multiply(product);
}
void multiply(const quantized::ProductOf<float>& product) {
  QuantizedLinear::kernels().multiplyToFloat(product);
}

}  // namespace

at::Tensor QuantizedSums::padded(const at::Tensor& numbers) {
  return at::constant_pad_nd(numbers, {0, at::round_up(numbers.size(0), kWidth) - numbers.size(0)})
      .contiguous();
}

const quantized::Kernels& QuantizedLinear::kernels() {
  return usesAmx() ? quantized::amx : usesAvx512Vnni() ? quantized::avx512_vnni : quantized::avx2;
}

bool QuantizedLinear::hasKernels() { return usesAvx512Vnni() || usesAvx2WithoutVnni(); }

bool QuantizedLinear::isSupported() const { return hasKernels() && inputs % kTogether == 0; }

bool QuantizedLinear::pays() const {
  constexpr int64_t kMost = 1 << 29;  // products: by AMX, oneDNN's kernels do more of them faster
  return !usesAmx() || rows * inputs * outputs <= kMost;
}

at::Tensor QuantizedLinear::ordered(const at::Tensor& weight, int64_t multiple) {
  const auto outputs = at::round_up(weight.size(0), kWidth);
  const auto inputs = at::round_up(weight.size(1), std::max(multiple, kTogether));
  const bool whole = outputs == weight.size(0) && inputs == weight.size(1);
  return (whole ? weight
                : at::constant_pad_nd(weight,
                                      {0, inputs - weight.size(1), 0, outputs - weight.size(0)}))
      .view({outputs / kWidth, kWidth, inputs / kTogether, kTogether})
      .permute({0, 2, 1, 3});
}

void QuantizedLinear::run(const Data& data) const {
  if (to_float) {
    runAs<float>(data);
  } else {
    runAs<uint8_t>(data);
  }
}

template <typename R>
void QuantizedLinear::runAs(const Data& data) const {
  constexpr int64_t kForOne = 1 << 19;  // products that are not worth a second thread
  constexpr int64_t kSource = 1 << 18;  // bytes of rows that stay in the second level of cache
  constexpr int64_t kFewRows = 512;     // then each thread takes some outputs of all of them
  constexpr int64_t kPanel = quantized::kVectors * kWidth;
  const auto panels = (outputs + kPanel - 1) / kPanel;
  const auto wanted = std::min<int64_t>(at::get_num_threads(), rows * inputs * outputs / kForOne);
  const bool by_outputs = rows <= kFewRows && panels >= wanted;
  const auto units = by_outputs ? panels : rows;
  const auto together = by_outputs ? 1 : amx::kMostRows;  // a multiple of other kernels' as well
  const auto parts = std::clamp<int64_t>(wanted, 1, at::ceil_div(units, together));
  const auto* addend = static_cast<const R*>(data.addend);
  auto* result = static_cast<R*>(data.result);
  forShares(units, together, parts, [&](int64_t from, int64_t to) {
    const auto row = by_outputs ? 0 : from;
    const auto end = by_outputs ? rows : to;
    const auto o = by_outputs ? from * kPanel : 0;
    const auto end_o = by_outputs ? std::min(to * kPanel, outputs) : outputs;
    const auto blocks = std::max<int64_t>(1, (end - row) * inputs / kSource);
    for (int64_t block = 0; block < blocks; ++block) {
      const auto begin = row + (end - row) * block / blocks;
      const auto count = row + (end - row) * (block + 1) / blocks - begin;
      const auto at = begin * outputs + o;
      multiply(quantized::ProductOf<R>{
          count, inputs, end_o - o, data.source + begin * inputs, inputs, data.weight + o * inputs,
          quantized::fromOutput(sums.rescale, o), addend != nullptr ? addend + at : nullptr,
          result + at, outputs, nullptr, outputs - end_o});
    }
  });
}

}  // namespace llga
