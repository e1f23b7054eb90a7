// Scaled dot product attention. oneDNN Graph has no single op; its backend knows the pattern
//
//   MatMul(q, k^T) -> Multiply(scale) [-> Add(float mask) | Select(bool mask)] -> SoftMax ->
//   MatMul(v)
//
// with the scale after the product and shaped {1}. One partition from oneDNN 3.7 on; where the
// pieces do not end up in one partition the bridge leaves the node to PyTorch's own kernel.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

// The additive mask of is_causal: 0 on and below the diagonal, -inf above.
Operand causalMask(Lowering& l, int64_t queries, int64_t keys, at::ScalarType dtype) {
  return l.constant(dtype, {1, 1, queries, keys}, [=] {
    return at::full({1, 1, queries, keys}, -std::numeric_limits<double>::infinity(),
                    at::TensorOptions().dtype(dtype))
        .triu_(1);
  });
}

void scaledDotProductAttention(Lowering& l) {
  const auto* query = l.arg("query");
  const auto* key = l.arg("key");
  const auto* value = l.arg("value");
  const auto dtype = l.dtype(query);
  if ((dtype != at::kFloat && dtype != at::kBFloat16) || l.dtype(key) != dtype ||
      l.dtype(value) != dtype) {
    l.refuse("query, key and value need one data type, float32 or bfloat16");
  }
  if (l.number("dropout_p") != 0) {
    l.refuse("dropout_p is not 0");
  }
  if (l.flag("enable_gqa")) {
    l.refuse("enable_gqa (grouped heads) is not mapped");
  }
  l.requireRank(query, 4, 4);
  const auto q = l.sizes(query);
  const auto k = l.sizes(key);
  if (k.size() != 4 || q[0] != k[0] || q[1] != k[1]) {
    l.refuse(fmt::format("query {} and key {} differ in batch or heads", toText(q), toText(k)));
  }
  const double scale =
      l.isNone("scale") ? 1.0 / std::sqrt(static_cast<double>(q[3])) : l.number("scale");

  const Shape scores_shape{q[0], q[1], q[2], k[2]};
  auto scores = l.temp(dtype, scores_shape);
  l.emit(OpKind::MatMul, {l.in("query"), l.in("key")}, {scores})
      .set_attr<bool>(Attr::transpose_b, true);
  auto scaled = l.temp(dtype, scores_shape);
  l.emit(OpKind::Multiply, {scores, l.scalar(scale, dtype)}, {scaled});

  auto masked = scaled;
  if (l.flag("is_causal")) {
    masked = l.temp(dtype, scores_shape);
    l.emit(OpKind::Add, {scaled, causalMask(l, q[2], k[2], dtype)}, {masked});
  } else if (!l.isNone("attn_mask")) {
    const auto* mask = l.arg("attn_mask");
    l.requireRank(mask, 1, 4);
    masked = l.temp(dtype, scores_shape);
    if (l.dtype(mask) == at::kBool) {
      l.emit(OpKind::Select,
             {l.in("attn_mask"), scaled, l.scalar(-std::numeric_limits<double>::infinity(), dtype)},
             {masked});
    } else {
      if (l.dtype(mask) != dtype) {
        l.refuse("the float mask differs in data type");
      }
      l.emit(OpKind::Add, {scaled, l.in("attn_mask")}, {masked});
    }
  }
  auto weights = l.temp(dtype, scores_shape);
  l.emit(OpKind::SoftMax, {masked}, {weights}).set_attr<int64_t>(Attr::axis, -1);
  l.emit(OpKind::MatMul, {weights, l.in("value")}, {l.out()});
}

}  // namespace

OpFamily attentionOps() {
  return {{"aten::scaled_dot_product_attention", OpClass::compute, scaledDotProductAttention},
          {"llga::scaled_dot_product_attention", OpClass::compute, scaledDotProductAttention}};
}

}  // namespace llga
