// Compiled for AVX2 and FMA.
#include "jit/onednn/runtime/simd_avx2.h"

#include "jit/onednn/runtime/winograd_kernel.h"

namespace llga::winograd {

// Costs were measured on Zen 3, with one and two threads.
const Kernels avx2{"avx2",    kWidth,        kPanel, kRows, {16, 8, 0, 1, 8, 0.75},
                   scratchOf, runTask<float>};

}  // namespace llga::winograd
