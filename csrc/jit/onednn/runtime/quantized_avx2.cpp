// Compiled for AVX2 and FMA.
//
// There is no instruction for sums of four products in 32 bit: two products of 8 bit are added in
// 16 bit, which cuts off what does not fit. Where weights leave room for that (graph_helper.cpp
// sees to it) nothing is cut off. Under a window neighbours are of one channel, and are given no
// such room: numbers of 16 bit are multiplied there.
#include "jit/onednn/runtime/simd_avx2.h"

#include "jit/onednn/runtime/activations.h"
#include "jit/onednn/runtime/quantized_blocks.h"

namespace llga::quantized {
namespace {

constexpr int64_t kHalf = 8;  // sums of a register, or of one half of what others have in one
constexpr int kHalves = 2;

LLGA_VECTOR_INLINE __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

LLGA_VECTOR_INLINE __m128i loadHalf(const void* from) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(from));
}

// The first `count` of a register's bytes.
LLGA_VECTOR_INLINE void storeBytes(uint8_t* to, __m128i bytes, int64_t count) {
  if (count >= kWidth) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    return;
  }
  if (count >= kHalf) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
    bytes = _mm_srli_si128(bytes, kHalf);
    to += kHalf;
    count -= kHalf;
  }
  auto rest = static_cast<uint64_t>(_mm_cvtsi128_si64(bytes));
  constexpr unsigned kBits = 8;
  for (; count > 0; --count, rest >>= kBits) {
    *to++ = static_cast<uint8_t>(rest);
  }
}

LLGA_VECTOR_INLINE Vector take(const float* from, int64_t count) {
  return count >= kHalf ? Simd::load(from) : Simd::loadFirst(from, Simd::lanesBefore(count));
}

LLGA_VECTOR_INLINE Vector take(const uint8_t* from, int64_t count) {
  uint64_t bytes = 0;
  if (count >= kHalf) {
    __builtin_memcpy(&bytes, from, sizeof(bytes));
  } else {
    constexpr unsigned kBits = 8;
    for (auto i = count; i > 0; --i) {
      bytes = bytes << kBits | from[i - 1];
    }
  }
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
}

// What a register of sums, that of the outputs from `o` on, comes to before a function. `addend`:
// as many numbers, or null; `count`: of those that are there.
template <typename R>
LLGA_VECTOR_INLINE Vector scaled(__m256i sum, const Rescale& r, int64_t o, const R* addend,
                                 int64_t count) {
  const auto x =
      _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), Simd::load(r.scale + o), Simd::load(r.shift + o));
  if (addend == nullptr) {
    return x;
  }
  const auto term = take(addend + o, count - o);
  return sizeof(R) == sizeof(float)
             ? x + term
             : Vector{_mm256_fmadd_ps(term, _mm256_set1_ps(r.addend_scale), x)};
}

// 1 / (1 + exp(-x)), off by 1e-5 of itself: for numbers that are rounded to 8 bit.
LLGA_VECTOR_INLINE Vector roughSigmoid(Vector x) {
  constexpr float kMinusLog2OfE = -1.44269504F;
  constexpr float kMost = 60;  // the power of it is no special number
  constexpr int kFraction = 23;
  const auto exponent = _mm256_min_ps(
      _mm256_max_ps(_mm256_mul_ps(x, _mm256_set1_ps(kMinusLog2OfE)), _mm256_set1_ps(-kMost)),
      _mm256_set1_ps(kMost));
  const auto whole = _mm256_cvtps_epi32(exponent);
  const Vector rest = _mm256_sub_ps(exponent, _mm256_cvtepi32_ps(whole));
  Vector power = 0.00956052F * rest + 0.05591708F;  // of 2, for -1/2 to 1/2
  power = power * rest + 0.24024981F;
  power = power * rest + 0.69312196F;
  power = power * rest + 0.99999919F;
  const auto scaled_power =
      _mm256_add_epi32(_mm256_castps_si256(power), _mm256_slli_epi32(whole, kFraction));
  const Vector sum = 1.0F + Vector{_mm256_castsi256_ps(scaled_power)};
  const Vector rough = _mm256_rcp_ps(sum);
  return rough * (2.0F - sum * rough);
}

// R: what the result is rounded to.
template <Function function, typename R>
LLGA_VECTOR_INLINE Vector applied(Vector x) {
  constexpr bool kRounded = sizeof(R) == 1;
  if constexpr (function == Function::hardswish) {
    const Vector bent =
        _mm256_min_ps(_mm256_set1_ps(6), _mm256_max_ps(_mm256_setzero_ps(), x + 3.0F));
    return x * bent * (1.0F / 6);
  } else if constexpr (function == Function::silu) {
    return kRounded ? x * roughSigmoid(x) : Silu::of(x);
  } else if constexpr (function == Function::gelu) {
    return Gelu::of(x);
  } else if constexpr (function == Function::tanh_gelu) {
    return kRounded ? x * roughSigmoid(TanhGelu::twice(x)) : TanhGelu::of(x);
  } else if constexpr (function == Function::sigmoid) {
    return kRounded ? roughSigmoid(x) : Sigmoid::of(x);
  } else {
    return x;
  }
}

