// A constant factor of each output of a linear layer or convolution becomes part of the layer's
// parameters: LayerScale (ConvNeXt, CaiT, DINOv2), or a frozen batch norm's under autocast.
//
//   %2 : Tensor = aten::linear(%x, %weight, %bias)
//   %3 : Tensor = aten::permute(%2, [0, 3, 1, 2])                  # and casts to float32
//   %4 : Tensor = aten::mul(%3, %factor)                           # %factor: 96 x 1 x 1
// ->
//   %2 : Tensor = aten::linear(%x, %scaled, %shifted)
//   %4 : Tensor = aten::permute(%2, [0, 3, 1, 2])
//
// So does one number in front of a sum: the half steps of Conformers, residuals that are scaled
// down (Inception-ResNet, EDSR).
//
// So does one number behind ReLU, and another one that is added to it: PP-HGNet's, which learns
// both.
//
//   %2 : Tensor = aten::conv2d(%x, %weight, %bias, ...)
//   %3 : Tensor = aten::relu(%2)
//   %4 : Tensor = aten::mul(%3, %factor)                           # %factor: 1
//   %5 : Tensor = aten::add(%4, %shift, %one)                      # %shift: 1
// ->
//   %2 : Tensor = aten::conv2d(%x, %scaled, %shifted, ...)
//   %5 : Tensor = aten::clamp_min(%2, 0.5)                         # clamp_max if %factor < 0
//
// Only for parameters and factors that are constants of float32, or parameters of reduced
// precision whose products become float32 in between, as they do under autocast; and only where
// nothing else reads them. Scaled parameters are rounded to the data type that they had: each
// number is off by a rounding or two.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::toIValue;
namespace aten = torch::jit::aten;

