// Convolutions and batch norms of one tensor whose results are added become one convolution: the
// branches that RepVGG, MobileOne and FastViT have when they are served as they were trained.
//
//   %2 : Tensor = aten::_convolution(%x, %3x3, %bias, ...)
//   %3 : Tensor = aten::_convolution(%x, %1x1, %other, ...)
//   %4 : Tensor = aten::add(%2, %3, %one)
//   %5 : Tensor = aten::batch_norm(%x, ...)
//   %6 : Tensor = aten::add(%4, %5, %one)
// ->
//   %7 : Tensor = aten::_convolution(%x, %merged, %sum, ...)
//   %6 : Tensor = llga::of_batch(%7, %x)
//
// Sums, differences, numbers that are added, and constant factors of each channel may be in
// between. Of depthwise convolutions %x itself may be a branch: residuals, as position encodings
// by convolution have them. A batch norm takes another dimension for its channels if %x is an image
// without a batch, which aten::conv2d takes, but no traced convolution; where the rank is not
// proven, llga::of_batch, which costs nothing inside a group, holds what was there before, for
// such.
//
// Where branches multiply an infinity by factors of either sign, eager's sum is NaN; that of the
// merged factor is an infinity, or NaN if it is 0.
//
// Only for constant parameters and for branches that nothing else reads. Merged parameters are
// rounded to the data type that they had, once; results of branches, each of which was rounded, are
// no more. Float32 is not merged into parameters of bfloat16, neither a norm's factors nor a sum,
// nor are factors: what is rounded there is off by as much in each pixel. Depthwise convolutions,
// which take as long in float32, become one of float32 then, of %x before it is rounded.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/known_shapes.h"
#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/norm_affine.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

using torch::jit::Stack;
using torch::jit::toIValue;
namespace aten = torch::jit::aten;

