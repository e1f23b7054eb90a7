// The enums of the C++ API. Their members come from the headers of the build: generate_enums.py.
#include "arguments.h"
#include "dnnl_graph_enums.inc"

namespace dnnl_graph_py {

#define NAME_CASE(name, value) \
  case value:                  \
    return #name;

#define DEFINE_NAME_OF(type, TABLE) \
  const char* name_of(type v) {     \
    switch (v) {                    \
      TABLE(NAME_CASE)              \
      default:                      \
        return "?";                 \
    }                               \
  }

DEFINE_NAME_OF(dnnl::engine::kind, DNNL_GRAPH_PY_ENGINE_KINDS)
DEFINE_NAME_OF(dnnl::fpmath_mode, DNNL_GRAPH_PY_FPMATH_MODES)
DEFINE_NAME_OF(data_type, DNNL_GRAPH_PY_DATA_TYPES)
DEFINE_NAME_OF(layout_type, DNNL_GRAPH_PY_LAYOUT_TYPES)
DEFINE_NAME_OF(property_type, DNNL_GRAPH_PY_PROPERTY_TYPES)
DEFINE_NAME_OF(op_kind, DNNL_GRAPH_PY_OP_KINDS)
DEFINE_NAME_OF(op_attr, DNNL_GRAPH_PY_OP_ATTRS)

const char* name_of(dnnl_status_t v) {
  switch (static_cast<dnnl::graph::status>(v)) {
    DNNL_GRAPH_PY_STATUSES(NAME_CASE)
    default:
      return "unknown status";
  }
}

// The enums live inside the classes they belong to, so the classes are registered here, and get
// their methods in the files named after them.
void bind_enums(py::module_& m) {
#define VALUE(name, v) .value(#name, v)

  py::enum_<dnnl::graph::status>(
      m, "status",
      "What a library call came back with; `error.status` is one of these.\n\n"
      "Source: oneDNN, Graph API, Status.") DNNL_GRAPH_PY_STATUSES(VALUE);
  py::enum_<dnnl::fpmath_mode>(
      m, "fpmath_mode",
      "Down-conversions of f32 that the library may use inside a graph; `strict` allows none.\n\n"
      "Source: oneDNN, Primitive Attributes: floating-point math mode.")
      DNNL_GRAPH_PY_FPMATH_MODES(VALUE);

  py::class_<engine_object> engine(
      m, "engine",
      "A device that partitions are compiled for and run on: `engine(kind, index)`.\n\n"
      "kind: engine.kind, such as engine.cpu; index: int, from 0 to engine.get_count(kind) - 1.\n"
      "Two engines of the same kind and index are the same engine and compare equal. An engine\n"
      "may be used by several threads at once.\n\n"
      "Raises TypeError or ValueError for a wrong argument, dnnl_graph.error if the library of\n"
      "this build has no such engine.\n\n"
      "Source: oneDNN, Graph API, Engine.");
  py::enum_<dnnl::engine::kind> engine_kind(engine, "kind", "Kind of an engine.");
  engine_kind DNNL_GRAPH_PY_ENGINE_KINDS(VALUE).export_values();

  py::class_<stream_object> stream(
      m, "stream",
      "A queue of an engine in which compiled partitions are executed:\n"
      "`stream(engine, flags=stream.default_flags)`.\n\n"
      "On the CPU, execution is done when `execute` returns. Several threads may use one "
      "stream.\n\n"
      "Raises TypeError for a wrong argument, dnnl_graph.error if the engine refuses the flags.\n\n"
      "Source: oneDNN, Graph API, Stream.");
  py::enum_<dnnl::stream::flags> flags(stream, "flags", py::arithmetic(),
                                       "Flags of a stream; may be combined with `|`.");
  flags DNNL_GRAPH_PY_STREAM_FLAGS(VALUE).export_values();

  py::class_<logical_tensor> lt(
      m, "logical_tensor",
      "What the library knows about a tensor: id, data type, sizes, memory layout, property.\n\n"
      "The five constructors of the C++ class, chosen by the types of the arguments:\n\n"
      "    logical_tensor(tid, dtype, ltype=layout_type.undef)\n"
      "    logical_tensor(tid, dtype, ndims, ltype, ptype=property_type.undef)\n"
      "    logical_tensor(tid, dtype, dims, ltype, ptype=property_type.undef)\n"
      "    logical_tensor(tid, dtype, dims, strides, ptype=property_type.undef)\n"
      "    logical_tensor(tid, dtype, dims, lid, ptype=property_type.undef)\n\n"
      "and `logical_tensor(other)`, a copy.\n\n"
      "tid: int, unique id, 0 to 2**64 - 1; ops that name the same id are connected.\n"
      "dtype: logical_tensor.data_type, such as logical_tensor.f32.\n"
      "ndims: int, -1 (DNNL_GRAPH_UNKNOWN_NDIMS) for unknown, 0 for a scalar, at most 12.\n"
      "dims: list of int, sizes in elements; DNNL_GRAPH_UNKNOWN_DIM for a size to be inferred.\n"
      "ltype: logical_tensor.layout_type; `strided` with dims means dense and row-major.\n"
      "strides: list of int, as long as dims, in elements (not bytes), not negative.\n"
      "lid: int, the opaque layout id that a compiled partition gave (get_layout_id).\n"
      "ptype: logical_tensor.property_type; `constant` for weights that do not change.\n\n"
      "Objects never change. Raises TypeError or ValueError with the name of the argument.\n\n"
      "Source: oneDNN, Graph API, Logical Tensor.");
  py::enum_<data_type> dtype(lt, "data_type", "Type of the elements.");
  dtype DNNL_GRAPH_PY_DATA_TYPES(VALUE);
  py::enum_<layout_type> ltype(
      lt, "layout_type",
      "How the elements lie in memory: `strided` by strides, `any` as the library likes best (it\n"
      "then answers with `strided` or `opaque`), `opaque` known only to the library.");
  ltype DNNL_GRAPH_PY_LAYOUT_TYPES(VALUE);
  py::enum_<property_type> ptype(
      lt, "property_type",
      "`constant`: the memory does not change between executions; `variable`: it may.");
  ptype DNNL_GRAPH_PY_PROPERTY_TYPES(VALUE);
  // C++ has logical_tensor::data_type::f32; the short form is logical_tensor.f32. `undef` is in all
  // three enums and therefore has no short form.
  const std::string undef = "undef";
#define SHORT_FORM(name, v) \
  if (undef != #name) lt.attr(#name) = v;
  DNNL_GRAPH_PY_DATA_TYPES(SHORT_FORM)
  DNNL_GRAPH_PY_LAYOUT_TYPES(SHORT_FORM)
  DNNL_GRAPH_PY_PROPERTY_TYPES(SHORT_FORM)

  py::class_<op_object> op(
      m, "op",
      "One operation of a graph.\n\n"
      "    op(id, kind, name='')\n"
      "    op(id, kind, inputs, outputs, name='')\n\n"
      "id: int, unique among the ops of a graph; kind: op.kind, such as op.MatMul;\n"
      "inputs, outputs: lists of logical_tensor; name: str, shown in oneDNN's verbose output, by\n"
      "default the kind and the id. An op is copied when it is added to a graph.\n\n"
      "Which inputs, outputs and attributes a kind has is checked by graph.add_op.\n\n"
      "Source: oneDNN, Graph API, Op, and the page of each operation.");
  py::enum_<op_kind> kinds(op, "kind", "Kind of an operation; every kind that oneDNN has.");
  kinds DNNL_GRAPH_PY_OP_KINDS(VALUE).export_values();
  py::enum_<op_attr> attrs(op, "attr", "Name of an attribute; every attribute that oneDNN has.");
  attrs DNNL_GRAPH_PY_OP_ATTRS(VALUE).export_values();

  py::class_<partition_object> partition(
      m, "partition",
      "Ops that the library compiles as one unit; from graph.get_partitions, or\n"
      "`partition(op, engine_kind)` for a single op without a graph.\n\n"
      "May be used by several threads at once, and after its graph is gone.\n\n"
      "Source: oneDNN, Graph API, Partition.");
  py::enum_<dnnl::graph::partition::policy> policy(
      partition, "policy",
      "`fusion`: as large as the library can; `debug`: one op in each partition.");
  policy DNNL_GRAPH_PY_POLICIES(VALUE).export_values();

#if DNNL_GRAPH_PY_HAS_DUMP_MODE
  py::enum_<dnnl::graph::graph_dump_mode>(m, "graph_dump_mode", py::arithmetic(),
                                          "What the library writes as JSON; see set_dump_mode.")
      DNNL_GRAPH_PY_DUMP_MODES(VALUE);
#endif
}

}  // namespace dnnl_graph_py
