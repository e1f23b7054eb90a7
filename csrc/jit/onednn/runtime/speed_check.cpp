#include "jit/onednn/runtime/speed_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "jit/onednn/runtime/environment.h"
#include "jit/onednn/runtime/stopwatch.h"

namespace llga {
namespace {

// A reference kernel is slower by far more than noise: no need for a fine scale. But with more
// threads than idle cores, one of OpenMP's barriers can take longer than the work; so what looks
// slow is repeated until one run shows that it isn't, or for a while.
constexpr double kWorthALook = 100e-6;  // seconds of one run
constexpr double kSlow = 4;             // times as long as the subgraph
constexpr double kWhile = 50e-3;        // seconds of all runs

std::atomic<bool>& checking() {
  static std::atomic<bool> on = !switchedOff("LLGA_FUSER_SPEED_CHECK");
  return on;
}

// Of the fastest run; ends early with one that takes no longer than `enough`.
template <typename Run>
double fastest(const Run& run, double enough) {
  auto least = std::numeric_limits<double>::infinity();
  double all = 0;
  do {
    const auto seconds = secondsOf(run);
    least = std::min(least, seconds);
    all += seconds;
  } while (all < kWhile && least > enough);
  return least;
}

}  // namespace

bool checkSpeed(bool on) { return checking().exchange(on); }

std::shared_ptr<const Plan> compileChecked(CompileRequest request, const torch::jit::Stack& inputs,
                                           const std::function<void()>& run_subgraph,
                                           double subgraph_seconds) {
  auto plan = compilePlan(request);
  if (!checking()) {
    return plan;
  }
  const auto run = [&inputs](const Plan& plan) {
    auto stack = inputs;
    try {
      plan.execute(stack, inputs.size());
    } catch (const dnnl::error& error) {
      throw CompileError{fmt::format("oneDNN: {}", error.what())};
    }
  };
  const auto once = secondsOf([&] { run(*plan); });
  if (once < kWorthALook || once < kSlow * subgraph_seconds) {
    return plan;
  }
  const auto interpreter = fastest(run_subgraph, once / kSlow / kSlow);
  const auto limit = kSlow * interpreter;
  auto seconds = fastest([&] { run(*plan); }, limit);
  if (seconds <= limit) {
    return plan;
  }
  request.division = Division::binaries_apart;
  if (auto apart = compilePlan(request); apart->steps.size() > plan->steps.size()) {
    seconds = std::min(seconds, fastest([&] { run(*apart); }, limit));
    if (seconds <= limit) {
      return apart;
    }
  }
  throw TooSlow{{fmt::format("oneDNN takes {:.0f} times as long as PyTorch at these sizes",
                             seconds / interpreter)}};
}

}  // namespace llga
