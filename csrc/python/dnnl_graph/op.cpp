// op: construction, attributes by Python type, inputs and outputs.
#include <pybind11/stl.h>

#include <algorithm>

#include "arguments.h"
#include "dnnl_graph_enums.inc"

namespace dnnl_graph_py {

namespace {

// Type of an attribute's value; `any` for attributes of a newer oneDNN in a section of the header
// that generate_enums.py does not know: then the Python type decides.
enum class value_type { any, f32, f32_vector, s64, s64_vector, boolean, string };

value_type type_of(op_attr a) {
#define TYPE_CASE(name, type) \
  if (a == op_attr::name) return value_type::type;
  DNNL_GRAPH_PY_OP_ATTR_TYPES(TYPE_CASE)
#undef TYPE_CASE
  return value_type::any;
}

const char* type_text(value_type t) {
  switch (t) {
    case value_type::f32:
      return "float";
    case value_type::f32_vector:
      return "list of float";
    case value_type::s64:
      return "int";
    case value_type::s64_vector:
      return "list of int";
    case value_type::boolean:
      return "bool";
    case value_type::string:
      return "str";
    case value_type::any:
      break;
  }
  return "bool, int, float, str, list of int or list of float";
}

// First and last members that only mark the ends of an enum.
bool is_marker(const char* name) {
  const std::string text = name;
  return text == "undef" || text == "end" || text == "LastSymbol" || text == "?";
}

value_type type_from_python(py::handle value, const where& at) {
  if (PyBool_Check(value.ptr())) return value_type::boolean;
  if (PyUnicode_Check(value.ptr())) return value_type::string;
  if (is_integer(value)) return value_type::s64;
  if (PyFloat_Check(value.ptr())) return value_type::f32;
  if (is_sequence(value)) {
    for (py::handle item : py::cast<py::sequence>(value)) {
      if (!is_integer(item)) return value_type::f32_vector;
    }
    return value_type::s64_vector;
  }
  throw_type(at, type_text(value_type::any), value);
}

attr_value read_value(op_attr attr, py::handle value, const where& at) {
  value_type type = type_of(attr);
  if (type == value_type::any) type = type_from_python(value, at);
  switch (type) {
    case value_type::f32:
      return to_float(value, at);
    case value_type::f32_vector:
      return to_float_list(value, at);
    case value_type::s64:
      return to_int64(value, at);
    case value_type::s64_vector:
      return to_int64_list(value, at);
    case value_type::boolean:
      return to_bool(value, at);
    default:
      return to_string(value, at);
  }
}

// The library divides by these without looking.
void check_positive(op_attr attr, const attr_value& value, const where& at) {
  const bool divisor = attr == op_attr::strides || attr == op_attr::dilations ||
                       attr == op_attr::kernel || attr == op_attr::groups;
  if (!divisor) return;
  const auto good = [](int64_t v) { return v >= 1; };
  const auto* list = std::get_if<std::vector<int64_t>>(&value);
  const auto* one = std::get_if<int64_t>(&value);
  if ((list != nullptr && !std::all_of(list->begin(), list->end(), good)) ||
      (one != nullptr && !good(*one))) {
    throw_value(at, std::string("must be positive for attribute ") + name_of(attr) + ", got " +
                        (list != nullptr ? dims_text(*list) : std::to_string(*one)));
  }
}

void set_attr(op_object& self, const py::object& name, const py::object& value) {
  const char* function = "op.set_attr";
  const where at_value{function, "value"};
  const auto attr =
      to_object<op_attr>(name, {function, "name"}, "an op.attr, such as op.transpose_a");
  if (is_marker(name_of(attr))) {
    throw_value({function, "name"},
                std::string("must be a real attribute, not op.attr.") + name_of(attr));
  }
  attr_value read;
  try {
    read = read_value(attr, value, at_value);
  } catch (const py::type_error&) {
    throw_type(at_value, std::string(type_text(type_of(attr))) + " for attribute " + name_of(attr),
               value);
  }
  check_positive(attr, read, at_value);
  std::visit(
      [&](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (!std::is_arithmetic_v<T>) {
          if (v.empty()) {
            throw_value(at_value, std::string("must not be empty for attribute ") + name_of(attr) +
                                      ": the library takes no empty value");
          }
        }
        call_library(function, [&] { self.handle->set_attr<T>(attr, v); });
      },
      read);
  self.record.attrs[attr] = std::move(read);
}

void add_input(op_object& self, const logical_tensor& lt, const where&) {
  call_library("op.add_input", [&] { self.handle->add_input(lt); });
  self.record.inputs.push_back(lt);
}

void check_new_output(const op_object& self, const logical_tensor& lt, const where& at) {
  for (const auto& known : self.record.outputs) {
    if (known.get_id() == lt.get_id()) {
      throw_value(at, "has id " + std::to_string(lt.get_id()) + ", which is already an output of " +
                          op_text(self.record));
    }
  }
}

void add_output(op_object& self, const logical_tensor& lt, const where& at) {
  check_new_output(self, lt, at);
  call_library("op.add_output", [&] { self.handle->add_output(lt); });
  self.record.outputs.push_back(lt);
}

const logical_tensor& to_lt(py::handle value, const where& at) {
  return to_object<logical_tensor>(value, at, "a logical_tensor");
}

op_object construct(const py::object& id, const py::object& kind, const py::args& args,
                    const py::kwargs& kwargs) {
  op_object self;
  self.record.id = to_size(id, {"op", "id"});
  self.record.kind = to_object<op_kind>(kind, {"op", "kind"}, "an op.kind, such as op.MatMul");
  if (is_marker(name_of(self.record.kind))) {
    throw_value({"op", "kind"}, "must be a real kind, not op.kind.LastSymbol");
  }
  // op(id, kind, name) or op(id, kind, inputs, outputs, name)
  py::object inputs, outputs, name;
  size_t next = 0;
  if (!args.empty() && !PyUnicode_Check(args[0].ptr())) {
    inputs = args[0];
    if (args.size() > 1) outputs = args[1];
    next = 2;
  }
  if (args.size() > next) name = args[next];
  if (args.size() > next + 1) {
    throw py::type_error(
        "op: too many arguments; it takes (id, kind, name) or (id, kind, inputs, "
        "outputs, name)");
  }
  for (const auto& [key, value] : kwargs) {
    const auto text = key.cast<std::string>();
    py::object* slot = text == "inputs"    ? &inputs
                       : text == "outputs" ? &outputs
                       : text == "name"    ? &name
                                           : nullptr;
    if (slot == nullptr) throw py::type_error("op: unknown argument '" + text + "'");
    if (*slot) throw py::type_error("op: argument '" + text + "' given twice");
    *slot = py::reinterpret_borrow<py::object>(value);
  }
  if (static_cast<bool>(inputs) != static_cast<bool>(outputs)) {
    throw py::type_error(std::string("op: argument '") + (inputs ? "outputs" : "inputs") +
                         "' is missing: inputs and outputs are given together");
  }
  if (name) self.record.name = to_string(name, {"op", "name"});
  const auto ins = inputs ? to_list<logical_tensor>(inputs, {"op", "inputs"}, "logical_tensor")
                          : std::vector<logical_tensor>{};
  const auto outs = outputs ? to_list<logical_tensor>(outputs, {"op", "outputs"}, "logical_tensor")
                            : std::vector<logical_tensor>{};
  call_library("op", [&] {
    self.handle =
        std::make_shared<dnnl::graph::op>(self.record.id, self.record.kind, self.record.name);
  });
  if (self.record.name.empty()) {  // what the library then shows
    self.record.name =
        std::string(name_of(self.record.kind)) + "_" + std::to_string(self.record.id);
  }
  for (const auto& lt : ins) add_input(self, lt, {"op", "inputs"});
  for (const auto& lt : outs) add_output(self, lt, {"op", "outputs"});
  return self;
}

}  // namespace

op_object make_op(const op_record& record) {
  op_object result{record, nullptr};
  call_library("op", [&] {
    result.handle = std::make_shared<dnnl::graph::op>(record.id, record.kind, record.inputs,
                                                      record.outputs, record.name);
    for (const auto& [name, value] : record.attrs) {
      std::visit(
          [&, attr = name](const auto& v) {
            result.handle->set_attr<std::decay_t<decltype(v)>>(attr, v);
          },
          value);
    }
  });
  return result;
}

std::string op_text(const op_record& op) {
  return "op(" + std::to_string(op.id) + ", " + name_of(op.kind) + ", '" + op.name + "')";
}

void bind_op(py::module_& m) {
  auto op = py::class_<op_object>(m.attr("op"));
  op.def(py::init(&construct), py::arg("id"), py::arg("kind"))
      .def(
          "add_input",
          [](op_object& self, const py::object& t) {
            const where at{"op.add_input", "t"};
            add_input(self, to_lt(t, at), at);
          },
          py::arg("t"), "Append an input (logical_tensor). Raises TypeError.")
      .def(
          "add_inputs",
          [](op_object& self, const py::object& ts) {
            const where at{"op.add_inputs", "ts"};
            for (const auto& lt : to_list<logical_tensor>(ts, at, "logical_tensor")) {
              add_input(self, lt, at);
            }
          },
          py::arg("ts"), "Append inputs (list of logical_tensor), in order. Raises TypeError.")
      .def(
          "add_output",
          [](op_object& self, const py::object& t) {
            const where at{"op.add_output", "t"};
            add_output(self, to_lt(t, at), at);
          },
          py::arg("t"),
          "Append an output (logical_tensor). Raises TypeError, ValueError for an id that already\n"
          "is an output.")
      .def(
          "add_outputs",
          [](op_object& self, const py::object& ts) {
            const where at{"op.add_outputs", "ts"};
            const auto list = to_list<logical_tensor>(ts, at, "logical_tensor");
            for (const auto& lt : list) check_new_output(self, lt, at);
            for (const auto& lt : list) add_output(self, lt, at);
          },
          py::arg("ts"), "Append outputs (list of logical_tensor), in order. See add_output.")
      .def(
          "set_attr",
          [](const py::object& self, const py::object& name, const py::object& value) {
            set_attr(self.cast<op_object&>(), name, value);
            return self;
          },
          py::arg("name"), py::arg("value"),
          "Set an attribute; returns the op.\n\n"
          "name: op.attr, such as op.strides. value: bool, int, float, str, list of int or list "
          "of\n"
          "float, as the attribute asks for; an int will do for a float. Whether the kind of the "
          "op\n"
          "has the attribute is checked by graph.add_op.\n\n"
          "Raises TypeError for a value of the wrong type, ValueError for an empty list or str, "
          "for\n"
          "a number out of range, and for strides, dilations, kernel or groups below 1.")
      .def(
          "get_id", [](const op_object& self) { return self.record.id; },
          "Id (int). In the C API: dnnl_graph_op_get_id.")
      .def(
          "get_kind", [](const op_object& self) { return self.record.kind; },
          "Kind (op.kind). In the C API: dnnl_graph_op_get_kind.")
      .def(
          "get_name", [](const op_object& self) { return self.record.name; },
          "Name (str). Not in the C++ API.")
      .def(
          "get_inputs", [](const op_object& self) { return self.record.inputs; },
          "Inputs added so far (list of logical_tensor). Not in the C++ API.")
      .def(
          "get_outputs", [](const op_object& self) { return self.record.outputs; },
          "Outputs added so far (list of logical_tensor). Not in the C++ API.")
      .def(
          "get_attrs",
          [](const op_object& self) {
            py::dict result;
            for (const auto& [name, value] : self.record.attrs) {
              result[py::cast(name)] =
                  std::visit([](const auto& v) { return py::object(py::cast(v)); }, value);
            }
            return result;
          },
          "Attributes set so far (dict of op.attr to value); defaults are not in it. Not in the\n"
          "C++ API.")
      .def("__repr__", [](const op_object& self) { return op_text(self.record); });
}

}  // namespace dnnl_graph_py
