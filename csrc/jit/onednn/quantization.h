// Affine quantization: q = round(x / scale) + zero_point, in 8 bit. What passes, op table and
// operator share about it. No oneDNN here. Stateless; any thread that owns the graph may call.
//
// An aten::dequantize reads its parameters from the tensor it gets; a oneDNN Graph op needs them
// when it is built. The pass prepare_quantized finds them in the graph and writes them onto the
// node.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/quantized/Quantizer.h>

#include <optional>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

struct QuantParams {
  at::ScalarType dtype = at::kQUInt8;  // or kQInt8
  std::vector<double> scales;          // one, or one for each channel
  std::vector<int64_t> zero_points;    // as many
  int64_t axis = -1;                   // of the channels; -1: per tensor

  bool perTensor() const { return axis < 0; }
  bool operator==(const QuantParams&) const = default;
};

// aten::quantize_per_tensor of one tensor, or aten::quantize_per_channel.
bool isQuantize(const Node* node);
// What such a node quantizes with; nullopt unless it is fixed, and 8 bit.
std::optional<QuantParams> quantizeParams(const Node* node);

bool isDequantize(const Node* node);
// What prepare_quantized has found out about the input of an aten::dequantize.
std::optional<QuantParams> dequantizeParams(const Node* node);
void setDequantizeParams(Node* node, const QuantParams& params);

// What `value` is dequantized from, by a node with known parameters or a group that is one; or
// null.
const Value* dequantizedFrom(const Value* value);
// Of such an input of `reader`, in its block: the node, for it alone. Where others read it too, or
// it is in a group, a copy in front of the reader. Null for other inputs.
Node* ownDequantize(Node* reader, size_t input);

// nullopt unless `tensor` is quantized to 8 bit.
std::optional<QuantParams> paramsOf(const at::Tensor& tensor);

at::QuantizerPtr makeQuantizer(const QuantParams& params);

// A quantized tensor's numbers as a plain uint8 or int8 tensor over the same memory.
at::Tensor integersOf(const at::Tensor& quantized);

// A weight that is kept in 8 bit:
//   %w : Tensor = aten::dequantize(%constant)      and maybe      aten::to(%w, dtype)
// It takes part in a group as a constant does: each group that reads it has it inside.
struct QuantizedConstant {
  at::Tensor tensor;
  QuantParams params;
  at::ScalarType dtype = at::kFloat;  // that it is dequantized to
};
std::optional<QuantizedConstant> quantizedConstant(const Value* value);
bool isQuantizedConstant(const Node* node);

}  // namespace llga
