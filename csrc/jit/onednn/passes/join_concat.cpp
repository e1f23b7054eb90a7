// Joins a concatenation with the batch norm that reads it, and with an activation behind that.
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
#include "jit/onednn/passes/known_types.h"
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

// A batch norm, and maybe an activation.
bool areNorm(at::ArrayRef<const Node*> operators) {
  return !operators.empty() && operators.size() <= 2 && operators[0]->kind() == aten::batch_norm &&
         (operators.size() == 1 || operators[1]->kind() == aten::relu ||
          isSmoothActivation(operators[1]));
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

// The node that alone reads the group's result; or null.
Node* soleReader(const Node* group) {
  const auto& uses = group->output()->uses();
  return uses.size() == 1 && uses[0].user->owningBlock() == group->owningBlock() ? uses[0].user
                                                                                 : nullptr;
}

// The node, or the only operator of a group.
const Node* operatorOf(const Node* node) {
  return node != nullptr && isFusionGroup(node)
             ? soleComputation(*node->g(torch::jit::attr::Subgraph))
             : node;
}

// Whether a node, or a group, only rounds to 8 bit, with one scale.
bool isRounding(const Node* node) {
  const auto* op = operatorOf(node);
  const auto params = op != nullptr ? quantizeParams(op) : std::nullopt;
  return params && params->perTensor();
}

// Whether a group only applies an activation that the kernel of a norm applies as well.
bool appliesActivation(const Node* node) {
  const auto* op = operatorOf(node);
  return op != nullptr && op != node && isSmoothActivation(op) && node->outputs().size() == 1;
}

// The group, what dequantizes its data if all of that is and the result is rounded, a group that
// applies an activation, and the rounding: each may follow the one before. Empty if neither
// activation nor rounding follow.
std::vector<Node*> normAndMore(Node* group) {
  if (!isNorm(group)) {
    return {};
  }
  std::vector<Node*> behind;
  auto* next = soleReader(group);
  const bool bare =
      computations(*group->g(torch::jit::attr::Subgraph)).back()->kind() == aten::batch_norm;
  if (bare && appliesActivation(next)) {
    behind.push_back(next);
    next = soleReader(next);
  }
  const bool rounded = isRounding(next);
  if (rounded) {
    behind.push_back(next);
  }
  if (behind.empty()) {
    return {};
  }
  const auto& inputs = group->inputs();
  std::vector<Node*> nodes;
  if (rounded && std::all_of(inputs.begin(), inputs.end(), [](const Value* input) {
        return dequantizedFrom(input) != nullptr;
      })) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      nodes.push_back(ownDequantize(group, i));
    }
  }
  nodes.push_back(group);
  nodes.insert(nodes.end(), behind.begin(), behind.end());
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
    if (auto norm = normAndMore(group); !norm.empty()) {
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
