// Concatenation, alone or with batch norm and ReLU in one pass over memory.
//
//   result[p][c] = max(parts[p][c] * scale[c] + shift[c], least)        p: pixels, c: channels
//
// oneDNN needs two primitives for that, of which the first only copies: a third of DenseNet's time
// that is not convolution. Alone, it copies channels-last images pixel by pixel, which takes longer
// where there are few channels.
//
// For channels-last data, where a pixel's channels of one part lie one behind the other.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct ConcatAffine {
  at::ScalarType dtype;           // of parts and result: float32 or bfloat16; computed in float32
  int64_t pixels;                 // of all images together
  std::vector<int64_t> channels;  // by part
  std::vector<float> scale;       // by channel of the result
  std::vector<float> shift;
  float least;  // 0 with ReLU, minus infinity without

  // Dense channels-last memory each; `result` overlaps no part.
  // Needs AVX2 and FMA.
  void run(c10::ArrayRef<const void*> parts, void* result) const;

 private:
  template <typename T>
  void runAs(c10::ArrayRef<const void*> parts, T* result) const;
};

// Likewise.
struct Concat {
  int64_t pixels;
  std::vector<int64_t> words;  // by part: what a pixel's channels are, of 4 bytes each

  void run(c10::ArrayRef<const void*> parts, void* result) const;
};

}  // namespace llga
