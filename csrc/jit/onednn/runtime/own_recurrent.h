// Which recurrent layers our own kernel computes, in the place of PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/recurrent.h"

namespace llga {

// Whether `node` is aten::lstm, gru, rnn_tanh or rnn_relu, of padded sequences, or one step of
// these (aten::lstm_cell and so on), with constant weights, without projections, and without
// dropout.
bool isOwnRecurrent(const Node* node, const Facts& facts);

struct FoundRecurrent {
  Recurrent kernel;  // but for the strides
  bool batch_first;
  const Value* data;
  // Before the first step: units, and an LSTM's cells. A constant, or else a value.
  struct State {
    const Value* value;
    at::Tensor constant;
  };
  std::vector<State> states;
  const Value* result;
  // Behind the last one.
  const Value* last_units;  // null for one step, whose result they are
  const Value* last_cells;  // of an LSTM; else null
  // Of each layer and direction: weights of inputs and units, and maybe both biases.
  std::vector<at::Tensor> parameters;
};

// Nothing for groups that are anything else. Throws CompileError for one that the kernel can't
// compute.
std::optional<FoundRecurrent> findRecurrent(const Graph& subgraph, const Facts& facts);

}  // namespace llga