// Too small numbers become the least integer.
LLGA_VECTOR_INLINE __m256i rounded(Vector x, const Rescale& r) {
  return _mm256_cvtps_epi32(_mm256_min_ps(x, _mm256_set1_ps(r.highest)));
}

// As bytes, one behind the other.
LLGA_VECTOR_INLINE __m256i packed(__m256i a, __m256i b, __m256i c, __m256i d, const Rescale& r) {
  const auto in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packed half by half
  const auto bytes = _mm256_permutevar8x32_epi32(
      _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)), in_order);
  return _mm256_max_epu8(bytes, _mm256_set1_epi8(static_cast<char>(r.lowest)));
}

// One row of outputs, a register of sums for 8 of them.
template <Function function, int halves>
LLGA_VECTOR_INLINE void finishRow(const __m256i (&sums)[halves], const Rescale& r, uint8_t* to,
                                  const uint8_t* addend, int64_t count) {
  const auto none = _mm256_setzero_si256();
  __m256i integers[kHalves] = {none, none};
#pragma GCC unroll 2
  for (int h = 0; h < halves; ++h) {
    auto x = scaled(sums[h], r, h * kHalf, addend, count);
    if (function != Function::none) {
      x = applied<function, uint8_t>(x) * r.result_scale + r.result_shift;
    }
    integers[h] = rounded(x, r);
  }
  const auto bytes = packed(integers[0], integers[1], none, none, r);
  storeBytes(to, _mm256_castsi256_si128(bytes), count);
}

template <Function function, int halves>
LLGA_VECTOR_INLINE void finishRow(const __m256i (&sums)[halves], const Rescale& r, float* to,
                                  const float* addend, int64_t count) {
#pragma GCC unroll 2
  for (int h = 0; h < halves; ++h) {
    const auto x = applied<function, float>(scaled(sums[h], r, h * kHalf, addend, count));
    const auto left = count - h * kHalf;
    if (left >= kHalf) {
      Simd::store(to + h * kHalf, x);
    } else {
      Simd::storeFirst(to + h * kHalf, x, Simd::lanesBefore(left));
    }
  }
}

// Where rows of a result go, and what is added to them.
template <typename R>
struct Target {
  R* result;
  int64_t stride;         // from row to row
  const int32_t* places;  // where each of them is; or null
  const R* addend;        // or null

  LLGA_VECTOR_INLINE R* row(int64_t r) const {
    return places != nullptr ? result + places[r] : result + r * stride;
  }
};

template <Function function, typename R, int halves>
[[gnu::noinline]] void finishRows(const __m256i (*sums)[halves], int64_t rows, const Rescale& r,
                                  const Target<R>& to, int64_t count) {
  for (int64_t row = 0; row < rows; ++row) {
    const auto* addend = to.addend != nullptr ? to.addend + row * to.stride : nullptr;
    finishRow<function, halves>(sums[row], r, to.row(row), addend, count);
  }
}

// With an addition, a function or outputs that are not there.
template <typename R, int halves>
[[gnu::noinline]] void finishSlowly(const __m256i (*sums)[halves], int64_t rows, const Rescale& r,
                                    const Target<R>& to, int64_t count) {
  switch (r.function) {
    case Function::hardswish:
      return finishRows<Function::hardswish, R, halves>(sums, rows, r, to, count);
    case Function::silu:
      return finishRows<Function::silu, R, halves>(sums, rows, r, to, count);
    case Function::gelu:
      return finishRows<Function::gelu, R, halves>(sums, rows, r, to, count);
    case Function::tanh_gelu:
      return finishRows<Function::tanh_gelu, R, halves>(sums, rows, r, to, count);
    case Function::sigmoid:
      return finishRows<Function::sigmoid, R, halves>(sums, rows, r, to, count);
    default:
      return finishRows<Function::none, R, halves>(sums, rows, r, to, count);
  }
}

// The scales of some registers of outputs.
template <int halves>
struct Affine {
  LLGA_VECTOR_INLINE explicit Affine(const Rescale& r) {
#pragma GCC unroll 2
    for (int h = 0; h < halves; ++h) {
      scale[h] = _mm256_loadu_ps(r.scale + h * kHalf);
      shift[h] = _mm256_loadu_ps(r.shift + h * kHalf);
    }
  }

  LLGA_VECTOR_INLINE __m256 of(__m256i sum, int h) const {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale[h], shift[h]);
  }

  __m256 scale[halves];
  __m256 shift[halves];
};

