// Compiled for AVX-512 (F, BW, VL, BF16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/gemm_kernel.h"

namespace llga::gemm {

const NarrowKernels avx512_bf16{
    kPanel, kRows, runTask<Bfloat16, float>, runTask<Bfloat16, Bfloat16>, nullptr, nullptr};

}  // namespace llga::gemm
