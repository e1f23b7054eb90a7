// Convolution of 3 x 3 with stride 1 by Winograd's algorithm, with an addend and ReLU, for
// channels-last float32 data: less than half of the multiplications of oneDNN's kernels, or a
// quarter. Rounding errors are within 2.5 times those of eager (docs/performance.md).
//
// winograd_tiles.h has the arithmetic of one task; here the work is divided.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct WinogradConvolution {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal

  int64_t images;
  Pair size;  // of an image
  Pair result_size;
  Pair padding;  // at the top and on the left
  int64_t inputs;
  int64_t outputs;
  bool relu;
  int64_t tile = 0;  // 2 or 4

  struct Data {
    const float* source;
    const float* weight;  // transformed
    const float* plain;   // as transform() got it, dense
    const float* bias;    // or null
    const float* addend;  // like the result, or null; may be the result
    float* result;        // overlaps nothing else
  };

  // Whether there is a kernel for this processor and these channels. All below needs one.
  bool isSupported() const;
  // Of the instruction sets, the one whose kernels run: "avx2" or "avx512".
  static const char* isa();
  // The tile that is expected to be the fastest; 0 where oneDNN's kernel is. Stateless.
  int64_t chooseTile() const;

  // Sizes of the transformed weight: points of a tile, panels, inputs, outputs of a panel.
  std::vector<int64_t> weightSizes() const;
  // From dense (outputs, inputs, 3, 3).
  void transform(const at::Tensor& weight, const at::Tensor& transformed) const;

  // Of a finite weight below 1e30: infinities, NaN and overflows reach the results that they reach
  // in eager.
  void run(const Data& data) const;
};

}  // namespace llga
