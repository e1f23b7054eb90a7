// The arithmetic of winograd.h for one task, on plain memory: what is compiled once for each
// instruction set. No PyTorch, no oneDNN, no standard library here: of an inline function the
// linker keeps one copy, and that might be the one for a newer processor.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"

namespace llga::winograd {

// A convolution over channels-last images of T, in tiles of `tile` x `tile` results. Whatever T is,
// the arithmetic is that of float32.
template <typename T>
struct ProblemOf {
  int64_t height;  // of an image
  int64_t width;
  int64_t result_height;
  int64_t result_width;
  int64_t top;  // padding
  int64_t left;
  int64_t inputs;  // channels
  int64_t outputs;
  int64_t tile;
  bool silu;  // before the addend
  bool relu;  // behind it

  const T* source;
  const float* weight;  // (point, panel, input, output of the panel)
  const T* plain;       // (output, input, 3, 3)
  const float* bias;    // or null
  const T* addend;      // as the result, or null; may be the result
  T* result;

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

// What takes how long, as multiplications.
struct Costs {
  double transform;    // of one number of a tile
  double read;         // of one of the transformed weight
  double reread;       // of one of a large weight, for each block of tiles behind the first
  double direct;       // one product of oneDNN's convolution
  double direct_read;  // of one of its weight
  double most;         // part of that convolution's cost that is worth a weight of another size
};

// What there is for one instruction set.
struct Kernels {
  const char* name;
  int64_t vector;  // numbers; channels are multiples of it
  int64_t panel;   // outputs whose weights lie together
  int64_t rows;    // tiles that are multiplied at once
  Costs costs;
  // Floats of memory that run() works in, aligned to 64 bytes; for tiles of this size and so many
  // channels of the images.
  int64_t (*scratch)(int64_t tile, int64_t inputs, const Task& task);
  void (*run)(const ProblemOf<float>& problem, const Task& task, float* scratch);
};

extern const Kernels avx2;
extern const Kernels avx512;

// With AVX-512's instructions for bfloat16; in all else like avx512.
struct NarrowKernels {
  const char* name;
  Costs costs;
  void (*run)(const ProblemOf<Bfloat16>& problem, const Task& task, float* scratch);
};

extern const NarrowKernels avx512_bf16;

// How many numbers a transformed tile has.
[[gnu::always_inline]] constexpr int64_t points(int64_t tile) { return (tile + 2) * (tile + 2); }

}  // namespace llga::winograd
