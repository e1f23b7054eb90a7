// Process-wide bookkeeping of compiled plans: least recently used first out.
//
// Kernels own their plans; the cache knows which kernel has which and asks it to drop one when the
// capacity is passed. Lock order: the cache's mutex, then a kernel's. A hit takes neither.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>

namespace llga {

struct CacheInfo {
  uint64_t entries = 0;
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t evictions = 0;
  uint64_t fallbacks = 0;
  double compile_seconds = 0;
  uint64_t packed_bytes = 0;
  uint64_t arena_bytes = 0;
  uint64_t capacity_entries = 0;
  uint64_t capacity_bytes = 0;  // 0: no limit
};

// What the cache needs to know of a kernel.
class PlanOwner {
 public:
  virtual ~PlanOwner() = default;
  // All modules that would run its plans are gone.
  virtual bool abandoned() const = 0;
  // Tick of the least recently used plan; false if there is none.
  virtual bool oldest(uint64_t& tick) const = 0;
  // Drops that plan.
  virtual void evictOldest() = 0;
  virtual void evictAll() = 0;
  virtual uint64_t planCount() const = 0;
  virtual uint64_t hits() const = 0;
};

class PlanCache {
 public:
  static PlanCache& instance();

  void add(PlanOwner* owner);
  void remove(PlanOwner* owner);

  // Called by a kernel, holding no lock, after it has a new plan.
  void compiled(double seconds);
  void missed() { ++misses_; }
  void fellBack(const std::string& reason);

  CacheInfo info();
  std::map<std::string, uint64_t> fallbackReasons() const;
  void clear();
  void resetStatistics();
  // `bytes` limits the packed weights that cached plans hold; 0: no limit.
  void setCapacity(uint64_t entries, uint64_t bytes);

 private:
  PlanCache() = default;
  void dropAbandoned();
  void shrink();

  mutable std::mutex mutex_;
  std::unordered_set<PlanOwner*> owners_;
  uint64_t capacity_entries_ = 4096;
  uint64_t capacity_bytes_ = 0;
  uint64_t evictions_ = 0;
  uint64_t retired_hits_ = 0;  // of kernels that are gone
  uint64_t hits_base_ = 0;
  double compile_seconds_ = 0;
  std::atomic<uint64_t> misses_{0};
  uint64_t fallbacks_ = 0;
  std::map<std::string, uint64_t> fallback_reasons_;
};

}  // namespace llga
