// What llga_fuser.report() asks for: executions of groups, and groups in oneDNN's terms, as plain
// Python values. Logical tensors and attributes are spelled as in the JSON that oneDNN dumps.
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bindings.h"
#include "jit/onednn/inspect.h"
#include "jit/onednn/kernel.h"

namespace py = pybind11;

// torch holds graphs in shared pointers.
PYBIND11_DECLARE_HOLDER_TYPE(T, std::shared_ptr<T>)

namespace {

using llga::Description;
using llga::Event;
using llga::Layout;
using torch::jit::Node;

// get_dims() throws for an unknown number of dimensions, and nothing else tells of it.
bool hasRank(const Layout& layout) {
  try {
    layout.get_dims();
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

py::dict logicalTensor(const Layout& layout) {
  const std::vector<int64_t> unknown{DNNL_GRAPH_UNKNOWN_DIM};
  const bool strided = layout.get_layout_type() == Layout::layout_type::strided;
  const auto sizes = hasRank(layout) ? layout.get_dims() : unknown;
  const auto strides = hasRank(layout) && strided ? layout.get_strides() : unknown;
  py::dict result;
  result["id"] = layout.get_id();
  result["dtype"] = llga::nameOf(layout.get_data_type());
  result["shape"] = sizes;
  result["stride"] = strides;
  result["layout_type"] = llga::nameOf(layout.get_layout_type());
  result["property_type"] = llga::nameOf(layout.get_property_type());
  return result;
}

// The shortest decimal number that is the same float.
double shortest(float value) { return std::strtod(fmt::format("{}", value).c_str(), nullptr); }

py::dict attribute(const llga::AttrValue& value) {
  struct {
    py::tuple operator()(bool v) const { return py::make_tuple("bool", v ? 1 : 0); }
    py::tuple operator()(int64_t v) const { return py::make_tuple("s64", v); }
    py::tuple operator()(float v) const { return py::make_tuple("f32", shortest(v)); }
    py::tuple operator()(const std::string& v) const { return py::make_tuple("string", v); }
    py::tuple operator()(const std::vector<int64_t>& v) const { return py::make_tuple("s64[]", v); }
    py::tuple operator()(const std::vector<float>& v) const {
      std::vector<double> items(v.size());
      std::transform(v.begin(), v.end(), items.begin(), shortest);
      return py::make_tuple("f32[]", items);
    }
  } convert;
  const auto pair = std::visit(convert, value);
  py::dict result;
  result["type"] = pair[0];
  result["value"] = pair[1];
  return result;
}

py::list logicalTensors(const std::vector<Layout>& layouts) {
  py::list result;
  for (const auto& layout : layouts) {
    result.append(logicalTensor(layout));
  }
  return result;
}

py::dict partition(const Description::Partition& part) {
  py::list ops;
  for (const auto& op : part.ops) {
    py::dict attributes;
    for (const auto& [name, value] : op.attributes) {
      attributes[py::str(llga::nameOf(name))] = attribute(value);
    }
    py::dict entry;
    entry["id"] = op.id;
    entry["name"] = op.name;
    entry["kind"] = llga::nameOf(op.kind);
    entry["attrs"] = attributes;
    entry["inputs"] = logicalTensors(op.inputs);
    entry["outputs"] = logicalTensors(op.outputs);
    ops.append(entry);
  }
  py::dict result;
  result["graph"] = ops;
  result["inputs"] = part.inputs;
  result["outputs"] = part.outputs;
  return result;
}

py::list partitions(const Description& description) {
  py::list result;
  for (const auto& part : description.partitions) {
    result.append(partition(part));
  }
  return result;
}

std::vector<size_t> constantIds(const Description& description) {
  std::vector<size_t> ids;
  ids.reserve(description.constants.size());
  for (const auto& [id, maker] : description.constants) {
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

py::list values(const std::vector<llga::ValueInfo>& infos) {
  py::list result;
  for (const auto& info : infos) {
    py::dict value;
    if (info.is_tensor) {
      value["dtype"] = c10::toString(info.dtype);
      value["shape"] = info.sizes;
      value["stride"] = info.strides;
    } else {
      value["value"] = info.text;
    }
    result.append(value);
  }
  return result;
}

py::dict eventOf(const Event& event) {
  py::dict result;
  result["name"] = event.name;
  result["kernel"] = event.kernel;
  result["start"] = event.start;
  result["end"] = event.end;
  result["compiled"] = event.compiled;
  result["fallback"] = event.fell_back ? py::cast(event.fallback_reason) : py::none();
  result["inputs"] = values(event.inputs);
  result["outputs"] = values(event.outputs);
  result["description"] = event.description;
  result["not_described"] = event.not_described;
  result["input_tensors"] = event.input_tensors;
  result["output_tensors"] = event.output_tensors;
  return result;
}

void observe(const std::string& mode, uint64_t kernel, size_t call) {
  using llga::ObserveMode;
  const auto which = mode == "describe"   ? ObserveMode::describe
                     : mode == "announce" ? ObserveMode::announce
                     : mode == "record"   ? ObserveMode::record
                                          : ObserveMode::time;
  llga::startObserving(which, kernel, call);
}

py::list stopObserving() {
  py::list result;
  for (const auto& event : llga::stopObserving()) {
    result.append(eventOf(event));
  }
  return result;
}

}  // namespace

void bindReport(py::module_& m) {
  py::class_<Description, std::shared_ptr<Description>>(m, "Description")
      .def_property_readonly("partitions", &partitions)
      .def_property_readonly("inputs", [](const Description& d) { return d.group_inputs; })
      .def_property_readonly("outputs", [](const Description& d) { return d.group_outputs; })
      .def_property_readonly("constant_ids", &constantIds)
      .def_property_readonly("fpmath_mode",
                             [](const Description& d) { return static_cast<int>(d.fpmath_mode); })
      .def(
          "constant", [](const Description& d, size_t id) { return d.constants.at(id)(); },
          py::arg("id"));
  m.def("kernel_id", [](const Node* node) { return llga::kernelOf(node)->id(); }, py::arg("node"));
  m.def(
      "kernel_name", [](const Node* node) { return llga::kernelOf(node)->name(); },
      py::arg("node"));
  // The graph whose nodes run: optimising and making code copy it, subgraphs included.
  m.def(
      "graph_of_code",
      [](const torch::jit::Code& code) {
        return code.instructions_source().at(0)->owningGraph()->shared_from_this();
      },
      py::arg("code"));
  m.def("source_lines", &llga::sourceLines, py::arg("node"));
  m.def("start_observing", &observe, py::arg("mode"), py::arg("kernel") = 0, py::arg("call") = 0);
  m.def("stop_observing", &stopObserving);
  m.def("start_verbose", &llga::startVerbose);
  m.def("stop_verbose", &llga::stopVerbose, py::arg("verbosity"));
}
