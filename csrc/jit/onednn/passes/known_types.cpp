#include "jit/onednn/passes/known_types.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <string>

#include "jit/onednn/passes/slice_sums.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

Dtype constantDtype(const Value* value) {
  const auto dtype = torch::jit::toIValue(value);
  return dtype && dtype->isInt() ? Dtype(static_cast<at::ScalarType>(dtype->toInt()))
                                 : std::nullopt;
}

// What a trace writes for a number (or one): it does not change the other operand's data type, or
// makes it one that autocast leaves alone.
bool isNumber(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return !isTensor(value) ||
         (known && known->isTensor() && known->toTensor().defined() &&
          known->toTensor().dim() == 0 &&
          (known->toTensor().scalar_type() == at::kDouble ||
           c10::isIntegralType(known->toTensor().scalar_type(), /*includeBool=*/true)));
}

std::unordered_set<Symbol> atenKinds(std::initializer_list<const char*> names) {
  std::unordered_set<Symbol> kinds;
  for (const auto* name : names) {
    kinds.insert(Symbol::fromQualString(std::string("aten::") + name));
  }
  return kinds;
}

// Whether a tensor has dimensions by construction; false where that is not known, or only from far
// back: both operands of a sum are asked, which for a chain of sums would be ever more questions.
bool hasDimensions(const Value* value, int further = 8) {
  if (further == 0) {
    return false;
  }
  const auto* node = value->node();
  if (const auto constant = torch::jit::toIValue(value)) {
    return constant->isTensor() && constant->toTensor().defined() && constant->toTensor().dim() > 0;
  }
  if (isBinary(node)) {
    return hasDimensions(node->input(0), further - 1) ||
           (isTensor(node->input(1)) && hasDimensions(node->input(1), further - 1));
  }
  switch (node->kind()) {
    case aten::matmul:  // of two vectors
      return false;
    case aten::layer_norm:
    case aten::batch_norm:
    case aten::embedding:
    case aten::max_pool1d:
    case aten::max_pool2d:
    case aten::max_pool3d:
    case aten::avg_pool1d:
    case aten::avg_pool2d:
    case aten::avg_pool3d:
    case aten::adaptive_avg_pool1d:
    case aten::adaptive_avg_pool2d:
    case aten::adaptive_avg_pool3d:
      return true;
    case aten::linalg_vector_norm:
    case aten::mean:
      return node->inputs().size() > 3 && isTrue(node->namedInput("keepdim")) &&
             hasDimensions(node->input(0), further - 1);
    case aten::dropout:
    case aten::to:
      return hasDimensions(node->input(0), further - 1);
    default:
      return isProduct(node) ||
             ((isActivation(node) || isIdentity(node) || node->kind() == fullPrecisionKind() ||
               isQuantize(node) || isDequantize(node)) &&
              hasDimensions(node->input(0), further - 1));
  }
}

}  // namespace

