// Convolutions. oneDNN Graph: Convolution, ConvTranspose (data NCX, weights OIX / IOX).
#include <fmt/format.h>

#include <algorithm>

#include "jit/onednn/ops/op_table.h"

namespace llga {
namespace {

struct ConvArgs {
  Shape stride;
  Shape pads_begin;
  Shape pads_end;
  Shape dilation;
  int64_t groups = 1;
  std::optional<Shape> output_padding;  // set: transposed
};

size_t spatialRank(const Lowering& lowering) {
  const auto* input = lowering.arg("input");
  const auto* weight = lowering.arg("weight");
  const auto rank = lowering.rank(weight);
  lowering.requireRank(weight, 3, 5);
  if (!lowering.mayHaveRank(input, rank)) {
    lowering.refuse(fmt::format("input {} is not batched for a weight {}",
                                toText(lowering.sizes(input)), toText(lowering.sizes(weight))));
  }
  return static_cast<size_t>(rank - 2);
}

void emitConvolution(Lowering& l, const ConvArgs& args) {
  const auto dtype = l.dtype(l.arg("input"));
  if (dtype != at::kFloat && dtype != at::kBFloat16) {
    l.refuse(
        fmt::format("data type {} (float32 and bfloat16 are supported)", c10::toString(dtype)));
  }
  if (l.dtype(l.arg("weight")) != dtype) {
    l.refuse("weight and input differ in data type");
  }
  const bool transposed = args.output_padding.has_value();
  const bool packable = !transposed && args.groups == 1;
  const auto* padding = paddingOf(l.node());
  const auto* data = padding != nullptr ? padding->input(0) : l.arg("input");
  std::vector<Operand> inputs{l.in(data), l.weight("weight", "input", packable)};
  if (!l.isNone("bias")) {
    // oneDNN takes no f32 bias for a bf16 convolution.
    inputs.push_back(l.inAs("bias", dtype));
  }
  auto& op = l.emit(transposed ? OpKind::ConvTranspose : OpKind::Convolution, inputs, {l.out()});
  op.set_attr<Shape>(Attr::strides, args.stride);
  auto pads_begin = args.pads_begin;
  auto pads_end = args.pads_end;
  if (padding != nullptr) {
    l.addPadding(padding, pads_begin, pads_end);
  }
  op.set_attr<Shape>(Attr::pads_begin, pads_begin);
  op.set_attr<Shape>(Attr::pads_end, pads_end);
  op.set_attr<Shape>(Attr::dilations, args.dilation);
  op.set_attr<int64_t>(Attr::groups, args.groups);
  op.set_attr<std::string>(Attr::data_format, "NCX");
  op.set_attr<std::string>(Attr::weights_format, transposed ? "IOX" : "OIX");
  if (transposed) {
    op.set_attr<Shape>(Attr::output_padding, *args.output_padding);
  }
}

// aten::conv{1,2,3}d, aten::convolution, aten::_convolution: symmetric padding.
void convolution(Lowering& l) {
  const auto n = spatialRank(l);
  ConvArgs args;
  args.stride = l.ints("stride", n);
  args.pads_begin = args.pads_end = l.ints("padding", n);
  args.dilation = l.ints("dilation", n);
  args.groups = l.integer("groups");
  const bool transposed = l.has("transposed") ? l.flag("transposed") : l.has("output_padding");
  if (transposed) {
    // A script computes it from output_size; any value makes the same partition.
    args.output_padding = l.isKnown("output_padding") ? l.ints("output_padding", n) : Shape(n, 0);
  }
  emitConvolution(l, args);
}

// padding='same' | 'valid'. PyTorch puts the odd element at the end.
void convolutionWithPaddingMode(Lowering& l) {
  const auto n = spatialRank(l);
  ConvArgs args;
  args.stride = l.ints("stride", n);
  args.dilation = l.ints("dilation", n);
  args.groups = l.integer("groups");
  args.pads_begin.resize(n, 0);
  args.pads_end.resize(n, 0);
  if (l.text("padding") == "same") {
    const auto& kernel = l.sizes(l.arg("weight"));
    for (size_t i = 0; i < n; ++i) {
      const auto total = args.dilation[i] * (kernel[i + 2] - 1);
      args.pads_begin[i] = total / 2;
      args.pads_end[i] = total - total / 2;
    }
  }
  emitConvolution(l, args);
}

}  // namespace

OpFamily convolutionOps() {
  return {
      {"aten::_convolution", OpClass::compute, convolution},
      {"aten::_convolution.deprecated", OpClass::compute, convolution},
      {"aten::convolution", OpClass::compute, convolution},
      {"aten::conv1d", OpClass::compute, convolution},
      {"aten::conv2d", OpClass::compute, convolution},
      {"aten::conv3d", OpClass::compute, convolution},
      {"aten::conv_transpose1d", OpClass::compute, convolution},
      {"aten::conv_transpose2d.input", OpClass::compute, convolution},
      {"aten::conv_transpose3d.input", OpClass::compute, convolution},
      {"aten::_convolution_mode", OpClass::compute, convolutionWithPaddingMode},
      {"aten::conv1d.padding", OpClass::compute, convolutionWithPaddingMode},
      {"aten::conv2d.padding", OpClass::compute, convolutionWithPaddingMode},
      {"aten::conv3d.padding", OpClass::compute, convolutionWithPaddingMode},
  };
}

}  // namespace llga
