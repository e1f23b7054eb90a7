// Included by one source for each instruction set, behind simd_avx512.h. Compiled for AVX-512 (F,
// BW, VL, VNNI) at least.
#include "jit/onednn/runtime/activations.h"
#include "jit/onednn/runtime/quantized_blocks.h"

namespace llga::quantized {
namespace {

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

LLGA_VECTOR_INLINE __m512 take(const float* from, int64_t count) {
  return count >= kWidth ? _mm512_loadu_ps(from) : Simd::loadFirst(from, Simd::lanesBefore(count));
}

LLGA_VECTOR_INLINE __m512 take(const uint8_t* from, int64_t count) {
  const auto bytes = count >= kWidth ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))
                                     : _mm_maskz_loadu_epi8(Simd::lanesBefore(count), from);
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}

// What is multiplied to sums and added, of some registers of outputs from the first on.
template <int vectors>
struct Affine {
  explicit Affine(const Rescale& r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      scale[v] = _mm512_loadu_ps(r.scale + v * kWidth);
      shift[v] = _mm512_loadu_ps(r.shift + v * kWidth);
    }
  }

  __m512 scale[vectors];
  __m512 shift[vectors];
};

// What a register of sums, that of the outputs from `o` on, comes to before a function. `addend`:
// as many numbers, or null; `count`: of those that are there.
template <typename R>
LLGA_VECTOR_INLINE __m512 scaled(__m512i sum, __m512 scale, __m512 shift, const Rescale& r,
                                 int64_t o, const R* addend, int64_t count) {
  const auto x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, shift);
  if (addend == nullptr) {
    return x;
  }
  const auto term = take(addend + o, count - o);
  return sizeof(R) == sizeof(float) ? _mm512_add_ps(term, x)
                                    : _mm512_fmadd_ps(term, _mm512_set1_ps(r.addend_scale), x);
}

__m512 applied(Function function, __m512 x) {
  switch (function) {
    case Function::hardswish: {
      const auto line = _mm512_add_ps(x, _mm512_set1_ps(3));
      const auto bent = _mm512_min_ps(_mm512_set1_ps(6), _mm512_max_ps(_mm512_setzero_ps(), line));
      return _mm512_mul_ps(_mm512_mul_ps(x, bent), _mm512_set1_ps(1.0F / 6));
    }
    case Function::silu:
      return Silu::of(x);
    case Function::gelu:
      return Gelu::of(x);
    case Function::tanh_gelu:
      return TanhGelu::of(x);
    case Function::sigmoid:
      return Sigmoid::of(x);
    default:
      return x;
  }
}

// Too small numbers become the least integer.
LLGA_VECTOR_INLINE __m512i rounded(__m512 x, const Rescale& r) {
  return _mm512_cvtps_epi32(_mm512_min_ps(x, _mm512_set1_ps(r.highest)));
}

LLGA_VECTOR_INLINE __m512i packed(const __m512i (&integers)[kVectors], const Rescale& r) {
  const auto bytes = _mm512_packus_epi16(_mm512_packs_epi32(integers[0], integers[1]),
                                         _mm512_packs_epi32(integers[2], integers[3]));
  return _mm512_max_epu8(bytes, _mm512_set1_epi8(static_cast<char>(r.lowest)));
}

// The 8-bit numbers of registers of sums, as a piece; behind them, nothing of use.
template <int vectors>
LLGA_VECTOR_INLINE __m512i finished(const __m512i (&sums)[vectors], const Affine<vectors>& affine,
                                    const Rescale& r, const uint8_t* addend, int64_t count) {
  const auto none = _mm512_setzero_si512();
  __m512i integers[kVectors] = {none, none, none, none};
  if (r.fits) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      integers[v] = _mm512_cvtps_epi32(
          scaled(sums[v], affine.scale[v], affine.shift[v], r, v * kWidth, addend, count));
    }
    return _mm512_min_epu8(packed(integers, r),
                           _mm512_set1_epi8(static_cast<char>(r.highest_rounded)));
  }
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    integers[v] =
        rounded(scaled(sums[v], affine.scale[v], affine.shift[v], r, v * kWidth, addend, count), r);
  }
  return packed(integers, r);
}

