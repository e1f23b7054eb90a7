"""Runs a fused model under observation and puts together what was seen."""

from __future__ import annotations

import os
import re
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llga_fuser import _C
from llga_fuser._report import verbose
from llga_fuser._report.model import (
    Conversion,
    Fallback,
    Group,
    Node,
    Op,
    Partition,
    Primitive,
    Report,
    Summary,
    TensorInfo,
)

__all__ = ["describe_arguments", "make_report"]

GROUP = "llga::FusionGroup"
ONCE_PER_SIZES = "llga::OncePerSizes"
WIDENING = ("llga::wide", "llga::narrow", "llga::narrow_as")
# Operators outside whose only work is to change layout or data type.
_CONVERTERS = (
    "aten::to",
    "aten::type_as",
    "aten::_to_copy",
    "aten::contiguous",
    "aten::clone",
    "aten::float",
    "aten::bfloat16",
)
_NO_REASON = "not in the op table"
_UNSEEN = "the fuser was off when TorchScript optimised this graph"

_lock = threading.RLock()  # observing is process-wide

Call = Callable[[], Any]


# -------------------------------------------------------------------------------- where a node is


def _package(module: Any) -> str:
    return str(os.path.dirname(os.path.abspath(module.__file__))) + os.sep


_FRAME = re.compile(r"^(.+?)\((\d+)\): (.+)$")
_NOT_THE_MODEL = (_package(torch), os.path.dirname(os.path.dirname(__file__)) + os.sep)


def _short_path(path: str) -> str:
    """From the directory on that Python finds modules in: "torchvision/models/resnet.py"."""
    roots = [os.path.abspath(p or os.getcwd()) + os.sep for p in sys.path]
    inside = [r for r in roots if path.startswith(r)]
    return path[len(max(inside, key=len)) :] if inside else os.path.basename(path)


def _source(node: Any) -> str:
    """The innermost line that is the model's, not torch's."""
    frames = [m for m in map(_FRAME.match, str(node.sourceRange()).splitlines()) if m]
    lines = [(m[1], int(m[2])) for m in frames] or _C.source_lines(node)
    for path, line in lines:
        if not path.startswith((*_NOT_THE_MODEL, "<frozen", "<string>")):
            return f"{_short_path(path)}:{line}"
    return ""


def _scope(node: Any) -> str:
    return str(node.scopeName()).rsplit("/", 1)[-1].removeprefix("__module.")


def _op(node: Any) -> Op:
    return Op(node.kind(), _source(node), _scope(node))


# ---------------------------------------------------------------------------------- the graph


def _holds_tensors(value: Any) -> bool:
    type_ = value.type()
    if type_.kind() in ("ListType", "OptionalType"):
        return bool(type_.getElementType().kind() == "TensorType")
    return type_.kind() in ("TensorType", "TupleType", "DictType")


def _is_operator(node: Any) -> bool:
    """Something that computes: no constant, no control flow, no arithmetic on sizes."""
    kind = node.kind()
    if kind in ("prim::PythonOp", "prim::CallFunction", "prim::CallMethod"):
        return True
    if kind.split("::")[0] in ("prim", "llga"):
        return False
    return any(_holds_tensors(v) for v in node.outputs())


class _Item(NamedTuple):
    """A group or an operator outside, as it stands in the graph."""

    node: Any
    block: str
    kernel: int  # of a group; 0


class _Walk:
    """The groups and operators of a graph in execution order, and who reads whose values."""

    def __init__(self, graph: Any) -> None:
        self.items: list[_Item] = []
        self.edges: set[tuple[int, int]] = set()
        self.fused = 0
        self.once_per_sizes = 0  # operators whose results are kept for the next call
        self.widens = False  # bfloat16 is computed in float32
        self._makers: dict[str, set[int]] = {}
        self._visit(graph, "")

    def _from(self, value: Any) -> set[int]:
        return self._makers.get(value.debugName(), set())

    def _give(self, value: Any, makers: set[int]) -> None:
        if _holds_tensors(value):
            self._makers.setdefault(value.debugName(), set()).update(makers)

    def _visit(self, block: Any, where: str) -> None:
        for node in block.nodes():
            kind = node.kind()
            reads = set().union(*(self._from(v) for v in node.inputs()))
            blocks = list(node.blocks())
            if blocks:
                self._nested(node, blocks, where)
                continue
            if kind == ONCE_PER_SIZES:
                self.once_per_sizes += sum(map(_is_operator, node.g("Subgraph").nodes()))
            self.widens |= kind in WIDENING
            if kind != GROUP and not _is_operator(node):
                for output in node.outputs():
                    self._give(output, reads)
                continue
            position = len(self.items)
            kernel = _C.kernel_id(node) if kind == GROUP else 0
            self.items.append(_Item(node, where, kernel))
            self.edges.update((source, position) for source in reads)
            for output in node.outputs():
                self._give(output, {position})

    def _nested(self, node: Any, blocks: list[Any], where: str) -> None:
        kind = node.kind()
        outputs = list(node.outputs())
        names = {"prim::If": ("if", "else"), "prim::Loop": ("loop",)}.get(kind, ())
        for i, inner in enumerate(blocks):
            name = names[i] if i < len(names) else kind.split("::")[-1]
            carried = list(inner.outputs())
            if kind == "prim::Loop":
                # Inputs: trip count, condition, initial values; a block's: counter, values.
                for inside, initial in zip(
                    list(inner.inputs())[1:], list(node.inputs())[2:], strict=False
                ):
                    self._give(inside, self._from(initial))
                carried = carried[1:]
            self._visit(inner, f"{where}/{name}" if where else name)
            for output, result in zip(outputs, carried, strict=False):
                self._give(output, self._from(result))


