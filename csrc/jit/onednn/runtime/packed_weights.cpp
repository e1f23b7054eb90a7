#include "jit/onednn/runtime/packed_weights.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace llga {
namespace {

constexpr size_t kUnalignedBy = 16;  // bytes off what the allocator aligns to

std::atomic<size_t> live_bytes{0};

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint32_t version;
  Shape sizes;
  Shape strides;
  int64_t offset;
  Layout layout;
  Placement placement;
  std::weak_ptr<const PackedWeight> packed;

  bool expired() const { return storage.expired() || packed.expired(); }
  bool matches(const at::Tensor& weight, uint32_t weight_version, const Layout& wanted,
               Placement where) const {
    return version == weight_version && offset == weight.storage_offset() &&
           weight.sizes() == sizes && weight.strides() == strides && layout.is_equal(wanted) &&
           placement == where;
  }
};

// By storage address; an address that was freed and reused is told apart by the weak pointer.
struct Registry {
  std::mutex mutex;
  std::unordered_multimap<const c10::StorageImpl*, Entry> entries;
};

Registry& registry() {
  static auto* instance = new Registry;  // outlives plans that die at exit
  return *instance;
}

uint32_t versionOf(const at::Tensor& weight) {
  // Inference tensors keep no version: they can't be written outside inference mode.
  return weight.is_inference() ? 0 : static_cast<uint32_t>(weight._version());
}

// Where each element of a plain tensor like `weight` lies in `layout`, by letting oneDNN unpack
// the numbers 0, 1, 2, ... It offers no way into a packed layout, but it has the way out of it.
// The data type holds integers exactly up to some power of two, so that large tensors take several
// passes, one for each digit.
template <typename T>
std::vector<uint32_t> positions(const at::Tensor& weight, const Layout& layout, uint32_t base) {
  const auto slots = static_cast<uint32_t>(layout.get_mem_size() / sizeof(T));
  auto digits = at::empty({slots}, weight.options());
  auto unpacked = at::empty_like(weight, at::MemoryFormat::Contiguous);
  std::vector<uint32_t> result(static_cast<size_t>(weight.numel()), 0);
  for (uint64_t unit = 1; unit < slots; unit *= base) {
    auto* digit = digits.data_ptr<T>();
    for (uint32_t i = 0; i < slots; ++i) {
      digit[i] = static_cast<T>(static_cast<float>(i / unit % base));
    }
    copyToPlain(layout, digit, unpacked);
    const auto* found = unpacked.const_data_ptr<T>();
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] +=
          static_cast<uint32_t>(static_cast<float>(found[i])) * static_cast<uint32_t>(unit);
    }
  }
  return result;
}

template <typename T>
at::Tensor packOpaque(const at::Tensor& weight, const Layout& layout, uint32_t base) {
  const auto slots = static_cast<int64_t>(layout.get_mem_size() / sizeof(T));
  if (slots > std::numeric_limits<int32_t>::max()) {
    throw PackError{"the packed weight has more than 2^31 elements"};
  }
  auto where = positions<T>(weight, layout, base);
  const auto plain = weight.contiguous();
  auto packed = at::zeros({slots}, weight.options());
  const auto* from = plain.const_data_ptr<T>();
  auto* to = packed.data_ptr<T>();
  for (size_t i = 0; i < where.size(); ++i) {
    if (where[i] >= slots) {
      throw PackError{"the layout is not a permutation"};
    }
    to[where[i]] = from[i];
  }
  where = {};  // as large as the weight
  // Proof that it is the layout's own order, and nothing but an order.
  auto back = at::empty_like(plain);
  copyToPlain(layout, to, back);
  if (std::memcmp(back.const_data_ptr(), plain.const_data_ptr(), plain.nbytes()) != 0) {
    throw PackError{"the packed weight does not unpack to itself"};
  }
  return packed;
}

at::Tensor packOpaque(const at::Tensor& weight, const Layout& layout) {
  switch (weight.scalar_type()) {
    case at::kFloat:
      return packOpaque<float>(weight, layout, 1U << 24);
    case at::kBFloat16:
      return packOpaque<at::BFloat16>(weight, layout, 1U << 8);
    case at::kChar:
      return packOpaque<int8_t>(weight, layout, 1U << 7);
    default:
      throw PackError{"only int8, float32 and bfloat16 weights are packed"};
  }
}

at::Tensor packStrided(const at::Tensor& weight, const Layout& layout, Placement placement) {
  const auto item = weight.itemsize();
  const auto bytes =
      at::detail::computeStorageNbytes(layout.get_dims(), layout.get_strides(), item);
  const auto offset = placement == Placement::unaligned ? kUnalignedBy / item : 0;
  auto memory = at::empty({static_cast<int64_t>(bytes / item + offset)}, weight.options());
  auto packed =
      memory.as_strided(layout.get_dims(), layout.get_strides(), static_cast<int64_t>(offset));
  packed.copy_(weight);
  return packed;
}

}  // namespace

PackedWeight::PackedWeight(at::Tensor memory, size_t bytes)
    : memory_(std::move(memory)), bytes_(bytes) {
  live_bytes += bytes_;
}

PackedWeight::~PackedWeight() { live_bytes -= bytes_; }

namespace {

PackedWeightPtr shared(const at::Tensor& weight, const Layout& wanted, Placement placement,
                       const std::function<at::Tensor()>& make) {
  auto& reg = registry();
  const std::lock_guard lock(reg.mutex);
  const auto* key = weight.storage().unsafeGetStorageImpl();
  const auto version = versionOf(weight);
  auto [it, end] = reg.entries.equal_range(key);
  while (it != end) {
    if (it->second.expired()) {
      it = reg.entries.erase(it);
      continue;
    }
    if (it->second.matches(weight, version, wanted, placement)) {
      if (auto packed = it->second.packed.lock()) {
        return packed;
      }
    }
    ++it;
  }
  auto packed = std::make_shared<const PackedWeight>(make(), wanted.get_mem_size());
  reg.entries.emplace(
      key, Entry{weight.storage().getWeakStorageImpl(), version, weight.sizes().vec(),
                 weight.strides().vec(), weight.storage_offset(), wanted, placement, packed});
  return packed;
}

}  // namespace

PackedWeightPtr packWeight(const at::Tensor& weight, const Layout& layout, Placement placement) {
  const auto wanted = withId(layout, 0);
  return shared(weight, wanted, placement, [&] {
    return isOpaque(wanted) ? packOpaque(weight, wanted) : packStrided(weight, wanted, placement);
  });
}

PackedWeightPtr transformWeight(const at::Tensor& weight, const Shape& sizes,
                                const std::function<at::Tensor()>& transform) {
  const Layout wanted(0, dnnl::graph::logical_tensor::data_type::f32, sizes,
                      c10::TensorType::contiguousStridesOf(sizes));
  return shared(weight, wanted, Placement::aligned, transform);
}

size_t packedBytes() { return live_bytes; }

}  // namespace llga
