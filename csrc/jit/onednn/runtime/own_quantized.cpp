#include "jit/onednn/runtime/own_quantized.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>

namespace llga {
namespace {

using quantized::Function;

constexpr double kLargest = std::numeric_limits<uint8_t>::max();

bool isPerTensor(const OpSpec& op) { return op.get_attr<std::string>(Attr::qtype) == "per_tensor"; }

Scale scaleOf(const OpSpec& op) {
  return {op.get_attr<std::vector<float>>(Attr::scales).front(),
          op.get_attr<std::vector<int64_t>>(Attr::zps).front()};
}

// Finds products of 8-bit data, each from its op on.
class Reader {
 public:
  Reader(const Ops& ops, const LoweredGraph& graph) : graph_(graph), ops_(ops) {
    for (const auto* op : ops) {
      for (const auto& input : op->inputs()) {
        readers_[input.id].push_back(op);
      }
      for (const auto& output : op->outputs()) {
        producers_[output.id] = op;
      }
    }
  }

  std::optional<FoundQuantized> read(const OpSpec& op) const {
    const auto& inputs = op.inputs();
    const auto* data = dequantize(inputs[0]);
    const auto* weight = dequantize(inputs[1]);
    if (data == nullptr || weight == nullptr || !isUnsigned(*data) ||
        (inputs.size() > 2 && !isBias(inputs[2]))) {
      return std::nullopt;
    }
    FoundQuantized found;
    found.op = &op;
    found.weight = weight->inputs()[0];
    found.outputs_last = op.kind() == OpKind::MatMul && !isSet(op, Attr::transpose_b);
    const bool transposed = op.kind() == OpKind::ConvTranspose;
    if (!isWeight(*weight, found.outputs_last || transposed ? 1 : 0)) {
      return std::nullopt;
    }
    found.scales = weight->get_attr<std::vector<float>>(Attr::scales);
    found.data = data->inputs()[0];
    found.data_scale = scaleOf(*data);
    found.result = op.outputs()[0];
    found.ops = 3;
    takeAddition(found);
    takeActivation(found);
    takeQuantization(found);
    return found.result.sizes ? std::optional(std::move(found)) : std::nullopt;
  }

  // The op that alone reads a value; or null.
  const OpSpec* soleReader(const Operand& value) const {
    const auto readers = readers_.find(value.id);
    return readers != readers_.end() && readers->second.size() == 1 ? readers->second[0] : nullptr;
  }

  // The op that dequantizes this value, for one reader; or null.
  const OpSpec* dequantize(const Operand& value) const {
    const auto producer = producers_.find(value.id);
    const bool is = producer != producers_.end() &&
                    producer->second->kind() == OpKind::Dequantize && value.dtype == at::kFloat &&
                    soleReader(value) != nullptr;
    return is ? producer->second : nullptr;
  }

  // Of a value that is computed, by one scale.
  bool isUnsigned(const OpSpec& conversion) const {
    const bool reads = conversion.kind() == OpKind::Dequantize;
    const auto& value = reads ? conversion.inputs()[0] : conversion.outputs()[0];
    return value.sizes && unsignedScale(conversion) && !graph_.operands.at(value.id).constant;
  }

  // A mean over pixels, dequantized before and quantized behind.
  std::optional<FoundQuantizedMean> readMean(const OpSpec& op) const {
    const auto* data = dequantize(op.inputs()[0]);
    const auto* result = soleReader(op.outputs()[0]);
    if (data == nullptr || !isUnsigned(*data) || result == nullptr ||
        result->kind() != OpKind::Quantize || !isUnsigned(*result)) {
      return std::nullopt;
    }
    FoundQuantizedMean found{{Reduction::Type::uint8, Reduction::Kind::mean, 1, 1, 1},
                             data->inputs()[0],
                             result->outputs()[0]};
    const auto& sizes = *found.data.sizes;
    const auto from = scaleOf(*data);
    const auto to = scaleOf(*result);
    auto& kernel = found.kernel;
    kernel.images = sizes[0];
    kernel.rows = sizes[2] * sizes[3];
    kernel.columns = sizes[1];
    kernel.scale = static_cast<float>(from.scale / to.scale);
    kernel.shift = static_cast<float>(static_cast<double>(to.zero_point) -
                                      from.scale / to.scale * static_cast<double>(from.zero_point));
    return found;
  }

