// Included by one source for each instruction set, behind its Simd.
//
// The gates of a block of units, of a few sequences, stay in registers while the units of the step
// before pass by, each with the next piece of the weight; of more sequences, those wait in memory
// while a chunk of the weight stays in the first cache. One sequence has less sums than additions
// are under way at a time: it has several of each, of every so many units.
#include "jit/onednn/runtime/activations.h"
#include "jit/onednn/runtime/recurrent_blocks.h"
#include "jit/onednn/runtime/vector.h"

namespace llga::recurrent {
namespace {

// Where the results of one row and block are, and what else they depend on.
struct Place {
  const float* sums;  // (gate, unit)
  const float* before;
  float* after;
  float* cells;
  int64_t count;  // of units
};

inline Vector load(const float* from, int64_t count) {
  return count == kVectorWidth ? loadVector(from) : loadFirst(from, count);
}

inline void store(float* to, Vector x, int64_t count) {
  if (count == kVectorWidth) {
    storeVector(to, x);
  } else {
    storeFirst(to, x, count);
  }
}

struct Lstm {
  static constexpr int kGates = gatesOf(Cell::lstm);  // in, forget, new, out
  static constexpr int kRows = kVectorWidth == 16 ? 6 : 3;
  static constexpr int kApart = kGates;  // from here on, gates begin with the bias

  static void finish(const Vector* gates, const Place& at) {
    const Vector cells = Sigmoid::of(gates[1]) * load(at.cells, at.count) +
                         Sigmoid::of(gates[0]) * Tanh::of(gates[2]);
    store(at.cells, cells, at.count);
    store(at.after, Sigmoid::of(gates[3]) * Tanh::of(cells), at.count);
  }
};

struct Gru {
  static constexpr int kGates = gatesOf(Cell::gru);  // reset, update, new
  static constexpr int kRows = kVectorWidth == 16 ? 8 : 3;
  static constexpr int kApart = 2;

  static void finish(const Vector* gates, const Place& at) {
    const Vector made =
        Tanh::of(loadVector(at.sums + 2 * kVectorWidth) + Sigmoid::of(gates[0]) * gates[2]);
    const Vector before = load(at.before, at.count);
    store(at.after, made + Sigmoid::of(gates[1]) * (before - made), at.count);
  }
};

struct TanhOfSum {
  static constexpr int kGates = gatesOf(Cell::tanh);
  static constexpr int kRows = kVectorWidth == 16 ? 12 : 8;
  static constexpr int kApart = kGates;

  static void finish(const Vector* gates, const Place& at) {
    store(at.after, Tanh::of(gates[0]), at.count);
  }
};

struct ReluOfSum {
  static constexpr int kGates = gatesOf(Cell::relu);
  static constexpr int kRows = TanhOfSum::kRows;
  static constexpr int kApart = kGates;

