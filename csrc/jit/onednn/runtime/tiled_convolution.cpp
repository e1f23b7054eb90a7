#include "jit/onednn/runtime/tiled_convolution.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <cstring>

#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/tasks.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

using amx::Band;

constexpr int64_t kPanel = amx::kMostOutputs;
constexpr int64_t kMostBytes = 1 << 20;  // of images beside a panel of a large weight
constexpr int64_t kMostWidened = 8;      // bytes of a pixel that is copied with more channels

// Copies pixels to places that are `stride` bytes apart, with zeros behind each.
template <typename Place>
void widen(const char* from, int64_t pixel, int64_t count, char* to, int64_t stride) {
  constexpr int64_t kBits = 8;
  constexpr int64_t kPlace = sizeof(Place);
  const auto there = ~Place{0} >> static_cast<unsigned>((kPlace - pixel) * kBits);
  const auto readable = count * pixel - kPlace;
  int64_t at = 0;
  for (; at <= readable; at += pixel, to += stride) {
    Place place{};
    std::memcpy(&place, from + at, sizeof(place));
    place &= there;
    std::memcpy(to, &place, sizeof(place));
  }
  for (; at < count * pixel; at += pixel, to += stride) {
    Place place{};
    std::memcpy(&place, from + at, pixel);
    std::memcpy(to, &place, sizeof(place));
  }
}

// The time of tiles, in that of one of their rows.
constexpr int64_t timeOf(int64_t tiles, int64_t rows) {
  constexpr int64_t kOther = 24;
  return tiles * (kOther + rows);
}

}  // namespace

bool TiledConvolution::isSupported() const {
  const auto count = images * result_size[0] * result_size[1] * outputs;
  const bool together =
      inputs * item % amx::kUnit == 0 || windowBytes() <= amx::kRowBytes || isWidened();
  const bool whole = result_lines == 1 || outputsOfLine() % amx::kOutputs == 0;
  return usesAmx() && count > 0 && together && whole && !isLeftToLinear();
}

bool TiledConvolution::isLeftToLinear() const {
  constexpr int64_t kMost = 1 << 29;   // products, more of which are worth it where
  constexpr int64_t kManyBytes = 512;  // of a pixel are multiplied
  const auto count = images * size[0] * size[1] * inputs * outputs;
  return result_lines == 1 && !isPadded() && window == Pair{1, 1} && stride == Pair{1, 1} &&
         (count <= kMost || inputs * item < kManyBytes);
}

// Where steps are not many more than if all bytes under a window were together.
bool TiledConvolution::isWidened() const {
  const auto held = pixels(From::widened);
  return inputs * item % amx::kUnit != 0 && windowBytes() > amx::kRowBytes &&
         dilation == Pair{1, 1} && held.bytes <= kMostWidened &&
         window[1] * held.together() <= amx::kRowBytes &&
         piecesOf(held) <= at::ceil_div(windowBytes(), amx::kRowBytes) + 1;
}

bool TiledConvolution::isPadded() const {
  const auto fits = [&](size_t i) {
    return (result_size[i] - 1) * stride[i] + (window[i] - 1) * dilation[i] < size[i];
  };
  return padding != Pair{0, 0} || !fits(0) || !fits(1);
}

bool TiledConvolution::hasColumns() const { return window[1] > 1 && dilation[1] != 1; }

std::pair<int64_t, bool> TiledConvolution::tiling(const Pair& result, int64_t pitch) const {
  const auto [lines, width] = result;
  const auto of_line = at::ceil_div(width, amx::kRows);
  const auto apart = timeOf(lines * of_line, at::ceil_div(width, of_line));
  const auto pixels = lines * pitch;
  const auto joined =
      stride == Pair{1, 1} ? timeOf(at::ceil_div(pixels, amx::kRows), amx::kRows) : apart + 1;
  return {std::min(apart, joined), joined < apart};
}

