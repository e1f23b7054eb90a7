// Concatenation, alone or with batch norm, an activation and rounding to 8 bit in one pass over
// memory.
//
//   result[p][c] = f(max(parts[p][c] * scale[c] + shift[c], least))     p: pixels, c: channels
//
// oneDNN needs two primitives for that, of which the first only copies: a third of DenseNet's time
// that is not convolution. Alone, it copies channels-last images pixel by pixel, which takes longer
// where there are few channels.
//
// For channels-last data, where a pixel's channels of one part lie one behind the other. Alone,
// also of any dimension of other data, which oneDNN copies to an order of its own first.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "jit/onednn/runtime/activation.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct ConcatAffine {
  at::ScalarType dtype;           // of parts: float32, bfloat16 or 8-bit numbers (kByte)
  at::ScalarType result;          // the same, or 8-bit numbers; computed in float32
  int64_t pixels;                 // of all images together
  std::vector<int64_t> channels;  // by part
  std::vector<float> scale;       // by channel of the result
  std::vector<float> shift;
  float least;  // of the result: minus infinity without ReLU
  // What is applied to that. Of 8-bit results, which are made of what it gives:
  // result_scale * f(...) + result_shift. Without one, `scale` and `shift` have these in them.
  std::optional<Activation> activation = {};
  float result_scale = 1;
  float result_shift = 0;

  // Dense channels-last memory each; `result` overlaps no part.
  // Needs AVX2 and FMA.
  void run(c10::ArrayRef<const void*> parts, void* to) const;

 private:
  template <typename From, typename To, typename AffineRows>
  void runAs(c10::ArrayRef<const void*> parts, To* to, AffineRows affineRows) const;
  template <typename From, typename AffineRows>
  void runRounded(c10::ArrayRef<const void*> parts, uint8_t* to, AffineRows affineRows) const;
};

// Likewise, but that there may be memory between the pixels of a part.
struct Concat {
  int64_t pixels;
  std::vector<int64_t> words;    // by part: what a pixel's channels are, of 4 bytes each
  std::vector<int64_t> strides;  // by part: from pixel to pixel

  void run(c10::ArrayRef<const void*> parts, void* result) const;
};

// Immutable; likewise. Of rows: the dimension and all behind it, which lie one behind the other in
// each part, while those in front may lie anywhere. The result is dense.
struct ConcatOfRows {
  std::vector<int64_t> sizes;                 // of the dimensions in front
  std::vector<int64_t> bytes;                 // by part: of a row
  std::vector<std::vector<int64_t>> strides;  // by part: of the dimensions in front, in bytes

  void run(c10::ArrayRef<const void*> parts, void* result) const;
};

}  // namespace llga
