// Tensors that are padded with what lies on the other side of their edges, or with one number.
//
// oneDNN has no such op but for the zeros of a convolution, and PyTorch's go number by number, or
// fill all memory first.
#pragma once

#include <cstdint>
#include <vector>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
class Padding {
 public:
  enum class Mode { constant, reflect, replicate, circular };

  struct Dimension {
    int64_t size;
    int64_t before;  // numbers that are padded with, as few as PyTorch allows
    int64_t after;
  };

  // Of dense memory, in the order of it; one dimension at least is padded. A number has `bytes`
  // bytes, and `number` is the one of Mode::constant.
  Padding(Mode mode, const std::vector<Dimension>& dimensions, int64_t bytes, const void* number);

  // `to` overlaps nothing else.
  void run(const void* from, void* to) const;

 private:
  void runRow(const char* from, char* to) const;
  char* runPixels(const std::vector<int64_t>& pixels, const char* from, char* to) const;

  int64_t images_ = 1;
  int64_t image_rows_ = 1;           // of an image that is padded
  std::vector<int64_t> rows_ = {0};  // of an image of the result: which one of the other; -1: none
  std::vector<int64_t> before_;      // pixels before a row, likewise
  std::vector<int64_t> after_;
  int64_t width_ = 1;  // of a row that is padded, in pixels
  int64_t pixel_;      // bytes
  std::vector<char> blank_;
};

}  // namespace llga
