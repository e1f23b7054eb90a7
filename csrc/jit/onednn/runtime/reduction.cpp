#include "jit/onednn/runtime/reduction.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/moments.h"
#include "jit/onednn/runtime/plan.h"
#include "jit/onednn/runtime/vector_loops.h"

namespace llga {
namespace {

constexpr int64_t kForOne = 1 << 14;   // numbers that are not worth a second thread
constexpr int64_t kColumns = 1 << 11;  // that are summed at once: they stay in the caches
constexpr int64_t kSome = 64;          // results at once, of rows of numbers side by side

void store(const float* numbers, int64_t count, float* to) { std::copy_n(numbers, count, to); }
void store(const float* numbers, int64_t count, Bfloat16* to) {
  vector_loops::kernels().narrowRows(numbers, 1, count, to, count);
}

// Puts together what `ofRows` makes of each part's rows.
template <typename T, typename OfRows, typename Combine>
void reduceRows(const T* image, int64_t rows, int64_t columns, int64_t parts, const OfRows& ofRows,
                const Combine& combine, float* result) {
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (auto part = first; part < last; ++part) {
      const auto row = rows * part / parts;
      ofRows(image + row * columns, rows * (part + 1) / parts - row, columns, columns,
             result + part * columns);
    }
  });
  for (int64_t part = 1; part < parts; ++part) {
    for (int64_t c = 0; c < columns; ++c) {
      result[c] = combine(result[c], result[part * columns + c]);
    }
  }
}

}  // namespace

int64_t reductionParts(int64_t rows, int64_t columns) {
  const auto threads = at::in_parallel_region() ? int64_t{1} : int64_t{at::get_num_threads()};
  return std::clamp(rows * columns / kForOne, int64_t{1}, threads);
}

template <typename T>
void meanOverRows(const T* image, int64_t rows, int64_t columns, int64_t parts, float* mean) {
  if constexpr (std::is_same_v<T, uint8_t>) {
    reduceRows(image, rows, columns, parts, vector_loops::kernels().sumRowsOfBytes, std::plus<>(),
               mean);
  } else {
    reduceRows(image, rows, columns, parts, vector_loops::functions<T>().sumRows, std::plus<>(),
               mean);
  }
  for (int64_t c = 0; c < columns; ++c) {
    mean[c] /= static_cast<float>(rows);
  }
}

template void meanOverRows(const float*, int64_t, int64_t, int64_t, float*);
template void meanOverRows(const Bfloat16*, int64_t, int64_t, int64_t, float*);
template void meanOverRows(const uint8_t*, int64_t, int64_t, int64_t, float*);

template <typename T>
auto Reduction::loops() const {
  const auto& loops = vector_loops::functions<T>();
  switch (kind) {
    case Kind::norm:
      return std::pair(loops.sumSquaresOfRows, loops.sumSquaresOfEachRow);
    case Kind::greatest:
      return std::pair(loops.greatestOfRows, loops.greatestOfEachRow);
    case Kind::least:
      return std::pair(loops.leastOfRows, loops.leastOfEachRow);
    default:
      return std::pair(loops.sumRows, loops.sumEachRow);
  }
}

// What two parts come to.
float Reduction::combined(float a, float b) const {
  switch (kind) {
    case Kind::greatest:
      return b <= a || std::isnan(a) ? a : b;
    case Kind::least:
      return b >= a || std::isnan(a) ? a : b;
    default:
      return a + b;
  }
}

void Reduction::run(const void* from, void* to) const {
  if (type == Type::float32) {
    runAs(static_cast<const float*>(from), static_cast<float*>(to));
  } else if (type == Type::bfloat16) {
    runAs(static_cast<const Bfloat16*>(from), static_cast<Bfloat16*>(to));
  } else {
    runBytes(static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to));
  }
}

void Reduction::runBytes(const uint8_t* from, uint8_t* to) const {
  const auto grain = images >= at::get_num_threads() ? 1 : images;
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    const auto parts = reductionParts(rows, columns);
    const auto memory = arena()->allocate(static_cast<size_t>(parts * columns) * sizeof(float));
    auto* mean = static_cast<float*>(memory.get());
    for (auto image = first; image < last; ++image) {
      meanOverRows(from + image * rows * columns, rows, columns, parts, mean);
      vector_loops::kernels().toBytes(mean, columns, scale, shift, to + image * columns);
    }
  });
}

float Reduction::ofSquares(double squares) const {
  const auto variance = squares / std::max(0.0, static_cast<double>(rows) - correction);
  const auto result = static_cast<float>(kind == Kind::deviation ? std::sqrt(variance) : variance);
  if (!std::isfinite(result)) {
    throw StepError("a variance is not finite");
  }
  return result;
}

