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
//    or an op that computes in fp32 would see stays as it is. Likewise with activations (GELU):
//    all kernels compute those of reduced precision in fp32 and round once, so nothing changes but
//    that the op before can be fused with it.
// 2. A cast to the data type that its input has by construction is its input.
//
// "By construction" is whatever the inputs of the graph are; profiled types don't count. The data
// types that autocast leaves alone (double, integers) may stand in place of a known one: neither
// cast changes them.
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;
using torch::jit::Use;
using Dtype = std::optional<at::ScalarType>;
using Nodes = std::unordered_set<const Node*>;

bool isTrue(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return known && known->isBool() && known->toBool();
}

bool isReducedPrecision(Dtype dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

Dtype constantDtype(const Value* value) {
  const auto dtype = torch::jit::toIValue(value);
  return dtype && dtype->isInt() ? Dtype(static_cast<at::ScalarType>(dtype->toInt()))
                                 : std::nullopt;
}

// What a cast to reduced precision makes of floats on a CPU.
Dtype reducesTo(const Node* node) {
  return node->kind() == reducedPrecisionKind() && isTrue(node->input(2))
             ? constantDtype(node->input(4))
             : std::nullopt;
}

bool widens(const Node* node) {
  return node->kind() == fullPrecisionKind() && isTrue(node->input(2));
}

// What a trace writes for a number (or one): it does not change the other operand's data type, or
// makes it one that autocast leaves alone.
bool isNumber(const Value* value) {
  const auto known = torch::jit::toIValue(value);
  return !isTensor(value) ||
         (known && known->isTensor() && known->toTensor().defined() &&
          known->toTensor().dim() == 0 &&
          (known->toTensor().scalar_type() == at::kDouble ||
           c10::isIntegralType(known->toTensor().scalar_type(), /*includeBool=*/true)));
}

std::unordered_set<Symbol> atenKinds(std::initializer_list<const char*> names) {
  std::unordered_set<Symbol> kinds;
  for (const auto* name : names) {
    kinds.insert(Symbol::fromQualString(std::string("aten::") + name));
  }
  return kinds;
}

bool isActivation(const Node* node) {
  static const auto kKinds =
      atenKinds({"relu", "relu6", "sigmoid", "tanh", "gelu", "elu", "leaky_relu", "hardswish",
                 "hardsigmoid", "hardtanh", "silu", "mish", "softplus"});
  return kKinds.count(node->kind()) != 0;
}

// Ops on floating-point tensors whose result has the data type of their first operand, also where
// autocast is on (pooling of volumes is not among them: eager's autocast makes floats of that).
bool keepsFirst(const Node* node) {
  static const auto kKinds = atenKinds(
      {// normalization; under autocast parameters may be wider
       "batch_norm", "instance_norm", "group_norm", "layer_norm",
       // views and copies
       "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "contiguous",
       "clone", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "t", "slice", "select",
       "narrow", "roll", "flip", "constant_pad_nd", "channel_shuffle", "pixel_shuffle", "dropout",
       // pooling and sampling
       "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d",
       "adaptive_avg_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
       "upsample_bilinear2d", "upsample_bicubic2d"});
  if (isActivation(node) || kKinds.count(node->kind()) != 0) {
    return true;
  }
  switch (node->kind()) {
    case aten::softmax:
    case aten::log_softmax:
    case aten::mean:
    case aten::sum:  // other than the operand's only if a data type is asked for
      return node->hasNamedInput("dtype") &&
             node->namedInput("dtype")->type()->isSubtypeOf(*c10::NoneType::get());
    case aten::clamp:  // bounds that are tensors promote
    case aten::clamp_min:
    case aten::clamp_max:
      return std::none_of(node->inputs().begin() + 1, node->inputs().end(), isTensor);
    default:
      return false;
  }
}

bool splits(const Node* node) {
  return node->kind() == aten::chunk || node->kind() == aten::split ||
         node->kind() == aten::split_with_sizes || node->kind() == aten::unbind;
}

// The data types that values have by construction. Values are best asked for in the graph's order:
// then no answer has to look far back.
class KnownTypes {
 public:
  // Of the ops in `narrowed`, the operands' casts to full precision are looked through.
  explicit KnownTypes(const Nodes& narrowed) : narrowed_(narrowed) {}

  Dtype of(const Value* value) {
    const auto known = types_.find(value->unique());
    if (known != types_.end()) {
      return known->second;
    }
    const auto type = infer(value);
    types_.emplace(value->unique(), type);
    return type;
  }

  void learn(const Node* node) {
    if (node->outputs().size() == 1) {
      of(node->output());
    }
  }

 private:
  Dtype infer(const Value* value) {
    const auto* node = value->node();
    if (const auto constant = torch::jit::toIValue(value);
        constant && constant->isTensor() && constant->toTensor().defined()) {
      return constant->toTensor().scalar_type();
    }
    if (keepsFirst(node)) {
      return of(operandOf(node, 0));
    }
    if (isProduct(node) || node->kind() == aten::scaled_dot_product_attention) {
      // The operands have one data type, or the op raises; but eager's autocast, which may be on as
      // well, makes reduced precision of floats there.
      const auto dtype = of(node->input(1));
      const auto common = dtype ? dtype : of(node->input(0));
      return isReducedPrecision(common) ? common : std::nullopt;
    }
    if (isBinary(node)) {
      return ofOperands(node);
    }
    if (node->kind() == asTargetKind()) {
      return of(node->input(1));
    }
    if (node->kind() == reducedPrecisionKind()) {
      return reducesTo(node);
    }
    if (widens(node)) {
      const auto dtype = of(node->input(0));
      return isReducedPrecision(dtype) ? Dtype(at::kFloat) : dtype;
    }
    switch (node->kind()) {
      case aten::to:
        return node->matches(
                   "aten::to.dtype(Tensor(a) self, ScalarType dtype, bool non_blocking=False, bool "
                   "copy=False, MemoryFormat? memory_format=None) -> Tensor(a)")
                   ? constantDtype(node->input(1))
                   : std::nullopt;
      case aten::cat:
      case aten::stack:
        return ofAll(node->input(0));
      case prim::ListUnpack:
        return splits(node->input(0)->node()) ? of(node->input(0)->node()->input(0)) : std::nullopt;
      case prim::ConstantChunk:
        return of(node->input(0));
      default:
        return std::nullopt;
    }
  }

  const Value* operandOf(const Node* node, size_t i) const {
    const auto* operand = node->input(i);
    return narrowed_.count(node) != 0 && widens(operand->node()) ? operand->node()->input(0)
                                                                 : operand;
  }

  Dtype ofOperands(const Node* node) {
    Dtype common;
    for (const size_t i : {0, 1}) {
      const auto* operand = operandOf(node, i);
      if (isNumber(operand)) {
        continue;
      }
      const auto dtype = of(operand);
      if (!dtype || (common && dtype != common)) {
        return std::nullopt;
      }
      common = dtype;
    }
    return common;
  }

  // That of all elements of a list, if it is one and the same.
  Dtype ofAll(const Value* list) {
    const auto* node = list->node();
    if (node->kind() != prim::ListConstruct || node->inputs().empty()) {
      return std::nullopt;
    }
    const auto first = of(node->input(0));
    return std::all_of(node->inputs().begin(), node->inputs().end(),
                       [&](const Value* item) { return of(item) == first; })
               ? first
               : std::nullopt;
  }

  const Nodes& narrowed_;
  std::unordered_map<size_t, Dtype> types_;  // by id
};

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
    if (reader->kind() == aten::size || reader->kind() == aten::dim) {
      return true;
    }
    if (reader->kind() == reducedPrecisionKind() || reader->kind() == aten::to) {
      return types_.of(reader->output()) == dtype;
    }
    if (widens(reader)) {
      const auto& uses = reader->output()->uses();
      return std::all_of(uses.begin(), uses.end(),
                         [&](const Use& use) { return narrowed_.count(use.user) != 0; });
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

// How many of an op's inputs are operands that autocast widens.
size_t operandCount(const Node* node) { return isBinary(node) ? 2 : isActivation(node) ? 1 : 0; }

Nodes opsOnCasts(Block* block) {
  Nodes found;
  walk(block, [&](const Node* node) {
    for (size_t i = 0; i < operandCount(node); ++i) {
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
      for (size_t i = 0; i < operandCount(node); ++i) {
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

// Assumes that all of them can be narrowed, and gives up those that contradict it, until none does.
void narrowOps(const GraphPtr& graph) {
  auto narrowed = opsOnCasts(graph->block());
  if (narrowed.empty()) {
    return;
  }
  const torch::jit::AliasDb aliases(graph);
  std::erase_if(narrowed, [&](const Node* node) {  // a cast may have been made before a write
    return std::any_of(node->inputs().begin(), node->inputs().end(), [&](const Value* operand) {
      return widens(operand->node()) && aliases.hasWriters(operand->node()->input(0));
    });
  });
  while (!narrowed.empty()) {
    KnownTypes types(narrowed);
    walk(graph->block(), [&](const Node* node) { types.learn(node); });
    Rounding rounding(narrowed, types);
    auto rest = narrowed;
    std::erase_if(rest,
                  [&](const Node* node) { return !rounding.reachesAllReadersOf(node->output()); });
    if (rest.size() == narrowed.size()) {
      narrow(graph->block(), narrowed, rounding);
      return;
    }
    narrowed = std::move(rest);
  }
}

void dropIdentities(Block* block) {
  const Nodes none;
  KnownTypes types(none);
  walk(block, [&](Node* node) {
    const auto target = widens(node) ? Dtype(at::kFloat) : reducesTo(node);
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
  dropIdentities(graph->block());
}

}  // namespace llga
