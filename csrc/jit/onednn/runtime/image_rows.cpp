#include "jit/onednn/runtime/image_rows.h"

#include <algorithm>

#include "jit/onednn/runtime/transposition.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
void ImageRows::copy(const float* image, int64_t top, int64_t rows, float* to) const {
  const auto from = std::clamp<int64_t>(padding, 0, width);
  const auto until = std::clamp(size[1] + padding, from, width);
  const auto count = until - from;
  for (auto y = top; y < top + rows; ++y, to += width * channels) {
    if (y < 0 || y >= size[0]) {
      std::fill_n(to, width * channels, 0.F);
      continue;
    }
    std::fill_n(to, from * channels, 0.F);
    std::fill_n(to + until * channels, (width - until) * channels, 0.F);
    const auto* source = image + y * strides[2] + std::max<int64_t>(-padding, 0) * strides[3];
    auto* inside = to + from * channels;
    if (strides[1] == 1 && strides[3] == channels) {
      std::copy_n(source, count * channels, inside);
    } else if (strides[3] == 1 && channels > 1 && channels <= kFewPlanes) {
      vector_loops::kernels().interleave(source, channels, strides[1], count, sizeof(float),
                                         inside);
    } else if (strides[3] == 1) {
      transpose(source, channels, count, strides[1], inside, channels);
    } else {
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t x = 0; x < count; ++x) {
          inside[x * channels + c] = source[c * strides[1] + x * strides[3]];
        }
      }
    }
  }
}

}  // namespace llga
