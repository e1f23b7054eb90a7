// The data types that the values of a graph have by construction, whatever its inputs are; profiled
// types don't count.
//
// The data types that autocast leaves alone (double, integers) may stand in place of a known one:
// its casts change neither.
#pragma once

#include <ATen/core/ScalarType.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "jit/onednn/ir.h"

namespace llga {

using Dtype = std::optional<at::ScalarType>;
using Nodes = std::unordered_set<const Node*>;

bool isReducedPrecision(Dtype dtype);

// What aten::to with a constant data type casts to.
Dtype castsTo(const Node* node);
// What TorchScript's autocast makes of floats on a CPU where it reduces precision.
Dtype reducesTo(const Node* node);
// Whether it makes float32 of reduced precision.
bool widens(const Node* node);
// Whether it is one of these and changes the data type alone.
bool isPlainCast(const Node* node);

// Activations, whose result has the data type of their operand.
bool isActivation(const Node* node);
// Of these, what the kernels for sums and for norms apply beside ReLU.
bool isSmoothActivation(const Node* node);
// Ops on floating-point tensors whose result has the data type of their first operand, also where
// autocast is on (pooling of volumes is not among them: eager's autocast makes floats of that).
bool keepsFirst(const Node* node);
// Ops that make a list of the parts of a tensor.
bool splits(const Node* node);

// Values are best asked for in the graph's order: then no answer has to look far back. Answers are
// kept, for values that have been asked for. Owned by one thread; the graph has to stay.
class KnownTypes {
 public:
  // Of the ops in `narrowed`, the operands' casts to full precision are looked through.
  explicit KnownTypes(const Nodes& narrowed) : narrowed_(narrowed) {}
  explicit KnownTypes(const Nodes&&) = delete;

  // What is not known by construction; before anything that depends on it is asked for.
  void assume(const Value* value, at::ScalarType dtype) { types_[value->unique()] = dtype; }

  Dtype of(const Value* value);
  // Whether the data type that `value` has by construction is its own for sure: that no double or
  // integers stand in its place.
  bool isCertain(const Value* value);
  void learn(const Node* node);

 private:
  Dtype infer(const Value* value);
  bool inferCertain(const Value* value);
  const Value* operandOf(const Node* node, size_t i) const;
  Dtype ofOperands(const Node* node);
  Dtype ofMixed(const Value* a, const Value* b);
  Dtype ofAll(const Value* list);

  const Nodes& narrowed_;
  std::unordered_map<size_t, Dtype> types_;  // by id
  std::unordered_map<size_t, bool> certain_;
};

}  // namespace llga
