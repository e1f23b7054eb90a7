#include "jit/onednn/runtime/own_kernels.h"
#include "jit/onednn/quantization.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>

#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/environment.h"

namespace llga {
namespace {

bool canAvx2() {
  static const bool can = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  return can;
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

using Readers = std::unordered_map<size_t, Ops>;

Readers readersOf(const LoweredGraph& graph) {
  Readers readers;
  for (const auto& op : graph.ops) {
    for (const auto& input : op.inputs()) {
      readers[input.id].push_back(&op);
    }
  }
  return readers;
}

// The activation whose first op this is.
std::optional<ActivationApart> activationFrom(
    const OpSpec& op, const LoweredGraph& graph, const Readers& readers,
    const std::unordered_map<size_t, size_t>& group_outputs) {
  const auto from = op.inputs()[0].id;
  const auto to = op.outputs()[0].id;
  if (auto ops = tanhGelu(op, opsOf(graph)); !ops.empty()) {
    return ActivationApart{Activation::tanh_gelu, ops, from, ops.back()->outputs()[0].id};
  }
  const auto kind = activationOf(op.kind());
  if (kind == Activation::sigmoid && group_outputs.count(to) == 0 && readers.count(to) != 0) {
    const auto& gate = readers.at(to);
    if (gate.size() == 1 && gate[0]->kind() == OpKind::Multiply &&
        readers.at(from) == Ops{&op, gate[0]}) {
      return ActivationApart{Activation::silu, {&op, gate[0]}, from, gate[0]->outputs()[0].id};
    }
  }
  return kind ? std::optional(ActivationApart{*kind, {&op}, from, to}) : std::nullopt;
}

// oneDNN has no kernel for GELU's tanh form, slow ones for AVX2 for all, and for AVX-512 good ones
// behind a convolution or product alone (`lone`: there is none).
bool isSlowInOnednn(Activation activation, at::ScalarType dtype, bool lone) {
  if (activation == Activation::tanh_gelu || lone) {
    return ownKernelsAnywhere() && (dtype == at::kFloat || dtype == at::kBFloat16);
  }
  return ownAvx2Kernels() && dtype == at::kFloat;
}

// How many numbers the activation is of; 0 where a pass of its own is not possible, or not worth
// it.
int64_t numbersOf(const ActivationApart& applied, const LoweredGraph& graph, const Readers& readers,
                  const std::unordered_map<size_t, size_t>& group_outputs, bool lone) {
  constexpr int64_t kFewest = 4096;
  const auto& from = graph.operands.at(applied.from);
  const auto& to = graph.operands.at(applied.to);
  const auto& read_by = readers.at(from.id);
  const bool others = std::any_of(read_by.begin(), read_by.end(), [&](const OpSpec* reader) {
    return std::find(applied.ops.begin(), applied.ops.end(), reader) == applied.ops.end();
  });
  const bool last = group_outputs.count(to.id) != 0 && readers.count(to.id) == 0;
  if (!isSlowInOnednn(applied.activation, from.dtype, lone) || from.dtype != to.dtype ||
      !from.sizes || from.sizes != to.sizes || others || group_outputs.count(from.id) != 0 ||
      (!last && applied.activation != Activation::tanh_gelu)) {
    return 0;
  }
  const auto count = c10::multiply_integers(*from.sizes);
  return count >= kFewest ? count : 0;
}

// Tells of an operand whether it is a constant. The graph outlives it.
auto constantsOf(const LoweredGraph& graph) {
  return [&graph](const Operand& operand) { return graph.operands.at(operand.id).constant; };
}

// Of images of known sizes and of this type, with constant parameters of it.
bool isOfImages(const OpSpec& op, const LoweredGraph& graph, at::ScalarType type) {
  const auto& inputs = op.inputs();  // data, weight, and maybe bias
  const bool parameters = std::all_of(inputs.begin() + 1, inputs.end(), [&](const Operand& input) {
    return input.dtype == type && graph.operands.at(input.id).constant;
  });
  const auto& data = inputs[0];
  const auto& result = op.outputs()[0];
  return parameters && data.dtype == type && data.sizes && data.sizes->size() == 4 &&
         inputs[1].sizes && result.dtype == type && result.sizes;
}

bool isImageConvolution(const OpSpec& op, const LoweredGraph& graph,
                        at::ScalarType type = at::kFloat) {
  return op.kind() == OpKind::Convolution && isOfImages(op, graph, type);
}

// Of float32 images, whose windows are of pixels side by side and of all channels.
bool isDenseConvolution(const OpSpec& op, const LoweredGraph& graph) {
  return isImageConvolution(op, graph) && op.get_attr<int64_t>(Attr::groups) == 1 &&
         op.get_attr<Shape>(Attr::dilations) == Shape{1, 1};
}

bool isProductOf(const OpSpec& op, const Operand& a, const Operand& b) {
  const auto& factors = op.inputs();
  return op.kind() == OpKind::Multiply && ((factors[0].id == a.id && factors[1].id == b.id) ||
                                           (factors[0].id == b.id && factors[1].id == a.id));
}

// Of images of this type, of all channels together and without padding.
bool isPlain(const OpSpec& op, const LoweredGraph& graph, at::ScalarType type) {
  const Shape none{0, 0};
  return isImageConvolution(op, graph, type) && op.get_attr<int64_t>(Attr::groups) == 1 &&
         op.get_attr<Shape>(Attr::pads_begin) == none && op.get_attr<Shape>(Attr::pads_end) == none;
}

// Such, over one pixel at a time.
bool isPointwise(const OpSpec& op, const LoweredGraph& graph, at::ScalarType type) {
  const Shape ones{1, 1};
  return isPlain(op, graph, type) && pair(*op.inputs()[1].sizes) == pair(ones) &&
         op.get_attr<Shape>(Attr::strides) == ones;
}

// Such, by a window that is as large as the images are: a linear layer of all numbers of an image.
bool isOfWholeImages(const OpSpec& op, const LoweredGraph& graph, at::ScalarType type) {
  return isPlain(op, graph, type) && pair(*op.inputs()[1].sizes) == pair(*op.inputs()[0].sizes) &&
         op.get_attr<Shape>(Attr::dilations) == Shape{1, 1};
}

// Of float32 images of a few planes, by a small square window; their strides are not known yet.
std::optional<Expansion::First> firstConvolution(const OpSpec& op, const LoweredGraph& graph) {
  if (!isDenseConvolution(op, graph)) {
    return std::nullopt;
  }
  constexpr int64_t kMostColumns = 3;  // of the window; others were not measured
  const auto size = pair(*op.inputs()[0].sizes);
  const auto channels = (*op.inputs()[0].sizes)[1];
  const auto window = pair(*op.inputs()[1].sizes);
  const auto stride = op.get_attr<Shape>(Attr::strides);
  const auto padding = op.get_attr<Shape>(Attr::pads_begin);
  if (channels > ImageRows::kFewPlanes || window[0] != window[1] || window[0] == 1 ||
      window[0] > kMostColumns || stride[0] != stride[1] || padding[0] != padding[1]) {
    return std::nullopt;
  }
  const auto width = (pair(*op.outputs()[0].sizes)[1] - 1) * stride[0] + window[0];
  return Expansion::First{window[0], stride[0], padding[0],
                          ImageRows{size, channels, {}, padding[0], width}};
}

// The other operand, if `op` is of this kind and of one other, and the result has the value's
// sizes; else null.
const Operand* operandBeside(const Operand& value, const OpSpec& op, OpKind kind) {
  if (op.kind() != kind || op.outputs()[0].sizes != value.sizes) {
    return nullptr;
  }
  const auto& operands = op.inputs();
  const bool left = operands[0].id == value.id;
  return left != (operands[1].id == value.id) ? &operands[left ? 1 : 0] : nullptr;
}

const Operand* addedTo(const Operand& value, const OpSpec& op) {
  return operandBeside(value, op, OpKind::Add);
}

// What a partition does behind its convolution.
struct Behind {
  bool silu;                      // before the addition
  std::optional<Operand> addend;  // like the result
  Rectifier rectifier = Rectifier::none;
  Operand result;
};

// Nothing if it is anything else than SiLU, an addition and an activation.
std::optional<Behind> behindConvolution(const Ops& ops) {
  Behind found{false, {}, Rectifier::none, ops[0]->outputs()[0]};
  size_t known = 1;
  if (known + 1 < ops.size() && ops[known]->kind() == OpKind::Sigmoid &&
      ops[known]->inputs()[0].id == found.result.id &&
      isProductOf(*ops[known + 1], found.result, ops[known]->outputs()[0])) {
    found.silu = true;
    found.result = ops[known + 1]->outputs()[0];
    known += 2;
  }
  if (known < ops.size() && ops[known]->kind() == OpKind::Add) {
    const auto* addend = addedTo(found.result, *ops[known]);
    if (addend == nullptr || addend->dtype != found.result.dtype ||
        addend->sizes != found.result.sizes) {
      return std::nullopt;
    }
    found.addend = *addend;
    found.result = ops[known++]->outputs()[0];
  }
  if (known < ops.size() && ops[known]->inputs()[0].id == found.result.id) {
    found.rectifier = rectifierOf(*ops[known]);
    known += found.rectifier == Rectifier::none ? 0 : 1;
    found.result = ops[known - 1]->outputs()[0];
  }
  return known == ops.size() ? std::optional(found) : std::nullopt;
}

// What a partition computes this value from, if it only casts or dequantizes that; else the value.
size_t beforeConversion(const Ops& ops, size_t id) {
  for (const auto* op : ops) {
    const bool converts = op->kind() == OpKind::TypeCast || op->kind() == OpKind::Dequantize;
    if (converts && op->outputs()[0].id == id) {
      return op->inputs()[0].id;
    }
  }
  return id;
}

// Whether it is PReLU with constant slopes, one for each channel.
bool isSloped(const OpSpec& op, const LoweredGraph& graph) {
  if (op.kind() != OpKind::PReLU || !graph.operands.at(op.inputs()[1].id).constant) {
    return false;
  }
  const auto& data = op.inputs()[0];
  const auto& slopes = op.inputs()[1];
  return data.sizes && data.sizes->size() > 1 && slopes.sizes == Shape{(*data.sizes)[1]};
}

// What ops from `next` on apply to `value`, if it is an activation: then both are behind it.
Expansion::Applied takeActivation(const Ops& ops, size_t& next, Operand& value) {
  Expansion::Applied found;
  if (next == ops.size() || ops[next]->inputs()[0].id != value.id) {
    return found;
  }
  const auto& op = *ops[next];
  const auto* last = &op;
  found.rectifier = rectifierOf(op);
  if (op.kind() == OpKind::Sigmoid && next + 1 < ops.size() &&
      isProductOf(*ops[next + 1], value, op.outputs()[0])) {
    found.activation = Activation::silu;
    last = ops[next + 1];
  } else if (op.kind() == OpKind::GELU) {
    found.activation = Activation::gelu;
  } else if (found.rectifier == Rectifier::none) {
    return found;
  }
  next += last == &op ? 1 : 2;
  value = last->outputs()[0];
  return found;
}

// Takes the ops of a graph one after the other, each a reader of the one before.
class Chain {
 public:
  explicit Chain(const std::vector<OpSpec>& ops) : next_(ops.begin()), end_(ops.end()) {}

  // The next op, if it is of this kind and reads `operand` first; else null, and nothing is taken.
  const OpSpec* take(OpKind kind, const Operand& operand) {
    if (next_ == end_ || next_->kind() != kind || next_->inputs()[0].id != operand.id) {
      return nullptr;
    }
    return &*next_++;
  }

  // The next op, if it multiplies the two.
  const OpSpec* takeProduct(const Operand& a, const Operand& b) {
    return next_ != end_ && isProductOf(*next_, a, b) ? &*next_++ : nullptr;
  }

  bool atEnd() const { return next_ == end_; }

 private:
  std::vector<OpSpec>::const_iterator next_;
  std::vector<OpSpec>::const_iterator end_;
};

// A convolution of one pixel.
bool isPixelConvolution(const OpSpec& op, const LoweredGraph& graph, at::ScalarType type) {
  const Shape one{1, 1};
  return isImageConvolution(op, graph, type) && op.get_attr<int64_t>(Attr::groups) == 1 &&
         pair(*op.inputs()[0].sizes) == pair(one) && pair(*op.inputs()[1].sizes) == pair(one) &&
         pair(*op.outputs()[0].sizes) == pair(one) &&
         op.get_attr<Shape>(Attr::pads_begin) == Shape{0, 0};
}

// Strides of what a view or a transposition makes of `value` without moving a number; nothing for
// other ops. `moved`: the value's strides, or empty if it is contiguous.
std::optional<Shape> movedStrides(const OpSpec& op, const Operand& value, const Shape& moved) {
  auto contiguous = [](const Operand& operand) {
    return c10::TensorType::contiguousStridesOf(*operand.sizes);
  };
  if (op.inputs()[0].id != value.id || !op.outputs()[0].sizes) {
    return std::nullopt;
  }
  if (op.kind() == OpKind::StaticReshape && (moved.empty() || moved == contiguous(value))) {
    return contiguous(op.outputs()[0]);
  }
  if (op.kind() == OpKind::StaticTranspose) {
    const auto strides = moved.empty() ? contiguous(value) : moved;
    Shape permuted;
    for (const auto dim : op.get_attr<Shape>(Attr::order)) {
      permuted.push_back(strides.at(static_cast<size_t>(dim)));
    }
    return permuted;
  }
  return std::nullopt;
}

// Whether it is expected to be faster than oneDNN's kernel, where that is no small work.
bool paysWide(const DirectConvolution& kernel) {
  // oneDNN's kernels for AVX-512 are as fast or faster over one plane, but over single rows or by
  // windows much wider than a vector.
  constexpr int64_t kWidest = 16;
  return kernel.isWide() && (ownAvx2Kernels() || kernel.inputs > 1 || kernel.window[0] == 1 ||
                             kernel.window[1] >= kWidest);
}

constexpr int64_t kMostProducts = 1 << 28;  // of two matrices: of more, oneDNN's gemm is as fast

int64_t productsOf(const MatrixProduct& p) {
  return c10::multiply_integers(p.sizes) * p.rows * p.inputs * p.outputs;
}

// Whether a product of float32 is expected to be faster than oneDNN's.
bool paysGemm(int64_t rows, int64_t inputs, int64_t outputs, bool image) {
  if (ownAvx2Kernels()) {
    constexpr int64_t kFewest = 8;  // rows that are worth another order of the weight
    return rows >= kFewest;
  }
  // oneDNN's kernels for AVX-512 wait for weights which are in no cache; of more rows, those that
  // have few inputs or are many are as fast, and so are most convolutions.
  constexpr int64_t kFewRows = 100;
  constexpr int64_t kMostRows = 1024;
  constexpr int64_t kFewInputs = 192;
  constexpr int64_t kMostPixels = 200;
  constexpr int64_t kLargeWeight = 1 << 17;  // numbers
  return image ? rows <= kMostPixels && inputs * outputs >= kLargeWeight
               : rows <= kFewRows || (rows <= kMostRows && inputs >= kFewInputs);
}

}  // namespace

Rectifier rectifierOf(const OpSpec& op) {
  constexpr float kMost = 6;
  switch (op.kind()) {
    case OpKind::ReLU:
      return Rectifier::relu;
    case OpKind::HardSwish:
      return Rectifier::hardswish;
    case OpKind::Clamp:
      return op.get_attr<float>(Attr::min) == 0 && op.get_attr<float>(Attr::max) == kMost
                 ? Rectifier::relu6
                 : Rectifier::none;
    default:
      return Rectifier::none;
  }
}

Ops opsOf(const LoweredGraph& graph) {
  Ops ops;
  for (const auto& op : graph.ops) {
    ops.push_back(&op);
  }
  return ops;
}

Ops tanhGelu(const OpSpec& op, const Ops& ops) {
  const auto* node = op.node();
  if (!isTanhGelu(node)) {
    return {};
  }
  Ops parts;
  std::copy_if(ops.begin(), ops.end(), std::back_inserter(parts),
               [&](const OpSpec* part) { return part->node() == node; });
  const bool whole = !parts.empty() && parts.front() == &op &&
                     parts.back()->outputs()[0].id == node->output()->unique();
  return whole ? parts : Ops{};
}

bool isGlobalMean(const OpSpec& op) {
  const auto& data = op.inputs()[0];
  if (!data.sizes || data.sizes->size() != 4) {
    return false;
  }
  if (op.kind() == OpKind::AvgPool) {
    return op.get_attr<Shape>(Attr::kernel) == Shape(data.sizes->begin() + 2, data.sizes->end()) &&
           op.get_attr<Shape>(Attr::pads_begin) == Shape{0, 0} &&
           op.get_attr<Shape>(Attr::pads_end) == Shape{0, 0};
  }
  return op.kind() == OpKind::ReduceMean && op.get_attr<Shape>(Attr::axes) == Shape{2, 3};
}

std::array<int64_t, 2> pair(const Shape& values) { return {values.end()[-2], values.end()[-1]}; }

bool isSet(const OpSpec& op, Attr flag) {
  const auto& attributes = op.attributes();
  return std::any_of(attributes.begin(), attributes.end(), [flag](const auto& known) {
    return known.first == flag && std::get<bool>(known.second);
  });
}

bool ownKernels() {
  static const bool on = !switchedOff("LLGA_FUSER_OWN_KERNELS");
  return on;
}

bool ownAvx2Kernels() { return ownKernels() && usesAvxGemm() && canAvx2(); }

bool ownKernelsAnywhere() { return ownKernels() && (usesAvxGemm() || usesAvx512()) && canAvx2(); }

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

std::optional<Activation> activationFrom(const Ops& ops, size_t& i, const Operand& value) {
  const auto& op = *ops[i];
  if (op.inputs()[0].id != value.id) {
    return std::nullopt;
  }
  if (const auto parts = tanhGelu(op, ops); !parts.empty()) {
    i += parts.size() - 1;
    return Activation::tanh_gelu;
  }
  const auto found = activationOf(op.kind());
  if (found == Activation::sigmoid && i + 1 < ops.size() &&
      isProductOf(*ops[i + 1], value, op.outputs()[0])) {
    ++i;
    return Activation::silu;
  }
  return found;
}

std::vector<ActivationApart> activationsApart(
    const LoweredGraph& graph, const std::unordered_map<size_t, size_t>& group_outputs) {
  constexpr int64_t kMost = int64_t{1} << 21;
  std::vector<ActivationApart> found;
  const auto producers = producerKinds(graph);
  const auto readers = readersOf(graph);
  for (const auto& op : graph.ops) {
    auto applied = activationFrom(op, graph, readers, group_outputs);
    if (!applied || producers.count(applied->from) == 0) {
      continue;
    }
    const auto numbers = numbersOf(*applied, graph, readers, group_outputs, /*lone=*/false);
    const auto most = applied->activation == Activation::tanh_gelu
                          ? std::numeric_limits<int64_t>::max()  // oneDNN's is slower still
                          : kMost;
    if (numbers > 0 && numbers <= most) {
      found.push_back(std::move(*applied));
    }
  }
  return found;
}

std::optional<ActivationApart> loneActivation(
    const LoweredGraph& graph, const std::unordered_map<size_t, size_t>& group_outputs) {
  if (graph.ops.empty()) {
    return std::nullopt;
  }
  const auto readers = readersOf(graph);
  auto applied = activationFrom(graph.ops.front(), graph, readers, group_outputs);
  const bool lone = applied && applied->ops.size() == graph.ops.size() &&
                    numbersOf(*applied, graph, readers, group_outputs, /*lone=*/true) > 0;
  return lone ? std::move(applied) : std::nullopt;
}

std::optional<FoundGate> gate(const LoweredGraph& graph) {
  constexpr size_t kLeastRank = 3;
  const auto ops = opsOf(graph);
  if (!ownKernelsAnywhere() || ops.size() < 2 || ops.back()->kind() != OpKind::Multiply) {
    return std::nullopt;
  }
  const auto& factors = ops.back()->inputs();
  FoundGate found{{factors[0], factors[1]}, {}, ops.back()->outputs()[0]};
  for (size_t i = 0; i + 1 < ops.size(); ++i) {
    const auto value = ops[i]->inputs()[0];
    const auto activation = activationFrom(ops, i, value);
    const auto result = ops[i]->outputs()[0].id;
    const size_t factor = factors[0].id == result ? 0 : 1;
    if (!activation || i + 1 == ops.size() || factors[factor].id != result) {
      return std::nullopt;
    }
    found.data[factor] = value;
    found.activations[factor] = activation;
  }
  const auto& result = found.result;
  const bool alike = std::all_of(found.data.begin(), found.data.end(), [&](const Operand& data) {
    return data.dtype == result.dtype && data.sizes && data.sizes == result.sizes;
  });
  const bool known = result.dtype == at::kFloat || result.dtype == at::kBFloat16;
  return alike && known && result.sizes->size() >= kLeastRank ? std::optional(std::move(found))
                                                              : std::nullopt;
}

std::optional<GroupedConvolution> groupedConvolution(const Ops& ops, const LoweredGraph& graph) {
  const bool relu = ops.size() == 2 && ops[1]->kind() == OpKind::ReLU;
  const auto& data = ops[0]->inputs()[0];
  const bool narrow = data.dtype == at::kBFloat16;
  if (!(narrow ? ownKernels() : ownAvx2Kernels()) || ops.size() != (relu ? 2 : 1) ||
      !isImageConvolution(*ops[0], graph, narrow ? at::kBFloat16 : at::kFloat)) {
    return std::nullopt;
  }
  const auto& weight = ops[0]->inputs()[1];
  const auto& result = ops.back()->outputs()[0];
  if (result.dtype != data.dtype || (*weight.sizes)[0] != (*data.sizes)[1]) {
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
  return (narrow ? kernel.isNarrowSupported() : kernel.isSupported()) ? std::optional(kernel)
                                                                      : std::nullopt;
}

std::optional<DepthwiseConvolution> depthwiseConvolution(const Ops& ops,
                                                         const LoweredGraph& graph) {
  const auto dtype = ops[0]->inputs()[0].dtype;
  if (!ownKernelsAnywhere() || (dtype != at::kFloat && dtype != at::kBFloat16) ||
      !isImageConvolution(*ops[0], graph, dtype)) {
    return std::nullopt;
  }
  const auto& data = ops[0]->inputs()[0];
  const auto& weight = *ops[0]->inputs()[1].sizes;
  const auto& last = *ops.back();
  const bool leaks = ops.size() == 2 && last.kind() == OpKind::LeakyReLU;
  const auto behind = behindConvolution(leaks ? Ops{ops[0]} : ops);
  const auto stride = pair(ops[0]->get_attr<Shape>(Attr::strides));
  const auto channels = (*data.sizes)[1];
  if (!behind || behind->silu || behind->addend || last.outputs()[0].dtype != dtype ||
      ops[0]->get_attr<int64_t>(Attr::groups) != channels ||
      (stride[0] != stride[1] && pair(*data.sizes)[0] != 1)) {
    return std::nullopt;
  }
  const DepthwiseConvolution kernel{(*data.sizes)[0],
                                    pair(*data.sizes),
                                    pair(*behind->result.sizes),
                                    channels,
                                    weight[0] / channels,
                                    pair(weight),
                                    stride[1],
                                    pair(ops[0]->get_attr<Shape>(Attr::dilations)),
                                    pair(ops[0]->get_attr<Shape>(Attr::pads_begin)),
                                    behind->rectifier,
                                    leaks ? last.get_attr<float>(Attr::alpha) : 1,
                                    dtype == at::kBFloat16};
  return kernel.isSupported() ? std::optional(kernel) : std::nullopt;
}

std::optional<TransposedConvolution> transposedConvolution(const Ops& ops,
                                                           const LoweredGraph& graph) {
  const auto& op = *ops[0];
  if (!ownKernelsAnywhere() || op.kind() != OpKind::ConvTranspose ||
      !isOfImages(op, graph, at::kFloat) || op.get_attr<int64_t>(Attr::groups) != 1 ||
      op.get_attr<Shape>(Attr::dilations) != Shape{1, 1}) {
    return std::nullopt;
  }
  const auto& data = *op.inputs()[0].sizes;
  const auto& weight = *op.inputs()[1].sizes;
  size_t last = 1;
  const auto activation =
      last < ops.size() ? activationFrom(ops, last, op.outputs()[0]) : std::optional<Activation>();
  const auto behind = behindConvolution(activation && last + 1 == ops.size() ? Ops{&op} : ops);
  if (!behind || behind->silu || behind->addend) {
    return std::nullopt;
  }
  const TransposedConvolution kernel{data[0],
                                     pair(data),
                                     pair(*op.outputs()[0].sizes),
                                     data[1],
                                     weight[1],
                                     pair(weight),
                                     pair(op.get_attr<Shape>(Attr::strides)),
                                     pair(op.get_attr<Shape>(Attr::pads_begin)),
                                     behind->rectifier,
                                     activation};
  return kernel.pays() ? std::optional(kernel) : std::nullopt;
}

std::optional<DepthwiseVolume> depthwiseVolume(const Ops& ops, const LoweredGraph& graph) {
  constexpr size_t kRank = 5;
  const auto& op = *ops[0];
  const auto& data = op.inputs()[0];
  const bool narrow = data.dtype == at::kBFloat16;
  if (!ownKernelsAnywhere() || op.kind() != OpKind::Convolution || !data.sizes ||
      data.sizes->size() != kRank || (!narrow && data.dtype != at::kFloat)) {
    return std::nullopt;
  }
  const auto& inputs = op.inputs();
  const bool parameters = std::all_of(inputs.begin() + 1, inputs.end(), [&](const Operand& input) {
    return input.dtype == data.dtype && graph.operands.at(input.id).constant;
  });
  const auto channels = (*data.sizes)[1];
  const auto behind = behindConvolution(ops);
  if (!parameters || !behind || behind->silu || behind->addend ||
      behind->result.dtype != data.dtype || !behind->result.sizes ||
      inputs[1].sizes != Shape{channels, 1, 3, 3, 3} ||
      op.get_attr<int64_t>(Attr::groups) != channels ||
      op.get_attr<Shape>(Attr::dilations) != Shape{1, 1, 1}) {
    return std::nullopt;
  }
  const auto last = [](const Shape& values) {
    return DepthwiseVolume::Triple{values.end()[-3], values.end()[-2], values.end()[-1]};
  };
  const DepthwiseVolume kernel{(*data.sizes)[0],
                               last(*data.sizes),
                               last(*behind->result.sizes),
                               channels,
                               last(op.get_attr<Shape>(Attr::strides)),
                               last(op.get_attr<Shape>(Attr::pads_begin)),
                               behind->rectifier,
                               narrow};
  return kernel.isSupported() ? std::optional(kernel) : std::nullopt;
}

std::optional<AddedConvolution<WinogradConvolution>> winogradConvolution(const Ops& ops,
                                                                         const LoweredGraph& graph,
                                                                         Way way) {
  const bool asked = way == Way::winograd2 || way == Way::winograd4;
  const auto dtype = ops[0]->inputs()[0].dtype;
  if ((!asked && way != Way::usual) || !winogradIsOn() ||
      (dtype != at::kFloat && dtype != at::kBFloat16) ||
      !isImageConvolution(*ops[0], graph, dtype)) {
    return std::nullopt;
  }
  const auto& data = ops[0]->inputs()[0];
  const auto& weight = ops[0]->inputs()[1];
  const auto behind = behindConvolution(ops);
  const auto ones = Shape{1, 1};
  if (!behind || behind->result.dtype != dtype || ops[0]->get_attr<int64_t>(Attr::groups) != 1 ||
      pair(*weight.sizes) != std::array<int64_t, 2>{3, 3} ||
      ops[0]->get_attr<Shape>(Attr::strides) != ones ||
      ops[0]->get_attr<Shape>(Attr::dilations) != ones ||
      (behind->rectifier != Rectifier::none && behind->rectifier != Rectifier::relu)) {
    return std::nullopt;
  }
  WinogradConvolution kernel{(*data.sizes)[0],
                             pair(*data.sizes),
                             pair(*behind->result.sizes),
                             pair(ops[0]->get_attr<Shape>(Attr::pads_begin)),
                             (*data.sizes)[1],
                             (*weight.sizes)[0],
                             behind->silu,
                             behind->rectifier == Rectifier::relu,
                             dtype};
  if (!kernel.isSupported()) {
    return std::nullopt;
  }
  constexpr int64_t kSmall = 2;
  constexpr int64_t kLarge = 4;
  kernel.tile = !asked ? kernel.chooseTile() : way == Way::winograd2 ? kSmall : kLarge;
  return kernel.tile != 0
             ? std::optional(AddedConvolution<WinogradConvolution>{kernel, behind->addend})
             : std::nullopt;
}

std::optional<AddedConvolution<NarrowConvolution>> narrowConvolution(const Ops& ops,
                                                                     const LoweredGraph& graph) {
  const auto kind = ops[0]->kind();
  if (!ownKernels() || (kind != OpKind::Convolution && kind != OpKind::ConvTranspose) ||
      !isOfImages(*ops[0], graph, at::kBFloat16)) {
    return std::nullopt;
  }
  const auto behind = behindConvolution(ops);
  if (!behind || behind->result.dtype != at::kBFloat16 ||
      (behind->silu && (behind->addend || behind->rectifier != Rectifier::none))) {
    return std::nullopt;
  }
  const auto convolution = tiledConvolution(*ops[0], *ops[0]->inputs()[1].sizes, sizeof(Bfloat16));
  if (!convolution) {
    return std::nullopt;
  }
  NarrowConvolution kernel{*convolution, behind->rectifier, {}};
  if (behind->silu) {
    kernel.activation = Activation::silu;
  }
  return AddedConvolution<NarrowConvolution>{kernel, behind->addend};
}

std::optional<AddedConvolution<DirectConvolution>> directConvolution(const Ops& ops,
                                                                     const LoweredGraph& graph) {
  if (!ownKernelsAnywhere() || !isDenseConvolution(*ops[0], graph)) {
    return std::nullopt;
  }
  const auto behind = behindConvolution(ops);
  const bool others = behind && (behind->addend || behind->rectifier != Rectifier::none);
  if (!behind || (behind->silu && others) || behind->result.dtype != at::kFloat) {
    return std::nullopt;
  }
  const auto& data = ops[0]->inputs()[0];
  const auto& weight = ops[0]->inputs()[1];
  const DirectConvolution kernel{(*data.sizes)[0],
                                 pair(*data.sizes),
                                 pair(*behind->result.sizes),
                                 pair(*weight.sizes),
                                 pair(ops[0]->get_attr<Shape>(Attr::strides)),
                                 pair(ops[0]->get_attr<Shape>(Attr::pads_begin)),
                                 (*data.sizes)[1],
                                 (*weight.sizes)[0],
                                 behind->rectifier,
                                 behind->silu};
  const bool pays = kernel.isSupported() && (kernel.pays() || paysWide(kernel));
  return pays ? std::optional(AddedConvolution<DirectConvolution>{kernel, behind->addend})
              : std::nullopt;
}

std::optional<TiledConvolution> tiledConvolution(const OpSpec& op, const Shape& weight,
                                                 int64_t item) {
  const auto& data = op.inputs()[0];
  const auto& result = op.outputs()[0];
  const bool transposed = op.kind() == OpKind::ConvTranspose;
  if ((op.kind() != OpKind::Convolution && !transposed) ||
      op.get_attr<int64_t>(Attr::groups) != 1 || !data.sizes || data.sizes->size() != 4 ||
      !result.sizes) {
    return std::nullopt;
  }
  TiledConvolution kernel{(*data.sizes)[0],
                          pair(*data.sizes),
                          pair(*result.sizes),
                          pair(weight),
                          pair(op.get_attr<Shape>(Attr::strides)),
                          pair(op.get_attr<Shape>(Attr::dilations)),
                          pair(op.get_attr<Shape>(Attr::pads_begin)),
                          (*data.sizes)[1],
                          weight[0],
                          item};
  if (transposed) {
    const Shape none{0, 0};
    const auto enlarged = [&](size_t i) {
      return kernel.result_size[i] == kernel.size[i] * kernel.stride[i];
    };
    if (kernel.window != kernel.stride || op.get_attr<Shape>(Attr::pads_begin) != none ||
        op.get_attr<Shape>(Attr::pads_end) != none || !enlarged(0) || !enlarged(1) ||
        op.get_attr<Shape>(Attr::dilations) != Shape{1, 1}) {
      return std::nullopt;
    }
    kernel.result_lines = kernel.window[0];
    kernel.outputs = weight[1] * kernel.window[0] * kernel.window[1];
    kernel.result_size = kernel.size;
    kernel.window = kernel.stride = {1, 1};
  }
  return kernel.isSupported() ? std::optional(kernel) : std::nullopt;
}

at::Tensor asPointwise(const at::Tensor& weight) {
  return weight.permute({2, 3, 1, 0}).flatten(0, 2).unsqueeze(-1).unsqueeze(-1);
}

bool isConvolutionOfPlanes(const Ops& ops, const Layout& images) {
  constexpr int64_t kManyPixels = 1024;
  if (!ownKernelsAnywhere() || images.get_layout_type() != Layout::layout_type::strided) {
    return false;
  }
  const auto sizes = images.get_dims();
  if (sizes.size() != 4 || sizes[1] < 2 || sizes[1] > ImageRows::kFewPlanes ||
      sizes[2] * sizes[3] < kManyPixels ||
      images.get_strides() != c10::TensorType::contiguousStridesOf(sizes)) {
    return false;
  }
  return std::any_of(ops.begin(), ops.end(), [&](const OpSpec* op) {
    return op->kind() == OpKind::Convolution &&
           beforeConversion(ops, op->inputs()[0].id) == images.get_id();
  });
}

std::optional<FoundLinear> linear(const Ops& ops, const LoweredGraph& graph, Way way) {
  const auto& product = *ops[0];
  const bool asked = way == Way::gemm;
  const bool image = isPointwise(product, graph, at::kFloat);
  if ((!asked && way != Way::usual) || !ownKernelsAnywhere() ||
      (!image && (product.kind() != OpKind::MatMul || isSet(product, Attr::transpose_a) ||
                  isSet(product, Attr::transpose_b)))) {
    return std::nullopt;
  }
  auto isFloat = [](const Operand& operand) {
    return operand.dtype == at::kFloat && operand.sizes && !operand.sizes->empty();
  };
  const auto isConstant = constantsOf(graph);
  const auto& operands = product.inputs();
  const auto& data = operands[0];
  const auto& weight = operands[1];
  if (!isFloat(data) || !isFloat(weight) || !isConstant(weight) ||
      weight.sizes->size() != (image ? 4 : 2)) {
    return std::nullopt;
  }
  const auto inputs = (*weight.sizes)[image ? 1 : 0];
  const auto outputs = (*weight.sizes)[image ? 0 : 1];
  if (data.sizes->end()[image ? -3 : -1] != inputs) {
    return std::nullopt;
  }
  auto isBias = [&](const Operand& operand) {
    return isFloat(operand) && isConstant(operand) && operand.sizes->back() == outputs &&
           c10::multiply_integers(*operand.sizes) == outputs;
  };
  FoundLinear found{image,
                    c10::multiply_integers(*data.sizes) / inputs,
                    data,
                    weight,
                    {},
                    {},
                    product.outputs()[0]};
  if (operands.size() == 3) {
    if (!isBias(operands[2])) {
      return std::nullopt;
    }
    found.biases.push_back(operands[2]);
  }
  for (size_t i = 1; i < ops.size(); ++i) {
    const auto& op = *ops[i];
    if (auto moved = movedStrides(op, found.result, found.moved)) {
      if (image || found.addend) {
        return std::nullopt;
      }
      found.moved = std::move(*moved);
      found.result = op.outputs()[0];
      continue;
    }
    const auto* factor = operandBeside(found.result, op, OpKind::Multiply);
    if (factor != nullptr && i + 1 == ops.size() && found.rows > 1 && !image && !found.addend &&
        found.moved.empty() && isFloat(*factor) && !isConstant(*factor) &&
        factor->sizes == found.result.sizes) {
      found.factor = *factor;
      found.result = op.outputs()[0];
      break;
    }
    if (found.rectifier != Rectifier::none || found.activation || !found.moved.empty()) {
      return std::nullopt;
    }
    if (factor != nullptr && isBias(*factor) && !image && found.addend && !found.scale) {
      found.scale = *factor;
    } else if (const auto* term = addedTo(found.result, op)) {
      if (!image && !found.addend && isBias(*term)) {
        found.biases.push_back(*term);
      } else if (found.scale && !found.shift && isBias(*term)) {
        found.shift = *term;
      } else if (!found.addend && isFloat(*term) && !isConstant(*term) &&
                 term->sizes == found.result.sizes) {
        found.addend = *term;
      } else {
        return std::nullopt;
      }
    } else {
      if (found.scale) {
        return std::nullopt;
      }
      if (op.inputs()[0].id == found.result.id) {
        found.rectifier = rectifierOf(op);
      }
      if (found.rectifier == Rectifier::none) {
        found.activation = activationFrom(ops, i, found.result);
        if (!found.activation) {
          return std::nullopt;
        }
      }
    }
    found.result = ops[i]->outputs()[0];
  }
  const bool row = !image && found.rows == 1 && !found.addend;
  found.if_narrow = !asked && !row && !paysGemm(found.rows, inputs, outputs, image);
  const bool few = found.rows <= Linear::kFewRows;
  return isFloat(found.result) && (!found.if_narrow || few) ? std::optional(found) : std::nullopt;
}

std::optional<FoundProduct> product(const Ops& ops, const LoweredGraph& graph) {
  const auto& op = *ops[0];
  const auto& operands = op.inputs();
  const auto isFloat = [](const Operand& operand) {
    return operand.dtype == at::kFloat && operand.sizes && operand.sizes->size() > 1;
  };
  const auto isConstant = constantsOf(graph);
  if (!ownKernelsAnywhere() || op.kind() != OpKind::MatMul || operands.size() != 2 ||
      !isFloat(operands[0]) || !isFloat(operands[1]) ||
      (isConstant(operands[1]) && operands[1].sizes->size() == 2)) {
    return std::nullopt;
  }
  FoundProduct found{operands[0], operands[1], isSet(op, Attr::transpose_a),
                     isSet(op, Attr::transpose_b), op.outputs()[0]};
  for (size_t i = 1; i < ops.size(); ++i) {
    const auto& next = *ops[i];
    const bool divides = next.kind() == OpKind::Divide;
    const auto* factor =
        operandBeside(found.result, next, divides ? OpKind::Divide : OpKind::Multiply);
    if (factor != nullptr) {
      auto& taken = found.addend ? found.behind : found.before;
      if (taken || !isConstant(*factor) || c10::multiply_integers(*factor->sizes) != 1 ||
          (divides && next.inputs()[1].id != factor->id)) {
        return std::nullopt;
      }
      taken = FoundProduct::Factor{*factor, divides};
    } else {
      const auto* term = addedTo(found.result, next);
      if (term == nullptr || found.addend || !isFloat(*term) || isConstant(*term) ||
          term->sizes != found.result.sizes) {
        return std::nullopt;
      }
      found.addend = *term;
    }
    found.result = next.outputs()[0];
  }
  return isFloat(found.result) ? std::optional(found) : std::nullopt;
}

bool paysProduct(const MatrixProduct& arranged) {
  constexpr int64_t kFewestInputs = 8;  // that are multiplied before the next panel is needed
  const auto& p = arranged;
  if (p.isVectorByRows()) {
    return true;
  }
  if (p.inputs < kFewestInputs || productsOf(p) > kMostProducts) {
    return false;
  }
  // oneDNN's kernels for AVX-512 are as fast or faster for all but small results, and few rows that
  // meet a matrix where it lies.
  constexpr int64_t kSmall = 1 << 11;
  constexpr int64_t kSmallAlone = 1 << 12;
  const bool alone = c10::multiply_integers(p.sizes) == 1;
  return ownAvx2Kernels() || p.rows * p.outputs <= (alone ? kSmallAlone : kSmall) ||
         (p.rows <= Linear::kernels().rows && p.b.column == 1);
}

bool paysProductOfPlanes(const MatrixProduct& product) {
  if (ownAvx2Kernels()) {
    return paysProduct(product.arranged());
  }
  constexpr int64_t kFewestPixels = 64;  // two panels
  return product.outputs >= kFewestPixels && productsOf(product) <= kMostProducts;
}

std::optional<FoundNarrowLinear> narrowLinear(const Ops& ops, const LoweredGraph& graph) {
  const auto& product = *ops[0];
  if (!ownKernelsAnywhere()) {
    return std::nullopt;
  }
  auto isNarrow = [](const Operand& operand) {
    return operand.dtype == at::kBFloat16 && operand.sizes && !operand.sizes->empty();
  };
  const auto isConstant = constantsOf(graph);
  const bool image =
      isPointwise(product, graph, at::kBFloat16) || isOfWholeImages(product, graph, at::kBFloat16);
  const auto& inputs = product.inputs();
  if ((!image && (product.kind() != OpKind::MatMul || isSet(product, Attr::transpose_a))) ||
      !isNarrow(inputs[0]) || !isNarrow(inputs[1]) || !isConstant(inputs[1]) ||
      inputs[1].sizes->size() != (image ? 4 : 2)) {
    return std::nullopt;
  }
  FoundNarrowLinear found{
      {}, &product, inputs[0],           inputs[1], !image && !isSet(product, Attr::transpose_b),
      {}, {},       product.outputs()[0]};
  const auto& weight = *found.weight.sizes;
  auto& kernel = found.kernel;
  kernel.outputs = weight[found.outputs_last ? 1 : 0];
  kernel.inputs = c10::multiply_integers(weight) / kernel.outputs;
  kernel.rows = c10::multiply_integers(*found.data.sizes) / kernel.inputs;
  constexpr int64_t kMostOfImages = int64_t{1} << 29;  // products; else see tiledConvolution()
  if (image && kernel.rows * kernel.inputs * kernel.outputs > kMostOfImages) {
    return std::nullopt;
  }
  auto isBias = [&](const Operand& operand) {
    const bool fits = operand.sizes && c10::multiply_integers(*operand.sizes) == kernel.outputs &&
                      (operand.sizes->size() == 1 || operand.sizes->back() == kernel.outputs);
    return (isNarrow(operand) || operand.dtype == at::kFloat) && fits && isConstant(operand);
  };
  if (inputs.size() == 3) {
    if (!isBias(inputs[2])) {
      return std::nullopt;
    }
    found.bias = inputs[2];
  }
  size_t next = 1;
  for (; next < ops.size() && ops[next]->kind() == OpKind::Add; ++next) {
    const auto* term = addedTo(found.result, *ops[next]);
    if (term == nullptr) {
      return std::nullopt;
    }
    if (!image && !found.bias && !found.addend && isBias(*term)) {
      found.bias = *term;
    } else if (!found.addend && isNarrow(*term) && !isConstant(*term) &&
               term->sizes == found.result.sizes) {
      found.addend = *term;
    } else {
      return std::nullopt;
    }
    found.result = ops[next]->outputs()[0];
  }
  if (next < ops.size() && ops[next]->inputs()[0].id == found.result.id) {
    kernel.rectifier = rectifierOf(*ops[next]);
    kernel.activation = activationFrom(ops, next, found.result);
    if (kernel.activation || kernel.rectifier != Rectifier::none) {
      found.result = ops[next++]->outputs()[0];
    }
  }
  if (next < ops.size() && ops[next]->kind() == OpKind::Multiply && !found.addend) {
    const auto& terms = ops[next]->inputs();
    const auto& other = terms[terms[0].id == found.result.id ? 1 : 0];
    if (isProductOf(*ops[next], found.result, other) && other.id != found.result.id &&
        isNarrow(other) && !isConstant(other) && other.sizes == found.result.sizes) {
      found.factor = other;
      found.result = ops[next++]->outputs()[0];
    }
  }
  for (; !image && !found.addend && !found.factor && next < ops.size(); ++next) {
    auto moved = movedStrides(*ops[next], found.result, found.moved);
    if (!moved) {
      break;
    }
    found.moved = std::move(*moved);
    found.result = ops[next]->outputs()[0];
  }
  // Not rounded before: eager's numbers are these, rounded.
  if (next < ops.size() && ops[next]->kind() == OpKind::TypeCast &&
      ops[next]->inputs()[0].id == found.result.id && !kernel.activation && !found.addend &&
      !found.factor) {
    found.result = ops[next++]->outputs()[0];
    const auto* term = next < ops.size() ? addedTo(found.result, *ops[next]) : nullptr;
    if (term != nullptr && kernel.rectifier == Rectifier::none && found.moved.empty() &&
        term->dtype == at::kFloat && !isConstant(*term) && term->sizes == found.result.sizes) {
      found.addend = *term;
      found.result = ops[next++]->outputs()[0];
    }
  }
  const bool known = isNarrow(found.result) || found.result.dtype == at::kFloat;
  const bool is = next == ops.size() && known && kernel.isSupported() && kernel.pays() &&
                  !(kernel.isRow() && (found.addend || found.factor));
  return is ? std::optional(found) : std::nullopt;
}

std::optional<FoundExpansion> expansion(const LoweredGraph& graph) {
  const auto ops = opsOf(graph);
  if (!ownKernelsAnywhere() || ops.size() < 2 || ops[0]->kind() != OpKind::Convolution) {
    return std::nullopt;
  }
  const auto& pointwise = *ops[0];
  const auto type = pointwise.inputs()[0].dtype;
  const auto first = firstConvolution(pointwise, graph);
  if ((type != at::kFloat && type != at::kBFloat16) ||
      (!first && !isPointwise(pointwise, graph, type))) {
    return std::nullopt;
  }
  FoundExpansion found{{},      pointwise.inputs()[0], pointwise.outputs()[0], &pointwise, nullptr,
                       nullptr, std::nullopt};
  auto& kernel = found.kernel;
  size_t next = 1;
  const auto takeApplied = [&](Expansion::Applied& applied, std::optional<Operand>& slopes) {
    applied = takeActivation(ops, next, found.result);
    const bool plain = applied.rectifier == Rectifier::none && !applied.activation;
    if (plain && next < ops.size() && ops[next]->inputs()[0].id == found.result.id &&
        isSloped(*ops[next], graph)) {
      applied.slopes = true;
      slopes = ops[next]->inputs()[1];
      found.result = ops[next++]->outputs()[0];
    }
  };
  takeApplied(kernel.inner, found.slopes[0]);
  if (next == ops.size() || !isImageConvolution(*ops[next], graph, type) ||
      ops[next]->inputs()[0].id != found.result.id) {
    return std::nullopt;
  }
  const auto expanded = found.result.id;
  const auto& depthwise = *ops[next++];
  const auto& weight = *depthwise.inputs()[1].sizes;
  const auto strides = depthwise.get_attr<Shape>(Attr::strides);
  const auto padding = depthwise.get_attr<Shape>(Attr::pads_begin);
  kernel.channels = (*found.result.sizes)[1];
  if (depthwise.get_attr<int64_t>(Attr::groups) != kernel.channels ||
      weight[0] != kernel.channels || weight[2] != weight[3] || strides[0] != strides[1] ||
      padding[0] != padding[1] || depthwise.get_attr<Shape>(Attr::dilations) != Shape{1, 1}) {
    return std::nullopt;
  }
  found.depthwise = &depthwise;
  found.result = depthwise.outputs()[0];
  takeApplied(kernel.outer, found.slopes[1]);
  if (next < ops.size() && isPointwise(*ops[next], graph, type) &&
      ops[next]->inputs()[0].id == found.result.id) {
    found.projection = ops[next++];
    found.result = found.projection->outputs()[0];
    kernel.outputs = (*found.result.sizes)[1];
    if (next < ops.size() && ops[next]->kind() == OpKind::TypeCast &&
        ops[next]->inputs()[0].id == found.result.id) {
      found.result = ops[next++]->outputs()[0];
    }
    kernel.wide_result = found.result.dtype != type;
    if (next < ops.size() && ops[next]->kind() == OpKind::Add) {
      const auto& terms = ops[next++]->inputs();
      const bool is_first = terms[0].id == found.result.id;
      const auto& addend = is_first ? terms[1] : terms[0];
      if (is_first == (terms[1].id == found.result.id) || addend.dtype != found.result.dtype ||
          addend.sizes != found.result.sizes) {
        return std::nullopt;
      }
      found.addend = addend;
      found.result = ops[next - 1]->outputs()[0];
    }
    const auto last = takeActivation(ops, next, found.result);
    if (last.activation) {
      return std::nullopt;
    }
    kernel.last = last.rectifier;
  }
  if (found.projection == nullptr && next < ops.size() && ops[next]->kind() == OpKind::Concat &&
      ops[next]->get_attr<int64_t>(Attr::axis) == 1) {
    const auto& parts = ops[next]->inputs();
    if (parts.size() != 2 || parts[0].id != expanded || parts[1].id != found.result.id) {
      return std::nullopt;
    }
    kernel.keeps_expanded = true;
    found.result = ops[next++]->outputs()[0];
  }
  kernel.type = type == at::kFloat ? Expansion::Type::float32 : Expansion::Type::bfloat16;
  kernel.images = (*found.data.sizes)[0];
  kernel.size = pair(*pointwise.outputs()[0].sizes);
  kernel.result_size = pair(*found.result.sizes);
  kernel.inputs = c10::multiply_integers(*pointwise.inputs()[1].sizes) / kernel.channels;
  kernel.first = first;
  kernel.window = weight[2];
  kernel.stride = strides[0];
  kernel.padding = padding[0];
  const bool known =
      found.result.dtype == type || (type == at::kBFloat16 && found.result.dtype == at::kFloat);
  const bool is = next == ops.size() && known && kernel.isSupported() && kernel.pays();
  return is ? std::optional(found) : std::nullopt;
}

std::optional<FoundReduction> reduction(const Ops& ops) {
  constexpr int64_t kMostRows = 1 << 14;    // sums of more would round more
  constexpr int64_t kMostPooled = 1 << 16;  // numbers; oneDNN's pooling is as fast for more
  if (!ownKernelsAnywhere() || ops.size() != 1) {
    return std::nullopt;
  }
  const auto& op = *ops[0];
  const auto& data = op.inputs()[0];
  const auto& result = op.outputs()[0];
  const bool known = data.dtype == at::kFloat || data.dtype == at::kBFloat16;
  if (!known || result.dtype != data.dtype || !data.sizes || !result.sizes) {
    return std::nullopt;
  }
  FoundReduction found{
      data.dtype == at::kFloat ? Reduction::Type::float32 : Reduction::Type::bfloat16,
      Reduction::Kind::mean,
      {2, 3},
      data,
      result};
  switch (op.kind()) {
    case OpKind::AvgPool:
      if (!isGlobalMean(op) || c10::multiply_integers(*data.sizes) > kMostPooled) {
        return std::nullopt;
      }
      return found;
    case OpKind::ReduceMean:
      break;
    case OpKind::ReduceSum:
      found.kind = Reduction::Kind::sum;
      break;
    case OpKind::ReduceL2:
      found.kind = Reduction::Kind::norm;
      break;
    case OpKind::ReduceMax:
      found.kind = Reduction::Kind::greatest;
      break;
    case OpKind::ReduceMin:
      found.kind = Reduction::Kind::least;
      break;
    default:
      return std::nullopt;
  }
  found.axes = op.get_attr<Shape>(Attr::axes);
  int64_t rows = 1;
  for (const auto axis : found.axes) {
    rows *= (*data.sizes)[static_cast<size_t>(axis)];
  }
  const bool sums = op.kind() != OpKind::ReduceMax && op.kind() != OpKind::ReduceMin;
  return !sums || rows <= kMostRows ? std::optional(std::move(found)) : std::nullopt;
}

std::optional<FoundExcitation> excitation(const LoweredGraph& graph) {
  const auto& ops = graph.ops;
  constexpr size_t kFewest = 6;
  if (!ownKernelsAnywhere() || ops.size() < kFewest || !isGlobalMean(ops[0])) {
    return std::nullopt;
  }
  const auto& data = ops[0].inputs()[0];
  const auto type = data.dtype;
  if (type != at::kFloat && type != at::kBFloat16) {
    return std::nullopt;
  }
  Chain chain(ops);
  chain.take(ops[0].kind(), data);

  const auto* squeeze = chain.take(OpKind::Convolution, ops[0].outputs()[0]);
  if (squeeze == nullptr || !isPixelConvolution(*squeeze, graph, type)) {
    return std::nullopt;
  }
  FoundExcitation found{{}, data, {}, squeeze, nullptr};
  const auto& squeezed = squeeze->outputs()[0];
  const auto* inner = chain.take(OpKind::ReLU, squeezed);
  if (inner == nullptr) {
    found.kernel.inner = Excitation::Inner::silu;
    const auto* sigmoid = chain.take(OpKind::Sigmoid, squeezed);
    inner = sigmoid != nullptr ? chain.takeProduct(squeezed, sigmoid->outputs()[0]) : nullptr;
  }
  found.excite = inner != nullptr ? chain.take(OpKind::Convolution, inner->outputs()[0]) : nullptr;
  if (found.excite == nullptr || !isPixelConvolution(*found.excite, graph, type)) {
    return std::nullopt;
  }
  const auto& excited = found.excite->outputs()[0];
  const auto* gate = chain.take(OpKind::Sigmoid, excited);
  found.kernel.sigmoid = gate != nullptr;
  if (gate == nullptr) {
    gate = chain.take(OpKind::HardSigmoid, excited);
    if (gate == nullptr) {
      return std::nullopt;
    }
    found.kernel.alpha = gate->get_attr<float>(Attr::alpha);
    found.kernel.beta = gate->get_attr<float>(Attr::beta);
  }
  const auto* product = chain.takeProduct(data, gate->outputs()[0]);
  if (product == nullptr || !chain.atEnd() || product->outputs()[0].sizes != data.sizes ||
      product->outputs()[0].dtype != type) {
    return std::nullopt;
  }
  found.kernel.type = type == at::kFloat ? Excitation::Type::float32 : Excitation::Type::bfloat16;
  found.result = product->outputs()[0];
  found.kernel.images = (*data.sizes)[0];
  found.kernel.pixels = (*data.sizes)[2] * (*data.sizes)[3];
  found.kernel.channels = (*data.sizes)[1];
  found.kernel.hidden = (*squeezed.sizes)[1];
  return found;
}

std::optional<Shuffle> findShuffle(const Graph& subgraph, const Facts& facts) {
  namespace aten = torch::jit::aten;
  namespace prim = torch::jit::prim;
  const Node* concat = nullptr;
  std::vector<const Node*> chain;
  for (const auto* node : subgraph.nodes()) {
    if (concat == nullptr && node->kind() == aten::cat) {
      concat = node;
      chain.push_back(node);
    } else if (node->kind() != prim::Constant && node->kind() != prim::ListConstruct &&
               !isShapeArithmetic(node) && !(concat == nullptr && isDequantize(node))) {
      if (chain.empty() || chain.back()->outputs().size() != 1 ||
          node->input(0) != chain.back()->output()) {
        return std::nullopt;
      }
      chain.push_back(node);
    }
  }
  size_t next = 1;
  auto take = [&](std::initializer_list<Symbol> kinds) -> const Node* {
    const bool is = next < chain.size() &&
                    std::find(kinds.begin(), kinds.end(), chain[next]->kind()) != kinds.end();
    return is ? chain[next++] : nullptr;
  };
  auto isOne = [&](const Value* value) { return facts.constant(value) == c10::IValue(1); };
  auto sizes = [&](const Value* value) { return facts.tensor(value).sizes.value_or(Shape{}); };

  const bool rounds = next < chain.size() && isQuantize(chain[next]);
  const auto* rounding = rounds ? chain[next++] : nullptr;
  const auto* split = take({aten::view, aten::reshape});
  const auto* swap = take({aten::transpose});
  if (split == nullptr || swap == nullptr || !isOne(concat->input(1)) || !isOne(swap->input(1)) ||
      facts.constant(swap->input(2)) != c10::IValue(2)) {
    return std::nullopt;
  }
  take({aten::contiguous, aten::clone});
  const auto* join = take({aten::view, aten::reshape, aten::flatten});
  const auto whole = sizes(concat->output());
  const auto grouped = sizes(split->output());
  if (join == nullptr || whole.size() != 4 || sizes(join->output()) != whole ||
      grouped.size() != 5 || grouped[0] != whole[0] || grouped[1] * grouped[2] != whole[1] ||
      grouped[3] != whole[2] || grouped[4] != whole[3]) {
    return std::nullopt;
  }
  const Node* last = join;
  if (const auto* chunk = take({aten::chunk})) {
    last = isOne(chunk->input(2)) ? take({prim::ListUnpack}) : nullptr;
  } else if (const auto* known = take({prim::ConstantChunk})) {
    last = known->i(torch::jit::attr::dim) == 1 ? known : nullptr;
  }
  const auto params = rounds ? quantizeParams(rounding) : std::nullopt;
  const auto dtype = params ? params->dtype : facts.tensor(concat->output()).dtype;
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || params;
  if (last == nullptr || next != chain.size() || !known || rounds != params.has_value()) {
    return std::nullopt;
  }
  Shuffle found{{},
                {last->outputs().begin(), last->outputs().end()},
                grouped[1],
                whole[0] * whole[2] * whole[3],
                *dtype};
  for (const auto* part : concat->input(0)->node()->inputs()) {
    if (params) {  // of equal parameters: only moved
      if (dequantizeParams(part->node()) != params) {
        return std::nullopt;
      }
      part = part->node()->input(0);
    }
    if (part->node()->kind() != prim::Param || facts.tensor(part).dtype != dtype ||
        sizes(part).size() != 4) {
      return std::nullopt;
    }
    found.parts.push_back(part);
  }
  const auto outputs = subgraph.outputs();
  const bool all = outputs.size() == found.chunks.size() &&
                   std::all_of(found.chunks.begin(), found.chunks.end(), [&](const Value* chunk) {
                     return std::find(outputs.begin(), outputs.end(), chunk) != outputs.end();
                   });
  return all ? std::optional(found) : std::nullopt;
}

}  // namespace llga
