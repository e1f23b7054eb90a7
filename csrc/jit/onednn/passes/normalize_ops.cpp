// Spells composite ops in ops that the op table knows.
//
// 1. nn.MultiheadAttention's inference kernel, for self-attention whose weights nobody reads:
//      %y, %w = aten::_native_multi_head_attention(%x, %x, %x, ...)
//    -> linear (query, key and value in one) -> split heads -> scaled_dot_product_attention, with a
//       mask of booleans llga's (ir.h) -> join heads -> linear
// 2. nn.TransformerEncoderLayer's inference kernel: attention as above, layer norms,
//    residual adds and the feed-forward part, each as its own op.
// 3. aten::dropout outside training is its input.
// 4. aten::cat of one tensor, where nobody could tell the copy from the tensor, is the tensor.
// 5. aten::slice of all there is (x[:]) is the tensor.
// 6. Arithmetic on sizes, which tracing records on 0-dim tensors, is arithmetic on integers:
//      aten::Int(aten::floor_divide(prim::NumToTensor(%n), 2))  ->  aten::floordiv(%n, 2)
// 7. GELU's tanh form, however it is spelled, of what a product with constant floats computes:
//      0.5 * %x * (1 + tanh(0.79788 * (%x + 0.044715 * pow(%x, 3))))  ->  aten::gelu(%x, "tanh")
//    Also of a cast to float32 by TorchScript's autocast, which casts each operand then.
// 8. torch.einsum of two tensors that is a product of matrices is llga::einsum (ir.h) of operands
//    whose last two dimensions are the matrices':
//      einsum("bihd, bjhd -> bhij", [%q, %k])
//    ->
//      llga::einsum(permute(%q, [0, 2, 1, 3]), permute(%k, [0, 2, 1, 3]), True,
//                   "bhid,bhjd->bhij")
//    One of a tensor and a constant one is a linear layer, or where they have dimensions in common
//    beside what is summed, and the tensor more, aten::matmul:
//      einsum("btd, edf -> ebtf", [%x, %w])
//    ->
//      permute(unflatten(linear(%x, %rows), -1, [e, f]), [2, 0, 1, 3])
// 9. aten::prelu with one constant slope for all channels is aten::leaky_relu.
//
// Ops that are several oneDNN Graph ops but one aten op (silu, scaled_dot_product_attention, ...)
// are not rewritten here: the op table lowers them as they stand, so there is nothing to undo.
#include <ATen/ops/einsum.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>
#include <fmt/format.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <string>

#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::WithInsertPoint;
namespace aten = torch::jit::aten;

Symbol attentionKind() { return Symbol::fromQualString("aten::_native_multi_head_attention"); }

Symbol encoderLayerKind() { return Symbol::fromQualString("aten::_transformer_encoder_layer_fwd"); }

// Inserts aten nodes at the graph's insert point, each with the source range of `origin`.
class Builder {
 public:
  explicit Builder(Node* origin) : origin_(origin), graph_(*origin->owningGraph()) {}

  Value* op(const char* name, const std::vector<Value*>& inputs, const char* space = "aten") {
    auto* node = graph_.insertNode(
        graph_.create(Symbol::fromQualString(fmt::format("{}::{}", space, name)), inputs));
    node->setSourceRange(origin_->sourceRange());
    node->setScope(origin_->scope());
    TORCH_INTERNAL_ASSERT(node->maybeSchema() != nullptr, "no schema for ", space, "::", name);
    return node->output();
  }
  Value* constant(const c10::IValue& value) { return graph_.insertConstant(value); }
  Value* ints(const std::vector<int64_t>& values) { return constant(c10::List<int64_t>(values)); }
  std::vector<Value*> unpack(Value* list, size_t count) {
    auto* node = graph_.insertNode(graph_.createListUnpack(list, count));
    return {node->outputs().begin(), node->outputs().end()};
  }

  Value* linear(Value* x, Value* weight, Value* bias) { return op("linear", {x, weight, bias}); }

  Value* layerNorm(Value* x, int64_t width, Value* weight, Value* bias, Value* eps) {
    return op("layer_norm", {x, ints({width}), weight, bias, eps, constant(false)});
  }

  Value* add(Value* a, Value* b) { return op("add", {a, b, constant(1)}); }

