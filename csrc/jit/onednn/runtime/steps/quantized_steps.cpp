#include "jit/onednn/runtime/steps/quantized_steps.h"

#include <ATen/ATen.h>
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
#include "jit/onednn/runtime/own_norm.h"
#include "jit/onednn/runtime/releasable_weights.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Of two operands of 8 bit as they are.
Plan::Kernel sumOfBytes(const FoundAffineSum& found) {
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

}  // namespace

std::optional<std::pair<QuantizedSums, at::Tensor>> QuantizedSteps::parametersOf(
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

template <typename Kernel, typename Ordered>
bool QuantizedSteps::addProduct(const Ops& ops, const FoundQuantized& product, Kernel kernel,
                                const Shape& strides, const Ordered& ordered, std::string name) {
  auto parameters = parametersOf(product);
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

bool QuantizedSteps::linear(const Ops& ops) {
  auto found = llga::quantizedLinear(ops, draft_.lowered);
  if (!found) {
    return false;
  }
  const auto& product = found->product;
  const bool image = product.op->kind() == OpKind::Convolution;
  const auto strides = rowStrides(image, product.data, product.addend, product.result);
  const auto isDense = [&](const Operand& rows) {
    return isContiguous(draft_.inputLayout(rows.id));
  };
  const bool dense =
      image || (isDense(product.data) && (!product.addend || isDense(*product.addend)));
  return strides && dense &&
         addProduct(
             ops, product, std::move(found->kernel), *strides,
             [](const at::Tensor& weight) { return QuantizedLinear::ordered(weight.flatten(1)); },
             fmt::format("llga_quantized:{}", QuantizedLinear::kernels().name));
}

bool QuantizedSteps::convolution(const Ops& ops) {
  auto found = llga::quantizedConvolution(ops, draft_.lowered);
  if (!found) {
    return false;
  }
  const auto& product = found->product;
  return takesImages(ops, product.data, product.result) && mayAdd(product.addend, product.result) &&
         addProduct(
             ops, product, found->kernel, channelsLastStrides(*product.result.sizes),
             [&](const at::Tensor& weight) { return found->kernel.convolution.ordered(weight); },
             "llga_tiled:amx_int8");
}

bool QuantizedSteps::roundedLayerNorm() {
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
                   layerNormRowsToBytes(numbers(0), rows, columns, epsilon, numbers(1), numbers(2),
                                        static_cast<uint8_t*>(to[0]));
                 },
                 "layer_norm", "llga_layer_norm"};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool QuantizedSteps::block() {
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
      auto parameters = parametersOf(*found->parts[i]);
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
  step.kernel = {[kernel, weight_at, addend_at](auto from, auto to) {
                   QuantizedBlock::Data data{};
                   data.source = static_cast<const uint8_t*>(from[0]);
                   for (size_t i = 0; i < weight_at.size(); ++i) {
                     data.weights[i] = static_cast<const int8_t*>(from[weight_at[i]]);
                   }
                   data.addend =
                       addend_at != 0 ? static_cast<const uint8_t*>(from[addend_at]) : nullptr;
                   data.result = static_cast<uint8_t*>(to[0]);
                   kernel.run(data);
                 },
                 "convolution", fmt::format("llga_quantized:{}", QuantizedLinear::kernels().name)};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool QuantizedSteps::excitation() {
  auto found = llga::quantizedExcitation(draft_.lowered);
  if (!found || !isFromImages(found->data, found->result)) {
    return false;
  }
  auto squeeze = parametersOf(found->squeeze);
  auto excite = parametersOf(found->excite);
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
                 "excitation", fmt::format("llga_excitation:{}", QuantizedLinear::kernels().name)};
  draft_.plan->steps.push_back(std::move(step));
  return true;
}

bool QuantizedSteps::affineSum() {
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

std::optional<Plan::Kernel> QuantizedSteps::sumOfRows(const FoundAffineSum& found,
                                                      bool norms) const {
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

bool QuantizedSteps::quantization() {
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

bool QuantizedSteps::mean(const Ops& ops) {
  const auto found = llga::quantizedMean(ops, draft_.lowered);
  return found &&
         addOfImages(found->data, found->result,
                     {[kernel = found->kernel](auto from, auto to) { kernel.run(from[0], to[0]); },
                      "reduction", "llga_reduction"});
}

bool QuantizedSteps::maxPool(const Ops& ops) {
  const auto found = llga::quantizedMaxPool(ops);
  return found && addOfImages(found->data, found->result,
                              {[kernel = found->kernel](auto from, auto to) {
                                 kernel.run(static_cast<const uint8_t*>(from[0]),
                                            static_cast<uint8_t*>(to[0]));
                               },
                               "pooling", "llga_max_pool"});
}

bool QuantizedSteps::addOfImages(const Operand& data, const Operand& result, Plan::Kernel kernel) {
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

}  // namespace llga
