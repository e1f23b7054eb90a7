#include "jit/onednn/runtime/plan_cache.h"

#include "jit/onednn/runtime/arena.h"
#include "jit/onednn/runtime/packed_weights.h"
#include "jit/onednn/runtime/releasable_weights.h"

namespace llga {

PlanCache& PlanCache::instance() {
  static auto* cache = new PlanCache;  // kernels may be destroyed after static destructors ran
  return *cache;
}

void PlanCache::add(PlanOwner* owner) {
  const std::lock_guard lock(mutex_);
  owners_.insert(owner);
}

void PlanCache::remove(PlanOwner* owner) {
  const std::lock_guard lock(mutex_);
  retired_hits_ += owner->hits();
  owners_.erase(owner);
}

void PlanCache::compiled(double seconds) {
  const std::lock_guard lock(mutex_);
  compile_seconds_ += seconds;
  dropAbandoned();
  shrink();
}

void PlanCache::fellBack(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++fallbacks_;
  ++fallback_reasons_[reason];
}

CacheInfo PlanCache::info() {
  const std::lock_guard lock(mutex_);
  dropAbandoned();
  CacheInfo info;
  info.hits = retired_hits_;
  for (const auto* owner : owners_) {
    info.entries += owner->planCount();
    info.hits += owner->hits();
  }
  info.hits -= hits_base_;
  info.misses = misses_;
  info.evictions = evictions_;
  info.fallbacks = fallbacks_;
  info.compile_seconds = compile_seconds_;
  info.packed_bytes = packedBytes();
  info.arena_bytes = arenaBytes();
  info.capacity_entries = capacity_entries_;
  info.capacity_bytes = capacity_bytes_;
  return info;
}

std::map<std::string, uint64_t> PlanCache::fallbackReasons() const {
  const std::lock_guard lock(mutex_);
  return fallback_reasons_;
}

void PlanCache::clear() {
  const std::lock_guard lock(mutex_);
  for (auto* owner : owners_) {
    owner->evictAll();
  }
  emptyArena();
}

void PlanCache::resetStatistics() {
  const std::lock_guard lock(mutex_);
  hits_base_ = retired_hits_;
  for (const auto* owner : owners_) {
    hits_base_ += owner->hits();
  }
  misses_ = 0;
  evictions_ = 0;
  compile_seconds_ = 0;
  fallbacks_ = 0;
  fallback_reasons_.clear();
}

void PlanCache::setCapacity(uint64_t entries, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  capacity_entries_ = entries;
  capacity_bytes_ = bytes;
  shrink();
}

void PlanCache::dropAbandoned() {
  for (auto* owner : owners_) {
    if (owner->abandoned()) {
      owner->evictAll();
    }
  }
}

void PlanCache::shrink() {
  for (;;) {
    uint64_t entries = 0;
    PlanOwner* victim = nullptr;
    uint64_t victim_tick = 0;
    for (auto* owner : owners_) {
      entries += owner->planCount();
      uint64_t tick = 0;
      if (owner->oldest(tick) && (victim == nullptr || tick < victim_tick)) {
        victim = owner;
        victim_tick = tick;
      }
    }
    const bool too_many = entries > capacity_entries_;
    const bool too_big = capacity_bytes_ != 0 && packedBytes() > capacity_bytes_ + heldBytes();
    // The newest plan always stays, or a small capacity would compile for ever.
    if ((!too_many && !too_big) || victim == nullptr || entries <= 1) {
      return;
    }
    victim->evictOldest();
    ++evictions_;
  }
}

}  // namespace llga
