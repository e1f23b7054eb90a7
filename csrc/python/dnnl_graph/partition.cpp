// partition and compiled_partition. All that the library takes on trust in compile and execute is
// checked here first: it reads tensors by position and sizes by what it was told.
#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "arguments.h"
#include "checks.h"

namespace dnnl_graph_py {

namespace {

using dnnl::graph::partition;

std::string ids_text(const std::vector<logical_tensor>& lts) {
  std::string text = "[";
  for (const auto& lt : lts) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(lt.get_id());
  }
  return text + "]";
}

bool identical(const logical_tensor& a, const logical_tensor& b) {
  return a.get_id() == b.get_id() && a.get_property_type() == b.get_property_type() &&
         same_layout(a, b);
}

void check_overlap(const logical_tensor& lt, const where& at) {
  if (overlaps(lt)) {
    throw_value(at, "has strides that put two elements in one place: " + logical_tensor_text(lt));
  }
}

// The given logical tensors in the order of the ports; each port must be served, by one of its own
// data type and number of dimensions.
std::vector<logical_tensor> match_ports(const std::vector<logical_tensor>& ports,
                                        const std::vector<logical_tensor>& given, bool inputs,
                                        const where& at) {
  for (size_t i = 0; i < given.size(); ++i) {
    const logical_tensor& lt = given[i];
    const bool wanted = std::any_of(ports.begin(), ports.end(), [&](const logical_tensor& port) {
      return port.get_id() == lt.get_id();
    });
    if (!wanted) {
      throw_value(at, "has id " + std::to_string(lt.get_id()) + ", the partition wants the ids " +
                          ids_text(ports));
    }
    for (size_t j = 0; j < i; ++j) {
      if (given[j].get_id() == lt.get_id() && !identical(given[j], lt)) {
        throw_value(at, "has id " + std::to_string(lt.get_id()) + " twice with different contents");
      }
    }
  }
  std::vector<logical_tensor> result;
  result.reserve(ports.size());
  for (const auto& port : ports) {
    const auto found = std::find_if(given.begin(), given.end(), [&](const logical_tensor& lt) {
      return lt.get_id() == port.get_id();
    });
    if (found == given.end()) {
      throw_value(at, "lacks a logical tensor with id " + std::to_string(port.get_id()) +
                          ", the partition wants the ids " + ids_text(ports));
    }
    const logical_tensor& lt = *found;
    if (port.get_data_type() != data_type::undef && lt.get_data_type() != port.get_data_type()) {
      throw_value(at, "has data type " + std::string(name_of(lt.get_data_type())) + " for " +
                          logical_tensor_text(port) + " of the partition");
    }
    if (lt.get_data_type() == data_type::undef) {
      throw_value(at, "has no data type: " + logical_tensor_text(lt));
    }
    if (lt.get_layout_type() == layout_type::undef) {
      throw_value(at, "has no layout type: " + logical_tensor_text(lt));
    }
    check_layout_known(lt, at);
    if (ndims_of(port) >= 0 && ndims_of(lt) >= 0 && ndims_of(port) != ndims_of(lt)) {
      throw_value(at, "has " + std::to_string(ndims_of(lt)) + " dimensions for " +
                          logical_tensor_text(port) + " of the partition");
    }
    check_overlap(lt, at);
    if (inputs) {
      if (has_unknown_dim(lt)) {
        throw_value(at,
                    "has unknown sizes, which only outputs may have: " + logical_tensor_text(lt));
      }
      if (lt.get_layout_type() == layout_type::strided) required_bytes(lt, at);
    }
    result.push_back(with_usual_strides(lt));
  }
  return result;
}

compiled_partition_object compile(const partition_object& self, const py::object& inputs,
                                  const py::object& outputs, const py::object& engine) {
  const char* function = "partition.compile";
  const where at_inputs{function, "inputs"}, at_outputs{function, "outputs"};
  const auto given_in = to_list<logical_tensor>(inputs, at_inputs, "logical_tensor");
  const auto given_out = to_list<logical_tensor>(outputs, at_outputs, "logical_tensor");
  const auto& e = to_object<engine_object>(engine, {function, "engine"}, "an engine");
  auto state = std::make_shared<compiled_state>();
  state->engine = e;
  state->source = self;
  call_library(function, [&] {
    if (!self.handle.is_supported()) {
      throw library_error(dnnl_invalid_arguments,
                          std::string(function) + ": the library does not support this partition");
    }
    if (self.handle.get_engine_kind() != e.handle.get_kind()) {
      throw library_error(dnnl_invalid_arguments,
                          std::string(function) +
                              ": argument 'engine' is of another kind than the "
                              "partition");
    }
  });
  const auto ports_in = self.handle.get_input_ports();
  const auto ports_out = self.handle.get_output_ports();
  const auto ins = match_ports(ports_in, given_in, true, at_inputs);
  const auto outs = match_ports(ports_out, given_out, false, at_outputs);
  const auto ids = self.handle.get_ops();
  const compile_request request{function, *self.ops, ids, ins, outs};
  check_shapes(request);
  check_any_layouts(request);
  state->kept = llga::KeptArguments::of(ops_of(request), [](const auto& op) { return op.kind; });
  compiled_before() = true;
  state->handle = call_library(function, [&] {
    return without_gil([&] {
      std::shared_lock<std::shared_mutex> no_partitioning;
      if (self.graph != nullptr) {
        no_partitioning = std::shared_lock<std::shared_mutex>(self.graph->partitioning);
      }
      const llga::NoThreadEnds none;
      return self.handle.compile(ins, outs, e.handle);
    });
  });
  call_library(function, [&] {
    for (const auto& lt : ins) {
      state->inputs.push_back(state->handle.query_logical_tensor(lt.get_id()));
      remember_layout(state->inputs.back());
    }
    for (const auto& lt : outs) {
      state->outputs.push_back(state->handle.query_logical_tensor(lt.get_id()));
      remember_layout(state->outputs.back());
      check_overlap(state->outputs.back(), at_outputs);  // of sizes that were inferred
    }
  });
  return {std::move(state)};
}

// The states of the tensors in the order of the compiled partition.
std::vector<std::shared_ptr<const tensor_state>> match_tensors(
    const std::vector<logical_tensor>& expected, const std::vector<tensor_object>& given,
    bool outputs, const where& at) {
  for (size_t i = 0; i < given.size(); ++i) {
    const size_t id = given[i].state->desc.get_id();
    const bool wanted = std::any_of(expected.begin(), expected.end(),
                                    [&](const logical_tensor& lt) { return lt.get_id() == id; });
    if (!wanted) {
      throw_value(at, "has a tensor with id " + std::to_string(id) +
                          ", the compiled partition wants the ids " + ids_text(expected));
    }
    for (size_t j = 0; j < i; ++j) {
      if (given[j].state->desc.get_id() == id && given[j].state->data != given[i].state->data) {
        throw_value(at, "has two different tensors with id " + std::to_string(id));
      }
    }
  }
  std::vector<std::shared_ptr<const tensor_state>> result;
  result.reserve(expected.size());
  for (const auto& lt : expected) {
    const auto found = std::find_if(given.begin(), given.end(), [&](const tensor_object& t) {
      return t.state->desc.get_id() == lt.get_id();
    });
    if (found == given.end()) {
      throw_value(at, "lacks a tensor with id " + std::to_string(lt.get_id()) +
                          ", the compiled partition wants the ids " + ids_text(expected));
    }
    const tensor_state& t = *found->state;
    bool fits = same_layout(t.desc, lt);
    if (!fits && t.desc.get_layout_type() != lt.get_layout_type() &&
        t.desc.get_data_type() == lt.get_data_type() && ndims_of(t.desc) == ndims_of(lt) &&
        t.desc.get_dims() == lt.get_dims()) {
      // An opaque layout may be a plain one after all; only the library can tell. The property is
      // part of its comparison, but has nothing to do with memory.
      const logical_tensor asked =
          t.desc.get_layout_type() == layout_type::opaque
              ? logical_tensor(lt.get_id(), lt.get_data_type(), lt.get_dims(),
                               t.desc.get_layout_id(), lt.get_property_type())
              : logical_tensor(lt.get_id(), lt.get_data_type(), lt.get_dims(), t.desc.get_strides(),
                               lt.get_property_type());
      fits = call_library(at.function, [&] { return asked.is_equal(lt); });
    }
    if (!fits) {
      throw_value(at, "has " + logical_tensor_text(t.desc) +
                          " where the compiled partition wants " + logical_tensor_text(lt));
    }
    const size_t needed = required_bytes(lt, at);
    if (t.capacity < needed) {
      throw_value(at, "has a tensor with id " + std::to_string(lt.get_id()) + " of " +
                          std::to_string(t.capacity) + " bytes, needed are " +
                          std::to_string(needed));
    }
    if (t.data == nullptr && needed != 0) {
      throw_value(at, "has a tensor with id " + std::to_string(lt.get_id()) +
                          " without memory (its address is 0)");
    }
    if (outputs && t.readonly) {
      throw_value(at,
                  "has a tensor with id " + std::to_string(lt.get_id()) + " in read-only memory");
    }
    result.push_back(found->state);
  }
  return result;
}

void execute(const compiled_partition_object& self, const py::object& stream,
             const py::object& inputs, const py::object& outputs) {
  const char* function = "compiled_partition.execute";
  const where at_inputs{function, "inputs"}, at_outputs{function, "outputs"};
  const auto& s = to_object<stream_object>(stream, {function, "stream"}, "a stream");
  const auto given_in = to_list<tensor_object>(inputs, at_inputs, "tensor");
  const auto given_out = to_list<tensor_object>(outputs, at_outputs, "tensor");
  const std::shared_ptr<const compiled_state> state = self.state;
  if (s.engine.handle.get_kind() != state->engine.handle.get_kind()) {
    throw_value({function, "stream"}, "belongs to an engine of another kind");
  }
  const auto ins = match_tensors(state->inputs, given_in, false, at_inputs);
  const auto outs = match_tensors(state->outputs, given_out, true, at_outputs);
  // Without elements to compute there is nothing to do, and 3.2 divides by their number.
  const bool empty = std::all_of(state->outputs.begin(), state->outputs.end(), [&](const auto& lt) {
    return required_bytes(lt, at_outputs) == 0;
  });
  if (empty) return;
  std::vector<dnnl::graph::tensor> library_in, library_out;
  for (const auto& t : ins) library_in.push_back(t->handle);
  for (const auto& t : outs) library_out.push_back(t->handle);
  dnnl::stream queue = s.handle;
  call_library(function, [&] {
    without_gil([&] {
      const llga::ExecutingThread thread(state->kept);
      state->handle.execute(queue, library_in, library_out);
      // Nothing may still run when the tensors on this stack are dropped. On the CPU nothing does.
      queue.wait();
    });
  });
}

}  // namespace

