#include "jit/onednn/passes/slice_sums.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <c10/util/irange.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <limits>

#include "jit/onednn/passes/known_types.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;
using torch::jit::Stack;

constexpr auto kEnd = std::numeric_limits<int64_t>::max();

struct Slice {
  int64_t dim;
  int64_t from;
  int64_t to;

  bool operator==(const Slice&) const = default;
};

// What `value` is a slice of, and in which dimensions, in order.
struct Sliced {
  Value* whole;
  std::vector<Slice> slices;
};

std::optional<int64_t> boundOf(const Value* value, int64_t otherwise) {
  return value->mustBeNone() ? std::optional(otherwise) : intOf(value);
}

std::optional<Sliced> slicedFrom(Value* value) {
  Sliced found{value, {}};
  for (; found.whole->node()->kind() == aten::slice && found.whole->node()->inputs().size() == 5;
       found.whole = found.whole->node()->input(0)) {
    const auto* node = found.whole->node();
    const auto dim = intOf(node->input(1));
    const auto from = boundOf(node->input(2), 0);
    const auto to = boundOf(node->input(3), kEnd);
    if (!dim || !from || !to || *dim < 0 || *from < 0 || *to < 0 || intOf(node->input(4)) != 1) {
      return std::nullopt;
    }
    if (*from != 0 || *to != kEnd) {
      found.slices.insert(found.slices.begin(), {*dim, *from, *to});
    }
  }
  return found.slices.empty() ? std::nullopt : std::optional(std::move(found));
}

bool isSameSlice(Value* a, Value* b) {
  const auto one = slicedFrom(a);
  const auto other = slicedFrom(b);
  return one && other && one->whole == other->whole && one->slices == other->slices;
}

bool isCast(const Node* node) { return castsTo(node) || reducesTo(node) || widens(node); }

bool isSumOfTensors(const Node* node) {
  return (node->kind() == aten::add || node->kind() == aten::add_) && node->inputs().size() == 3 &&
         isTensor(node->input(0)) && isTensor(node->input(1)) && intOf(node->input(2)) == 1;
}

bool isMatrixProduct(const Node* node) {
  return node->kind() == aten::matmul || node->kind() == aten::bmm;
}

// Whether a softmax reads it behind `node`, maybe widened or narrowed.
bool isSoftened(const Value* value, const Node* node) {
  return std::any_of(value->uses().begin(), value->uses().end(), [&](const torch::jit::Use& use) {
    return use.user->owningBlock() == node->owningBlock() && node->isBefore(use.user) &&
           (use.user->kind() == aten::softmax ||
            (isCast(use.user) && isSoftened(use.user->output(), node)));
  });
}

// What has the sizes of `value`, above casts and factors that are numbers.
Value* aboveFactors(Value* value) {
  for (;;) {
    auto* node = value->node();
    const bool scales = (node->kind() == aten::mul || node->kind() == aten::div) &&
                        node->inputs().size() == 2 && !isTensor(node->input(1));
    if (!scales && !isCast(node)) {
      return value;
    }
    value = node->input(0);
  }
}

// Query and key, whose product a softmax made `value` of, with casts in between; or none. (A sum
// may have larger sizes than the product.)
std::vector<Value*> softenedFrom(Value* value) {
  bool softened = false;
  for (;;) {
    auto* node = value->node();
    if (softened && isMatrixProduct(node)) {
      return {aboveFactors(node->input(0)), node->input(1)};
    }
    softened = softened || node->kind() == aten::softmax;
    const bool passed =
        node->kind() == aten::softmax || node->kind() == aten::dropout || isCast(node);
    if (!passed) {
      return {};
    }
    value = node->input(0);
  }
}

// What the product is of: query and key, of scores; these and the values, of attention's result.
// Nothing for other products.
std::vector<Value*> factorsOf(Value* product, const Node* write) {
  auto* node = product->node();
  if (isSoftened(product, write)) {
    return {aboveFactors(node->input(0)), node->input(1)};
  }
  auto factors = softenedFrom(node->input(0));
  if (!factors.empty()) {
    factors.push_back(node->input(1));
  }
  return factors;
}

