// Included by one source for each instruction set, behind its Simd:
//
//   kWidth; broadcast, store, zero, fmadd, isZero; lanesOf, lanesBefore, select
//
// and the kGemm of namespace llga::attention, with AVX-512's instructions for bfloat16 kNarrowGemm,
// too.
//
// For each block of queries: its products with a block of keys, their exponentials, and the
// products of these with the values. Over several blocks of keys the sums are kept relative to the
// largest score so far. All of it in float32, but for the products where they are those of bfloat16
// (P): there queries are multiplied as they are, and exponentials are rounded.
#include "jit/onednn/runtime/attention_blocks.h"
#include "jit/onednn/runtime/vector_sums.h"

namespace llga::attention {
namespace {

constexpr int64_t kWidth = Simd::kWidth;
constexpr int64_t kPanel = 2 * kWidth;
constexpr float kInfinity = __builtin_inff();

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

float largestOf(Vector x) {
  return reduced(x, [](Vector a, Vector b) -> Vector { return a > b ? a : b; });
}

[[maybe_unused]] float numberOf(float number) { return number; }

[[maybe_unused]] float numberOf(Bfloat16 bits) {
  const auto wide = static_cast<uint32_t>(bits) << 16U;
  float number = 0;
  __builtin_memcpy(&number, &wide, sizeof(number));
  return number;
}

[[maybe_unused]] __m256 loadEight(const float* from) { return _mm256_loadu_ps(from); }

[[maybe_unused]] __m256 loadEight(const Bfloat16* from) {
  const auto numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
}

// Eight rows of eight numbers to columns, so many numbers apart.
template <int64_t apart = kPanel>
void transpose(const __m256 (&rows)[8], float* to) {
  __m256 pairs[8];
#pragma GCC unroll 4
  for (int r = 0; r < 8; r += 2) {
    pairs[r] = _mm256_unpacklo_ps(rows[r], rows[r + 1]);
    pairs[r + 1] = _mm256_unpackhi_ps(rows[r], rows[r + 1]);
  }
  __m256 fours[8];
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4) {
    fours[r] = _mm256_shuffle_ps(pairs[r], pairs[r + 2], 0x44);
    fours[r + 1] = _mm256_shuffle_ps(pairs[r], pairs[r + 2], 0xEE);
    fours[r + 2] = _mm256_shuffle_ps(pairs[r + 1], pairs[r + 3], 0x44);
    fours[r + 3] = _mm256_shuffle_ps(pairs[r + 1], pairs[r + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(to + c * apart, _mm256_permute2f128_ps(fours[c], fours[c + 4], 0x20));
    _mm256_storeu_ps(to + (c + 4) * apart, _mm256_permute2f128_ps(fours[c], fours[c + 4], 0x31));
  }
}

// Of eight rows the eight numbers from `d` on, likewise. 0 where all are finite, else NaN
// somewhere.
template <typename T>
__m256 transpose(const T* const* from, int64_t d, float* to) {
  __m256 rows[8];
  auto sum = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
    rows[r] = loadEight(from[r] + d);
    sum = _mm256_fmadd_ps(rows[r], _mm256_setzero_ps(), sum);
  }
  transpose(rows, to);
  return sum;
}

// Sums of numbers times 0 are NaN where one is not finite.

template <typename T>
bool packKeys(const Head<T>& head, float* to) {
  constexpr int64_t kEight = 8;
  auto sum = _mm256_setzero_ps();
  float rest = 0;
  for (int64_t first = 0; first < head.keys; first += kPanel) {
    for (int64_t k = 0; k < kPanel; k += kEight) {
      const auto there = least(kEight, head.keys - first - k);
      const T* rows[kEight];
      for (int64_t i = 0; i < there; ++i) {
        rows[i] = head.key.row(first + k + i);
      }
      int64_t d = 0;
      for (; there == kEight && d + kEight <= head.size; d += kEight) {
        sum = _mm256_add_ps(sum, transpose(rows, d, to + d * kPanel + k));
      }
      for (; d < head.size; ++d) {
        for (int64_t i = 0; i < kEight; ++i) {
          const auto number = i < there ? numberOf(rows[i][d]) : 0.0F;
          to[d * kPanel + k + i] = number;
          rest += number * 0;
        }
      }
    }
    to += head.size * kPanel;
  }
  const auto zeros = _mm256_cmp_ps(sum, _mm256_setzero_ps(), _CMP_EQ_OQ);
  return _mm256_movemask_ps(zeros) == 0xFF && rest == 0;
}

// Divides the keys of panels by their norms.
template <typename T>
void normalizeKeys(const Head<T>& head, float* panels) {
  const auto least = Simd::broadcast(head.least_key_norm);
  for (int64_t first = 0; first < head.keys; first += kPanel) {
    for (int64_t k = 0; k < kPanel; k += kWidth) {
      Vector sum{};
      for (int64_t d = 0; d < head.size; ++d) {
        const auto numbers = loadVector(panels + d * kPanel + k);
        sum = Simd::fmadd(numbers, numbers, sum);
      }
      const Vector norm = Simd::root(sum);
      const Vector factor = 1.0F / (norm < least ? Vector(least) : norm);  // NaN stays
      for (int64_t d = 0; d < head.size; ++d) {
        auto* to = panels + d * kPanel + k;
        Simd::store(to, loadVector(to) * factor);
      }
    }
    panels += head.size * kPanel;
  }
}

// Of keys across: what makes the panels of a matrix.
template <typename T>
bool packKeysAcross(const Head<T>& head, float* to) {
  Vector sum{};
  for (int64_t first = 0; first < head.keys; first += kPanel) {
    for (int64_t d = 0; d < head.size; ++d) {
      const auto* from = head.key.row(d) + first;
      for (int64_t k = 0; k < kPanel; k += kWidth) {
        const auto left = head.keys - first - k;
        const Vector numbers = left >= kWidth ? loadVector(from + k)
                               : left > 0     ? loadFirst(from + k, left)
                                              : Vector{};
        Simd::store(to + k, numbers);
        sum += numbers * 0.0F;
      }
      to += kPanel;
    }
  }
  return Simd::isZero(sum);
}

template <typename T>
bool packValues(const Head<T>& head, float* to) {
  auto sum = Simd::zero();
  float rest = 0;
  for (int64_t first = 0; first < head.keys; first += kKeys) {
    const auto keys = least(kKeys, head.keys - first);
    for (int64_t o = 0; o < head.value_size; o += kPanel) {
      const auto numbers = least(kPanel, head.value_size - o);
      for (int64_t k = 0; k < keys; ++k) {
        const auto* from = head.value.row(first + k) + o;
        if (numbers == kPanel) {
          const auto left = loadVector(from);
          const auto right = loadVector(from + kWidth);
          sum = Simd::fmadd(left, Simd::zero(), sum);
          sum = Simd::fmadd(right, Simd::zero(), sum);
          Simd::store(to, left);
          Simd::store(to + kWidth, right);
        } else {
          for (int64_t i = 0; i < kPanel; ++i) {
            to[i] = i < numbers ? numberOf(from[i]) : 0;
            rest += to[i] * 0;
          }
        }
        to += kPanel;
      }
    }
  }
  return Simd::isZero(sum) && rest == 0;
}

// Lanes of the mask's row that are true, as far as there are `count`.
auto chosenLanes(const bool* row, int64_t count) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  uint8_t last[kWidth] = {};
  if (count < kWidth) {
    for (int64_t i = 0; i < count; ++i) {
      last[i] = bytes[i];
    }
    bytes = last;
  }
  return Simd::lanesOf(bytes);
}

// The scores of some keys behind a mask, whose numbers for them begin at `at`; `count` of them are
// left.
Vector behindMask(const Mask& mask, Vector x, int64_t at, int64_t count) {
  const auto read = [&](const auto* from) {
    return count < kWidth ? loadFirst(from + at, count) : loadVector(from + at);
  };
  if (mask.added != nullptr) {
    return x + read(mask.added);
  }
  if (mask.added_narrow != nullptr) {
    return x + read(mask.added_narrow);
  }
  if (mask.allowed != nullptr) {
    const auto lanes = chosenLanes(mask.allowed + at, count);
    return x + Vector(Simd::select(lanes, Simd::zero(), Simd::broadcast(-kInfinity)));
  }
  if (mask.chosen != nullptr) {
    const auto lanes = chosenLanes(mask.chosen + at, count);
    const auto other = Simd::broadcast(mask.replacement);
    return mask.chosen_is ? Simd::select(lanes, other, x) : Simd::select(lanes, x, other);
  }
  return x;
}

// Of the scores of one query with a block of keys.
struct Row {
  float* scores;
  int64_t met;    // that the query meets
  int64_t count;  // of all; what is behind `met` becomes 0
};

bool isThere(const Mask& mask) {
  return mask.added != nullptr || mask.added_narrow != nullptr || mask.allowed != nullptr ||
         mask.chosen != nullptr;
}

template <typename T, typename R>
bool isMasked(const Head<T, R>& head) {
  return isThere(head.masks[0]);
}

// Multiplies the scores and applies the masks. Returns the largest score, or -inf; NaN is none.
template <typename T, typename R>
float prepare(const Head<T, R>& head, int64_t query, int64_t first_key, const Row& row,
              float scale) {
  Vector largest = Vector{} - kInfinity;
  const bool masked = isMasked(head);
  const bool changed = masked || scale != 1;
  for (int64_t k = 0; k < row.met; k += kWidth) {
    Vector x = loadVector(row.scores + k) * scale;
    if (masked) {
      for (const auto& mask : head.masks) {
        x = behindMask(mask, x, query * mask.stride + first_key + k, head.keys - first_key - k);
      }
    }
    const bool last = row.met - k < kWidth;
    if (last) {
      x = Simd::select(Simd::lanesBefore(row.met - k), x, Simd::broadcast(-kInfinity));
    }
    if (changed || last) {
      Simd::store(row.scores + k, x);
    }
    largest = x > largest ? x : largest;
  }
  return largestOf(largest);
}

// exp(score - largest), written over the scores. Returns their sum. Where all are -inf, it is that
// of no key.
template <typename P>
float exponentials(const Row& row, float largest) {
  largest = largest == -kInfinity ? 0 : largest;
  Vector sum{};
  int64_t k = 0;
  auto* to = reinterpret_cast<P*>(row.scores);  // a P is no wider
  for (; k < row.met; k += kWidth) {
    const Vector e = expOfDifference(loadVector(row.scores + k) - largest);
    storeVector(to + k, e);
    sum += e;
  }
  for (; k < row.count; k += kWidth) {
    storeVector(to + k, Vector{});
  }
  return sumOf(sum);
}

// PyTorch's kernel takes a row of NaN for one whose keys are all hidden if it has fewer keys than a
// register holds, and no mask.
template <typename T, typename R>
bool ignoresNan(const Head<T, R>& head) {
  return head.safe && head.keys < kWidth && !isMasked(head);
}

void multiplyRow(float* row, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    row[i] *= factor;
  }
}

