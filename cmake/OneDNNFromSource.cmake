# Builds the pinned oneDNN release below: one to two hours of CPU time.
#
#   LLGA_FUSER_ONEDNN_SOURCE          a local directory or archive to build instead of downloading
#   FETCHCONTENT_SOURCE_DIR_ONEDNN    the same by CMake's own means, a directory
#
# Sets ONEDNN_INCLUDE_DIRS and ONEDNN_LICENSE_FILES, defines the target dnnl.

set(_tag v3.7.2)
# SHA-256 over the sources that end up in the library, see _onednn_content_hash. A tag can be moved
# and an archive repacked; this says whether it is the code that was tested.
set(_content_hash 168b6ecbdc236ff3bd3568487b2826561afa23d4a359d527697af3b12bb57f11)

if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR "oneDNN has to be built with g++, whose OpenMP runtime is the one torch uses.")
endif()

set(LLGA_FUSER_ONEDNN_SOURCE "" CACHE PATH "Local oneDNN source, a directory or an archive")

include(FetchContent)
if(IS_DIRECTORY "${LLGA_FUSER_ONEDNN_SOURCE}")
  set(FETCHCONTENT_SOURCE_DIR_ONEDNN "${LLGA_FUSER_ONEDNN_SOURCE}")
elseif(LLGA_FUSER_ONEDNN_SOURCE)
  if(NOT EXISTS "${LLGA_FUSER_ONEDNN_SOURCE}")
    message(FATAL_ERROR "LLGA_FUSER_ONEDNN_SOURCE=${LLGA_FUSER_ONEDNN_SOURCE} does not exist.")
  endif()
  set(_where URL "${LLGA_FUSER_ONEDNN_SOURCE}" DOWNLOAD_EXTRACT_TIMESTAMP ON)
endif()
if(NOT _where)
  set(_where
    GIT_REPOSITORY https://github.com/uxlfoundation/oneDNN.git
    GIT_TAG ${_tag}
    GIT_SHALLOW ON)
endif()

function(_onednn_content_hash directory out)
  file(GLOB_RECURSE _files LIST_DIRECTORIES OFF RELATIVE "${directory}"
    "${directory}/src/*" "${directory}/include/*" "${directory}/cmake/*.cmake")
  list(SORT _files)
  set(_manifest)
  foreach(_file IN LISTS _files ITEMS CMakeLists.txt)
    file(SHA256 "${directory}/${_file}" _hash)
    string(APPEND _manifest "${_hash}  ${_file}\n")
  endforeach()
  string(SHA256 _hash "${_manifest}")
  set(${out} ${_hash} PARENT_SCOPE)
endfunction()

block(PROPAGATE onednn_SOURCE_DIR onednn_BINARY_DIR)
  # oneDNN's own choices for itself, not those this project makes for its few files.
  set(CMAKE_CXX_STANDARD 11)
  set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
  unset(CMAKE_CXX_VISIBILITY_PRESET)
  unset(CMAKE_VISIBILITY_INLINES_HIDDEN)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW) # let the plain variables below set oneDNN's options
  set(CMAKE_POLICY_DEFAULT_CMP0126 NEW)
  set(DNNL_CPU_RUNTIME OMP)
  set(DNNL_GPU_RUNTIME NONE)
  set(DNNL_LIBRARY_TYPE SHARED)
  set(DNNL_ENABLE_WORKLOAD INFERENCE)
  set(DNNL_BUILD_TESTS OFF)
  set(DNNL_BUILD_EXAMPLES OFF)
  set(DNNL_BUILD_DOC OFF)
  set(ONEDNN_BUILD_GRAPH ON)
  set(ONEDNN_ENABLE_GRAPH_DUMP ON) # ONEDNN_GRAPH_DUMP=... at run time; free unless it is set
  # It asks git for the commit to report. Without a repository of its own, git would walk up to ours.
  foreach(_source IN ITEMS "${FETCHCONTENT_SOURCE_DIR_ONEDNN}" "${CMAKE_BINARY_DIR}/_deps/onednn-src")
    get_filename_component(_parent "${_source}" DIRECTORY)
    string(APPEND _ceiling "${_parent}:")
  endforeach()
  set(ENV{GIT_CEILING_DIRECTORIES} "${_ceiling}")

  # EXCLUDE_FROM_ALL keeps its headers and CMake files out of our install tree.
  FetchContent_Declare(onednn ${_where} EXCLUDE_FROM_ALL)
  FetchContent_MakeAvailable(onednn)
endblock()

_onednn_content_hash("${onednn_SOURCE_DIR}" _found_hash)
if(NOT _found_hash STREQUAL _content_hash)
  if(LLGA_FUSER_ONEDNN_SOURCE OR FETCHCONTENT_SOURCE_DIR_ONEDNN)
    message(WARNING "the local oneDNN source is not the pinned ${_tag} "
      "(content hash ${_found_hash})")
  else()
    message(FATAL_ERROR "the downloaded oneDNN ${_tag} is not the pinned one: content hash "
      "${_found_hash}, expected ${_content_hash}.")
  endif()
endif()

set(ONEDNN_INCLUDE_DIRS "${onednn_BINARY_DIR}/include" "${onednn_SOURCE_DIR}/include")
set(ONEDNN_LICENSE_FILES "${onednn_SOURCE_DIR}/LICENSE" "${onednn_SOURCE_DIR}/THIRD-PARTY-PROGRAMS")
