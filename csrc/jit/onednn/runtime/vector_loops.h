// Loops over numbers in memory that are compiled once for each instruction set: one thread, plain
// memory, no PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
//
// bfloat16 numbers are computed in float32 and rounded once. With AVX512_BF16, as in oneDNN's
// kernels, a result below 2^-126 is 0.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/bfloat16.h"

namespace llga::vector_loops {

// Rows of `columns` numbers, which are `from_stride` numbers apart, to rows that are `stride`
// apart.
struct Affine {
  int64_t rows;
  int64_t columns;
  int64_t from_stride;
  int64_t stride;
  const float* scale;  // by column
  const float* shift;
  float least;
};

// In 8 bit, max(a * scale[0] + b * scale[1] + shift, least).
struct SumOfBytes {
  float scale[2];
  float shift;
  float least;
};

// Windows over pixels. All strides in bytes.
struct Windows {
  static constexpr int64_t kMostRows = 16;
  static constexpr int64_t kMostBytes = 64;  // of a row
  static constexpr int64_t kMultiple = 64;   // of bytes are written

  int64_t pixels;
  int64_t stride;  // from pixel to pixel
  int64_t rows;
  int64_t row_stride;
  int64_t row_bytes;
  int64_t to_stride;  // from window to window
};

// The softmax of each column, or its logarithm. Strides from row to row; there is one at least.
struct SoftmaxOfColumns {
  int64_t rows;
  int64_t columns;
  int64_t from_stride;
  int64_t stride;
  bool logarithm;
};

// What is done to each row of numbers: max(f(x) * weight[.] + bias[.], least), NaN stays NaN.
struct RowNorm {
  enum class Kind {
    root_mean_square,  // f(x) = x / sqrt(mean of the squares + epsilon)
    centred,           // (x - mean) / sqrt(variance + epsilon)
    length,            // x / max(sqrt(sum of the squares), epsilon)
  };

  Kind kind;
  int64_t columns;
  float epsilon;
  const float* weight;  // by column; may be null
  const float* bias;    // likewise
  float least;
};

// What is computed of one, two or three numbers, and of `alpha` and `beta`. NaN and infinities give
// what they give in eager.
struct Pointwise {
  enum class Function {
    abs,
    add,
    clamp,  // to alpha .. beta
    divide,
    elu,  // below 0, alpha * (exp(a) - 1)
    exp,
    gelu,
    hard_sigmoid,  // alpha * a + beta, between 0 and 1
    hard_swish,
    leaky_relu,  // below 0, alpha * a
    maximum,
    minimum,
    multiply,
    relu,
    select,  // b where a is not 0, else c
    sigmoid,
    sqrt,
    square,
    subtract,
    tanh,
  };

  Function function;
  float alpha = 0;
  float beta = 0;
};

// What a number is made of: numbers at two places, and by how much of each.
struct Sample {
  int64_t at[2];
  float share[2];
};

template <typename T>
struct Functions {
  // to[i] = the activation of from[i]; `to` may be `from`.
  void (*activate)(Activation activation, const T* from, T* to, int64_t count);

  // to[c] = sum of from[.][c]; `stride` from row to row
  void (*sumRows)(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to);

  // to[c] = sum of the squares of from[.][c]
  void (*sumSquaresOfRows)(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to);

  // to[r] = sum of from[r][.], or of the squares
  void (*sumEachRow)(const T* from, int64_t rows, int64_t columns, float* to);
  void (*sumSquaresOfEachRow)(const T* from, int64_t rows, int64_t columns, float* to);

  // to[c] = the greatest, or the least, of from[.][c], or of from[r][.] to[r]; NaN if one is. Of
  // one row, or number, at least.
  void (*greatestOfRows)(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to);
  void (*leastOfRows)(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to);
  void (*greatestOfEachRow)(const T* from, int64_t rows, int64_t columns, float* to);
  void (*leastOfEachRow)(const T* from, int64_t rows, int64_t columns, float* to);

  // Of each column's numbers, or each row's, of which there is one at least: the mean, and the sum
  // of the squares of their differences from it. Rows: of so few numbers that these can be added.
  void (*momentsOfRows)(const T* from, int64_t rows, int64_t columns, float* mean, float* squares);
  void (*momentsOfEachRow)(const T* from, int64_t rows, int64_t columns, float* mean,
                           float* squares);

  // to[.][c] = from[.][c] * factor[c]; `to` may be `from`.
  void (*scaleRows)(const T* from, int64_t rows, int64_t columns, const float* factor, T* to);

  // to[.][c] = max(from[.][c] * scale[c] + shift[c], least); NaN stays NaN.
  void (*affineRows)(const T* from, T* to, const Affine& affine);

  // to[i][c] = from[samples[i]'s places][c], of each its share
  void (*blendPixels)(const T* from, const Sample* samples, int64_t count, int64_t channels,
                      float* to);
  // to[i] = a[i] and b[i], of each its share
  void (*blend)(const float* a, const float* b, const float* share, int64_t count, T* to);

  // `to` may be `from`, with the same stride.
  void (*softmaxOfColumns)(const T* from, T* to, const SoftmaxOfColumns& softmax);
};

// What there is for one instruction set.
struct Kernels {
  Functions<float> wide;
  Functions<Bfloat16> narrow;

