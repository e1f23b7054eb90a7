// Numbers of 8 bit as registers of float32 ones. For sources that are compiled for one instruction
// set, behind its Simd and vector.h.
#pragma once

#include "jit/onednn/runtime/vector.h"

namespace llga {

namespace {

using Bytes [[gnu::vector_size(kVectorWidth)]] = uint8_t;

LLGA_VECTOR_INLINE Vector loadVector(const uint8_t* from) {
#if LLGA_VECTOR_WIDTH == 16  // the compiler would convert number by number
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#endif
}

// Cut off at 0 and 255, and rounded to the nearest, of two to the even one; NaN becomes 255.
LLGA_VECTOR_INLINE Bytes bytesOf(Vector x) {
  constexpr float kMost = 255;
#if LLGA_VECTOR_WIDTH == 16
  const auto integers = _mm512_cvtps_epi32(_mm512_min_ps(x, _mm512_set1_ps(kMost)));
  return reinterpret_cast<Bytes>(
      _mm512_cvtusepi32_epi8(_mm512_max_epi32(integers, _mm512_setzero_si512())));
#else
  const auto integers = _mm256_cvtps_epi32(_mm256_min_ps(x, _mm256_set1_ps(kMost)));
  const auto words =
      _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  const auto bytes = _mm_packus_epi16(words, words);
  Bytes eight;
  __builtin_memcpy(&eight, &bytes, sizeof(eight));
  return eight;
#endif
}

LLGA_VECTOR_INLINE void storeVector(uint8_t* to, Vector x) {
  const auto bytes = bytesOf(x);
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}

// The first `count` numbers, fewer than a vector, and 0 behind them; nothing else is read.
LLGA_VECTOR_INLINE Vector loadFirst(const uint8_t* from, int64_t count) {
#if LLGA_VECTOR_WIDTH == 16
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(Simd::lanesBefore(count), from)));
#else
  uint8_t numbers[kVectorWidth] = {};
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = from[i];
  }
  return loadVector(numbers);
#endif
}

// Likewise; nothing else is written.
LLGA_VECTOR_INLINE void storeFirst(uint8_t* to, Vector x, int64_t count) {
  const auto bytes = bytesOf(x);
#if LLGA_VECTOR_WIDTH == 16
  _mm_mask_storeu_epi8(to, Simd::lanesBefore(count), reinterpret_cast<__m128i>(bytes));
#else
  for (int64_t i = 0; i < count; ++i) {
    to[i] = bytes[i];
  }
#endif
}

}  // namespace
}  // namespace llga
