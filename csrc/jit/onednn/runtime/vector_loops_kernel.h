// Included by one source for each instruction set, behind its Simd.
#include "jit/onednn/runtime/activations.h"
#include "jit/onednn/runtime/vector_bytes.h"
#include "jit/onednn/runtime/vector_loops.h"
#include "jit/onednn/runtime/vector_sums.h"

namespace llga::vector_loops {
namespace {

constexpr int64_t kWidth = kVectorWidth;

// ------------------------------------------------------------------------------------ activations

// to[i] = function(from[i]...); `to` may be one of them.
template <typename T, typename Function, typename... Numbers>
LLGA_VECTOR_INLINE void computeEach(int64_t count, T* to, const Function& function,
                                    const Numbers*... from) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    storeVector(to + i, function(loadVector(from + i)...));
  }
  if (i < count) {
    storeFirst(to + i, function(loadFirst(from + i, count - i)...), count - i);
  }
}

template <typename T>
void activate(Activation activation, const T* from, T* to, int64_t count) {
  switch (activation) {
    case Activation::sigmoid:
      return computeEach(count, to, Sigmoid::of, from);
    case Activation::silu:
      return computeEach(count, to, Silu::of, from);
    case Activation::tanh:
      return computeEach(count, to, Tanh::of, from);
    case Activation::gelu:
      return computeEach(count, to, Gelu::of, from);
    case Activation::tanh_gelu:
      return computeEach(count, to, TanhGelu::of, from);
  }
}

// ------------------------------------------------------------------------------------------- rows

// `first`: of this many numbers, fewer than a vector; 0 for whole vectors.
template <typename T>
Vector loadUpTo(const T* from, int64_t first) {
  return first != 0 ? loadFirst(from, first) : loadVector(from);
}

template <typename T>
void storeUpTo(T* to, Vector x, int64_t first) {
  if (first != 0) {
    storeFirst(to, x, first);
  } else {
    storeVector(to, x);
  }
}

// Calls f<n>(c, first) for bands of n vectors from column c on, many or half as many while there
// are so many; the last band may be of one vector's `first` numbers.
template <int64_t many, typename F>
void forBands(int64_t columns, const F& f) {
  int64_t c = 0;
  for (; c + many * kWidth <= columns; c += many * kWidth) {
    f.template operator()<many>(c, 0);
  }
  if (c + many / 2 * kWidth <= columns) {
    f.template operator()<many / 2>(c, 0);
    c += many / 2 * kWidth;
  }
  for (; c + kWidth <= columns; c += kWidth) {
    f.template operator()<1>(c, 0);
  }
  if (c < columns) {
    f.template operator()<1>(c, columns - c);
  }
}

// Adds up term(row, v) of all rows. Sums of a few rows each are added up, as they are in eager: one
// long sum would round more.
template <int64_t n, typename Term>
LLGA_VECTOR_INLINE void addRows(int64_t rows, Vector (&total)[n], const Term& term) {
  constexpr int64_t kFew = 64;
  for (int64_t begin = 0; begin < rows; begin += kFew) {
    const auto end = rows - begin < kFew ? rows : begin + kFew;
    Vector sum[n] = {};
    for (auto row = begin; row < end; ++row) {
      for (int64_t v = 0; v < n; ++v) {
        sum[v] += term(row, v);
      }
    }
    for (int64_t v = 0; v < n; ++v) {
      total[v] += sum[v];
    }
  }
}

// `of`: of the numbers of a vector.
template <typename T, typename F>
void sumOfRows(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to,
               const F& of) {
  forBands<8>(columns, [&]<int64_t n>(int64_t c, int64_t first) {
    Vector total[n] = {};
    addRows(rows, total, [&](int64_t row, int64_t v) {
      return of(loadUpTo(from + row * stride + c + v * kWidth, first));
    });
    for (int64_t v = 0; v < n; ++v) {
      storeUpTo(to + c + v * kWidth, total[v], first);
    }
  });
}

template <typename T>
void sumRows(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to) {
  sumOfRows(from, rows, columns, stride, to, [](Vector x) { return x; });
}

template <typename T>
void sumSquaresOfRows(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to) {
  sumOfRows(from, rows, columns, stride, to, [](Vector x) { return x * x; });
}

