#include "jit/onednn/runtime/steps/step_maker.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <set>

#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/own_pointwise.h"
#include "jit/onednn/runtime/releasable_weights.h"
#include "jit/onednn/runtime/transposition.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

void StepMaker::replaceByCopy(const Operand& input) {
  replace(input.id,
          withoutGaps({*draft_.knownSlot(input.id), draft_.inputLayout(input.id)}, input.dtype));
}

void StepMaker::replace(size_t id, const std::pair<Slot, Layout>& by) {
  draft_.slots.insert_or_assign(id, by.first);
  draft_.layouts.insert_or_assign(id, by.second);
}

void StepMaker::replacePlanes() {
  for (const auto& images : planesBesideChannelsLast()) {
    const auto from = draft_.inputLayout(images.id);
    const auto to =
        strided(images.id, images.dtype, *images.sizes, channelsLastStrides(*images.sizes));
    replace(images.id, copied({*draft_.knownSlot(images.id), from}, to, images.dtype));
  }
}

std::vector<Operand> StepMaker::planesBesideChannelsLast() const {
  constexpr int64_t kMany = 1 << 14;  // numbers; fewer our pointwise kernel takes as they are
  const auto& ops = draft_.lowered.ops;
  const bool pointwise = std::all_of(ops.begin(), ops.end(), isPointwise);
  const auto mayLieSo = [](const Operand& images) {
    const auto strides = images.sizes ? channelsLastStrides(*images.sizes) : Shape{};
    return !strides.empty() && canonicalStrides(*images.sizes, strides) == strides;
  };
  std::set<Shape> beside;   // sizes of images that are channels last
  std::set<size_t> planar;  // what has to lie otherwise, and what that is computed of
  for (auto op = ops.rbegin(); op != ops.rend(); ++op) {
    const auto& result = op->outputs()[0];
    const bool given = draft_.group_outputs.count(result.id) != 0 && mayLieSo(result);
    const bool is_planar = (given && !mayBeChannelsLast(result)) || planar.count(result.id) != 0;
    if (op->kind() == OpKind::Convolution && mayLieSo(result)) {
      beside.insert(*result.sizes);
    }
    for (const auto& input : op->inputs()) {
      if (isPointwise(*op) && is_planar) {
        planar.insert(input.id);
      }
      if (draft_.group_inputs.count(input.id) != 0 && mayLieSo(input) &&
          isChannelsLast(draft_.inputLayout(input.id), input)) {
        beside.insert(*input.sizes);
      }
    }
  }
  std::vector<Operand> found;
  for (const auto& op : ops) {
    for (const auto& input : op.inputs()) {
      const auto isInput = [&](const Operand& other) { return other.id == input.id; };
      const bool images = draft_.group_inputs.count(input.id) != 0 && mayLieSo(input) &&
                          (input.dtype == at::kFloat || input.dtype == at::kBFloat16);
      if (isPointwise(op) && images && input.sizes == op.outputs()[0].sizes &&
          beside.count(*input.sizes) != 0 && isContiguous(draft_.inputLayout(input.id)) &&
          (!pointwise || c10::multiply_integers(*input.sizes) >= kMany) &&
          planar.count(input.id) == 0 && std::none_of(found.begin(), found.end(), isInput)) {
        found.push_back(input);
      }
    }
  }
  return found;
}

std::pair<Slot, Layout> StepMaker::interleaved(const Layout& from) {
  constexpr int64_t kPixels = 1 << 13;  // worth a thread
  const auto sizes = from.get_dims();
  const Layout result(from.get_id(), from.get_data_type(), sizes, channelsLastStrides(sizes));
  const auto numbers = c10::multiply_integers(sizes);
  const auto bytes = static_cast<int64_t>(from.get_mem_size()) / numbers;
  Plan::Step step;
  bind(step, *draft_.knownSlot(from.get_id()), from);
  step.outputs.emplace_back(draft_.temporary(result), result);
  step.kernel = {[images = sizes[0], planes = sizes[1], pixels = sizes[2] * sizes[3], bytes](
                     auto source, auto target) {
                   const auto* from = static_cast<const char*>(source[0]);
                   auto* to = static_cast<char*>(target[0]);
                   at::parallel_for(0, images * pixels, kPixels, [&](int64_t first, int64_t last) {
                     while (first < last) {  // a part of one image after the other
                       const auto count = std::min(last - first, pixels - first % pixels);
                       const auto image = first / pixels * planes * pixels;
                       vector_loops::kernels().interleave(from + (image + first % pixels) * bytes,
                                                          planes, pixels, count, bytes,
                                                          to + first * planes * bytes);
                       first += count;
                     }
                   });
                 },
                 "reorder", "llga_interleave"};
  draft_.plan->steps.push_back(std::move(step));
  return draft_.plan->steps.back().outputs[0];
}

