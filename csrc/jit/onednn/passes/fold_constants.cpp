// Computes once what depends on constant tensors alone.
//
//   %2 : Tensor = aten::linear(%constant, %weight, %bias)
//   %3 : Tensor = aten::relu(%2)
// ->
//   %3 : Tensor = prim::Constant[value=<Tensor>]()
//
// torch.jit.freeze does so too, but stops at in-place ops, which are pure only by now (the MLP of
// Swin V2's position bias). oneDNN Graph can't take it over: it computes a partition of constants
// in the first call and never again.
//
// Kept: what might be written to or leave the graph, where a call would see what was done to the
// result of another; under autocast, all but casts, as data types may differ from call to call;
// 8-bit values, which are smaller than what they stand for.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace prim = torch::jit::prim;

bool isPlainTensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && !value.toTensor().is_quantized();
}

// Of a list of constants, the operands are the elements.
bool readsConstantsOnly(const Node* node) {
  bool reads_tensor = false;
  for (const auto* input : node->inputs()) {
    const auto value = torch::jit::toIValue(input);
    if (!value || (value->isTensor() && !isPlainTensor(*value))) {
      return false;
    }
    reads_tensor = reads_tensor || value->isTensor() || value->isTensorList();
  }
  return reads_tensor;
}

// Its result depends on its inputs alone, whether autocast is on or off.
bool isCast(const Node* node) {
  return node->kind() == reducedPrecisionKind() || node->kind() == fullPrecisionKind() ||
         node->kind() == torch::jit::aten::to;
}

bool canFold(Node* node, const AliasDb& aliases) {
  const bool known = node->kind().is_aten() || node->kind() == asTargetKind() ||
                     (node->kind() == prim::ListConstruct && isTensorList(node->output()));
  return known && node->outputs().size() == 1 && readsConstantsOnly(node) &&
         (isTensor(node->output()) || isTensorList(node->output())) &&
         !node->isNondeterministic() && !node->hasSideEffects() && !aliases.hasWriters(node) &&
         !aliases.escapesScope(node->outputs());
}

void foldIn(Block* block, const AliasDb& aliases, bool only_casts) {
  for (auto* node : block->nodes()) {
    for (auto* nested : node->blocks()) {
      foldIn(nested, aliases, only_casts);
    }
    if ((only_casts && !isCast(node)) || !canFold(node, aliases)) {
      continue;
    }
    const auto results = torch::jit::runNodeIfInputsAreConstant(node);
    if (!results || (results->front().isTensor() && !isPlainTensor(results->front()))) {
      continue;
    }
    const torch::jit::WithInsertPoint guard(node);
    if (const auto constant = torch::jit::tryInsertConstant(*block->owningGraph(), results->front(),
                                                            node->sourceRange(), node->scope())) {
      node->output()->replaceAllUsesWith(*constant);
    }
  }
}

}  // namespace

void foldConstants(const GraphPtr& graph) {
  // The results outlive the modes of the call that happens to be the first.
  const c10::InferenceMode not_inference(false);
  const at::NoGradGuard no_grad;
  const AliasDb aliases(graph);
  foldIn(graph->block(), aliases, at::autocast::is_autocast_enabled(at::kCPU));
  torch::jit::EliminateDeadCode(graph);
}

}  // namespace llga
