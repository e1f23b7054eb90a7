# The tables of oneDNN's enums (dnnl_graph binds them, the fuser's reports take names from them),
# generated from the oneDNN headers of this build.
#
#   dnnl_graph_generate_enums(<target> <include dir>)
#
# <include dir> is the directory that holds oneapi/dnnl/dnnl_graph.hpp. Adds a build step that writes
# dnnl_graph_enums.inc, makes <target> depend on it, and puts its directory on the include path of
# <target>. Runs again when the headers or the script change.
function(dnnl_graph_generate_enums target include_dir)
  find_package(Python COMPONENTS Interpreter REQUIRED)
  set(script "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../csrc/python/dnnl_graph/generate_enums.py")
  set(generated_dir "${CMAKE_CURRENT_BINARY_DIR}/dnnl_graph_generated")
  set(generated "${generated_dir}/dnnl_graph_enums.inc")
  set(stamp "${generated_dir}/dnnl_graph_enums.stamp")
  set(headers "${include_dir}/oneapi/dnnl/dnnl_graph.hpp"
              "${include_dir}/oneapi/dnnl/dnnl_common.hpp")
  foreach(header IN LISTS headers)
    if(NOT EXISTS "${header}")
      message(FATAL_ERROR "dnnl_graph_generate_enums: ${header} does not exist; pass the directory "
                          "that holds oneapi/dnnl/")
    endif()
  endforeach()
  if(NOT TARGET dnnl_graph_enums)
    # The script leaves an unchanged table untouched (nothing is compiled again), hence the stamp.
    add_custom_command(
      OUTPUT "${stamp}"
      BYPRODUCTS "${generated}"
      COMMAND ${CMAKE_COMMAND} -E make_directory "${generated_dir}"
      COMMAND "${Python_EXECUTABLE}" "${script}" --include "${include_dir}" --output "${generated}"
      COMMAND ${CMAKE_COMMAND} -E touch "${stamp}"
      DEPENDS "${script}" ${headers}
      COMMENT "Generating the tables of oneDNN's enums from ${include_dir}"
      VERBATIM)
    add_custom_target(dnnl_graph_enums DEPENDS "${stamp}")
  endif()
  add_dependencies(${target} dnnl_graph_enums)
  target_include_directories(${target} PRIVATE "${generated_dir}")
endfunction()
