// The arithmetic of 8-bit convolutions, on plain memory: sums of products of an unsigned number and
// a signed one, and what makes 8-bit numbers of the sums. No PyTorch, no oneDNN, no standard
// library here (gemm_blocks.h has the reason).
//
//   real number = scale * (number - zero point)
//
// Between the two convolutions of a block a pixel's channels lie in pieces of up to 64 bytes, which
// is what a register of AVX-512 holds, and in an order that costs no instruction to make or to
// read: there the byte 16*l + 4*v + i of a piece is its channel 16*v + 4*l + i; with AVX2 it is
// channel by channel.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/band_blocks.h"

namespace llga::quantized {

constexpr int64_t kWidth = 16;    // sums of a register, or of two
constexpr int64_t kPiece = 64;    // bytes of a piece
constexpr int64_t kVectors = 4;   // registers of sums that make a piece
constexpr int64_t kTogether = 4;  // products that one instruction adds to a sum

enum class Function { none, hardswish, silu, gelu, tanh_gelu, sigmoid };

// A function as pieces of cubics: of a u between i and i + 1,
//
//   ((terms[3][i] * u + terms[2][i]) * u + terms[1][i]) * u + terms[0][i]
//
// The first and the last one go on without end. In a quarter of the time of exp() and a division.
struct Curve {
  static constexpr int64_t kPieces = 32;
  static constexpr int64_t kTerms = 4;
};

// What follows a sum: an affine map, maybe an addition, then a function, and rounding (of two to
// the even one). Arrays by output, to the end of a register.
struct Rescale {
  const int32_t* start;  // what sums begin with: undoes the data's zero point
  // To real numbers, if the result is one; to the u of the curve, if there is one; else to numbers
  // of the result.
  const float* scale;
  const float* shift;
  float addend_scale;  // of an addend in 8 bit
  Function function;
  const float* curve;  // the function's, to numbers of the result, if that is of 8 bit
  // Without a curve: of the function's value, to numbers of the result.
  float result_scale;
  float result_shift;
  // Of the result: the greatest before it is rounded and after, the least after.
  float highest;
  uint8_t highest_rounded;
  uint8_t lowest;
  bool fits;  // whether what is rounded fits into 32 bits whatever it is, to be cut off after that
};

namespace {

// That of the outputs from this one on.
constexpr Rescale fromOutput(Rescale rescale, int64_t output) {
  rescale.start += output;
  rescale.scale += output;
  rescale.shift += output;
  return rescale;
}

}  // namespace

// A matrix product: rows of a source in 8 bit by a weight in 8 bit. R: uint8_t, or float for real
// numbers.
template <typename R>
struct ProductOf {
  int64_t rows;
  int64_t inputs;  // a multiple of 4
  int64_t outputs;
  const uint8_t* source;  // (row, input)
  int64_t source_stride;  // from row to row
  const int8_t* weight;   // (16 outputs, 4 inputs, output of the 16, input of the 4)
  Rescale rescale;
  const R* addend;  // like a result by rows, or null; may be the result
  R* result;
  int64_t result_stride;  // from row to row
  // Where the pieces of each row are, of at most 64 outputs; null: the result is by rows.
  const int32_t* places;
  // Outputs whose weights lie behind these, for what the thread will probably compute next.
  int64_t behind = 0;
};

// A row of the result of a depthwise convolution, at most 64 channels of it.
struct Row {
  static constexpr int kMostRows = 5;
  const uint8_t* source[kMostRows];  // pieces under the window of the first pixel, row by row
  int64_t pixels;
  int64_t channels;
  // (channels, rows, column, channel of those, row of those), rows that are summed at once and as
  // many channels as a register of sums has: 16 and 4, of 8 bit, or 8 and 2, of 16 bit.
  const void* weight;
  Rescale rescale;
  uint8_t* result;
  int64_t result_stride;  // from pixel to pixel
};

// What there is for one instruction set.
struct Kernels {
  const char* name;
  int64_t rows_together;  // of a depthwise convolution's window, summed at once: 4 or 2
  bool curves;            // whether functions are computed by their curves
  void (*multiply)(const ProductOf<uint8_t>& product);
  void (*multiplyToFloat)(const ProductOf<float>& product);
  // For windows of 3 x 3 or 5 x 5, with stride 1 or 2; nullptr for others.
  void (*(*find)(int64_t window, int64_t stride))(const Row&);
  // Pieces, one behind the other, of `channels` channels of pixels that lie in rows.
  void (*toPieces)(const uint8_t* source, int64_t stride, int64_t pixels, int64_t channels,
                   uint8_t* pieces);
  // Of pixels, by AMX, with `inputs` a multiple of a tile's bytes or as many as are under a window;
  // the source, its rows and its stride are the band's. Null without.
  void (*multiplyBand)(const ProductOf<uint8_t>& product, const amx::Band& band);
  void (*multiplyBandToFloat)(const ProductOf<float>& product, const amx::Band& band);
};

extern const Kernels avx2;  // and FMA
extern const Kernels avx512_vnni;
extern const Kernels amx;  // and AVX-512's for what is no product

}  // namespace llga::quantized
