#include "jit/onednn/runtime/own_attention.h"

#include <ATen/TensorGeometry.h>
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

// The softmax of a group that has one, and products before and behind it; oneDNN proposes no such
// group, and attention is no other.
const Node* writtenAttention(const Graph& subgraph) {
  const Node* softmax = nullptr;
  int products = 0;
  for (const auto* node : subgraph.nodes()) {
    if (node->kind() == torch::jit::aten::softmax) {
      softmax = softmax == nullptr && products == 1 ? node : nullptr;
    }
    products += isProduct(node) ? 1 : 0;
  }
  return products == 2 ? softmax : nullptr;
}

[[noreturn]] void refuse(const std::string& reason) { throw CompileError{"attention: " + reason}; }

constexpr size_t kRank = 4;

// A tensor as one of four dimensions, the first ones of size 1 where it has fewer.
struct Operand4 {
  Shape sizes;
  Shape strides;

  Attention::Strides rows() const { return {strides[0], strides[1], strides[2]}; }
};

Operand4 padded(Shape sizes, Shape strides) {
  sizes.insert(sizes.begin(), kRank - sizes.size(), 1);
  strides.insert(strides.begin(), kRank - strides.size(), 0);
  return {sizes, strides};
}

// What both spellings of attention have in common.
class Finder {
 public:
  // `request` is null for what is known of the values alone, which may be less than all.
  Finder(const Facts& facts, const CompileRequest* request) : facts_(facts), request_(request) {}

 protected:
  TensorFacts factsOf(const Value* value) const { return facts_.tensor(value); }

  Shape sizesOf(const Value* value) const {
    const auto facts = factsOf(value);
    if (!facts.sizes) {
      refuse("unknown sizes");
    }
    return *facts.sizes;
  }

  // What is not known yet is taken to be as it should.
  template <typename T>
  bool isUnknown(const std::optional<T>& fact) const {
    return request_ == nullptr && !fact;
  }

  // As they are in the call: a recorded run may have got copies.
  Shape stridesOf(const Value* value) const {
    if (request_ == nullptr) {
      return c10::TensorType::contiguousStridesOf(sizesOf(value));  // as good as any
    }
    const auto inputs = request_->subgraph->inputs();
    const auto input = std::find(inputs.begin(), inputs.end(), value);
    return input != inputs.end()
               ? request_->input_strides[static_cast<size_t>(input - inputs.begin())]
               : factsOf(value).strides.value();
  }

  Operand4 described(const Value* value, const Shape& strides) const {
    const auto sizes = sizesOf(value);
    if (sizes.size() < 2 || sizes.size() > kRank) {
      refuse(fmt::format("our kernel takes tensors of rank 2 to 4, got sizes {}", toText(sizes)));
    }
    return padded(sizes, strides);
  }

  // Strides of rows whose numbers lie together: the value's, or those of a copy.
  Shape rowStrides(const Value* value) {
    auto sizes = sizesOf(value);
    auto strides = stridesOf(value);
    if (strides.empty() || strides.back() == 1 || sizes.back() == 1) {
      return strides;
    }
    copied_.push_back(value);
    return c10::TensorType::contiguousStridesOf(sizes);
  }

  Operand4 operand(const Value* value, at::ScalarType dtype) {
    if (factsOf(value).dtype != dtype) {
      refuse("query, key and value have different data types");
    }
    return described(value, rowStrides(value));
  }

  Operand4 resultOf(const Value* value, const Shape& strides) const {
    const auto result = described(value, strides);
    if (result.strides[3] != 1 && result.sizes[3] != 1) {
      refuse(fmt::format("our kernel makes rows whose numbers lie together, asked for strides {}",
                         toText(strides)));
    }
    return result;
  }

  at::ScalarType dtypeOf(const Value* query, const Value* result) const {
    const auto dtype = factsOf(query).dtype;
    if (!takes(dtype) || factsOf(result).dtype != dtype) {
      refuse("our kernel takes float32, bfloat16 on some processors, without autocast");
    }
    return *dtype;
  }

