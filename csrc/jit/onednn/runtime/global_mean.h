// Means over all pixels of images that are channels last, of float32 or bfloat16 data.
//
// oneDNN's reductions bring such images into planes first, which takes ten times as long as the
// sums.
#pragma once

#include <cstdint>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct GlobalMean {
  enum class Type { float32, bfloat16 };

  Type type;
  int64_t images;
  int64_t pixels;
  int64_t channels;

  // (image, pixel, channel) to (image, channel).
  void run(const void* from, void* to) const;

 private:
  template <typename T>
  void runAs(const T* from, T* to) const;
};

// How many threads are worth it for one image.
int64_t meanParts(int64_t pixels, int64_t channels);

// Those of one image, by this many threads. `mean`: room for the channels that many times, of which
// the first ones become the result.
template <typename T>
void meanOverPixels(const T* image, int64_t pixels, int64_t channels, int64_t parts, float* mean);

}  // namespace llga