// `of`: of the numbers of a vector.
template <typename T, typename F>
float sumOfRow(const T* from, int64_t columns, const F& of) {
  constexpr int64_t kMany = 4;
  Vector sums[kMany] = {};
  int64_t c = 0;
  for (; c + kMany * kWidth <= columns; c += kMany * kWidth) {
    for (int64_t v = 0; v < kMany; ++v) {
      sums[v] += of(loadVector(from + c + v * kWidth));
    }
  }
  for (; c + kWidth <= columns; c += kWidth) {
    sums[0] += of(loadVector(from + c));
  }
  if (c < columns) {
    sums[1] += of(loadFirst(from + c, columns - c));
  }
  return sumOf((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void sumEachRow(const T* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t row = 0; row < rows; ++row) {
    to[row] = sumOfRow(from + row * columns, columns, [](Vector x) { return x; });
  }
}

template <typename T>
void sumSquaresOfEachRow(const T* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t row = 0; row < rows; ++row) {
    to[row] = sumOfRow(from + row * columns, columns, [](Vector x) { return x * x; });
  }
}

LLGA_VECTOR_INLINE Vector greaterOf(Vector a, Vector b) {
  return (b <= a) | (a != a) ? a : b;  // NaN if one is
}

LLGA_VECTOR_INLINE Vector lessOf(Vector a, Vector b) { return (b >= a) | (a != a) ? a : b; }

template <typename T, Vector (*choose)(Vector, Vector)>
void chosenOfRows(const T* from, int64_t rows, int64_t columns, int64_t stride, float* to) {
  forBands<8>(columns, [&]<int64_t n>(int64_t c, int64_t first) {
    Vector best[n];
    for (int64_t v = 0; v < n; ++v) {
      best[v] = loadUpTo(from + c + v * kWidth, first);
    }
    for (int64_t row = 1; row < rows; ++row) {
      for (int64_t v = 0; v < n; ++v) {
        best[v] = choose(best[v], loadUpTo(from + row * stride + c + v * kWidth, first));
      }
    }
    for (int64_t v = 0; v < n; ++v) {
      storeUpTo(to + c + v * kWidth, best[v], first);
    }
  });
}

template <typename T, Vector (*choose)(Vector, Vector)>
void chosenOfEachRow(const T* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t row = 0; row < rows; ++row, from += columns) {
    T numbers[kWidth];  // the last ones, and the first one in the place of those behind
    const auto rest = columns % kWidth;
    for (int64_t i = 0; i < kWidth; ++i) {
      numbers[i] = from[i < rest ? columns - rest + i : 0];
    }
    Vector even = loadVector(numbers);
    Vector odd = even;
    int64_t c = 0;
    for (; c + 2 * kWidth <= columns; c += 2 * kWidth) {
      even = choose(even, loadVector(from + c));
      odd = choose(odd, loadVector(from + c + kWidth));
    }
    if (c + kWidth <= columns) {
      even = choose(even, loadVector(from + c));
    }
    to[row] = reduced(choose(even, odd), choose);
  }
}

template <typename T, typename C>
void rotateRow(const T* from, const C* cos, const C* sin, int64_t half, float* to) {
  int64_t c = 0;
  for (; c + kWidth <= half; c += kWidth) {
    const Vector a = loadVector(from + c);
    const Vector b = loadVector(from + half + c);
    storeVector(to + c, a * loadVector(cos + c) - b * loadVector(sin + c));
    storeVector(to + half + c, b * loadVector(cos + half + c) + a * loadVector(sin + half + c));
  }
  if (c < half) {
    const auto rest = half - c;
    const Vector a = loadFirst(from + c, rest);
    const Vector b = loadFirst(from + half + c, rest);
    storeFirst(to + c, a * loadFirst(cos + c, rest) - b * loadFirst(sin + c, rest), rest);
    storeFirst(to + half + c,
               b * loadFirst(cos + half + c, rest) + a * loadFirst(sin + half + c, rest), rest);
  }
}

// The sum of the squares of the differences from `mean`.
template <typename T>
float squaresAround(float mean, const T* from, int64_t columns) {
  const auto whole = columns / kWidth * kWidth;  // numbers in full vectors
  auto squares = sumOfRow(from, whole, [mean](Vector x) {
    const Vector apart = x - mean;
    return apart * apart;
  });
  if (const auto rest = columns - whole; rest != 0) {
    float numbers[kWidth];
    storeVector(numbers, loadFirst(from + whole, rest));
    for (int64_t i = 0; i < rest; ++i) {
      squares += (numbers[i] - mean) * (numbers[i] - mean);
    }
  }
  return squares;
}

template <typename T>
void momentsOfEachRow(const T* from, int64_t rows, int64_t columns, float* mean, float* squares) {
  for (int64_t row = 0; row < rows; ++row, from += columns) {
    mean[row] = sumOfRow(from, columns, [](Vector x) { return x; }) / static_cast<float>(columns);
    squares[row] = squaresAround(mean[row], from, columns);
  }
}

