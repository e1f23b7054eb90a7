// How many rows of an image a block of convolutions computes at once (expansion.h,
// quantized_block.h).
#pragma once

#include <algorithm>
#include <cstdint>

namespace llga {

// Rows of the data that are read for `rows` of the result.
inline int64_t rowsUnder(int64_t rows, int64_t window, int64_t stride) {
  return (rows - 1) * stride + window;
}

// Rows of the result at once, of `rows`: enough pixels that weights are worth reading, and all
// blocks of nearly the same size. `width`: of the data; `projected`: of the result, if there is a
// projection, else 0.
inline int64_t rowsAtOnce(int64_t rows, int64_t width, int64_t stride, int64_t projected) {
  constexpr int64_t kExpanded = 96;  // pixels
  constexpr int64_t kProjected = 48;
  const auto fewest = [](int64_t pixels, int64_t row) {
    return std::max<int64_t>(1, (pixels + row / 2) / row);
  };
  const auto wanted = std::max(fewest(kExpanded, width * stride),
                               projected != 0 ? fewest(kProjected, projected) : 1);
  const auto blocks = (rows + wanted - 1) / wanted;
  return (rows + blocks - 1) / blocks;
}

// The rows of images in blocks, of up to `at_once` each. An image has parts of equal size, for as
// many threads, of which each has whole blocks.
class RowBlocks {
 public:
  struct Block {
    int64_t image;
    int64_t first_row;
    int64_t end_row;
  };

  RowBlocks(int64_t rows, int64_t parts, int64_t at_once)
      : rows_(rows), parts_(parts), each_(((rows + parts - 1) / parts + at_once - 1) / at_once) {}

  int64_t ofImage() const { return parts_ * each_; }

  // The i-th one of all images.
  Block at(int64_t i) const {
    const auto part = i % ofImage() / each_;
    const auto first = rows_ * part / parts_;
    const auto count = rows_ * (part + 1) / parts_ - first;
    return {i / ofImage(), first + count * (i % each_) / each_,
            first + count * (i % each_ + 1) / each_};
  }

 private:
  int64_t rows_;
  int64_t parts_;
  int64_t each_;  // blocks of a part
};

// The rows of an image that a thread has made for one block: those that the next one reads as well
// are not made again.
class MadeRows {
 public:
  // What was made is there only if the block follows the one before it.
  void begin(const RowBlocks::Block& block) {
    if (block.image != image_ || block.first_row != next_) {
      image_ = block.image;
      end_ = 0;
    }
    next_ = block.end_row;
  }

  int64_t image() const { return image_; }
  // Of the rows that are there; 0: none is.
  int64_t end() const { return end_; }
  void makeUpTo(int64_t end) { end_ = std::max(end_, end); }

 private:
  int64_t image_ = -1;
  int64_t next_ = 0;  // row of the result
  int64_t end_ = 0;
};

}  // namespace llga
