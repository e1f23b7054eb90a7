#include "jit/onednn/runtime/own_quantized.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

constexpr float kLargest = std::numeric_limits<uint8_t>::max();

// Finds convolutions of 8-bit data in a group, each from its op on.
class Reader {
 public:
  explicit Reader(const LoweredGraph& graph) : graph_(graph) {
    for (const auto& op : graph.ops) {
      for (const auto& input : op.inputs()) {
        ++reads_[input.id];
        readers_[input.id] = &op;
      }
      for (const auto& output : op.outputs()) {
        producers_[output.id] = &op;
      }
    }
  }

  std::optional<FoundQuantized> read(const OpSpec& op) const {
    const auto& inputs = op.inputs();
    const auto* data = dequantize(inputs[0]);
    const auto* weight = dequantize(inputs[1]);
    if (data == nullptr || weight == nullptr || !isUnsigned(*data) || !readWeight(*weight) ||
        (inputs.size() > 2 && !isFloatConstant(inputs[2]))) {
      return std::nullopt;
    }
    FoundQuantized found;
    found.op = &op;
    found.weight = weight->inputs()[0].id;
    found.scales = weight->get_attr<std::vector<float>>(Attr::scales);
    found.data = data->inputs()[0];
    found.data_scale = scaleOf(*data);
    found.ops = 3;
    return readRest(std::move(found));
  }

 private:
  // The op that alone reads what this one computes, which nobody else does.
  const OpSpec* readerOf(const OpSpec& op) const {
    const auto id = op.outputs()[0].id;
    const auto reads = reads_.find(id);
    return reads != reads_.end() && reads->second == 1 ? readers_.at(id) : nullptr;
  }

  // The op that dequantizes this value, for one reader; or null.
  const OpSpec* dequantize(const Operand& value) const {
    const auto producer = producers_.find(value.id);
    const bool is = producer != producers_.end() && producer->second->kind() == OpKind::Dequantize &&
                    value.dtype == at::kFloat && reads_.at(value.id) == 1;
    return is ? producer->second : nullptr;
  }

  static bool isPerTensor(const OpSpec& op) {
    return op.get_attr<std::string>(Attr::qtype) == "per_tensor";
  }

  // Of a value that is computed, by one scale.
  bool isUnsigned(const OpSpec& conversion) const {
    const bool reads = conversion.kind() == OpKind::Dequantize;
    const auto& value = reads ? conversion.inputs()[0] : conversion.outputs()[0];
    return value.dtype == at::kQUInt8 && value.sizes && isPerTensor(conversion) &&
           !graph_.operands.at(value.id).constant;
  }

  // Whether it is a constant, symmetric, and has a scale for each output or one for all.
  bool readWeight(const OpSpec& dequantize) const {
    const auto& value = dequantize.inputs()[0];
    const auto zero_points = dequantize.get_attr<std::vector<int64_t>>(Attr::zps);
    return value.dtype == at::kQInt8 && graph_.operands.at(value.id).constant && value.sizes &&
           (isPerTensor(dequantize) || dequantize.get_attr<int64_t>(Attr::axis) == 0) &&
           std::all_of(zero_points.begin(), zero_points.end(), [](int64_t z) { return z == 0; });
  }

  bool isFloatConstant(const Operand& value) const {
    return value.dtype == at::kFloat && graph_.operands.at(value.id).constant;
  }

  static Scale scaleOf(const OpSpec& op) {
    return {op.get_attr<std::vector<float>>(Attr::scales).front(),
            op.get_attr<std::vector<int64_t>>(Attr::zps).front()};
  }

