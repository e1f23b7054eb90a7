// What lies around an attention and only moves its numbers: the windows of an image that Swin
// attends to are rolled, cut out and put side by side before, and all of it backwards behind.
//
// Where this takes copies, a group of an attention has it inside: a kernel that knows where each
// row lies needs none of them. Stateless.
#pragma once

#include <unordered_set>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

// What an attention reads and gives, however it is spelled.
struct AttentionCore {
  const Value* query;
  const Value* key;
  const Value* value;
  const Value* result;
  std::vector<const Node*> nodes;
};

// True for views, copies and aten::roll.
bool movesRows(const Node* node);

// True for those that put rows side by side that were not, or may do so.
bool regroupsRows(const Node* node);

// The nodes that move what `value` is made of, from its own one upwards; inside its block.
std::vector<Node*> movesBefore(const Value* value);

// The nodes that move `value`, downwards, as far as each is all that reads what it gets.
std::vector<Node*> movesBehind(const Value* value);

// Those moves around an attention that its group may have inside, if there is a copy among them:
// what comes in between is read by nobody else.
std::unordered_set<const Node*> movesAround(const AttentionCore& core);

}  // namespace llga
