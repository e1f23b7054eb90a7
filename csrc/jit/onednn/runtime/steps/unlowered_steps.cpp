#include "jit/onednn/runtime/steps/unlowered_steps.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "jit/onednn/runtime/attention_blocks.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/releasable_weights.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Sizes and strides of sequences, or of one step of them.
std::pair<Shape, Shape> asSequences(const Layout& layout) {
  auto sizes = layout.get_dims();
  auto strides = layout.get_strides();
  if (sizes.size() == 2) {
    sizes.insert(sizes.begin(), 1);
    strides.insert(strides.begin(), sizes[1] * sizes[2]);
  }
  return {std::move(sizes), std::move(strides)};
}

// Whether the last dimension of sequences lies in rows, one behind the other in either order.
bool liesByRows(const Layout& layout) {
  const auto [sizes, strides] = asSequences(layout);
  const auto apart = [&](size_t outer, size_t inner) {
    return (sizes[inner] == 1 || strides[inner] == sizes[2]) &&
           (sizes[outer] == 1 || strides[outer] == sizes[inner] * sizes[2]);
  };
  return (sizes[2] == 1 || strides[2] == 1) && (apart(0, 1) || apart(1, 0));
}

// Of dense memory in which the numbers along one dimension lie side by side, and the others in
// their order.
Shape stridesByRows(const Shape& sizes, size_t dim) {
  Shape strides(sizes.size());
  int64_t numbers = sizes[dim];
  strides[dim] = 1;
  for (auto i = sizes.size(); i-- > 0;) {
    if (i != dim) {
      strides[i] = numbers;
      numbers *= sizes[i];
    }
  }
  return strides;
}

// As reports call it.
const char* nameOf(vector_loops::RowNorm::Kind kind) {
  switch (kind) {
    case vector_loops::RowNorm::Kind::root_mean_square:
      return "rms_norm";
    case vector_loops::RowNorm::Kind::centred:
      return "layer_norm";
    default:
      return "normalize";
  }
}

// Strides of the first two dimensions of what lies by rows, also where there is one row.
Shape rowsIn(const Layout& layout) {
  const auto [sizes, strides] = asSequences(layout);
  return {sizes[0] == 1 ? sizes[1] * sizes[2] : strides[0], sizes[1] == 1 ? sizes[2] : strides[1]};
}

}  // namespace

void UnloweredSteps::groupNorm(const FoundGroupNorm& found) {
  Plan::Step step;
  auto data = locatedDense(found.data);
  const auto sizes = data.second.get_dims();
  const auto rows = c10::TensorType::contiguousStridesOf(sizes);
  const auto last = pixelStrides(sizes);
  const auto facts = draft_.request.facts->tensor(found.result);
  const bool any = draft_.request.any_layout[draft_.group_outputs.at(found.result->unique())];
  const auto lies = data.second.get_strides();
  auto kernel = found.kernel;
  kernel.channels_last = lies == last && lies != rows && (any || facts.strides == last);
  const auto& strides = kernel.channels_last ? last : rows;
  if (!any && canonicalStrides(sizes, *facts.strides) != strides) {
    throw CompileError{"group norm: its result lies in an unusual order"};
  }
  step.inputs.push_back(lies == strides ? data : copied(data, found.data));
  std::array<size_t, 2> parameters{};
  for (const auto i : {0, 1}) {
    if (const auto* value = i == 0 ? found.weight : found.bias) {
      parameters[i] = step.inputs.size();
      step.inputs.push_back(parameter(value));
    }
  }
  draft_.addResult(step, strided(found.result->unique(), *facts.dtype, sizes, strides));
  step.kernel = {[kernel, parameters](auto from, auto to) {
                   const auto at = [&](size_t i) {
                     return i != 0 ? static_cast<const float*>(from[i]) : nullptr;
                   };
                   kernel.run(from[0], at(parameters[0]), at(parameters[1]), to[0]);
                 },
                 "group_norm", "llga_group_norm"};
  draft_.plan->steps.push_back(std::move(step));
}

