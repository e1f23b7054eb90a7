#include "jit/onednn/runtime/thread_exit.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

namespace llga {

// Not in the unnamed namespace, and visible: then the linker makes instance() one for all modules
// of the process, though they are loaded with RTLD_LOCAL.
class [[gnu::visibility("default")]] ThreadExits {
 public:
  static ThreadExits& instance() {
    static auto* exits = new ThreadExits;  // threads may end after static destructors ran
    return *exits;
  }

  // Both modules may say so of one thread.
  void begin() {
    if (!isEnding()) {
      ending_.lock();
      thread_ = std::this_thread::get_id();
    }
    ++depth_;
  }

  void end() {
    if (--depth_ == 0) {
      thread_ = std::thread::id();
      ending_.unlock();
      destroyDropped();
    }
  }

  // Waits while a thread ends, but for this one. False: there is nothing to allow again.
  bool forbid() {
    if (isEnding()) {
      return false;
    }
    ending_.lock_shared();
    return true;
  }

  void allow() {
    ending_.unlock_shared();
    destroyDropped();
  }

  void drop(dnnl::graph::compiled_partition&& compiled) {
    {
      const std::lock_guard lock(mutex_);
      dropped_.push_back(std::move(compiled));
    }
    destroyDropped();
  }

 private:
  bool isEnding() const { return thread_.load() == std::this_thread::get_id(); }

  // Unless a thread ends: that one comes here afterwards.
  void destroyDropped() {
    while (anyDropped()) {
      const bool ending = isEnding();
      if (!ending && !ending_.try_lock_shared()) {
        return;
      }
      {
        std::vector<dnnl::graph::compiled_partition> taken;  // dies behind the inner lock
        const std::lock_guard lock(mutex_);
        taken.swap(dropped_);
      }
      if (!ending) {
        ending_.unlock_shared();
      }
    }
  }

  bool anyDropped() {
    const std::lock_guard lock(mutex_);
    return !dropped_.empty();
  }

  std::shared_mutex ending_;             // exclusive: a thread ends
  std::atomic<std::thread::id> thread_;  // which one
  int depth_ = 0;                        // that thread's
  std::mutex mutex_;                     // of dropped_; the inner one
  std::vector<dnnl::graph::compiled_partition> dropped_;
};

namespace {

thread_local constinit unsigned known = 0;  // KeptArguments for which there is an EndBegins
thread_local constinit bool ends = false;

// Thread-local variables are destroyed in the reverse order. This one is made behind oneDNN's...
struct EndBegins {
  EndBegins() = default;
  ~EndBegins() {
    if (!std::exchange(ends, true)) {
      ThreadExits::instance().begin();
    }
  }
  EndBegins(const EndBegins&) = delete;
  EndBegins& operator=(const EndBegins&) = delete;
};

// ...and this one before.
struct HasEnded {
  HasEnded() = default;
  ~HasEnded() {
    if (std::exchange(ends, false)) {
      ThreadExits::instance().end();
    }
  }
  HasEnded(const HasEnded&) = delete;
  HasEnded& operator=(const HasEnded&) = delete;
};

// A function for each, because a variable is made when control passes it.
void makeHasEnded() { static const thread_local HasEnded variable; }

template <unsigned kBit>
void makeEndBegins(unsigned used) {
  if ((used & kBit) != 0) {
    static const thread_local EndBegins variable;
  }
}

}  // namespace

ExecutingThread::ExecutingThread(KeptArguments arguments) : known_(known), used_(arguments.bits()) {
  if (known_ == 0 && used_ != 0) {
    makeHasEnded();
  }
}

ExecutingThread::~ExecutingThread() {
  const unsigned fresh = used_ & ~known_;
  if (fresh != 0) {
    makeEndBegins<1>(fresh);
    makeEndBegins<2>(fresh);
    makeEndBegins<4>(fresh);
    known_ |= fresh;
  }
}

NoThreadEnds::NoThreadEnds() : forbidden_(ThreadExits::instance().forbid()) {}

NoThreadEnds::~NoThreadEnds() {
  if (forbidden_) {
    ThreadExits::instance().allow();
  }
}

void drop(dnnl::graph::compiled_partition&& compiled) {
  if (compiled) {
    ThreadExits::instance().drop(std::move(compiled));
  }
}

}  // namespace llga
