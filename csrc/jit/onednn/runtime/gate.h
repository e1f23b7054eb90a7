// Products of two images, each of them behind an activation maybe, which are parts of the channels
// of another one as a rule:
//
//   result[r][c] = f(a[r][c]) * g(b[r][c])
//
// oneDNN reads no parts, and applies one activation at most in a pass.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/bfloat16.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct Gate {
  struct Part {
    int64_t image_stride;
    int64_t pixel_stride;
    std::optional<Activation> activation;
  };

  int64_t images;
  int64_t pixels;    // of each
  int64_t channels;  // of each pixel, one behind the other
  std::array<Part, 2> parts;

  // `to` is dense and overlaps nothing else. bfloat16 is computed in float32, and rounded once.
  // Needs AVX2 and FMA.
  void run(const float* a, const float* b, float* to) const;
  void run(const Bfloat16* a, const Bfloat16* b, Bfloat16* to) const;

 private:
  template <typename T>
  void runAll(const T* a, const T* b, T* to) const;
};

}  // namespace llga
