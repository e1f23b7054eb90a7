#include "jit/onednn/runtime/winograd.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/tasks.h"
#include "jit/onednn/runtime/winograd_tiles.h"

#if !defined(_OPENMP) && !defined(__clang__)
#error "at::parallel_for would be a plain loop"
#endif

namespace llga {
namespace {

// Null without AVX2, or where oneDNN was told not to use it.
const winograd::Kernels* kernels() {
  static const auto* found = []() -> const winograd::Kernels* {
    if (usesAvxGemm()) {
      const bool can = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
      return can ? &winograd::avx2 : nullptr;
    }
    return usesAvx512() && __builtin_cpu_supports("avx512f") != 0 ? &winograd::avx512 : nullptr;
  }();
  return found;
}

int64_t panels(int64_t outputs) { return (outputs + kernels()->panel - 1) / kernels()->panel; }

constexpr int64_t kMostTiles = 64;         // that are computed at once
constexpr int64_t kSmallWeight = 1 << 18;  // floats

int64_t tilesOf(const WinogradConvolution& c, int64_t tile) {
  return c.images * ((c.result_size[0] + tile - 1) / tile) * ((c.result_size[1] + tile - 1) / tile);
}

bool isSmall(const WinogradConvolution& c, int64_t tile) {
  return winograd::points(tile) * c.inputs * c.outputs <= kSmallWeight;
}

// Costs are in multiplications.
constexpr double kLargeGain = 0.85;  // less of the small tile's isn't worth a larger weight
constexpr double kFewest = 2e6;      // products of a convolution that is worth it

winograd::Costs costs(const WinogradConvolution& c) {
  return c.dtype == at::kBFloat16 ? winograd::avx512_bf16.costs : kernels()->costs;
}

double directCost(const WinogradConvolution& c) {
  const auto pixels = static_cast<double>(c.images * c.result_size[0] * c.result_size[1]);
  const auto one = costs(c);
  return static_cast<double>(9 * c.inputs * c.outputs) * (one.direct * pixels + one.direct_read);
}

double cost(const WinogradConvolution& c, int64_t tile) {
  const auto tiles = static_cast<double>(tilesOf(c, tile));
  const auto products = static_cast<double>(c.inputs * c.outputs);
  const auto numbers = static_cast<double>(c.inputs + c.outputs);
  const auto one = costs(c);
  const auto again = isSmall(c, tile) ? 0 : std::max(0., tiles / kMostTiles - 1);
  return static_cast<double>(winograd::points(tile)) *
         (products * (tiles + one.read + one.reread * again) + one.transform * numbers * tiles);
}

// G: what each of three weights in a row is worth at a point.
using Factors = std::vector<std::array<double, 3>>;

Factors factors(int64_t tile) {
  const std::vector<double> finite =
      tile == 2 ? std::vector<double>{0, 1, -1} : std::vector<double>{0, 0.75, -0.75, 1.5, -1.5};
  Factors rows;
  for (const auto point : finite) {
    double scale = 1;
    for (const auto other : finite) {
      scale *= other == point ? 1 : point - other;
    }
    // With these signs the kernel needs no multiplication by -1.
    scale = tile == 2 && point == 0 ? -scale : scale;
    rows.push_back({1 / scale, point / scale, point * point / scale});
  }
  rows.push_back({0, 0, 1});
  return rows;
}

// G w G', each number `stride` behind the one before.
void transformTile(const Factors& g, const float* weight, float* to, int64_t stride) {
  for (const auto& down : g) {
    std::array<double, 3> row{};
    for (size_t x = 0; x < 3; ++x) {
      row[x] = down[0] * weight[x] + down[1] * weight[3 + x] + down[2] * weight[6 + x];
    }
    for (const auto& across : g) {
      *to = static_cast<float>(across[0] * row[0] + across[1] * row[1] + across[2] * row[2]);
      to += stride;
    }
  }
}

}  // namespace

const char* WinogradConvolution::isa() const {
  return dtype == at::kBFloat16 ? winograd::avx512_bf16.name : kernels()->name;
}

bool WinogradConvolution::isSupported() const {
  const bool known = dtype == at::kFloat || (usesAvx512Bf16() && !usesAmx());
  return known && kernels() != nullptr && inputs % kernels()->vector == 0 &&
         outputs % kernels()->vector == 0;
}

int64_t WinogradConvolution::chooseTile() const {
  const auto direct = directCost(*this);
  const auto small = cost(*this, 2);
  const auto large = cost(*this, 4);
  if (direct < kFewest || std::min(small, large) > costs(*this).most * direct) {
    return 0;
  }
  return large < kLargeGain * small ? 4 : 2;
}

std::vector<int64_t> WinogradConvolution::weightSizes() const {
  return {winograd::points(tile), panels(outputs), inputs, kernels()->panel};
}

void WinogradConvolution::transform(const at::Tensor& weight, const at::Tensor& transformed) const {
  const auto panel = kernels()->panel;
  const auto g = factors(tile);
  if (outputs % panel != 0) {
    transformed.zero_();
  }
  const auto wide = weight.to(at::kFloat);
  const auto* from = wide.const_data_ptr<float>();
  auto* to = transformed.mutable_data_ptr<float>();
  at::parallel_for(0, panels(outputs), 1, [&](int64_t first, int64_t last) {
    // Rows of a panel are a power of two apart: number by number, each would miss the caches.
    std::vector<float> rows(winograd::points(tile) * panel);
    for (auto p = first; p < last; ++p) {
      const auto width = std::min(panel, outputs - p * panel);
      for (int64_t i = 0; i < inputs; ++i) {
        for (int64_t o = 0; o < width; ++o) {
          transformTile(g, from + ((p * panel + o) * inputs + i) * 9, rows.data() + o, panel);
        }
        for (int64_t point = 0; point < winograd::points(tile); ++point) {
          std::copy_n(rows.data() + point * panel, width,
                      to + point * transformed.stride(0) + (p * inputs + i) * panel);
        }
      }
    }
  });
}

void WinogradConvolution::run(const Data& data) const {
  if (dtype == at::kBFloat16) {
    runAs<Bfloat16>(data, winograd::avx512_bf16.run);
  } else {
    runAs<float>(data, kernels()->run);
  }
}

template <typename T, typename Run>
void WinogradConvolution::runAs(const Data& data, const Run& runTask) const {
  constexpr int64_t kFewTiles = 24;   // where the weight is large
  constexpr int64_t kNear = 1 << 16;  // floats of working memory: in a core's own cache
  const winograd::ProblemOf<T> problem{size[0],
                                       size[1],
                                       result_size[0],
                                       result_size[1],
                                       padding[0],
                                       padding[1],
                                       inputs,
                                       outputs,
                                       tile,
                                       silu,
                                       relu,
                                       static_cast<const T*>(data.source),
                                       data.weight,
                                       static_cast<const T*>(data.plain),
                                       data.bias,
                                       static_cast<const T*>(data.addend),
                                       static_cast<T*>(data.result)};
  const auto threads = static_cast<int64_t>(at::get_num_threads());
  const auto tiles = tilesOf(*this, tile);
  // The weight is read once for each block of tiles: blocks are larger where it is large. Threads
  // divide blocks between them, or outputs where there would be too few tiles for each.
  const auto one = kernels()->scratch(tile, inputs, {0, 1, 0, outputs});
  const auto most =
      isSmall(*this, tile) ? std::clamp(kNear / one, kernels()->rows, kMostTiles) : kMostTiles;
  auto blocks = (tiles + most - 1) / most;
  if (tiles >= threads * kFewTiles) {
    blocks = (blocks + threads - 1) / threads * threads;
  }
  const auto wanted = std::max<int64_t>(1, threads / blocks);
  const auto part = (panels(outputs) + wanted - 1) / wanted * kernels()->panel;
  const auto parts = (outputs + part - 1) / part;
  const auto scratch = kernels()->scratch(
      tile, inputs, {0, (tiles + blocks - 1) / blocks, 0, std::min(part, outputs)});

  const auto bytes = scratch * static_cast<int64_t>(sizeof(float));
  forTasks(blocks * parts, bytes, [&](int64_t i, void* memory) {
    const auto first_tile = tiles * (i / parts) / blocks;
    const auto output = i % parts * part;
    const winograd::Task task{first_tile, tiles * (i / parts + 1) / blocks - first_tile, output,
                              std::min(part, outputs - output)};
    runTask(problem, task, static_cast<float*>(memory));
  });
}

}  // namespace llga
