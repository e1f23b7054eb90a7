// Fetching the weights that a kernel needs next into the second level of cache, while it computes
// with others. Evenly: a burst would occupy what all reads of a core go through, so that those of
// now would wait.
//
// In an unnamed namespace, so that what one source compiles stays there, as vector.h.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/vector.h"

namespace llga {

namespace {

// Owns nothing; to be used by one thread.
class FetchAhead {
 public:
  // `bytes` from `next` on, or nothing if that is null, during `tiles` sums of as many bytes, of
  // which each step reads `bytes_of_step`.
  FetchAhead(const void* next, int64_t bytes, int64_t bytes_of_step, int64_t tiles)
      : next_(static_cast<const char*>(next)),
        end_(next != nullptr ? next_ + bytes : next_),
        lines_((kSteps * bytes_of_step / kLine + tiles - 1) / tiles) {}

  // Steps until the next call of fetch(), of `most` that there are.
  LLGA_VECTOR_INLINE int64_t steps(int64_t most) const {
    return next_ < end_ && kSteps < most ? kSteps : most;
  }

  LLGA_VECTOR_INLINE void fetch() {
    for (int64_t i = 0; i < lines_ && next_ < end_; ++i, next_ += kLine) {
      __builtin_prefetch(next_, 0, 2);
    }
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  static constexpr int64_t kSteps = 8;

  const char* next_;
  const char* end_;
  int64_t lines_;
};

}  // namespace

}  // namespace llga
