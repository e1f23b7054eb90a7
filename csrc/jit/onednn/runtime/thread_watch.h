// Keeps parallel loops fast where other processes keep processors busy: by where OpenMP's threads
// run, and how they wait for each other.
//
// The threads of a loop that share a processor take turns of milliseconds on it, and each loop,
// which takes microseconds, waits for both. The scheduler leaves them there while the other
// processors have as many threads. So from time to time those are moved, and may go on from there.
//
// GNU OpenMP's threads look for some milliseconds whether the others are done before they sleep.
// Nothing is faster while each has a processor of its own. Where another process has a part of one,
// though, a thread that waits awake uses up its turn with that, and its part of the next loop
// begins when the other process has had its turn. With more of its threads than processors, idle
// ones too, GNU OpenMP has all of them sleep at once; so a team of idle threads changes it for the
// process, while it runs. Whether that is better is measured, where runs are late and threads had
// to wait for a processor; with other OpenMP runtimes it is not, and goes again.
//
// LLGA_FUSER_WATCH_THREADS=off in the environment switches both off. A process that has forked has
// neither: a loop would wait for threads that have stayed behind.
#pragma once

#include <cstdint>
#include <vector>

namespace llga {

enum class Waiting : uint8_t { awake, asleep };

// Decides, by what runs take. One thread at a time may call.
class WaitingChoice {
 public:
  // How long runs take, in times of their fastest, where something is wrong.
  static constexpr double kLate = 2;

  // How to wait from now on. `lateness`: how many times as long as their fastest runs have taken
  // since the last call; `contended`: whether threads had to wait for a processor meanwhile, if
  // that is known; `now` in seconds.
  Waiting next(double lateness, bool contended, double now);

 private:
  static constexpr double kLeastPatience = 2;  // seconds
  static constexpr double kMostPatience = 32;

  Waiting now_ = Waiting::awake;
  bool on_trial_ = false;
  double awake_lateness_ = 0;  // when waiting asleep was tried last
  double until_ = 0;           // then the other way is tried
  double patience_ = kLeastPatience;
};

// Where threads should go that run on these processors: each on one of its own, the first ones
// stay. -1: where it is, as there is none left of those that are allowed.
std::vector<int> placesApart(const std::vector<int>& places, const std::vector<int>& allowed);

// Moves threads of this thread's loops that share a processor to others that it may run on. Returns
// where they were.
std::vector<int> spreadThreads();

// A run of a plan on several threads has taken so many ticks of the processor's clock, and its
// fastest one so far so many. Any thread may call.
void noteRun(uint64_t ticks, uint64_t fastest);

Waiting waiting();

// Until runs say otherwise; asleep only where there is room for more threads. Any thread may call.
void waitFor(Waiting how);

}  // namespace llga
