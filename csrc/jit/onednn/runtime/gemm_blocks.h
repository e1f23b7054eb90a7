// The arithmetic of a matrix product, on plain memory: what is compiled once for each instruction
// set. No PyTorch, no oneDNN, no standard library here: of an inline function
// the linker keeps one copy, and that might be the one for a newer processor.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/rectifier.h"

namespace llga::gemm {

struct Problem {
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  Rectifier rectifier;

  const float* source;    // (row, input)
  int64_t source_stride;  // from row to row
  const float* weight;    // (panel, input, output of the panel), with zeros after the last output
  int64_t weight_stride;  // from panel to panel
  const float* bias;      // (output), or null
  const float* addend;    // as the result, or null; may be the result
  float* result;          // (row, output)
};

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
};

extern const Kernels avx2;
extern const Kernels avx512;

}  // namespace llga::gemm
