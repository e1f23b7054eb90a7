// Computes in float32 what would be computed in bfloat16: everything on processors that multiply
// float32 faster (widen_bfloat16), and everywhere what is made of 8-bit values (widen_quantized),
// which oneDNN multiplies as they are if nothing rounds what is dequantized.
//
//   %3 : Tensor = aten::conv2d(%x, %weight, ...)     # %weight: a constant of bfloat16
//   %4 : Tensor = aten::relu(%3)
// ->
//   %5 : Tensor = llga::wide(%x, %yes)
//   %6 : Tensor = aten::conv2d(%5, %weight.wide, ...)
//   %7 : Tensor = aten::relu(%6)
//   %4 : Tensor = llga::narrow(%7)
//
// Values keep their data types where anybody sees them: an op that is not among those below, the
// caller, an alias, a write. In between they are not rounded to bfloat16, as they are not within an
// op or a fused kernel either, and a cast to float32 is of what was computed. So a result is as
// exact as in eager, or more. Constants are there in float32 then, which takes twice their memory.
//
// Only what has bfloat16 by construction is touched (known_types.h), and llga::wide and
// llga::narrow look at the data types of a call: other ones stay as they are, but for what eager
// raises for, which llga::wide does in its place. An input that meets a constant of bfloat16 in a
// product is of bfloat16 as well, unless eager's autocast is on, under which it may be of float32;
// what has bfloat16 because of such an input is rounded where the input is of it:
//
//   %4 : Tensor = llga::narrow_as(%7, %x)
//
// Around 8-bit values those are chosen that have no other operands of bfloat16 than constants,
// rounded dequantized values, and results of those chosen: a product if all it multiplies is
// dequantized, and what follows it up to where other values of bfloat16 come in.
//
// TorchScript has a graph of its own for calls under eager's autocast. There products of float32
// give bfloat16 where PyTorch computes them: llga::as_float, which a group has nothing to do for,
// stands behind those that are chosen. Around 8-bit values nothing is changed.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>

#include "jit/onednn/passes/known_types.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/quantization.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;
namespace prim = torch::jit::prim;
using torch::jit::AliasDb;
using torch::jit::Stack;
using torch::jit::WithInsertPoint;

Symbol wideKind() {
  static const Symbol kind = Symbol::fromQualString("llga::wide");
  return kind;
}

Symbol narrowAsKind() {
  static const Symbol kind = Symbol::fromQualString("llga::narrow_as");
  return kind;
}

Symbol narrowKind() {
  static const Symbol kind = Symbol::fromQualString("llga::narrow");
  return kind;
}

at::Tensor narrowed(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat ? x.to(at::kBFloat16) : x;
}

at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? x.to(at::kFloat) : x;
}

