// Products of matrices of float32, batch by batch, in any order of memory: attention that no kernel
// takes as a whole, graphs, capsules, pairs of features. What has one constant matrix is a Linear.
//
//   result = (a @ b * before + addend) * behind
//
// And pointwise convolutions of images in planes, whose weight is multiplied with each image.
//
// oneDNN takes longer for each of many small matrices than the arithmetic does, and copies those
// that lie otherwise. Here the columns of b are brought into panels, one after the other, and
// multiplied while they are in a cache; few rows meet a matrix, and a vector meets rows, where they
// lie.
#pragma once

#include <cstdint>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/rectifier.h"

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct MatrixProduct {
  struct Matrix {
    Shape batches;  // strides, one for each dimension of the batches; 0 where they share it
    int64_t row;
    int64_t column;
  };

  struct Data {
    const float* a;
    const float* b;
    const float* addend;  // like the result, or null; may be the result
    float* result;        // dense: (batches..., row, output); overlaps nothing else
  };

  Shape sizes;  // of the batches
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  Matrix a;  // (row, input)
  Matrix b;  // (input, output)
  float before = 1;
  float behind = 1;
  // Behind its inputs, each row of a has a bias, which is added to all outputs of that row. Not of
  // vectors.
  bool biased = false;
  Rectifier rectifier = Rectifier::none;  // behind all else; then there are no factors
  bool swapped = false;  // a is the other operand's matrix, transposed, and so is b

  // The same product of as few batches as there may be, with a row in the place of a column. For
  // set-up.
  MatrixProduct arranged() const;
  // Of what arranged() gave: whether it is a vector that meets rows, which lie one behind the
  // other.
  bool isVectorByRows() const;

  // Of what arranged() gave. Takes memory from the arena while it runs.
  void run(const Data& operands) const;

 private:
  // Where a matrix of this batch begins.
  int64_t offset(const Matrix& matrix, int64_t batch) const;
  // What follows the sums, in place.
  void finish(const float* addend, float* result, int64_t count) const;
  void runVectors(const Data& data, int64_t threads) const;
  void runPanels(const Data& data, int64_t threads) const;
};

}  // namespace llga
