// Rotary position embeddings: halves of each row, rotated by angles that depend on its place.
#pragma once

#include <cstdint>
#include <vector>

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does. Needs
// AVX2 and FMA.
struct Rotary {
  static constexpr int64_t kMostColumns = 1024;

  bool narrow = false;         // the data is of bfloat16, else of float32
  bool narrow_angles = false;  // likewise the cosines and sines; only with such data
  bool narrow_result = false;
  int64_t columns = 0;         // of a row: an even number
  std::vector<int64_t> sizes;  // of the dimensions before
  // In numbers, for each of those; 0 where there is one row for all.
  std::vector<int64_t> strides;
  std::vector<int64_t> cos_strides;
  std::vector<int64_t> sin_strides;
  std::vector<int64_t> result_strides;

  // Of a row x with the halves a and b: x * cos + (-b, a) * sin, computed in float32.
  void run(const void* from, const void* cos, const void* sin, void* to) const;

 private:
  class Place;

  void rotate(const void* from, const void* cos, const void* sin, const Place& place,
              void* to) const;
};

}  // namespace llga