  // Sizes and types; `k`: by keys, whatever their strides are.
  static Attention kernelFor(at::ScalarType dtype, const Operand4& q, const Operand4& k,
                             const Operand4& v) {
    Attention kernel{};
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
    if (k.sizes != keys || v.sizes != values) {
      refuse(fmt::format("sizes {}, {} and {} of query, key and value do not fit", toText(q.sizes),
                         toText(k.sizes), toText(v.sizes)));
    }
    kernel.scale = 1;
    kernel.query_strides = q.rows();
    kernel.key_strides = k.rows();
    kernel.value_strides = v.rows();
    return kernel;
  }

  static Attention::Mask::Kind kindOfAdded(std::optional<at::ScalarType> dtype) {
    switch (dtype.value_or(at::kDouble)) {
      case at::kFloat:
        return Attention::Mask::Kind::added_float32;
      case at::kBFloat16:
        return Attention::Mask::Kind::added_bfloat16;
      default:
        refuse("our kernel takes masks of booleans, float32 or bfloat16");
    }
  }

  // Strides of a mask for scores of these sizes; 0 where it has one row for all.
  static Attention::Strides maskStrides(Operand4 mask, const Shape& scores) {
    bool fits = mask.sizes[3] == scores[3];
    for (size_t i = 0; fits && i < 3; ++i) {
      fits = mask.sizes[i] == scores[i] || mask.sizes[i] == 1;
      mask.strides[i] = mask.sizes[i] == 1 ? 0 : mask.strides[i];
    }
    if (!fits) {
      refuse(fmt::format("our kernel takes masks whose rows are {} numbers, got sizes {}",
                         scores[3], toText(mask.sizes)));
    }
    return mask.rows();
  }

  const Facts& facts_;
  const CompileRequest* request_;
  std::vector<const Value*> copied_;
};

// aten::scaled_dot_product_attention.
class NodeFinder : Finder {
 public:
  NodeFinder(const CompileRequest& request, const Node* node)
      : Finder(*request.facts, &request), node_(node) {}

  FoundAttention find() {
    if (constant("dropout_p").toScalar().toDouble() != 0) {
      refuse("dropout_p is not 0");
    }
    FoundAttention found{{}, named("query"), named("key"), named("value"), {}, {},
                         {}, node_->output()};
    const auto dtype = dtypeOf(found.query, found.result);
    found.kernel = kernelFor(dtype, operand(found.query, dtype), operand(found.key, dtype),
                             operand(found.value, dtype));
    auto& kernel = found.kernel;
    const auto result = resultOf(found.result, *factsOf(found.result).strides);
    const Shape results{kernel.batch, kernel.heads, kernel.queries, kernel.value_size};
    const bool grouped = constant("enable_gqa").toBool() && kernel.heads % kernel.key_heads == 0;
    if (result.sizes != results || (kernel.heads != kernel.key_heads && !grouped)) {
      refuse(fmt::format("{} heads of queries, {} of keys", kernel.heads, kernel.key_heads));
    }
    kernel.result_strides = result.rows();
    const auto scale = constant("scale");
    kernel.scale =
        static_cast<float>(scale.isNone() ? 1 / std::sqrt(static_cast<double>(kernel.size))
                                          : scale.toScalar().toDouble());
    kernel.causal = constant("is_causal").toBool();
    kernel.safe = true;
    if (const auto mask = facts_.constant(named("attn_mask")); !mask || !mask->isNone()) {
      describeMask(found);
    }
    found.copied = std::move(copied_);
    return found;
  }

 private:
  const Value* named(const char* argument) const { return node_->namedInput(argument); }
  c10::IValue constant(const char* argument) const {
    return facts_.constant(named(argument)).value();
  }

  void describeMask(FoundAttention& found) {
    auto& kernel = found.kernel;
    auto& mask = kernel.masks[0];
    const auto* value = named("attn_mask");
    const auto dtype = factsOf(value).dtype;
    mask.kind = dtype == at::kBool ? Attention::Mask::Kind::allowed : kindOfAdded(dtype);
    if (dtype == at::kBFloat16 && kernel.type != Attention::Type::bfloat16) {
      refuse("a bfloat16 mask of float32 data");  // an error in PyTorch
    }
    mask.strides = maskStrides(padded(sizesOf(value), rowStrides(value)),
                               {kernel.batch, kernel.heads, kernel.queries, kernel.keys});
    found.masks.push_back(value);
  }

  const Node* node_;
};

class WrittenFinder : Finder {
 public:
  WrittenFinder(const Facts& facts, const CompileRequest* request, const WrittenAttention& written)
      : Finder(facts, request), written_(written) {}

