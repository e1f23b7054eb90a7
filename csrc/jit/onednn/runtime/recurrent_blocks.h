// The arithmetic of one step of a recurrent layer, on plain memory: what is compiled once for each
// instruction set. No PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

namespace llga::recurrent {

enum class Cell { lstm, gru, tanh, relu };

// Gates of each unit, in PyTorch's order.
constexpr int gatesOf(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }

// One step of all sequences. Units come in blocks of as many as a vector holds, the last of which
// may have fewer: what lies by block has zeros there.
struct Step {
  int64_t rows;   // one for each sequence
  int64_t units;  // of each
  // What the gates have of the step's input, with all biases but the one below: (row; block, gate,
  // unit).
  const float* sums;
  int64_t sums_stride;  // from row to row; likewise below
  const float* weight;  // (block, unit of the step before, gate, unit)
  // What is added, in a GRU's new gate, to the product with the units of the step before: (block,
  // unit).
  const float* bias;
  const float* before;  // (row; unit)
  int64_t before_stride;
  float* after;
  int64_t after_stride;
  float* cells;  // of an LSTM, which are overwritten; dense rows
};

// What there is for one instruction set.
struct Kernels {
  int64_t width;  // units of a block
  // Blocks in [first, last).
  void (*(*find)(Cell cell))(const Step& step, int64_t first, int64_t last);
};

extern const Kernels avx2;
extern const Kernels avx512;

// The best that the processor has and oneDNN was not told to do without. Needs AVX2 and FMA.
const Kernels& kernels();

}  // namespace llga::recurrent
