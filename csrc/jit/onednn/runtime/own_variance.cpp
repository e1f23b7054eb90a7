#include "jit/onednn/runtime/own_variance.h"

#include <c10/util/accumulate.h>

#include <numeric>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;

// An argument, which not all overloads have: else it is None.
std::optional<c10::IValue> argument(const Node* node, const char* name, const Facts& facts) {
  return node->hasNamedInput(name) ? facts.constant(node->namedInput(name))
                                   : std::optional(c10::IValue());
}

// The dimensions as they are given: none where all are meant.
std::optional<Shape> dimensionsOf(const Node* node, const Facts& facts) {
  const auto known = argument(node, "dim", facts);
  if (!known || !(known->isNone() || known->isIntList())) {
    return std::nullopt;
  }
  return known->isNone() ? Shape{} : known->toIntVector();
}

std::optional<double> correctionOf(const Node* node, const Facts& facts) {
  if (node->hasNamedInput("unbiased")) {
    const auto known = argument(node, "unbiased", facts);
    return known && known->isBool() ? std::optional(known->toBool() ? 1.0 : 0.0) : std::nullopt;
  }
  const auto known = argument(node, "correction", facts);
  if (!known || !(known->isNone() || known->isScalar())) {
    return std::nullopt;
  }
  return known->isNone() ? 1.0 : known->toScalar().toDouble();
}

}  // namespace

bool isOwnVariance(const Node* node, const Facts& facts) {
  if ((node->kind() != aten::var && node->kind() != aten::std) || !ownKernelsAnywhere()) {
    return false;
  }
  const auto type = facts.tensor(node->input(0)).dtype.value_or(at::kFloat);
  return (type == at::kFloat || type == at::kBFloat16) && dimensionsOf(node, facts) &&
         correctionOf(node, facts);
}

std::optional<FoundVariance> findVariance(const Graph& subgraph, const Facts& facts) {
  const auto* node = soleComputation(subgraph);
  if (node == nullptr || (node->kind() != aten::var && node->kind() != aten::std)) {
    return std::nullopt;
  }
  FoundVariance found{{}, {}, node->input(0), node->output()};
  const auto data = facts.tensor(found.data);
  const auto axes = dimensionsOf(node, facts);
  const auto correction = correctionOf(node, facts);
  if (!isOwnVariance(node, facts) || facts.tensor(found.result).dtype != data.dtype) {
    throw CompileError{"a variance of neither float32 nor bfloat16 numbers"};
  }
  const auto rank = static_cast<int64_t>(data.sizes->size());
  for (const auto axis : *axes) {
    found.axes.push_back(axis < 0 ? axis + rank : axis);
  }
  if (axes->empty()) {
    found.axes.resize(data.sizes->size());
    std::iota(found.axes.begin(), found.axes.end(), 0);
  }
  int64_t rows = 1;
  for (const auto axis : found.axes) {
    rows *= (*data.sizes)[static_cast<size_t>(axis)];
  }
  if (rows < 2 || c10::multiply_integers(*data.sizes) == 0) {
    throw CompileError{"a variance of less than two numbers"};
  }
  found.kernel = {
      .type = isNarrow(data) ? Reduction::Type::bfloat16 : Reduction::Type::float32,
      .kind = node->kind() == aten::std ? Reduction::Kind::deviation : Reduction::Kind::variance,
      .images = 1,
      .rows = 1,
      .columns = 1,
      .correction = *correction};
  return found;
}

}  // namespace llga
