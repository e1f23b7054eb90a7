#include "jit/onednn/runtime/steps/pointwise_steps.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "jit/onednn/runtime/concat_affine.h"
#include "jit/onednn/runtime/own_pointwise.h"
#include "jit/onednn/runtime/softmax.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

bool isNarrow(const Layout& layout) { return layout.get_data_type() == DataType::bf16; }

size_t itemSize(const Layout& layout) {
  return isNarrow(layout) ? sizeof(Bfloat16) : sizeof(float);
}

// The one op of a partition that is a softmax over another dimension than the last; or null.
const OpSpec* softmaxAcross(const Ops& ops) {
  const auto* op = ops.front();
  if (ops.size() != 1 || (op->kind() != OpKind::SoftMax && op->kind() != OpKind::LogSoftmax)) {
    return nullptr;
  }
  const auto& data = op->inputs()[0];
  const auto rank = data.rank();
  const auto axis = op->get_attr<int64_t>(Attr::axis);
  const bool known = data.dtype == at::kFloat || data.dtype == at::kBFloat16;
  const bool across = rank > 1 && axis != -1 && axis != rank - 1;
  return across && known && data.dtype == op->outputs()[0].dtype ? op : nullptr;
}

}  // namespace

bool PointwiseSteps::activation(const Ops& ops) {
  const auto* applied = draft_.appliedTo(ops.front()->inputs()[0].id);
  if (applied == nullptr || applied->ops != ops) {
    return false;
  }
  addActivation(*applied, draft_.layouts.at(applied->from));
  if (const auto pair = draft_.inplace.find(applied->from); pair != draft_.inplace.end()) {
    draft_.inplace.insert_or_assign(applied->to, pair->second);
  }
  return true;
}

bool PointwiseSteps::wholeActivation() {
  const auto applied = loneActivation(draft_.lowered, draft_.group_outputs);
  if (!applied || draft_.group_inputs.count(applied->from) == 0) {
    return false;
  }
  const auto from = draft_.inputLayout(applied->from);
  const auto count = static_cast<size_t>(c10::multiply_integers(from.get_dims()));
  if (from.get_mem_size() != count * itemSize(from) ||
      !draft_.mayHaveStrides(applied->to, from.get_strides())) {
    return false;
  }
  addActivation(*applied, from);
  draft_.inplace.insert_or_assign(applied->to, applied->from);
  return true;
}

void PointwiseSteps::addActivation(const ActivationApart& applied, const Layout& from) {
  const auto count = static_cast<int64_t>(from.get_mem_size() / itemSize(from));
  Plan::Step step;
  step.inputs.emplace_back(*draft_.knownSlot(applied.from), from);
  draft_.addResult(step, withId(from, applied.to));
  step.kernel = {
      [kind = applied.activation, count, narrow = isNarrow(from)](auto data, auto result) {
        if (narrow) {
          activate(kind, static_cast<const Bfloat16*>(data[0]), static_cast<Bfloat16*>(result[0]),
                   count);
        } else {
          activate(kind, static_cast<const float*>(data[0]), static_cast<float*>(result[0]), count);
        }
      },
      "eltwise", "llga_activation"};
  draft_.plan->steps.push_back(std::move(step));
}

