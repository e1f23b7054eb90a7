// Product of a matrix and a vector, for processors with AVX2.
//
//   result[r] = bias[r] + sum of matrix[r][.] * vector[.]
//
// and maybe an activation. A linear layer of one row, as at the end of a network for one image,
// does nothing but read its weight from memory. oneDNN's gemm does that at two thirds to four
// fifths of the speed, and wants a copy of the weight in another order.
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/rectifier.h"

namespace llga {

// Needs AVX2 and FMA. Stateless; any thread may call, works with as many threads as PyTorch does.
// `matrix` is dense, by rows. `bias` may be null. `result` overlaps nothing. `grain`: numbers of
// the matrix that are worth a thread.
void gemv(const float* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain);
void gemv(const Bfloat16* matrix, const float* bias, int64_t rows, int64_t columns,
          const float* vector, float* result, Rectifier rectifier, int64_t grain);
void gemv(const Bfloat16* matrix, const float* bias, int64_t rows, int64_t columns,
          const Bfloat16* vector, float* result, Rectifier rectifier, int64_t grain);

}  // namespace llga
