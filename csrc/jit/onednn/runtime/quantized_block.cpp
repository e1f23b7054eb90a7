#include "jit/onednn/runtime/quantized_block.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

#include "jit/onednn/runtime/row_blocks.h"
#include "jit/onednn/runtime/tasks.h"

namespace llga {
namespace {

using quantized::kPiece;
using quantized::kTogether;
using quantized::kVectors;
using quantized::kWidth;

const quantized::Kernels& kernels() { return QuantizedLinear::kernels(); }

// Bytes of a number of the depthwise convolution's weight.
int64_t depthwiseItem() { return kTogether / kernels().rows_together; }

// Computes what one thread takes, block of rows by block of rows; up to `rows` of the result at
// once.
class Worker {
 public:
  Worker(const QuantizedBlock& b, const QuantizedBlock::Data& data, int64_t rows, uint8_t* memory)
      : b_(b), data_(data), sizes_(b, rows), memory_(memory) {
    blank_ = memory_ + sizes_.pieces();
    lines_ = blank_ + sizes_.pitch * kPiece;
    places_ = reinterpret_cast<int32_t*>(lines_ + sizes_.lines);
    pad();
  }

  // Bytes of working memory.
  static int64_t scratch(const QuantizedBlock& b, int64_t rows) {
    const Sizes s(b, rows);
    return s.pieces() + s.pitch * kPiece + s.lines +
           s.slots * b.size[1] * static_cast<int64_t>(sizeof(int32_t));
  }

  void run(const RowBlocks::Block& block) {
    made_.begin(block);
    if (block.first_row < block.end_row) {
      runBlock(block.first_row, block.end_row);
    }
  }

 private:
  struct Sizes {
    Sizes(const QuantizedBlock& b, int64_t rows)
        : step(rows),
          slots(rowsUnder(step, b.window, b.stride)),
          pitch(std::max(b.padding + b.size[1], rowsUnder(b.result_size[1], b.window, b.stride))),
          vectors(at::round_up(b.channels, kWidth) / kWidth),
          chunks(at::round_up(vectors, kVectors) / kVectors),
          lines(b.outputs != 0 ? at::round_up(step * b.result_size[1] * vectors * kWidth, kPiece)
                               : 0) {}

    int64_t chunk() const { return slots * pitch * kPiece; }  // bytes
    int64_t pieces() const { return chunks * chunk(); }       // bytes

    int64_t step;     // rows of the result at once
    int64_t slots;    // rows of the image that are there
    int64_t pitch;    // pixels from row to row
    int64_t vectors;  // of channels
    int64_t chunks;
    int64_t lines;  // bytes of what is projected
  };

  // Row y of the image, with what is on its left.
  uint8_t* rowOf(uint8_t* chunk, int64_t y) const {
    return chunk + y % sizes_.slots * sizes_.pitch * kPiece;
  }

  // Zeros around the image, in its numbers.
  void pad() {
    const auto left = b_.padding * kPiece;
    const auto right = left + b_.size[1] * kPiece;
    const auto whole = sizes_.pitch * kPiece;
    std::fill(blank_, blank_ + whole, b_.zero_point);
    for (auto* row = memory_; row < blank_; row += whole) {
      std::fill(row, row + left, b_.zero_point);
      std::fill(row + right, row + whole, b_.zero_point);
    }
  }

  void runBlock(int64_t row, int64_t end) {
    const auto top = row * b_.stride - b_.padding;
    const auto first = std::max(made_.end(), top);
    const auto last = std::min(b_.size[0], top + rowsUnder(end - row, b_.window, b_.stride));
    const bool projects = b_.outputs != 0;
    const auto width = projects ? sizes_.vectors * kWidth : b_.channels;
    const auto pixel = (made_.image() * b_.result_size[0] + row) * b_.result_size[1];
    auto* lines = projects ? lines_ : data_.result + pixel * width;
    if (b_.inputs != 0) {
      place(first, last);
    }
    for (int64_t c = 0; c < sizes_.chunks; ++c) {
      const auto channel = sizes_.vectors * c / sizes_.chunks * kWidth;
      const auto channels = sizes_.vectors * (c + 1) / sizes_.chunks * kWidth - channel;
      auto* chunk = memory_ + c * sizes_.chunk();
      if (first < last) {
        expand(first, last, channel, channels, chunk);
      }
      for (auto y = row; y < end; ++y) {
        const auto at = (y - row) * b_.result_size[1] * width + channel;
        depthwise(y, chunk, channel, std::min(channels, width - channel), lines + at, width);
      }
    }
    made_.makeUpTo(last);
    if (projects) {
      const auto at = pixel * b_.outputs;
      kernels().multiply({(end - row) * b_.result_size[1], width, b_.outputs, lines, width,
                          data_.weights[2], b_.sums[2].rescale,
                          data_.addend != nullptr ? data_.addend + at : nullptr, data_.result + at,
                          b_.outputs, nullptr});
    }
  }

