#include "jit/onednn/passes/padded.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>

#include "jit/onednn/quantization.h"

namespace llga {
namespace {

using torch::jit::Stack;

// `integers`, which stand for numbers as those of `like` do.
at::Tensor quantizedAs(const at::Tensor& like, const at::Tensor& integers) {
  auto result = at::_empty_affine_quantized(
      integers.sizes(), like.options().memory_format(integers.suggest_memory_format()),
      like.q_scale(), like.q_zero_point(), std::nullopt);
  integersOf(result).copy_(integers);
  return result;
}

at::Tensor padded(const at::Tensor& self, at::IntArrayRef pad, c10::string_view mode,
                  std::optional<double> value) {
  if (!self.is_quantized()) {
    return at::pad(self, pad, mode, value);
  }
  if (mode == "constant" && value.value_or(0) == 0) {
    return quantizedAs(self, at::constant_pad_nd(integersOf(self), pad, self.q_zero_point()));
  }
  return at::quantize_per_tensor(at::pad(self.dequantize(), pad, mode, value), self.q_scale(),
                                 self.q_zero_point(), self.scalar_type());
}

void run(Stack& stack) {
  const auto value = torch::jit::pop(stack).toOptional<double>();
  const auto mode = torch::jit::pop(stack).toStringView();
  const auto sizes = torch::jit::pop(stack).toIntVector();
  auto self = torch::jit::pop(stack).toTensor();
  const bool nothing = mode == "constant" && static_cast<int64_t>(sizes.size()) <= 2 * self.dim() &&
                       sizes.size() % 2 == 0 && self.is_contiguous() &&
                       std::all_of(sizes.begin(), sizes.end(), [](auto n) { return n == 0; });
  torch::jit::push(stack, nothing ? self : padded(self, sizes, mode, value));
}

at::Tensor shuffled(const at::Tensor& self, int64_t factor) {
  return self.is_quantized() ? quantizedAs(self, at::pixel_shuffle(integersOf(self), factor))
                             : at::pixel_shuffle(self, factor);
}

}  // namespace

Symbol shuffledKind() {
  static const Symbol kind = Symbol::fromQualString("llga::shuffled");
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::shuffled(Tensor self, int upscale_factor) -> Tensor",
      [](Stack& stack) {
        const auto factor = torch::jit::pop(stack).toInt();
        torch::jit::push(stack, shuffled(torch::jit::pop(stack).toTensor(), factor));
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
  return kind;
}

Symbol paddedKind() {
  static const Symbol kind = Symbol::fromQualString("llga::padded");
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::padded(Tensor(a) self, int[] pad, str mode, float? value) -> Tensor(a)", run,
      c10::AliasAnalysisKind::FROM_SCHEMA)});
  return kind;
}

}  // namespace llga
