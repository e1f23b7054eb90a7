#include "jit/onednn/passes/known_shapes.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>

#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

using torch::jit::toIValue;
namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;

using Rank = std::optional<size_t>;
using Size = std::optional<int64_t>;

Rank plusOne(Rank rank) { return rank ? Rank(*rank + 1) : std::nullopt; }

Rank lengthOf(const Value* list) {
  if (list->node()->kind() == prim::ListConstruct) {
    return list->node()->inputs().size();
  }
  const auto known = toIValue(list);
  return known && known->isIntList() ? Rank(known->toIntVector().size()) : std::nullopt;
}

// The element of a list of integers, from the front or the end, if it is a constant.
Size elementOf(const Value* list, size_t index) {
  const auto* node = list->node();
  if (node->kind() == prim::ListConstruct) {
    return index < node->inputs().size() ? intOf(node->input(index)) : std::nullopt;
  }
  const auto known = toIValue(list);
  if (!known || !known->isIntList() || index >= known->toIntVector().size()) {
    return std::nullopt;
  }
  return known->toIntVector()[index];
}

// Ops that keep the number of dimensions and the sizes of their first input.
bool keepsSizes(const Node* node) {
  switch (node->kind()) {
    case aten::layer_norm:
    case aten::batch_norm:
    case aten::dropout:
    case aten::contiguous:
    case aten::clone:
    case aten::to:
    case aten::group_norm:
    case aten::instance_norm:
    case aten::prelu:
    case aten::softmax:
    case aten::roll:
      return true;
    default:
      return isActivation(node) || isIdentity(node) || isQuantize(node) || isDequantize(node) ||
             node->kind() == reducedPrecisionKind() || node->kind() == fullPrecisionKind();
  }
}

bool isBroadcasting(const Node* node) {
  switch (node->kind()) {
    case aten::add:
    case aten::sub:
    case aten::mul:
    case aten::div:
      return node->inputs().size() >= 2;
    default:
      return false;
  }
}

}  // namespace

std::optional<size_t> KnownShapes::rank(const Value* value) {
  if (const auto known = ranks_.find(value); known != ranks_.end()) {
    return known->second;
  }
  ranks_[value] = std::nullopt;
  return ranks_[value] = findRank(value);
}

std::optional<int64_t> KnownShapes::last(const Value* value) {
  if (const auto known = lasts_.find(value); known != lasts_.end()) {
    return known->second;
  }
  lasts_[value] = std::nullopt;
  return lasts_[value] = findLast(value);
}

void KnownShapes::assume(const Value* integer, int64_t number) {
  assumed_.emplace(integer, number);
  lasts_.clear();  // more of them may be known now
}

std::optional<size_t> KnownShapes::findRank(const Value* value) {
  if (const auto constant = toIValue(value); constant && constant->isTensor()) {
    return constant->toTensor().dim();
  }
  const auto* node = value->node();
  if (isFusionGroup(node)) {  // by what is known inside
    const auto subgraph = node->g(torch::jit::attr::Subgraph);
    for (size_t i = 0; i < node->inputs().size(); ++i) {
      outside_.emplace(subgraph->inputs()[i], node->input(i));
    }
    return rank(subgraph->outputs()[value->offset()]);
  }
  if (const auto outside = outside_.find(value); outside != outside_.end()) {
    return rank(outside->second);
  }
  if (keepsSizes(node)) {
    return rank(node->input(0));
  }
  if (isBroadcasting(node)) {
    return broadcastRank(node);
  }
  switch (node->kind()) {
    case aten::view:
    case aten::reshape:
    case aten::permute:
      return lengthOf(node->input(1));
    case aten::reshape_as:
      return rank(node->input(1));
    case aten::flatten: {
      const auto first = intOf(node->input(1));
      return first && *first >= 0 && intOf(node->input(2)) == Size(-1)
                 ? Rank(static_cast<size_t>(*first) + 1)
                 : std::nullopt;
    }
    case aten::arange:
      return 1;
    case aten::embedding:
      return plusOne(rank(node->input(1)));
    case aten::unsqueeze:
      return plusOne(rank(node->input(0)));
    case prim::ConstantChunk:
    case aten::slice:
    case aten::transpose:
    case aten::pad:
    case aten::scaled_dot_product_attention:
    case aten::max_pool1d:
    case aten::max_pool2d:
    case aten::avg_pool1d:
    case aten::adaptive_avg_pool1d:
    case aten::upsample_nearest2d:
    case aten::conv_transpose1d:
    case aten::conv1d:
    case aten::conv2d:
    case aten::conv3d:
      return rank(node->input(0));
    case prim::ListUnpack: {
      const auto* split = node->input(0)->node();
      const bool pieces = split->kind() == aten::split || split->kind() == aten::chunk ||
                          split->kind() == aten::split_with_sizes;
      return pieces ? rank(split->input(0)) : std::nullopt;
    }
    case aten::_convolution:
    case aten::_convolution_mode:
    case aten::convolution: {  // raise for images without a batch
      const auto known = rank(node->input(1));
      return known ? known : rank(node->input(0));
    }
    case aten::linear:
      return rank(node->input(1)) == Rank(2) ? rank(node->input(0)) : std::nullopt;
    case aten::cat:
      return commonRank(node->input(0)->node());
    default:
      return std::nullopt;
  }
}

