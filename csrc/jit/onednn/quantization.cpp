#include "jit/onednn/quantization.h"

#include <ATen/ATen.h>
#include <ATen/native/quantized/AffineQuantizerBase.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>

namespace llga {
namespace {

Symbol quantizePerTensor() {
  static const Symbol kind = Symbol::fromQualString("aten::quantize_per_tensor");
  return kind;
}

Symbol quantizePerChannel() {
  static const Symbol kind = Symbol::fromQualString("aten::quantize_per_channel");
  return kind;
}

Symbol dequantizeKind() {
  static const Symbol kind = Symbol::fromQualString("aten::dequantize");
  return kind;
}

Symbol dtypeAttr() { return Symbol::attr("llga_quantized_dtype"); }
Symbol scalesAttr() { return Symbol::attr("llga_scales"); }
Symbol zeroPointsAttr() { return Symbol::attr("llga_zero_points"); }
Symbol axisAttr() { return Symbol::attr("llga_axis"); }

bool isEightBit(at::ScalarType dtype) { return dtype == at::kQUInt8 || dtype == at::kQInt8; }

// A number, or a tensor of numbers.
template <typename T>
std::optional<std::vector<T>> numbers(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  if (!known) {
    return std::nullopt;
  }
  if (known->isScalar()) {
    return std::vector<T>{known->toScalar().to<T>()};
  }
  if (!known->isTensor() || !known->toTensor().defined() || known->toTensor().dim() > 1 ||
      !known->toTensor().is_cpu()) {
    return std::nullopt;
  }
  const auto plain = known->toTensor().to(c10::CppTypeToScalarType<T>::value).contiguous();
  return std::vector<T>(plain.template const_data_ptr<T>(),
                        plain.template const_data_ptr<T>() + plain.numel());
}

// A scale of zero or a zero point out of range is not for oneDNN.
bool isSane(const QuantParams& params) {
  const int64_t low = params.dtype == at::kQInt8 ? -128 : 0;
  return isEightBit(params.dtype) && !params.scales.empty() &&
         params.scales.size() == params.zero_points.size() &&
         std::all_of(params.scales.begin(), params.scales.end(),
                     [](double scale) { return scale > 0 && std::isfinite(scale); }) &&
         std::all_of(params.zero_points.begin(), params.zero_points.end(),
                     [low](int64_t zero) { return zero >= low && zero <= low + 255; });
}

}  // namespace

bool isQuantize(const Node* node) {
  return (node->kind() == quantizePerTensor() || node->kind() == quantizePerChannel()) &&
         node->outputs().size() == 1 && isTensor(node->input(0)) && isTensor(node->output());
}

std::optional<QuantParams> quantizeParams(const Node* node) {
  if (!isQuantize(node)) {
    return std::nullopt;
  }
  const bool per_channel = node->kind() == quantizePerChannel();
  const auto scales = numbers<double>(node->input(1));
  const auto zero_points = numbers<int64_t>(node->input(2));
  const auto axis =
      per_channel ? torch::jit::toIValue(node->input(3)) : std::optional(c10::IValue(-1));
  const auto dtype = torch::jit::toIValue(node->input(per_channel ? 4 : 3));
  if (!scales || !zero_points || !axis || !axis->isInt() || !dtype || !dtype->isInt()) {
    return std::nullopt;
  }
  QuantParams params{static_cast<at::ScalarType>(dtype->toInt()), *scales, *zero_points,
                     axis->toInt()};
  const bool one = per_channel ? params.axis >= 0 : params.scales.size() == 1;
  return one && isSane(params) ? std::optional(std::move(params)) : std::nullopt;
}

bool isDequantize(const Node* node) {
  return node->kind() == dequantizeKind() && node->inputs().size() == 1 &&
         isTensor(node->input(0)) && isTensor(node->output());
}

std::optional<QuantParams> dequantizeParams(const Node* node) {
  if (!isDequantize(node) || !node->hasAttribute(dtypeAttr())) {
    return std::nullopt;
  }
  return QuantParams{static_cast<at::ScalarType>(node->i(dtypeAttr())), node->fs(scalesAttr()),
                     node->is(zeroPointsAttr()), node->i(axisAttr())};
}

void setDequantizeParams(Node* node, const QuantParams& params) {
  node->i_(dtypeAttr(), static_cast<int64_t>(params.dtype));
  node->fs_(scalesAttr(), params.scales);
  node->is_(zeroPointsAttr(), params.zero_points);
  node->i_(axisAttr(), params.axis);
}

namespace {

// The node, or the only one of its group; or null.
const Node* dequantizeIn(const Node* node) {
  if (isFusionGroup(node)) {
    node = node->inputs().size() == 1 ? soleComputation(*node->g(torch::jit::attr::Subgraph))
                                      : nullptr;
  }
  return node != nullptr && dequantizeParams(node) ? node : nullptr;
}

}  // namespace

const Value* dequantizedFrom(const Value* value) {
  return dequantizeIn(value->node()) != nullptr ? value->node()->input(0) : nullptr;
}

Node* ownDequantize(Node* reader, size_t input) {
  auto* node = reader->input(input)->node();
  const auto* dequantize = dequantizeIn(node);
  if (dequantize == nullptr || node->owningBlock() != reader->owningBlock()) {
    return nullptr;
  }
  if (dequantize == node && node->output()->uses().size() == 1) {
    return node;
  }
  auto* copy = reader->owningGraph()->createClone(const_cast<Node*>(dequantize),
                                                  [node](Value*) { return node->input(0); });
  copy->output()->copyMetadata(node->output());
  copy->insertBefore(reader);
  reader->replaceInput(input, copy->output());
  return copy;
}

std::optional<QuantParams> paramsOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_quantized() || !tensor.is_cpu() ||
      !isEightBit(tensor.scalar_type())) {
    return std::nullopt;
  }
  QuantParams params;
  params.dtype = tensor.scalar_type();
  if (tensor.qscheme() == at::kPerTensorAffine) {
    params.scales = {tensor.q_scale()};
    params.zero_points = {tensor.q_zero_point()};
  } else if (tensor.qscheme() == at::kPerChannelAffine) {
    const auto scales = tensor.q_per_channel_scales().to(at::kDouble).contiguous();
    const auto zeros = tensor.q_per_channel_zero_points().to(at::kLong).contiguous();
    params.scales.assign(scales.const_data_ptr<double>(),
                         scales.const_data_ptr<double>() + scales.numel());
    params.zero_points.assign(zeros.const_data_ptr<int64_t>(),
                              zeros.const_data_ptr<int64_t>() + zeros.numel());
    params.axis = tensor.q_per_channel_axis();
  } else {
    return std::nullopt;
  }
  return isSane(params) ? std::optional(std::move(params)) : std::nullopt;
}

