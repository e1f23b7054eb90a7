#include "jit/onednn/attention_moves.h"

#include <algorithm>

namespace llga {
namespace {

namespace aten = torch::jit::aten;

bool swapsDimensions(const Node* node) {
  return node->kind() == aten::permute || node->kind() == aten::transpose;
}

bool anyRegroups(const std::vector<Node*>& moves) {
  return std::any_of(moves.begin(), moves.end(), regroupsRows);
}

}  // namespace

bool movesRows(const Node* node) {
  return movesNumbers(node) || (node->kind() == aten::roll && isTensor(node->input(0))) ||
         node->kind() == asFloatKind();
}

bool regroupsRows(const Node* node) {
  switch (node->kind()) {
    case aten::roll:
      return true;
    case aten::view:
    case aten::reshape:
    case aten::flatten:
    case aten::contiguous:
      return swapsDimensions(node->input(0)->node());
    default:
      return false;
  }
}

std::vector<Node*> movesBefore(const Value* value) {
  std::vector<Node*> moves;
  const auto* block = value->node()->owningBlock();
  for (auto* node = const_cast<Node*>(value->node());
       node->owningBlock() == block && movesRows(node); node = node->input(0)->node()) {
    moves.push_back(node);
  }
  while (!moves.empty() && moves.back()->kind() == asFloatKind()) {
    moves.pop_back();  // it goes with the product before it
  }
  return moves;
}

std::vector<Node*> movesBehind(const Value* value) {
  std::vector<Node*> moves;
  const auto* block = value->node()->owningBlock();
  for (;;) {
    if (value->uses().size() != 1) {
      return moves;
    }
    const auto& use = value->uses()[0];
    if (use.offset != 0 || use.user->owningBlock() != block || !movesRows(use.user)) {
      return moves;
    }
    moves.push_back(use.user);
    value = use.user->output();
  }
}

std::unordered_set<const Node*> movesAround(const AttentionCore& core) {
  std::unordered_set<const Node*> members(core.nodes.begin(), core.nodes.end());
  std::vector<std::vector<Node*>> before;
  for (const auto* operand : {core.query, core.key, core.value}) {
    auto moves = movesBefore(operand);
    if (anyRegroups(moves)) {
      members.insert(moves.begin(), moves.end());
      before.push_back(std::move(moves));
    }
  }
  // What somebody else reads stays outside, and all that it is made of.
  std::unordered_set<const Node*> outside;
  const auto isRead = [&](const Node* node) {
    const auto& uses = node->output()->uses();
    return std::any_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
      return members.count(use.user) == 0 || outside.count(use.user) != 0;
    });
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (auto& moves : before) {
      const auto last = std::find_if(moves.begin(), moves.end(), isRead);
      if (last == moves.end()) {
        continue;
      }
      outside.insert(last, moves.end());
      moves.erase(last, moves.end());
      changed = true;
    }
  }
  std::unordered_set<const Node*> found;
  if (std::any_of(before.begin(), before.end(), anyRegroups)) {
    for (const auto& moves : before) {
      found.insert(moves.begin(), moves.end());
    }
  }
  auto behind = movesBehind(core.result);
  while (!behind.empty() && !regroupsRows(behind.back()) &&
         behind.back()->kind() != aten::contiguous) {
    behind.pop_back();
  }
  if (anyRegroups(behind)) {
    found.insert(behind.begin(), behind.end());
  }
  return found;
}

}  // namespace llga
