// A plan that is not slower than the interpreter.
//
// For some arguments oneDNN has a reference kernel only, a hundred times slower than PyTorch's: a
// matrix product with an addend that it can't broadcast (Swin's position bias), a reduction over
// outer dimensions. The Graph API does not say which kernel it took, so a new plan is run once;
// only where that takes several times as long as the subgraph did are both measured again, and a
// plan whose binary ops are not fused to others is tried. What was found of a group is true of
// those that are like it, as the layers of a network are: they are not measured. Set-up code; any
// thread may call.
#pragma once

#include <ATen/core/stack.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "jit/onednn/runtime/compile.h"

namespace llga {

// The interpreter is the faster one, by what was measured: other work on the machine may be why.
struct TooSlow : CompileError {
  using Time = std::chrono::steady_clock::time_point;

  std::string group;  // what it was measured of: subgraph and inputs
  // If it was measured of another group: until when that is believed, and how long it has been, in
  // times that measuring took.
  std::optional<Time> until;
  int64_t patience = 1;
};

// Until then, `verdict` is true of groups like its own. Process-wide.
void believe(TooSlow verdict, TooSlow::Time until, int64_t patience);

// The plan for `request` and inputs like `inputs`. `run_subgraph` runs the same in the interpreter,
// as the fallback would; `subgraph_seconds` is what that has taken already, once. Throws
// CompileError, TooSlow among them.
std::shared_ptr<const Plan> compileChecked(CompileRequest request, const torch::jit::Stack& inputs,
                                           const std::function<void()>& run_subgraph,
                                           double subgraph_seconds);

// Process-wide; on by default, off with LLGA_FUSER_SPEED_CHECK=off in the environment. Returns what
// was before.
bool checkSpeed(bool on);

}  // namespace llga
