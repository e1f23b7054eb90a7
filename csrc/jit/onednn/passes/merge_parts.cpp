// Convolutions of all parts of an image, whose results are concatenated, become one in groups:
// MixNet's pointwise ones.
//
//   %2 : Tensor[] = aten::split_with_sizes(%x, [8, 8], 1)
//   %3 : Tensor, %4 : Tensor = prim::ListUnpack(%2)
//   %5 : Tensor = aten::_convolution(%3, %first, ...)
//   %6 : Tensor = aten::_convolution(%4, %second, ...)
//   %7 : Tensor[] = prim::ListConstruct(%5, %6)
//   %8 : Tensor = aten::cat(%7, 1)
//   %9 : Tensor = aten::batch_norm(%8, ...)
// ->
//   %9 : Tensor = aten::_convolution(%x, %both, ..., groups=2)
//
// The sums are the same ones, in the order in which a kernel for groups adds them up; no part is
// copied, and neither are the results. A batch norm, if it alone reads the concatenation, becomes
// part of the parameters as torch.jit.freeze has it behind other convolutions: parameters are
// rounded once more.
//
// For constant parameters of equal sizes, of pointwise and depthwise convolutions.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/norm_affine.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::toIValue;
namespace aten = torch::jit::aten;
namespace attr = torch::jit::attr;
namespace prim = torch::jit::prim;

struct Parts {
  std::vector<Node*> convolutions;  // of the parts, in order
  Node* root = nullptr;             // the concatenation, or the batch norm behind it
  int64_t groups = 0;
  at::Tensor weight;
  at::Tensor bias;  // undefined: there is none
};

bool isOnlyReadBy(const Value* value, const Node* reader) {
  return value->uses().size() == 1 && value->uses()[0].user == reader;
}

// What has these parts of its channels, all of them in order; or null.
Value* dividedInto(at::ArrayRef<Node*> readers) {
  auto* unpacked = readers.front()->input(0)->node();
  const bool chunks = unpacked->kind() == prim::ConstantChunk;
  if ((!chunks && unpacked->kind() != prim::ListUnpack) ||
      unpacked->outputs().size() != readers.size()) {
    return nullptr;
  }
  for (size_t i = 0; i < readers.size(); ++i) {
    if (readers[i]->input(0) != unpacked->output(i) ||
        !isOnlyReadBy(unpacked->output(i), readers[i])) {
      return nullptr;
    }
  }
  if (chunks) {
    return unpacked->i(attr::dim) == 1 ? unpacked->input() : nullptr;
  }
  auto* split = unpacked->input()->node();
  const bool parts = split->kind() == aten::split || split->kind() == aten::split_with_sizes ||
                     split->kind() == aten::chunk;
  return parts && isOnlyReadBy(split->output(), unpacked) && intOf(split->namedInput("dim")) == 1
             ? split->input(0)
             : nullptr;
}

// Whether both go over their data in the same way, with weights of the same sizes and type.
bool areAlike(const Node* a, const Node* b) {
  if (a->kind() != b->kind() || a->inputs().size() != b->inputs().size()) {
    return false;
  }
  for (size_t i = 3; i < a->inputs().size(); ++i) {
    const auto ours = toIValue(a->input(i));
    if (!ours || ours != toIValue(b->input(i))) {
      return false;
    }
  }
  const auto ours = constantTensor(a->input(1));
  const auto theirs = constantTensor(b->input(1));
  return ours.defined() && theirs.defined() && ours.sizes() == theirs.sizes() &&
         ours.scalar_type() == theirs.scalar_type();
}

