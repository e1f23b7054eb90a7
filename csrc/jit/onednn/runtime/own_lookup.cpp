#include "jit/onednn/runtime/own_lookup.h"

#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {

bool isOwnLookup(const Node* node) {
  if (node->kind() != torch::jit::aten::embedding || !ownKernelsAnywhere()) {
    return false;
  }
  const auto table = constantTensor(node->namedInput("weight"));
  return table.defined() && table.dim() == 2 && table.numel() > 0 && table.stride(1) == 1 &&
         table.layout() == at::kStrided && toDataType(table.scalar_type()).has_value();
}

bool isLookupGroup(const Graph& subgraph) {
  const auto* node = soleComputation(subgraph);
  return node != nullptr && isOwnLookup(node);
}

std::optional<FoundLookup> findLookup(const Graph& subgraph, const Facts& facts) {
  if (!isLookupGroup(subgraph)) {
    return std::nullopt;
  }
  const auto* node = soleComputation(subgraph);
  FoundLookup found{
      {}, node->namedInput("indices"), node->output(), constantTensor(node->namedInput("weight"))};
  const auto indices = facts.tensor(found.indices);
  if (indices.dtype != at::kLong && indices.dtype != at::kInt) {
    throw CompileError{"indices of another type than int64 or int32"};
  }
  if (facts.tensor(found.result).dtype != found.table.scalar_type()) {
    throw CompileError{"rows of another type than their table"};
  }
  auto& kernel = found.kernel;
  const auto bytes = static_cast<int64_t>(found.table.element_size());
  kernel.rows = found.table.size(0);
  kernel.bytes = found.table.size(1) * bytes;
  kernel.step = found.table.stride(0) * bytes;
  kernel.wide = indices.dtype == at::kLong;
  kernel.sizes.assign(indices.sizes->begin(), indices.sizes->end());
  kernel.strides.assign(indices.strides->begin(), indices.strides->end());
  return found;
}

}  // namespace llga
