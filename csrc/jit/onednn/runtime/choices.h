// What autotuning has chosen: kept in the process, and in a file that other processes read.
//
// The file is one of text for each processor and set of versions: a line for a choice, its name, a
// tab and what it is about. Lines are only added; of several about one thing the last one counts,
// and what can't be read is passed over. Any thread may call; processes may share a file.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace llga {

class Choices {
 public:
  using Choice = std::pair<std::string, std::string>;  // what it is about, name

  static Choices& instance();

  // Where the files are; "" is where the environment says: LLGA_FUSER_CACHE_DIR, else llga_fuser in
  // XDG_CACHE_HOME or in ~/.cache. Forgets what is not there.
  void useDirectory(const std::string& directory);

  std::optional<std::string> find(const std::string& about);
  // Where the file can't be written there is a warning, once, and only this process knows.
  void remember(const std::vector<Choice>& made);

  struct Info {
    std::string path;  // of the file, whether it exists or not; "": there is no place for one
    std::unordered_map<std::string, std::string> known;
  };
  Info info();

 private:
  // Under the mutex.
  void load();
  bool append(const std::vector<Choice>& made) const;

  std::mutex mutex_;
  bool loaded_ = false;
  std::string directory_;
  std::string path_;
  std::unordered_map<std::string, std::string> known_;
};

// For short names of long texts: the same in every process.
uint64_t fingerprint(const std::string& text);

}  // namespace llga
