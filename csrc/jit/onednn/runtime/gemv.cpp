#include "jit/onednn/runtime/gemv.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#define LLGA_VECTOR_WIDTH 8
#define LLGA_VECTOR_INLINE [[gnu::target("avx2,fma"), gnu::always_inline]] inline
#include "jit/onednn/runtime/vector.h"

namespace llga {
namespace {

// Of the bits that are to stay.
using Mask [[gnu::vector_size(kVectorWidth * sizeof(float))]] = int32_t;

#define LLGA_AVX2 gnu::target("avx2,fma"), gnu::optimize("O3")
#define LLGA_INLINE [[LLGA_AVX2, gnu::always_inline]] inline

template <typename T>
LLGA_INLINE Vector loadMasked(const T* from, const Mask& mask) {
  return reinterpret_cast<Vector>(reinterpret_cast<Mask>(loadVector(from)) & mask);
}

// The products of some rows with one. What is left of them behind the last whole vector is `rest`
// of the vector that ends where they end.
template <int64_t rows, typename T>
LLGA_INLINE void dot(const T* from, int64_t columns, const float* factor, const Mask& rest,
                     float* to) {
  Vector sum[rows] = {};
  int64_t c = 0;
  for (; c + kVectorWidth <= columns; c += kVectorWidth) {
    const auto y = loadVector(factor + c);
    for (int64_t row = 0; row < rows; ++row) {
      sum[row] += loadVector(from + row * columns + c) * y;
    }
  }
  if (c < columns) {
    const auto y = loadMasked(factor + columns - kVectorWidth, rest);
    for (int64_t row = 0; row < rows; ++row) {
      sum[row] += loadMasked(from + (row + 1) * columns - kVectorWidth, rest) * y;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const auto& s = sum[row];
    to[row] = ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
  }
}

// to[row] = sum of from[row][.] * factor[.]
template <typename T>
[[LLGA_AVX2]] void dotRows(const T* from, int64_t rows, int64_t columns, const float* factor,
                           float* to) {
  constexpr int64_t kRows = 6;
  if (columns < kVectorWidth) {
    for (int64_t row = 0; row < rows; ++row) {
      T numbers[kVectorWidth] = {};
      std::memcpy(numbers, from + row * columns, static_cast<size_t>(columns) * sizeof(T));
      const auto wide = loadVector(numbers);
      float sum = 0;
      for (int64_t c = 0; c < columns; ++c) {
        sum += wide[c] * factor[c];
      }
      to[row] = sum;
    }
    return;
  }
  Mask rest;
  for (int64_t i = 0; i < kVectorWidth; ++i) {
    rest[i] = i < kVectorWidth - columns % kVectorWidth ? 0 : -1;
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
    case Rectifier::relu6: {
      const auto low = x < 0 ? 0 : x;
      return low > 6 ? 6 : low;
    }
    case Rectifier::hardswish: {
      const auto line = x + 3;
      const auto low = line < 0 ? 0 : line;
      return x * (low > 6 ? 6 : low) / 6;
    }
    default:
      return x;
  }
}

template <typename T>
void multiply(const T* matrix, const float* bias, int64_t rows, int64_t columns,
              const float* vector, float* result, Rectifier rectifier, int64_t grain) {
  at::parallel_for(
      0, rows, std::max<int64_t>(1, grain / columns), [&](int64_t first, int64_t last) {
        dotRows(matrix + first * columns, last - first, columns, vector, result + first);
        for (auto row = first; row < last; ++row) {
          result[row] = rectified(result[row] + (bias != nullptr ? bias[row] : 0), rectifier);
        }
      });
}

}  // namespace

void gemv(const float* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain) {
  multiply(matrix, bias, rows, columns, vector, result, rectifier, grain);
}

void gemv(const Bfloat16* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain) {
  multiply(matrix, bias, rows, columns, vector, result, rectifier, grain);
}

#undef LLGA_AVX2
#undef LLGA_INLINE

}  // namespace llga
