// Steps for whole groups that no op of oneDNN stands for: attention, norms, rotary embeddings,
// recurrent layers and embeddings.
//
// As steps/step_maker.h says. They throw CompileError where the kernel does not take the group's
// layouts.
#pragma once

#include "jit/onednn/runtime/own_attention.h"
#include "jit/onednn/runtime/own_lookup.h"
#include "jit/onednn/runtime/own_norm.h"
#include "jit/onednn/runtime/own_recurrent.h"
#include "jit/onednn/runtime/own_rotary.h"
#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class UnloweredSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // One step for a group that is a group norm, behind another one if its data lies in an order that
  // the kernel does not take, or the result has to lie in another one.
  void groupNorm(const FoundGroupNorm& found);

  // One step for a group that is a norm of rows, behind one that copies them to lie one behind the
  // other if they do not, and before one that copies the result if it has to lie otherwise.
  void rowNorm(const FoundRowNorm& found);

  void rotary(const FoundRotary& found);

  // One step for a group that is attention.
  void attention(const FoundAttention& found);

  // One step for a group that is an embedding.
  void lookup(const FoundLookup& found);

  // One step for a group that is a recurrent layer, or several, behind another one if its data does
  // not lie by rows of a step and sequence.
  void recurrent(const FoundRecurrent& found);

 private:
  void bindRecurrentParameters(Plan::Step& step, const FoundRecurrent& found);

  // Binds rows of numbers, and returns the strides of the dimensions before, as of a tensor that is
  // expanded to `sizes` of those.
  Shape bindRowsWithin(Plan::Step& step, const Value* value, const Shape& sizes);
};

}  // namespace llga
