// Which chains of pointwise functions our own kernel computes, in the place of oneDNN's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/runtime/pointwise.h"

namespace llga {

// Whether this is one of the functions.
bool isPointwise(const OpSpec& op);

// Whether a chain may have it: one of the functions, a softmax over the last dimension or its
// logarithm, or a cast between float32 and bfloat16.
bool isLink(const OpSpec& op);

// Whether oneDNN has no kernel for it, 3.2, or is not needed, 3.7, but as a part of attention.
bool isOnlyOurs(const OpSpec& op);

// Whether our kernel alone computes all of a group, which holds such an op.
bool isOnlyOurs(const LoweredGraph& graph);

struct FoundPointwise {
  std::vector<Operand> data;
  std::vector<Operand> results;  // all of the same sizes
  // By number of the data and results; their strides are not known yet.
  PointwiseChain chain;
};

// Of ops that are links, of float32 or bfloat16 data; nothing for others. Values in between are
// not rounded to bfloat16. `group_outputs`: index by value.
std::optional<FoundPointwise> pointwise(const Ops& ops, const LoweredGraph& graph,
                                        const std::unordered_map<size_t, size_t>& group_outputs);

// The strides that an operand has as one of these sizes.
Shape broadcastStrides(const Shape& sizes, const Shape& strides, const Shape& to);

// Whether oneDNN has a reference kernel, or none, for what is found, with data and results in these
// layouts.
bool isSlowPointwise(const FoundPointwise& found, const std::vector<Layout>& data,
                     const Shape& strides);

// Whether our own kernel takes less time, whatever the layouts: with a softmax, for few numbers,
// and for a whole group, which has no inputs to look for NaN in then. Of many functions oneDNN
// keeps the values in registers, and is faster.
bool isFastPointwise(const FoundPointwise& found, bool whole);

// Whether many numbers would be read one by one: oneDNN may turn those over faster.
bool gathersMuch(const PointwiseChain& arranged);

// Whether oneDNN has a reference kernel for a binary op on the result of a matrix product, of more
// than two dimensions, and an operand, while our own is fast: it is broadcast over the last one.
bool isAppliedByRow(const Operand& product, const Operand& operand);

}  // namespace llga
