#include "jit/onednn/runtime/autotune.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <sstream>

#include "jit/onednn/runtime/choices.h"
#include "jit/onednn/runtime/environment.h"
#include "jit/onednn/runtime/partition_key.h"
#include "jit/onednn/runtime/stopwatch.h"

namespace llga {
namespace {

using torch::jit::Stack;

// Less is not worth another way than the usual one: noise.
constexpr double kGain = 0.97;
constexpr double kInterpreterGain = 0.9;
constexpr double kFallback = 3e-6;  // seconds on the way to the interpreter

constexpr const char* kInterpreter = "interpreter";

std::atomic<bool>& processwide() {
  static std::atomic<bool> on = switchedOn("LLGA_FUSER_AUTOTUNE");
  return on;
}

thread_local int here = 0;

struct Seconds {
  std::vector<double> steps;
  double all = 0;
};

// Of the fastest run of each, taken in turns, so that other work on the machine meets both.
template <typename First, typename Second>
std::pair<Seconds, Seconds> compare(const First& first, const Second& second) {
  constexpr double kWhile = 40e-3;
  constexpr double kMost = 2;
  constexpr int kFewest = 5;
  const auto note = [](Seconds& least, const std::vector<double>& steps) {
    double all = 0;
    for (const auto seconds : steps) {
      all += seconds;
    }
    if (least.steps.empty()) {
      least = {steps, all};
    }
    for (size_t i = 0; i < steps.size(); ++i) {
      least.steps[i] = std::min(least.steps[i], steps[i]);
    }
    least.all = std::min(least.all, all);
    return all;
  };
  std::pair<Seconds, Seconds> result;
  first();
  second();
  double elapsed = 0;
  for (int round = 0; elapsed < kMost && (round < kFewest || elapsed < kWhile); ++round) {
    elapsed += note(result.first, first());
    elapsed += note(result.second, second());
  }
  return result;
}

class Tuner {
 public:
  Tuner(CompileRequest request, const std::string& text, std::shared_ptr<const Plan> plan,
        const Stack& inputs)
      : request_(std::move(request)), inputs_(inputs), best_(std::move(plan)) {
    request_.division = best_->division;
    request_.way_of = [this](const std::string& key) {
      const auto tried = ways_.find(key);
      return tried != ways_.end() ? std::optional(tried->second) : chosenWay(key);
    };
    group_ = fmt::format("{}: group {:016x}", circumstances(request_),
                         fingerprint(text + describeInputs()));
  }

  std::shared_ptr<const Plan> run(const std::function<void()>& run_subgraph) {
    const auto known = Choices::instance().find(group_);
    if (known == kInterpreter) {
      throw CompileError{"PyTorch is faster, as autotuning found before"};
    }
    chooseWays();
    const auto division = known ? divisionNamed(*known) : std::nullopt;
    if (division) {
      if (*division != best_->division) {
        request_.division = *division;
        if (auto plan = compiled()) {
          best_ = std::move(plan);
        }
      }
    } else {
      chooseDivision();
      try {
        chooseInterpreter(run_subgraph);
      } catch (const dnnl::error&) {  // NOLINT(bugprone-empty-catch): calls will tell of it
      }
    }
    Choices::instance().remember(made_);
    return best_;
  }

 private:
  std::string describeInputs() const {
    std::string text;
    for (const auto* input : request_.subgraph->inputs()) {
      const auto facts = request_.facts->tensor(input);
      const auto value = request_.facts->constant(input);
      if (facts.sizes && facts.dtype) {
        text += fmt::format("\n{} {}", c10::toString(*facts.dtype), fmt::join(*facts.sizes, "x"));
      } else if (value) {
        text += (std::ostringstream() << '\n' << *value).str();
      }
    }
    for (const auto& strides : request_.input_strides) {
      text += fmt::format("\n{}", fmt::join(strides, "x"));
    }
    return text;
  }

  // nullptr where it can't be.
  std::shared_ptr<const Plan> compiled() {
    try {
      return compilePlan(request_);
    } catch (const CompileError&) {
      return nullptr;
    }
  }

  // Nothing where oneDNN raises: then the plan is none to choose.
  std::optional<std::pair<Seconds, Seconds>> compared(const Plan& first, const Plan& second) const {
    try {
      return compare([&] { return first.timeSteps(inputs_); },
                     [&] { return second.timeSteps(inputs_); });
    } catch (const dnnl::error&) {
      return std::nullopt;
    }
  }

  // Seconds by key, of all parts that have it.
  static std::map<std::string, double> byKey(const Plan& plan, const Seconds& seconds) {
    std::map<std::string, double> sums;
    size_t step = 0;
    for (const auto& part : plan.parts) {
      auto& sum = sums[part.key];
      for (; step < part.end; ++step) {
        sum += seconds.steps[step];
      }
    }
    return sums;
  }

