// Included by one source for each instruction set, behind its Simd:
//
//   V, kWidth, kRows; load, store, broadcast, zero, add, fmadd (a*b+c), max (b where one is NaN)
//
// A tile of kRows x kPanel results stays in registers for all of its inputs; the source is read in
// place. The weights of a panel, that the second level of cache holds, meet all rows of a block
// before those of another do; meanwhile the next panel is fetched from memory. Copies of the source
// made nothing faster.
#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga::gemm {
namespace {

using V = Simd::V;
constexpr int64_t kWidth = Simd::kWidth;
constexpr int64_t kPanel = 2 * kWidth;
constexpr int kRows = Simd::kRows;
constexpr int64_t kBlock = 192;  // rows
constexpr int64_t kDepth = 256;  // inputs that are added up alone: one long sum would round more

// Tiles of the same outputs, one below the other.
struct Column {
  const float* source;
  int64_t source_stride;  // from row to row
  const float* weight;
  const float* bias;    // or null
  const float* addend;  // or null
  float* result;
  int64_t inputs;
  int64_t stride;     // from row to row of the result and the addend
  const float* next;  // a panel to fetch, or null
  bool relu;
};

template <int rows>
void multiply(const Column& c, int64_t tiles) {
  const auto* start = c.source;
  const auto* addend = c.addend;
  auto* result = c.result;
  const auto* next = c.next;
  const auto* next_end = next != nullptr ? next + c.inputs * kPanel : nullptr;
  const auto lines = c.inputs / (tiles * ((c.inputs + kDepth - 1) / kDepth)) + 1;
  for (; tiles > 0; --tiles) {
    V totals[rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __builtin_prefetch(result + r * c.stride + v * (kPanel - 1), 1);
        totals[r][v] = c.bias != nullptr ? Simd::load(c.bias + v * kWidth) : Simd::zero();
      }
    }
    const auto* source = start;
    const auto* weight = c.weight;
    for (int64_t first = 0; first < c.inputs; first += kDepth) {
      V sums[rows][2];
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        sums[r][0] = sums[r][1] = Simd::zero();
      }
      for (int64_t i = 0; i < lines && next < next_end; ++i) {
        __builtin_prefetch(next, 0, 2);
        next += kPanel;
      }
      const auto depth = c.inputs - first < kDepth ? c.inputs - first : kDepth;
#pragma GCC unroll 1
      for (int64_t i = 0; i < depth; ++i) {  // unrolled, sums would be moved to memory
        const auto left = Simd::load(weight);
        const auto right = Simd::load(weight + kWidth);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          const auto number = Simd::broadcast(source[r * c.source_stride]);
          sums[r][0] = Simd::fmadd(number, left, sums[r][0]);
          sums[r][1] = Simd::fmadd(number, right, sums[r][1]);
        }
        ++source;
        weight += kPanel;
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        totals[r][0] = Simd::add(totals[r][0], sums[r][0]);
        totals[r][1] = Simd::add(totals[r][1], sums[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        auto sum = totals[r][v];
        const auto at = r * c.stride + v * kWidth;
        if (addend != nullptr) {
          sum = Simd::add(sum, Simd::load(addend + at));
        }
        if (c.relu) {
          sum = Simd::max(Simd::zero(), sum);
        }
        Simd::store(result + at, sum);
      }
    }
    start += rows * c.source_stride;
    result += rows * c.stride;
    if (addend != nullptr) {
      addend += rows * c.stride;
    }
  }
}

using Multiply = void (*)(const Column&, int64_t);

template <int count, int... rows>
struct UpTo : UpTo<count - 1, count, rows...> {};

template <int... rows>
struct UpTo<0, rows...> {
  static constexpr Multiply kernels[] = {multiply<rows>...};
};

// A column of the last `outputs`, fewer than kPanel: by way of copies with whole panels.
void multiplyLast(Multiply kernel, Column c, int64_t rows, int64_t tiles, int64_t outputs) {
  float bias[kPanel] = {};
  float addend[kRows * kPanel] = {};
  float result[kRows * kPanel];
  auto last = c;
  last.stride = kPanel;
  last.result = result;
  if (c.bias != nullptr) {
    for (int64_t o = 0; o < outputs; ++o) {
      bias[o] = c.bias[o];
    }
    last.bias = bias;
  }
  for (int64_t first = 0; first < rows * tiles; first += rows) {
    if (c.addend != nullptr) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < outputs; ++o) {
          addend[r * kPanel + o] = c.addend[(first + r) * c.stride + o];
        }
      }
      last.addend = addend;
    }
    last.source = c.source + first * c.source_stride;
    kernel(last, 1);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < outputs; ++o) {
        c.result[(first + r) * c.stride + o] = result[r * kPanel + o];
      }
    }
  }
}

// `tiles` of `rows` rows from `row` on, by the outputs of the panel from `o` on, `outputs` of them.
void runRows(const Problem& p, int64_t row, int64_t rows, int64_t tiles, int64_t o, int64_t outputs,
             const float* next) {
  const auto kernel = UpTo<kRows>::kernels[rows - 1];
  const auto at = row * p.outputs + o;
  const Column column{p.source + row * p.source_stride,
                      p.source_stride,
                      p.weight + o / kPanel * p.weight_stride,
                      p.bias != nullptr ? p.bias + o : nullptr,
                      p.addend != nullptr ? p.addend + at : nullptr,
                      p.result + at,
                      p.inputs,
                      p.outputs,
                      next,
                      p.relu};
  if (outputs < kPanel) {
    multiplyLast(kernel, column, rows, tiles, outputs);
  } else {
    kernel(column, tiles);
  }
}

void runTask(const Problem& p, const Task& task) {
  const auto blocks = (task.rows + kBlock - 1) / kBlock;
  for (int64_t block = 0; block < blocks; ++block) {  // of nearly the same size, as their tiles
    const auto row = task.first_row + task.rows * block / blocks;
    const auto rows = task.first_row + task.rows * (block + 1) / blocks - row;
    const auto tiles = (rows + kRows - 1) / kRows;
    const auto size = rows / tiles;
    const auto larger = rows % tiles;
    // Panel by panel, so that the weights of each are read from memory once.
    const auto end = task.first_output + task.outputs;
    for (auto o = task.first_output; o < end; o += kPanel) {
      const auto outputs = end - o < kPanel ? end - o : kPanel;
      const bool more = block == 0 && o + kPanel < end;  // later blocks find them in a cache
      const auto* next = more ? p.weight + (o / kPanel + 1) * p.weight_stride : nullptr;
      if (larger > 0) {
        runRows(p, row, size + 1, larger, o, outputs, next);
        next = nullptr;
      }
      runRows(p, row + larger * (size + 1), size, tiles - larger, o, outputs, next);
    }
  }
}

}  // namespace
}  // namespace llga::gemm
