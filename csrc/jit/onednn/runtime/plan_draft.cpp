#include "jit/onednn/runtime/plan_draft.h"

#include <c10/util/irange.h>

#include <algorithm>

#include "jit/onednn/runtime/releasable_weights.h"
#include "jit/onednn/runtime/temporaries.h"

namespace llga {

using dnnl::graph::logical_tensor;
using LayoutType = logical_tensor::layout_type;
using Property = logical_tensor::property_type;

Layout strided(size_t id, at::ScalarType dtype, const Shape& sizes, const Shape& strides,
               bool constant) {
  const auto property = constant ? Property::constant : Property::variable;
  if (sizes.empty()) {
    return logical_tensor(id, *toDataType(dtype), Shape{1}, Shape{1}, property);
  }
  return logical_tensor(id, *toDataType(dtype), sizes, canonicalStrides(sizes, strides), property);
}

Layout anyLayout(size_t id, at::ScalarType dtype, const Shape& sizes, bool constant) {
  return logical_tensor(id, *toDataType(dtype), sizes, LayoutType::any,
                        constant ? Property::constant : Property::variable);
}

PlanDraft::PlanDraft(const CompileRequest& request, bool pack)
    : request(request), pack(pack), plan(std::make_shared<Plan>()) {
  const auto& subgraph = *request.subgraph;
  for (const auto i : c10::irange(subgraph.inputs().size())) {
    group_inputs[subgraph.inputs()[i]->unique()] = i;
  }
  for (const auto i : c10::irange(subgraph.outputs().size())) {
    group_outputs.emplace(behind(subgraph.outputs()[i])->unique(), i);
  }
}

Layout PlanDraft::inputLayout(size_t id) const {
  if (const auto it = layouts.find(id); it != layouts.end()) {
    return it->second;  // computed by an earlier partition
  }
  const auto& operand = lowered.operands.at(id);
  const auto& sizes = operand.sizes.value();
  if (const auto it = group_inputs.find(id); it != group_inputs.end()) {
    return strided(id, operand.dtype, sizes, request.input_strides[it->second]);
  }
  if (lowered.packable.count(id) != 0 && pack) {
    return anyLayout(id, operand.dtype, sizes, /*constant=*/true);
  }
  if (lowered.constants.count(id) != 0) {
    return strided(id, operand.dtype, sizes, c10::TensorType::contiguousStridesOf(sizes),
                   /*constant=*/true);
  }
  return strided(id, operand.dtype, sizes, constantTensor(id).strides().vec(),
                 /*constant=*/true);
}

std::optional<Slot> PlanDraft::knownSlot(size_t id) const {
  if (const auto it = slots.find(id); it != slots.end()) {
    return it->second;
  }
  if (const auto it = group_inputs.find(id); it != group_inputs.end()) {
    return Slot{Slot::Kind::input, it->second};
  }
  return std::nullopt;
}

at::Tensor PlanDraft::constantTensor(size_t id) const {
  if (const auto it = lowered.constants.find(id); it != lowered.constants.end()) {
    auto made = it->second();
    return lowered.packable.count(id) != 0 && pack ? made : made.contiguous();
  }
  return torch::jit::toIValue(lowered.values.at(id))->toTensor();
}

Slot PlanDraft::keep(at::Tensor tensor) {
  if (const auto releasable = findReleasable(tensor)) {
    releasable->pin();
  }
  const auto slot = constantSlot(tensor.data_ptr());
  plan->constant_tensors.push_back(std::move(tensor));
  return slot;
}

Slot PlanDraft::constantSlot(void* data) {
  plan->constants.push_back(data);
  return {Slot::Kind::constant, plan->constants.size() - 1};
}

Layout PlanDraft::outputLayout(size_t id) const {
  const auto& operand = lowered.operands.at(id);
  const auto it = group_outputs.find(id);
  if (!operand.sizes) {  // a made-up value between two partitions: oneDNN infers
    return logical_tensor(id, *toDataType(operand.dtype), DNNL_GRAPH_UNKNOWN_NDIMS,
                          LayoutType::any);
  }
  if (const auto* applied = appliedTo(id)) {
    const auto result = outputLayout(applied->to);
    return result.get_layout_type() == LayoutType::any
               ? anyLayout(id, operand.dtype, *operand.sizes, /*constant=*/false)
               : withId(result, id);
  }
  if (it == group_outputs.end() || request.any_layout[it->second]) {
    return anyLayout(id, operand.dtype, *operand.sizes, /*constant=*/false);
  }
  const auto facts = request.facts->tensor(lowered.values.at(id));
  return strided(id, operand.dtype, *operand.sizes, facts.strides.value());
}

bool PlanDraft::mayHaveStrides(size_t id, const Shape& strides) const {
  const auto wanted = outputLayout(id);
  return wanted.get_layout_type() == LayoutType::any || wanted.get_strides() == strides;
}

Slot PlanDraft::temporary(const Layout& layout) {
  plan->temporary_bytes.push_back(layout.get_mem_size());
  return {Slot::Kind::temporary, plan->temporary_bytes.size() - 1};
}

void PlanDraft::addResult(Plan::Step& step, const Layout& layout) {
  const auto id = layout.get_id();
  const auto* applied = appliedTo(id);
  const auto it = group_outputs.find(applied != nullptr ? applied->to : id);
  Slot slot{Slot::Kind::output, 0};
  if (it != group_outputs.end()) {
    slot.index = it->second;
  } else {
    slot = temporary(layout);
  }
  slots.insert_or_assign(id, slot);
  layouts.insert_or_assign(id, layout);
  step.outputs.emplace_back(slot, layout);
}

void PlanDraft::describeOutput(size_t index) {
  const auto* value = behind(request.subgraph->outputs()[index]);
  const auto id = value->unique();
  const auto it = layouts.find(id);
  if (it == layouts.end() || group_outputs.at(id) != index) {
    throw CompileError{"an output of the group is not an output of a partition"};
  }
  const auto& layout = it->second;
  const auto facts = request.facts->tensor(value);
  auto& spec = plan->outputs[index];
  spec.dtype = *facts.dtype;
  spec.sizes = *facts.sizes;
  spec.strides = request.any_layout[index] ? layout.get_strides() : *facts.strides;
  if (c10::isQIntType(spec.dtype)) {
    const auto* node = value->node();
    while (!isQuantize(node) && !node->inputs().empty()) {  // moves, and chunks
      node = node->input(0)->node();
    }
    spec.quantizer = makeQuantizer(quantizeParams(node).value());
  }
  spec.call_local = request.call_local[index];
  spec.inplace_input = spec.call_local ? inplaceInput(id, layout) : -1;
}

int64_t PlanDraft::inplaceInput(size_t output, const Layout& layout) const {
  const auto pair = inplace.find(output);
  if (pair == inplace.end()) {
    return -1;
  }
  const auto it = group_inputs.find(pair->second);
  if (it == group_inputs.end() || !request.owned_inputs[it->second]) {
    return -1;
  }
  const auto& strides = request.input_strides[it->second];
  const auto* value = request.subgraph->inputs()[it->second];
  const auto facts = request.facts->tensor(value);
  const bool same_layout = strides == layout.get_strides() && facts.sizes == layout.get_dims() &&
                           facts.dtype == lowered.operands.at(output).dtype;
  // An identity reads no numbers but of its first input.
  const auto readers = std::count_if(
      value->uses().begin(), value->uses().end(),
      [](const torch::jit::Use& use) { return !isIdentity(use.user) || use.offset == 0; });
  const bool may =
      readers == 1 || overwrites_what_it_reads || isReadLastFor(output, it->second, readers);
  return same_layout && may ? static_cast<int64_t>(it->second) : -1;
}

bool PlanDraft::isReadLastFor(size_t output, size_t input, int64_t readers) const {
  int64_t reads = 0;
  for (const auto& step : plan->steps) {
    const auto here = std::count_if(step.inputs.begin(), step.inputs.end(), [&](const auto& port) {
      return port.first.kind == Slot::Kind::input && port.first.index == input;
    });
    reads += here;
    const bool writes = std::any_of(step.outputs.begin(), step.outputs.end(),
                                    [&](const auto& to) { return to.second.get_id() == output; });
    if (writes) {
      return here == 1 && reads == readers;
    }
  }
  return false;
}

const ActivationApart* PlanDraft::appliedTo(size_t id) const {
  const auto it = std::find_if(activations.begin(), activations.end(),
                               [id](const ActivationApart& applied) { return applied.from == id; });
  return it == activations.end() ? nullptr : &*it;
}

std::shared_ptr<const Plan> PlanDraft::finished() {
  plan->outputs.resize(request.subgraph->outputs().size());
  for (const auto i : c10::irange(plan->outputs.size())) {
    describeOutput(i);
    // Groups that read results in free layouts do not look at them again.
    if (request.any_layout[i] && c10::isFloatingType(plan->outputs[i].dtype)) {
      plan->takes_non_finite = false;
    }
  }
  plan->division = request.division;
  plan->shares_work = request.threads > 1;
  if (usesArena()) {
    shareTemporaries(*plan, inplace);
  }
  plan->prepare();
  return plan;
}

}  // namespace llga