  // The product that alone reads a value of 8 bit.
  std::optional<FoundQuantized> readBehind(const Operand& value) const {
    const auto* dequantize = soleReader(value);
    const auto* product = dequantize != nullptr && dequantize->kind() == OpKind::Dequantize
                              ? soleReader(dequantize->outputs()[0])
                              : nullptr;
    const bool is = product != nullptr && product->kind() == OpKind::Convolution &&
                    product->inputs()[0].id == dequantize->outputs()[0].id;
    return is ? read(*product) : std::nullopt;
  }

  // What a squeeze and excitation does behind its second convolution: how many ops that are; 0 if
  // it is something else.
  size_t readGate(FoundQuantizedExcitation& found) const {
    size_t ops = 3;
    auto gate = found.excite.result;
    const auto* product = soleReader(gate);
    if (product != nullptr && product->kind() == OpKind::HardSigmoid) {
      found.kernel.outer = {product->get_attr<float>(Attr::alpha),
                            product->get_attr<float>(Attr::beta)};
      gate = product->outputs()[0];
      product = soleReader(gate);
      ++ops;
    }
    const bool once =
        found.kernel.outer.has_value() != (found.excite.function == Function::sigmoid);
    if (!once || product == nullptr || product->kind() != OpKind::Multiply) {
      return 0;
    }
    const auto& factors = product->inputs();
    const auto* data = dequantize(factors[factors[0].id == gate.id ? 1 : 0]);
    const auto* result = soleReader(product->outputs()[0]);
    if (data == nullptr || data->inputs()[0].id != found.data.id || !isUnsigned(*data) ||
        result == nullptr || result->kind() != OpKind::Quantize || !isUnsigned(*result) ||
        product->outputs()[0].sizes != found.data.sizes) {
      return 0;
    }
    const auto from = scaleOf(*data);
    const auto to = scaleOf(*result);
    found.result = result->outputs()[0];
    found.kernel.scale = static_cast<float>(from.scale / to.scale);
    found.kernel.data_zero_point = static_cast<float>(from.zero_point);
    found.kernel.result_zero_point = static_cast<float>(to.zero_point);
    return ops;
  }

 private:
  // A constant, symmetric, with a scale for each output or one for all.
  bool isWeight(const OpSpec& dequantize, int64_t axis) const {
    const auto& value = dequantize.inputs()[0];
    const auto zero_points = dequantize.get_attr<std::vector<int64_t>>(Attr::zps);
    return value.dtype == at::kQInt8 && graph_.operands.at(value.id).constant && value.sizes &&
           (isPerTensor(dequantize) || dequantize.get_attr<int64_t>(Attr::axis) == axis) &&
           std::all_of(zero_points.begin(), zero_points.end(), [](int64_t z) { return z == 0; });
  }

  bool isBias(const Operand& value) const {
    return value.dtype == at::kFloat && value.sizes && value.sizes->size() == 1 &&
           graph_.operands.at(value.id).constant;
  }

  // Of another value like the result: in 8 bit, or float32 that nothing here computes.
  void takeAddition(FoundQuantized& found) const {
    const auto* add = soleReader(found.result);
    if (add == nullptr || add->kind() != OpKind::Add) {
      return;
    }
    const auto& terms = add->inputs();
    const auto& other = terms[0].id == found.result.id ? terms[1] : terms[0];
    if (other.sizes != found.result.sizes || graph_.operands.at(other.id).constant) {
      return;
    }
    if (const auto* narrow = dequantize(other); narrow != nullptr && isUnsigned(*narrow)) {
      found.addend = narrow->inputs()[0];
      found.addend_scale = scaleOf(*narrow);
      ++found.ops;
    } else if (other.dtype == at::kFloat && producers_.count(other.id) == 0) {
      found.addend = other;
    } else {
      return;
    }
    ++found.ops;
    found.result = add->outputs()[0];
  }

