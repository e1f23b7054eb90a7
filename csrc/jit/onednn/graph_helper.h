// TorchScript block -> oneDNN graph -> proposals for fusion groups.
//
// The bridge passes a whole block to oneDNN, unknown ops as Wildcard, and takes the partitions as
// they are, but for those of several float32 convolutions: it knows no fusion pattern, so a newer
// oneDNN fuses more with no change here. Attention that a kernel of our own computes is not shown
// to oneDNN, nor is what moves its numbers around it. This header names no oneDNN type; the passes
// see proposals only.
#pragma once

#include <torch/csrc/jit/ir/alias_analysis.h>

#include <optional>
#include <vector>

#include "jit/onednn/attention_moves.h"
#include "jit/onednn/ir.h"

namespace llga {

// One supported partition, or one attention, as nodes of the block, in block order.
struct Proposal {
  std::vector<Node*> nodes;
  // How many of the nodes are of which class in the op table.
  int compute = 0;
  int elementwise = 0;
  int views = 0;
  int casts = 0;
};

// The attention that a kernel of our own computes and that has this node in the middle, as far as
// types in the graph say.
std::optional<AttentionCore> ownAttentionAt(const Node* node);

// Asks oneDNN for the partitions of `block` (not of its nested blocks). Every node that the op
// table knows and that is in no proposal has a reason recorded (refuse() in ir.h).
std::vector<Proposal> proposeGroups(Block* block, const torch::jit::AliasDb& aliases);

}  // namespace llga
