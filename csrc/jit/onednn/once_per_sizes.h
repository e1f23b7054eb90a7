// llga::OncePerSizes: an operator whose Subgraph computes tensors from integers and other host
// values alone, and is run once for each set of them.
//
// The pass once_per_sizes makes such nodes of masks, positions and index tables, which depend on
// the sizes of the inputs. What was computed is kept and returned again: nobody writes to it. It
// goes with the modules that would read it (module_watch.h), and when the cache is cleared.
#pragma once

#include <ATen/core/stack.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <memory>
#include <mutex>
#include <vector>

#include "jit/onednn/module_watch.h"
#include "jit/onednn/runtime/plan_cache.h"

namespace llga {

// Any thread may call.
class OncePerSizes final : public PlanOwner {
 public:
  explicit OncePerSizes(const Node* node);
  ~OncePerSizes() override;

  // Replaces the inputs on top of the stack by the results.
  void run(torch::jit::Stack& stack);

  // `watch` belongs to an executor that runs this.
  void watch(const std::shared_ptr<const ModuleWatch>& watch);

  bool abandoned() const override;
  // It has no plans: what it keeps is small, and bounded.
  bool oldest(uint64_t& /*tick*/) const override { return false; }
  void evictOldest() override {}
  void evictAll() override;
  uint64_t planCount() const override { return 0; }
  uint64_t hits() const override { return 0; }

 private:
  struct Surroundings;
  struct Entry;
  using Results = std::shared_ptr<const torch::jit::Stack>;

  Results find(const Surroundings& surroundings, c10::ArrayRef<c10::IValue> inputs);
  void keep(Entry entry);

  torch::jit::Code code_;
  size_t input_count_;
  mutable std::mutex mutex_;    // of what follows
  std::vector<Entry> entries_;  // the most recently used first
  ModuleWatches watches_;
};

// That of an OncePerSizes node. Nodes that share a Subgraph (copies of a graph) share it.
std::shared_ptr<OncePerSizes> oncePerSizesOf(const Node* node);

// Registers the operator; idempotent.
void registerOncePerSizes();

}  // namespace llga
