// Included by one source for each instruction set, behind its Simd.
//
// The sums of a few pixels, or of a few vectors of channels, stay in registers. A window that
// reaches over the image's edge has fewer columns. Where channels are no multiple of a vector, the
// last two have some in common, which are computed twice.
#include "jit/onednn/runtime/depthwise_blocks.h"
#include "jit/onednn/runtime/rectified.h"
#include "jit/onednn/runtime/vector.h"

namespace llga::depthwise {
namespace {

using V = Simd::V;
constexpr int64_t kWidth = Simd::kWidth;
constexpr int kPixels = 6;
constexpr int kInside = 2;  // vectors of channels
constexpr int kAtEdge = 4;

// A window of so many rows and columns; `step`: from one to the next, 0 if that is not known here.
template <int height, int width, int step>
struct Window {
  static constexpr int kRows = height;
  static constexpr int kColumns = width;

  template <typename T>
  static int64_t stride(const RowOf<T>& row) {
    return step != 0 ? step : row.stride;
  }
};

// What follows the sums.
template <int pixels, int vectors, typename T>
LLGA_VECTOR_INLINE void activate(V (&sums)[pixels][vectors], const RowOf<T>& row) {
  rectify(sums, row.rectifier);
  if (row.slope == 1) {
    return;
  }
  const auto slope = Simd::broadcast(row.slope);
  const auto zero = Simd::zero();
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const auto x = sums[p][v];
      sums[p][v] = x > zero ? x : x * slope;  // NaN stays NaN
    }
  }
}

// `pixels` of the result from `x` on, `vectors` of channels from `c` on, by the columns of the
// window in [first, last).
template <typename W, int pixels, int vectors, typename T>
void compute(const RowOf<T>& row, int64_t c, int64_t x, int64_t first, int64_t last) {
  constexpr int window = W::kColumns;
  const auto stride = W::stride(row);
  V sums[pixels][vectors];
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const auto bias = row.bias != nullptr ? Simd::load(row.bias + c + v * kWidth) : Simd::zero();
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) {
      sums[p][v] = bias;
    }
  }
#pragma GCC unroll 8
  for (int y = 0; y < W::kRows; ++y) {
    if (row.source[y] == nullptr) {
      continue;
    }
    const auto* source = row.source[y] + (x * stride - row.padding) * row.source_stride + c;
    const auto* weight = row.weight + int64_t{y} * window * row.weight_stride + c;
#pragma GCC unroll 8
    for (int64_t k = 0; k < window; ++k) {
      if (pixels == 1 && (k < first || k >= last)) {
        continue;
      }
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const auto factor = Simd::load(weight + k * row.weight_stride + v * kWidth);
#pragma GCC unroll 8
        for (int p = 0; p < pixels; ++p) {
          const auto at = (int64_t{p} * stride + k) * row.source_stride + v * kWidth;
          sums[p][v] = Simd::fmadd(loadVector(source + at), factor, sums[p][v]);
        }
      }
    }
  }
  activate(sums, row);
  const auto stride_to = row.result_stride;
  auto* to = row.result + x * stride_to + c;
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p, to += stride_to) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      Simd::store(to + v * kWidth, sums[p][v]);
    }
  }
}

// The first channel of a vector, or of the last one there is.
template <typename T>
int64_t vectorAt(const RowOf<T>& row, int64_t c) {
  return c + kWidth <= row.channels ? c : row.channels - kWidth;
}

// One pixel, all channels.
template <typename W, typename T>
void computeEdge(const RowOf<T>& row, int64_t x) {
  constexpr int64_t window = W::kColumns;
  const auto stride = W::stride(row);
  const auto left = x * stride - row.padding;
  const auto first = left < 0 ? -left : 0;
  const auto last = row.width - left < window ? row.width - left : window;
  int64_t c = 0;
  for (; c + kAtEdge * kWidth <= row.channels; c += kAtEdge * kWidth) {
    compute<W, 1, kAtEdge>(row, c, x, first, last);
  }
  for (; c < row.channels; c += kWidth) {
    compute<W, 1, 1>(row, vectorAt(row, c), x, first, last);
  }
}

// Fewer than kPixels, whose windows are all in the image.
template <typename W, int vectors, int pixels = kPixels - 1, typename T>
void computeRest(const RowOf<T>& row, int64_t c, int64_t x, int64_t count) {
  if constexpr (pixels > 0) {
    if (count == pixels) {
      compute<W, pixels, vectors>(row, c, x, 0, W::kColumns);
    } else {
      computeRest<W, vectors, pixels - 1>(row, c, x, count);
    }
  }
}

// The pixels [first, last), whose windows are all in the image.
template <typename W, int vectors, typename T>
void computeInside(const RowOf<T>& row, int64_t c, int64_t first, int64_t last) {
  for (; first + kPixels <= last; first += kPixels) {
    compute<W, kPixels, vectors>(row, c, first, 0, W::kColumns);
  }
  computeRest<W, vectors>(row, c, first, last - first);
}

