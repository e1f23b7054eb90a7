// Compiled for AVX-512 (F, BW, VL, BF16) and AMX (bfloat16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/amx_tiles.h"
#include "jit/onednn/runtime/grouped_blocks.h"
#include "jit/onednn/runtime/vector.h"

namespace llga::grouped {
namespace {

static_assert(kBlock == amx::kOutputs && kBlock == kVectorWidth);

// Of one register of outputs: sums 1 and 3 are asked for nowhere.
struct Products {
  template <int sums>
  [[gnu::always_inline]] static void multiply() {
    if constexpr (sums == 0) {
      _tile_dpbf16ps(0, 4, 6);
    } else {
      _tile_dpbf16ps(2, 5, 6);
    }
  }
};

bool copy(const Bfloat16* from, int64_t stride, int64_t pixels, Bfloat16* to) {
  constexpr Bfloat16 kExponent = 0x7F80;
  const auto exponent = _mm256_set1_epi16(kExponent);
  __mmask16 odd = 0;
  for (int64_t i = 0; i < pixels; ++i, from += stride, to += kBlock) {
    const auto numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    odd |= _mm256_cmpeq_epi16_mask(_mm256_and_si256(numbers, exponent), exponent);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), numbers);
  }
  return odd == 0;
}

void run(const Row& row) {
  constexpr int64_t kSize = sizeof(Bfloat16);
  constexpr int64_t kPixelBytes = kBlock * kSize;
  constexpr int64_t kRowSums = kBlock * sizeof(float);  // bytes
  // A window's row is one piece of memory.
  const auto steps = amx::stepsOf(row.window_columns * kPixelBytes);
  const auto weight_row = row.window_columns * kBlock * kBlock;
  const auto bias = row.bias != nullptr ? loadVector(row.bias) : Vector{};
  alignas(amx::kRowBytes) float sums[amx::kMostRows * kBlock];
  amx::Configuration configuration;
  for (int64_t pixel = 0; pixel < row.pixels; pixel += amx::kMostRows) {
    const auto left = row.pixels - pixel;
    const amx::Shape shape{left < amx::kMostRows ? left : amx::kMostRows, kBlock, steps.bytes};
    configuration.load(shape);
    amx::startWithZero(shape);
    const auto* source = row.source + pixel * row.source_pixel;
    const auto* weight = row.weight;
    for (int64_t y = 0; y < row.window_rows; ++y) {
      const auto stride = row.source_pixel * kSize;
      amx::accumulate<Products>(
          {source, stride, amx::kRows * stride, weight, kBlock * amx::kUnit, 0}, steps.count, shape,
          {});
      source += row.source_row;
      weight += weight_row;
    }
    amx::store(sums, kRowSums, shape);
    auto* to = row.result + pixel * row.result_pixel;
    for (int64_t i = 0; i < shape.rows; ++i, to += row.result_pixel) {
      Vector sum = loadVector(sums + i * kBlock) + bias;
      if (row.relu) {
        sum = sum < 0.0F ? Vector{} : sum;  // NaN stays NaN
      }
      storeVector(to, sum);
    }
  }
}

}  // namespace

const Kernels amx{copy, run};

}  // namespace llga::grouped
