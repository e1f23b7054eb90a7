// Subgraph + facts of one signature -> Plan. Set-up code: slow, allocates, throws.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "jit/onednn/facts.h"
#include "jit/onednn/ops/lowering.h"
#include "jit/onednn/runtime/plan.h"

namespace llga {

struct CompileRequest {
  const Graph* subgraph;
  // Facts of every value of the subgraph, inputs included.
  const Facts* facts;
  // By subgraph input; host values have none.
  std::vector<Shape> input_strides;
  // By subgraph input: memory that belongs to fusion groups alone and may be overwritten.
  std::vector<bool> owned_inputs;
  // By subgraph output: oneDNN chooses the layout.
  std::vector<bool> any_layout;
  // By subgraph output: its memory is not needed after the call.
  std::vector<bool> call_local;
  dnnl::fpmath_mode fpmath_mode;
  int threads;  // that calls will have
  Division division = Division::usual;
  // For autotuning: the way to compute what partitionKey() says, or nothing if there is a choice.
  // Empty: all in the usual way, and the plan tells of no parts.
  std::function<std::optional<Way>(const std::string& key)> way_of{};
};

// Thrown when oneDNN or the op table can't take the subgraph with these facts.
struct CompileError {
  std::string reason;
};

std::shared_ptr<const Plan> compilePlan(const CompileRequest& request);

// What compilePlan() gives to oneDNN, for people to read and run elsewhere.
struct Description {
  struct Op {
    size_t id;
    OpKind kind;
    std::string name;
    std::vector<std::pair<Attr, AttrValue>> attributes;
    std::vector<Layout> inputs;
    std::vector<Layout> outputs;
  };
  struct Partition {
    std::vector<Op> ops;
    std::vector<size_t> inputs;  // ids of logical tensors
    std::vector<size_t> outputs;
  };
  std::vector<Partition> partitions;  // in the order of execution
  // By id of the logical tensor: its index among the inputs or outputs of the group.
  std::unordered_map<size_t, size_t> group_inputs;
  std::unordered_map<size_t, size_t> group_outputs;
  std::unordered_map<size_t, ConstantMaker> constants;
  dnnl::fpmath_mode fpmath_mode;
};

// `output_strides`: by subgraph output, as a call returned them. Throws CompileError.
Description describePlan(const CompileRequest& request, const std::vector<Shape>& output_strides);

}  // namespace llga