  static void finish(const Vector* gates, const Place& at) {
    store(at.after, gates[0] < 0.0F ? Vector{} : gates[0], at.count);  // NaN stays NaN
  }
};

// The products with one unit of the step before.
template <int gates, int rows>
LLGA_VECTOR_INLINE void add(Vector (&sums)[rows][gates], const float* weight, const float* unit,
                            int64_t stride) {
#pragma GCC unroll 4
  for (int g = 0; g < gates; ++g) {
    const Vector factor = loadVector(weight + g * kVectorWidth);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      sums[r][g] += factor * unit[r * stride];
    }
  }
}

// Units of the step before whose weights for a block stay in the first cache.
template <typename C>
constexpr int64_t kChunk =
    (1 << 14) / (C::kGates * kVectorWidth * static_cast<int64_t>(sizeof(float)));

// Sums of some sequences, over the units in [first, last) of the step before.
struct Part {
  int64_t first;
  int64_t last;
  Vector* sums;  // of those before, and where these go if there are more; (row, gate)
};

// `rows` sequences from `row` on.
template <typename C, int rows>
void compute(const Step& step, int64_t block, int64_t row, const Part& part) {
  constexpr int kUnderWay = 8;  // two additions begin at a time, and take four times as long
  constexpr int kPiece = C::kGates * rows;
  constexpr int kSets = kPiece >= kUnderWay ? 1 : (kUnderWay + kPiece - 1) / kPiece;
  constexpr int64_t kOfBlock = C::kGates * kVectorWidth;
  const auto* sums = step.sums + row * step.sums_stride + block * kOfBlock;
  const auto* before = step.before + row * step.before_stride;
  const auto* weight = step.weight + block * step.units * kOfBlock;
  Vector gates[kSets][rows][C::kGates];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < C::kGates; ++g) {
      if (part.first > 0) {
        gates[0][r][g] = part.sums[r * C::kGates + g];
      } else {
        gates[0][r][g] = g < C::kApart ? loadVector(sums + r * step.sums_stride + g * kVectorWidth)
                                       : loadVector(step.bias + block * kVectorWidth);
      }
#pragma GCC unroll 8
      for (int s = 1; s < kSets; ++s) {
        gates[s][r][g] = Vector{};
      }
    }
  }
  auto unit = part.first;
  for (; unit + kSets <= part.last; unit += kSets) {
#pragma GCC unroll 8
    for (int s = 0; s < kSets; ++s) {
      add(gates[s], weight + (unit + s) * kOfBlock, before + unit + s, step.before_stride);
    }
  }
  for (; unit < part.last; ++unit) {
    add(gates[0], weight + unit * kOfBlock, before + unit, step.before_stride);
  }
  const auto first = block * kVectorWidth;
  const auto left = step.units - first;
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int g = 0; g < C::kGates; ++g) {
#pragma GCC unroll 8
      for (int s = 1; s < kSets; ++s) {
        gates[0][r][g] += gates[s][r][g];
      }
      if (part.last < step.units) {
        part.sums[r * C::kGates + g] = gates[0][r][g];
      }
    }
    if (part.last == step.units) {
      C::finish(gates[0][r],
                {sums + r * step.sums_stride, before + r * step.before_stride + first,
                 step.after + (row + r) * step.after_stride + first,
                 step.cells == nullptr ? nullptr : step.cells + (row + r) * step.units + first,
                 left < kVectorWidth ? left : kVectorWidth});
    }
  }
}

// Fewer than C::kRows.
template <typename C, int rows = C::kRows - 1>
void computeLast(const Step& step, int64_t block, int64_t row, int64_t count, const Part& part) {
  if constexpr (rows > 0) {
    if (count == rows) {
      compute<C, rows>(step, block, row, part);
    } else {
      computeLast<C, rows - 1>(step, block, row, count, part);
    }
  }
}

template <typename C>
void run(const Step& step, int64_t first, int64_t last) {
  constexpr int64_t kTogether = 16 * C::kRows;  // sequences that meet a chunk of the weight in turn
  Vector sums[kTogether * C::kGates];
  for (auto block = first; block < last; ++block) {
    for (int64_t row = 0; row < step.rows; row += kTogether) {
      const auto rows = step.rows - row < kTogether ? step.rows - row : kTogether;
      const auto chunk = rows > C::kRows ? kChunk<C> : step.units;
      for (int64_t unit = 0; unit < step.units; unit += chunk) {
        const auto end = step.units - unit < chunk ? step.units : unit + chunk;
        int64_t r = 0;
        for (; r + C::kRows <= rows; r += C::kRows) {
          compute<C, C::kRows>(step, block, row + r, {unit, end, sums + r * C::kGates});
        }
        computeLast<C>(step, block, row + r, rows - r, {unit, end, sums + r * C::kGates});
      }
    }
  }
}

auto find(Cell cell) -> void (*)(const Step&, int64_t, int64_t) {
  switch (cell) {
    case Cell::lstm:
      return run<Lstm>;
    case Cell::gru:
      return run<Gru>;
    case Cell::tanh:
      return run<TanhOfSum>;
    case Cell::relu:
      return run<ReluOfSum>;
  }
  return nullptr;
}

}  // namespace
}  // namespace llga::recurrent
