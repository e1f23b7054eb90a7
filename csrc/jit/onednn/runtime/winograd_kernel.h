// Included by one source for each instruction set, behind its Simd:
//
//   V, kWidth, kRows; load, store, broadcast, zero, add, sub, mul, fmadd (a*b+c), fnmadd (c-a*b),
//   max (b where one is NaN), isZero (all of a vector)
//
// vector.h reads and writes numbers of other types.
//
// A tile of m x m results comes from n x n pixels, n = m + 2, by Winograd's algorithm:
//
//   Y = A' [ sum over inputs of (G g G') * (B' d B) ] A
//
// with interpolation at 0, 1, -1 and infinity for m = 2, at 0, 3/4, -3/4, 3/2, -3/2 and infinity
// for m = 4. With the usual 1 and 2 in the place of 3/4 and 3/2, rounding errors would be four
// times as large. (Lavin, Gray: Fast Algorithms for Convolutional Neural Networks; Barabasz et al.:
// Error Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks.)
#include "jit/onednn/runtime/activations.h"
#include "jit/onednn/runtime/fetch_ahead.h"
#include "jit/onednn/runtime/vector.h"
#include "jit/onednn/runtime/winograd_tiles.h"

namespace llga::winograd {
namespace {

using V = Simd::V;
constexpr int64_t kWidth = Simd::kWidth;
constexpr int64_t kPanel = 2 * kWidth;
constexpr int kRows = Simd::kRows;
constexpr int64_t kChunk = 4 * kPanel;  // outputs whose sums are kept at once

int64_t inPanels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel * kPanel; }

// B' d, one column.
inline void transformIn(const V (&d)[4], V (&t)[4]) {
  t[0] = Simd::sub(d[0], d[2]);
  t[1] = Simd::add(d[1], d[2]);
  t[2] = Simd::sub(d[2], d[1]);
  t[3] = Simd::sub(d[1], d[3]);
}

inline void transformIn(const V (&d)[6], V (&t)[6]) {
  const auto a = Simd::broadcast(0.75F);
  const auto b = Simd::broadcast(1.5F);
  const auto aa = Simd::broadcast(0.5625F);
  const auto bb = Simd::broadcast(2.25F);
  const auto aabb = Simd::broadcast(1.265625F);
  const auto sum = Simd::broadcast(2.8125F);  // aa + bb
  t[0] = Simd::fmadd(aabb, d[0], Simd::fnmadd(sum, d[2], d[4]));
  t[5] = Simd::fmadd(aabb, d[1], Simd::fnmadd(sum, d[3], d[5]));
  const auto even_a = Simd::fnmadd(bb, d[2], d[4]);
  const auto odd_a = Simd::mul(a, Simd::fnmadd(bb, d[1], d[3]));
  const auto even_b = Simd::fnmadd(aa, d[2], d[4]);
  const auto odd_b = Simd::mul(b, Simd::fnmadd(aa, d[1], d[3]));
  t[1] = Simd::add(even_a, odd_a);
  t[2] = Simd::sub(even_a, odd_a);
  t[3] = Simd::add(even_b, odd_b);
  t[4] = Simd::sub(even_b, odd_b);
}

// A' m, one column.
inline void transformOut(const V (&m)[4], V (&y)[2]) {
  y[0] = Simd::add(Simd::add(m[0], m[1]), m[2]);
  y[1] = Simd::sub(Simd::sub(m[1], m[2]), m[3]);
}

inline void transformOut(const V (&m)[6], V (&y)[4]) {
  const auto a = Simd::broadcast(0.75F);
  const auto b = Simd::broadcast(1.5F);
  const auto aa = Simd::broadcast(0.5625F);
  const auto bb = Simd::broadcast(2.25F);
  const auto even_a = Simd::add(m[1], m[2]);
  const auto odd_a = Simd::mul(a, Simd::sub(m[1], m[2]));
  const auto even_b = Simd::add(m[3], m[4]);
  const auto odd_b = Simd::mul(b, Simd::sub(m[3], m[4]));
  y[0] = Simd::add(m[0], Simd::add(even_a, even_b));
  y[1] = Simd::add(odd_a, odd_b);
  y[2] = Simd::fmadd(aa, even_a, Simd::mul(bb, even_b));
  y[3] = Simd::add(m[5], Simd::fmadd(aa, odd_a, Simd::mul(bb, odd_b)));
}

inline float wide(float number) { return number; }

inline float wide(Bfloat16 number) {
  const auto bits = static_cast<uint32_t>(number) << 16U;
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

template <typename T>
struct Position {
  const T* image;
  T* result;        // of the image
  const T* addend;  // of the image, or null
  int64_t y;        // of the first result
  int64_t x;
};

template <typename T>
Position<T> positionOf(const ProblemOf<T>& p, int64_t tile) {
  const auto across = p.tilesAcross();
  const auto of_image = p.tilesDown() * across;
  const auto image = tile / of_image;
  const auto rest = tile % of_image;
  const auto results = image * p.result_height * p.result_width * p.outputs;
  return {p.source + image * p.height * p.width * p.inputs, p.result + results,
          p.addend != nullptr ? p.addend + results : nullptr, rest / across * p.tile,
          rest % across * p.tile};
}

// The pixels of a tile: in the image, or in `copy` with zeros around the image.
template <int n, typename T>
const T* window(const ProblemOf<T>& p, const Position<T>& at, T* copy, int64_t& row_size) {
  const auto top = at.y - p.top;
  const auto left = at.x - p.left;
  if (top >= 0 && left >= 0 && top + n <= p.height && left + n <= p.width) {
    row_size = p.width * p.inputs;
    return at.image + (top * p.width + left) * p.inputs;
  }
  row_size = n * p.inputs;
  auto* to = copy;
  for (int64_t y = top; y < top + n; ++y) {
    for (int64_t x = left; x < left + n; ++x, to += p.inputs) {
      const bool inside = y >= 0 && x >= 0 && y < p.height && x < p.width;
      const auto* from = at.image + (y * p.width + x) * p.inputs;
      for (int64_t c = 0; c < p.inputs; c += kWidth) {
        if (inside) {
          __builtin_memcpy(to + c, from + c, kWidth * sizeof(T));
        } else {
          __builtin_memset(to + c, 0, kWidth * sizeof(T));
        }
      }
    }
  }
  return copy;
}

// One tile to `to`, whose points are `point_size` numbers apart.
template <int n, typename T>
void transformTile(const ProblemOf<T>& p, const Position<T>& at, T* copy, float* to,
                   int64_t point_size) {
  int64_t row_size = 0;
  const auto* from = window<n>(p, at, copy, row_size);
  for (int64_t c = 0; c < p.inputs; c += kWidth) {
    V columns[n][n];  // [x][y]
#pragma GCC unroll 6
    for (int x = 0; x < n; ++x) {
      V pixels[n];
#pragma GCC unroll 6
      for (int y = 0; y < n; ++y) {
        pixels[y] = loadVector(from + y * row_size + x * p.inputs + c);
      }
      transformIn(pixels, columns[x]);
    }
#pragma GCC unroll 6
    for (int y = 0; y < n; ++y) {
      V row[n];
#pragma GCC unroll 6
      for (int x = 0; x < n; ++x) {
        row[x] = columns[x][y];
      }
      V points[n];
      transformIn(row, points);
#pragma GCC unroll 6
      for (int x = 0; x < n; ++x) {
        Simd::store(to + (y * n + x) * point_size + c, points[x]);
      }
    }
  }
}

// `rows` tiles by one panel: sums over the inputs.
template <int rows>
void multiply(const float* tiles, const float* panel, int64_t inputs, float* sums, int64_t sums_row,
              FetchAhead& rest) {
  auto ahead = rest;  // in registers
  V left[rows];
  V right[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    left[r] = Simd::zero();
    right[r] = Simd::zero();
  }
  int64_t count = 0;
  for (auto inputs_left = inputs; inputs_left > 0; inputs_left -= count) {
    count = ahead.steps(inputs_left);
    ahead.fetch();
#pragma GCC unroll 1
    for (int64_t i = 0; i < count; ++i, ++tiles, panel += kPanel) {
      const auto first = Simd::load(panel);
      const auto second = Simd::load(panel + kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const auto number = Simd::broadcast(tiles[r * inputs]);
        left[r] = Simd::fmadd(number, first, left[r]);
        right[r] = Simd::fmadd(number, second, right[r]);
      }
    }
  }
  rest = ahead;
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    Simd::store(sums + r * sums_row, left[r]);
    Simd::store(sums + r * sums_row + kWidth, right[r]);
  }
}

using Multiply = void (*)(const float*, const float*, int64_t, float*, int64_t, FetchAhead&);

template <int count, int... rows>
struct UpTo : UpTo<count - 1, count, rows...> {};

template <int... rows>
struct UpTo<0, rows...> {
  static constexpr Multiply kernels[] = {multiply<rows>...};
};

// By the definition of a convolution: for a tile in which an infinity, NaN or overflow would have
// spread. Sums of kWidth results from `output` on, for each of its m x m pixels.
template <int m, typename T>
void direct(const ProblemOf<T>& p, const T* pixels, int64_t row_size, int64_t output,
            V (&results)[m][m]) {
  for (auto& row : results) {
    for (auto& result : row) {
      result = Simd::zero();
    }
  }
  const auto* weight = p.plain + output * p.inputs * 9;
  for (int64_t i = 0; i < p.inputs; ++i, weight += 9) {
    for (int64_t k = 0; k < 9; ++k) {
      float numbers[kWidth];
      for (int64_t o = 0; o < kWidth; ++o) {
        numbers[o] = wide(weight[o * p.inputs * 9 + k]);
      }
      const auto factors = Simd::load(numbers);
      const auto* pixel = pixels + k / 3 * row_size + k % 3 * p.inputs + i;
      for (int y = 0; y < m; ++y) {
        for (int x = 0; x < m; ++x) {
          const auto number = Simd::broadcast(wide(pixel[y * row_size + x * p.inputs]));
          results[y][x] = Simd::fmadd(number, factors, results[y][x]);
        }
      }
    }
  }
}

// The results of one tile from its sums, for `count` outputs from `output` on.
template <int m, typename T>
void finishTile(const ProblemOf<T>& p, const Position<T>& at, const float* sums, int64_t point_size,
                int64_t output, int64_t count, T* copy) {
  constexpr int n = m + 2;
  const auto down = p.result_height - at.y;  // that are wanted
  const auto across = p.result_width - at.x;
  for (int64_t o = 0; o < count; o += kWidth) {
    V columns[n][m];  // [x][y]
#pragma GCC unroll 6
    for (int x = 0; x < n; ++x) {
      V points[n];
#pragma GCC unroll 6
      for (int y = 0; y < n; ++y) {
        points[y] = Simd::load(sums + (y * n + x) * point_size + o);
      }
      transformOut(points, columns[x]);
    }
    V results[m][m];
    auto check = Simd::zero();
#pragma GCC unroll 4
    for (int y = 0; y < m; ++y) {
      V row[n];
#pragma GCC unroll 6
      for (int x = 0; x < n; ++x) {
        row[x] = columns[x][y];
      }
      transformOut(row, results[y]);
#pragma GCC unroll 4
      for (int x = 0; x < m; ++x) {
        check = Simd::fmadd(results[y][x], Simd::zero(), check);
      }
    }
    if (!Simd::isZero(check)) {
      int64_t row_size = 0;
      const auto* pixels = window<n>(p, at, copy, row_size);
      direct(p, pixels, row_size, output + o, results);
    }
    const auto bias = p.bias != nullptr ? Simd::load(p.bias + output + o) : Simd::zero();
#pragma GCC unroll 4
    for (int y = 0; y < m; ++y) {
#pragma GCC unroll 4
      for (int x = 0; x < m; ++x) {
        if (y < down && x < across) {
          const auto offset = ((at.y + y) * p.result_width + at.x + x) * p.outputs + output + o;
          auto result = Simd::add(results[y][x], bias);
          if (p.silu) {
            result = Silu::of(result);
          }
          if (at.addend != nullptr) {
            result = Simd::add(result, loadVector(at.addend + offset));
          }
          if (p.relu) {
            result = Simd::max(Simd::zero(), result);
          }
          storeVector(at.result + offset, result);
        }
      }
    }
  }
}

inline int64_t scratchOf(int64_t tile, int64_t inputs, const Task& task) {
  const auto chunk = task.outputs < kChunk ? inPanels(task.outputs) : kChunk;
  return points(tile) * (task.tiles * (inputs + chunk) + inputs);
}

template <int m, typename T>
void runTiles(const ProblemOf<T>& p, const Task& task, float* scratch) {
  constexpr int64_t all = points(m);
  const auto point_size = task.tiles * p.inputs;
  auto* transformed = scratch;
  auto* sums = transformed + all * point_size + all * p.inputs;
  auto* copy = reinterpret_cast<T*>(transformed + all * point_size);
  for (int64_t t = 0; t < task.tiles; ++t) {
    transformTile<m + 2>(p, positionOf(p, task.first_tile + t), copy, transformed + t * p.inputs,
                         point_size);
  }
  const auto parts = (task.tiles + kRows - 1) / kRows;
  const auto end = task.first_output + task.outputs;
  const auto panel_size = kPanel * p.inputs;
  auto panelOf = [&](int64_t point, int64_t output) {
    return p.weight + (point * inPanels(p.outputs) + output) * p.inputs;
  };
  for (auto output = task.first_output; output < end; output += kChunk) {
    const auto count = end - output < kChunk ? end - output : kChunk;
    const auto sums_row = inPanels(count);
    for (int64_t point = 0; point < all; ++point) {
      for (int64_t o = 0; o < count; o += kPanel) {
        const auto* panel = panelOf(point, output + o);
        const float* next = nullptr;
        if (o + kPanel < count) {
          next = panel + panel_size;
        } else if (point + 1 < all) {
          next = panelOf(point + 1, output);
        } else if (output + kChunk < end) {
          next = panelOf(0, output + kChunk);
        }
        FetchAhead ahead(next, panel_size * sizeof(float), kPanel * sizeof(float), parts);
        const auto* tiles = transformed + point * point_size;
        auto* to = sums + point * task.tiles * sums_row + o;
        for (int64_t part = 0; part < parts; ++part) {  // of nearly the same size
          const auto rows = task.tiles / parts + (part < task.tiles % parts ? 1 : 0);
          UpTo<kRows>::kernels[rows - 1](tiles, panel, p.inputs, to, sums_row, ahead);
          tiles += rows * p.inputs;
          to += rows * sums_row;
        }
      }
    }
    for (int64_t t = 0; t < task.tiles; ++t) {
      finishTile<m>(p, positionOf(p, task.first_tile + t), sums + t * sums_row,
                    task.tiles * sums_row, output, count, copy);
    }
  }
}

template <typename T>
void runTask(const ProblemOf<T>& p, const Task& task, float* scratch) {
  p.tile == 2 ? runTiles<2>(p, task, scratch) : runTiles<4>(p, task, scratch);
}

}  // namespace
}  // namespace llga::winograd
