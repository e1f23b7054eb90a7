// Tasks for all threads, each thread with memory of its own.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/shares.h"

namespace llga {

// Calls task(i, memory) for each i in [0, tasks), with as many threads as PyTorch works with; all
// tasks of a thread get the same `bytes`, from a cache line's first one on. All memory comes from
// the arena at once: threads that ask for it at the same time wait for each other, longer than many
// a task takes.
template <typename Task>
void forTasks(int64_t tasks, int64_t bytes, const Task& task) {
  constexpr int64_t kLine = 64;
  const auto parts = std::min<int64_t>(at::get_num_threads(), tasks);
  const auto stride = (bytes / kLine + 2) * kLine;  // never the same offset of a page
  const auto memory = arena()->allocate(static_cast<size_t>(parts * stride));
  forShares(tasks, 1, parts, [&](int64_t part, int64_t first, int64_t last) {
    auto* own = static_cast<char*>(memory.get()) + part * stride;
    for (auto i = first; i < last; ++i) {
      task(i, own);
    }
  });
}

}  // namespace llga
