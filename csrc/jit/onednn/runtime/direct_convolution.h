// Convolution of float32 images that are few and small, or have few channels, with an addend and an
// activation, on processors with AVX2 or AVX-512: where the arithmetic takes less time than a call
// of oneDNN around it, or than oneDNN's kernels take to read a few planes.
//
// A row of the result is one matrix product: the window's columns and channels of each pixel lie
// one behind the other, and so do those of the next pixel, some numbers further. What is padded, or
// lies in another order, is copied first, a few rows at a time. gemm_blocks.h has the arithmetic.
#pragma once

#include <array>
#include <cstdint>

#include "jit/onednn/runtime/linear.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct DirectConvolution {
  using Pair = std::array<int64_t, 2>;     // vertical, horizontal
  using Strides = std::array<int64_t, 4>;  // from image to image, channel, row and column

  int64_t images;
  Pair size;  // of an image
  Pair result_size;
  Pair window;
  Pair stride;
  Pair padding;  // at the top and on the left
  int64_t inputs;
  int64_t outputs;
  Rectifier rectifier;
  bool silu = false;  // behind all else
  Strides source_strides{};
  Strides result_strides{};  // channels last or contiguous

  struct Data {
    const float* source;
    const float* weight;  // in panels, of matrix()
    const float* bias;    // or null
    const float* addend;  // like the result, which is channels last then; or null
    float* result;        // may be the addend; overlaps nothing else
  };

  // Whether the weights are few, and what is copied finds room. All below needs it.
  bool isSupported() const;
  // Whether it is expected to be faster than oneDNN's kernels: the work is small, or the channels
  // are few.
  bool pays() const;
  // Whether a call of oneDNN takes longer than the arithmetic. Beyond, its kernels are as fast or
  // faster, but for few planes.
  bool isSmall() const;
  // Whether few channels meet a wide window. oneDNN has no kernel for that on AVX2: it writes down
  // what is under each window, and multiplies that.
  bool isWide() const;
  // Whether results do that lie this way. run() needs it.
  bool fits() const;
  // The product of which a row of the result is a part; its weight is (window's row, column, input)
  // by outputs.
  Linear matrix() const;
  // Whether results lie as they are computed.
  bool isChannelsLast() const;

  // The weight is the one of matrix().
  void run(const Data& data) const;
};

}  // namespace llga