void UnloweredSteps::rowNorm(const FoundRowNorm& found) {
  auto data = located(found.data);
  const auto sizes = data.second.get_dims();
  const auto given = data.second.get_strides();
  const auto* result = behind(found.result);
  const auto facts = draft_.request.facts->tensor(result);
  const auto mayBe = [&](const Shape& strides) {
    return draft_.request.any_layout[draft_.group_outputs.at(result->unique())] ||
           areSameStrides(sizes, *facts.strides, strides);
  };
  // The order of the rows does not matter where it is the same in the result.
  const auto dense = at::infer_dense_strides(sizes, given);
  const bool by_rows = (dense[found.dim] == 1 || sizes[found.dim] == 1) && mayBe(dense);
  const auto strides = by_rows ? dense : stridesByRows(sizes, found.dim);
  const auto type = *draft_.request.facts->tensor(found.data).dtype;
  if (!areSameStrides(sizes, given, strides)) {
    data = by_rows ? withoutGaps(data, type)
                   : copied(data, strided(found.data->unique(), type, sizes, strides), type);
  }
  Plan::Step step;
  step.inputs.push_back(data);
  std::array<size_t, 2> parameters{};
  const auto bindLine = [&](size_t i, const std::pair<Slot, Layout>& line) {
    parameters[i] = step.inputs.size();
    step.inputs.push_back(line);
  };
  if (found.weight != nullptr) {
    bindLine(0, parameter(found.weight));
  } else if (found.factor.defined()) {
    bindLine(0, keptAsFloats(0, found.factor));
  }
  if (found.addend.defined()) {
    bindLine(1, keptAsFloats(0, found.addend));
  }
  const auto layout = strided(result->unique(), *facts.dtype, sizes, strides);
  const bool moves = !mayBe(strides);
  if (moves) {
    step.outputs.emplace_back(draft_.temporary(layout), layout);
  } else {
    draft_.addResult(step, layout);
  }
  step.kernel = {[kernel = found.kernel, parameters](auto from, auto to) {
                   const auto at = [&](size_t i) {
                     return i != 0 ? static_cast<const float*>(from[i]) : nullptr;
                   };
                   kernel.run(from[0], at(parameters[0]), at(parameters[1]), to[0]);
                 },
                 nameOf(found.kernel.kind), "llga_" + std::string(nameOf(found.kernel.kind))};
  draft_.plan->steps.push_back(std::move(step));
  if (moves) {
    Plan::Step copy;
    copy.inputs.push_back(draft_.plan->steps.back().outputs[0]);
    const auto to = strided(result->unique(), *facts.dtype, sizes, *facts.strides);
    draft_.addResult(copy, to);
    copy.kernel = copyBetween(layout, to, *facts.dtype);
    draft_.plan->steps.push_back(std::move(copy));
  }
  draft_.plan->takes_non_finite = true;
}

void UnloweredSteps::rotary(const FoundRotary& found) {
  Plan::Step step;
  auto kernel = found.kernel;
  kernel.strides = bindRowsWithin(step, found.data, kernel.sizes);
  kernel.cos_strides = bindRowsWithin(step, found.cos, kernel.sizes);
  kernel.sin_strides = bindRowsWithin(step, found.sin, kernel.sizes);
  const auto* result = behind(found.result);
  const auto facts = draft_.request.facts->tensor(result);
  kernel.result_strides.assign(facts.strides->begin(), facts.strides->end() - 1);
  draft_.addResult(step, strided(result->unique(), *facts.dtype, *facts.sizes, *facts.strides));
  step.kernel = {[kernel = std::move(kernel)](auto from, auto to) {
                   kernel.run(from[0], from[1], from[2], to[0]);
                 },
                 "rotary", "llga_rotary"};
  draft_.plan->steps.push_back(std::move(step));
}

