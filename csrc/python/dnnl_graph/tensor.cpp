// tensor: memory from Python (address, numpy, DLPack) for the library, and back, without a copy.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "arguments.h"
#include "dlpack.h"
#include "dnnl_graph_enums.inc"

namespace dnnl_graph_py {

namespace {

// One data type in the words of numpy and DLPack. 4-bit types are packed in oneDNN, which neither
// can express: their memory is given as bytes.
struct type_names {
  const char* dnnl;
  const char* numpy;
  bool ml_dtypes;
  dlpack::DLDataType dl;
};

constexpr std::array<type_names, 10> kTypes = {{
    {"f32", "float32", false, {dlpack::kFloat, 32, 1}},
    {"f16", "float16", false, {dlpack::kFloat, 16, 1}},
    {"bf16", "bfloat16", true, {dlpack::kBfloat, 16, 1}},
    {"s32", "int32", false, {dlpack::kInt, 32, 1}},
    {"s8", "int8", false, {dlpack::kInt, 8, 1}},
    {"u8", "uint8", false, {dlpack::kUInt, 8, 1}},
    {"boolean", "bool", false, {dlpack::kBool, 8, 1}},
    {"s64", "int64", false, {dlpack::kInt, 64, 1}},
    {"f8_e5m2", "float8_e5m2", true, {dlpack::kFloat8_e5m2, 8, 1}},
    {"f8_e4m3", "float8_e4m3fn", true, {dlpack::kFloat8_e4m3fn, 8, 1}},
}};

const type_names* names_of(data_type t) {
  for (const auto& row : kTypes) {
    if (std::strcmp(row.dnnl, name_of(t)) == 0) return &row;
  }
  return nullptr;
}

// Memory as Python describes it.
struct memory_view {
  void* data = nullptr;
  std::string type;         // numpy's name of the element type
  size_t element_size = 1;  // bytes
  dims_t shape;
  dims_t strides;  // elements
  bool readonly = false;
  std::shared_ptr<void> owner;
};

// Keeps a Python object alive from C++; may be dropped with or without the GIL.
std::shared_ptr<void> keep_alive(py::object object) {
  return {object.release().ptr(), [](void* p) {
            if (!Py_IsInitialized()) return;  // nobody is left to count references
            py::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(p));
          }};
}

memory_view view_numpy(const py::array& array, const where& at) {
  memory_view view;
  view.type = array.dtype().attr("name").cast<std::string>();
  if (!array.dtype().attr("isnative").cast<bool>()) {
    throw_value(at, "has a dtype in foreign byte order: " +
                        py::str(array.dtype().attr("str")).cast<std::string>());
  }
  view.element_size = static_cast<size_t>(array.itemsize());
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    view.shape.push_back(array.shape(i));
    const py::ssize_t bytes = array.strides(i);
    if (view.element_size == 0 || bytes % static_cast<py::ssize_t>(view.element_size) != 0) {
      throw_value(at, "has strides that are no multiple of its element size");
    }
    view.strides.push_back(bytes / static_cast<py::ssize_t>(view.element_size));
  }
  // The constness is numpy's, and `readonly` keeps it.
  view.data = const_cast<void*>(array.data());
  view.readonly = !array.writeable();
  view.owner = keep_alive(array);
  return view;
}

std::string type_text(const dlpack::DLDataType& t) {
  for (const auto& row : kTypes) {
    if (row.dl.code == t.code && row.dl.bits == t.bits && t.lanes == 1) return row.numpy;
  }
  return "DLPack type (code " + std::to_string(t.code) + ", bits " + std::to_string(t.bits) +
         ", lanes " + std::to_string(t.lanes) + ")";
}

