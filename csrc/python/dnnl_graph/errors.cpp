// dnnl_graph.error, and how library errors become it.
#include "arguments.h"

namespace dnnl_graph_py {

namespace {

// Leaked on purpose: exceptions may still be raised while the interpreter shuts down.
py::object* error_class = nullptr;

void raise_error(dnnl_status_t status, const std::string& message) {
  const std::string text = message + " (status: " + name_of(status) + ")";
  py::object error = (*error_class)(text);
  error.attr("status") = static_cast<dnnl::graph::status>(status);
  PyErr_SetObject(error_class->ptr(), error.ptr());
}

}  // namespace

void bind_errors(py::module_& m) {
  PyObject* type = PyErr_NewExceptionWithDoc(
      "dnnl_graph.error",
      "An error that the oneDNN library reported. `.status` is a member of dnnl_graph.status.",
      PyExc_RuntimeError, nullptr);
  if (type == nullptr) throw py::error_already_set();
  error_class = new py::object(py::reinterpret_steal<py::object>(type));
  error_class->attr("status") = static_cast<dnnl::graph::status>(dnnl_runtime_error);
  m.attr("error") = *error_class;
  // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11 asks for this signature
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const library_error& e) {
      raise_error(e.status(), e.what());
    } catch (const dnnl::error& e) {
      raise_error(e.status, e.what());
    }
  });
}

}  // namespace dnnl_graph_py