bool StepMaker::isContiguous(const Layout& layout) {
  return layout.get_layout_type() == Layout::layout_type::strided &&
         layout.get_strides() == c10::TensorType::contiguousStridesOf(layout.get_dims());
}

bool StepMaker::isChannelsLast(const Layout& layout, const Operand& like) {
  const auto strides = channelsLastStrides(*like.sizes);
  return layout.get_layout_type() == Layout::layout_type::strided && !strides.empty() &&
         layout.get_strides() == canonicalStrides(*like.sizes, strides);
}

std::optional<StepMaker::PixelStrides> StepMaker::pixelStridesOf(const Layout& images) {
  const auto sizes = images.get_dims();
  constexpr size_t kFirst = 2;
  if (images.get_layout_type() != Layout::layout_type::strided || sizes.size() <= kFirst) {
    return std::nullopt;
  }
  const auto strides = images.get_strides();
  std::optional<int64_t> pixel;
  int64_t pixels = 1;  // in so many dimensions as were seen
  for (auto i = sizes.size(); i-- > kFirst; pixels *= sizes[i]) {
    const auto each = strides[i] / pixels;
    if (sizes[i] != 1 && (each * pixels != strides[i] || each != pixel.value_or(each))) {
      return std::nullopt;
    }
    pixel = sizes[i] != 1 ? each : pixel;
  }
  const auto image = sizes[0] != 1 ? strides[0] : pixels * pixel.value_or(sizes[1]);
  return sizes[1] == 1 || strides[1] == 1
             ? std::optional(PixelStrides{image, pixel.value_or(sizes[1])})
             : std::nullopt;
}

Shape StepMaker::pixelStrides(const Shape& sizes) {
  Shape moved(sizes);
  std::rotate(moved.begin() + 1, moved.begin() + 2, moved.end());
  auto strides = c10::TensorType::contiguousStridesOf(moved);
  std::rotate(strides.begin() + 1, strides.end() - 1, strides.end());
  return canonicalStrides(sizes, strides);
}

std::optional<Concat> StepMaker::concatOf(const std::vector<Layout>& parts, int64_t item) {
  constexpr int64_t kWord = 4;
  Concat kernel{0, {}, {}};
  for (const auto& part : parts) {
    const auto lies = pixelStridesOf(part);
    const auto sizes = part.get_dims();
    const auto channels = sizes[1];
    const auto pixels = c10::multiply_integers(sizes) / channels;
    if (!lies || lies->image * sizes[0] != pixels * lies->pixel || channels * item % kWord != 0 ||
        lies->pixel * item % kWord != 0) {
      return std::nullopt;
    }
    kernel.pixels = pixels;
    kernel.words.push_back(channels * item / kWord);
    kernel.strides.push_back(lies->pixel * item / kWord);
  }
  return kernel;
}

bool StepMaker::overChannelsLast(const Operand& data, const Operand& result) const {
  return isChannelsLast(draft_.inputLayout(data.id), data) && mayBeChannelsLast(result);
}

bool StepMaker::mayBeChannelsLast(const Operand& result) const {
  return draft_.mayHaveStrides(result.id, channelsLastStrides(*result.sizes));
}

bool StepMaker::takesImages(const Ops& ops, const Operand& data, const Operand& result) const {
  const auto layout = draft_.inputLayout(data.id);
  return draft_.knownSlot(data.id) &&
         (isChannelsLast(layout, data) || isConvolutionOfPlanes(ops, layout)) &&
         mayBeChannelsLast(result);
}

bool StepMaker::mayAdd(const std::optional<Operand>& addend, const Operand& result) const {
  return !addend ||
         (draft_.knownSlot(addend->id) && isChannelsLast(draft_.inputLayout(addend->id), result));
}

