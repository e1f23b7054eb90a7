"""Run a whole graph: partition, compile, execute, and time it.

    g = dnnl_graph.load("graph-100001.json")
    arrays = dnnl_graph.run(g, {0: x, 1: weight})
    arrays[7], arrays["relu0"]                    # by id, or by the name of the op that wrote it

`run` follows the graph: an edge between two partitions that the graph describes as `any` is left to
the library (and may be opaque), every other one is strided. Graph inputs have the layout of the
array that is passed, graph outputs the one that the graph says, or are dense.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ._dnnl_graph import (
    DNNL_GRAPH_UNKNOWN_DIM,
    compiled_partition,
    engine,
    get_constant_tensor_cache,
    graph,
    logical_tensor,
    op,
    partition,
    stream,
    tensor,
)

# numpy's name of an element type -> name in logical_tensor.data_type
_DATA_TYPES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "s32",
    "int8": "s8",
    "uint8": "u8",
    "bool": "boolean",
    "int64": "s64",
    "float8_e5m2": "f8_e5m2",
    "float8_e4m3fn": "f8_e4m3",
}
_PACKED = ("s4", "u4")

Inputs = Mapping[int | str, Any] | Sequence[Any]


class Arrays(dict[int, numpy.ndarray[Any, Any]]):
    """Outputs of a graph by logical tensor id; a str asks by the name of the op that wrote it.

    `arrays["split"]` is the only output of the op named split, `arrays["split:1"]` its second one.
    KeyError for what is not there; its message lists what there is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __missing__(self, key: object) -> numpy.ndarray[Any, Any]:
        if isinstance(key, str) and self.names.get(key) in self:
            return self[self.names[key]]
        raise KeyError(f"{key!r}: there are the ids {list(self)} and the names {list(self.names)}")


@dataclass
class PartitionProfile:
    """One partition of a profiled graph.

    Attributes:
        id: of the partition, as the library gave it.
        ops: ids of its ops.
        kinds: names of their kinds, such as "MatMul".
        supported: False if the library can't compile it; what follows is then empty.
        inputs: logical tensors of the compiled partition, with all sizes and layouts.
        outputs: the same of what it writes.
        compile_time: in seconds.
        execute_time: in seconds, the median.
    """

    id: int
    ops: list[int]
    kinds: list[str]
    supported: bool
    inputs: list[logical_tensor] = field(default_factory=list)
    outputs: list[logical_tensor] = field(default_factory=list)
    compile_time: float = 0.0
    execute_time: float = 0.0


@dataclass
class Profile:
    """What `profile` found. `print` shows it as text.

    Attributes:
        partitions: one entry for each, in the order in which they were run.
        arrays: the outputs of the graph, as `run` returns them.
    """

    partitions: list[PartitionProfile]
    arrays: Arrays

    def __str__(self) -> str:
        lines = []
        total = 0.0
        for p in self.partitions:
            kinds = "+".join(p.kinds)
            if not p.supported:
                lines.append(f"partition {p.id}: {kinds}, ops {p.ops}, not supported: not run")
                continue
            total += p.execute_time
            lines.append(
                f"partition {p.id}: {kinds}, ops {p.ops}, compile {p.compile_time * 1e3:.2f} ms, "
                f"execute {p.execute_time * 1e6:.1f} us"
            )
            lines += [f"  in  {_shape_text(lt)}" for lt in p.inputs]
            lines += [f"  out {_shape_text(lt)}" for lt in p.outputs]
        supported = sum(p.supported for p in self.partitions)
        lines.append(
            f"{len(self.partitions)} partitions, {supported} run, sum of medians "
            f"{total * 1e6:.1f} us"
        )
        return "\n".join(lines)


def logical_tensor_like(
    tid: int,
    array: Any,
    ptype: logical_tensor.property_type = logical_tensor.property_type.variable,
) -> logical_tensor:
    """A strided logical tensor with the data type, shape and strides of an array.

    tid: int, its id; array: numpy array or object with __dlpack__ in CPU memory.
    Raises TypeError for an element type that oneDNN does not have.
    """
    name, shape, strides = _describe(array)
    return logical_tensor(tid, _data_type(name), shape, strides, ptype)