void registerCasts() {
  static const torch::jit::RegisterOperators registration(
      {torch::jit::Operator(
           "llga::wide(Tensor(a) x, bool must_be_bfloat16) -> Tensor(a)",
           [](Stack& stack) {
             const auto must_be = torch::jit::pop(stack).toBool();
             const auto x = torch::jit::pop(stack).toTensor();
             const bool is = x.scalar_type() == at::kBFloat16;
             TORCH_CHECK(is || !must_be || at::autocast::is_autocast_enabled(at::kCPU),
                         "expected a tensor of data type BFloat16, as the other operand of a "
                         "convolution or matrix product has, got ",
                         x.scalar_type());
             torch::jit::push(stack, widened(x));
           },
           c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator(
           "llga::narrow(Tensor(a) x) -> Tensor(a)",
           [](Stack& stack) {
             torch::jit::push(stack, narrowed(torch::jit::pop(stack).toTensor()));
           },
           c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator(
           "llga::narrow_as(Tensor(a) x, Tensor input) -> Tensor(a)",
           [](Stack& stack) {
             const auto dtype = torch::jit::pop(stack).toTensor().scalar_type();
             const auto x = torch::jit::pop(stack).toTensor();
             torch::jit::push(stack, dtype == at::kBFloat16 ? narrowed(x) : x);
           },
           c10::AliasAnalysisKind::FROM_SCHEMA)});
}

bool computes(const Node* node) {
  return isProduct(node) || isBinary(node) || keepsFirst(node) ||
         node->kind() == aten::scaled_dot_product_attention || node->kind() == aten::cat ||
         node->kind() == aten::stack || node->kind() == asTargetKind() ||
         node->kind() == prim::ConstantChunk || splits(node);
}

// The tensors that a node makes, be it as a list that is taken apart at once. None if it is not.
at::ArrayRef<Value*> resultsOf(Node* node) {
  if (!splits(node)) {
    return node->outputs();
  }
  const auto& uses = node->output()->uses();
  return uses.size() == 1 && uses[0].user->kind() == prim::ListUnpack ? uses[0].user->outputs()
                                                                      : at::ArrayRef<Value*>();
}

// What is computed in float32.
enum class Scope { all, around_8_bit };

class Widening {
 public:
  Widening(GraphPtr graph, Scope scope)
      : graph_(std::move(graph)),
        scope_(scope),
        types_(none_),
        aliases_(std::make_unique<AliasDb>(graph_)) {}

  void run() {
    if (scope_ == Scope::all) {
      assume();
    }
    choose();
    if (chosen_.empty()) {
      return;
    }
    aliases_.reset();  // of a graph that changes from here on
    walk(graph_->block(), [this](Node* node) {
      if (const auto chosen = chosen_.find(node); chosen != chosen_.end()) {
        widen(node, chosen->second);
      } else if (reads_.count(node) != 0) {
        readComputed(node);
      }
    });
    torch::jit::EliminateDeadCode(graph_);
  }

 private:
  // That inputs are of bfloat16 where a product that is always computed would raise.
  void assume() {
    KnownTypes known(none_);
    for (const auto* node : graph_->nodes()) {
      if (!isProduct(node) || known.of(node->output()) != at::kBFloat16) {
        continue;
      }
      for (const auto* operand : node->inputs()) {
        while (keepsFirst(operand->node())) {
          operand = operand->node()->input(0);
        }
        if (isTensor(operand) && operand->node() == graph_->param_node() &&
            !aliases_->hasWriters(operand)) {
          assumed_.try_emplace(operand, none_);
        }
      }
    }
    for (auto& [input, without] : assumed_) {
      types_.assume(input, at::kBFloat16);
      for (auto& [other, types] : assumed_) {
        if (other != input) {
          types.assume(input, at::kBFloat16);
        }
      }
    }
  }

  // The assumed inputs that a value is of bfloat16 because of.
  std::vector<Value*> reasonsOf(const Value* value) {
    std::vector<Value*> reasons;
    for (auto* input : graph_->inputs()) {
      const auto without = assumed_.find(input);
      if (without != assumed_.end() && without->second.of(value) != at::kBFloat16) {
        reasons.push_back(input);
      }
    }
    return reasons;
  }

  void choose() {
    walk(graph_->block(), [this](Node* node) {
      for (const auto* output : node->outputs()) {
        types_.of(output);
      }
      const auto dtype = castsTo(node);
      if (computes(node) && isNarrow(node) && isPrivate(node) && !takesOptional(node) &&
          isInScope(node)) {
        auto reasons = reasonsOf(resultsOf(node)[0]);
        if (reasons.size() <= 1) {
          chosen_.emplace(node, reasons.empty() ? nullptr : reasons[0]);
        }
      } else if (dtype == at::kFloat || widens(node) || isMixed(node) || readsShape(node)) {
        if (isPrivate(node)) {
          reads_.insert(node);
        }
      } else if (isPlainCast(node) && types_.of(node->output()) == at::kBFloat16 &&
                 isPrivate(node)) {
        roundings_.insert(node);
      }
    });
  }

  bool isInScope(const Node* node) {
    if (scope_ == Scope::all) {
      return true;
    }
    const auto isDequantized = [](const Value* value) {
      while (keepsFirst(value->node()) || isPlainCast(value->node())) {
        value = value->node()->input(0);
      }
      return isDequantize(value->node());
    };
    const size_t multiplied = node->kind() == aten::scaled_dot_product_attention ? 3
                              : isProduct(node)                                  ? 2
                                                                                 : 0;
    const auto inputs = node->inputs();
    if (!std::all_of(inputs.begin(), inputs.begin() + static_cast<int64_t>(multiplied),
                     isDequantized)) {
      return false;
    }
    bool any = false;
    const auto isWide = [&](const Value* value) {
      if (types_.of(value) != at::kBFloat16 || value->node()->kind() == prim::Constant) {
        return true;
      }
      const auto* source = value->node();
      while (roundings_.count(source) != 0) {
        source = source->input(0)->node();
      }
      const bool wide = isChosen(value) || (source != value->node() && isDequantize(source));
      any = any || wide;
      return wide;
    };
    return std::all_of(inputs.begin(), inputs.end(),
                       [&](const Value* input) {
                         const auto* list = input->node();
                         return isTensorList(input) ? std::all_of(list->inputs().begin(),
                                                                  list->inputs().end(), isWide)
                                                    : !isTensor(input) || isWide(input);
                       }) &&
           any;
  }

  bool isChosen(const Value* result) const {
    const auto* node = result->node();
    return chosen_.count(node->kind() == prim::ListUnpack ? node->input(0)->node() : node) != 0;
  }

  bool isNarrow(Node* node) {
    const auto results = resultsOf(node);
    return !results.empty() && std::all_of(results.begin(), results.end(), [this](Value* result) {
      return isTensor(result) && types_.of(result) == at::kBFloat16;
    });
  }

  bool isMixed(const Node* node) {
    return isBinary(node) && types_.of(node->output()) == at::kFloat;
  }

  // Whether there is a tensor that only a call shows to be none.
  static bool takesOptional(const Node* node) {
    return std::any_of(node->inputs().begin(), node->inputs().end(), [](const Value* operand) {
      return !isTensor(operand) && operand->type()->kind() == c10::TypeKind::OptionalType &&
             c10::TensorType::get()->isSubtypeOf(*operand->type());
    });
  }

  // Whether no operand or result is written to, or is returned and shares memory with another one.
  bool isPrivate(Node* node) const {
    const auto written = [this](const Value* value) { return aliases_->hasWriters(value); };
    const auto results = resultsOf(node);
    return std::none_of(node->inputs().begin(), node->inputs().end(), written) &&
           std::none_of(results.begin(), results.end(), written) &&
           std::none_of(results.begin(), results.end(), [&](Value* result) {
             return !isTargetOfOwn(node) && sharesWithOperand(result, node) &&
                    aliases_->mayContainAlias({result}, graph_->outputs());
           });
  }

  // A returned as_target of what nobody else reads shares its memory with nothing.
  bool isTargetOfOwn(const Node* node) const {
    return node->kind() == asTargetKind() && node->input(0)->uses().size() == 1 &&
           chosen_.count(node->input(0)->node()) != 0;
  }

  bool sharesWithOperand(Value* result, Node* node) const {
    return std::any_of(node->inputs().begin(), node->inputs().end(),
                       [&](Value* operand) { return aliases_->mayContainAlias(result, operand); });
  }

  // Puts an op whose result is of `dtype` between `value`, which `node` makes, and all its readers.
  Node* putBehind(Value* value, Node* node, Symbol kind, at::ScalarType dtype) {
    auto* cast = graph_->insertNode(graph_->create(kind, 1));
    cast->copyMetadata(node);
    cast->output()->setType(value->type());
    setDtype(cast->output(), dtype);
    value->replaceAllUsesWith(cast->output());
    cast->addInput(value);
    return cast;
  }

  // Rounds where `reason` is of bfloat16, or anyway if that is null.
  void widen(Node* node, Value* reason) {
    for (size_t i = 0; i < node->inputs().size(); ++i) {
      auto* operand = node->input(i);
      if (isTensor(operand)) {
        node->replaceInput(i, wideOf(operand, node, isProduct(node)));
      } else if (isTensorList(operand)) {
        node->replaceInput(i, wideList(operand, node));
      }
    }
    const auto results = resultsOf(node).vec();
    const WithInsertPoint guard(results.back()->node()->next());
    // Eager's autocast rounds what PyTorch computes of a product, be it in a group's fallback.
    const bool rounded =
        within_autocast_ && (isProduct(node) || node->kind() == aten::scaled_dot_product_attention);
    for (auto* result : results) {
      setDtype(result, at::kFloat);
      if (rounded) {
        result = putBehind(result, node, asFloatKind(), at::kFloat)->output();
      }
      auto* narrow =
          putBehind(result, node, reason != nullptr ? narrowAsKind() : narrowKind(), at::kBFloat16);
      if (reason != nullptr) {
        narrow->addInput(reason);
      }
      computed_.emplace(narrow->output(), result);
    }
  }

  // Of an op whose result is float32, or that looks at sizes alone: operands that are there in
  // float32. Then a cast does nothing.
  void readComputed(Node* node) {
    bool found = false;
    for (size_t i = 0; i < node->inputs().size(); ++i) {
      if (const auto known = computed_.find(node->input(i)); known != computed_.end()) {
        node->replaceInput(i, known->second);
        found = true;
      }
    }
    if (isPlainCast(node) && (found || types_.of(node->input(0)) == at::kFloat)) {
      node->output()->replaceAllUsesWith(node->input(0));
    }
  }

  // Of a list that is made in the graph: no other has a known data type.
  Value* wideList(Value* list, Node* reader) {
    std::vector<Value*> items;
    for (auto* item : list->node()->inputs()) {
      items.push_back(wideOf(item, reader, false));
    }
    auto* node = graph_->createList(c10::TensorType::get(), items)->insertBefore(reader);
    node->copyMetadata(list->node());
    return node->output();
  }

  // What `value` was rounded from, or is in float32, in front of `reader`; values of other data
  // types as they are.
  Value* wideOf(Value* value, Node* reader, bool must_be_narrow) {
    if (const auto known = computed_.find(value); known != computed_.end()) {
      return known->second;
    }
    const auto dtype = types_.of(value);
    auto* node = value->node();
    if (dtype ? dtype != at::kBFloat16 : node->kind() == prim::Constant) {
      return value;
    }
    if (roundings_.count(node) != 0) {
      auto* source = node->input(0);
      const auto known = types_.of(source);
      if (computed_.count(source) != 0 || known == at::kFloat || known == at::kBFloat16) {
        return wideOf(source, reader, false);
      }
    }
    const bool must_be = assumed_.count(value) != 0 || (must_be_narrow && !dtype);
    auto& made = made_[{value, reader->owningBlock(), must_be}];
    if (made == nullptr) {
      const WithInsertPoint guard(reader);
      made = makeWide(value, must_be);
    }
    return made;
  }

  Value* makeWide(Value* value, bool must_be) {
    auto* node = value->node();
    if (const auto constant = torch::jit::toIValue(value)) {
      return graph_->insertConstant(constant->toTensor().to(at::kFloat));
    }
    Node* cast = nullptr;
    if (roundings_.count(node) != 0 && castsTo(node)) {  // of what may be anything
      auto* to_float = graph_->insertConstant(static_cast<int64_t>(at::kFloat));
      cast = graph_->create(aten::to, node->inputs(), 1);
      cast->replaceInput(1, to_float);
    } else {
      cast = graph_->create(wideKind(), {value, graph_->insertConstant(must_be)}, 1);
    }
    graph_->insertNode(cast)->copyMetadata(node);
    cast->output()->setType(value->type());
    setDtype(cast->output(), at::kFloat);
    return cast->output();
  }

  GraphPtr graph_;
  Scope scope_;
  bool within_autocast_ = at::autocast::is_autocast_enabled(at::kCPU);
  const Nodes none_;
  KnownTypes types_;
  std::unique_ptr<AliasDb> aliases_;
  std::unordered_map<const Value*, KnownTypes> assumed_;  // and what is known without each
  std::unordered_map<const Node*, Value*> chosen_;        // with the input that is the reason
  Nodes reads_;                                           // that need not read what is rounded
  Nodes roundings_;                                       // that make bfloat16
  std::unordered_map<const Value*, Value*> computed_;     // in float32, by what it is rounded to
  std::map<std::tuple<const Value*, const Block*, bool>, Value*> made_;  // must it be bfloat16
};

}  // namespace

void registerAsFloat() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::as_float(Tensor(a) x) -> Tensor(a)",
      [](Stack& stack) { torch::jit::push(stack, widened(torch::jit::pop(stack).toTensor())); },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

void widenBfloat16(const GraphPtr& graph) {
  registerCasts();
  registerAsFloat();
  Widening(graph, Scope::all).run();
}

void widenQuantized(const GraphPtr& graph) {
  bool any = false;
  walk(graph->block(), [&](const Node* node) { any = any || isDequantize(node); });
  if (any && !at::autocast::is_autocast_enabled(at::kCPU)) {
    registerCasts();
    registerAsFloat();
    Widening(graph, Scope::around_8_bit).run();
  }
}

}  // namespace llga
