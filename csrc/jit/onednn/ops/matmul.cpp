// Matrix products. oneDNN Graph: MatMul.
#include <fmt/format.h>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

void requireFloat(const Lowering& l, const char* first, const char* second) {
  const auto dtype = l.dtype(l.arg(first));
  if (dtype != at::kFloat && dtype != at::kBFloat16) {
    l.refuse(
        fmt::format("data type {} (float32 and bfloat16 are supported)", c10::toString(dtype)));
  }
  if (l.dtype(l.arg(second)) != dtype) {
    l.refuse(fmt::format("'{}' and '{}' differ in data type", first, second));
  }
}

void linear(Lowering& l) {
  requireFloat(l, "input", "weight");
  l.requireRank(l.arg("input"), 1, 6);
  l.requireRank(l.arg("weight"), 2, 2);
  const bool constant = l.packable("weight", "input");
  std::vector<Operand> inputs{l.in("input"), constant
                                                 ? l.transposedWeight("weight", "input")
                                                 : l.weight("weight", "input", /*pack=*/false)};
  if (!l.isNone("bias")) {
    l.requireRank(l.arg("bias"), 1, 1);
    inputs.push_back(l.inAs("bias", l.dtype(l.arg("input"))));
  }
  l.emit(OpKind::MatMul, inputs, {l.out()}).set_attr<bool>(Attr::transpose_b, !constant);
}

// The second operand: packed if it is one constant matrix.
Operand matrix(Lowering& l, const char* name, const char* data) {
  return l.isConstantTensor(l.arg(name)) && l.rank(l.arg(name)) == 2 ? l.weight(name, data)
                                                                     : l.in(name);
}

void product(Lowering& l, const char* a, const char* b) {
  requireFloat(l, a, b);
  l.requireRank(l.arg(a), 1, 6);
  l.requireRank(l.arg(b), 1, 6);
  l.emit(OpKind::MatMul, {l.in(a), matrix(l, b, a)}, {l.out()});
}

void matmul(Lowering& l) { product(l, "self", "other"); }
void mm(Lowering& l) { product(l, "self", "mat2"); }

// Not of operands that have one number in the place of several, which einsum repeats.
void einsum(Lowering& l) {
  requireFloat(l, "a", "b");
  l.requireRank(l.arg("a"), 2, 6);
  l.requireRank(l.arg("b"), 2, 6);
  const auto a = l.maybeSizes(l.arg("a"));
  const auto b = l.maybeSizes(l.arg("b"));
  const bool transpose_b = l.flag("transpose_b");
  if (a && b && a->back() != b->end()[transpose_b ? -1 : -2]) {
    l.refuse("operands of different sizes in the dimension that is summed");
  }
  l.emit(OpKind::MatMul, {l.in("a"), l.in("b")}, {l.out()})
      .set_attr<bool>(Attr::transpose_b, transpose_b);
}

// beta * self + alpha * (a @ b)
void addProduct(Lowering& l, const char* a, const char* b) {
  requireFloat(l, a, b);
  const auto dtype = l.dtype(l.arg(a));
  if (l.dtype(l.arg("self")) != dtype) {
    l.refuse("'self' differs in data type");
  }
  const auto alpha = l.number("alpha");
  const auto beta = l.number("beta");
  const auto sizes = l.maybeSizes(l.node()->output());
  const auto added = l.maybeSizes(l.arg("self"));
  if (alpha == 1 && beta == 1 && added && added->size() == 1 && sizes &&
      added->front() == sizes->back()) {
    l.emit(OpKind::MatMul, {l.in(a), matrix(l, b, a), l.in("self")}, {l.out()});
    return;
  }
  const bool add = beta != 0;  // PyTorch ignores self, NaN included, where beta is 0
  auto product = add || alpha != 1 ? l.temp(dtype, sizes) : l.out();
  l.emit(OpKind::MatMul, {l.in(a), matrix(l, b, a)}, {product});
  if (alpha != 1) {
    auto scaled = add ? l.temp(dtype, sizes) : l.out();
    l.emit(OpKind::Multiply, {product, l.scalar(alpha, dtype)}, {scaled});
    product = scaled;
  }
  if (add) {
    auto addend = l.in("self");
    if (beta != 1) {
      auto scaled = l.temp(dtype, added);
      l.emit(OpKind::Multiply, {addend, l.scalar(beta, dtype)}, {scaled});
      addend = scaled;
    }
    l.emit(OpKind::Add, {product, addend}, {l.out()});
  }
}

void addmm(Lowering& l) { addProduct(l, "mat1", "mat2"); }
void baddbmm(Lowering& l) { addProduct(l, "batch1", "batch2"); }

// Those that a kernel of our own computes are taken before (runtime/own_recurrent.h).
void recurrent(Lowering& l) {
  l.refuse(
      "oneDNN Graph has no recurrent layers, and the fuser's own kernel takes those of padded "
      "sequences, or single steps, with constant weights and without projections");
}

}  // namespace

OpFamily matmulOps() {
  return {
      {"aten::linear", OpClass::compute, linear},
      {"aten::matmul", OpClass::compute, matmul},
      {"aten::mm", OpClass::compute, mm},
      {"aten::bmm", OpClass::compute, mm},
      {"aten::addmm", OpClass::compute, addmm},
      {"aten::baddbmm", OpClass::compute, baddbmm},
      {"llga::einsum", OpClass::compute, einsum},
      {"aten::lstm.input", OpClass::compute, recurrent},
      {"aten::lstm.data", OpClass::compute, recurrent},
      {"aten::gru.input", OpClass::compute, recurrent},
      {"aten::gru.data", OpClass::compute, recurrent},
      {"aten::rnn_tanh.input", OpClass::compute, recurrent},
      {"aten::rnn_tanh.data", OpClass::compute, recurrent},
      {"aten::rnn_relu.input", OpClass::compute, recurrent},
      {"aten::rnn_relu.data", OpClass::compute, recurrent},
      {"aten::lstm_cell", OpClass::compute, recurrent},
      {"llga::lstm_cell", OpClass::compute, recurrent},
      {"aten::gru_cell", OpClass::compute, recurrent},
      {"llga::gru_cell", OpClass::compute, recurrent},
      {"aten::rnn_tanh_cell", OpClass::compute, recurrent},
      {"aten::rnn_relu_cell", OpClass::compute, recurrent},
  };
}

}  // namespace llga
