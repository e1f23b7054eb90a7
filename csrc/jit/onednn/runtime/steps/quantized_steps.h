// Steps over numbers of 8 bit: products, convolutions, blocks of these, sums, and what rounds to
// them.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "jit/onednn/runtime/own_quantized.h"
#include "jit/onednn/runtime/steps/step_maker.h"

namespace llga {

class QuantizedSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // A step for a linear layer or pointwise convolution of 8-bit numbers. False for any other
  // partition.
  bool linear(const Ops& ops);

  // A step for a convolution of 8-bit channels-last images by AMX. False for any other partition.
  bool convolution(const Ops& ops);

  // A group that is a layer norm of rows, rounded to 8 bit. False for any other group.
  bool roundedLayerNorm();

  // A group that is a depthwise convolution of channels-last images in 8 bit, and maybe a pointwise
  // one before it and another one behind it: one step, by a kernel of our own. False if the group
  // or its data is anything else.
  bool block();

  // A group that is a squeeze and excitation of channels-last images in 8 bit: one step, by a
  // kernel of our own. False if the group or its data is anything else.
  bool excitation();

  // A group that adds up tensors of float32 or 8 bit, these with a batch norm maybe, and rounds the
  // sum: one step, by a kernel of our own. False for any other group, for tensors that lie in
  // different orders, and where a norm's channels do not come last.
  bool affineSum();

  // A group that quantizes float32 numbers and does nothing else, in the order of its data. False
  // for any other group.
  bool quantization();

  // A mean over the pixels of channels-last images in 8 bit. False for any other partition.
  bool mean(const Ops& ops);

  // A max pooling of 8-bit channels-last images. False for any other partition.
  bool maxPool(const Ops& ops);

 private:
  // What follows the sums of an 8-bit product, and its weight as (output, ...); nothing if the
  // kernels can't take it.
  std::optional<std::pair<QuantizedSums, at::Tensor>> parametersOf(
      const FoundQuantized& found) const;

  // Of any operands; nothing if a norm's parameters are no constants.
  std::optional<Plan::Kernel> sumOfRows(const FoundAffineSum& found, bool norms) const;

  // A step that makes channels-last images, of one pixel maybe, of others. False if they are not.
  bool addOfImages(const Operand& data, const Operand& result, Plan::Kernel kernel);

  // `strides`: of the result; `ordered(weight)`: the weight, as (output, ...), as the kernel reads
  // it. False if the kernel can't take the parameters.
  template <typename Kernel, typename Ordered>
  bool addProduct(const Ops& ops, const FoundQuantized& product, Kernel kernel,
                  const Shape& strides, const Ordered& ordered, std::string name);
};

}  // namespace llga