struct Folded {
  Node* product;
  Node* last;  // the multiplication, or the sum behind it
  Value* result;
  at::Tensor weight;
  at::Tensor bias;       // undefined if there is none
  bool widens = false;   // the factor makes float32 of reduced precision
  Node* relu = nullptr;  // between, if it is
  bool negative = false;
  double shift = 0;
};

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : graph_(graph) {}

  std::optional<Folded> find(Node* mul) {
    if (const auto number = numberOf(mul->input(1)); number && sumBehind(mul) != nullptr) {
      auto found = fold(mul, mul->input(0), at::full({}, *number, at::kDouble));
      if (found && found->weight.scalar_type() == at::kFloat && !written(*found)) {
        return found;
      }
    }
    if (!isTensor(mul->input(1))) {
      return std::nullopt;
    }
    for (const size_t i : {0, 1}) {
      const auto factor = constantTensor(mul->input(1 - i));
      if (!factor.defined() || factor.scalar_type() != at::kFloat) {
        continue;
      }
      auto found = fold(mul, mul->input(i), factor);
      if (!found) {
        found = foldThroughRelu(mul, mul->input(i), factor);
      }
      if (found && !written(*found)) {
        return found;
      }
    }
    return std::nullopt;
  }

 private:
  // Whether an op's result has the numbers of its first input in another order or in float32 alone.
  static bool passesOn(const Node* node) {
    return widens(node) || castsTo(node) == at::kFloat || node->kind() == aten::permute;
  }

  std::optional<Folded> fold(Node* mul, Value* result, const at::Tensor& factor) {
    std::vector<const Node*> between;
    auto* product = below(result, between)->node();
    const bool widened = !isNarrowStill(between);
    if (!isFoldable(product, widened || factor.dim() > 0)) {
      return std::nullopt;
    }
    const auto scale = scaleOf(factor, *product, constantTensor(product->input(1)), between);
    return folded({product, mul, result, {}, {}, /*widens=*/!widened}, scale, /*shift=*/0);
  }

  std::optional<Folded> foldThroughRelu(Node* mul, Value* result, const at::Tensor& factor) {
    std::vector<const Node*> behind;
    auto* relu = below(result, behind)->node();
    if (relu->kind() != aten::relu || relu->output()->uses().size() != 1) {
      return std::nullopt;
    }
    std::vector<const Node*> before;
    auto* product = below(relu->input(0), before)->node();
    const auto isOne = [&](const at::Tensor& number) {  // and adds no dimension
      const auto rank = shapes_.rank(product->output());
      const auto least = isConvolution(product) ? constantTensor(product->input(1)).dim() - 1 : 1;
      return number.defined() && number.scalar_type() == at::kFloat && number.numel() == 1 &&
             number.dim() <= static_cast<int64_t>(rank.value_or(static_cast<size_t>(least)));
    };
    const bool widened = !isNarrowStill(before) || !isNarrowStill(behind);
    if (!isFoldable(product, widened || factor.dim() > 0) || !isOne(factor)) {
      return std::nullopt;
    }
    Folded found{product, mul, result, {}, {}, /*widens=*/!widened, relu};
    double shift = 0;
    if (auto* sum = sumBehind(mul)) {
      const size_t i = constantTensor(sum->input(0)).defined() ? 0 : 1;
      const auto number = constantTensor(sum->input(i));
      if (isOne(number) && number.isfinite().all().item<bool>()) {
        found.last = sum;
        shift = number.item<double>();
      }
    }
    const auto scale = factor.reshape({1}).to(at::kDouble);
    found.negative = scale.item<double>() < 0;
    return folded(std::move(found), scale.expand({constantTensor(product->input(1)).size(0)}),
                  shift);
  }

  // What the value is in another order or precision of, read by nothing else on the way. `between`:
  // what makes it so, the last one first.
  static Value* below(Value* value, std::vector<const Node*>& between) {
    while (value->uses().size() == 1 && passesOn(value->node())) {
      between.push_back(value->node());
      value = value->node()->input(0);
    }
    return value;
  }

  static bool isNarrowStill(const std::vector<const Node*>& between) {
    return std::all_of(between.begin(), between.end(),
                       [](const Node* node) { return node->kind() == aten::permute; });
  }

  // The sum of a product, which nothing else reads, and something, cast to float32 in between or
  // not; null if there is none.
  static Node* sumBehind(const Node* mul) {
    const auto* value = mul->output();
    while (value->uses().size() == 1 && widens(value->uses()[0].user)) {
      value = value->uses()[0].user->output();
    }
    auto* sum = value->uses().size() == 1 ? value->uses()[0].user : nullptr;
    const bool is = sum != nullptr && sum->kind() == aten::add && isTensor(sum->input(1)) &&
                    sum->owningBlock() == mul->owningBlock() && intOf(sum->input(2)) == 1;
    return is ? sum : nullptr;
  }

  // Whether nothing else reads the product or its weight, and they may be changed.
  bool isFoldable(const Node* product, bool widened) const {
    if (!hasOutputs(product) || product->output()->uses().size() != 1 ||
        product->input(1)->uses().size() != 1) {
      return false;
    }
    const auto weight = constantTensor(product->input(1));
    return weight.defined() && (weight.scalar_type() == at::kFloat
                                    ? !within_autocast_
                                    : isReducedPrecision(weight.scalar_type()) && widened);
  }

  // With the parameters, or nothing where they cannot be. `scale`: of each output.
  static std::optional<Folded> folded(Folded found, const at::Tensor& scale, double shift) {
    if (!scale.defined() || !(scale.isfinite() & (scale != 0)).all().item<bool>()) {
      return std::nullopt;  // inf * 0 is not 0
    }
    const auto& product = *found.product;
    const auto weight = constantTensor(product.input(1));
    auto sizes = std::vector<int64_t>(static_cast<size_t>(weight.dim()), 1);
    sizes[0] = -1;
    found.weight = (weight.to(at::kDouble) * scale.view(sizes)).to(weight.scalar_type());
    found.shift = shift;
    if (!product.input(2)->mustBeNone()) {
      const auto bias = constantTensor(product.input(2));
      if (!bias.defined() || bias.scalar_type() != weight.scalar_type()) {
        return std::nullopt;
      }
      found.bias = (bias.to(at::kDouble) * scale + shift).to(bias.scalar_type());
    } else if (shift != 0) {
      found.bias = at::full({weight.size(0)}, shift, weight.options());
    }
    const bool finite = found.weight.isfinite().all().item<bool>() &&
                        (!found.bias.defined() || found.bias.isfinite().all().item<bool>());
    return finite ? std::optional(std::move(found)) : std::nullopt;
  }

  // A product whose weight's first dimension is its outputs.
  static bool hasOutputs(const Node* node) {
    return node->kind() == aten::linear || isConvolution(node);
  }

  // Of each output; undefined if the factor is of other dimensions of what is `between`, or makes
  // more of it.
  at::Tensor scaleOf(const at::Tensor& factor, const Node& product, const at::Tensor& weight,
                     const std::vector<const Node*>& between) {
    // Of the outputs, from the last dimension on.
    int64_t axis = product.kind() == aten::linear ? -1 : 1 - weight.dim();
    auto rank = shapes_.rank(product.output());
    for (auto it = between.rbegin(); it != between.rend(); ++it) {
      if ((*it)->kind() != aten::permute) {
        continue;
      }
      const auto order = toIValue((*it)->input(1));
      if (!order || !order->isIntList()) {
        return {};
      }
      const auto dims = order->toIntVector();
      const auto count = static_cast<int64_t>(dims.size());
      const auto from = std::find_if(dims.begin(), dims.end(), [&](int64_t dim) {
        return (dim < 0 ? dim : dim - count) == axis;
      });
      rank = dims.size();  // or it raises
      axis = from - dims.begin() - count;
    }
    const auto least = product.kind() == aten::linear ? 1 : weight.dim() - 1;
    if (factor.scalar_type() == at::kDouble) {  // a number
      return factor.expand({weight.size(0)});
    }
    if (factor.dim() > static_cast<int64_t>(rank.value_or(static_cast<size_t>(least))) ||
        -axis > factor.dim() || factor.size(axis) != weight.size(0) ||
        factor.numel() != weight.size(0)) {
      return {};
    }
    return factor.reshape({-1}).to(at::kDouble);
  }

  bool written(const Folded& folded) {
    if (aliases_ == nullptr) {
      aliases_ = std::make_unique<torch::jit::AliasDb>(graph_);
    }
    return aliases_->hasWriters(folded.product->output()) || aliases_->hasWriters(folded.result) ||
           aliases_->hasWriters(folded.last->output()) ||
           (folded.relu != nullptr && aliases_->hasWriters(folded.relu->output()));
  }

  const GraphPtr& graph_;
  bool within_autocast_ = at::autocast::is_autocast_enabled(at::kCPU);
  KnownShapes shapes_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;
};

