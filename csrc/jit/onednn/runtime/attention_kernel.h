// Included by one source for each instruction set, behind its Simd:
//
//   kWidth; broadcast, store, zero, fmadd, isZero; lanesOf, lanesBefore, select
//
// and the kGemm of namespace llga::attention.
//
// For each block of queries: its products with a block of keys, their exponentials, and the
// products of these with the values. Over several blocks of keys the sums are kept relative to the
// largest score so far. All of it in float32.
#include "jit/onednn/runtime/attention_blocks.h"
#include "jit/onednn/runtime/vector.h"

namespace llga::attention {
namespace {

constexpr int64_t kWidth = Simd::kWidth;
constexpr int64_t kPanel = 2 * kWidth;
constexpr float kInfinity = __builtin_inff();

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Of all numbers, half by half.
template <typename Combine>
float reduced(Vector x, const Combine& combine) {
  float parts[kWidth];
  Simd::store(parts, x);
#pragma GCC unroll 4
  for (auto half = kWidth / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      parts[i] = combine(parts[i], parts[i + half]);
    }
  }
  return parts[0];
}

float largestOf(Vector x) {
  return reduced(x, [](float a, float b) { return a > b ? a : b; });
}

float sumOf(Vector x) {
  return reduced(x, [](float a, float b) { return a + b; });
}

float numberOf(float number) { return number; }

float numberOf(Bfloat16 bits) {
  const auto wide = static_cast<uint32_t>(bits) << 16U;
  float number = 0;
  __builtin_memcpy(&number, &wide, sizeof(number));
  return number;
}

__m256 loadEight(const float* from) { return _mm256_loadu_ps(from); }

__m256 loadEight(const Bfloat16* from) {
  const auto numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
}

// Eight rows of eight numbers, `stride` apart, to columns, kPanel apart. 0 where all are finite,
// else NaN somewhere.
template <typename T>
__m256 transpose(const T* from, int64_t stride, float* to) {
  __m256 rows[8];
  auto sum = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
    rows[r] = loadEight(from + r * stride);
    sum = _mm256_fmadd_ps(rows[r], _mm256_setzero_ps(), sum);
  }
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
    _mm256_storeu_ps(to + c * kPanel, _mm256_permute2f128_ps(fours[c], fours[c + 4], 0x20));
    _mm256_storeu_ps(to + (c + 4) * kPanel, _mm256_permute2f128_ps(fours[c], fours[c + 4], 0x31));
  }
  return sum;
}

// Sums of numbers times 0 are NaN where one is not finite.

template <typename T>
bool packKeys(const Head<T>& head, float* to) {
  constexpr int64_t kEight = 8;
  auto sum = _mm256_setzero_ps();
  float rest = 0;
  for (int64_t first = 0; first < head.keys; first += kPanel) {
    const auto* from = head.key.data + first * head.key.stride;
    for (int64_t k = 0; k < kPanel; k += kEight) {
      const bool whole = first + k + kEight <= head.keys;
      int64_t d = 0;
      for (; whole && d + kEight <= head.size; d += kEight) {
        const auto* block = from + k * head.key.stride + d;
        sum = _mm256_add_ps(sum, transpose(block, head.key.stride, to + d * kPanel + k));
      }
      for (; d < head.size; ++d) {
        for (int64_t i = k; i < k + kEight; ++i) {
          const auto number =
              first + i < head.keys ? numberOf(from[i * head.key.stride + d]) : 0.0F;
          to[d * kPanel + i] = number;
          rest += number * 0;
        }
      }
    }
    to += head.size * kPanel;
  }
  const auto zeros = _mm256_cmp_ps(sum, _mm256_setzero_ps(), _CMP_EQ_OQ);
  return _mm256_movemask_ps(zeros) == 0xFF && rest == 0;
}

