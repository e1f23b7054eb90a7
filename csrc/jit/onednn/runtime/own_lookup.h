// Which embeddings our own kernel looks up, in the place of PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/lookup.h"

namespace llga {

// Whether `node` is aten::embedding of a constant table whose rows lie in one piece.
bool isOwnLookup(const Node* node);

// Whether a group is such a node and nothing else. Its indices are integers, in any order.
bool isLookupGroup(const Graph& subgraph);

struct FoundLookup {
  Lookup kernel;
  const Value* indices;
  const Value* result;
  at::Tensor table;
};

// Nothing for groups that are anything else. Throws CompileError for one that the kernel can't
// compute.
std::optional<FoundLookup> findLookup(const Graph& subgraph, const Facts& facts);

}  // namespace llga
