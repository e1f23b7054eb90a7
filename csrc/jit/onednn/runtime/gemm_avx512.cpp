// Compiled for AVX-512 (F, BW, VL).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/gemm_kernel.h"

namespace llga::gemm {

const Kernels avx512{"avx512",
                     kPanel,
                     kRows,
                     runTask<float, float>,
                     runTask<float, float, Bfloat16>,
                     runTask<float, float, InPlace>};

}  // namespace llga::gemm
