#include "jit/onednn/runtime/softmax.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/pointwise.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

std::optional<SoftmaxAcross> SoftmaxAcross::of(at::ScalarType dtype, const Shape& sizes,
                                               size_t axis, const Shape& from_strides,
                                               const Shape& strides) {
  const auto others = [axis](Shape values) {
    values.erase(values.begin() + static_cast<std::ptrdiff_t>(axis));
    return values;
  };
  const PointwiseChain others_of{
      others(sizes), {{dtype, others(from_strides)}}, {}, {{0, {dtype, others(strides)}}}};
  const auto arranged = others_of.arranged();
  if (!arranged || arranged->data[0].strides.back() != 1) {
    return std::nullopt;
  }
  return SoftmaxAcross{dtype,
                       false,
                       sizes[axis],
                       from_strides[axis],
                       strides[axis],
                       arranged->sizes,
                       arranged->data[0].strides,
                       arranged->results[0].port.strides};
}

template <typename T>
void SoftmaxAcross::runAll(const T* from, T* to) const {
  constexpr int64_t kTogether = 32;     // columns
  constexpr int64_t kForOne = 1 << 12;  // numbers that are not worth a second thread
  const auto columns = sizes.back();
  const auto parts = at::ceil_div(columns, kTogether);
  const auto outer = sizes.size() - 1;
  const auto images = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  const auto most = std::min(columns, kTogether) * count;
  at::parallel_for(
      0, images * parts, std::max<int64_t>(1, kForOne / most), [&](int64_t first, int64_t last) {
        for (; first < last; ++first) {
          const auto column = first % parts * kTogether;
          const auto* source = from + column;
          auto* target = to + column;
          auto image = first / parts;
          for (auto i = outer; i-- > 0;) {
            source += image % sizes[i] * from_strides[i];
            target += image % sizes[i] * strides[i];
            image /= sizes[i];
          }
          vector_loops::functions<T>().softmaxOfColumns(
              source, target,
              {count, std::min(kTogether, columns - column), from_stride, stride, logarithm});
        }
      });
}

void SoftmaxAcross::run(const void* from, void* to) const {
  if (dtype == at::kBFloat16) {
    runAll(static_cast<const Bfloat16*>(from), static_cast<Bfloat16*>(to));
  } else {
    runAll(static_cast<const float*>(from), static_cast<float*>(to));
  }
}

}  // namespace llga
