// Pixels of images as the rows of a matrix, for products by AMX: what is multiplied where it lies.
// No PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

namespace llga::amx {

// Of a window, some rows and columns: pieces of memory, of each as many steps, all of the same
// size. Where a row lies side by side it is one piece. All in bytes.
struct Pieces {
  int64_t rows;
  int64_t row_stride;
  int64_t columns;
  int64_t column_stride;
  int64_t steps;
  int64_t step_bytes;
  // Of an output's weights: all of them, those before the first piece, and from row to row.
  int64_t weight_bytes;
  int64_t weight_before = 0;
  int64_t weight_row = 0;

  constexpr int64_t allSteps() const { return rows * columns * steps; }
};

// Lines of a convolution's result, or images of it, each as one line. All strides in bytes.
struct Band {
  const char* source;    // what is under the window of the first pixel
  int64_t pixel_stride;  // from a pixel of the result to the next one
  int64_t line_stride;
  Pieces under;  // each pixel
  int64_t lines;
  int64_t width;  // pixels of a line
  // Lines of the image that one line holds may have a gap between them: so many pixels, and behind
  // each so many that are none of the result's.
  int64_t line = 0;
  int64_t gap = 0;
  // Pixels of the result from one of the image's lines to the next; 0: as many as it has.
  int64_t result_line = 0;
};

namespace {

constexpr int64_t kRows = 16;      // of a tile
constexpr int64_t kRowBytes = 64;  // likewise
constexpr int64_t kOutputs = 16;   // sums of a row of a tile
constexpr int64_t kMostRows = 2 * kRows;
constexpr int64_t kMostOutputs = 2 * kOutputs;
constexpr int64_t kUnit = 4;  // bytes of a source's row that meet an output together

// How the bytes of a source's row are divided into steps: all alike, or as large as a tile with a
// rest, which is copied and filled up with zeros.
struct Steps {
  int64_t count;  // without the rest; one at least
  int64_t bytes;
  int64_t rest;
};

constexpr Steps stepsOf(int64_t bytes) {
  const auto units = bytes / kUnit;
  const auto most = kRowBytes / kUnit;
  const auto fewest = (units + most - 1) / most;
  for (auto count = fewest; count <= fewest + 1; ++count) {
    if (units % count == 0) {
      return {count, bytes / count, 0};
    }
  }
  return {bytes / kRowBytes, kRowBytes, bytes % kRowBytes};
}

}  // namespace
}  // namespace llga::amx
