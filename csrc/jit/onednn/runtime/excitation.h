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
  enum class Inner { relu, silu };

  struct Data {
    const float* data;
    const float* squeeze;       // hidden x channels
    const float* squeeze_bias;  // null: none
    const float* excite;        // channels x hidden
    const float* excite_bias;   // null: none
    float* result;              // may be `data`
  };

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
  void runImage(const Data& data) const;
};

}  // namespace llga
