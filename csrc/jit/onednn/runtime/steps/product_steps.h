// Steps that run products of matrices in float32 and bfloat16: linear layers, pointwise
// convolutions, and products of what is no weight.
//
// As steps/step_maker.h says. False: nothing is added, as the kernel does not take that.
#pragma once

#include <optional>

#include "jit/onednn/runtime/matrix_product.h"
#include "jit/onednn/runtime/steps/step_maker.h"
#include "jit/onednn/runtime/way.h"

namespace llga {

class ProductSteps : public StepMaker {
 public:
  using StepMaker::StepMaker;

  // A step for a linear layer or pointwise convolution of float32 numbers. False for any other
  // partition.
  bool linear(const Ops& ops, Way way);

  // A step for a pointwise convolution of images in planes that gives planes: its weight is
  // multiplied with each image. False for any other partition.
  bool convolutionOfPlanes(const Ops& ops);

  // A step for a product of two matrices, neither of which is a weight. False for any other
  // partition.
  bool product(const Ops& ops);

  // A step for a linear layer or pointwise convolution of bfloat16 numbers. False for any other
  // partition.
  bool narrowLinear(const Ops& ops);

  // Whether the ops of a group read inputs where they lie, with memory between their numbers.
  bool takesGaps(const Ops& ops) const;

 private:
  // Nothing where oneDNN's is as fast, or the numbers are not to be computed this way.
  std::optional<MatrixProduct> kernelOf(const FoundProduct& found) const;

  // None if there is no finite one to multiply with in the place of a division.
  std::optional<float> numberOf(const FoundProduct::Factor& factor) const;

  // Those of an operand of a product with a result of these sizes.
  std::optional<MatrixProduct::Matrix> matrixStrides(const Operand& operand, bool transposed,
                                                     const Shape& sizes) const;
};

}  // namespace llga
