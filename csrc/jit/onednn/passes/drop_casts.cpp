// Drops casts of TorchScript's autocast that do nothing, or that eager's would not do.
//
// Freezing or calling under autocast puts a cast before every product, and each one that is left
// parts two groups.
//
// 1. TorchScript's autocast adds, multiplies, ... in fp32 where it doesn't know the operands' data
//    type; eager's adds two bf16 tensors in bf16. Where everything that reads such a sum rounds it
//    after all, it is computed as eager does:
//      %5 : Tensor = aten::_autocast_to_full_precision(%3, ...)   # %3, %4: bf16 by construction
//      %6 : Tensor = aten::_autocast_to_full_precision(%4, ...)
//      %7 : Tensor = aten::add(%5, %6, %one)
//      %8 : Tensor = aten::_autocast_to_reduced_precision(%7, ...)
//    ->
//      %7 : Tensor = aten::add(%3, %4, %one)
//    Rounding may also come later, after ops that keep the data type. A sum whose fp32 the caller
//    or an op that computes in fp32 would see stays as it is. Likewise with activations (GELU) and
//    layer norms: all kernels compute those of reduced precision in fp32 and round once, so nothing
//    changes but that the op before can be fused with an activation, and that a norm reads half as
//    much. In front of a norm a sum stays in fp32. And likewise with what moves numbers or takes
//    some of them: padding, concatenation, max pooling, bounds.
// 2. A trace under autocast holds the casts themselves. What picks numbers does so before they are
//    widened, as it is the same then:
//      %4 : Tensor = aten::to(%3, %float32, ...)                  # %3: bf16 by construction
//      %5 : Tensor = aten::max_pool3d(%4, ...)
//    ->
//      %5 : Tensor = aten::max_pool3d(%3, ...)
//      %6 : Tensor = aten::to(%5, %float32, ...)
//    Likewise what is concatenated, if all or some of it is widened and the rest is of the same
//    reduced precision (torch.jit.freeze makes such graphs: what it folds into a weight widens no
//    more). A batch norm of what was widened, whose result is only rounded, reads it before.
// 3. A cast to the data type that its input has by construction is its input, and so is one back to
//    what its input was widened from.
//
// "By construction" is whatever the inputs of the graph are; profiled types don't count. The data
// types that autocast leaves alone (double, integers) may stand in place of a known one: neither
// cast changes them, but aten::to does, which is dropped only where none can.
#include <torch/csrc/jit/ir/alias_analysis.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
using torch::jit::Use;

// Ops whose result has numbers of their operand, in memory of its own. (Rounding does not change
// which is the greater one.)
bool picks(const Node* node) {
  switch (node->kind()) {
    case aten::max_pool1d:
    case aten::max_pool2d:
    case aten::max_pool3d:
    case aten::constant_pad_nd:
    case aten::pad:
      return true;
    case aten::clamp:
    case aten::clamp_min:
    case aten::clamp_max:
      return keepsFirst(node);
    default:
      return false;
  }
}

// Whether it rounds what was widened.
bool castsBack(const Node* node) {
  return isReducedPrecision(castsTo(node)) && widens(node->input(0)->node());
}

// A list of tensors that is concatenated, and nothing else.
bool isConcatenated(const Node* node) {
  return node->kind() == torch::jit::prim::ListConstruct && node->output()->uses().size() == 1 &&
         node->output()->uses()[0].user->kind() == aten::cat;
}

// Whether all that depends on a value is as if the value had been rounded to the reduced precision;
// asks under the assumption that `narrowed` are computed in it.
class Rounding {
 public:
  Rounding(const Nodes& narrowed, KnownTypes& types) : narrowed_(narrowed), types_(types) {}

  bool reachesAllReadersOf(const Value* value) {
    const auto known = answers_.find(value);
    if (known != answers_.end()) {
      return known->second;
    }
    const auto dtype = types_.of(value);
    const auto& uses = value->uses();
    const bool answer = isReducedPrecision(dtype) &&
                        std::all_of(uses.begin(), uses.end(),
                                    [&](const Use& use) { return isRoundedBy(use.user, *dtype); });
    answers_.emplace(value, answer);
    return answer;
  }

  // The data type that a value has from now on, if it was asked for and the answer was yes.
  Dtype narrowedTo(const Value* value) const {
    const auto known = answers_.find(value);
    return known != answers_.end() && known->second ? types_.of(value) : std::nullopt;
  }

 private:
  bool isRoundedBy(const Node* reader, at::ScalarType dtype) {
    if (readsShape(reader)) {
      return true;
    }
    if (reader->kind() == reducedPrecisionKind() || reader->kind() == aten::to) {
      return types_.of(reader->output()) == dtype;
    }
    if (widens(reader)) {
      const auto& uses = reader->output()->uses();
      return std::all_of(uses.begin(), uses.end(), [&](const Use& use) {
        return narrowed_.count(use.user) != 0 && use.user->kind() != aten::layer_norm;
      });
    }
    return isPassedOnBy(reader, dtype);
  }

