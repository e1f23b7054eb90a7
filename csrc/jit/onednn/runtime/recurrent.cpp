#include "jit/onednn/runtime/recurrent.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <type_traits>
#include <vector>

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kDirections = 2;  // at most

// Parts of each of several steps, for threads of which each has some of its own. A step begins when
// all of the one before is done. Where another thread is late with a part, as one that has to share
// its core with something else, who waits for it does it in its place.
class Course {
 public:
  explicit Course(int64_t parts) : claims_(static_cast<size_t>(parts)) {}

  // Returns when all of this step is done. Each thread calls it for each step, with the same parts.
  template <typename Run>
  void take(int64_t step, int64_t first, int64_t last, const Run& run) {
    constexpr int kPatience = 1 << 8;
    const auto parts = static_cast<int64_t>(claims_.size());
    takeSome(step, first, last, run);
    for (int i = 0; done_.load(std::memory_order_acquire) < (step + 1) * parts; ++i) {
      if (i < kPatience) {
        _mm_pause();
      } else if (!takeSome(step, 0, parts, run)) {
        std::this_thread::yield();
      }
    }
  }

 private:
  // Those parts that nobody has begun. False if there was none.
  template <typename Run>
  bool takeSome(int64_t step, int64_t first, int64_t last, const Run& run) {
    bool any = false;
    for (auto part = first; part < last; ++part) {
      auto begun = step;
      if (claims_[static_cast<size_t>(part)].steps.compare_exchange_strong(begun, step + 1)) {
        run(part);
        done_.fetch_add(1, std::memory_order_acq_rel);
        any = true;
      }
    }
    return any;
  }

  struct alignas(64) Claim {
    std::atomic<int64_t> steps{0};  // that somebody has begun
  };

  std::vector<Claim> claims_;
  alignas(64) std::atomic<int64_t> done_{0};  // parts, of all steps
};

void widen(const Bfloat16* from, int64_t count, float* to) {
  vector_loops::kernels().widenRows(from, 1, count, count, to);
}

void copyNumbers(const float* from, int64_t count, Bfloat16* to) {
  vector_loops::kernels().narrowRows(from, 1, count, to, count);
}

void copyNumbers(const float* from, int64_t count, float* to) { std::copy_n(from, count, to); }

}  // namespace

namespace recurrent {

const Kernels& kernels() { return &Linear::kernels() == &gemm::avx512 ? avx512 : avx2; }

}  // namespace recurrent

int64_t Recurrent::blocks() const { return at::ceil_div(units, recurrent::kernels().width); }

Linear Recurrent::linear(int64_t layer) const {
  return {rows(), inputsOf(layer), blocks() * gates() * recurrent::kernels().width,
          Rectifier::none};
}

// -------------------------------------------------------------------------------- parameters

// (gate, unit; ...) as (block, gate, unit; ...), with zeros behind the last unit.
at::Tensor Recurrent::byBlock(const at::Tensor& rows_of_gates) const {
  const auto width = recurrent::kernels().width;
  const auto columns = rows_of_gates.numel() / (gates() * units);
  const auto all = rows_of_gates.to(at::kFloat).reshape({gates(), units, columns});
  const auto padded = at::constant_pad_nd(all, {0, 0, 0, blocks() * width - units});
  return padded.view({gates(), blocks(), width, columns}).permute({1, 0, 2, 3});
}

std::vector<int64_t> Recurrent::inputWeightSizes(int64_t layer) const {
  auto sizes = linear(layer).weightSizes();
  // Of another cell it would be another order: each has its own number of dimensions.
  sizes.insert(sizes.begin(), static_cast<size_t>(gates()), 1);
  return sizes;
}

std::vector<int64_t> Recurrent::hiddenWeightSizes() const {
  return {blocks(), units, gates(), 1, recurrent::kernels().width};
}

void Recurrent::orderInputWeight(const at::Tensor& weight, int64_t layer,
                                 const at::Tensor& to) const {
  const auto outputs = byBlock(weight).reshape({-1, inputsOf(layer)});
  Linear::toPanels(outputs.t(), to.view(linear(layer).weightSizes()));
}

