// What reports are made of: the executions of fusion groups as they happen, and what a group is in
// oneDNN's terms. Kernels and plans store nothing for it; it is worked out when asked for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/ir.h"
#include "jit/onednn/runtime/compile.h"

namespace llga {

class FusionKernel;

// "conv2d+relu+add": the name of a group in profilers and reports, from the ops that compute
// something. A long one is cut in the middle.
std::string groupName(const Graph& subgraph);

// One call of a group while somebody observes (RecordFunction has callbacks). It is there for the
// callbacks and for those who find out what became of the call.
struct Execution {
  FusionKernel* kernel;
  bool compiled = false;
  bool fell_back = false;
  std::string fallback_reason;

  explicit Execution(FusionKernel* kernel);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // That of this thread, or nullptr.
  static Execution* current();

 private:
  Execution* outer_;
};

struct ValueInfo {
  bool is_tensor = false;
  at::ScalarType dtype = at::kFloat;
  Shape sizes;
  Shape strides;
  std::string text;  // of a host value
};

// One op outside the groups, or one call of a group.
struct Event {
  std::string name;
  uint64_t kernel = 0;  // id; 0: not a group
  int64_t start = 0;    // nanoseconds on a steady clock
  int64_t end = 0;
  bool compiled = false;
  bool fell_back = false;
  std::string fallback_reason;
  // Mode::describe
  std::vector<ValueInfo> inputs;
  std::vector<ValueInfo> outputs;
  std::shared_ptr<const Description> description;
  std::string not_described;  // why there is no description
  // Mode::record
  std::vector<at::Tensor> input_tensors;  // undefined for host values
  std::vector<at::Tensor> output_tensors;
};

enum class ObserveMode {
  time,      // names and times
  describe,  // of each group its inputs and outputs, and its partitions
  announce,  // writes to standard output where a group begins and ends, and which kernels of ours
             // ran
  record,    // copies of one group's inputs and outputs
};

// Observes this thread, and what it forks, until stopObserving(). One at a time in a process;
// throws std::logic_error otherwise. `kernel`, `call`: what Mode::record is after, the call counted
// from 0.
void startObserving(ObserveMode mode, uint64_t kernel, size_t call);
std::vector<Event> stopObserving();

// What oneDNN writes to standard output from now on is kept, up to the end, which returns it.
// oneDNN says which implementations it runs, then; `verbosity` is what it goes back to at the end.
void startVerbose();
std::string stopVerbose(int verbosity);

// The source lines of a node, innermost first; a traced node has its Python stack in the source
// range's text instead.
std::vector<std::pair<std::string, size_t>> sourceLines(const Node* node);

// The names in oneDNN's headers.
std::string nameOf(OpKind kind);
std::string nameOf(Attr attr);
std::string nameOf(DataType type);
std::string nameOf(Layout::layout_type type);
std::string nameOf(Layout::property_type type);

}  // namespace llga
