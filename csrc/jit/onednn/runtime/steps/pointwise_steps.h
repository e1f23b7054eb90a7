// Steps that run functions of each number alone, softmaxes, and what else reads images once: gates
// and batch norms.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include <optional>
#include <utility>

#include "jit/onednn/runtime/gate.h"
#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class PointwiseSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // A step for an activation apart. False if the partition is none.
  bool activation(const Ops& ops);

  // One step for a group that is an activation. False if the group is anything else, or its result
  // is to have another layout than its data.
  bool wholeActivation();

  // A step for a softmax over a dimension that does not lie innermost. False for any other
  // partition.
  bool softmax(const Ops& ops);

  // A step for a chain of pointwise functions over data that oneDNN is slow at. False for any other
  // partition.
  bool pointwise(const Ops& ops);

  // One step for a whole group that is such a chain. Of what oneDNN has no kernel for, several, one
  // for those in a row whose results have the same sizes.
  bool wholePointwise();

  // A batch norm, and maybe ReLU, of data in which a pixel's channels lie side by side. False for
  // any other partition.
  bool batchNorm(const Ops& ops);

  // One step for a group that is a gate, by a kernel of our own. False for any other one.
  bool gate();

  // Whether the ops of a group read inputs where they lie, with memory between their numbers.
  bool takesGaps(const Ops& ops) const;

 private:
  void addActivation(const ActivationApart& applied, const Layout& from);

  void requirePointwise(const Ops& ops);

  // A group that multiplies two images whose channels lie side by side, which may be parts of
  // others, behind activations, to a channels-last one.
  std::optional<std::pair<FoundGate, Gate>> gateOfImages() const;
};

}  // namespace llga
