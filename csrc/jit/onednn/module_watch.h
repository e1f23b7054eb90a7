// Plans are dropped when the modules they were made for are gone.
//
// TorchScript never drops a function of a traced, scripted or frozen module, hence neither its
// executors nor the kernels of its fusion groups. What does go with the module is the object that
// its methods get as `self`. So a fused method begins with llga::watch(%self), which notes the
// objects it is called with; when all of them are gone, the kernels of the method give up their
// plans, with the packed weights, the next time a plan is compiled anywhere or the cache is asked
// for its state. A later call, by a copy of the module that was never called, compiles again.
#pragma once

#include <ATen/core/ivalue.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

// The objects that one executor's graph was called with. Held by the graph's operation; kernels
// refer to it weakly. Any thread may call.
class ModuleWatch {
 public:
  using Object = c10::ivalue::Object;

  void note(const c10::intrusive_ptr<Object>& object) {
    // An object that is noted keeps its address for itself, even when it is gone.
    if (last_.load(std::memory_order_relaxed) != object.get()) {
      add(object);
    }
  }

  enum class State { unused, alive, gone };
  State state() const;

 private:
  void add(const c10::intrusive_ptr<Object>& object);

  std::atomic<const Object*> last_{nullptr};
  mutable std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<Object>> objects_;
};

// Those of the executors that run one kernel, whose lock guards it.
class ModuleWatches {
 public:
  void add(const std::shared_ptr<const ModuleWatch>& watch) { watches_.push_back(watch); }
  // There were objects, and none is left.
  bool allGone() const;

 private:
  std::vector<std::weak_ptr<const ModuleWatch>> watches_;
};

// Puts the operator at the head of `graph` if that is a method with fusion groups. For graphs of
// TorchScript's own executors only; what llga_fuser.compile makes is freed with its module anyway.
void watchModule(Graph& graph);

}  // namespace llga
