// Softmax, or its logarithm, over a dimension that is not the innermost one in memory: attention
// over tokens (CoaT, XCiT), selective kernels, distributions over a box's distances (YOLO). oneDNN
// has its reference kernel for them, PyTorch goes number by number.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "jit/onednn/facts.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct SoftmaxAcross {
  at::ScalarType dtype;  // float32, or bfloat16, which is rounded once
  bool logarithm;
  int64_t count;  // numbers that go together
  int64_t from_stride;
  int64_t stride;
  // The other dimensions, the innermost one last, whose numbers lie side by side.
  Shape sizes;
  Shape from_strides;
  Shape strides;

  // Of a tensor with these sizes and strides over the dimension `axis`; nothing if no other
  // dimension's numbers lie side by side, in both.
  static std::optional<SoftmaxAcross> of(at::ScalarType dtype, const Shape& sizes, size_t axis,
                                         const Shape& from_strides, const Shape& strides);

  // `to` overlaps nothing. Needs AVX2 and FMA.
  void run(const void* from, void* to) const;

 private:
  template <typename T>
  void runAll(const T* from, T* to) const;
};

}  // namespace llga
