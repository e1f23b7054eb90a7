#include "jit/onednn/ops/lowering.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <tuple>

namespace llga {

using dnnl::graph::logical_tensor;

std::optional<DataType> toDataType(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DataType::f32;
    case at::kBFloat16:
      return DataType::bf16;
    case at::kBool:
      return DataType::boolean;
    case at::kQUInt8:
    case at::kByte:
      return DataType::u8;
    case at::kQInt8:
    case at::kChar:
      return DataType::s8;
    default:
      return std::nullopt;
  }
}

std::string toText(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

bool isOnePixel(const Shape& sizes) {
  return sizes.size() > 2 &&
         std::all_of(sizes.begin() + 2, sizes.end(), [](int64_t size) { return size == 1; });
}

logical_tensor Operand::logicalTensor() const {
  const auto property =
      constant ? logical_tensor::property_type::constant : logical_tensor::property_type::variable;
  const auto data_type = *toDataType(dtype);
  if (!sizes) {
    return logical_tensor(id, data_type, DNNL_GRAPH_UNKNOWN_NDIMS,
                          logical_tensor::layout_type::undef, property);
  }
  // oneDNN has no broadcasting for rank 0: a 0-dim tensor is its one element.
  return logical_tensor(id, data_type, sizes->empty() ? Shape{1} : *sizes,
                        logical_tensor::layout_type::strided, property);
}

Lowering::Lowering(const Node* node, const Facts& facts, size_t& next_id)
    : node_(node), facts_(facts), next_id_(next_id) {}

void Lowering::refuse(const std::string& reason) const {
  throw Refused{qualifiedName(node_) + ": " + reason};
}

// ------------------------------------------------------------------------------------ arguments

size_t Lowering::argIndex(const char* name) const {
  const auto index = node_->schema().argumentIndexWithName(name);
  TORCH_INTERNAL_ASSERT(index.has_value(), qualifiedName(node_), " has no argument ", name);
  return static_cast<size_t>(*index);
}

bool Lowering::has(const char* name) const {
  return node_->schema().argumentIndexWithName(name).has_value();
}

const Value* Lowering::arg(const char* name) const { return node_->input(argIndex(name)); }

c10::IValue Lowering::host(const char* name) const {
  const auto* value = arg(name);
  auto known = facts_.constant(value);
  if (!known) {
    refuse(fmt::format("'{}' is not known when the graph is compiled", name));
  }
  // A traced scalar may still be a 0-dim tensor.
  if (known->isTensor() && known->toTensor().defined() && known->toTensor().dim() == 0) {
    return known->toTensor().item();
  }
  return *known;
}

bool Lowering::isNone(const char* name) const {
  const auto* value = arg(name);
  if (value->mustBeNone()) {
    return true;
  }
  const auto known = facts_.constant(value);
  return known && known->isNone();
}

std::optional<Shape> Lowering::knownInts(const Value* list) const {
  const auto known = facts_.constant(list);
  return known && known->isIntList() ? std::optional(known->toIntVector()) : std::nullopt;
}

void Lowering::addPadding(const Node* padding, Shape& pads_begin, Shape& pads_end) const {
  const auto by = knownInts(padding->input(1)).value_or(Shape{});
  if (by.size() % 2 != 0 || by.size() > 2 * pads_begin.size() ||
      std::any_of(by.begin(), by.end(), [](int64_t number) { return number < 0; })) {
    refuse(fmt::format("padded by {}, which is no padding of {} dimensions of pixels", toText(by),
                       pads_begin.size()));
  }
  for (size_t i = 0; i < by.size(); i += 2) {
    const auto dim = pads_begin.size() - 1 - i / 2;
    pads_begin[dim] += by[i];
    pads_end[dim] += by[i + 1];
  }
}

int64_t Lowering::integer(const char* name) const {
  const auto value = host(name);
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isScalar() && value.toScalar().isIntegral(/*includeBool=*/false)) {
    return value.toScalar().toLong();
  }
  refuse(fmt::format("'{}' is not an integer", name));
}

double Lowering::number(const char* name) const {
  const auto value = host(name);
  if (!value.isScalar() || value.toScalar().isComplex()) {
    refuse(fmt::format("'{}' is not a real number", name));
  }
  return value.toScalar().toDouble();
}

bool Lowering::flag(const char* name) const {
  const auto value = host(name);
  if (value.isBool()) {
    return value.toBool();
  }
  return integer(name) != 0;
}

