// Copies between orders of memory in which the numbers of different dimensions lie side by side: of
// images between planes and channels last, of matrices to their transposes. PyTorch's copy_() takes
// these number by number but for two dimensions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace llga {

// (row, column) to (column, row); the strides are from row to row, and from column to column.
void transpose(const float* from, int64_t rows, int64_t columns, int64_t from_stride, float* to,
               int64_t to_stride);
void transpose(const uint16_t* from, int64_t rows, int64_t columns, int64_t from_stride,
               uint16_t* to, int64_t to_stride);

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct Transposition {
  int64_t batches;
  int64_t from_batch;  // from batch to batch
  int64_t to_batch;
  int64_t rows;  // whose numbers lie side by side afterwards
  int64_t from_row;
  int64_t columns;  // whose numbers lie side by side before
  int64_t to_column;

  // From strides to strides of a tensor of these sizes; nothing where it is no batch of matrices.
  static std::optional<Transposition> of(const std::vector<int64_t>& sizes,
                                         const std::vector<int64_t>& from,
                                         const std::vector<int64_t>& to);

  // Any numbers of four or two bytes; `to` overlaps nothing.
  void run(const float* from, float* to) const;
  void run(const uint16_t* from, uint16_t* to) const;
};

}  // namespace llga