#ifdef __AVX512BF16__
// Of bfloat16 products, which take numbers in pairs. The bits of those that are not finite are a
// largest exponent.

constexpr Bfloat16 kExponent = 0x7F80;

__mmask32 firstNumbers(int64_t count) {
  return count < kPanel ? static_cast<__mmask32>((uint64_t{1} << count) - 1) : ~__mmask32{0};
}

__mmask32 notFinite(__m512i numbers) {
  const auto exponent = _mm512_set1_epi16(kExponent);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(numbers, exponent), exponent);
}

// Keys of (panel, pair, key, number of the pair).
bool packKeys(const Head<Bfloat16>& head, Bfloat16* panels) {
  constexpr int64_t kEight = 8;
  __mmask32 odd = 0;
  const auto pairs = (head.size + 1) / 2;
  auto* to = reinterpret_cast<float*>(panels);  // a pair is moved like a number
  for (int64_t first = 0; first < head.keys; first += kPanel) {
    for (int64_t k = 0; k < kPanel; k += kEight) {
      const auto there = least(kEight, head.keys - first - k);
      const Bfloat16* rows[kEight];
      for (int64_t i = 0; i < there; ++i) {
        rows[i] = head.key.row(first + k + i);
        for (int64_t d = 0; d < head.size; d += kPanel) {
          odd |= notFinite(_mm512_maskz_loadu_epi16(firstNumbers(head.size - d), rows[i] + d));
        }
      }
      int64_t pair = 0;
      for (; there == kEight && 2 * (pair + kEight) <= head.size; pair += kEight) {
        __m256 block[kEight];
#pragma GCC unroll 8
        for (int64_t i = 0; i < kEight; ++i) {
          block[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + 2 * pair));
        }
        transpose(block, to + pair * kPanel + k);
      }
      for (; pair < pairs; ++pair) {
        for (int64_t i = 0; i < kEight; ++i) {
          Bfloat16 both[2] = {};
          for (auto d = 2 * pair; i < there && d < least(head.size, 2 * pair + 2); ++d) {
            both[d % 2] = rows[i][d];
          }
          __builtin_memcpy(to + pair * kPanel + k + i, both, sizeof(both));
        }
      }
    }
    to += pairs * kPanel;
  }
  return odd == 0;
}

