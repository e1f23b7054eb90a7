// Products of a band (band_blocks.h) by AMX. Included by sources that are compiled for it.
#pragma once

#include "jit/onednn/runtime/amx_tiles.h"

namespace llga::amx {
namespace {

// A weight in panels of kMostOutputs outputs. All strides in bytes.
struct Panels {
  const char* weight;
  int64_t panel_stride;
  int64_t unit_stride;
  int64_t next_outputs;  // from 16 outputs to the next ones
  int64_t outputs;
  int64_t behind;  // outputs whose weights lie behind these
};

// Calls finish(row, rows, output, outputs, sums) for blocks of up to kRows rows, which are the
// band's pixels, by kMostOutputs outputs, each once; Op is for addSteps.
//
// All tiles of a line have the same size: the last one begins earlier if need be, and what it
// computes again is dropped. What follows the sums of one block is computed while those of the next
// are added up.
template <typename Op, typename Sum, typename Finish>
class BandProduct {
 public:
  BandProduct(const Band& band, const Panels& panels, const Finish& finish)
      : band_(band),
        panels_(panels),
        finish_(finish),
        tiles_((band.width + kRows - 1) / kRows),
        rows_((band.width + tiles_ - 1) / tiles_),
        count_(band.lines * tiles_) {
    configuration_.loadAlike(rows_, band.step_bytes);
  }

  void run() {
    constexpr int64_t kCache = 1 << 19;  // bytes that stay in the second level beside a band
    const auto steps = band_.pieces * band_.steps;
    const auto panel_bytes = steps * band_.step_bytes * kMostOutputs;
    if (panels_.outputs * panel_bytes / kMostOutputs <= kCache) {
      // A few pixels stay in the first level, and the result is written in its order.
      for (int64_t tile = 0; tile < count_; tile += 2) {
        for (int64_t o = 0; o < panels_.outputs; o += kMostOutputs) {
          multiply(tile, o, {});
        }
      }
      return finish();
    }
    // All rows meet a panel, while the next one is fetched.
    for (int64_t o = 0; o < panels_.outputs; o += kMostOutputs) {
      Fetched fetched{panels_.weight + (o / kMostOutputs + 1) * panels_.panel_stride, 0};
      if (panels_.outputs - o + panels_.behind > kMostOutputs) {
        const auto each = (count_ + 1) / 2 * steps;
        fetched.lines = (panel_bytes / kRowBytes + each - 1) / each;
      }
      for (int64_t tile = 0; tile < count_; tile += 2) {
        multiply(tile, o, fetched);
        fetched.from += fetched.lines * steps * kRowBytes;
      }
    }
    finish();
  }

 private:
  // Rows of a tile that the one before it has.
  int64_t again(int64_t tile) const {
    return (tile + 1) % tiles_ == 0 ? tiles_ * rows_ - band_.width : 0;
  }

  const char* sourceOf(int64_t tile) const {
    return band_.source + tile / tiles_ * band_.line_stride +
           (tile % tiles_ * rows_ - again(tile)) * band_.pixel_stride;
  }

  // Two tiles by a panel of outputs.
  void multiply(int64_t tile, int64_t o, Fetched fetched) {
    const auto left = panels_.outputs - o;
    const bool two = tile + 1 < count_;
    const Shape shape{two ? kMostRows : kRows, left < kMostOutputs ? left : kMostOutputs,
                      band_.step_bytes};
    const auto* source = sourceOf(tile);
    const auto* weight = panels_.weight + o / kMostOutputs * panels_.panel_stride;
    const auto next_rows = two ? sourceOf(tile + 1) - source : 0;
    const auto piece_units = band_.steps * band_.step_bytes / kUnit;
    startWithZero(shape);
    for (int64_t piece = 0; piece < band_.pieces; ++piece) {
      accumulate<Op>({source, band_.pixel_stride, next_rows, weight, panels_.unit_stride,
                      panels_.next_outputs},
                     band_.steps, shape, fetched);
      source += band_.piece_stride;
      weight += piece_units * panels_.unit_stride;
      fetched.from += fetched.lines * band_.steps * kRowBytes;
    }
    finish();
    store(sums_, kMostOutputs * sizeof(Sum), shape);
    open_ = {tile, two ? 2 : 1, o, shape.outputs};
  }

  // What follows the sums that are stored.
  void finish() {
    const auto* sums = sums_;
    for (auto t = open_.tile; t < open_.tile + open_.tiles; ++t, sums += kRows * kMostOutputs) {
      const auto known = again(t);
      finishRows(t / tiles_ * band_.width + t % tiles_ * rows_, rows_ - known,
                 sums + known * kMostOutputs);
    }
  }

  // Of pixels of lines that hang together, without those between the lines.
  void finishRows(int64_t pixel, int64_t rows, const Sum* sums) const {
    if (band_.gap == 0) {
      return finish_(pixel, rows, open_.output, open_.outputs, sums);
    }
    const auto pitch = band_.line + band_.gap;
    for (const auto end = pixel + rows; pixel < end;) {
      const auto line = pixel / pitch;
      const auto column = pixel % pitch;
      const auto left = line * pitch + band_.line - pixel;  // of the line
      const auto count = left < end - pixel ? left : end - pixel;
      if (count > 0) {
        finish_(line * band_.line + column, count, open_.output, open_.outputs, sums);
      }
      const auto next = count > 0 ? count : pitch - column;
      pixel += next;
      sums += next * kMostOutputs;
    }
  }

  // A block whose sums are stored.
  struct Open {
    int64_t tile;
    int64_t tiles;
    int64_t output;
    int64_t outputs;
  };

  const Band& band_;
  const Panels& panels_;
  const Finish& finish_;
  int64_t tiles_;  // of a line
  int64_t rows_;   // of a tile
  int64_t count_;  // tiles
  Open open_{};
  Configuration configuration_;
  alignas(kRowBytes) Sum sums_[kMostRows * kMostOutputs];
};

template <typename Op, typename Sum, typename Finish>
void multiplyBand(const Band& band, const Panels& panels, const Finish& finish) {
  BandProduct<Op, Sum, Finish>(band, panels, finish).run();
}

}  // namespace
}  // namespace llga::amx
