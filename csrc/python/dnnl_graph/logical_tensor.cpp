// logical_tensor: its constructors, and what other files need to know about one.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <unordered_set>

#include "arguments.h"

namespace dnnl_graph_py {

namespace {

constexpr const char* kClass = "logical_tensor";

// Ids of opaque layouts that the library gave out in this process, kind of data and sizes do not
// matter. Guarded by the GIL; leaked, as it has no reason to end before the process does.
std::unordered_set<size_t>& known_layouts() {
  static auto* const ids = new std::unordered_set<size_t>();
  return *ids;
}

// Bits of one element, 0 if unknown here (a data type of a newer oneDNN).
size_t element_bits(data_type t) {
  static constexpr std::array<std::pair<const char*, size_t>, 12> kBits = {{{"f32", 32},
                                                                            {"f16", 16},
                                                                            {"bf16", 16},
                                                                            {"s32", 32},
                                                                            {"s8", 8},
                                                                            {"u8", 8},
                                                                            {"boolean", 8},
                                                                            {"s64", 64},
                                                                            {"f8_e5m2", 8},
                                                                            {"f8_e4m3", 8},
                                                                            {"s4", 4},
                                                                            {"u4", 4}}};
  for (const auto& [name, bits] : kBits) {
    if (std::strcmp(name, name_of(t)) == 0) return bits;
  }
  return 0;
}

bool all_known(const logical_tensor& lt) {
  if (lt.get_layout_type() != layout_type::strided || has_unknown_dim(lt)) return false;
  const dims_t strides = lt.get_strides();
  return std::find(strides.begin(), strides.end(), DNNL_GRAPH_UNKNOWN_DIM) == strides.end();
}

// Strides without gaps; `order` has the dimensions from the outermost to the innermost.
dims_t dense_strides(const dims_t& dims, const std::vector<size_t>& order) {
  dims_t strides(dims.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(dims[order[i]], 1);
  }
  return strides;
}

// Sizes of 1 aside, whose strides are never used.
bool same_strides(const dims_t& dims, const dims_t& a, const dims_t& b) {
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

std::vector<size_t> row_major(size_t ndims) {
  std::vector<size_t> order(ndims);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

// Number of elements from the first to behind the last one; false if that overflows.
bool extent(const dims_t& dims, const dims_t& strides, size_t* result) {
  size_t last = 0;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == 0) {
      *result = 0;
      return true;
    }
  }
  for (size_t i = 0; i < dims.size(); ++i) {
    size_t step = 0;
    if (__builtin_mul_overflow(static_cast<size_t>(dims[i] - 1), static_cast<size_t>(strides[i]),
                               &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return false;
    }
  }
  *result = last + 1;
  return last < (size_t{1} << 58U);  // room for the element size, and for the library's own sums
}

void check_dims(const dims_t& dims, const where& at) {
  if (dims.size() > DNNL_MAX_NDIMS) {
    throw_value(at, "has " + std::to_string(dims.size()) + " entries, the library takes at most " +
                        std::to_string(DNNL_MAX_NDIMS));
  }
  for (const int64_t d : dims) {
    if (d < 0 && d != DNNL_GRAPH_UNKNOWN_DIM) {
      throw_value(at, "must hold values >= 0 or DNNL_GRAPH_UNKNOWN_DIM, got " + std::to_string(d));
    }
  }
}

void check_volume(const dims_t& dims, const where& at) {
  if (!volume_fits(dims)) {
    throw_value(at, "describes more elements than fit in memory: " + dims_text(dims));
  }
}

layout_type to_layout(py::handle value, const where& at) {
  const auto result = to_object<layout_type>(
      value, at, "a logical_tensor.layout_type, such as logical_tensor.strided");
  if (result == layout_type::opaque) {
    throw_value(at, "cannot be opaque without a layout id: pass the id of get_layout_id() instead");
  }
  return result;
}

// The constructors, in the order of dnnl_graph.hpp, told apart by the types of the arguments.
logical_tensor construct(const py::args& args, const py::kwargs& kwargs) {
  if (args.size() == 1 && kwargs.empty() && py::isinstance<logical_tensor>(args[0])) {
    return args[0].cast<const logical_tensor&>();
  }
  // Slots: tid, dtype, sizes (ndims | dims), layout (ltype | strides | lid), ptype
  std::array<py::object, 5> slots;
  std::array<const char*, 5> names = {"tid", "dtype", "ndims or dims", "ltype, strides or lid",
                                      "ptype"};
  const auto put = [&](size_t slot, const char* name, py::handle value) {
    if (slots[slot]) {
      throw py::type_error(std::string(kClass) + ": argument '" + name +
                           "' given twice, or with "
                           "another one of " +
                           names[slot]);
    }
    slots[slot] = py::reinterpret_borrow<py::object>(value);
    names[slot] = name;
  };
  if (args.size() > slots.size()) {
    throw py::type_error(std::string(kClass) + ": takes at most 5 arguments, got " +
                         std::to_string(args.size()));
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const py::handle value = args[i];
    if (i == 2) {
      // The second constructor has its layout in third place.
      if (py::isinstance<layout_type>(value)) {
        put(3, "ltype", value);
      } else if (is_integer(value)) {
        put(2, "ndims", value);
      } else if (is_sequence(value)) {
        put(2, "dims", value);
      } else {
        throw_type({kClass, "ndims, dims or ltype"},
                   "an int, a list of int, or a logical_tensor.layout_type", value);
      }
    } else if (i == 3) {
      if (py::isinstance<layout_type>(value)) {
        put(3, "ltype", value);
      } else if (py::isinstance<property_type>(value)) {
        throw_type({kClass, "ltype, strides or lid"},
                   "a logical_tensor.layout_type, a list of int, or an int", value);
      } else if (is_integer(value)) {
        put(3, "lid", value);
      } else if (is_sequence(value)) {
        put(3, "strides", value);
      } else {
        throw_type({kClass, "ltype, strides or lid"},
                   "a logical_tensor.layout_type, a list of int, or an int", value);
      }
    } else {
      put(i, names[i], value);
    }
  }
  for (const auto& [key, value] : kwargs) {
    const auto name = key.cast<std::string>();
    if (name == "tid")
      put(0, "tid", value);
    else if (name == "dtype")
      put(1, "dtype", value);
    else if (name == "ndims")
      put(2, "ndims", value);
    else if (name == "dims")
      put(2, "dims", value);
    else if (name == "ltype")
      put(3, "ltype", value);
    else if (name == "strides")
      put(3, "strides", value);
    else if (name == "lid")
      put(3, "lid", value);
    else if (name == "ptype")
      put(4, "ptype", value);
    else
      throw py::type_error(std::string(kClass) + ": unknown argument '" + name +
                           "'; it takes tid, dtype, ndims or dims, ltype, strides or lid, ptype");
  }
  if (!slots[0] || !slots[1]) {
    throw py::type_error(std::string(kClass) + ": argument '" + (slots[0] ? "dtype" : "tid") +
                         "' is missing");
  }
  const size_t tid = to_size(slots[0], {kClass, "tid"});
  const auto dtype = to_object<data_type>(slots[1], {kClass, "dtype"},
                                          "a logical_tensor.data_type, such as logical_tensor.f32");
  const auto ptype = slots[4] ? to_object<property_type>(slots[4], {kClass, "ptype"},
                                                         "a logical_tensor.property_type, such as "
                                                         "logical_tensor.constant")
                              : property_type::undef;
  const std::string layout_argument = names[3];

  if (!slots[2]) {
    if (slots[3] && layout_argument != "ltype") {
      throw py::type_error(std::string(kClass) + ": argument '" + layout_argument +
                           "' needs argument 'dims'");
    }
    if (slots[4]) {
      throw py::type_error(std::string(kClass) +
                           ": argument 'ptype' needs argument 'ndims' or 'dims'");
    }
    const auto ltype = slots[3] ? to_layout(slots[3], {kClass, "ltype"}) : layout_type::undef;
    return logical_tensor(tid, dtype, ltype);
  }
  if (!slots[3]) {
    throw py::type_error(std::string(kClass) + ": argument 'ltype', 'strides' or 'lid' is missing");
  }
  if (std::string(names[2]) == "ndims") {
    const where at{kClass, "ndims"};
    const int64_t ndims = to_int64(slots[2], at);
    if (ndims < DNNL_GRAPH_UNKNOWN_NDIMS || ndims > DNNL_MAX_NDIMS) {
      throw_value(at, "must be between -1 (unknown) and " + std::to_string(DNNL_MAX_NDIMS) +
                          ", got " + std::to_string(ndims));
    }
    if (layout_argument != "ltype") {
      throw py::type_error(std::string(kClass) + ": argument '" + layout_argument +
                           "' needs argument 'dims', not 'ndims'");
    }
    return logical_tensor(tid, dtype, static_cast<int32_t>(ndims),
                          to_layout(slots[3], {kClass, "ltype"}), ptype);
  }
  const where at_dims{kClass, "dims"};
  const dims_t dims = to_int64_list(slots[2], at_dims);
  check_dims(dims, at_dims);
  check_volume(dims, at_dims);
  if (layout_argument == "ltype") {
    return logical_tensor(tid, dtype, dims, to_layout(slots[3], {kClass, "ltype"}), ptype);
  }
  if (layout_argument == "lid") {
    return logical_tensor(tid, dtype, dims, to_size(slots[3], {kClass, "lid"}), ptype);
  }
  const where at_strides{kClass, "strides"};
  const dims_t strides = to_int64_list(slots[3], at_strides);
  check_dims(strides, at_strides);
  if (strides.size() != dims.size()) {
    throw_value(at_strides,
                "must be as long as dims " + dims_text(dims) + ", got " + dims_text(strides));
  }
  const logical_tensor result(tid, dtype, dims, strides, ptype);
  size_t elements = 0;
  const auto unknown = [](int64_t v) { return v == DNNL_GRAPH_UNKNOWN_DIM; };
  if (std::none_of(dims.begin(), dims.end(), unknown) &&
      std::none_of(strides.begin(), strides.end(), unknown) && !extent(dims, strides, &elements)) {
    throw_value(at_strides, "reach over more memory than there can be: " + dims_text(strides));
  }
  return result;
}

}  // namespace

int ndims_of(const logical_tensor& lt) {
  // The class has no getter for ndims; get_dims throws for an unknown number.
  try {
    return static_cast<int>(lt.get_dims().size());
  } catch (const dnnl::error&) {
    return DNNL_GRAPH_UNKNOWN_NDIMS;
  }
}

std::string dims_text(const dims_t& dims) {
  std::string text = "[";
  for (const int64_t d : dims) {
    if (text.size() > 1) text += ", ";
    text += d == DNNL_GRAPH_UNKNOWN_DIM ? "?" : std::to_string(d);
  }
  return text + "]";
}

std::string logical_tensor_text(const logical_tensor& lt) {
  std::string text =
      "logical_tensor(" + std::to_string(lt.get_id()) + ", " + name_of(lt.get_data_type());
  const bool rank_known = ndims_of(lt) >= 0;
  text += rank_known ? ", " + dims_text(lt.get_dims()) : std::string(", dims=?");
  text += std::string(", ") + name_of(lt.get_layout_type());
  if (lt.get_layout_type() == layout_type::strided && rank_known) {
    text += " " + dims_text(lt.get_strides());
  } else if (lt.get_layout_type() == layout_type::opaque) {
    text += " " + std::to_string(lt.get_layout_id());
  }
  return text + ", " + name_of(lt.get_property_type()) + ")";
}

bool volume_fits(const dims_t& dims) {
  size_t volume = 1;
  for (const int64_t d : dims) {
    if (d == DNNL_GRAPH_UNKNOWN_DIM || d == 0) continue;
    if (__builtin_mul_overflow(volume, static_cast<size_t>(d), &volume) ||
        volume >= (size_t{1} << 58U)) {
      return false;
    }
  }
  return true;
}

bool has_unknown_dim(const logical_tensor& lt) {
  if (ndims_of(lt) < 0) return true;
  const dims_t dims = lt.get_dims();
  return std::find(dims.begin(), dims.end(), DNNL_GRAPH_UNKNOWN_DIM) != dims.end();
}

void remember_layout(const logical_tensor& lt) {
  if (lt.get_layout_type() == layout_type::opaque) known_layouts().insert(lt.get_layout_id());
}

void check_layout_known(const logical_tensor& lt, const where& at) {
  if (lt.get_layout_type() != layout_type::opaque) return;
  if (known_layouts().count(lt.get_layout_id()) == 0) {
    throw_value(at, "has layout id " + std::to_string(lt.get_layout_id()) +
                        ", which no compiled partition of this process gave out: " +
                        logical_tensor_text(lt));
  }
}

size_t required_bytes(const logical_tensor& lt, const where& at) {
  if (has_unknown_dim(lt)) throw_value(at, "has unknown sizes: " + logical_tensor_text(lt));
  check_layout_known(lt, at);
  if (lt.get_layout_type() == layout_type::strided) {
    const dims_t strides = lt.get_strides();
    if (std::find(strides.begin(), strides.end(), DNNL_GRAPH_UNKNOWN_DIM) != strides.end()) {
      throw_value(at, "has unknown strides: " + logical_tensor_text(lt));
    }
    const size_t bits = element_bits(lt.get_data_type());
    size_t elements = 0;
    if (bits != 0) {
      if (!extent(lt.get_dims(), strides, &elements)) {
        throw_value(at, "reaches over more memory than there can be: " + logical_tensor_text(lt));
      }
      return (elements * bits + 7) / 8;
    }
  } else if (lt.get_layout_type() != layout_type::opaque) {
    throw_value(at, "must have layout strided or opaque: " + logical_tensor_text(lt));
  }
  return call_library(at.function, [&] { return lt.get_mem_size(); });
}

logical_tensor with_usual_strides(const logical_tensor& lt) {
  if (!all_known(lt)) return lt;
  const dims_t dims = lt.get_dims(), strides = lt.get_strides();
  std::vector<size_t> order = row_major(dims.size());
  const dims_t rows = dense_strides(dims, order);
  if (order.size() > 2) std::rotate(order.begin() + 1, order.begin() + 2, order.end());
  for (const dims_t& usual : {rows, dense_strides(dims, order)}) {
    if (same_strides(dims, strides, usual)) {
      return {lt.get_id(), lt.get_data_type(), dims, usual, lt.get_property_type()};
    }
  }
  return lt;
}

bool packed(const logical_tensor& lt) {
  if (!all_known(lt)) return true;
  const dims_t dims = lt.get_dims();
  size_t reached = 0, volume = 1;
  for (const int64_t d : dims) volume *= static_cast<size_t>(d);
  return extent(dims, lt.get_strides(), &reached) && reached == volume;
}

bool dense(const logical_tensor& lt) {
  if (!all_known(lt)) return true;
  const dims_t dims = lt.get_dims();
  return same_strides(dims, lt.get_strides(), dense_strides(dims, row_major(dims.size())));
}

bool overlaps(const logical_tensor& lt) {
  if (!all_known(lt)) return false;
  const dims_t dims = lt.get_dims(), strides = lt.get_strides();
  std::vector<std::pair<int64_t, int64_t>> order;  // stride, size
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == 0) return false;
    if (dims[i] != 1) order.emplace_back(strides[i], dims[i]);
  }
  std::sort(order.begin(), order.end());
  int64_t end = 1;  // behind the last element of the dimensions so far
  for (const auto& [stride, size] : order) {
    if (stride < end) return true;
    end += (size - 1) * stride;  // fits: the constructor has summed the same up
  }
  return false;
}

