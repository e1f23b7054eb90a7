#include "jit/onednn/runtime/image_rows.h"

#include <xmmintrin.h>

#include <algorithm>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

void storeFirst(float* to, __m128 v, int64_t count) {
  if (count == 1) {
    return _mm_store_ss(to, v);
  }
  _mm_storel_pi(reinterpret_cast<__m64*>(to), v);
  if (count == 3) {
    _mm_store_ss(to + 2, _mm_movehl_ps(v, v));
  }
}

}  // namespace

// Four columns at a time: their places may be a power of two apart, where a cache holds few.
void transpose(const float* from, int64_t rows, int64_t columns, int64_t from_stride, float* to,
               int64_t to_stride) {
  constexpr int64_t kSide = 4;
  const auto whole = columns / kSide * kSide;
  for (int64_t c = 0; c < whole; c += kSide) {
    for (int64_t r = 0; r < rows; r += kSide) {
      const auto count = std::min(kSide, rows - r);
      auto row = [&](int64_t i) {
        return _mm_loadu_ps(from + (r + std::min(i, count - 1)) * from_stride + c);
      };
      __m128 v[kSide] = {row(0), row(1), row(2), row(3)};
      _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
      auto* block = to + c * to_stride + r;
      for (int64_t i = 0; i < kSide; ++i, block += to_stride) {
        if (count == kSide) {
          _mm_storeu_ps(block, v[i]);
        } else {
          storeFirst(block, v[i], count);
        }
      }
    }
  }
  for (int64_t c = whole; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      to[c * to_stride + r] = from[r * from_stride + c];
    }
  }
}

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
