// Compiled for AVX-512 (F, BW, VL, VNNI): attention of 8-bit data.
//
// Queries meet keys in 8 bits, without any rounding. Exponentials, from 0 to 1, become two digits
// of 8 bits each that meet the values one after the other: a rounding error of 2^-17, which is
// about that of float32 products where a row has many keys. The rest is that of float32.
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga::attention {
namespace {

constexpr const gemm::Kernels& kGemm = gemm::avx512;

}  // namespace
}  // namespace llga::attention

#include "jit/onednn/runtime/attention_kernel.h"

namespace llga::attention {
namespace {

static_assert(kWidth == quantized::kWidth);

constexpr int64_t kBytes = 64;  // of a register
constexpr int64_t kFour = quantized::kTogether;
constexpr int64_t kValueKeys = 128;   // whose values meet digits at once; a divisor of kKeys
constexpr float kLargest = 0xFFFF;    // of two digits
constexpr int kDigit = 8;             // bits
constexpr float kHigh = 1 << kDigit;  // worth of the high one

// For so many outputs at once.
struct Constants {
  alignas(kBytes) int32_t none[kKeys];
  alignas(kBytes) float zeros[kKeys];
  alignas(kBytes) float ones[kKeys];
  alignas(kBytes) float high[kKeys];
};

constexpr Constants kConstants = [] {
  Constants constants{};
  for (int64_t i = 0; i < kKeys; ++i) {
    constants.ones[i] = 1;
    constants.high[i] = kHigh;
  }
  return constants;
}();

// Sums of products as real numbers, each multiplied.
quantized::Rescale multipliedBy(const float* scale, const int32_t* start) {
  quantized::Rescale rescale{};
  rescale.start = start;
  rescale.scale = scale;
  rescale.shift = kConstants.zeros;
  rescale.function = quantized::Function::none;
  return rescale;
}

__mmask16 firstNumbers(int64_t count) { return Simd::lanesBefore(count); }

// From the first on.
__m128i loadBytes(const uint8_t* from, int64_t count) {
  return _mm_maskz_loadu_epi8(firstNumbers(count), from);
}

// Signed keys of (16 keys, four numbers, key, number of the four).
template <typename R>
void packKeys(const Head<uint8_t, R>& head, int8_t* to, int32_t* starts) {
  constexpr int64_t kEight = 8;  // rows, and fours of each, that are transposed at once
  const auto flip = _mm512_set1_epi8(static_cast<char>(head.bytes->key_flip));
  const auto zero_point = _mm512_set1_epi32(head.bytes->query_zero_point);
  const auto whole = head.size / kFour;
  const auto fours = (head.size + kFour - 1) / kFour;
  for (int64_t first = 0; first < head.keys; first += kWidth, to += fours * kBytes) {
    auto* words = reinterpret_cast<float*>(to);  // four bytes are moved like a number
    for (int64_t k = 0; k < kWidth; k += kEight) {
      const auto there = least(kEight, head.keys - first - k);
      const uint8_t* rows[kEight];
      for (int64_t i = 0; i < there; ++i) {
        rows[i] = head.key.row(first + k + i);
      }
      int64_t four = 0;
      for (; there == kEight && four + kEight <= whole; four += kEight) {
        __m256 block[kEight];
#pragma GCC unroll 8
        for (int64_t i = 0; i < kEight; ++i) {
          block[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + four * kFour));
        }
        transpose<kWidth>(block, words + four * kWidth + k);
      }
      for (; four < fours; ++four) {
        for (int64_t i = 0; i < kEight; ++i) {
          uint8_t numbers[kFour];
          for (int64_t n = 0; n < kFour; ++n) {
            const auto d = four * kFour + n;
            // What is no number becomes 0, as it is part of sums.
            numbers[n] = i < there && d < head.size ? rows[i][d] : head.bytes->key_flip;
          }
          __builtin_memcpy(words + four * kWidth + k + i, numbers, sizeof(numbers));
        }
      }
    }
    auto sums = _mm512_setzero_si512();
    for (int64_t four = 0; four < fours; ++four) {
      auto* numbers = to + four * kBytes;
      const auto flipped = _mm512_xor_si512(_mm512_loadu_si512(numbers), flip);
      sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), flipped);
      _mm512_storeu_si512(numbers, flipped);
    }
    const auto undone = _mm512_mullo_epi32(sums, zero_point);
    _mm512_storeu_si512(starts + first, _mm512_sub_epi32(_mm512_setzero_si512(), undone));
  }
}

