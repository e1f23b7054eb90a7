# Provides oneDNN with its Graph API.
#
#   LLGA_FUSER_ONEDNN   empty      find_package(dnnl CONFIG), guided by dnnl_DIR or
#                                  CMAKE_PREFIX_PATH
#                       <prefix>   the same, but only in that prefix
#                       source     build a pinned release, see OneDNNFromSource.cmake
#
# Sets ONEDNN_VERSION and ONEDNN_GRAPH_INCLUDE_DIR (where dnnl_graph.hpp is), defines the target
# onednn::graph, and installs the shared library with its licence files to llga_fuser/lib.

set(LLGA_FUSER_ONEDNN "" CACHE STRING "oneDNN: empty (find it), an install prefix, or `source`")

set(ONEDNN_MINIMUM_VERSION 3.2) # the first release that has the Graph API built in

# What `found` means: a target, the directories that hold oneapi/dnnl/, the licence files.
if(LLGA_FUSER_ONEDNN STREQUAL "source")
  include(OneDNNFromSource)
  set(_onednn_target dnnl)
  set(_onednn_origin "the source build")
else()
  if(LLGA_FUSER_ONEDNN)
    if(NOT IS_DIRECTORY "${LLGA_FUSER_ONEDNN}")
      message(FATAL_ERROR "LLGA_FUSER_ONEDNN=${LLGA_FUSER_ONEDNN} is neither `source` nor a "
        "directory that oneDNN is installed in.")
    endif()
    unset(dnnl_DIR CACHE) # or the find of an earlier run wins
    find_package(dnnl CONFIG QUIET PATHS "${LLGA_FUSER_ONEDNN}" NO_DEFAULT_PATH)
  else()
    find_package(dnnl CONFIG QUIET)
    set(_where "dnnl_DIR or CMAKE_PREFIX_PATH")
  endif()
  if(NOT dnnl_FOUND)
    message(FATAL_ERROR "oneDNN was not found in ${LLGA_FUSER_ONEDNN}${_where}. Install the package "
      "onednn-devel-cpu-gomp with pip, or set LLGA_FUSER_ONEDNN to an install prefix, or "
      "dnnl_DIR to the directory of dnnl-config.cmake, or LLGA_FUSER_ONEDNN=source to build it.")
  endif()
  set(_onednn_target DNNL::dnnl)
  set(_onednn_origin "${dnnl_DIR}")
  get_target_property(ONEDNN_INCLUDE_DIRS DNNL::dnnl INTERFACE_INCLUDE_DIRECTORIES)
  # <prefix>/lib/cmake/dnnl; the wheels and `make install` name the folder in share/doc differently.
  get_filename_component(_onednn_prefix "${dnnl_DIR}/../../.." ABSOLUTE)
  file(GLOB ONEDNN_LICENSE_FILES
    "${_onednn_prefix}/share/doc/*nn*/LICENSE"
    "${_onednn_prefix}/share/doc/*nn*/THIRD-PARTY-PROGRAMS")
endif()

# --- what was found must be usable -----------------------------------------------------------
function(_onednn_read_header name out)
  find_file(_header oneapi/dnnl/${name} PATHS ${ONEDNN_INCLUDE_DIRS} NO_DEFAULT_PATH NO_CACHE)
  if(NOT _header)
    message(FATAL_ERROR "oneDNN from ${_onednn_origin} has no header oneapi/dnnl/${name}; needed is "
      "oneDNN >= ${ONEDNN_MINIMUM_VERSION} with the Graph API.")
  endif()
  file(READ "${_header}" _text)
  set(${out} "${_text}" PARENT_SCOPE)
endfunction()

# The headers decide, not dnnl_VERSION: they are what gets compiled.
_onednn_read_header(dnnl_version.h _text)
set(ONEDNN_VERSION)
foreach(_part IN ITEMS MAJOR MINOR PATCH)
  string(REGEX MATCH "#define DNNL_VERSION_${_part} ([0-9]+)" _match "${_text}")
  list(APPEND ONEDNN_VERSION "${CMAKE_MATCH_1}")
endforeach()
list(JOIN ONEDNN_VERSION "." ONEDNN_VERSION)
if(ONEDNN_VERSION VERSION_LESS ONEDNN_MINIMUM_VERSION)
  message(FATAL_ERROR "oneDNN from ${_onednn_origin} is ${ONEDNN_VERSION}; needed is "
    ">= ${ONEDNN_MINIMUM_VERSION}.")
