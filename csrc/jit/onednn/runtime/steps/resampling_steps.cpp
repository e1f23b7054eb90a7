#include "jit/onednn/runtime/steps/resampling_steps.h"

namespace llga {

void ResamplingSteps::resampling(FoundResampling found) {
  using Order = Resampling::Order;
  auto data = locatedDense(found.data);
  const auto sizes = data.second.get_dims();
  const auto facts = draft_.request.facts->tensor(found.result);
  const bool any = draft_.request.any_layout[draft_.group_outputs.at(found.result->unique())];
  const auto liesLast = [](const Shape& of, const Shape& strides) {
    return areSameStrides(of, strides, pixelStrides(of));
  };
  const bool last = liesLast(sizes, data.second.get_strides());
  const auto result = *facts.sizes;
  const bool to_last = any ? last : liesLast(result, *facts.strides);
  const auto rows = c10::TensorType::contiguousStridesOf(result);
  if (!to_last && !any && !areSameStrides(result, *facts.strides, rows)) {
    throw CompileError{"resized images that lie in an unusual order"};
  }
  const auto type = *facts.dtype;
  const bool by_rows =
      areSameStrides(sizes, data.second.get_strides(), c10::TensorType::contiguousStridesOf(sizes));
  if (to_last && !last) {
    data = copied(data, strided(found.data->unique(), type, sizes, pixelStrides(sizes)), type);
  } else if (!last && !by_rows) {
    data = copied(data, found.data);
  }
  Plan::Step step;
  step.inputs.push_back(data);
  draft_.addResult(
      step, strided(found.result->unique(), type, result, to_last ? pixelStrides(result) : rows));
  addResampling(std::move(step), std::move(found.kernel),
                to_last || last ? Order::channels_last : Order::planes,
                to_last ? Order::channels_last : Order::planes);
  draft_.plan->takes_non_finite = true;
}

bool ResamplingSteps::resampling(const Ops& ops) {
  using Order = Resampling::Order;
  auto kernel = llga::resampling(ops);
  const auto& data = ops.front()->inputs()[0];
  if (!kernel || !draft_.knownSlot(data.id)) {
    return false;
  }
  const auto& result = ops.front()->outputs()[0];
  const auto rows = c10::TensorType::contiguousStridesOf(*result.sizes);
  const auto layout = draft_.inputLayout(data.id);
  const bool one = (*data.sizes)[1] == 1;
  const bool is =
      one ? isContiguous(layout) : isChannelsLast(layout, data) && !mayBeChannelsLast(result);
  if (!is || !draft_.mayHaveStrides(result.id, rows)) {
    return false;
  }
  Plan::Step step;
  bindData(step, data);
  draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, rows));
  addResampling(std::move(step), std::move(*kernel), one ? Order::planes : Order::channels_last,
                Order::planes);
  return true;
}

void ResamplingSteps::addResampling(Plan::Step step, Resampling kernel, Resampling::Order from,
                                    Resampling::Order to) {
  step.kernel = {[kernel = std::move(kernel), from, to](auto source, auto results) {
                   kernel.run(source[0], from, results[0], to);
                 },
                 "resampling", "llga_resampling"};
  draft_.plan->steps.push_back(std::move(step));
}

}  // namespace llga