void fill_from_dl(memory_view* view, const dlpack::DLTensor& dl, const where& at) {
  if (dl.device.device_type != dlpack::kCPU) {
    throw_value(at, "must be in CPU memory, its DLPack device type is " +
                        std::to_string(dl.device.device_type));
  }
  if (dl.ndim < 0 || (dl.ndim > 0 && dl.shape == nullptr)) {
    throw_value(at, "is a malformed DLPack tensor");
  }
  view->type = type_text(dl.dtype);
  view->element_size = (static_cast<size_t>(dl.dtype.bits) * dl.dtype.lanes + 7) / 8;
  view->shape.assign(dl.shape, dl.shape + dl.ndim);
  if (dl.strides != nullptr) {
    view->strides.assign(dl.strides, dl.strides + dl.ndim);
  } else {
    view->strides.resize(view->shape.size());
    int64_t step = 1;
    for (size_t i = view->shape.size(); i-- > 0;) {
      view->strides[i] = step;
      step *= std::max<int64_t>(view->shape[i], 1);
    }
  }
  view->data = static_cast<char*>(dl.data) + dl.byte_offset;
  if (dl.data == nullptr) view->data = nullptr;
}

memory_view view_dlpack(const py::object& object, const where& at) {
  if (py::hasattr(object, "__dlpack_device__")) {
    const py::object device = object.attr("__dlpack_device__")();
    const auto type = py::int_(py::cast<py::sequence>(device)[0]).cast<int64_t>();
    if (type != dlpack::kCPU) {
      throw_value(at, "must be in CPU memory, its DLPack device type is " + std::to_string(type));
    }
  }
  py::object capsule;
  try {
    capsule = object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(1, 0));
  } catch (py::error_already_set& e) {
    if (!e.matches(PyExc_TypeError)) throw;
    capsule = object.attr("__dlpack__")();  // a producer older than DLPack 1.0
  }
  memory_view view;
  // Ownership moves to us: the consumer renames the capsule and calls the deleter.
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed = static_cast<dlpack::DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major > 1) {
      throw_value(at, "speaks DLPack " + std::to_string(managed->version.major) +
                          ", this module knows versions up to 1");
    }
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    view.owner = {managed, [](void* p) {
                    if (!Py_IsInitialized()) return;
                    py::gil_scoped_acquire gil;  // the producer may own Python objects
                    auto* m = static_cast<dlpack::DLManagedTensorVersioned*>(p);
                    if (m->deleter != nullptr) m->deleter(m);
                  }};
    view.readonly = (managed->flags & dlpack::kReadOnly) != 0;
    fill_from_dl(&view, managed->dl_tensor, at);
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* managed =
        static_cast<dlpack::DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    view.owner = {managed, [](void* p) {
                    if (!Py_IsInitialized()) return;
                    py::gil_scoped_acquire gil;
                    auto* m = static_cast<dlpack::DLManagedTensor*>(p);
                    if (m->deleter != nullptr) m->deleter(m);
                  }};
    fill_from_dl(&view, managed->dl_tensor, at);
  } else {
    throw_type(at, "an object whose __dlpack__ returns a fresh DLPack capsule", capsule);
  }
  return view;
}

bool dense(const dims_t& shape, const dims_t& strides) {
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

size_t volume(const dims_t& shape) {
  size_t n = 1;
  for (const int64_t d : shape) n *= static_cast<size_t>(d);
  return n;
}

// Does this memory hold what the logical tensor describes? Returns the bytes it has.
size_t check_view(const memory_view& view, const logical_tensor& lt, size_t needed,
                  const where& at) {
  const type_names* names = names_of(lt.get_data_type());
  if (lt.get_layout_type() == layout_type::opaque || names == nullptr) {
    // Only the library knows what is where: any dense memory of enough bytes will do.
    if (!dense(view.shape, view.strides)) {
      throw_value(at, "must be dense and row-major to hold " + logical_tensor_text(lt) +
                          ", got shape " + dims_text(view.shape) + " with strides " +
                          dims_text(view.strides));
    }
    const size_t bytes = volume(view.shape) * view.element_size;
    if (bytes < needed) {
      throw_value(at, "has " + std::to_string(bytes) + " bytes, " + logical_tensor_text(lt) +
                          " needs " + std::to_string(needed));
    }
    return bytes;
  }
  if (view.type != names->numpy) {
    throw py::type_error(std::string(at.function) + ": argument '" + at.argument +
                         "' must have element type " + names->numpy + " to hold " +
                         logical_tensor_text(lt) + ", got " + view.type);
  }
  dims_t shape = view.shape, strides = view.strides;
  const dims_t dims = lt.get_dims(), wanted = lt.get_strides();
  if (volume(shape) == 1 && shape.size() != dims.size() && dims.size() <= 1 && shape.size() <= 1) {
    // A 0-dim array is what Python makes of a scalar; most ops want it as [1].
    shape = dims;
    strides = dims_t(dims.size(), 1);
  }
  if (shape != dims) {
    throw_value(at, "must have shape " + dims_text(dims) + " (" + logical_tensor_text(lt) +
                        "), got " + dims_text(view.shape));
  }
  if (volume(shape) == 0) return needed;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != 1 && strides[i] != wanted[i]) {
      throw_value(at, "must have strides " + dims_text(wanted) + " in elements (" +
                          logical_tensor_text(lt) + "), got " + dims_text(view.strides) +
                          "; is it contiguous?");
    }
  }
  return needed;
}

