// Steps that copy: concatenations, with a batch norm behind some, and channel shuffles.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/runtime/concat_affine.h"
#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class ConcatSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // A concatenation of the channels of channels-last images. False for any other partition.
  bool concat(const Ops& ops);

  // A concatenation of rows. False for any other partition.
  bool concatOfRows(const Ops& ops);

  // A group of Concat, BatchNormInference and maybe an activation, over channels-last images, or of
  // the latter with Quantize behind them and maybe Dequantize before: one step, by a kernel of our
  // own. False if the group or its data is anything else.
  bool concatAffine();

  // One step for a group that is a channel shuffle.
  void channelShuffle(const Shuffle& shuffle);

  // Whether the ops of a group read this input where it lies, with memory between its numbers.
  bool takesGaps(const Ops& ops, const Operand& input) const;

 private:
  // Of a partition that concatenates tensors and does no more.
  std::optional<ConcatOfRows> rowsConcatenated(const Ops& ops) const;

  struct AffineGroup {
    std::vector<Operand> parts;
    std::vector<Scale> from;  // of the parts; empty if they are not of 8 bit
    const OpSpec* norm;
    bool relu;
    std::optional<Activation> activation;
    std::optional<Scale> to;  // of the result, if it is of 8 bit
  };

  std::optional<AffineGroup> affineGroup() const;
};

}  // namespace llga
