// Sums over two tensors that were stacked are sums of the two: SKNet's branches, which it weighs.
//
//   %list : Tensor[] = prim::ListConstruct(%a, %b)
//   %s : Tensor = aten::stack(%list, 1)
//   %1 : Tensor = aten::sum(%s, [1], False, None)
//   %w : Tensor = aten::softmax(aten::view(%x, [n, 2, c, h, w]), 1, None)
//   %2 : Tensor = aten::sum(aten::mul(%s, %w), [1], False, None)
// ->
//   %1 : Tensor = aten::add(%a, %b, 1)
//   %2 : Tensor = aten::add(aten::mul(%a, aten::select(%w, 1, 0)),
//                           aten::mul(%b, aten::select(%w, 1, 1)), 1)
//
// The branches stay images, in the groups of their convolutions, and are not copied. Of two, as a
// sum of more in bfloat16 rounds once and several sums more often. Casts in front of a sum, as
// autocast has them, become such of what is added. Only where that is all that reads the stack, the
// branches are of floats and the weights of two items for sure, and nothing is written to.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

constexpr size_t kParts = 2;

// A sum over what was stacked, and what is between.
struct Sum {
  Node* sum;
  Node* cast = nullptr;      // in front of it
  Node* mul = nullptr;       // by weights
  Value* weights = nullptr;  // of that
};

class Unstacker {
 public:
  explicit Unstacker(const GraphPtr& graph) : graph_(graph), aliases_(graph) {}

  void run() {
    std::vector<Node*> found;
    walk(graph_->block(), [&](Node* node) {
      if (node->kind() == aten::stack) {
        found.push_back(node);
      }
    });
    std::for_each(found.begin(), found.end(), [this](Node* stack) { takeApart(stack); });
  }

 private:
  static Node* soleReader(const Value* value) {
    const auto& uses = value->uses();
    return uses.size() == 1 && uses[0].offset == 0 ? uses[0].user : nullptr;
  }

  // Over that dimension alone, in the data type of what is summed.
  static bool sumsOver(const Node* node, int64_t dim) {
    return node->kind() == aten::sum && node->inputs().size() == 4 &&
           intsOf(node->input(1)) == std::vector<int64_t>{dim} && !isTrue(node->input(2)) &&
           torch::jit::toIValue(node->input(2)).has_value() && node->input(3)->mustBeNone();
  }

  // The sum that a reader of the stack is, or leads to.
  std::optional<Sum> sumOf(Node* reader, const Value* stack, int64_t dim) {
    Sum found{};
    if (reader->kind() == aten::mul) {
      found.mul = reader;
      found.weights = reader->input(reader->input(0) == stack ? 1 : 0);
      if (found.weights == stack || !isTensor(found.weights)) {
        return std::nullopt;
      }
      reader = soleReader(reader->output());
    }
    if (reader != nullptr && isPlainCast(reader)) {
      found.cast = reader;
      reader = soleReader(reader->output());
    }
    if (reader == nullptr || !sumsOver(reader, dim)) {
      return std::nullopt;
    }
    found.sum = reader;
    return found;
  }

  // Whether weights have so many dimensions, and an item for each part along this one.
  bool hasParts(const Value* weights, size_t rank, int64_t dim) {
    if (shapes_.rank(weights) != rank) {
      return false;
    }
    while (weights->node()->kind() == aten::softmax || isPlainCast(weights->node())) {
      weights = weights->node()->input(0);
    }
    const auto* view = weights->node();
    if (view->kind() != aten::view && view->kind() != aten::reshape) {
      return false;
    }
    const auto* list = view->input(1)->node();
    return list->kind() == prim::ListConstruct && list->inputs().size() == rank &&
           intOf(list->input(static_cast<size_t>(dim))) == static_cast<int64_t>(kParts);
  }

  // What a product with constant floats gives, maybe activated: sums of integers are wider.
  static bool isFloating(const Value* value) {
    const auto* node = value->node();
    while (isActivation(node) || isIdentity(node) || node->kind() == aten::batch_norm) {
      node = node->input(0)->node();
    }
    const auto weight = isProduct(node) && node->hasNamedInput("weight")
                            ? constantTensor(node->namedInput("weight"))
                            : at::Tensor();
    return weight.defined() && weight.is_floating_point();
  }

