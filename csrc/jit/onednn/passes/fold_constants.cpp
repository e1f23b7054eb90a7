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
// Sizes count as constants that what reads the tensor raises an error for any other of, as the
// inputs of linear layers (known_shapes.h).
//
// Parts of a constant (aten::split, chunk, unbind: the weights of the attention of torch.nn when
// its queries are not its keys) become slices of it first, of which it can be told what is done to
// them:
//
//   %2 : Tensor[] = aten::split_with_sizes(%constant, [64, 128], %dim)
//   %3 : Tensor, %4 : Tensor = prim::ListUnpack(%2)
// ->
//   %3 : Tensor = aten::slice(%constant, %dim, 0, 64, 1)
//   %4 : Tensor = aten::slice(%constant, %dim, 64, 192, 1)
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
// result of another; under autocast, all but casts, views and integers, as data types may differ
// from call to call; 8-bit values, which are smaller than what they stand for.
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
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
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

// What has the same data type with autocast as without.
bool keepsType(const Node* node) {
  const auto isFloating = [](const Value* value) {
    const auto tensor = constantTensor(value);
    return isTensorList(value) || (tensor.defined() && tensor.is_floating_point());
  };
  return isCast(node) || movesNumbers(node) ||
         std::none_of(node->inputs().begin(), node->inputs().end(), isFloating);
}

// Constants, which say how long the parts are that a tensor is split into.
bool areLengths(const Node* node) {
  const auto inputs = node->inputs();
  const auto& uses = node->outputs().empty() ? torch::jit::use_list() : node->output(0)->uses();
  return node->kind() == prim::ListConstruct &&
         std::all_of(inputs.begin(), inputs.end(),
                     [](const Value* input) { return intOf(input).has_value(); }) &&
         std::all_of(uses.begin(), uses.end(),
                     [](const torch::jit::Use& use) { return splits(use.user); });
}

bool canFold(Node* node, const AliasDb& aliases) {
  if (isNumberToTensor(node) || areLengths(node)) {
    return !aliases.hasWriters(node) && !aliases.escapesScope(node->outputs());
  }
  const bool known = node->kind().is_aten() || node->kind() == asTargetKind() ||
                     (node->kind() == prim::ListConstruct && isTensorList(node->output()));
  return known && node->outputs().size() == 1 && readsConstantsOnly(node) &&
         (isTensor(node->output()) || isTensorList(node->output()) || isInteger(node->output())) &&
         !node->isNondeterministic() && !node->hasSideEffects() && !aliases.hasWriters(node) &&
         !aliases.escapesScope(node->outputs());
}

void foldIn(Block* block, const AliasDb& aliases, bool autocast) {
  for (auto* node : block->nodes()) {
    for (auto* nested : node->blocks()) {
      foldIn(nested, aliases, autocast);
    }
    if ((autocast && !keepsType(node)) || !canFold(node, aliases)) {
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

// The parts that a node takes apart a constant into, all of its outputs; empty for other nodes.
std::vector<at::Tensor> partsOfConstant(Node* node) {
  std::vector<at::Tensor> parts;
  if (node->kind() == prim::ConstantChunk) {
    const auto whole = constantTensor(node->input());
    if (whole.defined() && !whole.is_quantized()) {
      parts = whole.chunk(node->i(torch::jit::attr::chunks), node->i(torch::jit::attr::dim));
    }
  } else if (node->kind() == prim::ListUnpack && splits(node->input()->node()) &&
             readsConstantsOnly(node->input()->node())) {
    if (const auto list = torch::jit::runNodeIfInputsAreConstant(node->input()->node())) {
      parts = list->front().toTensorVector();
    }
  }
  return parts.size() == node->outputs().size() ? parts : std::vector<at::Tensor>();
}

// In the place of the parts that it takes a constant apart into, if it does.
bool makeSlices(Node* node) {
  const auto parts = node->hasUses() ? partsOfConstant(node) : std::vector<at::Tensor>();
  if (parts.empty()) {
    return false;
  }
  const bool chunks = node->kind() == prim::ConstantChunk;
  auto* from = chunks ? node : node->input()->node();
  const auto dim =
      chunks ? std::optional(node->i(torch::jit::attr::dim)) : intOf(from->namedInput("dim"));
  if (!dim) {
    return false;
  }
  auto* graph = node->owningGraph();
  const torch::jit::WithInsertPoint guard(node);
  int64_t begin = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    Value* view = nullptr;
    if (from->kind() == aten::unbind) {
      view = graph->insert(aten::select, {from->input(0), *dim, static_cast<int64_t>(i)});
    } else {
      const auto end = begin + parts[i].size(*dim);
      view = graph->insert(aten::slice, {from->input(0), *dim, begin, end, int64_t{1}});
      begin = end;
    }
    view->node()->copyMetadata(node);
    view->setType(node->output(i)->type());
    node->output(i)->replaceAllUsesWith(view);
  }
  return true;
}

void foldSizes(const GraphPtr& graph) {
  KnownShapes shapes;
  std::vector<std::pair<Node*, int64_t>> found;
  walk(graph->block(), [&](Node* node) {
    if (const auto size = shapes.askedSize(node)) {
      found.emplace_back(node, *size);
    }
  });
  if (found.empty()) {
    return;
  }
  const AliasDb aliases(graph);
  for (const auto& [node, size] : found) {
    if (aliases.hasWriters(node->input(0))) {
      continue;  // which may change its sizes
    }
    const torch::jit::WithInsertPoint guard(node);
    node->output()->replaceAllUsesWith(graph->insertConstant(size));
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
  const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  foldSizes(graph);
  for (bool again = true; again;) {
    foldIn(graph->block(), AliasDb(graph), autocast);
    again = false;
    walk(graph->block(), [&](Node* node) { again = makeSlices(node) || again; });
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