std::string Lowering::text(const char* name) const {
  const auto value = host(name);
  if (!value.isString()) {
    refuse(fmt::format("'{}' is not a string", name));
  }
  return value.toStringRef();
}

Shape Lowering::ints(const char* name) const {
  // A list may be built from values that are known one by one.
  const auto* value = arg(name);
  if (auto known = facts_.constant(value)) {
    if (known->isIntList()) {
      return known->toIntVector();
    }
    if (known->isInt()) {
      return {known->toInt()};
    }
    if (known->isNone()) {
      return {};
    }
  } else if (value->node()->kind() == torch::jit::prim::ListConstruct) {
    Shape items;
    for (const auto* item : value->node()->inputs()) {
      const auto element = facts_.constant(item);
      if (!element || !element->isInt()) {
        refuse(fmt::format("'{}' is not known when the graph is compiled", name));
      }
      items.push_back(element->toInt());
    }
    return items;
  }
  refuse(fmt::format("'{}' is not a known list of integers", name));
}

Shape Lowering::ints(const char* name, size_t n) const {
  auto items = ints(name);
  if (items.size() == 1 && n > 1) {
    items.resize(n, items[0]);
  }
  if (items.size() != n) {
    refuse(fmt::format("'{}' has {} elements, needs {}", name, items.size(), n));
  }
  return items;
}

// ---------------------------------------------------------------------------------------- facts

at::ScalarType Lowering::dtype(const Value* value) const {
  const auto facts = facts_.tensor(value);
  if (!facts.dtype) {
    refuse(fmt::format("data type of %{} is unknown", value->debugName()));
  }
  return *facts.dtype;
}

std::optional<Shape> Lowering::maybeSizes(const Value* value) const {
  return facts_.tensor(value).sizes;
}

const Shape& Lowering::sizes(const Value* value) const {
  auto it = sizes_.find(value);
  if (it == sizes_.end()) {
    auto sizes = maybeSizes(value);
    if (!sizes) {
      refuse(fmt::format("sizes of %{} are unknown", value->debugName()));
    }
    it = sizes_.emplace(value, std::move(*sizes)).first;
  }
  return it->second;
}

bool Lowering::isConstantTensor(const Value* value) const {
  return (value->node()->kind() == torch::jit::prim::Constant && isTensor(value)) ||
         quantizedConstant(value).has_value();
}

bool Lowering::mayHaveRank(const Value* value, int64_t rank) const {
  const auto known = maybeSizes(value);
  return !known || static_cast<int64_t>(known->size()) == rank;
}

int64_t Lowering::dim(int64_t index, const Value* value) const {
  const auto known = maybeSizes(value);
  if (!known) {
    return index;
  }
  const auto rank = static_cast<int64_t>(known->size());
  const auto wrapped = index < 0 ? index + rank : index;
  if (wrapped < 0 || wrapped >= rank) {
    refuse(fmt::format("dimension {} is out of range for rank {}", index, rank));
  }
  return wrapped;
}

void Lowering::requireOneDtype() const {
  std::optional<at::ScalarType> common;
  auto check = [&](const Value* value) {
    if (!isTensor(value)) {
      return;
    }
    const auto type = dtype(value);
    if (type != at::kFloat && type != at::kBFloat16) {
      refuse(fmt::format("data type {} (float32 and bfloat16 are supported)", c10::toString(type)));
    }
    if (common && *common != type) {
      refuse(
          fmt::format("mixed data types {} and {}", c10::toString(*common), c10::toString(type)));
    }
    common = type;
  };
  for (const auto* value : node_->inputs()) {
    check(value);
  }
  for (const auto* value : node_->outputs()) {
    check(value);
  }
}

void Lowering::requireRank(const Value* value, int64_t low, int64_t high) const {
  if (!maybeSizes(value)) {
    return;
  }
  const auto found = rank(value);
  if (found < low || found > high) {
    refuse(fmt::format("rank {} of {} (needs {}..{})", found, toText(sizes(value)), low, high));
  }
}

// ------------------------------------------------------------------------------------- operands

Operand Lowering::add(Operand operand) {
  operands_.emplace(operand.id, operand);
  return operand;
}

Operand Lowering::in(const Value* value) {
  value = behind(value);
  if (const auto weight = quantizedConstant(value)) {
    return floats(*weight, /*transposed=*/false);
  }
  const auto type = dtype(value);
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kBool) {
    refuse(fmt::format("data type {} of %{}", c10::toString(type), value->debugName()));
  }
  return operandOf(value, type);
}

