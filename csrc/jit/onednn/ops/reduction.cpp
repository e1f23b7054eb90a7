// Reductions over dimensions, softmax included.
#include <fmt/format.h>

#include <numeric>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

// Converts first where the call has a dtype argument, as PyTorch does.
Operand input(Lowering& l) {
  if (l.has("dtype") && !l.isNone("dtype")) {
    const auto wanted = static_cast<at::ScalarType>(l.integer("dtype"));
    if (!toDataType(wanted) || wanted == at::kBool) {
      l.refuse(fmt::format("dtype={}", c10::toString(wanted)));
    }
    return l.inAs("self", wanted);
  }
  return l.in("self");
}

void requireFloat(const Lowering& l) {
  for (const auto* value : {l.arg("self"), static_cast<const Value*>(l.node()->output(0))}) {
    const auto dtype = l.dtype(value);
    if (dtype != at::kFloat && dtype != at::kBFloat16) {
      l.refuse(
          fmt::format("data type {} (float32 and bfloat16 are supported)", c10::toString(dtype)));
    }
  }
}

void emitReduce(Lowering& l, OpKind kind, Shape axes) {
  requireFloat(l);
  if (axes.empty()) {  // PyTorch: none named, all meant
    axes.resize(l.sizes(l.arg("self")).size());
    std::iota(axes.begin(), axes.end(), 0);
  }
  for (auto& axis : axes) {
    axis = l.dim(axis, l.arg("self"));
  }
  l.emit(kind, {input(l)}, {l.out()})
      .set_attr<Shape>(Attr::axes, axes)
      .set_attr<bool>(Attr::keep_dims, l.flag("keepdim"));
}

Shape axesOf(const Lowering& l) { return l.isNone("dim") ? Shape{} : l.ints("dim"); }

template <OpKind kind>
void reduce(Lowering& l) {
  emitReduce(l, kind, axesOf(l));
}

// aten::max and aten::min over one dimension give indices as well.
template <OpKind kind>
void extreme(Lowering& l) {
  if (l.node()->output(1)->hasUses()) {
    l.refuse("the indices are used");
  }
  emitReduce(l, kind, {l.integer("dim")});
}

void vectorNorm(Lowering& l) {
  const auto order = l.number("ord");
  if (order != 1 && order != 2) {
    l.refuse(fmt::format("ord={} (1 and 2 are mapped)", order));
  }
  emitReduce(l, order == 1 ? OpKind::ReduceL1 : OpKind::ReduceL2, axesOf(l));
}

template <OpKind kind>
void softmax(Lowering& l) {
  requireFloat(l);
  l.emit(kind, {input(l)}, {l.out()})
      .set_attr<int64_t>(Attr::axis, l.dim(l.integer("dim"), l.arg("self")));
}

// Those that our own kernel computes are taken before (runtime/own_variance.h).
void variance(Lowering& l) {
  requireFloat(l);
  l.refuse(
      "oneDNN Graph has none, and the fuser's own kernel reduces dimensions that are constant");
}

}  // namespace

OpFamily reductionOps() {
  constexpr auto kClass = OpClass::compute;
  return {
      {"aten::mean.dim", kClass, reduce<OpKind::ReduceMean>},
      {"aten::sum.dim_IntList", kClass, reduce<OpKind::ReduceSum>},
      {"aten::amax", kClass, reduce<OpKind::ReduceMax>},
      {"aten::amin", kClass, reduce<OpKind::ReduceMin>},
      {"aten::max.dim", kClass, extreme<OpKind::ReduceMax>},
      {"aten::min.dim", kClass, extreme<OpKind::ReduceMin>},
      {"aten::linalg_vector_norm", kClass, vectorNorm},
      {"aten::var", kClass, variance},
      {"aten::var.dim", kClass, variance},
      {"aten::var.correction", kClass, variance},
      {"aten::std", kClass, variance},
      {"aten::std.dim", kClass, variance},
      {"aten::std.correction", kClass, variance},
      {"aten::softmax.int", kClass, softmax<OpKind::SoftMax>},
      {"aten::log_softmax.int", kClass, softmax<OpKind::LogSoftmax>},
  };
}

}  // namespace llga