def _executed_graph(script: Any, kernels: set[int]) -> Any:
    """The optimised graph that runs: the one whose groups were seen to run."""
    plans = script.get_debug_state().execution_plans.values()
    graphs = [_C.graph_of_code(plan.code) for plan in plans]

    def seen(graph: Any) -> int:
        return sum(_C.kernel_id(n) in kernels for n in _nodes(graph) if n.kind() == GROUP)

    return max(graphs, key=seen)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


# -------------------------------------------------------------------------------------- running


def _observed(call: Call, mode: str, kernel: int = 0, which: int = 0) -> list[dict[str, Any]]:
    """The events of one call of the model."""
    _C.start_observing(mode, kernel, which)
    try:
        call()
    finally:
        events = _C.stop_observing()
    return events


def _warm_up(call: Call) -> list[dict[str, Any]]:
    """Calls until TorchScript has optimised and no group compiles any more; the last call."""
    call()
    quiet = 0
    events: list[dict[str, Any]] = []
    for _ in range(12):
        events = _observed(call, "time")
        quiet = 0 if any(e["compiled"] for e in events) else quiet + 1
        if quiet == 2:
            break
    return events


class _Times(NamedTuple):
    total: float  # seconds per call of the model: those of the items, and what lies between them
    seconds: list[float]  # by item, medians
    calls: list[float]
    fallbacks: Counter[tuple[int, str]]  # (item, reason) -> calls in all rounds


def _time(call: Call, items: list[_Item], rounds: int) -> _Times:
    by_kernel: dict[int, list[int]] = defaultdict(list)
    by_kind: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        if item.kernel:
            by_kernel[item.kernel].append(i)
        else:
            by_kind[item.node.kind()].append(i)
    between = []
    samples: list[list[float]] = [[] for _ in items]
    calls: Counter[int] = Counter()
    fallbacks: Counter[tuple[int, str]] = Counter()
    for _ in range(rounds):
        start = time.perf_counter()
        events = _observed(call, "time")
        total = time.perf_counter() - start
        spent = [0.0] * len(items)
        position = -1
        for event in events:
            known = by_kernel if event["kernel"] else by_kind
            candidates = known.get(event["kernel"] or event["name"], ())
            # Execution goes on downwards, but for loops; several nodes may have one name.
            later = [i for i in candidates if i > position]
            if not candidates:
                continue
            position = later[0] if later else candidates[0]
            spent[position] += (event["end"] - event["start"]) * 1e-9
            calls[position] += 1
            if event["fallback"] is not None:
                fallbacks[position, event["fallback"]] += 1
        for sample, value in zip(samples, spent, strict=True):
            sample.append(value)
        between.append(max(0.0, total - sum(spent)))
    seconds = [statistics.median(s) for s in samples]
    # Medians do not add up to the median of the sum; shares have to add up to one.
    return _Times(
        sum(seconds) + statistics.median(between),
        seconds,
        [calls[i] / rounds for i in range(len(items))],
        fallbacks,
    )


def _primitives(call: Call) -> dict[int, list[Primitive]]:
    """By kernel id, what oneDNN ran in its first execution."""
    sys.stdout.flush()
    level = verbose.users_verbosity()
    _C.start_verbose()
    try:
        _observed(call, "announce")
    finally:
        text = _C.stop_verbose(level)
    executions, others = verbose.parse(text)
    if others:
        print(others)
    found: dict[int, list[Primitive]] = {}
    for kernel, primitives in executions:
        found.setdefault(kernel, primitives)
    return found