  FoundAttention find() {
    FoundAttention found{{}, written_.query, written_.key, written_.value, {}, {},
                         {}, written_.result};
    const auto dtype = dtypeOf(found.query, found.result);
    const auto q = operand(found.query, dtype);
    auto [k, across] = keys(dtype);
    found.kernel = kernelFor(dtype, q, k, operand(found.value, dtype));
    auto& kernel = found.kernel;
    if (kernel.heads != kernel.key_heads) {
      refuse("scores of broadcast heads");
    }
    kernel.key_across = across;
    kernel.safe = false;
    requireRounding();
    requireLastDimension();
    describeResult(kernel);
    describeFactors(found);
    if (written_.masks.size() > Attention::kMasks) {
      refuse(fmt::format("our kernel takes {} masks, got {}", Attention::kMasks,
                         written_.masks.size()));
    }
    regroup(kernel);
    for (size_t i = 0; i < written_.masks.size(); ++i) {
      kernel.masks[i] = describedMask(written_.masks[i], kernel);
      found.masks.push_back(written_.masks[i].value);
    }
    found.copied = std::move(copied_);
    return found;
  }

 private:
  // (batch, head, number, key): by keys, and whether a key's numbers lie apart.
  std::pair<Operand4, bool> keys(at::ScalarType dtype) {
    if (factsOf(written_.key).dtype != dtype) {
      refuse("query, key and value have different data types");
    }
    auto k = described(written_.key, stridesOf(written_.key));
    const bool across = k.strides[2] != 1 && k.sizes[2] != 1 && request_ != nullptr;
    if (across) {
      k = described(written_.key, rowStrides(written_.key));
    }
    std::swap(k.sizes[2], k.sizes[3]);
    if (!across) {
      std::swap(k.strides[2], k.strides[3]);
    }
    return {k, across};
  }

  // All in between is float32 or bfloat16, which we compute in float32.
  void requireRounding() const {
    for (const auto* node : written_.nodes) {
      const auto dtype = factsOf(node->output()).dtype;
      if (!isUnknown(dtype) && dtype != at::kFloat && dtype != at::kBFloat16) {
        refuse("values that are not float32 or bfloat16 in between");
      }
    }
    const auto dtype = facts_.constant(written_.softmax->input(2));
    if (!dtype || !(dtype->isNone() || dtype == c10::IValue(static_cast<int64_t>(at::kFloat)) ||
                    dtype == c10::IValue(static_cast<int64_t>(at::kBFloat16)))) {
      refuse("a softmax in another data type");
    }
  }

  void requireLastDimension() const {
    const auto rank = static_cast<int64_t>(sizesOf(written_.softmax->input(0)).size());
    const auto dim = facts_.constant(written_.softmax->input(1));
    if (!dim || (dim->toInt() != -1 && dim->toInt() != rank - 1) ||
        sizesOf(written_.softmax->output()) != sizesOf(written_.scores)) {
      refuse("a softmax over another dimension than the keys");
    }
  }

  void describeResult(Attention& kernel) const {
    if (written_.result == written_.product) {
      const auto strides =
          request_ != nullptr ? *factsOf(written_.result).strides : stridesOf(written_.result);
      kernel.result_strides = resultOf(written_.result, strides).rows();
      return;
    }
    // Whatever its sizes are then.
    if (sizesOf(written_.product).size() != kRank ||
        (request_ != nullptr && !isContiguous(written_.result))) {
      refuse("a result that is not made of heads side by side");
    }
    const auto width = kernel.heads * kernel.value_size;
    kernel.result_strides = {kernel.queries * width, kernel.value_size, width};
  }

  bool isContiguous(const Value* value) const {
    const auto facts = factsOf(value);
    return at::geometry_is_contiguous(*facts.sizes, *facts.strides);
  }

  // (batch * head, ..) that is viewed as (batch, head, ..) where a mask meets it.
  void regroup(Attention& kernel) const {
    if (kernel.batch != 1 || sizesOf(written_.scores).size() != kRank - 1) {
      return;
    }
    for (const auto& mask : written_.masks) {
      const auto met = sizesOf(mask.before);
      if (met.size() != kRank || met[0] * met[1] != kernel.heads) {
        continue;
      }
      kernel.batch = met[0];
      kernel.heads = kernel.key_heads = met[1];
      for (auto* strides : {&kernel.query_strides, &kernel.key_strides, &kernel.value_strides,
                            &kernel.result_strides}) {
        strides->batch = strides->head * kernel.heads;
      }
      return;
    }
  }

