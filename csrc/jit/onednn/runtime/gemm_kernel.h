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
// Rows. Those of a transformer's 196 patches and a token go together where narrow panels leave
// room.
constexpr int64_t kBlock = kWidth == 8 ? 224 : 192;
constexpr int64_t kDepth = 256;  // inputs that are added up alone: one long sum would round more
constexpr int64_t kResident = 3 << 16;  // numbers that the second level of cache keeps
constexpr int64_t kNear = 1 << 16;      // of a weight that is there already

// Inputs that a lane adds up in one instruction.
template <typename T>
constexpr int64_t kTogether = 1;
template <>
constexpr int64_t kTogether<Bfloat16> = 2;

template <typename W>
constexpr bool kIsInPlace = false;
template <>
constexpr bool kIsInPlace<InPlace> = true;

// From what an input is multiplied with to the same of the next one.
template <typename W, typename P>
LLGA_VECTOR_INLINE int64_t weightStep(const P& from) {
  if constexpr (kIsInPlace<W>) {
    return from.weight_step;
  } else {
    return kPanel;
  }
}

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
  int64_t weight_step;  // in place
};

// Adds the products of `depth` inputs.
template <int rows, int vectors, typename T, typename W>
LLGA_VECTOR_INLINE void accumulate(Sums<rows, vectors>& sums, const T* source, int64_t stride,
                                   const W* weight, int64_t step, int64_t depth,
                                   FetchAhead& ahead) {
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
      weight += step * kTogether<T>;
    }
  }
}

// Vector `v` of `vectors`, of which the last has `last` numbers unless all are `whole`.
template <bool whole, int vectors, typename R>
LLGA_VECTOR_INLINE V take(const R* from, int v, int64_t last) {
  return whole || v + 1 < vectors ? load(from + v * kWidth) : loadFirst(from + v * kWidth, last);
}

template <bool whole, int rows, int vectors, typename R>
LLGA_VECTOR_INLINE void addRows(Sums<rows, vectors>& sums, const R* addend, int64_t stride,
                                int64_t last) {
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r, addend += stride) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      sums[r][v] = Simd::add(sums[r][v], take<whole, vectors>(addend, v, last));
    }
  }
}

template <bool whole, int rows, int vectors, typename R>
LLGA_VECTOR_INLINE void storeRows(const Sums<rows, vectors>& sums, R* result, int64_t stride,
                                  int64_t last) {
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r, result += stride) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      if (whole || v + 1 < vectors) {
        store(result + v * kWidth, sums[r][v]);
      } else {
        storeFirst(result + v * kWidth, sums[r][v], last);
      }
    }
  }
}

// Adds the products of all inputs of rows that lie in pieces, or have many inputs.
template <int rows, int vectors, typename T, typename R, typename W>
LLGA_VECTOR_INLINE void accumulateInParts(Sums<rows, vectors>& sums, const T* piece,
                                          const Column<T, R, W>& c, FetchAhead& ahead) {
  const auto inputs = c.inputs / c.pieces;
  const auto* weight = c.weight;
  const auto step = weightStep<W>(c);
  bool alone = true;  // what is added up next goes to the sums themselves
  for (int64_t p = 0; p < c.pieces; ++p, piece += c.piece_stride) {
    for (int64_t first = 0; first < inputs; first += kDepth) {
      const auto depth = inputs - first < kDepth ? inputs - first : kDepth;
      const auto* source = piece + first;
      if (alone) {
        accumulate<rows, vectors>(sums, source, c.source_stride, weight, step, depth, ahead);
        alone = c.inputs <= kDepth;
        weight += depth * step;
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
      accumulate<rows, vectors>(more, source, c.source_stride, weight, step, depth, ahead);
      weight += depth * step;
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) {
          sums[r][v] = Simd::add(sums[r][v], more[r][v]);
        }
      }
    }
  }
}

// `deep`: rows lie in pieces, or have more than kDepth inputs.
template <bool deep, int rows, int vectors, typename T, typename R, typename W>
void multiply(const Column<T, R, W>& column, int64_t tiles) {
  const auto c = column;  // what is written might be the column's members, for all that is known
  const auto* start = c.source;
  const auto* addend = c.addend;
  auto* result = c.result;
  auto ahead = c.ahead;  // in registers
  const bool whole = c.last == kWidth;
  for (; tiles > 0; --tiles) {
    Sums<rows, vectors> sums;
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      const auto bias = c.bias == nullptr ? Simd::zero()
                        : whole           ? take<true, vectors>(c.bias, v, c.last)
                                          : take<false, vectors>(c.bias, v, c.last);
      auto* to = result + v * (kPanel - 1);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r, to += c.stride) {
        __builtin_prefetch(to, 1);
        sums[r][v] = bias;
      }
    }
    if constexpr (deep) {
      accumulateInParts<rows, vectors>(sums, start, c, ahead);
    } else {
      accumulate<rows, vectors>(sums, start, c.source_stride, c.weight, weightStep<W>(c), c.inputs,
                                ahead);
    }
    if (addend != nullptr) {
      whole ? addRows<true>(sums, addend, c.stride, c.last)
            : addRows<false>(sums, addend, c.stride, c.last);
      addend += rows * c.stride;
    }
    rectify(sums, c.rectifier);
    whole ? storeRows<true>(sums, result, c.stride, c.last)
          : storeRows<false>(sums, result, c.stride, c.last);
    start += rows * c.source_stride;
    result += rows * c.stride;
  }
  c.ahead = ahead;
}

