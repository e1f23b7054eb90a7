#include "jit/onednn/runtime/global_mean.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

void store(const float* mean, int64_t channels, float* to) { std::copy_n(mean, channels, to); }
void store(const float* mean, int64_t channels, Bfloat16* to) {
  vector_loops::kernels().narrowRows(mean, 1, channels, to, channels);
}

}  // namespace

int64_t meanParts(int64_t pixels, int64_t channels) {
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  const auto threads = at::in_parallel_region() ? int64_t{1} : int64_t{at::get_num_threads()};
  return std::clamp(pixels * channels / kForOne, int64_t{1}, threads);
}

template <typename T>
void meanOverPixels(const T* image, int64_t pixels, int64_t channels, int64_t parts, float* mean) {
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (auto part = first; part < last; ++part) {
      const auto pixel = pixels * part / parts;
      vector_loops::functions<T>().sumRows(image + pixel * channels,
                                           pixels * (part + 1) / parts - pixel, channels,
                                           mean + part * channels);
    }
  });
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t part = 1; part < parts; ++part) {
      mean[c] += mean[part * channels + c];
    }
    mean[c] /= static_cast<float>(pixels);
  }
}

template void meanOverPixels(const float*, int64_t, int64_t, int64_t, float*);
template void meanOverPixels(const Bfloat16*, int64_t, int64_t, int64_t, float*);

void GlobalMean::run(const void* from, void* to) const {
  if (type == Type::float32) {
    runAs(static_cast<const float*>(from), static_cast<float*>(to));
  } else {
    runAs(static_cast<const Bfloat16*>(from), static_cast<Bfloat16*>(to));
  }
}

template <typename T>
void GlobalMean::runAs(const T* from, T* to) const {
  // Each thread takes images of its own where there are enough.
  const auto grain = images >= at::get_num_threads() ? 1 : images;
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    const auto parts = meanParts(pixels, channels);
    const auto memory = arena()->allocate(static_cast<size_t>(parts * channels) * sizeof(float));
    auto* mean = static_cast<float*>(memory.get());
    for (auto image = first; image < last; ++image) {
      meanOverPixels(from + image * pixels * channels, pixels, channels, parts, mean);
      store(mean, channels, to + image * channels);
    }
  });
}

}  // namespace llga