template <int rows, int halves>
LLGA_VECTOR_INLINE void finishFast(const __m256i (&sums)[rows][halves], const Rescale& r,
                                   const Target<uint8_t>& to) {
  constexpr int kTogetherRows = 4 / halves;  // that make a register of bytes
  const Affine<halves> affine(r);
#pragma GCC unroll 12
  for (int first = 0; first < rows; first += kTogetherRows) {
    __m256i integers[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto row = first + i / halves;
      integers[i] = row < rows
                        ? rounded(affine.of(sums[row < rows ? row : 0][i % halves], i % halves), r)
                        : _mm256_setzero_si256();
    }
    const auto bytes = packed(integers[0], integers[1], integers[2], integers[3], r);
    const __m128i two[] = {_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)};
#pragma GCC unroll 4
    for (int i = 0; i < kTogetherRows; ++i) {
      if (first + i >= rows) {
        continue;
      }
      auto* row = to.row(first + i);
      if constexpr (halves == kHalves) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row), two[i]);
      } else if (i % kHalves == 0) {
        _mm_storel_pd(reinterpret_cast<double*>(row), _mm_castsi128_pd(two[i / kHalves]));
      } else {
        _mm_storeh_pd(reinterpret_cast<double*>(row), _mm_castsi128_pd(two[i / kHalves]));
      }
    }
  }
}

template <int rows, int halves>
LLGA_VECTOR_INLINE void finishFast(const __m256i (&sums)[rows][halves], const Rescale& r,
                                   const Target<float>& to) {
  const Affine<halves> affine(r);
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 2
    for (int h = 0; h < halves; ++h) {
      Simd::store(to.row(row) + h * kHalf, affine.of(sums[row][h], h));
    }
  }
}

template <typename R, int rows, int halves>
LLGA_VECTOR_INLINE void finish(__m256i (&sums)[rows][halves], const Rescale& r, const Target<R>& to,
                               int64_t count) {
  if (r.function != Function::none || to.addend != nullptr || count < halves * kHalf) {
    __m256i kept[rows][halves];  // or the compiler keeps the sums in memory all the time
#pragma GCC unroll 12
    for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 2
      for (int h = 0; h < halves; ++h) {
        kept[row][h] = sums[row][h];
      }
    }
    finishSlowly<R, halves>(kept, rows, r, to, count);
    return;
  }
#pragma GCC unroll 12
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 2
    for (int h = 0; h < halves; ++h) {
      asm("" : "+x"(sums[row][h]));  // or it does so for this
    }
  }
  finishFast(sums, r, to);
}

// ------------------------------------------------------------------------------- matrix products

// `tiles` of `rows` rows from `row` on, by `count` outputs from `o` on, at most 8 or 16.
template <typename R, int rows, int halves>
void multiply(const ProductOf<R>& p, int64_t row, int64_t tiles, int64_t o, int64_t count) {
  const auto rescale = fromOutput(p.rescale, o);
  const auto ones = _mm256_set1_epi16(1);
  for (; tiles > 0; --tiles, row += rows) {
    __m256i sums[rows][halves];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < halves; ++h) {
        sums[r][h] = load(rescale.start + h * kHalf);
      }
    }
    const auto* source = p.source + row * p.source_stride;
    const auto* weight = p.weight + o * p.inputs;
#pragma GCC unroll 1
    for (int64_t i = 0; i < p.inputs; i += kTogether) {
      __m256i factors[halves];
#pragma GCC unroll 2
      for (int h = 0; h < halves; ++h) {
        factors[h] = load(weight + h * kHalf * kTogether);
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        int four;
        __builtin_memcpy(&four, source + r * p.source_stride, sizeof(four));
        const auto numbers = _mm256_set1_epi32(four);
#pragma GCC unroll 2
        for (int h = 0; h < halves; ++h) {
          const auto pairs = _mm256_maddubs_epi16(numbers, factors[h]);
          sums[r][h] = _mm256_add_epi32(sums[r][h], _mm256_madd_epi16(pairs, ones));
        }
      }
      source += kTogether;
      weight += kTogether * kWidth;
    }
    const auto at = row * p.result_stride + o;
    const bool apart = p.places != nullptr;
    finish<R>(
        sums, rescale,
        Target<R>{p.result + (apart ? o : at), p.result_stride, apart ? p.places + row : nullptr,
                  p.addend != nullptr ? p.addend + at : nullptr},
        count);
  }
}

template <typename R>
using Multiply = void (*)(const ProductOf<R>&, int64_t, int64_t, int64_t, int64_t);

template <typename R, int halves, int count, int... rows>
struct UpTo : UpTo<R, halves, count - 1, count, rows...> {};

template <typename R, int halves, int... rows>
struct UpTo<R, halves, 0, rows...> {
  static constexpr Multiply<R> kernels[] = {multiply<R, rows, halves>...};
};

