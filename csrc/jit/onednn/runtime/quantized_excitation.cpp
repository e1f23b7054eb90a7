#include "jit/onednn/runtime/quantized_excitation.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

void QuantizedExcitation::run(const Data& data) const {
  // Each thread takes images of its own where there are enough.
  const auto grain = mean.images >= at::get_num_threads() ? 1 : mean.images;
  at::parallel_for(0, mean.images, grain, [&](int64_t first, int64_t last) {
    for (auto image = first; image < last; ++image) {
      const auto offset = image * mean.rows * mean.columns;
      runImage(data.data + offset, data, data.result + offset);
    }
  });
}

void QuantizedExcitation::runImage(const uint8_t* from, const Data& data, uint8_t* to) const {
  const auto pixels = mean.rows;
  const auto channels = mean.columns;
  const auto parts = reductionParts(pixels, channels);
  const auto floats = std::max<int64_t>(2, parts) * channels;
  const auto bytes = squeeze.inputs + excite.inputs;
  const auto memory =
      arena()->allocate(static_cast<size_t>(floats) * sizeof(float) + static_cast<size_t>(bytes));
  auto* gate = static_cast<float*>(memory.get());  // before, the mean and the sums of other parts
  auto* shift = gate + channels;
  auto* pooled = reinterpret_cast<uint8_t*>(gate + floats);
  auto* hidden = pooled + squeeze.inputs;

  const auto& loops = vector_loops::kernels();
  meanOverRows(from, pixels, channels, parts, gate);
  loops.toBytes(gate, channels, mean.scale, mean.shift, pooled);
  // Weights are 0 behind the last input; what they meet is to be known all the same.
  std::fill(pooled + channels, pooled + squeeze.inputs, uint8_t{0});
  std::fill(hidden + squeeze.outputs, hidden + excite.inputs, uint8_t{0});
  squeeze.run({pooled, data.squeeze, nullptr, hidden});
  excite.run({hidden, data.excite, nullptr, gate});
  for (int64_t c = 0; c < channels; ++c) {
    const auto x = outer ? std::clamp(outer->alpha * gate[c] + outer->beta, 0.F, 1.F) : gate[c];
    gate[c] = x * scale;
    shift[c] = result_zero_point - data_zero_point * gate[c];
  }

  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    const auto pixel = pixels * first / parts;
    const auto end = pixels * last / parts;
    loops.affineRowsOfBytes(from + pixel * channels, to + pixel * channels,
                            {end - pixel, channels, channels, channels, gate, shift, 0});
  });
}

}  // namespace llga