  void describeFactors(FoundAttention& found) const {
    double scale = 1;
    for (const auto& factor : written_.factors) {
      const auto known = facts_.constant(factor.number);
      if (!known) {
        const auto facts = factsOf(factor.number);
        if (!isTensor(factor.number) || !facts.sizes->empty() || facts.dtype != at::kFloat) {
          refuse("a factor that is no number of float32");
        }
        found.factors.push_back({factor.number, factor.divides});
        continue;
      }
      const auto number = oneNumber(*known);
      scale = factor.divides ? scale / number : scale * number;
    }
    found.kernel.scale = static_cast<float>(scale);
  }

  static double oneNumber(const c10::IValue& value) {
    return value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
  }

  Attention::Mask describedMask(const WrittenAttention::Mask& written, const Attention& kernel) {
    using Kind = WrittenAttention::Mask::Kind;
    Attention::Mask mask;
    const auto facts = factsOf(written.value);
    const auto scores = sizesOf(written.before);
    if (sizesOf(written.after) != scores) {
      refuse("a mask of more dimensions than the scores");
    }
    if (written.kind == Kind::added) {
      mask.kind = kindOfAdded(isUnknown(facts.dtype) ? at::kFloat : facts.dtype);
    } else {
      const auto number = facts_.constant(written.replacement);
      if ((!isUnknown(facts.dtype) && facts.dtype != at::kBool) || !number) {
        refuse("our kernel replaces scores by a constant where booleans say so");
      }
      mask.kind = Attention::Mask::Kind::chosen;
      mask.chosen_is = written.kind == Kind::replaced_where_true;
      mask.replacement = static_cast<float>(oneNumber(*number));
    }
    if (isUnknown(facts.sizes)) {
      return mask;
    }
    auto sizes = sizesOf(written.value);
    auto strides = rowStrides(written.value);
    if (scores.size() == kRank + 1) {  // elements of the batch in groups
      const bool once = sizes.size() == kRank + 1 && sizes[0] == 1;
      if (!once || scores[0] * scores[1] != kernel.batch || scores[2] != kernel.heads) {
        refuse("a mask of other parts of the batch than our kernel knows");
      }
      mask.period = scores[1];
      sizes.erase(sizes.begin());
      strides.erase(strides.begin());
    }
    if (sizes.size() > kRank || sizes.empty() || scores.size() < 2) {
      refuse("a mask of more dimensions than the scores");
    }
    const Shape last(scores.end() - static_cast<int64_t>(std::min(scores.size(), kRank)),
                     scores.end());
    const auto met = padded(last, last).sizes;
    const Shape all{mask.period != 0 ? mask.period : kernel.batch, kernel.heads, kernel.queries,
                    kernel.keys};
    if (met != all) {
      refuse("scores that are viewed in other dimensions where a mask meets them");
    }
    mask.strides = maskStrides(padded(sizes, strides), all);
    return mask;
  }

  const WrittenAttention& written_;
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

bool isOwnAttention(const WrittenAttention& written, const Facts& facts) {
  if (kernels() == nullptr) {
    return false;
  }
  try {
    WrittenFinder(facts, nullptr, written).find();
    return true;
  } catch (const CompileError&) {
    return false;
  }
}

bool isOwnAttentionGroup(const Graph& subgraph) {
  return kernels() != nullptr &&
         (soleAttention(subgraph) != nullptr || writtenAttention(subgraph) != nullptr);
}

std::optional<FoundAttention> findAttention(const CompileRequest& request) {
  if (kernels() == nullptr) {
    return std::nullopt;
  }
  if (const auto* node = soleAttention(*request.subgraph)) {
    return NodeFinder(request, node).find();
  }
  const auto* softmax = writtenAttention(*request.subgraph);
  if (softmax == nullptr) {
    return std::nullopt;
  }
  const auto written = attentionAround(softmax, *request.facts);
  if (!written || request.subgraph->outputs().size() != 1 ||
      request.subgraph->outputs()[0] != written->result) {
    refuse("its sizes make something else of it");
  }
  return WrittenFinder(*request.facts, &request, *written).find();
}

}  // namespace llga
