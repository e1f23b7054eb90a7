#include "jit/onednn/runtime/steps/resampling_steps.h"

#include <algorithm>

namespace llga {

void ResamplingSteps::resampling(FoundResampling found) {
  using Order = Resampling::Order;
  const auto orders = ordersOf(found.data, found.result);
  Plan::Step step;
  step.inputs.push_back(dataFor(orders, found.data));
  addResult(step, orders, found.result);
  addResampling(std::move(step), std::move(found.kernel),
                orders.to_last || orders.last ? Order::channels_last : Order::planes,
                orders.to_last ? Order::channels_last : Order::planes);
  draft_.plan->takes_non_finite = true;
}

void ResamplingSteps::padding(const FoundPadding& found) {
  auto orders = ordersOf(found.data, found.result);
  if (orders.last && !orders.to_last) {  // where planes are wanted, planes are padded
    orders.last = false;
    orders.by_rows = false;
  }
  Plan::Step step;
  step.inputs.push_back(dataFor(orders, found.data));
  addResult(step, orders, found.result);
  auto dimensions = found.dimensions;
  if (orders.to_last) {
    std::rotate(dimensions.begin() + 1, dimensions.begin() + 2, dimensions.end());
  }
  const bool wide = *draft_.request.facts->tensor(found.data).dtype == at::kFloat;
  const auto number = static_cast<float>(found.number);
  const auto narrow = c10::BFloat16(number).x;
  Padding kernel(found.mode, dimensions, wide ? sizeof(number) : sizeof(narrow),
                 wide ? static_cast<const void*>(&number) : &narrow);
  step.kernel = {[kernel = std::move(kernel)](auto from, auto to) { kernel.run(from[0], to[0]); },
                 "padding", "llga_padding"};
  draft_.plan->steps.push_back(std::move(step));
  draft_.plan->takes_non_finite = true;
}

ResamplingSteps::Orders ResamplingSteps::ordersOf(const Value* data, const Value* result) {
  const auto liesLast = [](const Shape& sizes, const Shape& strides) {
    return areSameStrides(sizes, strides, pixelStrides(sizes));
  };
  const auto liesByRows = [](const Shape& sizes, const Shape& strides) {
    return areSameStrides(sizes, strides, c10::TensorType::contiguousStridesOf(sizes));
  };
  const auto from = locatedDense(data);
  const auto sizes = from.second.get_dims();
  const auto strides = from.second.get_strides();
  const auto facts = draft_.request.facts->tensor(result);
  const bool any = draft_.request.any_layout[draft_.group_outputs.at(result->unique())];
  const bool images = sizes.size() > 2;
  Orders orders{from, images && liesLast(sizes, strides), liesByRows(sizes, strides), false};
  orders.to_last = any ? orders.last : images && liesLast(*facts.sizes, *facts.strides);
  if (!orders.to_last && !any && !liesByRows(*facts.sizes, *facts.strides)) {
    throw CompileError{"images that lie in an unusual order"};
  }
  return orders;
}

std::pair<Slot, Layout> ResamplingSteps::dataFor(const Orders& orders, const Value* data) {
  const auto sizes = orders.data.second.get_dims();
  const auto type = *draft_.request.facts->tensor(data).dtype;
  if (orders.to_last && !orders.last) {
    return copied(orders.data, strided(data->unique(), type, sizes, pixelStrides(sizes)), type);
  }
  return orders.last || orders.by_rows ? orders.data : copied(orders.data, data);
}

void ResamplingSteps::addResult(Plan::Step& step, const Orders& orders, const Value* result) {
  const auto facts = draft_.request.facts->tensor(result);
  draft_.addResult(step,
                   strided(result->unique(), *facts.dtype, *facts.sizes,
                           orders.to_last ? pixelStrides(*facts.sizes)
                                          : c10::TensorType::contiguousStridesOf(*facts.sizes)));
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
