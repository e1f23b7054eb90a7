// Joins the groups of a squeeze and excitation.
//
//   %2 = llga::FusionGroup[Subgraph=<adaptive_avg_pool2d>](%1)
//   %3 = llga::FusionGroup[Subgraph=<conv2d, relu>](%2)
//   %4 = llga::FusionGroup[Subgraph=<conv2d, sigmoid, mul>](%3, %1)
// ->
//   %4 = llga::FusionGroup[Subgraph=<adaptive_avg_pool2d, conv2d, relu, conv2d, ...>](%1)
//
// oneDNN has no partition of it all; a plan for the group may be one step (runtime/excitation.h).
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/utils/subgraph_utils.h>

#include <algorithm>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace aten = torch::jit::aten;

bool holds(const Node* group, Symbol kind) {
  const auto nodes = group->g(torch::jit::attr::Subgraph)->nodes();
  return std::any_of(nodes.begin(), nodes.end(),
                     [kind](const Node* node) { return node->kind() == kind; });
}

bool isSqueeze(const Node* node) {
  return isFusionGroup(node) && node->inputs().size() == 1 && node->outputs().size() == 1 &&
         (holds(node, aten::adaptive_avg_pool2d) || holds(node, aten::mean));
}

// From the squeeze to the group that multiplies with what was squeezed, each the only reader of
// the one before; empty if `squeeze` is no such beginning.
std::vector<Node*> excitationFrom(Node* squeeze) {
  constexpr size_t kMost = 4;  // the second convolution's activation may be a group of its own
  std::vector<Node*> chain{squeeze};
  while (chain.size() < kMost) {
    const auto* last = chain.back();
    if (last->outputs().size() != 1 || last->output()->uses().size() != 1) {
      return {};
    }
    auto* next = last->output()->uses()[0].user;
    if (!isFusionGroup(next) || next->owningBlock() != squeeze->owningBlock()) {
      return {};
    }
    chain.push_back(next);
    const auto inputs = next->inputs();
    if (std::find(inputs.begin(), inputs.end(), squeeze->input()) != inputs.end()) {
      return holds(next, aten::mul) ? chain : std::vector<Node*>{};
    }
  }
  return {};
}

}  // namespace

void joinExcitation(const GraphPtr& graph) {
  AliasDb aliases(graph);
  std::vector<Node*> squeezes;
  walk(graph->block(), [&](Node* node) {
    if (isSqueeze(node)) {
      squeezes.push_back(node);
    }
  });
  for (auto* squeeze : squeezes) {
    const auto chain = excitationFrom(squeeze);
    for (size_t i = chain.size(); i-- > 1;) {
      if (!aliases.moveBeforeTopologicallyValid(chain[i - 1], chain.back())) {
        break;
      }
      torch::jit::SubgraphUtils::mergeNodeIntoSubgraphAndUpdateAliasing(chain[i - 1], chain.back(),
                                                                        aliases);
    }
  }
}

}  // namespace llga
