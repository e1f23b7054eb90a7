#include "jit/onednn/runtime/moments.h"

#include "jit/onednn/runtime/vector_loops.h"

namespace llga {

Moments joined(const float* means, const float* squares, int64_t columns, int64_t rows) {
  const auto count = static_cast<double>(rows);
  double sum = 0;
  for (int64_t c = 0; c < columns; ++c) {
    sum += means[c];
  }
  Moments all{count * static_cast<double>(columns), sum / static_cast<double>(columns), 0};
  for (int64_t c = 0; c < columns; ++c) {
    const auto apart = means[c] - all.mean;
    all.squares += squares[c] + count * apart * apart;
  }
  return all;
}

template <typename T>
Moments momentsOf(const T* numbers, int64_t count) {
  constexpr int64_t kColumns = 128;
  float means[kColumns];
  float squares[kColumns];
  Moments all;
  const auto add = [&](const T* from, int64_t rows, int64_t columns) {
    if (rows * columns != 0) {
      vector_loops::functions<T>().momentsOfRows(from, rows, columns, means, squares);
      all.add(joined(means, squares, columns, rows));
    }
  };
  // Rows of so many numbers, which the loops take at once.
  const auto rest = count % kColumns;
  add(numbers, count / kColumns, kColumns);
  add(numbers + count - rest, 1, rest);
  return all;
}

template Moments momentsOf(const float*, int64_t);
template Moments momentsOf(const Bfloat16*, int64_t);

}  // namespace llga
