// Compiled for AVX-512 (F, BW, VL, BF16); the products of bfloat16 are those of AMX.
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga::attention {
namespace {

constexpr const gemm::Kernels& kGemm = gemm::avx512;
constexpr const gemm::NarrowKernels& kNarrowGemm = gemm::amx;

}  // namespace
}  // namespace llga::attention

#include "jit/onednn/runtime/attention_kernel.h"

namespace llga::attention {

const Kernels amx{"llga_attention:amx_bf16", kPanel, kFunctions<float>, kNarrowFunctions};

}  // namespace llga::attention
