// A depthwise convolution of volumes, as of videos, whose channels lie side by side (MViT, X3D).
//
// oneDNN's depthwise kernels bring volumes into blocks of channels first, and back: 3 to 6 times as
// long.
#pragma once

#include <array>
#include <cstdint>

#include "jit/onednn/runtime/rectifier.h"

namespace llga {

// Of float32, or of bfloat16, which is computed in float32, by windows of 3 x 3 x 3. Immutable; any
// thread may call run(), which works with as many threads as PyTorch does.
struct DepthwiseVolume {
  using Triple = std::array<int64_t, 3>;  // frames, rows, columns

  int64_t images;
  Triple size;
  Triple result_size;
  int64_t channels;
  Triple stride;
  Triple padding;  // in front
  Rectifier rectifier;
  bool narrow;  // volumes and result are of bfloat16
  // In numbers; there may be memory between the pixels, as of a part of all channels.
  int64_t image_stride = 0;
  int64_t pixel_stride = 0;

  // Whether there is a kernel for this processor and these numbers. run() needs one.
  bool isSupported() const;
  // Of the instruction sets, the one whose kernel runs.
  static const char* isa();

  // `weight`: (frame, row, column, channel); `bias`: (channel), or null; `result`: dense
  // channels-last memory, which does not overlap the rest.
  void run(const void* source, const float* weight, const float* bias, void* result) const;

 private:
  template <typename T>
  void runAs(const T* source, const float* weight, const float* bias, T* result) const;
};

}  // namespace llga
