// Holds `with torch.jit.strict_fusion():` to its word.
//
//   %s : __torch__.torch.jit.strict_fusion = prim::CreateObject()
//   %e = prim::Enter(%s)
//   %y = llga::FusionGroup(%x)
//   %z = aten::sort(%y)                     <- throws, with the reason
//   %q = prim::Exit(%s, ...)
//
// TorchScript checks such a block itself, after its custom passes, and would take our groups for
// unfused operators. So a block that is all right loses its markers. Not a pass of the pipeline:
// those may not fail, this one may.
#include <c10/util/Exception.h>

#include <algorithm>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace prim = torch::jit::prim;

bool marks(const Node* node, Symbol kind) {
  if (node->kind() != kind) {
    return false;
  }
  const auto type = node->input(0)->type()->cast<c10::ClassType>();
  return type && type->name() &&
         type->name()->qualifiedName() == "__torch__.torch.jit.strict_fusion";
}

// Something that computes on tensors, outside all groups.
bool isUnfused(const Node* node) {
  const auto kind = node->kind();
  if (kind == prim::PythonOp || kind == prim::CallFunction || kind == prim::CallMethod) {
    return true;
  }
  if (isFusionGroup(node) || kind.is_prim() || isIdentity(node)) {
    return false;
  }
  return std::any_of(node->outputs().begin(), node->outputs().end(),
                     [](const Value* v) { return isTensor(v) || isTensorList(v); });
}

void collect(const Node* node, std::string& reasons) {
  for (const auto* block : node->blocks()) {
    for (const auto* inner : block->nodes()) {
      collect(inner, reasons);
    }
  }
  if (isUnfused(node)) {
    reasons += "  " +
               (node->hasAttribute(refusedAttr()) ? node->s(refusedAttr())
                                                  : qualifiedName(node) + ": not in the op table") +
               "\n";
  }
}

void check(Block* block) {
  std::vector<Node*> markers;
  std::string reasons;
  int depth = 0;
  for (auto* node : block->nodes()) {
    if (marks(node, prim::Enter)) {
      ++depth;
      markers.push_back(node);
    } else if (marks(node, prim::Exit)) {
      --depth;
      markers.push_back(node);
    } else if (depth > 0) {
      collect(node, reasons);
    }
    for (auto* nested : node->blocks()) {
      check(nested);
    }
  }
  TORCH_CHECK(reasons.empty(), "torch.jit.strict_fusion: not fused\n", reasons);
  for (auto it = markers.rbegin(); it != markers.rend(); ++it) {
    const auto outputs = (*it)->outputs();
    if (std::all_of(outputs.begin(), outputs.end(),
                    [](const Value* v) { return v->uses().empty(); })) {
      (*it)->destroy();
    }
  }
}

}  // namespace

void checkStrictFusion(const GraphPtr& graph) { check(graph->block()); }

}  // namespace llga
