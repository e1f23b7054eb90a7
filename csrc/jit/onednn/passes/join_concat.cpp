// Joins a concatenation with the batch norm that reads it.
//
//   %2 = llga::FusionGroup[Subgraph=<cat>](%a, %b)
//   %3 = llga::FusionGroup[Subgraph=<batch_norm, relu>](%2)
// ->
//   %3 = llga::FusionGroup[Subgraph=<cat, batch_norm, relu>](%a, %b)
//
// And a batch norm with the rounding behind it, and what dequantizes its data:
//
//   %d = aten::dequantize(%q)
//   %3 = llga::FusionGroup[Subgraph=<cat, batch_norm, relu>](%d, ...)
//   %4 = aten::quantize_per_tensor(%3, ...)
// ->
//   %4 = llga::FusionGroup[Subgraph=<dequantize, cat, batch_norm, relu, quantize>](%q, ...)
//
// oneDNN has no partition of all that; a plan for the group may do without the copy in between
// (runtime/concat_affine.h). DenseNet has one before each of its layers.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/utils/subgraph_utils.h>

#include <algorithm>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

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

// A batch norm, and maybe ReLU.
bool areNorm(at::ArrayRef<const Node*> operators) {
  return !operators.empty() && operators.size() <= 2 && operators[0]->kind() == aten::batch_norm &&
         (operators.size() == 1 || operators[1]->kind() == aten::relu);
}

// The concatenation whose only reader is the batch norm that `group` consists of.
Node* concatOf(const Node* group) {
  const auto operators = computations(*group->g(torch::jit::attr::Subgraph));
  if (!areNorm(operators)) {
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

// A group of a batch norm, maybe of what is concatenated, and ReLU.
bool isNorm(const Node* node) {
  if (!isFusionGroup(node) || node->outputs().size() != 1) {
    return false;
  }
  const auto operators = computations(*node->g(torch::jit::attr::Subgraph));
  const bool joined = !operators.empty() && operators[0]->kind() == aten::cat;
  return areNorm(at::ArrayRef<const Node*>(operators).slice(joined ? 1 : 0));
}

// The node, or group of one, that alone reads the group's result, and rounds it to 8 bit; or null.
Node* roundingOf(const Node* group) {
  const auto& uses = group->output()->uses();
  if (uses.size() != 1 || uses[0].user->owningBlock() != group->owningBlock()) {
    return nullptr;
  }
  const auto* node = uses[0].user;
  if (isFusionGroup(node)) {
    node = soleComputation(*node->g(torch::jit::attr::Subgraph));
  }
  const auto params = node != nullptr ? quantizeParams(node) : std::nullopt;
  return params && params->perTensor() ? uses[0].user : nullptr;
}

// The group, what dequantizes its data if all of that is, and the rounding: each may follow the one
// before. Empty if there is no rounding.
std::vector<Node*> roundedNorm(Node* group) {
  auto* rounding = isNorm(group) ? roundingOf(group) : nullptr;
  if (rounding == nullptr) {
    return {};
  }
  const auto& inputs = group->inputs();
  std::vector<Node*> nodes;
  if (std::all_of(inputs.begin(), inputs.end(),
                  [](const Value* input) { return dequantizedFrom(input) != nullptr; })) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      nodes.push_back(ownDequantize(group, i));
    }
  }
  nodes.push_back(group);
  nodes.push_back(rounding);
  return nodes;
}

}  // namespace

void joinConcat(const GraphPtr& graph) {
  {
    AliasDb aliases(graph);
    joinIn(graph->block(), aliases);
  }
  std::vector<Node*> groups;
  walk(graph->block(), [&](Node* node) {
    if (isFusionGroup(node)) {
      groups.push_back(node);
    }
  });
  std::vector<std::vector<Node*>> norms;
  for (auto* group : groups) {
    if (auto norm = roundedNorm(group); !norm.empty()) {
      norms.push_back(std::move(norm));
    }
  }
  if (norms.empty()) {
    return;
  }
  AliasDb aliases(graph);
  for (const auto& norm : norms) {
    mergeIntoGroup(norm, aliases);
  }
  torch::jit::EliminateDeadCode(graph);
}

}  // namespace llga
