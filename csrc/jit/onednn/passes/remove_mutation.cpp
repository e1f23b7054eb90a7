// Rewrites in-place ops as their pure variants where alias analysis proves that nobody else sees
// the write.
//
//   %y : Tensor = aten::add_(%x, %z, %one)
// ->
//   %2 : Tensor = aten::add(%x, %z, %one)
//   %y : Tensor = llga::as_target(%2, %x)
//
// oneDNN Graph is pure. llga::as_target keeps what only the in-place op has: the data type of the
// target (bf16.add_(f32) is bf16, bf16.add(f32) is f32) and its errors. What can't be proven stays,
// and keeps its neighbours out of groups.
#include <ATen/ATen.h>
#include <torch/csrc/jit/passes/remove_mutation.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include "jit/onednn/ir.h"
#include "jit/onednn/passes/passes.h"

namespace llga {
namespace {

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

// Finds the pure nodes that RemoveTensorMutation puts in the place of in-place ones: it asks about
// each node right before it replaces it, so whatever follows the same predecessor afterwards is
// the replacement.
class Replacements {
 public:
  bool ask(Node* node) {
    const std::string name = node->kind().toUnqualString();
    if (node->kind().is_aten() && name.size() > 1 && name.back() == '_') {
      asked_.push_back(
          {node->prev(), Symbol::fromQualString("aten::" + name.substr(0, name.size() - 1))});
    }
    return true;
  }

  void keepTargets() const {
    // The last one first: what is inserted behind one must not come between another and its
    // predecessor.
    for (auto it = asked_.rbegin(); it != asked_.rend(); ++it) {
      auto* node = it->before->next();
      if (node->kind() == it->pure_kind && node->outputs().size() == 1 &&
          isTensor(node->input(0))) {
        keepTarget(node);
      }
    }
  }

 private:
  struct Asked {
    Node* before;
    Symbol pure_kind;
  };

  static void keepTarget(Node* node) {
    auto* as_target =
        node->owningGraph()->create(asTargetKind(), {node->output(), node->input(0)}, 1);
    as_target->copyMetadata(node);
    as_target->insertAfter(node);
    as_target->output()->setType(node->output()->type());
    node->output()->replaceAllUsesAfterNodeWith(as_target, as_target->output());
  }

  std::vector<Asked> asked_;
};

}  // namespace

void removeMutation(const GraphPtr& graph) {
  registerAsTarget();
  // Lists first: a list that is only appended to becomes one construction, which cat can read.
  torch::jit::RemoveListMutation(graph);
  Replacements replacements;
  torch::jit::RemoveTensorMutation(graph, [&](Node* node) { return replacements.ask(node); });
  replacements.keepTargets();
}

}  // namespace llga
