// Means of numbers, and how far they are spread: what norms and variances are made of. Parts are
// joined as in T. F. Chan, G. H. Golub, R. J. LeVeque, Algorithms for computing the sample variance
// (1983). Stateless; needs AVX2 and FMA.
#pragma once

#include <cstdint>

namespace llga {

struct Moments {
  double count = 0;
  double mean = 0;
  double squares = 0;  // the sum of those of the differences from the mean

  void add(const Moments& other) {
    if (other.count == 0) {
      return;
    }
    const auto all = count + other.count;
    const auto share = other.count / all;
    const auto apart = other.mean - mean;
    mean += apart * share;
    squares += other.squares + apart * apart * count * share;
    count = all;
  }
};

// Of all numbers of columns of which these are known, of `rows` numbers each.
Moments joined(const float* means, const float* squares, int64_t columns, int64_t rows);

// T: float or Bfloat16.
template <typename T>
Moments momentsOf(const T* numbers, int64_t count);

}  // namespace llga
