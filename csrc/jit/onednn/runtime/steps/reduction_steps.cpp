#include "jit/onednn/runtime/steps/reduction_steps.h"

#include <algorithm>
#include <vector>

namespace llga {
namespace {

// Those of dense memory in which these dimensions lie side by side, behind all others.
Shape innermost(const Shape& sizes, const Shape& axes) {
  Shape strides(sizes.size(), 1);
  int64_t step = 1;
  for (const bool reduced : {true, false}) {
    for (auto i = sizes.size(); i-- > 0;) {
      if ((std::count(axes.begin(), axes.end(), i) != 0) == reduced) {
        strides[i] = step;
        step *= sizes[i];
      }
    }
  }
  return strides;
}

// Of a reduction's result, from those that rowsOf() gives.
Shape keptStrides(const Shape& kept, const Shape& axes, const Shape& sizes) {
  Shape strides;
  const bool same_rank = sizes.size() == kept.size();
  for (size_t i = 0; i < kept.size(); ++i) {
    if (same_rank || std::count(axes.begin(), axes.end(), i) == 0) {
      strides.push_back(kept[i]);
    }
  }
  return canonicalStrides(sizes, strides);
}

// Sets images, rows and columns of the reduction. Returns the strides of the dimensions when
// those of the axes are gone; none (empty) if the data is not dense, or the axes do not lie side
// by side.
Shape rowsOf(const Layout& data, const Shape& axes, Reduction& kernel) {
  if (data.get_layout_type() != Layout::layout_type::strided) {
    return {};
  }
  const auto sizes = data.get_dims();
  const auto strides = data.get_strides();
  std::vector<size_t> inward;  // dimensions of more than one, from the innermost out
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) {
      inward.push_back(i);
    }
  }
  std::sort(inward.begin(), inward.end(),
            [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  Shape kept(sizes.size(), 1);
  int64_t step = 1;
  for (const auto i : inward) {
    if (strides[i] != step) {
      return {};
    }
    step *= sizes[i];
    if (std::count(axes.begin(), axes.end(), i) != 0) {
      if (kernel.images != 1) {
        return {};
      }
      kernel.rows *= sizes[i];
    } else {
      kept[i] = kernel.columns * kernel.images;
      (kernel.rows == 1 ? kernel.columns : kernel.images) *= sizes[i];
    }
  }
  return kernel.rows != 1 ? kept : Shape{};
}

}  // namespace

bool ReductionSteps::reduction(const Ops& ops) {
  const auto found = llga::reduction(ops);
  if (!found || !draft_.knownSlot(found->data.id)) {
    return false;
  }
  const auto& result = found->result;
  Reduction kernel{found->type, found->kind, 1, 1, 1};
  const auto kept = rowsOf(draft_.inputLayout(found->data.id), found->axes, kernel);
  if (kept.empty()) {
    return false;
  }
  const auto strides = keptStrides(kept, found->axes, *result.sizes);
  if (!draft_.mayHaveStrides(result.id, strides)) {
    return false;
  }
  Plan::Step step;
  bindData(step, found->data);
  draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
  step.kernel = {[kernel](auto from, auto to) { kernel.run(from[0], to[0]); }, "reduction",
                 "llga_reduction"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

void ReductionSteps::variance(const FoundVariance& found) {
  auto data = located(found.data);
  auto kernel = found.kernel;
  auto kept = rowsOf(data.second, found.axes, kernel);
  const auto facts = draft_.request.facts->tensor(found.result);
  const auto& sizes = *facts.sizes;
  const bool any = draft_.request.any_layout[draft_.group_outputs.at(found.result->unique())];
  const auto mayBe = [&](const Shape& strides) {
    return any || areSameStrides(sizes, *facts.strides, strides);
  };
  const auto type = *facts.dtype;
  if (kept.empty() || !mayBe(keptStrides(kept, found.axes, sizes))) {
    const auto of = data.second.get_dims();
    data = copied(data, strided(found.data->unique(), type, of, innermost(of, found.axes)), type);
    kernel = found.kernel;
    kept = rowsOf(data.second, found.axes, kernel);
  }
  const auto strides = keptStrides(kept, found.axes, sizes);
  if (!mayBe(strides)) {
    throw CompileError{"a variance whose result lies in an unusual order"};
  }
  Plan::Step step;
  step.inputs.push_back(data);
  draft_.addResult(step, strided(found.result->unique(), type, sizes, strides));
  step.kernel = {[kernel](auto from, auto to) { kernel.run(from[0], to[0]); }, "reduction",
                 "llga_reduction"};
  draft_.plan->takes_non_finite = true;  // the kernel looks at its result
  draft_.plan->steps.push_back(std::move(step));
}

}  // namespace llga
