#include "jit/onednn/runtime/releasable_weights.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <atomic>
#include <unordered_map>

namespace llga {
namespace {

std::atomic<size_t> held_bytes{0};

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, ReleasableWeight*> weights;
  std::atomic<size_t> count{0};
};

Registry& registry() {
  static auto* instance = new Registry;  // outlives weights that die at exit
  return *instance;
}

// What a storage of ours owns.
struct Context {
  ReleasableWeightPtr weight;
  at::DataPtr memory;
};

void deleteContext(void* context) { delete static_cast<Context*>(context); }

}  // namespace

ReleasableWeight::ReleasableWeight(const at::Tensor& plain)
    : dtype_(plain.scalar_type()),
      sizes_(plain.sizes().vec()),
      strides_(plain.strides().vec()),
      bytes_(plain.nbytes()) {}

at::Tensor ReleasableWeight::make(const at::Tensor& plain) {
  const auto weight = c10::make_intrusive<ReleasableWeight>(plain);
  auto* keeper = new c10::Storage(plain.storage());
  at::DataPtr shared(
      plain.data_ptr(), keeper, [](void* kept) { delete static_cast<c10::Storage*>(kept); },
      at::kCPU);
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), plain.nbytes(), weight->own(std::move(shared)),
      /*allocator=*/nullptr, /*resizable=*/false);
  weight->storage_ = storage.get();
  auto& reg = registry();
  const std::lock_guard lock(reg.mutex);
  reg.weights.emplace(storage.get(), weight.get());
  ++reg.count;
  return weight->tensor(weight->sizes_, weight->strides_);
}

ReleasableWeight::~ReleasableWeight() {
  held_bytes -= packed_ != nullptr ? packed_->bytes() : 0;
  auto& reg = registry();
  const std::lock_guard lock(reg.mutex);
  reg.count -= reg.weights.erase(storage_);
}

at::DataPtr ReleasableWeight::own(at::DataPtr memory) {
  auto* data = memory.get();
  auto self = ReleasableWeightPtr::reclaim_copy(this);
  return {data, new Context{std::move(self), std::move(memory)}, &deleteContext, at::kCPU};
}

at::Tensor ReleasableWeight::tensor(const Shape& sizes, const Shape& strides) const {
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_);
  return at::empty({0}, at::TensorOptions().dtype(dtype_))
      .set_(c10::Storage(std::move(storage)), 0, sizes, strides);
}

void ReleasableWeight::acquire() {
  const std::lock_guard lock(mutex_);
  if (!present_) {
    storage_->set_data_ptr_noswap(own(at::getCPUAllocator()->allocate(bytes_)));
    auto view = tensor(view_sizes_, view_strides_);
    auto dense = view.is_contiguous() ? view : at::empty(view_sizes_, view.options());
    copyToPlain(layout_, packed_->data(), dense);
    if (!dense.is_same(view)) {
      view.copy_(dense);
    }
    present_ = true;
  }
  ++users_;
}

void ReleasableWeight::yield() {
  const std::lock_guard lock(mutex_);
  --users_;
  drop();
}

void ReleasableWeight::packedAs(const at::Tensor& view, const Layout& layout,
                                PackedWeightPtr packed) {
  const std::lock_guard lock(mutex_);
  if (packed_ == nullptr && static_cast<size_t>(view.nbytes()) == bytes_) {
    packed_ = std::move(packed);
    held_bytes += packed_->bytes();
    layout_ = withId(layout, 0);
    view_sizes_ = view.sizes().vec();
    view_strides_ = view.strides().vec();
  }
}

void ReleasableWeight::pin() {
  const std::lock_guard lock(mutex_);
  pinned_ = true;
}

size_t ReleasableWeight::release() {
  const std::lock_guard lock(mutex_);
  const bool was_present = present_;
  releasing_ = true;
  drop();
  return was_present && !present_ ? bytes_ : 0;
}

at::Tensor ReleasableWeight::copy() {
  acquire();
  const auto guard = c10::make_scope_exit([this] { yield(); });
  return tensor(sizes_, strides_).clone();
}

void ReleasableWeight::drop() {
  if (present_ && releasing_ && !pinned_ && users_ == 0 && packed_ != nullptr) {
    storage_->set_data_ptr_noswap(own(at::DataPtr(nullptr, at::kCPU)));
    present_ = false;
  }
}

ReleasableWeightPtr findReleasable(const at::Tensor& tensor) {
  auto& reg = registry();
  if (reg.count.load(std::memory_order_relaxed) == 0 || !tensor.defined() ||
      !tensor.has_storage()) {
    return {};
  }
  const std::lock_guard lock(reg.mutex);
  // The storage is alive, and so is the weight that it owns.
  const auto it = reg.weights.find(tensor.storage().unsafeGetStorageImpl());
  return it != reg.weights.end() ? ReleasableWeightPtr::reclaim_copy(it->second)
                                 : ReleasableWeightPtr();
}

size_t heldBytes() { return held_bytes; }

WeightsInUse::WeightsInUse(const std::vector<ReleasableWeightPtr>& weights) : weights_(weights) {
  for (const auto& weight : weights_) {
    weight->acquire();
    ++acquired_;
  }
}

WeightsInUse::~WeightsInUse() {
  for (size_t i = 0; i < acquired_; ++i) {
    weights_[i]->yield();
  }
}

}  // namespace llga
