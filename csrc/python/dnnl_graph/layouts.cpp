// oneDNN 3.2 looks for a layout of an input that is `any` until one is found, and none ever is
// where it has put a reshape or a transposition between the input and the op that could choose:
// before grouped, transposed and channels-last convolutions, transposed factors of a product,
// vectors and all that is broadcast. 3.7 gives up, with the status invalid_arguments. Nothing tells
// of the versions in between, so they count as 3.2.
#include <algorithm>

#include "arguments.h"
#include "checks.h"

namespace dnnl_graph_py {

namespace {

bool is(const op_record& op, const char* attribute, const char* value, const char* standard) {
  const auto* given = find_attribute<std::string>(op, attribute);
  return (given == nullptr ? std::string(standard) : *given) == value;
}

bool is_set(const op_record& op, const char* attribute) {
  const auto* given = find_attribute<bool>(op, attribute);
  return given != nullptr && *given;
}

enum class reader { settles, passes_on, never };

// What becomes of an input that is `any`: the op settles it, or has the layout of its output, or
// neither.
reader read_by(const op_record& op, size_t index) {
  const std::string_view kind = name_of(op.kind);
  const auto when = [](bool good) { return good ? reader::settles : reader::never; };
  if (kind == "MatMul") {
    return when((index == 0 && !is_set(op, "transpose_a")) ||
                (index == 1 && !is_set(op, "transpose_b")));
  }
  const bool channels_first = is(op, "data_format", "NCX", "NXC");
  if (kind == "Convolution" || kind == "ConvolutionBackwardData") {
    const auto* groups = find_attribute<int64_t>(op, "groups");
    const bool plain_weights =
        is(op, "weights_format", "OIX", "XIO") && (groups == nullptr || *groups == 1);
    if (index == 1) return when(plain_weights);
    return when(index == 0 ? channels_first : kind == "Convolution");
  }
  if (kind == "ConvTranspose") return when((index == 0 && channels_first) || index == 2);
  if (kind == "ConvTransposeBackwardData") return when(index == 0 && channels_first);
  if (kind == "ConvolutionBackwardWeights" || kind == "ConvTransposeBackwardWeights") {
    return when(index < 2 && channels_first);
  }
  for (const char* one_to_one : {"Concat", "Dequantize", "Quantize", "Reorder", "TypeCast"}) {
    if (kind == one_to_one) return reader::passes_on;
  }
  return reader::never;
}

// The op that keeps logical tensor `id` from being settled, or null.
const op_record* obstacle(const std::vector<const op_record*>& ops, size_t id) {
  for (const op_record* op : ops) {
    for (size_t i = 0; i < op->inputs.size(); ++i) {
      if (op->inputs[i].get_id() != id) continue;
      const reader r = read_by(*op, i);
      if (r == reader::never) return op;
      if (r == reader::settles) continue;
      for (const auto& lt : op->outputs) {
        if (const op_record* found = obstacle(ops, lt.get_id())) return found;
      }
    }
  }
  return nullptr;
}

}  // namespace

void check_any_layouts(const compile_request& request) {
  if (!library_before(3, 7)) return;
  const auto ops = ops_of(request);
  for (const auto& lt : request.inputs) {
    if (lt.get_layout_type() != layout_type::any) continue;
    if (const op_record* op = obstacle(ops, lt.get_id())) {
      throw_value({request.function, "inputs"}, "has " + logical_tensor_text(lt) +
                                                    ", and this version of oneDNN cannot choose "
                                                    "a layout for it that suits " +
                                                    op_text(*op) + ": make it strided");
    }
  }
}

}  // namespace dnnl_graph_py
