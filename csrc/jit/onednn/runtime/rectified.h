// Included by sources for one instruction set, behind its Simd.
#pragma once

#include "jit/onednn/runtime/rectifier.h"

namespace llga {
namespace {

// NaN stays NaN.
LLGA_VECTOR_INLINE Simd::V rectified(Simd::V x, Rectifier rectifier) {
  switch (rectifier) {
    case Rectifier::relu:
      return Simd::max(Simd::zero(), x);
    case Rectifier::relu6:
      return Simd::min(Simd::broadcast(6), Simd::max(Simd::zero(), x));
    case Rectifier::hardswish: {
      const auto line = Simd::add(x, Simd::broadcast(3));
      const auto bent = Simd::min(Simd::broadcast(6), Simd::max(Simd::zero(), line));
      return Simd::mul(Simd::mul(x, bent), Simd::broadcast(1.0F / 6));
    }
    default:
      return x;
  }
}

template <Rectifier rectifier, int rows, int vectors>
LLGA_VECTOR_INLINE void rectifyAs(Simd::V (&numbers)[rows][vectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      numbers[r][v] = rectified(numbers[r][v], rectifier);
    }
  }
}

// All of them, after one branch.
template <int rows, int vectors>
LLGA_VECTOR_INLINE void rectify(Simd::V (&numbers)[rows][vectors], Rectifier rectifier) {
  switch (rectifier) {
    case Rectifier::relu:
      return rectifyAs<Rectifier::relu>(numbers);
    case Rectifier::relu6:
      return rectifyAs<Rectifier::relu6>(numbers);
    case Rectifier::hardswish:
      return rectifyAs<Rectifier::hardswish>(numbers);
    default:
      return;
  }
}

}  // namespace
}  // namespace llga
