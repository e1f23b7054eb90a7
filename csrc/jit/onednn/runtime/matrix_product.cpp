#include "jit/onednn/runtime/matrix_product.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/gemv.h"
#include "jit/onednn/runtime/linear.h"
#include "jit/onednn/runtime/shares.h"
#include "jit/onednn/runtime/transposition.h"

namespace llga {
namespace {

// Numbers for one thread.
class Scratch {
 public:
  explicit Scratch(int64_t numbers)
      : memory_(arena()->allocate(static_cast<size_t>(numbers) * sizeof(float))) {}

  float* get() const { return static_cast<float*>(memory_.get()); }

 private:
  at::DataPtr memory_;
};

// (row, column), with strides of any kind, to rows that are `stride` apart.
void copyMatrix(const float* from, const MatrixProduct::Matrix& matrix, int64_t rows,
                int64_t columns, float* to, int64_t stride) {
  if (matrix.column == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to + r * stride, from + r * matrix.row,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  } else if (matrix.row == 1) {
    transpose(from, columns, rows, matrix.column, to, stride);
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        to[r * stride + c] = from[r * matrix.row + c * matrix.column];
      }
    }
  }
}

}  // namespace

MatrixProduct MatrixProduct::arranged() const {
  auto p = *this;
  // Batches that share b are rows, where those of a lie one behind the other.
  const auto merges = [&] {
    const auto last = p.sizes.size() - 1;
    return p.sizes[last] == 1 ||
           (p.b.batches[last] == 0 && (p.rows == 1 || p.a.batches[last] == p.rows * p.a.row));
  };
  while (!p.sizes.empty() && merges()) {
    if (p.rows == 1 && p.sizes.back() != 1) {
      p.a.row = p.a.batches.back();
    }
    p.rows *= p.sizes.back();
    p.sizes.pop_back();
    p.a.batches.pop_back();
    p.b.batches.pop_back();
  }
  if (p.outputs == 1) {
    std::swap(p.a, p.b);
    std::swap(p.a.row, p.a.column);
    std::swap(p.b.row, p.b.column);
    std::swap(p.rows, p.outputs);
    p.swapped = true;
  }
  return p;
}

bool MatrixProduct::isVectorByRows() const {
  return rows == 1 && (inputs == 1 || b.row == 1) && (outputs == 1 || b.column == inputs);
}

int64_t MatrixProduct::offset(const Matrix& matrix, int64_t batch) const {
  int64_t at = 0;
  for (auto i = sizes.size(); i-- > 0; batch /= sizes[i]) {
    at += batch % sizes[i] * matrix.batches[i];
  }
  return at;
}

