// graph: collects ops, checks them as a whole, hands out partitions.
#include <pybind11/stl.h>

#include <limits>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "arguments.h"
#include "dnnl_graph_enums.inc"

namespace dnnl_graph_py {

namespace {

[[noreturn]] void throw_finalized(const char* function) {
  throw library_error(dnnl_invalid_graph,
                      std::string(function) + ": the graph is finalized and takes no changes");
}

// What the library does not check itself: it drops an op whose id it has seen, lets the last one of
// two ops that write the same tensor win, and takes the first two sizes off those of a filter to
// find out whether the rest is 1 (when it partitions the graph; all else is checked by compile).
void check_new_op(const graph_state& state, const op_object& op, const where& at) {
  if (op.record.kind == op_kind::Convolution && op.record.inputs.size() > 1) {
    const logical_tensor& weights = op.record.inputs[1];
    const int ndims = ndims_of(weights);
    if (ndims >= 0 && ndims < 3) {
      throw_value(at, "has weights of less than 3 dimensions: " + logical_tensor_text(weights));
    }
  }
  for (const auto& known : state.ops) {
    if (known.id == op.record.id) {
      throw_value(at, "has id " + std::to_string(op.record.id) + ", which " + op_text(known) +
                          " of this graph already has");
    }
    for (const auto& theirs : known.outputs) {
      for (const auto& ours : op.record.outputs) {
        if (theirs.get_id() == ours.get_id()) {
          throw_value(at, "writes logical tensor " + std::to_string(ours.get_id()) + ", which " +
                              op_text(known) + " of this graph already writes");
        }
      }
    }
  }
}

dnnl::graph::status add_op(graph_state& state, const op_object& op, bool allow_exception) {
  const where at{"graph.add_op", "op"};
  if (state.handle.is_finalized()) {
    if (allow_exception) throw_finalized(at.function);
    return dnnl::graph::status::invalid_graph;
  }
  try {
    check_new_op(state, op, at);
  } catch (const py::value_error&) {
    if (allow_exception) throw;
    return dnnl::graph::status::invalid_arguments;
  }
  const auto status = state.handle.add_op(*op.handle, false);
  if (status != dnnl::graph::status::success) {
    if (!allow_exception) return status;
    std::string text = std::string(at.function) + ": the library refuses argument 'op', " +
                       op_text(op.record) + ": check the number and data types of its " +
                       std::to_string(op.record.inputs.size()) + " inputs and " +
                       std::to_string(op.record.outputs.size()) +
                       " outputs, and that it has all required and only known attributes (";
    bool first = true;
    for (const auto& [name, value] : op.record.attrs) {
      text += (first ? "" : ", ") + std::string(name_of(name));
      first = false;
    }
    throw library_error(static_cast<dnnl_status_t>(status), text + ")");
  }
  state.ops.push_back(op.record);
  return status;
}

// oneDNN 3.2 follows a cycle for ever, and reads tensors of different sizes under one id.
void check_whole(const graph_state& state) {
  const char* function = "graph.finalize";
  std::unordered_map<size_t, size_t> producer;  // tensor id -> index of op
  for (size_t i = 0; i < state.ops.size(); ++i) {
    for (const auto& lt : state.ops[i].outputs) producer[lt.get_id()] = i;
  }
  std::vector<std::vector<size_t>> readers(state.ops.size());
  std::vector<size_t> missing(state.ops.size(), 0);
  for (size_t i = 0; i < state.ops.size(); ++i) {
    for (const auto& lt : state.ops[i].inputs) {
      const auto found = producer.find(lt.get_id());
      if (found == producer.end()) continue;
      readers[found->second].push_back(i);
      ++missing[i];
    }
  }
  std::vector<size_t> ready;
  for (size_t i = 0; i < missing.size(); ++i) {
    if (missing[i] == 0) ready.push_back(i);
  }
  size_t done = 0;
  while (!ready.empty()) {
    const size_t i = ready.back();
    ready.pop_back();
    ++done;
    for (const size_t reader : readers[i]) {
      if (--missing[reader] == 0) ready.push_back(reader);
    }
  }
  if (done == state.ops.size()) return;
  for (size_t i = 0; i < missing.size(); ++i) {
    if (missing[i] != 0) {
      throw library_error(
          dnnl_invalid_graph,
          std::string(function) + ": the graph has a cycle through " + op_text(state.ops[i]));
    }
  }
}

// oneDNN 3.7 looks for a Dequantize in front of both factors of a convolution as soon as one has
// it, and follows a null pointer where the other one is an input of the graph. A Wildcard, the op
// that stands for what is not in the graph, becomes its producer; its partition is left out below.
void add_missing_producers(graph_state& state) {
  std::unordered_map<size_t, op_kind> producers;  // tensor id -> kind of op
  std::unordered_set<size_t> ids;
  for (const auto& op : state.ops) {
    ids.insert(op.id);
    for (const auto& lt : op.outputs) producers.emplace(lt.get_id(), op.kind);
  }
  size_t id = std::numeric_limits<size_t>::max();
  for (const auto& op : state.ops) {
    if (op.kind != op_kind::Convolution) continue;
    for (size_t i = 0; i < 2; ++i) {
      const auto& lt = op.inputs[i];
      const auto other = producers.find(op.inputs[1 - i].get_id());
      if (producers.count(lt.get_id()) != 0 || other == producers.end() ||
          other->second != op_kind::Dequantize) {
        continue;
      }
      while (ids.count(id) != 0) --id;
      state.handle.add_op(dnnl::graph::op(id, op_kind::Wildcard, {}, {lt}, "input"));
      ids.insert(id);
      producers.emplace(lt.get_id(), op_kind::Wildcard);
      state.hidden.insert(id);
    }
  }
}

std::vector<partition_object> get_partitions(const std::shared_ptr<graph_state>& state,
                                             dnnl::graph::partition::policy policy) {
  const char* function = "graph.get_partitions";
  std::vector<dnnl::graph::partition> found = call_library(function, [&] {
    return without_gil([&] {
      const std::unique_lock<std::shared_mutex> alone(state->partitioning);
      return state->handle.get_partitions(policy);
    });
  });
  std::vector<partition_object> result;
  result.reserve(found.size());
  // The graph is finalized: its ops stay as they are.
  const std::shared_ptr<const std::vector<op_record>> ops(state, &state->ops);
  for (auto& p : found) {
    if (state->hidden.count(p.get_ops().front()) != 0) continue;
    result.push_back(partition_object{state, ops, std::move(p)});
  }
  return result;
}

}  // namespace

void bind_graph(py::module_& m) {
  py::class_<graph_object>(
      m, "graph",
      "Ops that are connected by the ids of their logical tensors:\n"
      "`graph(engine_kind, fpmath_mode=fpmath_mode.strict)`.\n\n"
      "engine_kind: engine.kind, such as engine.cpu; the partitions inherit it and the mode.\n"
      "Without a mode the library's default counts (environment ONEDNN_DEFAULT_FPMATH_MODE).\n\n"
      "add_op for each op, finalize, then get_partitions. Raises TypeError, dnnl_graph.error.\n\n"
      "Source: oneDNN, Graph API, Graph.")
      .def(py::init([](const py::object& kind, const py::object& mode) {
             const auto k = to_object<dnnl::engine::kind>(kind, {"graph", "engine_kind"},
                                                          "an engine.kind, such as engine.cpu");
             return call_library("graph", [&] {
               if (mode.is_none()) {
                 // The library's default mode, which the graph API gives no way to read on 3.2.
                 dnnl_fpmath_mode_t standard = dnnl_fpmath_mode_strict;
                 dnnl::error::wrap_c_api(dnnl_get_default_fpmath_mode(&standard),
                                         "could not get the default fpmath mode");
                 return graph_object{std::make_shared<graph_state>(
                     dnnl::graph::graph(k), k, static_cast<dnnl::fpmath_mode>(standard))};
               }
               const auto f =
                   to_object<dnnl::fpmath_mode>(mode, {"graph", "mode"}, "an fpmath_mode");
               return graph_object{std::make_shared<graph_state>(dnnl::graph::graph(k, f), k, f)};
             });
           }),
           py::arg("engine_kind"), py::arg("mode") = py::none())
      .def(
          "add_op",
          [](const graph_object& self, const py::object& op, const py::object& allow_exception) {
            const auto& o = to_object<op_object>(op, {"graph.add_op", "op"}, "an op");
            return add_op(*self.state, o,
                          to_bool(allow_exception, {"graph.add_op", "allow_exception"}));
          },
          py::arg("op"), py::arg("allow_exception") = true,
          "Add a copy of an op; returns status.success.\n\n"
          "op: op, with all its inputs, outputs and attributes; allow_exception: bool, False to "
          "have\n"
          "a refusal returned as a status instead of raised.\n\n"
          "Raises dnnl_graph.error if the op does not fit the definition of its kind or the graph\n"
          "is finalized, ValueError for an op id or an output that the graph already has, or for\n"
          "weights of a convolution that have less than 3 dimensions.")
      .def(
          "finalize",
          [](const graph_object& self) {
            if (self.state->handle.is_finalized()) return;  // as in C++, nothing happens
            check_whole(*self.state);
            call_library("graph.finalize", [&] {
              add_missing_producers(*self.state);
              self.state->handle.finalize();
            });
          },
          "Say that all ops are added; once more does nothing.\n\n"
          "Raises dnnl_graph.error (invalid_graph) for a cycle, or for logical tensors that have\n"
          "the same id and differ in anything else.")
      .def(
          "is_finalized",
          [](const graph_object& self) { return self.state->handle.is_finalized(); },
          "Whether finalize was called (bool).")
      .def(
          "get_partitions",
          [](const graph_object& self, const py::object& policy) {
            const auto p = to_object<dnnl::graph::partition::policy>(
                policy, {"graph.get_partitions", "policy"},
                "a partition.policy, such as partition.fusion");
            return get_partitions(self.state, p);
          },
          py::arg("policy") = dnnl::graph::partition::policy::fusion,
          "The partitions of a finalized graph (list of partition), in an order in which they can\n"
          "be executed. May be called again, also with another policy.\n\n"
          "Runs without the GIL. Raises dnnl_graph.error if the graph is not finalized.")
      .def(
          "set_fpmath_mode",
          []([[maybe_unused]] const graph_object& self, const py::object& mode,
             const py::object& apply_to_int) {
            const char* function = "graph.set_fpmath_mode";
            [[maybe_unused]] const auto f =
                to_object<dnnl::fpmath_mode>(mode, {function, "mode"}, "an fpmath_mode");
            [[maybe_unused]] const bool i = to_bool(apply_to_int, {function, "apply_to_int"});
            if (self.state->handle.is_finalized()) throw_finalized(function);
#if DNNL_GRAPH_PY_HAS_SET_FPMATH_MODE
            call_library(function, [&] { self.state->handle.set_fpmath_mode(f, i); });
            self.state->fpmath = f;
            self.state->fpmath_apply_to_int = i;
#else
            throw library_error(
                dnnl_unimplemented,
                std::string(function) +
                    ": not in the oneDNN this module was built with; pass the mode to graph()");
#endif
          },
          py::arg("mode"), py::arg("apply_to_int") = false,
          "Set the floating-point math mode before the graph is finalized.\n\n"
          "mode: fpmath_mode; apply_to_int: bool, whether integer ops may compute in floating "
          "point.\n"
          "Raises TypeError, dnnl_graph.error (invalid_graph; unimplemented on an older oneDNN).")
      .def(
          "get_fpmath_mode",
          [](const graph_object& self) {
            return py::make_tuple(self.state->fpmath, self.state->fpmath_apply_to_int);
          },
          "The floating-point math mode and whether it applies to integer ops: (fpmath_mode, "
          "bool).")
      .def(
          "get_engine_kind", [](const graph_object& self) { return self.state->kind; },
          "Engine kind of the graph (engine.kind). Not in the C++ API.")
      .def(
          "get_ops",
          [](const graph_object& self) {
            std::vector<op_object> result;
            for (const auto& record : self.state->ops) result.push_back(make_op(record));
            return result;
          },
          "Copies of the ops added so far, in order (list of op). Not in the C++ API.")
      .def("__repr__", [](const graph_object& self) {
        return std::string("graph(") + name_of(self.state->kind) + ", " +
               std::to_string(self.state->ops.size()) + " ops, " +
               (self.state->handle.is_finalized() ? "finalized)" : "not finalized)");
      });
}

}  // namespace dnnl_graph_py
