// Weights whose plain copy may go once a packed one exists (compile(..., release_weights=True)).
//
// Such a weight is a constant of fusion groups and of nothing else. Its tensor lies in a storage of
// its own, whose memory is there only while somebody uses it: compiling a new signature, the
// fallback. It comes back by unpacking, which is exact, because packing was verified to be a
// permutation. Without a packed copy the memory stays. Any thread may call.
//
// Ownership: tensor -> storage -> (the context of its memory) -> ReleasableWeight.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <mutex>
#include <vector>

#include "jit/onednn/runtime/packed_weights.h"

namespace llga {

class ReleasableWeight final : public torch::CustomClassHolder {
 public:
  // A tensor like `plain`, which has to be dense. Shares its memory until it lets go of it.
  static at::Tensor make(const at::Tensor& plain);
  // For make().
  explicit ReleasableWeight(const at::Tensor& plain);
  ~ReleasableWeight() override;
  ReleasableWeight(const ReleasableWeight&) = delete;
  ReleasableWeight& operator=(const ReleasableWeight&) = delete;

  // The memory may be read between these.
  void acquire();
  void yield();

  // `packed` is the weight in `layout`; `view` is the tensor or a view of all of it. Keeps `packed`
  // alive: the plans that share it may be evicted.
  void packedAs(const at::Tensor& view, const Layout& layout, PackedWeightPtr packed);
  // The plain memory is needed for good: a plan reads it, or autograd has saved it.
  void pin();
  // From now on the memory goes whenever nobody uses it. Returns the bytes that go now.
  size_t release();

  // A plain copy, for those that are no fusion group.
  at::Tensor copy();

 private:
  void drop();
  at::Tensor tensor(const Shape& sizes, const Shape& strides) const;
  at::DataPtr own(at::DataPtr memory);

  mutable std::mutex mutex_;
  c10::StorageImpl* storage_ = nullptr;  // alive as long as anyone can call
  at::ScalarType dtype_;
  Shape sizes_;
  Shape strides_;
  size_t bytes_;
  size_t users_ = 0;
  bool releasing_ = false;
  bool pinned_ = false;
  bool present_ = true;
  PackedWeightPtr packed_;
  Layout layout_;
  Shape view_sizes_;
  Shape view_strides_;
};

using ReleasableWeightPtr = c10::intrusive_ptr<ReleasableWeight>;

// The weight whose storage `tensor` lies in; null for all other tensors.
ReleasableWeightPtr findReleasable(const at::Tensor& tensor);

// Bytes of packed weights that releasable ones hold: evicting plans does not free them.
size_t heldBytes();

// Keeps the memory of some weights present.
class WeightsInUse {
 public:
  explicit WeightsInUse(const std::vector<ReleasableWeightPtr>& weights);
  ~WeightsInUse();
  WeightsInUse(const WeightsInUse&) = delete;
  WeightsInUse& operator=(const WeightsInUse&) = delete;

 private:
  const std::vector<ReleasableWeightPtr>& weights_;
  size_t acquired_ = 0;
};

}  // namespace llga
