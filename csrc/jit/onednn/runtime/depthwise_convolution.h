// A depthwise convolution of channels-last images that makes several channels of each one (Keras'
// depth multiplier; FastViT, MobileCLIP, where they halve the image), or whose window has gaps
// (dilation: networks for sound, segmentation) or is one long row (QuartzNet, Conformer), or that
// is small, or of bfloat16 by 5 x 5 or 7 x 7 pixels with AVX-512, and maybe ReLU or its like.
//
// oneDNN's depthwise kernels make one channel of each; for more it has those for groups, which
// compute one group after the other, vectors of which are nearly empty: 10 times as long. So it
// does where padding is wider than the window without gaps. Here every so many pixels are an image
// of their own, over which the window has none. Under long windows oneDNN's kernels reach a third
// of the speed: pixels of a power of two of channels push each other out of the caches, where here
// some channels of all pixels are copied together.
#pragma once

#include <array>
#include <cstdint>

#include "jit/onednn/runtime/depthwise_blocks.h"
#include "jit/onednn/runtime/rectifier.h"

namespace llga {

// Of float32, or of bfloat16, which is computed in float32. Immutable; any thread may call run(),
// which works with as many threads as PyTorch does.
struct DepthwiseConvolution {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal

  int64_t images;
  Pair size;  // of an image
  Pair result_size;
  int64_t channels;    // of an image
  int64_t multiplier;  // as many of the result for each
  Pair window;
  int64_t stride;  // both ways
  Pair dilation;   // horizontal: only with stride 1
  Pair padding;    // at the top and on the left
  Rectifier rectifier;
  float slope;  // of what is negative; 1 unless a leaky ReLU is behind
  bool narrow;  // images and result are of bfloat16

  // Whether there is a kernel for this processor and these numbers. run() needs one.
  bool isSupported() const;
  // Of the instruction sets, the one whose kernel runs.
  static const char* isa();

  // Dense channels-last memory. `weight`: (which of a channel's, row, column, channel); `bias`:
  // (which, channel), or null; `result` does not overlap the rest.
  void run(const void* source, const float* weight, const float* bias, void* result) const;

 private:
  struct Task;
  bool isLong() const { return depthwise::isLong(window[0], window[1]); }
  bool isGathered() const { return narrow || isLong(); }
  int64_t reach() const { return (window[0] - 1) * dilation[0] + 1; }  // rows under a window
  int64_t products() const;
  void runTask(const Task& task, float* memory) const;
  void runRow(depthwise::Row row, const Task& task) const;
};

}  // namespace llga
