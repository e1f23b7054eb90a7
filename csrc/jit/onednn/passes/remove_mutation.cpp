// Rewrites in-place ops as their pure variants where alias analysis proves that nobody else sees
// the write.
//
//   %y : Tensor = aten::add_(%x, %z, %one)
// ->
//   %2 : Tensor = aten::add(%x, %z, %one)
//   %y : Tensor = llga::as_target(%2, %x)
//
// TorchScript's own pass takes those that may follow right behind what makes their target. Others
// are proven here: writes to views (x = y[:, :n]; x += z), and behind what reads the target (x /=
// x.sum()), where nothing reads behind by another name what is written there. Sums with a part of
// attention's scores are made of all of them (slice_sums.h).
//
// Alias analysis takes what comes out of a list, and so what was split, for anything there is.
// While it is asked, parts are views of what they are parts of, which it can tell from others:
//
//   %l : Tensor[] = aten::split(%x, %n, %dim)          %p : Tensor = aten::alias(%x)
//   %p : Tensor, %q : Tensor = prim::ListUnpack(%l)    %q : Tensor = aten::alias(%x)
//
// oneDNN Graph is pure. llga::as_target keeps what only the in-place op has: the data type of the
// target (bf16.add_(f32) is bf16, bf16.add(f32) is f32) and its errors. What can't be proven stays,
// and keeps its neighbours out of groups.
#include <ATen/ATen.h>
#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/passes/remove_mutation.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"
#include "jit/onednn/passes/slice_sums.h"

