// A sum behind a linear layer whose rows become an image is computed of the rows, so that it joins
// the layer (ConvNeXt):
//
//   %2 : Tensor = aten::linear(%x, %weight, %bias)
//   %3 : Tensor = aten::permute(%2, [0, 3, 1, 2])                  # and casts to float32
//   %4 : Tensor = aten::add(%3, %image, 1)
// ->
//   %2 : Tensor = aten::linear(%x, %weight, %bias)
//   %5 : Tensor = aten::permute(%image, [0, 2, 3, 1])              # or what %image is a view of
//   %6 : Tensor = aten::add(%2, %5, 1)
//   %4 : Tensor = aten::permute(%6, [0, 3, 1, 2])
//
// Only where both operands have as many dimensions, which what computes them has to prove
// (known_shapes.h), and where nothing writes to them or to the sum. The sum lies in memory as
// eager's does if both operands do alike. What remove_mutation left of a sum in place,
// llga::as_target(%4, %3), moves with it.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <memory>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;

// The order of a permutation, without negative numbers; empty for other nodes.
std::vector<int64_t> orderOf(const Node* node) {
  const auto known = node->kind() == aten::permute ? torch::jit::toIValue(node->input(1))
                                                   : std::optional<c10::IValue>();
  if (!known || !known->isIntList()) {
    return {};
  }
  auto order = known->toIntVector();
  for (auto& dim : order) {
    dim += dim < 0 ? static_cast<int64_t>(order.size()) : 0;
  }
  return order;
}

std::vector<int64_t> inverse(const std::vector<int64_t>& order) {
  std::vector<int64_t> result(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    result[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  }
  return result;
}

// The type of what permuting a value gives.
c10::TypePtr permutedType(const Value* value, const std::vector<int64_t>& order) {
  const auto type = value->type()->cast<c10::TensorType>();
  const auto sizes = type ? type->sizes().concrete_sizes() : std::nullopt;
  const auto strides = type ? type->strides().concrete_sizes() : std::nullopt;
  if (!sizes || !strides || sizes->size() != order.size()) {
    return type ? type->dimensionedOnly() : value->type();
  }
  std::vector<int64_t> new_sizes;
  std::vector<int64_t> new_strides;
  for (const auto dim : order) {
    new_sizes.push_back((*sizes)[static_cast<size_t>(dim)]);
    new_strides.push_back((*strides)[static_cast<size_t>(dim)]);
  }
  return type->withSizesStrides(new_sizes, new_strides);
}

struct Sum {
  Node* add;
  size_t operand;            // which one is permuted
  Node* permute;             // the permutation
  std::vector<Node*> casts;  // behind it, the last one first
  Node* target;              // the llga::as_target that reads the operand as well, or null
};

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : graph_(graph) {}

  std::optional<Sum> find(Node* add) {
    for (const size_t i : {0, 1}) {
      auto* value = add->input(i);
      Sum sum{add, i, nullptr, {}, targetOf(*add, value)};
      size_t readers = sum.target == nullptr ? 1 : 2;
      while (value->uses().size() == readers &&
             (widens(value->node()) || castsTo(value->node()) == at::kFloat)) {
        sum.casts.push_back(value->node());
        value = value->node()->input(0);
        readers = 1;
      }
      sum.permute = value->node();
      const auto rank = orderOf(sum.permute).size();
      if (rank != 0 && value->uses().size() == readers && isOfLayer(sum.permute->input(0)) &&
          shapes_.rank(add->input(1 - i)) == rank && !written(sum)) {
        return sum;
      }
    }
    return std::nullopt;
  }

 private:
  // Whether nothing but casts is between a linear layer and this, its only reader's operand.
  static bool isOfLayer(const Value* value) {
    while (value->uses().size() == 1 && widens(value->node())) {
      value = value->node()->input(0);
    }
    return value->uses().size() == 1 && value->node()->kind() == aten::linear;
  }

  static Node* targetOf(const Node& add, const Value* operand) {
    const auto& uses = add.output()->uses();
    auto* reader = uses.size() == 1 ? uses[0].user : nullptr;
    const bool is = reader != nullptr && reader->kind() == asTargetKind() &&
                    reader->input(0) == add.output() && reader->input(1) == operand;
    return is ? reader : nullptr;
  }

  bool written(const Sum& sum) {
    if (aliases_ == nullptr) {
      aliases_ = std::make_unique<torch::jit::AliasDb>(graph_);
    }
    return aliases_->hasWriters(sum.add) || aliases_->hasWriters(sum.permute);
  }

  const GraphPtr& graph_;
  KnownShapes shapes_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;
};

void apply(const Sum& sum) {
  auto* graph = sum.add->owningGraph();
  const torch::jit::WithInsertPoint guard(sum.add);
  const auto order = orderOf(sum.permute);
  const auto permuted = [&](Value* value, const std::vector<int64_t>& dims) {
    auto* node =
        graph->insertNode(graph->create(aten::permute, {value, graph->insertConstant(dims)}, 1));
    node->copyMetadata(sum.permute);
    node->output()->setType(permutedType(value, dims));
    return node->output();
  };
  const auto moved = [&](Node* node) {
    auto* copy = graph->insertNode(graph->createClone(node, [](Value* v) { return v; }));
    copy->output()->setType(permutedType(node->output(), inverse(order)));
    return copy;
  };
  auto* rows = sum.permute->input(0);
  for (auto it = sum.casts.rbegin(); it != sum.casts.rend(); ++it) {
    auto* cast = moved(*it);
    cast->replaceInput(0, rows);
    rows = cast->output();
  }
  auto* other = sum.add->input(1 - sum.operand);
  auto* source = other->node();
  other = orderOf(source) == order ? source->input(0) : permuted(other, inverse(order));
  auto* last = sum.add;
  auto* add = moved(sum.add);
  add->replaceInput(sum.operand, rows);
  add->replaceInput(1 - sum.operand, other);
  auto* result = add->output();
  if (sum.target != nullptr) {
    last = sum.target;
    auto* target = moved(last);
    target->replaceInput(0, result);
    target->replaceInput(1, rows);
    result = target->output();
  }
  const auto uses = last->output()->uses();  // a copy: replaced below
  for (const auto& use : uses) {
    if (castsTo(use.user) || reducesTo(use.user)) {
      const torch::jit::WithInsertPoint before(use.user);
      auto* cast = moved(use.user);
      cast->replaceInput(0, result);
      use.user->output()->replaceAllUsesWith(permuted(cast->output(), order));
    }
  }
  auto* image = permuted(result, order);
  image->setType(last->output()->type());
  last->output()->replaceAllUsesWith(image);
}

}  // namespace

void sinkPermute(const GraphPtr& graph) {
  Finder finder(graph);
  std::vector<Sum> found;
  walk(graph->block(), [&](Node* node) {
    if (node->kind() != aten::add || node->inputs().size() != 3 || !isTensor(node->input(1))) {
      return;
    }
    if (auto sum = finder.find(node)) {
      found.push_back(std::move(*sum));
    }
  });
  for (const auto& sum : found) {
    apply(sum);
  }
  if (!found.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