  // By a reader whose results have the operand's data type, and are themselves rounded.
  bool isPassedOnBy(const Node* reader, at::ScalarType dtype) {
    const auto& outputs = reader->outputs();
    return !outputs.empty() &&
           std::all_of(outputs.begin(), outputs.end(), [&](const Value* output) {
             if (isTensorList(output)) {
               const auto& uses = output->uses();
               return std::all_of(uses.begin(), uses.end(),
                                  [&](const Use& use) { return isPassedOnBy(use.user, dtype); });
             }
             return isTensor(output) && types_.of(output) == dtype && reachesAllReadersOf(output);
           });
  }

  const Nodes& narrowed_;
  KnownTypes& types_;
  std::unordered_map<const Value*, bool> answers_;
};

// Which of an op's inputs are operands that autocast widens, from the first one to before the last
// one. The target of an as_target is one of the sum before it.
std::pair<size_t, size_t> operandsOf(const Node* node) {
  if (node->kind() == asTargetKind()) {
    return {1, 2};
  }
  if (isConcatenated(node)) {
    return {0, node->inputs().size()};
  }
  const bool one =
      isActivation(node) || picks(node) || castsBack(node) || node->kind() == aten::layer_norm;
  return {0, isBinary(node) ? 2 : one ? 1 : 0};
}

Nodes opsOnCasts(Block* block) {
  Nodes found;
  walk(block, [&](const Node* node) {
    for (auto [i, end] = operandsOf(node); i < end; ++i) {
      if (widens(node->input(i)->node())) {
        found.insert(node);
      }
    }
  });
  return found;
}

void narrow(Block* block, const Nodes& narrowed, const Rounding& rounding) {
  walk(block, [&](Node* node) {
    if (narrowed.count(node) != 0) {
      for (auto [i, end] = operandsOf(node); i < end; ++i) {
        if (const auto* source = node->input(i)->node(); widens(source)) {
          node->replaceInput(i, source->input(0));
        }
      }
    }
    for (auto* output : node->outputs()) {  // what was profiled is no more
      if (const auto dtype = rounding.narrowedTo(output)) {
        setDtype(output, *dtype);
      }
    }
  });
}

// What has the data type of its operands.
const Value* resultOf(const Node* node) {
  return isConcatenated(node) ? node->output()->uses()[0].user->output() : node->output();
}

// Whether a node still changes no data type that it did not change before.
bool agrees(const Node* node, KnownTypes& types) {
  return node->kind() != asTargetKind() || types.of(node->input(0)) == types.of(node->output());
}

// Assumes that all of them can be narrowed, and gives up those that contradict it, until none does.
void narrowOps(const GraphPtr& graph) {
  auto narrowed = opsOnCasts(graph->block());
  if (narrowed.empty()) {
    return;
  }
  const torch::jit::AliasDb aliases(graph);
  std::erase_if(narrowed, [&](const Node* node) {  // a cast may have been made before a write
    return (castsBack(node) && aliases.hasWriters(node->output())) ||
           std::any_of(node->inputs().begin(), node->inputs().end(), [&](const Value* operand) {
             return widens(operand->node()) && aliases.hasWriters(operand->node()->input(0));
           });
  });
  while (!narrowed.empty()) {
    KnownTypes types(narrowed);
    walk(graph->block(), [&](const Node* node) { types.learn(node); });
    Rounding rounding(narrowed, types);
    auto rest = narrowed;
    std::erase_if(rest, [&](const Node* node) {
      if (castsBack(node)) {
        const auto* source = node->input(0)->node()->input(0);
        return types.of(source) != castsTo(node) || !types.isCertain(source);
      }
      return !rounding.reachesAllReadersOf(resultOf(node)) || !agrees(node, types);
    });
    if (rest.size() == narrowed.size()) {
      narrow(graph->block(), narrowed, rounding);
      return;
    }
    narrowed = std::move(rest);
  }
}

// Moves casts of a graph behind what picks numbers, and drops those around what rounds once anyway.
class LateCasts {
 public:
  explicit LateCasts(const GraphPtr& graph) : graph_(graph), types_(none_), aliases_(graph) {}

  void run() {
    walk(graph_->block(), [&](Node* node) {
      auto* widened = picksOfCasts(node) ? pickNarrow(node) : nullptr;
      if (node->kind() == aten::batch_norm) {
        normalizeNarrow(node);
      }
      types_.learn(node);
      if (widened != nullptr) {
        types_.learn(widened);
      }
    });
  }

  // Ops that pick numbers, of which a trace under autocast widens all or some.
  static bool picksOfCasts(const Node* node) {
    return node->kind() == aten::max_pool3d ||
           (node->kind() == aten::cat && isConcatenated(node->input(0)->node()));
  }

