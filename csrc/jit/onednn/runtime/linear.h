// Linear layers of float32 data with constant weights, an addend and ReLU, on processors with AVX2
// or AVX-512.
//
// oneDNN's gemm for AVX2 copies weights to panels in each call, or reads them where they lie with a
// cache miss a row. Here they lie in panels, once and for all.
//
// gemm_blocks.h has the arithmetic of one task; here the work is divided.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct Linear {
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  Rectifier rectifier;

  struct Data {
    const float* source;
    const float* weight;  // as toPanels() made it
    const float* bias;    // or null
    const float* addend;  // like the result, or null; may be the result
    float* result;        // overlaps nothing else
  };

  // For the instruction set that is there: what computes products of float32.
  static const gemm::Kernels& kernels();

  // Sizes of the weight in panels: panels, inputs, outputs of a panel.
  std::vector<int64_t> weightSizes() const;
  // From (inputs, outputs). With twice the numbers in a panel, pairs of inputs lie side by side.
  static void toPanels(const at::Tensor& weight, const at::Tensor& panels);

  // Source and result are dense rows.
  void run(const Data& data) const;
};

}  // namespace llga