Operand Lowering::quantized(const Value* value, const QuantParams& params) {
  value = behind(value);
  const auto known = facts_.tensor(value).dtype;
  if (known && *known != params.dtype) {
    refuse(fmt::format("%{} is {} where {} was expected", value->debugName(), c10::toString(*known),
                       c10::toString(params.dtype)));
  }
  return operandOf(value, params.dtype);
}

Operand Lowering::operandOf(const Value* value, at::ScalarType type) {
  Operand operand;
  operand.id = value->unique();
  operand.dtype = type;
  operand.sizes = maybeSizes(value);
  if (operand.sizes &&
      std::find(operand.sizes->begin(), operand.sizes->end(), 0) != operand.sizes->end()) {
    refuse(fmt::format("%{} has no elements: {}", value->debugName(), toText(*operand.sizes)));
  }
  operand.constant = isConstantTensor(value);
  values_[operand.id] = value;
  return add(operand);
}

Operand Lowering::dequantized(const QuantizedConstant& weight, bool transposed, bool packable) {
  const auto integers = integersOf(weight.tensor);
  auto params = weight.params;
  auto sizes = integers.sizes().vec();
  if (transposed) {
    std::swap(sizes.at(0), sizes.at(1));
    params.axis = params.perTensor() ? params.axis : 1 - params.axis;
  }
  const auto stored = constant(
      params.dtype, sizes, [integers, transposed] { return transposed ? integers.t() : integers; });
  if (packable) {
    packable_.insert(stored.id);
  }
  auto result = temp(at::kFloat, sizes);
  emitQuantization(OpKind::Dequantize, stored, result, params);
  if (weight.dtype != at::kFloat) {
    const auto cast = temp(weight.dtype, sizes);
    emit(OpKind::TypeCast, {result}, {cast});
    result = cast;
  }
  return result;
}

Operand Lowering::floats(const QuantizedConstant& weight, bool transposed) {
  auto sizes = weight.tensor.sizes().vec();
  if (transposed) {
    std::swap(sizes.at(0), sizes.at(1));
  }
  return constant(weight.dtype, sizes, [weight, transposed] {
    const auto plain = weight.tensor.dequantize().to(weight.dtype);
    return transposed ? plain.t() : plain;
  });
}

std::optional<QuantParams> Lowering::quantization(const char* data) const {
  const auto* padding = paddingOf(node_);
  const bool padded = padding != nullptr && padding->output() == arg(data);
  const auto* source = behind(padded ? padding->input(0) : arg(data))->node();
  if (source->kind() == torch::jit::aten::to) {
    source = source->input(0)->node();
  }
  return dequantizeParams(source);
}

bool Lowering::packable(const char* name, const char* data) const {
  const auto params = quantization(data);
  if (!quantizedConstant(arg(name)) || !params) {
    return isConstantTensor(arg(name));
  }
  return params->dtype == at::kQUInt8 && params->perTensor() && params->zero_points.front() == 0;
}

Operand Lowering::weight(const char* name, const char* data, bool pack) {
  if (const auto eight_bit = quantizedConstant(arg(name)); eight_bit && quantization(data)) {
    return dequantized(*eight_bit, /*transposed=*/false, pack && packable(name, data));
  }
  auto operand = in(name);
  if (operand.constant && pack) {
    packable_.insert(operand.id);
  }
  return operand;
}

Operand Lowering::transposedWeight(const char* name, const char* data) {
  if (const auto eight_bit = quantizedConstant(arg(name))) {
    if (quantization(data)) {
      return dequantized(*eight_bit, /*transposed=*/true, /*packable=*/true);
    }
    auto plain = floats(*eight_bit, /*transposed=*/true);
    packable_.insert(plain.id);
    return plain;
  }
  const auto tensor = torch::jit::toIValue(arg(name))->toTensor();
  auto operand = constant(tensor.scalar_type(), {tensor.size(1), tensor.size(0)},
                          [tensor] { return tensor.t(); });
  packable_.insert(operand.id);
  return operand;
}

Operand Lowering::inAs(const char* name, at::ScalarType wanted) {
  const auto* value = arg(name);
  if (dtype(value) == wanted) {
    return in(value);
  }
  if (isConstantTensor(value) && !quantizedConstant(value)) {
    auto source = torch::jit::toIValue(value)->toTensor();
    return constant(wanted, source.sizes().vec(), [source, wanted] { return source.to(wanted); });
  }
  auto converted = temp(wanted, maybeSizes(value));
  emit(OpKind::TypeCast, {in(value)}, {converted});
  return converted;
}