void UnloweredSteps::attention(const FoundAttention& found) {
  Plan::Step step;
  const auto bind = [&](const Value* value) {
    const auto from = located(value);
    const auto copy = found.copied.find(step.inputs.size());
    if (copy == found.copied.end()) {
      step.inputs.push_back(from);
      return;
    }
    const auto type = *draft_.request.facts->tensor(value).dtype;
    const auto to = strided(value->unique(), type, from.second.get_dims(), copy->second);
    step.inputs.push_back(copied(from, to, type));
  };
  bind(found.query);
  bind(found.key);
  bind(found.value);
  std::for_each(found.masks.begin(), found.masks.end(), bind);
  std::vector<bool> divides;
  for (const auto& factor : found.factors) {
    bind(factor.number);
    divides.push_back(factor.divides);
  }
  const auto facts = draft_.request.facts->tensor(found.result);
  const auto layoutOf = [&](const std::vector<int64_t>& strides) {
    return strided(found.result->unique(), *facts.dtype, *facts.sizes, strides);
  };
  const auto layout = layoutOf(found.result_strides);
  const bool apart = found.result_strides != *facts.strides &&
                     !draft_.request.any_layout[draft_.group_outputs.at(layout.get_id())];
  if (apart) {
    step.outputs.emplace_back(draft_.temporary(layout), layout);
  } else {
    draft_.addResult(step, layout);
  }
  step.kernel = {[kernel = found.kernel, masks = found.masks.size(), divides](auto from, auto to) {
                   Attention::Data data{from[0], from[1], from[2], {}, to[0]};
                   std::copy_n(from.begin() + 3, masks, data.masks.begin());
                   for (size_t i = 0; i < divides.size(); ++i) {
                     const auto factor = *static_cast<const float*>(from[3 + masks + i]);
                     data.factor = divides[i] ? data.factor / factor : data.factor * factor;
                   }
                   kernel.run(data);
                 },
                 "attention", found.kernel.kernels->name};
  draft_.plan->steps.push_back(std::move(step));
  if (apart) {
    Plan::Step copy;
    copy.inputs = draft_.plan->steps.back().outputs;
    const auto result = layoutOf(*facts.strides);
    draft_.addResult(copy, result);
    copy.kernel = copyBetween(layout, result, *facts.dtype);
    draft_.plan->steps.push_back(std::move(copy));
  }
}

void UnloweredSteps::lookup(const FoundLookup& found) {
  Plan::Step step;
  const auto slot = draft_.knownSlot(found.indices->unique());
  if (!slot) {
    throw CompileError{"constant indices"};
  }
  // oneDNN has no integers of 64 bit, and reads none of these.
  step.inputs.emplace_back(*slot,
                           Layout(found.indices->unique(), DataType::s32, Shape{1}, Shape{1}));
  bind(step, draft_.keep(found.table),
       strided(0, found.table.scalar_type(), found.table.sizes().vec(), found.table.strides().vec(),
               /*constant=*/true));
  const auto facts = draft_.request.facts->tensor(found.result);
  draft_.addResult(step, strided(found.result->unique(), *facts.dtype, *facts.sizes,
                                 c10::TensorType::contiguousStridesOf(*facts.sizes)));
  step.kernel = {
      [kernel = found.kernel](auto from, auto to) { kernel.run(from[0], from[1], to[0]); },
      "lookup", "llga_lookup"};
  draft_.plan->takes_non_finite = true;
  draft_.plan->steps.push_back(std::move(step));
}

