// Compiled for AVX-512 (F, BW, VL, VNNI).
#include <immintrin.h>

#include "jit/onednn/runtime/quantized_blocks.h"

#define LLGA_VECTOR_INLINE [[gnu::always_inline]] inline

namespace llga::quantized {
namespace {

constexpr int kTogether = 4;  // products that one instruction adds to a sum

LLGA_VECTOR_INLINE __m512i load(const void* from) { return _mm512_loadu_si512(from); }

// The first `count` of the 64 bytes.
LLGA_VECTOR_INLINE __mmask64 firstBytes(int64_t count) {
  return ~__mmask64{0} >> static_cast<unsigned>(kPiece - count);
}

// From the order of a piece to that of channels, or back.
LLGA_VECTOR_INLINE __m512i reordered(__m512i bytes) {
  const auto order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}

// The integers that registers of sums come to, before they are cut to 8 bit. `addend`: as many
// numbers, or null; `count`: of those that are there.
LLGA_VECTOR_INLINE __m512i rescaled(__m512i sum, const Rescale& r, int64_t at,
                                    const uint8_t* addend, int64_t count) {
  auto x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(r.scale + at),
                           _mm512_loadu_ps(r.shift + at));
  if (addend != nullptr) {
    const auto mask = static_cast<__mmask16>(count - at < kWidth ? firstBytes(count - at) : -1);
    const auto bytes = _mm_maskz_loadu_epi8(mask, addend + at);
    x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)),
                        _mm512_set1_ps(r.addend_scale), x);
  }
  if (r.hardswish) {
    const auto line = _mm512_fmadd_ps(x, _mm512_set1_ps(r.unit), _mm512_set1_ps(0.5F));
    const auto bent = _mm512_min_ps(_mm512_set1_ps(1), _mm512_max_ps(_mm512_setzero_ps(), line));
    x = _mm512_fmadd_ps(x, bent, _mm512_set1_ps(r.zero_point));
  }
  // Too small numbers become the least integer.
  return _mm512_cvtps_epi32(_mm512_min_ps(x, _mm512_set1_ps(r.highest)));
}

// The 8-bit numbers of registers of sums, as a piece; behind them, nothing of use.
template <int vectors>
LLGA_VECTOR_INLINE __m512i finished(const __m512i (&sums)[vectors], const Rescale& r,
                                    const uint8_t* addend, int64_t count) {
  const auto none = _mm512_setzero_si512();
  const auto a = rescaled(sums[0], r, 0, addend, count);
  const auto b = vectors > 1 ? rescaled(sums[vectors > 1], r, kWidth, addend, count) : none;
  auto bytes = _mm512_packs_epi32(a, b);
  auto behind = none;
  if constexpr (vectors > 2) {
    const auto c = rescaled(sums[2], r, 2 * kWidth, addend, count);
    const auto d = vectors > 3 ? rescaled(sums[vectors - 1], r, 3 * kWidth, addend, count) : none;
    behind = _mm512_packs_epi32(c, d);
  }
  bytes = _mm512_packus_epi16(bytes, behind);
  return _mm512_max_epu8(bytes, _mm512_set1_epi8(static_cast<char>(r.lowest)));
}

LLGA_VECTOR_INLINE Rescale from(const Rescale& r, int64_t output) {
  auto there = r;
  there.start += output;
  there.scale += output;
  there.shift += output;
  return there;
}

LLGA_VECTOR_INLINE void storeRow(uint8_t* to, __m512i piece, int64_t count) {
  if (count == kPiece) {
    _mm512_storeu_si512(to, reordered(piece));
  } else {
    _mm512_mask_storeu_epi8(to, firstBytes(count), reordered(piece));
  }
}

// ------------------------------------------------------------------------------- matrix products

