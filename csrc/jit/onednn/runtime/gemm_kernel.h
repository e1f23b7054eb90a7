// Included by one source for each instruction set, behind its Simd:
//
//   V, kWidth, kRows; load, store, loadFirst, storeFirst, lanesBefore, broadcast, zero, add,
//   fmadd (a*b+c)
//
// A tile of kRows x kPanel results stays in registers for all of its inputs; the source is read in
// place. The weights of a panel, that the second level of cache holds, meet all rows of a block
// before those of another do; meanwhile the next panel is fetched from memory. Rows of many inputs
// are multiplied part by part, so that those of a block stay in that cache too. Copies of the
// source made nothing faster.
#include "jit/onednn/runtime/fetch_ahead.h"
#include "jit/onednn/runtime/gemm_blocks.h"
#include "jit/onednn/runtime/rectified.h"
#include "jit/onednn/runtime/vector.h"

namespace llga::gemm {
namespace {

using V = Simd::V;
constexpr int64_t kWidth = Simd::kWidth;
constexpr int64_t kPanel = 2 * kWidth;
constexpr int kRows = Simd::kRows;
constexpr int64_t kBlock = 192;  // rows
constexpr int64_t kDepth = 256;  // inputs that are added up alone: one long sum would round more
constexpr int64_t kResident = 3 << 16;  // numbers that the second level of cache keeps
constexpr int64_t kNear = 1 << 16;      // of a weight that is there already

// Inputs that a lane adds up in one instruction.
template <typename T>
constexpr int64_t kTogether = 1;
template <>
constexpr int64_t kTogether<Bfloat16> = 2;

template <int rows, int vectors>
using Sums = V[rows][vectors];

LLGA_VECTOR_INLINE V load(const float* from) { return Simd::load(from); }
LLGA_VECTOR_INLINE void store(float* to, V v) { Simd::store(to, v); }

// The first `count` numbers, fewer than a vector.
LLGA_VECTOR_INLINE V loadFirst(const float* from, int64_t count) {
  return Simd::loadFirst(from, Simd::lanesBefore(count));
}
LLGA_VECTOR_INLINE void storeFirst(float* to, V v, int64_t count) {
  Simd::storeFirst(to, v, Simd::lanesBefore(count));
}

LLGA_VECTOR_INLINE V addProducts(const float* number, V factor, V sum) {
  return Simd::fmadd(Simd::broadcast(*number), factor, sum);
}

#ifdef __AVX512BF16__
LLGA_VECTOR_INLINE V load(const Bfloat16* from) { return loadVector(from); }
LLGA_VECTOR_INLINE void store(Bfloat16* to, V v) { storeVector(to, v); }
LLGA_VECTOR_INLINE V loadFirst(const Bfloat16* from, int64_t count) {
  return llga::loadFirst(from, count);
}
LLGA_VECTOR_INLINE void storeFirst(Bfloat16* to, V v, int64_t count) {
  llga::storeFirst(to, v, count);
}

LLGA_VECTOR_INLINE V addProducts(const Bfloat16* pair, V factor, V sum) {
  int both;
  __builtin_memcpy(&both, pair, sizeof(both));
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)),
                          reinterpret_cast<__m512bh>(factor));
}
#endif

// Of a panel's weights, as many as a register holds; what they are multiplied with is T.
template <typename T, typename W>
LLGA_VECTOR_INLINE V loadFactors(const W* from) {
  if constexpr (sizeof(T) == sizeof(W)) {
    return Simd::load(reinterpret_cast<const float*>(from));
  } else {
    return loadVector(from);
  }
}

// Tiles of the same outputs, one below the other.
template <typename T, typename R, typename W>
struct Column {
  const T* source;
  int64_t source_stride;  // from row to row
  const W* weight;
  const float* bias;  // or null
  const R* addend;    // or null
  R* result;
  int64_t inputs;
  int64_t stride;  // from row to row of the result and the addend
  int64_t last;    // outputs of the last vector
  FetchAhead& ahead;
  Rectifier rectifier;
  int64_t pieces;
  int64_t piece_stride;
};

