// Activations of a register of float32 numbers. Included behind vector.h, by sources for one
// instruction set; NaN and infinities give what they give in eager.
#pragma once

#include "jit/onednn/runtime/vector.h"

namespace llga {
namespace {

// Of at least 1; of what is too large for a number, it may be NaN.
LLGA_VECTOR_INLINE Vector reciprocal(Vector x) {
#if LLGA_VECTOR_WIDTH == 16
  const Vector rough = _mm512_rcp14_ps(x);  // a division takes as long as all of a polynomial
  return rough * (2.0F - x * rough);
#else
  return 1.0F / x;
#endif
}

struct Sigmoid {
  LLGA_VECTOR_INLINE static Vector of(Vector x) { return 1.0F / (1.0F + expOf(-x)); }
};

struct Silu {
  LLGA_VECTOR_INLINE static Vector of(Vector x) { return x / (1.0F + expOf(-x)); }
};

struct Tanh {
  LLGA_VECTOR_INLINE static Vector of(Vector x) {
    const auto [power, rest] = reduce(between(-40.0F, 2.0F * x, 40.0F));
    const Vector expm1 = power * expm1OfRest(rest) + (power - 1.0F);  // all digits, near zero too
    return expm1 / (expm1 + 2.0F);
  }
};

// x / 2 * (1 + erf(x / sqrt(2))), where the erf is x * p(x^2) / q(x^2), fitted for |x| <= 5.5 with
// an error of 2e-8; beyond, it is 1 or -1 in float32.
struct Gelu {
  LLGA_VECTOR_INLINE static Vector of(Vector x) {
    const Vector square = x * x;
    Vector p = 4.58624855e-8F * square + 1.26031528e-5F;
    p = p * square + 3.29144473e-4F;
    p = p * square + 9.30294581e-3F;
    p = p * square + 6.69174939e-2F;
    p = p * square + 7.97884524e-1F;
    Vector q = 1.19902984e-6F * square + 7.21665347e-5F;
    q = q * square + 1.86063745e-3F;
    q = q * square + 2.84160469e-2F;
    q = q * square + 2.50535041e-1F;
    q = q * square + 1.0F;
    Vector erf = x * p * reciprocal(q);
    erf = x > 5.5F ? Vector{} + 1.0F : erf;
    erf = x < -5.5F ? Vector{} - 1.0F : erf;
    const Vector half = 0.5F * x;
    return half * erf + half;
  }
};

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct TanhGelu {
  LLGA_VECTOR_INLINE static Vector of(Vector x) { return x / (1.0F + expOf(-twice(x))); }

  // 2 u
  LLGA_VECTOR_INLINE static Vector twice(Vector x) {
    return x * (x * x * 0.0713548163F + 1.59576912F);
  }
};

}  // namespace
}  // namespace llga
