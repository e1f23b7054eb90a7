// Compiled for AVX-512 (F, BW, VL, BF16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/vector_loops_kernel.h"

namespace llga::vector_loops {

const Kernels avx512_bf16 = kKernels;

}  // namespace llga::vector_loops
