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

}  // namespace
}  // namespace llga
