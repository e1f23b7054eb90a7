#include "jit/onednn/runtime/pointwise.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <memory>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/transposition.h"

namespace llga {
namespace {

using vector_loops::kernels;
using Port = PointwiseChain::Port;

// Numbers that are computed at a time: the values of a chain stay in the first cache.
int64_t numbersAtOnce(size_t values) {
  constexpr int64_t kAll = 1 << 13;
  constexpr int64_t kLeast = 1 << 8;
  constexpr int64_t kMost = 1 << 10;
  return std::clamp(kAll / static_cast<int64_t>(values), kLeast, kMost);
}

// What a strip has of rows and columns, of so many numbers at most; whole rows if they are asked
// for. Long ones need not be brought together, but for data that lies across.
std::array<int64_t, 2> stripOf(int64_t numbers, int64_t columns, bool across, bool whole) {
  constexpr int64_t kLong = 1 << 8;
  constexpr int64_t kLine = 16;  // of a cache, numbers
  if (across) {
    const auto wide = whole ? columns : std::min(columns, numbers / kLine);
    return {std::max(kLine, numbers / wide), wide};
  }
  const auto wide = whole ? columns : std::min(columns, numbers);
  return {columns < kLong ? std::max<int64_t>(1, numbers / columns) : 1, wide};
}

// Whether rows lie side by side, number by number.
bool liesAcross(const Port& port) {
  return port.strides.end()[-2] == 1 && port.strides.end()[-1] > 1;
}

bool isOneNumber(const Port& port) {
  return std::all_of(port.strides.begin(), port.strides.end(),
                     [](int64_t stride) { return stride == 0; });
}

// Numbers `step` apart.
template <typename T>
void gather(const T* from, int64_t count, int64_t step, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<float>(from[i * step]);
  }
}

template <typename T>
void gatherRows(const void* data, const std::array<int64_t, 2>& sizes,
                const std::array<int64_t, 2>& strides, int64_t offset, float* to) {
  const auto* from = static_cast<const T*>(data) + offset;
  const auto [rows, columns] = sizes;
  for (int64_t row = 0; row < rows; ++row, from += strides[0], to += columns) {
    if (strides[1] == 0) {
      std::fill_n(to, columns, static_cast<float>(*from));
    } else {
      gather(from, columns, strides[1], to);
    }
  }
}

}  // namespace

std::optional<PointwiseChain> PointwiseChain::arranged() const {
  std::vector<Port> ports = data;
  for (const auto& result : results) {
    ports.push_back(result.port);
  }
  const auto& first = results.front().port.strides;
  std::vector<size_t> order;
  for (const auto i : c10::irange(sizes.size())) {
    if (sizes[i] != 1) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return first[a] > first[b]; });
  const bool rows = readsRows();
  if (rows && (order.empty() || order.back() + 1 != sizes.size())) {
    return std::nullopt;
  }
  auto arranged = *this;
  arranged.sizes.clear();
  for (auto& port : ports) {
    port.strides.clear();
  }
  const auto strideOf = [&](size_t port, size_t dim) {
    return (port < data.size() ? data[port] : results[port - data.size()].port).strides[dim];
  };
  for (const auto dim : order) {
    const auto size = sizes[dim];
    bool merges = !arranged.sizes.empty() && !(rows && dim == order.back());
    for (const auto i : c10::irange(ports.size())) {
      merges = merges && ports[i].strides.back() == size * strideOf(i, dim);
    }
    if (merges) {
      arranged.sizes.back() *= size;
    } else {
      arranged.sizes.push_back(size);
    }
    for (const auto i : c10::irange(ports.size())) {
      if (merges) {
        ports[i].strides.back() = strideOf(i, dim);
      } else {
        ports[i].strides.push_back(strideOf(i, dim));
      }
    }
  }
  while (arranged.sizes.size() < 2) {
    arranged.sizes.insert(arranged.sizes.begin(), 1);
    const bool only = arranged.sizes.size() == 1;
    for (const auto i : c10::irange(ports.size())) {
      ports[i].strides.insert(ports[i].strides.begin(), only && i >= data.size() ? 1 : 0);
    }
  }
  for (const auto i : c10::irange(ports.size())) {
    if (i < data.size()) {
      arranged.data[i] = std::move(ports[i]);
    } else if (ports[i].strides.back() == 1) {
      arranged.results[i - data.size()].port = std::move(ports[i]);
    } else {
      return std::nullopt;
    }
  }
  return arranged;
}

