#include "jit/onednn/runtime/activation.h"

#include <ATen/Parallel.h>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

template <typename T>
void activateAll(Activation activation, const T* from, T* to, int64_t count) {
  constexpr int64_t kForOneThread = 16384;
  const auto apply = vector_loops::functions<T>().activate;
  at::parallel_for(0, count, kForOneThread, [&](int64_t begin, int64_t end) {
    apply(activation, from + begin, to + begin, end - begin);
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
