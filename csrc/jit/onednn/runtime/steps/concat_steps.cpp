#include "jit/onednn/runtime/steps/concat_steps.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "jit/onednn/runtime/channel_shuffle.h"
#include "jit/onednn/runtime/own_quantized.h"

namespace llga {
namespace {

// What a partition concatenates along channels, if it does no more: also numbers of 8 bit that
// are dequantized before and quantized behind, all with the same scale. Else nothing.
std::vector<Operand> concatenated(const Ops& ops) {
  const auto is = [](const OpSpec* op) { return op->kind() == OpKind::Concat; };
  const auto concat = std::find_if(ops.begin(), ops.end(), is);
  if (concat == ops.end() || (*concat)->get_attr<int64_t>(Attr::axis) != 1) {
    return {};
  }
  auto parts = (*concat)->inputs();
  if (ops.size() == 1) {
    return parts;
  }
  const auto& quantize = *ops.back();
  const auto scale = quantize.kind() == OpKind::Quantize ? unsignedScale(quantize) : std::nullopt;
  if (!scale || concat + 2 != ops.end()) {
    return {};
  }
  for (auto& part : parts) {
    const auto dequantize = std::find_if(ops.begin(), concat, [&](const OpSpec* op) {
      return op->kind() == OpKind::Dequantize && op->outputs()[0].id == part.id;
    });
    const auto of = dequantize != concat ? unsignedScale(**dequantize) : std::nullopt;
    if (!of || of->scale != scale->scale || of->zero_point != scale->zero_point) {
      return {};
    }
    part = (*dequantize)->inputs()[0];
  }
  return parts;
}

// The activation of what ops[next - 1], `of` or null, gives; `next` moves behind it.
std::optional<Activation> takeActivation(const Ops& ops, size_t& next, const OpSpec* of) {
  if (of == nullptr || next == ops.size()) {
    return std::nullopt;
  }
  const auto found = activationFrom(ops, next, of->outputs()[0]);
  next += found ? 1 : 0;
  return found;
}

}  // namespace

bool ConcatSteps::concat(const Ops& ops) {
  const auto parts = ownKernelsAnywhere() ? concatenated(ops) : std::vector<Operand>{};
  const auto& result = ops.back()->outputs()[0];
  if (parts.empty() || !result.sizes) {
    return false;
  }
  const auto strides = channelsLastStrides(*result.sizes);
  const auto item = static_cast<int64_t>(c10::elementSize(result.dtype));
  if (strides.empty() || !draft_.mayHaveStrides(result.id, strides)) {
    return false;
  }
  std::vector<Layout> layouts;
  for (const auto& part : parts) {
    if (!part.sizes || part.dtype != result.dtype || !draft_.knownSlot(part.id)) {
      return false;
    }
    layouts.push_back(draft_.inputLayout(part.id));
  }
  auto kernel = concatOf(layouts, item);
  if (!kernel) {
    return false;
  }
  Plan::Step step;
  for (const auto& part : parts) {
    bindData(step, part);
  }
  addChannelsLastResult(step, result);
  step.kernel = {[kernel = std::move(*kernel)](auto from, auto to) { kernel.run(from, to[0]); },
                 "concat", "llga_concat"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConcatSteps::concatOfRows(const Ops& ops) {
  const auto kernel = ownKernelsAnywhere() ? rowsConcatenated(ops) : std::nullopt;
  const auto& result = ops.front()->outputs()[0];
  if (!kernel || !result.sizes) {
    return false;
  }
  const auto strides = c10::TensorType::contiguousStridesOf(*result.sizes);
  if (!draft_.mayHaveStrides(result.id, strides)) {
    return false;
  }
  Plan::Step step;
  for (const auto& part : ops.front()->inputs()) {
    bindDataOrConstant(step, part);
  }
  draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
  step.kernel = {[kernel = *kernel](auto from, auto to) { kernel.run(from, to[0]); }, "concat",
                 "llga_concat"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

std::optional<ConcatOfRows> ConcatSteps::rowsConcatenated(const Ops& ops) const {
  const auto& concat = *ops.front();
  if (ops.size() != 1 || concat.kind() != OpKind::Concat) {
    return std::nullopt;
  }
  const auto& result = concat.outputs()[0];
  const auto item = static_cast<int64_t>(c10::elementSize(result.dtype));
  const auto axis = concat.get_attr<int64_t>(Attr::axis);
  ConcatOfRows kernel{{}, {}, {}};
  for (const auto& part : concat.inputs()) {
    const auto layout = draft_.inputLayout(part.id);
    if (!part.sizes || part.dtype != result.dtype ||
        layout.get_layout_type() != Layout::layout_type::strided) {
      return std::nullopt;
    }
    const auto& sizes = *part.sizes;
    const auto rank = static_cast<int64_t>(sizes.size());
    const auto front = static_cast<size_t>(axis < 0 ? axis + rank : axis);
    auto strides = layout.get_strides();
    int64_t numbers = 1;
    for (auto dim = sizes.size(); dim-- > front; numbers *= sizes[dim]) {
      if (sizes[dim] != 1 && strides[dim] != numbers) {
        return std::nullopt;
      }
    }
    strides.resize(front);
    std::for_each(strides.begin(), strides.end(), [item](int64_t& stride) { stride *= item; });
    kernel.sizes.assign(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(front));
    kernel.bytes.push_back(numbers * item);
    kernel.strides.push_back(std::move(strides));
  }
  return c10::multiply_integers(kernel.sizes) > 0 ? std::optional(std::move(kernel)) : std::nullopt;
}

bool ConcatSteps::concatAffine() {
  const auto found = affineGroup();
  if (!found) {
    return false;
  }
  const auto& result = draft_.lowered.ops.back().outputs()[0];
  const auto strides = pixelStrides(*result.sizes);
  if (!isOnlyResult(result) || !draft_.mayHaveStrides(result.id, strides)) {
    return false;
  }
  const auto integers = [](at::ScalarType type) { return type == at::kQUInt8 ? at::kByte : type; };
  const auto dtype = found->parts[0].dtype;
  ConcatAffine kernel{integers(dtype), integers(result.dtype), 1, {}, {}, {}, -HUGE_VALF};
  auto affine = scaleAndShift(*found->norm);
  if (!affine) {
    return false;
  }
  std::tie(kernel.scale, kernel.shift) = std::move(*affine);
  Plan::Step step;
  for (const auto& part : found->parts) {
    if (part.dtype != dtype || !bindAs(step, part, pixelStrides(*part.sizes))) {
      return false;
    }
    kernel.channels.push_back((*part.sizes)[1]);
  }
  // What is behind the affine map, and not part of it.
  const auto rounded = found->to.value_or(Scale{});
  const auto to = found->activation ? Scale{} : rounded;
  if (found->relu) {
    kernel.least = static_cast<float>(to.zero_point);
  }
  if (found->activation) {
    kernel.activation = found->activation;
    kernel.result_scale = 1 / static_cast<float>(rounded.scale);
    kernel.result_shift = static_cast<float>(rounded.zero_point);
  }
  for (size_t c = 0, part = 0, end = 0; c < kernel.scale.size(); ++c) {
    while (c == end) {
      end += static_cast<size_t>(kernel.channels[part++]);
    }
    const auto from = found->from.empty() ? Scale{} : found->from[part - 1];
    rescale(kernel.scale[c], kernel.shift[c], from, to);
  }
  kernel.pixels = c10::multiply_integers(*result.sizes) / (*result.sizes)[1];

  draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
  step.kernel = {[kernel = std::move(kernel)](auto from, auto to) { kernel.run(from, to[0]); },
                 "concat", "llga_affine"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

std::optional<ConcatSteps::AffineGroup> ConcatSteps::affineGroup() const {
  const auto ops = opsOf(draft_.lowered);
  size_t next = 0;
  auto take = [&](OpKind kind) {
    return next < ops.size() && ops[next]->kind() == kind ? ops[next++] : nullptr;
  };
  std::unordered_map<size_t, const OpSpec*> wide;  // what dequantizes a value
  while (const auto* dequantize = take(OpKind::Dequantize)) {
    wide.emplace(dequantize->outputs()[0].id, dequantize);
  }
  const auto* concat = take(OpKind::Concat);
  const auto* norm = take(OpKind::BatchNormInference);
  const bool relu = take(OpKind::ReLU) != nullptr;
  const auto activation = takeActivation(ops, next, norm);
  const auto* quantize = take(OpKind::Quantize);
  // Nothing of that can be left out of the chain, as each result is read.
  const bool is = ownKernelsAnywhere() && norm != nullptr && next == ops.size() &&
                  !(relu && activation) &&
                  (concat != nullptr || quantize != nullptr || activation) &&
                  (concat == nullptr || (concat->get_attr<int64_t>(Attr::axis) == 1 &&
                                         concat->outputs()[0].id == norm->inputs()[0].id)) &&
                  (quantize != nullptr || wide.empty());
  if (!is) {
    return std::nullopt;
  }
  AffineGroup found{(concat != nullptr ? concat : norm)->inputs(), {}, norm, relu, activation, {}};
  if (concat == nullptr) {
    found.parts.resize(1);
  }
  const auto& result = ops.back()->outputs()[0];
  if (quantize != nullptr) {
    found.to = unsignedScale(*quantize);
    if (!found.to) {
      return std::nullopt;
    }
  } else if (result.dtype != found.parts[0].dtype) {
    return std::nullopt;
  }
  if (!wide.empty()) {
    for (auto& part : found.parts) {
      const auto dequantize = wide.find(part.id);
      const auto scale =
          dequantize != wide.end() ? unsignedScale(*dequantize->second) : std::nullopt;
      if (!scale) {
        return std::nullopt;
      }
      part = dequantize->second->inputs()[0];
      found.from.push_back(*scale);
    }
  } else if (found.parts[0].dtype != at::kFloat &&
             (quantize != nullptr || found.parts[0].dtype != at::kBFloat16)) {
    return std::nullopt;
  }
  return found;
}

void ConcatSteps::channelShuffle(const Shuffle& shuffle) {
  Plan::Step step;
  std::vector<int64_t> parts;
  std::vector<int64_t> chunks;
  auto layoutOf = [&](const Value* value, std::vector<int64_t>& channels) {
    const auto sizes = draft_.request.facts->tensor(value).sizes.value();
    channels.push_back(sizes[1]);
    return strided(value->unique(), shuffle.dtype, sizes, channelsLastStrides(sizes));
  };
  for (const auto* part : shuffle.parts) {
    const auto layout = layoutOf(part, parts);
    step.inputs.push_back(locatedDense(part));
    if (step.inputs.back().second.get_strides() != layout.get_strides()) {
      throw CompileError{"a channel shuffle of data that is not channels last"};
    }
  }
  for (const auto* chunk : shuffle.chunks) {
    const auto index = draft_.group_outputs.at(chunk->unique());
    if (!draft_.request.any_layout[index]) {
      throw CompileError{"a channel shuffle whose result is read outside of groups"};
    }
    const auto layout = layoutOf(chunk, chunks);
    draft_.layouts.insert_or_assign(chunk->unique(), layout);
    step.outputs.emplace_back(Slot{Slot::Kind::output, index}, layout);
  }
  step.kernel = {
      [kernel = ChannelShuffle(std::move(parts), std::move(chunks), shuffle.groups, shuffle.pixels,
                               static_cast<int64_t>(c10::elementSize(shuffle.dtype)))](
          auto from, auto to) { kernel.run(from, to); },
      "shuffle", "llga_shuffle"};
  draft_.plan->steps.push_back(std::move(step));
}

bool ConcatSteps::takesGaps(const Ops& ops, const Operand& input) const {
  const auto parts = concatenated(ops);
  const auto is = [&](const Operand& part) { return part.id == input.id; };
  return rowsConcatenated(ops) || (std::any_of(parts.begin(), parts.end(), is) &&
                                   pixelStridesOf(draft_.inputLayout(input.id)));
}

}  // namespace llga
