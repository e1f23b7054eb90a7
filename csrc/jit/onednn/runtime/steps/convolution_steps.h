// Steps that run convolutions of images and volumes in float32 and bfloat16, of which some take
// what is around them.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class ConvolutionSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // A step for a convolution in small groups over channels-last images, by a kernel of our own.
  // False for any other partition.
  bool grouped(const Ops& ops);

  // A step for a depthwise convolution that makes several channels of each one, or has a window
  // with gaps, over channels-last images. False for any other partition.
  bool depthwise(const Ops& ops);

  // A step for a depthwise convolution of volumes whose channels lie side by side. False for any
  // other partition.
  bool volume(const Ops& ops);

  // A step for a convolution, and maybe an addition and ReLU, over channels-last images by
  // Winograd's algorithm. False for any other partition.
  bool winograd(const Ops& ops, Way way);

  // A step for a convolution, or a transposed one, and maybe an addition and an activation, of
  // bfloat16 channels-last images by AMX. False for any other partition.
  bool narrow(const Ops& ops);

  // A step for a small convolution, and maybe an addition and an activation. False for any other
  // partition.
  bool direct(const Ops& ops);

  // A step for a transposed convolution with few output channels, over channels-last images. False
  // for any other partition.
  bool transposed(const Ops& ops);

  // A group that is a pointwise convolution of channels-last images, or one of a few planes, a
  // depthwise one, and maybe a projection: one step, by a kernel of our own. False if the group or
  // its data is anything else.
  bool expansion();

  // A group that is a squeeze and excitation of channels-last images: one step, by a kernel of our
  // own. False if the group or its data is anything else.
  bool squeezeExcitation();

  // Whether the ops of a group read this input where it lies, with memory between its pixels.
  bool takesGaps(const Ops& ops, const Operand& input) const;

 private:
  bool narrowGrouped(const GroupedConvolution& kernel, const std::vector<Operand>& inputs,
                     const at::Tensor& weight, const Operand& result);
};

}  // namespace llga
