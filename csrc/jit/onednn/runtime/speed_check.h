// A plan that is not slower than the interpreter.
//
// For some arguments oneDNN has a reference kernel only, a hundred times slower than PyTorch's: a
// matrix product with an addend that it can't broadcast (Swin's position bias), a reduction over
// outer dimensions. The Graph API does not say which kernel it took, so a new plan is run once;
// only where that takes several times as long as the subgraph did are both measured again, and a
// plan whose binary ops are not fused to others is tried. What was found of a group is true of
// those that are like it, as the layers of a network are: they are not measured. While others keep
// the processors busy nothing is known of either, but where one takes far longer: each waits for
// threads that wait for a processor.
// Set-up code; any thread may call.
#pragma once

#include <ATen/core/stack.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "jit/onednn/runtime/compile.h"
#include "jit/onednn/runtime/stopwatch.h"

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

// What running a subgraph in the interpreter has taken, once, and what was going on since it began.
struct FirstRun {
  Contention contention;
  double seconds = 0;
};

struct CheckedPlan {
  std::shared_ptr<const Plan> plan;
  bool doubtful = false;  // to be checked again later: the processors were busy with other work
};

// The plan for `request` and inputs like `inputs`. `run_subgraph` runs the same in the interpreter,
// as the fallback would; `first` tells of the run that has been. Throws CompileError, TooSlow among
// them.
CheckedPlan compileChecked(CompileRequest request, const torch::jit::Stack& inputs,
                           const std::function<void()>& run_subgraph, const FirstRun& first);

// Process-wide; on by default, off with LLGA_FUSER_SPEED_CHECK=off in the environment. Returns what
// was before.
bool checkSpeed(bool on);

// For tests: whether the processors count as busy with other work, if not what is found. Returns
// what was before.
std::optional<bool> assumeContention(std::optional<bool> high);

}  // namespace llga
