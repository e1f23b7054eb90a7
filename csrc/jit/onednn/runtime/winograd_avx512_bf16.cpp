// Compiled for AVX-512 (F, BW, VL, BF16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/winograd_kernel.h"

namespace llga::winograd {

// Costs were measured on Zen 5, with one and two threads, and with 1 and 16 images.
const NarrowKernels avx512_bf16{"avx512_bf16", {10, 16, 8, 0.41, 8, 0.94}, runTask<Bfloat16>};

}  // namespace llga::winograd
