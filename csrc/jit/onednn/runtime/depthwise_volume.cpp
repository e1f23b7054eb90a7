#include "jit/onednn/runtime/depthwise_volume.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <type_traits>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/depthwise_blocks.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/tasks.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kWindow = 3;

}  // namespace

bool DepthwiseVolume::isSupported() const { return channels >= depthwise::kernels().width; }

const char* DepthwiseVolume::isa() { return Linear::kernels().name; }

void DepthwiseVolume::run(const void* source, const float* weight, const float* bias,
                          void* result) const {
  if (narrow) {
    runAs(static_cast<const Bfloat16*>(source), weight, bias, static_cast<Bfloat16*>(result));
  } else {
    runAs(static_cast<const float*>(source), weight, bias, static_cast<float*>(result));
  }
}

template <typename T>
void DepthwiseVolume::runAs(const T* source, const float* weight, const float* bias,
                            T* result) const {
  constexpr bool wide = std::is_same_v<T, float>;
  const auto& [frames, rows, columns] = result_size;
  const auto row_numbers = columns * channels;
  const auto lines = images * frames * rows;
  const auto row_stride = size[2] * pixel_stride;
  const auto frame_stride = size[1] * row_stride;
  const auto bytes = wide ? 0 : row_numbers * static_cast<int64_t>(sizeof(float));
  // The next row of the result reads most of what this one has read.
  const auto each = std::max<int64_t>(1, lines / (int64_t{4} * at::get_num_threads()));
  forTasks(at::ceil_div(lines, each), bytes, [&](int64_t task, void* memory) {
    for (auto line = task * each; line < std::min(lines, (task + 1) * each); ++line) {
      const auto image = line / (frames * rows);
      const auto frame = line / rows % frames * stride[0] - padding[0];
      const auto row = line % rows * stride[1] - padding[1];
      depthwise::RowOf<T> under{{},         size[2],   pixel_stride, channels, weight,
                                channels,   bias,      nullptr,      channels, columns,
                                padding[2], rectifier, stride[2]};
      for (int64_t k = 0; k < kWindow * kWindow; ++k) {
        const auto t = frame + k / kWindow;
        const auto y = row + k % kWindow;
        const bool inside = t >= 0 && t < size[0] && y >= 0 && y < size[1];
        under.source[k] =
            inside ? source + image * image_stride + t * frame_stride + y * row_stride : nullptr;
      }
      auto* to = result + line * row_numbers;
      if constexpr (wide) {
        under.result = to;
        depthwise::kernels().volume(under);
      } else {
        under.result = static_cast<float*>(memory);
        depthwise::kernels().narrowVolume(under);
        vector_loops::kernels().narrowRows(under.result, columns, channels, to, channels);
      }
    }
  });
}

}  // namespace llga
