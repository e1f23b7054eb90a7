// Tasks for all threads, each thread with memory of its own.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/shares.h"

namespace llga {

// As forSharesOf, with as many threads as PyTorch works with, but no more than `most`, each of
// which calls make(memory): all that a thread takes gets the same `bytes`, from a cache line's
// first one on. All memory comes from the arena at once: threads that ask for it at the same time
// wait for each other, longer than many a task takes.
template <typename Make>
void forTasksOf(int64_t tasks, int64_t bytes, const Make& make,
                int64_t most = std::numeric_limits<int64_t>::max()) {
  constexpr int64_t kLine = 64;
  const auto parts = std::min({int64_t{at::get_num_threads()}, tasks, most});
  const auto stride = (bytes / kLine + 2) * kLine;  // never the same offset of a page
  const auto memory = arena()->allocate(static_cast<size_t>(parts * stride));
  forSharesOf(tasks, 1, parts, [&](int64_t part) {
    return make(static_cast<void*>(static_cast<char*>(memory.get()) + part * stride));
  });
}

// Calls task(i, memory) for each i in [0, tasks).
template <typename Task>
void forTasks(int64_t tasks, int64_t bytes, const Task& task,
              int64_t most = std::numeric_limits<int64_t>::max()) {
  forTasksOf(
      tasks, bytes,
      [&](void* memory) {
        return [&task, memory](int64_t first, int64_t last) {
          for (; first < last; ++first) {
            task(first, memory);
          }
        };
      },
      most);
}

}  // namespace llga