std::shared_ptr<const tensor_state> make_state(const logical_tensor& lt,
                                               const engine_object& engine, memory_view view,
                                               size_t capacity) {
  auto state = std::make_shared<tensor_state>();
  state->engine = engine;
  state->owner = std::move(view.owner);
  state->desc = lt;
  state->data = view.data;
  state->capacity = capacity;
  state->readonly = view.readonly;
  state->handle =
      call_library("tensor", [&] { return dnnl::graph::tensor(lt, engine.handle, state->data); });
  return state;
}

std::shared_ptr<const tensor_state> from_handle(const logical_tensor& lt,
                                                const engine_object& engine, py::handle handle,
                                                const char* function) {
  const where at{function, "handle"};
  const size_t needed = required_bytes(lt, {function, "lt"});
  const bool array = py::isinstance<py::array>(handle);
  // Arrays of one element count as integers in Python: the kind of memory is asked for first.
  if (!array && !py::hasattr(handle, "__dlpack__") && is_integer(handle)) {
    memory_view view;
    const size_t address = to_size(handle, at);
    // The library's own marks: DNNL_MEMORY_ALLOCATE would make it free memory behind our back.
    if (address == static_cast<size_t>(-1)) {
      throw_value(at, "must be an address; leave it out to have memory allocated");
    }
    view.data = reinterpret_cast<void*>(address);
    return make_state(lt, engine, std::move(view), SIZE_MAX);
  }
  memory_view view;
  if (array) {
    view = view_numpy(py::reinterpret_borrow<py::array>(handle), at);
  } else if (py::hasattr(handle, "__dlpack__")) {
    view = view_dlpack(py::reinterpret_borrow<py::object>(handle), at);
  } else {
    throw_type(at, "an address (int), a numpy array or an object with __dlpack__", handle);
  }
  const size_t capacity = check_view(view, lt, needed, at);
  return make_state(lt, engine, std::move(view), capacity);
}

