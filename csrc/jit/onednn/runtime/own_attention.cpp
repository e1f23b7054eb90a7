#include "jit/onednn/runtime/own_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "jit/onednn/runtime/attention_blocks.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/own_kernels.h"

namespace llga {
namespace {

// Of the instruction set that oneDNN uses; null without any.
const attention::Kernels* kernels() {
  static const auto* found = [] {
    if (ownAvx2Kernels()) {
      return &attention::avx2;
    }
    const bool avx512 = ownKernels() && usesAvx512() && __builtin_cpu_supports("avx512f") != 0;
    return avx512 ? &attention::avx512 : nullptr;
  }();
  return found;
}

// bfloat16 where there is AVX-512 and no AMX: our kernel would not use its matrix units.
bool takes(std::optional<at::ScalarType> dtype) {
  return dtype == at::kFloat || (dtype == at::kBFloat16 && supportsBf16() && !usesAmx());
}

bool isAttention(const Node* node) {
  return node->kind() == torch::jit::aten::scaled_dot_product_attention;
}

// The attention that is all a group computes; null if it computes anything else.
const Node* soleAttention(const Graph& subgraph) {
  const auto* sole = soleComputation(subgraph);
  return sole != nullptr && isAttention(sole) ? sole : nullptr;
}

[[noreturn]] void refuse(const std::string& reason) {
  throw CompileError{"aten::scaled_dot_product_attention: " + reason};
}

// A tensor as one of four dimensions, the first ones of size 1 where it has fewer.
struct Operand4 {
  Shape sizes;
  Shape strides;

  Attention::Strides rows() const { return {strides[0], strides[1], strides[2]}; }
};

class Finder {
 public:
  Finder(const CompileRequest& request, const Node* node) : request_(request), node_(node) {}

  FoundAttention find() const {
    if (number("dropout_p") != 0) {
      refuse("dropout_p is not 0");
    }
    const auto q = operand("query");
    const auto k = operand("key");
    const auto v = operand("value");
    FoundAttention found{{},      named("query"), named("key"), named("value"),
                         nullptr, node_->output()};
    const auto dtype = request_.facts->tensor(node_->namedInput("query")).dtype;
    if (!takes(dtype) || request_.facts->tensor(found.result).dtype != dtype) {
      refuse("our kernel takes float32, bfloat16 on some processors, without autocast");
    }
    const auto result = described(found.result, *request_.facts->tensor(found.result).strides);
    auto& kernel = found.kernel;
    kernel.kernels = kernels();
    kernel.type = dtype == at::kFloat ? Attention::Type::float32 : Attention::Type::bfloat16;
    kernel.batch = q.sizes[0];
    kernel.heads = q.sizes[1];
    kernel.key_heads = k.sizes[1];
    kernel.queries = q.sizes[2];
    kernel.keys = k.sizes[2];
    kernel.size = q.sizes[3];
    kernel.value_size = v.sizes[3];
    const Shape keys{kernel.batch, kernel.key_heads, kernel.keys, kernel.size};
    const Shape values{kernel.batch, kernel.key_heads, kernel.keys, kernel.value_size};
    const Shape results{kernel.batch, kernel.heads, kernel.queries, kernel.value_size};
    const bool grouped = constant("enable_gqa").toBool() && kernel.heads % kernel.key_heads == 0;
    if (k.sizes != keys || v.sizes != values || result.sizes != results ||
        (kernel.heads != kernel.key_heads && !grouped)) {
      refuse(fmt::format("sizes {}, {} and {} of query, key and value do not fit", toText(q.sizes),
                         toText(k.sizes), toText(v.sizes)));
    }
    const auto scale = constant("scale");
    kernel.scale =
        static_cast<float>(scale.isNone() ? 1 / std::sqrt(static_cast<double>(kernel.size))
                                          : scale.toScalar().toDouble());
    kernel.causal = constant("is_causal").toBool();
    kernel.query_strides = q.rows();
    kernel.key_strides = k.rows();
    kernel.value_strides = v.rows();
    kernel.result_strides = result.rows();
    kernel.mask = Attention::Mask::none;
    kernel.mask_strides = {};
    if (const auto mask = request_.facts->constant(named("attn_mask")); !mask || !mask->isNone()) {
      found.mask = named("attn_mask");
      describeMask(found);
    }
    return found;
  }

 private:
  const Value* named(const char* argument) const { return node_->namedInput(argument); }

