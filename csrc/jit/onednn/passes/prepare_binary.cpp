// Spells binary ops the way one oneDNN op computes them. All rewrites give bit-equal results.
//
// 1. A constant 0-dim tensor operand is a number:
//      aten::mul(%x, %two : Tensor = prim::Constant[value={2}]())  ->  aten::mul(%x, 2.)
//    and a number on the left of a non-commutative op goes to the right:
//      aten::sub(%two, %x)  ->  aten::rsub(%x, 2.)
// 2. Type promotion is a cast of its own, because no oneDNN before 3.12 mixes data types:
//      aten::add(%bf16, %f32)  ->  aten::add(aten::to(%bf16, float), %f32)
//    A cast that ends up in no group is taken out again by the graph fuser. Not where the result is
//    cast to bfloat16, as that of an in-place op is.
// 3. aten::expand or aten::expand_as of an operand is what the binary op does anyway:
//      aten::add(%x, aten::expand(%bias, %sizes, ...))
//    ->
//      aten::add(%x, llga::operand(%bias, %x, %sizes))
//    where %x alone already has the result's sizes; the op, which is the operand itself then, sees
//    to it that other calls get what they got.
#include <ATen/ATen.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::WithInsertPoint;
namespace aten = torch::jit::aten;

std::optional<at::Scalar> constantNumber(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  if (!known || !known->isTensor() || !known->toTensor().defined() ||
      known->toTensor().dim() != 0 || !known->toTensor().is_cpu()) {
    return std::nullopt;
  }
  const auto type = known->toTensor().scalar_type();
  if (!c10::isFloatingType(type) && !c10::isIntegralType(type, /*includeBool=*/false)) {
    return std::nullopt;
  }
  return known->toTensor().item();
}

// A float tensor with at least one dimension: numbers take part in its arithmetic without
// changing its data type.
bool isFloatArray(const Value* value, const Facts& facts) {
  const auto known = facts.tensor(value);
  return known.dtype && c10::isFloatingType(*known.dtype) && known.sizes && !known.sizes->empty();
}

void numberOperand(Node* node, const Facts& facts) {
  if (node->kind() == aten::maximum || node->kind() == aten::minimum) {
    return;  // no overload takes a number; the op table handles the tensor
  }
  auto number = constantNumber(node->input(1));
  if (!number) {
    number = constantNumber(node->input(0));
    if (!number || !isFloatArray(node->input(1), facts) || node->kind() == aten::div) {
      return;
    }
    // The number moves to the right.
    if (node->kind() == aten::sub || node->kind() == aten::rsub) {
      const auto alpha = torch::jit::toIValue(node->input(2));
      if (!alpha || !alpha->isScalar() || alpha->toScalar().toDouble() != 1) {
        return;
      }
      auto* swapped =
          node->owningGraph()->create(node->kind() == aten::sub ? aten::rsub : aten::sub,
                                      {node->input(1), node->input(0), node->input(2)});
      swapped->insertBefore(node);
      swapped->output()->copyMetadata(node->output());
      swapped->copyMetadata(node);
      node->output()->replaceAllUsesWith(swapped->output());
      numberOperand(swapped, facts);
      node->removeAllInputs();
      return;
    }
    if (node->kind() == aten::add) {
      const auto alpha = torch::jit::toIValue(node->input(2));
      if (!alpha || !alpha->isScalar() || alpha->toScalar().toDouble() != 1) {
        return;
      }
    }
    auto* array = node->input(1);
    node->replaceInput(1, node->input(0));
    node->replaceInput(0, array);
  }
  if (!isFloatArray(node->input(0), facts)) {
    return;
  }
  WithInsertPoint guard(node);
  node->replaceInput(1, node->owningGraph()->insertConstant(number->toDouble()));
}

void castOperand(Node* node, size_t index) {
  auto* graph = node->owningGraph();
  WithInsertPoint guard(node);
  auto* source = node->input(index);
  if (source->node()->kind() == torch::jit::prim::Constant) {
    node->replaceInput(
        index, graph->insertConstant(torch::jit::toIValue(source)->toTensor().to(at::kFloat)));
    return;
  }
  auto* cast = castToFloat(source, node);
  cast->i_(insertedAttr(), 1);
  node->replaceInput(index, cast->output());
}