bool isReducedPrecision(Dtype dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

Dtype castsTo(const Node* node) {
  return node->matches(
             "aten::to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool "
             "copy=False, MemoryFormat? memory_format=None) -> Tensor(a)")
             ? constantDtype(node->input(1))
             : std::nullopt;
}

Dtype reducesTo(const Node* node) {
  return node->kind() == reducedPrecisionKind() && isTrue(node->input(2))
             ? constantDtype(node->input(4))
             : std::nullopt;
}

bool widens(const Node* node) {
  return node->kind() == fullPrecisionKind() && isTrue(node->input(2));
}

bool isPlainCast(const Node* node) {
  if (castsTo(node)) {
    const auto copies = torch::jit::toIValue(node->input(3));
    return copies && copies->isBool() && !copies->toBool() && node->input(4)->mustBeNone();
  }
  return reducesTo(node) || widens(node);
}

bool isActivation(const Node* node) {
  static const auto kKinds =
      atenKinds({"relu", "relu6", "sigmoid", "tanh", "gelu", "elu", "leaky_relu", "hardswish",
                 "hardsigmoid", "hardtanh", "silu", "mish", "softplus"});
  return kKinds.count(node->kind()) != 0;
}

bool isSmoothActivation(const Node* node) {
  static const auto kKinds = atenKinds({"sigmoid", "silu", "tanh", "gelu"});
  return kKinds.count(node->kind()) != 0;
}

bool keepsFirst(const Node* node) {
  static const auto kKinds = atenKinds(
      {// normalization; under autocast parameters may be wider
       "batch_norm", "instance_norm", "group_norm", "layer_norm",
       // of one number
       "neg", "rsqrt",
       // views and copies
       "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "contiguous",
       "clone", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "t", "slice", "select",
       "narrow", "roll", "flip", "constant_pad_nd", "pad", "channel_shuffle", "pixel_shuffle",
       "dropout",
       // of many numbers
       "var", "std",
       // pooling and sampling
       "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
       "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d",
       "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d"});
  if (isActivation(node) || kKinds.count(node->kind()) != 0) {
    return true;
  }
  switch (node->kind()) {
    case aten::softmax:
    case aten::log_softmax:
    case aten::mean:
    case aten::sum:  // other than the operand's only if a data type is asked for
      return node->hasNamedInput("dtype") &&
             node->namedInput("dtype")->type()->isSubtypeOf(*c10::NoneType::get());
    case aten::pow:
    case aten::clamp:  // exponents and bounds that are tensors promote
    case aten::clamp_min:
    case aten::clamp_max:
      return std::none_of(node->inputs().begin() + 1, node->inputs().end(), isTensor);
    default:
      return false;
  }
}

bool splits(const Node* node) {
  return node->kind() == aten::chunk || node->kind() == aten::split ||
         node->kind() == aten::split_with_sizes || node->kind() == aten::unbind ||
         node->kind() == aten::tensor_split;
}

Dtype KnownTypes::of(const Value* value) {
  const auto known = types_.find(value->unique());
  if (known != types_.end()) {
    return known->second;
  }
  const auto type = infer(value);
  types_.emplace(value->unique(), type);
  return type;
}

bool KnownTypes::isCertain(const Value* value) {
  const auto known = certain_.find(value->unique());
  if (known != certain_.end()) {
    return known->second;
  }
  const bool is = inferCertain(value);
  certain_.emplace(value->unique(), is);
  return is;
}

void KnownTypes::learn(const Node* node) {
  if (node->outputs().size() == 1) {
    of(node->output());
    isCertain(node->output());
  }
}

bool KnownTypes::inferCertain(const Value* value) {
  const auto* node = value->node();
  if (node->kind() == prim::Constant || castsTo(node)) {
    return true;
  }
  const auto isCertainToo = [this](const Value* operand) { return isCertain(operand); };
  if (isProduct(node)) {  // both operands have one data type, or it raises
    return isCertain(node->input(0)) || isCertain(node->input(1));
  }
  if (isBinary(node)) {
    return std::all_of(
        node->inputs().begin(), node->inputs().begin() + 2,
        [this](const Value* operand) { return isNumber(operand) || isCertain(operand); });
  }
  if (node->kind() == asTargetKind()) {
    return isCertain(node->input(1));
  }
  if (keepsFirst(node) || widens(node) || node->kind() == prim::ConstantChunk) {
    return isCertain(node->input(0));
  }
  if (node->kind() == prim::ListUnpack && splits(node->input(0)->node())) {
    return isCertain(node->input(0)->node()->input(0));
  }
  const auto* list = node->kind() == aten::cat ? node->input(0)->node() : nullptr;
  return list != nullptr && list->kind() == prim::ListConstruct &&
         std::all_of(list->inputs().begin(), list->inputs().end(), isCertainToo);
}

Dtype KnownTypes::infer(const Value* value) {
  const auto* node = value->node();
  if (const auto constant = torch::jit::toIValue(value);
      constant && constant->isTensor() && constant->toTensor().defined()) {
    return constant->toTensor().scalar_type();
  }
  if (keepsFirst(node)) {
    return of(operandOf(node, 0));
  }
  if (isProduct(node) || node->kind() == aten::scaled_dot_product_attention) {
    // The operands have one data type, or the op raises; but eager's autocast, which may be on as
    // well, makes reduced precision of floats there.
    const auto dtype = of(node->input(1));
    const auto common = dtype ? dtype : of(node->input(0));
    return isReducedPrecision(common) ? common : std::nullopt;
  }
  if (isBinary(node)) {
    return ofOperands(node);
  }
  if (isDequantize(node)) {
    return at::kFloat;
  }
  if (node->kind() == asTargetKind()) {
    return of(operandOf(node, 1));
  }
  if (node->kind() == ofBatchKind() || node->kind() == operandKind() ||
      node->kind() == withinKind()) {
    return of(node->input(0));
  }
  if (node->kind() == asFloatKind()) {
    const auto dtype = of(node->input(0));
    return dtype == at::kBFloat16 ? at::kFloat : dtype;
  }
  if (node->kind() == reducedPrecisionKind()) {
    return reducesTo(node);
  }
  if (widens(node)) {
    const auto dtype = of(node->input(0));
    return isReducedPrecision(dtype) ? Dtype(at::kFloat) : dtype;
  }
  switch (node->kind()) {
    case aten::to:
      return castsTo(node);
    case aten::linalg_vector_norm:  // of reduced precision it is float32 where autocast is on
      return node->namedInput("dtype")->mustBeNone() && of(node->input(0)) == at::kFloat
                 ? Dtype(at::kFloat)
                 : std::nullopt;
    case aten::addcmul:
      return std::all_of(node->inputs().begin(), node->inputs().begin() + 3,
                         [&](const Value* operand) { return of(operand) == at::kFloat; })
                 ? Dtype(at::kFloat)
                 : std::nullopt;
    case aten::embedding:
      return of(node->input(0));
    case aten::cat:
    case aten::stack:
      return ofAll(node->input(0));
    case prim::ListUnpack:
      return splits(node->input(0)->node()) ? of(node->input(0)->node()->input(0)) : std::nullopt;
    case prim::ConstantChunk:
      return of(node->input(0));
    default:
      return std::nullopt;
  }
}

const Value* KnownTypes::operandOf(const Node* node, size_t i) const {
  const auto* operand = node->input(i);
  return narrowed_.count(node) != 0 && widens(operand->node()) ? operand->node()->input(0)
                                                               : operand;
}

Dtype KnownTypes::ofOperands(const Node* node) {
  Dtype common;
  for (const size_t i : {0, 1}) {
    const auto* operand = operandOf(node, i);
    if (isNumber(operand)) {
      continue;
    }
    const auto dtype = of(operand);
    if (!dtype) {
      return std::nullopt;
    }
    if (common && dtype != common) {
      return ofMixed(operandOf(node, 0), operandOf(node, 1));
    }
    common = dtype;
  }
  return common;
}

// float32, if one operand is of float32 and the other one of reduced precision; but a tensor
// without dimensions does not widen others.
Dtype KnownTypes::ofMixed(const Value* a, const Value* b) {
  const auto widens = [this](const Value* wide, const Value* narrow) {
    return of(wide) == at::kFloat && isReducedPrecision(of(narrow)) && hasDimensions(wide);
  };
  return widens(a, b) || widens(b, a) ? Dtype(at::kFloat) : std::nullopt;
}

// That of all elements of a list, if it is one and the same.
Dtype KnownTypes::ofAll(const Value* list) {
  const auto* node = list->node();
  if (node->kind() != prim::ListConstruct || node->inputs().empty()) {
    return std::nullopt;
  }
  const auto first = of(operandOf(node, 0));
  for (size_t i = 1; i < node->inputs().size(); ++i) {
    if (of(operandOf(node, i)) != first) {
      return std::nullopt;
    }
  }
  return first;
}

}  // namespace llga
