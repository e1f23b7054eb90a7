// Makes a group of a sum that ends in 8 bit and is not best computed behind a product.
//
//   %5 = aten::batch_norm(aten::dequantize(%1), ...)
//   %6 = aten::add(%2, aten::dequantize(%3))
//   %7 = aten::relu(aten::add(%6, %5))
//   %8 = aten::quantize_per_tensor(%7, ...)
// ->
//   %8 = llga::FusionGroup[Subgraph=<dequantize, ..., batch_norm, add, add, relu, quantize>](...)
//
// oneDNN has no partition of it with the batch norm; a plan for the group may be one step
// (runtime/affine_sum.h). RepVGG and MobileOne have such a sum in each block, and networks whose
// blocks end in a batch norm that nothing folds, as that of a concatenation, one without the norm.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/norm_affine.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace aten = torch::jit::aten;

// A sum of two tensors as they are.
bool isPlainSum(const Node* node) {
  return node->kind() == aten::add && node->inputs().size() == 3 && isTensor(node->input(0)) &&
         isTensor(node->input(1)) && torch::jit::toIValue(node->input(2)) == c10::IValue(1);
}

// The sum that a quantization rounds: its nodes, what is added up, and which of that is a norm.
class Sum {
 public:
  explicit Sum(Node* quantize) {
    const auto params = quantizeParams(quantize);
    if (!params || !params->perTensor() || params->dtype != at::kQUInt8) {
      return;
    }
    nodes_.push_back(quantize);
    auto* last = behindTargets(quantize, 0);
    if (last != nullptr && (last->kind() == aten::relu || isSmoothActivation(last))) {
      take(quantize, 0, last);
      last = behindTargets(last, 0);
    }
    if (last != nullptr && isPlainSum(last)) {
      take(nodes_.back(), 0, last);
      addUp(last);
    }
  }

  // A sum with a norm, or one to whose operands no product would be joined.
  bool isWanted() const { return norms_ > 0 || (narrow_ > 0 && wide_ > 0 && products_ == 0); }

  // In the order in which each may follow the one before; dequantizes are this sum's alone.
  std::vector<Node*> nodes() {
    std::vector<Node*> all;
    for (auto* node : nodes_) {
      for (size_t i = 0; i < node->inputs().size(); ++i) {
        if (isTensor(node->input(i)) && isNarrow(node->input(i))) {
          all.push_back(ownDequantize(node, i));
        }
      }
      all.push_back(node);
    }
    std::sort(all.begin(), all.end(), [](const Node* a, const Node* b) { return a->isBefore(b); });
    return all;
  }

 private:
  // The node that computes an input of `reader`, which alone reads it; or null. A sum that was
  // written into another one's memory has that for its target, which is no reading.
  static Node* ownedBy(Node* reader, size_t input) {
    auto* value = reader->input(input);
    const auto& uses = value->uses();
    const auto readers = std::count_if(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
      return use.user->kind() != asTargetKind() || use.offset == 0;
    });
    return readers == 1 && value->node()->owningBlock() == reader->owningBlock() ? value->node()
                                                                                 : nullptr;
  }

  // Likewise, behind nodes that only name a target.
  static Node* behindTargets(Node* reader, size_t input) {
    auto* node = ownedBy(reader, input);
    while (node != nullptr && node->kind() == asTargetKind()) {
      node = ownedBy(node, 0);
    }
    return node;
  }

  // What behindTargets() has found becomes part of the sum, with the nodes in between.
  void take(Node* reader, size_t input, Node* found) {
    for (auto* node = reader->input(input)->node(); node != found; node = node->input(0)->node()) {
      nodes_.push_back(node);
    }
    nodes_.push_back(found);
  }

  static bool isNarrow(const Value* value) {
    const auto params = dequantizeParams(value->node());
    return params && params->perTensor() && params->dtype == at::kQUInt8;
  }

  void addUp(Node* sum) {
    for (const auto i : {0, 1}) {
      auto* node = behindTargets(sum, i);
      if (node != nullptr && isPlainSum(node)) {
        take(sum, i, node);
        addUp(node);
      } else if (node != nullptr && node->kind() == aten::batch_norm && isNarrow(node->input(0)) &&
                 affineOf(node)) {
        take(sum, i, node);
        ++norms_;
      } else if (isNarrow(sum->input(i))) {
        ++narrow_;
      } else {
        ++wide_;
        while (node != nullptr && (isActivation(node) || isIdentity(node))) {
          node = node->input(0)->node();
        }
        products_ += node != nullptr && isProduct(node) ? 1 : 0;
      }
    }
  }

  std::vector<Node*> nodes_;
  int norms_ = 0;
  int narrow_ = 0;    // dequantized
  int wide_ = 0;      // other operands
  int products_ = 0;  // of those, maybe with an activation
};

}  // namespace

void joinSums(const GraphPtr& graph) {
  std::vector<Sum> sums;
  walk(graph->block(), [&](Node* node) {
    if (Sum sum(node); sum.isWanted()) {
      sums.push_back(std::move(sum));
    }
  });
  if (sums.empty()) {
    return;
  }
  std::vector<std::vector<Node*>> groups;
  groups.reserve(sums.size());
  for (auto& sum : sums) {
    groups.push_back(sum.nodes());
  }
  AliasDb aliases(graph);
  for (const auto& nodes : groups) {
    mergeIntoGroup(nodes, aliases);
  }
}

}  // namespace llga