// The only reader of a value; null if there are several, or none.
Node* soleReader(const Value* value) {
  return value->uses().size() == 1 ? value->uses()[0].user : nullptr;
}

bool writesAny(const Node* first, const Node* last) {
  for (; first != last; first = first->next()) {
    const auto* schema = first->maybeSchema();
    if (schema == nullptr ? first->kind() != prim::Constant && first->kind() != prim::ListConstruct
                          : schema->is_mutable()) {
      return true;
    }
  }
  return false;
}

// For aten::copy_ of sums to the slice that they begin with.
bool takeTerms(SliceSum& sum) {
  auto* value = sum.write->input(1);
  const auto step = [&](Node* node) {
    const bool ours =
        soleReader(value) != nullptr && node->owningBlock() == sum.write->owningBlock();
    value = ours ? node->input(0) : nullptr;
    return ours;
  };
  const auto skipCasts = [&] {
    while (isCast(value->node())) {
      if (!step(value->node())) {
        return false;
      }
    }
    return true;
  };
  const auto isView = [](const Node* node) {
    return node->kind() == aten::view || node->kind() == aten::reshape;
  };
  if (!skipCasts()) {
    return false;
  }
  const bool viewed = isView(value->node());
  if ((viewed && !step(value->node())) || !skipCasts()) {
    return false;
  }
  while (value->node()->kind() == aten::add && isSumOfTensors(value->node())) {
    sum.terms.insert(sum.terms.begin(), value->node());
    if (!step(value->node()) || !skipCasts()) {
      return false;
    }
  }
  if (viewed) {
    sum.view = value->node();
    if (!isView(sum.view) || !step(sum.view)) {
      return false;
    }
  }
  return !sum.terms.empty() && soleReader(value) != nullptr &&
         isSameSlice(value, sum.write->input(0)) && !writesAny(sum.terms.front(), sum.write);
}

// What is written is written again, by Python.
bool takeCopy(SliceSum& sum) {
  auto* result = sum.write->output();
  if (!result->hasUses()) {
    return true;
  }
  sum.copy = soleReader(result);
  return sum.copy != nullptr && sum.copy->kind() == aten::copy_ && sum.copy->input(1) == result &&
         sum.copy->owningBlock() == sum.write->owningBlock() && !sum.copy->output()->hasUses() &&
         isSameSlice(sum.copy->input(0), sum.write->input(0));
}

// Of a product of matrices; a vector is one row, or one column, which the product has not.
std::vector<int64_t> sizesOf(const std::vector<at::Tensor>& factors) {
  auto sizes = factors.front().sizes().vec();
  std::for_each(factors.begin() + 1, factors.end(), [&](const at::Tensor& factor) {
    const auto batch = [](at::IntArrayRef all) {
      return all.slice(0, all.size() - std::min<size_t>(all.size(), 2));
    };
    auto product = at::infer_size(batch(sizes), batch(factor.sizes()));
    if (sizes.size() > 1) {
      product.push_back(sizes.end()[-2]);
    }
    if (factor.dim() > 1) {
      product.push_back(factor.size(-1));
    }
    sizes = std::move(product);
  });
  return sizes;
}

struct Bounds {
  std::vector<int64_t> dims;
  std::vector<int64_t> from;
  std::vector<int64_t> to;
};

// In the place of the slice, of what has these sizes.
at::Tensor within(at::Tensor x, const std::vector<int64_t>& sizes, const Bounds& bounds,
                  const torch::jit::IValue& view) {
  auto result = at::empty(sizes, x.options());
  auto slice = result;
  for (const auto i : c10::irange(bounds.dims.size())) {
    const auto dim = bounds.dims[i];
    const auto size = slice.size(dim);
    const auto end = std::min(bounds.to[i], size);
    const auto begin = std::min(bounds.from[i], end);
    slice.narrow(dim, 0, begin).zero_();
    slice.narrow(dim, end, size - end).zero_();
    slice = slice.narrow(dim, begin, end - begin);
  }
  if (!view.isNone()) {
    x = x.expand(at::infer_size(view.toIntVector(), slice.numel())).reshape(slice.sizes());
  }
  slice.copy_(x);
  return result;
}

