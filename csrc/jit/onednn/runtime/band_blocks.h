// Pixels of images as the rows of a matrix, for products by AMX: what is multiplied where it lies.
// No PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

namespace llga::amx {

// Lines of a convolution's result, or images of it, each as one line. Under each pixel's window lie
// `pieces`, rows of the window, and of each as many steps, all of the same size. All strides in
// bytes.
struct Band {
  const char* source;    // what is under the window of the first pixel
  int64_t pixel_stride;  // from a pixel of the result to the next one
  int64_t line_stride;
  int64_t pieces;
  int64_t piece_stride;
  int64_t steps;  // of a piece
  int64_t step_bytes;
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

// Of a pixel's row of the matrix.
constexpr int64_t bytesUnder(const Band& band) {
  return band.pieces * band.steps * band.step_bytes;
}

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
