#include "jit/onednn/runtime/packed_weights.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/weight_memory.h"

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

// Indices along one dimension of a tensor: where they lie in its memory, and in a packed layout.
struct Axis {
  int64_t size;
  int64_t stride;
  std::vector<uint32_t> offsets;
};

// An order of numbers, padding between them, and nothing else: an element lies where the sum of the
// offsets of its indices says.
struct Order {
  int64_t slots;
  std::vector<std::vector<uint32_t>> offsets;  // by dimension

  // For a tensor of these strides, so that its memory is read from one end to the other. The last
  // axis is joined with those before it while it is short.
  std::vector<Axis> axes(at::IntArrayRef strides) const {
    std::vector<Axis> found;
    found.reserve(offsets.size());
    for (size_t d = 0; d < offsets.size(); ++d) {
      found.push_back({static_cast<int64_t>(offsets[d].size()), strides[d], offsets[d]});
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
    constexpr int64_t kShort = 64;
    while (found.size() > 1 && found.back().size < kShort) {
      const auto last = std::move(found.back());
      found.pop_back();
      auto& before = found.back();
      if (before.stride != last.stride * last.size) {
        found.push_back(last);
        break;
      }
      Axis joined{before.size * last.size, last.stride, {}};
      for (const auto outer : before.offsets) {
        for (const auto inner : last.offsets) {
          joined.offsets.push_back(outer + inner);
        }
      }
      before = std::move(joined);
    }
    return found;
  }
};

// Calls visit(place in the tensor's memory, sum of offsets) for the first element of each row along
// the last axis. Threads share the rows.
template <typename Visit>
void forEachRow(const std::vector<Axis>& axes, const Visit& visit) {
  constexpr int64_t kElements = 1 << 14;  // worth a thread
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < axes.size(); ++d) {
    rows *= axes[d].size;
  }
  const auto grain = std::max<int64_t>(1, kElements / axes.back().size);
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    for (auto row = first; row < last; ++row) {
      int64_t place = 0;
      uint32_t offset = 0;
      auto rest = row;
      for (auto d = axes.size() - 1; d-- > 0;) {
        const auto index = rest % axes[d].size;
        rest /= axes[d].size;
        place += index * axes[d].stride;
        offset += axes[d].offsets[index];
      }
      visit(place, offset);
    }
  });
}

// How numbers of a data type stand for the digits of positions: bit patterns in order, from that of
// zero on, which a copy keeps (of floating point only those of normal numbers).
template <typename T>
struct Digits;

template <>
struct Digits<float> {
  using Pattern = uint32_t;
  static constexpr int bits = 30;
  static constexpr Pattern zero = 0x00800000;
};

template <>
struct Digits<at::BFloat16> {
  using Pattern = uint16_t;
  static constexpr int bits = 14;
  static constexpr Pattern zero = 0x0080;
};

template <>
struct Digits<int8_t> {
  using Pattern = uint8_t;
  static constexpr int bits = 7;
  static constexpr Pattern zero = 0;
};

// The order of a packed layout of tensors like `weight`, by letting oneDNN unpack the numbers 0, 1,
// 2, ... It offers no way into a packed layout, but it has the way out of it. A number of the data
// type holds one digit of a position, the lowest first, and each pass finds and proves one: what
// is known of offsets then, adds up to what is known of positions.
template <typename T>
Order findOrder(const at::Tensor& weight, const Layout& layout) {
  using Pattern = typename Digits<T>::Pattern;
  constexpr auto kBits = Digits<T>::bits;
  constexpr auto kZero = Digits<T>::zero;
  const auto slots = static_cast<int64_t>(layout.get_mem_size() / sizeof(T));
  if (slots > std::numeric_limits<int32_t>::max()) {
    throw PackError{"the packed weight has more than 2^31 elements"};
  }
  const auto last = static_cast<uint32_t>(slots - 1);
  const auto digits = at::empty({slots}, weight.options());
  const auto unpacked = at::empty(weight.sizes(), weight.options());
  for (const auto& fresh : {digits, unpacked}) {  // most of the time goes to first uses of pages
    preferHugePages(fresh.mutable_data_ptr(), fresh.nbytes());
  }
  const auto* found = unpacked.const_data_ptr<T>();

  Order order{slots, {}};
  for (const auto size : weight.sizes()) {
    order.offsets.emplace_back(size, 0U);
  }
  std::atomic<bool> holds{true};
  for (int shift = 0; shift < 32 && last >> shift != 0; shift += kBits) {
    const auto patternOf = [shift](uint32_t position) {
      return static_cast<Pattern>(kZero + ((position >> shift) & ((1U << kBits) - 1)));
    };
    auto* digit = digits.mutable_data_ptr<T>();
    at::parallel_for(0, slots, 1 << 15, [&](int64_t from, int64_t to) {
      for (auto i = from; i < to; ++i) {
        digit[i] = c10::bit_cast<T>(patternOf(static_cast<uint32_t>(i)));
      }
    });
    copyToPlain(layout, digit, unpacked);

    // The first dimension's offsets contain where the tensor starts, those of the others do not;
    // unsigned differences are exact.
    const auto read = [&](int64_t place) {
      return static_cast<uint32_t>(c10::bit_cast<Pattern>(found[place]) - kZero) << shift;
    };
    const auto start = read(0);
    for (int64_t d = 0; d < weight.dim(); ++d) {
      for (int64_t i = 0; i < weight.size(d); ++i) {
        order.offsets[d][i] += read(i * unpacked.stride(d)) - (d == 0 ? 0 : start);
      }
    }
    const auto axes = order.axes(unpacked.strides());
    const auto& row = axes.back();
    forEachRow(axes, [&](int64_t place, uint32_t offset) {
      uint32_t differences = 0;
      for (int64_t i = 0; i < row.size; ++i) {
        differences |= c10::bit_cast<Pattern>(found[place + i * row.stride]) ^
                       patternOf(offset + row.offsets[i]);
      }
      if (differences != 0) {
        holds = false;
      }
    });
    if (!holds) {
      break;
    }
  }

  // Each element in a place of its own. The memory of the digits serves again.
  int64_t places = 0;
  if (holds) {
    auto* taken = static_cast<uint8_t*>(digits.mutable_data_ptr());
    std::fill_n(taken, slots, 0);
    const auto axes = order.axes(unpacked.strides());
    forEachRow(axes, [&](int64_t, uint32_t offset) {
      for (const auto more : axes.back().offsets) {
        if (offset + more <= last) {
          std::atomic_ref(taken[offset + more]).store(1, std::memory_order_relaxed);
        }
      }
    });
    places = std::count(taken, taken + slots, 1);
  }
  if (places != weight.numel()) {
    throw PackError{"the layout is not an order of the numbers"};
  }
  return order;
}