template <typename T>
void Reduction::runVarianceInside(const T* from, T* to) const {
  const auto grain = std::max<int64_t>(1, kForOne / rows);
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    float means[kSome];
    float squares[kSome];
    for (auto image = first; image < last; image += kSome) {
      const auto count = std::min(kSome, last - image);
      vector_loops::functions<T>().momentsOfEachRow(from + image * rows, count, rows, means,
                                                    squares);
      std::transform(squares, squares + count, squares, [this](float x) { return ofSquares(x); });
      store(squares, count, to + image);
    }
  });
}

template <typename T>
void Reduction::runVariance(const T* from, T* to) const {
  constexpr int64_t kShort = 1 << 12;
  if (columns == 1 && rows <= kShort) {
    return runVarianceInside(from, to);
  }
  // Each thread takes images of its own where there are enough.
  const bool many = images >= at::get_num_threads();
  const auto grain = many ? std::max<int64_t>(1, kForOne / (rows * columns)) : images;
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    const auto parts = std::min(reductionParts(rows, columns), rows);
    const auto floats = (2 * parts + 1) * columns;
    const auto memory = arena()->allocate(static_cast<size_t>(floats) * sizeof(float));
    auto* means = static_cast<float*>(memory.get());
    auto* squares = means + parts * columns;
    auto* result = squares + parts * columns;
    const auto rowOf = [&](int64_t part) { return rows * part / parts; };
    const auto take = [&](const T* image, int64_t part) {
      const auto* numbers = image + rowOf(part) * columns;
      const auto count = rowOf(part + 1) - rowOf(part);
      const auto at = part * columns;
      if (columns == 1) {
        const auto found = momentsOf(numbers, count);
        means[at] = static_cast<float>(found.mean);
        squares[at] = static_cast<float>(found.squares);
      } else {
        vector_loops::functions<T>().momentsOfRows(numbers, count, columns, means + at,
                                                   squares + at);
      }
    };
    for (auto image = first; image < last; ++image) {
      at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
        for (auto part = begin; part < end; ++part) {
          take(from + image * rows * columns, part);
        }
      });
      for (int64_t c = 0; c < columns; ++c) {
        Moments all;
        for (int64_t part = 0; part < parts; ++part) {
          const auto at = part * columns + c;
          all.add({static_cast<double>(rowOf(part + 1) - rowOf(part)), means[at], squares[at]});
        }
        result[c] = ofSquares(all.squares);
      }
      store(result, columns, to + image * columns);
    }
  });
}

template <typename T>
void Reduction::runAs(const T* from, T* to) const {
  if (kind == Kind::variance || kind == Kind::deviation) {
    return runVariance(from, to);
  }
  if (columns == 1) {
    return runInside(from, to);
  }
  if (columns >= kColumns * at::get_num_threads()) {
    return runAcross(from, to);
  }
  const auto ofRows = loops<T>().first;
  // Each thread takes images of its own where there are enough.
  const auto grain = images >= at::get_num_threads() ? 1 : images;
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    const auto parts = reductionParts(rows, columns);
    const auto memory = arena()->allocate(static_cast<size_t>(parts * columns) * sizeof(float));
    auto* result = static_cast<float*>(memory.get());
    for (auto image = first; image < last; ++image) {
      reduceRows(
          from + image * rows * columns, rows, columns, parts, ofRows,
          [this](float a, float b) { return combined(a, b); }, result);
      finish(result, columns);
      store(result, columns, to + image * columns);
    }
  });
}

template <typename T>
void Reduction::runAcross(const T* from, T* to) const {
  const auto ofRows = loops<T>().first;
  const auto blocks = (columns + kColumns - 1) / kColumns;
  const auto grain = std::max<int64_t>(1, kForOne / (rows * kColumns));
  at::parallel_for(0, images * blocks, grain, [&](int64_t first, int64_t last) {
    float results[kColumns];
    for (auto block = first; block < last; ++block) {
      const auto image = block / blocks;
      const auto column = block % blocks * kColumns;
      const auto count = std::min(kColumns, columns - column);
      ofRows(from + image * rows * columns + column, rows, count, columns, results);
      finish(results, count);
      store(results, count, to + image * columns + column);
    }
  });
}

template <typename T>
void Reduction::runInside(const T* from, T* to) const {
  const auto ofEachRow = loops<T>().second;
  const auto grain = std::max<int64_t>(1, kForOne / rows);
  at::parallel_for(0, images, grain, [&](int64_t first, int64_t last) {
    float results[kSome];
    for (auto image = first; image < last; image += kSome) {
      const auto count = std::min(kSome, last - image);
      ofEachRow(from + image * rows, count, rows, results);
      finish(results, count);
      store(results, count, to + image);
    }
  });
}

void Reduction::finish(float* sums, int64_t count) const {
  const auto each = [&](const auto& of) { std::transform(sums, sums + count, sums, of); };
  if (kind == Kind::mean) {
    each([n = static_cast<float>(rows)](float x) { return x / n; });
  } else if (kind == Kind::norm) {
    each([](float x) { return std::sqrt(x); });
  }
}

}  // namespace llga