[[gnu::target("avx2,fma"), gnu::optimize("O3")]] void MatrixProduct::finish(const float* addend,
                                                                            float* result,
                                                                            int64_t count) const {
  if (addend == nullptr) {
    const auto factor = before * behind;
    for (int64_t i = 0; i < count; ++i) {
      result[i] *= factor;
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    result[i] = (result[i] * before + addend[i]) * behind;
  }
}

void MatrixProduct::runVectors(const Data& data, int64_t threads) const {
  const auto batches = c10::multiply_integers(sizes);
  const auto parts = std::min(batches, threads);
  // Few batches: the threads share the rows of each.
  const auto grain = parts == threads ? std::numeric_limits<int64_t>::max()
                                      : std::max<int64_t>(1, inputs * outputs / threads);
  const bool finishes = data.addend != nullptr || before != 1 || behind != 1;
  forSharesOf(batches, 1, parts, [&](int64_t /*part*/) {
    return [&, vector = Scratch(a.column == 1 ? 0 : inputs)](int64_t first, int64_t last) {
      for (; first < last; ++first) {
        const auto* source = data.a + offset(a, first);
        if (a.column != 1) {
          copyMatrix(source, a, 1, inputs, vector.get(), inputs);
          source = vector.get();
        }
        auto* result = data.result + first * outputs;
        gemv(data.b + offset(b, first), nullptr, outputs, inputs, source, result, Rectifier::none,
             grain);
        if (finishes) {
          finish(data.addend == nullptr ? nullptr : data.addend + first * outputs, result, outputs);
        }
      }
    };
  });
}

void MatrixProduct::runPanels(const Data& data, int64_t threads) const {
  const auto& kernels = Linear::kernels();
  const auto panel = kernels.panel;
  const auto panels = at::ceil_div(outputs, panel);
  const auto batches = c10::multiply_integers(sizes);
  const auto row_parts =
      std::min(at::ceil_div(threads, batches * panels), at::ceil_div(rows, kernels.rows));
  const bool copies = a.column != 1 && inputs != 1;
  const bool finishes = behind != 1 || before != 1;
  // What is read once may stay where it is.
  const auto in_place = b.column == 1 && rows <= kernels.rows && !biased ? outputs / panel : 0;
  const auto columns_of_a = inputs + (biased ? 1 : 0);
  const auto units = batches * row_parts * panels;
  forSharesOf(units, 1, std::min(units, threads), [&](int64_t /*part*/) {
    return [&, rows_of_a = Scratch(copies ? rows * columns_of_a : 0),
            columns = Scratch(columns_of_a * panel),
            copied = int64_t{-1}](int64_t first, int64_t last) mutable {
      while (first < last) {
        const auto batch = first / (row_parts * panels);
        const auto part = first / panels % row_parts;
        const auto at = first % panels;
        const auto together = at < in_place ? std::min(in_place - at, last - first) : 1;
        const auto* source = data.a + offset(a, batch);
        if (copies && copied != batch) {
          copyMatrix(source, a, rows, columns_of_a, rows_of_a.get(), columns_of_a);
          copied = batch;
        }
        const auto row = rows * part / row_parts;
        const auto end = rows * (part + 1) / row_parts;
        const auto output = at * panel;
        const gemm::Task task{row, end - row, output, std::min(together * panel, outputs - output)};
        const auto* addend =
            data.addend == nullptr ? nullptr : data.addend + batch * rows * outputs;
        auto* result = data.result + batch * rows * outputs;
        const auto multiply = [&](auto problem, auto run) {
          problem.rows = rows;
          problem.inputs = columns_of_a;
          problem.outputs = outputs;
          problem.rectifier = rectifier;
          problem.source = copies ? rows_of_a.get() : source;
          problem.source_stride = copies ? columns_of_a : a.row;
          problem.bias = nullptr;
          problem.addend = before == 1 ? addend : nullptr;
          problem.result = result;
          run(problem, task);
        };
        const auto* from = data.b + offset(b, batch);
        if (at < in_place) {
          gemm::ProblemInPlace problem{};
          problem.weight = reinterpret_cast<const gemm::InPlace*>(from);
          problem.weight_stride = panel;
          problem.weight_step = b.row;
          multiply(problem, kernels.runInPlace);
        } else {
          if (task.outputs < panel) {
            std::fill_n(columns.get(), inputs * panel, 0.0F);
          }
          copyMatrix(from + output * b.column, b, inputs, task.outputs, columns.get(), panel);
          std::fill_n(columns.get() + inputs * panel, biased ? panel : 0, 1.0F);
          gemm::Problem problem{};
          problem.weight = columns.get();
          problem.weight_stride = 0;
          multiply(problem, kernels.run);
        }
        for (auto r = row; finishes && r < end; ++r) {  // while they are in this core's cache
          const auto of_row = r * outputs + output;
          finish(before == 1 || addend == nullptr ? nullptr : addend + of_row, result + of_row,
                 task.outputs);
        }
        first += together;
      }
    };
  });
}

void MatrixProduct::run(const Data& operands) const {
  // In products: what it takes to begin with a batch, and to bring a number of b to where it is
  // needed; and what is not worth a second thread.
  constexpr int64_t kForBatch = 1 << 10;
  constexpr int64_t kForNumber = 16;
  constexpr int64_t kForOne = 1 << 18;
  const auto work =
      c10::multiply_integers(sizes) * (kForBatch + (rows + kForNumber) * inputs * outputs);
  const auto threads = std::clamp<int64_t>(work / kForOne, 1, at::get_num_threads());
  auto data = operands;
  if (swapped) {
    std::swap(data.a, data.b);
  }
  if (isVectorByRows()) {
    runVectors(data, threads);
  } else {
    runPanels(data, threads);
  }
}

}  // namespace llga
