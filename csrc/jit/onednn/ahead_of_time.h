// Fused before the first call: the pipeline run on types from example inputs, and an executor that
// runs its result from the start.
//
// TorchScript's executors observe, optimise and then run. Here all of that is over when the module
// is handed out: its function owns a simple executor, which runs the fused graph as it is, whatever
// the modes of the other executors are. Function::graph() stays the graph without groups, so that
// the module is printed, saved, inlined and copied like any other.
#pragma once

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>

#include <memory>
#include <optional>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

// A copy of `graph`, fused. It runs once in the interpreter for each of `examples` (at least one;
// the inputs may be written to); what the values were is what the passes see as their types. Where
// examples differ the first one counts; later ones tell about blocks that it did not enter. The
// types are erased at the end: other inputs are as welcome as these. Throws what the graph throws.
std::shared_ptr<Graph> fuseAhead(Graph& graph, const std::vector<torch::jit::Stack>& examples);

struct CompileOptions {
  // The plain module is not needed any more and gives up its constants.
  bool consume;
  // Constants that only groups read can be released (releaseWeights).
  bool releasable;
  // Math mode of the groups, a dnnl_fpmath_mode_t; none: that of the process at the time of a call.
  std::optional<int> fpmath_mode;
};

// A module that computes what the forward method of `frozen` computes, by running `fused`. Where
// nothing but forward is there (no attribute, no other method), the module has a compilation unit
// of its own and all of it dies with the last reference. Otherwise it is a clone in that of
// `frozen`.
torch::jit::Module compiledModule(const torch::jit::Module& frozen, Graph& fused,
                                  const CompileOptions& options);

// The same for a function.
torch::jit::StrongFunctionPtr compiledFunction(torch::jit::GraphFunction& plain, Graph& fused,
                                               const CompileOptions& options);

// Frees the plain copies of weights that are packed. Returns their bytes.
size_t releaseWeights(torch::jit::GraphFunction& compiled);

// Registers the operators of such graphs; idempotent.
void registerAheadOfTime();

}  // namespace llga