template <typename W, typename T>
void runRow(const RowOf<T>& row) {
  constexpr int64_t window = W::kColumns;
  const auto stride = W::stride(row);
  auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
  // Pixels whose window is all in the image: [inner, outer).
  const auto inner = least((row.padding + stride - 1) / stride, row.result_width);
  const auto room = row.width + row.padding - window;
  const auto outer = most(inner, least(room < 0 ? 0 : room / stride + 1, row.result_width));
  for (int64_t x = 0; x < inner; ++x) {
    computeEdge<W>(row, x);
  }
  for (int64_t x = outer; x < row.result_width; ++x) {
    computeEdge<W>(row, x);
  }
  int64_t c = 0;
  for (; c + kInside * kWidth <= row.channels; c += kInside * kWidth) {
    computeInside<W, kInside>(row, c, inner, outer);
  }
  for (; c < row.channels; c += kWidth) {
    computeInside<W, 1>(row, vectorAt(row, c), inner, outer);
  }
}

// Of a long window: `pixels` of the result from `x` on, `vectors` of channels from `c` on. All of
// them have most columns in the image; the others are added pixel by pixel.
template <int pixels, int vectors>
void computeLong(const Row& row, int64_t c, int64_t x) {
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
  V sums[pixels][vectors];
#pragma GCC unroll 8
  for (int v = 0; v < vectors; ++v) {
    const auto bias = row.bias != nullptr ? Simd::load(row.bias + c + v * kWidth) : Simd::zero();
#pragma GCC unroll 8
    for (int p = 0; p < pixels; ++p) {
      sums[p][v] = bias;
    }
  }
  const auto left = x * row.stride - row.padding;
  const auto columns = row.source[0] != nullptr ? row.columns : 0;
  const auto* source = row.source[0] + left * row.source_stride + c;
  const auto* weight = row.weight + c;
  const auto first = most(0, -left);
  const auto last = most(first, least(columns, row.width - left - (pixels - 1) * row.stride));
  for (auto k = first; k < last; ++k) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      const auto factor = Simd::load(weight + k * row.weight_stride + v * kWidth);
#pragma GCC unroll 8
      for (int p = 0; p < pixels; ++p) {
        const auto at = (int64_t{p} * row.stride + k) * row.source_stride + v * kWidth;
        sums[p][v] = Simd::fmadd(Simd::load(source + at), factor, sums[p][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p) {
    const auto begin = most(0, -left - p * row.stride);
    const auto end = least(columns, row.width - left - p * row.stride);
    const auto add = [&](int64_t from, int64_t to) {
      for (auto k = from; k < to; ++k) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
          const auto at = (int64_t{p} * row.stride + k) * row.source_stride + v * kWidth;
          const auto factor = Simd::load(weight + k * row.weight_stride + v * kWidth);
          sums[p][v] = Simd::fmadd(Simd::load(source + at), factor, sums[p][v]);
        }
      }
    };
    add(begin, least(first, end));
    add(most(last, begin), end);
  }
  activate(sums, row);
  auto* to = row.result + x * row.result_stride + c;
#pragma GCC unroll 8
  for (int p = 0; p < pixels; ++p, to += row.result_stride) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      Simd::store(to + v * kWidth, sums[p][v]);
    }
  }
}

template <int vectors>
void runLong(const Row& row, int64_t c) {
  int64_t x = 0;
  for (; x + kPixels <= row.result_width; x += kPixels) {
    computeLong<kPixels, vectors>(row, c, x);
  }
  for (; x < row.result_width; ++x) {
    computeLong<1, vectors>(row, c, x);
  }
}

void runLongRow(const Row& row) {
  int64_t c = 0;
  for (; c + kInside * kWidth <= row.channels; c += kInside * kWidth) {
    runLong<kInside>(row, c);
  }
  for (; c < row.channels; c += kWidth) {
    runLong<1>(row, vectorAt(row, c));
  }
}

template <int columns>
void (*find(int64_t rows, int64_t stride))(const Row&) {
  const bool one = stride == 1;
  if (rows == 1) {
    return one ? runRow<Window<1, columns, 1>, float> : nullptr;
  }
  if (rows != columns || (!one && stride != 2)) {
    return nullptr;
  }
  return one ? runRow<Window<columns, columns, 1>, float>
             : runRow<Window<columns, columns, 2>, float>;
}

void (*find(int64_t rows, int64_t columns, int64_t stride))(const Row&) {
  if (isLong(rows, columns)) {
    return runLongRow;
  }
  switch (columns) {
    case 3:
      return find<3>(rows, stride);
    case 5:
      return find<5>(rows, stride);
    case 7:
      return find<7>(rows, stride);
    default:
      return nullptr;
  }
}

using Volume = Window<9, 3, 0>;

}  // namespace
}  // namespace llga::depthwise
