// Included first by each source that is compiled for AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace llga {
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
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fmadd(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V fnmadd(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static bool isZero(V v) {
    return _mm256_movemask_ps(_mm256_cmp_ps(v, zero(), _CMP_EQ_OQ)) == 0xFF;
  }
};

}  // namespace
}  // namespace llga
