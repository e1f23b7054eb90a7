// The arithmetic of attention, on plain memory: what is compiled once for each instruction set. No
// PyTorch, no oneDNN, no standard library here (gemm_blocks.h has the reason).
#pragma once

#include <cstdint>

namespace llga::attention {

// Rows of `size` numbers that are `stride` numbers apart.
struct Rows {
  const float* data;
  int64_t stride;
};

// One head of one element of the batch.
struct Head {
  int64_t queries;
  int64_t keys;
  int64_t size;        // of a query and a key
  int64_t value_size;  // of a value and a result
  float scale;
  bool causal;  // query i meets the keys 0 to i

  Rows query;
  Rows key;
  Rows value;
  const bool* allowed;  // (query, key), or null
  const float* added;   // likewise
  int64_t mask_stride;  // from query to query of either
  float* result;        // (query, number)
  int64_t result_stride;
};

// Keys and values as the products want them, and room for one block of queries. Used by one thread.
struct Workspace {
  float* keys;    // (panel, number, key of the panel)
  float* values;  // for each block of kKeys keys: (panel, key, number of the panel)
  float* query;
  float* scores;
  float* sums;
};

constexpr int64_t kPanel = 16;    // that of gemm::avx2
constexpr int64_t kQueries = 64;  // that are worked on at once
constexpr int64_t kKeys = 512;    // likewise; a multiple of kPanel

// The least multiple of kPanel that is not less. In line everywhere: no instruction set's copy of
// it may serve another.
[[gnu::always_inline]] constexpr int64_t wholePanels(int64_t count) {
  return (count + kPanel - 1) / kPanel * kPanel;
}

// Copies keys and values of a head. Returns whether all of them are finite.
bool pack(const Head& head, const Workspace& workspace);

// The results of `count` queries from the `first` on, at most kQueries of them. `finite`: what
// pack() returned.
void attend(const Head& head, const Workspace& workspace, bool finite, int64_t first,
            int64_t count);

// The result of the one query of a head, from keys and values where they lie. `scores`: room for
// all keys, up to a multiple of kPanel.
void attendAlone(const Head& head, float* scores);

}  // namespace llga::attention
