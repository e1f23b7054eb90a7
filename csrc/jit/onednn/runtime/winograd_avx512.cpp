// Compiled for AVX-512 (F, BW, VL).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/winograd_kernel.h"

namespace llga::winograd {

// Costs are a careful guess, for want of such a processor: it multiplies two to three times as fast
// as one with AVX2, and its memory is no faster.
const Kernels avx512{"avx512",  kWidth,        kPanel, kRows, {24, 24, 0, 1, 24, 0.75},
                     scratchOf, runTask<float>};

}  // namespace llga::winograd
