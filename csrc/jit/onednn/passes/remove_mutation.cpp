// Rewrites in-place ops as their pure variants where alias analysis proves that nobody else sees
// the write.
//
//   %y : Tensor = aten::relu_(%x)   ->   %y : Tensor = aten::relu(%x)
//
// oneDNN Graph is pure. What can't be proven stays, and keeps its neighbours out of groups.
#include <torch/csrc/jit/passes/remove_mutation.h>

#include <optional>

#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

// In place, the result has the data type of the target; the pure variant promotes:
//   bf16.add_(f32) is bf16, bf16.add(f32) is f32.
// So all operands must be known to have one type; 0-dim ones of the same kind don't promote.
bool keepsDtype(torch::jit::Node* node) {
  size_t tensors = 0;
  std::optional<at::ScalarType> common;
  bool one_dtype = true;
  for (const auto* input : node->inputs()) {
    const auto type = input->type()->cast<c10::TensorType>();
    if (!type) {
      continue;
    }
    ++tensors;
    const auto dtype = type->scalarType();
    one_dtype = one_dtype && dtype && (!common || *common == *dtype);
    common = common ? common : dtype;
  }
  return tensors <= 1 || one_dtype;
}

}  // namespace

void removeMutation(const GraphPtr& graph) {
  // Lists first: a list that is only appended to becomes one construction, which cat can read.
  torch::jit::RemoveListMutation(graph);
  torch::jit::RemoveTensorMutation(graph, keepsDtype);
}

}  // namespace llga
