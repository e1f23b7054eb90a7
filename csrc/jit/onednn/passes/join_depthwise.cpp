// Joins the group of a pointwise convolution with that of the depthwise one that alone reads it,
// and with that of the pointwise one that alone reads this.
//
//   %2 = llga::FusionGroup[Subgraph=<conv2d, hardtanh>](%1)
//   %3 = llga::FusionGroup[Subgraph=<conv2d, hardtanh>](%2)
//   %4 = llga::FusionGroup[Subgraph=<conv2d, add>](%3, %1)
// ->
//   %4 = llga::FusionGroup[Subgraph=<conv2d, hardtanh, conv2d, hardtanh, conv2d, add>](%1)
//
// oneDNN has no partition of them; a plan for the group may compute them a few rows at a time
// (runtime/expansion.h). MobileNets and EfficientNets have them in each block.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/utils/subgraph_utils.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::AliasDb;

struct Convolution {
  std::vector<int64_t> weight;  // sizes, outputs first
  const Value* data;            // of the subgraph

  bool isPointwise() const { return weight[2] == 1 && weight[3] == 1; }
  bool isDepthwise() const { return weight[1] == 1 && weight[2] > 1 && weight[3] > 1; }
};

// Of a group that is a convolution of images with a constant weight, and maybe one more op.
std::optional<Convolution> convolutionOf(const Node* group) {
  if (!isFusionGroup(group) || group->outputs().size() != 1) {
    return std::nullopt;
  }
  const auto operators = computations(*group->g(torch::jit::attr::Subgraph));
  if (operators.empty() || operators.size() > 2 || !isProduct(operators[0]) ||
      !operators[0]->hasNamedInput("weight") || !operators[0]->hasNamedInput("groups")) {
    return std::nullopt;
  }
  const auto weight = torch::jit::toIValue(operators[0]->namedInput("weight"));
  constexpr int64_t kRank = 4;
  if (!weight || !weight->isTensor() || weight->toTensor().dim() != kRank) {
    return std::nullopt;
  }
  return Convolution{weight->toTensor().sizes().vec(), operators[0]->namedInput("input")};
}

// The group whose result is the data of the convolution in `group`, and nobody else's.
Node* producerOf(Node* group, const Convolution& convolution) {
  const auto inputs = group->g(torch::jit::attr::Subgraph)->inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto* value = group->input(i);
    if (inputs[i] == convolution.data) {
      const bool sole = value->uses().size() == 1 && isFusionGroup(value->node()) &&
                        value->node()->owningBlock() == group->owningBlock();
      return sole ? value->node() : nullptr;
    }
  }
  return nullptr;
}

class Joiner {
 public:
  explicit Joiner(const GraphPtr& graph) : aliases_(graph) {}

  void visit(Node* node) {
    const auto convolution = convolutionOf(node);
    if (!convolution) {
      return;
    }
    if (convolution->isDepthwise()) {
      auto* before = producerOf(node, *convolution);
      const auto known = before != nullptr ? convolutionOf(before) : std::nullopt;
      if (known && known->isPointwise() && known->weight[0] == convolution->weight[0] &&
          join(before, node)) {
        joined_.push_back(node);
      }
    } else if (convolution->isPointwise()) {
      auto* before = producerOf(node, *convolution);
      if (std::find(joined_.begin(), joined_.end(), before) != joined_.end()) {
        join(before, node);
      }
    }
  }

 private:
  bool join(Node* before, Node* node) {
    if (!aliases_.moveBeforeTopologicallyValid(before, node)) {
      return false;
    }
    torch::jit::SubgraphUtils::mergeNodeIntoSubgraphAndUpdateAliasing(before, node, aliases_);
    return true;
  }

  AliasDb aliases_;
  std::vector<const Node*> joined_;  // with what they expand
};

}  // namespace

void joinDepthwise(const GraphPtr& graph) {
  Joiner joiner(graph);
  walk(graph->block(), [&](Node* node) { joiner.visit(node); });
}

}  // namespace llga
