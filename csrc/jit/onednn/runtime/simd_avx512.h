// Included first by each source that is compiled for AVX-512 (F, BW, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>

#define LLGA_VECTOR_WIDTH 16
#define LLGA_VECTOR_INLINE [[gnu::always_inline]] inline

namespace llga {
namespace {

struct Simd {
  using V = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kRows = 12;

  static V load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, V v) { _mm512_storeu_ps(to, v); }
  // The lanes that are set, and 0 in the others; no other memory is read.
  static V loadFirst(const float* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, from);
  }
  static void storeFirst(float* to, V v, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, v); }
  static V broadcast(float number) { return _mm512_set1_ps(number); }
  static V zero() { return _mm512_setzero_ps(); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fmadd(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V fnmadd(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V root(V v) { return _mm512_sqrt_ps(v); }
  static bool isZero(V v) { return _mm512_cmp_ps_mask(v, zero(), _CMP_EQ_OQ) == 0xFFFF; }

  // The lanes whose byte, of sixteen, is not 0.
  static __mmask16 lanesOf(const uint8_t* bytes) {
    const auto wide =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    return _mm512_test_epi32_mask(wide, wide);
  }
  static __mmask16 lanesBefore(int64_t count) {
    return count < kWidth ? static_cast<__mmask16>((1U << count) - 1) : __mmask16{0xFFFF};
  }
  // `a` in these lanes, `b` in the others.
  static V select(__mmask16 lanes, V a, V b) { return _mm512_mask_blend_ps(lanes, b, a); }
};

}  // namespace
}  // namespace llga
