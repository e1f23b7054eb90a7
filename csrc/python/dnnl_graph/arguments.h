// Reading of Python arguments. Every function here throws a Python exception that names the called
// function, the argument, what it got and what it wants. All need the GIL.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "objects.h"

namespace dnnl_graph_py {

// Where an argument stands: "logical_tensor" and "dims".
struct where {
  const char* function;
  const char* argument;
};

// "'abc' (str)", shortened.
std::string describe(py::handle value);

[[noreturn]] void throw_type(const where& at, const std::string& wanted, py::handle got);
[[noreturn]] void throw_value(const where& at, const std::string& problem);

// Any Python or numpy integer, but not bool.
bool is_integer(py::handle value);
// A list, tuple or other sequence; not str, bytes or a mapping.
bool is_sequence(py::handle value);

int64_t to_int64(py::handle value, const where& at);
size_t to_size(py::handle value, const where& at);
std::string to_string(py::handle value, const where& at);
bool to_bool(py::handle value, const where& at);
float to_float(py::handle value, const where& at);
std::vector<int64_t> to_int64_list(py::handle value, const where& at);
std::vector<float> to_float_list(py::handle value, const where& at);

// Enums come by value: pybind11 may convert them into a temporary.
template <typename T>
std::conditional_t<std::is_enum_v<T>, T, T&> to_object(py::handle value, const where& at,
                                                       const char* wanted) {
  if (!py::isinstance<T>(value)) throw_type(at, wanted, value);
  return value.cast<std::conditional_t<std::is_enum_v<T>, T, T&>>();
}

template <typename T>
std::vector<T> to_list(py::handle value, const where& at, const char* wanted) {
  if (!is_sequence(value)) throw_type(at, std::string("a list of ") + wanted, value);
  std::vector<T> result;
  for (py::handle item : py::cast<py::sequence>(value)) {
    if (!py::isinstance<T>(item)) throw_type(at, std::string("a list of only ") + wanted, item);
    result.push_back(item.cast<T&>());
  }
  return result;
}

class library_error : public std::exception {
 public:
  library_error(dnnl_status_t status, std::string message)
      : status_(status), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  dnnl_status_t status() const noexcept { return status_; }

 private:
  dnnl_status_t status_;
  std::string message_;
};

// Runs a library call; an error of the library becomes dnnl_graph.error with `context` in front. So
// does a C++ exception that gets out of the library: 3.7 lets a std::future_error out of the
// second compilation of what it could not compile the first time.
template <typename F>
auto call_library(const std::string& context, F&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const dnnl::error& e) {
    throw library_error(e.status, context + ": " + e.what());
  } catch (const library_error&) {
    throw;
  } catch (const py::builtin_exception&) {
    throw;
  } catch (const py::error_already_set&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw library_error(dnnl_out_of_memory, context + ": out of memory");
  } catch (const std::exception& e) {
    throw library_error(dnnl_runtime_error, context + ": " + e.what());
  }
}

// Lets go of the GIL for the time of a library call.
//
// Not py::gil_scoped_release: a thread that outlives the interpreter gets no GIL back, and Python
// before 3.14 answers its wish by unwinding the thread, through destructors of ours that need the
// GIL: the process would abort. Such a thread waits here until the process is gone.
class unlocked {
 public:
  unlocked();
  ~unlocked() noexcept(false);
  unlocked(const unlocked&) = delete;
  unlocked& operator=(const unlocked&) = delete;

  // At exit: waits (for some seconds at most) until no thread is inside the library any more, whose
  // static objects are about to be destroyed.
  static void wait_for_all();

 private:
  PyThreadState* state_;
};

template <typename F>
auto without_gil(F&& function) -> decltype(function()) {
  const unlocked here;
  return function();
}

const char* name_of(dnnl::engine::kind value);
const char* name_of(dnnl::fpmath_mode value);
const char* name_of(dnnl_status_t value);
const char* name_of(data_type value);
const char* name_of(layout_type value);
const char* name_of(property_type value);
const char* name_of(op_kind value);
const char* name_of(op_attr value);

// "[2, 3, ?]", with ? for an unknown size.
std::string dims_text(const dims_t& dims);
std::string logical_tensor_text(const logical_tensor& lt);
std::string op_text(const op_record& op);

// Whether this module has compiled a partition in this process. Guarded by the GIL.
bool& compiled_before();

// A new op of the library as the record describes it (op.cpp).
op_object make_op(const op_record& record);

// Logical tensors (logical_tensor.cpp) ------------------------------------------------------------

int ndims_of(const logical_tensor& lt);  // DNNL_GRAPH_UNKNOWN_NDIMS if unknown
// Whether the product of the known sizes leaves room for an address: the library computes with them
// unchecked.
bool volume_fits(const dims_t& dims);
bool has_unknown_dim(const logical_tensor& lt);  // or unknown rank
// Opaque layouts are numbers that only the library can have given out, and it does not check them:
// asking it about a number it never gave out reads outside its table. These two keep the list.
void remember_layout(const logical_tensor& lt);
void check_layout_known(const logical_tensor& lt, const where& at);
// Bytes that memory for this logical tensor must have. The layout must be strided or opaque, and
// all sizes known.
size_t required_bytes(const logical_tensor& lt, const where& at);
// With the strides that the sizes of 1 have in a row-major or channels-last layout, if it is one of
// these. What they are given as means nothing to frameworks, but a lot to the library: 3.7 takes an
// image for channels last and writes behind it.
logical_tensor with_usual_strides(const logical_tensor& lt);
// Without gaps, in any order of the dimensions, as far as is known.
bool packed(const logical_tensor& lt);
// Row-major without gaps, as far as is known. Layouts that the library is to choose count as dense.
bool dense(const logical_tensor& lt);
// The layout is strided, all is known, and two elements are in the same place. The library takes
// such an input for a dense one.
bool overlaps(const logical_tensor& lt);
// Same memory layout, data type and sizes; id and property do not matter.
bool same_layout(const logical_tensor& a, const logical_tensor& b);

}  // namespace dnnl_graph_py
