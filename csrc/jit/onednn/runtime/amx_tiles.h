// Matrix products by AMX. Included by sources that are compiled for it.
//
// Eight registers, the tiles, hold up to 16 rows of 64 bytes. One instruction adds to 16 x 16 sums
// the products of 16 rows of a source and 64 bytes of a weight for each of 16 outputs, in the time
// in which AVX-512 adds an eighth of them. Four tiles are sums, of up to 32 rows and 32 outputs:
//
//                weight 6    weight 7
//     source 4   sums 0      sums 1
//     source 5   sums 2      sums 3
//
// A configuration belongs to the thread; who computes by tiles makes its own and releases it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "jit/onednn/runtime/band_blocks.h"

#ifdef LLGA_FUSER_EMULATE_AMX
#include "jit/onednn/runtime/amx_emulated.h"
#endif

namespace llga::amx {
namespace {

// What there is of source and sums.
struct Shape {
  int64_t rows;     // up to kMostRows
  int64_t outputs;  // up to kMostOutputs
  int64_t bytes;    // of a source's row in a step
};

// The thread's configuration while it lives. oneDNN and others load their own before they compute.
class Configuration {
 public:
  Configuration() = default;
  Configuration(const Configuration&) = delete;
  Configuration& operator=(const Configuration&) = delete;
  ~Configuration() { _tile_release(); }

  void load(const Shape& shape) {
    if (shape.rows == shape_.rows && shape.outputs == shape_.outputs &&
        shape.bytes == shape_.bytes) {
      return;
    }
    shape_ = shape;
    const auto first = shape.rows < kRows ? shape.rows : kRows;
    load({first, shape.rows - first}, shape.outputs, shape.bytes);
  }

  // All four sums, with as many rows in each.
  void loadAlike(int64_t rows, int64_t bytes) { load({rows, rows}, kMostOutputs, bytes); }

 private:
  struct Rows {
    int64_t of[2];
  };

  static void load(const Rows& rows, int64_t most_outputs, int64_t bytes) {
    const auto first = most_outputs < kOutputs ? most_outputs : kOutputs;
    const int64_t outputs[] = {first, most_outputs - first};
    Numbers numbers;
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) {
        numbers.set(2 * i + j, rows.of[i], outputs[j] * kUnit);
      }
      numbers.set(4 + i, rows.of[i], bytes);
      numbers.set(6 + i, bytes / kUnit, outputs[i] * kUnit);
    }
    const auto* all = &numbers;
    asm volatile("" ::"r"(all) : "memory");  // the intrinsic does not say what it reads
    _tile_loadconfig(all);
  }

  struct alignas(64) Numbers {
    void set(int tile, int64_t some_rows, int64_t some_bytes) {
      if (some_rows > 0 && some_bytes > 0) {
        rows[tile] = static_cast<uint8_t>(some_rows);
        bytes[tile] = static_cast<uint16_t>(some_bytes);
      }
    }

    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };

  Shape shape_{};
};

// Where the operands of a product lie. All strides in bytes.
struct Operands {
  const void* source;
  int64_t source_stride;  // from row to row
  int64_t next_rows;      // from 16 rows to the next ones
  const void* weight;
  int64_t weight_stride;  // from unit to unit
  int64_t next_outputs;   // from 16 outputs to the next ones
};

// What is fetched to the second level of cache while a product is computed.
struct Fetched {
  const char* from;
  int64_t lines;  // in each step
};

// The rest of both, with zeros behind it. Used by one thread.
struct alignas(kRowBytes) Rest {
  char source[kMostRows][kRowBytes];
  char weight[kMostOutputs / kOutputs][kRowBytes / kUnit][kRowBytes];

  Operands operands() const {
    return {source, kRowBytes, kRows * kRowBytes, weight, kRowBytes, kRowBytes / kUnit * kRowBytes};
  }

  void copySource(const Operands& o, const Steps& steps, int64_t rows) {
    const auto* from = static_cast<const char*>(o.source) + steps.count * steps.bytes;
    const auto there = (uint64_t{1} << static_cast<unsigned>(steps.rest)) - 1;
    for (int64_t r = 0; r < rows; ++r) {
      _mm512_store_si512(source[r], _mm512_maskz_loadu_epi8(there, from + r * o.source_stride));
    }
  }

  void copyWeight(const Operands& o, const Steps& steps, int64_t outputs) {
    const auto first = steps.count * steps.bytes / kUnit;
    for (int64_t i = 0; i < outputs; i += kOutputs) {
      for (int64_t u = 0; u < kRowBytes / kUnit; ++u) {
        const auto* from = static_cast<const char*>(o.weight) + (first + u) * o.weight_stride +
                           i / kOutputs * o.next_outputs;
        _mm512_store_si512(weight[i / kOutputs][u], u * kUnit < steps.rest
                                                        ? _mm512_loadu_si512(from)
                                                        : _mm512_setzero_si512());
      }
    }
  }
};

