// The arithmetic of a matrix product, on plain memory: what is compiled once for each instruction
// set. No PyTorch, no oneDNN, no standard library here: of an inline function
// the linker keeps one copy, and that might be the one for a newer processor.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/band_blocks.h"
#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/rectifier.h"

namespace llga::gemm {

// A number of a weight that lies as the matrix (input, output) does, in the place of panels.
struct InPlace {
  float number;
};

// T: of the source; R: of the addend and the result; W: of the weight. Sums are of float32.
template <typename T, typename R, typename W = T>
struct ProblemOf {
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  Rectifier rectifier;

  const T* source;        // (row, input)
  int64_t source_stride;  // from row to row
  // (panel, input, output of the panel), with zeros after the last output; with a source of
  // bfloat16 (panel, pair of inputs, output of the panel, input of the pair).
  const W* weight;
  int64_t weight_stride;  // from panel to panel
  const float* bias;      // (output), or null
  const R* addend;        // as the result, or null; may be the result
  R* result;              // (row, output)
  // A row of the source may lie in pieces of the same size.
  int64_t pieces = 1;
  int64_t piece_stride = 0;  // from piece to piece
  // What the activated sums are multiplied by; as the addend. Only of toNarrow() and toActivated(),
  // of a source in one piece.
  const R* factor = nullptr;
  int64_t weight_step = 0;  // in place, from input to input
};

using Problem = ProblemOf<float, float>;
using ProblemOfNarrowWeight = ProblemOf<float, float, Bfloat16>;
using ProblemInPlace = ProblemOf<float, float, InPlace>;

// Part of the result, from the first output of a panel on, to the end of one or of all.
struct Task {
  int64_t first_row;
  int64_t rows;
  int64_t first_output;
  int64_t outputs;
};

// What there is for one instruction set.
struct Kernels {
  const char* name;
  int64_t panel;  // outputs whose weights lie together
  int64_t rows;   // that are multiplied at once
  void (*run)(const Problem& problem, const Task& task);
  // Reads half as much; widening the weight costs time where it meets many rows.
  void (*runNarrowWeight)(const ProblemOfNarrowWeight& problem, const Task& task);
  // Of whole panels, which are columns that lie side by side.
  void (*runInPlace)(const ProblemInPlace& problem, const Task& task);
};

extern const Kernels avx2;
extern const Kernels avx512;

// With AVX-512's instructions for bfloat16, or AMX; an even number of inputs.
struct NarrowKernels {
  const char* name;
  int64_t panel;
  int64_t rows;  // that are multiplied at once
  void (*toWide)(const ProblemOf<Bfloat16, float>& problem, const Task& task);
  void (*toNarrow)(const ProblemOf<Bfloat16, Bfloat16>& problem, const Task& task);
  // Likewise, with an activation behind all else, of a source in one piece.
  void (*toActivated)(const ProblemOf<Bfloat16, Bfloat16>& problem, const Task& task,
                      Activation activation);
  // Of pixels, by AMX: the source, its rows and its stride are the band's, and the weight is
  // (16 outputs, pair of inputs, output of the 16, input of the pair). With an activation behind
  // all else, if there is one. Null without.
  void (*multiplyBand)(const ProblemOf<Bfloat16, Bfloat16>& problem, const amx::Band& band,
                       int64_t first_output, int64_t outputs, const Activation* activation);
};

extern const NarrowKernels avx512_bf16;
extern const NarrowKernels amx;

}  // namespace llga::gemm