bool PointwiseChain::readsRows() const {
  return std::any_of(instructions.begin(), instructions.end(),
                     [](const Instruction& one) { return !one.pointwise; });
}

bool PointwiseChain::gathers() const {
  return std::any_of(data.begin(), data.end(),
                     [](const Port& port) { return port.strides.back() > 1 && !liesAcross(port); });
}

std::optional<size_t> PointwiseChain::mayOverwrite() const {
  const auto& [value, port] = results.front();
  if (results.size() != 1 || value + 1 != data.size() + instructions.size()) {
    return std::nullopt;
  }
  for (const auto i : c10::irange(data.size())) {
    if (data[i].dtype == port.dtype && data[i].strides == port.strides) {
      return i;  // number by number, it is read before
    }
  }
  return std::nullopt;
}

// What one thread computes at a time, of the last two dimensions, and its memory.
class PointwiseChain::Strip {
 public:
  // `most`: numbers that are computed at a time.
  Strip(const PointwiseChain& chain, const void* const* from, void* const* to, int64_t most)
      : chain_(chain),
        from_(from),
        to_(to),
        most_(most),
        memory_(std::make_unique_for_overwrite<float[]>(
            (chain.data.size() + chain.instructions.size() + 1) * (most_ + kBetween))),
        values_(chain.data.size() + chain.instructions.size()) {
    for (const auto i : c10::irange(chain.data.size())) {
      if (isOneNumber(chain.data[i])) {
        load(i, {1, most_}, 0);
      }
    }
  }

  // Its first number has these places in the dimensions before the last two, and in those.
  void compute(const Shape& outer, int64_t row, int64_t column, std::array<int64_t, 2> sizes) {
    const auto offset = [&](const Port& port) {
      auto at = port.strides.end()[-2] * row + port.strides.end()[-1] * column;
      for (const auto i : c10::irange(outer.size())) {
        at += outer[i] * port.strides[i];
      }
      return at;
    };
    for (const auto i : c10::irange(chain_.data.size())) {
      if (!isOneNumber(chain_.data[i])) {
        load(i, sizes, offset(chain_.data[i]));
      }
    }
    const auto [rows, columns] = sizes;
    for (const auto i : c10::irange(chain_.instructions.size())) {
      const auto value = chain_.data.size() + i;
      auto* result = buffer(value);
      if (const auto k = wholeResultOf(value, sizes)) {
        result = static_cast<float*>(to_[*k]) + offset(chain_.results[*k].port);
      }
      const auto& [pointwise, operands, logarithm] = chain_.instructions[i];
      if (pointwise) {
        kernels().compute(*pointwise, values_[operands[0]], values_[operands[1]],
                          values_[operands[2]], rows * columns, result);
      } else {
        kernels().softmaxOfEachRow(values_[operands[0]], rows, columns, logarithm, result);
      }
      values_[value] = result;
    }
    for (const auto k : c10::irange(chain_.results.size())) {
      const auto& [value, port] = chain_.results[k];
      const auto stride = port.strides.end()[-2];
      const auto at = offset(port);
      if (port.dtype == at::kBFloat16) {
        kernels().narrowRows(values_[value], rows, columns, static_cast<Bfloat16*>(to_[k]) + at,
                             stride);
      } else if (!isWhole(port, sizes)) {
        kernels().copyRows(values_[value], rows, columns, columns, static_cast<float*>(to_[k]) + at,
                           stride);
      }
    }
  }

 private:
  // Values a page apart would take reading one for reading what was written of another.
  static constexpr int64_t kBetween = 48;

  float* buffer(size_t value) {
    return memory_.get() + static_cast<int64_t>(value) * (most_ + kBetween);
  }

  // The result that the value may be written to at once.
  std::optional<size_t> wholeResultOf(size_t value, const std::array<int64_t, 2>& sizes) const {
    for (const auto k : c10::irange(chain_.results.size())) {
      if (chain_.results[k].value == value && isWhole(chain_.results[k].port, sizes)) {
        return k;
      }
    }
    return std::nullopt;
  }

  // Whether the rows lie one behind the other, in float32.
  static bool isWhole(const Port& port, const std::array<int64_t, 2>& sizes) {
    return port.dtype == at::kFloat && port.strides.end()[-1] == 1 &&
           (sizes[0] == 1 || port.strides.end()[-2] == sizes[1]);
  }

