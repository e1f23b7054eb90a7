#include "jit/onednn/runtime/excitation.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/gemv.h"
#include "jit/onednn/runtime/reduction.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread

}  // namespace

void Excitation::run(const Data& data) const {
  if (type == Type::float32) {
    runAs<float>(data);
  } else {
    runAs<Bfloat16>(data);
  }
}

template <typename T>
void Excitation::runAs(const Data& data) const {
  // Each thread takes images of its own where there are enough.
  const auto grain = images >= at::get_num_threads() ? 1 : images;
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    for (auto image = first; image < last; ++image) {
      const auto offset = image * pixels * channels;
      runImage(static_cast<const T*>(data.data) + offset, data,
               static_cast<T*>(data.result) + offset);
    }
  });
}

template <typename T>
void Excitation::runImage(const T* from, const Data& data, T* to) const {
  const auto parts = reductionParts(pixels, channels);
  const auto numbers = (parts + 1) * channels + hidden;
  const auto memory = arena()->allocate(static_cast<size_t>(numbers) * sizeof(float));
  auto* mean = static_cast<float*>(memory.get());  // and the sums of the other parts
  auto* gate = mean + parts * channels;
  auto* inside = gate + channels;

  const auto& loops = vector_loops::functions<T>();
  meanOverRows(from, pixels, channels, parts, mean);

  const bool relu = inner == Inner::relu;
  gemv(static_cast<const T*>(data.squeeze), data.squeeze_bias, hidden, channels, mean, inside,
       relu ? Rectifier::relu : Rectifier::none, kForOne);
  if (!relu) {
    activate(Activation::silu, inside, inside, hidden);
  }

  gemv(static_cast<const T*>(data.excite), data.excite_bias, channels, hidden, inside, gate,
       Rectifier::none, kForOne);
  if (sigmoid) {
    activate(Activation::sigmoid, gate, gate, channels);
  } else {
    for (int64_t c = 0; c < channels; ++c) {
      const auto line = alpha * gate[c] + beta;
      const auto low = line < 0 ? 0 : line;
      gate[c] = low > 1 ? 1 : low;
    }
  }

  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    const auto pixel = pixels * first / parts;
    loops.scaleRows(from + pixel * channels, pixels * last / parts - pixel, channels, gate,
                    to + pixel * channels);
  });
}

}  // namespace llga
