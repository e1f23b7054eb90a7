// Squeeze and excitation, as in MobileNetV3, EfficientNet and RegNetY, in one step:
//
//   mean[c]      = mean of data[.][c]
//   hidden[h]    = inner(squeeze_bias[h] + sum of squeeze[h][.] * mean[.])
//   gate[c]      = outer(excite_bias[c] + sum of excite[c][.] * hidden[.])
//   result[p][c] = data[p][c] * gate[c]                                 p: pixels, c: channels
//
// oneDNN needs four primitives for it in three partitions, all but the last too small to be worth
// their calls. For channels-last data, where a pixel's channels lie one behind the other.
#pragma once

#include <cstdint>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct Excitation {
  enum class Type { float32, bfloat16 };
  enum class Inner { relu, silu };

  struct Data {
    const void* data;
    const void* squeeze;        // hidden x channels
    const float* squeeze_bias;  // null: none
    const void* excite;         // channels x hidden
    const float* excite_bias;   // null: none
    void* result;               // may be `data`
  };

  Type type = Type::float32;  // of all but biases; the arithmetic is in float32
  int64_t images = 0;
  int64_t pixels = 0;  // of an image
  int64_t channels = 0;
  int64_t hidden = 0;
  Inner inner = Inner::relu;
  // The gate is a sigmoid, or else min(max(alpha * x + beta, 0), 1).
  bool sigmoid = true;
  float alpha = 0;
  float beta = 0;

  void run(const Data& data) const;

 private:
  template <typename T>
  void runAs(const Data& data) const;
  template <typename T>
  void runImage(const T* from, const Data& data, T* to) const;
};

}  // namespace llga
