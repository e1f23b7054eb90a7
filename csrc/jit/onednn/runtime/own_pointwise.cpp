#include "jit/onednn/runtime/own_pointwise.h"

#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <unordered_set>

namespace llga {
namespace {

using vector_loops::Pointwise;
using Function = Pointwise::Function;

std::optional<Pointwise> functionOf(const OpSpec& op) {
  const auto plain = [](Function function) { return Pointwise{function}; };
  switch (op.kind()) {
    case OpKind::Abs:
      return plain(Function::abs);
    case OpKind::Add:
      return plain(Function::add);
    case OpKind::Clamp:
      return Pointwise{Function::clamp, op.get_attr<float>(Attr::min),
                       op.get_attr<float>(Attr::max)};
    case OpKind::Divide:
      return plain(Function::divide);
    case OpKind::Elu:
      return Pointwise{Function::elu, op.get_attr<float>(Attr::alpha)};
    case OpKind::Exp:
      return plain(Function::exp);
    case OpKind::GELU:
      return plain(Function::gelu);
    case OpKind::HardSigmoid:
      return Pointwise{Function::hard_sigmoid, op.get_attr<float>(Attr::alpha),
                       op.get_attr<float>(Attr::beta)};
    case OpKind::HardSwish:
      return plain(Function::hard_swish);
    case OpKind::LeakyReLU:
      return Pointwise{Function::leaky_relu, op.get_attr<float>(Attr::alpha)};
    case OpKind::Maximum:
      return plain(Function::maximum);
    case OpKind::Minimum:
      return plain(Function::minimum);
    case OpKind::Multiply:
      return plain(Function::multiply);
    case OpKind::ReLU:
      return plain(Function::relu);
    case OpKind::Select:
      return plain(Function::select);
    case OpKind::Sigmoid:
      return plain(Function::sigmoid);
    case OpKind::Sqrt:
      return plain(Function::sqrt);
    case OpKind::Square:
      return plain(Function::square);
    case OpKind::Subtract:
      return plain(Function::subtract);
    case OpKind::Tanh:
      return plain(Function::tanh);
    default:
      return std::nullopt;
  }
}

bool isFloating(const Operand& operand) {
  return operand.dtype == at::kFloat || operand.dtype == at::kBFloat16;
}

bool isReadBy(const OpSpec& op, size_t id) {
  return std::any_of(op.inputs().begin(), op.inputs().end(),
                     [id](const Operand& input) { return input.id == id; });
}

// Numbers along one dimension, the second one, and one in all others: by channel.
bool isByChannel(const Shape& sizes, size_t rank) {
  const auto channels = rank - 2;  // counted from the last dimension
  for (const auto i : c10::irange(sizes.size())) {
    if (sizes.end()[-1 - static_cast<int64_t>(i)] != 1 && i != channels) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool isPointwise(const OpSpec& op) { return functionOf(op).has_value(); }

bool isLink(const OpSpec& op) {
  const auto& data = op.inputs()[0];
  switch (op.kind()) {
    case OpKind::TypeCast:
      return isFloating(data) && isFloating(op.outputs()[0]);
    case OpKind::SoftMax:
    case OpKind::LogSoftmax: {
      const auto axis = op.get_attr<int64_t>(Attr::axis);
      return isFloating(data) && (axis == -1 || axis + 1 == data.rank());
    }
    default:
      return isPointwise(op) && isFloating(op.outputs()[0]);
  }
}

bool isOnlyOurs(const OpSpec& op) { return op.kind() == OpKind::Select; }

bool isOnlyOurs(const LoweredGraph& graph) {
  return std::any_of(graph.ops.begin(), graph.ops.end(),
                     [](const OpSpec& op) { return isOnlyOurs(op); }) &&
         std::all_of(graph.ops.begin(), graph.ops.end(), isLink);
}

std::optional<FoundPointwise> pointwise(const Ops& ops, const LoweredGraph& graph,
                                        const std::unordered_map<size_t, size_t>& group_outputs) {
  constexpr size_t kMostValues = 24;
  FoundPointwise found;
  std::unordered_map<size_t, size_t> values;
  std::unordered_set<size_t> computed;
  for (const auto* op : ops) {
    computed.insert(op->outputs()[0].id);
  }
  for (const auto* op : ops) {
    for (const auto& input : op->inputs()) {
      if (computed.count(input.id) == 0 && values.emplace(input.id, found.data.size()).second) {
        if (!input.sizes || (!isFloating(input) && input.dtype != at::kBool)) {
          return std::nullopt;
        }
        found.data.push_back(input);
        found.chain.data.push_back({input.dtype, {}});
      }
    }
  }
  for (const auto* op : ops) {
    const auto& result = op->outputs()[0];
    if (op->outputs().size() != 1 || !isLink(*op)) {
      return std::nullopt;
    }
    PointwiseChain::Instruction instruction{functionOf(*op), {}, op->kind() == OpKind::LogSoftmax};
    for (const auto i : c10::irange(op->inputs().size())) {
      const auto value = values.find(op->inputs()[i].id);
      if (value == values.end()) {
        return std::nullopt;  // computed later, or not at all
      }
      instruction.from.at(i) = value->second;
    }
    auto value = found.data.size() + found.chain.instructions.size();
    if (op->kind() == OpKind::TypeCast) {
      value = instruction.from[0];
    } else {
      found.chain.instructions.push_back(instruction);
    }
    values.emplace(result.id, value);
    const bool is_read = std::any_of(graph.ops.begin(), graph.ops.end(), [&](const OpSpec& other) {
      return isReadBy(other, result.id) && std::find(ops.begin(), ops.end(), &other) == ops.end();
    });
    if (is_read || group_outputs.count(result.id) != 0) {
      if (!result.sizes || value < found.data.size() ||
          (!found.results.empty() && found.results[0].sizes != result.sizes)) {
        return std::nullopt;
      }
      found.results.push_back(result);
      found.chain.results.push_back({value, {result.dtype, {}}});
    }
  }
  if (found.results.empty() || values.size() > kMostValues) {
    return std::nullopt;
  }
  found.chain.sizes = *found.results[0].sizes;
  const auto& sizes = found.chain.sizes;
  constexpr int64_t kMostInRow = 1 << 16;  // what a thread has of a value fits into its cache
  for (const auto* op : ops) {
    const bool softmax = op->kind() == OpKind::SoftMax || op->kind() == OpKind::LogSoftmax;
    if (softmax && (op->inputs()[0].sizes != sizes || sizes.empty() || sizes.back() > kMostInRow)) {
      return std::nullopt;
    }
  }
  const bool broadcast =
      std::all_of(found.data.begin(), found.data.end(), [&](const Operand& from) {
        const auto& own = *from.sizes;
        return own.size() <= sizes.size() &&
               std::equal(own.rbegin(), own.rend(), sizes.rbegin(),
                          [](int64_t mine, int64_t all) { return mine == all || mine == 1; });
      });
  return broadcast && c10::multiply_integers(sizes) > 0 ? std::optional(std::move(found))
                                                        : std::nullopt;
}

Shape broadcastStrides(const Shape& sizes, const Shape& strides, const Shape& to) {
  Shape found(to.size(), 0);
  const auto missing = to.size() - sizes.size();
  for (const auto i : c10::irange(sizes.size())) {
    found[missing + i] = sizes[i] == 1 ? 0 : strides[i];
  }
  return found;
}

bool isSlowPointwise(const FoundPointwise& found, const std::vector<Layout>& data,
                     const Shape& strides) {
  const auto& sizes = found.chain.sizes;
  const bool usual = strides == c10::TensorType::contiguousStridesOf(sizes) ||
                     strides == channelsLastStrides(sizes);
  for (const auto i : c10::irange(data.size())) {
    const auto& own = *found.data[i].sizes;
    if (c10::multiply_integers(own) == 1) {
      continue;
    }
    const bool alike = own == sizes && data[i].get_strides() == canonicalStrides(sizes, strides);
    if (!alike && !(usual && own != sizes && sizes.size() > 2 && isByChannel(own, sizes.size()))) {
      return true;
    }
  }
  return !usual;
}

bool isFastPointwise(const FoundPointwise& found, bool whole) {
  constexpr size_t kMostFunctions = 4;
  constexpr int64_t kFew = 1 << 12;  // numbers, of which the call takes most of the time
  const auto functions = found.chain.instructions.size();
  return found.chain.readsRows() ||
         (functions <= kMostFunctions &&
          ((whole && functions > 1) || c10::multiply_integers(found.chain.sizes) <= kFew));
}

bool gathersMuch(const PointwiseChain& arranged) {
  constexpr int64_t kMany = 1 << 14;
  return c10::multiply_integers(arranged.sizes) >= kMany && arranged.gathers();
}

bool isAppliedByRow(const Operand& product, const Operand& operand) {
  return product.sizes && operand.sizes && !operand.sizes->empty() && product.sizes->size() > 2 &&
         operand.sizes->back() == 1 && product.sizes->back() != 1 &&
         c10::multiply_integers(*operand.sizes) != 1;
}

}  // namespace llga
