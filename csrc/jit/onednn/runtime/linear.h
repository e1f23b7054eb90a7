// Linear layers and pointwise convolutions of float32 data with constant weights, an addend and an
// activation, or a factor behind that (gated units), on processors with AVX2 or AVX-512.
//
// oneDNN's gemm for AVX2 copies weights to panels in each call, or reads them where they lie with a
// cache miss a row. Here they lie in panels, once and for all. Its kernels for AVX-512 wait for
// weights that are in no cache; these fetch the next ones.
//
// Few rows do next to nothing but read the weight: where all its numbers are of bfloat16, as in a
// model of bfloat16 that is computed in float32, half of their bytes will do, on both.
//
// And linear layers and pointwise convolutions of bfloat16 data by AMX, or AVX-512's instructions
// for it: while oneDNN's kernels wait for the weights of a model, which are in no cache, these
// fetch the next ones.
//
// One row of those that meets a weight which is in no cache is a product of a matrix and a vector.
//
// gemm_blocks.h has the arithmetic of one task; here the work is divided.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/gemm_blocks.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct Linear {
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  Rectifier rectifier;
  bool narrow_weight = false;                 // it is of bfloat16
  std::optional<Activation> activation = {};  // behind all else

  static constexpr int64_t kFewRows = 24;  // that are faster with such a weight

  struct Data {
    const float* source;
    const void* weight;   // as toPanels() made it
    const float* bias;    // or null
    const float* addend;  // like the result, or null; may be the result
    float* result;        // overlaps nothing else
    // By output; both or none. What the sums are multiplied with, and what is added then: there is
    // no activation.
    const float* scale = nullptr;
    const float* shift = nullptr;
    // Multiplies the result, behind the activation; like the result, which does not overlap it, or
    // null.
    const float* factor = nullptr;
  };

  // For the instruction set that is there: what computes products of float32.
  static const gemm::Kernels& kernels();

  // Sizes of the weight in panels: panels, inputs, outputs of a panel.
  std::vector<int64_t> weightSizes() const;
  // Whether a float32 weight is the same in bfloat16.
  static bool isNarrow(const at::Tensor& weight);
  // From (inputs, outputs). With twice the numbers in a panel, pairs of inputs lie side by side.
  static void toPanels(const at::Tensor& weight, const at::Tensor& panels);

  // Source and result are dense rows.
  void run(const Data& data) const;

 private:
  // Into how many parts of rows and of panels the work is divided: up to `most` together.
  std::array<int64_t, 2> divided(int64_t most, int64_t panels) const;
  template <typename W>
  void runAs(const Data& data,
             void (*run)(const gemm::ProblemOf<float, float, W>&, const gemm::Task&)) const;
};

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct NarrowLinear {
  int64_t rows = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  Rectifier rectifier = Rectifier::none;
  std::optional<Activation> activation = {};  // behind all else

  // Of a result of bfloat16 or float32.
  template <typename R>
  struct Data {
    const Bfloat16* source;
    const Bfloat16* weight;  // as Linear::toPanels() made it; for a row, each output's inputs
    const float* bias;       // or null
    const R* addend;         // like the result, or null; may be the result. A row has none
    R* result;               // overlaps nothing else
    // Multiplies the result, behind the activation; as the addend, or null.
    const R* factor = nullptr;
  };

  // For the instruction set that is there.
  static const gemm::NarrowKernels& kernels();
  // Whether there are.
  static bool hasKernels();
  // Whether it is one row that is computed as such, on any processor with AVX2.
  bool isRow() const;
  // Whether there is a kernel for these numbers. All below needs one.
  bool isSupported() const;
  // Whether it is expected to be faster than oneDNN's kernel. Stateless.
  bool pays() const;

  // Sizes of the weight in panels: panels, pairs of inputs, numbers of a panel.
  std::vector<int64_t> weightSizes() const;

  // Source and result are dense rows. There is no activation before float32.
  void run(const Data<Bfloat16>& data) const;
  void run(const Data<float>& data) const;

 private:
  template <typename R, typename Run>
  void runByPanels(const Data<R>& data, const Run& run) const;
  template <typename R>
  void multiplyRow(const Data<R>& data, float* sums) const;
};

}  // namespace llga
