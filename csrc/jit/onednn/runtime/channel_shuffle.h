// Concatenation, channel shuffle and chunks in one pass over memory.
//
//   channels of all parts, one behind the other, as groups x rest, transposed to rest x groups
//
// For channels-last data, where a pixel's channels of one part lie one behind the other.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
class ChannelShuffle {
 public:
  // `parts` and `chunks`: channels of each, of equal sums, which `groups` divides. `item`: bytes of
  // a number, 1, 2 or 4. `pixels`: of all images together.
  ChannelShuffle(std::vector<int64_t> parts, std::vector<int64_t> chunks, int64_t groups,
                 int64_t pixels, int64_t item);

  // Dense channels-last memory each; no chunk overlaps another or a part.
  void run(c10::ArrayRef<const void*> parts, c10::ArrayRef<void*> chunks) const;

 private:
  struct Source {
    int64_t part;
    int64_t channel;
  };

  template <typename T>
  void copy(c10::ArrayRef<const void*> parts, T* to, size_t chunk, int64_t first_pixel,
            int64_t last_pixel) const;

  std::vector<int64_t> parts_;
  std::vector<int64_t> chunks_;
  std::vector<Source> sources_;  // by channel of the result
  bool pairs_;                   // of two equal parts, whose numbers alternate
  int64_t pixels_;
  int64_t item_;
};

}  // namespace llga