// Values of (panel, pair of keys, number of the panel, key of the pair), for each block of keys.
bool packValues(const Head<Bfloat16>& head, Bfloat16* to) {
  alignas(64) static constexpr Bfloat16 kLow[] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                  11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const auto low = _mm512_load_si512(kLow);
  const auto high = _mm512_add_epi16(low, _mm512_set1_epi16(kWidth));
  __mmask32 odd = 0;
  for (int64_t first = 0; first < head.keys; first += kKeys) {
    const auto end = least(first + kKeys, head.keys);
    for (int64_t o = 0; o < head.value_size; o += kPanel) {
      const auto numbers = firstNumbers(head.value_size - o);
      const auto loadValue = [&](int64_t k) {
        return k < end ? _mm512_maskz_loadu_epi16(numbers, head.value.row(k) + o)
                       : _mm512_setzero_si512();
      };
      for (auto k = first; k < end; k += 2) {
        const auto one = loadValue(k);
        const auto other = loadValue(k + 1);
        odd |= notFinite(one) | notFinite(other);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(one, low, other));
        _mm512_storeu_si512(to + kPanel, _mm512_permutex2var_epi16(one, high, other));
        to += 2 * kPanel;
      }
    }
  }
  return odd == 0;
}
#endif

// What a query is multiplied with.
template <typename T>
float scaleOf(const Head<T>& head, const T* query) {
  if (head.least_query_norm < 0) {
    return head.scale;
  }
  Vector sums{};
  int64_t d = 0;
  for (; d + kWidth <= head.size; d += kWidth) {
    const auto numbers = loadVector(query + d);
    sums = Simd::fmadd(numbers, numbers, sums);
  }
  float sum = sumOf(sums);
  for (; d < head.size; ++d) {
    sum += numberOf(query[d]) * numberOf(query[d]);
  }
  const float norm = __builtin_sqrtf(sum);
  return head.scale / (norm < head.least_query_norm ? head.least_query_norm : norm);
}

