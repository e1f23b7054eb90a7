#include "jit/onednn/runtime/lookup.h"

#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "jit/onednn/runtime/plan.h"

namespace llga {
namespace {

constexpr int64_t kShare = 1 << 15;  // bytes worth a thread

// The indices from the one with number `first` on, in the order of their dimensions.
template <typename Index>
class Walk {
 public:
  Walk(const Lookup& lookup, const Index* indices, int64_t first)
      : lookup_(lookup), indices_(indices), place_(lookup.sizes.size()) {
    for (auto i = place_.size(); i-- > 0;) {
      place_[i] = first % lookup_.sizes[i];
      first /= lookup_.sizes[i];
      offset_ += place_[i] * lookup_.strides[i];
    }
  }

  int64_t next() {
    const auto index = static_cast<int64_t>(indices_[offset_]);
    for (auto i = place_.size(); i-- > 0;) {
      offset_ += lookup_.strides[i];
      if (++place_[i] < lookup_.sizes[i]) {
        break;
      }
      offset_ -= place_[i] * lookup_.strides[i];
      place_[i] = 0;
    }
    return index;
  }

 private:
  const Lookup& lookup_;
  const Index* indices_;
  int64_t offset_ = 0;
  std::vector<int64_t> place_;
};

template <typename Index>
void copyRows(const Lookup& lookup, const void* indices, const void* table, void* result) {
  const auto count = c10::multiply_integers(lookup.sizes);
  const auto rows = std::max<int64_t>(1, kShare / std::max<int64_t>(1, lookup.bytes));
  at::parallel_for(0, count, rows, [&](int64_t first, int64_t last) {
    Walk<Index> walk(lookup, static_cast<const Index*>(indices), first);
    auto* to = static_cast<char*>(result) + first * lookup.bytes;
    for (auto i = first; i < last; ++i, to += lookup.bytes) {
      const auto index = walk.next();
      if (index < 0 || index >= lookup.rows) {
        throw StepError(fmt::format("index {} of a table of {} rows", index, lookup.rows));
      }
      std::memcpy(to, static_cast<const char*>(table) + index * lookup.step,
                  static_cast<size_t>(lookup.bytes));
    }
  });
}

}  // namespace

void Lookup::run(const void* indices, const void* table, void* result) const {
  if (wide) {
    copyRows<int64_t>(*this, indices, table, result);
  } else {
    copyRows<int32_t>(*this, indices, table, result);
  }
}

}  // namespace llga
