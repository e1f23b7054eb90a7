#include "jit/onednn/runtime/linear.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <limits>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/gemv.h"
#include "jit/onednn/runtime/shares.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

// Whether two numbers below each other can be moved as one of twice the size.
bool liesInPairs(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 && matrix.size(0) % 2 == 0 && matrix.stride(1) % 2 == 0 &&
         matrix.storage_offset() % 2 == 0;
}

}  // namespace

const gemm::Kernels& Linear::kernels() {
  static const bool avx512 = usesAvx512() && __builtin_cpu_supports("avx512f") != 0;
  return avx512 ? gemm::avx512 : gemm::avx2;
}

std::vector<int64_t> Linear::weightSizes() const {
  return {(outputs + kernels().panel - 1) / kernels().panel, inputs, kernels().panel};
}

void Linear::toPanels(const at::Tensor& weight, const at::Tensor& panels) {
  const auto panel = kernels().panel;
  const auto together = panels.size(2) / panel;
  const auto missing = panels.size(0) * panel - weight.size(1);
  const auto whole = missing == 0 ? weight : at::constant_pad_nd(weight, {0, missing});
  if (together == 2 && panels.itemsize() == 2 && liesInPairs(whole)) {
    const auto pairs = whole.t().view(at::kInt).t();
    panels.view(at::kInt).copy_(
        pairs.reshape({panels.size(1), panels.size(0), panel}).permute({1, 0, 2}));
    return;
  }
  const auto parts = whole.reshape({panels.size(1), together, panels.size(0), panel});
  panels.view({panels.size(0), panels.size(1), panel, together}).copy_(parts.permute({2, 0, 3, 1}));
}

bool Linear::isNarrow(const at::Tensor& weight) {
  if (!weight.is_non_overlapping_and_dense()) {
    return false;
  }
  const auto* numbers = static_cast<const float*>(weight.data_ptr());
  return std::all_of(numbers, numbers + weight.numel(), [](float number) {
    constexpr uint32_t kDropped = 0xFFFF;
    return (c10::bit_cast<uint32_t>(number) & kDropped) == 0;
  });
}

void Linear::run(const Data& data) const {
  if (narrow_weight) {
    runAs<Bfloat16>(data, kernels().runNarrowWeight);
  } else {
    runAs<float>(data, kernels().run);
  }
}

template <typename W>
void Linear::runAs(const Data& data,
                   void (*run)(const gemm::ProblemOf<float, float, W>&, const gemm::Task&)) const {
  constexpr int64_t kForOne = 1 << 18;   // products that are not worth a second thread
  constexpr int64_t kOfActivation = 64;  // that take as long as it does for one number
  const auto panel = kernels().panel;
  const gemm::ProblemOf<float, float, W> problem{rows,
                                                 inputs,
                                                 outputs,
                                                 rectifier,
                                                 data.source,
                                                 inputs,
                                                 static_cast<const W*>(data.weight),
                                                 inputs * panel,
                                                 data.bias,
                                                 data.addend,
                                                 data.result};
  const auto panels = weightSizes()[0];
  const auto work = rows * outputs * (inputs + (activation ? kOfActivation : 0));
  const auto wanted = std::min<int64_t>(at::get_num_threads(), work / kForOne);
  const auto [row_parts, panel_parts] = divided(std::max<int64_t>(wanted, 1), panels);
  const auto block = [&](int64_t row, int64_t end_row, int64_t first, int64_t last) {
    const auto output = first * panel;
    const auto count = std::min(last * panel, outputs) - output;
    run(problem, {row, end_row - row, output, count});
    if (data.scale != nullptr) {
      auto* results = data.result + row * outputs + output;
      vector_loops::functions<float>().affineRows(
          results, results,
          {end_row - row, count, outputs, outputs, data.scale + output, data.shift + output,
           -std::numeric_limits<float>::infinity()});
    }
    for (auto r = row; activation && r < end_row; ++r) {  // while they are in this core's cache
      auto* results = data.result + r * outputs + output;
      vector_loops::functions<float>().activate(*activation, results, results, count);
    }
    for (auto r = row; data.factor != nullptr && r < end_row; ++r) {
      const auto at = r * outputs + output;
      auto* results = data.result + at;
      vector_loops::kernels().compute({vector_loops::Pointwise::Function::multiply}, results,
                                      data.factor + at, nullptr, count, results);
    }
  };
  // Of rows that are divided, each part has all its panels; or the other way round.
  if (panel_parts == 1) {
    forShares(rows, kernels().rows, row_parts,
              [&](int64_t from, int64_t to) { block(from, to, 0, panels); });
    return;
  }
  forShares(row_parts * panels, 1, row_parts * panel_parts, [&](int64_t from, int64_t to) {
    while (from < to) {
      const auto part = from / panels;
      const auto end = std::min((part + 1) * panels, to);
      block(rows * part / row_parts, rows * (part + 1) / row_parts, from - part * panels,
            end - part * panels);
      from = end;
    }
  });
}

