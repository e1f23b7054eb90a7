// Which variances and standard deviations our own kernel computes, in the place of PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/reduction.h"

namespace llga {

// Whether `node` is aten::var or aten::std of float32 or bfloat16 numbers, over dimensions that are
// known.
bool isOwnVariance(const Node* node, const Facts& facts);

struct FoundVariance {
  Reduction kernel;  // but for its sizes
  Shape axes;
  const Value* data;
  const Value* result;
};

// Nothing for groups that are anything but such a node. Throws CompileError for one that the kernel
// can't compute.
std::optional<FoundVariance> findVariance(const Graph& subgraph, const Facts& facts);

}  // namespace llga
