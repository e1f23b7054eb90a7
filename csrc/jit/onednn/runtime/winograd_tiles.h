// The arithmetic of winograd.h for one task, on plain memory: what is compiled once for each
// instruction set. No PyTorch, no oneDNN, no standard library here: of an inline function the
// linker keeps one copy, and that might be the one for a newer processor.
#pragma once

#include <cstdint>

namespace llga::winograd {

// A convolution over channels-last images, in tiles of `tile` x `tile` results.
struct Problem {
  int64_t height;  // of an image
  int64_t width;
  int64_t result_height;
  int64_t result_width;
  int64_t top;  // padding
  int64_t left;
  int64_t inputs;  // channels
  int64_t outputs;
  int64_t tile;
  bool relu;

  const float* source;
  const float* weight;  // (point, panel, input, output of the panel)
  const float* plain;   // (output, input, 3, 3)
  const float* bias;    // or null
  const float* addend;  // as the result, or null; may be the result
  float* result;

  [[gnu::always_inline]] int64_t tilesDown() const { return (result_height + tile - 1) / tile; }
  [[gnu::always_inline]] int64_t tilesAcross() const { return (result_width + tile - 1) / tile; }
};

// Tiles, counted over all images by rows, and channels of the result, from the first of a panel on.
struct Task {
  int64_t first_tile;
  int64_t tiles;
  int64_t first_output;
  int64_t outputs;
};

// What there is for one instruction set.
struct Kernels {
  const char* name;
  int64_t vector;  // numbers; channels are multiples of it
  int64_t panel;   // outputs whose weights lie together
  int64_t rows;    // tiles that are multiplied at once
  // Cost, as multiplications: to transform one number of a tile, to read one of the weight.
  double transform;
  double read;
  // Floats of memory that run() works in, aligned to 64 bytes.
  int64_t (*scratch)(const Problem& problem, const Task& task);
  void (*run)(const Problem& problem, const Task& task, float* scratch);
};

extern const Kernels avx2;
extern const Kernels avx512;

// How many numbers a transformed tile has.
[[gnu::always_inline]] constexpr int64_t points(int64_t tile) { return (tile + 2) * (tile + 2); }

}  // namespace llga::winograd
