// Which products of 8-bit numbers a kernel of our own computes, in the place of oneDNN's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "jit/onednn/runtime/max_pool.h"
#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/runtime/quantized_block.h"
#include "jit/onednn/runtime/quantized_excitation.h"

namespace llga {

// How the 8-bit numbers of a value stand for real ones.
struct Scale {
  double scale = 1;
  int64_t zero_point = 0;
};

// Of an op that quantizes a value, or dequantizes it: nothing if that is not unsigned, or has
// several scales.
std::optional<Scale> unsignedScale(const OpSpec& conversion);

// A convolution or linear layer whose data and weight are of 8 bit, and what follows it.
struct FoundQuantized {
  const OpSpec* op = nullptr;
  Operand weight;             // the 8-bit constant
  std::vector<float> scales;  // of the weight: one, or one for each output
  bool outputs_last = false;  // in the weight
  Operand data;
  Scale data_scale;
  std::optional<Operand> addend;  // like the result
  Scale addend_scale;
  // What is applied to the sum: a function, or a clamp.
  quantized::Function function = quantized::Function::none;
  std::optional<float> least;
  std::optional<float> most;
  Operand result;
  std::optional<Scale> result_scale;  // none: it is of float32
  size_t ops = 0;                     // that it takes

  // The weight of these numbers as (output, ...); of a transposed convolution as asPointwise().
  at::Tensor byOutputs(const at::Tensor& weight) const;
};

// Whether there are such kernels, and they are not switched off.
bool ownsQuantizedProducts();

// A partition that is a linear layer or a pointwise convolution, and maybe an addition and an
// activation; nothing for others. Rows have to be contiguous, images channels last.
struct FoundQuantizedLinear {
  QuantizedLinear kernel;
  FoundQuantized product;
};
std::optional<FoundQuantizedLinear> quantizedLinear(const Ops& ops, const LoweredGraph& graph);

// A partition that is a convolution, or a transposed one, and maybe an addition and an activation,
// that AMX computes; nothing for others. Images and addend have to be channels last.
struct FoundQuantizedConvolution {
  QuantizedConvolution kernel;
  FoundQuantized product;
};
std::optional<FoundQuantizedConvolution> quantizedConvolution(const Ops& ops,
                                                              const LoweredGraph& graph);

// A whole group that is a depthwise convolution of images, and maybe a pointwise one before it and
// another one behind it; nothing for other groups. Images and addend have to be channels last.
struct FoundQuantizedBlock {
  QuantizedBlock kernel;
  std::array<std::optional<FoundQuantized>, QuantizedBlock::kMost> parts;

  const FoundQuantized& first() const;
  const FoundQuantized& last() const;
};
std::optional<FoundQuantizedBlock> quantizedBlock(const LoweredGraph& graph);

// A whole group that is a squeeze and excitation of images, which have to be channels last; nothing
// for other groups.
struct FoundQuantizedExcitation {
  QuantizedExcitation kernel;
  Operand data;
  Operand result;
  FoundQuantized squeeze;
  FoundQuantized excite;
};
std::optional<FoundQuantizedExcitation> quantizedExcitation(const LoweredGraph& graph);

// A partition that is the mean over all pixels of images, which have to be channels last; nothing
// for others.
struct FoundQuantizedMean {
  Reduction kernel;
  Operand data;
  Operand result;
};
std::optional<FoundQuantizedMean> quantizedMean(const Ops& ops, const LoweredGraph& graph);

// A group that is a sum of tensors of one size, of float32 or dequantized, these with a batch norm
// maybe, then maybe an activation, and its rounding; nothing for others.
struct FoundAffineSum {
  struct Term {
    Operand data;
    std::optional<Scale> scale;  // none: float32
    const OpSpec* norm = nullptr;
  };
  std::vector<Term> terms;
  bool relu = false;
  std::optional<Activation> activation;
  Scale result_scale;
  Operand result;
};
std::optional<FoundAffineSum> affineSum(const LoweredGraph& graph);

// A group that quantizes float32 numbers, and nothing else; nothing for others.
struct FoundQuantization {
  float scale;  // times a number, plus
  float zero_point;
  Operand data;
  Operand result;
};
std::optional<FoundQuantization> quantization(const LoweredGraph& graph);

// A partition that is a max pooling of images, which have to be channels last, with the same scale
// before it and behind; nothing for others.
struct FoundQuantizedMaxPool {
  MaxPool kernel;
  Operand data;
  Operand result;
};
std::optional<FoundQuantizedMaxPool> quantizedMaxPool(const Ops& ops);

// What follows the sums; nothing if a number of it is not finite. `weight`: the 8-bit constant, as
// (output, ...); `bias`: the constant, or an undefined tensor.
std::optional<QuantizedSums> sumsOf(const FoundQuantized& found, const at::Tensor& weight,
                                    const at::Tensor& bias);

}  // namespace llga
