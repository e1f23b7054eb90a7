// Squeeze and excitation of 8-bit images in one step, as excitation.h has it for others:
//
//   mean[c]      = rounded(mean of data[.][c])
//   hidden[h]    = rounded(activation of (squeeze(mean))[h])
//   gate[c]      = outer(excite(hidden)[c])
//   result[p][c] = rounded(data[p][c] * gate[c])                        p: pixels, c: channels
//
// oneDNN has a reference kernel for the mean, and writes the data as float32 numbers before it
// multiplies them. For channels-last data.
#pragma once

#include <cstdint>
#include <optional>

#include "jit/onednn/runtime/quantized_linear.h"
#include "jit/onednn/runtime/reduction.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct QuantizedExcitation {
  struct Data {
    const uint8_t* data;
    const int8_t* squeeze;  // weights, as QuantizedLinear::ordered() made them
    const int8_t* excite;
    uint8_t* result;  // may be `data`
  };

  // min(max(alpha * x + beta, 0), 1)
  struct Line {
    float alpha;
    float beta;
  };

  Reduction mean;             // of the images
  QuantizedLinear squeeze;    // of one row each
  QuantizedLinear excite;     // to float32
  std::optional<Line> outer;  // none: it is in `excite`
  float scale = 1;            // from the data's numbers to the result's, but for the gate
  float data_zero_point = 0;
  float result_zero_point = 0;

  // Whether there are kernels for it. All below needs them.
  bool isSupported() const { return squeeze.isSupported() && excite.isSupported(); }

  void run(const Data& data) const;

 private:
  void runImage(const uint8_t* from, const Data& data, uint8_t* to) const;
};

}  // namespace llga
