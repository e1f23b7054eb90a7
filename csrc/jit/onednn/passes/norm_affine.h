// What a batch norm with constant parameters does to each channel: the seam between the passes that
// make it part of a layer. Stateless; owned by the thread that owns the graph.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "jit/onednn/ir.h"

namespace llga {

// channel * scale + shift; in float64, one number a channel.
struct NormAffine {
  at::Tensor scale;
  at::Tensor shift;
};

// That of an aten::batch_norm; nothing in training, or where a parameter is no constant of float32.
std::optional<NormAffine> affineOf(const Node* norm);

}  // namespace llga
