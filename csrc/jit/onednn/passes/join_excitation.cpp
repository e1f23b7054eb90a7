// Joins the groups of a squeeze and excitation.
//
//   %2 = llga::FusionGroup[Subgraph=<adaptive_avg_pool2d>](%1)
//   %3 = llga::FusionGroup[Subgraph=<conv2d, relu>](%2)
//   %4 = llga::FusionGroup[Subgraph=<conv2d, sigmoid, mul>](%3, %1)
// ->
//   %4 = llga::FusionGroup[Subgraph=<adaptive_avg_pool2d, conv2d, relu, conv2d, ...>](%1)
//
// Of 8-bit data, the squeeze begins with dequantizing what the product reads behind another one:
//
//   %5 = aten::dequantize(%1)
//   %4 = llga::FusionGroup[Subgraph=<dequantize, conv2d, sigmoid, mul, quantize>](%3, %5)
//
// which becomes part of the group too.
//
// oneDNN has no partition of it all; a plan for the group may be one step (runtime/excitation.h).
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/utils/subgraph_utils.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

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

// Which input of `group` is `data`, maybe dequantized; nothing if none is.
std::optional<size_t> inputOf(const Node* group, const Value* data) {
  for (size_t i = 0; i < group->inputs().size(); ++i) {
    const auto* input = group->input(i);
    if (input == data || dequantizedFrom(input) == data) {
      return i;
    }
  }
  return std::nullopt;
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
    if (inputOf(next, squeeze->input())) {
      return holds(next, aten::mul) ? chain : std::vector<Node*>{};
    }
  }
  return {};
}

}  // namespace

void joinExcitation(const GraphPtr& graph) {
  std::vector<std::vector<Node*>> chains;
  walk(graph->block(), [&](Node* node) {
    if (isSqueeze(node)) {
      chains.push_back(excitationFrom(node));
    }
  });
  for (auto& chain : chains) {
    if (chain.empty()) {
      continue;
    }
    const auto input = inputOf(chain.back(), chain.front()->input());
    if (auto* dequantize = ownDequantize(chain.back(), *input)) {
      chain.insert(chain.end() - 1, dequantize);
    }
  }
  AliasDb aliases(graph);
  for (const auto& chain : chains) {
    for (size_t i = chain.size(); i-- > 1;) {
      if (!aliases.moveBeforeTopologicallyValid(chain[i - 1], chain.back())) {
        break;
      }
      torch::jit::SubgraphUtils::mergeNodeIntoSubgraphAndUpdateAliasing(chain[i - 1], chain.back(),
                                                                        aliases);
    }
  }
  torch::jit::EliminateDeadCode(graph);
}

}  // namespace llga
