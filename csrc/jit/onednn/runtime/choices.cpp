#include "jit/onednn/runtime/choices.h"

#include <c10/util/Exception.h>
#include <cpuid.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "jit/onednn/runtime/engine.h"
#include "llga_fuser_build_config.h"

namespace llga {
namespace {

namespace fs = std::filesystem;

// Name and stepping, as CPUID has them.
std::string processor() {
  std::array<unsigned, 12> name{};
  unsigned most = __get_cpuid_max(0x80000000, nullptr);
  if (most >= 0x80000004) {
    for (unsigned i = 0; i < 3; ++i) {
      auto* four = &name[size_t{4} * i];
      __get_cpuid(0x80000002 + i, four, four + 1, four + 2, four + 3);
    }
  }
  std::array<char, sizeof(name) + 1> text{};
  std::memcpy(text.data(), name.data(), sizeof(name));
  unsigned signature = 0;
  unsigned rest = 0;
  __get_cpuid(1, &signature, &rest, &rest, &rest);
  return fmt::format("{} {:x}", text.data(), signature);
}

// What the speed of a kernel depends on beside its arguments.
const std::string& machine() {
  static const std::string text =
      fmt::format("llga_fuser {}, oneDNN {} {}, {}, {}", LLGA_FUSER_VERSION, onednnVersion(),
                  onednnHash(), effectiveIsa(), processor());
  return text;
}

std::string directoryOfEnvironment() {
  const auto of = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
  };
  if (const auto own = of("LLGA_FUSER_CACHE_DIR"); !own.empty()) {
    return own;
  }
  if (const auto cache = of("XDG_CACHE_HOME"); !cache.empty()) {
    return fs::path(cache) / "llga_fuser";
  }
  const auto home = of("HOME");
  return home.empty() ? "" : fs::path(home) / ".cache" / "llga_fuser";
}

}  // namespace

uint64_t fingerprint(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325ULL;  // FNV-1a
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  }
  return hash;
}

Choices& Choices::instance() {
  static auto* choices = new Choices();  // kernels may outlive the exit handlers
  return *choices;
}

void Choices::useDirectory(const std::string& directory) {
  const std::lock_guard lock(mutex_);
  directory_ = directory;
  loaded_ = false;
}

void Choices::load() {
  if (loaded_) {
    return;
  }
  loaded_ = true;
  known_.clear();
  path_.clear();
  const auto directory = directory_.empty() ? directoryOfEnvironment() : directory_;
  if (directory.empty()) {
    return;
  }
  path_ = fs::path(directory) / fmt::format("autotune-{:016x}.txt", fingerprint(machine()));
  std::ifstream file(path_);
  for (std::string line; std::getline(file, line);) {
    const auto tab = line.find('\t');
    if (!line.empty() && line[0] != '#' && tab != std::string::npos) {
      known_[line.substr(tab + 1)] = line.substr(0, tab);
    }
  }
}

std::optional<std::string> Choices::find(const std::string& about) {
  const std::lock_guard lock(mutex_);
  load();
  const auto found = known_.find(about);
  return found == known_.end() ? std::nullopt : std::optional(found->second);
}

void Choices::remember(const std::vector<Choice>& made) {
  const std::lock_guard lock(mutex_);
  load();
  for (const auto& [about, name] : made) {
    known_[about] = name;
  }
  if (!made.empty() && !append(made)) {
    TORCH_WARN_ONCE("llga_fuser: autotuning can't write its choices to ",
                    path_.empty() ? "a file, for want of a home directory" : path_,
                    "; other processes will measure again. LLGA_FUSER_CACHE_DIR names another "
                    "directory.");
  }
}

// In one call of write(), which other processes can't part.
bool Choices::append(const std::vector<Choice>& made) const {
  std::error_code error;
  fs::create_directories(fs::path(path_).parent_path(), error);
  std::string text;
  for (const auto& [about, name] : made) {
    text += fmt::format("{}\t{}\n", name, about);
  }
  constexpr mode_t kMode = 0644;
  int file = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  if (file >= 0) {
    text = fmt::format("# {}\n{}", machine(), text);
  } else {
    file = open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  }
  if (file < 0) {
    return false;
  }
  const auto written = write(file, text.data(), text.size());
  return close(file) == 0 && written == static_cast<ssize_t>(text.size());
}

Choices::Info Choices::info() {
  const std::lock_guard lock(mutex_);
  load();
  return {path_, known_};
}

}  // namespace llga