  void takeActivation(FoundQuantized& found) const {
    const auto readers = readers_.find(found.result.id);
    if (readers == readers_.end()) {
      return;
    }
    const auto& first = *readers->second.front();
    if (const auto parts = tanhGelu(first, ops_); !parts.empty()) {
      takeTanhGelu(found, parts, readers->second);
      return;
    }
    if (readers->second.size() > 2) {
      return;
    }
    if (readers->second.size() == 2) {
      takeSilu(found, first, *readers->second.back());
      return;
    }
    switch (first.kind()) {
      case OpKind::ReLU:
        found.least = 0;
        break;
      case OpKind::Clamp:
        found.least = first.get_attr<float>(Attr::min);
        found.most = first.get_attr<float>(Attr::max);
        break;
      case OpKind::HardSwish:
        found.function = Function::hardswish;
        break;
      case OpKind::GELU:
        found.function = Function::gelu;
        break;
      case OpKind::Sigmoid:
        found.function = Function::sigmoid;
        break;
      default:
        return;
    }
    ++found.ops;
    found.result = first.outputs()[0];
  }

  // `readers`: all that read the result so far.
  static void takeTanhGelu(FoundQuantized& found, const Ops& parts, const Ops& readers) {
    const bool alone = std::all_of(readers.begin(), readers.end(), [&](const OpSpec* reader) {
      return std::find(parts.begin(), parts.end(), reader) != parts.end();
    });
    if (alone) {
      found.function = Function::tanh_gelu;
      found.ops += parts.size();
      found.result = parts.back()->outputs()[0];
    }
  }

  // x * sigmoid(x)
  void takeSilu(FoundQuantized& found, const OpSpec& first, const OpSpec& second) const {
    const bool ordered = first.kind() == OpKind::Sigmoid;
    const auto& sigmoid = ordered ? first : second;
    const auto& product = ordered ? second : first;
    if (sigmoid.kind() != OpKind::Sigmoid || product.kind() != OpKind::Multiply ||
        soleReader(sigmoid.outputs()[0]) != &product) {
      return;
    }
    found.function = Function::silu;
    found.ops += 2;
    found.result = product.outputs()[0];
  }

  void takeQuantization(FoundQuantized& found) const {
    const auto* quantize = soleReader(found.result);
    if (quantize != nullptr && quantize->kind() == OpKind::Quantize && isUnsigned(*quantize)) {
      ++found.ops;
      found.result = quantize->outputs()[0];
      found.result_scale = scaleOf(*quantize);
    }
  }

