// Which group norms, instance norms and root-mean-square norms our own kernels compute, in the
// place of PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/group_norm.h"

namespace llga {

// What the bridge makes a group of, in the order of execution; empty if no kernel computes `node`:
//
// * a group norm or instance norm, and the activation that alone reads its numbers;
// * a root-mean-square norm, or the aten::rsqrt of one that is written out:
//     x * rsqrt(mean(pow(x, 2), -1) + eps) * weight        with casts to float32 and back, before
//     or behind the weight, or without
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

struct FoundRmsNorm {
  double epsilon;
  const Value* data;    // of float32; or of bfloat16, as the result is then
  const Value* weight;  // of the last dimension, or null
  const Value* result;
};

// Likewise.
std::optional<FoundRmsNorm> findRmsNorm(const Graph& subgraph, const Facts& facts);

}  // namespace llga