TiledConvolution::Tiles TiledConvolution::tiles() const {
  const auto [lines, width] = result_size;
  const auto whole = timeOf(at::ceil_div(lines * width, amx::kRows), amx::kRows);
  const auto from = isWidened() ? From::widened : isPadded() ? From::copies : From::images;
  if (from == From::widened) {
    return {from, false};
  }
  if (inputs * item % amx::kUnit != 0 ||
      amx::stepsOf(hasColumns() ? inputs * item : rowBytes()).rest != 0) {
    return {From::windows, true};
  }
  const auto [time, joined] = tiling(result_size, from == From::copies ? copiedWidth() : size[1]);
  constexpr int64_t kOf = 8;  // copying what is under windows takes about so much of the rest
  if (time > whole + whole / kOf) {
    return {From::windows, true};
  }
  return {from, joined};
}

std::vector<TiledConvolution::Region> TiledConvolution::regions() const {
  struct Segment {
    int64_t first;
    int64_t size;
    int64_t tap;
    int64_t taps;
  };
  std::array<std::vector<Segment>, 2> segments;
  for (size_t i = 0; i < segments.size(); ++i) {
    for (int64_t at = 0; at < result_size[i]; ++at) {
      const auto start = at * stride[i] - padding[i];
      const auto tap = std::min(window[i], start < 0 ? at::ceil_div(-start, dilation[i]) : 0);
      const auto end = start < size[i] ? at::ceil_div(size[i] - start, dilation[i]) : 0;
      const auto taps = std::max<int64_t>(0, std::min(window[i], end) - tap);
      auto& all = segments[i];
      if (!all.empty() && all.back().tap == tap && all.back().taps == taps) {
        ++all.back().size;
      } else {
        all.push_back({at, 1, tap, taps});
      }
    }
  }
  std::vector<Region> all;
  for (const auto& y : segments[0]) {
    for (const auto& x : segments[1]) {
      all.push_back({{y.first, x.first}, {y.size, x.size}, {y.tap, x.tap}, {y.taps, x.taps}});
    }
  }
  return all;
}

bool TiledConvolution::skipsPadding() const {
  // A window of 8 bit that sees padding has other sums than one that does without.
  if (item == 1 || !isPadded() || dilation == Pair{1, 1} || stride != Pair{1, 1} ||
      inputs * item % amx::kUnit != 0 || amx::stepsOf(inputs * item).rest != 0) {
    return false;
  }
  const auto [lines, width] = result_size;
  const auto whole = timeOf(at::ceil_div(lines * width, amx::kRows), amx::kRows);
  int64_t time = 0;
  for (const auto& region : regions()) {
    const auto taps = region.taps[0] * region.taps[1];
    if (taps == 0) {
      return false;
    }
    time += taps * tiling(region.size, size[1]).first;
  }
  constexpr int64_t kOf = 8;
  return time < window[0] * window[1] * (whole - whole / kOf);
}

int64_t TiledConvolution::copiedWidth() const {
  return (result_size[1] - 1) * stride[1] + (window[1] - 1) * dilation[1] + 1;
}

TiledConvolution::Pixels TiledConvolution::pixels(From from) const {
  const auto bytes = inputs * item;
  if (from != From::widened) {
    return {bytes, 1};
  }
  Pixels held{at::round_up(bytes, amx::kUnit), 1};
  for (auto lines = stride[0]; lines > 1; --lines) {
    // Zero is no weight for a line behind the window that has a NaN.
    const bool fits = item == 1 || window[0] % lines == 0;
    if (fits && stride[0] % lines == 0 && window[1] * held.bytes * lines <= amx::kRowBytes) {
      held.lines = lines;
      break;
    }
  }
  return held;
}

int64_t TiledConvolution::piecesOf(const Pixels& held) const {
  return at::ceil_div(window[0], held.lines);
}

int64_t TiledConvolution::copiedLines(int64_t lines, const Pixels& held) const {
  return (lines - 1) * stride[0] / held.lines + (piecesOf(held) - 1) * dilation[0] + 1;
}

