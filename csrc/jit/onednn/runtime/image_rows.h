// Rows of a float32 image, brought into the order of channels last, with zeros around the image:
// what a convolution reads as rows of a matrix.
#pragma once

#include <array>
#include <cstdint>

namespace llga {

// Immutable; any thread may call copy().
struct ImageRows {
  static constexpr int64_t kFewPlanes = 4;  // that lie apart and are brought together quickly

  std::array<int64_t, 2> size;  // of the image: rows, columns
  int64_t channels;
  std::array<int64_t, 4> strides;  // from image to image, channel, row and column
  int64_t padding;                 // columns on the left; if negative, the image's are left out
  int64_t width;                   // columns that are written

  // Writes `rows` of the image from `top` on, which may be outside, and of each the columns from
  // the padding's first on. Needs AVX2.
  void copy(const float* image, int64_t top, int64_t rows, float* to) const;
};

}  // namespace llga
