#include "jit/onednn/runtime/thread_watch.h"

#include <ATen/Parallel.h>
#include <c10/util/irange.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "jit/onednn/runtime/environment.h"
#include "jit/onednn/runtime/stopwatch.h"

namespace llga {
namespace {

double now() {
  const std::chrono::duration<double> since = std::chrono::steady_clock::now().time_since_epoch();
  return since.count();
}

// Idle threads of OpenMP, as many as make its threads more than the processors. They and the thread
// that they belong to end some time after this does.
class IdleTeam {
 public:
  // Throws std::system_error.
  explicit IdleTeam(int threads) {
    std::thread([over = over_, threads] {
      pthread_setname_np(pthread_self(), "llga_idle");
      if (hasRoomFor(threads)) {
        std::atomic<int> started = 0;
#pragma omp parallel num_threads(threads)
        started.fetch_add(1, std::memory_order_relaxed);
        over->wait(false);
      }
    }).detach();  // a process that forks would wait for it in vain
  }
  ~IdleTeam() {
    over_->store(true);
    over_->notify_one();
  }
  IdleTeam(const IdleTeam&) = delete;
  IdleTeam& operator=(const IdleTeam&) = delete;

 private:
  // OpenMP ends the process if it can't make one.
  static bool hasRoomFor(int threads) {
    std::atomic<bool> over = false;
    std::vector<std::thread> made;
    bool all = true;
    try {
      while (static_cast<int>(made.size()) < threads) {
        made.emplace_back([&over] { over.wait(false); });
      }
    } catch (const std::system_error&) {
      all = false;
    }
    over = true;
    over.notify_all();
    for (auto& thread : made) {
      thread.join();
    }
    return all;
  }

  std::shared_ptr<std::atomic<bool>> over_ = std::make_shared<std::atomic<bool>>(false);
};

// Whether this process has forked from one that had loaded the package. GNU OpenMP's threads have
// stayed behind, and a loop would wait for them for ever.
std::atomic<bool>& hasForked() noexcept {
  static std::atomic<bool> forked = [] {
    pthread_atfork(nullptr, nullptr, [] { hasForked() = true; });
    return false;
  }();
  return forked;
}
[[maybe_unused]] const bool begins_to_watch = hasForked();

// Calls `each` with its number in each thread of a loop.
template <typename Each>
void forEachThread(const Each& each) {
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t first, int64_t last) {
    for (; first < last; ++first) {
      each(static_cast<size_t>(first));
    }
  });
}

// Processors that this thread may run on. Nothing where there are too many to say.
cpu_set_t allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  return set;
}

// Moves this thread to the processor, if it may run there; it need not stay.
void moveTo(int place) {
  const auto before = allowed();
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(place, &only);
  if (CPU_ISSET(place, &before) && sched_setaffinity(0, sizeof(only), &only) == 0) {
    sched_setaffinity(0, sizeof(before), &before);
  }
}

// Collects what runs take, and acts on it.
class Watcher {
 public:
  // Never destroyed: threads may run plans while the process ends.
  static Watcher& instance() {
    static auto* watcher = new Watcher;
    return *watcher;
  }

