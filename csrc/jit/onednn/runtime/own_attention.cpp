#include "jit/onednn/runtime/own_attention.h"

#include <ATen/ATen.h>
#include <ATen/TensorGeometry.h>
#include <c10/util/irange.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "jit/onednn/attention_moves.h"
#include "jit/onednn/quantization.h"
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

bool takes(std::optional<at::ScalarType> dtype) {
  return dtype == at::kFloat || (dtype == at::kBFloat16 && supportsBf16());
}

// Those whose products are of bfloat16 or 8 bits, where there are any for this attention.
const attention::Kernels* kernelsFor(const Attention& kernel) {
  if (kernel.type == Attention::Type::quantized) {
    return &attention::avx512_vnni;
  }
  const bool narrow = kernel.type == Attention::Type::bfloat16 && usesAvx512Bf16() &&
                      !kernel.key_across && kernel.least_key_norm < 0;
  return !narrow ? kernels() : usesAmx() ? &attention::amx : &attention::avx512_bf16;
}

// The attention that is all a group computes, but for moves that the bridge has put there; null if
// it computes anything else.
const Node* soleAttention(const Graph& subgraph) {
  const auto* sole = soleComputation(subgraph);
  if (sole != nullptr) {
    return isAttention(sole) ? sole : nullptr;
  }
  for (const auto* node : subgraph.nodes()) {
    if (isAttention(node) && node->hasAttribute(ownAttentionAttr())) {
      return node;
    }
  }
  return nullptr;
}

// The softmax of attention that is written out, in a group that the bridge has made for us; oneDNN
// may propose one of its own.
const Node* writtenAttention(const Graph& subgraph) {
  for (const auto* node : subgraph.nodes()) {
    if (node->kind() == torch::jit::aten::softmax && node->hasAttribute(ownAttentionAttr())) {
      return node;
    }
  }
  return nullptr;
}

bool isPerTensor(const std::optional<QuantParams>& params) { return params && params->perTensor(); }

// The node that quantizes what `attention` gives, for all who read it; null if none does.
const Node* quantizeBehind(const Node* attention) {
  const auto& uses = attention->output()->uses();
  if (uses.size() != 1 || uses[0].user->owningBlock() != attention->owningBlock() ||
      uses[0].offset != 0) {
    return nullptr;
  }
  return isPerTensor(quantizeParams(uses[0].user)) ? uses[0].user : nullptr;
}

Attention::Numbers numbersOf(const QuantParams& params) {
  return {params.dtype == at::kQInt8, static_cast<float>(params.scales.front()),
          static_cast<int32_t>(params.zero_points.front())};
}

[[noreturn]] void refuse(const std::string& reason) { throw CompileError{"attention: " + reason}; }

constexpr size_t kRank = 4;

// A tensor as one of four dimensions: the first ones of size 1 where it has fewer, the first two as
// one where it has five.
struct Operand4 {
  Shape sizes;
  Shape strides;
  // For what is made of an input of the group by moving its numbers: that one, and where its rows
  // lie there, instead of strides.
  const Value* source = nullptr;
  Attention::Place place = {};

  Attention::Strides rows() const { return {strides[0], strides[1], strides[2]}; }
  Attention::Place where() const { return source != nullptr ? place : Attention::Place{rows()}; }
};

// Whether the first two dimensions of five are one, as they lie.
bool isFoldable(const Shape& sizes, const Shape& strides) {
  return sizes.size() != kRank + 1 || sizes[0] == 1 || sizes[1] == 1 ||
         strides[0] == sizes[1] * strides[1];
}

Operand4 padded(Shape sizes, Shape strides) {
  if (sizes.size() == kRank + 1) {
    strides.erase(strides.begin() + (sizes[1] == 1 && sizes[0] != 1 ? 1 : 0));
    sizes[1] *= sizes[0];
    sizes.erase(sizes.begin());
  }
  sizes.insert(sizes.begin(), kRank - sizes.size(), 1);
  strides.insert(strides.begin(), kRank - strides.size(), 0);
  return {sizes, strides};
}

