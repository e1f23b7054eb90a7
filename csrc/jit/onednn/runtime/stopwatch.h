// How long something takes.
#pragma once

#include <chrono>

namespace llga {

// Of one run, in seconds.
template <typename Run>
double secondsOf(const Run& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

}  // namespace llga
