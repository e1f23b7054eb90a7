// The arithmetic of a depthwise convolution, on plain memory: what is compiled once for each
// instruction set. No PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/rectifier.h"

namespace llga::depthwise {

// One row of the result, some channels of it, of an image or a volume of these numbers.
template <typename T>
struct RowOf {
  static constexpr int kMostRows = 9;
  const T* source[kMostRows];  // rows under the window; null: outside
  int64_t width;               // of the image
  int64_t source_stride;       // from pixel to pixel
  int64_t channels;            // as many as a vector holds, at least
  const float* weight;         // (window's row, column, channel)
  int64_t weight_stride;       // from column to column
  const float* bias;           // (channel), or null
  float* result;
  int64_t result_stride;  // from pixel to pixel
  int64_t result_width;
  int64_t padding;  // on the left
  Rectifier rectifier;
  int64_t stride = 0;   // of a volume, or a long window: from window to window
  int64_t columns = 0;  // of a long window
  float slope = 1;      // of what is not above 0
};
using Row = RowOf<float>;

// Whether a window is of one row and long, as networks for sound have them.
inline bool isLong(int64_t rows, int64_t columns) { return rows == 1 && columns > 7; }

// What there is for one instruction set.
struct Kernels {
  int64_t width;  // numbers of a vector
  // For windows of 3 x 3, 5 x 5 or 7 x 7, with stride 1 or 2, of 1 x 3, 1 x 5 or 1 x 7 with
  // stride 1, and for long ones; nullptr for others.
  void (*(*find)(int64_t rows, int64_t columns, int64_t stride))(const Row&);
  // For windows of 3 x 3 x 3: a row has nine under it, frame by frame.
  void (*volume)(const RowOf<float>&);
  void (*narrowVolume)(const RowOf<Bfloat16>&);
};

extern const Kernels avx2;
extern const Kernels avx512;

// The best that the processor has and oneDNN was not told to do without. Needs AVX2 and FMA.
const Kernels& kernels();

}  // namespace llga::depthwise