at::QuantizerPtr makeQuantizer(const QuantParams& params) {
  if (params.perTensor()) {
    return at::make_per_tensor_affine_quantizer(params.scales.front(), params.zero_points.front(),
                                                params.dtype);
  }
  return at::make_per_channel_affine_quantizer(at::tensor(params.scales, at::kDouble),
                                               at::tensor(params.zero_points, at::kLong),
                                               params.axis, params.dtype);
}

at::Tensor integersOf(const at::Tensor& quantized) {
  const auto dtype = quantized.scalar_type() == at::kQInt8 ? at::kChar : at::kByte;
  return at::empty({0}, at::TensorOptions().dtype(dtype))
      .set_(quantized.storage(), quantized.storage_offset(), quantized.sizes(),
            quantized.strides());
}

namespace {

// The aten::dequantize behind `value`, and the type of a cast in between.
const Node* dequantizeBehind(const Value* value, at::ScalarType& dtype) {
  const auto* node = value->node();
  if (node->kind() == torch::jit::aten::to && node->inputs().size() == 5 &&
      !isTensor(node->input(1))) {
    const auto wanted = torch::jit::toIValue(node->input(1));
    if (!wanted || !wanted->isInt()) {
      return nullptr;
    }
    dtype = static_cast<at::ScalarType>(wanted->toInt());
    node = node->input(0)->node();
  }
  return isDequantize(node) && node->input(0)->node()->kind() == torch::jit::prim::Constant
             ? node
             : nullptr;
}

}  // namespace

std::optional<QuantizedConstant> quantizedConstant(const Value* value) {
  QuantizedConstant constant;
  const auto* node = dequantizeBehind(value, constant.dtype);
  if (node == nullptr) {
    return std::nullopt;
  }
  constant.tensor = torch::jit::toIValue(node->input(0))->toTensor();
  auto params = paramsOf(constant.tensor);
  if (!params) {
    return std::nullopt;
  }
  constant.params = std::move(*params);
  return constant;
}

bool isQuantizedConstant(const Node* node) {
  at::ScalarType dtype = at::kFloat;
  return node->outputs().size() == 1 && dequantizeBehind(node->output(), dtype) != nullptr &&
         quantizedConstant(node->output()).has_value();
}

}  // namespace llga
