// Linear layers that are written as a product of two matrices between views, as transformers'
// Conv1D is, become aten::linear, next to the sums and activations that read them.
//
//   %2 : Tensor = aten::view(%x, [-1, %c])                    # %c : int = aten::size(%x, -1)
//   %3 : Tensor = aten::addmm(%bias, %2, %weight, 1, 1)
//   %4 : Tensor = aten::view(%3, [%n, %m, 768])               # %n and %m likewise: 0 and 1
// ->
//   %4 : Tensor = aten::linear(%x, %transposed, %bias)
//
// The executor may have made aten::mm and aten::add of the aten::addmm before. Only for constant
// parameters, and where %x has as many dimensions as the second view gives, which what computes it
// has to prove: an observed type says it of one set of inputs. aten::linear makes the same views
// and calls aten::addmm, so the numbers are eager's.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::toIValue;
namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

using Rank = std::optional<size_t>;

// The rank that a value has whatever the inputs of the graph are. Of a graph that does not change
// meanwhile.
class Ranks {
 public:
  Rank of(const Value* value) {
    if (const auto known = known_.find(value); known != known_.end()) {
      return known->second;
    }
    known_[value] = std::nullopt;
    return known_[value] = find(value);
  }

 private:
  Rank find(const Value* value) {
    if (const auto constant = toIValue(value); constant && constant->isTensor()) {
      return constant->toTensor().dim();
    }
    const auto* node = value->node();
    switch (node->kind()) {
      case aten::view:
      case aten::reshape:
        return lengthOf(node->input(1));
      case aten::arange:
        return 1;
      case aten::embedding:
        return plusOne(of(node->input(1)));
      case aten::unsqueeze:
        return plusOne(of(node->input(0)));
      case aten::add:
      case aten::sub:
      case aten::mul:
      case aten::div:
        return broadcast(node);
      case prim::ConstantChunk:
        return of(node->input(0));
      case prim::ListUnpack:
        return ofPieces(node->input(0)->node());
      case aten::linear:
        return of(node->input(1)) == Rank(2) ? of(node->input(0)) : std::nullopt;
      case aten::layer_norm:
      case aten::dropout:
      case aten::contiguous:
      case aten::clone:
      case aten::to:
      case aten::gelu:
      case aten::relu:
      case aten::silu:
      case aten::tanh:
      case aten::sigmoid:
      case aten::softmax:
      case aten::slice:
      case aten::transpose:
      case aten::scaled_dot_product_attention:
        return of(node->input(0));
      default:
        return node->kind() == asTargetKind() ? of(node->input(0)) : std::nullopt;
    }
  }

  static Rank plusOne(Rank rank) { return rank ? Rank(*rank + 1) : std::nullopt; }

  static Rank lengthOf(const Value* list) {
    if (list->node()->kind() == prim::ListConstruct) {
      return list->node()->inputs().size();
    }
    const auto known = toIValue(list);
    return known && known->isIntList() ? Rank(known->toIntVector().size()) : std::nullopt;
  }

  Rank broadcast(const Node* node) {
    const auto left = of(node->input(0));
    const auto right = isTensor(node->input(1)) ? of(node->input(1)) : Rank(0);
    return left && right ? Rank(std::max(*left, *right)) : std::nullopt;
  }

  Rank ofPieces(const Node* node) {
    const bool pieces = node->kind() == aten::split || node->kind() == aten::chunk ||
                        node->kind() == aten::split_with_sizes;
    return pieces ? of(node->input(0)) : std::nullopt;
  }

  std::unordered_map<const Value*, Rank> known_;
};

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
  at::Tensor weight;  // inputs x outputs
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
    Layer layer{last, nullptr, {}, product->bias};
    at::Tensor bias;
    const bool constants =
        constantTensor(product->bias, bias) && constantTensor(product->weight, layer.weight);
    if (!constants || layer.weight.dim() != 2 || bias.dim() != 1 ||
        bias.size(0) != layer.weight.size(1) ||
        toIValue(sizes.back()) != c10::IValue(layer.weight.size(1))) {
      return std::nullopt;
    }
    const auto* first = product->data->node();
    const auto rows = sizesOfView(first);
    if (rows.size() != 2) {
      return std::nullopt;
    }
    layer.data = const_cast<Value*>(first->input(0));
    if (toIValue(rows[0]) != c10::IValue(int64_t{-1}) || !isSize(rows[1], layer.data, -1) ||
        ranks_.of(layer.data) != sizes.size() || written(layer)) {
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
  Ranks ranks_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;
};

void replace(const Layer& layer) {
  const torch::jit::WithInsertPoint guard(layer.last);
  auto* graph = layer.last->owningGraph();
  auto* weight = graph->insertConstant(layer.weight.t());
  auto* linear = graph->insertNode(graph->create(aten::linear, {layer.data, weight, layer.bias}));
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