std::optional<size_t> KnownShapes::broadcastRank(const Node* node) {
  const auto left = rank(node->input(0));
  const auto right = isTensor(node->input(1)) ? rank(node->input(1)) : Rank(0);
  return left && right ? Rank(std::max(*left, *right)) : std::nullopt;
}

// Of all tensors in a list; cat leaves out empty ones of one dimension.
std::optional<size_t> KnownShapes::commonRank(const Node* list) {
  if (list->kind() != prim::ListConstruct || list->inputs().empty()) {
    return std::nullopt;
  }
  const auto first = rank(list->input(0));
  const bool common = std::all_of(list->inputs().begin(), list->inputs().end(),
                                  [&](const Value* value) { return rank(value) == first; });
  return common ? first : std::nullopt;
}

// Linear layers and layer norms raise an error for any other.
std::optional<int64_t> KnownShapes::lastForReaders(const Value* value) {
  for (const auto& use : value->uses()) {
    const auto* reader = use.user;
    if (use.offset != 0 || reader->owningBlock() != value->node()->owningBlock()) {
      continue;
    }
    const bool multiplies = reader->kind() == aten::linear && rank(reader->input(1)) == Rank(2);
    const auto size = reader->kind() == aten::layer_norm ? lastOfSizes(reader->input(1))
                      : multiplies                       ? last(reader->input(1))
                                                         : std::nullopt;
    if (size) {
      return size;
    }
  }
  return std::nullopt;
}

std::optional<int64_t> KnownShapes::findLast(const Value* value) {
  if (const auto known = lastForReaders(value)) {
    return known;
  }
  if (const auto constant = toIValue(value); constant && constant->isTensor()) {
    const auto& tensor = constant->toTensor();
    return tensor.dim() > 0 ? Size(tensor.size(-1)) : std::nullopt;
  }
  const auto* node = value->node();
  switch (node->kind()) {
    case aten::layer_norm:
      return lastOfSizes(node->input(1));
    case aten::linear: {
      const auto weight = toIValue(node->input(1));
      const bool matrix = weight && weight->isTensor() && weight->toTensor().dim() == 2;
      return matrix ? Size(weight->toTensor().size(0)) : std::nullopt;
    }
    case aten::view:
    case aten::reshape:
      return lastOfSizes(node->input(1));
    case aten::permute: {
      const auto dims = lengthOf(node->input(1));
      const auto from = dims && *dims > 0 ? elementOf(node->input(1), *dims - 1) : std::nullopt;
      const bool same = from && (*from == -1 || *from + 1 == static_cast<int64_t>(*dims));
      return same ? last(node->input(0)) : std::nullopt;
    }
    case aten::transpose:
      return isOther(node->input(0), node->input(1)) && isOther(node->input(0), node->input(2))
                 ? last(node->input(0))
                 : std::nullopt;
    case aten::slice:
      return isOther(node->input(0), node->input(1)) ? last(node->input(0)) : std::nullopt;
    case prim::ListUnpack: {
      const auto* split = node->input(0)->node();
      const bool pieces = splits(split) && split->kind() != aten::unbind &&
                          isOther(split->input(0), split->namedInput("dim"));
      return pieces ? last(split->input(0)) : std::nullopt;
    }
    case aten::pad:
      return elementOf(node->input(1), 0) == Size(0) && elementOf(node->input(1), 1) == Size(0)
                 ? last(node->input(0))
                 : std::nullopt;
    default:
      break;
  }
  if (keepsSizes(node)) {
    return last(node->input(0));
  }
  if (isBroadcasting(node)) {
    // One that is not 1 is that of the result, or they do not fit.
    for (const size_t i : {0, 1}) {
      const auto size = isTensor(node->input(i)) ? last(node->input(i)) : std::nullopt;
      if (size && *size > 1) {
        return size;
      }
    }
  }
  return std::nullopt;
}

std::optional<int64_t> KnownShapes::lastOfSizes(const Value* list) {
  const auto length = lengthOf(list);
  if (!length || *length == 0) {
    return std::nullopt;
  }
  if (const auto size = elementOf(list, *length - 1)) {
    return *size >= 0 ? size : std::nullopt;
  }
  const auto* node = list->node();
  if (node->kind() != prim::ListConstruct) {
    return std::nullopt;
  }
  if (const auto known = assumed_.find(node->inputs().back()); known != assumed_.end()) {
    return known->second;
  }
  return askedSize(node->inputs().back()->node());
}

std::optional<int64_t> KnownShapes::askedSize(const Node* size) {
  const bool asks = size->kind() == aten::size && size->inputs().size() == 2;
  return asks && isLast(size->input(0), size->input(1)) ? last(size->input(0)) : std::nullopt;
}

bool KnownShapes::isOther(const Value* value, const Value* dim) {
  return intOf(dim) && rank(value) && !isLast(value, dim);
}

bool KnownShapes::isLast(const Value* value, const Value* dim) {
  const auto number = intOf(dim);
  const auto dims = rank(value);
  return number == Size(-1) || (number && dims && *number + 1 == static_cast<int64_t>(*dims));
}

}  // namespace llga