at::Tensor padded(at::Tensor tensor) {
  if (tensor.dim() == static_cast<int64_t>(kRank) + 1) {
    tensor = tensor.flatten(0, 1);
  }
  while (tensor.dim() < static_cast<int64_t>(kRank)) {
    tensor = tensor.unsqueeze(0);
  }
  return tensor;
}

// Numbers where a tensor has its elements, in place of what they are: moved as these are, they say
// where each one has come from.
at::Tensor numbered(const Shape& sizes, const Shape& strides) {
  int64_t most = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    most += std::max<int64_t>(sizes[i] - 1, 0) * strides[i];
  }
  if (most > std::numeric_limits<int32_t>::max()) {
    refuse("more numbers than our kernel counts");
  }
  auto positions = at::zeros(sizes, at::kInt);
  for (size_t i = 0; i < sizes.size(); ++i) {
    Shape along(sizes.size(), 1);
    along[i] = sizes[i];
    positions += (at::arange(sizes[i], at::kInt) * strides[i]).view(along);
  }
  return positions;
}

constexpr const char* kApart =
    "rows whose numbers do not lie together, or heads that do not lie alike";

constexpr const char* kDifferent = "query, key and value have different data types";

// (batch, head, row, number) at these positions, negative ones for rows that are not there. Nothing
// where numbers of a row do not lie together, or heads not as far apart in all rows.
std::optional<Attention::Place> placeOf(const at::Tensor& positions) {
  const auto heads = positions.size(1);
  const auto numbers = positions.size(3);
  Attention::Place place;
  if (positions.numel() == 0) {
    return place;
  }
  const auto rows = positions.select(3, 0).select(1, 0).to(at::kLong).contiguous();
  const auto there = rows.ge(0);
  if (heads > 1) {
    const auto apart = positions.select(3, 0).select(1, 1) - rows;
    const auto any = apart.masked_select(there);
    place.strides.head = any.numel() == 0 ? 0 : any[0].item<int64_t>();
  }
  const auto expected = rows.view({rows.size(0), 1, rows.size(1), 1}) +
                        at::arange(heads, at::kLong).view({heads, 1, 1}) * place.strides.head +
                        at::arange(numbers, at::kLong);
  const auto mask = there.view({rows.size(0), 1, rows.size(1), 1});
  if (!at::where(mask, expected, -1).equal(positions.to(at::kLong))) {
    return std::nullopt;
  }
  const auto step = [&](int64_t dim) {
    return rows.size(dim) > 1
               ? (rows.select(dim, 1) - rows.select(dim, 0)).flatten()[0].item<int64_t>()
               : 0;
  };
  place.strides.batch = step(0);
  place.strides.row = step(1);
  place.first = rows[0][0].item<int64_t>();
  const auto regular = place.first +
                       at::arange(rows.size(0), at::kLong).unsqueeze(1) * place.strides.batch +
                       at::arange(rows.size(1), at::kLong) * place.strides.row;
  if (!there.all().item<bool>() || !regular.equal(rows)) {
    const auto* data = rows.const_data_ptr<int64_t>();
    place.rows.assign(data, data + rows.numel());
    place.first = 0;
  }
  return place;
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
    if (sizes.size() < 2 || sizes.size() > kRank + 1 || !isFoldable(sizes, strides)) {
      refuse(
          fmt::format("our kernel takes tensors of rank 2 to 4, or 5 with the first two as one, "
                      "got sizes {} and strides {}",
                      toText(sizes), toText(strides)));
    }
    return padded(sizes, strides);
  }

  // Strides of rows whose numbers lie together: the value's, or those of a copy.
  Shape rowStrides(const Value* value) {
    auto sizes = sizesOf(value);
    auto strides = stridesOf(value);
    const bool rows = strides.empty() || strides.back() == 1 || sizes.back() == 1;
    if (rows && isFoldable(sizes, strides)) {
      return strides;
    }
    return copiedTo(c10::TensorType::contiguousStridesOf(sizes));
  }

  Shape copiedTo(Shape strides) {
    copied_.insert_or_assign(place_, strides);
    return strides;
  }

  Operand4 operand(const Value* value, at::ScalarType dtype) {
    if (factsOf(value).dtype != dtype) {
      refuse(kDifferent);
    }
    return isMoved(value) ? moved(value, /*transposed=*/false)
                          : described(value, rowStrides(value));
  }

  // Of what lies by columns, (.., number, row), or is to be taken so: by rows.
  Operand4 operandOfColumns(const Value* value, at::ScalarType dtype) {
    if (factsOf(value).dtype != dtype) {
      refuse(kDifferent);
    }
    auto found =
        isMoved(value) ? moved(value, /*transposed=*/true) : described(value, columnStrides(value));
    std::swap(found.sizes[2], found.sizes[3]);
    if (found.source == nullptr) {
      std::swap(found.strides[2], found.strides[3]);
    }
    return found;
  }

  // Strides of columns whose numbers lie together: the value's, or those of a copy.
  Shape columnStrides(const Value* value) {
    const auto sizes = sizesOf(value);
    auto strides = stridesOf(value);
    const auto rank = sizes.size();
    if (rank < 2) {
      return strides;
    }
    const bool columns = strides[rank - 2] == 1 || sizes[rank - 2] == 1;
    return columns && isFoldable(sizes, strides) ? strides : copiedTo(byColumns(sizes));
  }

  // Dense ones of (.., number, row), where the numbers of a row lie together.
  static Shape byColumns(Shape sizes) {
    std::swap(sizes.end()[-1], sizes.end()[-2]);
    auto strides = c10::TensorType::contiguousStridesOf(sizes);
    std::swap(strides.end()[-1], strides.end()[-2]);
    return strides;
  }

  // Dense ones of (first, .., last) that lie as (first, last, ..).
  static Shape byPixel(Shape sizes) {
    std::rotate(sizes.begin() + 1, sizes.end() - 1, sizes.end());
    auto strides = c10::TensorType::contiguousStridesOf(sizes);
    std::rotate(strides.begin() + 1, strides.begin() + 2, strides.end());
    return strides;
  }

  // Whether the group moves numbers to make it.
  bool isMoved(const Value* value) const { return request_ != nullptr && movesRows(value->node()); }

  // What is made of an input, with the last two dimensions swapped or not; or of a copy of it,
  // whose pixels' channels lie side by side.
  Operand4 moved(const Value* value, bool transposed) {
    const auto moves = movesBefore(value);
    const auto* source = moves.back()->input(0);
    if (source->node()->kind() != torch::jit::prim::Param) {
      refuse("data that the group computes");
    }
    const auto source_sizes = sizesOf(source);
    const auto placeWith = [&](const Shape& strides) {
      auto positions = numbered(source_sizes, strides);
      for (auto move = moves.rbegin(); move != moves.rend(); ++move) {
        positions = afterMove(*move, positions);
      }
      return placeOf(padded(transposed ? positions.transpose(-1, -2) : positions));
    };
    auto place = placeWith(stridesOf(source));
    if (!place && source_sizes.size() > 1) {
      place = placeWith(copiedTo(byPixel(source_sizes)));
    }
    if (!place) {
      refuse(kApart);
    }
    const auto sizes = sizesOf(value);
    auto all = described(value, c10::TensorType::contiguousStridesOf(sizes));
    all.source = source;
    all.place = std::move(*place);
    return all;
  }

  at::Tensor afterMove(const Node* move, const at::Tensor& tensor) const {
    if (move->kind() == torch::jit::aten::view) {  // of data that lies otherwise
      return tensor.reshape(facts_.constant(move->input(1)).value().toIntVector());
    }
    torch::jit::Stack stack{tensor};
    for (size_t i = 1; i < move->inputs().size(); ++i) {
      stack.push_back(facts_.constant(move->input(i)).value());
    }
    move->getOperation()(stack);
    return stack.at(0).toTensor();
  }

  // Places the rows of `product`, or its columns, in a result that is made of them by moves, or is
  // that: in eager's order, or, where their numbers do not lie together in images, in channels
  // last, or with all dimensions between the first and the last one inside of that: pixels of which
  // each has its channels, those of all heads; or by rows.
  void placeIn(FoundAttention& found, const Value* product, bool columns = false) const {
    const auto sizes = sizesOf(found.result);
    auto place = placeIn(found.result, product, columns, found.result_strides);
    const auto tryAs = [&](Shape strides) {
      found.result_strides = std::move(strides);
      place = placeIn(found.result, product, columns, found.result_strides);
    };
    if (!place && sizes.size() == kRank) {
      tryAs(channelsLastStrides(sizes));
    }
    if (!place && sizes.size() > 1) {
      tryAs(byPixel(sizes));
    }
    if (!place && columns) {
      tryAs(c10::TensorType::contiguousStridesOf(sizes));
    }
    if (!place) {
      refuse(kApart);
    }
    found.kernel.result = std::move(*place);
  }

  std::optional<Attention::Place> placeIn(const Value* result, const Value* product, bool columns,
                                          const Shape& strides) const {
    const auto places = numbered(sizesOf(result), strides).flatten();
    if (places.numel() > 0 && places.max().item<int64_t>() >= places.numel()) {
      refuse("a result with gaps");
    }
    std::vector<const Node*> moves;
    for (const auto* value = result; value != product; value = value->node()->input(0)) {
      if (!movesRows(value->node())) {
        refuse("a result that is not the attention's");
      }
      moves.push_back(value->node());
    }
    const auto sizes = sizesOf(product);
    auto numbers = numbered(sizes, c10::TensorType::contiguousStridesOf(sizes));
    const auto count = numbers.numel();
    for (auto move = moves.rbegin(); move != moves.rend(); ++move) {
      numbers = afterMove(*move, numbers);
    }
    const auto targets = numbers.flatten().to(at::kLong);
    auto positions = at::full({count}, -1, at::kInt);
    positions.index_put_({targets}, places);
    if (positions.ge(0).sum().item<int64_t>() != targets.numel()) {
      refuse("a result that has numbers twice");
    }
    positions = positions.view(sizes);
    return placeOf(padded(columns ? positions.transpose(-1, -2) : positions));
  }

  static const Value* sourceOf(const Value* operand, const Operand4& found) {
    return found.source != nullptr ? found.source : operand;
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
    kernel.least_query_norm = kernel.least_key_norm = -1;
    kernel.query = q.where();
    kernel.key = k.where();
    kernel.value = v.where();
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

  // Says where a mask of these sizes lies for each element of the batch, of scores of these sizes.
  static void placeMask(Attention::Mask& mask, Shape sizes, Shape strides, const Shape& scores,
                        const Attention& kernel) {
    auto met = scores;
    if (scores.size() == kRank + 1) {  // elements of the batch in groups
      const bool five = sizes.size() == kRank + 1;
      const bool each = five && sizes[0] == scores[0] && sizes[1] == scores[1];
      if (scores[0] * scores[1] != kernel.batch || scores[2] != kernel.heads ||
          (five && !each && sizes[0] != 1)) {
        refuse("a mask of other parts of the batch than our kernel knows");
      }
      if (each) {
        const auto folded = padded(sizes, strides);
        sizes = folded.sizes;
        strides = folded.strides;
      } else if (five) {
        sizes.erase(sizes.begin());
        strides.erase(strides.begin());
      }
      mask.period = !each && sizes.size() == kRank && sizes[0] != 1 ? scores[1] : 0;
      met.erase(met.begin());
      met[0] = mask.period != 0 ? mask.period : kernel.batch;
    }
    if (sizes.size() > kRank || sizes.empty() || met.size() < 2 || met.size() > kRank) {
      refuse("a mask of more dimensions than the scores");
    }
    const Shape all{mask.period != 0 ? mask.period : kernel.batch, kernel.heads, kernel.queries,
                    kernel.keys};
    if (padded(met, met).sizes != all) {
      refuse("scores that are viewed in other dimensions where a mask meets them");
    }
    mask.strides = maskStrides(padded(sizes, strides), all);
  }

  const Facts& facts_;
  const CompileRequest* request_;
  static constexpr size_t kMask = 3;  // the place of the first one, behind query, key and value
  size_t place_ = 0;                  // of what is looked at
  std::map<size_t, Shape> copied_;
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
    const auto dtype = dtypeOf(named("query"), node_->output());
    const auto operands = attentionOperands(node_);
    const auto take = [&](const Value* value, size_t place) {
      place_ = place;
      return operand(value, operands.quantized ? factsOf(value).dtype.value() : dtype);
    };
    const auto q = take(operands.query, 0);
    const auto k = take(operands.key, 1);
    const auto v = take(operands.value, 2);
    FoundAttention found{kernelFor(dtype, q, k, v),
                         sourceOf(operands.query, q),
                         sourceOf(operands.key, k),
                         sourceOf(operands.value, v),
                         {},
                         {},
                         {},
                         behind(request_->subgraph->outputs()[0])};
    auto& kernel = found.kernel;
    if (operands.quantized) {
      describeNumbers(kernel, operands.result);
    }
    const auto* product = operands.result;
    const auto result = resultOf(product, *factsOf(product).strides);
    const Shape results{kernel.batch, kernel.heads, kernel.queries, kernel.value_size};
    // One head of keys is that of all queries, as sizes of 1 always are.
    const bool grouped = (constant("enable_gqa").toBool() || kernel.key_heads == 1) &&
                         kernel.heads % kernel.key_heads == 0;
    if (result.sizes != results || (kernel.heads != kernel.key_heads && !grouped)) {
      refuse(fmt::format("{} heads of queries, {} of keys", kernel.heads, kernel.key_heads));
    }
    found.result_strides = *factsOf(found.result).strides;
    if (found.result == product) {
      kernel.result = Attention::Place{result.rows()};
    } else {
      placeIn(found, product);
    }
    const auto scale = constant("scale");
    kernel.scale =
        static_cast<float>(scale.isNone() ? 1 / std::sqrt(static_cast<double>(kernel.size))
                                          : scale.toScalar().toDouble());
    kernel.causal = constant("is_causal").toBool();
    kernel.safe = node_->kind() != unsafeAttentionKind();
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

  void describeNumbers(Attention& kernel, const Value* result) const {
    const auto numbers = [&](const char* argument) {
      return numbersOf(dequantizeParams(named(argument)->node()).value());
    };
    kernel.type = Attention::Type::quantized;
    kernel.query_numbers = numbers("query");
    kernel.key_numbers = numbers("key");
    kernel.value_numbers = numbers("value");
    if (result != node_->output()) {
      kernel.result_numbers = numbersOf(quantizeParams(result->node()).value());
    }
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
    auto scores = sizesOf(node_->output());
    scores.back() = kernel.keys;
    place_ = kMask;
    placeMask(mask, sizesOf(value), rowStrides(value), scores, kernel);
    found.masks.push_back(value);
  }

  const Node* node_;
};