Operand Lowering::out(size_t index) {
  const auto* value = node_->output(index);
  auto operand = in(value);
  if (operand.sizes && operand.sizes->empty()) {
    refuse("the result is a 0-dim tensor");
  }
  return operand;
}

Operand Lowering::temp(at::ScalarType dtype, std::optional<Shape> sizes) {
  Operand operand;
  operand.id = next_id_++;
  operand.dtype = dtype;
  operand.sizes = std::move(sizes);
  return add(operand);
}

Operand Lowering::constant(at::ScalarType dtype, Shape sizes, ConstantMaker make) {
  auto operand = temp(dtype, std::move(sizes));
  operand.constant = true;
  operands_[operand.id] = operand;
  constants_[operand.id] = std::move(make);
  return operand;
}

Operand Lowering::scalar(double value, at::ScalarType dtype) {
  return constant(dtype, {1}, [value, dtype] {
    return at::full({1}, value, at::TensorOptions().dtype(dtype));
  });
}

// ------------------------------------------------------------------------------------------ ops

OpSpec::OpSpec(const Node* node, size_t id, OpKind kind, std::vector<Operand> inputs,
               std::vector<Operand> outputs)
    : node_(node), id_(id), kind_(kind), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

template <typename T>
OpSpec& OpSpec::set_attr(Attr name, const T& value) {
  attributes_.emplace_back(std::piecewise_construct, std::forward_as_tuple(name),
                           std::forward_as_tuple(std::in_place_type<T>, value));
  return *this;
}

template OpSpec& OpSpec::set_attr(Attr, const bool&);
template OpSpec& OpSpec::set_attr(Attr, const int64_t&);
template OpSpec& OpSpec::set_attr(Attr, const float&);
template OpSpec& OpSpec::set_attr(Attr, const std::string&);
template OpSpec& OpSpec::set_attr(Attr, const std::vector<int64_t>&);
template OpSpec& OpSpec::set_attr(Attr, const std::vector<float>&);

std::string OpSpec::name() const {
  return qualifiedName(node_) + " %" + node_->output(0)->debugName();
}

dnnl::graph::op OpSpec::build() const {
  dnnl::graph::op op(id_, kind_, name());
  for (const auto& input : inputs_) {
    op.add_input(input.logicalTensor());
  }
  for (const auto& output : outputs_) {
    op.add_output(output.logicalTensor());
  }
  for (const auto& [name, value] : attributes_) {
    std::visit([&op, name = name](const auto& v) { op.set_attr(name, v); }, value);
  }
  return op;
}

OpSpec& Lowering::emit(OpKind kind, const std::vector<Operand>& inputs,
                       const std::vector<Operand>& outputs) {
  // An op computes in the data type of its first input; what it returns must have that type, or
  // the recorded run did something the lowering does not know of (autocast, type promotion).
  const auto& lead = kind == OpKind::Select ? inputs.at(1) : inputs.at(0);
  for (const auto& output : outputs) {
    const bool converts =
        kind == OpKind::TypeCast || kind == OpKind::Quantize || kind == OpKind::Dequantize;
    if (!converts && output.dtype != lead.dtype) {
      refuse(fmt::format("result is {} where {} was expected", c10::toString(output.dtype),
                         c10::toString(lead.dtype)));
    }
  }
  return ops_.emplace_back(node_, next_id_++, kind, inputs, outputs);
}

void Lowering::emitQuantization(OpKind kind, const Operand& input, const Operand& output,
                                const QuantParams& params) {
  auto& op = emit(kind, {input}, {output});
  op.set_attr<std::string>(Attr::qtype, params.perTensor() ? "per_tensor" : "per_channel");
  op.set_attr<std::vector<float>>(Attr::scales,
                                  std::vector<float>(params.scales.begin(), params.scales.end()));
  op.set_attr<std::vector<int64_t>>(Attr::zps, params.zero_points);
  if (!params.perTensor()) {
    op.set_attr<int64_t>(Attr::axis, params.axis);
  }
}

void Lowering::commit(LoweredGraph& graph) && {
  for (auto& op : ops_) {
    graph.ops.push_back(std::move(op));
  }
  graph.values.merge(values_);
  graph.constants.merge(constants_);
  graph.packable.merge(packable_);
  graph.operands.merge(operands_);
}

}  // namespace llga