template <typename T, typename R>
void normalizeEachRow(const T* from, int64_t rows, const RowNorm& norm, R* to) {
  const auto columns = norm.columns;
  const auto count = static_cast<float>(columns);
  const auto whole = columns / kWidth * kWidth;  // numbers in full vectors
  const auto rest = columns - whole;
  for (int64_t row = 0; row < rows; ++row, from += columns, to += columns) {
    float mean = 0;
    float size;
    if (norm.kind == RowNorm::Kind::centred) {
      mean = sumOfRow(from, columns, [](Vector x) { return x; }) / count;
      size = __builtin_sqrtf(squaresAround(mean, from, columns) / count + norm.epsilon);
    } else {
      const auto squares = sumOfRow(from, columns, [](Vector x) { return x * x; });
      const auto length = __builtin_sqrtf(squares);
      size = norm.kind == RowNorm::Kind::root_mean_square
                 ? __builtin_sqrtf(squares / count + norm.epsilon)
             : length < norm.epsilon ? norm.epsilon
                                     : length;
    }
    const auto factor = 1 / size;
    const auto finished = [&](Vector x, const auto& line) {
      x = (x - mean) * factor;
      x = norm.weight != nullptr ? x * line(norm.weight) : x;
      x = norm.bias != nullptr ? x + line(norm.bias) : x;
      return x < norm.least ? Vector{} + norm.least : x;
    };
    for (int64_t c = 0; c < whole; c += kWidth) {
      storeVector(to + c, finished(loadVector(from + c),
                                   [c](const float* numbers) { return loadVector(numbers + c); }));
    }
    if (rest != 0) {
      storeFirst(to + whole,
                 finished(loadFirst(from + whole, rest),
                          [&](const float* numbers) { return loadFirst(numbers + whole, rest); }),
                 rest);
    }
  }
}

void centreEachRow(const float* from, int64_t rows, int64_t columns, float epsilon,
                   const float* scale, const float* shift, uint8_t* to) {
  const auto count = static_cast<float>(columns);
  const auto whole = columns / kWidth * kWidth;  // numbers in full vectors
  for (int64_t row = 0; row < rows; ++row, from += columns, to += columns) {
    const auto mean = sumOfRow(from, columns, [](Vector x) { return x; }) / count;
    const auto factor = 1 / __builtin_sqrtf(squaresAround(mean, from, columns) / count + epsilon);
    for (int64_t c = 0; c < whole; c += kWidth) {
      const Vector x = (loadVector(from + c) - mean) * factor;
      storeVector(to + c, x * loadVector(scale + c) + loadVector(shift + c));
    }
    if (const auto rest = columns - whole; rest != 0) {
      const Vector x = (loadFirst(from + whole, rest) - mean) * factor;
      const Vector y = x * loadFirst(scale + whole, rest) + loadFirst(shift + whole, rest);
      storeFirst(to + whole, y, rest);
    }
  }
}

// Those of a few rows each, which stay in the first level of cache, are joined: T. F. Chan, G. H.
// Golub, R. J. LeVeque, Algorithms for computing the sample variance (1983).
template <typename T>
void momentsOfRows(const T* from, int64_t rows, int64_t columns, float* mean, float* squares) {
  constexpr int64_t kFew = 32;
  forBands<8>(columns, [&]<int64_t n>(int64_t c, int64_t first) {
    Vector means[n] = {};
    Vector sums[n] = {};  // of squares
    for (int64_t begin = 0; begin < rows; begin += kFew) {
      const auto end = rows - begin < kFew ? rows : begin + kFew;
      const auto count = static_cast<float>(end - begin);
      Vector here[n] = {};
      for (auto row = begin; row < end; ++row) {
        for (int64_t v = 0; v < n; ++v) {
          here[v] += loadUpTo(from + row * columns + c + v * kWidth, first);
        }
      }
      for (int64_t v = 0; v < n; ++v) {
        here[v] /= count;
      }
      Vector spread[n] = {};
      for (auto row = begin; row < end; ++row) {
        for (int64_t v = 0; v < n; ++v) {
          const Vector x = loadUpTo(from + row * columns + c + v * kWidth, first) - here[v];
          spread[v] += x * x;
        }
      }
      const auto before = static_cast<float>(begin);
      const auto all = static_cast<float>(end);
      for (int64_t v = 0; v < n; ++v) {
        const Vector apart = here[v] - means[v];
        means[v] += apart * (count / all);
        sums[v] += spread[v] + apart * apart * (before * count / all);
      }
    }
    for (int64_t v = 0; v < n; ++v) {
      storeUpTo(mean + c + v * kWidth, means[v], first);
      storeUpTo(squares + c + v * kWidth, sums[v], first);
    }
  });
}

