// dnnl_graph._dnnl_graph: the oneDNN Graph API (dnnl_graph.hpp) in Python, one to one.
//
// No torch here. Everything that is more than the C++ API is in the Python files of dnnl_graph/.
#include "arguments.h"

PYBIND11_MODULE(_dnnl_graph, m) {
  using namespace dnnl_graph_py;
  m.doc() = "The oneDNN Graph API; import dnnl_graph instead of this module.";
  py::options options;
  // The docstrings say what overloads there are: most arguments are read by hand, so that errors
  // can name them, and pybind11's own signatures would only say `object`.
  options.disable_function_signatures();
  bind_enums(m);  // first: the exception has a status
  bind_errors(m);
  bind_engine(m);
  bind_logical_tensor(m);
  bind_op(m);
  bind_tensor(m);
  bind_partition(m);
  bind_graph(m);
  bind_settings(m);
  // The library's own cache would drop its compiled partitions in a static destructor, and these
  // reach for the constant tensor cache, which in 3.2 may be gone by then (after switching it on a
  // second time): a crash at exit. Dropped here, everything is still there.
  Py_AtExit([] {
    unlocked::wait_for_all();
    const llga::NoThreadEnds none;
    dnnl_graph_set_compiled_partition_cache_capacity(0);
  });
  empty_without_init<engine_object>();
  empty_without_init<stream_object>();
  empty_without_init<allocator_object>();
  empty_without_init<logical_tensor>();
  empty_without_init<op_object>();
  empty_without_init<tensor_object>();
  empty_without_init<partition_object>();
  empty_without_init<compiled_partition_object>();
  empty_without_init<graph_object>();
}
