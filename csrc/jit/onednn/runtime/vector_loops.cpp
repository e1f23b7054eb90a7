#include "jit/onednn/runtime/vector_loops.h"

#include "jit/onednn/runtime/engine.h"

namespace llga::vector_loops {

const Kernels& kernels() {
  static const Kernels& best = !usesAvx512() ? avx2 : usesAvx512Bf16() ? avx512_bf16 : avx512;
  return best;
}

template <>
const Functions<float>& functions() {
  return kernels().wide;
}

template <>
const Functions<Bfloat16>& functions() {
  return kernels().narrow;
}

}  // namespace llga::vector_loops
