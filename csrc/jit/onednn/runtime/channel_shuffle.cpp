#include "jit/onednn/runtime/channel_shuffle.h"

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <numeric>

namespace llga {
namespace {

// Numbers of a and b by turns.
template <typename T>
[[gnu::always_inline]] inline void alternate(const T* a, const T* b, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[2 * i] = a[i];
    to[2 * i + 1] = b[i];
  }
}

#define LLGA_FOR_ALL_ISA \
  [[gnu::target_clones("arch=skylake-avx512", "arch=haswell", "default"), gnu::optimize("O3")]]

LLGA_FOR_ALL_ISA void alternate32(const uint32_t* __restrict__ a, const uint32_t* __restrict__ b,
                                  int64_t count, uint32_t* __restrict__ to) {
  alternate(a, b, count, to);
}

LLGA_FOR_ALL_ISA void alternate16(const uint16_t* __restrict__ a, const uint16_t* __restrict__ b,
                                  int64_t count, uint16_t* __restrict__ to) {
  alternate(a, b, count, to);
}

LLGA_FOR_ALL_ISA void alternate8(const uint8_t* __restrict__ a, const uint8_t* __restrict__ b,
                                 int64_t count, uint8_t* __restrict__ to) {
  alternate(a, b, count, to);
}

#undef LLGA_FOR_ALL_ISA

void alternate(const uint32_t* a, const uint32_t* b, int64_t count, uint32_t* to) {
  alternate32(a, b, count, to);
}

void alternate(const uint16_t* a, const uint16_t* b, int64_t count, uint16_t* to) {
  alternate16(a, b, count, to);
}

void alternate(const uint8_t* a, const uint8_t* b, int64_t count, uint8_t* to) {
  alternate8(a, b, count, to);
}

}  // namespace

ChannelShuffle::ChannelShuffle(std::vector<int64_t> parts, std::vector<int64_t> chunks,
                               int64_t groups, int64_t pixels, int64_t item)
    : parts_(std::move(parts)),
      chunks_(std::move(chunks)),
      pairs_(groups == 2 && parts_.size() == 2 && parts_[0] == parts_[1] &&
             std::all_of(chunks_.begin(), chunks_.end(), [](int64_t c) { return c % 2 == 0; })),
      pixels_(pixels),
      item_(item) {
  std::vector<Source> concatenated;
  for (const auto part : c10::irange(parts_.size())) {
    for (const auto channel : c10::irange(parts_[part])) {
      concatenated.push_back({static_cast<int64_t>(part), channel});
    }
  }
  const auto channels = static_cast<int64_t>(concatenated.size());
  for (const auto i : c10::irange(channels)) {
    sources_.push_back(concatenated[i % groups * (channels / groups) + i / groups]);
  }
}

template <typename T>
void ChannelShuffle::copy(c10::ArrayRef<const void*> parts, T* to, size_t chunk,
                          int64_t first_pixel, int64_t last_pixel) const {
  const auto first = std::accumulate(chunks_.begin(), chunks_.begin() + chunk, int64_t{0});
  const auto count = chunks_[chunk];
  auto data = [&](int64_t part) { return static_cast<const T*>(parts[part]); };
  for (auto pixel = first_pixel; pixel < last_pixel; ++pixel) {
    auto* row = to + pixel * count;
    if (pairs_) {
      const auto from = pixel * parts_[0] + first / 2;
      alternate(data(0) + from, data(1) + from, count / 2, row);
      continue;
    }
    for (int64_t c = 0; c < count; ++c) {
      const auto& source = sources_[first + c];
      row[c] = data(source.part)[pixel * parts_[source.part] + source.channel];
    }
  }
}

void ChannelShuffle::run(c10::ArrayRef<const void*> parts, c10::ArrayRef<void*> chunks) const {
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  const auto width = static_cast<int64_t>(sources_.size());
  const auto grain = std::max<int64_t>(1, kForOne / width);
  at::parallel_for(0, pixels_, grain, [&](int64_t first, int64_t last) {
    for (const auto chunk : c10::irange(chunks.size())) {
      if (item_ == sizeof(uint32_t)) {
        copy(parts, static_cast<uint32_t*>(chunks[chunk]), chunk, first, last);
      } else if (item_ == sizeof(uint16_t)) {
        copy(parts, static_cast<uint16_t*>(chunks[chunk]), chunk, first, last);
      } else {
        copy(parts, static_cast<uint8_t*>(chunks[chunk]), chunk, first, last);
      }
    }
  });
}

}  // namespace llga
