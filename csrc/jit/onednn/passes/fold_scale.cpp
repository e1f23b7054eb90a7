// A constant factor of each output of a linear layer or convolution becomes part of the layer's
// parameters: LayerScale (ConvNeXt, CaiT, DINOv2), or a frozen batch norm's under autocast.
//
//   %2 : Tensor = aten::linear(%x, %weight, %bias)
//   %3 : Tensor = aten::permute(%2, [0, 3, 1, 2])                  # and casts to float32
//   %4 : Tensor = aten::mul(%3, %factor)                           # %factor: 96 x 1 x 1
// ->
//   %2 : Tensor = aten::linear(%x, %scaled, %shifted)
//   %4 : Tensor = aten::permute(%2, [0, 3, 1, 2])
//
// Only for parameters and factors that are constants of float32, or parameters of reduced
// precision whose products become float32 in between, as they do under autocast; and only where
// nothing else reads them. Scaled parameters are rounded to the data type that they had: each
// number is off by a rounding or two.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
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

struct Folded {
  Node* product;
  Node* factor;  // the multiplication
  Value* result;
  at::Tensor weight;
  at::Tensor bias;  // undefined if there is none
};

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : graph_(graph) {}

  std::optional<Folded> find(Node* mul) {
    for (const size_t i : {0, 1}) {
      const auto factor = constantTensor(mul->input(1 - i));
      if (!factor.defined() || factor.scalar_type() != at::kFloat) {
        continue;
      }
      auto found = fold(mul, mul->input(i), factor);
      if (found && !written(*found)) {
        return found;
      }
    }
    return std::nullopt;
  }

 private:
  // Whether an op's result has the numbers of its first input in another order or in float32 alone.
  static bool passesOn(const Node* node) {
    return widens(node) || castsTo(node) == at::kFloat || node->kind() == aten::permute;
  }

  std::optional<Folded> fold(Node* mul, Value* result, const at::Tensor& factor) {
    std::vector<const Node*> between;  // the last one first
    const auto* value = result;
    while (value->uses().size() == 1 && passesOn(value->node())) {
      between.push_back(value->node());
      value = value->node()->input(0);
    }
    auto* product = const_cast<Node*>(value->node());
    if (value->uses().size() != 1 || !hasOutputs(product)) {
      return std::nullopt;
    }
    const auto weight = constantTensor(product->input(1));
    const bool wide = std::any_of(between.begin(), between.end(),
                                  [](const Node* node) { return node->kind() != aten::permute; });
    if (!weight.defined() || product->input(1)->uses().size() != 1 ||
        !(weight.scalar_type() == at::kFloat ? !within_autocast_
                                             : isReducedPrecision(weight.scalar_type()) && wide)) {
      return std::nullopt;
    }
    const auto scale = scaleOf(factor, *product, weight, between);
    if (!scale.defined() || !(scale.isfinite() & (scale != 0)).all().item<bool>()) {
      return std::nullopt;  // inf * 0 is not 0
    }
    auto sizes = std::vector<int64_t>(static_cast<size_t>(weight.dim()), 1);
    sizes[0] = -1;
    Folded folded{product, mul, result, {}, {}};
    folded.weight = (weight.to(at::kDouble) * scale.view(sizes)).to(weight.scalar_type());
    if (!product->input(2)->mustBeNone()) {
      const auto bias = constantTensor(product->input(2));
      if (!bias.defined() || bias.scalar_type() != weight.scalar_type()) {
        return std::nullopt;
      }
      folded.bias = (bias.to(at::kDouble) * scale).to(bias.scalar_type());
    }
    const bool finite = folded.weight.isfinite().all().item<bool>() &&
                        (!folded.bias.defined() || folded.bias.isfinite().all().item<bool>());
    return finite ? std::optional(std::move(folded)) : std::nullopt;
  }

  // A product whose weight's first dimension is its outputs.
  static bool hasOutputs(const Node* node) {
    return node->kind() == aten::linear || isConvolution(node);
  }

  // Of each output; undefined if the factor is of other dimensions of what is `between`, or makes
  // more of it.
  at::Tensor scaleOf(const at::Tensor& factor, const Node& product, const at::Tensor& weight,
                     const std::vector<const Node*>& between) {
    // Of the outputs, from the last dimension on.
    int64_t axis = product.kind() == aten::linear ? -1 : 1 - weight.dim();
    auto rank = shapes_.rank(product.output());
    for (auto it = between.rbegin(); it != between.rend(); ++it) {
      if ((*it)->kind() != aten::permute) {
        continue;
      }
      const auto order = toIValue((*it)->input(1));
      if (!order || !order->isIntList()) {
        return {};
      }
      const auto dims = order->toIntVector();
      const auto count = static_cast<int64_t>(dims.size());
      const auto from = std::find_if(dims.begin(), dims.end(), [&](int64_t dim) {
        return (dim < 0 ? dim : dim - count) == axis;
      });
      rank = dims.size();  // or it raises
      axis = from - dims.begin() - count;
    }
    const auto least = product.kind() == aten::linear ? 1 : weight.dim() - 1;
    if (factor.dim() > static_cast<int64_t>(rank.value_or(static_cast<size_t>(least))) ||
        -axis > factor.dim() || factor.size(axis) != weight.size(0) ||
        factor.numel() != weight.size(0)) {
      return {};
    }
    return factor.reshape({-1}).to(at::kDouble);
  }

  bool written(const Folded& folded) {
    if (aliases_ == nullptr) {
      aliases_ = std::make_unique<torch::jit::AliasDb>(graph_);
    }
    return aliases_->hasWriters(folded.product->output()) || aliases_->hasWriters(folded.result) ||
           aliases_->hasWriters(folded.factor->output());
  }

  const GraphPtr& graph_;
  bool within_autocast_ = at::autocast::is_autocast_enabled(at::kCPU);
  KnownShapes shapes_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;
};

void apply(const Folded& folded) {
  auto* graph = folded.product->owningGraph();
  const torch::jit::WithInsertPoint guard(folded.product);
  folded.product->replaceInput(1, graph->insertConstant(folded.weight));
  if (folded.bias.defined()) {
    folded.product->replaceInput(2, graph->insertConstant(folded.bias));
  }
  folded.factor->output()->replaceAllUsesWith(folded.result);
}

}  // namespace

void foldScale(const GraphPtr& graph) {
  Finder finder(graph);
  std::vector<Folded> found;
  walk(graph->block(), [&](Node* node) {
    if (node->kind() != aten::mul || !isTensor(node->input(1))) {
      return;
    }
    if (auto folded = finder.find(node)) {
      found.push_back(std::move(*folded));
    }
  });
  for (const auto& folded : found) {
    apply(folded);
  }
  if (!found.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