  const LoweredGraph& graph_;
  const Ops& ops_;
  std::unordered_map<size_t, const OpSpec*> producers_;
  std::unordered_map<size_t, Ops> readers_;
};

bool isOfImages(const FoundQuantized& found) {
  constexpr size_t kRank = 4;
  return found.op->kind() == OpKind::Convolution && found.data.sizes->size() == kRank &&
         found.weight.sizes->size() == kRank && found.result.sizes->size() == kRank;
}

bool isPointwise(const FoundQuantized& found) {
  const Shape ones{1, 1};
  const Shape none{0, 0};
  const auto& op = *found.op;
  return isOfImages(found) && op.get_attr<int64_t>(Attr::groups) == 1 &&
         (*found.weight.sizes)[2] == 1 && (*found.weight.sizes)[3] == 1 &&
         op.get_attr<Shape>(Attr::strides) == ones &&
         op.get_attr<Shape>(Attr::pads_begin) == none && op.get_attr<Shape>(Attr::pads_end) == none;
}

// With the same window, stride and padding both ways.
bool isDepthwise(const FoundQuantized& found) {
  if (!isOfImages(found)) {
    return false;
  }
  const auto& op = *found.op;
  const auto& weight = *found.weight.sizes;
  const auto strides = op.get_attr<Shape>(Attr::strides);
  const auto padding = op.get_attr<Shape>(Attr::pads_begin);
  return weight[0] == (*found.data.sizes)[1] && weight[1] == 1 &&
         op.get_attr<int64_t>(Attr::groups) == weight[0] && weight[2] == weight[3] &&
         strides[0] == strides[1] && padding[0] == padding[1] &&
         op.get_attr<Shape>(Attr::dilations) == Shape{1, 1};
}

// Whether addend and result are of the same type, and what is between can be computed.
bool isWhole(const FoundQuantized& found) {
  if (found.addend && found.addend->dtype != found.result.dtype) {
    return false;
  }
  return found.result_scale || (found.result.dtype == at::kFloat && !found.least && !found.most);
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
  kernel.window = (*depthwise.weight.sizes)[2];
  kernel.stride = depthwise.op->get_attr<Shape>(Attr::strides)[0];
  kernel.padding = depthwise.op->get_attr<Shape>(Attr::pads_begin)[0];
  kernel.outputs = found.parts[2] ? (*found.parts[2]->result.sizes)[1] : 0;
  kernel.zero_point = static_cast<uint8_t>(depthwise.data_scale.zero_point);
  return kernel;
}

// A function of real numbers x = (u - kMiddle) * pieceOf(function) as pieces, to those of a result.
constexpr double kMiddle = quantized::Curve::kPieces / 2.0;

// How much of x a piece is: with the ends, where the function is 0 or x or 1 (but for less than a
// thousandth), it is off by 2e-4 at most.
double pieceOf(Function function) {
  const bool gelu = function == Function::gelu || function == Function::tanh_gelu;
  const auto end = function == Function::hardswish ? 4.0 : gelu ? 5.5 : 12.0;
  return end / kMiddle;
}

double valueOf(Function function, double x) {
  switch (function) {
    case Function::hardswish:
      return x * std::clamp(x + 3, 0.0, 6.0) / 6;
    case Function::silu:
      return x / (1 + std::exp(-x));
    case Function::gelu:
      return x / 2 * (1 + std::erf(x / std::sqrt(2.0)));
    case Function::tanh_gelu:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Function::sigmoid:
      return 1 / (1 + std::exp(-x));
    default:
      return x;
  }
}

at::Tensor curveOf(Function function, const Scale& result) {
  using quantized::Curve;
  constexpr auto kTerms = Curve::kTerms;
  auto terms = at::empty({kTerms, Curve::kPieces}, at::kFloat);
  auto* to = terms.mutable_data_ptr<float>();
  const auto last = Curve::kPieces - 1;
  for (int64_t i = 0; i <= last; ++i) {
    // Through Chebyshev's points: divided differences, then powers of u.
    std::array<double, kTerms> u{};
    std::array<double, kTerms> y{};
    for (int64_t k = 0; k < kTerms; ++k) {
      u[k] = static_cast<double>(i) + 0.5 - 0.5 * std::cos((2 * k + 1) * M_PI / (2 * kTerms));
      const auto x = (u[k] - kMiddle) * pieceOf(function);
      const auto end = function == Function::sigmoid ? 1.0 : x;
      const auto value = i == 0 ? 0.0 : i == last ? end : valueOf(function, x);
      y[k] = value / result.scale + static_cast<double>(result.zero_point);
    }
    for (int64_t level = 1; level < kTerms; ++level) {
      for (auto k = kTerms - 1; k >= level; --k) {
        y[k] = (y[k] - y[k - 1]) / (u[k] - u[k - level]);
      }
    }
    std::array<double, kTerms> powers{};
    for (auto k = kTerms - 1; k >= 0; --k) {  // times (v - u[k]), plus y[k]
      for (auto p = kTerms - 1; p > 0; --p) {
        powers[p] = powers[p - 1] - powers[p] * u[k];
      }
      powers[0] = y[k] - powers[0] * u[k];
    }
    for (int64_t p = 0; p < kTerms; ++p) {
      to[p * Curve::kPieces + i] = static_cast<float>(powers[p]);
    }
  }
  return terms;
}

// Of a pointwise convolution of one pixel.
QuantizedLinear pixelKernel(const FoundQuantized& found) {
  QuantizedLinear kernel;
  kernel.rows = 1;
  kernel.inputs = at::round_up((*found.weight.sizes)[1], quantized::kTogether);
  kernel.outputs = (*found.weight.sizes)[0];
  kernel.to_float = !found.result_scale;
  return kernel;
}

}  // namespace

std::optional<Scale> unsignedScale(const OpSpec& conversion) {
  const bool reads = conversion.kind() == OpKind::Dequantize;
  const auto& value = reads ? conversion.inputs()[0] : conversion.outputs()[0];
  if (value.dtype != at::kQUInt8 || !isPerTensor(conversion)) {
    return std::nullopt;
  }
  const auto scale = scaleOf(conversion);
  const bool fits = scale.zero_point >= 0 && static_cast<double>(scale.zero_point) <= kLargest;
  return fits ? std::optional(scale) : std::nullopt;
}

at::Tensor FoundQuantized::byOutputs(const at::Tensor& weight) const {
  const bool transposed = op->kind() == OpKind::ConvTranspose;
  return (transposed ? asPointwise(weight) : outputs_last ? weight.t() : weight).contiguous();
}

bool ownsQuantizedProducts() { return ownKernels() && QuantizedLinear::hasKernels(); }

namespace {

// All that a partition does, if that is a product of these kinds and what follows it.
std::optional<FoundQuantized> readAll(const Ops& ops, const LoweredGraph& graph) {
  const auto product = std::find_if(ops.begin(), ops.end(), [](const OpSpec* op) {
    return op->kind() == OpKind::Convolution || op->kind() == OpKind::ConvTranspose ||
           op->kind() == OpKind::MatMul;
  });
  if (!ownsQuantizedProducts() || product == ops.end()) {
    return std::nullopt;
  }
  auto found = Reader(ops, graph).read(**product);
  return found && found->ops == ops.size() && isWhole(*found) ? std::move(found) : std::nullopt;
}

}  // namespace

std::optional<FoundQuantizedConvolution> quantizedConvolution(const Ops& ops,
                                                              const LoweredGraph& graph) {
  auto found = readAll(ops, graph);
  const auto convolution =
      found ? tiledConvolution(*found->op, *found->weight.sizes, sizeof(uint8_t)) : std::nullopt;
  if (!convolution) {
    return std::nullopt;
  }
  return FoundQuantizedConvolution{
      {*convolution, !found->result_scale, static_cast<uint8_t>(found->data_scale.zero_point), {}},
      std::move(*found)};
}

std::optional<FoundQuantizedLinear> quantizedLinear(const Ops& ops, const LoweredGraph& graph) {
  auto found = readAll(ops, graph);
  if (!found) {
    return std::nullopt;
  }
  const auto& data = *found->data.sizes;
  const bool image = isPointwise(*found);
  if (!image && (found->op->kind() != OpKind::MatMul || isSet(*found->op, Attr::transpose_a) ||
                 found->weight.sizes->size() != 2 || data.empty())) {
    return std::nullopt;
  }
  QuantizedLinear kernel;
  kernel.inputs = image ? data[1] : data.back();
  kernel.rows = c10::multiply_integers(data) / kernel.inputs;
  kernel.outputs = (*found->weight.sizes)[found->outputs_last ? 1 : 0];
  kernel.to_float = !found->result_scale;
  return kernel.isSupported() && kernel.pays()
             ? std::optional(FoundQuantizedLinear{std::move(kernel), std::move(*found)})
             : std::nullopt;
}

std::optional<FoundQuantizedBlock> quantizedBlock(const LoweredGraph& graph) {
  if (!ownsQuantizedProducts()) {
    return std::nullopt;
  }
  const auto ops = opsOf(graph);
  const Reader reader(ops, graph);
  std::vector<FoundQuantized> convolutions;
  size_t taken = 0;
  for (const auto* op : ops) {
    if (op->kind() != OpKind::Convolution) {
      continue;
    }
    auto found = reader.read(*op);
    const bool follows =
        convolutions.empty() || (found && found->data.id == convolutions.back().result.id);
    if (!found || !follows || !found->result_scale || !isWhole(*found)) {
      return std::nullopt;
    }
    taken += found->ops;
    convolutions.push_back(std::move(*found));
  }
  if (convolutions.empty() || taken != ops.size()) {
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
  found.kernel = kernelOf(found);
  return found.kernel.isSupported() ? std::optional(std::move(found)) : std::nullopt;
}

std::optional<FoundQuantizedMaxPool> quantizedMaxPool(const Ops& ops) {
  constexpr size_t kOps = 3;
  if (!ownKernelsAnywhere() || ops.size() != kOps || ops[0]->kind() != OpKind::Dequantize ||
      ops[1]->kind() != OpKind::MaxPool || ops[2]->kind() != OpKind::Quantize) {
    return std::nullopt;
  }
  const auto& pool = *ops[1];
  const auto& data = ops[0]->inputs()[0];
  const auto& result = ops[2]->outputs()[0];
  const auto from = unsignedScale(*ops[0]);
  const auto to = unsignedScale(*ops[2]);
  constexpr size_t kRank = 4;
  if (!from || !to || from->scale != to->scale || from->zero_point != to->zero_point ||
      !data.sizes || data.sizes->size() != kRank || !result.sizes) {
    return std::nullopt;
  }
  const auto of = [&](Attr attribute) { return pair(pool.get_attr<Shape>(attribute)); };
  const MaxPool kernel{(*data.sizes)[0],     pair(*data.sizes), pair(*result.sizes),
                       of(Attr::kernel),     of(Attr::strides), of(Attr::dilations),
                       of(Attr::pads_begin), (*data.sizes)[1]};
  return kernel.isSupported() ? std::optional(FoundQuantizedMaxPool{kernel, data, result})
                              : std::nullopt;
}

std::optional<FoundQuantizedMean> quantizedMean(const Ops& ops, const LoweredGraph& graph) {
  constexpr size_t kOps = 3;
  const Reader reader(ops, graph);
  return ownKernelsAnywhere() && ops.size() == kOps && isGlobalMean(*ops[1])
             ? reader.readMean(*ops[1])
             : std::nullopt;
}

std::optional<FoundAffineSum> affineSum(const LoweredGraph& graph) {
  using Terms = std::vector<FoundAffineSum::Term>;
  if (!ownKernelsAnywhere()) {
    return std::nullopt;
  }
  const auto ops = opsOf(graph);
  std::unordered_map<size_t, Terms> sums;  // by value
  auto termsOf = [&](const Operand& value) {
    const auto known = sums.find(value.id);
    return known != sums.end() ? known->second : Terms{{value, {}, nullptr}};
  };
  size_t next = 0;
  for (; next < ops.size(); ++next) {
    const auto& op = *ops[next];
    const auto& inputs = op.inputs();
    Terms terms;
    const auto from = op.kind() == OpKind::Dequantize ? unsignedScale(op) : std::nullopt;
    if (from) {
      terms.push_back({inputs[0], from, nullptr});
    } else if (op.kind() == OpKind::BatchNormInference) {
      terms = termsOf(inputs[0]);
      if (terms.size() != 1 || !terms[0].scale || terms[0].norm != nullptr) {
        return std::nullopt;
      }
      terms[0].norm = &op;
    } else if (op.kind() == OpKind::Add) {
      terms = termsOf(inputs[0]);
      const auto others = termsOf(inputs[1]);
      terms.insert(terms.end(), others.begin(), others.end());
    } else {
      break;
    }
    sums[op.outputs()[0].id] = std::move(terms);
  }
  if (next == 0 || next == ops.size()) {
    return std::nullopt;
  }
  const auto& sum = ops[next - 1]->outputs()[0];
  FoundAffineSum found;
  found.terms = termsOf(sum);
  found.relu = ops[next]->kind() == OpKind::ReLU && ops[next]->inputs()[0].id == sum.id;
  found.activation = found.relu ? std::nullopt : activationFrom(ops, next, sum);
  next += found.relu || found.activation ? 1 : 0;
  const auto& last = ops[next - 1]->outputs()[0];
  const auto to = next + 1 == ops.size() && ops[next]->kind() == OpKind::Quantize &&
                          ops[next]->inputs()[0].id == last.id
                      ? unsignedScale(*ops[next])
                      : std::nullopt;
  if (!to) {
    return std::nullopt;
  }
  found.result_scale = *to;
  found.result = ops[next]->outputs()[0];
  const bool alike =
      std::all_of(found.terms.begin(), found.terms.end(), [&](const FoundAffineSum::Term& term) {
        const auto dtype = term.scale ? at::kQUInt8 : at::kFloat;
        return term.data.dtype == dtype && term.data.sizes == found.result.sizes;
      });
  return found.result.sizes && alike && found.terms.size() > 1 ? std::optional(std::move(found))
                                                               : std::nullopt;
}

std::optional<FoundQuantization> quantization(const LoweredGraph& graph) {
  if (!ownKernelsAnywhere() || graph.ops.size() != 1 || graph.ops[0].kind() != OpKind::Quantize) {
    return std::nullopt;
  }
  const auto& op = graph.ops[0];
  const auto& data = op.inputs()[0];
  const auto to = unsignedScale(op);
  if (!to || !data.sizes || data.dtype != at::kFloat) {
    return std::nullopt;
  }
  // As PyTorch computes it: of what is halfway, a quotient may fall to the other side.
  return FoundQuantization{1 / static_cast<float>(to->scale), static_cast<float>(to->zero_point),
                           data, op.outputs()[0]};
}

std::optional<FoundQuantizedExcitation> quantizedExcitation(const LoweredGraph& graph) {
  if (!ownsQuantizedProducts()) {
    return std::nullopt;
  }
  const auto ops = opsOf(graph);
  const Reader reader(ops, graph);
  const auto found =
      std::find_if(ops.begin(), ops.end(), [](const OpSpec* op) { return isGlobalMean(*op); });
  const auto mean = found != ops.end() ? reader.readMean(**found) : std::nullopt;
  auto squeeze = mean ? reader.readBehind(mean->result) : std::nullopt;
  if (!squeeze || !isPointwise(*squeeze) || !isWhole(*squeeze) || !squeeze->result_scale ||
      squeeze->addend) {
    return std::nullopt;
  }
  auto excite = reader.readBehind(squeeze->result);
  if (!excite || !isPointwise(*excite) || !isWhole(*excite) || excite->result_scale ||
      excite->addend) {
    return std::nullopt;
  }
  FoundQuantizedExcitation whole{{}, mean->data, {}, std::move(*squeeze), std::move(*excite)};
  const auto taken = reader.readGate(whole);
  constexpr size_t kMean = 3;
  if (taken == 0 || kMean + whole.squeeze.ops + whole.excite.ops + taken != ops.size()) {
    return std::nullopt;
  }
  auto& kernel = whole.kernel;
  kernel.mean = mean->kernel;
  kernel.squeeze = pixelKernel(whole.squeeze);
  kernel.excite = pixelKernel(whole.excite);
  return kernel.isSupported() ? std::optional(std::move(whole)) : std::nullopt;
}

const FoundQuantized& FoundQuantizedBlock::first() const {
  return parts[0] ? *parts[0] : *parts[1];
}

const FoundQuantized& FoundQuantizedBlock::last() const { return parts[2] ? *parts[2] : *parts[1]; }

namespace {

// Of each row of 8-bit numbers, in int64. PyTorch would make wider copies of all of them first.
struct RowSums {
  at::Tensor sums;
  at::Tensor magnitudes;

  static RowSums of(const at::Tensor& matrix) {
    constexpr int64_t kNumbers = 1 << 15;  // worth a thread
    const auto dense = matrix.contiguous();
    const auto columns = dense.size(1);
    RowSums result{at::empty({dense.size(0)}, at::kLong), at::empty({dense.size(0)}, at::kLong)};
    const auto* numbers = dense.const_data_ptr<int8_t>();
    auto* sums = result.sums.mutable_data_ptr<int64_t>();
    auto* magnitudes = result.magnitudes.mutable_data_ptr<int64_t>();
    at::parallel_for(
        0, dense.size(0), std::max<int64_t>(1, kNumbers / std::max<int64_t>(1, columns)),
        [&](int64_t first, int64_t last) {
          for (auto row = first; row < last; ++row) {
            const auto* from = numbers + row * columns;
            sums[row] = std::accumulate(from, from + columns, int64_t{0});
            magnitudes[row] = std::transform_reduce(from, from + columns, int64_t{0}, std::plus<>(),
                                                    [](int n) { return std::abs(n); });
          }
        });
    return result;
  }
};

}  // namespace

std::optional<QuantizedSums> sumsOf(const FoundQuantized& found, const at::Tensor& weight,
                                    const at::Tensor& bias) {
  const auto outputs = weight.size(0);
  const auto result = found.result_scale.value_or(Scale{});
  const auto zero_point = static_cast<double>(result.zero_point);
  const bool curved =
      found.function != Function::none && found.result_scale && QuantizedLinear::kernels().curves;
  // Without a curve a function is one of real numbers.
  const bool rounds = found.result_scale && (curved || found.function == Function::none);
  // The sum and all that is added to it are of these units.
  const auto unit = curved ? pieceOf(found.function) : rounds ? result.scale : 1.0;
  // Of a transposed convolution, each place of the window has the same ones.
  const auto ofOutputs = [&](const at::Tensor& numbers) {
    return numbers.repeat({outputs / numbers.numel()});
  };
  auto scale = ofOutputs(at::tensor(found.scales, at::kDouble)) * (found.data_scale.scale / unit);
  auto shift = bias.defined() ? ofOutputs(bias.to(at::kDouble).flatten()) / unit
                              : at::zeros({outputs}, at::kDouble);
  shift =
      shift - found.addend_scale.scale / unit * static_cast<double>(found.addend_scale.zero_point);
  if (rounds) {
    shift = shift + (curved ? kMiddle : zero_point);
  }
  scale = scale.to(at::kFloat);
  shift = shift.to(at::kFloat);
  QuantizedSums sums;
  auto& rescale = sums.rescale;
  rescale.addend_scale = static_cast<float>(found.addend_scale.scale / unit);
  rescale.function = found.function;
  rescale.result_scale = static_cast<float>(1 / result.scale);
  rescale.result_shift = static_cast<float>(zero_point);
  const auto curve = curved ? curveOf(found.function, result) : at::zeros({1});
  const bool finite = scale.isfinite().all().item<bool>() && shift.isfinite().all().item<bool>() &&
                      curve.isfinite().all().item<bool>() && std::isfinite(rescale.addend_scale) &&
                      std::isfinite(rescale.result_scale);
  if (!finite) {
    return std::nullopt;
  }
  const auto most = found.most ? *found.most / unit + zero_point : kLargest;
  const auto least = found.least ? std::nearbyint(*found.least / unit + zero_point) : 0;
  rescale.highest = static_cast<float>(std::min(kLargest, most));
  rescale.highest_rounded =
      static_cast<uint8_t>(std::clamp<double>(std::nearbyint(most), 0, kLargest));
  rescale.lowest = static_cast<uint8_t>(std::clamp<double>(least, 0, kLargest));
  constexpr double kLargestSum = 1 << 30;
  const auto weights = RowSums::of(weight.flatten(1));
  const auto largest = weights.magnitudes.to(at::kDouble) * kLargest;
  rescale.fits =
      (largest * scale.abs() + shift.abs()).max().item<double>() + kLargest * rescale.addend_scale <
      kLargestSum;
  const auto start = (weights.sums * -found.data_scale.zero_point).to(at::kInt);
  for (const auto& numbers : {start, scale, shift}) {
    sums.tensors.push_back(QuantizedSums::padded(numbers));
  }
  sums.tensors.push_back(curve);
  rescale.curve = curve.const_data_ptr<float>();
  rescale.start = sums.tensors[0].const_data_ptr<int32_t>();
  rescale.scale = sums.tensors[1].const_data_ptr<float>();
  rescale.shift = sums.tensors[2].const_data_ptr<float>();
  return sums;
}

}  // namespace llga
