#include "jit/onednn/runtime/transposition.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/irange.h>
#include <emmintrin.h>

#include <algorithm>
#include <cstring>

#include "jit/onednn/runtime/shares.h"

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

// Interleaves the halves of two registers; `bytes`: that stay together.
template <int bytes>
void interleave(__m128i a, __m128i b, __m128i& low, __m128i& high) {
  low = bytes == 2   ? _mm_unpacklo_epi16(a, b)
        : bytes == 4 ? _mm_unpacklo_epi32(a, b)
                     : _mm_unpacklo_epi64(a, b);
  high = bytes == 2   ? _mm_unpackhi_epi16(a, b)
         : bytes == 4 ? _mm_unpackhi_epi32(a, b)
                      : _mm_unpackhi_epi64(a, b);
}

// 8 x 8 numbers of two bytes.
void transposeSquare(__m128i (&v)[8]) {
  __m128i pairs[8];
  __m128i fours[8];
#pragma GCC unroll 4
  for (size_t i = 0; i < 8; i += 2) {  // rows i and i + 1
    interleave<2>(v[i], v[i + 1], pairs[i], pairs[i + 1]);
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < 8; i += 2) {  // of four rows each
    const auto first = i / 4 * 4 + i / 2 % 2;
    interleave<4>(pairs[first], pairs[first + 2], fours[i], fours[i + 1]);
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < 8; i += 2) {
    interleave<8>(fours[i / 2], fours[i / 2 + 4], v[i], v[i + 1]);
  }
}

// Of the columns [first, columns), one by one.
template <typename T>
void transposeRest(const T* from, int64_t rows, int64_t first, int64_t columns, int64_t from_stride,
                   T* to, int64_t to_stride) {
  for (int64_t c = first; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      to[c * to_stride + r] = from[r * from_stride + c];
    }
  }
}

template <typename T>
void runBlocks(const Transposition& t, const T* from, T* to) {
  constexpr int64_t kSide = 64;         // of a block, which finds room in the first level of cache
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  const auto along = at::ceil_div(t.rows, kSide);
  const auto across = at::ceil_div(t.columns, kSide);
  const auto blocks = t.batches * along * across;
  const auto threads =
      std::clamp<int64_t>(t.batches * t.rows * t.columns / kForOne, 1, at::get_num_threads());
  forShares(blocks, 1, std::min(threads, blocks), [&](int64_t block, int64_t last) {
    for (; block < last; ++block) {
      const auto batch = block / (along * across);
      const auto row = block / across % along * kSide;
      const auto column = block % across * kSide;
      transpose(from + batch * t.from_batch + row * t.from_row + column,
                std::min(kSide, t.rows - row), std::min(kSide, t.columns - column), t.from_row,
                to + batch * t.to_batch + column * t.to_column + row, t.to_column);
    }
  });
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
#pragma GCC unroll 4
      for (int64_t i = 0; i < kSide; ++i, block += to_stride) {
        if (count == kSide) {
          _mm_storeu_ps(block, v[i]);
        } else {
          storeFirst(block, v[i], count);
        }
      }
    }
  }
  transposeRest(from, rows, whole, columns, from_stride, to, to_stride);
}

void transpose(const uint16_t* from, int64_t rows, int64_t columns, int64_t from_stride,
               uint16_t* to, int64_t to_stride) {
  constexpr int64_t kSide = 8;
  const auto whole = columns / kSide * kSide;
  for (int64_t c = 0; c < whole; c += kSide) {
    for (int64_t r = 0; r < rows; r += kSide) {
      const auto count = std::min(kSide, rows - r);
      __m128i v[kSide];
#pragma GCC unroll 8
      for (int64_t i = 0; i < kSide; ++i) {
        v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(
            from + (r + std::min(i, count - 1)) * from_stride + c));
      }
      transposeSquare(v);
      auto* block = to + c * to_stride + r;
#pragma GCC unroll 8
      for (int64_t i = 0; i < kSide; ++i, block += to_stride) {
        if (count == kSide) {
          _mm_storeu_si128(reinterpret_cast<__m128i*>(block), v[i]);
        } else {
          std::memcpy(block, &v[i], static_cast<size_t>(count) * sizeof(uint16_t));
        }
      }
    }
  }
  transposeRest(from, rows, whole, columns, from_stride, to, to_stride);
}

std::optional<Transposition> Transposition::of(const std::vector<int64_t>& sizes,
                                               const std::vector<int64_t>& from,
                                               const std::vector<int64_t>& to) {
  struct Dim {
    int64_t size;
    int64_t from;
    int64_t to;
  };
  std::vector<Dim> dims;
  for (const auto i : c10::irange(sizes.size())) {
    if (sizes[i] == 0) {
      return std::nullopt;
    }
    if (sizes[i] != 1) {
      dims.push_back({sizes[i], from[i], to[i]});
    }
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.to > b.to; });
  std::vector<Dim> joined;  // the innermost one of the result last
  for (const auto& dim : dims) {
    auto* outer = joined.empty() ? nullptr : &joined.back();
    if (outer != nullptr && outer->from == dim.from * dim.size && outer->to == dim.to * dim.size) {
      *outer = {outer->size * dim.size, dim.from, dim.to};
    } else {
      joined.push_back(dim);
    }
  }
  constexpr size_t kMatrix = 2;
  if (joined.size() == kMatrix) {
    joined.insert(joined.begin(), {1, 0, 0});
  }
  if (joined.size() != kMatrix + 1 || joined[1].from != 1 || joined[2].to != 1) {
    return std::nullopt;
  }
  return Transposition{joined[0].size, joined[0].from, joined[0].to, joined[2].size,
                       joined[2].from, joined[1].size, joined[1].to};
}

void Transposition::run(const float* from, float* to) const { runBlocks(*this, from, to); }

void Transposition::run(const uint16_t* from, uint16_t* to) const { runBlocks(*this, from, to); }

}  // namespace llga
