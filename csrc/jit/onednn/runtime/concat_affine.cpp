#include "jit/onednn/runtime/concat_affine.h"

#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Of pixels that a thread takes together: their rows of the result stay in the second level of
// cache.
constexpr int64_t kBlock = 32;

// Calls f(pixel, rows, block) for blocks of pixels, whose rows have `width` numbers; `block` is
// memory for as many numbers as `kept` of each pixel.
template <typename F>
void forBlocks(int64_t pixels, int64_t width, int64_t kept, const F& f) {
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  at::parallel_for(0, pixels, std::max<int64_t>(1, kForOne / width), [&](int64_t from, int64_t to) {
    std::vector<float> block(kept * std::min(kBlock, to - from));
    for (auto pixel = from; pixel < to; pixel += kBlock) {
      f(pixel, std::min(kBlock, to - pixel), block.data());
    }
  });
}

// Calls f(part, offset) for each part. `offset`: of the part in a row of the result.
template <typename F>
void forParts(const std::vector<int64_t>& widths, const F& f) {
  int64_t offset = 0;
  for (const auto part : c10::irange(widths.size())) {
    f(part, offset);
    offset += widths[part];
  }
}

}  // namespace

void ConcatAffine::run(c10::ArrayRef<const void*> parts, void* to) const {
  const auto& loops = vector_loops::kernels();
  const bool bytes = dtype == at::kByte;
  if (result == at::kByte && activation) {
    auto* rounded = static_cast<uint8_t*>(to);
    bytes ? runRounded<uint8_t>(parts, rounded, loops.affineRowsFromBytes)
          : runRounded<float>(parts, rounded, loops.wide.affineRows);
  } else if (bytes) {
    runAs<uint8_t>(parts, static_cast<uint8_t*>(to), loops.affineRowsOfBytes);
  } else if (result == at::kByte) {
    runAs<float>(parts, static_cast<uint8_t*>(to), loops.affineRowsToBytes);
  } else if (dtype == at::kFloat) {
    runAs<float>(parts, static_cast<float*>(to), loops.wide.affineRows);
  } else {
    runAs<Bfloat16>(parts, static_cast<Bfloat16*>(to), loops.narrow.affineRows);
  }
}

template <typename From, typename To, typename AffineRows>
void ConcatAffine::runAs(c10::ArrayRef<const void*> parts, To* to, AffineRows affineRows) const {
  const auto width = static_cast<int64_t>(scale.size());
  forBlocks(pixels, width, 0, [&](int64_t pixel, int64_t rows, float* /*block*/) {
    auto* out = to + pixel * width;
    forParts(channels, [&](size_t part, int64_t channel) {
      affineRows(static_cast<const From*>(parts[part]) + pixel * channels[part], out + channel,
                 {rows, channels[part], channels[part], width, scale.data() + channel,
                  shift.data() + channel, least});
    });
    if constexpr (!std::is_same_v<To, uint8_t>) {
      if (activation) {
        vector_loops::functions<To>().activate(*activation, out, out, rows * width);
      }
    }
  });
}

template <typename From, typename AffineRows>
void ConcatAffine::runRounded(c10::ArrayRef<const void*> parts, uint8_t* to,
                              AffineRows affineRows) const {
  const auto& loops = vector_loops::kernels();
  const auto width = static_cast<int64_t>(scale.size());
  forBlocks(pixels, width, width, [&](int64_t pixel, int64_t rows, float* block) {
    forParts(channels, [&](size_t part, int64_t channel) {
      affineRows(static_cast<const From*>(parts[part]) + pixel * channels[part], block + channel,
                 {rows, channels[part], channels[part], width, scale.data() + channel,
                  shift.data() + channel, least});
    });
    loops.wide.activate(*activation, block, block, rows * width);
    loops.toBytes(block, rows * width, result_scale, result_shift, to + pixel * width);
  });
}

void Concat::run(c10::ArrayRef<const void*> parts, void* result) const {
  const auto width = std::accumulate(words.begin(), words.end(), int64_t{0});
  const auto copyRows = vector_loops::kernels().copyRows;
  forBlocks(pixels, width, 0, [&](int64_t pixel, int64_t rows, float* /*block*/) {
    forParts(words, [&](size_t part, int64_t word) {
      copyRows(static_cast<const float*>(parts[part]) + pixel * strides[part], rows, words[part],
               strides[part], static_cast<float*>(result) + pixel * width + word, width);
    });
  });
}

void ConcatOfRows::run(c10::ArrayRef<const void*> parts, void* result) const {
  constexpr int64_t kForOne = 1 << 15;  // bytes that are not worth a second thread
  const auto rows = c10::multiply_integers(sizes);
  const auto width = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  auto* to = static_cast<char*>(result);
  if (rows == 1) {
    forParts(bytes, [&](size_t part, int64_t offset) {
      const auto* from = static_cast<const char*>(parts[part]);
      at::parallel_for(0, bytes[part], kForOne, [&](int64_t first, int64_t last) {
        std::memcpy(to + offset + first, from + first, static_cast<size_t>(last - first));
      });
    });
    return;
  }
  const auto grain = std::max<int64_t>(1, kForOne / std::max<int64_t>(1, width));
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    std::vector<int64_t> place(sizes.size());
    auto rest = first;
    for (auto dim = sizes.size(); dim-- > 0; rest /= sizes[dim]) {
      place[dim] = rest % sizes[dim];
    }
    for (auto row = first; row < last; ++row) {
      forParts(bytes, [&](size_t part, int64_t offset) {
        const auto at =
            std::inner_product(place.begin(), place.end(), strides[part].begin(), int64_t{0});
        std::memcpy(to + row * width + offset, static_cast<const char*>(parts[part]) + at,
                    static_cast<size_t>(bytes[part]));
      });
      for (auto dim = sizes.size(); dim-- > 0;) {
        ++place[dim];
        if (place[dim] < sizes[dim]) {
          break;
        }
        place[dim] = 0;
      }
    }
  });
}

}  // namespace llga
