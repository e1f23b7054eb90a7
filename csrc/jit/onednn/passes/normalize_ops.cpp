// Spells composite ops in ops that the op table knows.
//
// 1. nn.MultiheadAttention's inference kernel, for self-attention without mask and weights:
//      %y, %w = aten::_native_multi_head_attention(%x, %x, %x, ...)
//    -> linear (query, key and value in one) -> split heads -> scaled_dot_product_attention
//       -> join heads -> linear
// 2. nn.TransformerEncoderLayer's inference kernel, without mask: attention as above, layer norms,
//    residual adds and the feed-forward part, each as its own op.
// 3. aten::dropout outside training is its input.
// 4. aten::cat of one tensor, where nobody could tell the copy from the tensor, is the tensor.
// 5. Arithmetic on sizes, which tracing records on 0-dim tensors, is arithmetic on integers:
//      aten::Int(aten::floor_divide(prim::NumToTensor(%n), 2))  ->  aten::floordiv(%n, 2)
//
// Ops that are several oneDNN Graph ops but one aten op (silu, scaled_dot_product_attention, ...)
// are not rewritten here: the op table lowers them as they stand, so there is nothing to undo.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include "jit/onednn/ir.h"
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

  Value* op(const char* name, const std::vector<Value*>& inputs) {
    auto* node = graph_.insertNode(
        graph_.create(Symbol::fromQualString(std::string("aten::") + name), inputs));
    node->setSourceRange(origin_->sourceRange());
    node->setScope(origin_->scope());
    TORCH_INTERNAL_ASSERT(node->maybeSchema() != nullptr, "no schema for aten::", name);
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

  Value* selfAttention(Value* x, int64_t width, int64_t heads, Value* qkv_weight, Value* qkv_bias,
                       Value* out_weight, Value* out_bias) {
    auto* qkv = linear(x, qkv_weight, qkv_bias);
    auto* split =
        op("unflatten", {qkv, constant(-1), ints({3, heads, width / heads})});  // [B, T, 3, H, D]
    auto* by_part = op("permute", {split, ints({2, 0, 3, 1, 4})});              // [3, B, H, T, D]
    auto* parts_list = op("unbind", {by_part, constant(0)});
    parts_list->setType(c10::ListType::ofTensors());
    auto parts = unpack(parts_list, 3);
    auto* attended = op("scaled_dot_product_attention",
                        {parts[0], parts[1], parts[2], constant(c10::IValue()), constant(0.0),
                         constant(false), constant(c10::IValue()), constant(false)});
    auto* by_token = op("transpose", {attended, constant(1), constant(2)});
    auto* joined = op("flatten", {by_token, constant(2), constant(3)});
    return linear(joined, out_weight, out_bias);
  }

 private:
  Node* origin_;
  Graph& graph_;
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

bool splitAttention(Node* node) {
  auto* x = in(node, "query");
  const auto width = known<int64_t>(node, "embed_dim");
  const auto heads = known<int64_t>(node, "num_head");
  const auto need_weights = known<bool>(node, "need_weights");
  if (x != in(node, "key") || x != in(node, "value") || !in(node, "mask")->mustBeNone() || !width ||
      !heads || *heads == 0 || !need_weights || *need_weights || node->output(1)->hasUses()) {
    refuse(node, qualifiedName(node) + ": only self-attention without mask and weights is split");
    return false;
  }
  const WithInsertPoint guard(node);
  Builder b(node);
  node->output(0)->replaceAllUsesWith(b.selfAttention(x, *width, *heads, in(node, "qkv_weight"),
                                                      in(node, "qkv_bias"), in(node, "proj_weight"),
                                                      in(node, "proj_bias")));
  return true;
}

bool splitEncoderLayer(Node* node) {
  const auto width = known<int64_t>(node, "embed_dim");
  const auto heads = known<int64_t>(node, "num_heads");
  const auto gelu = known<bool>(node, "use_gelu");
  const auto norm_first = known<bool>(node, "norm_first");
  if (!in(node, "mask")->mustBeNone() || !width || !heads || *heads == 0 || !gelu || !norm_first) {
    refuse(node, qualifiedName(node) + ": only layers without mask are split");
    return false;
  }
  const WithInsertPoint guard(node);
  Builder b(node);
  auto norm = [&](Value* x, const char* weight, const char* bias) {
    return b.layerNorm(x, *width, in(node, weight), in(node, bias), in(node, "eps"));
  };
  auto attention = [&](Value* x) {
    return b.selfAttention(x, *width, *heads, in(node, "qkv_weight"), in(node, "qkv_bias"),
                           in(node, "proj_weight"), in(node, "proj_bias"));
  };
  auto feedForward = [&](Value* x) {
    auto* hidden = b.linear(x, in(node, "ffn_weight_1"), in(node, "ffn_bias_1"));
    hidden = *gelu ? b.op("gelu", {hidden, b.constant("none")}) : b.op("relu", {hidden});
    return b.linear(hidden, in(node, "ffn_weight_2"), in(node, "ffn_bias_2"));
  };
  auto* x = in(node, "src");
  if (*norm_first) {
    x = b.add(x, attention(norm(x, "norm_weight_1", "norm_bias_1")));
    x = b.add(x, feedForward(norm(x, "norm_weight_2", "norm_bias_2")));
  } else {
    x = norm(b.add(x, attention(x)), "norm_weight_1", "norm_bias_1");
    x = norm(b.add(x, feedForward(x)), "norm_weight_2", "norm_bias_2");
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
  explicit TracedIntegers(const GraphPtr& graph) : graph_(graph) {}

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
        return "sub";
      default:
        return nullptr;
    }
  }

  static std::optional<int64_t> constant(const Value* value) {
    const auto known = torch::jit::toIValue(value);
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
      return node->input(0)->type()->isSubtypeOf(*c10::IntType::get()) && !isWritten(value);
    }
    if (nameFor(node) == nullptr || node->inputs().size() < 2 || !isTensor(value) ||
        !isInteger(node->input(0)) || !isInteger(node->input(1))) {
      return false;
    }
    const bool scaled = node->inputs().size() > 2 &&
                        torch::jit::toIValue(node->input(2)) != c10::IValue(int64_t{1});
    const bool divided = node->kind() == aten::floor_divide;
    return !scaled && !(divided && constant(node->input(1)).value_or(0) == 0) && !isWritten(value);
  }

  Value* integer(Builder b, const Value* value) {
    if (const auto known = constant(value)) {
      return b.constant(*known);
    }
    const auto* node = value->node();
    if (node->kind() == torch::jit::prim::NumToTensor) {
      return const_cast<Value*>(node->input(0));
    }
    auto* result = b.op(nameFor(node), {integer(b, node->input(0)), integer(b, node->input(1))});
    result->setType(c10::IntType::get());
    return result;
  }

  bool isWritten(const Value* value) {
    if (aliases_ == nullptr) {
      aliases_ = std::make_unique<torch::jit::AliasDb>(graph_);
    }
    return aliases_->hasWriters(value);
  }

  const GraphPtr& graph_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;  // of values that were there before
};

}  // namespace

void normalizeOps(const GraphPtr& graph) {
  TracedIntegers integers(graph);
  walk(graph->block(), [&](Node* node) {
    bool replaced = false;
    if (node->kind() == attentionKind()) {
      replaced = splitAttention(node);
    } else if (node->kind() == encoderLayerKind()) {
      replaced = splitEncoderLayer(node);
    } else if (node->kind() == aten::dropout) {
      replaced = dropDropout(node);
    } else if (node->kind() == aten::cat) {
      replaced = dropCatOfOne(node);
    } else if (node->kind() == aten::Int) {
      replaced = integers.untrace(node);
    }
    if (replaced) {
      node->destroy();
    }
  });
}

}  // namespace llga