void apply(const Folded& folded) {
  auto* graph = folded.product->owningGraph();
  const torch::jit::WithInsertPoint guard(folded.product);
  folded.product->replaceInput(1, graph->insertConstant(folded.weight));
  if (folded.bias.defined()) {
    folded.product->replaceInput(2, graph->insertConstant(folded.bias));
  }
  auto* result = folded.result;
  if (auto* relu = folded.relu; relu != nullptr && (folded.negative || folded.shift != 0)) {
    // relu(x) * factor + shift, of x * factor + shift
    const torch::jit::WithInsertPoint at_relu(relu);
    auto* bounded =
        graph->insertNode(graph->create(folded.negative ? aten::clamp_max : aten::clamp_min,
                                        {relu->input(0), graph->insertConstant(folded.shift)}));
    bounded->copyMetadata(relu);
    bounded->output()->copyMetadata(relu->output());
    relu->output()->replaceAllUsesWith(bounded->output());
    result = result == relu->output() ? bounded->output() : result;
  }
  if (folded.widens && folded.weight.scalar_type() != at::kFloat) {
    const torch::jit::WithInsertPoint before_last(folded.last);
    auto* cast = graph->insertNode(graph->create(
        fullPrecisionKind(), {result, graph->insertConstant(false), graph->insertConstant(true)}));
    cast->copyMetadata(folded.last);
    cast->output()->copyMetadata(folded.last->output());
    result = cast->output();
  }
  folded.last->output()->replaceAllUsesWith(result);
}

}  // namespace

void foldScale(const GraphPtr& graph) {
  Finder finder(graph);
  std::vector<Folded> found;
  walk(graph->block(), [&](Node* node) {
    if (node->kind() != aten::mul) {
      return;
    }
    if (auto folded = finder.find(node)) {
      found.push_back(std::move(*folded));
    }
  });
  for (const auto& folded : found) {
    apply(folded);
  }
  if (!found.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
