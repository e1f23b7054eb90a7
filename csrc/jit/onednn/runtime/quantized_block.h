// A depthwise convolution of 8-bit images, maybe with a pointwise one before it and another one
// behind it, as in the blocks of MobileNets, in one step:
//
//   expanded  = source, or rounded(activation of pointwise(source))
//   result    = rounded(activation of depthwise(expanded)), or
//               rounded(activation of (projection(rounded(depthwise ...)) + addend))
//
// All numbers that oneDNN's kernels would write are rounded here as well; they are in the caches.
// For channels-last data, unsigned, with signed weights that are symmetric.
//
// quantized_blocks.h has the arithmetic of one task; here the work is divided.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "jit/onednn/runtime/quantized_linear.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct QuantizedBlock {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal
  // Convolutions: pointwise, depthwise, projection.
  static constexpr size_t kMost = 3;

  int64_t images = 0;
  Pair size{};         // of an image
  Pair result_size{};  // of a result
  int64_t inputs = 0;  // of the first pointwise convolution; 0: there is none
  int64_t channels = 0;
  int64_t window = 0;  // both ways
  int64_t stride = 0;
  int64_t padding = 0;     // at the top and on the left
  int64_t outputs = 0;     // of the projection; 0: there is none
  uint8_t zero_point = 0;  // of what the depthwise convolution reads
  std::array<QuantizedSums, kMost> sums;

  struct Data {
    const uint8_t* source;
    std::array<const int8_t*, kMost> weights;  // in the order of ordered()
    const uint8_t* addend;                     // like the result, or null; may be the result
    uint8_t* result;                           // overlaps nothing else
  };

  // Whether there is a kernel for this processor and these numbers. All below needs one.
  bool isSupported() const;
  // The 8-bit weight of a convolution in the order in which the kernels read it; that of a
  // depthwise one maybe in 16 bit.
  static at::Tensor ordered(size_t convolution, const at::Tensor& weight);
  void run(const Data& data) const;
};

}  // namespace llga
