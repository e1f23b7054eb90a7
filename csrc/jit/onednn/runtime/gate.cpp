#include "jit/onednn/runtime/gate.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Pixels one behind the other.
void load(const float* from, int64_t pixels, int64_t channels, int64_t stride, float* to) {
  vector_loops::kernels().copyRows(from, pixels, channels, stride, to, channels);
}

void load(const Bfloat16* from, int64_t pixels, int64_t channels, int64_t stride, float* to) {
  vector_loops::kernels().widenRows(from, pixels, channels, stride, to);
}

// `a` may be written to.
void multiply(float* a, const float* b, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = a[i] * b[i];
  }
}

void multiply(float* a, const float* b, int64_t count, Bfloat16* to) {
  multiply(a, b, count, a);
  vector_loops::kernels().narrowRows(a, 1, count, to, count);
}

}  // namespace

template <typename T>
void Gate::runAll(const T* a, const T* b, T* to) const {
  constexpr int64_t kBlock = 1 << 11;   // numbers; those of both parts stay in the first cache
  constexpr int64_t kForOne = 1 << 12;  // that are not worth a second thread
  const auto most = std::max<int64_t>(1, kBlock / channels);
  at::parallel_for(0, images * pixels, std::max<int64_t>(1, kForOne / channels),
                   [&](int64_t begin, int64_t end) {
                     std::vector<float> memory(2 * most * channels);
                     float* factors[] = {memory.data(), memory.data() + most * channels};
                     while (begin < end) {
                       const auto image = begin / pixels;
                       const auto pixel = begin % pixels;
                       const auto rows = std::min({most, end - begin, pixels - pixel});
                       const auto count = rows * channels;
                       for (const size_t i : {0, 1}) {
                         const auto& part = parts[i];
                         const auto at = image * part.image_stride + pixel * part.pixel_stride;
                         load((i == 0 ? a : b) + at, rows, channels, part.pixel_stride, factors[i]);
                         if (part.activation) {
                           vector_loops::kernels().wide.activate(*part.activation, factors[i],
                                                                 factors[i], count);
                         }
                       }
                       multiply(factors[0], factors[1], count, to + begin * channels);
                       begin += rows;
                     }
                   });
}

void Gate::run(const float* a, const float* b, float* to) const { runAll(a, b, to); }

void Gate::run(const Bfloat16* a, const Bfloat16* b, Bfloat16* to) const { runAll(a, b, to); }

}  // namespace llga