  void note(uint64_t ticks, uint64_t fastest) {
    constexpr uint64_t kBrief = 1 << 12;  // about a microsecond: too little to share among threads
    if (fastest < kBrief || off_ || hasForked().load(std::memory_order_relaxed)) {
      return;
    }
    expected_.fetch_add(fastest, std::memory_order_relaxed);
    if (spent_.fetch_add(ticks, std::memory_order_relaxed) + ticks >= kWindow) {
      try {
        decide();
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): then all stays as it is
      }
    }
  }

  Waiting waiting() const { return waiting_.load(std::memory_order_relaxed); }

  void waitFor(Waiting how) {
    const std::lock_guard lock(mutex_);
    change(how);
  }

 private:
  static constexpr uint64_t kWindow = 1 << 25;  // some 10 ms

  void decide() {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    const auto spent = lock ? spent_.exchange(0, std::memory_order_relaxed) : 0;
    if (spent < kWindow) {
      return;
    }
    const auto expected = std::max<uint64_t>(1, expected_.exchange(0, std::memory_order_relaxed));
    const auto lateness = static_cast<double>(spent) / static_cast<double>(expected);
    // Late or not: what has shared a processor from its first run on is never seen to be late.
    spreadThreads();
    // To look at all threads takes a while: in the time after runs were late.
    const bool contended = contention_ && contention_->isHigh();
    if (contention_) {
      contention_.reset();
    } else if (waiting() == Waiting::awake && lateness > WaitingChoice::kLate) {
      contention_.emplace();
    }
    change(choice_.next(lateness, contended, now()));
  }

  void change(Waiting how) {
    if (how == waiting()) {
      return;
    }
    waiting_.store(how, std::memory_order_relaxed);
    team_.reset();
    constexpr int kMost = 64;
    const auto set = allowed();
    const auto threads = std::max(2, CPU_COUNT(&set) + 2 - at::get_num_threads());
    if (how == Waiting::asleep && threads <= kMost) {
      try {
        team_.emplace(threads);
      } catch (const std::system_error&) {  // NOLINT(bugprone-empty-catch): it will be no better
      }
    }
  }

  const bool off_ = switchedOff("LLGA_FUSER_WATCH_THREADS");
  std::atomic<uint64_t> spent_{0};
  std::atomic<uint64_t> expected_{0};
  std::atomic<Waiting> waiting_{Waiting::awake};

  std::mutex mutex_;  // the rest
  WaitingChoice choice_;
  std::optional<Contention> contention_;
  std::optional<IdleTeam> team_;
};

}  // namespace

Waiting WaitingChoice::next(double lateness, bool contended, double now) {
  constexpr double kBetter = 0.75;
  if (now_ == Waiting::awake) {
    if (lateness < kLate) {
      patience_ = kLeastPatience;
    } else if (contended && now >= until_) {
      awake_lateness_ = lateness;
      on_trial_ = true;
      now_ = Waiting::asleep;
    }
    return now_;
  }
  if (on_trial_) {
    on_trial_ = false;
    until_ = now + patience_;
    patience_ = std::min(2 * patience_, kMostPatience);
    if (lateness > kBetter * awake_lateness_) {
      now_ = Waiting::awake;
    }
  } else if (now >= until_) {
    now_ = Waiting::awake;
  }
  return now_;
}

std::vector<int> placesApart(const std::vector<int>& places, const std::vector<int>& allowed) {
  std::set<int> taken;
  std::set<int> free(allowed.begin(), allowed.end());
  for (const auto place : places) {
    free.erase(place);
  }
  std::vector<int> targets;
  for (const auto place : places) {
    const bool alone = taken.insert(place).second;
    targets.push_back(alone || free.empty() ? -1 : free.extract(free.begin()).value());
  }
  return targets;
}

std::vector<int> spreadThreads() {
  if (at::in_parallel_region()) {
    return {};
  }
  std::vector<int> places(static_cast<size_t>(at::get_num_threads()));
  forEachThread([&](size_t thread) { places[thread] = sched_getcpu(); });
  const std::set<int> different(places.begin(), places.end());
  if (different.size() == places.size()) {
    return places;
  }
  const auto set = allowed();
  std::vector<int> processors;
  for (const auto i : c10::irange(CPU_SETSIZE)) {
    if (CPU_ISSET(i, &set)) {
      processors.push_back(i);
    }
  }
  const auto targets = placesApart(places, processors);
  forEachThread([&](size_t thread) {
    if (targets[thread] >= 0) {
      moveTo(targets[thread]);
    }
  });
  return places;
}

void noteRun(uint64_t ticks, uint64_t fastest) { Watcher::instance().note(ticks, fastest); }

Waiting waiting() { return Watcher::instance().waiting(); }

void waitFor(Waiting how) { Watcher::instance().waitFor(how); }

}  // namespace llga