void UnloweredSteps::recurrent(const FoundRecurrent& found) {
  Plan::Step step;
  auto kernel = found.kernel;
  const auto stridesOf = [&](const Shape& strides) {
    return found.batch_first ? Recurrent::Strides{strides[1], strides[0]}
                             : Recurrent::Strides{strides[0], strides[1]};
  };
  auto data = located(found.data);
  if (!liesByRows(data.second)) {
    data = copied(data, found.data);
  }
  kernel.source_strides = stridesOf(rowsIn(data.second));
  step.inputs.push_back(data);
  for (const auto& state : found.states) {
    if (state.constant.defined()) {
      const auto tensor = state.constant.contiguous();
      bind(step, draft_.keep(tensor),
           strided(0, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(),
                   /*constant=*/true));
      continue;
    }
    auto from = located(state.value);
    const auto rows = c10::TensorType::contiguousStridesOf(from.second.get_dims());
    step.inputs.push_back(from.second.get_strides() == rows ? from : copied(from, state.value));
  }
  const auto of_states = step.inputs.size();
  bindRecurrentParameters(step, found);

  const auto facts = draft_.request.facts->tensor(found.result);
  const auto layout = strided(found.result->unique(), *facts.dtype, *facts.sizes, *facts.strides);
  if (!liesByRows(layout)) {
    throw CompileError{"a recurrent layer whose result does not lie by rows"};
  }
  kernel.result_strides = stridesOf(rowsIn(layout));
  draft_.addResult(step, layout);
  std::array<size_t, 2> last{};  // outputs of the step; 0 where nobody reads it
  for (const size_t i : {0, 1}) {
    const auto* value = i == 0 ? found.last_units : found.last_cells;
    if (value == nullptr || draft_.group_outputs.count(value->unique()) == 0) {
      continue;
    }
    const auto state = draft_.request.facts->tensor(value);
    const auto rows = c10::TensorType::contiguousStridesOf(*state.sizes);
    if (canonicalStrides(*state.sizes, *state.strides) != rows) {
      throw CompileError{"a recurrent layer whose last state does not lie by rows"};
    }
    last[i] = step.outputs.size();
    draft_.addResult(step, strided(value->unique(), *state.dtype, *state.sizes, rows));
  }
  const bool is_narrow = *facts.dtype == at::kBFloat16;
  const Shape numbers{kernel.scratch(is_narrow)};
  const Layout scratch(found.result->node()->input(0)->unique(), DataType::f32, numbers, Shape{1});
  step.outputs.emplace_back(draft_.temporary(scratch), scratch);
  const auto with = [&]<typename T>(T) -> Plan::Kernel {
    return {[kernel, last, of_states](auto from, auto to) {
              Recurrent::Data<T> data{};
              data.source = static_cast<const T*>(from[0]);
              data.units = static_cast<const T*>(from[1]);
              if (kernel.cell == Recurrent::Cell::lstm) {
                data.cells = static_cast<const T*>(from[2]);
              }
              data.parameters = from.slice(of_states);
              data.result = static_cast<T*>(to[0]);
              data.last_units = last[0] != 0 ? static_cast<T*>(to[last[0]]) : nullptr;
              data.last_cells = last[1] != 0 ? static_cast<T*>(to[last[1]]) : nullptr;
              data.scratch = static_cast<float*>(to[to.size() - 1]);
              kernel.run(data);
            },
            "rnn", fmt::format("llga_recurrent:{}", Linear::kernels().name)};
  };
  step.kernel = is_narrow ? with(Bfloat16{}) : with(float{});
  draft_.plan->steps.push_back(std::move(step));
}

void UnloweredSteps::bindRecurrentParameters(Plan::Step& step, const FoundRecurrent& found) {
  const auto& kernel = found.kernel;
  const auto of_each =
      found.parameters.size() / static_cast<size_t>(kernel.layers * kernel.directions);
  const auto bindMade = [&](const at::Tensor& tensor) {
    step.inputs.push_back(keptAsFloats(0, tensor));
  };
  const auto bindWeight = [&](const at::Tensor& weight, const Shape& sizes, const auto& order) {
    if (const auto releasable = findReleasable(weight)) {
      releasable->pin();
    }
    const auto strides = c10::TensorType::contiguousStridesOf(sizes);
    bindPacked(step, strided(0, at::kFloat, sizes, strides, /*constant=*/true),
               transformWeight(weight, sizes, at::kFloat, order));
  };
  for (size_t i = 0; i < found.parameters.size(); i += of_each) {
    const auto layer = static_cast<int64_t>(i / of_each) / kernel.directions;
    const auto& inputs = found.parameters[i];
    const auto& units = found.parameters[i + 1];
    bindWeight(inputs, kernel.inputWeightSizes(layer),
               [&](const at::Tensor& to) { kernel.orderInputWeight(inputs, layer, to); });
    bindWeight(units, kernel.hiddenWeightSizes(),
               [&](const at::Tensor& to) { kernel.orderHiddenWeight(units, to); });
    const bool biases = of_each == 4;
    const auto none = at::zeros({inputs.size(0)}, at::kFloat);
    const auto& hidden = biases ? found.parameters[i + 3] : none;
    bindMade(kernel.inputBias(biases ? found.parameters[i + 2] : none, hidden));
    if (kernel.cell == Recurrent::Cell::gru) {
      bindMade(kernel.newBias(hidden));
    }
  }
}

Shape UnloweredSteps::bindRowsWithin(Plan::Step& step, const Value* value, const Shape& sizes) {
  auto data = located(value);
  if (data.second.get_strides().back() != 1) {
    data = copied(data, value);
  }
  step.inputs.push_back(data);
  const auto own_sizes = data.second.get_dims();
  const auto own_strides = data.second.get_strides();
  Shape strides(sizes.size(), 0);
  const auto missing = sizes.size() + 1 - own_sizes.size();
  for (size_t i = 0; i + 1 < own_sizes.size(); ++i) {
    strides[missing + i] = own_sizes[i] == 1 ? 0 : own_strides[i];
  }
  return strides;
}

}  // namespace llga
