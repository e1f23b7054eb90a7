// Joins a concatenation with the channel shuffle that alone reads it, and with the chunks that
// groups take of it.
//
//   %2 = llga::FusionGroup[Subgraph=<cat>](%a, %b)
//   %3 = aten::view(%2, [n, 2, c / 2, h, w])
//   %4 = aten::transpose(%3, 1, 2)
//   %5 = aten::contiguous(%4)
//   %6 = aten::view(%5, [n, c, h, w])
//   %7, %8 = prim::ConstantChunk[chunks=2, dim=1](%6)
// ->
//   %7, %8 = llga::FusionGroup[Subgraph=<all of it, the arithmetic on sizes included>](%a, %b)
//
// Nothing of that but the concatenation is an op that oneDNN Graph has a kernel for; a plan for the
// group is one step (runtime/channel_shuffle.h), which finds out from the sizes whether the views
// are a shuffle. ShuffleNetV2 has one behind each block.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

using Nodes = std::vector<Node*>;

bool isChannelDim(const Node* node, const char* name) {
  return torch::jit::toIValue(node->namedInput(name)) == c10::IValue(1);
}

// A group of one concatenation of the channels of images that other groups made.
bool isConcat(const Node* group) {
  if (!isFusionGroup(group) || group->outputs().size() != 1) {
    return false;
  }
  const auto type = group->output()->type()->cast<c10::TensorType>();
  if (!type || type->dim() != size_t{4}) {
    return false;
  }
  const auto& inputs = group->inputs();
  if (!std::all_of(inputs.begin(), inputs.end(), [](const Value* input) {
        return isFusionGroup(input->node()) || input->node()->kind() == prim::ConstantChunk ||
               input->node()->kind() == prim::ListUnpack;
      })) {
    return false;
  }
  const auto nodes = group->g(torch::jit::attr::Subgraph)->nodes();
  return std::all_of(nodes.begin(), nodes.end(), [](const Node* node) {
    return node->kind() == prim::Constant || node->kind() == prim::ListConstruct ||
           isDequantize(node) || isQuantize(node) ||  // of 8-bit numbers
           (node->kind() == aten::cat && isChannelDim(node, "dim"));
  });
}

bool splitsChannels(const Node* view) {
  constexpr size_t kRank = 5;
  const auto* sizes = view->input(1);
  if (sizes->node()->kind() == prim::ListConstruct) {
    return sizes->node()->inputs().size() == kRank;
  }
  const auto known = torch::jit::toIValue(sizes);
  return known && known->isIntList() && known->toIntList().size() == kRank;
}

bool swapsGroups(const Node* node) {
  return node->kind() == aten::transpose && node->inputs().size() == 3 &&
         torch::jit::toIValue(node->input(1)) == c10::IValue(1) &&
         torch::jit::toIValue(node->input(2)) == c10::IValue(2);
}

// The only reader of a value, but for arithmetic on sizes.
Node* soleReader(const Value* value) {
  Node* found = nullptr;
  for (const auto& use : value->uses()) {
    if (use.user->kind() == aten::size) {
      continue;
    }
    if (found != nullptr || use.offset != 0) {
      return nullptr;
    }
    found = use.user;
  }
  return found;
}

class Shuffle {
 public:
  explicit Shuffle(Node* concat) : nodes_{concat} {}

  // Whether all that reads the concatenation is a shuffle, up to groups.
  bool find() {
    return isConcat(nodes_[0]) && take({aten::view, aten::reshape}) &&
           splitsChannels(nodes_.back()) && take({aten::transpose}) && swapsGroups(nodes_.back()) &&
           takeCopy() && takeChunks() && takeSizes();
  }

  // In an order in which each may follow the one before.
  const Nodes& nodes() const { return nodes_; }

 private:
  bool take(std::initializer_list<Symbol> kinds) {
    auto* next = soleReader(nodes_.back()->output());
    if (next == nullptr || next->owningBlock() != nodes_[0]->owningBlock() ||
        std::find(kinds.begin(), kinds.end(), next->kind()) == kinds.end()) {
      return false;
    }
    nodes_.push_back(next);
    return true;
  }

  // Into four dimensions again.
  bool takeCopy() {
    return take({aten::reshape, aten::flatten}) ||
           (take({aten::contiguous, aten::clone}) && take({aten::view, aten::reshape}));
  }

  bool takeChunks() {
    if (onlyGroupsRead(nodes_.back()->output())) {
      return true;
    }
    if (take({aten::chunk})) {
      if (!isChannelDim(nodes_.back(), "dim") || !take({prim::ListUnpack})) {
        return false;
      }
    } else if (!take({prim::ConstantChunk}) || nodes_.back()->i(torch::jit::attr::dim) != 1) {
      return false;
    }
    const auto chunks = nodes_.back()->outputs();
    return std::all_of(chunks.begin(), chunks.end(), onlyGroupsRead);
  }

  // What the views' sizes are computed by; fails if something else reads the concatenation.
  bool takeSizes() {
    Nodes sizes;
    std::unordered_set<const Node*> members(nodes_.begin(), nodes_.end());
    for (auto* node : nodes_) {
      if (!isFusionGroup(node)) {
        collect(node, sizes, members);
      }
    }
    std::sort(sizes.begin(), sizes.end(),
              [](const Node* a, const Node* b) { return a->isBefore(b); });
    nodes_.insert(nodes_.begin() + 1, sizes.begin(), sizes.end());
    return std::all_of(nodes_.begin(), nodes_.end() - 1, [&](const Node* node) {
      return std::all_of(node->output()->uses().begin(), node->output()->uses().end(),
                         [&](const torch::jit::Use& use) { return members.count(use.user) != 0; });
    });
  }

  void collect(Node* reader, Nodes& sizes, std::unordered_set<const Node*>& members) {
    for (auto* input : reader->inputs()) {
      auto* source = input->node();
      if (source->kind() != prim::Constant && isShapeArithmetic(source) &&
          source->owningBlock() == nodes_[0]->owningBlock() && members.insert(source).second) {
        sizes.push_back(source);
        collect(source, sizes, members);
      }
    }
  }

  Nodes nodes_;
};

}  // namespace

void joinShuffle(const GraphPtr& graph) {
  torch::jit::AliasDb aliases(graph);
  Nodes concats;
  walk(graph->block(), [&](Node* node) {
    if (isConcat(node)) {
      concats.push_back(node);
    }
  });
  for (auto* concat : concats) {
    if (Shuffle shuffle(concat); shuffle.find()) {
      mergeIntoGroup(shuffle.nodes(), aliases);
    }
  }
}

}  // namespace llga