// Copies them, multiplied. Returns whether all are finite.
template <typename T>
bool copyQueries(const Head<T>& head, int64_t first, int64_t count, float* to, float* scales) {
  Vector sum{};
  float rest = 0;
  for (auto q = first; q < first + count; ++q, to += head.size) {
    const auto* from = head.query.row(q);
    const float scale = scaleOf(head, from);
    *scales++ = 1;
    int64_t d = 0;
    for (; d + kWidth <= head.size; d += kWidth) {
      const Vector scaled = loadVector(from + d) * scale;
      Simd::store(to + d, scaled);
      sum += scaled * 0.0F;
    }
    for (; d < head.size; ++d) {
      to[d] = numberOf(from[d]) * scale;
      rest += to[d] * 0;
    }
  }
  return Simd::isZero(sum) && rest == 0;
}

#ifdef __AVX512BF16__
// Copies them as they are; `scales`: what their scores are to be multiplied with.
bool copyQueries(const Head<Bfloat16>& head, int64_t first, int64_t count, Bfloat16* to,
                 float* scales) {
  __mmask32 odd = 0;
  const auto whole = (head.size + 1) / 2 * 2;
  for (auto q = first; q < first + count; ++q, to += whole) {
    const auto* from = head.query.row(q);
    *scales++ = scaleOf(head, from);
    for (int64_t d = 0; d < whole; d += kPanel) {
      const auto numbers = _mm512_maskz_loadu_epi16(firstNumbers(head.size - d), from + d);
      odd |= notFinite(numbers);
      _mm512_mask_storeu_epi16(to + d, firstNumbers(whole - d), numbers);
    }
  }
  return odd == 0;
}
#endif

