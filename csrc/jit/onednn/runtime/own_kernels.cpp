#include "jit/onednn/runtime/own_kernels.h"

#include <c10/util/accumulate.h>

#include <algorithm>

#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/environment.h"

namespace llga {
namespace {

// Those for AVX2 stand in for oneDNN's, not for what it has for AVX-512.
bool ownAvx2Kernels() {
  static const bool can = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  return ownKernels() && usesAvxGemm() && can;
}

std::optional<Activation> activationOf(OpKind kind) {
  switch (kind) {
    case OpKind::Sigmoid:
      return Activation::sigmoid;
    case OpKind::Tanh:
      return Activation::tanh;
    case OpKind::GELU:
      return Activation::gelu;
    default:
      return std::nullopt;
  }
}

// Of float32 images of known sizes, with constant parameters.
bool isImageConvolution(const OpSpec& op, const LoweredGraph& graph) {
  if (op.kind() != OpKind::Convolution) {
    return false;
  }
  const auto& inputs = op.inputs();  // data, weight, and maybe bias
  const bool parameters = std::all_of(inputs.begin() + 1, inputs.end(), [&](const Operand& input) {
    return input.dtype == at::kFloat && graph.operands.at(input.id).constant;
  });
  const auto& data = inputs[0];
  const auto& result = op.outputs()[0];
  return parameters && data.dtype == at::kFloat && data.sizes && data.sizes->size() == 4 &&
         inputs[1].sizes && result.dtype == at::kFloat && result.sizes;
}

std::array<int64_t, 2> pair(const Shape& values) { return {values.end()[-2], values.end()[-1]}; }

// Groups of 4 channels take its gemm. With groups of 8, pixels that are a multiple of 512 bytes
// apart share few sets of the cache, and 3.2 is slow on all large images.
bool isSlowInOneDnn(const GroupedConvolution& kernel) {
  static const bool old = dnnl_version()->minor < 7;
  return kernel.channels == 4 || kernel.groups * kernel.channels % 128 == 0 ||
         (old && kernel.size[1] >= 56);
}

}  // namespace

bool ownKernels() {
  static const bool on = !switchedOff("LLGA_FUSER_OWN_KERNELS");
  return on;
}

bool winogradIsOn() {
  static const bool on = !switchedOff("LLGA_FUSER_WINOGRAD");
  return on && ownKernels();
}

std::unordered_map<size_t, OpKind> producerKinds(const LoweredGraph& graph) {
  std::unordered_map<size_t, OpKind> kinds;
  for (const auto& op : graph.ops) {
    for (const auto& output : op.outputs()) {
      kinds.emplace(output.id, op.kind());
    }
  }
  return kinds;
}

std::vector<InPlaceActivation> activationsApart(
    const LoweredGraph& graph, const std::unordered_map<size_t, size_t>& group_outputs) {
  constexpr int64_t kFewest = 4096;
  constexpr int64_t kMost = int64_t{1} << 21;
  std::vector<InPlaceActivation> found;
  if (!ownAvx2Kernels()) {
    return found;
  }
  const auto producers = producerKinds(graph);
  std::unordered_map<size_t, Ops> readers;
  for (const auto& op : graph.ops) {
    for (const auto& input : op.inputs()) {
      readers[input.id].push_back(&op);
    }
  }
  for (const auto& op : graph.ops) {
    const auto kind = activationOf(op.kind());
    if (!kind) {
      continue;
    }
    const auto& from = op.inputs()[0];
    InPlaceActivation applied{*kind, {&op}, from.id, op.outputs()[0].id};
    if (const auto& gate = readers[applied.to];
        applied.activation == Activation::sigmoid && gate.size() == 1 &&
        group_outputs.count(applied.to) == 0 && gate[0]->kind() == OpKind::Multiply &&
        readers[from.id] == Ops{&op, gate[0]}) {
      applied = {Activation::silu, {&op, gate[0]}, from.id, gate[0]->outputs()[0].id};
    }
    const auto& to = graph.operands.at(applied.to);
    if (from.dtype != at::kFloat || !from.sizes || from.sizes != to.sizes ||
        producers.count(from.id) == 0 || readers[from.id] != applied.ops ||
        group_outputs.count(from.id) != 0 || group_outputs.count(to.id) == 0 ||
        !readers[to.id].empty()) {
      continue;
    }
    const auto count = c10::multiply_integers(*from.sizes);
    if (count >= kFewest && count <= kMost) {
      found.push_back(std::move(applied));
    }
  }
  return found;
}

std::optional<GroupedConvolution> slowGroupedConvolution(const Ops& ops,
                                                         const LoweredGraph& graph) {
  const bool relu = ops.size() == 2 && ops[1]->kind() == OpKind::ReLU;
  if (!ownAvx2Kernels() || ops.size() != (relu ? 2 : 1) || !isImageConvolution(*ops[0], graph)) {
    return std::nullopt;
  }
  const auto& data = ops[0]->inputs()[0];
  const auto& weight = ops[0]->inputs()[1];
  const auto& result = ops.back()->outputs()[0];
  if (result.dtype != at::kFloat || (*weight.sizes)[0] != (*data.sizes)[1]) {
    return std::nullopt;
  }
  const auto groups = ops[0]->get_attr<int64_t>(Attr::groups);
  const GroupedConvolution kernel{(*data.sizes)[0],
                                  pair(*data.sizes),
                                  pair(*result.sizes),
                                  pair(*weight.sizes),
                                  pair(ops[0]->get_attr<Shape>(Attr::strides)),
                                  pair(ops[0]->get_attr<Shape>(Attr::dilations)),
                                  pair(ops[0]->get_attr<Shape>(Attr::pads_begin)),
                                  groups,
                                  (*data.sizes)[1] / groups,
                                  relu};
  return isSlowInOneDnn(kernel) && kernel.isSupported() ? std::optional(kernel) : std::nullopt;
}

std::optional<AddedConvolution> winogradConvolution(const Ops& ops, const LoweredGraph& graph) {
  if (!winogradIsOn() || !isImageConvolution(*ops[0], graph)) {
    return std::nullopt;
  }
  const auto& data = ops[0]->inputs()[0];
  const auto& weight = ops[0]->inputs()[1];
  const auto ones = Shape{1, 1};
  if (ops[0]->get_attr<int64_t>(Attr::groups) != 1 ||
      pair(*weight.sizes) != std::array<int64_t, 2>{3, 3} ||
      ops[0]->get_attr<Shape>(Attr::strides) != ones ||
      ops[0]->get_attr<Shape>(Attr::dilations) != ones) {
    return std::nullopt;
  }
  AddedConvolution found;
  auto last = ops[0]->outputs()[0];
  size_t known = 1;
  if (known < ops.size() && ops[known]->kind() == OpKind::Add) {
    const auto& terms = ops[known]->inputs();
    const auto& addend = terms[0].id == last.id ? terms[1] : terms[0];
    if ((terms[0].id == last.id) == (terms[1].id == last.id) || addend.dtype != at::kFloat ||
        addend.sizes != last.sizes) {
      return std::nullopt;
    }
    found.addend = addend.id;
    last = ops[known++]->outputs()[0];
  }
  const bool relu = known < ops.size() && ops[known]->kind() == OpKind::ReLU &&
                    ops[known]->inputs()[0].id == last.id;
  if (relu) {
    last = ops[known++]->outputs()[0];
  }
  if (known != ops.size()) {
    return std::nullopt;
  }
  found.kernel = {(*data.sizes)[0],
                  pair(*data.sizes),
                  pair(*last.sizes),
                  pair(ops[0]->get_attr<Shape>(Attr::pads_begin)),
                  (*data.sizes)[1],
                  (*weight.sizes)[0],
                  relu};
  found.kernel.tile = found.kernel.chooseTile();
  return found.kernel.tile != 0 ? std::optional(found) : std::nullopt;
}

}  // namespace llga