  c10::IValue constant(const char* argument) const {
    return request_.facts->constant(named(argument)).value();
  }
  double number(const char* argument) const { return constant(argument).toScalar().toDouble(); }

  Operand4 operand(const char* argument) const {
    const auto* value = named(argument);
    if (request_.facts->tensor(value).dtype != request_.facts->tensor(named("query")).dtype) {
      refuse("query, key and value have different data types");
    }
    return described(value, stridesOf(value));
  }

  // As they are in the call: a recorded run may have got copies.
  Shape stridesOf(const Value* value) const {
    const auto inputs = request_.subgraph->inputs();
    const auto input = std::find(inputs.begin(), inputs.end(), value);
    return input != inputs.end()
               ? request_.input_strides[static_cast<size_t>(input - inputs.begin())]
               : request_.facts->tensor(value).strides.value();
  }

  Operand4 described(const Value* value, const Shape& strides) const {
    constexpr size_t kRank = 4;
    const auto sizes = request_.facts->tensor(value).sizes.value();
    if (sizes.size() < 2 || sizes.size() > kRank) {
      refuse(fmt::format("our kernel takes tensors of rank 2 to 4, got sizes {}", toText(sizes)));
    }
    if (strides.back() != 1 && sizes.back() != 1) {
      refuse(fmt::format("our kernel takes rows whose numbers lie together, got strides {}",
                         toText(strides)));
    }
    return padded(sizes, strides);
  }

  static Operand4 padded(Shape sizes, Shape strides) {
    constexpr size_t kRank = 4;
    sizes.insert(sizes.begin(), kRank - sizes.size(), 1);
    strides.insert(strides.begin(), kRank - strides.size(), 0);
    return {sizes, strides};
  }

  void describeMask(FoundAttention& found) const {
    auto& kernel = found.kernel;
    const auto facts = request_.facts->tensor(found.mask);
    const auto strides = stridesOf(found.mask);
    switch (facts.dtype.value_or(at::kDouble)) {
      case at::kBool:
        kernel.mask = Attention::Mask::allowed;
        break;
      case at::kFloat:
        kernel.mask = Attention::Mask::added_float32;
        break;
      case at::kBFloat16:
        kernel.mask = Attention::Mask::added_bfloat16;
        break;
      default:
        refuse("our kernel takes masks of booleans, float32 or bfloat16");
    }
    if (kernel.mask == Attention::Mask::added_bfloat16 &&
        kernel.type != Attention::Type::bfloat16) {
      refuse("a bfloat16 mask of float32 data");  // an error in PyTorch
    }
    const Shape wanted{kernel.batch, kernel.heads, kernel.queries, kernel.keys};
    auto mask = padded(*facts.sizes, strides);
    bool fits = mask.sizes.size() == wanted.size() && mask.sizes[3] == wanted[3] &&
                (mask.strides[3] == 1 || wanted[3] == 1);
    for (size_t i = 0; fits && i < 3; ++i) {
      fits = mask.sizes[i] == wanted[i] || mask.sizes[i] == 1;
      mask.strides[i] = mask.sizes[i] == 1 ? 0 : mask.strides[i];
    }
    if (!fits) {
      refuse(
          fmt::format("our kernel takes masks whose rows are {} neighbouring numbers, got sizes "
                      "{}, strides {}",
                      kernel.keys, toText(*facts.sizes), toText(strides)));
    }
    kernel.mask_strides = mask.rows();
  }

  const CompileRequest& request_;
  const Node* node_;
};

}  // namespace

bool isOwnAttention(const Node* node, const Facts& facts) {
  if (!isAttention(node) || kernels() == nullptr ||
      facts.constant(node->namedInput("dropout_p")) != c10::IValue(0.0)) {
    return false;
  }
  const auto dtype = facts.tensor(node->namedInput("query")).dtype;
  return takes(dtype) && facts.tensor(node->namedInput("key")).dtype == dtype &&
         facts.tensor(node->namedInput("value")).dtype == dtype;
}

bool isOwnAttentionGroup(const Graph& subgraph) {
  return kernels() != nullptr && soleAttention(subgraph) != nullptr;
}

std::optional<FoundAttention> findAttention(const CompileRequest& request) {
  const auto* node = kernels() != nullptr ? soleAttention(*request.subgraph) : nullptr;
  return node != nullptr ? std::optional(Finder(request, node).find()) : std::nullopt;
}

}  // namespace llga
