// Functions of the C++ API that belong to no class: version, caches, dump mode.
#include <limits>

#include "arguments.h"
#include "dnnl_graph_enums.inc"

namespace dnnl_graph_py {

namespace {

// Said by functions that the headers of this build do not have, so that the same program runs (and
// can catch the error) whatever the version.
[[noreturn, maybe_unused]] void throw_too_old(const char* function) {
  throw library_error(dnnl_unimplemented, std::string(function) +
                                              ": not in the oneDNN this module was built with (" +
                                              std::to_string(DNNL_VERSION_MAJOR) + "." +
                                              std::to_string(DNNL_VERSION_MINOR) + ")");
}

int to_int(py::handle value, const where& at) {
  const int64_t number = to_int64(value, at);
  if (number < std::numeric_limits<int>::min() || number > std::numeric_limits<int>::max()) {
    throw_value(at, "does not fit a 32-bit int: " + describe(value));
  }
  return static_cast<int>(number);
}

}  // namespace

void bind_settings(py::module_& m) {
  m.attr("DNNL_GRAPH_UNKNOWN_NDIMS") = py::int_(DNNL_GRAPH_UNKNOWN_NDIMS);
  m.attr("DNNL_GRAPH_UNKNOWN_DIM") = py::int_(DNNL_GRAPH_UNKNOWN_DIM);

  // Deliberately a plain named tuple: version()[:2] >= (3, 7).
  const py::object version_type =
      py::module_::import("collections").attr("namedtuple")("version_t", "major minor patch hash");
  m.attr("version_t") = version_type;
  version_type.attr("__module__") = "dnnl_graph";
  m.def(
      "version",
      [version_type]() {
        const dnnl_version_t* v = dnnl_version();
        return version_type(v->major, v->minor, v->patch, v->hash);
      },
      "Version of the oneDNN library that is loaded: (major, minor, patch, hash).\n\n"
      "Source: oneDNN, dnnl_version.");
  m.def(
      "header_version",
      [version_type]() {
        return version_type(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH, "");
      },
      "Version of the headers this module was built with: the op kinds and attributes it has.");

  m.def(
      "get_compiled_partition_cache_capacity",
      [] {
        return call_library("get_compiled_partition_cache_capacity",
                            [] { return dnnl::graph::get_compiled_partition_cache_capacity(); });
      },
      "How many compiled partitions the library keeps for later compile calls (int).\n\n"
      "Source: oneDNN, Graph API, Compiled Partition Cache.");
  m.def(
      "set_compiled_partition_cache_capacity",
      [](const py::object& capacity) {
        const int n = to_int(capacity, {"set_compiled_partition_cache_capacity", "capacity"});
        call_library("set_compiled_partition_cache_capacity", [&] {
          const llga::NoThreadEnds none;
          dnnl::graph::set_compiled_partition_cache_capacity(n);
        });
      },
      py::arg("capacity"),
      "Set how many compiled partitions the library keeps; 0 keeps none and drops all.\n\n"
      "capacity: int, not negative. Raises TypeError, ValueError, dnnl_graph.error.\n"
      "Source: oneDNN, Graph API, Compiled Partition Cache.");

  m.def(
      "get_constant_tensor_cache",
      [] {
        return call_library("get_constant_tensor_cache",
                            [] { return dnnl::graph::get_constant_tensor_cache(); });
      },
      "1 if the library caches what it computes from constant tensors, else 0.\n\n"
      "Source: oneDNN, Graph API, Constant Tensor Cache.");
  m.def(
      "set_constant_tensor_cache",
      [](const py::object& flag) {
        const int n = to_int(flag, {"set_constant_tensor_cache", "flag"});
#if !DNNL_GRAPH_PY_HAS_CONSTANT_CACHE_CAPACITY
        // "This API must be called once before compilation stage", says the header, and means it:
        // compiled partitions of 3.2 that outlive a change crash when they are destroyed.
        if (compiled_before() && n >= 0 &&
            (n != 0) != (dnnl::graph::get_constant_tensor_cache() != 0)) {
          throw library_error(dnnl_invalid_arguments,
                              "set_constant_tensor_cache: argument 'flag' cannot change any more: "
                              "this oneDNN takes it only before the first partition is compiled");
        }
#endif
        call_library("set_constant_tensor_cache",
                     [&] { dnnl::graph::set_constant_tensor_cache(n); });
      },
      py::arg("flag"),
      "Switch the constant tensor cache on (1) or off (0), before anything is compiled.\n\n"
      "oneDNN 3.2 keys this cache without the address of the tensor: with the cache on (its\n"
      "default), a compiled partition that is executed with another constant tensor uses the\n"
      "first one. It takes a change only before the first partition is compiled.\n"
      "flag: int, not negative. Raises TypeError, dnnl_graph.error.\n"
      "Source: oneDNN, Graph API, Constant Tensor Cache.");
  m.def(
      "get_constant_tensor_cache_capacity",
      []([[maybe_unused]] const py::object& kind) -> size_t {
        const char* function = "get_constant_tensor_cache_capacity";
        [[maybe_unused]] const auto k =
            to_object<dnnl::engine::kind>(kind, {function, "kind"}, "an engine.kind");
#if DNNL_GRAPH_PY_HAS_CONSTANT_CACHE_CAPACITY
        return call_library(function,
                            [&] { return dnnl::graph::get_constant_tensor_cache_capacity(k); });
#else
        throw_too_old(function);
#endif
      },
      py::arg("kind"),
      "Capacity of the constant tensor cache of an engine kind, in megabytes (int).\n\n"
      "Raises TypeError, and dnnl_graph.error (unimplemented) if oneDNN is too old for it.\n"
      "Source: oneDNN, Graph API, Constant Tensor Cache.");
  m.def(
      "set_constant_tensor_cache_capacity",
      [](const py::object& kind, const py::object& size) {
        const char* function = "set_constant_tensor_cache_capacity";
        [[maybe_unused]] const auto k =
            to_object<dnnl::engine::kind>(kind, {function, "kind"}, "an engine.kind");
        [[maybe_unused]] const size_t n = to_size(size, {function, "size"});
#if DNNL_GRAPH_PY_HAS_CONSTANT_CACHE_CAPACITY
        call_library(function, [&] { dnnl::graph::set_constant_tensor_cache_capacity(k, n); });
#else
        throw_too_old(function);
#endif
      },
      py::arg("kind"), py::arg("size"),
      "Set the capacity of the constant tensor cache, in megabytes; 0 empties and disables it.\n\n"
      "Raises TypeError, ValueError, and dnnl_graph.error (unimplemented) if oneDNN is too old.\n"
      "Source: oneDNN, Graph API, Constant Tensor Cache.");

#if DNNL_GRAPH_PY_HAS_DUMP_MODE
  m.def(
      "set_dump_mode",
      [](const py::object& modes) {
        const auto value = py::isinstance<dnnl::graph::graph_dump_mode>(modes)
                               ? modes.cast<dnnl::graph::graph_dump_mode>()
                               : static_cast<dnnl::graph::graph_dump_mode>(
                                     to_size(modes, {"set_dump_mode", "modes"}));
        return dnnl::graph::set_dump_mode(value);
      },
      py::arg("modes"),
      "Choose what the library writes as JSON files; returns a status.\n\n"
      "Source: oneDNN, Graph API, Dump Mode.");
#endif
}

}  // namespace dnnl_graph_py
