// Which 8-bit groups a kernel of our own computes, in the place of oneDNN's.
//
// Decisions only; own_steps.cpp makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/quantized_block.h"

namespace llga {

// How the 8-bit numbers of a value stand for real ones.
struct Scale {
  float scale = 1;
  int64_t zero_point = 0;
};

// A convolution whose data, weight and result are of 8 bit.
struct FoundQuantized {
  const OpSpec* op = nullptr;
  size_t weight = 0;          // the 8-bit constant
  std::vector<float> scales;  // of the weight: one, or one for each output
  Operand data;
  Scale data_scale;
  std::optional<size_t> addend;  // an 8-bit value like the result
  Scale addend_scale;
  // What is applied to the sum: hardswish, or a clamp.
  bool hardswish = false;
  std::optional<float> least;
  std::optional<float> most;
  Operand result;
  Scale result_scale;
  size_t ops = 0;  // of the group, that it takes
};

struct FoundQuantizedBlock {
  QuantizedBlock kernel;
  std::array<std::optional<FoundQuantized>, QuantizedBlock::kMost> parts;

  const FoundQuantized& first() const;
  const FoundQuantized& last() const;
};

// A whole group that is a depthwise convolution of unsigned 8-bit images, and maybe a pointwise one
// before it and another one behind it; nothing for other groups. Images and addend have to be
// channels last.
std::optional<FoundQuantizedBlock> quantizedBlock(const LoweredGraph& graph);

// What follows the sums of a convolution; nothing if a number of it is not finite. `weight`: the
// 8-bit constant, output by output; `bias`: the constant, or an undefined tensor.
std::optional<QuantizedSums> sumsOf(const FoundQuantized& found, const at::Tensor& weight,
                                    const at::Tensor& bias);

}  // namespace llga