LLGA_VECTOR_INLINE void storeRow(uint8_t* to, __m512i piece, int64_t count) {
  _mm512_mask_storeu_epi8(to, firstBytes(count), reordered(piece));
}

LLGA_VECTOR_INLINE void storeNumbers(float* to, __m512 x, int64_t count) {
  if (count >= kWidth) {
    _mm512_storeu_ps(to, x);
  } else {
    Simd::storeFirst(to, x, Simd::lanesBefore(count));
  }
}

// Where a row of a result goes: as a piece, or by rows.
template <typename R>
struct Target {
  R* result;
  bool piece;
  const R* addend;
};

template <typename R>
LLGA_VECTOR_INLINE Target<R> targetOf(const ProductOf<R>& p, int64_t row, int64_t o) {
  if (p.places != nullptr) {
    return {p.result + p.places[row], true, nullptr};
  }
  const auto at = row * p.result_stride + o;
  return {p.result + at, false, p.addend != nullptr ? p.addend + at : nullptr};
}

// Likewise, by what is in memory.
template <typename R>
LLGA_VECTOR_INLINE __m512 scaledFrom(__m512i sum, const Rescale& r, int64_t o, const R* addend,
                                     int64_t count) {
  return scaled(sum, _mm512_loadu_ps(r.scale + o), _mm512_loadu_ps(r.shift + o), r, o, addend,
                count);
}

// The terms of a curve, in registers.
struct Terms {
  LLGA_VECTOR_INLINE explicit Terms(const float* curve) {
#pragma GCC unroll 4
    for (int i = 0; i < Curve::kTerms; ++i) {
      low[i] = _mm512_loadu_ps(curve + i * Curve::kPieces);
      high[i] = _mm512_loadu_ps(curve + i * Curve::kPieces + kWidth);
    }
  }

  LLGA_VECTOR_INLINE __m512 at(__m512 u) const {
    const auto inside = _mm512_min_ps(_mm512_max_ps(u, _mm512_setzero_ps()),
                                      _mm512_set1_ps(static_cast<float>(Curve::kPieces - 1)));
    const auto piece = _mm512_cvttps_epi32(inside);
    auto y = _mm512_permutex2var_ps(low[Curve::kTerms - 1], piece, high[Curve::kTerms - 1]);
#pragma GCC unroll 4
    for (int i = Curve::kTerms - 2; i >= 0; --i) {
      y = _mm512_fmadd_ps(y, u, _mm512_permutex2var_ps(low[i], piece, high[i]));
    }
    return y;
  }

  __m512 low[Curve::kTerms];
  __m512 high[Curve::kTerms];
};

// Sums that are in memory, of one row, with a function behind them: slow anyway.
[[gnu::noinline]] void finishSlowly(const __m512i* sums, int64_t vectors, const Rescale& r,
                                    const Target<uint8_t>& to, int64_t count) {
  const auto none = _mm512_setzero_si512();
  __m512i integers[kVectors] = {none, none, none, none};
  const Terms terms(r.curve);
  for (int64_t v = 0; v < vectors; ++v) {
    integers[v] = rounded(terms.at(scaledFrom(sums[v], r, v * kWidth, to.addend, count)), r);
  }
  const auto piece = packed(integers, r);
  if (to.piece) {
    _mm512_storeu_si512(to.result, piece);
  } else {
    storeRow(to.result, piece, count);
  }
}

[[gnu::noinline]] void finishSlowly(const __m512i* sums, int64_t vectors, const Rescale& r,
                                    const Target<float>& to, int64_t count) {
  for (int64_t v = 0; v < vectors; ++v) {
    const auto x = applied(r.function, scaledFrom(sums[v], r, v * kWidth, to.addend, count));
    storeNumbers(to.result + v * kWidth, x, count - v * kWidth);
  }
}

template <int vectors>
LLGA_VECTOR_INLINE void finish(const __m512i (&sums)[vectors], const Affine<vectors>& affine,
                               const Rescale& r, const Target<uint8_t>& to, int64_t count) {
  const auto piece = finished<vectors>(sums, affine, r, to.addend, count);
  if (to.piece) {
    _mm512_storeu_si512(to.result, piece);
  } else {
    storeRow(to.result, piece, count);
  }
}

