// Steps that resize images.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include "jit/onednn/runtime/own_resampling.h"
#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class ResamplingSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // One step for a group that resizes images, behind another one if these lie in an order that the
  // kernel does not take.
  void resampling(FoundResampling found);

  // A step that resizes images, the result of which lies in planes, or that have one channel:
  // oneDNN has no such kernel, or a slow one. False for any other partition.
  bool resampling(const Ops& ops);

 private:
  void addResampling(Plan::Step step, Resampling kernel, Resampling::Order from,
                     Resampling::Order to);
};

}  // namespace llga
