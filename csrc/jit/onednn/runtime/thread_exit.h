// Keeps the end of threads and the end of compiled partitions apart.
//
// Of each compiled partition, oneDNN keeps arguments for each thread that executed it, in a
// thread-local variable. They go when the thread ends, or when the partition does. In a thread that
// ends while another one drops a partition, oneDNN erases an element that is no longer there, which
// corrupts memory (thread_local_cache_t, in 3.2.0 and 3.7.2 alike). So here one waits for the
// other.
//
// The fuser and dnnl_graph are two modules with one oneDNN: what they lock is one for the process.
// Any thread may call.
#pragma once

#include <oneapi/dnnl/dnnl_graph.hpp>

#include <algorithm>

namespace llga {

// Which thread-local variables executions of a partition use. oneDNN has one for each type of
// arguments: the usual ones, those of attention, and those of attention with reshapes.
class KeptArguments {
 public:
  // None.
  constexpr KeptArguments() = default;
  static constexpr KeptArguments usual() { return KeptArguments(1); }
  // Of a partition of ops, of which those with SoftMax may be attention.
  template <typename Ops, typename KindOf>
  static KeptArguments of(const Ops& ops, const KindOf& kindOf) {
    using Kind = dnnl::graph::op::kind;
    auto has = [&](Kind kind) {
      return std::any_of(ops.begin(), ops.end(), [&](auto* op) { return kindOf(*op) == kind; });
    };
    if (!has(Kind::SoftMax)) {
      return usual();
    }
    return KeptArguments(has(Kind::StaticReshape) ? 5 : 3);
  }
  constexpr KeptArguments& operator|=(KeptArguments other) {
    bits_ |= other.bits_;
    return *this;
  }
  constexpr unsigned bits() const { return bits_; }

 private:
  constexpr explicit KeptArguments(unsigned bits) : bits_(bits) {}
  unsigned bits_ = 0;
};

// Lives around each execution of compiled partitions.
class ExecutingThread {
 public:
  explicit ExecutingThread(KeptArguments arguments);
  ~ExecutingThread();
  ExecutingThread(const ExecutingThread&) = delete;
  ExecutingThread& operator=(const ExecutingThread&) = delete;

 private:
  unsigned& known_;  // of this thread
  unsigned used_;
};

// The only way to drop one that may have been executed in other threads. Never waits: while a
// thread ends, that one drops it then.
void drop(dnnl::graph::compiled_partition&& compiled);

// For calls in which oneDNN itself drops what its cache of compiled partitions holds. Waits while a
// thread ends.
class NoThreadEnds {
 public:
  NoThreadEnds();
  ~NoThreadEnds();
  NoThreadEnds(const NoThreadEnds&) = delete;
  NoThreadEnds& operator=(const NoThreadEnds&) = delete;

 private:
  bool forbidden_;
};

}  // namespace llga
