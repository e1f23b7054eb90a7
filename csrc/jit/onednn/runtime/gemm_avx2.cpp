// Compiled for AVX2 and FMA.
#include "jit/onednn/runtime/simd_avx2.h"

#include "jit/onednn/runtime/gemm_kernel.h"

namespace llga::gemm {

const Kernels avx2{"avx2",
                   kPanel,
                   kRows,
                   runTask<float, float>,
                   runTask<float, float, Bfloat16>,
                   runTask<float, float, InPlace>};

}  // namespace llga::gemm
