// Spells composite ops in ops that the op table knows.
//
// 1. nn.MultiheadAttention's inference kernel, for self-attention without mask and weights:
//      %y, %w = aten::_native_multi_head_attention(%x, %x, %x, ...)
//    -> linear (query, key and value in one) -> split heads -> scaled_dot_product_attention
//       -> join heads -> linear
// 2. nn.TransformerEncoderLayer's inference kernel, without mask: attention as above, layer norms,
//    residual adds and the feed-forward part, each as its own op.
// 3. aten::dropout outside training is its input.
// 4. A cast to the data type that its input has by construction, as freezing under autocast leaves
//    them all over the graph, is its input.
// 5. aten::cat of one tensor, where nobody could tell the copy from the tensor, is the tensor.
//
// Ops that are several oneDNN Graph ops but one aten op (silu, scaled_dot_product_attention, ...)
// are not rewritten here: the op table lowers them as they stand, so there is nothing to undo.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

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

// What aten::_autocast_to_* casts floating-point tensors to, if that is fixed.
std::optional<at::ScalarType> autocastTarget(const Node* node) {
  static const auto kReduced = Symbol::fromQualString("aten::_autocast_to_reduced_precision");
  if (node->kind() != kReduced) {
    return std::nullopt;
  }
  const auto enabled = torch::jit::toIValue(node->input(2));
  const auto dtype = torch::jit::toIValue(node->input(4));
  if (!enabled || !enabled->isBool() || !enabled->toBool() || !dtype || !dtype->isInt()) {
    return std::nullopt;
  }
  return static_cast<at::ScalarType>(dtype->toInt());
}

bool dropDropout(Node* node) {
  const auto train = torch::jit::toIValue(node->input(2));
  if (!train || !train->isBool() || train->toBool()) {
    return false;
  }
  node->output()->replaceAllUsesWith(node->input(0));
  return true;
}

// The data types that values have whatever the inputs of the graph are; profiled types don't count.
class KnownTypes {
 public:
  std::optional<at::ScalarType> of(const Value* value) {
    const auto known = types_.find(value->unique());
    if (known != types_.end()) {
      return known->second;
    }
    const auto type = infer(value);
    types_.emplace(value->unique(), type);
    return type;
  }

 private:
  std::optional<at::ScalarType> infer(const Value* value) {
    const auto* node = value->node();
    if (const auto constant = torch::jit::toIValue(value);
        constant && constant->isTensor() && constant->toTensor().defined()) {
      return constant->toTensor().scalar_type();
    }
    if (keepsFirst(node)) {
      return of(node->input(0));
    }
    if (node->kind() == asTargetKind()) {
      return of(node->input(1));
    }
    if (const auto target = autocastTarget(node)) {
      return target;
    }
    switch (node->kind()) {
      case aten::to: {
        const auto dtype = node->matches(
                               "aten::to.dtype(Tensor(a) self, ScalarType dtype, bool "
                               "non_blocking=False, bool copy=False, MemoryFormat? "
                               "memory_format=None) -> Tensor(a)")
                               ? torch::jit::toIValue(node->input(1))
                               : std::nullopt;
        return dtype && dtype->isInt() ? std::optional(static_cast<at::ScalarType>(dtype->toInt()))
                                       : std::nullopt;
      }
      case aten::_convolution:
      case aten::conv1d:
      case aten::conv2d:
      case aten::conv3d:
      case aten::conv_transpose1d:
      case aten::conv_transpose2d:
      case aten::conv_transpose3d:
      case aten::linear:
      case aten::matmul:
      case aten::mm:
      case aten::bmm:
      case aten::addmm:
      case aten::baddbmm: {  // the operands have one data type, or the op raises
        const auto dtype = of(node->input(1));
        return dtype ? dtype : of(node->input(0));
      }
      case aten::add:
      case aten::sub:
      case aten::mul:
      case aten::div:
      case aten::maximum:
      case aten::minimum: {
        const auto dtype = of(node->input(0));
        return isTensor(node->input(1)) && of(node->input(1)) != dtype ? std::nullopt : dtype;
      }
      case aten::cat:
      case aten::stack:
        return ofAll(node->input(0));
      case torch::jit::prim::ListUnpack:
        return splits(node->input(0)->node()) ? of(node->input(0)->node()->input(0)) : std::nullopt;
      case torch::jit::prim::ConstantChunk:
        return of(node->input(0));
      default:
        return std::nullopt;
    }
  }