Shape StepMaker::denseStrides(const std::optional<Operand>& addend, const Operand& result) const {
  auto last = channelsLastStrides(*result.sizes);
  if (draft_.mayHaveStrides(result.id, last)) {
    return mayAdd(addend, result) ? last : Shape{};
  }
  auto rows = c10::TensorType::contiguousStridesOf(*result.sizes);
  return !addend && draft_.mayHaveStrides(result.id, rows) ? rows : Shape{};
}

std::optional<Shape> StepMaker::rowStrides(bool image, const Operand& data,
                                           const std::optional<Operand>& addend,
                                           const Operand& result, const Shape& moved) const {
  // Of one pixel, rows are images in both orders.
  const bool rows = !image || (*data.sizes)[2] * (*data.sizes)[3] == 1;
  const auto takes = [&](const Operand& value) {
    if (!draft_.knownSlot(value.id)) {
      return false;
    }
    const auto layout = draft_.inputLayout(value.id);
    return image ? isChannelsLast(layout, value) || (rows && isContiguous(layout))
                 : layout.get_layout_type() == Layout::layout_type::strided;
  };
  if (!takes(data) || (addend && !takes(*addend))) {
    return std::nullopt;
  }
  if (image) {
    auto last = channelsLastStrides(*result.sizes);
    if (draft_.mayHaveStrides(result.id, last)) {
      return last;
    }
  }
  const auto strides = moved.empty() ? c10::TensorType::contiguousStridesOf(*result.sizes) : moved;
  return rows && draft_.mayHaveStrides(result.id, strides) ? std::optional(strides) : std::nullopt;
}

bool StepMaker::isFromImages(const Operand& data, const Operand& result) const {
  return isOnlyResult(result) && draft_.knownSlot(data.id) && overChannelsLast(data, result);
}

bool StepMaker::isOnlyResult(const Operand& result) const {
  return draft_.group_outputs.size() == 1 && draft_.group_outputs.count(result.id) != 0;
}

bool StepMaker::isStrict(const Operand& data) const {
  return data.dtype != at::kFloat || !usesAmx() ||
         draft_.request.fpmath_mode == dnnl::fpmath_mode::strict;
}

at::Tensor StepMaker::finiteWeight(const Operand& operand) const {
  const auto weight = draft_.constantTensor(operand.id).contiguous();
  return findReleasable(weight) || !weight.isfinite().all().item<bool>() ? at::Tensor() : weight;
}

at::Tensor StepMaker::matrixOf(const at::Tensor& weight) {
  return (weight.dim() == 4 ? weight.permute({0, 2, 3, 1}) : weight).flatten(1).t();
}

std::optional<std::pair<std::vector<float>, std::vector<float>>> StepMaker::scaleAndShift(
    const OpSpec& norm) const {
  std::vector<at::Tensor> parameters;  // weight, bias, mean, variance
  for (size_t i = 1; i <= 4; ++i) {
    const auto id = norm.inputs()[i].id;
    if (!draft_.lowered.operands.at(id).constant) {
      return std::nullopt;
    }
    parameters.push_back(draft_.constantTensor(id).to(at::kFloat));
  }
  auto numbers = [](const at::Tensor& tensor) {
    const auto dense = tensor.contiguous();
    const auto* data = dense.const_data_ptr<float>();
    return std::vector<float>(data, data + dense.numel());
  };
  const auto scale = parameters[0] / (parameters[3] + norm.get_attr<float>(Attr::epsilon)).sqrt();
  return std::pair{numbers(scale), numbers(parameters[1] - parameters[2] * scale)};
}

void StepMaker::rescale(float& scale, float& shift, const Scale& from, const Scale& to) {
  const auto real = shift - scale * from.scale * static_cast<double>(from.zero_point);
  shift = static_cast<float>(real / to.scale + static_cast<double>(to.zero_point));
  scale = static_cast<float>(scale * from.scale / to.scale);
}

size_t StepMaker::bind(Plan::Step& step, const Slot& slot, const Layout& layout) {
  step.inputs.emplace_back(slot, layout);
  return step.inputs.size() - 1;
}

void StepMaker::bindData(Plan::Step& step, const Operand& data) const {
  bind(step, *draft_.knownSlot(data.id), draft_.inputLayout(data.id));
}

void StepMaker::bindDataOrConstant(Plan::Step& step, const Operand& operand) {
  const auto slot = draft_.knownSlot(operand.id);
  bind(step, slot ? *slot : draft_.keep(draft_.constantTensor(operand.id)),
       draft_.inputLayout(operand.id));
}

