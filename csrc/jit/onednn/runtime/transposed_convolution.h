// A transposed convolution of float32 images with few output channels, as the last layer of a
// generator or of a network for super-resolution, and maybe an activation.
//
// oneDNN's kernels have an output channel for each number of a vector: with few of them most is
// empty. Here the inputs of each pixel are multiplied by all weights at once, one for each pixel
// and channel of the result under the window, and the products are added where they belong.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "jit/onednn/runtime/linear.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct TransposedConvolution {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal

  int64_t images;
  Pair size;  // of an image
  Pair result_size;
  int64_t channels;  // of an image
  int64_t outputs;   // channels of the result
  Pair window;
  Pair stride;
  Pair padding;  // at the top and on the left
  Rectifier rectifier;
  std::optional<Activation> activation;  // behind all else
  // From channel to channel of the result, whose rows are dense: channels last, or planes.
  bool planes = false;

  // Whether it is expected to be faster than oneDNN's kernel.
  bool pays() const;
  // What the pixels are multiplied by: (channel, window's row, window's column, output).
  Linear product() const;
  // Numbers of float32 that run() works with.
  int64_t scratch() const;

  struct Data {
    const float* source;  // dense, channels last
    const float* weight;  // as Linear::toPanels() made it
    const float* bias;    // by output, or null
    float* result;        // overlaps nothing else
    float* scratch;
  };
  void run(const Data& data) const;

 private:
  int64_t span() const { return window[1] * outputs; }  // numbers of a window's row
  // Pixels of a row of sums: what the windows of the image's row cover, and what the result has.
  int64_t width() const;
  void makeRow(const Data& data, int64_t image, int64_t y, float* sums) const;
  void write(const float* sums, int64_t image, int64_t y, float* result) const;
};

}  // namespace llga
