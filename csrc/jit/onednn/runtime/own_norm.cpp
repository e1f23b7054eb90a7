#include "jit/onednn/runtime/own_norm.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/written_norm.h"

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

// A weight or bias that a kernel can take: a constant, or dense numbers of float32. Throws
// CompileError.
void requireParameter(const Value* value, const Facts& facts) {
  const bool constant = value->node()->kind() == torch::jit::prim::Constant;
  if (!constant &&
      (facts.tensor(value).dtype != at::kFloat || facts.tensor(value).strides != Shape{1})) {
    throw CompileError{"a norm whose parameters are neither constants nor dense float32 numbers"};
  }
}

// ------------------------------------------------------------------------------- norms of rows

Symbol rmsNormKind() {
  static const Symbol kind = Symbol::fromQualString("aten::rms_norm");
  return kind;
}

using RowKind = vector_loops::RowNorm::Kind;

RowKind kindOf(WrittenNorm::Kind kind) {
  switch (kind) {
    case WrittenNorm::Kind::root_mean_square:
      return RowKind::root_mean_square;
    case WrittenNorm::Kind::centred:
      return RowKind::centred;
    default:
      return RowKind::length;
  }
}

NormOfRows kernelOf(RowKind kind, double epsilon, const std::optional<End>& end) {
  return {kind,
          0,
          0,
          static_cast<float>(epsilon),
          false,
          false,
          end && end->relu ? 0.F : -std::numeric_limits<float>::infinity(),
          end ? end->activation : std::nullopt};
}

// An aten::rms_norm.
FoundRowNorm rowNormOf(const Node* node, const Facts& facts) {
  const auto* weight = node->input(2);
  const auto given = facts.constant(node->input(3));
  const auto epsilon = given && given->isScalar() ? given->toScalar().toDouble()
                                                  : std::numeric_limits<float>::epsilon();
  const auto sizes = facts.tensor(node->input(0)).sizes;
  if (!given || !(given->isNone() || given->isScalar()) || !sizes || sizes->empty()) {
    throw CompileError{"a root-mean-square norm whose eps is not known"};
  }
  if (!weight->mustBeNone()) {
    requireParameter(weight, facts);
    if (facts.tensor(weight).sizes != Shape{sizes->back()}) {
      throw CompileError{"a root-mean-square norm whose weight is not one of the last dimension"};
    }
  }
  return {kernelOf(RowKind::root_mean_square, epsilon, std::nullopt),
          sizes->size() - 1,
          node->input(0),
          weight->mustBeNone() ? nullptr : weight,
          {},
          {},
          node->output()};
}

// One that is written out.
FoundRowNorm rowNormOf(const WrittenNorm& written, const Facts& facts) {
  const auto end = written.activation != nullptr ? endOf(written.activation, facts) : std::nullopt;
  const auto sizes = facts.tensor(written.data).sizes;
  const auto rank = sizes ? static_cast<int64_t>(sizes->size()) : 0;
  const auto dim = written.dim < 0 ? written.dim + rank : written.dim;
  if (dim < 0 || dim >= rank || (written.activation != nullptr && !end)) {
    throw CompileError{"a norm of an unknown dimension, or with an unknown activation"};
  }
  FoundRowNorm found{kernelOf(kindOf(written.kind), written.epsilon, end),
                     static_cast<size_t>(dim),
                     written.data,
                     nullptr,
                     {},
                     {},
                     written.result};
  const auto columns = (*sizes)[found.dim];
  const auto line = [&](const at::Tensor& constant) {
    if (constant.dim() != 0 && !(liesAlong(constant, dim, rank) && constant.numel() == columns)) {
      throw CompileError{"a norm whose parameters are not those of its dimension"};
    }
    return constant.to(at::kFloat).reshape({-1}).expand({columns});
  };
  for (const auto& factor : written.factors) {
    found.factor = found.factor.defined() ? found.factor * line(factor) : line(factor);
  }
  if (written.addend.defined()) {
    found.addend = line(written.addend);
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
  const auto areFloats = [&](const Value* data, const Value* result) {
    const auto isKnown = [&](const Value* value) {
      return isOf(value, at::kFloat) || isNarrow(facts.tensor(value));
    };
    return isKnown(data) && isKnown(result);
  };
  if (node->kind() == rmsNormKind()) {
    const auto rows = facts.constant(node->input(1));
    const bool known = rows && rows->isIntList() && rows->toIntVector().size() == 1;
    const auto* weight = node->input(2);
    const bool floats = areFloats(node->input(0), node->output()) &&
                        (weight->mustBeNone() || areFloats(weight, node->output()));
    return known && floats ? std::vector<const Node*>{node} : std::vector<const Node*>{};
  }
  if (node->kind() == aten::div || node->kind() == aten::mul) {
    auto found = normAround(node, facts);
    const bool is = found && areFloats(found->data, found->result);
    return is ? std::move(found->nodes) : std::vector<const Node*>{};
  }
  if (!isGroupNorm(node, facts) ||
      !(isOf(node->input(0), at::kFloat) || isOf(node->input(0), at::kBFloat16))) {
    return {};
  }
  const auto* next = readerOf(node->output());
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

std::optional<FoundRowNorm> findRowNorm(const Graph& subgraph, const Facts& facts) {
  const auto nodes = computations(subgraph);
  if (!ownKernelsAnywhere() || subgraph.outputs().size() != 1) {
    return std::nullopt;
  }
  std::optional<FoundRowNorm> found;
  if (nodes.size() == 1 && nodes[0]->kind() == rmsNormKind()) {
    found = rowNormOf(nodes[0], facts);
  }
  for (auto node = nodes.begin(); node != nodes.end() && !found; ++node) {
    const auto written = normAround(*node, facts);
    const bool is_all = written && behind(subgraph.outputs()[0]) == behind(written->result) &&
                        std::all_of(nodes.begin(), nodes.end(), [&](const Node* member) {
                          const auto& of_norm = written->nodes;
                          return std::find(of_norm.begin(), of_norm.end(), member) != of_norm.end();
                        });
    if (is_all) {
      found = rowNormOf(*written, facts);
    }
  }
  if (!found) {
    return std::nullopt;
  }
  const auto data = facts.tensor(found->data);
  const auto result = facts.tensor(found->result);
  // In between as well: float64 has more digits than the kernel.
  const bool floats = std::all_of(nodes.begin(), nodes.end(), [&](const Node* node) {
    const auto between = facts.tensor(node->output());
    return between.dtype == at::kFloat || isNarrow(between);
  });
  if (!floats || !(data.dtype == at::kFloat || isNarrow(data)) || result.sizes != data.sizes ||
      c10::multiply_integers(*data.sizes) == 0) {
    throw CompileError{"a norm of neither float32 nor bfloat16 numbers, or of none"};
  }
  found->kernel.columns = (*data.sizes)[found->dim];
  found->kernel.rows = c10::multiply_integers(*data.sizes) / found->kernel.columns;
  found->kernel.from_narrow = isNarrow(data);
  found->kernel.to_narrow = isNarrow(result);
  return found;
}

}  // namespace llga
