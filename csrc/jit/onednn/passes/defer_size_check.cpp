// Reads sizes where no aten::size stands between two ops that could share a group: from an input of
// the block that has the same ones, or else from the end of the chain of ops that keep them.
//
//   %y : Tensor = aten::relu(%x)              %y : Tensor = aten::relu(%x)
//   %n : int[] = aten::size(%y)        ->     %n : int[] = aten::size(%x)
//   %z : Tensor = aten::view(%y, %n)          %z : Tensor = aten::view(%y, %n)
//
//   %1 : Tensor = aten::conv2d(%x, ...)       %1 : Tensor = aten::conv2d(%x, ...)
//   %y : Tensor = aten::relu(%1)              %y : Tensor = aten::relu(%1)
//   %n : int[] = aten::size(%1)        ->     %n : int[] = aten::size(%y)
//
// Shape arithmetic that a group needs is taken into it by the graph fuser.
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
         {"relu",       "relu6",      "sigmoid",      "tanh",       "gelu",       "elu",
          "leaky_relu", "hardswish",  "hardsigmoid",  "hardtanh",   "clamp_min",  "clamp_max",
          "silu",       "mish",       "softplus",     "prelu",      "sqrt",       "square",
          "abs",        "exp",        "log",          "round",      "rsqrt",      "reciprocal",
          "neg",        "softmax",    "log_softmax",  "batch_norm", "layer_norm", "group_norm",
          "dropout",    "contiguous", "instance_norm"}) {
      set.insert(Symbol::fromQualString(std::string("aten::") + name));
    }
    return set;
  }();
  return kinds.count(node->kind()) != 0 || isIdentity(node);
}

Value* top(Value* value) {
  while (keepsShape(value->node())) {
    value = value->node()->input(0);
  }
  return value;
}

// The last value of the chain that `value` starts, as far as nothing but sizes is read on the way
// and all of it lies before `reader`.
Value* bottom(Value* value, const Node* reader) {
  for (;;) {
    Node* next = nullptr;
    for (const auto& use : value->uses()) {
      const bool reads_none = use.user->kind() == torch::jit::aten::size ||
                              (use.user->kind() == asTargetKind() && use.offset == 1);
      if (reads_none || use.user == next) {
        continue;
      }
      if (next != nullptr || use.offset != 0 || !keepsShape(use.user) ||
          use.user->owningBlock() != reader->owningBlock() || !use.user->isBefore(reader)) {
        return value;
      }
      next = use.user;
    }
    if (next == nullptr) {
      return value;
    }
    value = next->output();
  }
}

void visit(Block* block) {
  for (auto* node : block->nodes()) {
    for (auto* nested : node->blocks()) {
      visit(nested);
    }
    if (node->kind() != torch::jit::aten::size) {
      continue;
    }
    auto* source = top(node->input(0));
    node->replaceInput(
        0, source->node()->kind() == torch::jit::prim::Param ? source : bottom(source, node));
  }
}

}  // namespace

void deferSizeCheck(const GraphPtr& graph) { visit(graph->block()); }

}  // namespace llga
