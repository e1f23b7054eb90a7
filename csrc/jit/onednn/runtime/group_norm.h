// Group norms of float32 or bfloat16 data, which are instance norms with a group for each channel,
// and an activation behind them; root-mean-square norms; layer norms that are rounded to 8 bit.
//
// oneDNN has none before 3.6, and PyTorch's take the activation apart. Means and variances are
// joined from those of parts, without sums of squares of the numbers, which lose digits where the
// mean is large.
#pragma once

#include <cstdint>
#include <optional>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/bfloat16.h"

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

// Root-mean-square norms of rows of numbers, one behind the other:
//
//   to[r][.] = from[r][.] / sqrt(mean of the squares of from[r][.] + epsilon) * weight[.]
//
// `weight` may be null, `to` may be `from`. Any thread may call; works with as many threads as
// PyTorch does. Needs AVX2 and FMA.
void rmsNormRows(const float* from, int64_t rows, int64_t columns, float epsilon,
                 const float* weight, float* to);
void rmsNormRows(const Bfloat16* from, int64_t rows, int64_t columns, float epsilon,
                 const float* weight, Bfloat16* to);
void rmsNormRows(const float* from, int64_t rows, int64_t columns, float epsilon,
                 const float* weight, Bfloat16* to);

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
