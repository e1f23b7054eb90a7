// Convolution of 3 x 3 with stride 1 by Winograd's algorithm, with SiLU, an addend and ReLU, for
// channels-last data of float32, or of bfloat16 with AVX-512's instructions for it: less than half
// of the multiplications of oneDNN's kernels, or a quarter, all of them of float32. In float32,
// rounding errors are within 2.5 times those of eager (docs/performance.md); in bfloat16 the
// result's own is all there is.
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
  bool silu;             // before the addend
  bool relu;             // behind it
  at::ScalarType dtype;  // of data, plain weight, addend and result: float32 or bfloat16
  int64_t tile = 0;      // 2 or 4

  struct Data {
    const void* source;
    const float* weight;  // transformed
    const void* plain;    // as transform() got it, dense
    const float* bias;    // or null
    const void* addend;   // like the result, or null; may be the result
    void* result;         // overlaps nothing else
  };

  // Whether there is a kernel for this processor, type and channels. All below needs one.
  bool isSupported() const;
  // Of the instruction sets, the one whose kernels run: "avx2", "avx512" or "avx512_bf16".
  const char* isa() const;
  // The tile that is expected to be the fastest; 0 where oneDNN's kernel is. Stateless.
  int64_t chooseTile() const;

  // Sizes of the transformed weight: points of a tile, panels, inputs, outputs of a panel.
  std::vector<int64_t> weightSizes() const;
  // From dense (outputs, inputs, 3, 3), to float32.
  void transform(const at::Tensor& weight, const at::Tensor& transformed) const;

  // Of a finite weight below 1e30: infinities, NaN and overflows reach the results that they reach
  // in eager.
  void run(const Data& data) const;

 private:
  template <typename T, typename Run>
  void runAs(const Data& data, const Run& runTask) const;
};

}  // namespace llga
