#include "jit/onednn/runtime/finite.h"

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
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

// Likewise of short rows, `stride` numbers apart.
template <typename Bits, Bits exponent>
[[gnu::always_inline]] inline bool scanRows(const Bits* values, int64_t rows, int64_t count,
                                            int64_t stride) {
  constexpr int64_t kRows = 64;
  while (rows > 0) {
    Bits found = 0;
    for (int64_t row = 0; row < kRows && rows > 0; ++row, --rows, values += stride) {
      for (int64_t i = 0; i < count; ++i) {
        found |= static_cast<Bits>((values[i] & exponent) == exponent);
      }
    }
    if (found != 0) {
      return false;
    }
  }
  return true;
}

#define LLGA_FOR_EACH_ISA \
  [[gnu::target_clones("arch=skylake-avx512", "avx2", "default"), gnu::optimize("O3")]]

LLGA_FOR_EACH_ISA bool finite32(const uint32_t* values, int64_t count) {
  return scan<uint32_t, 0x7F800000U>(values, count);
}

LLGA_FOR_EACH_ISA bool finite16(const uint16_t* values, int64_t count) {
  return scan<uint16_t, 0x7F80U>(values, count);
}

LLGA_FOR_EACH_ISA bool finiteRows32(const uint32_t* values, int64_t rows, int64_t count,
                                    int64_t stride) {
  return scanRows<uint32_t, 0x7F800000U>(values, rows, count, stride);
}

LLGA_FOR_EACH_ISA bool finiteRows16(const uint16_t* values, int64_t rows, int64_t count,
                                    int64_t stride) {
  return scanRows<uint16_t, 0x7F80U>(values, rows, count, stride);
}

#undef LLGA_FOR_EACH_ISA

// Whether check(first, last) holds for all shares of so many units, of `numbers` each. By several
// threads where there is much to read, as the image that a network gets, which is in no cache yet:
// each has a part of it in its own then.
template <typename Check>
bool holdsForAll(int64_t units, int64_t numbers, const Check& check) {
  constexpr int64_t kForOne = 1 << 15;
  std::atomic<bool> all{true};
  at::parallel_for(0, units, std::max<int64_t>(1, kForOne / std::max<int64_t>(1, numbers)),
                   [&](int64_t first, int64_t last) {
                     if (!check(first, last)) {
                       all.store(false, std::memory_order_relaxed);
                     }
                   });
  return all.load(std::memory_order_relaxed);
}

// Of float32 or bfloat16.
bool finite(at::ScalarType dtype, const void* values, int64_t count) {
  return holdsForAll(count, 1, [&](int64_t first, int64_t last) {
    return dtype == at::kFloat
               ? finite32(static_cast<const uint32_t*>(values) + first, last - first)
               : finite16(static_cast<const uint16_t*>(values) + first, last - first);
  });
}

struct Dim {
  int64_t stride;
  int64_t size;
};

// The outermost in memory first; those that lie side by side are one.
c10::SmallVector<Dim, 6> dimsOf(const at::Tensor& tensor) {
  c10::SmallVector<Dim, 6> all;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) != 1) {
      all.push_back({tensor.stride(i), tensor.size(i)});
    }
  }
  std::sort(all.begin(), all.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  c10::SmallVector<Dim, 6> joined;
  for (const auto& dim : all) {
    if (!joined.empty() && joined.back().stride == dim.stride * dim.size) {
      joined.back() = {dim.stride, joined.back().size * dim.size};
    } else {
      joined.push_back(dim);
    }
  }
  return joined;
}

// Of numbers whose last dimension lies side by side.
bool finiteRows(at::ScalarType dtype, const char* data, c10::ArrayRef<Dim> dims) {
  if (dims.size() <= 1) {
    return finite(dtype, data, dims.empty() ? 1 : dims[0].size);
  }
  constexpr int64_t kShort = 1 << 12;
  const auto stride = dims[0].stride;
  const auto count = dims.back().size;
  if (dims.size() == 2 && count <= kShort) {
    return holdsForAll(dims[0].size, count, [&](int64_t first, int64_t last) {
      const auto rows = last - first;
      return dtype == at::kFloat
                 ? finiteRows32(reinterpret_cast<const uint32_t*>(data) + first * stride, rows,
                                count, stride)
                 : finiteRows16(reinterpret_cast<const uint16_t*>(data) + first * stride, rows,
                                count, stride);
    });
  }
  const auto step = stride * static_cast<int64_t>(c10::elementSize(dtype));
  for (int64_t i = 0; i < dims[0].size; ++i) {
    if (!finiteRows(dtype, data + i * step, dims.slice(1))) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool allFinite(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16) {
    return true;
  }
  if (tensor.is_non_overlapping_and_dense()) {
    return finite(dtype, tensor.const_data_ptr(), tensor.numel());
  }
  const auto dims = dimsOf(tensor);
  if (!dims.empty() && dims.back().stride != 1) {
    return allFinite(tensor.contiguous());
  }
  return finiteRows(dtype, static_cast<const char*>(tensor.const_data_ptr()), dims);
}

}  // namespace llga