void Recurrent::orderHiddenWeight(const at::Tensor& weight, const at::Tensor& to) const {
  to.copy_(byBlock(weight).permute({0, 3, 1, 2}).unsqueeze(3));
}

at::Tensor Recurrent::inputBias(const at::Tensor& input, const at::Tensor& hidden) const {
  auto sum = input.to(at::kFloat).clone();
  const auto outer = cell == Cell::gru ? 2 * units : sum.numel();
  sum.slice(0, 0, outer) += hidden.slice(0, 0, outer);
  return byBlock(sum).contiguous();
}

at::Tensor Recurrent::newBias(const at::Tensor& hidden) const {
  return byBlock(hidden).select(1, 2).contiguous();
}

// ------------------------------------------------------------------------------------ running

// What one layer reads and writes.
struct Recurrent::Layer {
  struct Direction {
    const float* sums;
    const float* hidden_weight;
    const float* new_bias;
    const float* before;  // the first step
    float* cells;
  };
  std::array<Direction, kDirections> directions;
  Strides sums;
  float* result;
  Strides results;
};

struct Recurrent::Scratch {
  float* source;  // in float32
  std::array<float*, kDirections> sums;
  float* hidden;  // a layer's result
  float* units;   // before the first step
  float* cells;
  int64_t numbers;  // of all
};

Recurrent::Scratch Recurrent::scratchAt(float* memory, bool is_narrow) const {
  Scratch scratch{};
  int64_t taken = 0;
  const auto take = [&](bool needed, int64_t numbers) -> float* {
    constexpr int64_t kLine = 16;
    auto* piece = needed && memory != nullptr ? memory + taken : nullptr;
    taken += needed ? at::ceil_div(numbers, kLine) * kLine : 0;
    return piece;
  };
  scratch.source = take(is_narrow, rows() * inputs);
  for (int64_t i = 0; i < directions; ++i) {
    scratch.sums[static_cast<size_t>(i)] = take(true, rows() * linear(0).outputs);
  }
  scratch.hidden = take(is_narrow || layers > 1, rows() * directions * units);
  scratch.units = take(is_narrow, states());
  scratch.cells = take(cell == Cell::lstm, states());
  scratch.numbers = taken;
  return scratch;
}

int64_t Recurrent::scratch(bool is_narrow) const { return scratchAt(nullptr, is_narrow).numbers; }

// Each thread has the same parts of the units in all steps. A direction's parts run at the same
// time, on as many threads, or on one.
void Recurrent::runLayer(const Layer& layer) const {
  constexpr int64_t kForOne = 1 << 14;   // products that are not worth a second thread
  constexpr int64_t kForLate = 1 << 18;  // that are worth being done for one that is late
  constexpr int64_t kMostParts = 4;      // of a thread
  const auto run_blocks = recurrent::kernels().find(cell);
  const auto products = gates() * units * units * sequences;
  const auto threads = std::max<int64_t>(1, at::get_num_threads() / directions);
  const auto sharers = std::clamp<int64_t>(std::min(products / kForOne, blocks()), 1, threads);
  const auto most = sharers == 1 ? 1 : std::min(products / sharers / kForLate, blocks() / sharers);
  const auto of_each = std::clamp<int64_t>(most, 1, kMostParts);
  const auto parts = sharers * of_each;
  std::array<Course, kDirections> courses{Course(parts), Course(parts)};
  const auto runDirection = [&](int64_t index, int64_t first_part, int64_t last_part) {
    const auto& direction = layer.directions[static_cast<size_t>(index)];
    recurrent::Step step{};
    step.rows = sequences;
    step.units = units;
    step.sums_stride = layer.sums.sequence;
    step.weight = direction.hidden_weight;
    step.bias = direction.new_bias;
    step.before = direction.before;
    step.before_stride = units;
    step.after_stride = layer.results.sequence;
    step.cells = direction.cells;
    for (int64_t i = 0; i < steps; ++i) {
      const auto t = index == 0 ? i : steps - 1 - i;
      step.sums = direction.sums + t * layer.sums.step;
      step.after = layer.result + t * layer.results.step + index * units;
      courses[static_cast<size_t>(index)].take(i, first_part, last_part, [&](int64_t part) {
        run_blocks(step, blocks() * part / parts, blocks() * (part + 1) / parts);
      });
      step.before = step.after;
      step.before_stride = step.after_stride;
    }
  };
  // A thread that has parts of both directions has them one after the other, like all others.
  at::parallel_for(0, directions * sharers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin / sharers; index * sharers < end; ++index) {
      runDirection(index, std::max(begin - index * sharers, int64_t{0}) * of_each,
                   std::min(end - index * sharers, sharers) * of_each);
    }
  });
}