void run(Stack& stack) {
  const auto view = torch::jit::pop(stack);
  auto to = torch::jit::pop(stack).toIntVector();
  auto from = torch::jit::pop(stack).toIntVector();
  auto dims = torch::jit::pop(stack).toIntVector();
  const auto factors = torch::jit::pop(stack).toTensorVector();
  auto x = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, within(std::move(x), sizesOf(factors),
                                 {std::move(dims), std::move(from), std::move(to)}, view));
}

}  // namespace

Symbol withinKind() {
  static const Symbol kind = Symbol::fromQualString("llga::within");
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::within(Tensor x, Tensor[] factors, int[] dim, int[] start, int[] end, int[]? view) -> "
      "Tensor",
      run, c10::AliasAnalysisKind::FROM_SCHEMA)});
  return kind;
}

std::optional<SliceSum> sliceSum(Node* write) {
  const bool adds = write->kind() == aten::add_ && isSumOfTensors(write);
  if (!adds && write->kind() != aten::copy_) {
    return std::nullopt;
  }
  const auto sliced = slicedFrom(write->input(0));
  if (!sliced || !isMatrixProduct(sliced->whole->node()) ||
      sliced->whole->node()->owningBlock() != write->owningBlock() ||
      soleReader(write->input(0)) == nullptr) {
    return std::nullopt;
  }
  SliceSum sum{write, sliced->whole, factorsOf(sliced->whole, write), {}};
  if (sum.factors.empty()) {
    return std::nullopt;
  }
  const bool known = adds ? takeCopy(sum) : !write->output()->hasUses() && takeTerms(sum);
  return known ? std::optional(std::move(sum)) : std::nullopt;
}

void writeWhole(const SliceSum& sum) {
  auto* write = sum.write;
  auto* graph = write->owningGraph();
  const auto sliced = slicedFrom(write->input(0));
  const torch::jit::WithInsertPoint before(write);
  const auto inserted = [&](Symbol kind, at::ArrayRef<Value*> inputs, const Value* like) {
    auto* node = graph->insertNode(graph->create(kind, inputs, 1));
    node->copyMetadata(write);
    node->output()->setType(like->type());
    return node->output();
  };
  auto* added = write->input(1);
  for (auto* term : sum.terms) {
    added = term == sum.terms.front()
                ? term->input(1)
                : inserted(aten::add, {added, term->input(1), term->input(2)}, term->output());
  }
  const auto ints = [&](int64_t Slice::* field) {
    std::vector<int64_t> values;
    std::transform(sliced->slices.begin(), sliced->slices.end(), std::back_inserter(values),
                   [field](const Slice& slice) { return slice.*field; });
    return graph->insertConstant(values);
  };
  auto* view =
      sum.view != nullptr ? sum.view->input(1) : graph->insertConstant(torch::jit::IValue());
  auto* factors = graph->insertNode(graph->createList(c10::TensorType::get(), sum.factors));
  auto* placed = inserted(
      withinKind(),
      {added, factors->output(), ints(&Slice::dim), ints(&Slice::from), ints(&Slice::to), view},
      sum.whole);
  placed->setType(c10::TensorType::get());
  auto* one = graph->insertConstant(1);
  auto* all = inserted(aten::add, {sum.whole, placed, one}, sum.whole);
  auto* result = inserted(asTargetKind(), {all, sum.whole}, sum.whole);
  for (auto* node : {sum.copy, write}) {
    if (node != nullptr) {
      auto* target = node->input(0);
      node->destroy();
      while (!target->hasUses() && target->node()->kind() == aten::slice) {
        auto* slice = target->node();
        target = slice->input(0);
        slice->destroy();
      }
    }
  }
  sum.whole->replaceAllUsesAfterNodeWith(result->node(), result);
}

}  // namespace llga
