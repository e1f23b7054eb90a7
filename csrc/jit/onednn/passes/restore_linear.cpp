// Linear layers that are written as a product of two matrices between views, as transformers'
// Conv1D is, become aten::linear, next to the sums and activations that read them.
//
//   %2 : Tensor = aten::view(%x, [-1, %c])                    # %c : int = aten::size(%x, -1)
//   %3 : Tensor = aten::addmm(%bias, %2, %weight, 1, 1)
//   %4 : Tensor = aten::view(%3, [%n, %m, 768])               # %n and %m likewise: 0 and 1
// ->
//   %4 : Tensor = aten::linear(%x, %transposed, %bias)
//
// Casts of %2, as autocast puts them there, become such of %x.
//
// The executor may have made aten::mm and aten::add of the aten::addmm before. Only for constant
// parameters, and where %x has as many dimensions as the second view gives, which what computes it
// has to prove: an observed type says it of one set of inputs. aten::linear makes the same views
// and calls aten::addmm, so the numbers are eager's.
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

using torch::jit::toIValue;
namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

bool isSize(const Value* value, const Value* tensor, int64_t dim) {
  const auto* node = value->node();
  return node->kind() == aten::size && node->inputs().size() == 2 && node->input(0) == tensor &&
         toIValue(node->input(1)) == c10::IValue(dim);
}

// The list of sizes that `node` views its first input with; empty if it is no such view.
std::vector<const Value*> sizesOfView(const Node* node) {
  if (node->kind() != aten::view && node->kind() != aten::reshape) {
    return {};
  }
  const auto* list = node->input(1)->node();
  if (list->kind() != prim::ListConstruct) {
    return {};
  }
  return {list->inputs().begin(), list->inputs().end()};
}

// False if it is none.
bool constantTensor(const Value* value, at::Tensor& tensor) {
  const auto known = toIValue(value);
  if (!known || !known->isTensor()) {
    return false;
  }
  tensor = known->toTensor();
  return true;
}

bool isOne(const Value* value) {
  const auto known = toIValue(value);
  return known && known->isScalar() && known->toScalar().equal(1);
}

// A product of two matrices and its bias.
struct Product {
  const Value* data;
  const Value* weight;
  Value* bias;
};

// The one that computes `value`, of which nothing else is read.
std::optional<Product> productOf(const Value* value) {
  const auto* node = value->node();
  if (value->uses().size() != 1) {
    return std::nullopt;
  }
  if (node->kind() == aten::addmm) {
    const bool plain = isOne(node->namedInput("alpha")) && isOne(node->namedInput("beta"));
    const Product product{node->namedInput("mat1"), node->namedInput("mat2"),
                          const_cast<Value*>(node->namedInput("self"))};
    return plain ? std::optional(product) : std::nullopt;
  }
  if (node->kind() != aten::add || node->inputs().size() != 3 || !isOne(node->input(2))) {
    return std::nullopt;
  }
  for (const size_t i : {0, 1}) {
    const auto* factors = node->input(i)->node();
    if (factors->kind() == aten::mm && factors->output()->uses().size() == 1) {
      return Product{factors->input(0), factors->input(1), const_cast<Value*>(node->input(1 - i))};
    }
  }
  return std::nullopt;
}

struct Layer {
  Node* last;
  Value* data;
  std::vector<Node*> casts;  // of a view of the data, the last one first
  at::Tensor weight;         // inputs x outputs
  Value* bias;
};

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : graph_(graph) {}

  std::optional<Layer> find(Node* last) {
    const auto sizes = sizesOfView(last);
    const auto product = sizes.size() < 2 ? std::nullopt : productOf(last->input(0));
    if (!product) {
      return std::nullopt;
    }
    Layer layer{last, nullptr, {}, {}, product->bias};
    at::Tensor bias;
    const bool constants =
        constantTensor(product->bias, bias) && constantTensor(product->weight, layer.weight);
    if (!constants || layer.weight.dim() != 2 || bias.dim() != 1 ||
        bias.size(0) != layer.weight.size(1) ||
        toIValue(sizes.back()) != c10::IValue(layer.weight.size(1))) {
      return std::nullopt;
    }
    auto* first = const_cast<Node*>(product->data->node());
    while (castsTo(first) || first->kind() == reducedPrecisionKind()) {
      layer.casts.push_back(first);
      first = first->input(0)->node();
    }
    const auto rows = sizesOfView(first);
    if (rows.size() != 2) {
      return std::nullopt;
    }
    layer.data = first->input(0);
    if (toIValue(rows[0]) != c10::IValue(int64_t{-1}) || !isSize(rows[1], layer.data, -1) ||
        shapes_.rank(layer.data) != sizes.size() || written(layer)) {
      return std::nullopt;
    }
    for (size_t i = 0; i + 1 < sizes.size(); ++i) {
      if (!isSize(sizes[i], layer.data, static_cast<int64_t>(i))) {
        return std::nullopt;
      }
    }
    return layer;
  }

 private:
  // A view of the data would see what is written to it, and the other way round.
  bool written(const Layer& layer) {
    if (aliases_ == nullptr) {
      aliases_ = std::make_unique<torch::jit::AliasDb>(graph_);
    }
    return aliases_->hasWriters(layer.data) || aliases_->hasWriters(layer.last->output());
  }

  const GraphPtr& graph_;
  KnownShapes shapes_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;
};

void replace(const Layer& layer) {
  const torch::jit::WithInsertPoint guard(layer.last);
  auto* graph = layer.last->owningGraph();
  auto* weight = graph->insertConstant(layer.weight.t());
  auto* data = layer.data;
  for (auto it = layer.casts.rbegin(); it != layer.casts.rend(); ++it) {
    auto* cast = graph->insertNode(graph->createClone(*it, [](Value* v) { return v; }));
    cast->replaceInput(0, data);
    const auto type = (*it)->output()->type()->cast<c10::TensorType>();
    cast->output()->setType(
        c10::TensorType::get()->withScalarType(type ? type->scalarType() : std::nullopt));
    data = cast->output();
  }
  auto* linear = graph->insertNode(graph->create(aten::linear, {data, weight, layer.bias}));
  linear->copyMetadata(layer.last);
  linear->output()->setType(layer.last->output()->type());
  layer.last->output()->replaceAllUsesWith(linear->output());
}

}  // namespace

void restoreLinear(const GraphPtr& graph) {
  Finder finder(graph);
  std::vector<Layer> layers;
  walk(graph->block(), [&](Node* node) {
    if (auto layer = finder.find(node)) {
      layers.push_back(std::move(*layer));
    }
  });
  for (const auto& layer : layers) {
    replace(layer);
  }
  if (!layers.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
