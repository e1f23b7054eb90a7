// llga::FusionGroup: one fusion group at run time.
//
// The operator is total: it accepts whatever its subgraph accepts. For a known signature it runs
// the plan; for a new one it compiles a plan first, while other threads go on with the fallback;
// what oneDNN cannot take runs the subgraph in the TorchScript interpreter, with the numbers that
// the fuser switched off would give. It raises nothing of its own.
//
// Ownership: the interpreter's operation holds the kernel, the kernel holds its subgraph and its
// plans. Kernels of one subgraph are one kernel (kernelOf). Any thread may call run().
#pragma once

#include <ATen/core/stack.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "jit/onednn/ir.h"
#include "jit/onednn/module_watch.h"
#include "jit/onednn/runtime/plan.h"
#include "jit/onednn/runtime/plan_cache.h"
#include "jit/onednn/runtime/releasable_weights.h"

namespace at {
struct StepCallbacks;
}

namespace torch::jit {
struct Code;
}

namespace llga {

struct CompileRequest;
struct Description;

// int on a FusionGroup: its math mode, a dnnl_fpmath_mode_t, whatever the process' is.
Symbol fpmathModeAttr();

// What, beside the inputs, a plan was compiled for.
struct Environment {
  int threads;
  bool autocast;
  at::ScalarType autocast_dtype;
  int fpmath_mode;

  static Environment current();
  bool operator==(const Environment&) const = default;
};

// Signature of one input: everything about it that a plan depends on.
struct InputSignature {
  bool is_tensor = false;
  c10::IValue host;  // a number, a list of integers, None
  at::ScalarType dtype = at::kFloat;
  Shape sizes;
  Shape strides;

  bool matches(const c10::IValue& value) const;
};

class FusionKernel final : public PlanOwner {
 public:
  explicit FusionKernel(const Node* group);
  ~FusionKernel() override;

  void run(torch::jit::Stack& stack);

  // Different from that of any other kernel of this process; never 0.
  uint64_t id() const { return id_; }
  // Its ops: "conv2d+relu+add".
  const std::string& name() const { return name_; }
  // What oneDNN gets for these inputs (reports only); `output_strides` as a call returned them.
  // Throws CompileError where it can't take them, and what the subgraph throws.
  std::shared_ptr<const Description> describe(c10::ArrayRef<c10::IValue> inputs,
                                              const std::vector<Shape>& output_strides);
  // What a call with these inputs executes; nullptr if nothing is ready for them.
  std::shared_ptr<const Plan> planFor(c10::ArrayRef<c10::IValue> inputs);

  // `watch` belongs to an executor that runs this kernel.
  void dropPlansWith(const std::shared_ptr<const ModuleWatch>& watch);

  bool abandoned() const override;
  bool oldest(uint64_t& tick) const override;
  void evictOldest() override;
  void evictAll() override;
  uint64_t planCount() const override;
  uint64_t hits() const override { return hits_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    enum class State { compiling, ready, failed };
    Environment environment;
    std::vector<InputSignature> inputs;
    State state = State::compiling;
    std::shared_ptr<const Plan> plan;
    std::string reason;  // failed
    // When to try again what failed for speed alone, or was found fast enough under another's load.
    static constexpr auto kNever = std::chrono::steady_clock::time_point::max();
    std::chrono::steady_clock::time_point retry = kNever;
    int64_t patience = 1;  // how long until then, in times that measuring took
    bool isDue() const { return retry != kNever && std::chrono::steady_clock::now() > retry; }
    std::atomic<uint64_t> last_used{0};
  };
  using EntryPtr = std::shared_ptr<Entry>;
  // The hash beside the pointer: a search reads one piece of memory, not one for each entry.
  struct Known {
    uint64_t hash;
    EntryPtr entry;
  };

  // Which inputs plans read where they lie, though they are not dense: those with gaps they copy.
  enum class Sparse { none, with_gaps, all };

  Environment environment() const;
  bool matches(const Entry& entry, const Environment& environment,
               c10::ArrayRef<c10::IValue> inputs) const;
  // The plan for these inputs, or nullptr if there is none that is ready.
  std::shared_ptr<const Plan> find(const Environment& environment,
                                   c10::ArrayRef<c10::IValue> inputs);
  void runUnobserved(torch::jit::Stack& stack);
  // With the callbacks of profilers and reports.
  void runObserved(torch::jit::Stack& stack, at::StepCallbacks&& callbacks);
  void runSlow(torch::jit::Stack& stack);
  // The entry for these inputs; `ours` if the caller has to compile it.
  EntryPtr claim(const Environment& environment, c10::ArrayRef<c10::IValue> inputs, bool& ours);
  // Strides of 0, overlaps, gaps: plans get a dense copy, in the order of dimensions that there is,
  // but for what is kept. Returns "", or why no plan takes these inputs.
  std::string makeDense(std::span<c10::IValue> inputs, Sparse kept) const;
  // Inputs as the subgraph gets them in eager.
  torch::jit::Stack allAsInEager(c10::ArrayRef<c10::IValue> inputs) const;
  // `facts` outlive it.
  CompileRequest requestFor(c10::ArrayRef<c10::IValue> inputs, const Facts& facts,
                            const Environment& environment) const;
  void compile(Entry& entry, c10::ArrayRef<c10::IValue> inputs);
  // True if an input holds NaN or an infinity that the group's kernels might lose.
  bool holdsNonFinite(c10::ArrayRef<c10::IValue> inputs) const;
  const torch::jit::Code& fallbackCode();
  void runSubgraph(torch::jit::Stack& stack);
  // `taint`: mark the results for the groups that read them as not finite.
  void fallBack(torch::jit::Stack& stack, const std::string& reason, bool taint = false);

  std::shared_ptr<Graph> subgraph_;
  uint64_t id_;
  std::string name_;
  size_t input_count_;
  bool takes_indices_;              // its tensors of integers are indices
  Sparse kept_;                     // by its plans
  bool in_float_ = false;           // eager's autocast has no say in it: it holds llga::as_float
  std::optional<int> fpmath_mode_;  // of this group alone
  std::vector<bool> any_layout_;
  std::vector<bool> call_local_;
  std::vector<int64_t> owned_;
  std::vector<int64_t> viewed_order_;
  std::vector<size_t> watched_;       // inputs that must be finite
  std::vector<size_t> owned_inputs_;  // inputs that another group may have marked
  std::vector<ReleasableWeightPtr> weights_;

  mutable std::shared_mutex mutex_;  // entries_; shared for a hit, for a few nanoseconds
  std::vector<Known> entries_;
  std::atomic<size_t> recent_{0};  // where the last hit was
  std::atomic<uint64_t> hits_{0};

  ModuleWatches watches_;  // under mutex_

  std::once_flag fallback_once_;
  std::unique_ptr<torch::jit::Code> fallback_code_;
};

// The kernel of a FusionGroup node. Nodes that share a Subgraph (copies of a graph) share it.
std::shared_ptr<FusionKernel> kernelOf(const Node* group);

// Math mode of float32 compute ops, a dnnl_fpmath_mode_t. Process-wide.
int fpmathMode();
void setFpmathMode(int mode);

// Registers the operator; idempotent.
void registerFusionGroup();

}  // namespace llga
