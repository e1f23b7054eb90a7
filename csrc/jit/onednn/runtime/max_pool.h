// Max pooling of channels-last images of 8 bit.
//
// oneDNN's takes several times as long as reading them does.
#pragma once

#include <array>
#include <cstdint>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct MaxPool {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal

  int64_t images;
  Pair size;  // of an image
  Pair result_size;
  Pair window;
  Pair stride;
  Pair dilation;
  Pair padding;  // at the top and on the left; what is outside is less than any number
  int64_t channels;

  // Whether there is a pixel under each window.
  bool isSupported() const;

  // Dense channels-last memory each; they do not overlap. Needs AVX2 and FMA.
  void run(const uint8_t* from, uint8_t* to) const;
};

}  // namespace llga
