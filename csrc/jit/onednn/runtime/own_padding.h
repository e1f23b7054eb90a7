// Which tensors our own kernel pads, in the place of PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/padding.h"

namespace llga {

// Whether `node` pads float32 or bfloat16 numbers, and no convolution or pooling does it in its
// place.
bool isOwnPadding(const Node* node, const Facts& facts);

struct FoundPadding {
  Padding::Mode mode;
  std::vector<Padding::Dimension> dimensions;  // as the tensor has them
  double number;                               // of Mode::constant
  const Value* data;
  const Value* result;
};

// Nothing for groups that are anything but such a node. Throws CompileError for one that the kernel
// can't compute.
std::optional<FoundPadding> findPadding(const Graph& subgraph, const Facts& facts);

}  // namespace llga