// Work for the other units of the core, to be done bit by bit between the products: where a core
// has two threads, neither looks far enough ahead to do what follows a long row of products beside
// them.
struct NothingBetween {
  void operator()() const {}
};

// How many rows of a block to finish at once, so that all are in so many steps.
constexpr int64_t rowsBetween(int64_t steps) {
  constexpr int64_t kFewest = 4;
  const auto rows = (kMostRows + steps - 1) / steps;
  return rows > kFewest ? rows : kFewest;
}

// Rows of a block whose sums are stored, which are finished some at a time.
class OpenRows {
 public:
  struct Some {
    int64_t first;
    int64_t count;
  };

  OpenRows() = default;
  explicit OpenRows(int64_t end, int64_t first = 0) : next_(first), end_(end) {}

  bool any() const { return next_ < end_; }

  // The next ones, which count as finished.
  Some take(int64_t most) {
    const auto left = end_ - next_;
    const Some some{next_, left < most ? left : most};
    next_ += some.count;
    return some;
  }

 private:
  int64_t next_ = 0;
  int64_t end_ = 0;
};

// Adds the products of some steps to the sums. Op::multiply<i>() is the instruction for the sums i.
template <typename Op, bool more_rows, bool more_outputs, typename Between>
void addSteps(const Operands& o, int64_t steps, int64_t bytes, const Fetched& fetched,
              const Between& between) {
  const auto* source = static_cast<const char*>(o.source);
  const auto* weight = static_cast<const char*>(o.weight);
  const auto weight_step = bytes / kUnit * o.weight_stride;
  const auto* coming = fetched.from;
  for (int64_t step = 0; step < steps; ++step, source += bytes, weight += weight_step) {
    for (int64_t i = 0; i < fetched.lines; ++i, coming += kRowBytes) {
      __builtin_prefetch(coming, 0, 2);
    }
    _tile_loadd(6, weight, o.weight_stride);
    _tile_loadd(4, source, o.source_stride);
    Op::template multiply<0>();
    if constexpr (more_outputs) {
      _tile_loadd(7, weight + o.next_outputs, o.weight_stride);
      Op::template multiply<1>();
    }
    if constexpr (more_rows) {
      _tile_loadd(5, source + o.next_rows, o.source_stride);
      Op::template multiply<2>();
      if constexpr (more_outputs) {
        Op::template multiply<3>();
      }
    }
    between();
  }
}

[[gnu::always_inline]] inline void startWithZero(const Shape& shape) {
  _tile_zero(0);
  if (shape.outputs > kOutputs) {
    _tile_zero(1);
  }
  if (shape.rows > kRows) {
    _tile_zero(2);
    if (shape.outputs > kOutputs) {
      _tile_zero(3);
    }
  }
}

[[gnu::always_inline]] inline void store(void* numbers, int64_t stride, const Shape& shape) {
  auto* first = static_cast<char*>(numbers);
  auto* below = first + kRows * stride;
  _tile_stored(0, first, stride);
  if (shape.outputs > kOutputs) {
    _tile_stored(1, first + kRowBytes, stride);
  }
  if (shape.rows > kRows) {
    _tile_stored(2, below, stride);
    if (shape.outputs > kOutputs) {
      _tile_stored(3, below + kRowBytes, stride);
    }
  }
}

// For sums of any shape.
template <typename Op, typename Between = NothingBetween>
[[gnu::always_inline]] inline void accumulate(const Operands& o, int64_t steps, const Shape& shape,
                                              const Fetched& fetched, const Between& between = {}) {
  const bool more_outputs = shape.outputs > kOutputs;
  const auto add =
      shape.rows > kRows
          ? (more_outputs ? addSteps<Op, true, true, Between> : addSteps<Op, true, false, Between>)
          : (more_outputs ? addSteps<Op, false, true, Between>
                          : addSteps<Op, false, false, Between>);
  add(o, steps, shape.bytes, fetched, between);
}

// Likewise, of the rest; that of the weight is there.
template <typename Op>
void accumulateRest(const Operands& o, const Steps& steps, const Shape& shape, Rest& rest) {
  rest.copySource(o, steps, shape.rows);
  asm volatile("" ::: "memory");  // what the intrinsics read
  accumulate<Op>(rest.operands(), 1, shape, {});
}

}  // namespace
}  // namespace llga::amx
