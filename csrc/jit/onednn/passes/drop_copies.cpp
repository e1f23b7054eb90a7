// Drops copies of images to planes, behind a permutation of rows of channels, where all that reads
// them computes the same of pixels whose channels lie side by side:
//
//   %2 : Tensor = aten::permute(%x, [0, 3, 1, 2])
//   %3 : Tensor = aten::contiguous(%2, 0)
//   %4 : Tensor = aten::_convolution(%3, %weight, ...)
//   %5 : Tensor = aten::permute(%4, [0, 2, 3, 1])
//   %6 : Tensor = aten::contiguous(%5, 0)
// ->
//   %2 : Tensor = aten::permute(%x, [0, 3, 1, 2])
//   %4 : Tensor = aten::_convolution(%2, %weight, ...)
//   %5 : Tensor = aten::permute(%4, [0, 2, 3, 1])
//   %6 : Tensor = aten::contiguous(%5, 0)
//
// Convolutions' kernels like it better, and the copy back, if there is one, has nothing to do. So
// it is with a copy of what a convolution or its like computes, which has nothing to do in eager.
//
// Strides change up to what makes them the same again, so only where nobody could tell: neither a
// view that needs its memory in an order (aten::view raises an error for others), nor the caller,
// nor what writes to any of it.
#include <torch/csrc/jit/ir/alias_analysis.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

bool isContiguous(const Node* node) {
  return node->kind() == aten::contiguous &&
         intOf(node->input(1)) == static_cast<int64_t>(at::MemoryFormat::Contiguous);
}

// Whether its results have strides of their own, whatever those of what it reads are.
bool endsOrder(const Node* node) {
  return isContiguous(node) || node->kind() == aten::linear || node->kind() == aten::layer_norm ||
         readsShape(node);
}

// Whether its results are the same numbers whatever strides it reads; theirs may differ.
bool takesAnyOrder(const Node* node) {
  static const auto kKinds = [] {
    std::unordered_set<Symbol> kinds;
    for (const auto* name : {"batch_norm",
                             "mean",
                             "sum",
                             "softmax",
                             "dropout",
                             "cat",
                             "permute",
                             "transpose",
                             "slice",
                             "select",
                             "unsqueeze",
                             "squeeze",
                             "reshape",
                             "flatten",
                             "constant_pad_nd",
                             "pad",
                             "pixel_shuffle",
                             "max_pool2d",
                             "avg_pool2d",
                             "adaptive_avg_pool2d",
                             "upsample_nearest2d",
                             "upsample_bilinear2d"}) {
      kinds.insert(Symbol::aten(name));
    }
    return kinds;
  }();
  return kKinds.count(node->kind()) != 0 || isConvolution(node) || isActivation(node) ||
         isBinary(node) || isPlainCast(node) || isIdentity(node) || splits(node) ||
         node->kind() == prim::ListUnpack || node->kind() == prim::ConstantChunk ||
         node->kind() == prim::ListConstruct;
}

// Whether nobody could tell in which order the numbers of the value lie.
bool anyOrderDoes(const Value* value, const AliasDb& aliases) {
  std::vector<const Value*> left = {value};
  std::unordered_set<const Value*> seen = {value};
  while (!left.empty()) {
    const auto* next = left.back();
    left.pop_back();
    if (aliases.hasWriters(next)) {
      return false;
    }
    for (const auto& use : next->uses()) {
      if (endsOrder(use.user)) {
        continue;
      }
      if (!takesAnyOrder(use.user)) {
        return false;
      }
      for (const auto* output : use.user->outputs()) {
        if (seen.insert(output).second) {
          left.push_back(output);
        }
      }
    }
  }
  return true;
}

// A copy to planes of what lies as if it was channels last, or may be.
bool copiesToPlanes(const Node* node) {
  if (!isContiguous(node)) {
    return false;
  }
  const auto* source = node->input(0)->node();
  const bool computed = isConvolution(source) || isActivation(source) || isBinary(source) ||
                        source->kind() == aten::batch_norm || source->kind() == aten::cat;
  return computed || (source->kind() == aten::permute &&
                      intsOf(source->input(1)) == std::vector<int64_t>{0, 3, 1, 2});
}

}  // namespace

void dropCopies(const GraphPtr& graph) {
  std::vector<Node*> found;
  walk(graph->block(), [&](Node* node) {
    if (copiesToPlanes(node)) {
      found.push_back(node);
    }
  });
  if (found.empty()) {
    return;
  }
  const AliasDb aliases(graph);
  for (auto* copy : found) {
    if (!aliases.hasWriters(copy->input(0)) && anyOrderDoes(copy->output(), aliases)) {
      copy->output()->replaceAllUsesWith(copy->input(0));
      copy->destroy();
    }
  }
}

}  // namespace llga
