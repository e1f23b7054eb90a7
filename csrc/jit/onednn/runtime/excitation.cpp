#include "jit/onednn/runtime/excitation.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "jit/onednn/runtime/activation.h"
#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/gemv.h"

namespace llga {
namespace {

constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread

// One register of AVX2. Arithmetic goes number by number.
constexpr int64_t kWidth = 8;
using Vector [[gnu::vector_size(kWidth * sizeof(float))]] = float;

#define LLGA_AVX2 gnu::target("avx2,fma"), gnu::optimize("O3")
#define LLGA_INLINE [[LLGA_AVX2, gnu::always_inline]] inline

LLGA_INLINE Vector load(const float* from) {
  Vector to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

// Sums of a few rows each are added up, as they are in eager: one long sum would round more.
template <int64_t vectors>
LLGA_INLINE void sumBand(const float* from, int64_t rows, int64_t stride, float* to) {
  constexpr int64_t kFew = 64;
  Vector total[vectors] = {};
  for (int64_t first = 0; first < rows; first += kFew) {
    Vector sum[vectors] = {};
    for (auto row = first; row < std::min(rows, first + kFew); ++row) {
      for (int64_t v = 0; v < vectors; ++v) {
        sum[v] += load(from + row * stride + v * kWidth);
      }
    }
    for (int64_t v = 0; v < vectors; ++v) {
      total[v] += sum[v];
    }
  }
  std::memcpy(to, total, sizeof(total));
}

// to[c] = sum of from[.][c]
[[LLGA_AVX2]] void sumRows(const float* from, int64_t rows, int64_t columns, float* to) {
  constexpr int64_t kVectors = 8;
  int64_t c = 0;
  for (; c + kVectors * kWidth <= columns; c += kVectors * kWidth) {
    sumBand<kVectors>(from + c, rows, columns, to + c);
  }
  for (; c + kWidth <= columns; c += kWidth) {
    sumBand<1>(from + c, rows, columns, to + c);
  }
  for (; c < columns; ++c) {
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) {
      sum += from[row * columns + c];
    }
    to[c] = static_cast<float>(sum);
  }
}

// to[.][c] = from[.][c] * factor[c]
[[LLGA_AVX2]] void scaleRows(const float* from, int64_t rows, int64_t columns, const float* factor,
                             float* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < columns; ++c) {
      to[c] = from[c] * factor[c];
    }
    from += columns;
    to += columns;
  }
}

#undef LLGA_AVX2
#undef LLGA_INLINE

}  // namespace

void Excitation::run(const Data& data) const {
  // Each thread takes images of its own where there are enough.
  const auto grain = images >= at::get_num_threads() ? 1 : images;
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    for (auto image = first; image < last; ++image) {
      auto one = data;
      one.data += image * pixels * channels;
      one.result += image * pixels * channels;
      runImage(one);
    }
  });
}

void Excitation::runImage(const Data& data) const {
  const auto threads = at::in_parallel_region() ? int64_t{1} : int64_t{at::get_num_threads()};
  const auto parts = std::clamp(pixels * channels / kForOne, int64_t{1}, threads);
  const auto numbers = (parts + 1) * channels + hidden;
  const auto memory = arena()->allocate(static_cast<size_t>(numbers) * sizeof(float));
  auto* mean = static_cast<float*>(memory.get());  // and the sums of the other parts
  auto* gate = mean + parts * channels;
  auto* inside = gate + channels;

  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (auto part = first; part < last; ++part) {
      const auto pixel = pixels * part / parts;
      sumRows(data.data + pixel * channels, pixels * (part + 1) / parts - pixel, channels,
              mean + part * channels);
    }
  });
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t part = 1; part < parts; ++part) {
      mean[c] += mean[part * channels + c];
    }
    mean[c] /= static_cast<float>(pixels);
  }

  const bool relu = inner == Inner::relu;
  gemv(data.squeeze, data.squeeze_bias, hidden, channels, mean, inside,
       relu ? Rectifier::relu : Rectifier::none);
  if (!relu) {
    activate(Activation::silu, inside, inside, hidden);
  }

  gemv(data.excite, data.excite_bias, channels, hidden, inside, gate);
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
    scaleRows(data.data + pixel * channels, pixels * last / parts - pixel, channels, gate,
              data.result + pixel * channels);
  });
}

}  // namespace llga