// Applies `of` to a band of `n` vectors of all rows. It gets a vector, which of the row's it is,
// and where its result will be.
template <int64_t n, typename From, typename To, typename F>
void mapBand(const From* from, To* to, const Affine& rows, int64_t first, const F& of) {
  for (int64_t row = 0; row < rows.rows; ++row) {
    Vector x[n];
    for (int64_t v = 0; v < n; ++v) {
      x[v] = of(loadUpTo(from + v * kWidth, first), v, to + v * kWidth);
    }
    for (int64_t v = 0; v < n; ++v) {
      storeUpTo(to + v * kWidth, x[v], first);
    }
    from += rows.from_stride;
    to += rows.stride;
  }
}

template <typename T>
void scaleRows(const T* from, int64_t rows, int64_t columns, const float* factor, T* to) {
  const Affine plain{rows, columns, columns, columns, factor, nullptr, 0};
  forBands<4>(columns, [&]<int64_t n>(int64_t c, int64_t first) {
    Vector factors[n];
    for (int64_t v = 0; v < n; ++v) {
      factors[v] = loadUpTo(factor + c + v * kWidth, first);
    }
    mapBand<n>(from + c, to + c, plain, first,
               [&](Vector x, int64_t v, const T*) { return x * factors[v]; });
  });
}

void slopeRows(float* numbers, int64_t rows, int64_t columns, int64_t stride, const float* slope) {
  const Affine plain{rows, columns, stride, stride, slope, nullptr, 0};
  const Vector zero{};
  forBands<4>(columns, [&]<int64_t n>(int64_t c, int64_t first) {
    Vector slopes[n];
    for (int64_t v = 0; v < n; ++v) {
      slopes[v] = loadUpTo(slope + c + v * kWidth, first);
    }
    mapBand<n>(
        static_cast<const float*>(numbers) + c, numbers + c, plain, first,
        [&](Vector x, int64_t v, const float*) -> Vector { return x > zero ? x : x * slopes[v]; });
  });
}

float toFloat(float number) { return number; }
float toFloat(Bfloat16 number) {
  const auto bits = static_cast<uint32_t>(number) << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <typename T>
void blendPixels(const T* from, const Sample* samples, int64_t count, int64_t channels, float* to) {
  if (channels == 1) {
    for (int64_t i = 0; i < count; ++i) {
      const auto& sample = samples[i];
      to[i] = toFloat(from[sample.at[0]]) * sample.share[0] +
              toFloat(from[sample.at[1]]) * sample.share[1];
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i, to += channels) {
    const auto& sample = samples[i];
    const auto of_a = sample.share[0];
    const auto of_b = sample.share[1];
    computeEach(
        channels, to, [&](Vector x, Vector y) -> Vector { return x * of_a + y * of_b; },
        from + sample.at[0] * channels, from + sample.at[1] * channels);
  }
}

template <typename T>
void blend(const float* a, const float* b, const float* share, int64_t count, T* to) {
  const auto of_a = share[0];
  const auto of_b = share[1];
  computeEach(count, to, [&](Vector x, Vector y) -> Vector { return x * of_a + y * of_b; }, a, b);
}

// `add`: to what is there.
template <typename From, typename To, bool add>
void affineRowsTo(const From* from, To* to, const Affine& affine) {
  const Vector least = Vector{} + affine.least;
  forBands<2>(affine.columns, [&]<int64_t n>(int64_t c, int64_t first) {
    Vector scale[n];
    Vector shift[n];
    for (int64_t v = 0; v < n; ++v) {
      scale[v] = loadUpTo(affine.scale + c + v * kWidth, first);
      shift[v] = loadUpTo(affine.shift + c + v * kWidth, first);
    }
    mapBand<n>(from + c, to + c, affine, first, [&](Vector x, int64_t v, const To* there) {
      Vector line = x * scale[v] + shift[v];
      if constexpr (add) {
        line += loadUpTo(there, first);
      }
      return line < least ? least : line;
    });
  });
}

template <typename From, typename To>
void affineRows(const From* from, To* to, const Affine& affine) {
  affineRowsTo<From, To, false>(from, to, affine);
}

template <typename From>
void addAffineRows(const From* from, float* to, const Affine& affine) {
  affineRowsTo<From, float, true>(from, to, affine);
}

void toBytes(const float* from, int64_t count, float scale, float shift, uint8_t* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    storeVector(to + i, loadVector(from + i) * scale + shift);
  }
  if (i < count) {
    storeFirst(to + i, loadFirst(from + i, count - i) * scale + shift, count - i);
  }
}

void sumOfBytes(const uint8_t* a, const uint8_t* b, int64_t count, const SumOfBytes& sum,
                uint8_t* to) {
  const auto of = [&](Vector x, Vector y) {
    const Vector line = x * sum.scale[0] + (y * sum.scale[1] + sum.shift);
    return line < sum.least ? Vector{} + sum.least : line;
  };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    storeVector(to + i, of(loadVector(a + i), loadVector(b + i)));
  }
  if (i < count) {
    const auto rest = count - i;
    storeFirst(to + i, of(loadFirst(a + i, rest), loadFirst(b + i, rest)), rest);
  }
}

