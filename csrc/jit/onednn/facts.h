// What is known about the values of a graph: the seam between the IR and the op table.
//
// The op table asks the same questions twice: when a block is partitioned (answers come from
// profiled types, some are missing) and when a fusion group is compiled for concrete inputs
// (answers come from a recorded run, none is missing).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "jit/onednn/ir.h"

namespace llga {

using Shape = std::vector<int64_t>;

struct TensorFacts {
  std::optional<at::ScalarType> dtype;
  std::optional<Shape> sizes;
  std::optional<Shape> strides;
};

// Whether it is known to be of bfloat16.
inline bool isNarrow(const TensorFacts& tensor) { return tensor.dtype == at::kBFloat16; }

class Facts {
 public:
  Facts() = default;
  Facts(const Facts&) = delete;
  Facts& operator=(const Facts&) = delete;
  virtual ~Facts() = default;

  virtual TensorFacts tensor(const Value* value) const = 0;
  // The value itself where it is fixed: a constant, or a host value of a recorded run.
  virtual std::optional<c10::IValue> constant(const Value* value) const = 0;
};

// Facts from the types in the IR, as profiling or shape propagation left them. The executor does
// not profile every op; assume() fills a gap for the partitioner. A wrong assumption costs a
// fallback at run time, nothing else.
class StaticFacts final : public Facts {
 public:
  void assume(const Value* value, at::ScalarType dtype) { assumed_.emplace(behind(value), dtype); }

  TensorFacts tensor(const Value* value) const override;
  std::optional<c10::IValue> constant(const Value* value) const override;

 private:
  std::unordered_map<const Value*, at::ScalarType> assumed_;
};

// Facts from one run of a subgraph with concrete inputs.
class RecordedFacts final : public Facts {
 public:
  void record(const Value* value, const c10::IValue& ivalue);

  TensorFacts tensor(const Value* value) const override;
  std::optional<c10::IValue> constant(const Value* value) const override;

 private:
  std::unordered_map<const Value*, TensorFacts> tensors_;
  std::unordered_map<const Value*, c10::IValue> host_values_;
};

}  // namespace llga