bool StepMaker::bindAs(Plan::Step& step, const Operand& data, const Shape& strides) {
  if (!draft_.knownSlot(data.id)) {
    return false;
  }
  const auto layout = draft_.inputLayout(data.id);
  const bool is =
      layout.get_layout_type() == Layout::layout_type::strided && layout.get_strides() == strides;
  if (is) {
    bindData(step, data);
  }
  return is;
}

void StepMaker::bindImages(Plan::Step& step, const Ops& ops, const Operand& data) {
  const auto layout = draft_.inputLayout(data.id);
  if (isConvolutionOfPlanes(ops, layout)) {
    const auto [slot, interleaved_layout] = interleaved(layout);
    bind(step, slot, interleaved_layout);
  } else {
    bindData(step, data);
  }
}

size_t StepMaker::bindPacked(Plan::Step& step, const Layout& weight, PackedWeightPtr packed) {
  const auto slot = draft_.constantSlot(packed->data());
  draft_.plan->packed.push_back(std::move(packed));
  return bind(step, slot, weight);
}

size_t StepMaker::bindPacked(Plan::Step& step, const Operand& weight, PackedWeightPtr packed) {
  return bindPacked(step, draft_.inputLayout(weight.id), std::move(packed));
}

size_t StepMaker::bindOrdered(Plan::Step& step, const Operand& operand, const at::Tensor& weight,
                              const at::Tensor& ordered) {
  return bindPacked(step, operand,
                    transformWeight(weight, ordered.sizes().vec(), ordered.scalar_type(),
                                    [&](const at::Tensor& to) { to.copy_(ordered); }));
}

size_t StepMaker::bindPanels(Plan::Step& step, const Operand& operand, const at::Tensor& weight,
                             const at::Tensor& matrix, const Shape& sizes) {
  return bindPacked(step, operand,
                    transformWeight(weight, sizes, weight.scalar_type(),
                                    [&](const at::Tensor& to) { Linear::toPanels(matrix, to); }));
}

size_t StepMaker::bindParameter(Plan::Step& step, const Operand& operand, const at::Tensor& value) {
  const auto [slot, layout] = keptAsFloats(operand.id, value);
  return bind(step, slot, layout);
}

size_t StepMaker::bindBias(Plan::Step& step, const std::vector<Operand>& inputs, int64_t times) {
  return inputs.size() < 3
             ? 0
             : bindParameter(step, inputs[2], draft_.constantTensor(inputs[2].id).repeat(times));
}

size_t StepMaker::bindAddend(Plan::Step& step, const std::optional<Operand>& addend,
                             const Operand& result) {
  if (!addend) {
    return 0;
  }
  if (step.inputs[0].second.get_id() != addend->id) {
    draft_.inplace[result.id] = addend->id;
  }
  return bind(step, *draft_.knownSlot(addend->id), draft_.inputLayout(addend->id));
}

size_t StepMaker::bindAddedRows(Plan::Step& step, bool image, const std::optional<Operand>& addend,
                                const Operand& result) {
  const bool lies = !addend || image || isContiguous(draft_.inputLayout(addend->id));
  return lies ? bindAddend(step, addend, result) : bindRows(step, *addend);
}

size_t StepMaker::bindRows(Plan::Step& step, const Operand& rows) {
  const std::pair<Slot, Layout> known{*draft_.knownSlot(rows.id), draft_.inputLayout(rows.id)};
  step.inputs.push_back(isContiguous(known.second) ? known : copied(known, rows.id, rows.dtype));
  return step.inputs.size() - 1;
}

void StepMaker::bindDataRows(Plan::Step& step, bool image, const Operand& data) {
  if (image) {
    bindData(step, data);
  } else {
    bindRows(step, data);
  }
}

void StepMaker::addChannelsLastResult(Plan::Step& step, const Operand& result) {
  draft_.addResult(
      step, strided(result.id, result.dtype, *result.sizes, channelsLastStrides(*result.sizes)));
}

const char* StepMaker::kindOf(const OpSpec& op) {
  switch (op.kind()) {
    case OpKind::MatMul:
      return "matmul";
    case OpKind::ConvTranspose:
      return "deconvolution";
    default:
      return "convolution";
  }
}