void registerOfBatch() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::of_batch(Tensor(a) result, Tensor x) -> Tensor(a)",
      [](const Node* node) -> torch::jit::Operation {
        const auto rank = node->i(rankAttr());
        const torch::jit::Code code(node->g(otherwiseAttr()), "llga_of_batch");
        return [rank, code](Stack& stack) {
          const auto x = torch::jit::pop(stack).toTensor();
          if (x.dim() == rank) {
            return;
          }
          torch::jit::drop(stack, 1);
          Stack computed{x};
          torch::jit::InterpreterState(code).run(computed);
          torch::jit::push(stack, std::move(computed.front()));
        };
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

bool isFactor(const Value* value) { return constantTensor(value).defined() || numberOf(value); }

// Of aten::mul, which operand is a constant, if one is.
size_t factorAt(const Node* mul) { return isFactor(mul->input(0)) ? 0 : 1; }

// How a convolution goes over its input.
struct Steps {
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;
  std::vector<int64_t> dilation;
  int64_t groups = 1;
};

// A linear function of an image; parameters in float64.
struct Branch {
  std::optional<Steps> steps;  // none: each channel has a factor
  at::Tensor weight;           // as a convolution has it, or the factors
  at::Tensor bias;             // of each channel
};

std::optional<std::vector<int64_t>> intsOf(const Value* value, size_t count) {
  auto ints = llga::intsOf(value);
  if (ints && ints->size() == 1) {
    ints->resize(count, ints->front());
  }
  return ints && ints->size() == count ? ints : std::nullopt;
}

std::optional<Branch> convolutionOf(const Node* node) {
  const auto weight = constantTensor(node->input(1));
  if (!weight.defined() || weight.dim() < 3 || !weight.is_floating_point()) {
    return std::nullopt;
  }
  const auto spatial = static_cast<size_t>(weight.dim()) - 2;
  auto stride = intsOf(node->namedInput("stride"), spatial);
  auto padding = intsOf(node->namedInput("padding"), spatial);
  auto dilation = intsOf(node->namedInput("dilation"), spatial);
  const auto groups = intOf(node->namedInput("groups"));
  if (!stride || !padding || !dilation || !groups) {
    return std::nullopt;
  }
  Branch branch{Steps{*stride, *padding, *dilation, *groups}, weight.to(at::kDouble), {}};
  if (node->input(2)->mustBeNone()) {
    branch.bias = at::zeros({weight.size(0)}, at::kDouble);
  } else {
    const auto bias = constantTensor(node->input(2));
    if (!bias.defined() || bias.scalar_type() != weight.scalar_type() || bias.dim() != 1 ||
        bias.size(0) != weight.size(0)) {
      return std::nullopt;
    }
    branch.bias = bias.to(at::kDouble);
  }
  return branch;
}

std::optional<Branch> normOf(const Node* node) {
  const auto affine = affineOf(node);
  return affine ? std::optional(Branch{std::nullopt, affine->scale, affine->shift}) : std::nullopt;
}

// What a convolution reads, as a branch beside it.
Branch identityLike(const Node* convolution) {
  const auto channels = constantTensor(convolution->input(1)).size(1) *
                        intOf(convolution->namedInput("groups")).value();
  return {std::nullopt, at::ones({channels}, at::kDouble), at::zeros({channels}, at::kDouble)};
}

// The factors as the convolution of one pixel that they are, to go with `like`; none if that one
// makes another number of pixels or of channels.
std::optional<Branch> asConvolution(const Branch& factors, const Branch& like) {
  const auto channels = factors.weight.size(0);
  const auto groups = like.steps->groups;
  if (like.weight.size(0) != channels || like.weight.size(1) * groups != channels) {
    return std::nullopt;
  }
  const auto spatial = like.steps->stride.size();
  auto sizes = std::vector<int64_t>(spatial + 2, 1);
  sizes[0] = channels;
  sizes[1] = channels / groups;
  const auto within = at::arange(channels).remainder(channels / groups);
  auto weight = at::zeros({channels, channels / groups}, at::kDouble);
  weight.scatter_(1, within.unsqueeze(1), factors.weight.unsqueeze(1));
  return Branch{Steps{std::vector<int64_t>(spatial, 1), std::vector<int64_t>(spatial, 0),
                      std::vector<int64_t>(spatial, 1), groups},
                weight.view(sizes), factors.bias};
}

// Of which one of the two has the larger kernel, or as large a one, in every dimension.
std::optional<Branch> sumOfConvolutions(const Branch& a, const Branch& b, double sign) {
  const bool swapped = a.weight.numel() < b.weight.numel();
  const auto& large = swapped ? b : a;
  const auto& small = swapped ? a : b;
  if (a.steps->stride != b.steps->stride || a.steps->groups != b.steps->groups ||
      a.weight.size(0) != b.weight.size(0) || a.weight.size(1) != b.weight.size(1)) {
    return std::nullopt;
  }
  Branch sum{large.steps, large.weight * (swapped ? sign : 1), a.bias + b.bias * sign};
  auto here = sum.weight;
  for (size_t i = 0; i < large.steps->stride.size(); ++i) {
    const auto dim = static_cast<int64_t>(i) + 2;
    const auto taps = small.weight.size(dim);
    const auto dilation = large.steps->dilation[i];
    const auto before = large.steps->padding[i] - small.steps->padding[i];  // pixels
    const auto first = before / dilation;
    if ((taps != 1 && small.steps->dilation[i] != dilation) || before < 0 ||
        before % dilation != 0 || 2 * before != dilation * (large.weight.size(dim) - taps)) {
      return std::nullopt;
    }
    here = here.narrow(dim, first, taps);
  }
  here.add_(small.weight, swapped ? 1 : sign);
  return sum;
}

std::optional<Branch> sumOf(const Branch& a, const Branch& b, double sign) {
  if (a.steps && b.steps) {
    return sumOfConvolutions(a, b, sign);
  }
  if (!a.steps && !b.steps) {
    return a.weight.size(0) == b.weight.size(0)
               ? std::optional(
                     Branch{std::nullopt, a.weight + b.weight * sign, a.bias + b.bias * sign})
               : std::nullopt;
  }
  const auto other = asConvolution(a.steps ? b : a, a.steps ? a : b);
  if (!other) {
    return std::nullopt;
  }
  return a.steps ? sumOfConvolutions(a, *other, sign) : sumOfConvolutions(*other, b, sign);
}

// Whether it raises for an image without a batch.
bool takesBatchesOnly(const Node* convolution) {
  return convolution->kind() == aten::_convolution || convolution->kind() == aten::convolution;
}

// Autocast rounds what each convolution takes by a cast of its own.
bool isSame(const Value* a, const Value* b) {
  return a == b || (reducesTo(a->node()) && reducesTo(a->node()) == reducesTo(b->node()) &&
                    a->node()->input(0) == b->node()->input(0));
}

Dtype castOf(const Node* cast) {
  return widens(cast) ? at::kFloat : reducesTo(cast) ? reducesTo(cast) : castsTo(cast);
}

// What autocast, while the module was traced or now, rounds to it.
template <typename AnyValue>  // Value or const Value
AnyValue* unrounded(AnyValue* value) {
  auto* node = value->node();
  return isPlainCast(node) && castOf(node) == at::kBFloat16 ? node->input(0) : value;
}

bool isDepthwise(const Node* convolution) {
  const auto weight = constantTensor(convolution->input(1));
  return weight.dim() > 1 && weight.size(1) == 1 &&
         intOf(convolution->namedInput("groups")) == weight.size(0);
}

// What a sum is computed by: the nodes between one tensor and the sum.
struct Tree {
  Node* root = nullptr;
  Value* source = nullptr;
  bool one_source = true;  // that nobody rounds alone
  bool identity = false;   // the source itself is a branch
  bool casts = false;      // between branches and sum
  bool wide = false;       // merged in float32, of convolutions in bfloat16
  bool narrow_source = false;
  std::vector<Node*> convolutions;
  Nodes norms;
  Nodes nodes;            // all
  bool of_batch = false;  // it may be called with an image without a batch
  at::Tensor weight;      // of the convolution that all of it is
  at::Tensor bias;
  std::unordered_map<const Node*, std::optional<Branch>> branches;  // what nodes compute; of null
                                                                    // the source
};

// Rounded or not.
bool isSource(const Value* value, const Tree& tree) {
  return unrounded(value) == unrounded(static_cast<const Value*>(tree.source));
}

class Finder {
 public:
  explicit Finder(const GraphPtr& graph) : graph_(graph) {
    walk(graph->block(), [this](const Node* node) { types_.learn(node); });
  }

  std::optional<Tree> find(Node* root) {
    for (auto* source : sourcesBelow(root)) {
      if (auto tree = find(root, source)) {
        return tree;
      }
    }
    return std::nullopt;
  }

 private:
  // What convolutions near the root read, of which all of its tree may be a function.
  static std::vector<Value*> sourcesBelow(Node* root) {
    constexpr size_t kMany = 64;  // a residual is a sum of all that is before it
    std::vector<Node*> nodes{root};
    std::vector<Value*> found;
    const auto isNew = [](const auto& list, auto* item) {
      return std::find(list.begin(), list.end(), item) == list.end();
    };
    for (size_t i = 0; i < nodes.size(); ++i) {
      auto* node = nodes[i];
      for (auto* value : operandsOf(node)) {
        if (nodes.size() < kMany && isNew(nodes, value->node())) {
          nodes.push_back(value->node());
        }
      }
      if (isConvolution(node) && isNew(found, node->input(0))) {
        found.push_back(node->input(0));
      }
    }
    return found;
  }

  // What a sum or product, or a cast of one, is computed of; nothing for what may be a branch.
  static std::vector<Value*> operandsOf(Node* node) {
    switch (node->kind()) {
      case aten::add:
      case aten::sub:
        return numberOf(node->input(1)) || !isTensor(node->input(1))
                   ? std::vector<Value*>{node->input(0)}
                   : std::vector<Value*>{node->input(0), node->input(1)};
      case aten::mul:
        return {node->input(1 - factorAt(node))};
      default:
        return node->kind() == asTargetKind() ? std::vector<Value*>{node->input(0), node->input(1)}
               : isPlainCast(node)            ? std::vector<Value*>{node->input(0)}
                                              : std::vector<Value*>{};
    }
  }

  std::optional<Tree> find(Node* root, Value* source) {
    Tree tree;
    tree.root = root;
    tree.source = source;
    if (!collect(root->output(), tree) || tree.convolutions.empty() || tree.nodes.size() < 2 ||
        !isRead(tree) || isWritten(tree)) {
      return std::nullopt;
    }
    const auto dtype = typeOf(tree);
    if (!dtype) {
      return std::nullopt;
    }
    const auto weight = constantTensor(tree.convolutions.front()->input(1));
    const auto rank = weight.dim();
    const bool raises = std::all_of(tree.convolutions.begin(), tree.convolutions.end(),
                                    [](const Node* node) { return takesBatchesOnly(node); });
    tree.of_batch = !raises && shapes_.rank(tree.source) != static_cast<size_t>(rank);
    tree.wide = weight.scalar_type() != dtype;
    tree.narrow_source = isReducedPrecision(types_.of(unrounded(tree.source)));
    return merge(tree, *dtype) ? std::optional(std::move(tree)) : std::nullopt;
  }

  static bool collect(Value* value, Tree& tree) {
    auto* node = value->node();
    if (isSource(value, tree)) {
      tree.identity = true;
      tree.one_source = tree.one_source && isSame(tree.source, value);
      return true;
    }
    if (node->owningBlock() != tree.root->owningBlock()) {
      return false;
    }
    if (tree.nodes.count(node) != 0) {
      return true;
    }
    tree.nodes.insert(node);
    switch (node->kind()) {
      case aten::add:
      case aten::sub:
        return collect(node->input(0), tree) &&
               (numberOf(node->input(1)) ||
                (isTensor(node->input(1)) && collect(node->input(1), tree))) &&
               numberOf(node->input(2));
      case aten::mul:
        return isFactor(node->input(factorAt(node))) &&
               collect(node->input(1 - factorAt(node)), tree);
      case aten::batch_norm:
        tree.norms.insert(node);
        break;
      default:
        if (node->kind() == asTargetKind()) {
          return collect(node->input(0), tree) && collect(node->input(1), tree);
        }
        if (isPlainCast(node)) {
          tree.casts = true;
          const auto dtype = castOf(node);
          return (dtype == at::kFloat || dtype == at::kBFloat16) && collect(node->input(0), tree);
        }
        if (!isConvolution(node)) {
          return false;
        }
        tree.convolutions.push_back(node);
    }
    tree.one_source = tree.one_source && isSame(tree.source, node->input(0));
    return isSource(node->input(0), tree);
  }

  // By itself alone. A norm may have other readers, for which it stays.
  static bool isRead(const Tree& tree) {
    return std::all_of(tree.nodes.begin(), tree.nodes.end(), [&](const Node* node) {
      const auto& uses = node->output()->uses();
      return node == tree.root || tree.norms.count(node) != 0 ||
             std::all_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
               return tree.nodes.count(use.user) != 0;
             });
    });
  }

  bool isWritten(const Tree& tree) {
    if (aliases_ == nullptr) {
      aliases_ = std::make_unique<torch::jit::AliasDb>(graph_);
    }
    return aliases_->hasWriters(tree.source) ||
           std::any_of(tree.nodes.begin(), tree.nodes.end(),
                       [&](const Node* node) { return aliases_->hasWriters(node->output()); });
  }

  // Of merged parameters: that of the convolutions, which all that they are added up to has; or
  // float32. None if they are of no use.
  Dtype typeOf(const Tree& tree) {
    const auto weight = constantTensor(tree.convolutions.front()->input(1));
    if (!weight.defined()) {
      return std::nullopt;
    }
    const auto dtype = weight.scalar_type();
    const bool same = std::all_of(tree.convolutions.begin(), tree.convolutions.end(),
                                  [&](const Node* convolution) {
                                    const auto other = constantTensor(convolution->input(1));
                                    return other.defined() && other.scalar_type() == dtype;
                                  });
    if (!same || (dtype == at::kFloat && (within_autocast_ || tree.casts || !tree.one_source))) {
      return std::nullopt;
    }
    if (tree.identity &&
        !std::all_of(tree.convolutions.begin(), tree.convolutions.end(), isDepthwise)) {
      return std::nullopt;
    }
    if (dtype != at::kBFloat16) {
      return dtype == at::kFloat ? Dtype(dtype) : std::nullopt;
    }
    const bool narrow = tree.one_source && tree.norms.empty() && !tree.identity &&
                        std::all_of(tree.nodes.begin(), tree.nodes.end(), [&](const Node* node) {
                          return node->kind() != aten::mul && types_.of(node->output()) == dtype;
                        });
    return narrow ? Dtype(dtype) : isWide(tree) ? Dtype(at::kFloat) : std::nullopt;
  }

  // Whether depthwise convolutions of bfloat16 are added up in float32.
  bool isWide(const Tree& tree) {
    const auto* source = unrounded(tree.source);
    const auto dtype = types_.of(source);
    return types_.of(tree.root->output()) == at::kFloat && types_.isCertain(source) &&
           (dtype == at::kFloat || dtype == at::kBFloat16) &&
           std::all_of(tree.convolutions.begin(), tree.convolutions.end(), [](const Node* node) {
             return isDepthwise(node) && takesBatchesOnly(node);
           });
  }

  // False if the sum is none, or merged parameters are of no use.
  static bool merge(Tree& tree, at::ScalarType dtype) {
    const auto& sum = branch(tree.root->output(), tree);
    if (!sum) {
      return false;
    }
    tree.weight = sum->weight.to(dtype);
    tree.bias = sum->bias.to(dtype);
    tree.branches.clear();
    return tree.weight.isfinite().all().item<bool>() && tree.bias.isfinite().all().item<bool>();
  }

  static const std::optional<Branch>& branch(const Value* value, Tree& tree) {
    const auto* node = isSource(value, tree) ? nullptr : value->node();
    const auto known = tree.branches.find(node);
    if (known != tree.branches.end()) {
      return known->second;
    }
    return tree.branches[node] =
               node != nullptr ? compute(node, tree) : identityLike(tree.convolutions.front());
  }

  static std::optional<Branch> compute(const Node* node, Tree& tree) {
    switch (node->kind()) {
      case aten::add:
      case aten::sub: {
        const auto& first = branch(node->input(0), tree);
        const auto times = *numberOf(node->input(2));
        const auto sign = node->kind() == aten::sub ? -times : times;
        const auto number = numberOf(node->input(1));
        if (!first || sign == 0) {
          return std::nullopt;
        }
        if (number) {
          return Branch{first->steps, first->weight, first->bias + *number * sign};
        }
        const auto& second = branch(node->input(1), tree);
        return second ? sumOf(*first, *second, sign) : std::nullopt;
      }
      case aten::mul: {
        const auto& multiplied = branch(node->input(1 - factorAt(node)), tree);
        return multiplied ? scaled(*multiplied, node->input(factorAt(node)), tree) : std::nullopt;
      }
      case aten::batch_norm:
        return normOf(node);
      default:
        return isConvolution(node) ? convolutionOf(node) : branch(node->input(0), tree);
    }
  }

  static std::optional<Branch> scaled(const Branch& branch, const Value* by, const Tree& tree) {
    const auto factor = constantTensor(by);
    const auto channels = branch.bias.size(0);
    const auto rank = constantTensor(tree.convolutions.front()->input(1)).dim();
    at::Tensor factors;
    if (const auto number = numberOf(by)) {
      factors = at::full({channels}, *number, at::kDouble);
    } else if (factor.is_floating_point() && factor.scalar_type() != at::kDouble &&
               (factor.dim() == rank - 1 || (factor.dim() == rank && !tree.of_batch)) &&
               factor.numel() == channels && factor.size(1 - rank) == channels) {
      factors = factor.reshape({-1}).to(at::kDouble);
    } else {
      return std::nullopt;
    }
    if (!(factors != 0).all().item<bool>()) {
      return std::nullopt;  // inf * 0 is not 0
    }
    auto sizes = std::vector<int64_t>(static_cast<size_t>(branch.weight.dim()), 1);
    sizes[0] = -1;
    return Branch{branch.steps, branch.weight * factors.view(sizes), branch.bias * factors};
  }

  const GraphPtr& graph_;
  bool within_autocast_ = at::autocast::is_autocast_enabled(at::kCPU);
  Nodes narrowed_;
  KnownTypes types_{narrowed_};
  KnownShapes shapes_;
  std::unique_ptr<torch::jit::AliasDb> aliases_;
};

