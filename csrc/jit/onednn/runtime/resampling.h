// Bilinear resizing of images of float32 or bfloat16: each number of the result is made of the four
// around its place. aten::upsample_bilinear2d.
//
// A row of the image is resized once, and two of them make each row of the result: oneDNN has no
// resizing that keeps corners in their places, and PyTorch's takes ten times as long for planes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
class Resampling {
 public:
  enum class Type { float32, bfloat16 };
  enum class Order { channels_last, planes };
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal

  struct Sizes {
    int64_t images;
    int64_t channels;
    Pair size;
    Pair result_size;
  };

  // `align_corners`: the middles of the pixels in the corners keep their places, else the corners
  // themselves.
  Resampling(Type type, const Sizes& sizes, bool align_corners);

  // To channels last only from channels last. Dense memory; `to` overlaps nothing.
  void run(const void* from, Order order, void* to, Order result_order) const;

 private:
  template <typename T>
  class Rows;
  template <typename T>
  void runAs(const T* from, Order order, T* to, Order result_order) const;

  Type type_;
  Sizes sizes_;
  std::array<std::vector<vector_loops::Sample>, 2> samples_;
};

}  // namespace llga
