#include "jit/onednn/runtime/finite.h"

#include <cstdint>

namespace llga {
namespace {

// An IEEE number is finite unless all bits of its exponent are set. Written so that compilers make
// vector code of it; blocks, so that a NaN near the start is found without reading the rest.
template <typename Bits, Bits exponent>
[[gnu::always_inline]] inline bool scan(const Bits* values, int64_t count) {
  constexpr int64_t kBlock = 4096;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t end = start + kBlock < count ? start + kBlock : count;
    Bits found = 0;
    for (int64_t i = start; i < end; ++i) {
      found |= static_cast<Bits>((values[i] & exponent) == exponent);
    }
    if (found != 0) {
      return false;
    }
  }
  return true;
}

[[gnu::target_clones("arch=skylake-avx512", "avx2", "default"), gnu::optimize("O3")]] bool finite32(
    const uint32_t* values, int64_t count) {
  return scan<uint32_t, 0x7F800000U>(values, count);
}

[[gnu::target_clones("arch=skylake-avx512", "avx2", "default"), gnu::optimize("O3")]] bool finite16(
    const uint16_t* values, int64_t count) {
  return scan<uint16_t, 0x7F80U>(values, count);
}

bool finite(at::ScalarType dtype, const void* values, int64_t count) {
  switch (dtype) {
    case at::kFloat:
      return finite32(static_cast<const uint32_t*>(values), count);
    case at::kBFloat16:
      return finite16(static_cast<const uint16_t*>(values), count);
    default:
      return true;
  }
}

// Row by row, of a tensor whose rows are dense.
bool finiteRows(const at::Tensor& tensor, const void* data, int64_t dim) {
  const auto size = tensor.size(dim);
  if (dim == tensor.dim() - 1) {
    return finite(tensor.scalar_type(), data, size);
  }
  const auto step = tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
  for (int64_t i = 0; i < size; ++i) {
    if (!finiteRows(tensor, static_cast<const char*>(data) + i * step, dim + 1)) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool allFinite(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) {
    return finite(tensor.scalar_type(), tensor.const_data_ptr(), tensor.numel());
  }
  const auto rows = tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
  return finiteRows(rows, rows.const_data_ptr(), 0);
}

}  // namespace llga
