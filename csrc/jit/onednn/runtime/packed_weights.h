// Constant weights in the layouts that compiled partitions ask for.
//
// One packed copy for each (constant tensor, layout, placement), or what a kernel of our own reads
// in its place, shared by all plans, shapes and threads that need it. A plan owns what it reads
// through shared_ptr; the registry only remembers (weak), so the last plan frees the memory. Any
// thread may call; packing holds one lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "jit/onednn/facts.h"
#include "jit/onednn/runtime/layout.h"

namespace llga {

class PackedWeight {
 public:
  explicit PackedWeight(at::Tensor memory);
  ~PackedWeight();
  PackedWeight(const PackedWeight&) = delete;
  PackedWeight& operator=(const PackedWeight&) = delete;

  void* data() const { return memory_.data_ptr(); }
  size_t bytes() const { return bytes_; }

 private:
  at::Tensor memory_;
  size_t bytes_;
};

using PackedWeightPtr = std::shared_ptr<const PackedWeight>;

// Thrown where a layout can't be packed; the plan then takes the plain weight.
struct PackError {
  const char* reason;
};

// Where a packed weight in a strided layout starts.
enum class Placement {
  aligned,    // as PyTorch's allocator aligns it: 64 bytes
  unaligned,  // 16 bytes further
};

// `weight` in layout `layout`; packed now unless some plan already has it. Throws PackError.
PackedWeightPtr packWeight(const at::Tensor& weight, const Layout& layout, Placement placement);

// What `transform` makes of `weight` and writes to the contiguous tensor that it is given; `sizes`
// and `dtype` are that one's, and of all transformations of a weight only this one has both.
PackedWeightPtr transformWeight(const at::Tensor& weight, const Shape& sizes, at::ScalarType dtype,
                                const std::function<void(const at::Tensor&)>& transform);

// Bytes of all packed weights alive.
size_t packedBytes();

}  // namespace llga