namespace llga {
namespace {

using torch::jit::AliasDb;
using torch::jit::Stack;

at::Tensor asTarget(const at::Tensor& result, const at::Tensor& target) {
  TORCH_CHECK(c10::canCast(result.scalar_type(), target.scalar_type()), "result type ",
              result.scalar_type(), " can't be cast to the desired output type ",
              target.scalar_type());
  TORCH_CHECK(result.sizes().equals(target.sizes()), "output with shape ", target.sizes(),
              " doesn't match the broadcast shape ", result.sizes());
  return result.to(target.scalar_type());
}

void registerAsTarget() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::as_target(Tensor(a) result, Tensor target) -> Tensor(a)",
      [](Stack& stack) {
        auto result = asTarget(torch::jit::peek(stack, 0, 2).toTensor(),
                               torch::jit::peek(stack, 1, 2).toTensor());
        torch::jit::drop(stack, 2);
        torch::jit::push(stack, std::move(result));
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

// aten::add of aten::add_; no other node has one.
std::optional<Symbol> pureKindOf(const Node* node) {
  const std::string name = node->kind().toUnqualString();
  if (!node->kind().is_aten() || name.size() < 2 || name.back() != '_') {
    return std::nullopt;
  }
  return Symbol::fromQualString("aten::" + name.substr(0, name.size() - 1));
}

void keepTarget(Node* node) {
  auto* as_target =
      node->owningGraph()->create(asTargetKind(), {node->output(), node->input(0)}, 1);
  as_target->copyMetadata(node);
  as_target->insertAfter(node);
  as_target->output()->setType(node->output()->type());
  node->output()->replaceAllUsesAfterNodeWith(as_target, as_target->output());
}

// In-place ops whose targets are made in their block, by whatever name.
class OwnWrites {
 public:
  explicit OwnWrites(const GraphPtr& graph) : graph_(graph) {}

  void find() {
    walk(graph_->block(), [&](Node* node) {
      if (!pureKindOf(node) || !writesItsFirstInput(node) ||
          !isOwn(node->input(0), node->owningBlock()) ||
          std::any_of(sums_.begin(), sums_.end(),
                      [node](const SliceSum& sum) { return sum.copy == node; })) {
        return;
      }
      if (auto sum = sliceSum(node); sum && !isSeenBehind(node, sum->whole)) {
        sums_.push_back(std::move(*sum));
      } else if (!isSeenBehind(node, node->input(0))) {
        writes_.push_back(node);
      }
    });
  }

  // Returns the pure nodes.
  std::vector<Node*> makePure() {
    std::vector<Node*> made;
    std::for_each(sums_.begin(), sums_.end(), writeWhole);
    for (auto* write : writes_) {
      auto* pure = graph_->create(*pureKindOf(write), write->inputs(), 1);
      pure->copyMetadata(write)->copyAttributes(*write);
      pure->insertBefore(write);
      const auto* schema = pure->maybeSchema();
      if (schema == nullptr || schema->returns().size() != 1 ||
          schema->returns()[0].alias_info() != nullptr) {
        pure->destroy();
        continue;
      }
      pure->output()->setType(write->output()->type());
      write->output()->replaceAllUsesWith(pure->output());
      write->input(0)->replaceAllUsesAfterNodeWith(write, pure->output());
      write->destroy();
      made.push_back(pure);
    }
    return made;
  }

 private:
  static bool writesItsFirstInput(const Node* node) {
    const auto* schema = node->maybeSchema();
    if (schema == nullptr || node->outputs().size() != 1 || node->isNondeterministic()) {
      return false;
    }
    const auto& arguments = schema->arguments();
    return std::count_if(arguments.begin(), arguments.end(),
                         [](const c10::Argument& argument) {
                           return argument.alias_info() != nullptr &&
                                  argument.alias_info()->isWrite();
                         }) == 1 &&
           arguments[0].alias_info() != nullptr && arguments[0].alias_info()->isWrite();
  }

  // Of its first input, by any name.
  static bool isView(const Node* node) {
    if (isIdentity(node)) {
      return true;
    }
    const auto* schema = node->maybeSchema();
    return node->kind().is_aten() && schema != nullptr && schema->returns().size() == 1 &&
           schema->returns()[0].alias_info() != nullptr && isTensor(node->output()) &&
           !node->inputs().empty() && isTensor(node->input(0));
  }

  // Whether what it is a view of is made in this block, by an op that gives nothing else.
  static bool isOwn(const Value* value, const Block* block) {
    while (isView(value->node())) {
      value = value->node()->input(0);
    }
    const auto* schema = value->node()->maybeSchema();
    return value->node()->owningBlock() == block && value->node()->kind().is_aten() &&
           schema != nullptr && schema->returns().size() == 1 &&
           schema->returns()[0].alias_info() == nullptr;
  }

  // Whether anything behind reads what `write` has written by a name that there was before, but for
  // this one.
  bool isSeenBehind(const Node* write, const Value* name) {
    if (aliases_ == nullptr) {  // most graphs need none
      aliases_ = std::make_unique<AliasDb>(graph_);
    }
    const auto* target = write->input(0);
    const auto sees = [&](const Value* value) {
      const auto* source = value->node();
      const bool before = source->owningBlock() != write->owningBlock() || source->isBefore(write);
      return value != name && before &&
             aliases_->mayContainAlias(const_cast<Value*>(value), const_cast<Value*>(target));
    };
    const auto* block = write->owningBlock();
    for (const auto* node = write->next(); node != block->return_node(); node = node->next()) {
      if (readsAny(node, sees)) {
        return true;
      }
    }
    // Or is there after the call, as an attribute.
    const auto& inputs = graph_->inputs();
    return std::any_of(block->outputs().begin(), block->outputs().end(), sees) ||
           std::any_of(inputs.begin(), inputs.end(), [&](Value* input) {
             return aliases_->mayContainAlias(input, const_cast<Value*>(target));
           });
  }

  template <typename Sees>
  static bool readsAny(const Node* node, const Sees& sees) {
    const auto reads = [&](const Block* nested) {
      return std::any_of(nested->nodes().begin(), nested->nodes().end(),
                         [&](const Node* inner) { return readsAny(inner, sees); }) ||
             std::any_of(nested->outputs().begin(), nested->outputs().end(), sees);
    };
    return std::any_of(node->inputs().begin(), node->inputs().end(), sees) ||
           std::any_of(node->blocks().begin(), node->blocks().end(), reads);
  }

  const GraphPtr& graph_;
  std::unique_ptr<AliasDb> aliases_;
  std::vector<Node*> writes_;
  std::vector<SliceSum> sums_;
};

// Lists of parts of a tensor (aten::split, chunk, unbind), taken out of the graph as the head of
// this file says, and put back.
class PartsAsViews {
 public:
  explicit PartsAsViews(const GraphPtr& graph) : graph_(graph) {
    std::vector<Node*> found;
    walk(graph->block(), [&](Node* node) {
      if (givesParts(node) && isOnlyTakenApart(node->output())) {
        found.push_back(node);
      }
    });
    std::for_each(found.begin(), found.end(), [this](Node* split) { takeOut(split); });
  }

  void putBack() {
    for (const auto& [split, parts] : taken_) {
      putBack(split, parts);
    }
    for (const auto& [split, parts] : taken_) {
      for (const auto& part : parts) {
        part.view->destroy();
        if (part.output + 1 == part.reader->outputs().size()) {
          part.reader->destroy();
        }
      }
      auto* nothing = split->input(0)->node();
      split->destroy();
      nothing->destroy();
    }
  }

 private:
  struct Part {
    Node* reader;  // of the list
    size_t output;
    Node* view;
  };

  // A list of views of the first input, which is the only tensor.
  static bool givesParts(const Node* node) {
    const auto* schema = node->maybeSchema();
    if (!node->kind().is_aten() || schema == nullptr || schema->returns().size() != 1 ||
        schema->returns()[0].alias_info() == nullptr ||
        !node->output()->type()->isSubtypeOf(*c10::ListType::ofTensors())) {
      return false;
    }
    const auto& inputs = node->inputs();
    return !inputs.empty() && isTensor(inputs[0]) &&
           std::none_of(inputs.begin() + 1, inputs.end(), isTensor);
  }

  static bool isOnlyTakenApart(const Value* list) {
    const auto& uses = list->uses();
    return !uses.empty() && std::all_of(uses.begin(), uses.end(), [&](const torch::jit::Use& use) {
      const auto kind = use.user->kind();
      return (kind == torch::jit::prim::ListUnpack || kind == torch::jit::aten::__getitem__) &&
             use.user->owningBlock() == list->node()->owningBlock() && !use.user->outputs().empty();
    });
  }

  // The list is one of parts of nothing meanwhile.
  void takeOut(Node* split) {
    std::vector<Node*> readers;
    for (const auto& use : split->output()->uses()) {
      readers.push_back(use.user);
    }
    std::sort(readers.begin(), readers.end(),
              [](const Node* a, const Node* b) { return a->isBefore(b); });
    auto& parts = taken_.emplace_back(split, std::vector<Part>{}).second;
    for (auto* reader : readers) {
      auto* last = reader;
      for (auto* value : reader->outputs()) {
        auto* view = graph_->create(torch::jit::aten::alias, {split->input(0)}, 1);
        view->insertAfter(last);
        view->output()->setType(value->type());
        value->replaceAllUsesWith(view->output());
        parts.push_back({reader, value->offset(), view});
        last = view;
      }
    }
    const torch::jit::WithInsertPoint before(split);
    split->replaceInput(0, graph_->insertConstant(at::empty({0})));
  }

  void putBack(const Node* split, const std::vector<Part>& parts) {
    const auto copy = [&](const Node* node, Value* input, Node* before) {
      auto* made = graph_->createClone(const_cast<Node*>(node), [](Value* value) { return value; });
      made->replaceInput(0, input);
      return made->insertBefore(before);
    };
    Node* list = nullptr;
    Node* reader = nullptr;
    const Part* last = nullptr;
    for (const auto& part : parts) {
      // Another tensor where a write was made pure between two of them.
      const bool other = last == nullptr || last->view->input() != part.view->input();
      if (other) {
        list = copy(split, part.view->input(), part.view);
      }
      if (other || last->reader != part.reader) {
        reader = copy(part.reader, list->output(), part.view);
      }
      part.view->output()->replaceAllUsesWith(reader->output(part.output));
      last = &part;
    }
  }

  const GraphPtr& graph_;
  std::vector<std::pair<Node*, std::vector<Part>>> taken_;
};

// Finds the pure nodes that RemoveTensorMutation puts in the place of in-place ones: new ones, of a
// kind that it has asked about.
class Replacements {
 public:
  explicit Replacements(const GraphPtr& graph) : graph_(graph) {
    auto* probe = graph->create(torch::jit::prim::Constant, 1);
    first_ = probe->output()->unique();  // ids are counted up
    probe->destroy();
  }

  bool ask(const Node* node) {
    if (const auto kind = pureKindOf(node)) {
      kinds_.insert(*kind);
    }
    return true;
  }

  void keepTargets() const {
    std::vector<Node*> found;
    walk(graph_->block(), [&](Node* node) {
      if (kinds_.count(node->kind()) != 0 && node->outputs().size() == 1 &&
          node->output()->unique() > first_ && isTensor(node->input(0))) {
        found.push_back(node);
      }
    });
    std::for_each(found.begin(), found.end(), keepTarget);
  }

 private:
  const GraphPtr& graph_;
  size_t first_ = 0;  // id, those of new values are larger
  std::unordered_set<Symbol> kinds_;
};

}  // namespace

void removeMutation(const GraphPtr& graph) {
  registerAsTarget();
  // Lists first: a list that is only appended to becomes one construction, which cat can read.
  torch::jit::RemoveListMutation(graph);
  PartsAsViews parts(graph);
  Replacements replacements(graph);
  torch::jit::RemoveTensorMutation(graph, [&](Node* node) { return replacements.ask(node); });
  replacements.keepTargets();
  OwnWrites writes(graph);
  writes.find();
  const auto made = writes.makePure();
  parts.putBack();
  std::for_each(made.begin(), made.end(), keepTarget);
}

}  // namespace llga
