// Linear layers and pointwise convolutions of 8-bit data, on processors with AVX-512's instructions
// for them, AMX, or AVX2 and no better ones: for unsigned data and signed weights that are
// symmetric.
//
// quantized_blocks.h has the arithmetic of one task; here the work is divided.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "jit/onednn/runtime/quantized_blocks.h"

namespace llga {

// What follows the sums of a product.
struct QuantizedSums {
  quantized::Rescale rescale;
  std::vector<at::Tensor> tensors;  // own its arrays

  // To the end of a register, with zeros.
  static at::Tensor padded(const at::Tensor& numbers);
};

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct QuantizedLinear {
  int64_t rows = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  bool to_float = false;  // addend and result are of float32, else of 8 bit
  QuantizedSums sums;

  struct Data {
    const uint8_t* source;
    const int8_t* weight;  // as ordered() made it
    const void* addend;    // like the result, or null; may be the result
    void* result;          // overlaps nothing else
  };

  // Whether there is a kernel for this processor and these numbers. All below needs one.
  bool isSupported() const;
  // Whether it is expected to be faster than oneDNN's kernel. Stateless.
  bool pays() const;
  // Of the instruction sets, the one whose kernels run.
  static const quantized::Kernels& kernels();
  // Whether this processor has them.
  static bool hasKernels();

  // The weight in the order in which the kernels read it (a view of it, or of a copy), from
  // (output, input), of a multiple of so many inputs.
  static at::Tensor ordered(const at::Tensor& weight, int64_t multiple = 1);

  // Source and result are dense rows.
  void run(const Data& data) const;

 private:
  template <typename R>
  void runAs(const Data& data) const;
};

}  // namespace llga
