// Pooling. oneDNN Graph: MaxPool, AvgPool (data NCX).
#include <fmt/format.h>

#include <algorithm>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

size_t spatialRank(const Lowering& l, size_t n) {
  l.requireOneDtype();
  if (!l.mayHaveRank(l.arg("self"), static_cast<int64_t>(n) + 2)) {
    l.refuse(fmt::format("input {} is not batched", toText(l.sizes(l.arg("self")))));
  }
  return n;
}

struct Window {
  Shape kernel;
  Shape stride;
  Shape pads_begin;
  Shape pads_end;
  Shape dilation;
};

Window window(const Lowering& l, size_t n) {
  Window w;
  w.kernel = l.ints("kernel_size", n);
  w.stride = l.ints("stride");
  w.stride = w.stride.empty() ? w.kernel : l.ints("stride", n);  // empty: the kernel's
  w.pads_begin = l.ints("padding", n);
  w.dilation = l.has("dilation") ? l.ints("dilation", n) : Shape(n, 1);
  return w;
}

// PyTorch's ceil_mode lets a last window start inside the input but not in the padding. Spelled as
// padding at the end, which floor rounding then counts out exactly; also set without ceil_mode.
bool padToOutput(const Lowering& l, Window& w, size_t n) {
  w.pads_end = w.pads_begin;
  if (!l.maybeSizes(l.arg("self")) || !l.maybeSizes(l.node()->output(0))) {
    return false;
  }
  const auto& in = l.sizes(l.arg("self"));
  const auto& out = l.sizes(l.node()->output(0));
  bool extended = false;
  for (size_t i = 0; i < n; ++i) {
    const auto reach = (out[i + 2] - 1) * w.stride[i] + (w.kernel[i] - 1) * w.dilation[i] + 1;
    const auto needed = reach - in[i + 2] - w.pads_begin[i];
    if (needed > w.pads_end[i]) {
      w.pads_end[i] = needed;
      extended = true;
    }
  }
  return extended;
}

void setWindow(OpSpec& op, const Window& w) {
  op.set_attr<Shape>(Attr::kernel, w.kernel);
  op.set_attr<Shape>(Attr::strides, w.stride);
  op.set_attr<Shape>(Attr::pads_begin, w.pads_begin);
  op.set_attr<Shape>(Attr::pads_end, w.pads_end);
  op.set_attr<std::string>(Attr::data_format, "NCX");
  op.set_attr<std::string>(Attr::rounding_type, "floor");
}

template <size_t n>
void maxPool(Lowering& l) {
  if (l.node()->outputs().size() > 1 && l.node()->output(1)->hasUses()) {
    l.refuse("the indices are used");
  }
  spatialRank(l, n);
  auto w = window(l, n);
  padToOutput(l, w, n);
  const auto* padding = paddingOf(l.node());
  if (padding != nullptr) {
    l.addPadding(padding, w.pads_begin, w.pads_end);
    for (size_t i = 0; i < n; ++i) {
      // oneDNN's least number, where there is nothing else, is finite.
      if (std::max(w.pads_begin[i], w.pads_end[i]) > (w.kernel[i] - 1) * w.dilation[i]) {
        l.refuse("padded so that there is no pixel under a window");
      }
    }
  }
  const auto* data = padding != nullptr ? padding->input(0) : l.arg("self");
  auto& op = l.emit(OpKind::MaxPool, {l.in(data)}, {l.out()});
  setWindow(op, w);
  op.set_attr<Shape>(Attr::dilations, w.dilation);
}

template <size_t n>
void avgPool(Lowering& l) {
  spatialRank(l, n);
  if (l.has("divisor_override") && !l.isNone("divisor_override")) {
    l.refuse("divisor_override");
  }
  auto w = window(l, n);
  const bool include_pad = l.flag("count_include_pad");
  // Whether ceil_mode matters depends on the sizes; where they are unknown it is taken to.
  const bool sizes_known = l.maybeSizes(l.arg("self")) && l.maybeSizes(l.node()->output());
  const bool extended = padToOutput(l, w, n) || (!sizes_known && l.flag("ceil_mode"));
  if (extended && include_pad) {
    l.refuse("ceil_mode with count_include_pad counts padding that oneDNN does not");
  }
  auto& op = l.emit(OpKind::AvgPool, {l.in("self")}, {l.out()});
  setWindow(op, w);
  op.set_attr<bool>(Attr::exclude_pad, !include_pad);
}

// All windows have one size where the input divides evenly; then adaptive is plain pooling.
template <size_t n>
void adaptiveAvgPool(Lowering& l) {
  spatialRank(l, n);
  const auto& in = l.sizes(l.arg("self"));
  const auto& out = l.sizes(l.node()->output());
  Window w;
  for (size_t i = 2; i < n + 2; ++i) {
    if (out[i] == 0 || in[i] % out[i] != 0) {
      l.refuse(fmt::format("{} -> {} is not divisible", toText(in), toText(out)));
    }
    w.kernel.push_back(in[i] / out[i]);
  }
  w.stride = w.kernel;
  w.pads_begin = w.pads_end = Shape(n, 0);
  auto& op = l.emit(OpKind::AvgPool, {l.in("self")}, {l.out()});
  setWindow(op, w);
  op.set_attr<bool>(Attr::exclude_pad, true);
}

}  // namespace

OpFamily poolingOps() {
  constexpr auto kClass = OpClass::compute;
  return {
      {"aten::max_pool1d", kClass, maxPool<1>},
      {"aten::max_pool2d", kClass, maxPool<2>},
      {"aten::max_pool3d", kClass, maxPool<3>},
      {"aten::max_pool2d_with_indices", kClass, maxPool<2>},
      {"aten::avg_pool1d", kClass, avgPool<1>},
      {"aten::avg_pool2d", kClass, avgPool<2>},
      {"aten::avg_pool3d", kClass, avgPool<3>},
      {"aten::adaptive_avg_pool1d", kClass, adaptiveAvgPool<1>},
      {"aten::adaptive_avg_pool2d", kClass, adaptiveAvgPool<2>},
      {"aten::adaptive_avg_pool3d", kClass, adaptiveAvgPool<3>},
  };
}

}  // namespace llga
