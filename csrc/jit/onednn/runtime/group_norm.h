// Group norms of float32 or bfloat16 data, which are instance norms with a group for each channel,
// and an activation behind them; norms of rows; layer norms that are rounded to 8 bit.
//
// oneDNN has none before 3.6, and PyTorch's take the activation apart. Means and variances are
// joined from those of parts, without sums of squares of the numbers, which lose digits where the
// mean is large.
#pragma once

#include <cstdint>
#include <optional>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct GroupNorm {
  enum class Type { float32, bfloat16 };

  Type type;
  int64_t images;
  int64_t channels;
  int64_t pixels;
  int64_t groups;
  bool channels_last;  // (image, pixel, channel) in memory, else (image, channel, pixel)
  double epsilon;
  float least;  // no result is less: 0 is ReLU, minus infinity nothing
  std::optional<Activation> activation;

  // `weight` and `bias`: by channel; each may be null. `to` may be `from`.
  void run(const void* from, const float* weight, const float* bias, void* to) const;

 private:
  template <typename T>
  class Image;

  template <typename T>
  void runAs(const T* from, const float* weight, const float* bias, T* to) const;
};

// Norms of rows of numbers, one behind the other, and an activation behind them: what RowNorm
// (vector_loops.h) says. Immutable; any thread may call run(), which works with as many threads as
// PyTorch does. Needs AVX2 and FMA.
struct NormOfRows {
  vector_loops::RowNorm::Kind kind;
  int64_t rows;
  int64_t columns;
  float epsilon;
  bool from_narrow;  // numbers of bfloat16, not of float32
  bool to_narrow;
  float least;  // no result is less: 0 is ReLU, minus infinity nothing
  std::optional<Activation> activation;

  // `weight` and `bias`: by column; each may be null. `to` may be `from`, if their types are one.
  void run(const void* from, const float* weight, const float* bias, void* to) const;

 private:
  template <typename T, typename R>
  void runAs(const T* from, const float* weight, const float* bias, R* to) const;
};

// Layer norms of rows of float32 numbers, one behind the other, in 8 bit: of the mean m and
// variance v of from[r][.]
//
//   to[r][.] = (from[r][.] - m) / sqrt(v + epsilon) * scale[.] + shift[.]
//
// cut off at 0 and 255, and rounded to the nearest, of two to the even one; NaN becomes any number.
// Likewise.
void layerNormRowsToBytes(const float* from, int64_t rows, int64_t columns, float epsilon,
                          const float* scale, const float* shift, uint8_t* to);

}  // namespace llga