// Of the first `count` inputs, those of bfloat16 beside others of float32.
void castOperands(Node* node, size_t count, const Facts& facts) {
  std::vector<size_t> narrow;
  for (size_t i = 0; i < count; ++i) {
    const auto known = facts.tensor(node->input(i));
    if (!known.sizes || known.sizes->empty() || !(isNarrow(known) || known.dtype == at::kFloat)) {
      return;
    }
    if (isNarrow(known)) {
      narrow.push_back(i);
    }
  }
  if (narrow.size() < count) {
    for (const auto i : narrow) {
      castOperand(node, i);
    }
  }
}

// Whether it was written into bfloat16: then a group, in which that costs nothing, must not compute
// in float32.
bool isWrittenIntoNarrow(const Node* node, const Facts& facts) {
  const auto& uses = node->output()->uses();
  return std::any_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
    return use.user->kind() == asTargetKind() && use.offset == 0 &&
           isNarrow(facts.tensor(use.user->input(1)));
  });
}

void registerOperand() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::operand(Tensor(a) x, Tensor other, int[]? sizes) -> Tensor(a)",
      [](torch::jit::Stack& stack) {
        const auto sizes = torch::jit::pop(stack);
        const auto other = torch::jit::pop(stack).toTensor();
        auto expanded = torch::jit::peek(stack, 0, 1)
                            .toTensor()
                            .expand(sizes.isNone() ? other.sizes().vec() : sizes.toIntVector());
        if (expanded.sizes() != other.sizes()) {
          torch::jit::peek(stack, 0, 1) = std::move(expanded);
        }
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

// The other operand may have other sizes in another call, so that the expansion is not just gone.
void dropExpand(Node* node, const Facts& facts) {
  const auto result = facts.tensor(node->output()).sizes;
  if (!result) {
    return;
  }
  auto* graph = node->owningGraph();
  for (size_t i = 0; i < 2; ++i) {
    auto* source = node->input(i)->node();
    auto* other = node->input(1 - i);
    const bool expands = source->kind() == aten::expand ||
                         (source->kind() == aten::expand_as && source->input(1) == other);
    if (!expands || facts.tensor(other).sizes != result) {
      continue;
    }
    registerOperand();
    const WithInsertPoint guard(node);
    auto* sizes =
        source->kind() == aten::expand ? source->input(1) : graph->insertConstant(c10::IValue());
    auto* operand =
        graph->insertNode(graph->create(operandKind(), {source->input(0), other, sizes}));
    operand->copyMetadata(source);
    operand->output()->setType(source->input(0)->type());
    node->replaceInput(i, operand->output());
    if (!source->output()->hasUses()) {
      source->destroy();  // or it would read both tensors still
    }
  }
}

void visit(Block* block, const Facts& facts) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    auto* node = *it++;
    for (auto* nested : node->blocks()) {
      visit(nested, facts);
    }
    if (node->kind() == aten::addcmul) {
      castOperands(node, 3, facts);
    }
    if (!isBinary(node) || !isTensor(node->input(1))) {
      continue;
    }
    dropExpand(node, facts);
    numberOperand(node, facts);
    if (node->inputs().empty()) {  // replaced by its mirror image
      node->destroy();
      continue;
    }
    if (isTensor(node->input(1)) && !isWrittenIntoNarrow(node, facts)) {
      castOperands(node, 2, facts);
    }
  }
}

}  // namespace

Node* castToFloat(Value* value, Node* node) {
  auto* graph = node->owningGraph();
  const WithInsertPoint guard(node);
  auto* no = graph->insertConstant(false);
  auto* cast = graph->insertNode(
      graph->create(aten::to, {value, graph->insertConstant(static_cast<int64_t>(at::kFloat)), no,
                               no, graph->insertConstant(c10::IValue())}));
  if (auto type = value->type()->cast<c10::TensorType>()) {
    cast->output()->setType(type->withScalarType(at::kFloat));
  }
  cast->copyMetadata(node);
  return cast;
}

void prepareBinary(const GraphPtr& graph) { visit(graph->block(), StaticFacts()); }

}  // namespace llga
