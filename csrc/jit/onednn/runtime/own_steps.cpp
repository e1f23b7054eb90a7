#include "jit/onednn/runtime/own_steps.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <vector>

#include "jit/onednn/runtime/affine_sum.h"
#include "jit/onednn/runtime/attention_blocks.h"
#include "jit/onednn/runtime/channel_shuffle.h"
#include "jit/onednn/runtime/concat_affine.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/gate.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/own_attention.h"
#include "jit/onednn/runtime/own_lookup.h"
#include "jit/onednn/runtime/own_norm.h"
#include "jit/onednn/runtime/own_pointwise.h"
#include "jit/onednn/runtime/own_quantized.h"
#include "jit/onednn/runtime/own_recurrent.h"
#include "jit/onednn/runtime/own_resampling.h"
#include "jit/onednn/runtime/own_rotary.h"
#include "jit/onednn/runtime/own_variance.h"
#include "jit/onednn/runtime/releasable_weights.h"
#include "jit/onednn/runtime/softmax.h"
#include "jit/onednn/runtime/transposition.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

using dnnl::graph::logical_tensor;
using LayoutType = logical_tensor::layout_type;
using Property = logical_tensor::property_type;

class OwnSteps {
 public:
  explicit OwnSteps(PlanDraft& draft) : draft_(draft) {}

