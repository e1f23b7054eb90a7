#include "jit/onednn/runtime/concat_affine.h"

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <bit>

namespace llga {
namespace {

// One part of some pixels. Parts are dense; rows of the result are `stride` numbers apart.
struct Rows {
  int64_t pixels;
  int64_t channels;
  int64_t stride;
  const float* scale;
  const float* shift;
  float least;
};

inline float toFloat(float value) { return value; }
inline float toFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline void store(float value, float& to) { to = value; }
inline void store(float value, uint16_t& to) {  // to the nearest bfloat16, ties to even
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  to = static_cast<uint16_t>(value != value ? 0x7FC0U : rounded);
}

// NaN stays NaN, as it is not less than anything.
template <typename T>
[[gnu::always_inline]] inline void affine(const T* from, T* to, const Rows& rows) {
  const auto* scale = rows.scale;
  const auto* shift = rows.shift;
  const auto least = rows.least;
  for (int64_t pixel = 0; pixel < rows.pixels; ++pixel) {
    for (int64_t c = 0; c < rows.channels; ++c) {
      const float value = toFloat(from[c]) * scale[c] + shift[c];
      store(value < least ? least : value, to[c]);
    }
    from += rows.channels;
    to += rows.stride;
  }
}

[[gnu::target_clones("arch=skylake-avx512", "arch=haswell", "default"), gnu::optimize("O3")]] void
affine32(const float* __restrict__ from, float* __restrict__ to, const Rows& rows) {
  affine(from, to, rows);
}

[[gnu::target_clones("arch=skylake-avx512", "arch=haswell", "default"), gnu::optimize("O3")]] void
affine16(const uint16_t* __restrict__ from, uint16_t* __restrict__ to, const Rows& rows) {
  affine(from, to, rows);
}

}  // namespace

void ConcatAffine::run(c10::ArrayRef<const void*> parts, void* result) const {
  constexpr int64_t kBlock = 32;        // pixels: their rows of the result stay in the L2 cache
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  const auto width = static_cast<int64_t>(scale.size());
  at::parallel_for(0, pixels, std::max<int64_t>(1, kForOne / width), [&](int64_t from, int64_t to) {
    for (auto pixel = from; pixel < to; pixel += kBlock) {
      int64_t channel = 0;
      for (const auto i : c10::irange(parts.size())) {
        const Rows rows{std::min(kBlock, to - pixel), channels[i], width, scale.data() + channel,
                        shift.data() + channel,       least};
        const auto source = pixel * channels[i];
        const auto target = pixel * width + channel;
        if (dtype == at::kFloat) {
          affine32(static_cast<const float*>(parts[i]) + source,
                   static_cast<float*>(result) + target, rows);
        } else {
          affine16(static_cast<const uint16_t*>(parts[i]) + source,
                   static_cast<uint16_t*>(result) + target, rows);
        }
        channel += channels[i];
      }
    }
  });
}

}  // namespace llga
