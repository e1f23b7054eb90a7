// A plan in the making: what its group computes, where the values are, and in which layouts.
//
// compile.cpp, own_steps.cpp and steps/ add its steps, in the order of execution, and say where the
// results of each are. Set-up code: slow, may throw CompileError; used by one thread.
#pragma once

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {

// The layout of a tensor with these strides; a 0-dim tensor is its one element.
Layout strided(size_t id, at::ScalarType dtype, const Shape& sizes, const Shape& strides,
               bool constant = false);

// A layout that oneDNN chooses.
Layout anyLayout(size_t id, at::ScalarType dtype, const Shape& sizes, bool constant);

struct PlanDraft {
  // `pack`: let oneDNN choose the layout of constant weights. The request outlives the draft.
  PlanDraft(const CompileRequest& request, bool pack);

  // --- what a step reads --------------------------------------------------------------------
  // Of a value that has been computed, an input of the group, or a constant.
  Layout inputLayout(size_t id) const;
  // Where a value is that is no constant.
  std::optional<Slot> knownSlot(size_t id) const;
  at::Tensor constantTensor(size_t id) const;
  // For a constant that is used as it is.
  Slot keep(at::Tensor tensor);
  // For memory that the plan owns, or one of its constants.
  Slot constantSlot(void* data);

  // --- what a step computes -----------------------------------------------------------------
  // That it has to have, or that oneDNN may choose.
  Layout outputLayout(size_t id) const;
  // Whether it may have these strides.
  bool mayHaveStrides(size_t id, const Shape& strides) const;
  // Memory for a value that only this plan reads.
  Slot temporary(const Layout& layout);
  // Adds what is computed in this layout, and where it goes: to an output of the group, or to
  // memory of the plan's own.
  void addResult(Plan::Step& step, const Layout& layout);
  // What is applied in place to this value; nullptr if nothing is.
  const ActivationApart* appliedTo(size_t id) const;

  // The plan, when all steps are there.
  std::shared_ptr<const Plan> finished();

  const CompileRequest& request;
  bool pack;
  std::shared_ptr<Plan> plan;
  LoweredGraph lowered;
  std::unordered_map<size_t, size_t> group_inputs;   // index by value
  std::unordered_map<size_t, size_t> group_outputs;  // likewise
  std::unordered_map<size_t, Layout> layouts;        // of values computed so far
  std::unordered_map<size_t, Slot> slots;            // where they are
  std::unordered_map<size_t, size_t> inplace;        // output -> input that it may overwrite
  bool overwrites_what_it_reads = false;             // the one step of the plan, and when it may
  std::vector<ActivationApart> activations;

 private:
  void describeOutput(size_t index);
  int64_t inplaceInput(size_t output, const Layout& layout) const;
  // Whether the step that writes the output reads the group's input last, as one of several that
  // read it, each for one of its readers in the subgraph.
  bool isReadLastFor(size_t output, size_t input, int64_t readers) const;
};

}  // namespace llga