// Rows that are multiplied at once: sums of all of them are in registers.
constexpr int64_t kRows[] = {12, 6};

template <typename R>
void multiplyAll(const ProductOf<R>& p) {
  for (int64_t o = 0; o < p.outputs; o += kWidth) {
    const auto count = p.outputs - o;
    const bool half = count <= kHalf;
    const auto* kernel = half ? UpTo<R, 1, kRows[0]>::kernels : UpTo<R, kHalves, kRows[1]>::kernels;
    const auto most = kRows[half ? 0 : 1];
    const auto tiles = (p.rows + most - 1) / most;  // of nearly the same size
    const auto size = p.rows / tiles;
    const auto larger = p.rows % tiles;
    if (larger > 0) {
      kernel[size](p, 0, larger, o, count);
    }
    kernel[size - 1](p, larger * (size + 1), tiles - larger, o, count);
  }
}

// ------------------------------------------------------------------------ depthwise convolutions

constexpr int kPair = 2;  // rows whose products are added at once

// Of 8 channels.
struct Part {
  Rescale rescale;
  const int16_t* weight;
  int64_t channel;
  int64_t count;  // of those that are there
};

// Of two rows' bytes at a pixel, or of one's, those of one channel together, as numbers of 16 bit.
template <bool two>
LLGA_VECTOR_INLINE __m256i interleaved(const uint8_t* const* rows, int64_t at) {
  const auto a = loadHalf(rows[0] + at);
  if constexpr (two) {
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, loadHalf(rows[1] + at)));
  }
  return _mm256_cvtepu8_epi32(a);
}

// `pixels` of the result from `x` on.
template <int window, int stride, int pixels>
LLGA_VECTOR_INLINE void compute(const Row& row, const Part& part, int64_t x) {
  constexpr int kPairs = (window + kPair - 1) / kPair;
  constexpr int kColumns = (pixels - 1) * stride + window;
  __m256i sums[pixels][1];
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p) {
    sums[p][0] = load(part.rescale.start);
  }
#pragma GCC unroll 32
  for (int column = 0; column < kColumns; ++column) {
    const auto at = (x * stride + column) * kPiece + part.channel;
    __m256i pairs[kPairs];
#pragma GCC unroll 3
    for (int i = 0; i < window / kPair; ++i) {
      pairs[i] = interleaved<true>(row.source + int64_t{i} * kPair, at);
    }
    pairs[kPairs - 1] = interleaved<false>(row.source + window - 1, at);
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) {
      const auto k = column - p * stride;
      if (k < 0 || k >= window) {
        continue;
      }
#pragma GCC unroll 3
      for (int i = 0; i < kPairs; ++i) {
        const auto factors = load(part.weight + (int64_t{i} * window + k) * kHalf * kPair);
        sums[p][0] = _mm256_add_epi32(sums[p][0], _mm256_madd_epi16(pairs[i], factors));
      }
    }
  }
  finish<uint8_t>(sums, part.rescale,
                  Target<uint8_t>{row.result + x * row.result_stride + part.channel,
                                  row.result_stride, nullptr, nullptr},
                  part.count);
}

template <int window, int stride>
void runRow(const Row& row) {
  static_assert(window % kPair == 1, "the last row has no neighbour");
  constexpr int kPixels = 6;
  constexpr int64_t kWeights = int64_t{window + 1} * window * kHalf;  // of 8 channels
  for (int64_t channel = 0; channel < row.channels; channel += kHalf) {
    const Part part{fromOutput(row.rescale, channel),
                    static_cast<const int16_t*>(row.weight) + channel / kHalf * kWeights, channel,
                    row.channels - channel < kHalf ? row.channels - channel : kHalf};
    int64_t x = 0;
    for (; x + kPixels <= row.pixels; x += kPixels) {
      compute<window, stride, kPixels>(row, part, x);
    }
    if (x == row.pixels) {
      continue;
    }
    if (row.pixels >= kPixels) {  // some are computed twice
      compute<window, stride, kPixels>(row, part, row.pixels - kPixels);
      continue;
    }
    for (; x < row.pixels; ++x) {
      compute<window, stride, 1>(row, part, x);
    }
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
  for (int64_t i = 0; i < pixels; ++i, source += stride, pieces += kPiece) {
    for (int64_t c = 0; c < channels; c += kWidth) {
      if (channels - c >= kWidth) {
        const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + c));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(pieces + c), bytes);
      } else {
        __builtin_memcpy(pieces + c, source + c, static_cast<uint64_t>(channels - c));
      }
    }
  }
}

}  // namespace

const Kernels avx2{"avx2",   kPair,   false,  multiplyAll<uint8_t>, multiplyAll<float>, find,
                   toPieces, nullptr, nullptr};

}  // namespace llga::quantized
