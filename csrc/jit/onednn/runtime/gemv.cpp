#include "jit/onednn/runtime/gemv.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

namespace llga {
namespace {

// One register of AVX2. Arithmetic goes number by number.
constexpr int64_t kWidth = 8;
using Vector [[gnu::vector_size(kWidth * sizeof(float))]] = float;
// Of the bits that are to stay.
using Mask [[gnu::vector_size(kWidth * sizeof(float))]] = int32_t;

#define LLGA_AVX2 gnu::target("avx2,fma"), gnu::optimize("O3")
#define LLGA_INLINE [[LLGA_AVX2, gnu::always_inline]] inline

LLGA_INLINE Vector load(const float* from) {
  Vector to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

LLGA_INLINE Vector loadMasked(const float* from, const Mask& mask) {
  return reinterpret_cast<Vector>(reinterpret_cast<Mask>(load(from)) & mask);
}

// Sums of a few rows each are added up, as they are in eager: one long sum would round more.
template <int64_t vectors>
LLGA_INLINE void sumBand(const float* from, int64_t rows, int64_t stride, float* to) {
  constexpr int64_t kFew = 64;
  Vector total[vectors] = {};
  for (int64_t first = 0; first < rows; first += kFew) {
    Vector sum[vectors] = {};
    for (auto row = first; row < std::min(rows, first + kFew); ++row) {
      for (int64_t v = 0; v < vectors; ++v) {
        sum[v] += load(from + row * stride + v * kWidth);
      }
    }
    for (int64_t v = 0; v < vectors; ++v) {
      total[v] += sum[v];
    }
  }
  std::memcpy(to, total, sizeof(total));
}

// The products of some rows with one. What is left of them behind the last whole vector is `rest`
// of the vector that ends where they end.
template <int64_t rows>
LLGA_INLINE void dot(const float* from, int64_t columns, const float* factor, const Mask& rest,
                     float* to) {
  Vector sum[rows] = {};
  int64_t c = 0;
  for (; c + kWidth <= columns; c += kWidth) {
    const auto y = load(factor + c);
    for (int64_t row = 0; row < rows; ++row) {
      sum[row] += load(from + row * columns + c) * y;
    }
  }
  if (c < columns) {
    const auto y = loadMasked(factor + columns - kWidth, rest);
    for (int64_t row = 0; row < rows; ++row) {
      sum[row] += loadMasked(from + (row + 1) * columns - kWidth, rest) * y;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const auto& s = sum[row];
    to[row] = ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
  }
}

// to[row] = sum of from[row][.] * factor[.]
[[LLGA_AVX2]] void dotRows(const float* from, int64_t rows, int64_t columns, const float* factor,
                           float* to) {
  constexpr int64_t kRows = 6;
  if (columns < kWidth) {
    for (int64_t row = 0; row < rows; ++row) {
      float sum = 0;
      for (int64_t c = 0; c < columns; ++c) {
        sum += from[row * columns + c] * factor[c];
      }
      to[row] = sum;
    }
    return;
  }
  Mask rest;
  for (int64_t i = 0; i < kWidth; ++i) {
    rest[i] = i < kWidth - columns % kWidth ? 0 : -1;
  }
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    dot<kRows>(from + row * columns, columns, factor, rest, to + row);
  }
  for (; row < rows; ++row) {
    dot<1>(from + row * columns, columns, factor, rest, to + row);
  }
}

// NaN stays NaN.
float rectified(float x, Rectifier rectifier) {
  switch (rectifier) {
    case Rectifier::relu:
      return x < 0 ? 0 : x;
    case Rectifier::hardswish: {
      const auto line = x + 3;
      const auto low = line < 0 ? 0 : line;
      return x * (low > 6 ? 6 : low) / 6;
    }
    default:
      return x;
  }
}

}  // namespace

[[LLGA_AVX2]] void sumRows(const float* from, int64_t rows, int64_t columns, float* to) {
  constexpr int64_t kVectors = 8;
  int64_t c = 0;
  for (; c + kVectors * kWidth <= columns; c += kVectors * kWidth) {
    sumBand<kVectors>(from + c, rows, columns, to + c);
  }
  for (; c + kWidth <= columns; c += kWidth) {
    sumBand<1>(from + c, rows, columns, to + c);
  }
  for (; c < columns; ++c) {
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) {
      sum += from[row * columns + c];
    }
    to[c] = static_cast<float>(sum);
  }
}

[[LLGA_AVX2]] void scaleRows(const float* from, int64_t rows, int64_t columns, const float* factor,
                             float* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < columns; ++c) {
      to[c] = from[c] * factor[c];
    }
    from += columns;
    to += columns;
  }
}

#undef LLGA_AVX2
#undef LLGA_INLINE

void gemv(const float* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier) {
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  const auto grain = std::max<int64_t>(1, kForOne / columns);
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    dotRows(matrix + first * columns, last - first, columns, vector, result + first);
    for (auto row = first; row < last; ++row) {
      result[row] = rectified(result[row] + (bias != nullptr ? bias[row] : 0), rectifier);
    }
  });
}

}  // namespace llga
