// How long something takes.
#pragma once

#include <chrono>
#include <string>
#include <unordered_map>

namespace llga {

// Of one run, in seconds.
template <typename Run>
double secondsOf(const Run& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

// Whether others have kept the processors busy since it was made: a thread of this process, which
// the others may have waited for, was ready to run and did not for a good part of the time. Takes
// tens of microseconds. Never where the kernel does not tell.
class Contention {
 public:
  bool isHigh() const;

 private:
  // Seconds that each thread has waited for a processor, by its name in /proc.
  static std::unordered_map<std::string, double> waits();

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::unordered_map<std::string, double> before_ = waits();
};

}  // namespace llga
