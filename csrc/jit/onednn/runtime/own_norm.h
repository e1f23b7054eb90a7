// Which group norms and instance norms our own kernel computes, in the place of PyTorch's.
//
// Decisions only; own_steps.cpp makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/group_norm.h"

namespace llga {

// The norm, and behind it the activation that alone reads its numbers, if there is one: what the
// bridge makes a group of. Empty if the kernel does not compute this node.
std::vector<const Node*> ownNorm(const Node* node, const Facts& facts);

struct FoundGroupNorm {
  GroupNorm kernel;  // but for the order in memory
  const Value* data;
  // By channel; null where there is none.
  const Value* weight;
  const Value* bias;
  const Value* result;
};

// Nothing for groups that are anything else. Throws CompileError for one that the kernel can't
// compute.
std::optional<FoundGroupNorm> findGroupNorm(const Graph& subgraph, const Facts& facts);

}  // namespace llga