bool PointwiseSteps::softmax(const Ops& ops) {
  const auto* op = ownKernelsAnywhere() ? softmaxAcross(ops) : nullptr;
  if (op == nullptr || !draft_.knownSlot(op->inputs()[0].id)) {
    return false;
  }
  const auto& data = op->inputs()[0];
  const auto& result = op->outputs()[0];
  const auto& sizes = *data.sizes;
  const auto from = draft_.inputLayout(data.id);
  const auto wanted = draft_.outputLayout(result.id);
  if (from.get_layout_type() != Layout::layout_type::strided ||
      c10::multiply_integers(sizes) == 0) {
    return false;
  }
  const auto strides = wanted.get_layout_type() == Layout::layout_type::strided
                           ? wanted.get_strides()
                           : at::infer_dense_strides(sizes, from.get_strides());
  const auto axis = op->get_attr<int64_t>(Attr::axis);
  const auto kernelFor = [&](const Shape& source_strides) {
    return SoftmaxAcross::of(data.dtype, sizes,
                             static_cast<size_t>(axis < 0 ? axis + data.rank() : axis),
                             source_strides, canonicalStrides(sizes, strides));
  };
  auto kernel = kernelFor(from.get_strides());
  std::pair<Slot, Layout> source{*draft_.knownSlot(data.id), from};
  if (!kernel) {  // channels last to planes: oneDNN has its reference kernel for that
    kernel = kernelFor(strides);
    if (!kernel) {
      return false;
    }
    source = copied(source, strided(data.id, data.dtype, sizes, strides), data.dtype);
  }
  kernel->logarithm = op->kind() == OpKind::LogSoftmax;
  Plan::Step step;
  step.inputs.push_back(source);
  draft_.addResult(step, strided(result.id, result.dtype, sizes, strides));
  step.kernel = {[kernel = *kernel](auto from, auto to) { kernel.run(from[0], to[0]); }, "softmax",
                 "llga_softmax"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool PointwiseSteps::pointwise(const Ops& ops) {
  auto found = ownKernelsAnywhere() ? llga::pointwise(ops, draft_.lowered, draft_.group_outputs)
                                    : std::nullopt;
  if (!found) {
    return false;
  }
  const auto& sizes = found->chain.sizes;
  std::vector<Layout> layouts;
  for (const auto& data : found->data) {
    layouts.push_back(draft_.inputLayout(data.id));
    if (layouts.back().get_layout_type() != Layout::layout_type::strided) {
      return false;
    }
  }
  // Of the first result that has to have some; else of data that is dense.
  std::optional<Shape> strides;
  for (const auto& result : found->results) {
    const auto wanted = draft_.outputLayout(result.id);
    if (!strides && wanted.get_layout_type() == Layout::layout_type::strided) {
      strides = wanted.get_strides();
    }
  }
  for (const auto i : c10::irange(layouts.size())) {  // whose readers take such images as they are
    if (!strides && found->data[i].sizes == sizes && isChannelsLast(layouts[i], found->data[i])) {
      strides = layouts[i].get_strides();
    }
  }
  for (const auto i : c10::irange(layouts.size())) {
    if (!strides && found->data[i].sizes == sizes && !hasGaps(sizes, layouts[i].get_strides())) {
      strides = layouts[i].get_strides();
    }
  }
  for (const auto i : c10::irange(layouts.size())) {  // or in the order of data with gaps
    if (!strides && found->data[i].sizes == sizes) {
      strides = at::infer_dense_strides(sizes, layouts[i].get_strides());
    }
  }
  if (sizes.empty()) {
    strides = Shape{};
  } else if (!strides) {
    strides = c10::TensorType::contiguousStridesOf(sizes);
  }
  strides = canonicalStrides(sizes, *strides);
  const bool whole = ops.size() == draft_.lowered.ops.size();
  const bool only =
      std::any_of(ops.begin(), ops.end(), [](const OpSpec* op) { return isOnlyOurs(*op); });
  if (!only && !isFastPointwise(*found, whole) && !isSlowPointwise(*found, layouts, *strides)) {
    return false;
  }
  for (const auto i : c10::irange(found->results.size())) {
    if (!sizes.empty() && !draft_.mayHaveStrides(found->results[i].id, *strides)) {
      return false;
    }
    found->chain.results[i].port.strides = *strides;
  }
  for (const auto i : c10::irange(layouts.size())) {
    const auto& own = *found->data[i].sizes;
    found->chain.data[i].strides = own.empty()
                                       ? Shape(sizes.size(), 0)
                                       : broadcastStrides(own, layouts[i].get_strides(), sizes);
  }
  const auto chain = found->chain.arranged();
  if (!chain || (!only && gathersMuch(*chain))) {
    return false;
  }
  Plan::Step step;
  for (const auto i : c10::irange(layouts.size())) {
    bindDataOrConstant(step, found->data[i]);
  }
  for (const auto& result : found->results) {
    draft_.addResult(step, strided(result.id, result.dtype, sizes, *strides));
  }
  if (const auto over = chain->mayOverwrite()) {
    draft_.inplace.insert_or_assign(found->results[0].id, found->data[*over].id);
  }
  const bool softmax = chain->readsRows();
  step.kernel = {[chain = *chain](auto from, auto to) { chain.run(from.data(), to.data()); },
                 softmax ? "softmax" : "pointwise", softmax ? "llga_softmax" : "llga_pointwise"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool PointwiseSteps::wholePointwise() {
  const auto ops = opsOf(draft_.lowered);
  if (!pointwise(ops)) {
    if (!isOnlyOurs(draft_.lowered)) {
      return false;
    }
    Ops row;
    for (const auto* op : ops) {
      if (!row.empty() && row.back()->outputs()[0].sizes != op->outputs()[0].sizes) {
        requirePointwise(row);
        row.clear();
      }
      row.push_back(op);
    }
    requirePointwise(row);
  }
  draft_.plan->takes_non_finite = true;
  return true;
}

void PointwiseSteps::requirePointwise(const Ops& ops) {
  if (!pointwise(ops)) {
    throw CompileError{"our kernel does not take pointwise functions of such layouts"};
  }
}

bool PointwiseSteps::batchNorm(const Ops& ops) {
  const bool relu = ops.size() == 2 && ops[1]->kind() == OpKind::ReLU;
  if (!ownKernelsAnywhere() || ops.size() != (relu ? 2 : 1) ||
      ops[0]->kind() != OpKind::BatchNormInference) {
    return false;
  }
  const auto& data = ops[0]->inputs()[0];
  const auto& result = ops.back()->outputs()[0];
  const auto& sizes = *result.sizes;
  const auto strides = pixelStrides(sizes);
  Plan::Step step;
  if (!bindAs(step, data, strides) || !draft_.mayHaveStrides(result.id, strides) ||
      data.dtype != result.dtype || (data.dtype != at::kFloat && data.dtype != at::kBFloat16)) {
    return false;
  }
  ConcatAffine kernel{
      data.dtype, result.dtype,           c10::multiply_integers(sizes) / sizes[1], {sizes[1]}, {},
      {},         relu ? 0.F : -HUGE_VALF};
  auto affine = scaleAndShift(*ops[0]);
  if (!affine) {
    return false;
  }
  std::tie(kernel.scale, kernel.shift) = std::move(*affine);
  draft_.addResult(step, strided(result.id, result.dtype, sizes, strides));
  step.kernel = {[kernel = std::move(kernel)](auto from, auto to) { kernel.run(from, to[0]); },
                 "batch_norm", "llga_affine"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool PointwiseSteps::gate() {
  const auto found = gateOfImages();
  if (!found) {
    return false;
  }
  Plan::Step step;
  for (const auto& data : found->first.data) {
    bindData(step, data);
  }
  const auto& result = found->first.result;
  addChannelsLastResult(step, result);
  const bool narrow = result.dtype == at::kBFloat16;
  step.kernel = {[kernel = found->second, narrow](auto from, auto to) {
                   const auto run = [&](auto* product) {
                     using Number = std::remove_pointer_t<decltype(product)>;
                     kernel.run(static_cast<const Number*>(from[0]),
                                static_cast<const Number*>(from[1]), product);
                   };
                   narrow ? run(static_cast<Bfloat16*>(to[0])) : run(static_cast<float*>(to[0]));
                 },
                 "binary", "llga_gate"};
  draft_.plan->steps.push_back(std::move(step));
  draft_.plan->takes_non_finite = true;
  return true;
}

std::optional<std::pair<FoundGate, Gate>> PointwiseSteps::gateOfImages() const {
  auto found = llga::gate(draft_.lowered);
  if (!found || !isOnlyResult(found->result) || !mayBeChannelsLast(found->result)) {
    return std::nullopt;
  }
  const auto& sizes = *found->result.sizes;
  Gate kernel{sizes[0], c10::multiply_integers(sizes.begin() + 2, sizes.end()), sizes[1], {}};
  for (const size_t i : {0, 1}) {
    const auto id = found->data[i].id;
    const auto lies = draft_.knownSlot(id) ? pixelStridesOf(draft_.inputLayout(id)) : std::nullopt;
    if (!lies) {
      return std::nullopt;
    }
    kernel.parts[i] = {lies->image, lies->pixel, found->activations[i]};
  }
  return std::pair(std::move(*found), kernel);
}

bool PointwiseSteps::takesGaps(const Ops& ops) const {
  // What has gaps does not lie as the result does.
  return llga::pointwise(ops, draft_.lowered, draft_.group_outputs) ||
         softmaxAcross(ops) != nullptr || gateOfImages();
}

}  // namespace llga
