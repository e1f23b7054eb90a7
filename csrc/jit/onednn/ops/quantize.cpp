// Quantization. oneDNN Graph: Quantize, Dequantize.
//
// Dequantized constants (weights) are not here: they are part of the op that reads them, see
// Lowering::weight.
#include "jit/onednn/ops/op_table.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

void quantize(Lowering& l) {
  const auto params = quantizeParams(l.node());
  if (!params) {
    l.refuse("scale, zero point or data type are not constants of an 8-bit quantization");
  }
  if (l.dtype(l.arg("self")) != at::kFloat) {
    l.refuse("quantizes " + std::string(c10::toString(l.dtype(l.arg("self")))) +
             " (float32 is mapped)");
  }
  l.emitQuantization(OpKind::Quantize, l.in("self"), l.quantized(l.node()->output(), *params),
                     *params);
}

void dequantize(Lowering& l) {
  const auto params = dequantizeParams(l.node());
  if (!params) {
    l.refuse("its input was not quantized in this graph with constant parameters");
  }
  l.emitQuantization(OpKind::Dequantize, l.quantized(l.arg("self"), *params), l.out(), *params);
}

}  // namespace

OpFamily quantizeOps() {
  return {
      {"aten::quantize_per_tensor", OpClass::cast, quantize},
      {"aten::quantize_per_tensor.tensor_qparams", OpClass::cast, quantize},
      {"aten::quantize_per_channel", OpClass::cast, quantize},
      {"aten::dequantize.self", OpClass::cast, dequantize},
  };
}

}  // namespace llga