  void load(size_t i, const std::array<int64_t, 2>& sizes, int64_t offset) {
    const auto& port = chain_.data[i];
    const std::array strides{port.strides.end()[-2], port.strides.end()[-1]};
    auto* to = buffer(i);
    values_[i] = to;
    if (isWhole(port, sizes)) {
      values_[i] = static_cast<const float*>(from_[i]) + offset;
    } else if (liesAcross(port)) {
      transpose(columnsOf(port, from_[i], sizes, offset), sizes[1], sizes[0],
                port.dtype == at::kFloat ? strides[1] : sizes[0], to, sizes[1]);
    } else if (port.dtype == at::kBool) {
      if (strides[1] == 1) {
        kernels().widenRowsOfBytes(static_cast<const uint8_t*>(from_[i]) + offset, sizes[0],
                                   sizes[1], strides[0], to);
      } else {
        gatherRows<bool>(from_[i], sizes, strides, offset, to);
      }
    } else if (port.dtype == at::kBFloat16) {
      if (strides[1] == 1) {
        kernels().widenRows(static_cast<const Bfloat16*>(from_[i]) + offset, sizes[0], sizes[1],
                            strides[0], to);
      } else {
        gatherRows<c10::BFloat16>(from_[i], sizes, strides, offset, to);
      }
    } else if (strides[1] == 1) {
      kernels().copyRows(static_cast<const float*>(from_[i]) + offset, sizes[0], sizes[1],
                         strides[0], to, sizes[1]);
    } else if (strides[1] == 0) {
      kernels().repeatInRows(static_cast<const float*>(from_[i]) + offset, sizes[0], sizes[1],
                             strides[0], to);
    } else {
      gatherRows<float>(from_[i], sizes, strides, offset, to);
    }
  }

  // Of data that lies across; those of other types are widened, and lie one behind the other.
  const float* columnsOf(const Port& port, const void* data, const std::array<int64_t, 2>& sizes,
                         int64_t offset) {
    if (port.dtype == at::kFloat) {
      return static_cast<const float*>(data) + offset;
    }
    auto* wide = buffer(values_.size());
    const auto stride = port.strides.back();
    if (port.dtype == at::kBool) {
      kernels().widenRowsOfBytes(static_cast<const uint8_t*>(data) + offset, sizes[1], sizes[0],
                                 stride, wide);
    } else {
      kernels().widenRows(static_cast<const Bfloat16*>(data) + offset, sizes[1], sizes[0], stride,
                          wide);
    }
    return wide;
  }

  const PointwiseChain& chain_;
  const void* const* from_;
  void* const* to_;
  int64_t most_;
  std::unique_ptr<float[]> memory_;
  std::vector<const float*> values_;
};

void PointwiseChain::run(const void* const* from, void* const* to) const {
  constexpr int64_t kForOne = 1 << 15;  // functions of numbers that are not worth a second thread
  const auto rows = sizes.end()[-2];
  const auto columns = sizes.end()[-1];
  const bool lies_across = std::any_of(data.begin(), data.end(), liesAcross);
  const auto strip =
      stripOf(numbersAtOnce(data.size() + instructions.size()), columns, lies_across, readsRows());
  const auto high = strip[0];
  const auto wide = strip[1];
  const auto across = at::ceil_div(columns, wide);
  const auto down = at::ceil_div(rows, high);
  const auto outer_rank = sizes.size() - 2;
  const auto images = c10::multiply_integers(sizes.begin(), sizes.end() - 2);
  const auto most = wide * std::min(high, rows);
  const auto cost = most * static_cast<int64_t>(instructions.size());
  at::parallel_for(0, images * down * across, std::max<int64_t>(1, kForOne / cost),
                   [&](int64_t first, int64_t last) {
                     Strip one(*this, from, to, most);
                     Shape outer(outer_rank);
                     for (; first < last; ++first) {
                       const auto column = first % across * wide;
                       const auto row = first / across % down * high;
                       auto image = first / across / down;
                       for (auto i = outer_rank; i-- > 0;) {
                         outer[i] = image % sizes[i];
                         image /= sizes[i];
                       }
                       one.compute(outer, row, column,
                                   {std::min(high, rows - row), std::min(wide, columns - column)});
                     }
                   });
}

}  // namespace llga
