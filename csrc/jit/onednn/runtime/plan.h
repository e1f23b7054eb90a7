// What a fusion group does for one signature: compiled partitions, their arguments prepared.
//
// A plan is immutable after compilation and shared by threads; execute() may run in several at
// once. It owns its packed weights and compiled partitions.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <oneapi/dnnl/dnnl_graph.hpp>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/quantization.h"
#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/packed_weights.h"
#include "jit/onednn/runtime/thread_exit.h"
#include "jit/onednn/runtime/way.h"

namespace llga {

// Where an argument of a compiled partition lives.
struct Slot {
  enum class Kind { input, output, temporary, constant };
  Kind kind;
  size_t index;
};

struct OutputSpec {
  at::ScalarType dtype;
  Shape sizes;
  Shape strides;
  at::QuantizerPtr quantizer;  // of a quantized output; shared by all tensors that are made for it
  // The group input whose memory may become this output: oneDNN offers it and nothing else in the
  // group reads it. Used at run time only if no one else holds that input. -1: none.
  int64_t inplace_input = -1;
  bool call_local = false;  // nobody keeps it after the call: it may lie in the arena
};

// Thrown by a step that can't take these numbers: eager says what they are worth.
struct StepError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Plan {
 public:
  // One of our own.
  struct Kernel {
    // Data of a step's inputs, and where its outputs go.
    std::function<void(c10::ArrayRef<const void*>, c10::ArrayRef<void*>)> run;
    // For reports, like those of oneDNN's primitives.
    std::string kind;
    std::string implementation;
  };

  struct Step {
    dnnl::graph::compiled_partition compiled;
    Kernel kernel;  // if it can run, it does so in the place of the compiled partition
    std::vector<std::pair<Slot, Layout>> inputs;
    std::vector<std::pair<Slot, Layout>> outputs;
  };

  // The steps of one partition, for autotuning.
  struct Part {
    std::string key;  // partitionKey()
    size_t end;       // the step behind its last one
    // What else there is than the usual way, which it takes; empty if the way was known.
    std::vector<Way> others;
  };

  std::vector<Step> steps;
  KeptArguments kept;  // of all steps
  std::vector<OutputSpec> outputs;
  std::vector<size_t> temporary_bytes;
  bool takes_non_finite = false;        // NaN and infinities become what they do in eager
  bool shares_work = false;             // among several threads
  Division division = Division::usual;  // as it was requested
  std::vector<Part> parts;              // if asked for
  // Constants by Slot index: packed weights, or plain tensors used as they are.
  std::vector<PackedWeightPtr> packed;
  std::vector<void*> constants;
  std::vector<at::Tensor> constant_tensors;

  Plan() = default;
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // To be called once, when all fields are set.
  void prepare();

  // Replaces the top `inputs` values of the stack with the outputs. `inputs` match the signature
  // the plan was compiled for. Throws dnnl::error and StepError; the stack is as it was then.
  void execute(torch::jit::Stack& stack, size_t inputs) const;

  // Does the same with a copy of what it may overwrite, and returns the seconds of each step.
  std::vector<double> timeSteps(torch::jit::Stack inputs) const;

  size_t constantBytes() const;

 private:
  struct Arguments;
  std::unique_ptr<Arguments> makeArguments() const;
  // Calls `around(run)` for each step, which calls `run()`.
  template <typename Around>
  void executeWith(torch::jit::Stack& stack, size_t inputs, const Around& around) const;

  // One set of prepared arguments waits here; a second thread makes its own.
  mutable std::atomic<Arguments*> idle_{nullptr};
  mutable std::atomic<bool> has_run_{false};
  mutable std::atomic<uint64_t> fastest_{std::numeric_limits<uint64_t>::max()};  // run, in ticks
  ArenaUser arena_user_;
};

}  // namespace llga