# --------------------------------------------------------------------------------- what was seen


_SCALAR_TYPES = {
    "Float": "float32",
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Double": "float64",
    "Bool": "bool",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


def _layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> str:
    def dense(order: list[int]) -> bool:
        expected = 1
        for d in reversed(order):
            if shape[d] != 1 and stride[d] != expected:
                return False
            expected *= shape[d]
        return True

    rank = len(shape)
    if dense(list(range(rank))):
        return "contiguous"
    if rank in (4, 5) and dense([0, *range(2, rank), 1]):
        return "channels last"
    return "strided"


# Kernels that read parts of tensors where they lie.
_TAKE_PARTS = ("llga_attention", "llga_concat", "llga_depthwise_volume", "llga_pointwise")


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Neither overlaps nor gaps."""
    order = sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1)
    expected = 1
    for s, n in order:
        if s != expected:
            return False
        expected *= n
    return True


def _info(name: str, seen: Mapping[str, Any]) -> TensorInfo:
    if "dtype" not in seen:
        return TensorInfo(name, value=str(seen["value"]))
    shape, stride = tuple(seen["shape"]), tuple(seen["stride"])
    dtype = _SCALAR_TYPES.get(seen["dtype"], seen["dtype"].lower())
    return TensorInfo(name, dtype, shape, stride, _layout(shape, stride))


def describe_tensor(name: str, value: Any) -> TensorInfo:
    """A value from Python's side."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        text = type(value).__name__ if isinstance(value, Tensor | list | dict) else repr(value)
        return TensorInfo(name, value=text)
    shape, stride = tuple(value.shape), tuple(value.stride())
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorInfo(name, dtype, shape, stride, _layout(shape, stride))


def _names(values: Any) -> list[str]:
    return [v.debugName() for v in values]


def _subgraph_ops(node: Any) -> tuple[Op, ...]:
    return tuple(_op(n) for n in node.g("Subgraph").nodes() if _is_operator(n))


def _reason(node: Any, known: set[str]) -> str:
    if node.hasAttribute("llga_refused"):
        return str(node.s("llga_refused"))
    kind = node.kind()
    if kind == "prim::PythonOp":
        return "Python code"
    qualified = str(node.schema()).split("(", 1)[0]
    return _UNSEEN if qualified in known else f"{kind.split('::')[-1]}: {_NO_REASON}"


def _conversions(
    items: list[_Item], edges: set[tuple[int, int]], groups: list[Group]
) -> list[Conversion]:
    at = {g.position: g for g in groups}
    found = []
    for g in groups:
        takes_gaps = any(p.implementation.startswith(_TAKE_PARTS) for p in g.primitives)
        for value in g.inputs:
            if value.dtype and not takes_gaps and not _is_dense(value.shape, value.stride):
                found.append(
                    Conversion(
                        g.index, "copy", f"%{value.name} {value} has gaps or overlaps: a dense copy"
                    )
                )
        for p in g.primitives:
            if p.kind == "reorder":
                names = list(p.layouts.values())
                if len(names) < 2:
                    continue
                source, target = names[0], names[-1]
                kind = "copy" if source == target else "reorder"
                text = f"{p.problem} {source}" + ("" if kind == "copy" else f" -> {target}")
                found.append(Conversion(g.index, kind, f"{text} ({p.implementation})"))
        for part in g.partitions:
            border = {*part._part["inputs"], *part._part["outputs"]}
            for op in part._part["graph"]:
                ends = op["inputs"][0], op["outputs"][0] if op["outputs"] else op["inputs"][0]
                if op["kind"] == "TypeCast" and {e["id"] for e in ends} & border:
                    found.append(
                        Conversion(g.index, "cast", f"{ends[0]['dtype']} -> {ends[1]['dtype']}")
                    )
    for start, end in sorted(edges):
        for group, other in ((at.get(start), end), (at.get(end), start)):
            kind = items[other].node.kind()
            if group is not None and kind in _CONVERTERS:
                side = "reads from" if other == start else "writes to"
                found.append(Conversion(group.index, kind, f"the group {side} it"))
    return found


def _recorder(call: Call, kernels: list[int]) -> Callable[[int], tuple[list[Any], list[Any]]]:
    """Inputs and outputs of a group in a fresh call of the model; the last group's are kept."""
    last: dict[int, tuple[list[Any], list[Any]]] = {}

    def record(group: int) -> tuple[list[Any], list[Any]]:
        with _lock:
            if group not in last:
                last.clear()
                for event in _observed(call, "record", kernels[group]):
                    if event["kernel"] == kernels[group] and event["output_tensors"]:
                        last[group] = event["input_tensors"], event["output_tensors"]
                        break
                else:
                    raise RuntimeError(f"group {group} did not run when the model was called again")
            return last[group]

    return record


# -------------------------------------------------------------------------------- all together


def make_report(
    script: Any,
    call: Call,
    *,
    model: str,
    inputs: tuple[TensorInfo, ...],
    environment: Mapping[str, Any],
    rounds: int,
) -> Report:
    """Runs `call` (which runs `script`) as often as needed, and looks."""
    with _lock:
        ran = {e["kernel"] for e in _warm_up(call)}
        walk = _Walk(_executed_graph(script, ran))
        times = _time(call, walk.items, rounds)
        seen: dict[int, dict[str, Any]] = {}
        for run in _observed(call, "describe"):
            if run["kernel"]:
                seen.setdefault(run["kernel"], run)
        primitives = _primitives(call)

    items = walk.items
    positions = [i for i, item in enumerate(items) if item.kernel]
    record = _recorder(call, [items[i].kernel for i in positions])
    groups: list[Group] = []
    fallbacks: list[Fallback] = []
    flat = 0
    for index, position in enumerate(positions):
        item = items[position]
        event = seen.get(item.kernel)
        for (at, reason), n in times.fallbacks.items():
            if at == position:
                fallbacks.append(Fallback(index, reason, n / rounds))
        fell_back = event is not None and event["fallback"] is not None
        note = ""
        parts: list[Partition] = []
        if event is None:
            note = "did not run for these inputs"
        elif fell_back:
            note = f"ran in the interpreter: {event['fallback']}"
        elif event["description"] is None:
            note = f"cannot be described: {event['not_described']}"
        else:
            for part in event["description"].partitions:
                parts.append(
                    Partition(index, flat, part, event["description"], record, environment)
                )
                flat += 1
        values = (event["inputs"], event["outputs"]) if event else ([], [])
        groups.append(
            Group(
                index=index,
                position=position,
                name=_C.kernel_name(item.node),
                ops=_subgraph_ops(item.node),
                inputs=tuple(map(_info, _names(item.node.inputs()), values[0])),
                outputs=tuple(map(_info, _names(item.node.outputs()), values[1])),
                primitives=() if fell_back else tuple(primitives.get(item.kernel, ())),
                partitions=tuple(parts),
                calls=times.calls[position],
                seconds=times.seconds[position],
                share=times.seconds[position] / times.total,
                block=item.block,
                note=note,
            )
        )
    known = set(_C.op_names())
    outside = [
        Node(
            index=i,
            op=_op(item.node),
            reason=_reason(item.node, known),
            outputs=tuple(_names(item.node.outputs())),
            calls=times.calls[i],
            seconds=times.seconds[i],
            share=times.seconds[i] / times.total,
            block=item.block,
        )
        for i, item in enumerate(items)
        if not item.kernel
    ]
    fused = sum(len(g.ops) for g in groups)
    fused_seconds = sum(g.seconds for g in groups)
    notes = []
    if not groups and any(n.reason == _UNSEEN for n in outside):
        notes.append(
            "TorchScript optimised this model before the fuser was on: trace, script or load it "
            "again"
        )
    if walk.once_per_sizes:
        notes.append(
            f"operators that depend on sizes alone: {walk.once_per_sizes}. They are computed once "
            "for each set of sizes, and counted neither as fused nor as outside"
        )
    if walk.widens:
        notes.append(
            "bfloat16 is computed in float32, which is faster on this processor "
            f"({environment['isa']})"
        )
    return Report(
        model=model,
        inputs=inputs,
        environment=environment,
        groups=tuple(groups),
        outside=tuple(outside),
        conversions=tuple(_conversions(items, walk.edges, groups)),
        fallbacks=tuple(fallbacks),
        edges=tuple(sorted(walk.edges)),
        summary=Summary(
            operators=fused + len(outside),
            fused=fused,
            groups=len(groups),
            seconds=times.total,
            fused_seconds=fused_seconds,
            share=fused_seconds / times.total,
        ),
        notes=tuple(notes),
    )


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}[{i}]")
    else:
        yield name, value


def describe_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    """The arguments of a call, lists and dicts taken apart."""
    named = [(str(i), a) for i, a in enumerate(args)] + list(kwargs.items())
    return tuple(describe_tensor(name, value) for n, a in named for name, value in _leaves(a, n))