// Memory of our own, on every oneDNN version: 3.2 has no tensor that allocates, and the library's
// memory is tied to the allocator of the engine.
std::shared_ptr<const tensor_state> allocate(const logical_tensor& lt,
                                             const engine_object& engine) {
  constexpr size_t kAlignment = 64;  // a cache line, and the widest vector
  const size_t needed = required_bytes(lt, {"tensor", "lt"});
  const size_t rounded = (std::max<size_t>(needed, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, rounded);
  if (memory == nullptr) {
    throw library_error(dnnl_out_of_memory,
                        "tensor: no memory for " + std::to_string(needed) + " bytes");
  }
  // Zeroed: uninitialised memory of the process must not be readable by accident.
  std::memset(memory, 0, rounded);
  memory_view view;
  view.data = memory;
  view.owner = {memory, [](void* p) { std::free(p); }};
  return make_state(lt, engine, std::move(view), needed);
}

#if DNNL_GRAPH_PY_HAS_SCALAR_TENSOR
std::shared_ptr<const tensor_state> make_scalar(const logical_tensor& lt, py::handle scalar) {
  const char* function = "tensor.make_scalar_tensor";
  const where at_lt{function, "lt"};
  if (lt.get_property_type() != property_type::host_scalar || has_unknown_dim(lt) ||
      !lt.get_dims().empty()) {
    throw_value(at_lt,
                "must have property host_scalar and no dimensions: " + logical_tensor_text(lt));
  }
  const type_names* names = names_of(lt.get_data_type());
  if (names == nullptr || names->ml_dtypes) {
    throw_value(at_lt, std::string("has a data type that no Python number becomes: ") +
                           name_of(lt.get_data_type()));
  }
  const py::module_ numpy = py::module_::import("numpy");
  py::array value;
  try {
    value = numpy.attr("array")(scalar, py::arg("dtype") = names->numpy);
  } catch (py::error_already_set&) {
    throw_type({function, "scalar"}, std::string("a number that fits ") + names->numpy, scalar);
  }
  if (value.ndim() != 0) throw_type({function, "scalar"}, "one number", scalar);
  auto state = std::make_shared<tensor_state>();
  state->desc = lt;
  state->data = value.mutable_data();
  state->capacity = static_cast<size_t>(value.nbytes());
  state->readonly = true;
  state->owner = keep_alive(value);
  state->handle = call_library(
      function, [&] { return dnnl::graph::tensor::make_scalar_tensor(lt, state->data); });
  return state;
}
#endif

const type_names& exportable(const tensor_state& state, const char* function) {
  const where at{function, "self"};
  if (state.desc.get_layout_type() != layout_type::strided) {
    throw_value(at, "has a layout that only the library knows: " + logical_tensor_text(state.desc) +
                        "; convert it with a Reorder op first");
  }
  const type_names* names = names_of(state.desc.get_data_type());
  if (names == nullptr) {
    throw_value(at, std::string("has data type ") + name_of(state.desc.get_data_type()) +
                        ", which numpy and DLPack cannot describe");
  }
  if (state.data == nullptr && volume(state.desc.get_dims()) != 0) {
    throw_value(at, "has no memory (its address is 0)");
  }
  return *names;
}

using state_ptr = required_ptr<const tensor_state>;

py::object to_numpy(const state_ptr& state) {
  const type_names& names = exportable(*state, "tensor.numpy");
  py::object dtype;
  if (names.ml_dtypes) {
    try {
      dtype = py::module_::import("ml_dtypes").attr(names.numpy);
    } catch (py::error_already_set& e) {
      if (!e.matches(PyExc_ImportError)) throw;
      throw py::import_error(std::string("tensor.numpy: element type ") + names.numpy +
                             " needs the package ml_dtypes");
    }
  } else {
    dtype = py::str(names.numpy);
  }
  const py::dtype descr = py::dtype::from_args(dtype);
  const dims_t dims = state->desc.get_dims(), strides = state->desc.get_strides();
  std::vector<py::ssize_t> shape(dims.begin(), dims.end()), steps;
  for (size_t i = 0; i < dims.size(); ++i) {
    steps.push_back(static_cast<py::ssize_t>(strides[i]) * descr.itemsize());
  }
  py::capsule base(new state_ptr(state), [](void* p) { delete static_cast<state_ptr*>(p); });
  // numpy would allocate for a null pointer, which only a tensor without elements has here.
  static char nothing;
  py::array array(descr, shape, steps, state->data != nullptr ? state->data : &nothing, base);
  if (state->readonly) array.attr("setflags")(py::arg("write") = false);
  return array;
}

// What an exported DLPack tensor points into.
template <typename Managed>
struct exported {
  Managed managed{};
  state_ptr state;
  dims_t shape;
  dims_t strides;
};

template <typename Managed>
py::object to_dlpack(const state_ptr& state, const char* capsule_name) {
  const type_names& names = exportable(*state, "tensor.__dlpack__");
  auto holder = std::make_unique<exported<Managed>>();
  holder->state = state;
  holder->shape = state->desc.get_dims();
  holder->strides = state->desc.get_strides();
  dlpack::DLTensor& dl = holder->managed.dl_tensor;
  dl.data = state->data;
  dl.device = {dlpack::kCPU, 0};
  dl.ndim = static_cast<int32_t>(holder->shape.size());
  dl.dtype = names.dl;
  dl.shape = holder->shape.data();
  dl.strides = holder->strides.data();
  dl.byte_offset = 0;
  holder->managed.manager_ctx = holder.get();
  holder->managed.deleter = [](Managed* m) {
    delete static_cast<exported<Managed>*>(m->manager_ctx);
  };
  if constexpr (std::is_same_v<Managed, dlpack::DLManagedTensorVersioned>) {
    holder->managed.version = {1, 0};
    holder->managed.flags = state->readonly ? dlpack::kReadOnly : 0;
  }
  // Called for a capsule that nobody consumed; a consumer renames it and calls the deleter itself.
  const auto drop = [](PyObject* capsule) {
    constexpr const char* name = std::is_same_v<Managed, dlpack::DLManagedTensorVersioned>
                                     ? "dltensor_versioned"
                                     : "dltensor";
    if (!PyCapsule_IsValid(capsule, name)) return;
    auto* m = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
    m->deleter(m);
  };
  PyObject* capsule = PyCapsule_New(&holder->managed, capsule_name, drop);
  if (capsule == nullptr) throw py::error_already_set();
  holder.release();
  return py::reinterpret_steal<py::object>(capsule);
}

py::object dlpack_method(const state_ptr& state, const py::object& stream,
                         const py::object& max_version, const py::object& dl_device,
                         const py::object& copy) {
  if (!stream.is_none()) {
    throw_value({"tensor.__dlpack__", "stream"}, "must be None for CPU memory");
  }
  if (!dl_device.is_none()) {
    const auto device = py::cast<py::sequence>(dl_device);
    if (py::len(device) != 2 ||
        to_int64(py::object(device[0]), {"tensor.__dlpack__", "dl_device"}) != dlpack::kCPU) {
      PyErr_SetString(PyExc_BufferError, "tensor.__dlpack__: only the CPU device (1, 0) is there");
      throw py::error_already_set();
    }
  }
  if (!copy.is_none() && to_bool(copy, {"tensor.__dlpack__", "copy"})) {
    PyErr_SetString(PyExc_BufferError, "tensor.__dlpack__: this class never copies");
    throw py::error_already_set();
  }
  if (!max_version.is_none()) {
    const auto version = py::cast<py::sequence>(max_version);
    if (py::len(version) > 0 &&
        to_int64(py::object(version[0]), {"tensor.__dlpack__", "max_version"}) >= 1) {
      return to_dlpack<dlpack::DLManagedTensorVersioned>(state, "dltensor_versioned");
    }
  }
  if (state->readonly) {
    // Without a version there is no way to say so, and the consumer would write.
    PyErr_SetString(PyExc_BufferError,
                    "tensor.__dlpack__: read-only memory needs max_version=(1, 0) or later");
    throw py::error_already_set();
  }
  return to_dlpack<dlpack::DLManagedTensor>(state, "dltensor");
}

}  // namespace

