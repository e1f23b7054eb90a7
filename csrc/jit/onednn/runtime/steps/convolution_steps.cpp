#include "jit/onednn/runtime/steps/convolution_steps.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/releasable_weights.h"

namespace llga {

bool ConvolutionSteps::grouped(const Ops& ops) {
  const auto kernel = llga::groupedConvolution(ops, draft_.lowered);
  const auto& inputs = ops[0]->inputs();
  const auto& data = inputs[0];
  const auto& result = ops.back()->outputs()[0];
  if (!kernel || !overChannelsLast(data, result)) {
    return false;
  }
  const auto weight = draft_.constantTensor(inputs[1].id).contiguous();
  if (!weight.isfinite().all().item<bool>()) {  // in the padding, the others make NaN of zeros
    return false;
  }
  if (data.dtype == at::kBFloat16) {
    return narrowGrouped(*kernel, inputs, weight, result);
  }
  Plan::Step step;
  bindData(step, data);
  const auto packed_layout = Layout(inputs[1].id, DataType::f32, kernel->weightSizes(),
                                    kernel->weightStrides(), Layout::property_type::constant);
  if (const auto releasable = findReleasable(weight)) {
    releasable->pin();
  }
  bindPacked(step, inputs[1],
             packWeight(weight.view(kernel->weightSizes()), packed_layout, Placement::aligned));
  const auto bias = bindBias(step, inputs);
  addChannelsLastResult(step, result);
  step.kernel = {[kernel = *kernel, bias](auto from, auto to) {
                   kernel.run(static_cast<const float*>(from[0]),
                              static_cast<const float*>(from[1]),
                              bias != 0 ? static_cast<const float*>(from[bias]) : nullptr,
                              static_cast<float*>(to[0]));
                 },
                 "convolution", "llga_grouped:avx2"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::narrowGrouped(const GroupedConvolution& kernel,
                                     const std::vector<Operand>& inputs, const at::Tensor& weight,
                                     const Operand& result) {
  if (findReleasable(weight)) {
    return false;
  }
  Plan::Step step;
  bindData(step, inputs[0]);
  bindOrdered(step, inputs[1], weight, kernel.narrowWeight(weight));
  const auto bias = bindBias(step, inputs);
  addChannelsLastResult(step, result);
  step.kernel = {[kernel, weight, bias](auto from, auto to) {
                   auto numbers = [&](size_t i) { return static_cast<const Bfloat16*>(from[i]); };
                   kernel.runNarrow(numbers(0), numbers(1),
                                    static_cast<const Bfloat16*>(weight.const_data_ptr()),
                                    bias != 0 ? static_cast<const float*>(from[bias]) : nullptr,
                                    static_cast<Bfloat16*>(to[0]));
                 },
                 "convolution", "llga_grouped:amx_bf16"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::depthwise(const Ops& ops) {
  const auto kernel = llga::depthwiseConvolution(ops, draft_.lowered);
  const auto& inputs = ops[0]->inputs();
  const auto& result = ops.back()->outputs()[0];
  if (!kernel || !overChannelsLast(inputs[0], result)) {
    return false;
  }
  const auto weight = finiteWeight(inputs[1]);
  if (!weight.defined()) {
    return false;
  }
  const auto channels = kernel->channels;
  const auto multiplier = kernel->multiplier;
  const auto parts = weight.view({channels, multiplier, kernel->window[0], kernel->window[1]});
  Plan::Step step;
  bindData(step, inputs[0]);
  bindParameter(step, inputs[1], parts.permute({1, 2, 3, 0}));
  size_t bias = 0;
  if (inputs.size() > 2) {
    const auto value = draft_.constantTensor(inputs[2].id);
    bias = bindParameter(step, inputs[2], value.reshape({channels, multiplier}).t());
  }
  addChannelsLastResult(step, result);
  step.kernel = {[kernel = *kernel, bias](auto from, auto to) {
                   kernel.run(from[0], static_cast<const float*>(from[1]),
                              bias != 0 ? static_cast<const float*>(from[bias]) : nullptr, to[0]);
                 },
                 "convolution", fmt::format("llga_depthwise:{}", kernel->isa())};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::volume(const Ops& ops) {
  auto kernel = llga::depthwiseVolume(ops, draft_.lowered);
  const auto& inputs = ops[0]->inputs();
  const auto& data = inputs[0];
  const auto& result = ops.back()->outputs()[0];
  if (!kernel || !draft_.knownSlot(data.id) || !mayBeChannelsLast(result)) {
    return false;
  }
  const auto lies = pixelStridesOf(draft_.inputLayout(data.id));
  const auto weight = finiteWeight(inputs[1]);
  if (!lies || !weight.defined()) {
    return false;
  }
  kernel->image_stride = lies->image;
  kernel->pixel_stride = lies->pixel;
  Plan::Step step;
  bindData(step, data);
  bindParameter(step, inputs[1], weight.flatten(1).t());
  const auto bias = bindBias(step, inputs);
  addChannelsLastResult(step, result);
  step.kernel = {[kernel = *kernel, bias](auto from, auto to) {
                   kernel.run(from[0], static_cast<const float*>(from[1]),
                              bias != 0 ? static_cast<const float*>(from[bias]) : nullptr, to[0]);
                 },
                 "convolution", fmt::format("llga_depthwise_volume:{}", kernel->isa())};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::winograd(const Ops& ops, Way way) {
  const auto found = winogradConvolution(ops, draft_.lowered, way);
  const auto& inputs = ops[0]->inputs();
  const auto& data = inputs[0];
  const auto& result = ops.back()->outputs()[0];
  if (!found || !isStrict(data) || !overChannelsLast(data, result)) {
    return false;
  }
  if (!mayAdd(found->addend, result)) {
    return false;
  }
  constexpr double kLarge = 1e30;  // sums of a few such numbers are finite
  const auto weight = draft_.constantTensor(inputs[1].id).contiguous();
  if (findReleasable(weight) || !(weight.abs().max().item<double>() < kLarge)) {
    return false;
  }
  const auto& kernel = found->kernel;
  Plan::Step step;
  bindData(step, data);
  bindPacked(step, inputs[1],
             transformWeight(weight, kernel.weightSizes(), at::kFloat,
                             [&](const at::Tensor& to) { kernel.transform(weight, to); }));
  const auto bias = bindBias(step, inputs);
  const auto addend = bindAddend(step, found->addend, result);
  addChannelsLastResult(step, result);
  step.kernel = {
      [kernel, weight, bias, addend](auto from, auto to) {
        auto floats = [&](size_t i) { return static_cast<const float*>(from[i]); };
        kernel.run({from[0], floats(1), weight.const_data_ptr(), bias != 0 ? floats(bias) : nullptr,
                    addend != 0 ? from[addend] : nullptr, to[0]});
      },
      "convolution", fmt::format("llga_winograd:{}", kernel.isa())};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::narrow(const Ops& ops) {
  const auto found = llga::narrowConvolution(ops, draft_.lowered);
  const auto& inputs = ops[0]->inputs();
  const auto& result = ops.back()->outputs()[0];
  if (!found || !takesImages(ops, inputs[0], result) || !mayAdd(found->addend, result)) {
    return false;
  }
  const auto weight = finiteWeight(inputs[1]);
  if (!weight.defined()) {
    return false;
  }
  const auto& kernel = found->kernel;
  Plan::Step step;
  bindImages(step, ops, inputs[0]);
  const bool transposed = ops[0]->kind() == OpKind::ConvTranspose;
  bindOrdered(step, inputs[1], weight,
              kernel.convolution.ordered(transposed ? asPointwise(weight) : weight));
  const auto places = transposed ? weight.size(2) * weight.size(3) : 1;
  const auto bias = bindBias(step, inputs, places);
  const auto addend = bindAddend(step, found->addend, result);
  addChannelsLastResult(step, result);
  step.kernel = {
      [kernel, bias, addend](auto from, auto to) {
        auto data = [&](size_t i) { return static_cast<const Bfloat16*>(from[i]); };
        kernel.run({data(0), data(1), bias != 0 ? static_cast<const float*>(from[bias]) : nullptr,
                    addend != 0 ? data(addend) : nullptr, static_cast<Bfloat16*>(to[0])});
      },
      kindOf(*ops[0]), "llga_tiled:amx_bf16"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::direct(const Ops& ops) {
  const auto found = directConvolution(ops, draft_.lowered);
  const auto& inputs = ops[0]->inputs();
  const auto& data = inputs[0];
  const auto& result = ops.back()->outputs()[0];
  if (!found || !isStrict(data) || !draft_.knownSlot(data.id)) {
    return false;
  }
  const auto layout = draft_.inputLayout(data.id);
  const auto strides = denseStrides(found->addend, result);
  const auto weight = draft_.constantTensor(inputs[1].id);
  if (layout.get_layout_type() != Layout::layout_type::strided || strides.empty() ||
      findReleasable(weight)) {
    return false;
  }
  auto kernel = found->kernel;
  std::copy_n(layout.get_strides().begin(), 4, kernel.source_strides.begin());
  std::copy_n(strides.begin(), 4, kernel.result_strides.begin());
  if (!kernel.fits()) {
    return false;
  }
  Plan::Step step;
  bind(step, *draft_.knownSlot(data.id), layout);
  bindPanels(step, inputs[1], weight, matrixOf(weight), kernel.matrix().weightSizes());
  const auto bias = bindBias(step, inputs);
  const auto addend = bindAddend(step, found->addend, result);
  draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
  step.kernel = {[kernel, bias, addend](auto from, auto to) {
                   auto data = [&](size_t i) { return static_cast<const float*>(from[i]); };
                   kernel.run({data(0), data(1), bias != 0 ? data(bias) : nullptr,
                               addend != 0 ? data(addend) : nullptr, static_cast<float*>(to[0])});
                 },
                 "convolution", fmt::format("llga_direct:{}", Linear::kernels().name)};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::transposed(const Ops& ops) {
  const auto found = transposedConvolution(ops, draft_.lowered);
  const auto& inputs = ops[0]->inputs();
  const auto& result = ops.back()->outputs()[0];
  if (!found || !isStrict(inputs[0]) || !draft_.knownSlot(inputs[0].id) ||
      !isChannelsLast(draft_.inputLayout(inputs[0].id), inputs[0])) {
    return false;
  }
  const auto strides = denseStrides({}, result);
  const auto weight = draft_.constantTensor(inputs[1].id);
  if (strides.empty() || findReleasable(weight)) {
    return false;
  }
  auto kernel = *found;
  kernel.planes = strides != channelsLastStrides(*result.sizes);
  Plan::Step step;
  bindData(step, inputs[0]);
  bindPanels(step, inputs[1], weight, weight.permute({0, 2, 3, 1}).flatten(1),
             kernel.product().weightSizes());
  const auto bias = bindBias(step, inputs);
  draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
  const Layout scratch(inputs[1].id, DataType::f32, Shape{kernel.scratch()}, Shape{1});
  step.outputs.emplace_back(draft_.temporary(scratch), scratch);
  step.kernel = {[kernel, bias](auto from, auto to) {
                   auto data = [&](size_t i) { return static_cast<const float*>(from[i]); };
                   kernel.run({data(0), data(1), bias != 0 ? data(bias) : nullptr,
                               static_cast<float*>(to[0]), static_cast<float*>(to[1])});
                 },
                 kindOf(*ops[0]), fmt::format("llga_transposed:{}", Linear::kernels().name)};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::expansion() {
  auto found = llga::expansion(draft_.lowered);
  if (!found || !isOnlyResult(found->result) || !draft_.knownSlot(found->data.id) ||
      !isStrict(found->data)) {
    return false;
  }
  auto& kernel = found->kernel;
  if (kernel.first) {
    const auto layout = draft_.inputLayout(found->data.id);
    if (layout.get_layout_type() != Layout::layout_type::strided ||
        !draft_.mayHaveStrides(found->result.id, channelsLastStrides(*found->result.sizes))) {
      return false;
    }
    std::copy_n(layout.get_strides().begin(), 4, kernel.first->rows.strides.begin());
  } else if (!overChannelsLast(found->data, found->result)) {
    return false;
  }
  if (!mayAdd(found->addend, found->result)) {
    return false;
  }
  std::vector<const OpSpec*> convolutions{found->pointwise, found->depthwise};
  if (found->projection != nullptr) {
    convolutions.push_back(found->projection);
  }
  std::vector<at::Tensor> weights;
  for (const auto* op : convolutions) {
    weights.push_back(draft_.constantTensor(op->inputs()[1].id).contiguous());
    if (findReleasable(weights.back())) {
      return false;
    }
  }
  if (!weights[1].isfinite().all().item<bool>()) {  // in the padding, others make NaN of zeros
    return false;
  }
  Plan::Step step;
  bindData(step, found->data);
  std::array<size_t, 3> weight_at{};
  std::array<size_t, 3> bias_at{};
  for (size_t i = 0; i < convolutions.size(); ++i) {
    const auto& inputs = convolutions[i]->inputs();
    const auto& weight = weights[i];
    if (i == 1) {
      weight_at[i] = bindParameter(step, inputs[1], weight.squeeze(1).permute({1, 2, 0}));
    } else {
      const auto matrix = matrixOf(weight);
      weight_at[i] = bindPanels(step, inputs[1], weight, matrix,
                                kernel.panelSizes(matrix.size(0), matrix.size(1)));
    }
    bias_at[i] = bindBias(step, inputs);
  }
  std::array<size_t, 2> slopes_at{};
  for (size_t i = 0; i < slopes_at.size(); ++i) {
    if (const auto& slopes = found->slopes[i]) {
      slopes_at[i] = bindParameter(step, *slopes, draft_.constantTensor(slopes->id));
    }
  }
  const auto addend = bindAddend(step, found->addend, found->result);
  addChannelsLastResult(step, found->result);
  step.kernel = {
      [kernel, weight_at, bias_at, slopes_at, addend](auto from, auto to) {
        auto data = [&](size_t i) { return i != 0 ? from[i] : nullptr; };
        auto floats = [&](size_t i) { return static_cast<const float*>(data(i)); };
        kernel.run({from[0], data(weight_at[0]), floats(bias_at[0]), floats(weight_at[1]),
                    floats(bias_at[1]), data(weight_at[2]), floats(bias_at[2]),
                    floats(slopes_at[0]), floats(slopes_at[1]), data(addend), to[0]});
      },
      "convolution", fmt::format("llga_expansion:{}", kernel.isa())};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::squeezeExcitation() {
  const auto found = excitation(draft_.lowered);
  if (!found || !isFromImages(found->data, found->result)) {
    return false;
  }
  Plan::Step step;
  bindData(step, found->data);
  auto bind = [&](const OpSpec& convolution, size_t input) {
    if (input >= convolution.inputs().size()) {
      return size_t{0};  // no bias
    }
    const auto& parameter = convolution.inputs()[input];
    const auto type = input == 1 ? parameter.dtype : at::kFloat;
    const auto tensor = draft_.constantTensor(parameter.id).to(type).contiguous();
    step.inputs.emplace_back(
        draft_.keep(tensor),
        strided(parameter.id, type, *parameter.sizes, tensor.strides().vec(), /*constant=*/true));
    return step.inputs.size() - 1;
  };
  bind(*found->squeeze, 1);
  bind(*found->excite, 1);
  const auto squeeze_bias = bind(*found->squeeze, 2);
  const auto excite_bias = bind(*found->excite, 2);
  addChannelsLastResult(step, found->result);
  draft_.inplace[found->result.id] = found->data.id;
  draft_.overwrites_what_it_reads = true;
  step.kernel = {[kernel = found->kernel, squeeze_bias, excite_bias](auto from, auto to) {
                   auto data = [&](size_t i) { return static_cast<const float*>(from[i]); };
                   kernel.run({from[0], data(1), squeeze_bias != 0 ? data(squeeze_bias) : nullptr,
                               data(2), excite_bias != 0 ? data(excite_bias) : nullptr, to[0]});
                 },
                 "excitation", "llga_excitation"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool ConvolutionSteps::takesGaps(const Ops& ops, const Operand& input) const {
  return depthwiseVolume(ops, draft_.lowered) && pixelStridesOf(draft_.inputLayout(input.id));
}

}  // namespace llga
