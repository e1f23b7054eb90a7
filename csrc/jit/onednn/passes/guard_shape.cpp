// Erases the observed types again.
//
//   %x : Float(1, 3, 8, 8)   ->   %x : Tensor
//
// They hold for one set of inputs. A guard around every group would keep them true; instead
// llga::FusionGroup is total (it looks at its inputs itself), so nobody needs them any more, and
// nobody may trust them.
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

void eraseInSubgraphs(Block* block) {
  for (auto* node : block->nodes()) {
    if (isFusionGroup(node)) {
      torch::jit::removeTensorTypeSpecializations(node->g(torch::jit::attr::Subgraph)->block());
    }
    for (auto* nested : node->blocks()) {
      eraseInSubgraphs(nested);
    }
  }
}

}  // namespace

void guardShape(const GraphPtr& graph) {
  eraseInSubgraphs(graph->block());
  auto shared = graph;
  torch::jit::RemoveTensorTypeSpecializations(shared);
}

}  // namespace llga
