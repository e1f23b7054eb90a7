// Convolution of images in groups of 4, 8 or 16 channels, and ReLU, for channels-last data: float32
// on processors with AVX2, bfloat16 on those with AMX (ResNeXt, RegNet).
//
// oneDNN's kernels for AVX2 take longer there: several times as long for groups of 4, for which
// they have none; for groups of 8 1.4 to 1.9 times in 3.2, 1.0 to 1.7 times in 3.7, and more where
// pixels lie a power of two apart. In bfloat16 it has none that uses AMX.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "jit/onednn/runtime/grouped_blocks.h"

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

  // Whether there is a kernel for float32. The next three need one.
  bool isSupported() const;

  // Channels are computed in blocks of 8: a group, or two groups of 4. The weight, seen as (blocks,
  // outputs of a block, inputs of a group, kernel height, kernel width), has these strides.
  std::vector<int64_t> weightSizes() const;
  std::vector<int64_t> weightStrides() const;

  // Dense channels-last memory; `bias` may be null; `result` does not overlap the rest.
  void run(const float* source, const float* weight, const float* bias, float* result) const;

  // Whether there is a kernel for bfloat16, and this processor has AMX. The rest needs one.
  bool isNarrowSupported() const;
  // The weight (output, input of a group, row, column) in blocks of channels, as Row has it. The
  // last block may have channels of the one before, too.
  at::Tensor narrowWeight(const at::Tensor& weight) const;
  // Like run(). `plain`: the weight as it is; data that are not finite meet it.
  void runNarrow(const Bfloat16* source, const Bfloat16* weight, const Bfloat16* plain,
                 const float* bias, Bfloat16* result) const;

 private:
  int64_t narrowBlocks() const;
  // Of a block, its first channel.
  int64_t narrowChannel(int64_t block) const;
  // A row of the result from the window's copy, number by number.
  void runSlowly(const grouped::Row& row, const Bfloat16* plain, int64_t channel) const;
};

}  // namespace llga