 private:
  // Of reduced precision for sure, and not written to.
  bool isNarrow(const Value* value) {
    return isReducedPrecision(types_.of(value)) && types_.isCertain(value) &&
           !aliases_.hasWriters(value);
  }

  // The cast that makes float32 of such a tensor; or null.
  Node* widenedBy(const Value* value) {
    auto* cast = const_cast<Node*>(value->node());
    const bool is = castsTo(cast) == at::kFloat && isPlainCast(cast) &&
                    !aliases_.hasWriters(value) && isNarrow(cast->input(0));
    return is ? cast : nullptr;
  }

  // The casts among what the operands of an op are: of none or of some, if the others are of the
  // reduced precision of these anyway; else nothing.
  std::vector<Node*> castsOf(const Node* operands, size_t count) {
    std::vector<Node*> casts;
    std::vector<const Value*> narrow;
    for (const auto* operand : operands->inputs().slice(0, count)) {
      auto* cast = widenedBy(operand);
      if (cast != nullptr) {
        casts.push_back(cast);
      }
      narrow.push_back(cast != nullptr ? cast->input(0) : operand);
    }
    const bool all = std::all_of(narrow.begin(), narrow.end(), [&](const Value* operand) {
      return isNarrow(operand) && types_.of(operand) == types_.of(narrow[0]);
    });
    return all ? casts : std::vector<Node*>{};
  }

  // Takes numbers before they are widened. Returns the cast behind; or null, and nothing is done.
  Node* pickNarrow(Node* node) {
    const bool list = node->kind() == aten::cat;
    auto* operands = list ? node->input(0)->node() : node;
    const auto casts = castsOf(operands, list ? operands->inputs().size() : 1);
    if (casts.empty() || aliases_.hasWriters(node->output())) {
      return nullptr;
    }
    const auto dtype = types_.of(casts[0]->input(0));
    auto* result = node->output();
    auto* widened = graph_->createClone(casts[0], [](Value* value) { return value; });
    widened->insertAfter(node);
    widened->output()->setType(result->type());
    result->replaceAllUsesAfterNodeWith(widened, widened->output());
    widened->replaceInput(0, result);
    for (auto* cast : casts) {
      for (size_t i = 0; i < operands->inputs().size(); ++i) {
        if (operands->input(i) == cast->output()) {
          operands->replaceInput(i, cast->input(0));
        }
      }
    }
    setDtype(result, *dtype);
    for (const auto& use : std::vector<Use>(widened->output()->uses())) {
      if (roundsTo(use.user, *dtype)) {
        use.user->output()->replaceAllUsesWith(result);
      }
    }
    return widened;
  }

  // Reads numbers before they are widened where the result is only rounded: kernels compute norms
  // of reduced precision in float32, and round once.
  void normalizeNarrow(Node* norm) {
    const auto casts = castsOf(norm, 1);
    const auto& uses = norm->output()->uses();
    if (casts.empty() || aliases_.hasWriters(norm->output())) {
      return;
    }
    const auto dtype = *types_.of(casts[0]->input(0));
    if (std::all_of(uses.begin(), uses.end(),
                    [&](const Use& use) { return roundsTo(use.user, dtype); })) {
      norm->replaceInput(0, casts[0]->input(0));
      setDtype(norm->output(), dtype);
    }
  }

  bool roundsTo(const Node* node, at::ScalarType dtype) const {
    return (castsTo(node) == dtype || reducesTo(node) == dtype) && isPlainCast(node) &&
           !aliases_.hasWriters(node->output());
  }

  const GraphPtr& graph_;
  const Nodes none_;
  KnownTypes types_;
  const torch::jit::AliasDb aliases_;
};

void widenLater(const GraphPtr& graph) {
  bool any = false;
  walk(graph->block(), [&](const Node* node) { any = any || LateCasts::picksOfCasts(node); });
  if (any) {
    LateCasts(graph).run();
  }
}

void dropIdentities(Block* block) {
  const Nodes none;
  KnownTypes types(none);
  walk(block, [&](Node* node) {
    // One of a tensor whose data type is certain gives the tensor itself where it is the same.
    const bool no_copy = castsTo(node) && isPlainCast(node) && types.isCertain(node->input(0));
    const auto target = widens(node) ? Dtype(at::kFloat)
                        : no_copy    ? castsTo(node)
                                     : reducesTo(node);
    if (target) {
      if (types.of(node->input(0)) == target) {
        node->output()->replaceAllUsesWith(node->input(0));
      }
      if (!node->output()->hasUses()) {
        node->destroy();
        return;
      }
    }
    types.learn(node);
  });
}

}  // namespace

void dropCasts(const GraphPtr& graph) {
  narrowOps(graph);
  widenLater(graph);
  dropIdentities(graph->block());
}

}  // namespace llga
