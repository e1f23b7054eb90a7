// Work for all threads that does not wait for the slowest of them: the cores of a virtual machine
// differ by a factor of two and more while a neighbour computes on the same ones.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

namespace llga {

// What nobody has taken yet, of equal shares of [0, count). A thread takes from its own share, from
// the front and so in the order of memory, and the same each time; who has none left takes from the
// backs of the others'. Any thread may call take.
class Shares {
 public:
  struct Range {
    int64_t first;
    int64_t last;
  };

  Shares(int64_t count, int64_t parts) : parts_(parts) {
    if (parts > kFew) {
      many_ = std::make_unique<Share[]>(static_cast<size_t>(parts));
      shares_ = many_.get();
    }
    for (int64_t i = 0; i < parts; ++i) {
      shares_[i].left.store(packed(count * i / parts, count * (i + 1) / parts),
                            std::memory_order_relaxed);
    }
  }

  // Never an empty range but if nothing is left.
  Range take(int64_t part) {
    for (int64_t i = 0; i < parts_; ++i) {
      const auto owner = (part + i) % parts_;
      auto& left = shares_[owner].left;
      for (auto was = left.load(std::memory_order_relaxed); first(was) < last(was);) {
        // Large ones at first: few are taken in all, and little is under way at the end.
        constexpr int64_t kOf = 3;
        const auto size = (last(was) - first(was) + kOf - 1) / kOf;
        const auto mine =
            i == 0 ? Range{first(was), first(was) + size} : Range{last(was) - size, last(was)};
        const auto now = i == 0 ? packed(mine.last, last(was)) : packed(first(was), mine.first);
        if (left.compare_exchange_weak(was, now, std::memory_order_relaxed)) {
          return mine;
        }
      }
    }
    return {0, 0};
  }

 private:
  static constexpr int64_t kFew = 8;
  static constexpr int kHalf = 32;

  struct alignas(64) Share {
    std::atomic<uint64_t> left;  // where it begins and ends
  };

  static uint64_t packed(int64_t first, int64_t last) {
    return static_cast<uint64_t>(first) << kHalf | static_cast<uint64_t>(last);
  }
  static int64_t first(uint64_t left) { return static_cast<int64_t>(left >> kHalf); }
  static int64_t last(uint64_t left) { return static_cast<int64_t>(left & UINT32_MAX); }

  int64_t parts_;
  std::array<Share, kFew> few_;
  std::unique_ptr<Share[]> many_;
  Share* shares_ = few_.data();
};

// Does [0, units) in ranges that begin at multiples of `together`, by up to `parts` threads: each
// calls make(part), with a part of its own, and what that returns with the first unit of each range
// that it takes and the one behind the last.
template <typename Make>
void forSharesOf(int64_t units, int64_t together, int64_t parts, const Make& make) {
  if (parts <= 1) {
    make(0)(0, units);
    return;
  }
  together = std::max(together, at::ceil_div<int64_t>(units, std::numeric_limits<int32_t>::max()));
  Shares shares(at::ceil_div(units, together), parts);
  at::parallel_for(0, parts, 1, [&](int64_t part, int64_t end) {
    for (; part < end; ++part) {
      auto run = make(part);
      for (auto some = shares.take(part); some.first < some.last; some = shares.take(part)) {
        run(some.first * together, std::min(some.last * together, units));
      }
    }
  });
}

// Likewise, where nothing belongs to a thread: calls run(first, last).
template <typename Run>
void forShares(int64_t units, int64_t together, int64_t parts, const Run& run) {
  forSharesOf(units, together, parts, [&](int64_t /*part*/) {
    return [&](int64_t first, int64_t last) { run(first, last); };
  });
}

}  // namespace llga