// The nodes of a tree as a function of its source.
std::shared_ptr<Graph> functionOf(const Tree& tree) {
  auto function = std::make_shared<Graph>();
  std::unordered_map<const Value*, Value*> values{{tree.source, function->addInput()}};
  auto valueOf = [&](Value* value) {
    const auto known = values.find(isSame(value, tree.source) ? tree.source : value);
    return known != values.end() ? known->second
                                 : values[value] = function->insertConstant(*toIValue(value));
  };
  for (auto* node : tree.root->owningBlock()->nodes()) {
    if (tree.nodes.count(node) != 0) {
      auto* copy = function->insertNode(function->createClone(node, valueOf));
      values[node->output()] = copy->output();
    }
  }
  function->registerOutput(values.at(tree.root->output()));
  return function;
}

void apply(const Tree& tree) {
  auto* graph = tree.root->owningGraph();
  const auto isLargest = [&](const Node* node) {
    return constantTensor(node->input(1)).sizes() == tree.weight.sizes();
  };
  auto* like = *std::find_if(tree.convolutions.begin(), tree.convolutions.end(), isLargest);
  const torch::jit::WithInsertPoint guard(tree.root);
  auto* merged = graph->insertNode(graph->createClone(like, [](Value* value) { return value; }));
  merged->replaceInput(1, graph->insertConstant(tree.weight));
  merged->replaceInput(2, graph->insertConstant(tree.bias));
  merged->moveBefore(tree.root);
  merged->output()->setType(tree.root->output()->type());
  auto* result = merged->output();
  if (tree.wide) {
    auto* source = unrounded(tree.source);
    merged->replaceInput(0, tree.narrow_source ? castToFloat(source, merged)->output() : source);
    registerAsFloat();  // eager's autocast would round the result
    auto* as_float = graph->insertNode(graph->create(asFloatKind(), {result}, 1));
    as_float->copyMetadata(tree.root);
    result = as_float->output();
    result->setType(merged->output()->type());
  }
  if (tree.of_batch && !tree.norms.empty()) {
    registerOfBatch();
    auto* of_batch =
        graph->insertNode(graph->create(ofBatchKind(), {merged->output(), tree.source}, 1));
    of_batch->copyMetadata(tree.root);
    of_batch->g_(otherwiseAttr(), functionOf(tree));
    of_batch->i_(rankAttr(), tree.weight.dim());
    result = of_batch->output();
    result->setType(merged->output()->type());
  }
  tree.root->output()->replaceAllUsesWith(result);
}

}  // namespace

void mergeBranches(const GraphPtr& graph) {
  std::vector<Node*> roots;
  walk(graph->block(), [&](Node* node) {
    if (node->kind() == aten::add || node->kind() == aten::sub || node->kind() == aten::mul ||
        node->kind() == asTargetKind()) {
      roots.push_back(node);
    }
  });
  if (roots.empty()) {
    return;
  }
  Finder finder(graph);
  std::vector<Tree> found;
  Nodes taken;
  std::for_each(roots.rbegin(), roots.rend(), [&](Node* root) {  // whole sums first
    if (taken.count(root) != 0) {
      return;
    }
    if (auto tree = finder.find(root)) {
      taken.insert(tree->nodes.begin(), tree->nodes.end());
      found.push_back(std::move(*tree));
    }
  });
  for (const auto& tree : found) {  // the source of one may be the sum of one further on
    apply(tree);
  }
  if (!found.empty()) {
    torch::jit::EliminateDeadCode(graph);
  }
}

}  // namespace llga
