// Reads sizes from as far up as they are the same, so that no aten::size stands between two ops
// that could share a group.
//
//   %y : Tensor = aten::relu(%x)              %y : Tensor = aten::relu(%x)
//   %n : int[] = aten::size(%y)        ->     %n : int[] = aten::size(%x)
//   %z : Tensor = aten::view(%y, %n)          %z : Tensor = aten::view(%y, %n)
//
// The size of a compute op's result cannot be read further up; the graph fuser takes such shape
// arithmetic into the group that needs it.
#include <unordered_set>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::Symbol;

// Ops whose result has exactly the shape of their first input.
bool keepsShape(const Node* node) {
  static const std::unordered_set<Symbol> kinds = [] {
    std::unordered_set<Symbol> set;
    for (const auto* name :
         {"relu",       "relu6",     "sigmoid",     "tanh",       "gelu",       "elu",
          "leaky_relu", "hardswish", "hardsigmoid", "hardtanh",   "clamp_min",  "clamp_max",
          "silu",       "mish",      "softplus",    "prelu",      "sqrt",       "square",
          "abs",        "exp",       "log",         "round",      "rsqrt",      "reciprocal",
          "neg",        "softmax",   "log_softmax", "batch_norm", "layer_norm", "group_norm",
          "dropout",    "contiguous"}) {
      set.insert(Symbol::fromQualString(std::string("aten::") + name));
    }
    return set;
  }();
  return kinds.count(node->kind()) != 0;
}

void visit(Block* block) {
  for (auto* node : block->nodes()) {
    for (auto* nested : node->blocks()) {
      visit(nested);
    }
    if (node->kind() != torch::jit::aten::size) {
      continue;
    }
    while (keepsShape(node->input(0)->node())) {
      node->replaceInput(0, node->input(0)->node()->input(0));
    }
  }
}

}  // namespace

void deferSizeCheck(const GraphPtr& graph) { visit(graph->block()); }

}  // namespace llga
