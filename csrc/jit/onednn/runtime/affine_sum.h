// Sums that end in 8 bit, of operands that are float32 or 8-bit numbers, each with a batch norm
// maybe:
//
//   result[r][c] = round(f(max(sum over operands of x[r][c] * scale[c] + shift[c], least)) / step)
//                  + zero_point
//
// oneDNN fuses such a sum to one product at most, and none of it to a batch norm of 8-bit numbers,
// which it computes in float32, in an order of its own.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "jit/onednn/runtime/activation.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct AffineSum {
  struct Term {
    bool bytes;                // 8-bit numbers, or float32
    std::vector<float> scale;  // by column
    std::vector<float> shift;
  };

  int64_t count;  // of numbers
  // Of a row: the channels, which lie one behind the other. Where all columns of a term are alike,
  // any number; the last row may be a part of one then.
  int64_t columns;
  std::vector<Term> terms;  // one at least
  float least;              // minus infinity without ReLU
  std::optional<Activation> activation;
  float result_scale;  // 1 / step
  float result_shift;  // the zero point

  // Dense memory each, all in the same order; `to` overlaps no operand.
  // Needs AVX2 and FMA. NaN and infinities give what they give in eager.
  void run(c10::ArrayRef<const void*> operands, uint8_t* to) const;
};

}  // namespace llga
