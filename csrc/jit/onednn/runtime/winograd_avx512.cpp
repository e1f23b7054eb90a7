// Compiled for AVX-512 (F).
#include <immintrin.h>

#include <cstdint>

namespace llga::winograd {
namespace {

struct Simd {
  using V = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kRows = 12;

  static V load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, V v) { _mm512_storeu_ps(to, v); }
  static V broadcast(float number) { return _mm512_set1_ps(number); }
  static V zero() { return _mm512_setzero_ps(); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fmadd(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V fnmadd(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static bool isZero(V v) { return _mm512_cmp_ps_mask(v, zero(), _CMP_EQ_OQ) == 0xFFFF; }
};

}  // namespace
}  // namespace llga::winograd

#include "jit/onednn/runtime/winograd_kernel.h"

namespace llga::winograd {

// Costs are a careful guess, for want of such a processor: it multiplies two to three times as fast
// as one with AVX2, and its memory is no faster.
const Kernels avx512{"avx512", kWidth, kPanel, kRows, 24, 24, scratchOf, runTask};

}  // namespace llga::winograd
