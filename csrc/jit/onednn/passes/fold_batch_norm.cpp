// A batch norm of a linear layer's rows becomes part of the layer's parameters, as torch.jit.freeze
// does where nothing is between them (LeViT).
//
//   %2 : Tensor = aten::linear(%x, %weight, %bias)
//   %3 : Tensor = aten::flatten(%2, 0, 1)
//   %4 : Tensor = aten::batch_norm(%3, ...)
//   %5 : Tensor = aten::reshape_as(%4, %2)
// ->
//   %5 : Tensor = aten::linear(%x, %scaled, %shifted)
//
// Only for constant parameters of float32, and where %2 has three dimensions (or as many as are
// flattened, and one more), which what computes it has to prove: of others the norm's channels
// would be another dimension. Each number is off by a rounding or two.
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
  Node* linear;
  Node* flatten;
  Node* norm;
  std::vector<Node*> unflattened;  // readers of the norm that give it the layer's sizes
  at::Tensor weight;
  at::Tensor bias;
};

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : aliases_(graph) {}

  std::optional<Folded> find(Node* norm) {
    auto* flatten = norm->input(0)->node();
    if (flatten->kind() != aten::flatten || flatten->output()->uses().size() != 1) {
      return std::nullopt;
    }
    auto* linear = flatten->input(0)->node();
    if (linear->kind() != aten::linear || !becomesRows(flatten)) {
      return std::nullopt;
    }
    Folded folded{linear, flatten, norm, {}, {}, {}};
    for (const auto& use : linear->output()->uses()) {
      const auto kind = use.user->kind();
      const bool sizes = kind == aten::size || (kind == aten::reshape_as && use.offset == 1);
      if (!sizes && use.user != flatten) {
        return std::nullopt;
      }
    }
    for (const auto& use : norm->output()->uses()) {
      if (use.user->kind() == aten::reshape_as && use.offset == 0 &&
          use.user->input(1) == linear->output()) {
        folded.unflattened.push_back(use.user);
      }
    }
    const bool written =
        aliases_.hasWriters(linear->output()) || aliases_.hasWriters(norm->output());
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

  static bool fold(Folded& folded) {
    const auto weight = constantTensor(folded.linear->input(1));
    const auto affine = affineOf(folded.norm);
    if (!affine || !weight.defined() || weight.scalar_type() != at::kFloat || weight.dim() != 2 ||
        weight.size(0) != affine->scale.size(0)) {
      return false;
    }
    auto shift = affine->shift;
    if (!folded.linear->input(2)->mustBeNone()) {
      const auto bias = constantTensor(folded.linear->input(2));
      if (!bias.defined() || bias.scalar_type() != at::kFloat || bias.sizes() != shift.sizes()) {
        return false;
      }
      shift = shift + bias.to(at::kDouble) * affine->scale;
    }
    folded.weight = (weight.to(at::kDouble) * affine->scale.unsqueeze(1)).to(at::kFloat);
    folded.bias = shift.to(at::kFloat);
    return folded.weight.isfinite().all().item<bool>() && folded.bias.isfinite().all().item<bool>();
  }

  torch::jit::AliasDb aliases_;
  KnownShapes shapes_;
};

void apply(const Folded& folded) {
  auto* graph = folded.linear->owningGraph();
  {
    const torch::jit::WithInsertPoint guard(folded.linear);
    folded.linear->replaceInput(1, graph->insertConstant(folded.weight));
    folded.linear->replaceInput(2, graph->insertConstant(folded.bias));
  }
  for (auto* node : folded.unflattened) {
    node->output()->replaceAllUsesWith(folded.linear->output());
  }
  folded.norm->output()->replaceAllUsesWith(folded.flatten->output());
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
