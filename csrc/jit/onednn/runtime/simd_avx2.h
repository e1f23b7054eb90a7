// Included first by each source that is compiled for AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define LLGA_VECTOR_WIDTH 8
#define LLGA_VECTOR_INLINE [[gnu::always_inline]] inline

namespace llga {
namespace {

struct Simd {
  using V = __m256;
  static constexpr int64_t kWidth = 8;
  static constexpr int kRows = 6;

  static V load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, V v) { _mm256_storeu_ps(to, v); }
  // The lanes that are set, and 0 in the others; no other memory is read.
  static V loadFirst(const float* from, __m256i lanes) { return _mm256_maskload_ps(from, lanes); }
  static void storeFirst(float* to, V v, __m256i lanes) { _mm256_maskstore_ps(to, lanes, v); }
  static V broadcast(float number) { return _mm256_set1_ps(number); }
  static V zero() { return _mm256_setzero_ps(); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fmadd(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V fnmadd(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V root(V v) { return _mm256_sqrt_ps(v); }
  static bool isZero(V v) {
    return _mm256_movemask_ps(_mm256_cmp_ps(v, zero(), _CMP_EQ_OQ)) == 0xFF;
  }

  // All bits of the lanes whose byte, of eight, is not 0.
  static __m256i lanesOf(const uint8_t* bytes) {
    const auto wide =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    return _mm256_cmpgt_epi32(wide, _mm256_setzero_si256());
  }
  static __m256i lanesBefore(int64_t count) {
    const auto end = static_cast<int32_t>(count < kWidth ? count : kWidth);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(end), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  // `a` in these lanes, `b` in the others.
  static V select(__m256i lanes, V a, V b) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(lanes));
  }
};

}  // namespace
}  // namespace llga