  // `mask` is added to scores; null if there is none.
  Value* selfAttention(Value* x, int64_t width, int64_t heads, Value* qkv_weight, Value* qkv_bias,
                       Value* out_weight, Value* out_bias, Value* mask) {
    const auto type = x->type()->cast<c10::TensorType>();
    const auto known = type ? type->sizes().concrete_sizes() : std::nullopt;
    constexpr size_t kRank = 3;
    const bool sized = known && known->size() == kRank;
    const int64_t batch = sized ? (*known)[0] : 0;
    const int64_t tokens = sized ? (*known)[1] : 0;
    const int64_t size = width / heads;
    const auto as = [&](Value* value, const std::vector<int64_t>& sizes,
                        const std::vector<int64_t>& strides) {
      if (sized) {
        value->setType(type->withSizesStrides(sizes, strides));
      }
      return value;
    };
    const int64_t row = 3 * width;
    auto* qkv = as(linear(x, qkv_weight, qkv_bias), {batch, tokens, row}, {tokens * row, row, 1});
    auto* split = as(op("unflatten", {qkv, constant(-1), ints({3, heads, size})}),
                     {batch, tokens, 3, heads, size}, {tokens * row, row, width, size, 1});
    auto* by_part = as(op("permute", {split, ints({2, 0, 3, 1, 4})}),
                       {3, batch, heads, tokens, size}, {width, tokens * row, size, row, 1});
    auto* parts_list = op("unbind", {by_part, constant(0)});
    parts_list->setType(c10::ListType::ofTensors());
    auto parts = unpack(parts_list, 3);
    for (auto* part : parts) {
      as(part, {batch, heads, tokens, size}, {tokens * row, size, row, 1});
    }
    auto* attended =
        op("scaled_dot_product_attention",
           {parts[0], parts[1], parts[2], mask != nullptr ? mask : constant(c10::IValue()),
            constant(0.0), constant(false), constant(c10::IValue()), constant(false)},
           mask != nullptr ? "llga" : "aten");
    as(attended, {batch, heads, tokens, size}, {tokens * width, size, width, 1});
    auto* by_token = as(op("transpose", {attended, constant(1), constant(2)}),
                        {batch, tokens, heads, size}, {tokens * width, width, size, 1});
    const auto rows = [&](Value* value) {
      return as(value, {batch, tokens, width}, {tokens * width, width, 1});
    };
    auto* joined = rows(op("flatten", {by_token, constant(2), constant(3)}));
    return rows(linear(joined, out_weight, out_bias));
  }

 private:
  Node* origin_;
  Graph& graph_;
};

// Which values are written to, of those that the graph had at the first question.
class Writers {
 public:
  explicit Writers(const GraphPtr& graph) : graph_(graph) {}

  bool write(const Value* value) {
    if (aliases_ == nullptr) {
      aliases_ = std::make_unique<torch::jit::AliasDb>(graph_);
    }
    return aliases_->hasWriters(value);
  }

 private:
  const GraphPtr& graph_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;
};

template <typename T>
std::optional<T> known(const Node* node, const char* name) {
  const auto index = node->schema().argumentIndexWithName(name);
  const auto value = torch::jit::toIValue(node->input(static_cast<size_t>(*index)));
  if (!value || value->isNone()) {
    return std::nullopt;
  }
  return value->to<T>();
}

Value* in(Node* node, const char* name) { return node->namedInput(name); }

// Whether a mask of floats is 0 or minus infinity everywhere, so that it may be added to scores:
// the kernels of torch.nn leave out what is not 0. As nn.MultiheadAttention makes it of booleans.
// (A sum of two is not: a group would have it, which is watched for infinities.)
bool isZeroOrMinusInfinity(const Value* mask) {
  for (;;) {
    const auto constant = constantTensor(mask);
    if (constant.defined()) {
      const auto infinite = constant.eq(-std::numeric_limits<double>::infinity());
      return constant.is_floating_point() && infinite.logical_or(constant.eq(0)).all().item<bool>();
    }
    const auto* node = mask->node();
    if (isIdentity(node) || movesNumbers(node) || node->kind() == aten::expand) {
      mask = node->input(0);
      continue;
    }
    const auto value =
        node->kind() == aten::masked_fill ? torch::jit::toIValue(node->input(2)) : std::nullopt;
    return value && value->isDouble() &&
           value->toDouble() == -std::numeric_limits<double>::infinity() &&
           behind(node->input(0))->node()->kind() == aten::zeros_like;
  }
}

// What is added to scores of heads in the place of the mask of nn's kernels; nullopt if that can't
// be told, as of one that is written to. Null for none.
std::optional<Value*> addedMask(Node* node, Writers& writers) {
  auto* mask = in(node, "mask");
  if (mask->mustBeNone()) {
    return nullptr;
  }
  const auto type = known<int64_t>(node, "mask_type");
  constexpr int64_t kOfKeys = 1;  // batch x keys, else queries x keys with or without others before
  if (!type || !isTensor(mask) || !isZeroOrMinusInfinity(mask) || writers.write(mask)) {
    return std::nullopt;
  }
  if (*type != kOfKeys) {
    return mask;
  }
  const WithInsertPoint guard(node);
  Builder b(node);
  return b.op("unsqueeze", {b.op("unsqueeze", {mask, b.constant(1)}), b.constant(1)});
}

