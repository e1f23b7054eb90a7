// Joins the group of a pointwise convolution with that of the depthwise one that alone reads it,
// and with that of the pointwise one that alone reads this.
//
//   %2 = llga::FusionGroup[Subgraph=<conv2d, hardtanh>](%1)
//   %3 = llga::FusionGroup[Subgraph=<conv2d, hardtanh>](%2)
//   %4 = llga::FusionGroup[Subgraph=<conv2d, add>](%3, %1)
// ->
//   %4 = llga::FusionGroup[Subgraph=<conv2d, hardtanh, conv2d, hardtanh, conv2d, add>](%1)
//
// The first one may also be the first convolution of a network, of a few planes.
//
// And both with the concatenation that alone reads them, as in GhostNets:
//
//   %2 = llga::FusionGroup[Subgraph=<conv2d, relu>](%1)
//   %3 = llga::FusionGroup[Subgraph=<conv2d, relu>](%2)
//   %4 = llga::FusionGroup[Subgraph=<cat>](%2, %3)
// ->
//   %4 = llga::FusionGroup[Subgraph=<conv2d, relu, conv2d, relu, cat>](%1)
//
// PReLU, which oneDNN leaves in a group of its own, may stand for the activations (MobileFaceNet).
//
// oneDNN has no partition of all three; a plan for the group may compute them a few rows at a time
// (runtime/expansion.h). MobileNets and EfficientNets have them in each block.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
namespace aten = torch::jit::aten;

struct Convolution {
  std::vector<int64_t> weight;  // sizes, outputs first
  const Value* data;            // of the subgraph
  bool quantized;               // data of 8 bit

  bool isPointwise() const { return weight[2] == 1 && weight[3] == 1; }
  // Of a few planes, as the first one of a network.
  bool isFirst() const {
    constexpr int64_t kMostPlanes = 4;
    return !quantized && weight[1] > 1 && weight[1] <= kMostPlanes && !isPointwise();
  }
  bool isDepthwise() const { return weight[1] == 1 && weight[2] > 1 && weight[3] > 1; }
};

// Of images, with a constant weight.
std::optional<Convolution> convolutionOf(const Node* op) {
  if (!isProduct(op) || !op->hasNamedInput("weight") || !op->hasNamedInput("groups")) {
    return std::nullopt;
  }
  const auto* weight = op->namedInput("weight");
  const auto plain = torch::jit::toIValue(weight);
  const auto eight_bit = quantizedConstant(weight);
  const auto tensor = eight_bit                    ? eight_bit->tensor
                      : plain && plain->isTensor() ? plain->toTensor()
                                                   : at::Tensor();
  constexpr int64_t kRank = 4;
  if (!tensor.defined() || tensor.dim() != kRank) {
    return std::nullopt;
  }
  const auto* padding = paddingOf(op);
  const auto* data = padding != nullptr ? padding->input(0) : op->namedInput("input");
  const bool quantized = eight_bit && isDequantize(data->node());
  return Convolution{tensor.sizes().vec(), quantized ? data->node()->input(0) : data, quantized};
}

// But for what only converts from or to 8 bit.
std::vector<const Node*> arithmetic(const Node* group) {
  auto ops = computations(*group->g(torch::jit::attr::Subgraph));
  ops.erase(std::remove_if(ops.begin(), ops.end(),
                           [](const Node* op) { return isQuantize(op) || isDequantize(op); }),
            ops.end());
  return ops;
}

// Of a group that is one, and maybe one more op, of 8 bit two.
std::optional<Convolution> soleConvolution(const Node* group) {
  const auto ops = arithmetic(group);
  auto found = ops.empty() ? std::nullopt : convolutionOf(ops[0]);
  const bool few = found && ops.size() <= (found->quantized ? 3U : 2U);
  return few ? std::move(found) : std::nullopt;
}

// Of a group that is a pointwise one, what makes float32 of its result, and maybe a sum.
std::optional<Convolution> widenedProjection(const Node* group) {
  const auto ops = arithmetic(group);
  const bool is =
      (ops.size() == 2 || (ops.size() == 3 && ops[2]->kind() == aten::add)) && isPlainCast(ops[1]);
  auto found = is ? convolutionOf(ops[0]) : std::nullopt;
  return found && found->isPointwise() ? std::move(found) : std::nullopt;
}

// Whether the group is a pointwise convolution and a depthwise one, each with one more op at most:
// oneDNN 3.7 has such partitions in bfloat16.
bool isExpansion(const Node* group) {
  constexpr size_t kMost = 4;
  const auto ops = arithmetic(group);
  std::vector<Convolution> found;
  for (const auto* op : ops) {
    if (const auto convolution = convolutionOf(op)) {
      found.push_back(*convolution);
    }
  }
  return ops.size() <= kMost && found.size() == 2 && isProduct(ops[0]) && found[0].isPointwise() &&
         found[1].isDepthwise();
}

