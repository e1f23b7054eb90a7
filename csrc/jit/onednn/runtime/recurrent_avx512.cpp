// Compiled for AVX-512 (F, BW, VL).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/recurrent_kernel.h"

namespace llga::recurrent {

const Kernels avx512{kVectorWidth, find};

}  // namespace llga::recurrent
