// Compiled for AVX-512 (F, BW, VL, BF16) and AMX (bfloat16).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/amx_tiles.h"
#include "jit/onednn/runtime/gemm_kernel.h"

namespace llga::gemm {
namespace {

struct Products {
  template <int sums>
  [[gnu::always_inline]] static void multiply() {
    if constexpr (sums == 0) {
      _tile_dpbf16ps(0, 4, 6);
    } else if constexpr (sums == 1) {
      _tile_dpbf16ps(1, 4, 7);
    } else if constexpr (sums == 2) {
      _tile_dpbf16ps(2, 5, 6);
    } else {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

static_assert(kPanel == amx::kMostOutputs);

// What follows the sums of a block, to the result.
template <typename R>
void finishRows(const ProblemOf<Bfloat16, R>& p, int64_t row, const amx::Shape& shape, int64_t o,
                const float* sums) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    const auto at = (row + r) * p.outputs + o;
    for (int64_t i = 0; i < shape.outputs; i += kWidth) {
      const auto left = shape.outputs - i;
      auto sum = load(sums + r * kPanel + i);
      if (left >= kWidth) {
        if (p.addend != nullptr) {
          sum = Simd::add(sum, load(p.addend + at + i));
        }
        store(p.result + at + i, rectified(sum, p.rectifier));
      } else {
        if (p.addend != nullptr) {
          sum = Simd::add(sum, loadFirst(p.addend + at + i, left));
        }
        storeFirst(p.result + at + i, rectified(sum, p.rectifier), left);
      }
    }
  }
}

// Whether sums are the result as they are.
bool isPlain(const ProblemOf<Bfloat16, Bfloat16>& /*problem*/) { return false; }
bool isPlain(const ProblemOf<Bfloat16, float>& problem) {
  return problem.addend == nullptr && problem.rectifier == Rectifier::none;
}

template <typename R>
void runByTiles(const ProblemOf<Bfloat16, R>& p, const Task& task) {
  constexpr int64_t kPair = 2 * sizeof(Bfloat16);
  if (p.pieces != 1) {
    runTask(p, task);
    return;
  }
  const auto steps = amx::stepsOf(p.inputs * int64_t{sizeof(Bfloat16)});
  const auto stride = p.source_stride * int64_t{sizeof(Bfloat16)};
  amx::Rest rest;
  const auto last = task.first_output + task.outputs;
  alignas(amx::kRowBytes) float sums[2][amx::kMostRows * kPanel];
  int turn = 0;
  const auto end = task.first_row + task.rows;
  const auto whole = end - task.rows % amx::kMostRows;
  // Blocks of all rows of a tile and the rest, by panels and what there is of the last one: each of
  // the four has a configuration.
  const auto last_panel = last - (last - task.first_output) % kPanel;
  const int64_t row_ends[] = {whole, end};
  const int64_t output_ends[] = {last_panel, last};
  auto first_row = task.first_row;
  for (const auto row_end : row_ends) {
    auto first_output = task.first_output;
    for (const auto output_end : output_ends) {
      if (first_row == row_end || first_output == output_end) {
        continue;
      }
      const auto left = output_end - first_output;
      const amx::Shape shape{
          row_end - first_row < amx::kMostRows ? row_end - first_row : amx::kMostRows,
          left < kPanel ? left : kPanel, steps.bytes};
      const amx::Configuration configuration(shape);
      for (auto o = first_output; o < output_end; o += kPanel) {
        amx::Operands operands{nullptr, stride, p.weight + o / kPanel * p.weight_stride,
                               kPanel * kPair, kWidth * kPair};
        if (steps.rest != 0) {
          rest.copyWeight(operands, steps, shape.outputs);
        }
        for (auto row = first_row; row < row_end; row += shape.rows) {
          if (p.bias != nullptr) {
            amx::start(p.bias + o, 0, shape);
          } else {
            amx::startWithZero(shape);
          }
          operands.source = p.source + row * p.source_stride;
          amx::accumulate<Products>(operands, steps, shape, rest);
          if (isPlain(p)) {
            amx::store(p.result + row * p.outputs + o, p.outputs * int64_t{sizeof(R)}, shape);
            continue;
          }
          auto* block = sums[turn];
          turn = 1 - turn;
          amx::store(block, kPanel * sizeof(float), shape);
          finishRows(p, row, shape, o, block);
        }
      }
      first_output = output_end;
    }
    first_row = row_end;
  }
  _tile_release();
}

}  // namespace

const NarrowKernels amx{kPanel, runByTiles<float>, runByTiles<Bfloat16>};

}  // namespace llga::gemm