  bool isWritten(const Sum& found) const {
    const auto written = [this](const Node* node) {
      return node != nullptr && aliases_.hasWriters(node->output());
    };
    return written(found.sum) || written(found.cast) || written(found.mul) ||
           (found.weights != nullptr && aliases_.hasWriters(found.weights));
  }

  void takeApart(Node* stack) {
    auto* list = stack->input(0)->node();
    const auto dim = intOf(stack->input(1)).value_or(-1);
    if (list->kind() != prim::ListConstruct || list->inputs().size() != kParts || dim < 0 ||
        aliases_.hasWriters(stack->output()) || aliases_.hasWriters(stack->input(0))) {
      return;
    }
    const auto parts = list->inputs();
    const auto rank = shapes_.rank(parts[0]);
    if (!rank || shapes_.rank(parts[1]) != rank || dim > static_cast<int64_t>(*rank) ||
        !isFloating(parts[0]) || !isFloating(parts[1]) || aliases_.hasWriters(parts[0]) ||
        aliases_.hasWriters(parts[1])) {
      return;
    }
    std::vector<Sum> sums;
    for (const auto& use : stack->output()->uses()) {
      const auto found = sumOf(use.user, stack->output(), dim);
      if (!found || isWritten(*found) ||
          (found->weights != nullptr && !hasParts(found->weights, *rank + 1, dim))) {
        return;
      }
      sums.push_back(*found);
    }
    for (const auto& found : sums) {
      found.sum->output()->replaceAllUsesWith(sumOfParts(found, parts, dim));
    }
  }

  Value* sumOfParts(const Sum& found, at::ArrayRef<Value*> parts, int64_t dim) {
    const torch::jit::WithInsertPoint guard(found.sum);
    const auto create = [&](Symbol kind, at::ArrayRef<Value*> inputs, Node* like) {
      auto* node = graph_->insertNode(graph_->create(kind, inputs, 1));
      node->copyMetadata(like);
      return node->output();
    };
    std::array<Value*, kParts> addends{};
    for (size_t i = 0; i < kParts; ++i) {
      auto* addend = parts[i];
      if (found.mul != nullptr) {
        auto* item = create(aten::select,
                            {found.weights, graph_->insertConstant(dim),
                             graph_->insertConstant(static_cast<int64_t>(i))},
                            found.mul);
        setSizes(item, found.weights, dim);
        auto* product = create(aten::mul, {addend, item}, found.mul);
        product->setType(addend->type());
        addend = product;
      }
      if (found.cast != nullptr) {
        auto* cast = graph_->createClone(found.cast, [](Value* value) { return value; });
        cast->replaceInput(0, addend);
        graph_->insertNode(cast);
        cast->output()->setType(addend->type());
        if (const auto type = found.cast->output()->type()->cast<c10::TensorType>();
            type && type->scalarType()) {
          setDtype(cast->output(), *type->scalarType());
        }
        addend = cast->output();
      }
      addends[i] = addend;
    }
    auto* sum = create(aten::add, {addends[0], addends[1], graph_->insertConstant(1)}, found.sum);
    sum->setType(addends[0]->type());
    return sum;
  }

  // Those of the weights without this dimension, if they are known.
  static void setSizes(Value* item, const Value* weights, int64_t dim) {
    const auto type = weights->type()->cast<c10::TensorType>();
    auto sizes = type ? type->sizes().concrete_sizes() : std::nullopt;
    auto strides = type ? type->strides().concrete_sizes() : std::nullopt;
    if (sizes && strides && dim < static_cast<int64_t>(sizes->size())) {
      sizes->erase(sizes->begin() + dim);
      strides->erase(strides->begin() + dim);
      item->setType(type->withSizesStrides(*sizes, *strides));
    }
  }

  const GraphPtr& graph_;
  const torch::jit::AliasDb aliases_;  // of the graph as it was
  KnownShapes shapes_;
};

}  // namespace

void unstack(const GraphPtr& graph) {
  bool any = false;
  walk(graph->block(), [&](const Node* node) { any = any || node->kind() == aten::stack; });
  if (any) {
    Unstacker(graph).run();
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