bool same_layout(const logical_tensor& a, const logical_tensor& b) {
  if (a.get_data_type() != b.get_data_type() || ndims_of(a) != ndims_of(b) || ndims_of(a) < 0 ||
      a.get_dims() != b.get_dims() || a.get_layout_type() != b.get_layout_type()) {
    return false;
  }
  switch (a.get_layout_type()) {
    case layout_type::strided:
      return same_strides(a.get_dims(), a.get_strides(), b.get_strides());
    case layout_type::opaque:
      return a.get_layout_id() == b.get_layout_id();
    default:
      return true;
  }
}

void bind_logical_tensor(py::module_& m) {
  auto lt = py::class_<logical_tensor>(m.attr("logical_tensor"));
  lt.def(py::init(&construct))
      .def("get_id", &logical_tensor::get_id, "Id (int).")
      .def("get_data_type", &logical_tensor::get_data_type,
           "Type of the elements (logical_tensor.data_type).")
      .def("get_layout_type", &logical_tensor::get_layout_type,
           "Layout type (logical_tensor.layout_type).")
      .def("get_property_type", &logical_tensor::get_property_type,
           "Property (logical_tensor.property_type).")
      .def(
          "get_layout_id",
          [](const logical_tensor& self) {
            return call_library("logical_tensor.get_layout_id",
                                [&] { return self.get_layout_id(); });
          },
          "Layout id (int). Raises dnnl_graph.error unless the layout is opaque.")
      .def(
          "get_dims",
          [](const logical_tensor& self) {
            return call_library("logical_tensor.get_dims",
                                [&] { return py::cast(self.get_dims()); });
          },
          "Sizes in elements (list of int), DNNL_GRAPH_UNKNOWN_DIM for unknown ones.\n\n"
          "Raises dnnl_graph.error if the number of dimensions is unknown.")
      .def(
          "get_strides",
          [](const logical_tensor& self) {
            return call_library("logical_tensor.get_strides",
                                [&] { return py::cast(self.get_strides()); });
          },
          "Strides in elements (list of int).\n\n"
          "Raises dnnl_graph.error unless the layout is strided with a known number of dimensions.")
      .def(
          "get_mem_size",
          [](const logical_tensor& self) {
            const where at{"logical_tensor.get_mem_size", "self"};
            if (self.get_layout_type() == layout_type::strided ||
                self.get_layout_type() == layout_type::opaque) {
              // The library would multiply the marker of an unknown size, and 3.2 says that a
              // tensor without elements needs memory.
              if (required_bytes(self, at) == 0) return size_t{0};
            }
            return call_library(at.function, [&] { return self.get_mem_size(); });
          },
          "Bytes of memory that the tensor needs (int); 2**64 - 1 if the layout is not decided.\n\n"
          "Raises ValueError for unknown sizes.")
      .def(
          "is_equal",
          [](const logical_tensor& self, const py::object& other) {
            const where at{"logical_tensor.is_equal", "lt"};
            const auto& o = to_object<logical_tensor>(other, at, "a logical_tensor");
            if (self.get_layout_type() != o.get_layout_type()) {
              check_layout_known(self, {"logical_tensor.is_equal", "self"});
              check_layout_known(o, at);
              // To compare an opaque with a strided layout the library needs all sizes.
              if (has_unknown_dim(self) || has_unknown_dim(o)) return false;
            }
            return call_library(at.function, [&] { return self.is_equal(o); });
          },
          py::arg("lt"),
          "Whether all fields are equal, or all but the layout type and the memory layout behind\n"
          "both is the same (an opaque layout that is plain after all). Raises TypeError.")
      .def("__copy__", [](const logical_tensor& self) { return self; })
      .def(
          "__deepcopy__", [](const logical_tensor& self, const py::object&) { return self; },
          py::arg("memo"))
      .def("__repr__", &logical_tensor_text);
}

}  // namespace dnnl_graph_py
