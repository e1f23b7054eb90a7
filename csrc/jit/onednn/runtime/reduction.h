// Means, sums, 2-norms, variances, greatest and least numbers over rows of float32 or bfloat16:
// over the pixels of images that are channels last, over the tokens of a text, over the numbers of
// a token. Means of 8-bit numbers over rows of more than one.
//
// oneDNN's reductions bring images into planes first, which takes ten times as long as the sums, or
// have reference kernels.
#pragma once

#include <cstdint>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct Reduction {
  enum class Type { float32, bfloat16, uint8 };
  // norm: the root of the sum of squares; greatest, least: NaN if one number is; deviation: the
  // root of the variance
  enum class Kind { mean, sum, norm, greatest, least, variance, deviation };

  Type type;
  Kind kind;
  int64_t images;
  int64_t rows;
  int64_t columns;
  // From 8-bit numbers to those of the result.
  float scale = 1;
  float shift = 0;
  // By how much less than the rows the squares of a variance are divided.
  double correction = 1;

  // (image, row, column) to (image, column). With one column the rows are numbers side by side.
  // Throws StepError where a variance is not finite: its squares may have been too large for
  // float32; then `to` holds anything.
  void run(const void* from, void* to) const;

 private:
  template <typename T>
  void runAs(const T* from, T* to) const;
  template <typename T>
  void runVariance(const T* from, T* to) const;
  template <typename T>
  void runVarianceInside(const T* from, T* to) const;
  void runBytes(const uint8_t* from, uint8_t* to) const;
  template <typename T>
  void runInside(const T* from, T* to) const;
  template <typename T>
  void runAcross(const T* from, T* to) const;
  template <typename T>
  auto loops() const;  // over rows, and over each row
  float combined(float a, float b) const;
  void finish(float* sums, int64_t count) const;
  float ofSquares(double squares) const;  // the variance, or its root; StepError: not finite
};

// How many threads are worth it for so many numbers.
int64_t reductionParts(int64_t rows, int64_t columns);

// The means of one image's columns, by this many threads. `mean`: room for the columns that many
// times, of which the first ones become the result.
template <typename T>
void meanOverRows(const T* image, int64_t rows, int64_t columns, int64_t parts, float* mean);

}  // namespace llga
