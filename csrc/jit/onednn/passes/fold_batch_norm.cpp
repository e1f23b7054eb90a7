// A batch norm becomes part of the parameters of what it reads, where torch.jit.freeze does not do
// that: of a linear layer's rows (LeViT), or of a convolution that pads with mode "same" (EEGNet).
//
//   %2 : Tensor = aten::linear(%x, %weight, %bias)
//   %3 : Tensor = aten::flatten(%2, 0, 1)
//   %4 : Tensor = aten::batch_norm(%3, ...)
//   %5 : Tensor = aten::reshape_as(%4, %2)
// ->
//   %5 : Tensor = aten::linear(%x, %scaled, %shifted)
//
//   %2 : Tensor = aten::_convolution_mode(%x, %weight, %bias, ..., %same, ...)
//   %3 : Tensor = aten::batch_norm(%2, ...)
// ->
//   %2 : Tensor = aten::_convolution_mode(%x, %scaled, %shifted, ..., %same, ...)
//
// Only for constant parameters of float32, and where a layer's %2 has three dimensions (or as many
// as are flattened, and one more), or a convolution's those of its weight, which what computes it
// has to prove: of others the norm's channels would be another dimension. Each number is off by a
// rounding or two.
#include <ATen/ATen.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/norm_affine.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;

struct Folded {
  Node* layer;    // linear, or a convolution
  Node* flatten;  // or null
  Node* norm;
  std::vector<Node*> unflattened;  // readers of the norm that give it the layer's sizes
  at::Tensor weight;
  at::Tensor bias;
};

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : aliases_(graph) {}

  std::optional<Folded> find(Node* norm) {
    auto* read = norm->input(0)->node();
    auto* flatten = read->kind() == aten::flatten ? read : nullptr;
    if (flatten != nullptr && flatten->output()->uses().size() != 1) {
      return std::nullopt;
    }
    auto* layer = flatten != nullptr ? flatten->input(0)->node() : read;
    const bool fits = flatten != nullptr
                          ? layer->kind() == aten::linear && becomesRows(flatten)
                          : layer->kind() == aten::_convolution_mode && isOfItsWeightsRank(layer);
    if (!fits) {
      return std::nullopt;
    }
    Folded folded{layer, flatten, norm, {}, {}, {}};
    for (const auto& use : layer->output()->uses()) {
      const auto kind = use.user->kind();
      const bool sizes = kind == aten::size || (kind == aten::reshape_as && use.offset == 1);
      if (!sizes && use.user != flatten && use.user != norm) {
        return std::nullopt;
      }
    }
    for (const auto& use : norm->output()->uses()) {
      if (use.user->kind() == aten::reshape_as && use.offset == 0 &&
          use.user->input(1) == layer->output()) {
        folded.unflattened.push_back(use.user);
      }
    }
    const bool written =
        aliases_.hasWriters(layer->output()) || aliases_.hasWriters(norm->output());
    return !written && fold(folded) ? std::optional(std::move(folded)) : std::nullopt;
  }

 private:
  // All dimensions but the last become one.
  bool becomesRows(const Node* flatten) {
    const auto rank = shapes_.rank(flatten->input(0));
    const auto end = intOf(flatten->namedInput("end_dim"));
    if (!rank || !end || intOf(flatten->namedInput("start_dim")) != int64_t{0}) {
      return false;
    }
    const auto count = static_cast<int64_t>(*rank);
    return (*end < 0 ? *end + count : *end) == count - 2;
  }

  // Not of an image without a batch.
  bool isOfItsWeightsRank(const Node* convolution) {
    const auto weight = constantTensor(convolution->input(1));
    const auto rank = shapes_.rank(convolution->output());
    return weight.defined() && rank && static_cast<int64_t>(*rank) == weight.dim();
  }

  static bool fold(Folded& folded) {
    const auto weight = constantTensor(folded.layer->input(1));
    const auto affine = affineOf(folded.norm);
    if (!affine || !weight.defined() || weight.scalar_type() != at::kFloat ||
        (folded.flatten != nullptr && weight.dim() != 2) ||
        weight.size(0) != affine->scale.size(0)) {
      return false;
    }
    auto shift = affine->shift;
    if (!folded.layer->input(2)->mustBeNone()) {
      const auto bias = constantTensor(folded.layer->input(2));
      if (!bias.defined() || bias.scalar_type() != at::kFloat || bias.sizes() != shift.sizes()) {
        return false;
      }
      shift = shift + bias.to(at::kDouble) * affine->scale;
    }
    std::vector<int64_t> of_outputs(static_cast<size_t>(weight.dim()), 1);
    of_outputs[0] = -1;
    folded.weight = (weight.to(at::kDouble) * affine->scale.view(of_outputs)).to(at::kFloat);
    folded.bias = shift.to(at::kFloat);
    return folded.weight.isfinite().all().item<bool>() && folded.bias.isfinite().all().item<bool>();
  }

  torch::jit::AliasDb aliases_;
  KnownShapes shapes_;
};

void apply(const Folded& folded) {
  auto* graph = folded.layer->owningGraph();
  {
    const torch::jit::WithInsertPoint guard(folded.layer);
    folded.layer->replaceInput(1, graph->insertConstant(folded.weight));
    folded.layer->replaceInput(2, graph->insertConstant(folded.bias));
  }
  for (auto* node : folded.unflattened) {
    node->output()->replaceAllUsesWith(folded.layer->output());
  }
  auto* last = folded.flatten != nullptr ? folded.flatten : folded.layer;
  folded.norm->output()->replaceAllUsesWith(last->output());
}

}  // namespace

void foldBatchNorm(const GraphPtr& graph) {
  std::vector<Node*> norms;
  walk(graph->block(), [&](Node* node) {
    if (node->kind() == aten::batch_norm) {
      norms.push_back(node);
    }
  });
  if (norms.empty()) {
    return;
  }
  Finder finder(graph);
  std::vector<Folded> found;
  for (auto* norm : norms) {
    if (auto folded = finder.find(norm)) {
      found.push_back(std::move(*folded));
    }
  }
  for (const auto& folded : found) {
    apply(folded);
  }
  if (!found.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
