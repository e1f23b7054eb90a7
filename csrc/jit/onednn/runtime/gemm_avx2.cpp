// Compiled for AVX2 and FMA.
#include <immintrin.h>

#include <cstdint>

namespace llga::gemm {
namespace {

struct Simd {
  using V = __m256;
  static constexpr int64_t kWidth = 8;
  static constexpr int kRows = 6;

  static V load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, V v) { _mm256_storeu_ps(to, v); }
  static V broadcast(float number) { return _mm256_set1_ps(number); }
  static V zero() { return _mm256_setzero_ps(); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V fmadd(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
};

}  // namespace
}  // namespace llga::gemm

#include "jit/onednn/runtime/gemm_kernel.h"

namespace llga::gemm {

const Kernels avx2{"avx2", kPanel, kRows, runTask};

}  // namespace llga::gemm
