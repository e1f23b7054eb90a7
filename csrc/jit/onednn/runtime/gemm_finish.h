// What follows the sums of a matrix product of bfloat16, block by block, while they are in a cache:
// bias, addend, rectifier or activation, factor. Included behind gemm_kernel.h.
#pragma once

#include "jit/onednn/runtime/activations.h"
#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga::gemm {
namespace {

// Of a block of results: rows by outputs of one panel, of which the sums of a row are kPanel apart.
struct Block {
  int64_t row;
  int64_t rows;
  int64_t output;
  int64_t outputs;
};

struct Identity {
  LLGA_VECTOR_INLINE static V of(V x) { return x; }
};

// What follows the sums of a register of outputs that all are there.
template <typename Function, Rectifier rectifier, typename R>
LLGA_VECTOR_INLINE V finished(V sum, V bias, const R* addend, const R* factor) {
  sum = Simd::add(sum, bias);
  if (addend != nullptr) {
    sum = Simd::add(sum, load(addend));
  }
  const V result = Function::of(rectified(sum, rectifier));
  return factor == nullptr ? result : result * load(factor);
}

template <typename R>
LLGA_VECTOR_INLINE const R* further(const R* numbers, int64_t count) {
  return numbers == nullptr ? nullptr : numbers + count;
}

LLGA_VECTOR_INLINE void storePair(float* to, V first, V second) {
  store(to, first);
  store(to + kWidth, second);
}

LLGA_VECTOR_INLINE void storePair(Bfloat16* to, V first, V second) {
  _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}

// Likewise those of a panel, row by row, as they lie in memory.
template <typename Function, Rectifier rectifier, typename R>
void finishPanel(const ProblemOf<Bfloat16, R>& p, const Block& block, const float* sums) {
  const auto o = block.output;
  const auto first = p.bias == nullptr ? Simd::zero() : load(p.bias + o);
  const auto second = p.bias == nullptr ? Simd::zero() : load(p.bias + o + kWidth);
  const auto at = block.row * p.outputs + o;
  const auto* addend = further(p.addend, at);
  const auto* factor = further(p.factor, at);
  auto* result = p.result + at;
  for (int64_t r = 0; r < block.rows; ++r, sums += kPanel, result += p.outputs) {
    storePair(result, finished<Function, rectifier>(load(sums), first, addend, factor),
              finished<Function, rectifier>(load(sums + kWidth), second, further(addend, kWidth),
                                            further(factor, kWidth)));
    addend = further(addend, p.outputs);
    factor = further(factor, p.outputs);
  }
}

// What follows the sums of a block, to the result.
template <typename Function, typename R>
void finishRows(const ProblemOf<Bfloat16, R>& p, const Block& block, const float* sums) {
  if (block.outputs == kPanel) {
    switch (p.rectifier) {
      case Rectifier::none:
        return finishPanel<Function, Rectifier::none>(p, block, sums);
      case Rectifier::relu:
        return finishPanel<Function, Rectifier::relu>(p, block, sums);
      case Rectifier::relu6:
        return finishPanel<Function, Rectifier::relu6>(p, block, sums);
      case Rectifier::hardswish:
        return finishPanel<Function, Rectifier::hardswish>(p, block, sums);
    }
  }
  for (int64_t i = 0; i < block.outputs; i += kWidth) {
    const auto left = block.outputs - i;
    const bool whole = left >= kWidth;
    const auto o = block.output + i;
    const auto bias = p.bias == nullptr ? Simd::zero()
                      : whole           ? load(p.bias + o)
                                        : loadFirst(p.bias + o, left);
    for (int64_t r = 0; r < block.rows; ++r) {
      const auto at = (block.row + r) * p.outputs + o;
      // Behind those that count may be numbers of any kind, and denormal ones take long.
      const auto* from = sums + r * kPanel + i;
      auto sum = Simd::add(whole ? load(from) : loadFirst(from, left), bias);
      if (p.addend != nullptr) {
        sum = Simd::add(sum, whole ? load(p.addend + at) : loadFirst(p.addend + at, left));
      }
      sum = Function::of(rectified(sum, p.rectifier));
      if (p.factor != nullptr) {
        sum = sum * (whole ? load(p.factor + at) : loadFirst(p.factor + at, left));
      }
      if (whole) {
        store(p.result + at, sum);
      } else {
        storeFirst(p.result + at, sum, left);
      }
    }
  }
}

template <typename R>
using Finish = void (*)(const ProblemOf<Bfloat16, R>&, const Block&, const float* sums);

Finish<Bfloat16> finishWith(Activation activation) {
  switch (activation) {
    case Activation::sigmoid:
      return finishRows<Sigmoid, Bfloat16>;
    case Activation::silu:
      return finishRows<Silu, Bfloat16>;
    case Activation::tanh:
      return finishRows<Tanh, Bfloat16>;
    case Activation::gelu:
      return finishRows<Gelu, Bfloat16>;
    default:
      return finishRows<TanhGelu, Bfloat16>;
  }
}

}  // namespace
}  // namespace llga::gemm
