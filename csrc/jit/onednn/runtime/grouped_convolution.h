// Convolution of images in groups of 4 or 8 channels, and ReLU, for channels-last float32 data on
// processors with AVX2 (ResNeXt, RegNet).
//
// oneDNN's kernels for AVX2 take longer there: several times as long for groups of 4, for which
// they have none; for groups of 8 1.4 to 1.9 times in 3.2, 1.0 to 1.7 times in 3.7, and more where
// pixels lie a power of two apart.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace llga {

// Needs AVX2 and FMA. Immutable; any thread may call run(), which works with as many threads as
// PyTorch does.
struct GroupedConvolution {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal

  int64_t images;
  Pair size;  // of an image
  Pair result_size;
  Pair kernel;
  Pair stride;
  Pair dilation;
  Pair padding;  // at the top and on the left
  int64_t groups;
  int64_t channels;  // of a group, of image and result
  bool relu;

  // Whether there is a kernel.
  bool isSupported() const;

  // Channels are computed in blocks of 8: a group, or two groups of 4. The weight, seen as (blocks,
  // outputs of a block, inputs of a group, kernel height, kernel width), has these strides.
  std::vector<int64_t> weightSizes() const;
  std::vector<int64_t> weightStrides() const;

  // Dense channels-last memory; `bias` may be null; `result` does not overlap the rest.
  void run(const float* source, const float* weight, const float* bias, float* result) const;
};

}  // namespace llga
