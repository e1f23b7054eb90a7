// Which rotary position embeddings our own kernel computes.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/rotary.h"

namespace llga {

// What the bridge makes a group of, in the order of execution; empty if `node` is not the sum of
//   x * cos + cat([-x[..., n:], x[..., :n]], -1) * sin
// with casts to float32 around what is of x, or without, and a cast to bfloat16 that alone reads
// the sum.
std::vector<const Node*> ownRotary(const Node* node, const Facts& facts);

struct FoundRotary {
  Rotary kernel;  // but for the strides
  const Value* data;
  const Value* cos;
  const Value* sin;
  const Value* result;
};

// Nothing for groups that are anything else. Throws CompileError for one that the kernel can't
// compute.
std::optional<FoundRotary> findRotary(const Graph& subgraph, const Facts& facts);

}  // namespace llga