int64_t TiledConvolution::imageBytes() const { return size[0] * size[1] * inputs * item; }

int64_t TiledConvolution::rowBytes() const { return window[1] * inputs * item; }

int64_t TiledConvolution::windowBytes() const { return window[0] * rowBytes(); }

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
    case From::widened: {
      const auto held = pixels(from);
      return copiedLines(lines, held) * copiedWidth() * held.together();
    }
    default:
      return lines * result_size[1] * gatheredStride();
  }
}

bool TiledConvolution::hasSmallWeight() const {
  constexpr int64_t kBytes = 1 << 19;  // that stay in the second level of cache
  return windowBytes() * outputs <= kBytes;
}

int64_t TiledConvolution::linesAtOnce(From from) const {
  constexpr int64_t kFewBytes = 1 << 18;  // of lines that do beside a small weight
  constexpr int64_t kFewPixels = 128;
  constexpr int64_t kUnits = 8;  // of work for a thread
  const bool small = hasSmallWeight();
  const auto lines = result_size[0];
  const auto line = from == From::windows ? bytesOf(1, from) : stride[0] * size[1] * inputs * item;
  const auto panels = at::ceil_div(outputs, kPanel);
  const auto bands = at::ceil_div(kUnits * at::get_num_threads(), images * panels);
  const auto fewest = small ? at::ceil_div(kFewPixels, result_size[1]) : lines;
  const auto most =
      std::min((small ? kFewBytes : kMostBytes) / line, std::max(lines / bands, fewest));
  return at::ceil_div(lines, at::ceil_div(lines, std::clamp<int64_t>(most, 1, lines)));
}

// More than one where a panel of a large weight would meet few pixels.
int64_t TiledConvolution::imagesAtOnce(const Tiles& tiles, int64_t lines) const {
  constexpr int64_t kPixels = 512;
  if (hasSmallWeight() || !tiles.joined || lines < result_size[0]) {
    return 1;
  }
  const auto bytes = std::max(bytesOf(lines, tiles.from), imageBytes());
  const auto most =
      std::clamp<int64_t>(kMostBytes / bytes, 1, at::ceil_div(kPixels, lines * result_size[1]));
  const auto threads = std::min<int64_t>(at::get_num_threads(), images);
  return at::ceil_div(images, std::max(at::ceil_div(images, most), threads));
}

Band TiledConvolution::band(int64_t images, int64_t lines, const Tiles& tiles) const {
  if (tiles.from == From::windows) {
    const auto steps = at::ceil_div(windowBytes(), amx::kRowBytes);
    const auto pixels = images * lines * result_size[1];
    const amx::Pieces under{1, 0, 1, 0, steps, amx::kRowBytes, steps * amx::kRowBytes};
    Band found{nullptr, gatheredStride(), 0, under, 1, pixels};
    found.line = result_size[1];
    found.result_line = resultLine();
    return found;
  }
  const auto held = pixels(tiles.from);
  const auto pixel = held.together();
  const auto pitch = tiles.from == From::images ? size[1] : copiedWidth();
  const auto row = pitch * pixel;
  const auto columns = hasColumns() ? window[1] : 1;
  const auto steps = amx::stepsOf(window[1] / columns * pixel);
  const auto rows = piecesOf(held);
  const auto weight_row = window[1] * pixel;
  const amx::Pieces under{rows,        dilation[0] * row, columns, dilation[1] * pixel, steps.count,
                          steps.bytes, rows * weight_row, 0,       weight_row};
  Band found{nullptr, stride[1] * pixel, stride[0] / held.lines * row, under,
             lines,   result_size[1]};
  found.result_line = resultLine();
  if (tiles.joined) {
    found.line = found.width;
    found.gap = pitch - found.width;
    found.width = lines * pitch - found.gap;
    found.lines = images;
    found.line_stride = tiles.from == From::images ? imageBytes() : bytesOf(lines, tiles.from);
  }
  return found;
}