// One T of each row.
template <typename T>
void copyOneOfRows(const float* from, int64_t rows, int64_t from_stride, float* to,
                   int64_t stride) {
  for (; rows > 0; --rows) {
    __builtin_memcpy(to, from, sizeof(T));
    from += from_stride;
    to += stride;
  }
}

void copyRows(const float* from, int64_t rows, int64_t columns, int64_t from_stride, float* to,
              int64_t stride) {
  const auto whole = columns / kWidth * kWidth;
  const Affine plain{rows, whole, from_stride, stride, nullptr, nullptr, 0};
  forBands<4>(whole, [&]<int64_t n>(int64_t c, int64_t first) {
    mapBand<n>(from + c, to + c, plain, first, [](Vector x, int64_t, const float*) { return x; });
  });
  // Storing a part of a vector takes longer.
  struct Four {
    float numbers[4];
  };
  auto c = whole;
  for (; c + 4 <= columns; c += 4) {
    copyOneOfRows<Four>(from + c, rows, from_stride, to + c, stride);
  }
  for (; c < columns; ++c) {
    copyOneOfRows<float>(from + c, rows, from_stride, to + c, stride);
  }
}

void repeatInRows(const float* from, int64_t rows, int64_t columns, int64_t from_stride,
                  float* to) {
  for (; rows > 0; --rows, from += from_stride, to += columns) {
    computeEach(columns, to, [x = *from]() -> Vector { return Vector{} + x; });
  }
}

// Strides from row to row.
template <typename From, typename To>
void convertRows(const From* from, int64_t rows, int64_t columns, int64_t from_stride, To* to,
                 int64_t to_stride) {
  for (; rows > 0; --rows) {
    int64_t c = 0;
    for (; c + kWidth <= columns; c += kWidth) {
      storeVector(to + c, loadVector(from + c));
    }
    if (c < columns) {
      storeFirst(to + c, loadFirst(from + c, columns - c), columns - c);
    }
    from += from_stride;
    to += to_stride;
  }
}

void narrowRows(const float* from, int64_t rows, int64_t columns, Bfloat16* to, int64_t stride) {
  convertRows(from, rows, columns, columns, to, stride);
}

void widenRows(const Bfloat16* from, int64_t rows, int64_t columns, int64_t stride, float* to) {
  convertRows(from, rows, columns, stride, to, columns);
}

void widenRowsOfBytes(const uint8_t* from, int64_t rows, int64_t columns, int64_t stride,
                      float* to) {
  convertRows(from, rows, columns, stride, to, columns);
}

void add(const float* from, float* to, int64_t count) {
  computeEach(count, to, [](Vector x, Vector y) -> Vector { return x + y; }, to, from);
}

// -------------------------------------------------------------------------------------- pointwise

LLGA_VECTOR_INLINE Vector rootOf(Vector x) { return static_cast<Vector>(Simd::root(x)); }

LLGA_VECTOR_INLINE Vector absOf(Vector x) {
  return reinterpret_cast<Vector>(reinterpret_cast<Bits>(x) & 0x7FFFFFFFU);
}

// Of half of it, squared: expOf() is infinite a little too early, and never 0.
LLGA_VECTOR_INLINE Vector wholeExpOf(Vector x) {
  const Vector root = expOf(0.5F * x);
  return root * root;
}

// exp(x) - 1, for x <= 0 or NaN.
LLGA_VECTOR_INLINE Vector expm1Of(Vector x) {
  const auto [power, rest] = reduce(between(-40.0F, x, 0.0F));
  return power * expm1OfRest(rest) + (power - 1.0F);
}

