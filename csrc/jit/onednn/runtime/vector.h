// A register of float32 numbers: reading, writing, exp(). Included by a source that is compiled for
// an instruction set, or has functions that are, behind
//
//   LLGA_VECTOR_WIDTH   numbers of a register
//   LLGA_VECTOR_INLINE  "always inline", and the instruction set if that is not the source's
//
// In an unnamed namespace, so that what one source compiles stays there. Arithmetic, comparisons
// and ?: of these vectors go number by number.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"

namespace llga {

namespace {

constexpr int64_t kVectorWidth = LLGA_VECTOR_WIDTH;
using Vector [[gnu::vector_size(kVectorWidth * sizeof(float))]] = float;
using Bits [[gnu::vector_size(kVectorWidth * sizeof(float))]] = uint32_t;
using Narrow [[gnu::vector_size(kVectorWidth * sizeof(Bfloat16))]] = Bfloat16;

LLGA_VECTOR_INLINE Vector loadVector(const float* from) {
  Vector to;
  __builtin_memcpy(&to, from, sizeof(to));
  return to;
}

LLGA_VECTOR_INLINE Vector loadVector(const Bfloat16* from) {
  Narrow narrow;
  __builtin_memcpy(&narrow, from, sizeof(narrow));
  return reinterpret_cast<Vector>(__builtin_convertvector(narrow, Bits) << 16U);
}

LLGA_VECTOR_INLINE void storeVector(float* to, Vector x) { __builtin_memcpy(to, &x, sizeof(x)); }

// Rounds to the nearest, of two to the even one.
LLGA_VECTOR_INLINE Narrow narrowed(Vector x) {
#if LLGA_VECTOR_WIDTH == 16 && defined(__AVX512BF16__)
  return reinterpret_cast<Narrow>(_mm512_cvtneps_pbh(x));
#else
  const auto bits = reinterpret_cast<Bits>(x);
  const Bits rounded = (bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U;
  return __builtin_convertvector(x == x ? rounded : Bits{} + 0x7FC0U, Narrow);
#endif
}

LLGA_VECTOR_INLINE void storeVector(Bfloat16* to, Vector x) {
  const auto narrow = narrowed(x);
  __builtin_memcpy(to, &narrow, sizeof(narrow));
}

// The first `count` numbers, fewer than a vector, and 0 behind them; nothing else is read.
template <typename T>
LLGA_VECTOR_INLINE Vector loadFirst(const T* from, int64_t count) {
  T numbers[kVectorWidth] = {};
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = from[i];
  }
  return loadVector(numbers);
}

// Likewise; nothing else is written.
template <typename T>
LLGA_VECTOR_INLINE void storeFirst(T* to, Vector x, int64_t count) {
  T numbers[kVectorWidth];
  storeVector(numbers, x);
  for (int64_t i = 0; i < count; ++i) {
    to[i] = numbers[i];
  }
}

#if LLGA_VECTOR_WIDTH == 16  // behind simd_avx512.h
template <>
LLGA_VECTOR_INLINE Vector loadFirst(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(Simd::lanesBefore(count), from);
}

template <>
LLGA_VECTOR_INLINE Vector loadFirst(const Bfloat16* from, int64_t count) {
  const auto narrow = _mm256_maskz_loadu_epi16(Simd::lanesBefore(count), from);
  return reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

template <>
LLGA_VECTOR_INLINE void storeFirst(float* to, Vector x, int64_t count) {
  _mm512_mask_storeu_ps(to, Simd::lanesBefore(count), x);
}

template <>
LLGA_VECTOR_INLINE void storeFirst(Bfloat16* to, Vector x, int64_t count) {
  _mm256_mask_storeu_epi16(to, Simd::lanesBefore(count), reinterpret_cast<__m256i>(narrowed(x)));
}
#else
template <>
LLGA_VECTOR_INLINE Vector loadFirst(const float* from, int64_t count) {
  const auto lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                                        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return _mm256_maskload_ps(from, lanes);
}

// By halves: a store with a mask takes some processors (Zen 3) longer.
template <>
LLGA_VECTOR_INLINE void storeFirst(float* to, Vector x, int64_t count) {
  auto rest = _mm256_castps256_ps128(x);
  if ((count & 4) != 0) {
    _mm_storeu_ps(to, rest);
    rest = _mm256_extractf128_ps(x, 1);
    to += 4;
  }
  if ((count & 2) != 0) {
    _mm_storel_pi(reinterpret_cast<__m64*>(to), rest);
    rest = _mm_movehl_ps(rest, rest);
    to += 2;
  }
  if ((count & 1) != 0) {
    _mm_store_ss(to, rest);
  }
}
#endif

// The greater, or the lesser, of two numbers: b where one of them is NaN.
#if LLGA_VECTOR_WIDTH == 16
LLGA_VECTOR_INLINE Vector maxOrSecond(Vector a, Vector b) { return _mm512_max_ps(a, b); }
LLGA_VECTOR_INLINE Vector minOrSecond(Vector a, Vector b) { return _mm512_min_ps(a, b); }
#else
LLGA_VECTOR_INLINE Vector maxOrSecond(Vector a, Vector b) { return _mm256_max_ps(a, b); }
LLGA_VECTOR_INLINE Vector minOrSecond(Vector a, Vector b) { return _mm256_min_ps(a, b); }
#endif

// NaN stays NaN.
LLGA_VECTOR_INLINE Vector between(float least, Vector x, float most) {
  return minOrSecond(Vector{} + most, maxOrSecond(Vector{} + least, x));
}

// x = exponent * log(2) + rest, |rest| <= log(2) / 2.
struct Reduced {
  Vector power;  // 2 to the exponent; infinity from 128 on
  Vector rest;
};

// For -87 <= x <= 89.
LLGA_VECTOR_INLINE Reduced reduce(Vector x) {
  constexpr float kRound = 12582912.0F;      // 1.5 * 2^23: sums with it have no fraction
  constexpr float kLog2High = 0.693145752F;  // log(2) in two parts, the first with few bits
  constexpr float kLog2Low = 1.42860677e-6F;
  const Vector shifted = x * 1.44269504F + kRound;
  const Vector exponent = shifted - kRound;
  return {reinterpret_cast<Vector>((reinterpret_cast<Bits>(shifted) << 23U) + 0x3F800000U),
          (x - exponent * kLog2High) - exponent * kLog2Low};
}

// exp(rest) - 1, by its Taylor series but for the last coefficients, which make up for the others.
LLGA_VECTOR_INLINE Vector expm1OfRest(Vector rest) {
  Vector tail = 1.3998743e-3F * rest + 8.3680279e-3F;
  tail = tail * rest + 4.1665714e-2F;
  tail = tail * rest + 1.6666507e-1F;
  tail = tail * rest + 0.5F;
  return rest * rest * tail + rest;
}

// Of at least -87: below, it is that of -87.
LLGA_VECTOR_INLINE Vector expOf(Vector x) {
  const auto [power, rest] = reduce(between(-87.0F, x, 89.0F));
  return power * (expm1OfRest(rest) + 1.0F);
}

// exp(x) of differences, none of which is more than 0; 0 for the least ones.
#if LLGA_VECTOR_WIDTH == 16
LLGA_VECTOR_INLINE Vector expOfDifference(Vector x) {
  const Vector power = x * 1.44269504F;
  const auto there = _mm512_cmp_ps_mask(power, _mm512_set1_ps(-126), _CMP_NLT_UQ);  // NaN is
  const Vector whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector rest = power - whole;
  // Of the least largest relative error, 8e-8.
  Vector of_rest = 1.32116035e-3F * rest + 9.67129319e-3F;
  of_rest = of_rest * rest + 5.55090006e-2F;
  of_rest = of_rest * rest + 2.40222529e-1F;
  of_rest = of_rest * rest + 6.93146884e-1F;
  of_rest = of_rest * rest + 1.0F;
  return _mm512_maskz_scalef_ps(there, of_rest, whole);
}
#else
LLGA_VECTOR_INLINE Vector expOfDifference(Vector x) { return x < -87.0F ? Vector{} : expOf(x); }
#endif

}  // namespace
}  // namespace llga