// Whether the first mask hides keys, and nothing but it changes scores.
template <typename T, typename R>
bool hidesOnly(const Head<T, R>& head) {
  const auto& mask = head.masks[0];
  return !isThere(head.masks[1]) &&
         (mask.allowed != nullptr ||
          (mask.chosen != nullptr && mask.replacement == -kInfinity && !mask.chosen_is));
}

// From the first on, up to the last that any of these queries is allowed to meet.
template <typename T, typename R>
int64_t keysAllowed(const Head<T, R>& head, int64_t keys, int64_t first, int64_t count) {
  const auto& mask = head.masks[0];
  const auto* allowed = mask.allowed != nullptr ? mask.allowed : mask.chosen;
  int64_t most = 0;
  for (auto q = first + (mask.stride == 0 ? 1 : count); q-- > first;) {
    const auto* row = allowed + q * mask.stride;
    auto k = keys;
    constexpr int64_t kWord = sizeof(uint64_t);
    for (uint64_t word = 0; k - kWord >= most; k -= kWord) {
      __builtin_memcpy(&word, row + k - kWord, sizeof(word));
      if (word != 0) {
        break;
      }
    }
    while (k > most && !row[k - 1]) {
      --k;
    }
    most = k > most ? k : most;
  }
  return most;
}

template <typename T>
bool pack(const Head<T>& head, const Workspace& workspace) {
  const bool keys =
      head.key_across ? packKeysAcross(head, workspace.keys) : packKeys(head, workspace.keys);
  if (head.least_key_norm >= 0) {
    normalizeKeys(head, workspace.keys);
  }
  return packValues(head, workspace.values) && keys;
}

[[maybe_unused]] void multiply(const gemm::Problem& problem) {
  kGemm.run(problem, {0, problem.rows, 0, problem.outputs});
}

// Numbers that a product takes at once.
template <typename P>
constexpr int64_t kTogether = 1;

#ifdef __AVX512BF16__
template <>
constexpr int64_t kTogether<Bfloat16> = 2;

bool packNarrow(const Head<Bfloat16>& head, const Workspace& workspace) {
  const bool keys = packKeys(head, reinterpret_cast<Bfloat16*>(workspace.keys));
  return packValues(head, reinterpret_cast<Bfloat16*>(workspace.values)) && keys;
}

void multiply(const gemm::ProblemOf<Bfloat16, float>& problem) {
  kNarrowGemm.toWide(problem, {0, problem.rows, 0, problem.outputs});
}
#endif

// Of the sums, for a total of their exponentials, which is 0 for a query that meets no key.
template <typename T, typename R>
float factorOf(const Head<T, R>& head, float total) {
  return total == 0 ? (head.safe ? 0 : __builtin_nanf("")) : 1 / total;
}

// What is known of the scores of each query, up to a block of keys.
struct SoFar {
  float largest[kQueries];
  float total[kQueries];  // of exp(score - largest)

  explicit SoFar(int64_t count) {
    for (int64_t q = 0; q < count; ++q) {
      largest[q] = -kInfinity;
      total[q] = 0;
    }
  }
};

// Query `first + q` meets those of a block's keys, from `key` on, that are before `end`: `row` has
// room for them. `weigh(row, largest)` writes their exponentials and returns the sum; the sums of
// blocks before are brought to the largest score of now.
template <typename T, typename R, typename Weigh>
void meet(const Head<T, R>& head, const Workspace& workspace, SoFar& so_far, int64_t first,
          int64_t q, int64_t key, int64_t end, Row row, float scale, const Weigh& weigh) {
  end = head.causal ? least(end, first + q + 1) : end;
  row.met = end > key ? least(end - key, kKeys) : 0;
  const auto most = prepare(head, first + q, key, row, scale);
  const auto before = so_far.largest[q];
  const auto now = most > before ? most : before;
  if (now == -kInfinity && ignoresNan(head)) {
    row.met = 0;
  }
  if (key > 0 && now != before) {
    const float factor = before == -kInfinity ? 0 : __builtin_expf(before - now);
    multiplyRow(workspace.sums + q * head.value_size, head.value_size, factor);
    so_far.total[q] *= factor;
  }
  so_far.largest[q] = now;
  so_far.total[q] += weigh(row, now);
}

