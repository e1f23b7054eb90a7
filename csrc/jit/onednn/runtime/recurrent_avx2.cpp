// Compiled for AVX2 and FMA.
#include "jit/onednn/runtime/simd_avx2.h"

#include "jit/onednn/runtime/recurrent_kernel.h"

namespace llga::recurrent {

const Kernels avx2{kVectorWidth, find};

}  // namespace llga::recurrent