template <typename T>
void Recurrent::runAs(const Data<T>& data) const {
  constexpr bool is_narrow = !std::is_same_v<T, float>;
  const auto scratch = scratchAt(data.scratch, is_narrow);
  const float* source = scratch.source;
  const float* first_units = scratch.units;
  auto* cells = scratch.cells;
  if constexpr (is_narrow) {
    widen(data.source, rows() * inputs, scratch.source);
    widen(data.units, states(), scratch.units);
    if (cell == Cell::lstm) {
      widen(data.cells, states(), cells);
    }
  } else {
    source = data.source;
    first_units = data.units;
    if (cell == Cell::lstm) {
      cells = data.last_cells != nullptr ? data.last_cells : cells;
      std::copy_n(data.cells, states(), cells);
    }
  }
  const auto state = sequences * units;  // numbers of a layer and direction
  const auto columns = directions * units;
  const Strides order{source_strides.step / inputs, source_strides.sequence / inputs};
  const auto stridesOf = [&](int64_t numbers) {
    return Strides{order.step * numbers, order.sequence * numbers};
  };
  const auto of_each = data.parameters.size() / static_cast<size_t>(layers * directions);
  for (int64_t l = 0; l < layers; ++l) {
    const auto product = linear(l);
    Layer layer{};
    layer.sums = stridesOf(product.outputs);
    for (int64_t d = 0; d < directions; ++d) {
      const auto at = l * directions + d;
      const auto parameter = [&](size_t i) {
        return static_cast<const float*>(data.parameters[static_cast<size_t>(at) * of_each + i]);
      };
      auto* sums = scratch.sums[static_cast<size_t>(d)];
      product.run({source, parameter(0), parameter(2), nullptr, sums});
      layer.directions[static_cast<size_t>(d)] = {
          sums, parameter(1), cell == Cell::gru ? parameter(3) : nullptr, first_units + at * state,
          cells == nullptr ? nullptr : cells + at * state};
    }
    layer.result = scratch.hidden;
    layer.results = stridesOf(columns);
    if constexpr (!is_narrow) {
      if (l + 1 == layers) {
        layer.result = data.result;
        layer.results = result_strides;
      }
    }
    runLayer(layer);
    source = scratch.hidden;
    for (int64_t d = 0; d < directions && data.last_units != nullptr; ++d) {
      const auto t = d == 0 ? steps - 1 : 0;
      for (int64_t s = 0; s < sequences; ++s) {
        copyNumbers(layer.result + t * layer.results.step + s * layer.results.sequence + d * units,
                    units, data.last_units + (l * directions + d) * state + s * units);
      }
    }
  }
  if constexpr (is_narrow) {
    const auto from = stridesOf(columns);
    for (int64_t t = 0; t < steps; ++t) {
      for (int64_t s = 0; s < sequences; ++s) {
        copyNumbers(scratch.hidden + t * from.step + s * from.sequence, columns,
                    data.result + t * result_strides.step + s * result_strides.sequence);
      }
    }
    if (data.last_cells != nullptr) {
      copyNumbers(cells, states(), data.last_cells);
    }
  }
}

void Recurrent::run(const Data<float>& data) const { runAs(data); }

void Recurrent::run(const Data<Bfloat16>& data) const { runAs(data); }

}  // namespace llga