void compute(const Pointwise& pointwise, const float* a, const float* b, const float* c,
             int64_t count, float* to) {
  using Function = Pointwise::Function;
  const auto alpha = pointwise.alpha;
  const auto beta = pointwise.beta;
  const Vector zero{};
  switch (pointwise.function) {
    case Function::abs:
      return computeEach(count, to, absOf, a);
    case Function::add:
      return computeEach(count, to, [](Vector x, Vector y) -> Vector { return x + y; }, a, b);
    case Function::clamp:
      return computeEach(count, to, [=](Vector x) { return between(alpha, x, beta); }, a);
    case Function::divide:
      return computeEach(count, to, [](Vector x, Vector y) -> Vector { return x / y; }, a, b);
    case Function::elu:
      return computeEach(
          count, to, [=](Vector x) -> Vector { return x < zero ? alpha * expm1Of(x) : x; }, a);
    case Function::exp:
      return computeEach(count, to, wholeExpOf, a);
    case Function::gelu:
      return computeEach(count, to, Gelu::of, a);
    case Function::hard_sigmoid:
      return computeEach(
          count, to, [=](Vector x) { return between(0.0F, alpha * x + beta, 1.0F); }, a);
    case Function::hard_swish:
      return computeEach(
          count, to, [](Vector x) -> Vector { return x * between(0.0F, x + 3.0F, 6.0F) / 6.0F; },
          a);
    case Function::leaky_relu:
      return computeEach(
          count, to, [=](Vector x) -> Vector { return x > zero ? x : alpha * x; }, a);
    case Function::maximum:
      return computeEach(count, to, greaterOf, a, b);
    case Function::minimum:
      return computeEach(count, to, lessOf, a, b);
    case Function::multiply:
      return computeEach(count, to, [](Vector x, Vector y) -> Vector { return x * y; }, a, b);
    case Function::relu:
      return computeEach(count, to, [=](Vector x) -> Vector { return x < zero ? zero : x; }, a);
    case Function::select:
      return computeEach(
          count, to, [=](Vector x, Vector y, Vector z) -> Vector { return x != zero ? y : z; }, a,
          b, c);
    case Function::sigmoid:
      return computeEach(count, to, Sigmoid::of, a);
    case Function::sqrt:
      return computeEach(count, to, rootOf, a);
    case Function::square:
      return computeEach(count, to, [](Vector x) -> Vector { return x * x; }, a);
    case Function::subtract:
      return computeEach(count, to, [](Vector x, Vector y) -> Vector { return x - y; }, a, b);
    case Function::tanh:
      return computeEach(count, to, Tanh::of, a);
  }
}

LLGA_VECTOR_INLINE Vector logOf(Vector x) {
  Vector result;
  for (int64_t i = 0; i < kWidth; ++i) {
    result[i] = __builtin_logf(x[i]);
  }
  return result;
}

// Exponentials are computed twice: keeping them would take memory, or round those of bfloat16.
template <typename T>
void softmaxOfColumns(const T* from, T* to, const SoftmaxOfColumns& softmax) {
  const auto rows = softmax.rows;
  forBands<2>(softmax.columns, [&]<int64_t n>(int64_t c, int64_t first) {
    const auto load = [&](int64_t row, int64_t v) {
      return loadUpTo(from + row * softmax.from_stride + c + v * kWidth, first);
    };
    Vector most[n];
    for (int64_t v = 0; v < n; ++v) {
      most[v] = load(0, v);
    }
    for (int64_t row = 1; row < rows; ++row) {
      for (int64_t v = 0; v < n; ++v) {
        most[v] = greaterOf(most[v], load(row, v));
      }
    }
    Vector total[n] = {};
    addRows(rows, total,
            [&](int64_t row, int64_t v) { return expOfDifference(load(row, v) - most[v]); });
    for (int64_t v = 0; v < n; ++v) {
      total[v] = softmax.logarithm ? logOf(total[v]) : 1.0F / total[v];
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t v = 0; v < n; ++v) {
        const Vector x = load(row, v) - most[v];
        const Vector result = softmax.logarithm ? x - total[v] : expOfDifference(x) * total[v];
        storeUpTo(to + row * softmax.stride + c + v * kWidth, result, first);
      }
    }
  });
}

// The greatest one, of a vector at least; NaN only where all are.
float greatestOf(const float* from, int64_t count) {
  Vector even = loadVector(from + count - kWidth);
  Vector odd = even;
  int64_t i = 0;
  for (; i + 2 * kWidth <= count; i += 2 * kWidth) {
    even = maxOrSecond(loadVector(from + i), even);
    odd = maxOrSecond(loadVector(from + i + kWidth), odd);
  }
  if (i + kWidth <= count) {
    even = maxOrSecond(loadVector(from + i), even);
  }
  return reduced(maxOrSecond(even, odd), maxOrSecond);
}