void bind_tensor(py::module_& m) {
  auto tensor = py::class_<tensor_object>(
      m, "tensor",
      "Memory together with the logical tensor that describes it.\n\n"
      "    tensor(lt, engine)           memory of its own, zeroed, 64-byte aligned\n"
      "    tensor(lt, engine, handle)   the memory of `handle`, without a copy\n\n"
      "lt: logical_tensor, strided or opaque, all sizes known; engine: engine.\n"
      "handle: a numpy array, or any object with __dlpack__ (torch.Tensor, ...) in CPU memory, "
      "with\n"
      "exactly the data type, shape and strides of `lt` (strides of sizes 1 do not matter; a "
      "0-dim\n"
      "array will do for dims [1]). For an opaque layout or a 4-bit type: any dense memory of at\n"
      "least lt.get_mem_size() bytes. bf16 and f8 arrays are those of ml_dtypes. The object is "
      "kept\n"
      "alive by the tensor. Read-only memory is taken, but refused as an output.\n"
      "Or an int, the address of memory that the caller keeps alive and large enough: that cannot\n"
      "be checked.\n\n"
      "Raises TypeError for a wrong type or element type, ValueError for a wrong shape, strides,\n"
      "size, device or layout; both name the argument.\n\n"
      "Source: oneDNN, Graph API, Tensor.");
  tensor
      .def(py::init([](const py::object& lt, const py::object& engine, const py::object& handle) {
             const auto& l = to_object<logical_tensor>(lt, {"tensor", "lt"}, "a logical_tensor");
             const auto& e = to_object<engine_object>(engine, {"tensor", "engine"}, "an engine");
             return tensor_object{handle.is_none() ? allocate(l, e)
                                                   : from_handle(l, e, handle, "tensor")};
           }),
           py::arg("lt"), py::arg("engine"), py::arg("handle") = py::none())
      .def(
          "get_data_handle",
          [](const tensor_object& self) { return reinterpret_cast<size_t>(self.state->data); },
          "Address of the memory (int).")
      .def(
          "set_data_handle",
          [](tensor_object& self, const py::object& handle) {
            self.state =
                from_handle(self.state->desc, self.state->engine, handle, "tensor.set_data_handle");
          },
          py::arg("handle"),
          "Use other memory from now on: an address, a numpy array or an object with __dlpack__, "
          "as\n"
          "in the constructor. Arrays made from the tensor before keep the old memory.")
      .def(
          "get_engine", [](const tensor_object& self) { return self.state->engine; },
          "The engine of the tensor.")
      .def(
          "get_logical_tensor", [](const tensor_object& self) { return self.state->desc; },
          "The logical tensor that describes the memory.")
      .def(
          "numpy", [](const tensor_object& self) { return to_numpy(self.state); },
          "The memory as a numpy array (with ml_dtypes for bf16 and f8), without a copy; the "
          "array\n"
          "keeps the memory alive. Not in the C++ API.\n\n"
          "Raises ValueError for an opaque layout or a 4-bit type, ImportError without ml_dtypes.")
      .def(
          "__array__",
          [](const tensor_object& self, const py::object& dtype, const py::object& copy) {
            py::object array = to_numpy(self.state);
            py::object converted =
                dtype.is_none() ? array : array.attr("astype")(dtype, py::arg("copy") = false);
            if (!copy.is_none()) {
              if (to_bool(copy, {"tensor.__array__", "copy"})) {
                return converted.is(array) ? py::object(array.attr("copy")()) : converted;
              }
              if (!converted.is(array)) {
                throw_value({"tensor.__array__", "copy"}, "is False, but dtype needs a copy");
              }
            }
            return converted;
          },
          py::arg("dtype") = py::none(), py::arg("copy") = py::none(), "See numpy().")
      .def(
          "__dlpack__",
          [](const tensor_object& self, const py::object& stream, const py::object& max_version,
             const py::object& dl_device, const py::object& copy) {
            return dlpack_method(self.state, stream, max_version, dl_device, copy);
          },
          py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
          py::arg("dl_device") = py::none(), py::arg("copy") = py::none(),
          "A DLPack capsule of the memory, without a copy; it keeps the memory alive.\n\n"
          "Raises ValueError as numpy() does, BufferError for what DLPack cannot say.")
      .def(
          "__dlpack_device__", [](const tensor_object&) { return py::make_tuple(dlpack::kCPU, 0); },
          "(1, 0): CPU memory.")
      .def("__repr__", [](const tensor_object& self) {
        char address[32];
        std::snprintf(address, sizeof address, "%p", self.state->data);
        return "tensor(" + logical_tensor_text(self.state->desc) + ", " + address +
               (self.state->readonly ? ", read-only)" : ")");
      });
#if DNNL_GRAPH_PY_HAS_SCALAR_TENSOR
  tensor.def_static(
      "make_scalar_tensor",
      [](const py::object& lt, const py::object& scalar) {
        const where at{"tensor.make_scalar_tensor", "lt"};
        const auto& l = to_object<logical_tensor>(lt, at, "a logical_tensor");
        return tensor_object{make_scalar(l, scalar)};
      },
      py::arg("lt"), py::arg("scalar"),
      "A tensor of one value, for a logical tensor with property host_scalar and no dimensions.\n\n"
      "scalar: a number; it is converted to the data type of `lt` and copied. The tensor has no\n"
      "engine. Raises TypeError, ValueError, dnnl_graph.error. Source: oneDNN, Graph API, Tensor.");
#endif
}

}  // namespace dnnl_graph_py