// `tiles` of `rows` rows from `row` on, by `count` outputs from `o` on.
template <int rows, int vectors>
void multiply(const Product& p, int64_t row, int64_t tiles, int64_t o, int64_t count) {
  const auto rescale = from(p.rescale, o);
  for (; tiles > 0; --tiles, row += rows) {
    __m512i sums[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        sums[r][v] = load(rescale.start + v * kWidth);
      }
    }
    const auto* source = p.source + row * p.source_stride;
    const auto* weight = p.weight + o * p.inputs;
#pragma GCC unroll 1
    for (int64_t i = 0; i < p.inputs; i += kTogether) {
      __m512i factors[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        factors[v] = load(weight + v * kWidth * p.inputs);
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        int four;
        __builtin_memcpy(&four, source + r * p.source_stride, sizeof(four));
        const auto numbers = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
          sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], numbers, factors[v]);
        }
      }
      source += kTogether;
      weight += kTogether * kWidth;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        asm("" : "+v"(sums[r][v]));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const auto at = (row + r) * p.result_stride + o;
      const auto piece = finished<vectors>(
          sums[r], rescale, p.addend != nullptr ? p.addend + at : nullptr, count);
      if (p.places != nullptr) {
        _mm512_storeu_si512(p.result + p.places[row + r], piece);
      } else {
        storeRow(p.result + at, piece, count);
      }
    }
  }
}

using Multiply = void (*)(const Product&, int64_t, int64_t, int64_t, int64_t);

template <int vectors, int count, int... rows>
struct UpTo : UpTo<vectors, count - 1, count, rows...> {};

template <int vectors, int... rows>
struct UpTo<vectors, 0, rows...> {
  static constexpr Multiply kernels[] = {multiply<rows, vectors>...};
};

// Rows that are multiplied at once, by registers of outputs: sums of all of them are in registers.
constexpr int64_t kRows[] = {12, 12, 8, 6};

void multiplyAll(const Product& p) {
  const Multiply* const kernels[] = {UpTo<1, kRows[0]>::kernels, UpTo<2, kRows[1]>::kernels,
                                     UpTo<3, kRows[2]>::kernels, UpTo<4, kRows[3]>::kernels};
  const auto vectors = (p.outputs + kWidth - 1) / kWidth;
  const auto panels = (vectors + kVectors - 1) / kVectors;
  for (int64_t panel = 0; panel < panels; ++panel) {  // of nearly the same size, as their tiles
    const auto first = vectors * panel / panels;
    const auto last = vectors * (panel + 1) / panels;
    const auto most = kRows[last - first - 1];
    const auto tiles = (p.rows + most - 1) / most;
    const auto size = p.rows / tiles;
    const auto larger = p.rows % tiles;
    const auto* kernel = kernels[last - first - 1];
    const auto end = last * kWidth < p.outputs ? last * kWidth : p.outputs;
    const auto o = first * kWidth;
    if (larger > 0) {
      kernel[size](p, 0, larger, o, end - o);
    }
    kernel[size - 1](p, larger * (size + 1), tiles - larger, o, end - o);
  }
}

// ------------------------------------------------------------------------ depthwise convolutions

// Of four rows' bytes at a pixel, those of one channel together; by registers of channels.
template <int rows, int vectors>
LLGA_VECTOR_INLINE void interleave(const uint8_t* const* source, int64_t at, __m512i* columns) {
  const auto none = _mm512_setzero_si512();
  const auto a = load(source[0] + at);
  const auto b = rows > 1 ? load(source[1] + at) : none;
  const auto c = rows > 2 ? load(source[2] + at) : none;
  const auto d = rows > 3 ? load(source[3] + at) : none;
  const auto low = _mm512_unpacklo_epi8(a, b);
  const auto low_behind = rows > 2 ? _mm512_unpacklo_epi8(c, d) : none;
  columns[0] = _mm512_unpacklo_epi16(low, low_behind);
  if constexpr (vectors > 1) {
    columns[1] = _mm512_unpackhi_epi16(low, low_behind);
  }
  if constexpr (vectors > 2) {
    const auto high = _mm512_unpackhi_epi8(a, b);
    const auto high_behind = rows > 2 ? _mm512_unpackhi_epi8(c, d) : none;
    columns[2] = _mm512_unpacklo_epi16(high, high_behind);
    if constexpr (vectors > 3) {
      columns[3] = _mm512_unpackhi_epi16(high, high_behind);
    }
  }
}