class WrittenFinder : Finder {
 public:
  WrittenFinder(const Facts& facts, const CompileRequest* request, const WrittenAttention& written)
      : Finder(facts, request), written_(written) {}

  FoundAttention find() {
    const auto dtype = dtypeOf(written_.query, written_.result);
    const auto q = written_.query_by_columns ? operandOfColumns(written_.query, dtype)
                                             : operand(written_.query, dtype);
    place_ = 1;
    const auto [k, across] = keys(dtype, q.sizes[2]);
    place_ = 2;
    const auto v = written_.value_by_columns ? operandOfColumns(written_.value, dtype)
                                             : operand(written_.value, dtype);
    FoundAttention found{
        kernelFor(dtype, q, k, v),
        sourceOf(written_.query, q),
        sourceOf(written_.key, k),
        sourceOf(written_.value, v),
        {},
        {},
        {},
        request_ != nullptr ? behind(request_->subgraph->outputs()[0]) : written_.result};
    auto& kernel = found.kernel;
    if (kernel.heads != kernel.key_heads) {
      refuse("scores of broadcast heads");
    }
    kernel.key_across = across;
    kernel.safe = false;
    kernel.least_query_norm = leastNorm(written_.least_query_norm);
    kernel.least_key_norm = leastNorm(written_.least_key_norm);
    requireRounding();
    requireLastDimension();
    describeResult(found);
    describeFactors(found);
    if (written_.masks.size() > Attention::kMasks) {
      refuse(fmt::format("our kernel takes {} masks, got {}", Attention::kMasks,
                         written_.masks.size()));
    }
    regroup(kernel);
    describeHeadScales(kernel);
    for (size_t i = 0; i < written_.masks.size(); ++i) {
      place_ = kMask + i;
      kernel.masks[i] = describedMask(written_.masks[i], kernel);
      found.masks.push_back(written_.masks[i].value);
    }
    found.copied = std::move(copied_);
    return found;
  }

