// Which images our own kernel resizes, in the place of PyTorch's.
//
// Decisions only; steps/ makes the step of a plan. Stateless but for the environment, which
// is read once.
#pragma once

#include <optional>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/runtime/resampling.h"

namespace llga {

// Whether `node` resizes float32 or bfloat16 images, and is no node for oneDNN's partitions: it is
// aten::upsample_bilinear2d and aligns corners, which oneDNN's does not, or nothing knows the
// images' sizes before the group is compiled.
bool isOwnResampling(const Node* node, const Facts& facts);

struct FoundResampling {
  Resampling kernel;
  const Value* data;
  const Value* result;
};

// Nothing for groups that are anything but such a node. Throws CompileError for one that the kernel
// can't compute.
std::optional<FoundResampling> findResampling(const Graph& subgraph, const Facts& facts);

// A bilinear Interpolate that is all of a partition; nothing for other partitions.
std::optional<Resampling> resampling(const Ops& ops);

}  // namespace llga
