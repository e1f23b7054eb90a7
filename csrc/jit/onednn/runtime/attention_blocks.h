// The arithmetic of attention, on plain memory: what is compiled once for each instruction set. No
// PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"
#include "jit/onednn/runtime/quantized_blocks.h"

namespace llga::attention {

// Rows of numbers that are `stride` numbers apart, or lie where `offsets` says; T may be const. In
// line everywhere, as below.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
  const int64_t* offsets;  // null: by `stride`

  [[gnu::always_inline]] T* row(int64_t i) const {
    return data + (offsets != nullptr ? offsets[i] : i * stride);
  }
  // Whether there is one.
  [[gnu::always_inline]] bool has(int64_t i) const { return offsets == nullptr || offsets[i] >= 0; }
};

// What happens to the scores of each query: of the pointers, to the mask's first row, one at most
// is not null.
struct Mask {
  const float* added;            // to the score
  const Bfloat16* added_narrow;  // likewise
  const bool* allowed;           // minus infinity is added where it is false
  const bool* chosen;            // where it is `chosen_is`, the score is replaced
  bool chosen_is;
  float replacement;
  int64_t stride;  // from query to query
};

constexpr int kMasks = 2;

// What 8-bit numbers are: real number = scale * (number - zero point). Where products want unsigned
// numbers and there are signed ones, or the other way round, the first bit is flipped and 128 added
// to the zero point or taken off it.
struct Bytes {
  const quantized::Kernels* products;
  uint8_t query_flip;  // makes unsigned numbers
  uint8_t key_flip;    // makes signed ones, as the next
  uint8_t value_flip;
  int32_t query_zero_point;  // of the unsigned; that of keys changes no result
  float value_zero_point;    // of the signed
  float value_scale;
  // Of a result in 8 bit: what real numbers are multiplied with, and of the unsigned ones.
  float inverse;
  float zero_point;
  uint8_t result_flip;
};

// One head of one element of the batch; T is float, Bfloat16, or uint8_t for 8-bit numbers of
// either kind. R, the result's, is another one at most where T is uint8_t: float for real numbers.
template <typename T, typename R = T>
struct Head {
  int64_t queries;
  int64_t keys;
  int64_t size;        // of a query and a key
  int64_t value_size;  // of a value and a result
  float scale;
  // Rows are divided by their norm, or by this where it is more; negative: they are not.
  float least_query_norm;
  float least_key_norm;
  bool causal;      // query i meets the keys 0 to i
  bool key_across;  // a row of `key` is one number of all keys, not all numbers of a key
  bool safe;        // a query that meets no key gives 0, as in PyTorch's kernel; else NaN

  Rows<const T> query;
  Rows<const T> key;
  Rows<const T> value;
  Mask masks[kMasks];  // applied in this order
  Rows<R> result;      // those that are not there are not written
  const Bytes* bytes;  // of 8-bit numbers, whose scales but for the values' are part of `scale`
};

// Keys and values as the products want them, and room for one block of queries. Used by one thread.
// Where the products are those of bfloat16, so are keys, values and queries, and likewise with 8
// bits; it needs no more room.
struct Workspace {
  float* keys;    // (panel, number, key of the panel), or (panel, pair, key, number of the pair)
  float* values;  // for each block of kKeys keys: (panel, key, number of the panel), or likewise
  float* query;
  float* scores;
  float* sums;
  // With 8 bits: what sums of each key begin with, and exponentials in two digits.
  int32_t* starts;
  uint8_t* digits;
};

constexpr int64_t kQueries = 64;  // that are worked on at once
constexpr int64_t kKeys = 512;    // likewise; a multiple of all panels

// The least multiple of a panel that is not less. In line everywhere: no instruction set's copy of
// it may serve another.
[[gnu::always_inline]] constexpr int64_t wholePanels(int64_t count, int64_t panel) {
  return (count + panel - 1) / panel * panel;
}

template <typename T, typename R = T>
struct Functions {
  // Copies keys and values of a head. Returns whether all of them are finite.
  bool (*pack)(const Head<T, R>& head, const Workspace& workspace);

  // The results of `count` queries from the `first` on, at most kQueries of them. `finite`: what
  // pack() returned.
  void (*attend)(const Head<T, R>& head, const Workspace& workspace, bool finite, int64_t first,
                 int64_t count);

  // The result of the one query of a head, from keys and values where they lie, the keys not
  // across and not normalized, nor the query. `scores`: room for all keys, up to a whole panel.
  // Null where there is none.
  void (*attendAlone)(const Head<T, R>& head, float* scores);
};

// What there is for one instruction set; null where it is for other numbers.
struct Kernels {
  const char* name;
  int64_t panel;  // keys, or numbers of values, that lie together
  Functions<float> wide;
  Functions<Bfloat16> narrow;
  // Of 8-bit data, keys and queries neither across nor normalized.
  Functions<uint8_t> quantized = {};
  Functions<uint8_t, float> quantized_to_float = {};
};

extern const Kernels avx2;
extern const Kernels avx512;
// With AVX-512's instructions for bfloat16; keys of such data neither across nor normalized.
extern const Kernels avx512_bf16;
extern const Kernels amx;          // likewise, with AMX
extern const Kernels avx512_vnni;  // for 8-bit data; the products may be those of AMX

}  // namespace llga::attention
