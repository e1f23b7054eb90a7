// Lets oneDNN choose the memory layout of values that only fusion groups read.
//
//   %2 = llga::FusionGroup[llga_any_layout=[1]](%x)
//   %3 = llga::FusionGroup[llga_any_layout=[0], llga_group_owned=[1]](%2)
//
// Such a value never meets an aten op that looks at more than its sizes, so its strides are
// nobody's business: image-like values are channels last. Everything else leaves a group with
// exactly the strides eager gives it. llga_group_owned tells the reader what it would have got in
// eager: 1 contiguous, 2 channels last.
//
// llga_call_local marks the outputs that die with the call, whoever reads them. Should an op return
// its input against its schema, that output lives on where it should not: memory is held for it, no
// number is wrong.
#include <algorithm>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

// Whether a tensor that is `value`, or a view of it, may be there after the call.
bool escapes(const Value* value) {
  const auto& uses = value->uses();
  return std::any_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
    const auto* user = use.user;
    const auto anyEscapes = [user] {
      return std::any_of(user->outputs().begin(), user->outputs().end(), escapes);
    };
    switch (user->kind()) {
      case prim::ListConstruct:
      case prim::ListUnpack:
      case prim::TupleConstruct:
      case prim::TupleUnpack:
      case prim::ConstantChunk:
      case aten::chunk:
      case aten::split:
      case aten::split_with_sizes:
      case aten::tensor_split:
      case aten::unbind:
        return anyEscapes();
      default:
        break;
    }
    if (isFusionGroup(user)) {
      return false;
    }
    const auto* schema = user->maybeSchema();
    if (schema == nullptr || use.offset >= schema->arguments().size()) {
      return true;
    }
    const auto* alias = schema->arguments()[use.offset].alias_info();
    return alias != nullptr && (alias->isWildcardAfter() || anyEscapes());
  });
}

// Whether groups alone read its numbers; sizes are the same in any layout.
bool mayLieAnyhow(const Value* value) {
  bool read = false;
  for (const auto& use : value->uses()) {
    if (readsShape(use.user)) {
      continue;
    }
    if (!isFusionGroup(use.user) || use.user->owningBlock() != value->node()->owningBlock()) {
      return false;
    }
    read = true;
  }
  return read;
}

bool isChannelsLast(const Value* value) {
  const auto type = value->type()->cast<c10::TensorType>();
  if (!type) {
    return false;
  }
  const auto sizes = type->sizes().concrete_sizes();
  const auto strides = type->strides().concrete_sizes();
  if (!sizes || !strides || sizes->size() < 4 || sizes->size() > 5) {
    return false;
  }
  const auto format =
      sizes->size() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  return *strides == c10::TensorType::contiguousStridesOf(*sizes, format) &&
         *strides != c10::TensorType::contiguousStridesOf(*sizes);
}

void visit(Block* block) {
  for (auto* node : block->nodes()) {
    for (auto* nested : node->blocks()) {
      visit(nested);
    }
    if (!isFusionGroup(node)) {
      continue;
    }
    std::vector<int64_t> any;
    std::vector<int64_t> local;
    for (const auto* output : node->outputs()) {
      any.push_back(mayLieAnyhow(output) ? 1 : 0);
      local.push_back(escapes(output) ? 0 : 1);
    }
    node->is_(anyLayoutAttr(), any);
    node->is_(callLocalAttr(), local);
    std::vector<int64_t> owned;
    for (const auto* input : node->inputs()) {
      const bool free = isFusionGroup(input->node()) && mayLieAnyhow(input);
      owned.push_back(!free ? 0 : isChannelsLast(input) ? 2 : 1);
    }
    node->is_(groupOwnedAttr(), owned);
  }
}

}  // namespace

void propagateLayout(const GraphPtr& graph) { visit(graph->block()); }

}  // namespace llga
