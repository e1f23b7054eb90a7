# Finds the libraries and headers of an installed torch wheel.
#
# torch's own TorchConfig.cmake is not used on purpose: with a CUDA build of torch it insists on a
# CUDA toolkit, and it looks for MKL and Kineto on the machine. This project needs neither.
#
#   TorchJit_ROOT      directory of the Python package torch; asked from Python if unset
#   TorchJit_VERSION   version of the headers, e.g. 2.13.0
#   TorchJit::torch    imported target

if(NOT TorchJit_ROOT)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE _torch_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(TorchJit_ROOT "${_torch_package}")
endif()

find_path(TorchJit_INCLUDE_DIR torch/csrc/jit/ir/ir.h
  PATHS "${TorchJit_ROOT}/include" NO_DEFAULT_PATH)

if(TorchJit_INCLUDE_DIR)
  file(STRINGS "${TorchJit_INCLUDE_DIR}/torch/headeronly/version.h" _torch_version_lines
    REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+$")
  list(TRANSFORM _torch_version_lines REPLACE "^.* " "")
  list(JOIN _torch_version_lines "." TorchJit_VERSION)
endif()

set(_torch_libraries)
foreach(_lib IN ITEMS c10 torch_cpu torch torch_python)
  find_library(TorchJit_${_lib}_LIBRARY ${_lib} PATHS "${TorchJit_ROOT}/lib" NO_DEFAULT_PATH)
  list(APPEND _torch_libraries TorchJit_${_lib}_LIBRARY)
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchJit
  REQUIRED_VARS TorchJit_INCLUDE_DIR ${_torch_libraries}
  VERSION_VAR TorchJit_VERSION)

if(TorchJit_FOUND AND NOT TARGET TorchJit::torch)
  add_library(TorchJit::torch INTERFACE IMPORTED)
  target_include_directories(TorchJit::torch SYSTEM INTERFACE
    "${TorchJit_INCLUDE_DIR}" "${TorchJit_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(TorchJit::torch INTERFACE
    "${TorchJit_torch_cpu_LIBRARY}" "${TorchJit_c10_LIBRARY}"
    "${TorchJit_torch_LIBRARY}" "${TorchJit_torch_python_LIBRARY}")
endif()
mark_as_advanced(TorchJit_INCLUDE_DIR ${_torch_libraries})
