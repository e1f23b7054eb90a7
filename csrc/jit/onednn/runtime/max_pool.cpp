#include "jit/onednn/runtime/max_pool.h"

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "jit/onednn/runtime/shares.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

bool MaxPool::isSupported() const {
  for (size_t i = 0; i < size.size(); ++i) {
    for (int64_t start = -padding[i], n = 0; n < result_size[i]; ++n, start += stride[i]) {
      auto first = start;
      while (first < 0) {
        first += dilation[i];
      }
      if (first >= std::min(size[i], start + window[i] * dilation[i])) {
        return false;
      }
    }
  }
  return true;
}

void MaxPool::run(const uint8_t* from, uint8_t* to) const {
  constexpr int64_t kForOne = 1 << 16;  // bytes that are not worth a second thread
  constexpr size_t kUsual = 9;          // pixels under a window
  const auto maxOfBytes = vector_loops::kernels().maxOfBytes;
  const auto rows = images * result_size[0];
  const auto bytes = rows * result_size[1] * window[0] * window[1] * channels;
  const auto parts =
      std::clamp<int64_t>(bytes / kForOne, 1, std::min<int64_t>(rows, at::get_num_threads()));
  forShares(rows, 1, parts, [&](int64_t first, int64_t last) {
    c10::SmallVector<const uint8_t*, kUsual> under;
    for (auto row = first; row < last; ++row) {
      const auto* image = from + row / result_size[0] * size[0] * size[1] * channels;
      const auto top = row % result_size[0] * stride[0] - padding[0];
      auto* pixel = to + row * result_size[1] * channels;
      for (int64_t x = 0; x < result_size[1]; ++x, pixel += channels) {
        const auto left = x * stride[1] - padding[1];
        under.clear();
        for (int64_t ky = 0; ky < window[0]; ++ky) {
          const auto line = top + ky * dilation[0];
          if (line < 0 || line >= size[0]) {
            continue;
          }
          for (int64_t kx = 0; kx < window[1]; ++kx) {
            const auto column = left + kx * dilation[1];
            if (column >= 0 && column < size[1]) {
              under.push_back(image + (line * size[1] + column) * channels);
            }
          }
        }
        maxOfBytes(under.data(), static_cast<int64_t>(under.size()), channels, pixel);
      }
    }
  });
}

}  // namespace llga
