// Compiled for AVX2 and FMA.
#include "jit/onednn/runtime/simd_avx2.h"

#include "jit/onednn/runtime/depthwise_kernel.h"

namespace llga::depthwise {

const Kernels avx2{kWidth, find, runRow<Volume, float>, runRow<Volume, Bfloat16>};

}  // namespace llga::depthwise