Band TiledConvolution::band(const Region& region) const {
  const auto pixel = inputs * item;
  const auto row = size[1] * pixel;
  const auto steps = amx::stepsOf(pixel);
  const amx::Pieces under{region.taps[0], dilation[0] * row,
                          region.taps[1], dilation[1] * pixel,
                          steps.count,    steps.bytes,
                          windowBytes(),  region.tap[0] * rowBytes() + region.tap[1] * pixel,
                          rowBytes()};
  Band found{nullptr, pixel, row, under, region.size[0], region.size[1]};
  found.result_line = result_size[1];
  if (tiling(region.size, size[1]).second) {
    found.line = region.size[1];
    found.gap = size[1] - region.size[1];
    found.width = region.size[0] * size[1] - found.gap;
    found.lines = 1;
  }
  return found;
}

int64_t TiledConvolution::resultLine() const {
  return result_lines == 1 ? 0 : result_lines * result_size[1];
}

// Lines of an image with what is outside.
void TiledConvolution::copy(const char* image, int64_t line, int64_t lines, uint8_t outside,
                            const Pixels& held, char* to) const {
  const auto pixel = inputs * item;
  const auto width = copiedWidth();
  const auto before = std::min(padding[1], width);
  const auto end = std::clamp(size[1] + padding[1], before, width);
  const auto together = held.together();
  const auto fill = [&](char* from, int64_t count) {
    if (held.lines == 1) {
      std::memset(from, outside, count * held.bytes);
      return;
    }
    for (int64_t x = 0; x < count; ++x) {
      std::memset(from + x * together, outside, held.bytes);
    }
  };
  const auto copyPixels = [&](const char* from, int64_t count, char* place) {
    if (held.bytes == pixel) {
      std::memcpy(place, from, count * pixel);
    } else if (held.bytes == sizeof(uint32_t)) {
      widen<uint32_t>(from, pixel, count, place, together);
    } else {
      widen<uint64_t>(from, pixel, count, place, together);
    }
  };
  auto y = line * stride[0] - padding[0];
  for (int64_t k = 0; k < copiedLines(lines, held); ++k, to += width * together) {
    for (int64_t i = 0; i < held.lines; ++i, ++y) {
      auto* place = to + i * held.bytes;
      if (y < 0 || y >= size[0]) {
        fill(place, width);
        continue;
      }
      fill(place, before);
      copyPixels(image + y * size[1] * pixel, end - before, place + before * together);
      fill(place + end * together, width - end);
    }
  }
}

void TiledConvolution::gather(const char* from, int64_t width, int64_t lines, char* to) const {
  const auto pixel = inputs * item;
  const auto pitch = width * pixel;
  const auto rest = at::round_up(windowBytes(), amx::kRowBytes) - windowBytes();
  const bool apart = window[1] > 1 && dilation[1] != 1;
  using vector_loops::Windows;
  const Windows windows{result_size[1],      stride[1] * pixel, window[0],
                        dilation[0] * pitch, rowBytes(),        gatheredStride()};
  static_assert(Windows::kMultiple == amx::kRowBytes);
  const bool few = !apart && window[0] <= Windows::kMostRows && rowBytes() <= Windows::kMostBytes;
  for (int64_t y = 0; y < lines; ++y, from += stride[0] * pitch) {
    if (few) {
      vector_loops::kernels().gatherWindows(from, to, windows);
      to += result_size[1] * gatheredStride();
      continue;
    }
    for (int64_t x = 0; x < result_size[1]; ++x, to += gatheredStride()) {
      auto* piece = to;
      for (int64_t ky = 0; ky < window[0]; ++ky) {
        const auto* row = from + ky * dilation[0] * pitch + x * stride[1] * pixel;
        if (apart) {
          for (int64_t kx = 0; kx < window[1]; ++kx) {
            std::memcpy(piece + kx * pixel, row + kx * dilation[1] * pixel, pixel);
          }
        } else {
          std::memcpy(piece, row, rowBytes());
        }
        piece += rowBytes();
      }
      std::memset(piece, 0, rest);
    }
  }
}