def run(
    g: graph,
    inputs: Inputs,
    *,
    policy: partition.policy = partition.policy.fusion,
    eng: engine | None = None,
) -> Arrays:
    """Partition, compile and execute a graph; returns its outputs as numpy arrays.

    g: graph; it is finalized if it is not yet.
    inputs: dict of logical tensor id (or "op name:input index") to a numpy array or an object with
    __dlpack__, with the data type and shape of the graph; or a list in the order of
    `graph_inputs(g)`. 4-bit types: an array of uint8 with two values in each byte.
    policy: partition.policy. eng: engine, by default engine(kind of the graph, 0).

    What a partition that is not supported would compute (all of a Wildcard op) cannot be run: where
    other partitions read it, it has to be among the inputs.

    Each call takes constant tensors anew. While the library's constant tensor cache is on, they are
    therefore compiled as variable ones.

    Raises TypeError, ValueError or KeyError for inputs that do not fit, dnnl_graph.error.
    """
    return _execute(g, inputs, policy, eng, repeat=0, constants_fixed=False).arrays


def profile(
    g: graph,
    inputs: Inputs | None = None,
    *,
    policy: partition.policy = partition.policy.fusion,
    eng: engine | None = None,
    repeat: int = 20,
    seed: int = 0,
) -> Profile:
    """As `run`, and times each partition: the median of `repeat` executions after one to warm up.

    inputs: as for `run`; None for random ones (`random_inputs(g, seed)`).
    Constant tensors are taken to stay the same until the process ends, so that the library's
    constant tensor cache, where it is on, shows in the times.

    Returns a Profile; times are in seconds.
    Raises what `run` does, ValueError for `repeat` below 1 or inputs of unknown sizes.
    """
    if repeat < 1:
        raise ValueError(f"profile: argument 'repeat' must be at least 1, got {repeat}")
    if inputs is None:
        inputs = random_inputs(g, seed, policy=policy)
    return _execute(g, inputs, policy, eng, repeat=repeat, constants_fixed=True)


def graph_inputs(
    g: graph, *, policy: partition.policy = partition.policy.fusion
) -> list[logical_tensor]:
    """What `run` has to be given: the inputs of supported partitions that no such one writes.

    g: graph; it is finalized if it is not yet. policy: partition.policy.
    Returns logical tensors, as the graph describes them. Raises dnnl_graph.error.
    """
    if not g.is_finalized():
        g.finalize()
    parts = [p for p in g.get_partitions(policy) if p.is_supported()]
    written = {lt.get_id() for p in parts for lt in p.get_output_ports()}
    needed: dict[int, logical_tensor] = {}
    for p in parts:
        for lt in p.get_input_ports():
            if lt.get_id() not in written:
                needed.setdefault(lt.get_id(), lt)
    return list(needed.values())


def random_inputs(
    g: graph, seed: int = 0, *, policy: partition.policy = partition.policy.fusion
) -> dict[int | str, Any]:
    """Arrays for `graph_inputs(g)`: floats in [0.05, 1), integers in [0, 8), strided as said.

    Positive, so that a variance or a scale among them makes sense.
    Raises ValueError for an input whose sizes the graph does not know.
    """
    rng = numpy.random.default_rng(seed)
    result: dict[int | str, Any] = {}
    for lt in graph_inputs(g, policy=policy):
        dims = _dims(lt)
        if dims is None or DNNL_GRAPH_UNKNOWN_DIM in dims:
            raise ValueError(f"random_inputs: sizes are unknown, pass an array for {lt!r}")
        name = lt.get_data_type().name
        if name in _PACKED:
            dense = logical_tensor(lt.get_id(), lt.get_data_type(), dims, logical_tensor.strided)
            size = dense.get_mem_size()
            result[lt.get_id()] = rng.integers(0, 256, size, dtype=numpy.uint8)
            continue
        dtype = _numpy_dtype(name)
        if name == "boolean":
            values: Any = rng.integers(0, 2, dims).astype(bool)
        elif name in ("s32", "s8", "u8", "s64"):
            values = rng.integers(0, 8, dims).astype(dtype)
        else:
            values = rng.uniform(0.05, 1.0, dims).astype(numpy.float32).astype(dtype)
        if lt.get_layout_type() == logical_tensor.strided:
            values = _with_strides(values, lt)
        result[lt.get_id()] = values
    return result


def _shape_text(lt: logical_tensor) -> str:
    text = f"{lt.get_id()} {lt.get_data_type().name} {_dims(lt)} {lt.get_layout_type().name}"
    if lt.get_layout_type() == logical_tensor.strided:
        text += f" {lt.get_strides()}"
    return f"{text} {lt.get_property_type().name}"


def _dims(lt: logical_tensor) -> list[int] | None:
    try:
        return lt.get_dims()
    except RuntimeError:
        return None


def _data_type(numpy_name: str) -> logical_tensor.data_type:
    members = logical_tensor.data_type.__members__
    name = _DATA_TYPES.get(numpy_name)
    if name is None or name not in members:
        raise TypeError(f"element type {numpy_name} is none of oneDNN's: {', '.join(members)}")
    return members[name]


