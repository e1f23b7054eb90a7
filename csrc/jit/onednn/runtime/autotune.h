// Choice by measurement: where there are several ways to compute a group, all are tried, once.
//
// For each partition: a kernel of our own or oneDNN's, tiles of Winograd's algorithm, weights
// packed or plain, data as it lies or copied. For the group: how it is divided into partitions, and
// oneDNN or the interpreter. What was chosen is remembered (choices.h). Off unless asked for: it
// takes seconds. Set-up code; any thread may call, one at a time measures.
#pragma once

#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <string>

#include "jit/onednn/runtime/compile.h"

namespace llga {

// Process-wide; off by default, on with LLGA_FUSER_AUTOTUNE=on in the environment. Returns what was
// before.
bool autotune(bool on);

// As long as one is there, this thread autotunes, whatever the process does.
class AutotuneHere {
 public:
  AutotuneHere();
  ~AutotuneHere();
  AutotuneHere(const AutotuneHere&) = delete;
  AutotuneHere& operator=(const AutotuneHere&) = delete;
};

bool autotunes();

// What has been chosen before: CompileRequest::way_of of a plan to be tuned.
std::optional<Way> chosenWay(const std::string& key);

// The fastest plan. `text`: of the subgraph, without names that differ between equal ones; `plan`:
// for `request`, maybe in another division; `inputs`: like those of its calls; `run_subgraph` runs
// the same in the interpreter. Throws CompileError where that is the fastest.
std::shared_ptr<const Plan> fastestPlan(const CompileRequest& request, const std::string& text,
                                        std::shared_ptr<const Plan> plan,
                                        const torch::jit::Stack& inputs,
                                        const std::function<void()>& run_subgraph);

}  // namespace llga
