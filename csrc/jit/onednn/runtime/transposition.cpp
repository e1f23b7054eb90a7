#include "jit/onednn/runtime/transposition.h"

#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>
#include <c10/util/irange.h>
#include <xmmintrin.h>

#include <algorithm>

#include "jit/onednn/runtime/shares.h"

namespace llga {
namespace {

void storeFirst(float* to, __m128 v, int64_t count) {
  if (count == 1) {
    return _mm_store_ss(to, v);
  }
  _mm_storel_pi(reinterpret_cast<__m64*>(to), v);
  if (count == 3) {
    _mm_store_ss(to + 2, _mm_movehl_ps(v, v));
  }
}

}  // namespace

// Four columns at a time: their places may be a power of two apart, where a cache holds few.
void transpose(const float* from, int64_t rows, int64_t columns, int64_t from_stride, float* to,
               int64_t to_stride) {
  constexpr int64_t kSide = 4;
  const auto whole = columns / kSide * kSide;
  for (int64_t c = 0; c < whole; c += kSide) {
    for (int64_t r = 0; r < rows; r += kSide) {
      const auto count = std::min(kSide, rows - r);
      auto row = [&](int64_t i) {
        return _mm_loadu_ps(from + (r + std::min(i, count - 1)) * from_stride + c);
      };
      __m128 v[kSide] = {row(0), row(1), row(2), row(3)};
      _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
      auto* block = to + c * to_stride + r;
      for (int64_t i = 0; i < kSide; ++i, block += to_stride) {
        if (count == kSide) {
          _mm_storeu_ps(block, v[i]);
        } else {
          storeFirst(block, v[i], count);
        }
      }
    }
  }
  for (int64_t c = whole; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      to[c * to_stride + r] = from[r * from_stride + c];
    }
  }
}

std::optional<Transposition> Transposition::of(const std::vector<int64_t>& sizes,
                                               const std::vector<int64_t>& from,
                                               const std::vector<int64_t>& to) {
  struct Dim {
    int64_t size;
    int64_t from;
    int64_t to;
  };
  std::vector<Dim> dims;
  for (const auto i : c10::irange(sizes.size())) {
    if (sizes[i] == 0) {
      return std::nullopt;
    }
    if (sizes[i] != 1) {
      dims.push_back({sizes[i], from[i], to[i]});
    }
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.to > b.to; });
  std::vector<Dim> joined;  // the innermost one of the result last
  for (const auto& dim : dims) {
    auto* outer = joined.empty() ? nullptr : &joined.back();
    if (outer != nullptr && outer->from == dim.from * dim.size && outer->to == dim.to * dim.size) {
      *outer = {outer->size * dim.size, dim.from, dim.to};
    } else {
      joined.push_back(dim);
    }
  }
  constexpr size_t kMatrix = 2;
  if (joined.size() == kMatrix) {
    joined.insert(joined.begin(), {1, 0, 0});
  }
  if (joined.size() != kMatrix + 1 || joined[1].from != 1 || joined[2].to != 1) {
    return std::nullopt;
  }
  return Transposition{joined[0].size, joined[0].from, joined[0].to, joined[2].size,
                       joined[2].from, joined[1].size, joined[1].to};
}

void Transposition::run(const float* from, float* to) const {
  constexpr int64_t kSide = 64;         // of a block, which finds room in the first level of cache
  constexpr int64_t kForOne = 1 << 14;  // numbers that are not worth a second thread
  const auto along = at::ceil_div(rows, kSide);
  const auto across = at::ceil_div(columns, kSide);
  const auto blocks = batches * along * across;
  const auto threads =
      std::clamp<int64_t>(batches * rows * columns / kForOne, 1, at::get_num_threads());
  forShares(blocks, 1, std::min(threads, blocks), [&](int64_t block, int64_t last) {
    for (; block < last; ++block) {
      const auto batch = block / (along * across);
      const auto row = block / across % along * kSide;
      const auto column = block % across * kSide;
      transpose(from + batch * from_batch + row * from_row + column, std::min(kSide, rows - row),
                std::min(kSide, columns - column), from_row,
                to + batch * to_batch + column * to_column + row, to_column);
    }
  });
}

}  // namespace llga
