#include "jit/onednn/runtime/rotary.h"

#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

using vector_loops::kernels;

// Of a row: what its dimensions' indices are, and so where it is.
class Rotary::Place {
 public:
  Place(const Rotary& rotary, int64_t row) : rotary_(rotary), indices_(rotary.sizes.size()) {
    for (auto i = indices_.size(); i > 0; --i) {
      indices_[i - 1] = row % rotary.sizes[i - 1];
      row /= rotary.sizes[i - 1];
    }
  }

  void next() {
    for (auto i = indices_.size(); i > 0; --i) {
      if (++indices_[i - 1] < rotary_.sizes[i - 1]) {
        return;
      }
      indices_[i - 1] = 0;
    }
  }

  int64_t at(const std::vector<int64_t>& strides) const {
    int64_t offset = 0;
    for (size_t i = 0; i < indices_.size(); ++i) {
      offset += indices_[i] * strides[i];
    }
    return offset;
  }

 private:
  const Rotary& rotary_;
  std::vector<int64_t> indices_;
};

void Rotary::rotate(const void* from, const void* cos, const void* sin, const Place& place,
                    void* to) const {
  const auto half = columns / 2;
  const auto data = place.at(strides);
  const auto c = place.at(cos_strides);
  const auto s = place.at(sin_strides);
  const auto result = place.at(result_strides);
  std::array<float, kMostColumns> row;  // NOLINT: written below
  auto* wide = narrow_result ? row.data() : static_cast<float*>(to) + result;
  if (!narrow) {
    kernels().rotateRow(static_cast<const float*>(from) + data, static_cast<const float*>(cos) + c,
                        static_cast<const float*>(sin) + s, half, wide);
  } else if (narrow_angles) {
    kernels().rotateNarrowRowByNarrow(static_cast<const Bfloat16*>(from) + data,
                                      static_cast<const Bfloat16*>(cos) + c,
                                      static_cast<const Bfloat16*>(sin) + s, half, wide);
  } else {
    kernels().rotateNarrowRow(static_cast<const Bfloat16*>(from) + data,
                              static_cast<const float*>(cos) + c,
                              static_cast<const float*>(sin) + s, half, wide);
  }
  if (narrow_result) {
    kernels().narrowRows(wide, 1, columns, static_cast<Bfloat16*>(to) + result, columns);
  }
}

void Rotary::run(const void* from, const void* cos, const void* sin, void* to) const {
  constexpr int64_t kGrain = 1 << 14;  // numbers that are worth a thread
  const auto rows = c10::multiply_integers(sizes);
  at::parallel_for(0, rows, std::max<int64_t>(kGrain / columns, 1),
                   [&](int64_t first, int64_t last) {
                     Place place(*this, first);
                     for (auto row = first; row < last; ++row, place.next()) {
                       rotate(from, cos, sin, place, to);
                     }
                   });
}

}  // namespace llga
