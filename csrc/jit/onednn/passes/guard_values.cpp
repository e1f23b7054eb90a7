// Marks the inputs that a group may only take when they are finite.
//
//   %2 = llga::FusionGroup[llga_must_be_finite=[1]](%x)     where relu follows
//
// oneDNN's vector kernels compute relu, clamp, max pooling and a few more with instructions that
// turn NaN into a number; in eager NaN survives them. NaN comes in through an input (or arises
// from an infinite one), so values are looked at where they enter a chain of groups, once: inside
// the chain only fusion groups touch them, and a group that fell back marks what it returns where
// that is not finite.
// What overflows inside a chain is not seen. Nor do its kernels multiply infinities by a share of 0
// where they interpolate, which gives NaN in eager.
//
// With AMX, oneDNN's convolution of bfloat16 images of up to four channels multiplies pixels beside
// a window of several by zeros (3.2 and 3.12, so eager's as well): a NaN spreads. What it reads is
// looked at, too.
//
// Masks of attention are -inf by design: groups with a softmax look at nothing. Only where
// attention alone is a group and causal, keys and values have to be finite: what NaN of those a
// query must not see reaches depends on how a kernel divides the work.
#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

const std::unordered_set<Symbol>& kinds(const char* list) {
  static std::unordered_map<std::string, std::unordered_set<Symbol>> known;
  auto [it, added] = known.try_emplace(list);
  if (added) {
    std::string word;
    for (const char* c = list;; ++c) {
      if (*c == ' ' || *c == '\0') {
        it->second.insert(Symbol::fromQualString("aten::" + word));
        word.clear();
        if (*c == '\0') {
          break;
        }
      } else {
        word += *c;
      }
    }
  }
  return it->second;
}

// Resizing that our own kernels compute, as eager does.
bool alignsCorners(const Node* node) {
  static const auto kBilinear = Symbol::aten("upsample_bilinear2d");
  return node->kind() == kBilinear && isTrue(node->namedInput("align_corners"));
}

bool contains(const Node* group, const std::unordered_set<Symbol>& wanted) {
  for (const auto* node : group->g(torch::jit::attr::Subgraph)->nodes()) {
    // GELU's tanh form is made of ops that keep NaN.
    if (wanted.count(node->kind()) != 0 && !isTanhGelu(node) && !alignsCorners(node)) {
      return true;
    }
  }
  return false;
}

// Keys and values of a group that is causal attention and nothing else, as indices of its inputs.
std::unordered_set<size_t> ofCausalAttention(const Graph& subgraph) {
  const auto* node = soleComputation(subgraph);
  if (node == nullptr || node->kind() != torch::jit::aten::scaled_dot_product_attention) {
    return {};
  }
  const auto causal = torch::jit::toIValue(node->namedInput("is_causal"));
  if (causal && !causal->toBool()) {
    return {};
  }
  std::unordered_set<size_t> found;
  for (size_t i = 0; i < subgraph.inputs().size(); ++i) {
    const auto* input = subgraph.inputs()[i];
    if (input == node->namedInput("key") || input == node->namedInput("value")) {
      found.insert(i);
    }
  }
  return found;
}

class Guard {
 public:
  void visit(Block* block) {
    for (auto* node : block->nodes()) {
      for (auto* nested : node->blocks()) {
        visit(nested);
      }
      if (isFusionGroup(node)) {
        mark(node);
      }
    }
  }

 private:
  static const std::unordered_set<Symbol>& losesNan() {
    return kinds(
        "relu relu6 hardtanh clamp clamp_min clamp_max gelu hardsigmoid exp max_pool1d max_pool2d "
        "max_pool3d max_pool2d_with_indices max min amax amin maximum minimum "
        "upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
        "quantize_per_tensor quantize_per_channel");
  }

  // Whether a NaN in `group` could get lost there or in the groups that read its free layouts.
  bool leadsToLoss(const Node* group) {
    if (const auto it = leads_.find(group); it != leads_.end()) {
      return it->second;
    }
    bool result = contains(group, losesNan());
    const auto any =
        group->hasAttribute(anyLayoutAttr()) ? group->is(anyLayoutAttr()) : std::vector<int64_t>();
    for (size_t i = 0; i < any.size() && !result; ++i) {
      for (const auto& use : group->outputs()[i]->uses()) {
        result = result || (any[i] != 0 && isFusionGroup(use.user) && leadsToLoss(use.user));
      }
    }
    return leads_[group] = result;
  }

  static bool mightSpreadNan(const Node* group) {
    constexpr int64_t kFewChannels = 4;
    const auto nodes = group->g(torch::jit::attr::Subgraph)->nodes();
    return std::any_of(nodes.begin(), nodes.end(), [](const Node* node) {
      if (!isConvolution(node)) {
        return false;
      }
      const auto weight = constantTensor(node->namedInput("weight"));
      const auto groups = torch::jit::toIValue(node->namedInput("groups"));
      return weight.defined() && weight.scalar_type() == at::kBFloat16 && weight.dim() > 2 &&
             weight.size(1) <= kFewChannels && weight[0][0].numel() > 1 &&
             (!groups || groups->toInt() == 1);
    });
  }

  void mark(Node* group) {
    const bool watch =
        (leadsToLoss(group) || mightSpreadNan(group)) &&
        !contains(group, kinds("softmax log_softmax scaled_dot_product_attention")) &&
        !contains(group, {unsafeAttentionKind()});
    const auto needed = ofCausalAttention(*group->g(torch::jit::attr::Subgraph));
    std::vector<int64_t> finite;
    for (size_t i = 0; i < group->inputs().size(); ++i) {
      const bool owned =
          group->hasAttribute(groupOwnedAttr()) && group->is(groupOwnedAttr())[i] != 0;
      const bool read = (watch && isTensor(group->inputs()[i])) || needed.count(i) != 0;
      finite.push_back(read && !owned ? 1 : 0);
    }
    group->is_(mustBeFiniteAttr(), finite);
  }

  std::unordered_map<const Node*, bool> leads_;
};

}  // namespace

void guardValues(const GraphPtr& graph) { Guard().visit(graph->block()); }

}  // namespace llga