def _numpy_dtype(name: str) -> Any:
    numpy_name = next(n for n, d in _DATA_TYPES.items() if d == name)
    if hasattr(numpy, numpy_name):
        return numpy.dtype(numpy_name)
    import ml_dtypes

    return numpy.dtype(getattr(ml_dtypes, numpy_name))


def _describe(array: Any) -> tuple[str, list[int], list[int]]:
    """Element type in numpy's words, shape, strides in elements."""
    if isinstance(array, numpy.ndarray):
        steps = [s // array.itemsize for s in array.strides]
        return array.dtype.name, list(array.shape), steps
    if hasattr(array, "__dlpack__") and hasattr(array, "dtype") and hasattr(array, "stride"):
        # torch: numpy does not know bfloat16, so it cannot be asked through numpy.from_dlpack.
        name = str(array.dtype).removeprefix("torch.")
        return name, list(array.shape), list(array.stride())
    if hasattr(array, "__dlpack__"):
        view = numpy.from_dlpack(array)
        return view.dtype.name, list(view.shape), [s // view.itemsize for s in view.strides]
    raise TypeError(
        f"must be a numpy array or an object with __dlpack__, got {type(array).__name__}"
    )


def _with_strides(values: Any, lt: logical_tensor) -> Any:
    """The same values in memory of the strides that the logical tensor has."""
    dims, strides = lt.get_dims(), lt.get_strides()
    if DNNL_GRAPH_UNKNOWN_DIM in strides or 0 in dims:
        return values
    size = 1 + sum((d - 1) * s for d, s in zip(dims, strides, strict=True))
    memory = numpy.zeros(size, dtype=values.dtype)
    view = numpy.lib.stride_tricks.as_strided(
        memory, dims, [s * values.itemsize for s in strides], writeable=True
    )
    view[...] = values
    return view


def _input_table(g: graph, inputs: Inputs, needed: list[logical_tensor]) -> dict[int, Any]:
    if not isinstance(inputs, Mapping):
        if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence):
            raise TypeError(
                f"run: argument 'inputs' must be a dict or a list, got {type(inputs).__name__}"
            )
        if len(inputs) != len(needed):
            raise ValueError(
                f"run: argument 'inputs' has {len(inputs)} arrays, the graph needs {len(needed)}: "
                f"{needed}"
            )
        return {lt.get_id(): a for lt, a in zip(needed, inputs, strict=True)}
    ops = g.get_ops()
    names = {f"{o.get_name()}:{i}": lt.get_id() for o in ops for i, lt in enumerate(o.get_inputs())}
    ids = {lt.get_id() for o in ops for lt in o.get_inputs() + o.get_outputs()}
    table: dict[int, Any] = {}
    for key, array in inputs.items():
        tid = names.get(key) if isinstance(key, str) else key
        if tid not in ids:
            raise KeyError(
                f"run: argument 'inputs' names {key!r}, the graph has {list(names)} and the ids "
                f"{sorted(ids)}"
            )
        if tid in table:
            raise ValueError(f"run: argument 'inputs' has logical tensor {tid} twice")
        table[tid] = array
    missing = [lt for lt in needed if lt.get_id() not in table]
    if missing:
        raise ValueError(f"run: argument 'inputs' lacks {missing}")
    return table


def _input_logical_tensor(port: logical_tensor, array: Any, fixed: bool) -> logical_tensor:
    """The logical tensor for compiling with this array in this place."""
    tid = port.get_id()
    ptype = port.get_property_type()
    if ptype == logical_tensor.constant and not fixed:
        ptype = logical_tensor.variable
    dims = _dims(port)
    if port.get_data_type().name in _PACKED:
        if dims is None or DNNL_GRAPH_UNKNOWN_DIM in dims:
            raise ValueError(f"run: sizes of a packed tensor must be known: {port!r}")
        return logical_tensor(tid, port.get_data_type(), dims, logical_tensor.strided, ptype)
    try:
        name, shape, strides = _describe(array)
        dtype = _data_type(name)
    except TypeError as e:
        raise TypeError(f"run: argument 'inputs', logical tensor {tid}: {e}") from e
    if dtype != port.get_data_type():
        raise TypeError(
            f"run: argument 'inputs', logical tensor {tid}: must have data type "
            f"{port.get_data_type().name}, got {name}"
        )
    if dims == [1] and shape == []:
        shape, strides = [1], [1]  # a 0-dim array for a scalar operand
    if dims is not None and (
        len(dims) != len(shape)
        or any(d not in (DNNL_GRAPH_UNKNOWN_DIM, s) for d, s in zip(dims, shape, strict=True))
    ):
        raise ValueError(
            f"run: argument 'inputs', logical tensor {tid}: must have shape {dims}, got {shape}"
        )
    return logical_tensor(tid, dtype, shape, strides, ptype)


def _output_logical_tensor(port: logical_tensor, inner: bool) -> logical_tensor:
    tid, dtype, ptype = port.get_id(), port.get_data_type(), port.get_property_type()
    if port.get_layout_type() == logical_tensor.strided:
        return port
    layout = logical_tensor.strided
    if inner and port.get_layout_type() == logical_tensor.any:
        layout = logical_tensor.any
    dims = _dims(port)
    if dims is None:
        return logical_tensor(tid, dtype, -1, layout, ptype)
    return logical_tensor(tid, dtype, dims, layout, ptype)


def _execute(
    g: graph,
    inputs: Inputs,
    policy: partition.policy,
    eng: engine | None,
    *,
    repeat: int,
    constants_fixed: bool,
) -> Profile:
    if not isinstance(g, graph):
        raise TypeError(f"run: argument 'g' must be a graph, got {type(g).__name__}")
    if eng is None:
        eng = engine(g.get_engine_kind(), 0)
    queue = stream(eng)
    needed = graph_inputs(g, policy=policy)
    table = _input_table(g, inputs, needed)
    fixed = constants_fixed or not get_constant_tensor_cache()
    ops: dict[int, op] = {o.get_id(): o for o in g.get_ops()}
    parts = g.get_partitions(policy)
    supported = [p for p in parts if p.is_supported()]
    if not supported:
        kinds = [ops[i].get_kind().name for p in parts for i in p.get_ops()]
        raise ValueError(f"run: the library supports none of the partitions of this graph: {kinds}")
    # An edge stays inside if supported partitions alone read it.
    read_inside = {lt.get_id() for p in supported for lt in p.get_input_ports()}
    read_outside = {
        lt.get_id() for p in parts if not p.is_supported() for lt in p.get_input_ports()
    }

    profiles: list[PartitionProfile] = []
    tensors: dict[int, tensor] = {}
    outputs: list[int] = []
    for p in parts:
        kinds = [ops[i].get_kind().name for i in p.get_ops()]
        entry = PartitionProfile(p.get_id(), p.get_ops(), kinds, p.is_supported())
        profiles.append(entry)
        if not entry.supported:
            continue
        in_lts = []
        for port in p.get_input_ports():
            tid = port.get_id()
            if tid not in tensors:
                lt = _input_logical_tensor(port, table[tid], fixed)
                tensors[tid] = tensor(lt, eng, table[tid])
            in_lts.append(tensors[tid].get_logical_tensor())
        out_lts = []
        for port in p.get_output_ports():
            tid = port.get_id()
            inner = tid in read_inside and tid not in read_outside
            out_lts.append(_output_logical_tensor(port, inner))
            if not inner:
                outputs.append(tid)
        start = time.perf_counter()
        compiled = p.compile(in_lts, out_lts, eng)
        entry.compile_time = time.perf_counter() - start
        entry.inputs = [compiled.query_logical_tensor(lt.get_id()) for lt in in_lts]
        entry.outputs = [compiled.query_logical_tensor(lt.get_id()) for lt in out_lts]
        for lt in entry.outputs:
            tensors[lt.get_id()] = tensor(lt, eng)
        entry.execute_time = _run_one(compiled, queue, entry, tensors, repeat)
    arrays = Arrays()
    for tid in outputs:
        arrays[tid] = tensors[tid].numpy()
    for o in ops.values():
        for index, lt in enumerate(o.get_outputs()):
            if lt.get_id() in arrays:
                arrays.names.setdefault(f"{o.get_name()}:{index}", lt.get_id())
                if len(o.get_outputs()) == 1:
                    arrays.names.setdefault(o.get_name(), lt.get_id())
    return Profile(profiles, arrays)


def _run_one(
    compiled: compiled_partition,
    queue: stream,
    entry: PartitionProfile,
    tensors: dict[int, tensor],
    repeat: int,
) -> float:
    """Execute once, then `repeat` times against the clock; returns the median in seconds."""
    ins = [tensors[lt.get_id()] for lt in entry.inputs]
    outs = [tensors[lt.get_id()] for lt in entry.outputs]
    compiled.execute(queue, ins, outs)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        compiled.execute(queue, ins, outs)
        times.append(time.perf_counter() - start)
    return statistics.median(times) if times else 0.0