  // That of all elements of a list, if it is one and the same.
  std::optional<at::ScalarType> ofAll(const Value* list) {
    const auto* node = list->node();
    if (node->kind() != torch::jit::prim::ListConstruct || node->inputs().empty()) {
      return std::nullopt;
    }
    const auto first = of(node->input(0));
    for (const auto* item : node->inputs()) {
      if (of(item) != first) {
        return std::nullopt;
      }
    }
    return first;
  }

  static bool splits(const Node* node) {
    return node->kind() == aten::chunk || node->kind() == aten::split ||
           node->kind() == aten::split_with_sizes || node->kind() == aten::unbind;
  }

  // Ops on floating-point tensors whose result has the data type of their first operand, also where
  // autocast is on (pooling of volumes is not among them: eager's autocast makes floats of that).
  static bool keepsFirst(const Node* node) {
    static const auto kKinds = [] {
      std::unordered_set<Symbol> set;
      for (const auto* name :
           {"relu", "relu6", "sigmoid", "tanh", "gelu", "elu", "leaky_relu", "hardswish",
            "hardsigmoid", "hardtanh", "silu", "mish", "softplus",
            // normalization; under autocast parameters may be wider
            "batch_norm", "instance_norm", "group_norm", "layer_norm",
            // views and copies
            "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim",
            "contiguous", "clone", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "t",
            "slice", "select", "narrow", "roll", "flip", "constant_pad_nd", "channel_shuffle",
            "pixel_shuffle", "dropout",
            // pooling and sampling
            "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d",
            "adaptive_avg_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
            "upsample_bilinear2d", "upsample_bicubic2d", "scaled_dot_product_attention"}) {
        set.insert(Symbol::fromQualString(std::string("aten::") + name));
      }
      return set;
    }();
    if (kKinds.count(node->kind()) != 0) {
      return true;
    }
    switch (node->kind()) {
      case aten::softmax:
      case aten::log_softmax:
      case aten::mean:
      case aten::sum:  // other than the operand's only if a data type is asked for
        return node->hasNamedInput("dtype") &&
               node->namedInput("dtype")->type()->isSubtypeOf(*c10::NoneType::get());
      case aten::clamp:  // bounds that are tensors promote
      case aten::clamp_min:
      case aten::clamp_max:
        return std::none_of(node->inputs().begin() + 1, node->inputs().end(), isTensor);
      default:
        return false;
    }
  }

  std::unordered_map<size_t, std::optional<at::ScalarType>> types_;  // by id
};

bool dropIdentityCast(Node* node, KnownTypes& types) {
  const auto target = autocastTarget(node);
  if (!target || types.of(node->input(0)) != target) {
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

void visit(Block* block, KnownTypes& types) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    auto* node = *it++;
    for (auto* nested : node->blocks()) {
      visit(nested, types);
    }
    bool replaced = false;
    if (node->kind() == attentionKind()) {
      replaced = splitAttention(node);
    } else if (node->kind() == encoderLayerKind()) {
      replaced = splitEncoderLayer(node);
    } else if (node->kind() == aten::dropout) {
      replaced = dropDropout(node);
    } else if (node->kind() == aten::cat) {
      replaced = dropCatOfOne(node);
    } else {
      replaced = dropIdentityCast(node, types);
    }
    if (replaced) {
      node->destroy();
    } else if (node->outputs().size() == 1) {
      types.of(node->output());  // in this order, no look goes far back
    }
  }
}

}  // namespace

void normalizeOps(const GraphPtr& graph) {
  KnownTypes types;
  visit(graph->block(), types);
}

}  // namespace llga
