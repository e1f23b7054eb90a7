#include "jit/onednn/passes/padded.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>

namespace llga {
namespace {

using torch::jit::Stack;

at::Tensor padded(const at::Tensor& self, at::IntArrayRef pad, c10::string_view mode,
                  std::optional<double> value) {
  if (!self.is_quantized()) {
    return at::pad(self, pad, mode, value);
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

}  // namespace

Symbol paddedKind() {
  static const Symbol kind = Symbol::fromQualString("llga::padded");
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::padded(Tensor(a) self, int[] pad, str mode, float? value) -> Tensor(a)", run,
      c10::AliasAnalysisKind::FROM_SCHEMA)});
  return kind;
}

}  // namespace llga