endif()

_onednn_read_header(dnnl_config.h _text)
if(NOT _text MATCHES "#define ONEDNN_BUILD_GRAPH")
  message(FATAL_ERROR "oneDNN ${ONEDNN_VERSION} from ${_onednn_origin} was built without the Graph "
    "API (ONEDNN_BUILD_GRAPH=OFF).")
endif()
if(NOT _text MATCHES "#define DNNL_CPU_THREADING_RUNTIME DNNL_RUNTIME_OMP")
  message(FATAL_ERROR "oneDNN ${ONEDNN_VERSION} from ${_onednn_origin} does not run on OpenMP "
    "threads; only DNNL_CPU_RUNTIME=OMP shares torch's thread pool.")
endif()
_onednn_read_header(dnnl_graph.hpp _text)
unset(_text)
find_path(ONEDNN_GRAPH_INCLUDE_DIR oneapi/dnnl/dnnl_graph.hpp
  PATHS ${ONEDNN_INCLUDE_DIRS} NO_DEFAULT_PATH NO_CACHE)

get_target_property(_onednn_type ${_onednn_target} TYPE)
if(NOT _onednn_type STREQUAL "SHARED_LIBRARY")
  message(FATAL_ERROR "oneDNN ${ONEDNN_VERSION} from ${_onednn_origin} is a static library; both "
    "extension modules must share one libdnnl, so a shared one is needed.")
endif()

# torch brings GNU OpenMP; a second OpenMP runtime in the process doubles the threads.
get_target_property(_onednn_imported ${_onednn_target} IMPORTED)
if(_onednn_imported AND CMAKE_READELF)
  get_target_property(_onednn_file ${_onednn_target} LOCATION)
  execute_process(COMMAND "${CMAKE_READELF}" -d "${_onednn_file}" OUTPUT_VARIABLE _dynamic)
  if(_dynamic MATCHES "\\[(lib(iomp5|omp)\\.so[^]]*)\\]")
    message(FATAL_ERROR "oneDNN ${ONEDNN_VERSION} from ${_onednn_origin} needs ${CMAKE_MATCH_1}; "
      "torch runs on GNU OpenMP, so use a oneDNN built for libgomp.")
  endif()
endif()

# --- the target --------------------------------------------------------------------------------
# Not the target's own include directories, but one that holds oneapi/ and nothing else: they may
# be a whole /usr/include, which compilers put last however early it is asked for, behind torch's
# copy of the oneDNN headers.
set(_onednn_headers "${CMAKE_CURRENT_BINARY_DIR}/onednn-include")
file(REMOVE_RECURSE "${_onednn_headers}")
set(_directories)
foreach(_include IN LISTS ONEDNN_INCLUDE_DIRS)
  string(MD5 _id "${_include}")
  file(MAKE_DIRECTORY "${_onednn_headers}/${_id}")
  file(CREATE_LINK "${_include}/oneapi" "${_onednn_headers}/${_id}/oneapi" SYMBOLIC)
  list(APPEND _directories "${_onednn_headers}/${_id}")
endforeach()

add_library(onednn::graph INTERFACE IMPORTED)
target_include_directories(onednn::graph SYSTEM INTERFACE ${_directories})
target_link_libraries(onednn::graph INTERFACE "$<TARGET_FILE:${_onednn_target}>")
if(NOT _onednn_imported)
  add_dependencies(onednn::graph ${_onednn_target})
endif()

# The soname is what the loader asks for, so the file is installed under it, without symlinks:
# a wheel has none.
install(FILES "$<TARGET_FILE:${_onednn_target}>" DESTINATION llga_fuser/lib
  PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE
  RENAME "$<TARGET_SONAME_FILE_NAME:${_onednn_target}>")
if(NOT ONEDNN_LICENSE_FILES)
  message(WARNING "no licence files found beside oneDNN from ${_onednn_origin}; add them to "
    "llga_fuser/lib before you redistribute the package")
endif()
install(FILES ${ONEDNN_LICENSE_FILES} DESTINATION llga_fuser/lib)

message(STATUS "oneDNN ${ONEDNN_VERSION} from ${_onednn_origin}")
