// Compiled for AVX-512 (F, BW, VL).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/winograd_kernel.h"

namespace llga::winograd {

// Costs were measured on Emerald Rapids, with one and two threads, and with 1 to 16 images.
const Kernels avx512{"avx512",  kWidth,        kPanel, kRows, {24, 8, 0, 1, 24, 0.7},
                     scratchOf, runTask<float>};

}  // namespace llga::winograd