void registerAttention() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? "
      "attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool "
      "enable_gqa=False) -> Tensor",
      [](torch::jit::Stack& stack) {
        constexpr size_t kOptions = 4;
        torch::jit::drop(stack, kOptions);  // none that is made here has any
        const auto mask = torch::jit::pop(stack).toTensor();
        const auto value = torch::jit::pop(stack).toTensor();
        const auto key = torch::jit::pop(stack).toTensor();
        const auto query = torch::jit::pop(stack).toTensor();
        const auto scale = 1 / std::sqrt(static_cast<double>(query.size(-1)));
        auto scores = at::matmul(query * scale, key.transpose(-2, -1));
        scores.add_(mask);  // in the scores' type: 0 and minus infinity are in any
        torch::jit::push(stack, at::matmul(at::softmax(scores, -1), value));
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

bool splitAttention(Node* node, Writers& writers) {
  auto* x = in(node, "query");
  const auto width = known<int64_t>(node, "embed_dim");
  const auto heads = known<int64_t>(node, "num_head");
  const auto mask = addedMask(node, writers);
  if (x != in(node, "key") || x != in(node, "value") || !mask || !width || !heads || *heads == 0 ||
      node->output(1)->hasUses()) {
    refuse(node, qualifiedName(node) +
                     ": only self-attention is split, with a mask made of booleans or none, whose "
                     "weights nobody reads");
    return false;
  }
  const WithInsertPoint guard(node);
  Builder b(node);
  node->output(0)->replaceAllUsesWith(b.selfAttention(x, *width, *heads, in(node, "qkv_weight"),
                                                      in(node, "qkv_bias"), in(node, "proj_weight"),
                                                      in(node, "proj_bias"), *mask));
  return true;
}

bool splitEncoderLayer(Node* node, Writers& writers) {
  const auto width = known<int64_t>(node, "embed_dim");
  const auto heads = known<int64_t>(node, "num_heads");
  const auto gelu = known<bool>(node, "use_gelu");
  const auto norm_first = known<bool>(node, "norm_first");
  const auto mask = addedMask(node, writers);
  if (!mask || !width || !heads || *heads == 0 || !gelu || !norm_first) {
    refuse(node,
           qualifiedName(node) + ": only layers with a mask made of booleans, or none, are split");
    return false;
  }
  const WithInsertPoint guard(node);
  Builder b(node);
  const auto type = in(node, "src")->type()->cast<c10::TensorType>();
  const auto sizes = type ? type->sizes().concrete_sizes() : std::nullopt;
  const auto alike = [&](Value* value) {  // of all between sums, too
    if (sizes) {
      value->setType(type->withSizes(*sizes));
    }
    return value;
  };
  auto norm = [&](Value* x, const char* weight, const char* bias) {
    return alike(b.layerNorm(x, *width, in(node, weight), in(node, bias), in(node, "eps")));
  };
  const auto sum = [&](Value* a, Value* of) { return alike(b.add(a, of)); };
  auto attention = [&](Value* x) {
    return b.selfAttention(x, *width, *heads, in(node, "qkv_weight"), in(node, "qkv_bias"),
                           in(node, "proj_weight"), in(node, "proj_bias"), *mask);
  };
  auto feedForward = [&](Value* x) {
    auto* hidden = b.linear(x, in(node, "ffn_weight_1"), in(node, "ffn_bias_1"));
    hidden = *gelu ? b.op("gelu", {hidden, b.constant("none")}) : b.op("relu", {hidden});
    return alike(b.linear(hidden, in(node, "ffn_weight_2"), in(node, "ffn_bias_2")));
  };
  auto* x = in(node, "src");
  if (*norm_first) {
    x = sum(x, attention(norm(x, "norm_weight_1", "norm_bias_1")));
    x = sum(x, feedForward(norm(x, "norm_weight_2", "norm_bias_2")));
  } else {
    x = norm(sum(x, attention(x)), "norm_weight_1", "norm_bias_1");
    x = norm(sum(x, feedForward(x)), "norm_weight_2", "norm_bias_2");
  }
  node->output()->replaceAllUsesWith(x);
  return true;
}

bool dropDropout(Node* node) {
  const auto train = torch::jit::toIValue(node->input(2));
  if (!train || !train->isBool() || train->toBool()) {
    return false;
  }
  node->output()->replaceAllUsesWith(node->input(0));
  return true;
}

// Into a leaky ReLU, if its slope is one for all channels.
bool fixSlope(Node* node) {
  const auto slope = constantTensor(node->input(1));
  if (!slope.defined() || slope.numel() != 1 || !slope.is_floating_point()) {
    return false;
  }
  const WithInsertPoint guard(node);
  Builder b(node);
  auto* result = b.op("leaky_relu", {node->input(0), b.constant(slope.item())});
  result->setType(node->output()->type());
  node->output()->replaceAllUsesWith(result);
  return true;
}

void registerEinsum() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::einsum(Tensor a, Tensor b, bool transpose_b, str equation) -> Tensor",
      [](torch::jit::Stack& stack) {
        const auto equation = torch::jit::pop(stack).toStringRef();
        torch::jit::drop(stack, 1);
        const auto b = torch::jit::pop(stack).toTensor();
        const auto a = torch::jit::pop(stack).toTensor();
        torch::jit::push(stack, at::einsum(equation, {a, b}));
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

// An einsum of two operands that is a product of matrices, once their dimensions are in order.
struct MatrixProduct {
  std::string a;  // letters of the batch, of the result's rows, and of what is summed
  std::string b;  // of the batch, and the last two
  std::string result;
  bool transpose_b;
};

// The labels of an equation's operands and result; an ellipsis is a label of its own.
struct Labels {
  std::string a;
  std::string b;
  std::string result;
};

constexpr char kEllipsis = '.';

bool has(const std::string& labels, char label) { return labels.find(label) != std::string::npos; }

std::optional<Labels> labelsOf(std::string equation) {
  equation.erase(std::remove(equation.begin(), equation.end(), ' '), equation.end());
  const auto comma = equation.find(',');
  const auto arrow = equation.find("->");
  if (comma == std::string::npos || arrow == std::string::npos || comma > arrow) {
    return std::nullopt;
  }
  Labels labels{equation.substr(0, comma), equation.substr(comma + 1, arrow - comma - 1),
                equation.substr(arrow + 2)};
  for (auto* each : {&labels.a, &labels.b, &labels.result}) {
    if (each->compare(0, 3, "...") == 0) {
      each->replace(0, 3, 1, kEllipsis);
    }
    for (size_t i = 0; i < each->size(); ++i) {
      const auto label = (*each)[i];
      const bool known =
          std::isalpha(static_cast<unsigned char>(label)) != 0 || (label == kEllipsis && i == 0);
      if (!known || std::count(each->begin(), each->end(), label) != 1) {
        return std::nullopt;
      }
    }
  }
  return labels;
}

// Of the first operand's rows by the second one's columns.
std::optional<MatrixProduct> matrixProduct(const Labels& labels) {
  std::string batch;
  std::string left;
  std::string right;
  std::string summed;
  for (const auto label : labels.result) {
    auto& kind = !has(labels.b, label) ? left : has(labels.a, label) ? batch : right;
    kind += label;
  }
  for (const auto label : labels.a) {
    if (!has(labels.result, label)) {
      summed += label;
    }
  }
  if (left.size() != 1 || right.size() != 1 || summed.size() != 1 ||
      has(left + right + summed, kEllipsis) || labels.a.size() != batch.size() + 2 ||
      labels.b.size() != batch.size() + 2 || !has(labels.a, left[0]) || !has(labels.b, summed[0]) ||
      labels.result.find(left) > labels.result.find(right)) {
    return std::nullopt;
  }
  // What lies together in the second one stays so. The first one is by rows always: oneDNN 3.7
  // takes products of others for attention, and fails to compile it.
  const bool transpose_b = labels.b.back() != right[0];
  return MatrixProduct{batch + left + summed,
                       batch + (transpose_b ? right + summed : summed + right),
                       batch + left + right, transpose_b};
}

// Tensor types of the data type of `like`, with any strides.
c10::TypePtr ofSizes(const c10::TensorType& like, const std::vector<int64_t>& sizes) {
  return like.withSizes(sizes)->withStrides(c10::VaryingShape<c10::Stride>());
}

c10::TypePtr ofAnySizes(const c10::TensorType& like) {
  return c10::TensorType::get()->withScalarType(like.scalarType());
}

// What `permute` makes of a tensor's type.
c10::TypePtr permuted(const c10::TypePtr& type, const std::vector<int64_t>& dims) {
  const auto tensor = type->expect<c10::TensorType>();
  const auto sizes = tensor->sizes().concrete_sizes();
  if (!sizes || sizes->size() != dims.size()) {
    return ofAnySizes(*tensor);
  }
  std::vector<int64_t> in_order;
  in_order.reserve(dims.size());
  for (const auto dim : dims) {
    in_order.push_back((*sizes)[static_cast<size_t>(dim)]);
  }
  return ofSizes(*tensor, in_order);
}

// Dimensions in the order `to`; the value itself where they are.
Value* inOrder(Builder& build, Value* value, const std::string& from, const std::string& to) {
  if (from == to) {
    return value;
  }
  std::vector<int64_t> dims;
  dims.reserve(to.size());
  for (const auto label : to) {
    dims.push_back(static_cast<int64_t>(from.find(label)));
  }
  auto* result = build.op("permute", {value, build.ints(dims)});
  result->setType(permuted(value->type(), dims));
  return result;
}

// The executor looks at operands of an einsum, but not at what it gives.
c10::TypePtr productType(const Node* einsum, const MatrixProduct& product) {
  const auto a = einsum->input(0)->type()->expect<c10::TensorType>();
  const auto b = einsum->input(1)->type()->expect<c10::TensorType>();
  auto sizes = a->sizes().concrete_sizes();
  auto others = b->sizes().concrete_sizes();
  if (!sizes || !others || sizes->size() != others->size() || sizes->size() < 2) {
    return ofAnySizes(*a);
  }
  const auto columns = others->end()[product.transpose_b ? -2 : -1];
  for (size_t i = 0; i + 2 < sizes->size(); ++i) {
    (*sizes)[i] = (*sizes)[i] == 1 ? (*others)[i] : (*sizes)[i];
  }
  sizes->back() = columns;
  return ofSizes(*a, *sizes);
}

// Of an einsum of two tensors in a constant equation.
std::optional<Labels> labelsOf(const Node* einsum) {
  const auto equation = torch::jit::toIValue(einsum->input(0));
  const auto* list = einsum->input(1)->node();
  const bool known = equation && equation->isString() &&
                     list->kind() == torch::jit::prim::ListConstruct &&
                     list->inputs().size() == 2 && einsum->input(2)->mustBeNone();
  return known ? labelsOf(equation->toStringRef()) : std::nullopt;
}

bool takeEinsumApart(Node* node) {
  const auto* list = node->input(1)->node();
  auto labels = labelsOf(node);
  auto product = labels ? matrixProduct(*labels) : std::nullopt;
  const bool swapped = labels && !product;
  if (swapped) {
    std::swap(labels->a, labels->b);
    product = matrixProduct(*labels);
  }
  if (!product) {
    return false;
  }
  const bool ordered =
      labels->a == product->a && labels->b == product->b && labels->result == product->result;
  if ((!ordered || swapped) &&
      has(product->result, kEllipsis)) {  // of who knows how many dimensions
    return false;
  }
  registerEinsum();
  const WithInsertPoint guard(node);
  Builder build(node);
  auto& graph = *node->owningGraph();
  auto* same = ordered && !swapped
                   ? node->input(0)
                   : build.constant(product->a + "," + product->b + "->" + product->result);
  auto* einsum = graph.insertNode(graph.create(
      einsumKind(), {inOrder(build, list->input(swapped ? 1 : 0), labels->a, product->a),
                     inOrder(build, list->input(swapped ? 0 : 1), labels->b, product->b),
                     build.constant(product->transpose_b), same}));
  einsum->copyMetadata(node);
  einsum->output()->setType(productType(einsum, *product));
  node->output()->replaceAllUsesWith(
      inOrder(build, einsum->output(), product->result, labels->result));
  return true;
}

// An einsum of a tensor and a constant one that is a linear layer, or a product of matrices with
// some of the dimensions in common.
struct Layer {
  Value* data;
  std::string of_data;  // labels
  at::Tensor weight;
  std::string of_weight;
  std::string batch;    // labels of both and the result
  std::string rows;     // of the data and the result
  std::string outputs;  // of the weight and the result
  std::string summed;   // of both
};

std::optional<Layer> layerOf(const Node* einsum, const Labels& labels) {
  if (has(labels.a + labels.b + labels.result, kEllipsis)) {
    return std::nullopt;
  }
  const auto* list = einsum->input(1)->node();
  const auto second = constantTensor(list->input(1));
  const size_t data = second.defined() ? 0 : 1;
  Layer layer{const_cast<Value*>(list->input(data)),
              data == 0 ? labels.a : labels.b,
              second.defined() ? second : constantTensor(list->input(0)),
              data == 0 ? labels.b : labels.a,
              "",
              "",
              "",
              ""};
  if (!layer.weight.defined() || !layer.weight.is_floating_point() || layer.weight.numel() == 0 ||
      layer.weight.dim() != static_cast<int64_t>(layer.of_weight.size()) ||
      constantTensor(layer.data).defined()) {
    return std::nullopt;
  }
  // In the order of the result, as torch.einsum has them.
  for (const auto label : labels.result) {
    auto& kind = !has(layer.of_weight, label) ? layer.rows
                 : has(layer.of_data, label)  ? layer.batch
                                              : layer.outputs;
    kind += label;
  }
  for (const auto label : layer.of_data) {
    if (!has(labels.result, label)) {
      layer.summed += label;
    }
  }
  const auto kept = layer.batch + layer.summed;
  const bool known = layer.of_data.size() == kept.size() + layer.rows.size() &&
                     layer.of_weight.size() == kept.size() + layer.outputs.size() &&
                     std::all_of(layer.summed.begin(), layer.summed.end(),
                                 [&](char label) { return has(layer.of_weight, label); });
  // Else torch.einsum has the outputs first in memory.
  const bool lies_by_rows = data == 0 || labels.result == layer.batch + layer.rows + layer.outputs;
  return known && lies_by_rows && has(layer.outputs, labels.result.back()) && !layer.rows.empty() &&
                 !layer.outputs.empty() && !layer.summed.empty()
             ? std::optional(std::move(layer))
             : std::nullopt;
}

std::vector<int64_t> sizesOf(const at::Tensor& tensor, const std::string& from,
                             const std::string& labels) {
  std::vector<int64_t> sizes;
  sizes.reserve(labels.size());
  for (const auto label : labels) {
    sizes.push_back(tensor.size(static_cast<int64_t>(from.find(label))));
  }
  return sizes;
}

// A layer's data: batch, rows, and what is summed as one dimension. torch.einsum takes one number
// in the place of several.
Value* dataOf(Builder& build, const Layer& layer) {
  KnownShapes shapes;
  auto* data = layer.data;
  const auto summed = sizesOf(layer.weight, layer.of_weight, layer.summed);
  const bool known = shapes.rank(data) == layer.of_data.size() && summed.size() == 1 &&
                     layer.of_data.back() == layer.summed[0] && shapes.last(data) == summed[0];
  if (!known) {
    std::vector<int64_t> sizes;
    for (const auto label : layer.of_data) {
      const auto at = layer.summed.find(label);
      sizes.push_back(at == std::string::npos ? -1 : summed[at]);
    }
    data = build.op("expand", {data, build.ints(sizes), build.constant(false)});
    data->setType(layer.data->type());
  }
  data = inOrder(build, data, layer.of_data, layer.batch + layer.rows + layer.summed);
  if (summed.size() > 1) {
    const auto first = -static_cast<int64_t>(summed.size());
    const auto& type = *data->type()->expect<c10::TensorType>();
    data = build.op("flatten", {data, build.constant(first), build.constant(int64_t{-1})});
    data->setType(ofAnySizes(type));
  }
  return data;
}

bool makeLayerOfEinsum(Node* node) {
  const auto labels = labelsOf(node);
  const auto layer = labels ? layerOf(node, *labels) : std::nullopt;
  // With a batch, and a row that llga::einsum's operands have too, it is one of these.
  if (!layer ||
      (!layer->batch.empty() && (layer->outputs.size() != 1 || layer->rows.size() == 1))) {
    return false;
  }
  const WithInsertPoint guard(node);
  Builder build(node);
  const auto outputs = sizesOf(layer->weight, layer->of_weight, layer->outputs);
  const auto numbers = c10::multiply_integers(outputs);
  std::vector<int64_t> order;
  for (const auto label : layer->batch + layer->outputs + layer->summed) {
    order.push_back(static_cast<int64_t>(layer->of_weight.find(label)));
  }
  auto weight = layer->weight.permute(order);
  auto* data = dataOf(build, *layer);
  const auto type = ofAnySizes(*layer->data->type()->expect<c10::TensorType>());
  Value* result = nullptr;
  if (layer->batch.empty()) {
    weight = weight.reshape({numbers, -1});
    auto* none = build.constant(c10::IValue());
    result = build.op("linear", {data, build.constant(weight), none});
  } else {
    auto sizes = sizesOf(layer->weight, layer->of_weight, layer->batch);
    sizes.resize(layer->batch.size() + layer->rows.size() - 1, 1);
    sizes.insert(sizes.end(), {numbers, -1});
    result = build.op("matmul", {data, build.constant(weight.reshape(sizes).mT().contiguous())});
  }
  result->setType(type);
  if (outputs.size() > 1) {
    result = build.op("unflatten", {result, build.constant(int64_t{-1}), build.ints(outputs)});
    result->setType(type);
  }
  result = inOrder(build, result, layer->batch + layer->rows + layer->outputs, labels->result);
  node->output()->replaceAllUsesWith(result);
  return true;
}

// DenseNets begin each block with one.
bool dropCatOfOne(Node* node) {
  const auto* list = node->input(0)->node();
  if (list->kind() != torch::jit::prim::ListConstruct || list->inputs().size() != 1) {
    return false;
  }
  const torch::jit::AliasDb aliases(node->owningGraph()->shared_from_this());
  auto* item = list->input(0);
  if (aliases.hasWriters(list) || aliases.hasWriters(item) || aliases.hasWriters(node->output()) ||
      aliases.mayContainAlias(node->output(), node->owningGraph()->outputs())) {
    return false;
  }
  node->output()->replaceAllUsesWith(item);
  return true;
}

// Integers that a traced graph computes on 0-dim tensors.
class TracedIntegers {
 public:
  explicit TracedIntegers(Writers& writers) : writers_(writers) {}

  // Of an aten::Int.
  bool untrace(Node* node) {
    auto* tensor = node->input(0);
    if (!isTensor(tensor) || !isInteger(tensor)) {
      return false;
    }
    const WithInsertPoint guard(node);
    node->output()->replaceAllUsesWith(integer(Builder(node), tensor));
    return true;
  }

 private:
  static const char* nameFor(const Node* node) {
    switch (node->kind()) {
      case aten::floor_divide:
        return "floordiv";
      case aten::mul:
        return "mul";
      case aten::add:
        return "add";
      case aten::sub:
      case aten::rsub:
        return "sub";
      case aten::remainder:
        return "remainder";
      default:
        return nullptr;
    }
  }

  static std::optional<int64_t> constant(const Value* value) {
    const auto known = torch::jit::toIValue(value);
    if (known && known->isInt()) {
      return known->toInt();
    }
    if (!known || !known->isTensor()) {
      return std::nullopt;
    }
    const auto& tensor = known->toTensor();
    return tensor.dim() == 0 && tensor.scalar_type() == at::kLong && tensor.device().is_cpu()
               ? std::optional(tensor.item<int64_t>())
               : std::nullopt;
  }

  bool isInteger(const Value* value) {
    const auto* node = value->node();
    if (constant(value)) {
      return true;
    }
    if (node->kind() == torch::jit::prim::NumToTensor) {
      return node->input(0)->type()->isSubtypeOf(*c10::IntType::get()) && !writers_.write(value);
    }
    if (nameFor(node) == nullptr || node->inputs().size() < 2 || !isTensor(value) ||
        !isInteger(node->input(0)) || !isInteger(node->input(1))) {
      return false;
    }
    const bool scaled = node->inputs().size() > 2 &&
                        torch::jit::toIValue(node->input(2)) != c10::IValue(int64_t{1});
    const bool divided = node->kind() == aten::floor_divide || node->kind() == aten::remainder;
    return !scaled && !(divided && constant(node->input(1)).value_or(0) == 0) &&
           !writers_.write(value);
  }

  Value* integer(Builder b, const Value* value) {
    if (const auto known = constant(value)) {
      return b.constant(*known);
    }
    const auto* node = value->node();
    if (node->kind() == torch::jit::prim::NumToTensor) {
      return const_cast<Value*>(node->input(0));
    }
    std::vector<Value*> operands{integer(b, node->input(0)), integer(b, node->input(1))};
    if (node->kind() == aten::rsub) {
      std::swap(operands[0], operands[1]);
    }
    auto* result = b.op(nameFor(node), operands);
    result->setType(c10::IntType::get());
    return result;
  }

  Writers& writers_;
};

// GELU's tanh form, found by its tanh.
class TanhGelu {
 public:
  explicit TanhGelu(Writers& writers) : writers_(writers) {}

  // Of an aten::tanh. Leaves it and what else the GELU was made of without a reader.
  bool replace(Node* tanh) {
    std::vector<Value*> candidates;
    leaves(tanh->input(0), kDepth, candidates);
    for (auto* x : candidates) {
      const auto inner = polynomial(tanh->input(0), x, kDepth);
      if (!isNear(inner, {0, kScale, 0, kScale * kCubic}) || !holdsFloats(x, kDepth)) {
        continue;
      }
      const Value* gate = tanh->output();
      auto* sum = onlyReader(gate, x);
      if (sum == nullptr || !isNear(polynomial(sum->output(), gate, 1), {1, 1, 0, 0})) {
        continue;
      }
      auto* product = productFrom(sum, x);
      if (product == nullptr || writers_.write(x)) {
        continue;
      }
      const WithInsertPoint guard(product);
      Builder b(product);
      product->output()->replaceAllUsesWith(b.op("gelu", {x, b.constant("tanh")}));
      return true;
    }
    return false;
  }

 private:
  // Coefficients of 1, x, x^2, x^3.
  using Polynomial = std::array<double, 4>;

  static constexpr int kDepth = 6;                      // nodes from the tanh to x
  static constexpr double kScale = 0.7978845608028654;  // sqrt(2 / pi)
  static constexpr double kCubic = 0.044715;

  static bool isNear(const std::optional<Polynomial>& found, const Polynomial& wanted) {
    constexpr double kRelative = 3e-7;  // some write eight digits, or tensors of float32
    if (!found) {
      return false;
    }
    for (const auto i : c10::irange(wanted.size())) {
      if (std::abs((*found)[i] - wanted[i]) > kRelative * std::abs(wanted[i])) {
        return false;
      }
    }
    return true;
  }

  static std::optional<double> number(const Value* value) {
    const auto known = torch::jit::toIValue(value);
    if (!known) {
      return std::nullopt;
    }
    if (known->isInt() || known->isDouble()) {
      return known->toScalar().toDouble();
    }
    if (known->isTensor() && known->toTensor().dim() == 0 && !known->toTensor().is_complex() &&
        known->toTensor().is_cpu()) {
      return known->toTensor().item().toDouble();
    }
    return std::nullopt;
  }

  static bool isArithmetic(const Node* node) {
    return node->kind() == aten::mul || node->kind() == aten::add || node->kind() == aten::pow;
  }

  static void leaves(Value* value, int depth, std::vector<Value*>& found) {
    if (!isTensor(value) || number(value)) {
      return;
    }
    if (std::find(found.begin(), found.end(), value) == found.end()) {
      found.push_back(value);  // x may be the result of arithmetic too
    }
    if (depth > 0 && isArithmetic(value->node())) {
      leaves(value->node()->input(0), depth - 1, found);
      leaves(value->node()->input(1), depth - 1, found);
    } else if (widens(value->node())) {
      leaves(value->node()->input(0), depth, found);
    }
  }

  // What autocast casts to float32 to make `value`, where `x` is the result of such a cast: with it
  // all that is computed of it has float32.
  static const Value* beforeCasts(const Value* value, const Value* x) {
    while (widens(x->node()) && widens(value->node())) {
      value = value->node()->input(0);
    }
    return value;
  }

  // `value` in terms of `x`.
  static std::optional<Polynomial> polynomial(const Value* value, const Value* x, int depth) {
    value = beforeCasts(value, x);
    if (value == beforeCasts(x, x)) {
      return Polynomial{0, 1, 0, 0};
    }
    if (const auto known = number(value)) {
      return Polynomial{*known, 0, 0, 0};
    }
    const auto* node = value->node();
    if (depth == 0 || !isTensor(value) || !isArithmetic(node) || node->maybeSchema() == nullptr ||
        node->outputs().size() != 1) {
      return std::nullopt;
    }
    const auto a = polynomial(node->input(0), x, depth - 1);
    if (node->kind() == aten::pow) {
      const auto exponent = number(node->input(1));
      if (!a || !exponent || (*exponent != 2 && *exponent != 3)) {
        return std::nullopt;
      }
      const auto square = product(*a, *a);
      return *exponent == 2 || !square ? square : product(*square, *a);
    }
    const auto b = polynomial(node->input(1), x, depth - 1);
    if (!a || !b) {
      return std::nullopt;
    }
    if (node->kind() == aten::mul) {
      return product(*a, *b);
    }
    const auto alpha = number(node->input(2));
    if (!alpha) {
      return std::nullopt;
    }
    Polynomial sum{};
    for (const auto i : c10::irange(sum.size())) {
      sum[i] = (*a)[i] + *alpha * (*b)[i];
    }
    return sum;
  }

  static std::optional<Polynomial> product(const Polynomial& a, const Polynomial& b) {
    Polynomial result{};
    for (const auto i : c10::irange(a.size())) {
      for (const auto j : c10::irange(b.size())) {
        const auto term = a[i] * b[j];
        if (i + j < result.size()) {
          result[i + j] += term;
        } else if (term != 0) {
          return std::nullopt;
        }
      }
    }
    return result;
  }

  // The node that alone reads `value`, which becomes what it reads of it: a cast of it, maybe,
  // where beforeCasts() looks through those.
  static Node* onlyReader(const Value*& value, const Value* x) {
    for (;;) {
      if (value->uses().size() != 1) {
        return nullptr;
      }
      auto* reader = value->uses()[0].user;
      if (!widens(x->node()) || !widens(reader)) {
        return reader;
      }
      value = reader->output();
    }
  }

  // Where `sum` has been multiplied with x / 2, in whatever order; nullptr if it is not.
  static Node* productFrom(Node* sum, const Value* x) {
    std::optional<Polynomial> factor = Polynomial{1, 0, 0, 0};
    const Value* last = sum->output();
    for (int i = 0; i < 2; ++i) {
      auto* node = onlyReader(last, x);
      if (node == nullptr || node->kind() != aten::mul) {
        return nullptr;
      }
      const auto* other = node->input(node->input(0) == last ? 1 : 0);
      const auto more = polynomial(other, x, 2);
      factor = more ? product(*factor, *more) : std::nullopt;
      if (!factor) {
        return nullptr;
      }
      last = node->output();
      if (isNear(factor, {0, 0.5, 0, 0})) {
        return node;
      }
    }
    return nullptr;
  }

  // True if a call with other data could not make integers of it, which aten::gelu does not take.
  static bool holdsFloats(const Value* value, int depth) {
    const auto* node = value->node();
    if (isProduct(node)) {
      return std::any_of(node->inputs().begin(), node->inputs().end(), [](const Value* input) {
        const auto known = torch::jit::toIValue(input);
        return known && known->isTensor() && known->toTensor().is_floating_point();
      });
    }
    if (depth == 0 || node->inputs().empty()) {
      return false;
    }
    if (widens(node)) {
      return holdsFloats(node->input(0), depth);
    }
    if (node->kind() == aten::add) {
      return holdsFloats(node->input(0), depth - 1) || holdsFloats(node->input(1), depth - 1);
    }
    return (node->kind() == aten::view || node->kind() == aten::reshape) &&
           holdsFloats(node->input(0), depth - 1);
  }

  Writers& writers_;
};

// x[:, :n] has three of them if x has four dimensions. What is returned stays a tensor of its own.
bool dropWholeSlice(Node* node) {
  if (node->inputs().size() != 5 || !isTensor(node->input(0)) || !takesAll(node)) {
    return false;
  }
  const auto& uses = node->output()->uses();
  if (std::any_of(uses.begin(), uses.end(), [](const torch::jit::Use& use) {
        return use.user->kind() == torch::jit::prim::Return ||
               use.user->kind() == torch::jit::prim::TupleConstruct;
      })) {
    return false;
  }
  node->output()->replaceAllUsesWith(node->input(0));
  return true;
}

}  // namespace

void normalizeOps(const GraphPtr& graph) {
  registerAttention();
  Writers writers(graph);
  TracedIntegers integers(writers);
  std::vector<Node*> tanhs;
  walk(graph->block(), [&](Node* node) {
    bool replaced = false;
    if (node->kind() == attentionKind()) {
      replaced = splitAttention(node, writers);
    } else if (node->kind() == encoderLayerKind()) {
      replaced = splitEncoderLayer(node, writers);
    } else if (node->kind() == aten::dropout) {
      replaced = dropDropout(node);
    } else if (node->kind() == aten::prelu) {
      replaced = fixSlope(node);
    } else if (node->kind() == aten::cat) {
      replaced = dropCatOfOne(node);
    } else if (node->kind() == aten::slice) {
      replaced = dropWholeSlice(node);
    } else if (node->kind() == aten::einsum) {
      replaced = makeLayerOfEinsum(node) || takeEinsumApart(node);
    } else if (node->kind() == aten::Int) {
      replaced = integers.untrace(node);
    } else if (node->kind() == aten::tanh) {
      tanhs.push_back(node);
    }
    if (replaced) {
      node->destroy();
    }
  });
  TanhGelu gelus(writers);
  bool replaced = false;
  for (auto* tanh : tanhs) {
    replaced = gelus.replace(tanh) || replaced;
  }
  if (replaced) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
