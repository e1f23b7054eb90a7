#include "arguments.h"

#include <cxxabi.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

namespace dnnl_graph_py {

namespace {

std::atomic<int> threads_inside{0};

[[noreturn]] void wait_for_the_end() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace

unlocked::unlocked() : state_(nullptr) {
  ++threads_inside;
  state_ = PyEval_SaveThread();
}

unlocked::~unlocked() noexcept(false) {
  --threads_inside;
  try {
    PyEval_RestoreThread(state_);
  } catch (abi::__forced_unwind&) {
    wait_for_the_end();
  }
}

void unlocked::wait_for_all() {
  for (int i = 0; i < 1000 && threads_inside != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

std::string describe(py::handle value) {
  std::string text;
  try {
    text = py::repr(value).cast<std::string>();
  } catch (const std::exception&) {  // a broken __repr__ must not hide the real error
    text = "<unprintable>";
  }
  constexpr size_t kLongest = 120;
  if (text.size() > kLongest) {
    size_t cut = kLongest;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
    text = text.substr(0, cut) + "...";
  }
  return text + " (" + Py_TYPE(value.ptr())->tp_name + ")";
}

void throw_type(const where& at, const std::string& wanted, py::handle got) {
  throw py::type_error(std::string(at.function) + ": argument '" + at.argument + "' must be " +
                       wanted + ", got " + describe(got));
}

void throw_value(const where& at, const std::string& problem) {
  throw py::value_error(std::string(at.function) + ": argument '" + at.argument + "' " + problem);
}

bool is_integer(py::handle value) {
  return !PyBool_Check(value.ptr()) && PyIndex_Check(value.ptr()) && !is_sequence(value);
}

bool is_sequence(py::handle value) {
  PyObject* p = value.ptr();
  return PySequence_Check(p) && !PyUnicode_Check(p) && !PyBytes_Check(p) && !PyByteArray_Check(p) &&
                 PySequence_Size(p) >= 0
             ? true
             : (PyErr_Clear(), false);
}

namespace {

// The Python int of `value`, or a null object with no error set.
py::object as_index(py::handle value) {
  if (!is_integer(value)) return {};
  PyObject* index = PyNumber_Index(value.ptr());
  if (index == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(index);
}

}  // namespace

int64_t to_int64(py::handle value, const where& at) {
  py::object index = as_index(value);
  if (!index) throw_type(at, "an int", value);
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) throw_value(at, "does not fit a 64-bit signed integer: " + describe(value));
  return result;
}

size_t to_size(py::handle value, const where& at) {
  py::object index = as_index(value);
  if (!index) throw_type(at, "an int", value);
  const size_t result = PyLong_AsSize_t(index.ptr());
  if (result == static_cast<size_t>(-1) && PyErr_Occurred()) {
    PyErr_Clear();
    throw_value(at, "must be between 0 and 2**64 - 1, got " + describe(value));
  }
  return result;
}

std::string to_string(py::handle value, const where& at) {
  if (!PyUnicode_Check(value.ptr())) throw_type(at, "a str", value);
  auto text = value.cast<std::string>();
  // The library takes C strings.
  if (text.find('\0') != std::string::npos) throw_value(at, "must not contain a NUL character");
  return text;
}

bool to_bool(py::handle value, const where& at) {
  if (PyBool_Check(value.ptr())) return value.ptr() == Py_True;
  if (is_integer(value)) {  // oneDNN's own JSON writes 0 and 1
    const int64_t number = to_int64(value, at);
    if (number == 0 || number == 1) return number == 1;
  }
  // numpy.bool is no subclass of bool
  if (std::string(Py_TYPE(value.ptr())->tp_name).rfind("numpy.bool", 0) == 0) {
    return PyObject_IsTrue(value.ptr()) == 1;
  }
  throw_type(at, "a bool", value);
}

float to_float(py::handle value, const where& at) {
  PyObject* p = value.ptr();
  const bool number =
      PyFloat_Check(p) || is_integer(value) ||
      (PyNumber_Check(p) && !PyBool_Check(p) && !PyComplex_Check(p) && !is_sequence(value));
  if (!number) throw_type(at, "a float", value);
  const double result = PyFloat_AsDouble(p);
  if (result == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    throw_type(at, "a float", value);
  }
  if (std::isfinite(result) && std::fabs(result) > std::numeric_limits<float>::max()) {
    throw_value(at, "does not fit a 32-bit float: " + describe(value));
  }
  return static_cast<float>(result);
}

std::vector<int64_t> to_int64_list(py::handle value, const where& at) {
  if (!is_sequence(value)) throw_type(at, "a list of int", value);
  std::vector<int64_t> result;
  for (py::handle item : py::cast<py::sequence>(value)) {
    if (!is_integer(item)) throw_type(at, "a list of only int", item);
    result.push_back(to_int64(item, at));
  }
  return result;
}

std::vector<float> to_float_list(py::handle value, const where& at) {
  if (!is_sequence(value)) throw_type(at, "a list of float", value);
  std::vector<float> result;
  for (py::handle item : py::cast<py::sequence>(value)) result.push_back(to_float(item, at));
  return result;
}

}  // namespace dnnl_graph_py
