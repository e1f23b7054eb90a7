// Compiled for AVX-512 (F, BW, VL, VNNI) and AMX (8 bit).
#include "jit/onednn/runtime/simd_avx512.h"

#include "jit/onednn/runtime/band_kernel.h"
#include "jit/onednn/runtime/quantized_kernel.h"

namespace llga::quantized {
namespace {

struct Products {
  template <int sums>
  [[gnu::always_inline]] static void multiply() {
    if constexpr (sums == 0) {
      _tile_dpbusd(0, 4, 6);
    } else if constexpr (sums == 1) {
      _tile_dpbusd(1, 4, 7);
    } else if constexpr (sums == 2) {
      _tile_dpbusd(2, 5, 6);
    } else {
      _tile_dpbusd(3, 5, 7);
    }
  }
};

using RowSums = int32_t[kPiece];

// A panel of up to kPiece outputs, from `first` on, in registers of 16.
struct Panel {
  int64_t first;
  int64_t vectors;
};

template <typename R>
amx::Operands operandsOf(const ProductOf<R>& p, int64_t row, int64_t o) {
  return {p.source + row * p.source_stride, p.source_stride, amx::kRows * p.source_stride,
          p.weight + o * p.inputs,          kPiece,          kWidth * p.inputs};
}

// Sums of `rows` rows from `row` on; `rests`: of the panel's pairs of registers.
template <typename R, typename Between>
void multiplyTiles(const ProductOf<R>& p, int64_t row, int64_t rows, const Panel& panel,
                   const amx::Steps& steps, amx::Rest* rests, amx::Fetched fetched, RowSums* sums,
                   const Between& between) {
  for (int64_t v = 0; v < panel.vectors; v += 2, ++rests) {
    const auto o = panel.first + v * kWidth;
    const amx::Shape shape{rows, (panel.vectors - v < 2 ? 1 : 2) * kWidth, steps.bytes};
    const auto operands = operandsOf(p, row, o);
    amx::startWithZero(shape);
    amx::accumulate<Products>(operands, steps.count, shape, fetched, between);
    if (steps.rest != 0) {
      amx::accumulateRest<Products>(operands, steps, shape, *rests);
    }
    amx::store(&sums[0][v * kWidth], sizeof(RowSums), shape);
    fetched.from += fetched.lines * steps.count * kPiece;
  }
}

// What the sums of a panel come to, `stride` from row to row; `count`: of its outputs that there
// are.
template <typename R, int vectors, int64_t stride>
void finishRows(const ProductOf<R>& p, int64_t row, int64_t rows, int64_t o, int64_t count,
                const int32_t* sums) {
  const auto rescale = fromOutput(p.rescale, o);
  const Affine<vectors> affine(rescale);
  __m512i start[vectors];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    start[v] = load(rescale.start + v * kWidth);
  }
  for (int64_t r = 0; r < rows; ++r) {
    __m512i registers[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      registers[v] = _mm512_add_epi32(load(sums + r * stride + v * kWidth), start[v]);
    }
    const auto target = targetOf(p, row + r, o);
    if (rescale.function != Function::none) {
      finishSlowly(registers, vectors, rescale, target, count);
    } else {
      finish<vectors>(registers, affine, rescale, target, count);
    }
  }
}

// A block whose sums are stored.
template <typename R>
struct Open {
  using Finish = void (*)(const ProductOf<R>&, int64_t, int64_t, int64_t, int64_t, const int32_t*);

  amx::OpenRows rows;
  Finish finish;
  int64_t row;
  int64_t output;
  int64_t outputs;
  const RowSums* sums;

