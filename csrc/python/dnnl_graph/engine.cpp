// engine, stream, allocator. Owner of all engines of the process (objects.h says why).
#include <mutex>

#include "arguments.h"

namespace dnnl_graph_py {

namespace {

// Function-local and leaked: no destructor runs while the library shuts down.
dnnl::engine shared_engine(dnnl::engine::kind kind, size_t index) {
  static auto* const engines = new std::map<std::pair<int, size_t>, dnnl::engine>();
  const auto key = std::make_pair(static_cast<int>(kind), index);
  const auto found = engines->find(key);
  if (found != engines->end()) return found->second;
  dnnl::engine created = call_library(std::string("engine: no engine of kind ") + name_of(kind) +
                                          " with index " + std::to_string(index),
                                      [&] { return dnnl::engine(kind, index); });
  engines->emplace(key, created);
  return created;
}

dnnl::engine::kind to_engine_kind(py::handle value, const where& at) {
  return to_object<dnnl::engine::kind>(value, at, "an engine.kind, such as engine.cpu");
}

std::string engine_text(const engine_object& e) {
  if (!e.handle) return "engine()";
  return std::string("engine(kind=") + name_of(e.handle.get_kind()) + ")";
}

// The address of a C function: an int, or a ctypes function, which is then kept alive for good.
void* to_function(py::handle value, const where& at) {
  if (is_integer(value)) {
    const size_t address = to_size(value, at);
    if (address == 0) throw_value(at, "must not be a null address");
    return reinterpret_cast<void*>(address);
  }
  const py::module_ ctypes = py::module_::import("ctypes");
  if (!py::isinstance(value, ctypes.attr("_CFuncPtr"))) {
    throw_type(at, "the address of a C function (int) or a ctypes function", value);
  }
  const py::object address = ctypes.attr("cast")(value, ctypes.attr("c_void_p")).attr("value");
  if (address.is_none()) throw_value(at, "must not be a null function");
  value.inc_ref();
  return reinterpret_cast<void*>(to_size(address, at));
}

}  // namespace

void bind_engine(py::module_& m) {
  auto engine = py::class_<engine_object>(m.attr("engine"));
  engine
      .def(py::init([](const py::object& kind, const py::object& index) {
             return engine_object{shared_engine(to_engine_kind(kind, {"engine", "kind"}),
                                                to_size(index, {"engine", "index"}))};
           }),
           py::arg("kind"), py::arg("index") = 0)
      .def(
          "get_kind", [](const engine_object& self) { return self.handle.get_kind(); },
          "Kind of the engine (engine.kind).")
      .def_static(
          "get_count",
          [](const py::object& kind) {
            return dnnl::engine::get_count(to_engine_kind(kind, {"engine.get_count", "kind"}));
          },
          py::arg("kind"), "Number of engines of a kind (int). Raises TypeError.")
      .def("__eq__",
           [](const engine_object& self, const py::object& other) {
             return py::isinstance<engine_object>(other) &&
                    self.handle == other.cast<const engine_object&>().handle;
           })
      .def("__hash__",
           [](const engine_object& self) {
             return std::hash<const void*>()(static_cast<const void*>(self.handle.get()));
           })
      .def("__repr__", &engine_text);

  auto stream = py::class_<stream_object>(m.attr("stream"));
  stream
      .def(py::init([](const py::object& engine, const py::object& flags) {
             const auto& e = to_object<engine_object>(engine, {"stream", "engine"}, "an engine");
             // `a | b` of an arithmetic enum is a plain int.
             const auto f =
                 py::isinstance<dnnl::stream::flags>(flags)
                     ? flags.cast<dnnl::stream::flags>()
                     : static_cast<dnnl::stream::flags>(to_size(flags, {"stream", "flags"}));
             return call_library("stream",
                                 [&] { return stream_object{dnnl::stream(e.handle, f), e}; });
           }),
           py::arg("engine"), py::arg("flags") = dnnl::stream::flags::default_flags)
      .def(
          "wait",
          [](const py::object& self) {
            dnnl::stream handle = self.cast<stream_object&>().handle;
            call_library("stream.wait", [&] { without_gil([&] { handle.wait(); }); });
            return self;
          },
          "Wait until everything in the stream is done; returns the stream.\n\n"
          "Runs without the GIL. Raises dnnl_graph.error.")
      .def(
          "get_engine", [](const stream_object& self) { return self.engine; },
          "The engine of the stream.")
      .def("__repr__",
           [](const stream_object& self) { return "stream(" + engine_text(self.engine) + ")"; });

  py::class_<allocator_object>(
      m, "allocator",
      "Where the library takes its memory from: `allocator()` for its own functions, or\n"
      "`allocator(host_malloc, host_free)`.\n\n"
      "host_malloc: `void *f(size_t bytes, size_t alignment)`; host_free: `void f(void *)`; each\n"
      "the address of a C function (int) or a ctypes function. The library may call them from any\n"
      "thread until the process ends. A wrong address cannot be detected.\n\n"
      "Use: make_engine_with_allocator. Source: oneDNN, Graph API, Allocator.")
      .def(py::init([](const py::object& host_malloc, const py::object& host_free) {
             if (host_malloc.is_none() != host_free.is_none()) {
               throw_value({"allocator", host_malloc.is_none() ? "host_malloc" : "host_free"},
                           "must be given together with the other function");
             }
             return call_library("allocator", [&] {
               if (host_malloc.is_none()) {
                 return allocator_object{std::make_shared<dnnl::graph::allocator>()};
               }
               void* const malloc_address = to_function(host_malloc, {"allocator", "host_malloc"});
               void* const free_address = to_function(host_free, {"allocator", "host_free"});
               return allocator_object{std::make_shared<dnnl::graph::allocator>(
                   reinterpret_cast<dnnl_graph_host_allocate_f>(malloc_address),
                   reinterpret_cast<dnnl_graph_host_deallocate_f>(free_address))};
             });
           }),
           py::arg("host_malloc") = py::none(), py::arg("host_free") = py::none())
      .def("__repr__", [](const allocator_object&) { return "allocator()"; });

  m.def(
      "make_engine_with_allocator",
      [](const py::object& kind, const py::object& index, const py::object& alloc) {
        const char* function = "make_engine_with_allocator";
        const auto k = to_engine_kind(kind, {function, "kind"});
        const size_t i = to_size(index, {function, "index"});
        const auto& a = to_object<allocator_object>(alloc, {function, "alloc"}, "an allocator");
        return call_library(function, [&] {
          engine_object made{dnnl::graph::make_engine_with_allocator(k, i, *a.handle)};
          // One more handle, never dropped: the engine and its allocator live until the end.
          static auto* const kept =
              new std::vector<std::pair<dnnl::engine, std::shared_ptr<dnnl::graph::allocator>>>();
          kept->emplace_back(made.handle, a.handle);
          return made;
        });
      },
      py::arg("kind"), py::arg("index"), py::arg("alloc"),
      "An engine that takes its memory from `alloc`. It lives until the process ends.\n\n"
      "kind: engine.kind; index: int; alloc: allocator. Raises TypeError, dnnl_graph.error.\n"
      "Source: oneDNN, Graph API, Engine.");
}

}  // namespace dnnl_graph_py
