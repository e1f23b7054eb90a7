// Compiled for AVX2 and FMA.
#include "jit/onednn/runtime/simd_avx2.h"

#include "jit/onednn/runtime/vector_loops_kernel.h"

namespace llga::vector_loops {

const Kernels avx2 = kKernels;

}  // namespace llga::vector_loops