// Adds the products of the window's rows from `first` on, four or those that are left.
template <int window, int stride, int pixels, int vectors, int first>
LLGA_VECTOR_INLINE void accumulate(const Row& row, int64_t x, __m512i (&sums)[pixels][vectors]) {
  constexpr int kRowsLeft = window - first < kTogether ? window - first : kTogether;
  constexpr int kSets = (window + kTogether - 1) / kTogether;
  constexpr int kColumns = (pixels - 1) * stride + window;
  const auto* weight = row.weight + first / kTogether * window * kPiece;
#pragma GCC unroll 32
  for (int column = 0; column < kColumns; ++column) {
    __m512i four[vectors];
    interleave<kRowsLeft, vectors>(row.source + first, (x * stride + column) * kPiece, four);
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) {
      const auto k = column - p * stride;
      if (k < 0 || k >= window) {
        continue;
      }
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const auto factor = load(weight + (int64_t{v} * kSets * window + k) * kPiece);
        sums[p][v] = _mm512_dpbusd_epi32(sums[p][v], four[v], factor);
      }
    }
  }
  if constexpr (first + kTogether < window) {
    accumulate<window, stride, pixels, vectors, first + kTogether>(row, x, sums);
  }
}

// `pixels` of the result from `x` on.
template <int window, int stride, int pixels, int vectors>
void compute(const Row& row, int64_t x) {
  __m512i sums[pixels][vectors];
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sums[p][v] = load(row.rescale.start + v * kWidth);
    }
  }
  accumulate<window, stride, pixels, vectors, 0>(row, x, sums);
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p) {
    storeRow(row.result + (x + p) * row.result_stride,
             finished<vectors>(sums[p], row.rescale, nullptr, 0), row.channels);
  }
}

template <int window, int stride, int vectors>
void runRow(const Row& row) {
  constexpr int kPixels = vectors < kVectors ? 6 : 4;
  int64_t x = 0;
  for (; x + kPixels <= row.pixels; x += kPixels) {
    compute<window, stride, kPixels, vectors>(row, x);
  }
  if (x == row.pixels) {
    return;
  }
  if (row.pixels >= kPixels) {  // some are computed twice
    compute<window, stride, kPixels, vectors>(row, row.pixels - kPixels);
    return;
  }
  for (; x < row.pixels; ++x) {
    compute<window, stride, 1, vectors>(row, x);
  }
}

template <int window, int stride>
void runRow(const Row& row) {
  switch ((row.channels + kWidth - 1) / kWidth) {
    case 1:
      return runRow<window, stride, 1>(row);
    case 2:
      return runRow<window, stride, 2>(row);
    case 3:
      return runRow<window, stride, 3>(row);
    default:
      return runRow<window, stride, 4>(row);
  }
}

void (*find(int64_t window, int64_t stride))(const Row&) {
  const bool one = stride == 1;
  if (!one && stride != 2) {
    return nullptr;
  }
  switch (window) {
    case 3:
      return one ? runRow<3, 1> : runRow<3, 2>;
    case 5:
      return one ? runRow<5, 1> : runRow<5, 2>;
    default:
      return nullptr;
  }
}

void toPieces(const uint8_t* source, int64_t stride, int64_t pixels, int64_t channels,
              uint8_t* pieces) {
  const auto mask = firstBytes(channels);
  for (int64_t i = 0; i < pixels; ++i, source += stride, pieces += kPiece) {
    _mm512_storeu_si512(pieces, reordered(_mm512_maskz_loadu_epi8(mask, source)));
  }
}

}  // namespace

const Kernels avx512_vnni{"avx512_vnni", multiplyAll, find, toPieces};

}  // namespace llga::quantized
