// Rows of a table by their numbers: aten::embedding.
//
// Holds no data. Any number of threads may run one; it starts threads of its own, PyTorch's.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>

namespace llga {

struct Lookup {
  int64_t rows;   // of the table
  int64_t bytes;  // of a row, which lies in one piece
  int64_t step;   // from one row to the next, in bytes
  bool wide;      // indices of 64 bit, else of 32
  // Of the indices, in any order; strides in indices.
  c10::SmallVector<int64_t, 4> sizes;
  c10::SmallVector<int64_t, 4> strides;

  // Copies the row of each index, one behind the other. Throws StepError where there is no such
  // row; then `result` holds anything.
  void run(const void* indices, const void* table, void* result) const;
};

}  // namespace llga