// Adds the products of `depth` inputs.
template <int rows, int vectors, typename T, typename W>
LLGA_VECTOR_INLINE void accumulate(Sums<rows, vectors>& sums, const T* source, int64_t stride,
                                   const W* weight, int64_t depth, FetchAhead& ahead) {
  int64_t count = 0;
#pragma GCC unroll 1
  for (auto left = depth / kTogether<T>; left > 0; left -= count) {
    count = ahead.steps(left);
    ahead.fetch();
#pragma GCC unroll 1
    for (int64_t i = 0; i < count; ++i) {  // unrolled, sums would be moved to memory
      V factors[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        factors[v] = loadFactors<T>(weight + v * kWidth * kTogether<T>);
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) {
          sums[r][v] = addProducts(source + r * stride, factors[v], sums[r][v]);
        }
      }
      source += kTogether<T>;
      weight += kPanel * kTogether<T>;
    }
  }
}

template <int rows, int vectors, typename T, typename R, typename W>
void multiply(const Column<T, R, W>& c, int64_t tiles) {
  const auto* start = c.source;
  const auto* addend = c.addend;
  auto* result = c.result;
  auto ahead = c.ahead;  // in registers
  const auto inputs = c.inputs / c.pieces;
  const auto blocks = (inputs + kDepth - 1) / kDepth;
  const bool whole = c.last == kWidth;
  auto take = [&](const auto* from, int v) {
    return whole || v + 1 < vectors ? load(from + v * kWidth)
                                    : loadFirst(from + v * kWidth, c.last);
  };
  for (; tiles > 0; --tiles) {
    Sums<rows, vectors> sums;
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      const auto bias = c.bias != nullptr ? take(c.bias, v) : Simd::zero();
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        __builtin_prefetch(result + r * c.stride + v * (kPanel - 1), 1);
        sums[r][v] = bias;
      }
    }
    const auto* piece = start;
    const auto* weight = c.weight;
    bool alone = true;  // what is added up next goes to the sums themselves
    for (int64_t p = 0; p < c.pieces; ++p, piece += c.piece_stride) {
      for (int64_t block = 0; block < blocks; ++block) {
        const auto first = block * kDepth;
        const auto depth = inputs - first < kDepth ? inputs - first : kDepth;
        const auto* source = piece + first;
        if (alone) {
          accumulate<rows, vectors>(sums, source, c.source_stride, weight, depth, ahead);
          alone = c.inputs <= kDepth;
          weight += depth * kPanel;
          continue;
        }
        Sums<rows, vectors> more;
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < vectors; ++v) {
            more[r][v] = Simd::zero();
          }
        }
        accumulate<rows, vectors>(more, source, c.source_stride, weight, depth, ahead);
        weight += depth * kPanel;
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < vectors; ++v) {
            sums[r][v] = Simd::add(sums[r][v], more[r][v]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        auto sum = sums[r][v];
        if (addend != nullptr) {
          sum = Simd::add(sum, take(addend + r * c.stride, v));
        }
        sum = rectified(sum, c.rectifier);
        auto* to = result + r * c.stride + v * kWidth;
        if (whole || v + 1 < vectors) {
          store(to, sum);
        } else {
          storeFirst(to, sum, c.last);
        }
      }
    }
    start += rows * c.source_stride;
    result += rows * c.stride;
    if (addend != nullptr) {
      addend += rows * c.stride;
    }
  }
  c.ahead = ahead;
}

template <typename T, typename R, typename W>
using Multiply = void (*)(const Column<T, R, W>&, int64_t);

template <typename T, typename R, typename W, int vectors, int count, int... rows>
struct UpTo : UpTo<T, R, W, vectors, count - 1, count, rows...> {};

template <typename T, typename R, typename W, int vectors, int... rows>
struct UpTo<T, R, W, vectors, 0, rows...> {
  static constexpr Multiply<T, R, W> kernels[] = {multiply<rows, vectors, T, R, W>...};
};

