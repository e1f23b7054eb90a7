// The arithmetic of attention, on plain memory: what is compiled once for each instruction set. No
// PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

#include "jit/onednn/runtime/bfloat16.h"

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

// One head of one element of the batch; T is float or Bfloat16.
template <typename T>
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
  Rows<T> result;      // those that are not there are not written
};

// Keys and values as the products want them, and room for one block of queries. Used by one thread.
// Where the products are those of bfloat16, so are keys, values and queries; it needs no more room.
struct Workspace {
  float* keys;    // (panel, number, key of the panel), or (panel, pair, key, number of the pair)
  float* values;  // for each block of kKeys keys: (panel, key, number of the panel), or likewise
  float* query;
  float* scores;
  float* sums;
};

constexpr int64_t kQueries = 64;  // that are worked on at once
constexpr int64_t kKeys = 512;    // likewise; a multiple of all panels

// The least multiple of a panel that is not less. In line everywhere: no instruction set's copy of
// it may serve another.
[[gnu::always_inline]] constexpr int64_t wholePanels(int64_t count, int64_t panel) {
  return (count + panel - 1) / panel * panel;
}

template <typename T>
struct Functions {
  // Copies keys and values of a head. Returns whether all of them are finite.
  bool (*pack)(const Head<T>& head, const Workspace& workspace);

  // The results of `count` queries from the `first` on, at most kQueries of them. `finite`: what
  // pack() returned.
  void (*attend)(const Head<T>& head, const Workspace& workspace, bool finite, int64_t first,
                 int64_t count);

  // The result of the one query of a head, from keys and values where they lie, the keys not
  // across and not normalized, nor the query. `scores`: room for all keys, up to a whole panel.
  void (*attendAlone)(const Head<T>& head, float* scores);
};

// What there is for one instruction set.
struct Kernels {
  const char* name;
  int64_t panel;  // keys, or numbers of values, that lie together
  Functions<float> wide;
  Functions<Bfloat16> narrow;
};

extern const Kernels avx2;
extern const Kernels avx512;
// With AVX-512's instructions for bfloat16; keys of such data neither across nor normalized.
extern const Kernels avx512_bf16;
extern const Kernels amx;  // likewise, with AMX

}  // namespace llga::attention
