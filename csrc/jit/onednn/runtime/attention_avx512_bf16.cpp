// Compiled for AVX-512 (F, BW, VL, BF16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga::attention {
namespace {

constexpr const gemm::Kernels& kGemm = gemm::avx512;
constexpr const gemm::NarrowKernels& kNarrowGemm = gemm::avx512_bf16;

}  // namespace
}  // namespace llga::attention

#include "jit/onednn/runtime/attention_kernel.h"

namespace llga::attention {

const Kernels avx512_bf16{"llga_attention:avx512_bf16", kPanel, kFunctions<float>,
                          kNarrowFunctions};

}  // namespace llga::attention
