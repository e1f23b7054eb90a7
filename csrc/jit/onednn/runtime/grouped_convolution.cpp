#include "jit/onednn/runtime/grouped_convolution.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "jit/onednn/runtime/engine.h"

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

bool GroupedConvolution::isNarrowSupported() const {
  const bool whole = channels == 4 || channels == 8 || channels == grouped::kBlock;
  // A window's row is read in equal steps.
  const bool even = kernel[1] == 1 || kernel[1] == 3 || kernel[1] == 5 || kernel[1] == 7;
  return usesAmx() && groups > 1 && whole && groups * channels >= grouped::kBlock && even &&
         dilation[1] == 1;
}

int64_t GroupedConvolution::narrowBlocks() const {
  return (groups * channels + grouped::kBlock - 1) / grouped::kBlock;
}

int64_t GroupedConvolution::narrowChannel(int64_t block) const {
  return std::min(block * grouped::kBlock, groups * channels - grouped::kBlock);
}

at::Tensor GroupedConvolution::narrowWeight(const at::Tensor& weight) const {
  const auto blocks = narrowBlocks();
  constexpr auto kBlock = grouped::kBlock;
  auto dense = at::zeros({blocks, kBlock, kBlock, kernel[0], kernel[1]}, weight.options());
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t group = 0; group < kBlock; group += channels) {
      dense[b]
          .narrow(0, group, channels)
          .narrow(1, group, channels)
          .copy_(weight.narrow(0, narrowChannel(b) + group, channels));
    }
  }
  return dense.view({blocks, kBlock, kBlock / 2, 2, kernel[0], kernel[1]})
      .permute({0, 4, 5, 2, 1, 3});
}

void GroupedConvolution::runSlowly(const grouped::Row& row, const Bfloat16* plain,
                                   int64_t channel) const {
  const auto wide = [](Bfloat16 number) {
    return static_cast<float>(c10::BFloat16(number, c10::BFloat16::from_bits()));
  };
  for (int64_t pixel = 0; pixel < row.pixels; ++pixel) {
    for (int64_t o = 0; o < grouped::kBlock; ++o) {
      const auto* source = row.source + pixel * row.source_pixel + o / channels * channels;
      const auto* weight = plain + (channel + o) * channels * kernel[0] * kernel[1];
      float sum = 0;
      for (int64_t i = 0; i < channels; ++i) {
        for (int64_t y = 0; y < kernel[0]; ++y) {
          for (int64_t x = 0; x < kernel[1]; ++x) {
            sum += wide(source[y * row.source_row + x * grouped::kBlock + i]) * wide(*weight++);
          }
        }
      }
      sum += row.bias != nullptr ? row.bias[o] : 0;
      row.result[pixel * row.result_pixel + o] =
          c10::BFloat16(relu && sum < 0 ? 0 : sum).x;  // NaN stays NaN
    }
  }
}

void GroupedConvolution::runNarrow(const Bfloat16* source, const Bfloat16* weight,
                                   const Bfloat16* plain, const float* bias,
                                   Bfloat16* result) const {
  constexpr auto kBlock = grouped::kBlock;
  constexpr int64_t kPixels = 224;  // of the result at once, as whole rows: their window is copied
  constexpr int64_t kForOne = 1 << 19;  // products that are not worth a second thread
  const auto all = groups * channels;
  const auto rows_at_once = std::max<int64_t>(1, kPixels / result_size[1]);
  const auto row_tasks = (result_size[0] + rows_at_once - 1) / rows_at_once;
  const auto blocks = narrowBlocks();
  const auto columns = (result_size[1] - 1) * stride[1] + kernel[1];
  const auto first = std::min(padding[1], columns);
  const auto inside = std::max<int64_t>(0, std::min(size[1], columns - first));
  const auto row_size = columns * kBlock;

  const auto task = [&](int64_t index, std::vector<Bfloat16>& copy) {
    const auto block = index % blocks;
    const auto row = index / blocks % row_tasks * rows_at_once;
    const auto rows = std::min(rows_at_once, result_size[0] - row);
    const auto image = index / blocks / row_tasks;
    const auto channel = narrowChannel(block);
    const auto window = (rows - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1;
    copy.resize(static_cast<size_t>(window * row_size));
    bool finite = true;
    for (int64_t y = 0; y < window; ++y) {
      const auto from = row * stride[0] - padding[0] + y;
      auto* to = copy.data() + y * row_size;
      if (from < 0 || from >= size[0]) {
        std::fill_n(to, row_size, Bfloat16{0});
        continue;
      }
      const auto pixel = (image * size[0] + from) * size[1];
      std::fill_n(to, first * kBlock, Bfloat16{0});
      to += first * kBlock;
      finite = grouped::amx.copy(source + pixel * all + channel, all, inside, to) && finite;
      std::fill_n(to + inside * kBlock, (columns - first - inside) * kBlock, Bfloat16{0});
    }
    for (int64_t y = 0; y < rows; ++y) {
      const auto pixel = (image * result_size[0] + row + y) * result_size[1];
      const grouped::Row one{copy.data() + y * stride[0] * row_size,
                             dilation[0] * row_size,
                             stride[1] * kBlock,
                             kernel[0],
                             kernel[1],
                             weight + block * kernel[0] * kernel[1] * kBlock * kBlock,
                             bias != nullptr ? bias + channel : nullptr,
                             relu,
                             result + pixel * all + channel,
                             all,
                             result_size[1]};
      if (finite) {
        grouped::amx.run(one);
      } else {
        runSlowly(one, plain, channel);
      }
    }
  };
  const auto products = rows_at_once * result_size[1] * kBlock * channels * kernel[0] * kernel[1];
  at::parallel_for(0, images * row_tasks * blocks, std::max<int64_t>(1, kForOne / products),
                   [&](int64_t from, int64_t to) {
                     std::vector<Bfloat16> copy;
                     for (auto index = from; index < to; ++index) {
                       task(index, copy);
                     }
                   });
}

}  // namespace llga
