#include "jit/onednn/runtime/activation.h"

#include <ATen/Parallel.h>

#include <cstring>

#define LLGA_VECTOR_WIDTH 8
#define LLGA_VECTOR_INLINE [[gnu::target("avx2,fma"), gnu::always_inline]] inline
#include "jit/onednn/runtime/vector.h"

namespace llga {
namespace {

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
    Vector erf = x * p / q;
    erf = x > 5.5F ? Vector{} + 1.0F : erf;
    erf = x < -5.5F ? Vector{} - 1.0F : erf;
    const Vector half = 0.5F * x;
    return half * erf + half;
  }
};

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct TanhGelu {
  LLGA_VECTOR_INLINE static Vector of(Vector x) {
    const Vector twice = x * (x * x * 0.0713548163F + 1.59576912F);
    return x / (1.0F + expOf(-twice));
  }
};

template <typename Function, typename T>
[[gnu::target("avx2,fma")]] void apply(const T* from, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + kVectorWidth <= count; i += kVectorWidth) {
    storeVector(to + i, Function::of(loadVector(from + i)));
  }
  if (i < count) {
    const auto rest = static_cast<size_t>(count - i) * sizeof(T);
    T numbers[kVectorWidth] = {};
    std::memcpy(numbers, from + i, rest);
    storeVector(numbers, Function::of(loadVector(numbers)));
    std::memcpy(to + i, numbers, rest);
  }
}

template <typename T>
void activateAll(Activation activation, const T* from, T* to, int64_t count) {
  constexpr int64_t kForOneThread = 16384;
  at::parallel_for(0, count, kForOneThread, [&](int64_t begin, int64_t end) {
    const auto* source = from + begin;
    auto* target = to + begin;
    switch (activation) {
      case Activation::sigmoid:
        return apply<Sigmoid>(source, target, end - begin);
      case Activation::silu:
        return apply<Silu>(source, target, end - begin);
      case Activation::tanh:
        return apply<Tanh>(source, target, end - begin);
      case Activation::gelu:
        return apply<Gelu>(source, target, end - begin);
      case Activation::tanh_gelu:
        return apply<TanhGelu>(source, target, end - begin);
    }
  });
}

}  // namespace

void activate(Activation activation, const float* from, float* to, int64_t count) {
  activateAll(activation, from, to, count);
}

void activate(Activation activation, const Bfloat16* from, Bfloat16* to, int64_t count) {
  activateAll(activation, from, to, count);
}

}  // namespace llga
