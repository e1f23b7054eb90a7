// Convolutions of channels-last images of bfloat16 or 8 bit by AMX, with what follows them.
//
// The window's columns and channels of a pixel lie one behind the other, and so do those of the
// next pixel, some bytes further: tiles are loaded from there. Images with padding are copied
// first, a band of lines at a time. Where lines do not fill tiles, they are taken as one, and what
// lies between them is dropped; or what is under the window of each pixel is copied. Where channels
// are too few to be taken together, so is that, or the image is copied with some more of them.
// Where dilated windows lie on the padding for the most part, regions of the result are computed
// from what of the window is inside. The work is divided into bands, or some small images, by
// panels of outputs. band_kernel.h has the arithmetic.
//
// A transposed convolution whose windows do not overlap is a pointwise one, with outputs for each
// place of the window; lines of its result are further apart.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "jit/onednn/runtime/band_blocks.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/quantized_linear.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct TiledConvolution {
  using Pair = std::array<int64_t, 2>;  // vertical, horizontal

  int64_t images = 0;
  Pair size{};  // of an image
  Pair result_size{};
  Pair window{};
  Pair stride{};
  Pair dilation{};
  Pair padding{};  // at the top and on the left
  int64_t inputs = 0;
  int64_t outputs = 0;
  int64_t item = 0;  // bytes of a number
  // Of a transposed convolution: how many lines of its result each line makes. What lies side by
  // side in them are the outputs of a pixel, line by line; result_size is the size of an image.
  int64_t result_lines = 1;

  // Whether this processor has AMX, and the kernel is the fastest.
  bool isSupported() const;
  // The weight of a convolution in the order in which tiles are loaded, with zeros where there are
  // no inputs and outputs: (16 outputs, 4 bytes of inputs, output of the 16, input of those). Of an
  // output, in the order of window's row, column, input.
  at::Tensor ordered(const at::Tensor& weight) const;
  // Those of a pixel that lie side by side in the result.
  int64_t outputsOfLine() const { return outputs / result_lines; }

  // Part of the result: the pixels of a band, and some outputs of a line.
  struct Sums {
    const amx::Band& band;
    int64_t result;         // index of the first pixel's first output of the line
    int64_t lines_outputs;  // of the lines before it
    int64_t first_output;   // of the line
    int64_t outputs;
  };
  using Multiply = c10::function_ref<void(const Sums& sums)>;
  // `outside`: each byte of what is padded.
  void run(const void* source, uint8_t outside, Multiply multiply) const;

 private:
  // What tiles are loaded from.
  enum class From { images, copies, widened, windows };
  struct Tiles {
    From from;
    bool joined;  // lines as one
  };

  // How a copy holds an image: pixels of so many bytes, of as many lines side by side.
  struct Pixels {
    int64_t bytes;
    int64_t lines;

    int64_t together() const { return bytes * lines; }
  };

  // Pixels of the result that see the same part of the window, the rest of it being padding.
  struct Region {
    Pair first;
    Pair size;
    Pair tap;  // the first one that is inside of the image
    Pair taps;
  };

  // What is multiplied at once: lines of an image, or all of some images.
  struct Part {
    int64_t image;
    int64_t images;
    int64_t line;
    int64_t lines;
  };

  Tiles tiles() const;
  // Whether it is a linear layer of all pixels for NarrowLinear or QuantizedLinear, or oneDNN.
  bool isLeftToLinear() const;
  bool isPadded() const;
  // Whether an image is copied with more channels.
  bool isWidened() const;
  // Whether a row of the window is divided into its columns.
  bool hasColumns() const;
  std::vector<Region> regions() const;
  // The time of tiles over all of a result's lines, and whether they are joined.
  std::pair<int64_t, bool> tiling(const Pair& result, int64_t pitch) const;
  bool skipsPadding() const;
  Pixels pixels(From from) const;
  int64_t copiedWidth() const;
  int64_t piecesOf(const Pixels& held) const;  // rows, as of amx::Pieces
  int64_t copiedLines(int64_t lines, const Pixels& held) const;
  int64_t imageBytes() const;
  int64_t rowBytes() const;        // of a row of the window
  int64_t windowBytes() const;     // of all rows
  int64_t gatheredStride() const;  // from pixel to pixel
  int64_t bytesOf(int64_t lines, From from) const;
  bool hasSmallWeight() const;
  int64_t linesAtOnce(From from) const;
  int64_t imagesAtOnce(const Tiles& tiles, int64_t lines) const;
  int64_t resultLine() const;  // as of amx::Band
  amx::Band band(int64_t images, int64_t lines, const Tiles& tiles) const;
  amx::Band band(const Region& region) const;
  void runRegions(const char* source, Multiply multiply) const;
  // Where tiles are loaded from. Copies it to `memory`, if that is not the source.
  const char* prepare(const Part& part, const Tiles& tiles, const char* source, uint8_t outside,
                      char* memory) const;
  void copy(const char* image, int64_t line, int64_t lines, uint8_t outside, const Pixels& held,
            char* to) const;
  // Of lines that have so many columns.
  void gather(const char* from, int64_t width, int64_t lines, char* to) const;
};

// Likewise, of bfloat16.
struct NarrowConvolution {
  TiledConvolution convolution;
  Rectifier rectifier = Rectifier::none;
  std::optional<Activation> activation = {};  // behind all else

  struct Data {
    const Bfloat16* source;
    const Bfloat16* weight;  // as ordered() made it
    const float* bias;       // or null
    const Bfloat16* addend;  // like the result, or null; may be the result
    Bfloat16* result;        // overlaps nothing else
  };

  // Source and result are channels last.
  void run(const Data& data) const;
};

// Likewise, of 8 bit: of unsigned data and a signed weight that is symmetric.
struct QuantizedConvolution {
  TiledConvolution convolution;
  bool to_float = false;   // addend and result are of float32, else of 8 bit
  uint8_t zero_point = 0;  // of the source
  QuantizedSums sums;

  // The weight is one that ordered() made.
  void run(const QuantizedLinear::Data& data) const;

 private:
  template <typename R>
  void runAs(const QuantizedLinear::Data& data) const;
};

}  // namespace llga
