#include "jit/onednn/runtime/gemv.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <cstring>

#include "jit/onednn/runtime/arena.h"

#define LLGA_VECTOR_WIDTH 8
#define LLGA_VECTOR_INLINE [[gnu::target("avx2,fma"), gnu::always_inline]] inline
#include "jit/onednn/runtime/vector.h"

namespace llga {
namespace {

// Of the bits that are to stay.
using Mask [[gnu::vector_size(kVectorWidth * sizeof(float))]] = int32_t;

constexpr int64_t kTwice = 2 * kVectorWidth;  // numbers of bfloat16 in a register

#define LLGA_AVX2 gnu::target("avx2,fma"), gnu::optimize("O3")
#define LLGA_INLINE [[LLGA_AVX2, gnu::always_inline]] inline

LLGA_INLINE Vector loadMasked(const float* from, const Mask& mask) {
  return reinterpret_cast<Vector>(reinterpret_cast<Mask>(loadVector(from)) & mask);
}

// The sum of each one's numbers: those of four take as many instructions as those of one.
LLGA_INLINE __m128 sumsOf(__m256 a, __m256 b, __m256 c, __m256 d) {
  const auto sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

template <int64_t count>
LLGA_INLINE void storeSums(const Vector (&of)[count], float* to) {
  constexpr int64_t kFour = 4;
  constexpr auto kLeft = count % kFour;
  static_assert(kLeft < 3);
  int64_t i = 0;
  for (; i + kFour <= count; i += kFour) {
    _mm_storeu_ps(to + i, sumsOf(of[i], of[i + 1], of[i + 2], of[i + 3]));
  }
  if constexpr (kLeft == 1) {
    _mm_store_ss(to + i, sumsOf(of[i], of[i], of[i], of[i]));
  } else if constexpr (kLeft == 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(to + i), sumsOf(of[i], of[i + 1], of[i], of[i + 1]));
  }
}

// The products of some rows with one. What is left of them behind the last whole vector is `rest`
// of the vector that ends where they end. If `fetches`, as many rows behind them are fetched, in
// the order in which they lie in memory.
template <int64_t rows, bool fetches>
LLGA_INLINE void dot(const float* from, int64_t columns, const float* factor, const Mask& rest,
                     float* to) {
  constexpr int64_t kLine = 16;
  Vector sum[rows] = {};
  int64_t c = 0;
  for (; fetches && c + kLine <= columns; c += kLine) {
    for (int64_t line = 0; line < rows; ++line) {
      __builtin_prefetch(from + rows * (columns + c) + line * kLine);
    }
    for (int64_t half = c; half < c + kLine; half += kVectorWidth) {
      const auto y = loadVector(factor + half);
      for (int64_t row = 0; row < rows; ++row) {
        sum[row] += loadVector(from + row * columns + half) * y;
      }
    }
  }
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
  storeSums(sum, to);
}

// Likewise of bfloat16; `factor` as inHalves() made it. A register holds an even and an odd column
// in 32 bits, which need no shuffling to become float32. What lies `ahead` numbers further is
// fetched: unlike those of float32, such rows are too short for the processor to find out itself.
template <int64_t rows>
LLGA_INLINE void dot(const Bfloat16* from, int64_t columns, const float* factor, float* to,
                     int64_t ahead) {
  Vector even[rows] = {};
  Vector odd[rows] = {};
  for (int64_t c = 0; c < columns; c += kTwice) {
    const auto for_even = loadVector(factor + c);
    const auto for_odd = loadVector(factor + c + kVectorWidth);
    const bool whole = c + kTwice <= columns;
    for (int64_t row = 0; row < rows; ++row) {
      __builtin_prefetch(from + row * columns + c + ahead);
      Bits both = {};
      if (whole) {
        std::memcpy(&both, from + row * columns + c, sizeof(both));
      } else {
        std::memcpy(&both, from + row * columns + c,
                    static_cast<size_t>(columns - c) * sizeof(Bfloat16));
      }
      even[row] += reinterpret_cast<Vector>(both << 16U) * for_even;
      odd[row] += reinterpret_cast<Vector>(both & 0xFFFF0000U) * for_odd;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    even[row] += odd[row];
  }
  storeSums(even, to);
}

float widened(float number) { return number; }
float widened(Bfloat16 number) {
  return c10::bit_cast<float>(static_cast<uint32_t>(number) << 16U);
}

// Of each kTwice numbers the even ones, then the odd ones; zeros behind the last.
template <typename T>
void inHalves(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kTwice) {
    for (int64_t k = 0; k < kTwice; ++k) {
      const auto column = i + k % kVectorWidth * 2 + k / kVectorWidth;
      to[i + k] = column < count ? widened(from[column]) : 0;
    }
  }
}

// to[row] = sum of from[row][.] * factor[.]
[[LLGA_AVX2]] void dotRows(const Bfloat16* from, int64_t rows, int64_t columns, const float* factor,
                           float* to) {
  constexpr int64_t kRows = 4;
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    const bool more = row + 2 * kRows <= rows;
    dot<kRows>(from + row * columns, columns, factor, to + row, more ? kRows * columns : 0);
  }
  for (; row < rows; ++row) {
    dot<1>(from + row * columns, columns, factor, to + row, 0);
  }
}

[[LLGA_AVX2]] void dotRows(const float* from, int64_t rows, int64_t columns, const float* factor,
                           float* to) {
  constexpr int64_t kRows = 6;
  constexpr int64_t kShort = 512;  // columns, up to which the processor finds out too late
  if (columns < kVectorWidth) {
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
  for (int64_t i = 0; i < kVectorWidth; ++i) {
    rest[i] = i < kVectorWidth - columns % kVectorWidth ? 0 : -1;
  }
  int64_t row = 0;
  for (; columns <= kShort && row + 2 * kRows <= rows; row += kRows) {
    dot<kRows, true>(from + row * columns, columns, factor, rest, to + row);
  }
  for (; row + kRows <= rows; row += kRows) {
    dot<kRows, false>(from + row * columns, columns, factor, rest, to + row);
  }
  for (; row < rows; ++row) {
    dot<1, false>(from + row * columns, columns, factor, rest, to + row);
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

template <typename V>
void multiplyNarrow(const Bfloat16* matrix, const float* bias, int64_t rows, int64_t columns,
                    const V* vector, float* result, Rectifier rectifier, int64_t grain) {
  const auto whole = at::round_up(columns, kTwice);
  const auto memory = arena()->allocate(static_cast<size_t>(whole) * sizeof(float));
  auto* halves = static_cast<float*>(memory.get());
  inHalves(vector, columns, halves);
  multiply(matrix, bias, rows, columns, halves, result, rectifier, grain);
}

}  // namespace

void gemv(const float* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain) {
  multiply(matrix, bias, rows, columns, vector, result, rectifier, grain);
}

void gemv(const Bfloat16* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain) {
  multiplyNarrow(matrix, bias, rows, columns, vector, result, rectifier, grain);
}

void gemv(const Bfloat16* matrix, const float* bias, int64_t rows, int64_t columns,
          const Bfloat16* vector, float* result, Rectifier rectifier, int64_t grain) {
  multiplyNarrow(matrix, bias, rows, columns, vector, result, rectifier, grain);
}

#undef LLGA_AVX2
#undef LLGA_INLINE

}  // namespace llga
