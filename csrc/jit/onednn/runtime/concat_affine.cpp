#include "jit/onednn/runtime/concat_affine.h"

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <numeric>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Calls f(pixel, rows, part, offset) for some pixels of each part, so many that their rows of the
// result stay in the second level of cache. `offset`: of the part in such a row.
template <typename F>
void forBlocks(int64_t pixels, int64_t width, const std::vector<int64_t>& widths, const F& f) {
  constexpr int64_t kBlock = 32;
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  at::parallel_for(0, pixels, std::max<int64_t>(1, kForOne / width), [&](int64_t from, int64_t to) {
    for (auto pixel = from; pixel < to; pixel += kBlock) {
      int64_t offset = 0;
      for (const auto part : c10::irange(widths.size())) {
        f(pixel, std::min(kBlock, to - pixel), part, offset);
        offset += widths[part];
      }
    }
  });
}

}  // namespace

void ConcatAffine::run(c10::ArrayRef<const void*> parts, void* to) const {
  const auto& loops = vector_loops::kernels();
  if (dtype == at::kByte) {
    runAs<uint8_t>(parts, static_cast<uint8_t*>(to), loops.affineRowsOfBytes);
  } else if (result == at::kByte) {
    runAs<float>(parts, static_cast<uint8_t*>(to), loops.affineRowsToBytes);
  } else if (dtype == at::kFloat) {
    runAs<float>(parts, static_cast<float*>(to), loops.wide.affineRows);
  } else {
    runAs<Bfloat16>(parts, static_cast<Bfloat16*>(to), loops.narrow.affineRows);
  }
}

template <typename From, typename To, typename AffineRows>
void ConcatAffine::runAs(c10::ArrayRef<const void*> parts, To* to, AffineRows affineRows) const {
  const auto width = static_cast<int64_t>(scale.size());
  forBlocks(pixels, width, channels,
            [&](int64_t pixel, int64_t rows, size_t part, int64_t channel) {
              affineRows(static_cast<const From*>(parts[part]) + pixel * channels[part],
                         to + pixel * width + channel,
                         {rows, channels[part], channels[part], width, scale.data() + channel,
                          shift.data() + channel, least});
            });
}

void Concat::run(c10::ArrayRef<const void*> parts, void* result) const {
  const auto width = std::accumulate(words.begin(), words.end(), int64_t{0});
  const auto copyRows = vector_loops::kernels().copyRows;
  forBlocks(pixels, width, words, [&](int64_t pixel, int64_t rows, size_t part, int64_t word) {
    copyRows(static_cast<const float*>(parts[part]) + pixel * strides[part], rows, words[part],
             strides[part], static_cast<float*>(result) + pixel * width + word, width);
  });
}

}  // namespace llga
