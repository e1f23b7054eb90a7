// Product of a matrix and a vector, and sums over a matrix, for processors with AVX2.
//
//   result[r] = bias[r] + sum of matrix[r][.] * vector[.]
//
// and maybe an activation. A linear layer of one row, as at the end of a network for one image,
// does nothing but read its weight from memory. oneDNN's gemm does that at two thirds to four
// fifths of the speed, and wants a copy of the weight in another order.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"

namespace llga {

enum class Rectifier { none, relu, hardswish };

// Needs AVX2 and FMA. Stateless; any thread may call, works with as many threads as PyTorch does.
// `matrix` is dense, by rows. `bias` may be null. `result` overlaps nothing. `grain`: numbers of
// the matrix that are worth a thread.
void gemv(const float* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain);
void gemv(const Bfloat16* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain);

// In the calling thread, with the same needs:

// to[c] = sum of from[.][c]
void sumRows(const float* from, int64_t rows, int64_t columns, float* to);
void sumRows(const Bfloat16* from, int64_t rows, int64_t columns, float* to);

// to[.][c] = from[.][c] * factor[c]; `to` may be `from`.
void scaleRows(const float* from, int64_t rows, int64_t columns, const float* factor, float* to);
void scaleRows(const Bfloat16* from, int64_t rows, int64_t columns, const float* factor,
               Bfloat16* to);

}  // namespace llga