// Signed values of (16 numbers, four keys, number, key of the four), for each block of kValueKeys.
template <typename R>
void packValues(const Head<uint8_t, R>& head, int8_t* to) {
  const auto flip = _mm_set1_epi8(static_cast<char>(head.bytes->value_flip));
  for (int64_t first = 0; first < head.keys; first += kValueKeys) {
    const auto end = least(first + kValueKeys, head.keys);
    for (int64_t o = 0; o < head.value_size; o += kWidth) {
      for (auto key = first; key < end; key += kFour, to += kBytes) {
        __m128i rows[kFour];
        for (int64_t i = 0; i < kFour; ++i) {
          rows[i] =
              key + i < end
                  ? _mm_xor_si128(loadBytes(head.value.row(key + i) + o, head.value_size - o), flip)
                  : _mm_setzero_si128();
        }
        const auto low = _mm_unpacklo_epi8(rows[0], rows[1]);
        const auto low_behind = _mm_unpacklo_epi8(rows[2], rows[3]);
        const auto high = _mm_unpackhi_epi8(rows[0], rows[1]);
        const auto high_behind = _mm_unpackhi_epi8(rows[2], rows[3]);
        auto* four = reinterpret_cast<__m128i*>(to);
        _mm_storeu_si128(four, _mm_unpacklo_epi16(low, low_behind));
        _mm_storeu_si128(four + 1, _mm_unpackhi_epi16(low, low_behind));
        _mm_storeu_si128(four + 2, _mm_unpacklo_epi16(high, high_behind));
        _mm_storeu_si128(four + 3, _mm_unpackhi_epi16(high, high_behind));
      }
    }
  }
}

template <typename R>
bool packBytes(const Head<uint8_t, R>& head, const Workspace& workspace) {
  packKeys(head, reinterpret_cast<int8_t*>(workspace.keys), workspace.starts);
  packValues(head, reinterpret_cast<int8_t*>(workspace.values));
  return true;
}

// Unsigned queries, each up to a whole four.
template <typename R>
void copyBytes(const Head<uint8_t, R>& head, int64_t first, int64_t count, uint8_t* to) {
  const auto flip = _mm_set1_epi8(static_cast<char>(head.bytes->query_flip));
  const auto whole = wholePanels(head.size, kFour);
  for (auto q = first; q < first + count; ++q, to += whole) {
    const auto* from = head.query.row(q);
    for (int64_t d = 0; d < whole; d += kWidth) {
      const auto numbers = _mm_xor_si128(loadBytes(from + d, head.size - d), flip);
      _mm_mask_storeu_epi8(to + d, firstNumbers(whole - d), numbers);
    }
  }
}

// exp(score - largest) in two digits, from `digits` on and `high` further on. Returns their sum,
// which is NaN if one is.
float inDigits(const Row& row, float largest, uint8_t* digits, int64_t high) {
  largest = largest == -kInfinity ? 0 : largest;
  Vector sum{};
  int64_t k = 0;
  for (; k < row.met; k += kWidth) {
    const Vector e = expOfDifference(loadVector(row.scores + k) - largest) * kLargest;
    const Vector whole = _mm512_roundscale_ps(e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    sum += whole;
    const auto both = _mm512_cvtps_epi32(whole);
    auto* to = reinterpret_cast<__m128i*>(digits + k);
    _mm_storeu_si128(to, _mm512_cvtepi32_epi8(both));
    to = reinterpret_cast<__m128i*>(digits + k + high);
    _mm_storeu_si128(to, _mm512_cvtepi32_epi8(_mm512_srli_epi32(both, kDigit)));
  }
  for (; k < row.count; k += kWidth) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + k), _mm_setzero_si128());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(digits + k + high), _mm_setzero_si128());
  }
  return sumOf(sum);
}

// Digits of a block of keys, for all rows of queries.
struct Digits {
  const uint8_t* first;
  const float* worth;  // of each
  int64_t rows;
  int64_t size;  // of a row
  int64_t key;   // the first one of the block
  int64_t end;   // behind the last one that any query meets
};

