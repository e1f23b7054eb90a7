#include "jit/onednn/runtime/weight_memory.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>

#include "jit/onednn/runtime/environment.h"

namespace llga {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallestSlab = size_t{32} << 20;

// The whole units of memory between two addresses.
struct Range {
  Range(void* memory, size_t bytes, size_t unit) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const auto first = at::round_up(address, unit);
    const auto last = (address + bytes) / unit * unit;
    start = static_cast<char*>(memory) + (first - address);
    size = last > first ? last - first : 0;
  }

  char* start;
  size_t size;
};

class Slab {
 public:
  // Whole huge pages, as many as hold so many bytes at least.
  explicit Slab(size_t bytes)
      : bytes_(at::round_up(bytes, kHugePage) + kHugePage),
        memory_(c10::GetCPUAllocator()->allocate(bytes_)),
        range_(memory_.get(), bytes_, kHugePage) {
    preferHugePages(range_.start, range_.size);
  }

  // Null where there is no room left.
  char* take(size_t bytes) {
    if (bytes > range_.size - used_) {
      return nullptr;
    }
    auto* taken = range_.start + used_;
    used_ += bytes;
    return taken;
  }

 private:
  size_t bytes_;  // that are allocated: one page more, as they begin anywhere
  c10::DataPtr memory_;
  Range range_;
  size_t used_ = 0;
};

struct Slabs {
  std::mutex mutex;
  std::weak_ptr<Slab> last;
};

Slabs& slabs() {
  static auto* instance = new Slabs;  // outlives plans that die at exit
  return *instance;
}

std::pair<std::shared_ptr<Slab>, char*> take(size_t bytes) {
  auto& all = slabs();
  const std::lock_guard lock(all.mutex);
  if (auto slab = all.last.lock()) {
    if (auto* data = slab->take(bytes)) {
      return {std::move(slab), data};
    }
  }
  auto slab = std::make_shared<Slab>(std::max(bytes, kSmallestSlab));
  auto* data = slab->take(bytes);
  all.last = slab;
  return {std::move(slab), data};
}

}  // namespace

at::Tensor allocateWeight(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto bytes =
      static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  auto [slab, data] = take(at::round_up(bytes, kAlignment));
  return at::from_blob(
      data, sizes,
      [slab = std::move(slab), bytes](void* memory) {
        static const auto kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        if (const Range pages(memory, bytes, kPage); pages.size != 0) {
          madvise(pages.start, pages.size, MADV_DONTNEED);
        }
      },
      options);
}

void preferHugePages(void* memory, size_t bytes) {
  static const bool kOff = switchedOff("LLGA_FUSER_HUGE_PAGES");
  if (const Range pages(memory, bytes, kHugePage); !kOff && pages.size != 0) {
    madvise(pages.start, pages.size, MADV_HUGEPAGE);
  }
}

}  // namespace llga
