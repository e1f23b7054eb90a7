#include "jit/onednn/once_per_sizes.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>

#include "jit/onednn/shared_kernel.h"

namespace llga {

using c10::IValue;
using torch::jit::Stack;

// What the results depend on beside the inputs.
struct OncePerSizes::Surroundings {
  bool inference = c10::InferenceMode::is_enabled();
  bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType autocast_dtype = at::autocast::get_autocast_dtype(at::kCPU);
  at::ScalarType default_dtype = c10::get_default_dtype_as_scalartype();

  bool operator==(const Surroundings&) const = default;
};

struct OncePerSizes::Entry {
  Surroundings surroundings;
  std::vector<IValue> inputs;
  Results results;
};

OncePerSizes::OncePerSizes(const Node* node)
    : code_(node->g(torch::jit::attr::Subgraph), "llga_once_per_sizes"),
      input_count_(node->inputs().size()) {
  PlanCache::instance().add(this);
}

OncePerSizes::~OncePerSizes() { PlanCache::instance().remove(this); }

void OncePerSizes::run(Stack& stack) {
  const auto inputs = torch::jit::last(stack, input_count_);
  const Surroundings surroundings;
  auto results = find(surroundings, inputs);
  if (results == nullptr) {
    Entry entry{surroundings, inputs.vec(), nullptr};
    Stack computed = entry.inputs;
    torch::jit::InterpreterState(code_).run(computed);
    results = entry.results = std::make_shared<const Stack>(std::move(computed));
    keep(std::move(entry));
  }
  torch::jit::drop(stack, input_count_);
  stack.insert(stack.end(), results->begin(), results->end());
}

OncePerSizes::Results OncePerSizes::find(const Surroundings& surroundings,
                                         c10::ArrayRef<IValue> inputs) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.surroundings == surroundings &&
           std::equal(inputs.begin(), inputs.end(), entry.inputs.begin());
  });
  if (found == entries_.end()) {
    return nullptr;
  }
  std::rotate(entries_.begin(), found, found + 1);
  return entries_.front().results;
}

void OncePerSizes::keep(Entry entry) {
  constexpr size_t kMost = 8;                    // sets of sizes
  constexpr size_t kLargest = size_t{16} << 20;  // bytes of the results for one of them
  size_t bytes = 0;
  for (const auto& result : *entry.results) {
    bytes += result.isTensor() ? result.toTensor().nbytes() : 0;
  }
  if (bytes > kLargest) {
    return;
  }
  const std::lock_guard lock(mutex_);
  if (entries_.size() == kMost) {
    entries_.pop_back();
  }
  entries_.insert(entries_.begin(), std::move(entry));
}

void OncePerSizes::watch(const std::shared_ptr<const ModuleWatch>& watch) {
  const std::lock_guard lock(mutex_);
  watches_.add(watch);
}

bool OncePerSizes::abandoned() const {
  const std::lock_guard lock(mutex_);
  return watches_.allGone();
}

void OncePerSizes::evictAll() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

std::shared_ptr<OncePerSizes> oncePerSizesOf(const Node* node) {
  return sharedKernel<OncePerSizes>(node);
}

void registerOncePerSizes() {
  static const torch::jit::RegisterOperators registration({torch::jit::Operator(
      oncePerSizesKind(),
      [](const Node* node) -> torch::jit::Operation {
        return [kernel = oncePerSizesOf(node)](Stack& stack) { kernel->run(stack); };
      },
      c10::AliasAnalysisKind::PURE_FUNCTION)});
}

}  // namespace llga