// The group whose only result is this value of `group`'s subgraph, which has so many readers.
Node* producerOf(Node* group, const Value* data, size_t readers) {
  const auto inputs = group->g(torch::jit::attr::Subgraph)->inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto* value = group->input(i);
    if (inputs[i] == data) {
      const bool sole = value->uses().size() == readers && isFusionGroup(value->node()) &&
                        value->node()->outputs().size() == 1 &&
                        value->node()->owningBlock() == group->owningBlock();
      return sole ? value->node() : nullptr;
    }
  }
  return nullptr;
}

// Whether the group is PReLU alone, whose slopes are constant.
bool isSloped(const Node* group) {
  const auto* op = soleComputation(*group->g(torch::jit::attr::Subgraph));
  return op != nullptr && op->kind() == aten::prelu &&
         torch::jit::toIValue(op->namedInput("weight")).has_value();
}

// Likewise producerOf() of what PReLU reads.
Node* producerOfSloped(Node* group) {
  const auto* op = soleComputation(*group->g(torch::jit::attr::Subgraph));
  return producerOf(group, op->namedInput("self"), 1);
}

// The groups of a pointwise convolution, and of a depthwise one of its result, if `group` is the
// concatenation of both results and nobody else reads these; else nothing.
std::vector<Node*> concatenated(Node* group) {
  constexpr size_t kParts = 2;
  const auto* concat = soleComputation(*group->g(torch::jit::attr::Subgraph));
  if (concat == nullptr || concat->kind() != aten::cat ||
      torch::jit::toIValue(concat->namedInput("dim")) != c10::IValue(1)) {
    return {};
  }
  const auto parts = concat->input(0)->node()->inputs();
  if (parts.size() != kParts) {
    return {};
  }
  auto* pointwise = producerOf(group, parts[0], 2);
  auto* depthwise = producerOf(group, parts[1], 1);
  const auto expands = pointwise != nullptr ? soleConvolution(pointwise) : std::nullopt;
  const auto reads = depthwise != nullptr ? soleConvolution(depthwise) : std::nullopt;
  const bool are = expands && expands->isPointwise() && !expands->quantized && reads &&
                   reads->isDepthwise() && !reads->quantized &&
                   producerOf(depthwise, reads->data, 2) == pointwise;
  return are ? std::vector<Node*>{pointwise, depthwise, group} : std::vector<Node*>{};
}

class Joiner {
 public:
  explicit Joiner(const GraphPtr& graph) : aliases_(graph) {}

  void visit(Node* node) {
    if (!isFusionGroup(node) || node->outputs().size() != 1) {
      return;
    }
    if (isExpansion(node)) {
      joined_.push_back(node);
      return;
    }
    if (const auto groups = concatenated(node); !groups.empty()) {
      mergeIntoGroup(groups, aliases_);
      return;
    }
    if (isSloped(node)) {
      auto* before = producerOfSloped(node);
      if (isJoined(before) && join({before}, node)) {
        joined_.push_back(node);
      }
      return;
    }
    const auto widened = widenedProjection(node);
    const auto convolution = widened ? widened : soleConvolution(node);
    if (!convolution) {
      return;
    }
    if (convolution->isDepthwise()) {
      const auto before = expanding(node, *convolution);
      const bool expands = !before.empty() && join(before, node);
      if (expands || convolution->quantized) {
        joined_.push_back(node);
      }
    } else if (convolution->isPointwise()) {
      auto* before = producerOf(node, convolution->data, 1);
      if (isJoined(before)) {
        join({before}, node);
      }
    }
  }

 private:
  bool isJoined(const Node* group) const {
    return std::find(joined_.begin(), joined_.end(), group) != joined_.end();
  }

  // The groups that make the data of a depthwise convolution, the one of an expansion and maybe
  // PReLU; empty if these are others.
  static std::vector<Node*> expanding(Node* node, const Convolution& depthwise) {
    std::vector<Node*> before{producerOf(node, depthwise.data, 1)};
    if (before[0] != nullptr && isSloped(before[0])) {
      before.insert(before.begin(), producerOfSloped(before[0]));
    }
    auto* first = before.front();
    const bool narrow = first != nullptr && !widenedProjection(first);
    const auto known = narrow ? soleConvolution(first) : std::nullopt;
    const bool expands = known && (known->isPointwise() || known->isFirst()) &&
                         known->weight[0] == depthwise.weight[0];
    return expands ? before : std::vector<Node*>{};
  }

  bool join(std::vector<Node*> nodes, Node* last) {
    nodes.push_back(last);
    return mergeIntoGroup(nodes, aliases_);
  }

  AliasDb aliases_;
  std::vector<const Node*> joined_;  // depthwise convolutions that a projection may join
};

}  // namespace

void joinDepthwise(const GraphPtr& graph) {
  Joiner joiner(graph);
  walk(graph->block(), [&](Node* node) { joiner.visit(node); });
}

}  // namespace llga
