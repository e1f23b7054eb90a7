#include "jit/onednn/runtime/steps/product_steps.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <tuple>

#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/own_pointwise.h"
#include "jit/onednn/runtime/releasable_weights.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

bool ProductSteps::linear(const Ops& ops, Way way) {
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
  bindDataRows(step, found->image, found->data);
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
                     kernel.run({source, from[1], data(bias), data(addend), result, data(affine[0]),
                                 data(affine[1]), data(factor)});
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

bool ProductSteps::convolutionOfPlanes(const Ops& ops) {
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

bool ProductSteps::product(const Ops& ops) {
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

std::optional<MatrixProduct> ProductSteps::kernelOf(const FoundProduct& found) const {
  const auto& sizes = *found.result.sizes;
  const auto before = found.before ? numberOf(*found.before) : 1;
  const auto behind = found.behind ? numberOf(*found.behind) : 1;
  const auto a = matrixStrides(found.a, found.transpose_a, sizes);
  const auto b = matrixStrides(found.b, found.transpose_b, sizes);
  if (!isStrict(found.a) || !before || !behind || !a || !b || c10::multiply_integers(sizes) == 0 ||
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

std::optional<float> ProductSteps::numberOf(const FoundProduct::Factor& factor) const {
  const auto number = draft_.constantTensor(factor.number.id).item<float>();
  const auto reciprocal = 1 / number;
  return !factor.divides             ? std::optional(number)
         : std::isfinite(reciprocal) ? std::optional(reciprocal)
                                     : std::nullopt;
}

std::optional<MatrixProduct::Matrix> ProductSteps::matrixStrides(const Operand& operand,
                                                                 bool transposed,
                                                                 const Shape& sizes) const {
  const auto layout = draft_.inputLayout(operand.id);
  if (layout.get_layout_type() != Layout::layout_type::strided) {
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

bool ProductSteps::narrowLinear(const Ops& ops) {
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
  // A row is read as its weight lies; so all numbers of an image are, plane by plane.
  const bool planes = image && kernel.isRow();
  const auto matrix = found->outputs_last ? weight
                      : planes            ? weight.flatten(1).t()
                                          : matrixOf(weight);
  Plan::Step step;
  bindDataRows(step, image && !planes, found->data);
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

bool ProductSteps::takesGaps(const Ops& ops) const {
  const auto found = llga::product(ops, draft_.lowered);
  return found && kernelOf(*found);
}

}  // namespace llga
