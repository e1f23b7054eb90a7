// What a partition is asked before it goes to the library, which trusts most of what it is told.
#pragma once

#include <string_view>
#include <variant>
#include <vector>

#include "arguments.h"

namespace dnnl_graph_py {

// The partition that is to be compiled. `ops` has the ops of the whole graph, `ids` says which ones
// are in the partition. All sizes of `inputs` are known, `outputs` may lack some.
struct compile_request {
  const char* function;
  const std::vector<op_record>& ops;
  const std::vector<size_t>& ids;
  const std::vector<logical_tensor>& inputs;
  const std::vector<logical_tensor>& outputs;
};

// Whether the library that was loaded is older than this release.
bool library_before(int major, int minor);

// The ops of the partition, in the order of the graph.
std::vector<const op_record*> ops_of(const compile_request& request);

// The value of an attribute, or null. By name, as a header may not have all of them.
template <typename T>
const T* find_attribute(const op_record& op, std::string_view name) {
  for (const auto& [key, value] : op.attrs) {
    if (name == name_of(key)) return std::get_if<T>(&value);
  }
  return nullptr;
}

// Whether the sizes fit the ops. Throws a ValueError that names the op and its tensor or attribute.
void check_shapes(const compile_request& request);

// Whether the library will find a layout for the inputs that are `any`, or look for one for ever.
// Throws a ValueError that names the logical tensor and the op.
void check_any_layouts(const compile_request& request);

}  // namespace dnnl_graph_py
