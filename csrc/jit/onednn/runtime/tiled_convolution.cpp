#include "jit/onednn/runtime/tiled_convolution.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <cstring>

#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/tasks.h"

namespace llga {
namespace {

using amx::Band;

constexpr int64_t kPanel = amx::kMostOutputs;

}  // namespace

bool TiledConvolution::isSupported() const {
  const auto count = images * result_size[0] * result_size[1] * outputs;
  return usesAmx() && count > 0 && inputs * item % amx::kUnit == 0;
}

bool TiledConvolution::isOfRows() const {
  return !isPadded() && window == Pair{1, 1} && stride == Pair{1, 1};
}

bool TiledConvolution::isPadded() const {
  const auto fits = [&](size_t i) {
    return (result_size[i] - 1) * stride[i] + (window[i] - 1) * dilation[i] < size[i];
  };
  return padding != Pair{0, 0} || !fits(0) || !fits(1);
}

TiledConvolution::Tiles TiledConvolution::tiles() const {
  // The time of a tile, in that of one of its rows.
  const auto timeOf = [](int64_t tiles, int64_t rows) {
    constexpr int64_t kOther = 24;
    return tiles * (kOther + rows);
  };
  const auto [lines, width] = result_size;
  const auto whole = timeOf(at::ceil_div(lines * width, amx::kRows), amx::kRows);
  const auto from = isPadded() ? From::copies : From::images;
  if ((window[1] > 1 && dilation[1] != 1) || amx::stepsOf(window[1] * inputs * item).rest != 0) {
    return {From::windows, true};
  }
  const auto of_line = at::ceil_div(width, amx::kRows);
  const auto apart = timeOf(lines * of_line, at::ceil_div(width, of_line));
  const auto pitch = from == From::copies ? copiedWidth() : size[1];
  const auto joined = stride == Pair{1, 1}
                          ? timeOf(at::ceil_div(lines * pitch, amx::kRows), amx::kRows)
                          : apart + 1;
  constexpr int64_t kOf = 8;  // copying what is under windows takes about so much of the rest
  if (std::min(apart, joined) > whole + whole / kOf) {
    return {From::windows, true};
  }
  return {from, joined < apart};
}

int64_t TiledConvolution::copiedWidth() const {
  return (result_size[1] - 1) * stride[1] + window[1];
}

int64_t TiledConvolution::linesUnder(int64_t lines) const {
  return (lines - 1) * stride[0] + (window[0] - 1) * dilation[0] + 1;
}

int64_t TiledConvolution::windowBytes() const { return window[0] * window[1] * inputs * item; }

int64_t TiledConvolution::weightInputs() const {
  const bool gathered = tiles().from == From::windows;
  return (gathered ? at::round_up(windowBytes(), amx::kRowBytes) : windowBytes()) / item;
}

int64_t TiledConvolution::gatheredStride() const {
  const auto bytes = at::round_up(windowBytes(), amx::kRowBytes);
  // An odd number of cache lines: a tile's rows lie in different sets of the first level.
  return bytes / amx::kRowBytes % 2 == 0 ? bytes + amx::kRowBytes : bytes;
}

int64_t TiledConvolution::bytesOf(int64_t lines, From from) const {
  switch (from) {
    case From::images:
      return 0;
    case From::copies:
      return linesUnder(lines) * copiedWidth() * inputs * item;
    default:
      return lines * result_size[1] * gatheredStride();
  }
}

int64_t TiledConvolution::linesAtOnce(From from) const {
  constexpr int64_t kSmallWeight = 1 << 19;  // bytes that stay in the second level of cache
  constexpr int64_t kFewBytes = 1 << 18;     // of lines that do beside such a weight
  constexpr int64_t kBytes = 1 << 20;        // beside a panel of a large one
  constexpr int64_t kFewPixels = 128;
  constexpr int64_t kUnits = 8;  // of work for a thread
  const bool small = weightInputs() * outputs * item <= kSmallWeight;
  const auto lines = result_size[0];
  const auto line = from == From::windows ? bytesOf(1, from) : stride[0] * size[1] * inputs * item;
  const auto panels = at::ceil_div(outputs, kPanel);
  const auto bands = at::ceil_div(kUnits * at::get_num_threads(), images * panels);
  const auto fewest = small ? at::ceil_div(kFewPixels, result_size[1]) : lines;
  const auto most = std::min((small ? kFewBytes : kBytes) / line, std::max(lines / bands, fewest));
  return at::ceil_div(lines, at::ceil_div(lines, std::clamp<int64_t>(most, 1, lines)));
}

Band TiledConvolution::band(int64_t lines, const Tiles& tiles) const {
  if (tiles.from == From::windows) {
    const auto steps = at::ceil_div(windowBytes(), amx::kRowBytes);
    return {nullptr, gatheredStride(), 0, 1, 0, steps, amx::kRowBytes, 1, lines * result_size[1]};
  }
  const auto steps = amx::stepsOf(window[1] * inputs * item);
  const auto pitch = tiles.from == From::images ? size[1] : copiedWidth();
  const auto row = pitch * inputs * item;
  Band found{nullptr,           stride[1] * inputs * item,
             stride[0] * row,   window[0],
             dilation[0] * row, steps.count,
             steps.bytes,       lines,
             result_size[1]};
  if (tiles.joined) {
    found.line = found.width;
    found.gap = pitch - found.width;
    found.width = lines * pitch - found.gap;
    found.lines = 1;
  }
  return found;
}

// Of `count` columns from this one of an image on, each as many channels; outside, `outside`.
void TiledConvolution::copyWindows(const char* line, int64_t column, int64_t count, uint8_t outside,
                                   char* to) const {
  const auto pixel = inputs * item;
  const auto before = std::clamp<int64_t>(-column, 0, count);
  const auto end = std::clamp<int64_t>(size[1] - column, before, count);
  std::memset(to, outside, before * pixel);
  std::memcpy(to + before * pixel, line + (column + before) * pixel, (end - before) * pixel);
  std::memset(to + end * pixel, outside, (count - end) * pixel);
}

void TiledConvolution::copy(const char* image, int64_t line, int64_t lines, uint8_t outside,
                            char* to) const {
  const auto row = copiedWidth() * inputs * item;
  const auto top = line * stride[0] - padding[0];
  for (auto y = top; y < top + linesUnder(lines); ++y, to += row) {
    if (y < 0 || y >= size[0]) {
      std::memset(to, outside, row);
    } else {
      copyWindows(image + y * size[1] * inputs * item, -padding[1], copiedWidth(), outside, to);
    }
  }
}

void TiledConvolution::gather(const char* image, int64_t line, int64_t lines, uint8_t outside,
                              char* to) const {
  const auto pixel = inputs * item;
  const auto row = window[1] * pixel;
  const auto rest = at::round_up(windowBytes(), amx::kRowBytes) - windowBytes();
  for (auto y = line; y < line + lines; ++y) {
    for (int64_t x = 0; x < result_size[1]; ++x, to += gatheredStride()) {
      auto* piece = to;
      for (int64_t ky = 0; ky < window[0]; ++ky, piece += row) {
        const auto under = y * stride[0] - padding[0] + ky * dilation[0];
        const auto column = x * stride[1] - padding[1];
        if (under < 0 || under >= size[0]) {
          std::memset(piece, outside, row);
          continue;
        }
        const auto* source = image + under * size[1] * pixel;
        if (dilation[1] == 1) {
          copyWindows(source, column, window[1], outside, piece);
          continue;
        }
        for (int64_t kx = 0; kx < window[1]; ++kx) {
          copyWindows(source, column + kx * dilation[1], 1, outside, piece + kx * pixel);
        }
      }
      std::memset(piece, 0, rest);
    }
  }
}

void TiledConvolution::run(const void* source, uint8_t outside, Multiply multiply) const {
  constexpr int64_t kForOne = 1 << 20;  // products that are not worth a second thread
  const auto how = tiles();
  const auto lines_at_once = linesAtOnce(how.from);
  const auto bands = at::ceil_div(result_size[0], lines_at_once);
  const auto panels = at::ceil_div(outputs, kPanel);
  const auto pixels = images * result_size[0] * result_size[1];
  const auto threads = std::max<int64_t>(1, pixels * windowBytes() / item * outputs / kForOne);
  const auto image_bytes = size[0] * size[1] * inputs * item;
  forTasksOf(
      images * bands * panels, bytesOf(lines_at_once, how.from),
      [&](void* memory) {
        return [&, copied = static_cast<char*>(memory), last = int64_t{-1}](int64_t first,
                                                                            int64_t end) mutable {
          while (first < end) {
            const auto i = first / panels;
            const auto until = std::min(end, (i + 1) * panels);
            const auto line = i % bands * lines_at_once;
            const auto lines = std::min(lines_at_once, result_size[0] - line);
            const auto* image = static_cast<const char*>(source) + i / bands * image_bytes;
            auto here = band(lines, how);
            here.source = copied;
            if (how.from == From::images) {
              here.source = image + line * stride[0] * size[1] * inputs * item;
            } else if (i != last) {
              how.from == From::windows ? gather(image, line, lines, outside, copied)
                                        : copy(image, line, lines, outside, copied);
              last = i;
            }
            const auto o = (first - i * panels) * kPanel;
            multiply(here, (i / bands * result_size[0] + line) * result_size[1], o,
                     std::min((until - i * panels) * kPanel, outputs) - o);
            first = until;
          }
        };
      },
      threads);
}

at::Tensor TiledConvolution::ordered(const at::Tensor& weight) const {
  const auto matrix = weight.permute({0, 2, 3, 1}).flatten(1);
  const auto more_outputs = at::round_up(outputs, amx::kOutputs) - outputs;
  const auto together = amx::kUnit / item;
  return at::constant_pad_nd(matrix, {0, weightInputs() - matrix.size(1), 0, more_outputs})
      .view({-1, amx::kOutputs, weightInputs() / together, together})
      .transpose(1, 2);
}

void NarrowConvolution::run(const Data& data) const {
  const auto& c = convolution;
  const auto inputs = c.weightInputs();
  c.run(data.source, 0, [&](const Band& band, int64_t pixel, int64_t o, int64_t outputs) {
    const auto at = pixel * c.outputs;
    const gemm::ProblemOf<Bfloat16, Bfloat16> problem{
        band.lines * band.width,
        inputs,
        c.outputs,
        rectifier,
        nullptr,
        0,
        data.weight,
        0,
        data.bias,
        data.addend != nullptr ? data.addend + at : nullptr,
        data.result + at};
    gemm::amx.multiplyBand(problem, band, o, outputs, activation ? &*activation : nullptr);
  });
}

void QuantizedConvolution::run(const QuantizedLinear::Data& data) const {
  if (to_float) {
    runAs<float>(data);
  } else {
    runAs<uint8_t>(data);
  }
}

template <typename R>
void QuantizedConvolution::runAs(const QuantizedLinear::Data& data) const {
  const auto& c = convolution;
  const auto inputs = c.weightInputs();
  const auto* addend = static_cast<const R*>(data.addend);
  auto* result = static_cast<R*>(data.result);
  c.run(data.source, zero_point, [&](const Band& band, int64_t pixel, int64_t o, int64_t outputs) {
    const auto at = pixel * c.outputs + o;
    auto rescale = sums.rescale;
    rescale.start += o;
    rescale.scale += o;
    rescale.shift += o;
    const quantized::ProductOf<R> product{band.lines * band.width,
                                          inputs,
                                          outputs,
                                          nullptr,
                                          0,
                                          data.weight + o * inputs,
                                          rescale,
                                          addend != nullptr ? addend + at : nullptr,
                                          result + at,
                                          c.outputs,
                                          nullptr,
                                          c.outputs - o - outputs};
    if constexpr (std::is_same_v<R, float>) {
      quantized::amx.multiplyBandToFloat(product, band);
    } else {
      quantized::amx.multiplyBand(product, band);
    }
  });
}

}  // namespace llga