// Whether its windows are of one pixel, or of one channel.
bool isOfOne(const Node* convolution) {
  const auto weight = constantTensor(convolution->input(1));
  const auto pixels = weight.numel() / std::max<int64_t>(1, weight.size(0) * weight.size(1));
  return pixels == 1 || weight.size(1) == 1;
}

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : aliases_(graph) {}

  std::optional<Parts> find(Node* concat) {
    auto* list = concat->input(0)->node();
    if (list->kind() != prim::ListConstruct || list->inputs().size() < 2 ||
        !isOnlyReadBy(list->output(), concat) || intOf(concat->namedInput("dim")) != 1) {
      return std::nullopt;
    }
    Parts parts;
    for (auto* value : list->inputs()) {
      auto* node = value->node();
      if (!isConvolution(node) || !isOnlyReadBy(value, list) ||
          node->owningBlock() != concat->owningBlock() ||
          (!parts.convolutions.empty() && !areAlike(parts.convolutions.front(), node))) {
        return std::nullopt;
      }
      parts.convolutions.push_back(node);
    }
    parts.root = concat;
    const auto* source = dividedInto(parts.convolutions);
    return source != nullptr && merge(parts, source) && !isWritten(parts, source)
               ? std::optional(parts)
               : std::nullopt;
  }

 private:
  bool merge(Parts& parts, const Value* source) {
    const auto* first = parts.convolutions.front();
    const auto weight = constantTensor(first->input(1));
    const auto groups = intOf(first->namedInput("groups"));
    if (!weight.defined() || !groups || weight.dim() < 3 || !isOfOne(first) ||
        (weight.scalar_type() != at::kFloat && weight.scalar_type() != at::kBFloat16)) {
      return false;
    }
    // Of an image without a batch the parts would be rows.
    const bool raises = first->kind() != aten::conv1d && first->kind() != aten::conv2d &&
                        first->kind() != aten::conv3d;
    if (!raises && shapes_.rank(source) != static_cast<size_t>(weight.dim())) {
      return false;
    }
    parts.groups = *groups * static_cast<int64_t>(parts.convolutions.size());
    std::vector<at::Tensor> weights;
    std::vector<at::Tensor> biases;
    for (const auto* node : parts.convolutions) {
      weights.push_back(constantTensor(node->input(1)));
      const auto bias = constantTensor(node->input(2));
      const bool none = node->input(2)->mustBeNone();
      if (!none && (!bias.defined() || bias.scalar_type() != weight.scalar_type() ||
                    bias.sizes() != at::IntArrayRef{weight.size(0)})) {
        return false;
      }
      biases.push_back(none ? at::zeros({weight.size(0)}, weight.options()) : bias);
    }
    parts.weight = at::cat(weights);
    if (!std::all_of(parts.convolutions.begin(), parts.convolutions.end(),
                     [](const Node* node) { return node->input(2)->mustBeNone(); })) {
      parts.bias = at::cat(biases);
    }
    foldNorm(parts);
    return true;
  }

  // Where what is folded is finite.
  static void foldNorm(Parts& parts) {
    const auto& uses = parts.root->output()->uses();
    auto* norm = uses.size() == 1 ? uses[0].user : nullptr;
    if (norm == nullptr || norm->kind() != aten::batch_norm || uses[0].offset != 0 ||
        norm->owningBlock() != parts.root->owningBlock() ||
        at::autocast::is_autocast_enabled(at::kCPU)) {
      return;
    }
    const auto affine = affineOf(norm);
    if (!affine || affine->scale.size(0) != parts.weight.size(0)) {
      return;
    }
    auto sizes = std::vector<int64_t>(static_cast<size_t>(parts.weight.dim()), 1);
    sizes[0] = -1;
    const auto dtype = parts.weight.scalar_type();
    const auto weight = (parts.weight.to(at::kDouble) * affine->scale.view(sizes)).to(dtype);
    auto bias = affine->shift;
    if (parts.bias.defined()) {
      bias = bias + parts.bias.to(at::kDouble) * affine->scale;
    }
    bias = bias.to(dtype);
    if ((affine->scale != 0).all().item<bool>() && weight.isfinite().all().item<bool>() &&
        bias.isfinite().all().item<bool>()) {
      parts.weight = weight;
      parts.bias = bias;
      parts.root = norm;
    }
  }

  bool isWritten(const Parts& parts, const Value* source) const {
    return aliases_.hasWriters(source) || aliases_.hasWriters(parts.root->output()) ||
           std::any_of(parts.convolutions.begin(), parts.convolutions.end(),
                       [&](const Node* node) { return aliases_.hasWriters(node->output()); });
  }

  const torch::jit::AliasDb aliases_;
  KnownShapes shapes_;
};

void apply(const Parts& parts) {
  auto* first = parts.convolutions.front();
  auto* graph = first->owningGraph();
  auto* source = dividedInto(parts.convolutions);  // now: it may be what another one was
  const torch::jit::WithInsertPoint guard(parts.root);
  auto* merged = graph->insertNode(graph->createClone(first, [](Value* value) { return value; }));
  merged->replaceInput(0, source);
  merged->replaceInput(1, graph->insertConstant(parts.weight));
  if (parts.bias.defined()) {
    merged->replaceInput(2, graph->insertConstant(parts.bias));
  }
  merged->replaceInputWith(merged->namedInput("groups"), graph->insertConstant(parts.groups));
  merged->moveBefore(parts.root);
  merged->output()->setType(parts.root->output()->type());
  parts.root->output()->replaceAllUsesWith(merged->output());
}

}  // namespace

void mergeParts(const GraphPtr& graph) {
  std::vector<Node*> concatenations;
  walk(graph->block(), [&](Node* node) {
    if (node->kind() == aten::cat) {
      concatenations.push_back(node);
    }
  });
  if (concatenations.empty()) {
    return;
  }
  std::vector<Parts> found;
  Finder finder(graph);
  for (auto* concat : concatenations) {
    if (auto parts = finder.find(concat)) {
      found.push_back(std::move(*parts));
    }
  }
  std::for_each(found.begin(), found.end(), apply);
  if (!found.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