// Of keys across: what makes the panels of a matrix.
template <typename T>
bool packKeysAcross(const Head<T>& head, float* to) {
  Vector sum{};
  for (int64_t first = 0; first < head.keys; first += kPanel) {
    for (int64_t d = 0; d < head.size; ++d) {
      const auto* from = head.key.data + d * head.key.stride + first;
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
        const auto* from = head.value.data + (first + k) * head.value.stride + o;
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

template <typename T>
bool isMasked(const Head<T>& head) {
  return isThere(head.masks[0]);
}

// Applies the masks. Returns the largest score, or -inf; NaN is none.
template <typename T>
float prepare(const Head<T>& head, int64_t query, int64_t first_key, const Row& row) {
  Vector largest = Vector{} - kInfinity;
  const bool masked = isMasked(head);
  for (int64_t k = 0; k < row.met; k += kWidth) {
    Vector x = loadVector(row.scores + k);
    if (masked) {
      for (const auto& mask : head.masks) {
        x = behindMask(mask, x, query * mask.stride + first_key + k, head.keys - first_key - k);
      }
    }
    const bool last = row.met - k < kWidth;
    if (last) {
      x = Simd::select(Simd::lanesBefore(row.met - k), x, Simd::broadcast(-kInfinity));
    }
    if (masked || last) {
      Simd::store(row.scores + k, x);
    }
    largest = x > largest ? x : largest;
  }
  return largestOf(largest);
}

// exp(score - largest). Returns their sum. Where all are -inf, it is that of no key.
float exponentials(const Row& row, float largest) {
  largest = largest == -kInfinity ? 0 : largest;
  Vector sum{};
  int64_t k = 0;
  for (; k < row.met; k += kWidth) {
    const Vector x = loadVector(row.scores + k) - largest;
    const Vector e = x < -87.0F ? Vector{} : expOf(x);
    Simd::store(row.scores + k, e);
    sum += e;
  }
  for (; k < row.count; k += kWidth) {
    Simd::store(row.scores + k, Simd::zero());
  }
  return sumOf(sum);
}

// PyTorch's kernel takes a row of NaN for one whose keys are all hidden if it has fewer keys than a
// register holds, and no mask.
template <typename T>
bool ignoresNan(const Head<T>& head) {
  return head.safe && head.keys < kWidth && !isMasked(head);
}

void multiplyRow(float* row, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    row[i] *= factor;
  }
}

// Copies them. Returns whether all are finite.
template <typename T>
bool scaleQueries(const Head<T>& head, int64_t first, int64_t count, float* to) {
  Vector sum{};
  float rest = 0;
  for (auto q = first; q < first + count; ++q, to += head.size) {
    const auto* from = head.query.data + q * head.query.stride;
    int64_t d = 0;
    for (; d + kWidth <= head.size; d += kWidth) {
      const Vector scaled = loadVector(from + d) * head.scale;
      Simd::store(to + d, scaled);
      sum += scaled * 0.0F;
    }
    for (; d < head.size; ++d) {
      to[d] = numberOf(from[d]) * head.scale;
      rest += to[d] * 0;
    }
  }
  return Simd::isZero(sum) && rest == 0;
}

// Whether the first mask hides keys, and nothing but it changes scores.
template <typename T>
bool hidesOnly(const Head<T>& head) {
  const auto& mask = head.masks[0];
  return !isThere(head.masks[1]) &&
         (mask.allowed != nullptr ||
          (mask.chosen != nullptr && mask.replacement == -kInfinity && !mask.chosen_is));
}

// From the first on, up to the last that any of these queries is allowed to meet.
template <typename T>
int64_t keysAllowed(const Head<T>& head, int64_t keys, int64_t first, int64_t count) {
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
  return packValues(head, workspace.values) && keys;
}

// Of the sums, for a total of their exponentials, which is 0 for a query that meets no key.
template <typename T>
float factorOf(const Head<T>& head, float total) {
  return total == 0 ? (head.safe ? 0 : __builtin_nanf("")) : 1 / total;
}

template <typename T>
void attend(const Head<T>& head, const Workspace& workspace, bool finite, int64_t first,
            int64_t count) {
  float largest[kQueries];
  float total[kQueries];
  for (int64_t q = 0; q < count; ++q) {
    largest[q] = -kInfinity;
    total[q] = 0;
  }
  finite = scaleQueries(head, first, count, workspace.query) && finite;
  auto keys = head.causal ? least(head.keys, first + count) : head.keys;
  if (finite && hidesOnly(head)) {  // else those left out reach the results
    keys = keysAllowed(head, keys, first, count);
  }
  for (int64_t key = 0; key < keys; key += kKeys) {
    const auto count_here = least(kKeys, keys - key);
    const auto room = wholePanels(count_here, kPanel);
    const gemm::Problem scores{count,
                               head.size,
                               room,
                               Rectifier::none,
                               workspace.query,
                               head.size,
                               workspace.keys + key * head.size,
                               head.size * kPanel,
                               nullptr,
                               nullptr,
                               workspace.scores};
    kGemm.run(scores, {0, count, 0, room});
    for (int64_t q = 0; q < count; ++q) {
      const auto end = head.causal ? least(keys, first + q + 1) : keys;
      const auto met = end > key ? least(end - key, kKeys) : 0;
      Row row{workspace.scores + q * room, met, count_here};
      const auto most = prepare(head, first + q, key, row);
      const auto before = largest[q];
      const auto now = most > before ? most : before;
      if (now == -kInfinity && ignoresNan(head)) {
        row.met = 0;
      }
      if (key > 0 && now != before) {
        const float factor = before == -kInfinity ? 0 : __builtin_expf(before - now);
        multiplyRow(workspace.sums + q * head.value_size, head.value_size, factor);
        total[q] *= factor;
      }
      largest[q] = now;
      total[q] += exponentials(row, now);
    }
    const gemm::Problem sums{count,
                             count_here,
                             head.value_size,
                             Rectifier::none,
                             workspace.scores,
                             room,
                             workspace.values + key * wholePanels(head.value_size, kPanel),
                             least(kKeys, head.keys - key) * kPanel,
                             nullptr,
                             key > 0 ? workspace.sums : nullptr,
                             workspace.sums};
    kGemm.run(sums, {0, count, 0, head.value_size});
  }
  for (int64_t q = 0; q < count; ++q) {
    const auto* from = workspace.sums + q * head.value_size;
    auto* to = head.result + (first + q) * head.result_stride;
    const float factor = factorOf(head, total[q]);
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
  const auto keys = head.causal ? 1 : head.keys;
  const auto whole = head.size / kWidth * kWidth;
  for (int64_t k = 0; k < keys; ++k) {
    const auto* key = head.key.data + k * head.key.stride;
    Vector sum{};
    for (int64_t d = 0; d < whole; d += kWidth) {
      sum += loadVector(head.query.data + d) * loadVector(key + d);
    }
    auto score = sumOf(sum);
    for (auto d = whole; d < head.size; ++d) {
      score += numberOf(head.query.data[d]) * numberOf(key[d]);
    }
    scores[k] = score * head.scale;
  }
  Row row{scores, keys, keys};
  const auto largest = prepare(head, 0, 0, row);
  if (largest == -kInfinity && ignoresNan(head)) {
    row = {scores, 0, keys};
  }
  const auto total = exponentials(row, largest);
  const float factor = factorOf(head, total);
  int64_t d = 0;
  for (; d + kPanel <= head.value_size; d += kPanel) {
    Vector left{};
    Vector right{};
    for (int64_t k = 0; k < keys; ++k) {
      const auto* value = head.value.data + k * head.value.stride + d;
      left += scores[k] * loadVector(value);
      right += scores[k] * loadVector(value + kWidth);
    }
    storeVector(head.result + d, left * factor);
    storeVector(head.result + d + kWidth, right * factor);
  }
  for (; d < head.value_size; d += kWidth) {
    const auto count = least(kWidth, head.value_size - d);
    Vector sum{};
    for (int64_t k = 0; k < keys; ++k) {
      sum += scores[k] * loadFirst(head.value.data + k * head.value.stride + d, count);
    }
    storeFirst(head.result + d, sum * factor, count);
  }
}

template <typename T>
constexpr Functions<T> kFunctions{pack<T>, attend<T>, attendAlone<T>};

}  // namespace
}  // namespace llga::attention
