// The arithmetic of a convolution in small groups of bfloat16 images, on plain memory. No PyTorch,
// no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"

namespace llga::grouped {

// Channels that are computed together: some groups, and zeros in the weight between two of them.
constexpr int64_t kBlock = 16;

// Pixels of one row of the result, one block of channels.
struct Row {
  const Bfloat16*
      source;            // where the first pixel's window begins: (row, pixel, channel of a block)
  int64_t source_row;    // numbers from one row of a window to the next
  int64_t source_pixel;  // from one window to the next
  int64_t window_rows;
  int64_t window_columns;
  const Bfloat16* weight;  // (row, column, pair of inputs, output, input of the pair)
  const float* bias;       // or null
  bool relu;
  Bfloat16* result;
  int64_t result_pixel;  // numbers from one pixel to the next
  int64_t pixels;
};

struct Kernels {
  // Copies a block of channels of some pixels, `stride` numbers apart, one behind the other.
  // Returns whether all are finite.
  bool (*copy)(const Bfloat16* from, int64_t stride, int64_t pixels, Bfloat16* to);
  // Numbers that are not finite would reach the other groups of a block.
  void (*run)(const Row& row);
};

extern const Kernels amx;

}  // namespace llga::grouped
