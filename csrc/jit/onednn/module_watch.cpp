#include "jit/onednn/module_watch.h"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>

#include "jit/onednn/kernel.h"
#include "jit/onednn/once_per_sizes.h"

namespace llga {
namespace {

using torch::jit::Stack;

Symbol watchKind() {
  static const Symbol kind = Symbol::fromQualString("llga::watch");
  return kind;
}

torch::jit::Operation watchOperation(const Node* node) {
  auto watch = std::make_shared<ModuleWatch>();
  std::vector<std::shared_ptr<void>> kernels;  // the nodes' own operations come later
  walk(node->owningGraph()->block(), [&](const Node* other) {
    if (isFusionGroup(other)) {
      const auto kernel = kernelOf(other);
      kernel->dropPlansWith(watch);
      kernels.push_back(kernel);
    } else if (other->kind() == oncePerSizesKind()) {
      const auto kernel = oncePerSizesOf(other);
      kernel->watch(watch);
      kernels.push_back(kernel);
    }
  });
  return [watch, kernels = std::move(kernels)](Stack& stack) {
    watch->note(torch::jit::pop(stack).toObject());
  };
}

// The write to `self` that the schema claims keeps the node alive, and touches nothing else.
void registerWatch() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      "llga::watch(Any(a!) self) -> ()", watchOperation, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace

ModuleWatch::State ModuleWatch::state() const {
  const std::lock_guard lock(mutex_);
  if (objects_.empty()) {
    return State::unused;
  }
  const bool gone = std::all_of(objects_.begin(), objects_.end(),
                                [](const auto& object) { return object.expired(); });
  return gone ? State::gone : State::alive;
}

bool ModuleWatches::allGone() const {
  bool gone = false;
  for (const auto& weak : watches_) {
    const auto watch = weak.lock();
    const auto state = watch ? watch->state() : ModuleWatch::State::unused;
    if (state == ModuleWatch::State::alive) {
      return false;
    }
    gone = gone || state == ModuleWatch::State::gone;
  }
  return gone;
}

void ModuleWatch::add(const c10::intrusive_ptr<Object>& object) {
  const std::lock_guard lock(mutex_);
  last_ = object.get();
  std::erase_if(objects_, [](const auto& known) { return known.expired(); });
  const bool known = std::any_of(objects_.begin(), objects_.end(), [&](const auto& other) {
    return other._unsafe_get_target() == object.get();
  });
  if (!known) {
    objects_.emplace_back(object);
  }
}

void watchModule(Graph& graph) {
  const auto type = graph.inputs().empty() ? nullptr : graph.inputs()[0]->type();
  if (!type || !type->is_module()) {
    return;
  }
  bool fused = false;
  walk(graph.block(), [&](const Node* node) {
    fused = fused || isFusionGroup(node) || node->kind() == oncePerSizesKind();
  });
  if (fused) {
    registerWatch();
    graph.create(watchKind(), {graph.inputs()[0]}, /*num_outputs=*/0)
        ->insertBefore(*graph.nodes().begin());
  }
}

}  // namespace llga
