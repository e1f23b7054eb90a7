#include "jit/onednn/runtime/speed_check.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/passes/canonicalize.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "jit/onednn/runtime/environment.h"
#include "jit/onednn/runtime/stopwatch.h"

namespace llga {
namespace {

namespace aten = torch::jit::aten;

// A reference kernel is slower by far more than noise: no need for a fine scale. But with more
// threads than idle cores, one of OpenMP's barriers can take longer than the work; so what looks
// slow is repeated until one run shows that it isn't, or for a while.
constexpr double kWorthALook = 100e-6;      // seconds of one run
constexpr double kWithoutProducts = 20e-6;  // likewise: to look at a softmax takes less
constexpr double kSlow = 4;                 // times as long as the subgraph
constexpr double kWhile = 50e-3;            // seconds of all runs
constexpr double kMuch = 20;                // times as long: whatever else the processors do
constexpr double kFewProducts = 5e8;        // in a second and thread: a reference kernel's

std::atomic<bool>& checking() {
  static std::atomic<bool> on = !switchedOff("LLGA_FUSER_SPEED_CHECK");
  return on;
}

std::atomic<std::optional<bool>>& contentionAssumed() {
  static std::atomic<std::optional<bool>> assumed;
  return assumed;
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

// What is believed, by group.
class Verdicts {
 public:
  static Verdicts& instance() {
    static Verdicts verdicts;
    return verdicts;
  }

  void add(TooSlow verdict) {
    constexpr size_t kMany = 256;
    const std::lock_guard lock(mutex_);
    if (known_.size() >= kMany) {
      known_.clear();
    }
    auto group = verdict.group;
    known_.insert_or_assign(std::move(group), std::move(verdict));
  }

  bool empty() {
    const std::lock_guard lock(mutex_);
    return known_.empty();
  }

  std::optional<TooSlow> find(const std::string& group) {
    const std::lock_guard lock(mutex_);
    const auto known = known_.find(group);
    const bool valid =
        known != known_.end() && std::chrono::steady_clock::now() < *known->second.until;
    return valid ? std::optional(known->second) : std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, TooSlow> known_;
};

// All that the speed depends on but the numbers.
std::string textOf(const CompileRequest& request, const torch::jit::Stack& inputs) {
  const auto graph = const_cast<Graph*>(request.subgraph)->copy();  // only reads it
  auto text = torch::jit::Canonicalize(graph, /*keep_unique_names=*/false)->toString(false);
  for (const auto& input : inputs) {
    if (input.isTensor()) {
      const auto& tensor = input.toTensor();
      text += fmt::format("{} {} {};", c10::toString(tensor.scalar_type()),
                          fmt::join(tensor.sizes(), ","), fmt::join(tensor.strides(), ","));
    } else {
      text += fmt::format("{};", input.tagKind());
    }
  }
  return text + fmt::format("{} {}", request.threads, static_cast<int>(request.fpmath_mode));
}

bool hasProduct(const Graph& subgraph) {
  const auto nodes = computations(subgraph);
  return std::any_of(nodes.begin(), nodes.end(), isProduct);
}

// Multiplications that convolutions and matrix products of the subgraph come to, at least.
double multiplicationsOf(const Graph& subgraph, const Facts& facts) {
  const auto numbersOf = [](const Shape& sizes) {
    return static_cast<double>(c10::multiply_integers(sizes));
  };
  double all = 0;
  for (const auto* node : computations(subgraph)) {
    if (!isProduct(node)) {
      continue;
    }
    const bool adds = node->kind() == aten::addmm || node->kind() == aten::baddbmm;
    const auto data = facts.tensor(node->input(adds ? 1 : 0)).sizes;
    const auto other = facts.tensor(node->input(adds ? 2 : 1)).sizes;
    const auto result = facts.tensor(node->output()).sizes;
    if (!data || !other || !result || data->empty() || other->empty()) {
      continue;
    }
    // Of a convolution each number of the result, of a transposed one each number of the data, is
    // multiplied by as many as a row of the weight has.
    all += node->hasNamedInput("stride") ? std::min(numbersOf(*data), numbersOf(*result)) *
                                               numbersOf({other->begin() + 1, other->end()})
                                         : numbersOf(*result) * static_cast<double>(data->back());
  }
  return all;
}

}  // namespace

void believe(TooSlow verdict, TooSlow::Time until, int64_t patience) {
  verdict.until = until;
  verdict.patience = patience;
  Verdicts::instance().add(std::move(verdict));
}

bool checkSpeed(bool on) { return checking().exchange(on); }

std::optional<bool> assumeContention(std::optional<bool> high) {
  return contentionAssumed().exchange(high);
}

CheckedPlan compileChecked(CompileRequest request, const torch::jit::Stack& inputs,
                           const std::function<void()>& run_subgraph, const FirstRun& first) {
  if (!checking()) {
    return {compilePlan(request)};
  }
  if (auto& verdicts = Verdicts::instance(); !verdicts.empty()) {
    if (auto known = verdicts.find(textOf(request, inputs))) {
      throw TooSlow(std::move(*known));
    }
  }
  auto plan = compilePlan(request);
  const auto run = [&inputs](const Plan& plan) {
    auto stack = inputs;
    try {
      plan.execute(stack, inputs.size());
    } catch (const dnnl::error& error) {
      throw CompileError{fmt::format("oneDNN: {}", error.what())};
    }
  };
  const auto once = secondsOf([&] { run(*plan); });
  const bool products = hasProduct(*request.subgraph);
  if (once < (products ? kWorthALook : kWithoutProducts)) {
    return {plan};
  }
  // What either took may be mostly that it ran for the first time.
  auto known = first.seconds;
  const bool surely_slow = products && once > kWhile && once > kMuch * known;
  if (contentionAssumed().load().value_or(first.contention.isHigh()) && !surely_slow) {
    return {plan, /*doubtful=*/true};
  }
  const auto usual = kFewProducts * request.threads * once;
  if (products && once < known && multiplicationsOf(*request.subgraph, *request.facts) > usual) {
    return {plan};
  }
  for (int i = 0; i < 3; ++i) {
    known = std::min(known, secondsOf(run_subgraph));
  }
  if (once < kSlow * known) {
    return {plan};
  }
  auto seconds = fastest([&] { run(*plan); }, kSlow * known);
  if (seconds < kSlow * known) {
    return {plan};
  }
  const auto interpreter = fastest(run_subgraph, seconds / kSlow / kSlow);
  const auto limit = kSlow * interpreter;
  seconds = std::min(seconds, fastest([&] { run(*plan); }, limit));
  if (seconds <= limit) {
    return {plan};
  }
  request.division = Division::binaries_apart;
  if (auto apart = compilePlan(request); apart->steps.size() > plan->steps.size()) {
    seconds = std::min(seconds, fastest([&] { run(*apart); }, limit));
    if (seconds <= limit) {
      return {apart};
    }
  }
  throw TooSlow{{fmt::format("oneDNN takes {:.0f} times as long as PyTorch at these sizes",
                             seconds / interpreter)},
                textOf(request, inputs),
                {}};
}

}  // namespace llga
