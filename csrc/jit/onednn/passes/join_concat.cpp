// Joins a concatenation with the batch norm that reads it.
//
//   %2 = llga::FusionGroup[Subgraph=<cat>](%a, %b)
//   %3 = llga::FusionGroup[Subgraph=<batch_norm, relu>](%2)
// ->
//   %3 = llga::FusionGroup[Subgraph=<cat, batch_norm, relu>](%a, %b)
//
// oneDNN has no partition of both; a plan for the group may do without the copy in between
// (runtime/concat_affine.h). DenseNet has one before each of its layers.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/utils/subgraph_utils.h>

#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace aten = torch::jit::aten;

bool isConcat(const Node* node) {
  if (!isFusionGroup(node) || node->outputs().size() != 1) {
    return false;
  }
  const auto operators = computations(*node->g(torch::jit::attr::Subgraph));
  return operators.size() == 1 && operators[0]->kind() == aten::cat &&
         torch::jit::toIValue(operators[0]->namedInput("dim")) == c10::IValue(1);
}

// The concatenation whose only reader is the batch norm that `group` consists of.
Node* concatOf(const Node* group) {
  const auto operators = computations(*group->g(torch::jit::attr::Subgraph));
  if (operators.empty() || operators.size() > 2 || operators[0]->kind() != aten::batch_norm ||
      (operators.size() == 2 && operators[1]->kind() != aten::relu)) {
    return nullptr;
  }
  const auto* data = operators[0]->namedInput("input");
  for (size_t i = 0; i < group->inputs().size(); ++i) {
    const auto* value = group->input(i);
    if (group->g(torch::jit::attr::Subgraph)->inputs()[i] == data && isConcat(value->node()) &&
        value->uses().size() == 1 && value->node()->owningBlock() == group->owningBlock()) {
      return const_cast<Node*>(value->node());
    }
  }
  return nullptr;
}

void joinIn(Block* block, AliasDb& aliases) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    auto* node = *it++;
    for (auto* nested : node->blocks()) {
      joinIn(nested, aliases);
    }
    auto* concat = isFusionGroup(node) ? concatOf(node) : nullptr;
    if (concat != nullptr && aliases.moveBeforeTopologicallyValid(concat, node)) {
      torch::jit::SubgraphUtils::mergeNodeIntoSubgraphAndUpdateAliasing(concat, node, aliases);
    }
  }
}

}  // namespace

void joinConcat(const GraphPtr& graph) {
  AliasDb aliases(graph);
  joinIn(graph->block(), aliases);
}

}  // namespace llga
