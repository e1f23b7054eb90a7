#include "jit/onednn/runtime/own_norm.h"

#include <c10/util/accumulate.h>

#include <algorithm>
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

bool isGroupNorm(const Node* node, const Facts& facts) {
  return node->kind() == aten::group_norm || isInstanceNorm(node, facts);
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
    if (found != nullptr || use.user->owningBlock() != value->node()->owningBlock()) {
      return nullptr;
    }
    found = use.user;
  }
  return found;
}

// A weight or bias that a kernel can take: a constant, or dense numbers of float32. Throws
// CompileError.
void requireParameter(const Value* value, const Facts& facts) {
  const bool constant = value->node()->kind() == torch::jit::prim::Constant;
  if (!constant &&
      (facts.tensor(value).dtype != at::kFloat || facts.tensor(value).strides != Shape{1})) {
    throw CompileError{"a norm whose parameters are neither constants nor dense float32 numbers"};
  }
}

// ----------------------------------------------------------------------- root-mean-square norms

Symbol rmsNormKind() {
  static const Symbol kind = Symbol::fromQualString("aten::rms_norm");
  return kind;
}

bool isCast(const Node* node) {
  return node->kind() == aten::to || node->kind() == reducedPrecisionKind();
}

// x of pow(x, 2) or x * x; null for others.
const Value* squaredBy(const Node* node, const Facts& facts) {
  if (node->kind() == aten::pow) {
    const auto exponent = facts.constant(node->input(1));
    const bool two = exponent && exponent->isScalar() && exponent->toScalar().equal(2);
    return two ? node->input(0) : nullptr;
  }
  return node->kind() == aten::mul && node->input(0) == node->input(1) ? node->input(0) : nullptr;
}

// Whether it is a mean over the last dimension, which is kept.
bool isMeanOfRows(const Node* node, const Facts& facts) {
  if (node->kind() != aten::mean || node->inputs().size() != 4 || !isNone(node, "dtype")) {
    return false;
  }
  const auto dims = facts.constant(node->input(1));
  return dims && dims->isIntList() && dims->toIntVector() == std::vector<int64_t>{-1} &&
         facts.constant(node->input(2)) == c10::IValue(true);
}

// The other operand of a product; null if `node` is none of `value`.
const Value* factorBeside(const Node* node, const Value* value) {
  if (node == nullptr || node->kind() != aten::mul || !isTensor(node->input(1))) {
    return nullptr;
  }
  const bool first = node->input(0) == value;
  return first || node->input(1) == value ? node->input(first ? 1 : 0) : nullptr;
}

struct WrittenNorm {
  const Value* data;
  const Value* epsilon;
  const Value* weight;  // or null
  const Value* result;
  std::vector<const Node*> nodes;
};

WrittenNorm normOf(const Node* node) {
  const auto* weight = node->input(2);
  return {node->input(0),
          node->input(3),
          weight->mustBeNone() ? nullptr : weight,
          node->output(),
          {node}};
}

// Around the aten::rsqrt; nothing if its data or what follows is anything else.
std::optional<WrittenNorm> normAround(const Node* root, const Facts& facts) {
  const auto* sum = root->input(0)->node();
  if (sum->kind() != aten::add || isTensor(sum->input(1)) ||
      facts.constant(sum->input(2)) != c10::IValue(1)) {
    return std::nullopt;
  }
  const auto* mean = sum->input(0)->node();
  if (!isMeanOfRows(mean, facts)) {
    return std::nullopt;
  }
  const auto* square = mean->input(0)->node();
  const auto* data = squaredBy(square, facts);
  const auto* product = soleReader(root->output());
  for (const auto* node : {square, mean, sum}) {
    if (soleReader(node->output()) == nullptr) {
      return std::nullopt;
    }
  }
  if (data == nullptr) {
    return std::nullopt;
  }
  // What is squared may be a cast of what is divided, or both are of one.
  const auto* cast = isCast(data->node()) ? data->node() : nullptr;
  const auto* divided = factorBeside(product, root->output());
  if (divided != data && (cast == nullptr || divided != cast->input(0))) {
    return std::nullopt;
  }
  WrittenNorm found{
      divided, sum->input(1), nullptr, product->output(), {square, mean, sum, root, product}};
  const auto& uses = data->uses();
  const bool inside = std::all_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
    return use.user == square || use.user == product;
  });
  if (cast != nullptr && inside && cast->owningBlock() == root->owningBlock()) {
    found.data = cast->input(0);
    found.nodes.insert(found.nodes.begin(), cast);
  } else if (divided != data) {
    return std::nullopt;
  }
  const auto* next = soleReader(found.result);
  if (next != nullptr && isCast(next)) {
    found.result = next->output();
    found.nodes.push_back(next);
    next = soleReader(found.result);
  }
  const auto* weight = factorBeside(next, found.result);
  const auto known = weight != nullptr ? facts.constant(weight) : std::nullopt;
  if (known && known->isTensor() && known->toTensor().dim() == 1) {
    found.weight = weight;
    found.result = next->output();
    found.nodes.push_back(next);
    next = soleReader(found.result);
    if (next != nullptr && isCast(next) && isNarrow(facts.tensor(next->output()))) {
      found.result = next->output();
      found.nodes.push_back(next);
    }
  }
  // The kernel writes numbers like those it reads: where bfloat16 is computed in float32 from here
  // on, the cast stays before it.
  if (found.data != data && divided == data && isNarrow(facts.tensor(found.data)) &&
      facts.tensor(found.result).dtype == at::kFloat) {
    found.data = data;
    found.nodes.erase(found.nodes.begin());
  }
  return found;
}

}  // namespace

