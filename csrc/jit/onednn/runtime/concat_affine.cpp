#include "jit/onednn/runtime/concat_affine.h"

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

void ConcatAffine::run(c10::ArrayRef<const void*> parts, void* result) const {
  if (dtype == at::kFloat) {
    runAs<float>(parts, static_cast<float*>(result));
  } else {
    runAs<Bfloat16>(parts, static_cast<Bfloat16*>(result));
  }
}

template <typename T>
void ConcatAffine::runAs(c10::ArrayRef<const void*> parts, T* result) const {
  constexpr int64_t kBlock = 32;        // pixels: their rows of the result stay in the L2 cache
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  const auto width = static_cast<int64_t>(scale.size());
  const auto affineRows = vector_loops::functions<T>().affineRows;
  at::parallel_for(0, pixels, std::max<int64_t>(1, kForOne / width), [&](int64_t from, int64_t to) {
    for (auto pixel = from; pixel < to; pixel += kBlock) {
      int64_t channel = 0;
      for (const auto i : c10::irange(parts.size())) {
        affineRows(static_cast<const T*>(parts[i]) + pixel * channels[i],
                   result + pixel * width + channel,
                   {std::min(kBlock, to - pixel), channels[i], width, scale.data() + channel,
                    shift.data() + channel, least});
        channel += channels[i];
      }
    }
  });
}

}  // namespace llga
