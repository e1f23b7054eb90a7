// A pointwise convolution, the depthwise one behind it and maybe another pointwise one, as in the
// blocks of MobileNets and EfficientNets, in one step:
//
//   expanded  = activation of pointwise(source)
//   result    = activation of depthwise(expanded), or
//               projection(activation of depthwise(expanded)) + addend, or, as in GhostNets,
//               expanded and activation of depthwise(expanded), one behind the other in each pixel
//
// In the place of the first one may be the first convolution of a network, of float32 images of a
// few planes, in any order.
//
// The first one makes up to six times as many channels as it reads, or ten. As kernels of their own
// they pass through memory, or the caches of the other core. Here a few rows of the image are
// expanded at a time, and read while they are in the cache. For channels-last data of float32, or
// of bfloat16 with AVX-512's instructions for it; in between, numbers are float32.
//
// gemm_blocks.h and depthwise_blocks.h have the arithmetic of one task; here the work is divided.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/image_rows.h"
#include "jit/onednn/runtime/rectifier.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct Expansion {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal
  enum class Type { float32, bfloat16 };

  // One of them, or none.
  struct Applied {
    Rectifier rectifier = Rectifier::none;
    std::optional<Activation> activation;
    bool slopes = false;  // PReLU, by channel

    bool isSlow() const { return activation || slopes; }  // to be applied by oneDNN
  };

  // A first convolution with a window, which it has both ways, as strides and padding.
  struct First {
    int64_t window;
    int64_t stride;
    int64_t padding;  // at the top and on the left
    ImageRows rows;   // of the image that it reads
  };

  Type type = Type::float32;  // of data and the weights of pointwise convolutions
  bool wide_result = false;   // of a projection in bfloat16: that and the addend are float32
  int64_t images = 0;
  Pair size{};           // of what is expanded
  Pair result_size{};    // of a result
  int64_t inputs = 0;    // products that each expanded number is a sum of
  int64_t channels = 0;  // of what is expanded
  int64_t window = 0;    // both ways
  int64_t stride = 0;
  int64_t padding = 0;              // at the top and on the left
  std::optional<First> first = {};  // or it is pointwise
  Applied inner;
  Applied outer;
  int64_t outputs = 0;               // of the projection; 0: there is none
  Rectifier last = Rectifier::none;  // behind it, and the addend
  // The result has what is expanded, too. No projection; and as many pixels are in a result.
  bool keeps_expanded = false;

  struct Data {
    const void* source;
    const void* pointwise;        // as toPanels() made it; (row, column, channel) by outputs
    const float* pointwise_bias;  // all biases: or null
    const float* depthwise;       // (row, column, channel)
    const float* depthwise_bias;
    const void* projection;  // as toPanels() made it
    const float* projection_bias;
    const float* inner_slopes;  // (channel), of PReLU
    const float* outer_slopes;
    const void* addend;  // like the result, or null; may be the result
    void* result;        // overlaps nothing else
  };

  // Whether there is a kernel for this processor and these numbers. All below needs one.
  bool isSupported() const;
  // Whether it is expected to be faster than oneDNN's kernels one after the other. Stateless.
  bool pays() const;
  // Of the instruction sets, the one whose kernels run.
  const char* isa() const;

  // Sizes of a pointwise weight in panels: panels, inputs or pairs of them, numbers of a panel.
  std::vector<int64_t> panelSizes(int64_t inputs, int64_t outputs) const;

  void run(const Data& data) const;

 private:
  template <typename T>
  void runAs(const Data& data) const;
};

}  // namespace llga
