// Elementwise functions of two and three tensors, with PyTorch's broadcasting.
#include <fmt/format.h>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

// self OP other, `other` a tensor or a number by overload.
Operand other(Lowering& l, const char* name, at::ScalarType dtype) {
  const auto* value = l.arg(name);
  if (isTensor(value)) {
    return l.in(value);
  }
  return l.scalar(l.number(name), dtype);
}

at::ScalarType checked(Lowering& l) {
  l.requireOneDtype();
  return l.dtype(l.node()->output());
}

template <OpKind kind>
void binary(Lowering& l) {
  const auto dtype = checked(l);
  l.emit(kind, {l.in("self"), other(l, "other", dtype)}, {l.out()});
}

// self OP alpha * other, the operands swapped for rsub.
template <OpKind kind, bool reversed>
void withAlpha(Lowering& l) {
  const auto dtype = checked(l);
  const auto alpha = l.number("alpha");
  const auto* second = l.arg("other");
  if (reversed && !isTensor(second)) {
    // other - alpha * self, spelled with self in front: only then is it a post-op.
    auto negated = l.temp(dtype, l.maybeSizes(l.arg("self")));
    l.emit(OpKind::Multiply, {l.in("self"), l.scalar(-alpha, dtype)}, {negated});
    l.emit(OpKind::Add, {negated, l.scalar(l.number("other"), dtype)}, {l.out()});
    return;
  }
  Operand scaled;
  const bool scale_self = reversed && alpha != 1;
  if (!isTensor(second)) {
    scaled = l.scalar(alpha * l.number("other"), dtype);
  } else if (alpha == 1 || reversed) {
    scaled = l.in(second);
  } else {
    scaled = l.temp(dtype, l.maybeSizes(second));
    l.emit(OpKind::Multiply, {l.in(second), l.scalar(alpha, dtype)}, {scaled});
  }
  auto self = l.in("self");
  if (scale_self) {
    auto product = l.temp(dtype, self.sizes);
    l.emit(OpKind::Multiply, {self, l.scalar(alpha, dtype)}, {product});
    self = product;
  }
  if constexpr (reversed) {
    l.emit(kind, {scaled, self}, {l.out()});
  } else {
    l.emit(kind, {self, scaled}, {l.out()});
  }
}

void addcmul(Lowering& l) {
  const auto dtype = checked(l);
  const auto sizes = l.maybeSizes(l.node()->output());
  auto product = l.temp(dtype, std::nullopt);
  if (l.maybeSizes(l.arg("tensor1")) == sizes || l.maybeSizes(l.arg("tensor2")) == sizes) {
    product = l.temp(dtype, sizes);
  }
  l.emit(OpKind::Multiply, {l.in("tensor1"), l.in("tensor2")}, {product});
  if (l.number("value") != 1) {
    auto scaled = l.temp(dtype, product.sizes);
    l.emit(OpKind::Multiply, {product, l.scalar(l.number("value"), dtype)}, {scaled});
    product = scaled;
  }
  l.emit(OpKind::Add, {product, l.in("self")}, {l.out()});
}

at::ScalarType selectDtype(Lowering& l, const char* condition) {
  if (l.dtype(l.arg(condition)) != at::kBool) {
    l.refuse(fmt::format("'{}' is not boolean", condition));
  }
  const auto dtype = l.dtype(l.node()->output());
  if (dtype != at::kFloat && dtype != at::kBFloat16) {
    l.refuse(fmt::format("data type {}", c10::toString(dtype)));
  }
  return dtype;
}

void where(Lowering& l) {
  const auto dtype = selectDtype(l, "condition");
  for (const auto* name : {"self", "other"}) {
    if (isTensor(l.arg(name)) && l.dtype(l.arg(name)) != dtype) {
      l.refuse("the branches differ in data type");
    }
  }
  l.emit(OpKind::Select, {l.in("condition"), other(l, "self", dtype), other(l, "other", dtype)},
         {l.out()});
}

void maskedFill(Lowering& l) {
  const auto dtype = selectDtype(l, "mask");
  l.emit(OpKind::Select, {l.in("mask"), l.scalar(l.number("value"), dtype), l.in("self")},
         {l.out()});
}

}  // namespace

OpFamily binaryOps() {
  constexpr auto kClass = OpClass::elementwise;
  return {
      {"aten::add.Tensor", kClass, withAlpha<OpKind::Add, false>},
      {"aten::add.Scalar", kClass, withAlpha<OpKind::Add, false>},
      {"aten::sub.Tensor", kClass, withAlpha<OpKind::Subtract, false>},
      {"aten::sub.Scalar", kClass, withAlpha<OpKind::Subtract, false>},
      {"aten::rsub.Tensor", kClass, withAlpha<OpKind::Subtract, true>},
      {"aten::rsub.Scalar", kClass, withAlpha<OpKind::Subtract, true>},
      {"aten::mul.Tensor", kClass, binary<OpKind::Multiply>},
      {"aten::mul.Scalar", kClass, binary<OpKind::Multiply>},
      {"aten::div.Tensor", kClass, binary<OpKind::Divide>},
      {"aten::div.Scalar", kClass, binary<OpKind::Divide>},
      {"aten::maximum", kClass, binary<OpKind::Maximum>},
      {"aten::minimum", kClass, binary<OpKind::Minimum>},
      {"aten::addcmul", kClass, addcmul},
      {"aten::where.self", kClass, where},
      {"aten::where.ScalarOther", kClass, where},
      {"aten::where.ScalarSelf", kClass, where},
      {"aten::masked_fill.Scalar", kClass, maskedFill},
  };
}

}  // namespace llga