template <typename T>
at::Tensor pack(const at::Tensor& weight, const Order& order) {
  auto packed = allocateWeight({order.slots}, weight.options());
  auto* to = packed.mutable_data_ptr<T>();
  if (order.slots != weight.numel()) {
    packed.zero_();
  }
  const auto* from = weight.const_data_ptr<T>();
  const auto axes = order.axes(weight.strides());
  const auto& row = axes.back();
  forEachRow(axes, [&](int64_t place, uint32_t offset) {
    for (int64_t i = 0; i < row.size; ++i) {
      to[offset + row.offsets[i]] = from[place + i * row.stride];
    }
  });
  return packed;
}

// Kept by layout, behind the registry's lock: they are small, and networks repeat their layers.
template <typename T>
const Order& orderOf(const at::Tensor& weight, const Layout& layout) {
  static auto* known = new std::deque<std::pair<Layout, Order>>;
  constexpr size_t kMost = 256;
  const auto found = std::find_if(known->begin(), known->end(),
                                  [&](const auto& entry) { return entry.first.is_equal(layout); });
  if (found != known->end()) {
    return found->second;
  }
  if (known->size() == kMost) {
    known->pop_front();
  }
  known->emplace_back(layout, findOrder<T>(weight, layout));
  return known->back().second;
}

at::Tensor packOpaque(const at::Tensor& weight, const Layout& layout) {
  switch (weight.scalar_type()) {
    case at::kFloat:
      return pack<float>(weight, orderOf<float>(weight, layout));
    case at::kBFloat16:
      return pack<at::BFloat16>(weight, orderOf<at::BFloat16>(weight, layout));
    case at::kChar:
      return pack<int8_t>(weight, orderOf<int8_t>(weight, layout));
    default:
      throw PackError{"only int8, float32 and bfloat16 weights are packed"};
  }
}

at::Tensor packStrided(const at::Tensor& weight, const Layout& layout, Placement placement) {
  const auto item = weight.itemsize();
  const auto bytes =
      at::detail::computeStorageNbytes(layout.get_dims(), layout.get_strides(), item);
  const auto offset = placement == Placement::unaligned ? kUnalignedBy / item : 0;
  auto memory = allocateWeight({static_cast<int64_t>(bytes / item + offset)}, weight.options());
  auto packed =
      memory.as_strided(layout.get_dims(), layout.get_strides(), static_cast<int64_t>(offset));
  packed.copy_(weight);
  return packed;
}

}  // namespace

PackedWeight::PackedWeight(at::Tensor memory)
    : memory_(std::move(memory)), bytes_(memory_.nbytes()) {
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
  auto packed = std::make_shared<const PackedWeight>(make());
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

PackedWeightPtr transformWeight(const at::Tensor& weight, const Shape& sizes, at::ScalarType dtype,
                                const std::function<void(const at::Tensor&)>& transform) {
  const Layout wanted(0, *toDataType(dtype), sizes, c10::TensorType::contiguousStridesOf(sizes));
  return shared(weight, wanted, Placement::aligned, [&] {
    auto result = allocateWeight(sizes, weight.options().dtype(dtype));
    transform(result);
    return result;
  });
}

size_t packedBytes() { return live_bytes; }

}  // namespace llga
