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
        count_(band.lines * tiles_),
        results_(resultsOf(band)),
        rows_at_once_(rowsBetween(band.under.allSteps())) {
    configuration_.loadAlike(rows_, band.under.step_bytes);
  }

  void run() {
    constexpr int64_t kCache = 1 << 19;  // bytes that stay in the second level beside a band
    const auto& under = band_.under;
    const auto steps = under.allSteps();
    const auto panel_bytes = steps * under.step_bytes * kMostOutputs;
    if (panels_.outputs * panel_bytes / kMostOutputs <= kCache) {
      // A few pixels stay in the first level, and the result is written in its order.
      for (int64_t tile = 0; tile < count_; tile += 2) {
        const auto pair = pairFrom(tile);
        for (int64_t o = 0; o < panels_.outputs; o += kMostOutputs) {
          multiply(pair, o, {});
        }
      }
      return finish();
    }
    // All rows meet a panel, while the next one is fetched.
    for (int64_t o = 0; o < panels_.outputs; o += kMostOutputs) {
      Fetched fetched{firstWeight(o + kMostOutputs), 0};
      if (panels_.outputs - o + panels_.behind > kMostOutputs) {
        const auto each = (count_ + 1) / 2 * steps;
        fetched.lines = (panel_bytes / kRowBytes + each - 1) / each;
      }
      for (int64_t tile = 0; tile < count_; tile += 2) {
        multiply(pairFrom(tile), o, fetched);
        fetched.from += fetched.lines * steps * kRowBytes;
      }
    }
    finish();
  }

 private:
  struct Tile {
    const char* source;
    int64_t result;  // the first one of its line
    int64_t pixel;   // of the line
    int64_t known;   // rows that the tile before it has
  };

  struct Pair {
    Tile tiles[2];
    int64_t count;  // of them
  };

  Tile at(int64_t tile) const {
    const auto line = tile / tiles_;
    const auto of_line = tile - line * tiles_;
    const auto known = of_line + 1 == tiles_ ? tiles_ * rows_ - band_.width : 0;
    const auto pixel = of_line * rows_ - known;
    return {band_.source + line * band_.line_stride + pixel * band_.pixel_stride, line * results_,
            pixel + known, known};
  }

  Pair pairFrom(int64_t tile) const {
    return tile + 1 < count_ ? Pair{{at(tile), at(tile + 1)}, 2} : Pair{{at(tile), {}}, 1};
  }

  // Of a panel, what meets the first piece.
  const char* firstWeight(int64_t o) const {
    return panels_.weight + o / kMostOutputs * panels_.panel_stride +
           band_.under.weight_before / kUnit * panels_.unit_stride;
  }

  // Two tiles by a panel of outputs.
  void multiply(const Pair& pair, int64_t o, Fetched fetched) {
    const auto left = panels_.outputs - o;
    const auto& under = band_.under;
    const bool two = pair.count == 2;
    const Shape shape{two ? kMostRows : kRows, left < kMostOutputs ? left : kMostOutputs,
                      under.step_bytes};
    const auto* first = pair.tiles[0].source;
    const auto next_rows = two ? pair.tiles[1].source - first : 0;
    const auto* first_weight = firstWeight(o);
    const auto weight_piece = under.steps * under.step_bytes / kUnit * panels_.unit_stride;
    const auto weight_row = under.weight_row / kUnit * panels_.unit_stride;
    startWithZero(shape);
    const auto between = [this] {
      if (open_.rows.any()) {
        finishSome();
      }
    };
    for (int64_t row = 0; row < under.rows; ++row) {
      const auto* source = first + row * under.row_stride;
      const auto* weight = first_weight + row * weight_row;
      for (int64_t column = 0; column < under.columns; ++column) {
        accumulate<Op>({source, band_.pixel_stride, next_rows, weight, panels_.unit_stride,
                        panels_.next_outputs},
                       under.steps, shape, fetched, between);
        source += under.column_stride;
        weight += weight_piece;
        fetched.from += fetched.lines * under.steps * kRowBytes;
      }
    }
    finish();
    store(sums_, kMostOutputs * sizeof(Sum), shape);
    open_ = {OpenRows(rows_, pair.tiles[0].known), pair, 0, o, shape.outputs};
  }

  // From a line to the next one.
  static int64_t resultsOf(const Band& band) {
    const auto lines = band.line == 0 ? 1 : (band.width + band.gap) / (band.line + band.gap);
    return lines * resultLine(band);
  }

  static int64_t resultLine(const Band& band) {
    return band.result_line != 0 ? band.result_line : band.line != 0 ? band.line : band.width;
  }

  // What follows the sums that are stored, of the next rows.
  void finishSome() {
    const auto& tile = open_.pair.tiles[open_.tile];
    const auto some = open_.rows.take(rows_at_once_);
    finishRows(tile.result, tile.pixel + some.first - tile.known, some.count,
               sums_ + (open_.tile * kRows + some.first) * kMostOutputs);
    if (!open_.rows.any() && ++open_.tile < open_.pair.count) {
      open_.rows = OpenRows(rows_, open_.pair.tiles[open_.tile].known);
    }
  }

  void finish() {
    while (open_.rows.any()) {
      finishSome();
    }
  }

  // Of pixels of a line, whose first result is this one. What hangs together is divided into lines
  // of the image, without what is between them.
  void finishRows(int64_t result, int64_t pixel, int64_t rows, const Sum* sums) const {
    if (band_.line == 0 || (band_.gap == 0 && band_.result_line == 0)) {
      return finish_(result + pixel, rows, open_.output, open_.outputs, sums);
    }
    const auto pitch = band_.line + band_.gap;
    for (const auto end = pixel + rows; pixel < end;) {
      const auto line = pixel / pitch;
      const auto column = pixel % pitch;
      const auto left = line * pitch + band_.line - pixel;  // of the line
      const auto count = left < end - pixel ? left : end - pixel;
      if (count > 0) {
        finish_(result + line * resultLine(band_) + column, count, open_.output, open_.outputs,
                sums);
      }
      const auto next = count > 0 ? count : pitch - column;
      pixel += next;
      sums += next * kMostOutputs;
    }
  }

  // A block whose sums are stored.
  struct Open {
    OpenRows rows;  // of the tile, of the pair, that is the next one
    Pair pair;
    int64_t tile;
    int64_t output;
    int64_t outputs;
  };

  const Band& band_;
  const Panels& panels_;
  const Finish& finish_;
  int64_t tiles_;         // of a line
  int64_t rows_;          // of a tile
  int64_t count_;         // tiles
  int64_t results_;       // from line to line
  int64_t rows_at_once_;  // that are finished
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