  // What follows the sums of the next rows; there are some.
  void finishSome(const ProductOf<R>& p, int64_t most) {
    const auto some = rows.take(most);
    finish(p, row + some.first, some.count, output, outputs, sums[some.first]);
  }
};

// The weights behind a panel are fetched while rows meet it, in blocks.
template <typename R>
amx::Fetched behind(const ProductOf<R>& p, const Panel& panel, int64_t blocks, int64_t steps) {
  const auto next = panel.first + panel.vectors * kWidth;
  const auto left = (p.outputs + kWidth - 1) / kWidth * kWidth - next + p.behind;
  const auto outputs = left < panel.vectors * kWidth ? left : panel.vectors * kWidth;
  const auto pairs = (panel.vectors + 1) / 2;
  const auto each = blocks * pairs * steps * kPiece;
  return {reinterpret_cast<const char*>(p.weight) + next * p.inputs,
          (outputs * p.inputs + each - 1) / each};
}

template <typename R>
void multiplyByTiles(const ProductOf<R>& p) {
  constexpr
      typename Open<R>::Finish kFinish[] = {finishRows<R, 1, kPiece>, finishRows<R, 2, kPiece>,
                                            finishRows<R, 3, kPiece>, finishRows<R, 4, kPiece>};
  const auto steps = amx::stepsOf(p.inputs);
  const auto vectors = (p.outputs + kWidth - 1) / kWidth;
  const auto blocks = (p.rows + amx::kMostRows - 1) / amx::kMostRows;
  // Twice: the sums of one block are rounded while those of the next are added up.
  alignas(kPiece) RowSums sums[2][amx::kMostRows];
  amx::Rest rests[kVectors / 2];
  amx::Configuration configuration;
  int turn = 0;
  Open<R> open{};
  int64_t rows_at_once = 0;
  const auto between = [&] {
    if (open.rows.any()) {
      open.finishSome(p, rows_at_once);
    }
  };
  for (int64_t v = 0; v < vectors; v += kVectors) {
    const Panel panel{v * kWidth, vectors - v < kVectors ? vectors - v : kVectors};
    const auto pairs = (panel.vectors + 1) / 2;
    for (int64_t i = 0; steps.rest != 0 && i < pairs; ++i) {
      rests[i].copyWeight(operandsOf(p, 0, panel.first + i * amx::kMostOutputs), steps,
                          panel.vectors - 2 * i < 2 ? amx::kOutputs : amx::kMostOutputs);
    }
    const auto left = p.outputs - panel.first;
    const auto count = left < panel.vectors * kWidth ? left : panel.vectors * kWidth;
    auto fetched = behind(p, panel, blocks, steps.count);
    rows_at_once = amx::rowsBetween(pairs * steps.count);
    for (int64_t row = 0; row < p.rows; row += amx::kMostRows) {
      const auto rows = p.rows - row < amx::kMostRows ? p.rows - row : amx::kMostRows;
      configuration.load({rows, amx::kMostOutputs, steps.bytes});
      multiplyTiles(p, row, rows, panel, steps, rests, fetched, sums[turn], between);
      fetched.from += fetched.lines * steps.count * kPiece * pairs;
      if (open.rows.any()) {
        open.finishSome(p, amx::kMostRows);
      }
      open = {amx::OpenRows(rows), kFinish[panel.vectors - 1], row, panel.first, count, sums[turn]};
      turn = 1 - turn;
    }
  }
  open.finishSome(p, amx::kMostRows);
}

// Of a panel for tiles of all outputs.
constexpr int kBandVectors = amx::kMostOutputs / kWidth;

template <typename R>
void multiplyBand(const ProductOf<R>& p, const amx::Band& band) {
  const amx::Panels panels{reinterpret_cast<const char*>(p.weight),
                           amx::kMostOutputs * p.inputs,
                           kPiece,
                           kWidth * p.inputs,
                           p.outputs,
                           p.behind};
  amx::multiplyBand<Products, int32_t>(
      band, panels,
      [&](int64_t row, int64_t rows, int64_t o, int64_t outputs, const int32_t* sums) {
        const auto finish = outputs > kWidth ? finishRows<R, kBandVectors, amx::kMostOutputs>
                                             : finishRows<R, 1, amx::kMostOutputs>;
        finish(p, row, rows, o, outputs, sums);
      });
}

}  // namespace

const Kernels amx{"amx_int8",
                  kTogether,
                  true,
                  multiplyByTiles<uint8_t>,
                  multiplyByTiles<float>,
                  find,
                  toPieces,
                  multiplyBand<uint8_t>,
                  multiplyBand<float>};

}  // namespace llga::quantized