  void chooseWays() {
    std::map<Way, std::vector<std::string>> open;
    for (const auto& part : best_->parts) {
      for (const auto way : part.others) {
        open[way].push_back(part.key);
      }
    }
    const auto usual = best_;
    std::map<std::string, std::pair<double, Way>> fastest;
    for (const auto& [way, keys] : open) {
      ways_.clear();
      for (const auto& key : keys) {
        fastest.try_emplace(key, kGain, Way::usual);
        ways_.emplace(key, way);
      }
      const auto other = compiled();
      if (!other || !sameParts(*other, *usual)) {
        continue;
      }
      const auto seconds = compared(*usual, *other);
      if (!seconds) {
        continue;
      }
      const auto old_sums = byKey(*usual, seconds->first);
      const auto new_sums = byKey(*other, seconds->second);
      for (const auto& key : keys) {
        const auto ratio = new_sums.at(key) / old_sums.at(key);
        fastest[key] = std::min(fastest[key], std::pair(ratio, way));
      }
    }
    ways_.clear();
    for (const auto& [key, choice] : fastest) {
      if (choice.second != Way::usual) {
        ways_.emplace(key, choice.second);
      }
    }
    // Together they may be slower than one by one: their weights share the caches.
    if (!ways_.empty() && !takeIfFaster(compiled())) {
      ways_.clear();
    }
    for (const auto& [key, choice] : fastest) {
      const auto found = ways_.find(key);
      made_.emplace_back(key, nameOf(found == ways_.end() ? Way::usual : found->second));
    }
  }

  static bool sameParts(const Plan& a, const Plan& b) {
    return std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(),
                      [](const Plan::Part& x, const Plan::Part& y) { return x.key == y.key; });
  }

  void chooseDivision() {
    for (const auto division :
         {Division::onednn, Division::binaries_apart, Division::activations_fused}) {
      const auto before = request_.division;
      if (before != Division::usual) {
        break;  // a second one beside it is none of the three
      }
      request_.division = division;
      auto plan = compiled();
      if (!plan || !isOther(*plan, *best_) || !takeIfFaster(std::move(plan))) {
        request_.division = before;
      }
    }
    made_.emplace_back(group_, nameOf(request_.division));
  }

  // Steps and what they run: of a group without binary ops, a plan that keeps them apart is none.
  static bool isOther(const Plan& a, const Plan& b) {
    return !std::equal(a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(),
                       [](const Plan::Step& x, const Plan::Step& y) {
                         return x.kernel.implementation == y.kernel.implementation &&
                                x.inputs.size() == y.inputs.size() &&
                                x.outputs.size() == y.outputs.size();
                       });
  }

  // Measured twice: of many candidates, one or the other looks faster by chance.
  bool takeIfFaster(std::shared_ptr<const Plan> plan) {
    const auto isFaster = [&] {
      const auto seconds = compared(*best_, *plan);
      return seconds && seconds->second.all < kGain * seconds->first.all;
    };
    const bool faster = plan && isFaster() && isFaster();
    if (faster) {
      best_ = std::move(plan);
    }
    return faster;
  }

  // Whether its results lie as those of the plan: other groups may be slower with other ones.
  bool interpreterMay() const {
    for (size_t i = 0; i < best_->outputs.size(); ++i) {
      const auto facts = request_.facts->tensor(behind(request_.subgraph->outputs()[i]));
      if (facts.strides != best_->outputs[i].strides) {
        return false;
      }
    }
    return true;
  }

  void chooseInterpreter(const std::function<void()>& run_subgraph) {
    if (!interpreterMay()) {
      return;
    }
    const auto [ours, interpreter] =
        compare([&] { return best_->timeSteps(inputs_); },
                [&] { return std::vector<double>{secondsOf(run_subgraph) + kFallback}; });
    if (interpreter.all < kInterpreterGain * ours.all) {
      made_.back().second = kInterpreter;
      Choices::instance().remember(made_);
      constexpr double kMicro = 1e6;
      throw CompileError{fmt::format("PyTorch takes {:.1f} us, oneDNN {:.1f} us (autotuned)",
                                     interpreter.all * kMicro, ours.all * kMicro)};
    }
  }

  CompileRequest request_;
  const Stack& inputs_;
  std::string group_;
  std::unordered_map<std::string, Way> ways_;  // to try, or chosen
  std::shared_ptr<const Plan> best_;
  std::vector<Choices::Choice> made_;
};

}  // namespace

bool autotune(bool on) { return processwide().exchange(on); }

AutotuneHere::AutotuneHere() { ++here; }
AutotuneHere::~AutotuneHere() { --here; }

bool autotunes() { return here != 0 || processwide(); }

std::optional<Way> chosenWay(const std::string& key) {
  const auto name = Choices::instance().find(key);
  return name ? wayNamed(*name) : std::nullopt;
}

std::shared_ptr<const Plan> fastestPlan(const CompileRequest& request, const std::string& text,
                                        std::shared_ptr<const Plan> plan, const Stack& inputs,
                                        const std::function<void()>& run_subgraph) {
  static std::mutex one_measures;
  const std::lock_guard lock(one_measures);
  return Tuner(request, text, std::move(plan), inputs).run(run_subgraph);
}

}  // namespace llga
