#include "jit/onednn/runtime/own_resampling.h"

#include <c10/util/accumulate.h>

#include <string>

#include "jit/onednn/ops/op_table.h"
#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

const Symbol& kind() {
  static const auto kind = Symbol::aten("upsample_bilinear2d");
  return kind;
}

bool resizes(const Node* node) {
  const std::string name = node->kind().toUnqualString();
  return node->kind().is_aten() && name.rfind("upsample_", 0) == 0 && findOp(node) != nullptr;
}

bool alignsCorners(const Node* node, const Facts& facts) {
  return node->kind() == kind() &&
         facts.constant(node->namedInput("align_corners")) == c10::IValue(true);
}

Resampling kernelFor(at::ScalarType type, const Shape& sizes, const Shape& result,
                     bool align_corners) {
  return {type == at::kFloat ? Resampling::Type::float32 : Resampling::Type::bfloat16,
          {sizes[0], sizes[1], {sizes[2], sizes[3]}, {result[2], result[3]}},
          align_corners};
}

}  // namespace

bool isOwnResampling(const Node* node, const Facts& facts) {
  if (!ownKernelsAnywhere() || !resizes(node)) {
    return false;
  }
  const auto data = facts.tensor(node->input(0));
  const auto type = data.dtype.value_or(at::kFloat);
  if (type != at::kFloat && type != at::kBFloat16) {
    return false;
  }
  // What our kernel leaves to oneDNN: nothing but sizes may be unknown without kernels for
  // bfloat16.
  const bool lowers = data.dtype == at::kFloat || supportsBf16();
  return alignsCorners(node, facts) || (!data.sizes && lowers);
}

std::optional<FoundResampling> findResampling(const Graph& subgraph, const Facts& facts) {
  const auto* node = soleComputation(subgraph);
  if (node == nullptr || !alignsCorners(node, facts)) {
    return std::nullopt;
  }
  const auto data = facts.tensor(node->input(0));
  const auto result = facts.tensor(node->output());
  if (!isOwnResampling(node, facts) || result.dtype != data.dtype || data.sizes->size() != 4 ||
      c10::multiply_integers(*data.sizes) == 0 || c10::multiply_integers(*result.sizes) == 0) {
    throw CompileError{"resizing of images of neither float32 nor bfloat16, or without pixels"};
  }
  return FoundResampling{kernelFor(*data.dtype, *data.sizes, *result.sizes, /*align_corners=*/true),
                         node->input(0), node->output()};
}

std::optional<Resampling> resampling(const Ops& ops) {
  const auto& op = *ops.front();
  if (!ownKernelsAnywhere() || ops.size() != 1 || op.kind() != OpKind::Interpolate ||
      op.get_attr<std::string>(Attr::mode) != "bilinear") {
    return std::nullopt;
  }
  const auto& data = op.inputs()[0];
  const auto& result = op.outputs()[0];
  constexpr size_t kRank = 4;
  const bool known = (data.dtype == at::kFloat || data.dtype == at::kBFloat16) &&
                     result.dtype == data.dtype && data.sizes && result.sizes &&
                     data.sizes->size() == kRank;
  if (!known || c10::multiply_integers(*data.sizes) * c10::multiply_integers(*result.sizes) == 0) {
    return std::nullopt;
  }
  return kernelFor(data.dtype, *data.sizes, *result.sizes, /*align_corners=*/false);
}

}  // namespace llga
