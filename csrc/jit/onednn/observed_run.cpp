#include "jit/onednn/observed_run.h"

#include <c10/util/irange.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/interpreter.h>

namespace llga {

using c10::IValue;
using torch::jit::Stack;

namespace {

Symbol observeKind() {
  static const Symbol kind = Symbol::fromQualString("llga::observe");
  return kind;
}

Symbol watchAttr() {
  static const Symbol attr = Symbol::attr("llga_watch");
  return attr;
}

Symbol firstAttr() {
  static const Symbol attr = Symbol::attr("llga_first");
  return attr;
}

}  // namespace

ObservedGraph::ObservedGraph(Graph& graph, See see)
    : graph_(graph.copy()), watch_(c10::make_intrusive<Watch>()) {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      observeKind(),
      [](const Node* node) -> torch::jit::Operation {
        auto watch = c10::static_intrusive_pointer_cast<Watch>(node->ival(watchAttr()).toCapsule());
        const auto first = static_cast<size_t>(node->i(firstAttr()));
        const auto count = node->inputs().size();
        return [watch = std::move(watch), first, count](Stack& stack) {
          const auto values = torch::jit::last(stack, count);
          for (const auto i : c10::irange(count)) {
            watch->see(watch->originals[first + i], values[i]);
          }
          torch::jit::drop(stack, count);
        };
      },
      c10::AliasAnalysisKind::CONSERVATIVE)});
  watch_->see = std::move(see);
  visit(graph.block(), graph_->block());
}

void ObservedGraph::run(Stack inputs) const {
  const torch::jit::Code code(graph_, "llga_observe");
  torch::jit::InterpreterState(code).run(inputs);
}

// Original and copy are walked in step; only the copy gets nodes.
void ObservedGraph::visit(Block* original, Block* copy) {
  auto* first = *copy->nodes().begin();  // or the return node
  auto source = original->nodes().begin();
  for (auto it = copy->nodes().begin(); it != copy->nodes().end(); ++source) {
    auto* node = *it++;
    for (const auto i : c10::irange(node->blocks().size())) {
      visit(source->blocks()[i], node->blocks()[i]);
    }
    if (node->kind() != torch::jit::prim::Constant) {
      observe(source->outputs(), node->outputs(), *it);
    }
  }
  observe(original->inputs(), copy->inputs(), first);
}

void ObservedGraph::observe(at::ArrayRef<Value*> originals, at::ArrayRef<Value*> copies,
                            Node* before) {
  if (originals.empty()) {
    return;
  }
  auto* node = graph_->create(observeKind(), copies, /*num_outputs=*/0);
  node->ival_(watchAttr(), IValue::make_capsule(watch_));
  node->i_(firstAttr(), static_cast<int64_t>(watch_->originals.size()));
  node->insertBefore(before);
  watch_->originals.insert(watch_->originals.end(), originals.begin(), originals.end());
}

}  // namespace llga
