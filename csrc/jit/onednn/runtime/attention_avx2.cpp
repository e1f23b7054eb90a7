// Compiled for AVX2 and FMA.
#include "jit/onednn/runtime/simd_avx2.h"

#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga::attention {
namespace {

constexpr const gemm::Kernels& kGemm = gemm::avx2;

}
}  // namespace llga::attention

#include "jit/onednn/runtime/attention_kernel.h"

namespace llga::attention {

const Kernels avx2{"llga_attention:avx2", kPanel, kFunctions<float>, kFunctions<Bfloat16>};

}  // namespace llga::attention
