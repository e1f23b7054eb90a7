#include "jit/onednn/runtime/grouped_convolution.h"

#include <ATen/Parallel.h>
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace llga {
namespace {

constexpr int64_t kWidth = 8;  // channels of a block: one vector of AVX2

// Whose sums leave registers for the rest: weights of four inputs and a pixel's numbers, or a
// weight and a number.
constexpr int mostPixels(bool paired) { return paired ? 8 : 14; }

// Some pixels of one row of the result, one block of channels.
struct Tile {
  const float* source;  // where the first pixel's window begins
  int64_t source_row;   // numbers from one row to the next
  const float* weight;
  const float* bias;  // or null
  float* result;
  int64_t result_pixel;  // numbers from one pixel to the next
};

using Kernel = void (*)(const GroupedConvolution&, const Tile&);

// The sums of kPixels pixels stay in registers. kPaired: a block is two groups of 4 channels.
template <bool kPaired, int kStride, int kPixels>
[[gnu::target("avx2,fma")]] void compute(const GroupedConvolution& c, const Tile& tile) {
  const auto bias = tile.bias != nullptr ? _mm256_loadu_ps(tile.bias) : _mm256_setzero_ps();
  __m256 sums[kPixels];
#pragma GCC unroll 16
  for (auto& sum : sums) {
    sum = bias;
  }
  const auto* weight = tile.weight;
  for (int64_t y = 0; y < c.kernel[0]; ++y) {
    for (int64_t x = 0; x < c.kernel[1]; ++x) {
      const auto* source =
          tile.source + y * c.dilation[0] * tile.source_row + x * c.dilation[1] * kWidth;
      if constexpr (kPaired) {
        const __m256 factors[4] = {_mm256_loadu_ps(weight), _mm256_loadu_ps(weight + 8),
                                   _mm256_loadu_ps(weight + 16), _mm256_loadu_ps(weight + 24)};
        weight += 4 * kWidth;
#pragma GCC unroll 16
        for (int64_t p = 0; p < kPixels; ++p) {
          const auto both = _mm256_loadu_ps(source + p * kStride * kWidth);
          sums[p] = _mm256_fmadd_ps(_mm256_permute_ps(both, 0x00), factors[0], sums[p]);
          sums[p] = _mm256_fmadd_ps(_mm256_permute_ps(both, 0x55), factors[1], sums[p]);
          sums[p] = _mm256_fmadd_ps(_mm256_permute_ps(both, 0xAA), factors[2], sums[p]);
          sums[p] = _mm256_fmadd_ps(_mm256_permute_ps(both, 0xFF), factors[3], sums[p]);
        }
      } else {
#pragma GCC unroll 8
        for (int64_t i = 0; i < kWidth; ++i, weight += kWidth) {
          const auto factors = _mm256_loadu_ps(weight);
#pragma GCC unroll 16
          for (int64_t p = 0; p < kPixels; ++p) {
            const auto number = _mm256_broadcast_ss(source + p * kStride * kWidth + i);
            sums[p] = _mm256_fmadd_ps(number, factors, sums[p]);
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int64_t p = 0; p < kPixels; ++p) {
    // In this order NaN stays NaN.
    const auto sum = c.relu ? _mm256_max_ps(_mm256_setzero_ps(), sums[p]) : sums[p];
    _mm256_storeu_ps(tile.result + p * tile.result_pixel, sum);
  }
}

template <bool kPaired, int kStride, int... kPixels>
const Kernel* kernelsFor(std::integer_sequence<int, kPixels...>) {
  static constexpr std::array<Kernel, sizeof...(kPixels)> kernels{
      compute<kPaired, kStride, kPixels + 1>...};
  return kernels.data();
}

// For 1 to mostPixels() pixels.
template <bool kPaired>
const Kernel* kernelsFor(int64_t stride) {
  constexpr std::make_integer_sequence<int, mostPixels(kPaired)> pixels;
  return stride == 1 ? kernelsFor<kPaired, 1>(pixels) : kernelsFor<kPaired, 2>(pixels);
}

// Rows of an image, each block's channels together: what one block reads then lies close together,
// whatever the number of channels (powers of two share few sets of the cache), with zeros around.
struct Window {
  int64_t top;  // the first row, in the image
  int64_t left;
  int64_t rows;
  int64_t columns;
  int64_t blocks;
};

void copyWindow(const GroupedConvolution& c, const Window& window, const float* image, float* to) {
  const auto channels = c.groups * c.channels;
  const auto row_size = window.columns * kWidth;
  const auto block_size = window.rows * row_size;
  const auto first = std::max<int64_t>(0, -window.left);
  const auto last = std::max(first, std::min(window.columns, c.size[1] - window.left));
  for (int64_t y = 0; y < window.rows; ++y, to += row_size) {
    const auto row = window.top + y;
    const bool inside = row >= 0 && row < c.size[0];
    for (int64_t b = 0; b < window.blocks; ++b) {
      auto* copy = to + b * block_size;
      std::fill_n(copy, (inside ? first : window.columns) * kWidth, 0.F);
      std::fill_n(copy + last * kWidth, (window.columns - last) * kWidth, 0.F);
    }
    for (int64_t x = first; inside && x < last; ++x) {
      const auto* from = image + (row * c.size[1] + window.left + x) * channels;
      auto* copy = to + x * kWidth;
      for (int64_t b = 0; b < window.blocks; ++b, from += kWidth, copy += block_size) {
        std::memcpy(copy, from, kWidth * sizeof(float));
      }
    }
  }
}

}  // namespace

bool GroupedConvolution::isSupported() const {
  return groups > 1 && (stride[1] == 1 || stride[1] == 2) &&
         ((channels == 4 && groups % 2 == 0) || channels == 8);
}

std::vector<int64_t> GroupedConvolution::weightSizes() const {
  return {groups * channels / kWidth, kWidth, channels, kernel[0], kernel[1]};
}

std::vector<int64_t> GroupedConvolution::weightStrides() const {
  const auto row = kernel[1] * channels * kWidth;
  return {kernel[0] * row, 1, kWidth, row, channels * kWidth};
}

void GroupedConvolution::run(const float* source, const float* weight, const float* bias,
                             float* result) const {
  constexpr int64_t kRows = 4;          // of the result at once
  constexpr int64_t kBlocks = 8;        // of channels at once
  constexpr int64_t kForOne = 1 << 18;  // products that are not worth a second thread
  const bool paired = channels == 4;
  const auto* kernels = paired ? kernelsFor<true>(stride[1]) : kernelsFor<false>(stride[1]);
  const auto all = groups * channels;
  const auto blocks = all / kWidth;
  const auto weight_block = kernel[0] * kernel[1] * channels * kWidth;
  const auto block_tasks = (blocks + kBlocks - 1) / kBlocks;
  const auto row_tasks = (result_size[0] + kRows - 1) / kRows;
  const auto most = mostPixels(paired);
  const auto tiles = (result_size[1] + most - 1) / most;

  const auto task = [&](int64_t index, std::vector<float>& copy) {
    const auto first = index % block_tasks * kBlocks;
    const auto row = index / block_tasks % row_tasks * kRows;
    const auto rows = std::min(kRows, result_size[0] - row);
    const auto image = index / block_tasks / row_tasks;
    const Window window{row * stride[0] - padding[0], -padding[1],
                        (rows - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1,
                        (result_size[1] - 1) * stride[1] + (kernel[1] - 1) * dilation[1] + 1,
                        std::min(kBlocks, blocks - first)};
    const auto row_size = window.columns * kWidth;
    const auto block_size = window.rows * row_size;
    copy.resize(static_cast<size_t>(window.blocks * block_size));
    copyWindow(*this, window, source + image * size[0] * size[1] * all + first * kWidth,
               copy.data());
    for (int64_t b = 0; b < window.blocks; ++b) {
      const auto channel = (first + b) * kWidth;
      for (int64_t y = 0; y < rows; ++y) {
        Tile tile{copy.data() + b * block_size + y * stride[0] * row_size,
                  row_size,
                  weight + (first + b) * weight_block,
                  bias != nullptr ? bias + channel : nullptr,
                  result + (image * result_size[0] + row + y) * result_size[1] * all + channel,
                  all};
        for (int64_t i = 0; i < tiles; ++i) {  // of nearly the same size
          const auto pixels = result_size[1] / tiles + (i < result_size[1] % tiles ? 1 : 0);
          kernels[pixels - 1](*this, tile);
          tile.source += pixels * stride[1] * kWidth;
          tile.result += pixels * all;
        }
      }
    }
  };
  const auto products = kRows * kBlocks * result_size[1] * weight_block;
  at::parallel_for(0, images * row_tasks * block_tasks, std::max<int64_t>(1, kForOne / products),
                   [&](int64_t from, int64_t to) {
                     std::vector<float> copy;
                     for (auto index = from; index < to; ++index) {
                       task(index, copy);
                     }
                   });
}

}  // namespace llga
