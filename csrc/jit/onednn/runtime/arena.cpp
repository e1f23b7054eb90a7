#include "jit/onednn/runtime/arena.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "jit/onednn/runtime/environment.h"

namespace llga {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallest = size_t{64} << 10;  // smaller ones the C library keeps
constexpr size_t kSmallestSlab = size_t{1} << 20;
constexpr uint64_t kEpoch = 4096;  // allocations

struct Slab;

// A piece of a slab. Neighbours are linked; no two free ones lie side by side.
struct Block {
  Slab* slab;
  char* data;
  size_t bytes;
  bool free;
  Block* before;
  Block* after;
};

struct Slab {
  c10::DataPtr memory;
  size_t bytes;

  bool unused(const Block* block) const { return block->free && block->bytes == bytes; }
};

class Arena final : public c10::Allocator {
 public:
  // Tensors may be freed after static destructors ran.
  static Arena& instance() {
    static auto* arena = new Arena;
    return *arena;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest) {
      return c10::GetCPUAllocator()->allocate(bytes);
    }
    auto* block = take(bytes);
    return {block->data, block, &giveBack, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void* allocateRaw(size_t bytes) {
    auto* block = take(bytes);
    const std::lock_guard lock(mutex_);
    raw_.emplace(block->data, block);
    return block->data;
  }

  // False if the memory is not the arena's.
  bool releaseRaw(void* memory) {
    Block* block = nullptr;
    {
      const std::lock_guard lock(mutex_);
      const auto found = raw_.find(memory);
      if (found == raw_.end()) {
        return false;
      }
      block = found->second;
      raw_.erase(found);
    }
    giveBack(block);
    return true;
  }

  uint64_t bytes() {
    const std::lock_guard lock(mutex_);
    return held_;
  }

  void empty() {
    Gone gone;
    const std::lock_guard lock(mutex_);
    shrink(0, gone);
    wanted_ = 0;
  }

  void addUser() {
    const std::lock_guard lock(mutex_);
    ++users_;
  }

  void removeUser() {
    Gone gone;
    const std::lock_guard lock(mutex_);
    if (--users_ == 0) {
      shrink(0, gone);
      wanted_ = peak_ = 0;
    }
  }

 private:
  // Slabs to be freed without the lock: that takes time. To be declared before the lock.
  using Gone = std::vector<std::unique_ptr<Slab>>;
  using FreeBlocks = std::set<std::pair<size_t, Block*>>;

  Arena() = default;

  // A cache line more than asked for, so that values one behind the other do not begin at the same
  // offset of a page.
  static size_t rounded(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  }

  Block* take(size_t asked) {
    const auto bytes = rounded(asked);
    Gone gone;
    const std::lock_guard lock(mutex_);
    if (++clock_ % kEpoch == 0) {
      const auto enough = std::max(peak_, kSmallestSlab) * 2;
      peak_ = in_use_;
      shrink(enough, gone);
      too_much_ = held_ > enough;
    }
    auto found = free_.lower_bound({bytes, nullptr});
    auto* block = found != free_.end() ? found->second : addSlab(bytes);
    free_.erase({block->bytes, block});
    if (block->bytes - bytes >= kSmallest) {
      auto* rest = new Block{block->slab, block->data + bytes, block->bytes - bytes, true,
                             block,       block->after};
      if (rest->after != nullptr) {
        rest->after->before = rest;
      }
      block->after = rest;
      block->bytes = bytes;
      free_.emplace(rest->bytes, rest);
    }
    block->free = false;
    in_use_ += block->bytes;
    peak_ = std::max(peak_, in_use_);
    return block;
  }

  // Its one free block.
  Block* addSlab(size_t bytes) {
    auto slab = std::make_unique<Slab>();
    slab->bytes = std::max({bytes, wanted_, kSmallestSlab});
    try {
      slab->memory = c10::GetCPUAllocator()->allocate(slab->bytes);
    } catch (const c10::Error&) {
      slab->bytes = bytes;
      slab->memory = c10::GetCPUAllocator()->allocate(bytes);
    }
    wanted_ = 0;
    auto* block = new Block{
        slab.get(), static_cast<char*>(slab->memory.get()), slab->bytes, true, nullptr, nullptr};
    free_.emplace(block->bytes, block);
    held_ += slab->bytes;
    slabs_.push_back(std::move(slab));
    return block;
  }

  static void giveBack(void* context) {
    auto& arena = instance();
    auto* block = static_cast<Block*>(context);
    Gone gone;
    const std::lock_guard lock(arena.mutex_);
    arena.in_use_ -= block->bytes;
    block->free = true;
    block = arena.joined(block);
    arena.free_.emplace(block->bytes, block);
    if (arena.users_ == 0) {
      arena.shrink(0, gone);
    } else if (arena.in_use_ == 0 && (arena.slabs_.size() > 1 || arena.too_much_)) {
      arena.wanted_ = arena.too_much_ ? 0 : arena.held_;
      arena.too_much_ = false;
      arena.shrink(0, gone);
    }
  }

  // With its free neighbours; it is in free_ itself neither before nor after.
  Block* joined(Block* block) {
    auto swallow = [](Block* first, Block* second) {
      first->bytes += second->bytes;
      first->after = second->after;
      if (first->after != nullptr) {
        first->after->before = first;
      }
      delete second;
    };
    if (block->after != nullptr && block->after->free) {
      free_.erase({block->after->bytes, block->after});
      swallow(block, block->after);
    }
    if (block->before != nullptr && block->before->free) {
      auto* before = block->before;
      free_.erase({before->bytes, before});
      swallow(before, block);
      block = before;
    }
    return block;
  }

  // Gives back slabs of which nothing is in use until no more than `bytes` are held.
  void shrink(size_t bytes, Gone& gone) {
    for (auto it = free_.begin(); it != free_.end() && held_ > bytes;) {
      auto* block = it->second;
      if (!block->slab->unused(block)) {
        ++it;
        continue;
      }
      it = free_.erase(it);
      const auto slab = std::find_if(slabs_.begin(), slabs_.end(), [&](const auto& candidate) {
        return candidate.get() == block->slab;
      });
      held_ -= block->bytes;
      gone.push_back(std::move(*slab));
      slabs_.erase(slab);
      delete block;
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  FreeBlocks free_;
  std::map<void*, Block*> raw_;  // in use, by their address
  uint64_t clock_ = 0;
  size_t users_ = 0;
  size_t held_ = 0;
  size_t in_use_ = 0;
  size_t peak_ = 0;        // of in_use_, in this epoch
  bool too_much_ = false;  // was held in the last one
  size_t wanted_ = 0;      // size of the next slab, at least
};

thread_local bool scratch_in_arena = false;

}  // namespace

bool usesArena() {
  static const bool uses = !switchedOff("LLGA_FUSER_ARENA");
  return uses;
}

c10::Allocator* arena() { return usesArena() ? &Arena::instance() : c10::GetCPUAllocator(); }

void* allocateScratch(size_t bytes) {
  return scratch_in_arena && bytes >= kSmallest ? Arena::instance().allocateRaw(bytes)
                                                : c10::alloc_cpu(bytes);
}

void releaseScratch(void* memory) {
  if (!Arena::instance().releaseRaw(memory)) {
    c10::free_cpu(memory);
  }
}

uint64_t arenaBytes() { return Arena::instance().bytes(); }

void emptyArena() { Arena::instance().empty(); }

ArenaUser::ArenaUser() { Arena::instance().addUser(); }

ArenaUser::~ArenaUser() { Arena::instance().removeUser(); }

ArenaForScratch::ArenaForScratch(bool use) : before_(scratch_in_arena) {
  scratch_in_arena = use && usesArena();
}

ArenaForScratch::~ArenaForScratch() { scratch_in_arena = before_; }

}  // namespace llga