template <int vectors>
LLGA_VECTOR_INLINE void finish(const __m512i (&sums)[vectors], const Affine<vectors>& affine,
                               const Rescale& r, const Target<float>& to, int64_t count) {
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    const auto x =
        scaled(sums[v], affine.scale[v], affine.shift[v], r, v * kWidth, to.addend, count);
    storeNumbers(to.result + v * kWidth, x, count - v * kWidth);
  }
}

// ------------------------------------------------------------------------------- matrix products

// Bytes of the source that are fetched before they are read.
constexpr int64_t kAhead = 2048;

// `tiles` of `rows` rows from `row` on, by `count` outputs from `o` on.
template <typename R, int rows, int vectors>
void multiply(const ProductOf<R>& p, int64_t row, int64_t tiles, int64_t o, int64_t count) {
  const auto rescale = fromOutput(p.rescale, o);
  const auto tile = rows * p.source_stride;
  // The first outputs meet rows that may be in memory yet.
  const auto ahead = o > 0 ? 0 : tile < kAhead ? kAhead : tile;
  // Meanwhile the weights of the next ones are fetched, a line for each four inputs.
  const auto* coming = p.weight + (o + vectors * kWidth) * p.inputs;
  const auto* coming_end =
      o + count < p.outputs + p.behind ? coming + vectors * kWidth * p.inputs : coming;
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
    const auto* fetched = source + ahead;
    const auto step = coming < coming_end ? kPiece : 0;
#pragma GCC unroll 1
    for (int64_t i = 0; i < p.inputs; i += kTogether) {
      __builtin_prefetch(fetched + i * rows);
      __builtin_prefetch(coming, 0, 2);
      coming += step;
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
    if (rescale.function != Function::none) {
      __m512i kept[rows][vectors];
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
          kept[r][v] = sums[r][v];
        }
      }
#pragma GCC unroll 1
      for (int r = 0; r < rows; ++r) {
        finishSlowly(kept[r], vectors, rescale, targetOf(p, row + r, o), count);
      }
      continue;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        // Or the compiler keeps sums in memory for all that follows, and so in the loop above.
        asm("" : "+v"(sums[r][v]));
      }
    }
    const Affine<vectors> affine(rescale);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      finish<vectors>(sums[r], affine, rescale, targetOf(p, row + r, o), count);
    }
  }
}

template <typename R>
using Multiply = void (*)(const ProductOf<R>&, int64_t, int64_t, int64_t, int64_t);

template <typename R, int vectors, int count, int... rows>
struct UpTo : UpTo<R, vectors, count - 1, count, rows...> {};

template <typename R, int vectors, int... rows>
struct UpTo<R, vectors, 0, rows...> {
  static constexpr Multiply<R> kernels[] = {multiply<R, rows, vectors>...};
};

// Rows that are multiplied at once, by registers of outputs: sums of all of them are in registers.
constexpr int64_t kRows[] = {12, 12, 8, 6};

template <typename R>
void multiplyAll(const ProductOf<R>& p) {
  const Multiply<R>* const kernels[] = {
      UpTo<R, 1, kRows[0]>::kernels, UpTo<R, 2, kRows[1]>::kernels, UpTo<R, 3, kRows[2]>::kernels,
      UpTo<R, 4, kRows[3]>::kernels};
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
  constexpr int kRowsLeft = window - first < kTogether ? window - first : int{kTogether};
  constexpr int kSets = (window + int{kTogether} - 1) / kTogether;
  constexpr int kColumns = (pixels - 1) * stride + window;
  const auto* weight = static_cast<const int8_t*>(row.weight) + first / kTogether * window * kPiece;
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
    accumulate<window, stride, pixels, vectors, first + int{kTogether}>(row, x, sums);
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
  auto* to = row.result + x * row.result_stride;
  if (row.rescale.function != Function::none) {
    for (int p = 0; p < pixels; ++p) {
      finishSlowly(sums[p], vectors, row.rescale, {to + p * row.result_stride, false, nullptr},
                   row.channels);
    }
    return;
  }
  const Affine<vectors> affine(row.rescale);
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p) {
    finish<vectors>(sums[p], affine, row.rescale, {to + p * row.result_stride, false, nullptr},
                    row.channels);
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
}  // namespace llga::quantized
