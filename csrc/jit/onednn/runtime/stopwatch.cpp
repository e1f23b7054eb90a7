#include "jit/onednn/runtime/stopwatch.h"

#include <filesystem>
#include <fstream>
#include <system_error>

namespace llga {

bool Contention::isHigh() const {
  constexpr double kGoodPart = 0.2;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
  for (const auto& [thread, waited] : waits()) {
    const auto known = before_.find(thread);
    const auto since = waited - (known != before_.end() ? known->second : 0);
    if (since > kGoodPart * elapsed.count()) {
      return true;
    }
  }
  return false;
}

std::unordered_map<std::string, double> Contention::waits() {
  constexpr double kNanosecond = 1e-9;
  std::unordered_map<std::string, double> found;
  std::error_code none;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", none)) {
    double ran = 0;
    double waited = 0;
    if (std::ifstream(thread.path() / "schedstat") >> ran >> waited) {
      found[thread.path().filename()] = waited * kNanosecond;
    }
  }
  return found;
}

}  // namespace llga