  // Rows of `columns` numbers, one behind the other, to rows that are `stride` numbers apart.
  void (*narrowRows)(const float* from, int64_t rows, int64_t columns, Bfloat16* to,
                     int64_t stride);
  // And back: rows that are `stride` numbers apart to rows one behind the other.
  void (*widenRows)(const Bfloat16* from, int64_t rows, int64_t columns, int64_t stride, float* to);
  // Likewise of booleans, as 0 and 1.
  void (*widenRowsOfBytes)(const uint8_t* from, int64_t rows, int64_t columns, int64_t stride,
                           float* to);

  // to[r][.] = the softmax of from[r][.], or its logarithm; `to` may be `from`. Of one number at
  // least.
  void (*softmaxOfEachRow)(const float* from, int64_t rows, int64_t columns, bool logarithm,
                           float* to);

  // Of rows one behind the other; `to` may be `from`, if their numbers have the same size.
  void (*normalizeEachRow)(const float* from, int64_t rows, const RowNorm& norm, float* to);
  void (*normalizeEachRowToNarrow)(const float* from, int64_t rows, const RowNorm& norm,
                                   Bfloat16* to);
  void (*normalizeEachNarrowRow)(const Bfloat16* from, int64_t rows, const RowNorm& norm,
                                 Bfloat16* to);
  void (*normalizeEachNarrowRowToWide)(const Bfloat16* from, int64_t rows, const RowNorm& norm,
                                       float* to);

  // Two halves of a row, rotated by angles whose cosines and sines are there for each number:
  //   to[c] = from[c] * cos[c] - from[half + c] * sin[c]
  //   to[half + c] = from[half + c] * cos[half + c] + from[c] * sin[half + c]
  // `to` overlaps nothing else.
  void (*rotateRow)(const float* from, const float* cos, const float* sin, int64_t half, float* to);
  void (*rotateNarrowRow)(const Bfloat16* from, const float* cos, const float* sin, int64_t half,
                          float* to);
  void (*rotateNarrowRowByNarrow)(const Bfloat16* from, const Bfloat16* cos, const Bfloat16* sin,
                                  int64_t half, float* to);

  // In 8 bit, of the mean m and variance v of from[r][.]:
  //   to[r][.] = (from[r][.] - m) / sqrt(v + epsilon) * scale[.] + shift[.]
  void (*centreEachRow)(const float* from, int64_t rows, int64_t columns, float epsilon,
                        const float* scale, const float* shift, uint8_t* to);

  // Of 8-bit numbers, sumRows() and affineRows(). What is stored in 8 bit is cut off at 0 and 255,
  // and rounded to the nearest, of two to the even one; NaN becomes any of them.
  void (*sumRowsOfBytes)(const uint8_t* from, int64_t rows, int64_t columns, int64_t stride,
                         float* to);
  void (*affineRowsOfBytes)(const uint8_t* from, uint8_t* to, const Affine& affine);
  void (*affineRowsToBytes)(const float* from, uint8_t* to, const Affine& affine);
  void (*affineRowsFromBytes)(const uint8_t* from, float* to, const Affine& affine);

  // numbers[.][c] *= slope[c], of those that are not above 0; `stride` from row to row
  void (*slopeRows)(float* numbers, int64_t rows, int64_t columns, int64_t stride,
                    const float* slope);

  // to[.][c] = max(to[.][c] + from[.][c] * scale[c] + shift[c], least); NaN stays NaN.
  void (*addAffineRows)(const float* from, float* to, const Affine& affine);
  void (*addAffineRowsOfBytes)(const uint8_t* from, float* to, const Affine& affine);

  // to[i] = the greatest of from[.][i], of which there is one at least
  void (*maxOfBytes)(const uint8_t* const* from, int64_t count, int64_t bytes, uint8_t* to);

  // to[i] = from[i] * scale + shift, in 8 bit: as PyTorch quantizes; NaN becomes 255.
  void (*toBytes)(const float* from, int64_t count, float scale, float shift, uint8_t* to);

  // to[i] = the sum of a[i] and b[i]; `to` may be either.
  void (*sumOfBytes)(const uint8_t* a, const uint8_t* b, int64_t count, const SumOfBytes& sum,
                     uint8_t* to);

  // Of any numbers of 32 bits, or pairs of 16; strides from row to row.
  void (*copyRows)(const float* from, int64_t rows, int64_t columns, int64_t from_stride, float* to,
                   int64_t stride);

  // to[r][.] = from[r]; stride from one to the next
  void (*repeatInRows)(const float* from, int64_t rows, int64_t columns, int64_t from_stride,
                       float* to);

  // to[i] = the function of a[i], b[i] and c[i], as many as it has; `to` may be one of them.
  void (*compute)(const Pointwise& pointwise, const float* a, const float* b, const float* c,
                  int64_t count, float* to);

  // to[i] += from[i]
  void (*add)(const float* from, float* to, int64_t count);

  // Planes of `count` numbers, `stride` numbers apart, to pixels, one behind the other: `planes` is
  // 2, 3 or 4, a number has 1, 2 or 4 bytes.
  void (*interleave)(const void* from, int64_t planes, int64_t stride, int64_t count, int64_t bytes,
                     void* to);

  // The rows of each window, one behind the other, with zeros behind the last one. Null without
  // AVX-512.
  void (*gatherWindows)(const char* from, char* to, const Windows& windows);
};

extern const Kernels avx2;  // and FMA
extern const Kernels avx512;
extern const Kernels avx512_bf16;

// The best that the processor has and oneDNN was not told to do without. Needs AVX2 and FMA.
const Kernels& kernels();
template <typename T>
const Functions<T>& functions();

template <>
const Functions<float>& functions();
template <>
const Functions<Bfloat16>& functions();

}  // namespace llga::vector_loops
