// Compiled for AVX-512 (F, BW, VL).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/vector_loops_kernel.h"

namespace llga::vector_loops {

const Kernels avx512 = kKernels;

}  // namespace llga::vector_loops