const char* TiledConvolution::prepare(const Part& part, const Tiles& tiles, const char* source,
                                      uint8_t outside, char* memory) const {
  const auto* image = source + part.image * imageBytes();
  const auto line_bytes = size[1] * inputs * item;
  if (tiles.from == From::images) {
    return image + part.line * stride[0] * line_bytes;
  }
  auto* to = memory;
  auto* padded = memory + part.images * bytesOf(part.lines, From::windows);
  for (int64_t i = 0; i < part.images; ++i, image += imageBytes()) {
    if (tiles.from != From::windows) {
      copy(image, part.line, part.lines, outside, pixels(tiles.from), to);
    } else if (isPadded()) {
      copy(image, part.line, part.lines, outside, pixels(From::copies), padded);
      gather(padded, copiedWidth(), part.lines, to);
    } else {
      gather(image + part.line * stride[0] * line_bytes, size[1], part.lines, to);
    }
    to += bytesOf(part.lines, tiles.from);
  }
  return memory;
}

// All regions meet a panel of the weight, or some of them where panels are fewer than threads.
void TiledConvolution::runRegions(const char* source, Multiply multiply) const {
  const auto all = regions();
  const auto count = static_cast<int64_t>(all.size());
  const auto panels = at::ceil_div(outputs, kPanel);
  const auto threads = int64_t{at::get_num_threads()};
  const auto parts = std::clamp<int64_t>(2 * threads / (images * panels), 1, count);
  const auto tasks = images * parts * panels;
  forSharesOf(tasks, 1, std::min(threads, tasks), [&](int64_t) {
    return [&](int64_t first, int64_t end) {
      for (; first < end; ++first) {
        const auto image = first / panels / parts;
        const auto part = first / panels % parts;
        const auto output = first % panels * kPanel;
        for (auto i = count * part / parts; i < count * (part + 1) / parts; ++i) {
          const auto& region = all[i];
          auto here = band(region);
          std::array<int64_t, 2> from{};
          for (size_t k = 0; k < from.size(); ++k) {
            from[k] = region.first[k] - padding[k] + region.tap[k] * dilation[k];
          }
          here.source =
              source + image * imageBytes() + (from[0] * size[1] + from[1]) * inputs * item;
          const auto pixel =
              (image * result_size[0] + region.first[0]) * result_size[1] + region.first[1];
          multiply({here, pixel * outputs, 0, output, std::min(kPanel, outputs - output)});
        }
      }
    };
  });
}

void TiledConvolution::run(const void* source, uint8_t outside, Multiply multiply) const {
  if (skipsPadding()) {
    return runRegions(static_cast<const char*>(source), multiply);
  }
  constexpr int64_t kForOne = 1 << 20;  // products that are not worth a second thread
  const auto how = tiles();
  const auto lines_at_once = linesAtOnce(how.from);
  const auto images_at_once = imagesAtOnce(how, lines_at_once);
  const auto bands = at::ceil_div(result_size[0], lines_at_once);
  const auto panels = at::ceil_div(outputs, kPanel);
  const auto result_pixels = result_size[0] * result_size[1];
  const auto products = images * result_pixels * (windowBytes() / item) * outputs;
  const auto padded_bytes =
      how.from == From::windows && isPadded() ? bytesOf(lines_at_once, From::copies) : 0;
  const auto partOf = [&](int64_t i) {
    const auto image = i / bands * images_at_once;
    const auto line = i % bands * lines_at_once;
    return Part{image, std::min(images_at_once, images - image), line,
                std::min(lines_at_once, result_size[0] - line)};
  };
  forTasksOf(
      at::ceil_div(images, images_at_once) * bands * panels,
      images_at_once * bytesOf(lines_at_once, how.from) + padded_bytes,
      [&](void* memory) {
        return [&, memory, last = int64_t{-1}, prepared = static_cast<const char*>(nullptr)](
                   int64_t first, int64_t end) mutable {
          while (first < end) {
            const auto i = first / panels;
            const auto until = std::min(end, (i + 1) * panels);
            const auto part = partOf(i);
            if (i != last) {
              prepared = prepare(part, how, static_cast<const char*>(source), outside,
                                 static_cast<char*>(memory));
              last = i;
            }
            auto here = band(part.images, part.lines, how);
            here.source = prepared;
            const auto pixel = part.image * result_pixels + part.line * result_size[1];
            const auto end_output = std::min((until - i * panels) * kPanel, outputs);
            for (auto o = (first - i * panels) * kPanel; o < end_output;) {
              const auto line = o / outputsOfLine();
              const auto before = line * outputsOfLine();
              const auto count = std::min(end_output, before + outputsOfLine()) - o;
              const auto index = pixel * result_lines + line * result_size[1];
              multiply({here, index * outputsOfLine(), before, o - before, count});
              o += count;
            }
            first = until;
          }
        };
      },
      std::max<int64_t>(1, products / kForOne));
}