// Adds to the sums what they come to with the values; `begins`: the sums are not there yet.
template <typename R>
void addProducts(const Head<uint8_t, R>& head, const Workspace& workspace, const Digits& digits,
                 bool begins) {
  const auto whole = wholePanels(head.value_size, kWidth);
  for (auto key = digits.key; key < digits.end; key += kValueKeys, begins = false) {
    const auto inputs = wholePanels(least(kValueKeys, head.keys - key), kFour);
    const auto* values = reinterpret_cast<const int8_t*>(workspace.values) + key * whole;
    for (int64_t o = 0; o < head.value_size; o += kKeys) {
      auto* sums = workspace.sums + o;
      head.bytes->products->multiplyToFloat(
          {digits.rows, inputs, least(kKeys, head.value_size - o),
           digits.first + (key - digits.key), digits.size, values + o * inputs,
           multipliedBy(digits.worth, kConstants.none), begins ? nullptr : sums, sums,
           head.value_size, nullptr});
    }
  }
}

void storeResult(const Bytes& /*bytes*/, Vector x, float* to, int64_t count) {
  Simd::storeFirst(to, x, firstNumbers(count));
}

void storeResult(const Bytes& bytes, Vector x, uint8_t* to, int64_t count) {
  const Vector number = x * bytes.inverse + bytes.zero_point;
  const auto whole = _mm512_cvtps_epi32(_mm512_min_ps(number, _mm512_set1_ps(0xFF)));
  const auto numbers = _mm512_cvtusepi32_epi8(_mm512_max_epi32(whole, _mm512_setzero_si512()));
  const auto flip = _mm_set1_epi8(static_cast<char>(bytes.result_flip));
  _mm_mask_storeu_epi8(to, firstNumbers(count), _mm_xor_si128(numbers, flip));
}

template <typename R>
void attendBytes(const Head<uint8_t, R>& head, const Workspace& workspace, bool /*finite*/,
                 int64_t first, int64_t count) {
  const auto& bytes = *head.bytes;
  SoFar so_far(count);
  auto* query = reinterpret_cast<uint8_t*>(workspace.query);
  copyBytes(head, first, count, query);
  const auto size = wholePanels(head.size, kFour);
  auto keys = head.causal ? least(head.keys, first + count) : head.keys;
  if (hidesOnly(head)) {
    keys = keysAllowed(head, keys, first, count);
  }
  for (int64_t key = 0; key < keys; key += kKeys) {
    const auto count_here = least(kKeys, keys - key);
    const auto room = wholePanels(count_here, kPanel);
    bytes.products->multiplyToFloat({count, size, count_here, query, size,
                                     reinterpret_cast<const int8_t*>(workspace.keys) + key * size,
                                     multipliedBy(kConstants.ones, workspace.starts + key), nullptr,
                                     workspace.scores, room, nullptr});
    // With those that are not met but multiplied.
    const auto multiplied = least(wholePanels(count_here, kValueKeys), head.keys - key);
    const auto digits_size = wholePanels(multiplied, kPanel);
    const auto high = count * digits_size;
    for (int64_t q = 0; q < count; ++q) {
      auto* to = workspace.digits + q * digits_size;
      meet(head, workspace, so_far, first, q, key, keys,
           {workspace.scores + q * room, 0, multiplied}, head.scale,
           [&](const Row& row, float most) { return inDigits(row, most, to, high); });
    }
    Digits digits{workspace.digits + high, kConstants.high, count, digits_size, key,
                  key + count_here};
    addProducts(head, workspace, digits, /*begins=*/key == 0);
    digits.first = workspace.digits;
    digits.worth = kConstants.ones;
    addProducts(head, workspace, digits, /*begins=*/false);
  }
  for (int64_t q = 0; q < count; ++q) {
    if (!head.result.has(first + q)) {
      continue;
    }
    const auto* from = workspace.sums + q * head.value_size;
    auto* to = head.result.row(first + q);
    const float factor = factorOf(head, so_far.total[q]);
    for (int64_t d = 0; d < head.value_size; d += kWidth) {
      const auto left = head.value_size - d;
      Vector result = Vector{} + factor;
      if (keys > 0 && so_far.total[q] != 0) {
        const auto sum = left < kWidth ? loadFirst(from + d, left) : loadVector(from + d);
        result = (sum * factor - bytes.value_zero_point) * bytes.value_scale;
      }
      storeResult(bytes, result, to + d, left);
    }
  }
}

template <typename R>
constexpr Functions<uint8_t, R> kByteFunctions{packBytes<R>, attendBytes<R>, nullptr};

}  // namespace

const Kernels avx512_vnni{"llga_attention:avx512_vnni", kPanel, {}, {}, kByteFunctions<uint8_t>,
                          kByteFunctions<float>};

}  // namespace llga::attention