// Of rows of `n` vectors, which stay in registers; the last one may be of fewer numbers.
template <int64_t n>
void softmaxOfShortRows(const float* from, int64_t rows, int64_t columns, bool logarithm,
                        float* to) {
  alignas(64) static constexpr float kOnes[kWidth] = {
#if LLGA_VECTOR_WIDTH == 16
      1, 1, 1, 1, 1, 1, 1, 1,
#endif
      1, 1, 1, 1, 1, 1, 1, 1};
  constexpr auto kLast = n - 1;
  const auto first = columns % kWidth;
  const auto is = loadUpTo(kOnes, first) > Vector{};
  for (; rows > 0; --rows, from += columns, to += columns) {
    Vector x[n];
    for (int64_t v = 0; v < n; ++v) {
      x[v] = loadUpTo(from + v * kWidth, v < kLast ? 0 : first);
    }
    Vector greatest = is ? x[kLast] : Vector{} + from[0];
    for (int64_t v = 0; v < kLast; ++v) {
      greatest = maxOrSecond(x[v], greatest);
    }
    const auto most = reduced(greatest, maxOrSecond);
    Vector e[n];
    Vector sum{};
    for (int64_t v = 0; v < n; ++v) {
      x[v] -= most;
      e[v] = expOfDifference(x[v]);
      sum += v < kLast ? e[v] : is ? e[v] : Vector{};
    }
    const auto total = sumOf(sum);
    const auto shift = logarithm ? __builtin_logf(total) : 0;
    const auto factor = 1.0F / total;
    for (int64_t v = 0; v < n; ++v) {
      const Vector result = logarithm ? x[v] - shift : e[v] * factor;
      storeUpTo(to + v * kWidth, result, v < kLast ? 0 : first);
    }
  }
}

void softmaxOfEachRow(const float* from, int64_t rows, int64_t columns, bool logarithm, float* to) {
  switch ((columns + kWidth - 1) / kWidth) {
    case 1:
      return softmaxOfShortRows<1>(from, rows, columns, logarithm, to);
    case 2:
      return softmaxOfShortRows<2>(from, rows, columns, logarithm, to);
    case 3:
      return softmaxOfShortRows<3>(from, rows, columns, logarithm, to);
    case 4:
      return softmaxOfShortRows<4>(from, rows, columns, logarithm, to);
    default:
      break;
  }
  for (; rows > 0; --rows, from += columns, to += columns) {
    const auto most = greatestOf(from, columns);
    Vector sum{};
    int64_t c = 0;
    for (; c + kWidth <= columns; c += kWidth) {
      const Vector e = expOfDifference(loadVector(from + c) - most);
      if (!logarithm) {
        storeVector(to + c, e);
      }
      sum += e;
    }
    if (c < columns) {
      const auto rest = columns - c;
      float last[kWidth] = {};
      storeFirst(last, expOfDifference(loadFirst(from + c, rest) - most), rest);
      sum += loadVector(last);
      if (!logarithm) {
        storeFirst(to + c, loadVector(last), rest);
      }
    }
    const auto total = sumOf(sum);
    if (logarithm) {
      const auto log = __builtin_logf(total);
      computeEach(columns, to, [=](Vector x) -> Vector { return (x - most) - log; }, from);
    } else {
      const auto factor = 1.0F / total;
      computeEach(columns, to, [=](Vector x) -> Vector { return x * factor; }, to);
    }
  }
}

// By numbers that the compiler knows, so that it shuffles vectors.
template <typename Bits, int64_t planes>
void interleavePlanes(const Bits* __restrict__ from, int64_t stride, int64_t count,
                      Bits* __restrict__ to) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t plane = 0; plane < planes; ++plane) {
      to[i * planes + plane] = from[plane * stride + i];
    }
  }
}

template <typename Bits>
void interleaveNumbers(const void* from, int64_t planes, int64_t stride, int64_t count, void* to) {
  const auto* source = static_cast<const Bits*>(from);
  auto* target = static_cast<Bits*>(to);
  switch (planes) {
    case 2:
      return interleavePlanes<Bits, 2>(source, stride, count, target);
    case 3:
      return interleavePlanes<Bits, 3>(source, stride, count, target);
    default:
      return interleavePlanes<Bits, 4>(source, stride, count, target);
  }
}

void interleave(const void* from, int64_t planes, int64_t stride, int64_t count, int64_t bytes,
                void* to) {
  switch (bytes) {
    case 1:
      return interleaveNumbers<uint8_t>(from, planes, stride, count, to);
    case 2:
      return interleaveNumbers<uint16_t>(from, planes, stride, count, to);
    default:
      return interleaveNumbers<uint32_t>(from, planes, stride, count, to);
  }
}

#if LLGA_VECTOR_WIDTH == 16