std::vector<const Node*> ownNorm(const Node* node, const Facts& facts) {
  if (!ownKernelsAnywhere()) {
    return {};
  }
  const auto isOf = [&](const Value* value, at::ScalarType type) {
    return facts.tensor(value).dtype.value_or(type) == type;
  };
  const auto ofFloats = [&](const WrittenNorm& norm) {
    const auto isKnown = [&](const Value* value) {
      return isOf(value, at::kFloat) || isNarrow(facts.tensor(value));
    };
    const bool floats = isKnown(norm.data) && isKnown(norm.result) &&
                        (norm.weight == nullptr || isKnown(norm.weight));
    return floats ? norm.nodes : std::vector<const Node*>{};
  };
  if (node->kind() == rmsNormKind()) {
    const auto rows = facts.constant(node->input(1));
    const bool known = rows && rows->isIntList() && rows->toIntVector().size() == 1;
    return known ? ofFloats(normOf(node)) : std::vector<const Node*>{};
  }
  if (node->kind() == aten::rsqrt) {
    const auto found = normAround(node, facts);
    return found ? ofFloats(*found) : std::vector<const Node*>{};
  }
  if (!isGroupNorm(node, facts) ||
      !(isOf(node->input(0), at::kFloat) || isOf(node->input(0), at::kBFloat16))) {
    return {};
  }
  const auto* next = soleReader(node->output());
  if (next != nullptr && next->input(0) == node->output() && endOf(next, facts)) {
    return {node, next};
  }
  return {node};
}

std::optional<FoundGroupNorm> findGroupNorm(const Graph& subgraph, const Facts& facts) {
  const auto nodes = computations(subgraph);
  if (!ownKernelsAnywhere() || nodes.empty() || nodes.size() > 2 ||
      subgraph.outputs().size() != 1 || !isGroupNorm(nodes[0], facts)) {
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
    requireParameter(value, facts);
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

std::optional<FoundRmsNorm> findRmsNorm(const Graph& subgraph, const Facts& facts) {
  const auto nodes = computations(subgraph);
  const auto root = std::find_if(nodes.begin(), nodes.end(), [](const Node* node) {
    return node->kind() == aten::rsqrt || node->kind() == rmsNormKind();
  });
  if (!ownKernelsAnywhere() || root == nodes.end() || subgraph.outputs().size() != 1) {
    return std::nullopt;
  }
  const auto found =
      (*root)->kind() == aten::rsqrt ? normAround(*root, facts) : std::optional(normOf(*root));
  if (!found || found->nodes.size() != nodes.size() ||
      behind(subgraph.outputs()[0]) != behind(found->result)) {
    return std::nullopt;
  }
  const auto data = facts.tensor(found->data);
  const auto given = facts.constant(found->epsilon);
  const auto epsilon = given && given->isNone()  // of aten::rms_norm
                           ? c10::IValue(double{std::numeric_limits<float>::epsilon()})
                           : given.value_or(c10::IValue());
  const auto result = facts.tensor(found->result);
  // In between as well: float64 has more digits than the kernel.
  const bool floats = std::all_of(nodes.begin(), nodes.end(), [&](const Node* node) {
    const auto between = facts.tensor(node->output());
    return between.dtype == at::kFloat || isNarrow(between);
  });
  const bool known = floats && (isNarrow(data) ? isNarrow(result) : data.dtype == at::kFloat);
  if (!known || !epsilon.isScalar() || !data.sizes || data.sizes->empty() ||
      result.sizes != data.sizes) {
    throw CompileError{"a root-mean-square norm of neither float32 nor bfloat16 numbers"};
  }
  if (found->weight != nullptr) {
    requireParameter(found->weight, facts);
    if (facts.tensor(found->weight).sizes != Shape{data.sizes->back()}) {
      throw CompileError{"a root-mean-square norm whose weight is not one of the last dimension"};
    }
  }
  return FoundRmsNorm{epsilon.toScalar().toDouble(), found->data, found->weight, found->result};
}

}  // namespace llga
