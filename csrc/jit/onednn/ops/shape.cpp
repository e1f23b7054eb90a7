// Concatenation, views and data type conversion.
#include <fmt/format.h>

#include <numeric>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

void cat(Lowering& l) {
  const auto* list = l.arg("tensors");
  if (list->node()->kind() != torch::jit::prim::ListConstruct) {
    l.refuse("the list of tensors is not built in the graph");
  }
  const auto dtype = l.dtype(l.node()->output());
  if (dtype != at::kFloat && dtype != at::kBFloat16) {
    l.refuse(fmt::format("data type {}", c10::toString(dtype)));
  }
  std::vector<Operand> inputs;
  for (const auto* item : list->node()->inputs()) {
    if (l.dtype(item) != dtype) {
      l.refuse("mixed data types");
    }
    inputs.push_back(l.in(item));
  }
  if (inputs.size() < 2) {
    l.refuse(fmt::format("{} tensors", inputs.size()));
  }
  for (const auto& input : inputs) {
    if (input.rank() != inputs[0].rank()) {  // PyTorch still lets [0] pass beside any rank
      l.refuse("the tensors differ in rank");
    }
  }
  l.emit(OpKind::Concat, inputs, {l.out()})
      .set_attr<int64_t>(Attr::axis, l.dim(l.integer("dim"), l.node()->output()));
}

// view, reshape, flatten, (un)squeeze: only the result's shape counts.
void reshape(Lowering& l) {
  l.requireOneDtype();
  l.emit(OpKind::StaticReshape, {l.in("self")}, {l.out()})
      .set_attr<Shape>(Attr::shape, l.sizes(l.node()->output()))
      .set_attr<bool>(Attr::special_zero, false);
}

// oneDNN's kernels for batches of matrix products write rows; for columns it has a reference one.
bool isProductByColumns(const Node* transposition, const Shape& order) {
  const auto kind = transposition->input(0)->node()->kind();
  return (kind == torch::jit::aten::matmul || kind == torch::jit::aten::bmm) && !order.empty() &&
         order.back() + 1 != static_cast<int64_t>(order.size());
}

void emitTranspose(Lowering& l, const Shape& order) {
  l.requireOneDtype();
  if (isProductByColumns(l.node(), order)) {
    l.refuse("of a matrix product, whose result would lie by columns");
  }
  l.emit(OpKind::StaticTranspose, {l.in("self")}, {l.out()}).set_attr<Shape>(Attr::order, order);
}

void permute(Lowering& l) {
  auto order = l.ints("dims");
  for (auto& axis : order) {
    axis = l.dim(axis, l.arg("self"));
  }
  emitTranspose(l, order);
}

void transpose(Lowering& l) {
  const auto rank = l.rank(l.arg("self"));
  Shape order(static_cast<size_t>(rank));
  std::iota(order.begin(), order.end(), 0);
  std::swap(order.at(static_cast<size_t>(l.dim(l.integer("dim0"), l.arg("self")))),
            order.at(static_cast<size_t>(l.dim(l.integer("dim1"), l.arg("self")))));
  emitTranspose(l, order);
}

void matrixTranspose(Lowering& l) {
  l.requireRank(l.arg("self"), 2, 2);
  emitTranspose(l, {1, 0});
}

// Any conversion between float32 and bfloat16, by what goes in and what comes out.
void cast(Lowering& l) {
  const auto from = l.dtype(l.arg("self"));
  const auto to = l.dtype(l.node()->output());
  const bool floats =
      (from == at::kFloat && to == at::kBFloat16) || (from == at::kBFloat16 && to == at::kFloat);
  if (!floats) {
    l.refuse(fmt::format("{} -> {} (float32 <-> bfloat16 is mapped)", c10::toString(from),
                         c10::toString(to)));
  }
  l.emit(OpKind::TypeCast, {l.in("self")}, {l.out()});
}

// That of a constant table is taken before (runtime/own_lookup.h).
void embedding(Lowering& l) {
  l.refuse(
      "oneDNN Graph has none, and the fuser's own kernel reads constant tables of float32 or "
      "bfloat16 whose rows lie in one piece");
}

}  // namespace

OpFamily shapeOps() {
  return {
      {"aten::cat", OpClass::compute, cat},
      {"aten::embedding", OpClass::compute, embedding},
      {"aten::view", OpClass::view, reshape},
      {"aten::reshape", OpClass::view, reshape},
      {"aten::flatten.using_ints", OpClass::view, reshape},
      {"aten::unsqueeze", OpClass::view, reshape},
      {"aten::squeeze.dim", OpClass::view, reshape},
      {"aten::squeeze.dims", OpClass::view, reshape},
      {"aten::transpose.int", OpClass::view, transpose},
      {"aten::permute", OpClass::view, permute},
      {"aten::t", OpClass::view, matrixTranspose},
      {"aten::to.dtype", OpClass::cast, cast},
      {"aten::to.other", OpClass::cast, cast},
      {"aten::to.prim_dtype", OpClass::cast, cast},
      {"aten::type_as", OpClass::cast, cast},
      {"aten::_autocast_to_reduced_precision", OpClass::cast, cast},
      {"aten::_autocast_to_full_precision", OpClass::cast, cast},
  };
}

}  // namespace llga