// `tiles` of `rows` rows from `row` on, by the outputs of the panel from `o` on, `outputs` of them.
template <typename T, typename R, typename W>
void runRows(const ProblemOf<T, R, W>& p, int64_t row, int64_t rows, int64_t tiles, int64_t o,
             int64_t outputs, FetchAhead& ahead) {
  const auto at = row * p.outputs + o;
  const bool one = outputs <= kWidth;
  const auto* kernels = one ? UpTo<T, R, W, 1, kRows>::kernels : UpTo<T, R, W, 2, kRows>::kernels;
  kernels[rows - 1](
      {p.source + row * p.source_stride, p.source_stride, p.weight + o / kPanel * p.weight_stride,
       p.bias != nullptr ? p.bias + o : nullptr, p.addend != nullptr ? p.addend + at : nullptr,
       p.result + at, p.inputs, p.outputs, one ? outputs : outputs - kWidth, ahead, p.rectifier,
       p.pieces, p.piece_stride},
      tiles);
}

// Rows that stay in a cache. `then`: weights that are needed afterwards, or null.
template <typename T, typename R, typename W>
void runBlock(const ProblemOf<T, R, W>& p, const Task& task, const W* then) {
  const auto tiles = (task.rows + kRows - 1) / kRows;
  const auto size = task.rows / tiles;
  const auto larger = task.rows % tiles;
  const auto larger_end = task.first_row + larger * (size + 1);
  const auto end = task.first_output + task.outputs;
  constexpr auto kStep = static_cast<int64_t>(kPanel * kTogether<T> * sizeof(W));
  const auto panel_bytes = static_cast<int64_t>(p.inputs * kPanel * sizeof(W));
  // Panel by panel, so that the weights of each are read from memory once.
  for (auto o = task.first_output; o < end; o += kPanel) {
    const auto outputs = end - o < kPanel ? end - o : kPanel;
    const auto* next = o + kPanel < end ? p.weight + (o / kPanel + 1) * p.weight_stride : then;
    FetchAhead ahead(p.inputs * p.outputs > kNear ? next : nullptr, panel_bytes, kStep, tiles);
    if (larger > 0) {
      runRows(p, task.first_row, size + 1, larger, o, outputs, ahead);
    }
    runRows(p, larger_end, size, tiles - larger, o, outputs, ahead);
  }
}

// Parts of all inputs that are multiplied one after the other: results, which are read again, have
// to be as exact as sums, and one source in a piece.
template <typename R>
int64_t partsOf(int64_t rows, int64_t inputs, int64_t pieces) {
  const auto most = kResident / (rows + 2 * kPanel);
  return pieces == 1 && sizeof(R) == sizeof(float) ? (inputs + most - 1) / most : 1;
}

template <typename T, typename R, typename W = T>
void runTask(const ProblemOf<T, R, W>& p, const Task& task) {
  const auto blocks = (task.rows + kBlock - 1) / kBlock;
  const auto* weight = p.weight + task.first_output / kPanel * p.weight_stride;
  for (int64_t block = 0; block < blocks; ++block) {  // of nearly the same size, as their tiles
    const auto row = task.first_row + task.rows * block / blocks;
    const auto rows = task.first_row + task.rows * (block + 1) / blocks - row;
    const Task of_block{row, rows, task.first_output, task.outputs};
    const W* then = block + 1 < blocks ? weight : nullptr;
    const auto parts = partsOf<R>(rows, p.inputs, p.pieces);
    if (parts == 1) {
      runBlock(p, of_block, then);
      continue;
    }
    constexpr int64_t kMultiple = 16;  // inputs that are read together
    const auto part_inputs = p.inputs / parts / kMultiple * kMultiple;
    for (int64_t part = 0; part < parts; ++part) {
      const auto first = part * part_inputs;
      const bool last = part + 1 == parts;
      auto of_part = p;
      of_part.inputs = last ? p.inputs - first : part_inputs;
      of_part.source += first;
      of_part.weight += first * kPanel;
      if (part > 0) {
        of_part.bias = nullptr;
        of_part.addend = p.result;
      }
      if (!last) {
        of_part.rectifier = Rectifier::none;
      }
      runBlock(of_part, of_block, last ? then : weight + (first + part_inputs) * kPanel);
    }
  }
}

}  // namespace
}  // namespace llga::gemm
