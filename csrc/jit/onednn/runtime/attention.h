// Scaled dot product attention of float32 or bfloat16 data, on processors with AVX2 or AVX-512, and
// of 8-bit data with AVX-512's instructions for them.
//
// PyTorch's kernel gives the products of each head to a BLAS, call by call, at half to two thirds
// of the speed that a core has, and at a third of it with a boolean mask. Here they are those of
// our linear layers (gemm_blocks.h), with keys and values copied to panels once a head, but for a
// query alone. bfloat16 data are computed in float32, but for the products where there are
// instructions for those. 8-bit data are multiplied as they are.
//
// attention_blocks.h has the arithmetic of one block of queries; here the work is divided.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace llga::attention {
struct Kernels;
}

namespace llga {

// Immutable; any thread may call run(), which works with as many threads as PyTorch does.
struct Attention {
  enum class Type { float32, bfloat16, quantized };

  // Of 8-bit data: real number = scale * (number - zero point).
  struct Numbers {
    bool is_signed = false;
    float scale = 1;
    int32_t zero_point = 0;
  };

  // From one to the next, in numbers; the numbers of a row lie together.
  struct Strides {
    int64_t batch;
    int64_t head;
    int64_t row;
  };

  // Where the rows of a tensor lie.
  struct Place {
    Strides strides = {};
    int64_t first = 0;  // number of the first row
    // Of each row of the first head, in the order of batch and row, where strides.batch and
    // strides.row do not say it; negative for a row that is left out, of a result.
    std::vector<int64_t> rows = {};
  };

  struct Mask {
    // Booleans by which minus infinity is added, where false, or scores are replaced, where they
    // are `chosen_is`; numbers of either type that are added.
    enum class Kind { none, allowed, chosen, added_float32, added_bfloat16 };

    Kind kind = Kind::none;
    Strides strides = {};
    int64_t period = 0;  // elements of the batch after which it begins again; 0: it does not
    bool chosen_is = false;
    float replacement = 0;
  };
  static constexpr size_t kMasks = 2;

  const attention::Kernels* kernels;  // for an instruction set that the processor has
  Type type;                          // of all but the mask, and a result of float32
  int64_t batch;
  int64_t heads;
  int64_t key_heads;  // each is that of heads / key_heads neighbours
  int64_t queries;
  int64_t keys;
  int64_t size;        // of a query and a key
  int64_t value_size;  // of a value and a result
  float scale;
  std::vector<float> head_scales;  // of each head, beside the scale; empty: none
  // Rows are divided by their norm, or by this where it is more; negative: they are not.
  float least_query_norm;
  float least_key_norm;
  bool causal;      // query i meets the keys 0 to i
  bool key_across;  // a row of `key` is one number of all keys, not all numbers of a key
  bool safe;        // a query that meets no key gives 0, not NaN
  std::array<Mask, kMasks> masks;  // applied in this order
  Place query;
  Place key;
  Place value;
  Place result;
  // Of 8-bit data; that of query and key is not part of `scale`.
  Numbers query_numbers = {};
  Numbers key_numbers = {};
  Numbers value_numbers = {};
  std::optional<Numbers> result_numbers = {};  // nothing: the result is of float32

  struct Data {
    const void* query;
    const void* key;
    const void* value;
    std::array<const void*, kMasks> masks;  // of those that there are
    void* result;                           // overlaps nothing else
    float factor = 1;                       // of the scale
  };

  // NaN and infinities reach the results that they reach in eager, but for those of values that a
  // causal mask hides.
  void run(const Data& data) const;
};

}  // namespace llga