  // Where pixels of the rows [first, last) go.
  void place(int64_t first, int64_t last) {
    auto* to = places_;
    for (auto y = first; y < last; ++y) {
      const auto start = y % sizes_.slots * sizes_.pitch + b_.padding;
      for (int64_t x = 0; x < b_.size[1]; ++x) {
        *to++ = static_cast<int32_t>((start + x) * kPiece);
      }
    }
  }

  // Makes the rows [first, last) of a chunk: `channels` from `channel` on.
  void expand(int64_t first, int64_t last, int64_t channel, int64_t channels,
              uint8_t* chunk) const {
    const auto from = (made_.image() * b_.size[0] + first) * b_.size[1];
    if (b_.inputs == 0) {
      const auto present = std::min(b_.channels - channel, channels);
      for (auto y = first; y < last; ++y) {
        const auto pixel = from + (y - first) * b_.size[1];
        kernels().toPieces(data_.source + pixel * b_.channels + channel, b_.channels, b_.size[1],
                           present, rowOf(chunk, y) + b_.padding * kPiece);
      }
      return;
    }
    kernels().multiply(
        {(last - first) * b_.size[1], b_.inputs, channels, data_.source + from * b_.inputs,
         b_.inputs, data_.weights[0] + channel * b_.inputs,
         quantized::fromOutput(b_.sums[0].rescale, channel), nullptr, chunk, 0, places_});
  }

  // Row `y` of the result.
  void depthwise(int64_t y, uint8_t* chunk, int64_t channel, int64_t channels, uint8_t* to,
                 int64_t stride) const {
    const auto rows = at::round_up(b_.window, kernels().rows_together);
    const auto bytes = rows * b_.window * depthwiseItem();  // of the weight of a channel
    quantized::Row row{{},
                       b_.result_size[1],
                       channels,
                       data_.weights[1] + channel * bytes,
                       quantized::fromOutput(b_.sums[1].rescale, channel),
                       to,
                       stride};
    for (int64_t k = 0; k < b_.window; ++k) {
      const auto under = y * b_.stride - b_.padding + k;
      row.source[k] = under >= 0 && under < b_.size[0] ? rowOf(chunk, under) : blank_;
    }
    kernels().find(b_.window, b_.stride)(row);
  }

  const QuantizedBlock& b_;
  const QuantizedBlock::Data& data_;
  Sizes sizes_;
  uint8_t* memory_;  // pieces of each chunk of channels, row by row
  uint8_t* blank_;   // a row outside of the image
  uint8_t* lines_;   // what is projected
  int32_t* places_;  // of pixels that are expanded
  MadeRows made_;
};

// Of (channel, row, column).
at::Tensor depthwiseWeight(const at::Tensor& weight) {
  const auto channels = at::round_up(weight.size(0), kWidth);
  const auto window = weight.size(1);
  const auto together = kernels().rows_together;
  const auto width = kWidth / depthwiseItem();
  const auto rows = at::round_up(window, together);
  return at::constant_pad_nd(weight, {0, 0, 0, rows - window, 0, channels - weight.size(0)})
      .to(depthwiseItem() == 1 ? at::kChar : at::kShort)
      .view({channels / width, width, rows / together, together, window})
      .permute({0, 2, 4, 1, 3});
}

}  // namespace

bool QuantizedBlock::isSupported() const {
  constexpr int64_t kWidest = 4096;  // pixels: whole rows are kept
  return QuantizedLinear::hasKernels() && inputs % kTogether == 0 &&
         kernels().find(window, stride) != nullptr && padding < window && size[1] <= kWidest;
}

at::Tensor QuantizedBlock::ordered(size_t convolution, const at::Tensor& weight) {
  return convolution == 1   ? depthwiseWeight(weight.squeeze(1))
         : convolution == 0 ? QuantizedLinear::ordered(weight.flatten(1))
                            : QuantizedLinear::ordered(weight.flatten(1), kWidth);
}

void QuantizedBlock::run(const Data& data) const {
  const auto threads = int64_t{at::get_num_threads()};
  // Of too few images for all threads, rows are divided, of which some are expanded twice.
  const auto parts = std::min((threads + images - 1) / images, result_size[0]);
  const auto rows = rowsAtOnce(at::ceil_div(result_size[0], parts), size[1], stride,
                               outputs != 0 ? result_size[1] : 0);
  const RowBlocks blocks(result_size[0], parts, rows);
  forTasksOf(images * blocks.ofImage(), Worker::scratch(*this, rows), [&](void* memory) {
    return [&blocks, worker = Worker(*this, data, rows, static_cast<uint8_t*>(memory))](
               int64_t first, int64_t last) mutable {
      for (; first < last; ++first) {
        worker.run(blocks.at(first));
      }
    };
  });
}

}  // namespace llga