std::array<int64_t, 2> Linear::divided(int64_t most, int64_t panels) const {
  constexpr int64_t kFewRows = 256;  // all of them stay in a cache, while weights are read once
  const bool by_outputs = rows <= kFewRows;
  std::array<int64_t, 2> best{1, 1};
  auto least = std::numeric_limits<int64_t>::max();
  for (int64_t i = 1; i <= most; ++i) {
    const auto row_parts = std::min(by_outputs ? i : most / i, rows);
    const auto panel_parts = std::min(most / row_parts, panels);
    const auto largest =
        ((rows + row_parts - 1) / row_parts) * ((panels + panel_parts - 1) / panel_parts);
    if (largest < least) {
      least = largest;
      best = {row_parts, panel_parts};
    }
    if (least * most <= rows * panels) {
      break;  // none is smaller
    }
  }
  return best;
}

namespace {

constexpr int64_t kSmallWeight = 1 << 19;  // numbers that are in a cache

}  // namespace

const gemm::NarrowKernels& NarrowLinear::kernels() {
  return usesAmx() ? gemm::amx : gemm::avx512_bf16;
}

bool NarrowLinear::hasKernels() { return usesAvx512Bf16(); }

bool NarrowLinear::isRow() const { return rows == 1 && inputs * outputs > kSmallWeight; }

bool NarrowLinear::isSupported() const { return isRow() || (hasKernels() && inputs % 2 == 0); }

bool NarrowLinear::pays() const {
  if (isRow() || !usesAmx()) {
    return true;
  }
  constexpr int64_t kFewRows = 16;  // that meet weights which are in no cache
  // Products: of more, oneDNN's kernel is as fast in one thread. Several of its threads wait for
  // each other; ours take each other's shares.
  constexpr int64_t kMost = int64_t{1} << 30;
  const bool few = rows * inputs * outputs <= kMost || at::get_num_threads() > 1;
  return few && (rows >= kFewRows || inputs * outputs <= kSmallWeight);
}

std::vector<int64_t> NarrowLinear::weightSizes() const {
  const auto panel = kernels().panel;
  return {(outputs + panel - 1) / panel, inputs / 2, 2 * panel};
}

template <typename R>
void NarrowLinear::multiplyRow(const Data<R>& data, float* sums) const {
  constexpr int64_t kGrain = 1 << 17;  // numbers of the weight: threads may have to be woken
  gemv(data.weight, data.bias, outputs, inputs, data.source, sums, rectifier, kGrain);
}

// Calls run(problem, task) for the tasks that it is divided into.
template <typename R, typename Run>
void NarrowLinear::runByPanels(const Data<R>& data, const Run& run) const {
  constexpr int64_t kForOne = 1 << 20;  // products that are not worth a second thread
  constexpr int64_t kOfActivation = 128;
  const auto panel = kernels().panel;
  gemm::ProblemOf<Bfloat16, R> problem{rows,        inputs,      outputs,     rectifier,
                                       data.source, inputs,      data.weight, inputs * panel,
                                       data.bias,   data.addend, data.result};
  problem.factor = data.factor;
  const auto panels = weightSizes()[0];
  const auto work = rows * outputs * (inputs + (activation ? kOfActivation : 0));
  const auto wanted = std::min<int64_t>(at::get_num_threads(), work / kForOne);
  // What is divided is read by one thread, the other operand by all.
  const bool by_outputs = outputs >= rows && panels >= wanted;
  const auto units = by_outputs ? panels : rows;
  const auto together = by_outputs ? 1 : kernels().rows;
  const auto parts = std::clamp<int64_t>(wanted, 1, at::ceil_div(units, together));
  forShares(units, together, parts, [&](int64_t from, int64_t to) {
    const gemm::Task task =
        by_outputs ? gemm::Task{0, rows, from * panel, std::min(to * panel, outputs) - from * panel}
                   : gemm::Task{from, to - from, 0, outputs};
    run(problem, task);
  });
}

void NarrowLinear::run(const Data<float>& data) const {
  if (isRow()) {
    return multiplyRow(data, data.result);
  }
  runByPanels(data, kernels().toWide);
}

void NarrowLinear::run(const Data<Bfloat16>& data) const {
  if (isRow()) {
    const auto memory = arena()->allocate(static_cast<size_t>(outputs) * sizeof(float));
    auto* sums = static_cast<float*>(memory.get());
    multiplyRow(data, sums);
    if (activation) {
      activate(*activation, sums, sums, outputs);
    }
    std::transform(sums, sums + outputs, data.result,
                   [](float sum) { return c10::BFloat16(sum).x; });
    return;
  }
  runByPanels(data, [&](const auto& problem, const gemm::Task& task) {
    if (activation) {
      kernels().toActivated(problem, task, *activation);
    } else {
      kernels().toNarrow(problem, task);
    }
  });
}

}  // namespace llga