// Registers are put together from the parts of rows that lie in them, and stored whole.
void gatherWindows(const char* from, char* to, const Windows& windows) {
  struct Part {
    int64_t offset;
    __mmask64 mask;
  };
  constexpr auto kBytes = Windows::kMultiple;
  constexpr auto kMostRegisters = Windows::kMostRows * Windows::kMostBytes / kBytes;
  Part parts[Windows::kMostRows + kMostRegisters];
  int64_t ends[kMostRegisters];
  const auto bytes = windows.rows * windows.row_bytes;
  const auto registers = (bytes + kBytes - 1) / kBytes;
  int64_t count = 0;
  for (int64_t i = 0; i < registers; ++i) {
    const auto begin = i * kBytes;
    for (int64_t y = begin / windows.row_bytes; y < windows.rows; ++y) {
      const auto at = y * windows.row_bytes - begin;  // of the row's first byte, in the register
      if (at >= kBytes) {
        break;
      }
      const auto before = at > 0 ? at : 0;
      const auto end = at + windows.row_bytes < kBytes ? at + windows.row_bytes : kBytes;
      const auto all = ~__mmask64{0};
      parts[count] = {y * windows.row_stride - at, all << static_cast<uint64_t>(before) &
                                                       all >> static_cast<uint64_t>(kBytes - end)};
      ++count;
    }
    ends[i] = count;
  }
  for (int64_t p = 0; p < windows.pixels; ++p, from += windows.stride, to += windows.to_stride) {
    const auto* part = parts;
    for (int64_t i = 0; i < registers; ++i) {
      auto together = _mm512_setzero_si512();
      for (; part < parts + ends[i]; ++part) {
        together = _mm512_mask_loadu_epi8(together, part->mask, from + part->offset);
      }
      _mm512_storeu_si512(to + i * kBytes, together);
    }
  }
}

#else

constexpr decltype(Kernels::gatherWindows) gatherWindows = nullptr;

#endif

void maxOfBytes(const uint8_t* const* from, int64_t count, int64_t bytes, uint8_t* to) {
#if LLGA_VECTOR_WIDTH == 16
  constexpr int64_t kBytes = 64;
  for (int64_t i = 0; i < bytes; i += kBytes) {
    const auto left = bytes - i;
    const auto there =
        left < kBytes ? (uint64_t{1} << static_cast<unsigned>(left)) - 1 : ~uint64_t{0};
    auto most = _mm512_maskz_loadu_epi8(there, from[0] + i);
    for (int64_t n = 1; n < count; ++n) {
      most = _mm512_max_epu8(most, _mm512_maskz_loadu_epi8(there, from[n] + i));
    }
    _mm512_mask_storeu_epi8(to + i, there, most);
  }
#else
  const auto load = [](const uint8_t* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  };
  constexpr int64_t kBytes = 32;
  int64_t i = 0;
  for (; i + kBytes <= bytes; i += kBytes) {
    auto most = load(from[0] + i);
    for (int64_t n = 1; n < count; ++n) {
      most = _mm256_max_epu8(most, load(from[n] + i));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), most);
  }
  for (; i < bytes; ++i) {
    to[i] = from[0][i];
    for (int64_t n = 1; n < count; ++n) {
      to[i] = from[n][i] > to[i] ? from[n][i] : to[i];
    }
  }
#endif
}

template <typename T>
constexpr Functions<T> kFunctions{activate<T>,
                                  sumRows<T>,
                                  sumSquaresOfRows<T>,
                                  sumEachRow<T>,
                                  sumSquaresOfEachRow<T>,
                                  chosenOfRows<T, greaterOf>,
                                  chosenOfRows<T, lessOf>,
                                  chosenOfEachRow<T, greaterOf>,
                                  chosenOfEachRow<T, lessOf>,
                                  momentsOfRows<T>,
                                  momentsOfEachRow<T>,
                                  scaleRows<T>,
                                  affineRows<T, T>,
                                  blendPixels<T>,
                                  blend<T>,
                                  softmaxOfColumns<T>};

constexpr Kernels kKernels{kFunctions<float>,
                           kFunctions<Bfloat16>,
                           narrowRows,
                           widenRows,
                           widenRowsOfBytes,
                           softmaxOfEachRow,
                           normalizeEachRow<float, float>,
                           normalizeEachRow<float, Bfloat16>,
                           normalizeEachRow<Bfloat16, Bfloat16>,
                           normalizeEachRow<Bfloat16, float>,
                           rotateRow<float, float>,
                           rotateRow<Bfloat16, float>,
                           rotateRow<Bfloat16, Bfloat16>,
                           centreEachRow,
                           sumRows<uint8_t>,
                           affineRows<uint8_t, uint8_t>,
                           affineRows<float, uint8_t>,
                           affineRows<uint8_t, float>,
                           slopeRows,
                           addAffineRows<float>,
                           addAffineRows<uint8_t>,
                           maxOfBytes,
                           toBytes,
                           sumOfBytes,
                           copyRows,
                           repeatInRows,
                           compute,
                           add,
                           interleave,
                           gatherWindows};

}  // namespace
}  // namespace llga::vector_loops
