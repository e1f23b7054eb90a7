// Which attention our own kernel computes, in the place of PyTorch's.
//
// Decisions only; own_steps.cpp makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include "jit/onednn/runtime/attention.h"
#include "jit/onednn/runtime/compile.h"

namespace llga {

// Whether the bridge makes a group of this node alone. What the kernel can't do with the inputs of
// a call is left to PyTorch then.
bool isOwnAttention(const Node* node, const Facts& facts);

// Whether this is such a group. It reads inputs with gaps, or with strides of 0, where they lie.
bool isOwnAttentionGroup(const Graph& subgraph);

struct FoundAttention {
  Attention kernel;
  const Value* query;
  const Value* key;
  const Value* value;
  const Value* mask;  // or null
  const Value* result;
};

// Nothing for other groups. Throws CompileError for one that the kernel can't compute.
std::optional<FoundAttention> findAttention(const CompileRequest& request);

}  // namespace llga
