#include "jit/onednn/passes/norm_affine.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/ir/constants.h>

namespace llga {
namespace {

using torch::jit::toIValue;

bool isNone(const Value* value) {
  const auto known = toIValue(value);
  return known && known->isNone();
}

// A vector of so many float32 numbers; of None, all of them are `otherwise`. Undefined for others.
at::Tensor parameter(const Value* value, int64_t count, double otherwise) {
  if (isNone(value)) {
    return at::full({count}, otherwise, at::kDouble);
  }
  const auto known = constantTensor(value);
  return known.defined() && known.scalar_type() == at::kFloat && known.dim() == 1 &&
                 known.size(0) == count
             ? known.to(at::kDouble)
             : at::Tensor();
}

}  // namespace

std::optional<NormAffine> affineOf(const Node* norm) {
  const auto running = constantTensor(norm->namedInput("running_mean"));
  const auto epsilon = toIValue(norm->namedInput("eps"));
  if (toIValue(norm->namedInput("training")) != c10::IValue(false) || !running.defined() ||
      running.dim() != 1 || !epsilon || isNone(norm->namedInput("running_var"))) {
    return std::nullopt;
  }
  const auto count = running.size(0);
  const auto mean = parameter(norm->namedInput("running_mean"), count, 0);
  const auto variance = parameter(norm->namedInput("running_var"), count, 1);
  const auto gamma = parameter(norm->namedInput("weight"), count, 1);
  const auto beta = parameter(norm->namedInput("bias"), count, 0);
  if (!mean.defined() || !variance.defined() || !gamma.defined() || !beta.defined()) {
    return std::nullopt;
  }
  const auto scale = gamma / (variance + epsilon->toDouble()).sqrt();
  return NormAffine{scale, beta - mean * scale};
}

}  // namespace llga
