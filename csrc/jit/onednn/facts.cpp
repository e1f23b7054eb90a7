#include "jit/onednn/facts.h"

#include <torch/csrc/jit/ir/constants.h>

namespace llga {
namespace {

TensorFacts factsOf(const at::Tensor& tensor) {
  TensorFacts facts;
  facts.dtype = tensor.scalar_type();
  facts.sizes = tensor.sizes().vec();
  if (tensor.layout() == at::kStrided && !tensor.is_mkldnn()) {
    facts.strides = tensor.strides().vec();
  }
  return facts;
}

}  // namespace

TensorFacts StaticFacts::tensor(const Value* value) const {
  value = behind(value);
  if (auto known = torch::jit::toIValue(value); known && known->isTensor()) {
    const auto& tensor = known->toTensor();
    return tensor.defined() ? factsOf(tensor) : TensorFacts{};
  }
  TensorFacts facts;
  if (auto type = value->type()->cast<c10::TensorType>()) {
    facts.dtype = type->scalarType();
    facts.sizes = type->sizes().concrete_sizes();
    facts.strides = type->strides().concrete_sizes();
  }
  if (!facts.dtype) {
    if (const auto it = assumed_.find(value); it != assumed_.end()) {
      facts.dtype = it->second;
    }
  }
  return facts;
}

std::optional<c10::IValue> StaticFacts::constant(const Value* value) const {
  return torch::jit::toIValue(value);
}

void RecordedFacts::record(const Value* value, const c10::IValue& ivalue) {
  if (ivalue.isTensor()) {
    if (ivalue.toTensor().defined()) {
      tensors_[value] = factsOf(ivalue.toTensor());
    }
  } else if (!ivalue.isTensorList()) {
    host_values_[value] = ivalue;
  }
}

TensorFacts RecordedFacts::tensor(const Value* value) const {
  auto it = tensors_.find(value);
  if (it != tensors_.end()) {
    return it->second;
  }
  if (auto known = torch::jit::toIValue(value);
      known && known->isTensor() && known->toTensor().defined()) {
    return factsOf(known->toTensor());
  }
  return {};
}

std::optional<c10::IValue> RecordedFacts::constant(const Value* value) const {
  if (auto it = host_values_.find(value); it != host_values_.end()) {
    return it->second;
  }
  return torch::jit::toIValue(value);
}

}  // namespace llga
