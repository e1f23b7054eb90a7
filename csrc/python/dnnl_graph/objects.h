// The objects behind the Python classes of dnnl_graph: who owns what, who may call.
//
// Ownership. Each Python object holds shared handles only, so the order in which Python drops its
// objects does not matter:
//
//   engine_object               -> the library's engine, which lives until the process ends (below)
//   stream_object               -> library stream, engine
//   graph_object                -> graph_state
//   partition_object            -> library partition, graph_state
//   compiled_partition_object   -> compiled_state -> library compiled partition, partition, engine
//   tensor_object               -> tensor_state   -> library tensor, engine, owner of the memory
//   exported numpy / DLPack     -> tensor_state
//
// Engines live until the process ends: oneDNN's caches (compiled partitions, constant tensors) keep
// plain pointers to the engine that filled them and use these when they drop an entry, possibly in
// a static destructor. There is one library engine per (kind, index), and one per allocator.
//
// Threads. Everything is called with the GIL held, except for the library's own work in
// partition.compile, compiled_partition.execute, graph.get_partitions and stream.wait, which run
// without it on handles that the caller holds on its stack. A partition shares its ops with the
// graph, and get_partitions marks these ops: graph_state::partitioning keeps the two apart.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "jit/onednn/runtime/thread_exit.h"
#include "oneapi/dnnl/dnnl_graph.hpp"

namespace dnnl_graph_py {

namespace py = pybind11;

using data_type = dnnl::graph::logical_tensor::data_type;
using layout_type = dnnl::graph::logical_tensor::layout_type;
using property_type = dnnl::graph::logical_tensor::property_type;
using op_kind = dnnl::graph::op::kind;
using op_attr = dnnl::graph::op::attr;
using logical_tensor = dnnl::graph::logical_tensor;
using dims_t = logical_tensor::dims;

// A handle that is there unless Python made the object without calling __init__.
template <typename T>
class required_ptr : public std::shared_ptr<T> {
 public:
  using std::shared_ptr<T>::shared_ptr;
  // NOLINTNEXTLINE(google-explicit-constructor): pybind11 holders are converted implicitly
  required_ptr(std::shared_ptr<T> p) : std::shared_ptr<T>(std::move(p)) {}
  T* operator->() const { return checked(); }
  T& operator*() const { return *checked(); }

 private:
  T* checked() const {
    if (this->get() == nullptr) {
      throw py::type_error("the object is empty: its class's __init__ was never called");
    }
    return this->get();
  }
};

struct engine_object {
  dnnl::engine handle;
};

struct stream_object {
  dnnl::stream handle;
  engine_object engine;
};

// Keeps its functions alive: the library may call them as long as the process runs.
struct allocator_object {
  required_ptr<dnnl::graph::allocator> handle;
};

using attr_value =
    std::variant<bool, int64_t, float, std::vector<int64_t>, std::vector<float>, std::string>;

// What Python said about an op. The library has no way to read an op back, and repr(), dump() and
// the checks of graph.add_op need it.
struct op_record {
  size_t id = 0;
  op_kind kind = op_kind::Wildcard;
  std::string name;
  std::map<op_attr, attr_value> attrs;
  std::vector<logical_tensor> inputs;
  std::vector<logical_tensor> outputs;
};

struct op_object {
  op_record record;
  required_ptr<dnnl::graph::op> handle;  // always holds what the record says
};

struct graph_state {
  explicit graph_state(dnnl::graph::graph g, dnnl::engine::kind k, dnnl::fpmath_mode m)
      : handle(std::move(g)), kind(k), fpmath(m) {}

  dnnl::graph::graph handle;
  const dnnl::engine::kind kind;
  dnnl::fpmath_mode fpmath;
  bool fpmath_apply_to_int = false;
  // Copies, as the library copies an op that is added: later changes to the op do not reach it.
  std::vector<op_record> ops;
  std::unordered_set<size_t> hidden;  // ids of ops that Python did not add
  // Exclusive: get_partitions. Shared: compile. Taken only without the GIL.
  std::shared_mutex partitioning;
};

struct graph_object {
  required_ptr<graph_state> state;
};

struct partition_object {
  // Null for a partition made from one op. Declared first: outlives the handle.
  std::shared_ptr<graph_state> graph;
  std::shared_ptr<const std::vector<op_record>> ops;  // those of the whole graph
  dnnl::graph::partition handle;
};

struct compiled_state {
  compiled_state() = default;
  ~compiled_state() { llga::drop(std::move(handle)); }
  compiled_state(const compiled_state&) = delete;
  compiled_state& operator=(const compiled_state&) = delete;

  engine_object engine;
  partition_object source;
  dnnl::graph::compiled_partition handle;
  llga::KeptArguments kept;
  // In the order of the ports of the partition, which is the order the library reads tensors in.
  // A tensor that the partition reads twice is there twice.
  std::vector<logical_tensor> inputs;
  std::vector<logical_tensor> outputs;
};

struct compiled_partition_object {
  required_ptr<const compiled_state> state;
};

// Never changed after construction: tensor.set_data_handle makes a new one, so that an execution
// or an exported array that holds the old one is not disturbed.
struct tensor_state {
  engine_object engine;
  std::shared_ptr<void> owner;  // of the memory; null when Python gave a bare address
  logical_tensor desc;
  dnnl::graph::tensor handle;
  void* data = nullptr;
  size_t capacity = 0;  // bytes from `data` on; SIZE_MAX for a bare address, whose size is unknown
  bool readonly = false;
};

struct tensor_object {
  required_ptr<const tensor_state> state;
};

// `cls.__new__(cls)` without __init__ makes pybind11 hand out raw memory as the C++ object at the
// first use. Zeroed, it is an empty object: all classes here are made of numbers and shared
// handles, and an empty handle raises.
template <typename T>
void empty_without_init() {
  py::detail::get_type_info(typeid(T), true)->operator_new = [](size_t size) {
    return std::memset(::operator new(size), 0, size);
  };
}

// Registration of each file's part; module.cpp calls them.
void bind_errors(py::module_& m);
void bind_enums(py::module_& m);
void bind_engine(py::module_& m);
void bind_logical_tensor(py::module_& m);
void bind_op(py::module_& m);
void bind_tensor(py::module_& m);
void bind_partition(py::module_& m);
void bind_graph(py::module_& m);
void bind_settings(py::module_& m);

}  // namespace dnnl_graph_py
