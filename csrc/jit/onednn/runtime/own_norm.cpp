#include "jit/onednn/runtime/own_norm.h"

#include <c10/util/accumulate.h>

#include <limits>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;

bool isNone(const Node* node, const char* name) { return node->namedInput(name)->mustBeNone(); }

// With the statistics of its input.
bool isInstanceNorm(const Node* node, const Facts& facts) {
  return node->kind() == aten::instance_norm && isNone(node, "running_mean") &&
         isNone(node, "running_var") &&
         facts.constant(node->namedInput("use_input_stats")) == c10::IValue(true);
}

struct End {
  bool relu;
  std::optional<Activation> activation;
};

std::optional<End> endOf(const Node* node, const Facts& facts) {
  switch (node->kind()) {
    case aten::relu:
      return End{true, std::nullopt};
    case aten::silu:
      return End{false, Activation::silu};
    case aten::sigmoid:
      return End{false, Activation::sigmoid};
    case aten::tanh:
      return End{false, Activation::tanh};
    case aten::gelu: {
      const auto form = facts.constant(node->namedInput("approximate"));
      if (!form || !form->isString()) {
        return std::nullopt;
      }
      return End{false, form->toStringRef() == "none" ? Activation::gelu : Activation::tanh_gelu};
    }
    default:
      return std::nullopt;
  }
}

// What alone reads the numbers of the value, in its block; null if there is no such node, or
// another one reads its sizes.
const Node* soleReader(const Value* value) {
  const Node* found = nullptr;
  for (const auto& use : value->uses()) {
    if (use.user->kind() == asTargetKind() && use.offset == 1) {
      continue;  // reads no numbers, and comes along
    }
    if (found != nullptr || use.offset != 0 ||
        use.user->owningBlock() != value->node()->owningBlock()) {
      return nullptr;
    }
    found = use.user;
  }
  return found;
}

}  // namespace

std::vector<const Node*> ownNorm(const Node* node, const Facts& facts) {
  if (!ownKernelsAnywhere() || !(node->kind() == aten::group_norm || isInstanceNorm(node, facts))) {
    return {};
  }
  const auto dtype = facts.tensor(node->input(0)).dtype;
  if (dtype != at::kFloat && dtype != at::kBFloat16) {
    return {};
  }
  const auto* next = soleReader(node->output());
  if (next != nullptr && endOf(next, facts)) {
    return {node, next};
  }
  return {node};
}

std::optional<FoundGroupNorm> findGroupNorm(const Graph& subgraph, const Facts& facts) {
  const auto nodes = computations(subgraph);
  if (nodes.empty() || nodes.size() > 2 || subgraph.outputs().size() != 1 ||
      ownNorm(nodes[0], facts).empty()) {
    return std::nullopt;
  }
  const auto* norm = nodes[0];
  std::optional<End> end;
  if (nodes.size() == 2) {
    end = endOf(nodes[1], facts);
    if (!end || nodes[1]->input(0) != norm->output()) {
      return std::nullopt;
    }
  }
  const auto data = facts.tensor(norm->input(0));
  const auto* result = nodes.back()->output();
  if (!data.sizes || data.sizes->size() < 2 || facts.tensor(result).dtype != data.dtype) {
    throw CompileError{"group norm: of mixed data types, or of less than two dimensions"};
  }
  const auto& sizes = *data.sizes;
  const auto groups = norm->kind() == aten::group_norm
                          ? facts.constant(norm->namedInput("num_groups"))
                          : std::optional<c10::IValue>(sizes[1]);
  const auto epsilon = facts.constant(norm->namedInput("eps"));
  if (!groups || !epsilon) {
    throw CompileError{"group norm: its groups or its eps are not known"};
  }
  const auto parameter = [&](const char* name) -> const Value* {
    if (isNone(norm, name)) {
      return nullptr;
    }
    const auto* value = norm->namedInput(name);
    const bool constant = value->node()->kind() == torch::jit::prim::Constant;
    if (!constant &&
        (facts.tensor(value).dtype != at::kFloat || facts.tensor(value).strides != Shape{1})) {
      throw CompileError{"group norm: its parameters are neither constants nor dense float32"};
    }
    return value;
  };
  const bool narrow = data.dtype == at::kBFloat16;
  return FoundGroupNorm{
      {narrow ? GroupNorm::Type::bfloat16 : GroupNorm::Type::float32, sizes[0], sizes[1],
       c10::multiply_integers(sizes.begin() + 2, sizes.end()), groups->toInt(),
       /*channels_last=*/false, epsilon->toDouble(),
       end && end->relu ? 0.F : -std::numeric_limits<float>::infinity(),
       end ? end->activation : std::nullopt},
      norm->input(0),
      parameter("weight"),
      parameter("bias"),
      result};
}

}  // namespace llga
