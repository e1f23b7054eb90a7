// Takes the profiling executor's observations out of the instruction stream and into the types.
//
//   %2 : Tensor = prim::profile[profiled_type=Float(1, 3, 8, 8)](%x)
//   %3 : Tensor = aten::relu(%2)
// ->
//   %3 : Tensor = aten::relu(%x)       with  %x : Float(1, 3, 8, 8)
//
// First, because a profile node between two ops would hide every pattern. The types are hints for
// the passes below; guard_shape takes them out again.
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

#include "jit/onednn/passes/passes.h"

namespace llga {

void specializeTypes(const GraphPtr& graph) {
  auto shared = graph;
  torch::jit::RemoveProfileNodesAndSpecializeTypes(shared);
}

}  // namespace llga