 private:
  // (batch, head, number, key): by keys, and whether a key's numbers lie apart. Instructions for
  // bfloat16 want them together, which for one query alone is not worth a copy.
  std::pair<Operand4, bool> keys(at::ScalarType dtype, int64_t queries) {
    if (written_.key_by_rows) {
      return {operand(written_.key, dtype), false};
    }
    const bool together = dtype == at::kBFloat16 && usesAvx512Bf16() && queries > 1;
    if (isMoved(written_.key) || (together && request_ != nullptr)) {
      return {operandOfColumns(written_.key, dtype), false};
    }
    if (factsOf(written_.key).dtype != dtype) {
      refuse(kDifferent);
    }
    auto strides = stridesOf(written_.key);
    const bool apart = !isFoldable(sizesOf(written_.key), strides);
    if (apart) {
      strides = rowStrides(written_.key);
    }
    auto k = described(written_.key, strides);
    const bool across = k.strides[2] != 1 && k.sizes[2] != 1 && request_ != nullptr;
    if (across && !apart) {
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

  void describeResult(FoundAttention& found) const {
    auto& kernel = found.kernel;
    if (request_ != nullptr) {
      found.result_strides = *factsOf(found.result).strides;
    }
    const bool columns = written_.value_by_columns;
    if (found.result != written_.result || (columns && request_ != nullptr)) {
      placeIn(found, written_.product, columns);
      return;
    }
    if (columns) {
      return;  // wherever they will lie
    }
    if (written_.result == written_.product) {
      const auto strides =
          request_ != nullptr ? *factsOf(written_.result).strides : stridesOf(written_.result);
      kernel.result.strides = resultOf(written_.result, strides).rows();
      return;
    }
    // Whatever its sizes are then.
    if (sizesOf(written_.product).size() != kRank ||
        (request_ != nullptr && !isContiguous(written_.result))) {
      refuse("a result that is not made of heads side by side");
    }
    const auto width = kernel.heads * kernel.value_size;
    kernel.result.strides = {kernel.queries * width, kernel.value_size, width};
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
      for (auto* place : {&kernel.query, &kernel.key, &kernel.value, &kernel.result}) {
        if (!place->rows.empty()) {
          refuse("heads and elements of the batch in one dimension, whose rows are moved");
        }
        place->strides.batch = place->strides.head * kernel.heads;
      }
      return;
    }
  }

  void describeFactors(FoundAttention& found) const {
    double scale = 1;
    for (const auto& factor : written_.factors) {
      if (factor.scores != nullptr) {
        continue;
      }
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

  // Of factors that have one number for each head.
  void describeHeadScales(Attention& kernel) const {
    for (const auto& factor : written_.factors) {
      if (factor.scores == nullptr) {
        continue;
      }
      const auto known = facts_.constant(factor.number);
      if (!known) {
        refuse("a factor for each head that is no constant");
      }
      const auto met = sizesOf(factor.scores);
      if (met.size() > kRank) {
        refuse("a factor for each head of scores in more dimensions than our kernel knows");
      }
      const auto scores = padded(met, met).sizes;
      const auto numbers = known->toTensor().to(at::kFloat).flatten();
      const Shape heads{kernel.heads, kernel.queries, kernel.keys};
      if (!std::equal(heads.begin(), heads.end(), scores.begin() + 1) ||
          numbers.numel() != kernel.heads) {
        refuse("a factor for other parts of the scores than heads");
      }
      kernel.head_scales.resize(static_cast<size_t>(kernel.heads), 1);
      for (const auto i : c10::irange(kernel.head_scales.size())) {
        const auto number = numbers[static_cast<int64_t>(i)].item<float>();
        kernel.head_scales[i] =
            factor.divides ? kernel.head_scales[i] / number : kernel.head_scales[i] * number;
      }
    }
  }

  // Of rows that are brought to a length of 1; negative for those that are not.
  float leastNorm(const Value* least) const {
    if (least == nullptr) {
      return -1;
    }
    const auto known = facts_.constant(least);
    if (!known || oneNumber(*known) < 0) {
      refuse("a norm whose least value is no constant");
    }
    return static_cast<float>(oneNumber(*known));
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
    placeMask(mask, sizesOf(written.value), rowStrides(written.value), scores, kernel);
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

AttentionOperands attentionOperands(const Node* attention) {
  const auto* query = attention->namedInput("query");
  const auto* key = attention->namedInput("key");
  const auto* value = attention->namedInput("value");
  AttentionOperands operands{query, key, value, attention->output(), false, {attention}};
  const auto isQuantized = [&](const Value* operand) {
    const auto* dequantize = operand->node();
    return isPerTensor(dequantizeParams(dequantize)) &&
           dequantize->owningBlock() == attention->owningBlock() && operand->uses().size() == 1;
  };
  if (!usesAvx512Vnni() || !isQuantized(query) || !isQuantized(key) || !isQuantized(value)) {
    return operands;
  }
  operands.quantized = true;
  for (auto* operand : {&operands.query, &operands.key, &operands.value}) {
    operands.nodes.push_back((*operand)->node());
    *operand = (*operand)->node()->input(0);
  }
  if (const auto* quantize = quantizeBehind(attention)) {
    operands.nodes.push_back(quantize);
    operands.result = quantize->output();
  }
  return operands;
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
  auto withKernels = [](FoundAttention found) {
    found.kernel.kernels = kernelsFor(found.kernel);
    return found;
  };
  if (const auto* node = soleAttention(*request.subgraph)) {
    return withKernels(NodeFinder(request, node).find());
  }
  const auto* softmax = writtenAttention(*request.subgraph);
  if (softmax == nullptr) {
    return std::nullopt;
  }
  const auto written = attentionAround(softmax, *request.facts);
  if (!written || request.subgraph->outputs().size() != 1) {
    refuse("its sizes make something else of it");
  }
  return withKernels(WrittenFinder(*request.facts, &request, *written).find());
}

}  // namespace llga
