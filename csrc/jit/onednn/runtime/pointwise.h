// Chains of pointwise functions of tensors that are broadcast to each other, in any order of
// dimensions:
//
//   results[k][i] = f_k(data[0][i], data[1][i], ...)
//
// and of softmaxes over the last dimension between them.
//
// oneDNN has a reference kernel where an operand is broadcast over the last dimension, or the data
// lies neither by rows nor channels last.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Computed
// in float32, bfloat16 results are rounded once, at the end.
struct PointwiseChain {
  struct Port {
    at::ScalarType dtype;  // float32, bfloat16 or, of data, bool
    Shape strides;         // in numbers; 0 where it is broadcast
  };

  // Its result is the value with the number of the data plus its own.
  struct Instruction {
    std::optional<vector_loops::Pointwise> pointwise;  // nothing: the softmax of each row
    std::array<size_t, 3> from;  // values, as many as the function has; the others are any
    bool logarithm = false;      // of the softmax
  };

  struct Result {
    size_t value;  // of an instruction
    Port port;
  };

  Shape sizes;
  std::vector<Port> data;
  std::vector<Instruction> instructions;
  std::vector<Result> results;

  // In the order in which the first result lies in memory, with as few dimensions as that takes,
  // and two at least; where there is a softmax, its dimension is the last one. Nothing if numbers
  // of a result do not lie side by side.
  std::optional<PointwiseChain> arranged() const;

  // Data whose memory the result, if there is but one, may take; nothing if there is none such.
  std::optional<size_t> mayOverwrite() const;

  // Only what is arranged. Results are dense and overlap nothing else, but for the data above.
  // Needs AVX2 and FMA.
  void run(const void* const* from, void* const* to) const;

  // Whether there is a softmax.
  bool readsRows() const;

  // Whether numbers of data in the last dimension are apart, and lie not across either: with those
  // of the dimension before side by side. Only what is arranged.
  bool gathers() const;

 private:
  class Strip;
};

}  // namespace llga
