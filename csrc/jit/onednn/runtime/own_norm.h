// Which group norms, instance norms and norms of rows our own kernels compute, in the place of
// PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/group_norm.h"

namespace llga {

// What the bridge makes a group of, in the order of execution; empty if no kernel computes `node`:
//
// * a group norm or instance norm, and the activation that alone reads its numbers;
// * a root-mean-square norm, or the division, or product, of a norm that is written out
//   (written_norm.h)
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

struct FoundRowNorm {
  NormOfRows kernel;  // but for the number of rows
  size_t dim;         // what rows are of
  const Value* data;
  const Value* weight;  // of aten::rms_norm; or null
  // Of a norm that is written out: by number of a row, of float32; undefined where there is none.
  at::Tensor factor;
  at::Tensor addend;
  const Value* result;
};

// Likewise.
std::optional<FoundRowNorm> findRowNorm(const Graph& subgraph, const Facts& facts);

}  // namespace llga