at::Tensor TiledConvolution::ordered(const at::Tensor& weight) const {
  const auto from = skipsPadding() ? From::images : tiles().from;
  const auto held = pixels(from);
  const auto more_inputs = held.bytes / item - inputs;
  const auto more_lines = piecesOf(held) * held.lines - window[0];
  const auto matrix = at::constant_pad_nd(weight, {0, 0, 0, more_lines, 0, more_inputs})
                          .unflatten(2, {piecesOf(held), held.lines})
                          .permute({0, 2, 4, 3, 1})
                          .flatten(1);
  const auto bytes =
      from == From::windows ? at::round_up(windowBytes(), amx::kRowBytes) : matrix.size(1) * item;
  const auto more_outputs = at::round_up(outputs, amx::kOutputs) - outputs;
  const auto together = amx::kUnit / item;
  return at::constant_pad_nd(matrix, {0, bytes / item - matrix.size(1), 0, more_outputs})
      .view({-1, amx::kOutputs, bytes / amx::kUnit, together})
      .transpose(1, 2);
}

void NarrowConvolution::run(const Data& data) const {
  const auto& c = convolution;
  c.run(data.source, 0, [&](const TiledConvolution::Sums& sums) {
    const auto& band = sums.band;
    const auto inputs = band.under.weight_bytes / c.item;
    const gemm::ProblemOf<Bfloat16, Bfloat16> problem{
        band.lines * band.width,
        inputs,
        c.outputsOfLine(),
        rectifier,
        nullptr,
        0,
        data.weight + sums.lines_outputs * inputs,
        0,
        data.bias != nullptr ? data.bias + sums.lines_outputs : nullptr,
        data.addend != nullptr ? data.addend + sums.result : nullptr,
        data.result + sums.result};
    gemm::amx.multiplyBand(problem, band, sums.first_output, sums.outputs,
                           activation ? &*activation : nullptr);
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
  const auto* addend = static_cast<const R*>(data.addend);
  auto* result = static_cast<R*>(data.result);
  c.run(data.source, zero_point, [&](const TiledConvolution::Sums& part) {
    const auto& band = part.band;
    const auto inputs = band.under.weight_bytes;
    const auto o = part.lines_outputs + part.first_output;
    const auto at = part.result + part.first_output;
    const quantized::ProductOf<R> product{band.lines * band.width,
                                          inputs,
                                          part.outputs,
                                          nullptr,
                                          0,
                                          data.weight + o * inputs,
                                          quantized::fromOutput(sums.rescale, o),
                                          addend != nullptr ? addend + at : nullptr,
                                          result + at,
                                          c.outputsOfLine(),
                                          nullptr,
                                          c.outputs - o - part.outputs};
    if constexpr (std::is_same_v<R, float>) {
      quantized::amx.multiplyBandToFloat(product, band);
    } else {
      quantized::amx.multiplyBand(product, band);
    }
  });
}

}  // namespace llga