template <typename T, typename R, typename W>
using Multiply = void (*)(const Column<T, R, W>&, int64_t);

template <typename T, typename R, typename W, bool deep, int vectors, int count, int... rows>
struct UpTo : UpTo<T, R, W, deep, vectors, count - 1, count, rows...> {};

template <typename T, typename R, typename W, bool deep, int vectors, int... rows>
struct UpTo<T, R, W, deep, vectors, 0, rows...> {
  static constexpr Multiply<T, R, W> kernels[] = {multiply<deep, rows, vectors, T, R, W>...};
};

// For up to so many outputs; kernels[i] is for i + 1 rows.
template <bool deep, typename T, typename R, typename W>
const Multiply<T, R, W>* kernelsFor(int64_t outputs) {
  return outputs <= kWidth ? UpTo<T, R, W, deep, 1, kRows>::kernels
                           : UpTo<T, R, W, deep, 2, kRows>::kernels;
}

// `tiles` of `rows` rows from `row` on, by the outputs of the panel from `o` on, `outputs` of them.
template <typename T, typename R, typename W>
void runRows(const ProblemOf<T, R, W>& p, int64_t row, int64_t rows, int64_t tiles, int64_t o,
             int64_t outputs, FetchAhead& ahead) {
  const auto at = row * p.outputs + o;
  const bool deep = p.pieces > 1 || p.inputs > kDepth;
  const auto* kernels =
      deep ? kernelsFor<true, T, R, W>(outputs) : kernelsFor<false, T, R, W>(outputs);
  kernels[rows - 1](
      {p.source + row * p.source_stride, p.source_stride, p.weight + o / kPanel * p.weight_stride,
       p.bias != nullptr ? p.bias + o : nullptr, p.addend != nullptr ? p.addend + at : nullptr,
       p.result + at, p.inputs, p.outputs, outputs <= kWidth ? outputs : outputs - kWidth, ahead,
       p.rectifier, p.pieces, p.piece_stride, p.weight_step},
      tiles);
}

constexpr int64_t tilesOf(int64_t rows) { return (rows + kRows - 1) / kRows; }

// `rows` from `row` on, in tiles of nearly the same size, by outputs of one panel.
template <typename T, typename R, typename W>
void runTiles(const ProblemOf<T, R, W>& p, int64_t row, int64_t rows, int64_t o, int64_t outputs,
              FetchAhead& ahead) {
  const auto tiles = tilesOf(rows);
  const auto size = rows / tiles;
  const auto larger = rows % tiles;
  if (larger > 0) {
    runRows(p, row, size + 1, larger, o, outputs, ahead);
  }
  runRows(p, row + larger * (size + 1), size, tiles - larger, o, outputs, ahead);
}

// Rows that stay in a cache. `then`: weights that are needed afterwards, or null.
template <typename T, typename R, typename W>
void runBlock(const ProblemOf<T, R, W>& p, const Task& task, const W* then) {
  const auto end = task.first_output + task.outputs;
  constexpr auto kStep = static_cast<int64_t>(kPanel * kTogether<T> * sizeof(W));
  const auto panel_bytes = static_cast<int64_t>(p.inputs * kPanel * sizeof(W));
  // Panel by panel, so that the weights of each are read from memory once.
  for (auto o = task.first_output; o < end; o += kPanel) {
    const auto outputs = end - o < kPanel ? end - o : kPanel;
    const auto* next = o + kPanel < end ? p.weight + (o / kPanel + 1) * p.weight_stride : then;
    const bool fetches = !kIsInPlace<W> && p.inputs * p.outputs > kNear;
    FetchAhead ahead(fetches ? next : nullptr, panel_bytes, kStep, tilesOf(task.rows));
    runTiles(p, task.first_row, task.rows, o, outputs, ahead);
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
  // By the problem: which rows a thread takes at once, chance decides, and rounding must not.
  const auto of_all = (p.rows + kBlock - 1) / kBlock;
  const auto parts = partsOf<R>((p.rows + of_all - 1) / of_all, p.inputs, p.pieces);
  const auto* weight = p.weight + task.first_output / kPanel * p.weight_stride;
  const auto step = weightStep<W>(p);
  // The panel behind the task is mostly the first one of the thread's next.
  const auto end = task.first_output + task.outputs;
  const auto* behind = end < p.outputs ? p.weight + end / kPanel * p.weight_stride : nullptr;
  for (int64_t block = 0; block < blocks; ++block) {  // of nearly the same size, as their tiles
    const auto row = task.first_row + task.rows * block / blocks;
    const auto rows = task.first_row + task.rows * (block + 1) / blocks - row;
    const Task of_block{row, rows, task.first_output, task.outputs};
    const W* then = block + 1 < blocks ? weight : behind;
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
      of_part.weight += first * step;
      if (part > 0) {
        of_part.bias = nullptr;
        of_part.addend = p.result;
      }
      if (!last) {
        of_part.rectifier = Rectifier::none;
      }
      runBlock(of_part, of_block, last ? then : weight + (first + part_inputs) * step);
    }
  }
}

}  // namespace
}  // namespace llga::gemm
