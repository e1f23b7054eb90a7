// What the numbers of a register come to. For sources that are compiled for one instruction set,
// behind vector.h.
#pragma once

#include "jit/onednn/runtime/vector.h"

namespace llga {

namespace {

// Of all numbers of a register, half by half.
template <typename Combine>
float reduced(Vector x, const Combine& combine) {
#if LLGA_VECTOR_WIDTH == 16
  x = combine(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                         0, 1, 2, 3, 4, 5, 6, 7));
  x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3,  //
                                         12, 13, 14, 15, 8, 9, 10, 11));
  x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5,  //
                                         10, 11, 8, 9, 14, 15, 12, 13));
  x = combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6,  //
                                         9, 8, 11, 10, 13, 12, 15, 14));
#else
  x = combine(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = combine(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  x = combine(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
  return x[0];
}

float sumOf(Vector x) {
  return reduced(x, [](Vector a, Vector b) -> Vector { return a + b; });
}

}  // namespace
}  // namespace llga
