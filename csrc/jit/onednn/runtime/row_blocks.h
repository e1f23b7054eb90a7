// How many rows of an image a block of convolutions computes at once (expansion.h,
// quantized_block.h).
#pragma once

#include <algorithm>
#include <cstdint>

namespace llga {

// Rows of the data that are read for `rows` of the result.
inline int64_t rowsUnder(int64_t rows, int64_t window, int64_t stride) {
  return (rows - 1) * stride + window;
}

// Rows of the result at once, of `rows`: enough pixels that weights are worth reading, and all
// blocks of nearly the same size. `width`: of the data; `projected`: of the result, if there is a
// projection, else 0.
inline int64_t rowsAtOnce(int64_t rows, int64_t width, int64_t stride, int64_t projected) {
  constexpr int64_t kExpanded = 96;  // pixels
  constexpr int64_t kProjected = 48;
  const auto fewest = [](int64_t pixels, int64_t row) {
    return std::max<int64_t>(1, (pixels + row / 2) / row);
  };
  const auto wanted = std::max(fewest(kExpanded, width * stride),
                               projected != 0 ? fewest(kProjected, projected) : 1);
  const auto blocks = (rows + wanted - 1) / wanted;
  return (rows + blocks - 1) / blocks;
}

}  // namespace llga
