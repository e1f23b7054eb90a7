// Subgraph + facts of one signature -> Plan. Set-up code: slow, allocates, throws.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "jit/onednn/facts.h"
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
  dnnl::fpmath_mode fpmath_mode;
};

// Thrown when oneDNN or the op table can't take the subgraph with these facts.
struct CompileError {
  std::string reason;
};

std::shared_ptr<const Plan> compilePlan(const CompileRequest& request);

}  // namespace llga