template <typename T, typename P>
void attend(const Head<T>& head, const Workspace& workspace, bool finite, int64_t first,
            int64_t count) {
  SoFar so_far(count);
  float scales[kQueries];
  const auto* all_keys = reinterpret_cast<const P*>(workspace.keys);
  const auto* all_values = reinterpret_cast<const P*>(workspace.values);
  auto* query = reinterpret_cast<P*>(workspace.query);
  finite = copyQueries(head, first, count, query, scales) && finite;
  const auto size = wholePanels(head.size, kTogether<P>);
  auto keys = head.causal ? least(head.keys, first + count) : head.keys;
  if (finite && hidesOnly(head)) {  // else those left out reach the results
    keys = keysAllowed(head, keys, first, count);
  }
  for (int64_t key = 0; key < keys; key += kKeys) {
    const auto count_here = least(kKeys, keys - key);
    const auto room = wholePanels(count_here, kPanel);
    multiply(gemm::ProblemOf<P, float>{count, size, room, Rectifier::none, query, size,
                                       all_keys + key * size, size * kPanel, nullptr, nullptr,
                                       workspace.scores});
    for (int64_t q = 0; q < count; ++q) {
      meet(head, workspace, so_far, first, q, key, keys,
           {workspace.scores + q * room, 0, count_here}, scales[q], exponentials<P>);
    }
    // A P is as much narrower than the scores that it is written over as products take more at
    // once.
    multiply(gemm::ProblemOf<P, float>{
        count, wholePanels(count_here, kTogether<P>), head.value_size, Rectifier::none,
        reinterpret_cast<const P*>(workspace.scores), room * kTogether<P>,
        all_values + key * wholePanels(head.value_size, kPanel),
        wholePanels(least(kKeys, head.keys - key), kTogether<P>) * kPanel, nullptr,
        key > 0 ? workspace.sums : nullptr, workspace.sums});
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
      const auto sum = left < kWidth ? loadFirst(from + d, left) : loadVector(from + d);
      const Vector result = keys > 0 ? Vector(sum * factor) : Vector{} + factor;
      if (left < kWidth) {
        storeFirst(to + d, result, left);
      } else {
        storeVector(to + d, result);
      }
    }
  }
}

template <typename T>
void attendAlone(const Head<T>& head, float* scores) {
  if (!head.result.has(0)) {
    return;
  }
  const auto* query = head.query.row(0);
  auto* result = head.result.row(0);
  const auto keys = head.causal ? 1 : head.keys;
  const auto whole = head.size / kWidth * kWidth;
  for (int64_t k = 0; k < keys; ++k) {
    const auto* key = head.key.row(k);
    Vector sum{};
    for (int64_t d = 0; d < whole; d += kWidth) {
      sum += loadVector(query + d) * loadVector(key + d);
    }
    auto score = sumOf(sum);
    for (auto d = whole; d < head.size; ++d) {
      score += numberOf(query[d]) * numberOf(key[d]);
    }
    scores[k] = score * head.scale;
  }
  Row row{scores, keys, keys};
  const auto largest = prepare(head, 0, 0, row, 1);
  if (largest == -kInfinity && ignoresNan(head)) {
    row = {scores, 0, keys};
  }
  const auto total = exponentials<float>(row, largest);
  const float factor = factorOf(head, total);
  int64_t d = 0;
  for (; d + kPanel <= head.value_size; d += kPanel) {
    Vector left{};
    Vector right{};
    for (int64_t k = 0; k < keys; ++k) {
      const auto* value = head.value.row(k) + d;
      left += scores[k] * loadVector(value);
      right += scores[k] * loadVector(value + kWidth);
    }
    storeVector(result + d, left * factor);
    storeVector(result + d + kWidth, right * factor);
  }
  for (; d < head.value_size; d += kWidth) {
    const auto count = least(kWidth, head.value_size - d);
    Vector sum{};
    for (int64_t k = 0; k < keys; ++k) {
      sum += scores[k] * loadFirst(head.value.row(k) + d, count);
    }
    storeFirst(result + d, sum * factor, count);
  }
}

template <typename T>
constexpr Functions<T> kFunctions{pack<T>, attend<T, float>, attendAlone<T>};

#ifdef __AVX512BF16__
constexpr Functions<Bfloat16> kNarrowFunctions{packNarrow, attend<Bfloat16, Bfloat16>,
                                               attendAlone<Bfloat16>};
#endif

}  // namespace
}  // namespace llga::attention
