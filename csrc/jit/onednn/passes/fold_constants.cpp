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
// Where a part of what is made of constants is written to, and nobody holds a view of it meanwhile,
// the write is made pure first (Swin V2's bias, without that of the keys):
//
//   %2 : Tensor = aten::clone(%constant, %none)
//   %3 : Tensor = aten::slice(%2, %dim, %start, %end, %step)
//   %4 : Tensor = aten::zero_(%3)
// ->
//   %3 : Tensor = aten::slice(%2, %dim, %start, %end, %step)
//   %4 : Tensor = aten::zeros_like(%3, ...)
//   %5 : Tensor = aten::slice_scatter(%2, %4, %dim, %start, %end, %step)
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
#include <optional>
#include <utility>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace aten = torch::jit::aten;
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
         node->kind() == aten::to;
}

// Integers that tracing made tensors of, and those that it asks constants for.
bool isInteger(const Value* value) { return value->type()->isSubtypeOf(*c10::IntType::get()); }

bool isNumberToTensor(const Node* node) {
  return node->kind() == prim::NumToTensor && torch::jit::toIValue(node->input(0)).has_value();
}

bool canFold(Node* node, const AliasDb& aliases) {
  if (isNumberToTensor(node)) {
    return !aliases.hasWriters(node) && !aliases.escapesScope(node->outputs());
  }
  const bool known = node->kind().is_aten() || node->kind() == asTargetKind() ||
                     (node->kind() == prim::ListConstruct && isTensorList(node->output()));
  return known && node->outputs().size() == 1 && readsConstantsOnly(node) &&
         (isTensor(node->output()) || isTensorList(node->output()) || isInteger(node->output())) &&
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

// The write of a constant to a slice of `base`, if it is the only use of that slice.
struct Fill {
  Node* slice;
  Node* write;
};

std::optional<Fill> fillOf(const Value* base, Node* user) {
  static const auto kZero = Symbol::fromQualString("aten::zero_");
  if (user->kind() != aten::slice || user->input(0) != base || user->output()->uses().size() != 1) {
    return std::nullopt;
  }
  auto* write = user->output()->uses()[0].user;
  const bool only = write->kind() == kZero && !write->hasUses() &&
                    write->owningBlock() == base->node()->owningBlock() &&
                    user->owningBlock() == write->owningBlock();
  return only ? std::optional(Fill{user, write}) : std::nullopt;
}

// A fill of new data that is made of constants and that nobody has a view of before the last fill.
std::vector<Fill> fillsOf(Node* node, const AliasDb& aliases) {
  if (node->kind() != aten::clone || !readsConstantsOnly(node)) {
    return {};
  }
  std::vector<Fill> fills;
  for (const auto& use : node->output()->uses()) {
    if (const auto fill = fillOf(node->output(), use.user)) {
      fills.push_back(*fill);
    }
  }
  if (fills.empty()) {
    return {};
  }
  std::sort(fills.begin(), fills.end(),
            [](const Fill& a, const Fill& b) { return a.write->isBefore(b.write); });
  const auto isFill = [&](const Node* user) {
    return std::any_of(fills.begin(), fills.end(),
                       [&](const Fill& fill) { return fill.slice == user; });
  };
  // Who else writes to it may come later; who else reads it by another name may not come earlier.
  for (const auto& use : node->output()->uses()) {
    if (isFill(use.user)) {
      continue;
    }
    const auto outputs = use.user->outputs();
    const bool sees = use.user->owningBlock() != node->owningBlock() ||
                      aliases.mayContainAlias(node->output(), outputs) ||
                      aliases.writesToAlias(use.user, {node->output()});
    if (sees && !use.user->isAfter(fills.back().write)) {
      return {};
    }
  }
  return fills;
}

// Returns what `base` is then.
Value* makePure(const Fill& fill, Value* base) {
  auto* graph = fill.write->owningGraph();
  const torch::jit::WithInsertPoint guard(fill.write);
  auto* zeros = graph->insert(aten::zeros_like, {fill.slice->output()});
  auto* result = graph->insert(Symbol::fromQualString("aten::slice_scatter"),
                               {base, zeros, fill.slice->input(1), fill.slice->input(2),
                                fill.slice->input(3), fill.slice->input(4)});
  result->setType(base->type());
  result->node()->copyMetadata(fill.write);
  base->replaceAllUsesAfterNodeWith(fill.write, result);
  fill.write->destroy();
  return result;
}

void makeFillsPure(Block* block, const AliasDb& aliases) {
  std::vector<std::pair<Node*, std::vector<Fill>>> found;
  for (auto* node : block->nodes()) {
    for (auto* nested : node->blocks()) {
      makeFillsPure(nested, aliases);
    }
    if (auto fills = fillsOf(node, aliases); !fills.empty()) {
      found.emplace_back(node, std::move(fills));
    }
  }
  for (const auto& [node, fills] : found) {
    auto* base = node->output();
    for (const auto& fill : fills) {
      base = makePure(fill, base);
    }
  }
}

}  // namespace

void foldConstants(const GraphPtr& graph) {
  makeFillsPure(graph->block(), AliasDb(graph));
  // The results outlive the modes of the call that happens to be the first.
  const c10::InferenceMode not_inference(false);
  const at::NoGradGuard no_grad;
  const AliasDb aliases(graph);
  foldIn(graph->block(), aliases, at::autocast::is_autocast_enabled(at::kCPU));
  torch::jit::EliminateDeadCode(graph);
}

}  // namespace llga