  // A step for a convolution in small groups over channels-last images, by a kernel of our own.
  // False for any other partition.
  bool groupedConvolution(const Ops& ops) {
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
    const auto packed_layout = logical_tensor(inputs[1].id, DataType::f32, kernel->weightSizes(),
                                              kernel->weightStrides(), Property::constant);
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

  bool narrowGrouped(const GroupedConvolution& kernel, const std::vector<Operand>& inputs,
                     const at::Tensor& weight, const Operand& result) {
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

  // A step for a depthwise convolution that makes several channels of each one, or has a window
  // with gaps, over channels-last images. False for any other partition.
  bool depthwise(const Ops& ops) {
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

  // A step for a depthwise convolution of volumes whose channels lie side by side. False for any
  // other partition.
  bool volume(const Ops& ops) {
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

  // A step for a convolution, and maybe an addition and ReLU, over channels-last images by
  // Winograd's algorithm. False for any other partition.
  bool winograd(const Ops& ops, Way way) {
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
    step.kernel = {[kernel, weight, bias, addend](auto from, auto to) {
                     auto floats = [&](size_t i) { return static_cast<const float*>(from[i]); };
                     kernel.run({from[0], floats(1), weight.const_data_ptr(),
                                 bias != 0 ? floats(bias) : nullptr,
                                 addend != 0 ? from[addend] : nullptr, to[0]});
                   },
                   "convolution", fmt::format("llga_winograd:{}", kernel.isa())};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A step for a convolution, or a transposed one, and maybe an addition and an activation, of
  // bfloat16 channels-last images by AMX. False for any other partition.
  bool narrowConvolution(const Ops& ops) {
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

  // A step for a small convolution, and maybe an addition and an activation. False for any other
  // partition.
  bool direct(const Ops& ops) {
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
    if (layout.get_layout_type() != LayoutType::strided || strides.empty() ||
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

  // A step for a transposed convolution with few output channels, over channels-last images. False
  // for any other partition.
  bool transposed(const Ops& ops) {
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

  // Of a result that may have any, but like an addend; empty if that is not possible.
  Shape denseStrides(const std::optional<Operand>& addend, const Operand& result) const {
    auto last = channelsLastStrides(*result.sizes);
    if (draft_.mayHaveStrides(result.id, last)) {
      return mayAdd(addend, result) ? last : Shape{};
    }
    auto rows = c10::TensorType::contiguousStridesOf(*result.sizes);
    return !addend && draft_.mayHaveStrides(result.id, rows) ? rows : Shape{};
  }

  // As oneDNN calls what computes it.
  static const char* kindOf(const OpSpec& op) {
    switch (op.kind()) {
      case OpKind::MatMul:
        return "matmul";
      case OpKind::ConvTranspose:
        return "deconvolution";
      default:
        return "convolution";
    }
  }

  // Makes it an input of the step; its index there.
  static size_t bind(Plan::Step& step, const Slot& slot, const Layout& layout) {
    step.inputs.emplace_back(slot, layout);
    return step.inputs.size() - 1;
  }

  // What a step reads first.
  void bindData(Plan::Step& step, const Operand& data) const {
    bind(step, *draft_.knownSlot(data.id), draft_.inputLayout(data.id));
  }

  void bindDataOrConstant(Plan::Step& step, const Operand& operand) {
    const auto slot = draft_.knownSlot(operand.id);
    bind(step, slot ? *slot : draft_.keep(draft_.constantTensor(operand.id)),
         draft_.inputLayout(operand.id));
  }

  // As bindData(); a few planes are interleaved first.
  void bindImages(Plan::Step& step, const Ops& ops, const Operand& data) {
    const auto layout = draft_.inputLayout(data.id);
    if (isConvolutionOfPlanes(ops, layout)) {
      const auto [slot, interleaved_layout] = interleaved(layout);
      bind(step, slot, interleaved_layout);
    } else {
      bindData(step, data);
    }
  }

  // A weight in the order of a kernel of our own.
  size_t bindPacked(Plan::Step& step, const Layout& weight, PackedWeightPtr packed) {
    const auto slot = draft_.constantSlot(packed->data());
    draft_.plan->packed.push_back(std::move(packed));
    return bind(step, slot, weight);
  }

  size_t bindPacked(Plan::Step& step, const Operand& weight, PackedWeightPtr packed) {
    return bindPacked(step, draft_.inputLayout(weight.id), std::move(packed));
  }

  // `ordered`: the numbers of `weight`, as they are or narrower, in that order.
  size_t bindOrdered(Plan::Step& step, const Operand& operand, const at::Tensor& weight,
                     const at::Tensor& ordered) {
    return bindPacked(step, operand,
                      transformWeight(weight, ordered.sizes().vec(), ordered.scalar_type(),
                                      [&](const at::Tensor& to) { to.copy_(ordered); }));
  }

  // `matrix`: the numbers of `weight`, inputs by outputs; `sizes`: in panels.
  size_t bindPanels(Plan::Step& step, const Operand& operand, const at::Tensor& weight,
                    const at::Tensor& matrix, const Shape& sizes) {
    return bindPacked(step, operand,
                      transformWeight(weight, sizes, weight.scalar_type(),
                                      [&](const at::Tensor& to) { Linear::toPanels(matrix, to); }));
  }

  // Of a weight whose first dimension are its outputs: (row, column and channel of a convolution's
  // window) by outputs.
  static at::Tensor matrixOf(const at::Tensor& weight) {
    return (weight.dim() == 4 ? weight.permute({0, 2, 3, 1}) : weight).flatten(1).t();
  }

  // A constant weight, if all its numbers are finite, of which others make NaN of the padding's
  // zeros, and its memory stays; else an undefined tensor.
  at::Tensor finiteWeight(const Operand& operand) const {
    const auto weight = draft_.constantTensor(operand.id).contiguous();
    return findReleasable(weight) || !weight.isfinite().all().item<bool>() ? at::Tensor() : weight;
  }

  // A constant, as dense numbers of float32.
  std::pair<Slot, Layout> keptAsFloats(size_t id, const at::Tensor& value) {
    const auto tensor = value.to(at::kFloat).contiguous();
    return {draft_.keep(tensor), strided(id, at::kFloat, tensor.sizes().vec(),
                                         tensor.strides().vec(), /*constant=*/true)};
  }

  size_t bindParameter(Plan::Step& step, const Operand& operand, const at::Tensor& value) {
    const auto [slot, layout] = keptAsFloats(operand.id, value);
    return bind(step, slot, layout);
  }

  // The constant bias of a convolution, so many times; 0 if it has none.
  size_t bindBias(Plan::Step& step, const std::vector<Operand>& inputs, int64_t times = 1) {
    return inputs.size() < 3
               ? 0
               : bindParameter(step, inputs[2], draft_.constantTensor(inputs[2].id).repeat(times));
  }

  // Numbers of float32 are to be computed as such, or oneDNN would: without AMX it has no products
  // that are faster.
  bool isStrict(const Operand& data) const {
    return data.dtype != at::kFloat || !usesAmx() ||
           draft_.request.fpmath_mode == dnnl::fpmath_mode::strict;
  }

  // What is added to the result, which may take its place unless it is the data, whose rows are
  // read again; 0 if nothing is.
  size_t bindAddend(Plan::Step& step, const std::optional<Operand>& addend, const Operand& result) {
    if (!addend) {
      return 0;
    }
    if (step.inputs[0].second.get_id() != addend->id) {
      draft_.inplace[result.id] = addend->id;
    }
    return bind(step, *draft_.knownSlot(addend->id), draft_.inputLayout(addend->id));
  }

  // Likewise to rows, one behind the other, behind a step that copies it there if it lies
  // otherwise.
  size_t bindAddedRows(Plan::Step& step, bool image, const std::optional<Operand>& addend,
                       const Operand& result) {
    const bool lies = !addend || image || isContiguous(draft_.inputLayout(addend->id));
    return lies ? bindAddend(step, addend, result) : bindRows(step, *addend);
  }

  // Rows one behind the other; likewise behind a step that copies them.
  size_t bindRows(Plan::Step& step, const Operand& rows) {
    const std::pair<Slot, Layout> known{*draft_.knownSlot(rows.id), draft_.inputLayout(rows.id)};
    step.inputs.push_back(isContiguous(known.second) ? known : copied(known, rows.id, rows.dtype));
    return step.inputs.size() - 1;
  }

  static bool isChannelsLast(const Layout& layout, const Operand& like) {
    const auto strides = channelsLastStrides(*like.sizes);
    return layout.get_layout_type() == LayoutType::strided && !strides.empty() &&
           layout.get_strides() == canonicalStrides(*like.sizes, strides);
  }

  struct PixelStrides {
    int64_t image;
    int64_t pixel;
  };

  // Of images, or volumes, whose channels lie side by side and whose pixels lie evenly, line by
  // line; nothing for others. There may be memory in between, as of a part of all channels.
  static std::optional<PixelStrides> pixelStridesOf(const Layout& images) {
    const auto sizes = images.get_dims();
    constexpr size_t kFirst = 2;
    if (images.get_layout_type() != LayoutType::strided || sizes.size() <= kFirst) {
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

  // The images are, and the result may be.
  bool overChannelsLast(const Operand& data, const Operand& result) const {
    return isChannelsLast(draft_.inputLayout(data.id), data) && mayBeChannelsLast(result);
  }

  bool mayBeChannelsLast(const Operand& result) const {
    return draft_.mayHaveStrides(result.id, channelsLastStrides(*result.sizes));
  }

  // Likewise, or such as bindImages() brings into that order.
  bool takesImages(const Ops& ops, const Operand& data, const Operand& result) const {
    const auto layout = draft_.inputLayout(data.id);
    return draft_.knownSlot(data.id) &&
           (isChannelsLast(layout, data) || isConvolutionOfPlanes(ops, layout)) &&
           mayBeChannelsLast(result);
  }

  // No addend at all, or one that a kernel for channels-last images can read.
  bool mayAdd(const std::optional<Operand>& addend, const Operand& result) const {
    return !addend ||
           (draft_.knownSlot(addend->id) && isChannelsLast(draft_.inputLayout(addend->id), result));
  }

  void addChannelsLastResult(Plan::Step& step, const Operand& result) {
    draft_.addResult(
        step, strided(result.id, result.dtype, *result.sizes, channelsLastStrides(*result.sizes)));
  }

  // A step for a linear layer or pointwise convolution of float32 numbers. False for any other
  // partition.
  bool linear(const Ops& ops, Way way) {
    const auto found = llga::linear(ops, draft_.lowered, way);
    if (!found) {
      return false;
    }
    const auto& result = found->result;
    const auto& other = found->factor ? found->factor : found->addend;
    const auto strides = rowStrides(found->image, found->data, other, result, found->moved);
    if (!strides) {
      return false;
    }
    const auto weight = draft_.constantTensor(found->weight.id);
    const auto matrix = found->image ? weight.flatten(1).t() : weight;  // inputs x outputs
    const bool releasable = findReleasable(weight) != nullptr;
    const bool narrow = found->rows <= Linear::kFewRows && !releasable && Linear::isNarrow(weight);
    const bool one = found->rows == 1 && !found->addend;
    const bool row = one && matrix.t().is_contiguous();
    const Linear kernel{found->rows,      matrix.size(0), matrix.size(1),
                        found->rectifier, narrow,         found->activation};
    if (!narrow && (found->if_narrow || (one && !row))) {
      return false;
    }
    if (!row && (releasable || !(narrow || way == Way::gemm || isStrict(found->data)))) {
      return false;
    }
    Plan::Step step;
    bindData(step, found->data);
    if (row && !narrow) {
      bind(step, draft_.keep(matrix),
           strided(found->weight.id, at::kFloat, matrix.sizes().vec(), matrix.strides().vec(),
                   /*constant=*/true));
    } else {
      const auto sizes = row ? matrix.t().sizes().vec() : kernel.weightSizes();
      bindPacked(step, found->weight,
                 transformWeight(weight, sizes, narrow ? at::kBFloat16 : at::kFloat,
                                 [&](const at::Tensor& to) {
                                   if (row) {
                                     to.copy_(matrix.t());
                                   } else {
                                     Linear::toPanels(matrix, to);
                                   }
                                 }));
    }
    size_t bias = 0;
    if (!found->biases.empty()) {
      at::Tensor sum;
      for (const auto& operand : found->biases) {
        const auto term = draft_.constantTensor(operand.id).flatten();
        sum = sum.defined() ? sum + term : term;
      }
      bias = bindParameter(step, found->biases[0], sum);
    }
    const auto addend = bindAddedRows(step, found->image, found->addend, result);
    const auto factor = found->factor ? bindRows(step, *found->factor) : 0;
    std::array<size_t, 2> affine{};
    if (found->scale) {
      const auto scale = draft_.constantTensor(found->scale->id).flatten();
      affine[0] = bindParameter(step, *found->scale, scale);
      affine[1] = found->shift ? bindParameter(step, *found->shift,
                                               draft_.constantTensor(found->shift->id).flatten())
                               : bindParameter(step, *found->scale, at::zeros_like(scale));
    }
    draft_.addResult(step, strided(result.id, at::kFloat, *result.sizes, *strides));
    step.kernel = {[kernel, row, bias, addend, factor, affine](auto from, auto to) {
                     auto data = [&](size_t i) {
                       return i != 0 ? static_cast<const float*>(from[i]) : nullptr;
                     };
                     const auto* source = static_cast<const float*>(from[0]);
                     auto* result = static_cast<float*>(to[0]);
                     auto multiply = [&](const auto* matrix) {
                       constexpr int64_t kGrain = 1 << 15;  // threads may have to be woken
                       gemv(matrix, data(bias), kernel.outputs, kernel.inputs, source, result,
                            kernel.rectifier, kGrain);
                       if (kernel.activation) {
                         activate(*kernel.activation, result, result, kernel.outputs);
                       }
                     };
                     if (!row) {
                       kernel.run({source, from[1], data(bias), data(addend), result,
                                   data(affine[0]), data(affine[1]), data(factor)});
                     } else if (kernel.narrow_weight) {
                       multiply(static_cast<const Bfloat16*>(from[1]));
                     } else {
                       multiply(data(1));
                     }
                   },
                   found->image ? "convolution" : "matmul",
                   fmt::format("llga_{}{}:{}", row ? "gemv" : "gemm", narrow ? "_bf16_weight" : "",
                               row ? "avx2" : Linear::kernels().name)};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A step for a pointwise convolution of images in planes that gives planes: its weight is
  // multiplied with each image. False for any other partition.
  bool convolutionOfPlanes(const Ops& ops) {
    const auto found = llga::linear(ops, draft_.lowered, Way::gemm);
    if (!found || !found->image || found->activation || !isStrict(found->data)) {
      return false;
    }
    const auto& [data, result] = std::tie(found->data, found->result);
    const auto images = draft_.inputLayout(data.id);
    const auto weight = draft_.constantTensor(found->weight.id);
    constexpr int64_t kMostWeights = 1 << 18;  // that stay in a cache while each panel meets them
    if (weight.numel() > kMostWeights || !isContiguous(images) || isChannelsLast(images, data) ||
        !isContiguous(draft_.outputLayout(result.id)) ||
        (found->addend && !isContiguous(draft_.inputLayout(found->addend->id))) ||
        findReleasable(weight) != nullptr) {
      return false;
    }
    const auto& sizes = *data.sizes;
    const auto pixels = sizes[2] * sizes[3];
    auto matrix = weight.flatten(1);
    const auto outputs = matrix.size(0);
    const auto inputs = matrix.size(1);
    const bool biased = !found->biases.empty();
    if (biased) {
      const auto bias = draft_.constantTensor(found->biases[0].id).reshape({outputs, 1});
      matrix = at::cat({matrix, bias}, 1);
    }
    const auto product = MatrixProduct{.sizes = {sizes[0]},
                                       .rows = outputs,
                                       .inputs = inputs,
                                       .outputs = pixels,
                                       .a = {{0}, matrix.size(1), 1},
                                       .b = {{inputs * pixels}, pixels, 1},
                                       .biased = biased,
                                       .rectifier = found->rectifier};
    if (!paysProductOfPlanes(product)) {
      return false;
    }
    Plan::Step step;
    bindData(step, data);
    bindParameter(step, found->weight, matrix);
    const auto addend = bindAddend(step, found->addend, result);
    draft_.addResult(step, draft_.outputLayout(result.id));
    step.kernel = {[product = product.arranged(), addend](auto from, auto to) {
                     auto numbers = [&](size_t i) { return static_cast<const float*>(from[i]); };
                     product.run({numbers(1), numbers(0), addend != 0 ? numbers(addend) : nullptr,
                                  static_cast<float*>(to[0])});
                   },
                   "convolution", fmt::format("llga_gemm:{}", Linear::kernels().name)};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A step for a product of two matrices, neither of which is a weight. False for any other
  // partition.
  bool product(const Ops& ops) {
    const auto found = llga::product(ops, draft_.lowered);
    const auto kernel = found ? kernelOf(*found) : std::nullopt;
    if (!kernel) {
      return false;
    }
    const auto& result = found->result;
    Plan::Step step;
    bindDataOrConstant(step, found->a);
    bindDataOrConstant(step, found->b);
    const bool is_operand = found->addend && found->addend->id == found->b.id;
    const auto addend = is_operand ? bindRows(step, *found->addend)
                                   : bindAddedRows(step, /*image=*/false, found->addend, result);
    draft_.addResult(step, strided(result.id, at::kFloat, *result.sizes,
                                   c10::TensorType::contiguousStridesOf(*result.sizes)));
    step.kernel = {[kernel = *kernel, addend](auto from, auto to) {
                     auto data = [&](size_t i) { return static_cast<const float*>(from[i]); };
                     kernel.run({data(0), data(1), addend != 0 ? data(addend) : nullptr,
                                 static_cast<float*>(to[0])});
                   },
                   "matmul",
                   kernel->isVectorByRows() ? "llga_gemv:avx2"
                                            : fmt::format("llga_gemm:{}", Linear::kernels().name)};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // Nothing where oneDNN's is as fast, or the numbers are not to be computed this way.
  std::optional<MatrixProduct> kernelOf(const FoundProduct& found) const {
    const auto& sizes = *found.result.sizes;
    const auto before = found.before ? numberOf(*found.before) : 1;
    const auto behind = found.behind ? numberOf(*found.behind) : 1;
    const auto a = matrixStrides(found.a, found.transpose_a, sizes);
    const auto b = matrixStrides(found.b, found.transpose_b, sizes);
    if (!isStrict(found.a) || !before || !behind || !a || !b ||
        c10::multiply_integers(sizes) == 0 ||
        !draft_.mayHaveStrides(found.result.id, c10::TensorType::contiguousStridesOf(sizes))) {
      return std::nullopt;
    }
    const auto inputs = found.a.sizes->end()[found.transpose_a ? -2 : -1];
    const auto kernel = MatrixProduct{Shape(sizes.begin(), sizes.end() - 2),
                                      sizes.end()[-2],
                                      inputs,
                                      sizes.end()[-1],
                                      *a,
                                      *b,
                                      *before,
                                      *behind}
                            .arranged();
    return paysProduct(kernel) ? std::optional(kernel) : std::nullopt;
  }

  // None if there is no finite one to multiply with in the place of a division.
  std::optional<float> numberOf(const FoundProduct::Factor& factor) const {
    const auto number = draft_.constantTensor(factor.number.id).item<float>();
    const auto reciprocal = 1 / number;
    return !factor.divides             ? std::optional(number)
           : std::isfinite(reciprocal) ? std::optional(reciprocal)
                                       : std::nullopt;
  }

  // Those of an operand of a product with a result of these sizes.
  std::optional<MatrixProduct::Matrix> matrixStrides(const Operand& operand, bool transposed,
                                                     const Shape& sizes) const {
    const auto layout = draft_.inputLayout(operand.id);
    if (layout.get_layout_type() != LayoutType::strided) {
      return std::nullopt;
    }
    constexpr size_t kMatrix = 2;
    auto strides = layout.get_strides();
    MatrixProduct::Matrix matrix{{}, strides.end()[-2], strides.end()[-1]};
    if (transposed) {
      std::swap(matrix.row, matrix.column);
    }
    strides.resize(strides.size() - kMatrix);
    matrix.batches = broadcastStrides(Shape(operand.sizes->begin(), operand.sizes->end() - kMatrix),
                                      strides, Shape(sizes.begin(), sizes.end() - kMatrix));
    return matrix;
  }

  static bool isContiguous(const Layout& layout) {
    return layout.get_layout_type() == LayoutType::strided &&
           layout.get_strides() == c10::TensorType::contiguousStridesOf(layout.get_dims());
  }

  // A step for an activation apart. False if the partition is none.
  bool activation(const Ops& ops) {
    const auto* applied = draft_.appliedTo(ops.front()->inputs()[0].id);
    if (applied == nullptr || applied->ops != ops) {
      return false;
    }
    addActivation(*applied, draft_.layouts.at(applied->from));
    if (const auto pair = draft_.inplace.find(applied->from); pair != draft_.inplace.end()) {
      draft_.inplace.insert_or_assign(applied->to, pair->second);
    }
    return true;
  }

  // One step for a group that is an activation. False if the group is anything else, or its result
  // is to have another layout than its data.
  bool wholeActivation() {
    const auto applied = loneActivation(draft_.lowered, draft_.group_outputs);
    if (!applied || draft_.group_inputs.count(applied->from) == 0) {
      return false;
    }
    const auto from = draft_.inputLayout(applied->from);
    const auto count = static_cast<size_t>(c10::multiply_integers(from.get_dims()));
    if (from.get_mem_size() != count * itemSize(from) ||
        !draft_.mayHaveStrides(applied->to, from.get_strides())) {
      return false;
    }
    addActivation(*applied, from);
    draft_.inplace.insert_or_assign(applied->to, applied->from);
    return true;
  }

  // The one op of a partition that is a softmax over another dimension than the last; or null.
  static const OpSpec* softmaxAcross(const Ops& ops) {
    const auto* op = ops.front();
    if (ops.size() != 1 || (op->kind() != OpKind::SoftMax && op->kind() != OpKind::LogSoftmax)) {
      return nullptr;
    }
    const auto& data = op->inputs()[0];
    const auto rank = data.rank();
    const auto axis = op->get_attr<int64_t>(Attr::axis);
    const bool known = data.dtype == at::kFloat || data.dtype == at::kBFloat16;
    const bool across = rank > 1 && axis != -1 && axis != rank - 1;
    return across && known && data.dtype == op->outputs()[0].dtype ? op : nullptr;
  }

  // A step for a softmax over a dimension that does not lie innermost. False for any other
  // partition.
  bool softmax(const Ops& ops) {
    const auto* op = ownKernelsAnywhere() ? softmaxAcross(ops) : nullptr;
    if (op == nullptr || !draft_.knownSlot(op->inputs()[0].id)) {
      return false;
    }
    const auto& data = op->inputs()[0];
    const auto& result = op->outputs()[0];
    const auto& sizes = *data.sizes;
    const auto from = draft_.inputLayout(data.id);
    const auto wanted = draft_.outputLayout(result.id);
    if (from.get_layout_type() != LayoutType::strided || c10::multiply_integers(sizes) == 0) {
      return false;
    }
    const auto strides = wanted.get_layout_type() == LayoutType::strided
                             ? wanted.get_strides()
                             : at::infer_dense_strides(sizes, from.get_strides());
    const auto axis = op->get_attr<int64_t>(Attr::axis);
    const auto kernelFor = [&](const Shape& source_strides) {
      return SoftmaxAcross::of(data.dtype, sizes,
                               static_cast<size_t>(axis < 0 ? axis + data.rank() : axis),
                               source_strides, canonicalStrides(sizes, strides));
    };
    auto kernel = kernelFor(from.get_strides());
    std::pair<Slot, Layout> source{*draft_.knownSlot(data.id), from};
    if (!kernel) {  // channels last to planes: oneDNN has its reference kernel for that
      kernel = kernelFor(strides);
      if (!kernel) {
        return false;
      }
      source = copied(source, strided(data.id, data.dtype, sizes, strides), data.dtype);
    }
    kernel->logarithm = op->kind() == OpKind::LogSoftmax;
    Plan::Step step;
    step.inputs.push_back(source);
    draft_.addResult(step, strided(result.id, result.dtype, sizes, strides));
    step.kernel = {[kernel = *kernel](auto from, auto to) { kernel.run(from[0], to[0]); },
                   "softmax", "llga_softmax"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A step for a chain of pointwise functions over data that oneDNN is slow at. False for any other
  // partition.
  bool pointwise(const Ops& ops) {
    auto found = ownKernelsAnywhere() ? llga::pointwise(ops, draft_.lowered, draft_.group_outputs)
                                      : std::nullopt;
    if (!found) {
      return false;
    }
    const auto& sizes = found->chain.sizes;
    std::vector<Layout> layouts;
    for (const auto& data : found->data) {
      layouts.push_back(draft_.inputLayout(data.id));
      if (layouts.back().get_layout_type() != LayoutType::strided) {
        return false;
      }
    }
    // Of the first result that has to have some; else of data that is dense.
    std::optional<Shape> strides;
    for (const auto& result : found->results) {
      const auto wanted = draft_.outputLayout(result.id);
      if (!strides && wanted.get_layout_type() == LayoutType::strided) {
        strides = wanted.get_strides();
      }
    }
    for (const auto i : c10::irange(layouts.size())) {
      if (!strides && found->data[i].sizes == sizes && !hasGaps(sizes, layouts[i].get_strides())) {
        strides = layouts[i].get_strides();
      }
    }
    for (const auto i : c10::irange(layouts.size())) {  // or in the order of data with gaps
      if (!strides && found->data[i].sizes == sizes) {
        strides = at::infer_dense_strides(sizes, layouts[i].get_strides());
      }
    }
    if (sizes.empty()) {
      strides = Shape{};
    } else if (!strides) {
      strides = c10::TensorType::contiguousStridesOf(sizes);
    }
    strides = canonicalStrides(sizes, *strides);
    const bool whole = ops.size() == draft_.lowered.ops.size();
    const bool only =
        std::any_of(ops.begin(), ops.end(), [](const OpSpec* op) { return isOnlyOurs(*op); });
    if (!only && !isFastPointwise(*found, whole) && !isSlowPointwise(*found, layouts, *strides)) {
      return false;
    }
    for (const auto i : c10::irange(found->results.size())) {
      if (!sizes.empty() && !draft_.mayHaveStrides(found->results[i].id, *strides)) {
        return false;
      }
      found->chain.results[i].port.strides = *strides;
    }
    for (const auto i : c10::irange(layouts.size())) {
      const auto& own = *found->data[i].sizes;
      found->chain.data[i].strides = own.empty()
                                         ? Shape(sizes.size(), 0)
                                         : broadcastStrides(own, layouts[i].get_strides(), sizes);
    }
    const auto chain = found->chain.arranged();
    if (!chain || (!only && gathersMuch(*chain))) {
      return false;
    }
    Plan::Step step;
    for (const auto i : c10::irange(layouts.size())) {
      bindDataOrConstant(step, found->data[i]);
    }
    for (const auto& result : found->results) {
      draft_.addResult(step, strided(result.id, result.dtype, sizes, *strides));
    }
    if (const auto over = chain->mayOverwrite()) {
      draft_.inplace.insert_or_assign(found->results[0].id, found->data[*over].id);
    }
    const bool softmax = chain->readsRows();
    step.kernel = {[chain = *chain](auto from, auto to) { chain.run(from.data(), to.data()); },
                   softmax ? "softmax" : "pointwise", softmax ? "llga_softmax" : "llga_pointwise"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // One step for a whole group that is such a chain. Of what oneDNN has no kernel for, several, one
  // for those in a row whose results have the same sizes.
  bool wholePointwise() {
    const auto ops = opsOf(draft_.lowered);
    if (!pointwise(ops)) {
      if (!isOnlyOurs(draft_.lowered)) {
        return false;
      }
      Ops row;
      for (const auto* op : ops) {
        if (!row.empty() && row.back()->outputs()[0].sizes != op->outputs()[0].sizes) {
          requirePointwise(row);
          row.clear();
        }
        row.push_back(op);
      }
      requirePointwise(row);
    }
    draft_.plan->takes_non_finite = true;
    return true;
  }

  void requirePointwise(const Ops& ops) {
    if (!pointwise(ops)) {
      throw CompileError{"our kernel does not take pointwise functions of such layouts"};
    }
  }

  static bool isNarrow(const Layout& layout) { return layout.get_data_type() == DataType::bf16; }
  static size_t itemSize(const Layout& layout) {
    return isNarrow(layout) ? sizeof(Bfloat16) : sizeof(float);
  }

  void addActivation(const ActivationApart& applied, const Layout& from) {
    const auto count = static_cast<int64_t>(from.get_mem_size() / itemSize(from));
    Plan::Step step;
    step.inputs.emplace_back(*draft_.knownSlot(applied.from), from);
    draft_.addResult(step, withId(from, applied.to));
    step.kernel = {
        [kind = applied.activation, count, narrow = isNarrow(from)](auto data, auto result) {
          if (narrow) {
            activate(kind, static_cast<const Bfloat16*>(data[0]), static_cast<Bfloat16*>(result[0]),
                     count);
          } else {
            activate(kind, static_cast<const float*>(data[0]), static_cast<float*>(result[0]),
                     count);
          }
        },
        "eltwise", "llga_activation"};
    draft_.plan->steps.push_back(std::move(step));
  }

  // A group of Concat, BatchNormInference and maybe an activation, over channels-last images, or of
  // the latter with Quantize behind them and maybe Dequantize before: one step, by a kernel of our
  // own.
  // False if the group or its data is anything else.
  bool concatAffine() {
    const auto found = affineGroup();
    if (!found) {
      return false;
    }
    const auto& result = draft_.lowered.ops.back().outputs()[0];
    const auto strides = pixelStrides(*result.sizes);
    if (!isOnlyResult(result) || !draft_.mayHaveStrides(result.id, strides)) {
      return false;
    }
    const auto integers = [](at::ScalarType type) {
      return type == at::kQUInt8 ? at::kByte : type;
    };
    const auto dtype = found->parts[0].dtype;
    ConcatAffine kernel{integers(dtype), integers(result.dtype), 1, {}, {}, {}, -HUGE_VALF};
    auto affine = scaleAndShift(*found->norm);
    if (!affine) {
      return false;
    }
    std::tie(kernel.scale, kernel.shift) = std::move(*affine);
    Plan::Step step;
    for (const auto& part : found->parts) {
      if (part.dtype != dtype || !bindAs(step, part, pixelStrides(*part.sizes))) {
        return false;
      }
      kernel.channels.push_back((*part.sizes)[1]);
    }
    // What is behind the affine map, and not part of it.
    const auto rounded = found->to.value_or(Scale{});
    const auto to = found->activation ? Scale{} : rounded;
    if (found->relu) {
      kernel.least = static_cast<float>(to.zero_point);
    }
    if (found->activation) {
      kernel.activation = found->activation;
      kernel.result_scale = 1 / static_cast<float>(rounded.scale);
      kernel.result_shift = static_cast<float>(rounded.zero_point);
    }
    for (size_t c = 0, part = 0, end = 0; c < kernel.scale.size(); ++c) {
      while (c == end) {
        end += static_cast<size_t>(kernel.channels[part++]);
      }
      const auto from = found->from.empty() ? Scale{} : found->from[part - 1];
      rescale(kernel.scale[c], kernel.shift[c], from, to);
    }
    kernel.pixels = c10::multiply_integers(*result.sizes) / (*result.sizes)[1];

    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
    step.kernel = {[kernel = std::move(kernel)](auto from, auto to) { kernel.run(from, to[0]); },
                   "concat", "llga_affine"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  struct AffineGroup {
    std::vector<Operand> parts;
    std::vector<Scale> from;  // of the parts; empty if they are not of 8 bit
    const OpSpec* norm;
    bool relu;
    std::optional<Activation> activation;
    std::optional<Scale> to;  // of the result, if it is of 8 bit
  };

  std::optional<AffineGroup> affineGroup() const {
    const auto ops = opsOf(draft_.lowered);
    size_t next = 0;
    auto take = [&](OpKind kind) {
      return next < ops.size() && ops[next]->kind() == kind ? ops[next++] : nullptr;
    };
    std::unordered_map<size_t, const OpSpec*> wide;  // what dequantizes a value
    while (const auto* dequantize = take(OpKind::Dequantize)) {
      wide.emplace(dequantize->outputs()[0].id, dequantize);
    }
    const auto* concat = take(OpKind::Concat);
    const auto* norm = take(OpKind::BatchNormInference);
    const bool relu = take(OpKind::ReLU) != nullptr;
    const auto activation = takeActivation(ops, next, norm);
    const auto* quantize = take(OpKind::Quantize);
    // Nothing of that can be left out of the chain, as each result is read.
    const bool is = ownKernelsAnywhere() && norm != nullptr && next == ops.size() &&
                    !(relu && activation) &&
                    (concat != nullptr || quantize != nullptr || activation) &&
                    (concat == nullptr || (concat->get_attr<int64_t>(Attr::axis) == 1 &&
                                           concat->outputs()[0].id == norm->inputs()[0].id)) &&
                    (quantize != nullptr || wide.empty());
    if (!is) {
      return std::nullopt;
    }
    AffineGroup found{
        (concat != nullptr ? concat : norm)->inputs(), {}, norm, relu, activation, {}};
    if (concat == nullptr) {
      found.parts.resize(1);
    }
    const auto& result = ops.back()->outputs()[0];
    if (quantize != nullptr) {
      found.to = unsignedScale(*quantize);
      if (!found.to) {
        return std::nullopt;
      }
    } else if (result.dtype != found.parts[0].dtype) {
      return std::nullopt;
    }
    if (!wide.empty()) {
      for (auto& part : found.parts) {
        const auto dequantize = wide.find(part.id);
        const auto scale =
            dequantize != wide.end() ? unsignedScale(*dequantize->second) : std::nullopt;
        if (!scale) {
          return std::nullopt;
        }
        part = dequantize->second->inputs()[0];
        found.from.push_back(*scale);
      }
    } else if (found.parts[0].dtype != at::kFloat &&
               (quantize != nullptr || found.parts[0].dtype != at::kBFloat16)) {
      return std::nullopt;
    }
    return found;
  }

  // The activation of what ops[next - 1], `of` or null, gives; `next` moves behind it.
  static std::optional<Activation> takeActivation(const Ops& ops, size_t& next, const OpSpec* of) {
    if (of == nullptr || next == ops.size()) {
      return std::nullopt;
    }
    const auto found = activationFrom(ops, next, of->outputs()[0]);
    next += found ? 1 : 0;
    return found;
  }

  // A batch norm, and maybe ReLU, of data in which a pixel's channels lie side by side. False for
  // any other partition.
  bool batchNorm(const Ops& ops) {
    const bool relu = ops.size() == 2 && ops[1]->kind() == OpKind::ReLU;
    if (!ownKernelsAnywhere() || ops.size() != (relu ? 2 : 1) ||
        ops[0]->kind() != OpKind::BatchNormInference) {
      return false;
    }
    const auto& data = ops[0]->inputs()[0];
    const auto& result = ops.back()->outputs()[0];
    const auto& sizes = *result.sizes;
    const auto strides = pixelStrides(sizes);
    Plan::Step step;
    if (!bindAs(step, data, strides) || !draft_.mayHaveStrides(result.id, strides) ||
        data.dtype != result.dtype || (data.dtype != at::kFloat && data.dtype != at::kBFloat16)) {
      return false;
    }
    ConcatAffine kernel{data.dtype,
                        result.dtype,
                        c10::multiply_integers(sizes) / sizes[1],
                        {sizes[1]},
                        {},
                        {},
                        relu ? 0.F : -HUGE_VALF};
    auto affine = scaleAndShift(*ops[0]);
    if (!affine) {
      return false;
    }
    std::tie(kernel.scale, kernel.shift) = std::move(*affine);
    draft_.addResult(step, strided(result.id, result.dtype, sizes, strides));
    step.kernel = {[kernel = std::move(kernel)](auto from, auto to) { kernel.run(from, to[0]); },
                   "batch_norm", "llga_affine"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A concatenation of the channels of channels-last images. False for any other partition.
  bool concat(const Ops& ops) {
    const auto parts = ownKernelsAnywhere() ? concatenated(ops) : std::vector<Operand>{};
    const auto& result = ops.back()->outputs()[0];
    if (parts.empty() || !result.sizes) {
      return false;
    }
    const auto strides = channelsLastStrides(*result.sizes);
    const auto item = static_cast<int64_t>(c10::elementSize(result.dtype));
    if (strides.empty() || !draft_.mayHaveStrides(result.id, strides)) {
      return false;
    }
    std::vector<Layout> layouts;
    for (const auto& part : parts) {
      if (!part.sizes || part.dtype != result.dtype || !draft_.knownSlot(part.id)) {
        return false;
      }
      layouts.push_back(draft_.inputLayout(part.id));
    }
    auto kernel = concatOf(layouts, item);
    if (!kernel) {
      return false;
    }
    Plan::Step step;
    for (const auto& part : parts) {
      bindData(step, part);
    }
    addChannelsLastResult(step, result);
    step.kernel = {[kernel = std::move(*kernel)](auto from, auto to) { kernel.run(from, to[0]); },
                   "concat", "llga_concat"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A concatenation of rows. False for any other partition.
  bool concatOfRows(const Ops& ops) {
    const auto kernel = ownKernelsAnywhere() ? rowsConcatenated(ops) : std::nullopt;
    const auto& result = ops.front()->outputs()[0];
    if (!kernel || !result.sizes) {
      return false;
    }
    const auto strides = c10::TensorType::contiguousStridesOf(*result.sizes);
    if (!draft_.mayHaveStrides(result.id, strides)) {
      return false;
    }
    Plan::Step step;
    for (const auto& part : ops.front()->inputs()) {
      bindDataOrConstant(step, part);
    }
    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
    step.kernel = {[kernel = *kernel](auto from, auto to) { kernel.run(from, to[0]); }, "concat",
                   "llga_concat"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // Of a partition that concatenates tensors and does no more.
  std::optional<ConcatOfRows> rowsConcatenated(const Ops& ops) const {
    const auto& concat = *ops.front();
    if (ops.size() != 1 || concat.kind() != OpKind::Concat) {
      return std::nullopt;
    }
    const auto& result = concat.outputs()[0];
    const auto item = static_cast<int64_t>(c10::elementSize(result.dtype));
    const auto axis = concat.get_attr<int64_t>(Attr::axis);
    ConcatOfRows kernel{{}, {}, {}};
    for (const auto& part : concat.inputs()) {
      const auto layout = draft_.inputLayout(part.id);
      if (!part.sizes || part.dtype != result.dtype ||
          layout.get_layout_type() != LayoutType::strided) {
        return std::nullopt;
      }
      const auto& sizes = *part.sizes;
      const auto rank = static_cast<int64_t>(sizes.size());
      const auto front = static_cast<size_t>(axis < 0 ? axis + rank : axis);
      auto strides = layout.get_strides();
      int64_t numbers = 1;
      for (auto dim = sizes.size(); dim-- > front; numbers *= sizes[dim]) {
        if (sizes[dim] != 1 && strides[dim] != numbers) {
          return std::nullopt;
        }
      }
      strides.resize(front);
      std::for_each(strides.begin(), strides.end(), [item](int64_t& stride) { stride *= item; });
      kernel.sizes.assign(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(front));
      kernel.bytes.push_back(numbers * item);
      kernel.strides.push_back(std::move(strides));
    }
    return c10::multiply_integers(kernel.sizes) > 0 ? std::optional(std::move(kernel))
                                                    : std::nullopt;
  }

  // Of the channels of images whose numbers have so many bytes; nothing where it can't be.
  static std::optional<Concat> concatOf(const std::vector<Layout>& parts, int64_t item) {
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

  // Whether what reads an input of the group takes it with memory between its pixels.
  bool readsWithGaps(const Operand& input) const {
    const auto ops = llga::opsOf(draft_.lowered);
    if (!ownKernelsAnywhere()) {
      return false;
    }
    if (llga::pointwise(ops, draft_.lowered, draft_.group_outputs) ||
        softmaxAcross(ops) != nullptr || rowsConcatenated(ops)) {
      return true;  // what has gaps does not lie as the result does
    }
    const auto product = llga::product(ops, draft_.lowered);
    if (product && kernelOf(*product)) {
      return true;
    }
    if (!pixelStridesOf(draft_.inputLayout(input.id))) {
      return false;
    }
    const auto parts = concatenated(ops);
    return depthwiseVolume(ops, draft_.lowered) || gateOfImages() ||
           std::any_of(parts.begin(), parts.end(),
                       [&](const Operand& part) { return part.id == input.id; });
  }

  // A step that copies an input of the group to dense memory, which is read in its place.
  void replaceByCopy(const Operand& input) {
    const auto [slot, layout] =
        withoutGaps({*draft_.knownSlot(input.id), draft_.inputLayout(input.id)}, input.dtype);
    draft_.slots.insert_or_assign(input.id, slot);
    draft_.layouts.insert_or_assign(input.id, layout);
  }

  // What a partition concatenates along channels, if it does no more: also numbers of 8 bit that
  // are dequantized before and quantized behind, all with the same scale. Else nothing.
  static std::vector<Operand> concatenated(const Ops& ops) {
    const auto is = [](const OpSpec* op) { return op->kind() == OpKind::Concat; };
    const auto concat = std::find_if(ops.begin(), ops.end(), is);
    if (concat == ops.end() || (*concat)->get_attr<int64_t>(Attr::axis) != 1) {
      return {};
    }
    auto parts = (*concat)->inputs();
    if (ops.size() == 1) {
      return parts;
    }
    const auto& quantize = *ops.back();
    const auto scale = quantize.kind() == OpKind::Quantize ? unsignedScale(quantize) : std::nullopt;
    if (!scale || concat + 2 != ops.end()) {
      return {};
    }
    for (auto& part : parts) {
      const auto dequantize = std::find_if(ops.begin(), concat, [&](const OpSpec* op) {
        return op->kind() == OpKind::Dequantize && op->outputs()[0].id == part.id;
      });
      const auto of = dequantize != concat ? unsignedScale(**dequantize) : std::nullopt;
      if (!of || of->scale != scale->scale || of->zero_point != scale->zero_point) {
        return {};
      }
      part = (*dequantize)->inputs()[0];
    }
    return parts;
  }

  // One step for a group that is a channel shuffle.
  void channelShuffle(const Shuffle& shuffle) {
    Plan::Step step;
    std::vector<int64_t> parts;
    std::vector<int64_t> chunks;
    auto layoutOf = [&](const Value* value, std::vector<int64_t>& channels) {
      const auto sizes = draft_.request.facts->tensor(value).sizes.value();
      channels.push_back(sizes[1]);
      return strided(value->unique(), shuffle.dtype, sizes, channelsLastStrides(sizes));
    };
    for (const auto* part : shuffle.parts) {
      const auto layout = layoutOf(part, parts);
      step.inputs.push_back(locatedDense(part));
      if (step.inputs.back().second.get_strides() != layout.get_strides()) {
        throw CompileError{"a channel shuffle of data that is not channels last"};
      }
    }
    for (const auto* chunk : shuffle.chunks) {
      const auto index = draft_.group_outputs.at(chunk->unique());
      if (!draft_.request.any_layout[index]) {
        throw CompileError{"a channel shuffle whose result is read outside of groups"};
      }
      const auto layout = layoutOf(chunk, chunks);
      draft_.layouts.insert_or_assign(chunk->unique(), layout);
      step.outputs.emplace_back(Slot{Slot::Kind::output, index}, layout);
    }
    step.kernel = {[kernel = ChannelShuffle(std::move(parts), std::move(chunks), shuffle.groups,
                                            shuffle.pixels,
                                            static_cast<int64_t>(c10::elementSize(shuffle.dtype)))](
                       auto from, auto to) { kernel.run(from, to); },
                   "shuffle", "llga_shuffle"};
    draft_.plan->steps.push_back(std::move(step));
  }

  // Where an input of the group or a constant is, as it lies.
  std::pair<Slot, Layout> located(const Value* value) {
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

  // Likewise, or of a copy, if there is memory between its numbers.
  std::pair<Slot, Layout> locatedDense(const Value* value) {
    const auto from = located(value);
    const bool gaps = hasGaps(from.second.get_dims(), from.second.get_strides());
    return gaps ? withoutGaps(from, *draft_.request.facts->tensor(value).dtype) : from;
  }

  // Where the value is by rows, after a step that copies it there.
  std::pair<Slot, Layout> copied(const std::pair<Slot, Layout>& from, const Value* value) {
    return copied(from, value->unique(), *draft_.request.facts->tensor(value).dtype);
  }

  std::pair<Slot, Layout> copied(const std::pair<Slot, Layout>& from, size_t id,
                                 at::ScalarType type) {
    const auto sizes = from.second.get_dims();
    return copied(from, strided(id, type, sizes, c10::TensorType::contiguousStridesOf(sizes)),
                  type);
  }

  // The dimensions of the copy lie in the order that they have.
  std::pair<Slot, Layout> withoutGaps(const std::pair<Slot, Layout>& from, at::ScalarType type) {
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

  std::pair<Slot, Layout> copied(const std::pair<Slot, Layout>& from, const Layout& to,
                                 at::ScalarType type) {
    Plan::Step step;
    step.inputs.push_back(from);
    step.outputs.emplace_back(draft_.temporary(to), to);
    step.kernel = copyBetween(from.second, to, type);
    draft_.plan->steps.push_back(std::move(step));
    return draft_.plan->steps.back().outputs[0];
  }

  static Plan::Kernel copyBetween(const Layout& from, const Layout& to, at::ScalarType type) {
    if (const auto transposition =
            Transposition::of(from.get_dims(), from.get_strides(), to.get_strides());
        transposition && c10::elementSize(type) == sizeof(float)) {
      return {[transposition = *transposition](auto source, auto results) {
                transposition.run(static_cast<const float*>(source[0]),
                                  static_cast<float*>(results[0]));
              },
              "reorder", "llga_copy"};
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

  // One step for a group that is a group norm, behind another one if its data lies in an order that
  // the kernel does not take, or the result has to lie in another one.
  void groupNorm(const FoundGroupNorm& found) {
    Plan::Step step;
    auto data = locatedDense(found.data);
    const auto sizes = data.second.get_dims();
    const auto rows = c10::TensorType::contiguousStridesOf(sizes);
    const auto last = pixelStrides(sizes);
    const auto facts = draft_.request.facts->tensor(found.result);
    const bool any = draft_.request.any_layout[draft_.group_outputs.at(found.result->unique())];
    const auto lies = data.second.get_strides();
    auto kernel = found.kernel;
    kernel.channels_last = lies == last && lies != rows && (any || facts.strides == last);
    const auto& strides = kernel.channels_last ? last : rows;
    if (!any && canonicalStrides(sizes, *facts.strides) != strides) {
      throw CompileError{"group norm: its result lies in an unusual order"};
    }
    step.inputs.push_back(lies == strides ? data : copied(data, found.data));
    std::array<size_t, 2> parameters{};
    for (const auto i : {0, 1}) {
      if (const auto* value = i == 0 ? found.weight : found.bias) {
        parameters[i] = step.inputs.size();
        step.inputs.push_back(parameter(value));
      }
    }
    draft_.addResult(step, strided(found.result->unique(), *facts.dtype, sizes, strides));
    step.kernel = {[kernel, parameters](auto from, auto to) {
                     const auto at = [&](size_t i) {
                       return i != 0 ? static_cast<const float*>(from[i]) : nullptr;
                     };
                     kernel.run(from[0], at(parameters[0]), at(parameters[1]), to[0]);
                   },
                   "group_norm", "llga_group_norm"};
    draft_.plan->steps.push_back(std::move(step));
  }

  // One step for a group that is a root-mean-square norm, behind another one if its rows do not lie
  // one behind the other.
  void rmsNorm(const FoundRmsNorm& found) {
    Plan::Step step;
    const auto data = located(found.data);
    const auto sizes = data.second.get_dims();
    const auto* result = behind(found.result);
    const auto facts = draft_.request.facts->tensor(result);
    const auto given = data.second.get_strides();
    const auto mayBe = [&](const Shape& strides) {
      return draft_.request.any_layout[draft_.group_outputs.at(result->unique())] ||
             areSameStrides(sizes, *facts.strides, strides);
    };
    // The order of the rows does not matter where it is the same in the result.
    const auto dense = at::infer_dense_strides(sizes, given);
    const bool by_rows = dense.back() == 1 && mayBe(dense);
    const auto strides = by_rows ? dense : c10::TensorType::contiguousStridesOf(sizes);
    if (!mayBe(strides)) {
      throw CompileError{"a root-mean-square norm whose result does not lie by rows"};
    }
    const auto type = *draft_.request.facts->tensor(found.data).dtype;
    step.inputs.push_back(areSameStrides(sizes, given, strides) ? data
                          : by_rows                             ? withoutGaps(data, type)
                                                                : copied(data, found.data));
    if (found.weight != nullptr) {
      step.inputs.push_back(parameter(found.weight));
    }
    draft_.addResult(step, strided(result->unique(), *facts.dtype, sizes, strides));
    const auto columns = sizes.back();
    const auto kernel = [&]<typename T, typename R>(T, R) -> Plan::Kernel {
      return {[rows = c10::multiply_integers(sizes) / columns, columns,
               epsilon = static_cast<float>(found.epsilon)](auto from, auto to) {
                rmsNormRows(static_cast<const T*>(from[0]), rows, columns, epsilon,
                            from.size() > 1 ? static_cast<const float*>(from[1]) : nullptr,
                            static_cast<R*>(to[0]));
              },
              "rms_norm", "llga_rms_norm"};
    };
    step.kernel = type == at::kBFloat16           ? kernel(Bfloat16{}, Bfloat16{})
                  : *facts.dtype == at::kBFloat16 ? kernel(float{}, Bfloat16{})
                                                  : kernel(float{}, float{});
    draft_.plan->steps.push_back(std::move(step));
  }

  void rotary(const FoundRotary& found) {
    Plan::Step step;
    auto kernel = found.kernel;
    kernel.strides = rowStrides(step, found.data, kernel.sizes);
    kernel.cos_strides = rowStrides(step, found.cos, kernel.sizes);
    kernel.sin_strides = rowStrides(step, found.sin, kernel.sizes);
    const auto* result = behind(found.result);
    const auto facts = draft_.request.facts->tensor(result);
    kernel.result_strides.assign(facts.strides->begin(), facts.strides->end() - 1);
    draft_.addResult(step, strided(result->unique(), *facts.dtype, *facts.sizes, *facts.strides));
    step.kernel = {[kernel = std::move(kernel)](auto from, auto to) {
                     kernel.run(from[0], from[1], from[2], to[0]);
                   },
                   "rotary", "llga_rotary"};
    draft_.plan->steps.push_back(std::move(step));
  }

  // One step for a group that is a recurrent layer, or several, behind another one if its data does
  // not lie by rows of a step and sequence.
  void recurrent(const FoundRecurrent& found) {
    Plan::Step step;
    auto kernel = found.kernel;
    const auto stridesOf = [&](const Shape& strides) {
      return found.batch_first ? Recurrent::Strides{strides[1], strides[0]}
                               : Recurrent::Strides{strides[0], strides[1]};
    };
    auto data = located(found.data);
    if (!liesByRows(data.second)) {
      data = copied(data, found.data);
    }
    kernel.source_strides = stridesOf(rowsIn(data.second));
    step.inputs.push_back(data);
    for (const auto& state : found.states) {
      if (state.constant.defined()) {
        const auto tensor = state.constant.contiguous();
        bind(step, draft_.keep(tensor),
             strided(0, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(),
                     /*constant=*/true));
        continue;
      }
      auto from = located(state.value);
      const auto rows = c10::TensorType::contiguousStridesOf(from.second.get_dims());
      step.inputs.push_back(from.second.get_strides() == rows ? from : copied(from, state.value));
    }
    const auto of_states = step.inputs.size();
    bindRecurrentParameters(step, found);

    const auto facts = draft_.request.facts->tensor(found.result);
    const auto layout = strided(found.result->unique(), *facts.dtype, *facts.sizes, *facts.strides);
    if (!liesByRows(layout)) {
      throw CompileError{"a recurrent layer whose result does not lie by rows"};
    }
    kernel.result_strides = stridesOf(rowsIn(layout));
    draft_.addResult(step, layout);
    std::array<size_t, 2> last{};  // outputs of the step; 0 where nobody reads it
    for (const size_t i : {0, 1}) {
      const auto* value = i == 0 ? found.last_units : found.last_cells;
      if (value == nullptr || draft_.group_outputs.count(value->unique()) == 0) {
        continue;
      }
      const auto state = draft_.request.facts->tensor(value);
      const auto rows = c10::TensorType::contiguousStridesOf(*state.sizes);
      if (canonicalStrides(*state.sizes, *state.strides) != rows) {
        throw CompileError{"a recurrent layer whose last state does not lie by rows"};
      }
      last[i] = step.outputs.size();
      draft_.addResult(step, strided(value->unique(), *state.dtype, *state.sizes, rows));
    }
    const bool is_narrow = *facts.dtype == at::kBFloat16;
    const Shape numbers{kernel.scratch(is_narrow)};
    const Layout scratch(found.result->node()->input(0)->unique(), DataType::f32, numbers,
                         Shape{1});
    step.outputs.emplace_back(draft_.temporary(scratch), scratch);
    const auto with = [&]<typename T>(T) -> Plan::Kernel {
      return {[kernel, last, of_states](auto from, auto to) {
                Recurrent::Data<T> data{};
                data.source = static_cast<const T*>(from[0]);
                data.units = static_cast<const T*>(from[1]);
                if (kernel.cell == Recurrent::Cell::lstm) {
                  data.cells = static_cast<const T*>(from[2]);
                }
                data.parameters = from.slice(of_states);
                data.result = static_cast<T*>(to[0]);
                data.last_units = last[0] != 0 ? static_cast<T*>(to[last[0]]) : nullptr;
                data.last_cells = last[1] != 0 ? static_cast<T*>(to[last[1]]) : nullptr;
                data.scratch = static_cast<float*>(to[to.size() - 1]);
                kernel.run(data);
              },
              "rnn", fmt::format("llga_recurrent:{}", Linear::kernels().name)};
    };
    step.kernel = is_narrow ? with(Bfloat16{}) : with(float{});
    draft_.plan->steps.push_back(std::move(step));
  }

  // One step for a group that is an embedding.
  void lookup(const FoundLookup& found) {
    Plan::Step step;
    const auto slot = draft_.knownSlot(found.indices->unique());
    if (!slot) {
      throw CompileError{"constant indices"};
    }
    // oneDNN has no integers of 64 bit, and reads none of these.
    step.inputs.emplace_back(*slot,
                             Layout(found.indices->unique(), DataType::s32, Shape{1}, Shape{1}));
    bind(step, draft_.keep(found.table),
         strided(0, found.table.scalar_type(), found.table.sizes().vec(),
                 found.table.strides().vec(), /*constant=*/true));
    const auto facts = draft_.request.facts->tensor(found.result);
    draft_.addResult(step, strided(found.result->unique(), *facts.dtype, *facts.sizes,
                                   c10::TensorType::contiguousStridesOf(*facts.sizes)));
    step.kernel = {
        [kernel = found.kernel](auto from, auto to) { kernel.run(from[0], from[1], to[0]); },
        "lookup", "llga_lookup"};
    draft_.plan->takes_non_finite = true;
    draft_.plan->steps.push_back(std::move(step));
  }

  void bindRecurrentParameters(Plan::Step& step, const FoundRecurrent& found) {
    const auto& kernel = found.kernel;
    const auto of_each =
        found.parameters.size() / static_cast<size_t>(kernel.layers * kernel.directions);
    const auto bindMade = [&](const at::Tensor& tensor) {
      step.inputs.push_back(keptAsFloats(0, tensor));
    };
    const auto bindWeight = [&](const at::Tensor& weight, const Shape& sizes, const auto& order) {
      if (const auto releasable = findReleasable(weight)) {
        releasable->pin();
      }
      const auto strides = c10::TensorType::contiguousStridesOf(sizes);
      bindPacked(step, strided(0, at::kFloat, sizes, strides, /*constant=*/true),
                 transformWeight(weight, sizes, at::kFloat, order));
    };
    for (size_t i = 0; i < found.parameters.size(); i += of_each) {
      const auto layer = static_cast<int64_t>(i / of_each) / kernel.directions;
      const auto& inputs = found.parameters[i];
      const auto& units = found.parameters[i + 1];
      bindWeight(inputs, kernel.inputWeightSizes(layer),
                 [&](const at::Tensor& to) { kernel.orderInputWeight(inputs, layer, to); });
      bindWeight(units, kernel.hiddenWeightSizes(),
                 [&](const at::Tensor& to) { kernel.orderHiddenWeight(units, to); });
      const bool biases = of_each == 4;
      const auto none = at::zeros({inputs.size(0)}, at::kFloat);
      const auto& hidden = biases ? found.parameters[i + 3] : none;
      bindMade(kernel.inputBias(biases ? found.parameters[i + 2] : none, hidden));
      if (kernel.cell == Recurrent::Cell::gru) {
        bindMade(kernel.newBias(hidden));
      }
    }
  }

  // Sizes and strides of sequences, or of one step of them.
  static std::pair<Shape, Shape> asSequences(const Layout& layout) {
    auto sizes = layout.get_dims();
    auto strides = layout.get_strides();
    if (sizes.size() == 2) {
      sizes.insert(sizes.begin(), 1);
      strides.insert(strides.begin(), sizes[1] * sizes[2]);
    }
    return {std::move(sizes), std::move(strides)};
  }

  // Whether the last dimension of sequences lies in rows, one behind the other in either order.
  static bool liesByRows(const Layout& layout) {
    const auto [sizes, strides] = asSequences(layout);
    const auto apart = [&](size_t outer, size_t inner) {
      return (sizes[inner] == 1 || strides[inner] == sizes[2]) &&
             (sizes[outer] == 1 || strides[outer] == sizes[inner] * sizes[2]);
    };
    return (sizes[2] == 1 || strides[2] == 1) && (apart(0, 1) || apart(1, 0));
  }

  // Strides of the first two dimensions of what lies by rows, also where there is one row.
  static Shape rowsIn(const Layout& layout) {
    const auto [sizes, strides] = asSequences(layout);
    return {sizes[0] == 1 ? sizes[1] * sizes[2] : strides[0],
            sizes[1] == 1 ? sizes[2] : strides[1]};
  }

  // Binds rows of numbers, and returns the strides of the dimensions before, as of a tensor that is
  // expanded to `sizes` of those.
  Shape rowStrides(Plan::Step& step, const Value* value, const Shape& sizes) {
    auto data = located(value);
    if (data.second.get_strides().back() != 1) {
      data = copied(data, value);
    }
    step.inputs.push_back(data);
    const auto own_sizes = data.second.get_dims();
    const auto own_strides = data.second.get_strides();
    Shape strides(sizes.size(), 0);
    const auto missing = sizes.size() + 1 - own_sizes.size();
    for (size_t i = 0; i + 1 < own_sizes.size(); ++i) {
      strides[missing + i] = own_sizes[i] == 1 ? 0 : own_strides[i];
    }
    return strides;
  }

  // Numbers of float32, by channel.
  std::pair<Slot, Layout> parameter(const Value* value) {
    const auto known = torch::jit::toIValue(value);
    return known ? keptAsFloats(value->unique(), known->toTensor()) : located(value);
  }

  // Of dense memory in which a pixel's channels lie side by side.
  static Shape pixelStrides(const Shape& sizes) {
    Shape moved(sizes);
    std::rotate(moved.begin() + 1, moved.begin() + 2, moved.end());
    auto strides = c10::TensorType::contiguousStridesOf(moved);
    std::rotate(strides.begin() + 1, strides.end() - 1, strides.end());
    return canonicalStrides(sizes, strides);
  }

  // One step for a group that is attention.
  void attention(const FoundAttention& found) {
    Plan::Step step;
    const auto bind = [&](const Value* value) {
      const auto from = located(value);
      const auto copy = found.copied.find(step.inputs.size());
      if (copy == found.copied.end()) {
        step.inputs.push_back(from);
        return;
      }
      const auto type = *draft_.request.facts->tensor(value).dtype;
      const auto to = strided(value->unique(), type, from.second.get_dims(), copy->second);
      step.inputs.push_back(copied(from, to, type));
    };
    bind(found.query);
    bind(found.key);
    bind(found.value);
    std::for_each(found.masks.begin(), found.masks.end(), bind);
    std::vector<bool> divides;
    for (const auto& factor : found.factors) {
      bind(factor.number);
      divides.push_back(factor.divides);
    }
    const auto facts = draft_.request.facts->tensor(found.result);
    const auto layoutOf = [&](const std::vector<int64_t>& strides) {
      return strided(found.result->unique(), *facts.dtype, *facts.sizes, strides);
    };
    const auto layout = layoutOf(found.result_strides);
    const bool apart = found.result_strides != *facts.strides &&
                       !draft_.request.any_layout[draft_.group_outputs.at(layout.get_id())];
    if (apart) {
      step.outputs.emplace_back(draft_.temporary(layout), layout);
    } else {
      draft_.addResult(step, layout);
    }
    step.kernel = {
        [kernel = found.kernel, masks = found.masks.size(), divides](auto from, auto to) {
          Attention::Data data{from[0], from[1], from[2], {}, to[0]};
          std::copy_n(from.begin() + 3, masks, data.masks.begin());
          for (size_t i = 0; i < divides.size(); ++i) {
            const auto factor = *static_cast<const float*>(from[3 + masks + i]);
            data.factor = divides[i] ? data.factor / factor : data.factor * factor;
          }
          kernel.run(data);
        },
        "attention", found.kernel.kernels->name};
    draft_.plan->steps.push_back(std::move(step));
    if (apart) {
      Plan::Step copy;
      copy.inputs = draft_.plan->steps.back().outputs;
      const auto result = layoutOf(*facts.strides);
      draft_.addResult(copy, result);
      copy.kernel = copyBetween(layout, result, *facts.dtype);
      draft_.plan->steps.push_back(std::move(copy));
    }
  }

  // A group that is a pointwise convolution of channels-last images, or one of a few planes, a
  // depthwise one, and maybe a projection: one step, by a kernel of our own. False if the group or
  // its data is anything else.
  bool expansion() {
    auto found = llga::expansion(draft_.lowered);
    if (!found || !isOnlyResult(found->result) || !draft_.knownSlot(found->data.id) ||
        !isStrict(found->data)) {
      return false;
    }
    auto& kernel = found->kernel;
    if (kernel.first) {
      const auto layout = draft_.inputLayout(found->data.id);
      if (layout.get_layout_type() != LayoutType::strided ||
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

  // What follows the sums of an 8-bit product, and its weight as (output, ...); nothing if the
  // kernels can't take it.
  std::optional<std::pair<QuantizedSums, at::Tensor>> quantizedParameters(
      const FoundQuantized& found) const {
    const auto& inputs = found.op->inputs();
    auto weight = found.byOutputs(draft_.constantTensor(found.weight.id));
    const auto bias = inputs.size() > 2 ? draft_.constantTensor(inputs[2].id) : at::Tensor();
    auto sums = sumsOf(found, weight, bias);
    if (!sums || findReleasable(weight) || (bias.defined() && findReleasable(bias))) {
      return std::nullopt;
    }
    return std::pair(std::move(*sums), std::move(weight));
  }

  // Strides of the result of a linear layer or, of images, a pointwise convolution, where all are
  // dense rows, but for what is added to those of a linear layer; nothing where they are not, or
  // the result may not have such. `moved`: those of rows that are the result by views and
  // transpositions, or empty.
  std::optional<Shape> rowStrides(bool image, const Operand& data,
                                  const std::optional<Operand>& addend, const Operand& result,
                                  const Shape& moved = {}) const {
    // Of one pixel, rows are images in both orders.
    const bool rows = !image || (*data.sizes)[2] * (*data.sizes)[3] == 1;
    const auto isDense = [&](const Operand& value) {
      if (!draft_.knownSlot(value.id)) {
        return false;
      }
      const auto layout = draft_.inputLayout(value.id);
      return (image && isChannelsLast(layout, value)) || (rows && isContiguous(layout));
    };
    const auto isStrided = [&](const Operand& value) {
      return draft_.knownSlot(value.id) &&
             draft_.inputLayout(value.id).get_layout_type() == LayoutType::strided;
    };
    if (!isDense(data) || (addend && !isDense(*addend) && (image || !isStrided(*addend)))) {
      return std::nullopt;
    }
    if (image) {
      auto last = channelsLastStrides(*result.sizes);
      if (draft_.mayHaveStrides(result.id, last)) {
        return last;
      }
    }
    const auto strides =
        moved.empty() ? c10::TensorType::contiguousStridesOf(*result.sizes) : moved;
    return rows && draft_.mayHaveStrides(result.id, strides) ? std::optional(strides)
                                                             : std::nullopt;
  }

  // A step for a linear layer or pointwise convolution of bfloat16 numbers. False for any other
  // partition.
  bool narrowLinear(const Ops& ops) {
    const auto found = llga::narrowLinear(ops, draft_.lowered);
    if (!found) {
      return false;
    }
    const auto& result = found->result;
    const bool image = found->op->kind() == OpKind::Convolution;
    const auto& other = found->factor ? found->factor : found->addend;
    const auto strides = rowStrides(image, found->data, other, result, found->moved);
    const auto weight = draft_.constantTensor(found->weight.id);
    const auto& kernel = found->kernel;
    if (!strides || (findReleasable(weight) && !kernel.isRow())) {
      return false;
    }
    const auto matrix = found->outputs_last ? weight : matrixOf(weight);
    Plan::Step step;
    bindData(step, found->data);
    if (kernel.isRow()) {
      const auto rows = matrix.t().contiguous();  // as most models have it
      bind(step, draft_.keep(rows),
           strided(found->weight.id, at::kBFloat16, rows.sizes().vec(), rows.strides().vec(),
                   /*constant=*/true));
    } else {
      bindPanels(step, found->weight, weight, matrix, kernel.weightSizes());
    }
    const auto bias =
        found->bias ? bindParameter(step, *found->bias, draft_.constantTensor(found->bias->id)) : 0;
    const auto bound = bindAddedRows(step, image, other, result);
    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, *strides));
    step.kernel = {
        [kernel, bias, bound, multiplies = found->factor.has_value(),
         wide = result.dtype == at::kFloat](auto from, auto to) {
          const auto run = [&]<typename R>(R* sums) {
            const auto* numbers = bound != 0 ? static_cast<const R*>(from[bound]) : nullptr;
            kernel.run(NarrowLinear::Data<R>{
                static_cast<const Bfloat16*>(from[0]), static_cast<const Bfloat16*>(from[1]),
                bias != 0 ? static_cast<const float*>(from[bias]) : nullptr,
                multiplies ? nullptr : numbers, sums, multiplies ? numbers : nullptr});
          };
          if (wide) {
            run(static_cast<float*>(to[0]));
          } else {
            run(static_cast<Bfloat16*>(to[0]));
          }
        },
        image ? "convolution" : "matmul",
        kernel.isRow() ? "llga_gemv:avx2"
                       : fmt::format("llga_gemm:{}", NarrowLinear::kernels().name)};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A step for a linear layer or pointwise convolution of 8-bit numbers. False for any other
  // partition.
  bool quantizedLinear(const Ops& ops) {
    auto found = llga::quantizedLinear(ops, draft_.lowered);
    if (!found) {
      return false;
    }
    const auto& product = found->product;
    const bool image = product.op->kind() == OpKind::Convolution;
    const auto strides = rowStrides(image, product.data, product.addend, product.result);
    const bool dense =
        image || !product.addend || isContiguous(draft_.inputLayout(product.addend->id));
    return strides && dense &&
           quantizedProduct(
               ops, product, std::move(found->kernel), *strides,
               [](const at::Tensor& weight) { return QuantizedLinear::ordered(weight.flatten(1)); },
               fmt::format("llga_quantized:{}", QuantizedLinear::kernels().name));
  }

  // A step for a convolution of 8-bit channels-last images by AMX. False for any other partition.
  bool quantizedConvolution(const Ops& ops) {
    auto found = llga::quantizedConvolution(ops, draft_.lowered);
    if (!found) {
      return false;
    }
    const auto& product = found->product;
    return takesImages(ops, product.data, product.result) &&
           mayAdd(product.addend, product.result) &&
           quantizedProduct(
               ops, product, found->kernel, channelsLastStrides(*product.result.sizes),
               [&](const at::Tensor& weight) { return found->kernel.convolution.ordered(weight); },
               "llga_tiled:amx_int8");
  }

  // `strides`: of the result; `ordered(weight)`: the weight, as (output, ...), as the kernel reads
  // it. False if the kernel can't take the parameters.
  template <typename Kernel, typename Ordered>
  bool quantizedProduct(const Ops& ops, const FoundQuantized& product, Kernel kernel,
                        const Shape& strides, const Ordered& ordered, std::string name) {
    auto parameters = quantizedParameters(product);
    if (!parameters) {
      return false;
    }
    const auto& [sums, weight] = *parameters;
    kernel.sums = sums;
    const auto& result = product.result;
    Plan::Step step;
    bindImages(step, ops, product.data);
    bindOrdered(step, product.weight, weight, ordered(weight));
    const auto addend = bindAddend(step, product.addend, result);
    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
    step.kernel = {
        [kernel = std::move(kernel), addend](auto from, auto to) {
          kernel.run({static_cast<const uint8_t*>(from[0]), static_cast<const int8_t*>(from[1]),
                      addend != 0 ? from[addend] : nullptr, to[0]});
        },
        kindOf(*product.op), std::move(name)};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A group that is a layer norm of rows, rounded to 8 bit. False for any other group.
  bool roundedLayerNorm() {
    const auto& ops = draft_.lowered.ops;
    if (ops.size() != 2 || !ownKernelsAnywhere() || ops[0].kind() != OpKind::LayerNorm ||
        ops[1].kind() != OpKind::Quantize) {
      return false;
    }
    const auto& inputs = ops[0].inputs();  // data, and maybe weight and bias
    const auto& data = inputs[0];
    const auto& result = ops[1].outputs()[0];
    const auto to = unsignedScale(ops[1]);
    const auto isConstant = [&](const Operand& operand) {
      return draft_.lowered.operands.at(operand.id).constant;
    };
    if (!to || data.dtype != at::kFloat || !data.sizes || !draft_.knownSlot(data.id) ||
        !std::all_of(inputs.begin() + 1, inputs.end(), isConstant) ||
        !isContiguous(draft_.inputLayout(data.id))) {
      return false;
    }
    const auto strides = c10::TensorType::contiguousStridesOf(*data.sizes);
    if (!draft_.mayHaveStrides(result.id, strides)) {
      return false;
    }
    const auto columns = data.sizes->back();
    auto scale = at::ones({columns}, at::kDouble);
    auto shift = at::zeros({columns}, at::kDouble);
    if (inputs.size() == 3) {
      scale = draft_.constantTensor(inputs[1].id).to(at::kDouble);
      shift = draft_.constantTensor(inputs[2].id).to(at::kDouble);
    }
    Plan::Step step;
    bindData(step, data);
    bindParameter(step, data, scale / to->scale);
    bindParameter(step, data, shift / to->scale + static_cast<double>(to->zero_point));
    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
    step.kernel = {[rows = c10::multiply_integers(*data.sizes) / columns, columns,
                    epsilon = ops[0].get_attr<float>(Attr::epsilon)](auto from, auto to) {
                     auto numbers = [&](size_t i) { return static_cast<const float*>(from[i]); };
                     layerNormRowsToBytes(numbers(0), rows, columns, epsilon, numbers(1),
                                          numbers(2), static_cast<uint8_t*>(to[0]));
                   },
                   "layer_norm", "llga_layer_norm"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A group that is a linear layer with GELU's tanh form behind it, or one of bfloat16 whose sums
  // become float32, which oneDNN has no partition of. False for any other group.
  bool productAndMore() {
    const auto ops = opsOf(draft_.lowered);
    const bool has = std::any_of(ops.begin(), ops.end(), [&](const OpSpec* op) {
      return op->kind() == OpKind::TypeCast || !tanhGelu(*op, ops).empty();
    });
    return has && (quantizedLinear(ops) || narrowLinear(ops) || linear(ops, Way::usual));
  }

  // A group that is a depthwise convolution of channels-last images in 8 bit, and maybe a pointwise
  // one before it and another one behind it: one step, by a kernel of our own. False if the group
  // or its data is anything else.
  bool quantizedBlock() {
    auto found = llga::quantizedBlock(draft_.lowered);
    if (!found) {
      return false;
    }
    const auto& data = found->first().data;
    const auto& result = found->last().result;
    const auto& addend = found->last().addend;
    if (!isFromImages(data, result) || !mayAdd(addend, result)) {
      return false;
    }
    auto& kernel = found->kernel;
    std::array<at::Tensor, QuantizedBlock::kMost> weights;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (found->parts[i]) {
        auto parameters = quantizedParameters(*found->parts[i]);
        if (!parameters) {
          return false;
        }
        std::tie(kernel.sums[i], weights[i]) = std::move(*parameters);
      }
    }
    Plan::Step step;
    bindData(step, data);
    std::array<size_t, QuantizedBlock::kMost> weight_at{};
    for (size_t i = 0; i < weights.size(); ++i) {
      if (found->parts[i]) {
        weight_at[i] = bindOrdered(step, found->parts[i]->weight, weights[i],
                                   QuantizedBlock::ordered(i, weights[i]));
      }
    }
    const auto addend_at = bindAddend(step, addend, result);
    addChannelsLastResult(step, result);
    step.kernel = {
        [kernel, weight_at, addend_at](auto from, auto to) {
          QuantizedBlock::Data data{};
          data.source = static_cast<const uint8_t*>(from[0]);
          for (size_t i = 0; i < weight_at.size(); ++i) {
            data.weights[i] = static_cast<const int8_t*>(from[weight_at[i]]);
          }
          data.addend = addend_at != 0 ? static_cast<const uint8_t*>(from[addend_at]) : nullptr;
          data.result = static_cast<uint8_t*>(to[0]);
          kernel.run(data);
        },
        "convolution", fmt::format("llga_quantized:{}", QuantizedLinear::kernels().name)};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A group whose only result a step writes: `result`, of channels-last images from `data`.
  bool isFromImages(const Operand& data, const Operand& result) const {
    return draft_.group_outputs.size() == 1 && draft_.group_outputs.count(result.id) != 0 &&
           draft_.knownSlot(data.id) && overChannelsLast(data, result);
  }

  // A group that is a squeeze and excitation of channels-last images in 8 bit: one step, by a
  // kernel of our own. False if the group or its data is anything else.
  bool quantizedExcitation() {
    auto found = llga::quantizedExcitation(draft_.lowered);
    if (!found || !isFromImages(found->data, found->result)) {
      return false;
    }
    auto squeeze = quantizedParameters(found->squeeze);
    auto excite = quantizedParameters(found->excite);
    if (!squeeze || !excite) {
      return false;
    }
    auto& kernel = found->kernel;
    kernel.squeeze.sums = std::move(squeeze->first);
    kernel.excite.sums = std::move(excite->first);
    Plan::Step step;
    bindData(step, found->data);
    for (const auto& [product, parameters] :
         {std::tie(found->squeeze, squeeze), std::tie(found->excite, excite)}) {
      const auto& weight = parameters->second;
      bindOrdered(step, product.weight, weight, QuantizedLinear::ordered(weight.flatten(1)));
    }
    addChannelsLastResult(step, found->result);
    draft_.inplace[found->result.id] = found->data.id;
    draft_.overwrites_what_it_reads = true;
    step.kernel = {[kernel](auto from, auto to) {
                     auto weight = [&](size_t i) { return static_cast<const int8_t*>(from[i]); };
                     kernel.run({static_cast<const uint8_t*>(from[0]), weight(1), weight(2),
                                 static_cast<uint8_t*>(to[0])});
                   },
                   "excitation",
                   fmt::format("llga_excitation:{}", QuantizedLinear::kernels().name)};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // Data that lies in this order, densely as all that groups read; false for other data.
  bool bindAs(Plan::Step& step, const Operand& data, const Shape& strides) {
    if (!draft_.knownSlot(data.id)) {
      return false;
    }
    const auto layout = draft_.inputLayout(data.id);
    const bool is =
        layout.get_layout_type() == LayoutType::strided && layout.get_strides() == strides;
    if (is) {
      bindData(step, data);
    }
    return is;
  }

  // A group that adds up tensors of float32 or 8 bit, these with a batch norm maybe, and rounds the
  // sum: one step, by a kernel of our own. False for any other group, for tensors that lie in
  // different orders, and where a norm's channels do not come last.
  bool affineSum() {
    const auto found = llga::affineSum(draft_.lowered);
    if (!found || !isOnlyResult(found->result)) {
      return false;
    }
    const auto& sizes = *found->result.sizes;
    const auto& terms = found->terms;
    const bool norms = std::any_of(terms.begin(), terms.end(),
                                   [](const auto& term) { return term.norm != nullptr; });
    const auto strides =
        norms ? pixelStrides(sizes) : draft_.inputLayout(terms[0].data.id).get_strides();
    if (!draft_.mayHaveStrides(found->result.id, strides)) {
      return false;
    }
    Plan::Step step;
    for (const auto& term : terms) {
      if (!bindAs(step, term.data, strides)) {
        return false;
      }
    }
    const bool bytes =
        std::all_of(terms.begin(), terms.end(), [](const auto& term) { return term.scale; });
    auto kernel = bytes && !norms && terms.size() == 2 && !found->activation
                      ? std::optional(sumOfBytes(*found))
                      : sumOfRows(*found, norms);
    if (!kernel) {
      return false;
    }
    draft_.addResult(step, strided(found->result.id, found->result.dtype, sizes, strides));
    step.kernel = std::move(*kernel);
    draft_.plan->steps.push_back(std::move(step));
    draft_.plan->takes_non_finite = true;
    return true;
  }

  // Of two operands of 8 bit as they are.
  static Plan::Kernel sumOfBytes(const FoundAffineSum& found) {
    const auto& from = found.terms;
    const auto& to = found.result_scale;
    const auto zero = static_cast<double>(to.zero_point);
    double shift = 0;
    for (const auto& term : from) {
      shift += static_cast<double>(term.scale->zero_point) * term.scale->scale;
    }
    const vector_loops::SumOfBytes sum{{static_cast<float>(from[0].scale->scale / to.scale),
                                        static_cast<float>(from[1].scale->scale / to.scale)},
                                       static_cast<float>(zero - shift / to.scale),
                                       found.relu ? static_cast<float>(zero) : 0};
    return {[sum, count = c10::multiply_integers(*found.result.sizes)](auto data, auto results) {
              const auto* a = static_cast<const uint8_t*>(data[0]);
              const auto* b = static_cast<const uint8_t*>(data[1]);
              auto* result = static_cast<uint8_t*>(results[0]);
              constexpr int64_t kForOne = 1 << 15;
              at::parallel_for(0, count, kForOne, [&](int64_t first, int64_t last) {
                vector_loops::kernels().sumOfBytes(a + first, b + first, last - first, sum,
                                                   result + first);
              });
            },
            "binary", "llga_sum"};
  }

  // Of any operands; nothing if a norm's parameters are no constants.
  std::optional<Plan::Kernel> sumOfRows(const FoundAffineSum& found, bool norms) const {
    constexpr int64_t kAnyColumns = 512;
    const auto& sizes = *found.result.sizes;
    const auto columns = static_cast<size_t>(norms ? sizes[1] : kAnyColumns);
    AffineSum kernel{.count = c10::multiply_integers(sizes),
                     .columns = static_cast<int64_t>(columns),
                     .terms = {},
                     .least = found.relu ? 0 : -HUGE_VALF,
                     .activation = found.activation,
                     .result_scale = 1 / static_cast<float>(found.result_scale.scale),
                     .result_shift = static_cast<float>(found.result_scale.zero_point)};
    for (const auto& term : found.terms) {
      auto affine = term.norm != nullptr
                        ? scaleAndShift(*term.norm)
                        : std::pair{std::vector<float>(columns, 1), std::vector<float>(columns, 0)};
      if (!affine) {
        return std::nullopt;
      }
      auto& [scale, shift] = *affine;
      for (const auto c : c10::irange(columns)) {
        rescale(scale[c], shift[c], term.scale.value_or(Scale{}), Scale{});
      }
      kernel.terms.push_back({term.scale.has_value(), std::move(scale), std::move(shift)});
    }
    return Plan::Kernel{[kernel = std::move(kernel)](auto from, auto to) {
                          kernel.run(from, static_cast<uint8_t*>(to[0]));
                        },
                        "binary", "llga_sum"};
  }

  // What is computed of a real number becomes what is computed of the one it is kept as.
  static void rescale(float& scale, float& shift, const Scale& from, const Scale& to) {
    const auto real = shift - scale * from.scale * static_cast<double>(from.zero_point);
    shift = static_cast<float>(real / to.scale + static_cast<double>(to.zero_point));
    scale = static_cast<float>(scale * from.scale / to.scale);
  }

  // Whether it is what the group gives, and all of that.
  bool isOnlyResult(const Operand& result) const {
    return draft_.group_outputs.size() == 1 && draft_.group_outputs.count(result.id) != 0;
  }

  // A group that multiplies two images whose channels lie side by side, which may be parts of
  // others, behind activations, to a channels-last one.
  std::optional<std::pair<FoundGate, Gate>> gateOfImages() const {
    auto found = llga::gate(draft_.lowered);
    if (!found || !isOnlyResult(found->result) || !mayBeChannelsLast(found->result)) {
      return std::nullopt;
    }
    const auto& sizes = *found->result.sizes;
    Gate kernel{sizes[0], c10::multiply_integers(sizes.begin() + 2, sizes.end()), sizes[1], {}};
    for (const size_t i : {0, 1}) {
      const auto id = found->data[i].id;
      const auto lies =
          draft_.knownSlot(id) ? pixelStridesOf(draft_.inputLayout(id)) : std::nullopt;
      if (!lies) {
        return std::nullopt;
      }
      kernel.parts[i] = {lies->image, lies->pixel, found->activations[i]};
    }
    return std::pair(std::move(*found), kernel);
  }

  // One step for such a group, by a kernel of our own. False for any other one.
  bool gate() {
    const auto found = gateOfImages();
    if (!found) {
      return false;
    }
    Plan::Step step;
    for (const auto& data : found->first.data) {
      bindData(step, data);
    }
    const auto& result = found->first.result;
    addChannelsLastResult(step, result);
    const bool narrow = result.dtype == at::kBFloat16;
    step.kernel = {[kernel = found->second, narrow](auto from, auto to) {
                     const auto run = [&](auto* product) {
                       using Number = std::remove_pointer_t<decltype(product)>;
                       kernel.run(static_cast<const Number*>(from[0]),
                                  static_cast<const Number*>(from[1]), product);
                     };
                     narrow ? run(static_cast<Bfloat16*>(to[0])) : run(static_cast<float*>(to[0]));
                   },
                   "binary", "llga_gate"};
    draft_.plan->steps.push_back(std::move(step));
    draft_.plan->takes_non_finite = true;
    return true;
  }

  // A group that quantizes float32 numbers and does nothing else, in the order of its data. False
  // for any other group.
  bool quantization() {
    const auto found = llga::quantization(draft_.lowered);
    if (!found || !draft_.knownSlot(found->data.id) ||
        draft_.group_outputs.count(found->result.id) == 0) {
      return false;
    }
    const auto layout = draft_.inputLayout(found->data.id);
    const auto strides = layout.get_strides();
    const auto count = c10::multiply_integers(layout.get_dims());
    if (layout.get_mem_size() != static_cast<size_t>(count) * sizeof(float) ||
        !draft_.mayHaveStrides(found->result.id, strides)) {
      return false;
    }
    Plan::Step step;
    bindData(step, found->data);
    draft_.addResult(step,
                     strided(found->result.id, found->result.dtype, layout.get_dims(), strides));
    step.kernel = {[count, scale = found->scale, zero = found->zero_point](auto from, auto to) {
                     const auto* numbers = static_cast<const float*>(from[0]);
                     auto* result = static_cast<uint8_t*>(to[0]);
                     constexpr int64_t kForOne = 1 << 13;
                     at::parallel_for(0, count, kForOne, [&](int64_t first, int64_t last) {
                       vector_loops::kernels().toBytes(numbers + first, last - first, scale, zero,
                                                       result + first);
                     });
                   },
                   "reorder", "llga_quantize"};
    draft_.plan->steps.push_back(std::move(step));
    draft_.plan->takes_non_finite = true;
    return true;
  }

  // A mean over the pixels of channels-last images in 8 bit. False for any other partition.
  bool quantizedMean(const Ops& ops) {
    const auto found = llga::quantizedMean(ops, draft_.lowered);
    return found && addOfImages(found->data, found->result,
                                {[kernel = found->kernel](auto from, auto to) {
                                   kernel.run(from[0], to[0]);
                                 },
                                 "reduction", "llga_reduction"});
  }

  // A max pooling of 8-bit channels-last images. False for any other partition.
  bool quantizedMaxPool(const Ops& ops) {
    const auto found = llga::quantizedMaxPool(ops);
    return found && addOfImages(found->data, found->result,
                                {[kernel = found->kernel](auto from, auto to) {
                                   kernel.run(static_cast<const uint8_t*>(from[0]),
                                              static_cast<uint8_t*>(to[0]));
                                 },
                                 "pooling", "llga_max_pool"});
  }

  // A step that makes channels-last images, of one pixel maybe, of others. False if they are not.
  bool addOfImages(const Operand& data, const Operand& result, Plan::Kernel kernel) {
    const auto strides = canonicalStrides(*result.sizes, channelsLastStrides(*result.sizes));
    if (!draft_.knownSlot(data.id) || !isChannelsLast(draft_.inputLayout(data.id), data) ||
        !draft_.mayHaveStrides(result.id, strides)) {
      return false;
    }
    Plan::Step step;
    bindData(step, data);
    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
    step.kernel = std::move(kernel);
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // A mean, sum or norm over dimensions that lie side by side. False for any other partition.
  bool reduction(const Ops& ops) {
    const auto found = llga::reduction(ops);
    if (!found || !draft_.knownSlot(found->data.id)) {
      return false;
    }
    const auto& result = found->result;
    Reduction kernel{found->type, found->kind, 1, 1, 1};
    const auto kept = rowsOf(draft_.inputLayout(found->data.id), found->axes, kernel);
    if (kept.empty()) {
      return false;
    }
    const auto strides = keptStrides(kept, found->axes, *result.sizes);
    if (!draft_.mayHaveStrides(result.id, strides)) {
      return false;
    }
    Plan::Step step;
    bindData(step, found->data);
    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, strides));
    step.kernel = {[kernel](auto from, auto to) { kernel.run(from[0], to[0]); }, "reduction",
                   "llga_reduction"};
    draft_.plan->steps.push_back(std::move(step));
    return true;
  }

  // One step for a group that resizes images, behind another one if these lie in an order that the
  // kernel does not take.
  void resampling(FoundResampling found) {
    using Order = Resampling::Order;
    auto data = locatedDense(found.data);
    const auto sizes = data.second.get_dims();
    const auto facts = draft_.request.facts->tensor(found.result);
    const bool any = draft_.request.any_layout[draft_.group_outputs.at(found.result->unique())];
    const auto liesLast = [](const Shape& of, const Shape& strides) {
      return areSameStrides(of, strides, pixelStrides(of));
    };
    const bool last = liesLast(sizes, data.second.get_strides());
    const auto result = *facts.sizes;
    const bool to_last = any ? last : liesLast(result, *facts.strides);
    const auto rows = c10::TensorType::contiguousStridesOf(result);
    if (!to_last && !any && !areSameStrides(result, *facts.strides, rows)) {
      throw CompileError{"resized images that lie in an unusual order"};
    }
    const auto type = *facts.dtype;
    const bool by_rows = areSameStrides(sizes, data.second.get_strides(),
                                        c10::TensorType::contiguousStridesOf(sizes));
    if (to_last && !last) {
      data = copied(data, strided(found.data->unique(), type, sizes, pixelStrides(sizes)), type);
    } else if (!last && !by_rows) {
      data = copied(data, found.data);
    }
    Plan::Step step;
    step.inputs.push_back(data);
    draft_.addResult(
        step, strided(found.result->unique(), type, result, to_last ? pixelStrides(result) : rows));
    addResampling(std::move(step), std::move(found.kernel),
                  to_last || last ? Order::channels_last : Order::planes,
                  to_last ? Order::channels_last : Order::planes);
    draft_.plan->takes_non_finite = true;
  }

  // A step that resizes images, the result of which lies in planes, or that have one channel:
  // oneDNN has no such kernel, or a slow one. False for any other partition.
  bool resampling(const Ops& ops) {
    using Order = Resampling::Order;
    auto kernel = llga::resampling(ops);
    const auto& data = ops.front()->inputs()[0];
    if (!kernel || !draft_.knownSlot(data.id)) {
      return false;
    }
    const auto& result = ops.front()->outputs()[0];
    const auto rows = c10::TensorType::contiguousStridesOf(*result.sizes);
    const auto layout = draft_.inputLayout(data.id);
    const bool one = (*data.sizes)[1] == 1;
    const bool is =
        one ? isContiguous(layout) : isChannelsLast(layout, data) && !mayBeChannelsLast(result);
    if (!is || !draft_.mayHaveStrides(result.id, rows)) {
      return false;
    }
    Plan::Step step;
    bindData(step, data);
    draft_.addResult(step, strided(result.id, result.dtype, *result.sizes, rows));
    addResampling(std::move(step), std::move(*kernel), one ? Order::planes : Order::channels_last,
                  Order::planes);
    return true;
  }

  void addResampling(Plan::Step step, Resampling kernel, Resampling::Order from,
                     Resampling::Order to) {
    step.kernel = {[kernel = std::move(kernel), from, to](auto source, auto results) {
                     kernel.run(source[0], from, results[0], to);
                   },
                   "resampling", "llga_resampling"};
    draft_.plan->steps.push_back(std::move(step));
  }

  // One step for a group that is a variance or a standard deviation, behind another one if the
  // dimensions that are reduced do not lie side by side.
  void variance(const FoundVariance& found) {
    auto data = located(found.data);
    auto kernel = found.kernel;
    auto kept = rowsOf(data.second, found.axes, kernel);
    const auto facts = draft_.request.facts->tensor(found.result);
    const auto& sizes = *facts.sizes;
    const bool any = draft_.request.any_layout[draft_.group_outputs.at(found.result->unique())];
    const auto mayBe = [&](const Shape& strides) {
      return any || areSameStrides(sizes, *facts.strides, strides);
    };
    const auto type = *facts.dtype;
    if (kept.empty() || !mayBe(keptStrides(kept, found.axes, sizes))) {
      const auto of = data.second.get_dims();
      data = copied(data, strided(found.data->unique(), type, of, innermost(of, found.axes)), type);
      kernel = found.kernel;
      kept = rowsOf(data.second, found.axes, kernel);
    }
    const auto strides = keptStrides(kept, found.axes, sizes);
    if (!mayBe(strides)) {
      throw CompileError{"a variance whose result lies in an unusual order"};
    }
    Plan::Step step;
    step.inputs.push_back(data);
    draft_.addResult(step, strided(found.result->unique(), type, sizes, strides));
    step.kernel = {[kernel](auto from, auto to) { kernel.run(from[0], to[0]); }, "reduction",
                   "llga_reduction"};
    draft_.plan->takes_non_finite = true;  // the kernel looks at its result
    draft_.plan->steps.push_back(std::move(step));
  }

  // Those of dense memory in which these dimensions lie side by side, behind all others.
  static Shape innermost(const Shape& sizes, const Shape& axes) {
    Shape strides(sizes.size(), 1);
    int64_t step = 1;
    for (const bool reduced : {true, false}) {
      for (auto i = sizes.size(); i-- > 0;) {
        if ((std::count(axes.begin(), axes.end(), i) != 0) == reduced) {
          strides[i] = step;
          step *= sizes[i];
        }
      }
    }
    return strides;
  }

  // Of a reduction's result, from those that rowsOf() gives.
  static Shape keptStrides(const Shape& kept, const Shape& axes, const Shape& sizes) {
    Shape strides;
    const bool same_rank = sizes.size() == kept.size();
    for (size_t i = 0; i < kept.size(); ++i) {
      if (same_rank || std::count(axes.begin(), axes.end(), i) == 0) {
        strides.push_back(kept[i]);
      }
    }
    return canonicalStrides(sizes, strides);
  }

  // Sets images, rows and columns of the reduction. Returns the strides of the dimensions when
  // those of the axes are gone; none (empty) if the data is not dense, or the axes do not lie side
  // by side.
  static Shape rowsOf(const Layout& data, const Shape& axes, Reduction& kernel) {
    if (data.get_layout_type() != LayoutType::strided) {
      return {};
    }
    const auto sizes = data.get_dims();
    const auto strides = data.get_strides();
    std::vector<size_t> inward;  // dimensions of more than one, from the innermost out
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != 1) {
        inward.push_back(i);
      }
    }
    std::sort(inward.begin(), inward.end(),
              [&](size_t a, size_t b) { return strides[a] < strides[b]; });
    Shape kept(sizes.size(), 1);
    int64_t step = 1;
    for (const auto i : inward) {
      if (strides[i] != step) {
        return {};
      }
      step *= sizes[i];
      if (std::count(axes.begin(), axes.end(), i) != 0) {
        if (kernel.images != 1) {
          return {};
        }
        kernel.rows *= sizes[i];
      } else {
        kept[i] = kernel.columns * kernel.images;
        (kernel.rows == 1 ? kernel.columns : kernel.images) *= sizes[i];
      }
    }
    return kernel.rows != 1 ? kept : Shape{};
  }

  // A group that is a squeeze and excitation of channels-last images: one step, by a kernel of our
  // own. False if the group or its data is anything else.
  bool squeezeExcitation() {
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

  // Contiguous images, copied to channels last by a step: where they will be.
  std::pair<Slot, Layout> interleaved(const Layout& from) {
    constexpr int64_t kPixels = 1 << 13;  // worth a thread
    const auto sizes = from.get_dims();
    const Layout result(from.get_id(), from.get_data_type(), sizes, channelsLastStrides(sizes));
    const auto numbers = c10::multiply_integers(sizes);
    const auto bytes = static_cast<int64_t>(from.get_mem_size()) / numbers;
    Plan::Step step;
    bind(step, *draft_.knownSlot(from.get_id()), from);
    step.outputs.emplace_back(draft_.temporary(result), result);
    step.kernel = {
        [images = sizes[0], planes = sizes[1], pixels = sizes[2] * sizes[3], bytes](auto source,
                                                                                    auto target) {
          const auto* from = static_cast<const char*>(source[0]);
          auto* to = static_cast<char*>(target[0]);
          at::parallel_for(0, images * pixels, kPixels, [&](int64_t first, int64_t last) {
            while (first < last) {  // a part of one image after the other
              const auto count = std::min(last - first, pixels - first % pixels);
              const auto image = first / pixels * planes * pixels;
              vector_loops::kernels().interleave(from + (image + first % pixels) * bytes, planes,
                                                 pixels, count, bytes, to + first * planes * bytes);
              first += count;
            }
          });
        },
        "reorder", "llga_interleave"};
    draft_.plan->steps.push_back(std::move(step));
    return draft_.plan->steps.back().outputs[0];
  }

  // What the batch norm multiplies each channel with, and what it adds then; nothing if its
  // parameters are no constants.
  std::optional<std::pair<std::vector<float>, std::vector<float>>> scaleAndShift(
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

 private:
  PlanDraft& draft_;
};

}  // namespace

bool addUnlowered(PlanDraft& draft) {
  const auto& subgraph = *draft.request.subgraph;
  const auto& facts = *draft.request.facts;
  OwnSteps steps(draft);
  if (const auto shuffle = findShuffle(subgraph, facts)) {
    steps.channelShuffle(*shuffle);
  } else if (const auto attention = findAttention(draft.request)) {
    steps.attention(*attention);
  } else if (const auto group_norm = findGroupNorm(subgraph, facts)) {
    steps.groupNorm(*group_norm);
  } else if (const auto rms_norm = findRmsNorm(subgraph, facts)) {
    steps.rmsNorm(*rms_norm);
  } else if (const auto rotary = findRotary(subgraph, facts)) {
    steps.rotary(*rotary);
  } else if (const auto layers = findRecurrent(subgraph, facts)) {
    steps.recurrent(*layers);
  } else if (const auto lookup = findLookup(subgraph, facts)) {
    steps.lookup(*lookup);
  } else if (const auto variance = findVariance(subgraph, facts)) {
    steps.variance(*variance);
  } else if (auto resampling = findResampling(subgraph, facts)) {
    steps.resampling(std::move(*resampling));
  } else {
    return false;
  }
  return true;
}

bool isUnlowered(const CompileRequest& request) {
  const auto& subgraph = *request.subgraph;
  const auto& facts = *request.facts;
  return findShuffle(subgraph, facts) || isOwnAttentionGroup(subgraph) ||
         findGroupNorm(subgraph, facts) || findRmsNorm(subgraph, facts) ||
         findRotary(subgraph, facts) || findRecurrent(subgraph, facts) ||
         findLookup(subgraph, facts) || findVariance(subgraph, facts) ||
         findResampling(subgraph, facts);
}

bool addOwnGroup(PlanDraft& draft) {
  OwnSteps steps(draft);
  return steps.productAndMore() || steps.roundedLayerNorm() || steps.concatAffine() ||
         steps.expansion() || steps.quantizedBlock() || steps.squeezeExcitation() ||
         steps.quantizedExcitation() || steps.affineSum() || steps.gate() || steps.quantization() ||
         steps.wholeActivation() || steps.wholePointwise();
}

void addCopiesWithoutGaps(PlanDraft& draft) {
  OwnSteps steps(draft);
  for (const auto& op : draft.lowered.ops) {
    for (const auto& input : op.inputs()) {
      const auto found = draft.group_inputs.find(input.id);
      if (found != draft.group_inputs.end() && draft.slots.count(input.id) == 0 && input.sizes &&
          hasGaps(*input.sizes, draft.request.input_strides[found->second]) &&
          !steps.readsWithGaps(input)) {
        steps.replaceByCopy(input);
      }
    }
  }
}

std::pair<Slot, Layout> addInterleaved(PlanDraft& draft, const Layout& images) {
  return OwnSteps(draft).interleaved(images);
}

bool addOwnStep(PlanDraft& draft, const Ops& partition, Way way) {
  OwnSteps steps(draft);
  const bool usual = way == Way::usual;
  return (usual &&
          (steps.groupedConvolution(partition) || steps.depthwise(partition) ||
           steps.volume(partition) || steps.direct(partition) || steps.transposed(partition))) ||
         (usual && (steps.batchNorm(partition) || steps.concat(partition) ||
                    steps.concatOfRows(partition) || steps.reduction(partition) ||
                    steps.softmax(partition) || steps.resampling(partition))) ||
         (usual && (steps.quantizedLinear(partition) || steps.quantizedConvolution(partition) ||
                    steps.quantizedMean(partition) || steps.quantizedMaxPool(partition) ||
                    steps.narrowLinear(partition) || steps.narrowConvolution(partition))) ||
         steps.winograd(partition, way) || (usual && steps.convolutionOfPlanes(partition)) ||
         steps.linear(partition, way) || (usual && steps.product(partition)) ||
         steps.activation(partition) || (usual && steps.pointwise(partition));
}

}  // namespace llga