bool& compiled_before() {
  static bool value = false;
  return value;
}

void bind_partition(py::module_& m) {
  auto cls = py::class_<partition_object>(m.attr("partition"));
  auto compiled = py::class_<compiled_partition_object>(
      m, "compiled_partition",
      "Code for a partition, made for certain sizes, layouts and one engine: partition.compile.\n\n"
      "Several threads may execute one compiled partition at once. The library fixes the number\n"
      "of OpenMP threads when it compiles.\n\n"
      "Source: oneDNN, Graph API, Compiled Partition.");

  cls.def(py::init([](const py::object& op, const py::object& engine_kind) {
            const auto& o = to_object<op_object>(op, {"partition", "op"}, "an op");
            const auto kind = to_object<dnnl::engine::kind>(
                engine_kind, {"partition", "engine_kind"}, "an engine.kind, such as engine.cpu");
            for (const auto& lt : o.record.inputs) check_layout_known(lt, {"partition", "op"});
            for (const auto& lt : o.record.outputs) check_layout_known(lt, {"partition", "op"});
            // The library's own function for this reads the first of no partitions when the op is
            // refused, so the op goes through a graph first.
            call_library("partition", [&] {
              dnnl::graph::graph probe(kind);
              probe.add_op(*o.handle);
              probe.finalize();
            });
            // A copy: later changes to the op do not reach the partition.
            auto ops = std::make_shared<const std::vector<op_record>>(1, o.record);
            return call_library("partition", [&] {
              return partition_object{nullptr, std::move(ops), partition(*o.handle, kind)};
            });
          }),
          py::arg("op"), py::arg("engine_kind"))
      .def(
          "get_ops_num", [](const partition_object& self) { return self.handle.get_ops_num(); },
          "Number of ops (int).")
      .def(
          "get_ops", [](const partition_object& self) { return self.handle.get_ops(); },
          "Ids of the ops (list of int).")
      .def(
          "get_id", [](const partition_object& self) { return self.handle.get_id(); },
          "Id that the library gave the partition (int).")
      .def(
          "is_supported", [](const partition_object& self) { return self.handle.is_supported(); },
          "Whether the library can compile the partition (bool). Compilation may still fail, as\n"
          "sizes and layouts are only known then.")
      .def(
          "get_input_ports",
          [](const partition_object& self) { return self.handle.get_input_ports(); },
          "Inputs (list of logical_tensor), as the graph describes them. A tensor that is read\n"
          "twice is there twice.")
      .def(
          "get_output_ports",
          [](const partition_object& self) { return self.handle.get_output_ports(); },
          "Outputs (list of logical_tensor), as the graph describes them.")
      .def(
          "get_engine_kind",
          [](const partition_object& self) { return self.handle.get_engine_kind(); },
          "Engine kind (engine.kind).")
      .def(
          "compile", &compile, py::arg("inputs"), py::arg("outputs"), py::arg("engine"),
          "Compile for certain sizes and layouts; returns a compiled_partition.\n\n"
          "inputs, outputs: lists of logical_tensor with the ids of the ports, in any order.\n"
          "Inputs: all sizes known, layout strided, opaque (from another compiled partition) or,\n"
          "to ask which layout is best, any. Outputs: sizes may be unknown and are then inferred;\n"
          "layout any leaves it to the library. query_logical_tensor has the answers.\n\n"
          "Runs without the GIL. Raises TypeError or ValueError for what does not fit the ports, or\n"
          "does not fit the ops of the partition (sizes, attributes, strides), dnnl_graph.error if\n"
          "the library cannot compile it: status.unimplemented if it has no kernel for this\n"
          "processor.")
      .def("__repr__", [](const partition_object& self) {
        std::string ops;
        for (const size_t id : self.handle.get_ops()) {
          ops += (ops.empty() ? "" : ", ") + std::to_string(id);
        }
        return "partition(" + std::to_string(self.handle.get_id()) + ", ops [" + ops + "], " +
               (self.handle.is_supported() ? "supported)" : "not supported)");
      });

  compiled
      .def(
          "query_logical_tensor",
          [](const compiled_partition_object& self, const py::object& tid) {
            const size_t id = to_size(tid, {"compiled_partition.query_logical_tensor", "tid"});
            for (const auto* list : {&self.state->inputs, &self.state->outputs}) {
              for (const auto& lt : *list) {
                if (lt.get_id() == id) return lt;
              }
            }
            throw library_error(dnnl_invalid_arguments,
                                "compiled_partition.query_logical_tensor: argument 'tid' " +
                                    std::to_string(id) + " is none of the inputs " +
                                    ids_text(self.state->inputs) + " and outputs " +
                                    ids_text(self.state->outputs));
          },
          py::arg("tid"),
          "The input or output with id `tid`, with all sizes and the layout chosen.\n\n"
          "Raises TypeError, dnnl_graph.error for an id that is none of them.")
      .def(
          "get_inplace_ports",
          [](const compiled_partition_object& self) {
            return call_library("compiled_partition.get_inplace_ports",
                                [&] { return self.state->handle.get_inplace_ports(); });
          },
          "Pairs (input id, output id) that may share memory (list of tuple of int).")
      .def("execute", &execute, py::arg("stream"), py::arg("inputs"), py::arg("outputs"),
           "Execute on tensors.\n\n"
           "stream: stream; inputs, outputs: lists of tensor with the ids of the inputs and "
           "outputs,\n"
           "in any order, each with the data type, sizes and layout of query_logical_tensor(id).\n"
           "An output may share memory with an input only if get_inplace_ports has the pair.\n\n"
           "Runs without the GIL. Raises TypeError or ValueError for missing, unknown or doubled\n"
           "ids, other sizes or layouts, too little memory, read-only memory as an output, and\n"
           "dnnl_graph.error if the library fails.")
      .def("__repr__", [](const compiled_partition_object& self) {
        std::string text = "compiled_partition(inputs [";
        for (size_t i = 0; i < self.state->inputs.size(); ++i) {
          text += (i == 0 ? "" : ", ") + logical_tensor_text(self.state->inputs[i]);
        }
        text += "], outputs [";
        for (size_t i = 0; i < self.state->outputs.size(); ++i) {
          text += (i == 0 ? "" : ", ") + logical_tensor_text(self.state->outputs[i]);
        }
        return text + "])";
      });
}

}  // namespace dnnl_graph_py