  // An addition, an activation, and rounding.
  std::optional<FoundQuantized> readRest(FoundQuantized found) const {
    const auto* last = found.op;
    const auto* next = readerOf(*last);
    if (next != nullptr && next->kind() == OpKind::Add) {
      const auto& terms = next->inputs();
      const auto& other = terms[0].id == last->outputs()[0].id ? terms[1] : terms[0];
      const auto* addend = dequantize(other);
      if (addend == nullptr || !isUnsigned(*addend) || other.sizes != last->outputs()[0].sizes) {
        return std::nullopt;
      }
      found.addend = addend->inputs()[0].id;
      found.addend_scale = scaleOf(*addend);
      found.ops += 2;
      last = next;
      next = readerOf(*last);
    }
    if (next != nullptr && readActivation(*next, found)) {
      ++found.ops;
      last = next;
      next = readerOf(*last);
    }
    if (next == nullptr || next->kind() != OpKind::Quantize || !isUnsigned(*next)) {
      return std::nullopt;
    }
    ++found.ops;
    found.result = next->outputs()[0];
    found.result_scale = scaleOf(*next);
    return found;
  }

  static bool readActivation(const OpSpec& op, FoundQuantized& found) {
    switch (op.kind()) {
      case OpKind::ReLU:
        found.least = 0;
        return true;
      case OpKind::Clamp:
        found.least = op.get_attr<float>(Attr::min);
        found.most = op.get_attr<float>(Attr::max);
        return true;
      case OpKind::HardSwish:
        found.hardswish = true;
        return true;
      default:
        return false;
    }
  }

  const LoweredGraph& graph_;
  std::unordered_map<size_t, const OpSpec*> producers_;
  std::unordered_map<size_t, const OpSpec*> readers_;  // the last of them
  std::unordered_map<size_t, size_t> reads_;
};

bool isOfImages(const FoundQuantized& found) {
  return found.data.sizes->size() == 4 && found.op->inputs()[1].sizes &&
         found.op->inputs()[1].sizes->size() == 4 && found.result.sizes->size() == 4;
}

const Shape& weightSizes(const FoundQuantized& found) { return *found.op->inputs()[1].sizes; }

bool isPointwise(const FoundQuantized& found) {
  const Shape ones{1, 1};
  const Shape none{0, 0};
  const auto& op = *found.op;
  return isOfImages(found) && op.get_attr<int64_t>(Attr::groups) == 1 &&
         weightSizes(found)[2] == 1 && weightSizes(found)[3] == 1 &&
         op.get_attr<Shape>(Attr::strides) == ones &&
         op.get_attr<Shape>(Attr::pads_begin) == none && op.get_attr<Shape>(Attr::pads_end) == none;
}

// With the same window, stride and padding both ways.
bool isDepthwise(const FoundQuantized& found) {
  if (!isOfImages(found)) {
    return false;
  }
  const auto& op = *found.op;
  const auto& weight = weightSizes(found);
  const auto strides = op.get_attr<Shape>(Attr::strides);
  const auto padding = op.get_attr<Shape>(Attr::pads_begin);
  return weight[0] == (*found.data.sizes)[1] && weight[1] == 1 &&
         op.get_attr<int64_t>(Attr::groups) == weight[0] && weight[2] == weight[3] &&
         strides[0] == strides[1] && padding[0] == padding[1] &&
         op.get_attr<Shape>(Attr::dilations) == Shape{1, 1};
}

QuantizedBlock kernelOf(const FoundQuantizedBlock& found) {
  const auto& depthwise = *found.parts[1];
  const auto& data = *depthwise.data.sizes;
  const auto& result = *depthwise.result.sizes;
  QuantizedBlock kernel;
  kernel.images = data[0];
  kernel.size = {data[2], data[3]};
  kernel.result_size = {result[2], result[3]};
  kernel.inputs = found.parts[0] ? (*found.parts[0]->data.sizes)[1] : 0;
  kernel.channels = data[1];
  kernel.window = weightSizes(depthwise)[2];
  kernel.stride = depthwise.op->get_attr<Shape>(Attr::strides)[0];
  kernel.padding = depthwise.op->get_attr<Shape>(Attr::pads_begin)[0];
  kernel.outputs = found.parts[2] ? (*found.parts[2]->result.sizes)[1] : 0;
  kernel.zero_point = static_cast<uint8_t>(depthwise.data_scale.zero_point);
  return kernel;
}

}  // namespace

