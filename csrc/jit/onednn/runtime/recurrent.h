// Recurrent layers of float32 or bfloat16 data with constant weights: LSTM, GRU, and units with
// tanh or ReLU, in several layers and both directions.
//
//   sums[t] = W_i * x[t] + b            of all steps at once, a matrix product
//   h[t] = cell(sums[t] + W_h * h[t-1])
//
// PyTorch calls oneDNN for each layer of an LSTM, and a matrix product and some elementwise ops for
// each step of the others; either reads the weight W_h from further away than it need be. Here each
// thread has some units of each layer and keeps to them, so that their part of W_h stays in its
// core's cache, and threads wait for each other in each step without going to sleep. Both
// directions run at the same time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/recurrent_blocks.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA. Computes in float32 whatever the numbers are.
struct Recurrent {
  using Cell = recurrent::Cell;
  struct Strides {
    int64_t step;
    int64_t sequence;
  };

  Cell cell;
  int64_t steps;
  int64_t sequences;
  int64_t inputs;  // of the first layer
  int64_t units;   // of each layer and direction
  int64_t layers;
  int64_t directions;
  Strides source_strides;  // of dense rows
  Strides result_strides;

  template <typename T>
  struct Data {
    const T* source;
    const T* units;  // before the first step: (layer and direction, sequence, unit)
    const T* cells;  // likewise, of an LSTM; else null
    // Of each layer and direction, in float32: what orderInputWeight(), orderHiddenWeight() and
    // inputBias() made, and of a GRU newBias().
    c10::ArrayRef<const void*> parameters;
    T* result;      // overlaps nothing else
    T* last_units;  // behind the last step; or null
    T* last_cells;  // likewise
    float* scratch;
  };

  // Numbers of float32 that run() needs as scratch, of bfloat16 data or others.
  int64_t scratch(bool is_narrow) const;

  void run(const Data<float>& data) const;
  void run(const Data<Bfloat16>& data) const;

  int64_t gates() const { return recurrent::gatesOf(cell); }
  int64_t inputsOf(int64_t layer) const { return layer == 0 ? inputs : directions * units; }

  // A layer's parameters of PyTorch as they are read here, in float32. Sizes of what these give; of
  // all tensors made of a weight, only these have such.
  std::vector<int64_t> inputWeightSizes(int64_t layer) const;
  std::vector<int64_t> hiddenWeightSizes() const;
  void orderInputWeight(const at::Tensor& weight, int64_t layer, const at::Tensor& to) const;
  void orderHiddenWeight(const at::Tensor& weight, const at::Tensor& to) const;
  // Of both biases.
  at::Tensor inputBias(const at::Tensor& input, const at::Tensor& hidden) const;
  at::Tensor newBias(const at::Tensor& hidden) const;

 private:
  struct Layer;
  struct Scratch;

  int64_t blocks() const;
  int64_t rows() const { return steps * sequences; }
  int64_t states() const { return layers * directions * sequences * units; }
  Scratch scratchAt(float* memory, bool is_narrow) const;
  Linear linear(int64_t layer) const;
  at::Tensor byBlock(const at::Tensor& rows_of_gates) const;
  template <typename T>
  void runAs(const Data<T>& data) const;
  void runLayer(const Layer& layer) const;
};

}  // namespace llga