std::pair<Slot, Layout> StepMaker::located(const Value* value) {
  const auto id = value->unique();
  const auto facts = draft_.request.facts->tensor(value);
  if (const auto input = draft_.group_inputs.find(id); input != draft_.group_inputs.end()) {
    const auto& strides = draft_.request.input_strides[input->second];
    return {Slot{Slot::Kind::input, input->second},
            strided(id, *facts.dtype, *facts.sizes, strides)};
  }
  const auto tensor = torch::jit::toIValue(value)->toTensor();
  return {draft_.keep(tensor), strided(id, *facts.dtype, *facts.sizes, tensor.strides().vec(),
                                       /*constant=*/true)};
}

std::pair<Slot, Layout> StepMaker::locatedDense(const Value* value) {
  const auto from = located(value);
  const bool gaps = hasGaps(from.second.get_dims(), from.second.get_strides());
  return gaps ? withoutGaps(from, *draft_.request.facts->tensor(value).dtype) : from;
}

std::pair<Slot, Layout> StepMaker::parameter(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return known ? keptAsFloats(value->unique(), known->toTensor()) : located(value);
}

std::pair<Slot, Layout> StepMaker::keptAsFloats(size_t id, const at::Tensor& value) {
  const auto tensor = value.to(at::kFloat).contiguous();
  return {draft_.keep(tensor),
          strided(id, at::kFloat, tensor.sizes().vec(), tensor.strides().vec(), /*constant=*/true)};
}

std::pair<Slot, Layout> StepMaker::copied(const std::pair<Slot, Layout>& from, const Value* value) {
  return copied(from, value->unique(), *draft_.request.facts->tensor(value).dtype);
}

std::pair<Slot, Layout> StepMaker::copied(const std::pair<Slot, Layout>& from, size_t id,
                                          at::ScalarType type) {
  const auto sizes = from.second.get_dims();
  return copied(from, strided(id, type, sizes, c10::TensorType::contiguousStridesOf(sizes)), type);
}

std::pair<Slot, Layout> StepMaker::copied(const std::pair<Slot, Layout>& from, const Layout& to,
                                          at::ScalarType type) {
  Plan::Step step;
  step.inputs.push_back(from);
  step.outputs.emplace_back(draft_.temporary(to), to);
  step.kernel = copyBetween(from.second, to, type);
  draft_.plan->steps.push_back(std::move(step));
  return draft_.plan->steps.back().outputs[0];
}

std::pair<Slot, Layout> StepMaker::withoutGaps(const std::pair<Slot, Layout>& from,
                                               at::ScalarType type) {
  const auto sizes = from.second.get_dims();
  const auto strides = at::infer_dense_strides(sizes, from.second.get_strides());
  const auto result = copied(from, strided(from.second.get_id(), type, sizes, strides), type);
  if (auto kernel = concatOf({from.second}, static_cast<int64_t>(c10::elementSize(type)));
      kernel && ownKernelsAnywhere()) {  // several times as fast where there are few channels
    draft_.plan->steps.back().kernel.run = [kernel = std::move(*kernel)](auto source, auto to) {
      kernel.run(source, to[0]);
    };
  }
  return result;
}

Plan::Kernel StepMaker::copyBetween(const Layout& from, const Layout& to, at::ScalarType type) {
  const auto bytes = c10::elementSize(type);
  if (const auto found = Transposition::of(from.get_dims(), from.get_strides(), to.get_strides());
      found && (bytes == sizeof(float) || bytes == sizeof(uint16_t))) {
    const auto with = [&]<typename T>(T) -> Plan::Kernel {
      return {[transposition = *found](auto source, auto results) {
                transposition.run(static_cast<const T*>(source[0]), static_cast<T*>(results[0]));
              },
              "reorder", "llga_copy"};
    };
    return bytes == sizeof(float) ? with(float{}) : with(uint16_t{});
  }
  const auto dtype = c10::isQIntType(type) ? c10::toUnderlying(type) : type;  // as plain numbers
  return {[dtype, sizes = from.get_dims(), strides = from.get_strides(),
           result_strides = to.get_strides()](auto source, auto results) {
            // Only read.
            auto* data = const_cast<void*>(source[0]);
            at::from_blob(results[0], sizes, result_strides, dtype)
                .copy_(at::from_blob(data, sizes, strides, dtype));
          },
          "reorder", "llga_copy"};
}

}  // namespace llga
