// Compiled for AVX-512 (F, BW, VL).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/depthwise_kernel.h"

namespace llga::depthwise {

const Kernels avx512{kWidth, find, runRow<Volume, float>, runRow<Volume, Bfloat16>};

}  // namespace llga::depthwise
