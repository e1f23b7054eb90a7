#include "jit/onednn/runtime/affine_sum.h"

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

void AffineSum::run(c10::ArrayRef<const void*> operands, uint8_t* to) const {
  constexpr int64_t kBlock = 1 << 12;   // numbers that stay in the first level of cache
  constexpr int64_t kForOne = 1 << 13;  // that are not worth a second thread
  const auto& loops = vector_loops::kernels();
  const auto block_rows = std::max<int64_t>(1, kBlock / columns);
  const auto rows = (count + columns - 1) / columns;

  // A sum of `height` rows of `width` numbers from number `first` on.
  auto sum = [&](int64_t first, int64_t height, int64_t width, float* block) {
    for (const auto i : c10::irange(terms.size())) {
      const auto& term = terms[i];
      const vector_loops::Affine affine{height,
                                        width,
                                        width,
                                        width,
                                        term.scale.data(),
                                        term.shift.data(),
                                        i + 1 == terms.size() ? least : -HUGE_VALF};
      if (term.bytes) {
        const auto* from = static_cast<const uint8_t*>(operands[i]) + first;
        (i == 0 ? loops.affineRowsFromBytes : loops.addAffineRowsOfBytes)(from, block, affine);
      } else {
        const auto* from = static_cast<const float*>(operands[i]) + first;
        (i == 0 ? loops.wide.affineRows : loops.addAffineRows)(from, block, affine);
      }
    }
    const auto numbers = height * width;
    if (activation) {
      loops.wide.activate(*activation, block, block, numbers);
    }
    loops.toBytes(block, numbers, result_scale, result_shift, to + first);
  };

  at::parallel_for(0, rows, std::max<int64_t>(1, kForOne / columns),
                   [&](int64_t begin, int64_t end) {
                     std::vector<float> block(columns * std::min(block_rows, end - begin));
                     const auto whole = std::min(end, count / columns);
                     for (auto row = begin; row < whole; row += block_rows) {
                       sum(row * columns, std::min(block_rows, whole - row), columns, block.data());
                     }
                     if (whole < end) {
                       sum(whole * columns, 1, count % columns, block.data());
                     }
                   });
}

}  // namespace llga