std::optional<FoundQuantizedBlock> quantizedBlock(const LoweredGraph& graph) {
  if (!ownKernels()) {
    return std::nullopt;
  }
  const Reader reader(graph);
  std::vector<FoundQuantized> convolutions;
  size_t ops = 0;
  for (const auto& op : graph.ops) {
    if (op.kind() != OpKind::Convolution) {
      continue;
    }
    auto found = reader.read(op);
    const bool follows = convolutions.empty() ||
                         (found && found->data.id == convolutions.back().result.id);
    if (!found || !follows || convolutions.size() == QuantizedBlock::kMost) {
      return std::nullopt;
    }
    ops += found->ops;
    convolutions.push_back(std::move(*found));
  }
  if (convolutions.empty() || ops != graph.ops.size()) {
    return std::nullopt;
  }
  FoundQuantizedBlock found;
  const bool expands = convolutions.size() > 1 && isPointwise(convolutions[0]);
  size_t part = expands ? 0 : 1;
  for (auto& convolution : convolutions) {
    if (part == found.parts.size() ||
        !(part == 1 ? isDepthwise(convolution) : isPointwise(convolution)) ||
        (convolution.addend && part != 2)) {
      return std::nullopt;
    }
    found.parts[part++] = std::move(convolution);
  }
  if (!found.parts[1]) {
    return std::nullopt;
  }
  found.kernel = kernelOf(found);
  return found.kernel.isSupported() ? std::optional(std::move(found)) : std::nullopt;
}

const FoundQuantized& FoundQuantizedBlock::first() const { return parts[0] ? *parts[0] : *parts[1]; }

const FoundQuantized& FoundQuantizedBlock::last() const { return parts[2] ? *parts[2] : *parts[1]; }

std::optional<QuantizedSums> sumsOf(const FoundQuantized& found, const at::Tensor& weight,
                                    const at::Tensor& bias) {
  const auto outputs = weight.size(0);
  const auto& result = found.result_scale;
  const auto unit = static_cast<double>(result.scale);
  const auto zero_point = static_cast<double>(result.zero_point);
  auto scales = at::tensor(found.scales, at::kDouble).expand({outputs});
  auto factor = scales * (found.data_scale.scale / unit);
  auto shift = bias.defined() ? bias.to(at::kDouble).reshape({outputs}) / unit
                              : at::zeros({outputs}, at::kDouble);
  if (!found.hardswish) {
    shift = shift + zero_point;
  }
  QuantizedSums sums;
  auto& rescale = sums.rescale;
  if (found.addend) {
    const auto& addend = found.addend_scale;
    rescale.addend_scale = static_cast<float>(addend.scale / unit);
    shift = shift - addend.scale / unit * static_cast<double>(addend.zero_point);
  }
  const auto weights = weight.flatten(1).sum(1, /*keepdim=*/false, at::kLong);
  const auto start = (weights * -found.data_scale.zero_point).to(at::kInt);
  factor = factor.to(at::kFloat);
  shift = shift.to(at::kFloat);
  const bool finite = factor.isfinite().all().item<bool>() &&
                      shift.isfinite().all().item<bool>() && std::isfinite(rescale.addend_scale);
  if (!finite) {
    return std::nullopt;
  }
  for (const auto& numbers : {start, factor, shift}) {
    sums.tensors.push_back(QuantizedBlock::padded(numbers).contiguous());
  }
  rescale.start = sums.tensors[0].const_data_ptr<int32_t>();
  rescale.scale = sums.tensors[1].const_data_ptr<float>();
  rescale.shift = sums.tensors[2].const_data_ptr<float>();
  rescale.hardswish = found.hardswish;
  rescale.unit = result.scale / 6;
  rescale.zero_point = static_cast<float>(result.zero_point);
  rescale.highest =
      found.most ? static_cast<float>(std::min<double>(kLargest, *found.most / unit + zero_point))
                 : kLargest;
  const auto lowest = found.least ? std::nearbyint(*found.least / unit + zero_point) : 0;
  rescale.lowest = static_cast<uint8_t>(std::clamp<double>(lowest, 0, kLargest));
  return sums;
}

}  // namespace llga
