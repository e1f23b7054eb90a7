// Steps that make one number of many: means, sums, norms and variances over dimensions.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include "jit/onednn/runtime/own_variance.h"
#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class ReductionSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // A mean, sum or norm over dimensions that lie side by side. False for any other partition.
  bool reduction(const Ops& ops);

  // One step for a group that is a variance or a standard deviation, behind another one if the
  // dimensions that are reduced do not lie side by side.
  void variance(const FoundVariance& found);
};

}  // namespace llga
