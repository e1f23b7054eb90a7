"""What a report consists of. Everything in it is plain data, made by `collect`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = [
    "SCHEMA",
    "Conversion",
    "Fallback",
    "Group",
    "Node",
    "Op",
    "Partition",
    "Primitive",
    "Report",
    "Summary",
    "TensorInfo",
    "UnfusedError",
]

# Version of what `Report.to_dict` returns: a field is never renamed or removed under one number.
SCHEMA = 1

_PRODUCTS = ("convolution", "deconvolution", "matmul")


class UnfusedError(RuntimeError):
    """Strict mode: something is not fused. The message has a line for each operator and reason."""


@dataclass(frozen=True)
class TensorInfo:
    """One value that a group or an operator reads or returns.

    Attributes:
        name: in the optimised graph, without %.
        dtype: "float32", ...; "" for what is no tensor.
        shape: sizes; empty for a 0-dim tensor and for what is no tensor.
        stride: in elements.
        layout: "contiguous", "channels last", "strided", or "" for what is no tensor.
        value: of an argument that is no tensor, as text.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    layout: str = ""
    value: str = ""

    def __str__(self) -> str:
        if not self.dtype:
            return self.value or "?"
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {short_dtype(self.dtype)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "stride": list(self.stride),
            "layout": self.layout,
            "value": self.value,
        }


@dataclass(frozen=True)
class Op:
    """One operator of the model.

    Attributes:
        kind: "aten::relu".
        source: the line of the model that calls it, "torchvision/models/resnet.py:92"; "" unknown.
        scope: the submodule it belongs to, "layer1.0.conv1"; "" unknown.
    """

    kind: str
    source: str
    scope: str

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "source": self.source, "scope": self.scope}


@dataclass(frozen=True)
class Primitive:
    """One kernel that ran for a group: oneDNN's, or one of the fuser's own.

    Attributes:
        kind: "convolution", "matmul", "reorder", ...
        implementation: oneDNN's name of it, "brgconv:avx512_core_amx"; the fuser's own begin with
            ``llga_``.
        isa: the instruction set in that name; where it names none, the one that oneDNN may use at
            most; "any" for reference code.
        layouts: of its operands, as oneDNN calls them: {"src": "f32 acdb", "wei": "f32 Acdb16a"};
            for the fuser's own, of the first operand and the first result ("src", "dst").
        problem: sizes, in oneDNN's spelling; for the fuser's own, those of the first operand.
    """

    kind: str
    implementation: str
    isa: str
    layouts: Mapping[str, str]
    problem: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "implementation": self.implementation,
            "isa": self.isa,
            "layouts": dict(self.layouts),
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Conversion:
    """A change of layout or data type at the border of a group.

    Attributes:
        group: index of the group.
        kind: "reorder", "copy", "cast", or the operator outside that does it ("aten::contiguous").
        text: what is changed into what.
    """

    group: int
    kind: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        return {"group": self.group, "kind": self.kind, "text": self.text}


@dataclass(frozen=True)
class Fallback:
    """A group ran in the TorchScript interpreter, once everything was warm.

    Attributes:
        group: index of the group.
        reason: why.
        calls: in one call of the model, on average.
    """

    group: int
    reason: str
    calls: float

    def to_dict(self) -> dict[str, Any]:
        return {"group": self.group, "reason": self.reason, "calls": self.calls}


@dataclass(frozen=True)
class Node:
    """One operator outside all groups.

    Attributes:
        index: position among the groups and operators in execution order.
        op: the operator.
        reason: why it is not fused.
        outputs: names of the values it returns.
        calls: in one call of the model; 0 if it was not seen to run.
        seconds: per call of the model.
        share: of the time of a call, 0 to 1.
        block: the control flow it is in, "if/else"; "" at top level.
    """

    index: int
    op: Op
    reason: str
    outputs: tuple[str, ...]
    calls: float
    seconds: float
    share: float
    block: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            **self.op.to_dict(),
            "reason": self.reason,
            "outputs": list(self.outputs),
            "calls": self.calls,
            "seconds": self.seconds,
            "share": self.share,
            "block": self.block,
        }


@dataclass(frozen=True)
class Partition:
    """What oneDNN takes as one piece: a graph of oneDNN ops. A group has one as a rule.

    Attributes:
        group: index of the group.
        index: position in the report's flat list.
    """

    group: int
    index: int
    _part: Mapping[str, Any] = field(repr=False)
    _description: Any = field(repr=False)
    _record: Callable[[int], tuple[list[Any], list[Any]]] = field(repr=False)
    _environment: Mapping[str, Any] = field(repr=False)

    @property
    def op_kinds(self) -> list[str]:
        """Kinds of its oneDNN ops, such as ["Convolution", "ReLU"]."""
        return [op["kind"] for op in self._part["graph"]]

    def to_dict(self) -> dict[str, Any]:
        """The graph in the format of oneDNN's graph dump, which `dnnl_graph.load` takes.

        The format is described in docs/dnnl_graph.md. Source: oneDNN, Graph Dump.
        """
        ops = [dict(op) for op in self._part["graph"]]
        written = {lt["id"] for op in ops for lt in op["outputs"]}
        read = {lt["id"]: lt for op in ops for lt in op["inputs"]}
        # An output that is read inside, too: an End op says that somebody outside reads it.
        last = max(op["id"] for op in ops)
        for tid in self._part["outputs"]:
            if tid in read:
                last += 1
                ops.append(
                    {
                        "id": last,
                        "name": "output",
                        "kind": "End",
                        "attrs": {},
                        "inputs": [read[tid]],
                        "outputs": [],
                    }
                )
        return {
            "version": self._environment["onednn"],
            "engine_kind": "cpu",
            "fpmath_mode": _FPMATH[self._description.fpmath_mode],
            "fpmath_mode_apply_to_int": "false",
            "input_ports": list(dict.fromkeys(t for t in read if t not in written)),
            "output_ports": list(self._part["outputs"]),
            "graph": ops,
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The graph as the text of such a file, written to `path` if given.

        `dnnl_graph.run(dnnl_graph.load(text), {**p.constants, **p.inputs})` computes what the group
        computed, `p.outputs`.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=2)
        text = re.sub(
            r'"(?:\\.|[^"\\])*"|-?Infinity|NaN',
            lambda m: {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(m[0], m[0]),
            text,
        )
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @property
    def constants(self) -> dict[int, Tensor]:
        """Constant inputs by id of the logical tensor; numbers are tensors of shape {1}."""
        known = set(self._description.constant_ids)
        return {
            tid: self._description.constant(tid) for tid in self._part["inputs"] if tid in known
        }

    @property
    def inputs(self) -> dict[int, Tensor]:
        """The other inputs by id, as the group gets them when the model is called once more.

        Of quantized tensors, the integers. Runs the model with the report's own arguments. Values
        that another partition of the same group computes are not among them.
        """
        places, (tensors, _) = self._description.inputs, self._record(self.group)
        found = {t: tensors[places[t]] for t in self._part["inputs"] if t in places}
        # oneDNN has no 0-dim tensors.
        return {t: _integers(v.reshape(1) if v.dim() == 0 else v) for t, v in found.items()}

    @property
    def outputs(self) -> dict[int, Tensor]:
        """The outputs by id, as the group returns them in that call; see `inputs`."""
        places, (_, tensors) = self._description.outputs, self._record(self.group)
        return {t: _integers(tensors[places[t]]) for t in self._part["outputs"] if t in places}


def _integers(value: Tensor) -> Tensor:
    return value.int_repr() if value.is_quantized else value


@dataclass(frozen=True)
class Group:
    """One fusion group.

    Attributes:
        index: position among the groups, in execution order.
        position: position among the groups and the operators outside.
        name: made of its ops, "conv2d+relu+add"; the name it has in profiles too.
        ops: the operators in it.
        inputs: what it reads, in the first call after the warm-up.
        outputs: what it returns there.
        primitives: the kernels that ran, reorders included, the fuser's own behind oneDNN's; empty
            if it fell back.
        partitions: oneDNN's pieces, one as a rule.
        calls: in one call of the model.
        seconds: per call of the model, the median of the rounds.
        share: of the time of a call, 0 to 1.
        block: the control flow it is in, "loop"; "" at top level.
        note: why there is nothing to say about kernels and partitions; "" otherwise.
    """

    index: int
    position: int
    name: str
    ops: tuple[Op, ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    primitives: tuple[Primitive, ...]
    partitions: tuple[Partition, ...]
    calls: float
    seconds: float
    share: float
    block: str
    note: str

    @property
    def sources(self) -> list[str]:
        """The lines of the model, each once."""
        return list(dict.fromkeys(op.source for op in self.ops if op.source))

    @property
    def scopes(self) -> list[str]:
        """The submodules, each once."""
        return list(dict.fromkeys(op.scope for op in self.ops if op.scope))

    @property
    def main(self) -> Primitive | None:
        """The first convolution or product, else the first that is no reorder; None without any."""
        computing = [p for p in self.primitives if p.kind != "reorder"]
        products = [p for p in computing if p.kind in _PRODUCTS]
        return next(iter(products or computing or self.primitives), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "position": self.position,
            "name": self.name,
            "ops": [op.to_dict() for op in self.ops],
            "sources": self.sources,
            "inputs": [v.to_dict() for v in self.inputs],
            "outputs": [v.to_dict() for v in self.outputs],
            "primitives": [p.to_dict() for p in self.primitives],
            "partitions": [p.op_kinds for p in self.partitions],
            "calls": self.calls,
            "seconds": self.seconds,
            "share": self.share,
            "block": self.block,
            "note": self.note,
        }


@dataclass(frozen=True)
class Summary:
    """The report in figures.

    Attributes:
        operators: of the model, in groups and outside; constants, control flow and arithmetic on
            sizes are not counted.
        fused: those in groups.
        groups: the number of groups.
        seconds: one call of the model, the median of the rounds.
        fused_seconds: thereof in groups.
        share: `fused_seconds / seconds`.
    """

    operators: int
    fused: int
    groups: int
    seconds: float
    fused_seconds: float
    share: float

    def __str__(self) -> str:
        return (
            f"{self.fused} of {self.operators} nodes in {self.groups} groups, "
            f"{100 * self.share:.1f} % of time"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "operators": self.operators,
            "fused": self.fused,
            "groups": self.groups,
            "seconds": self.seconds,
            "fused_seconds": self.fused_seconds,
            "share": self.share,
            "text": str(self),
        }


@dataclass(frozen=True)
class Report:
    """What became of a model. Print it, or see `to_dict`, `to_html` and `diff`.

    Attributes:
        model: its name.
        inputs: the arguments of the call that was looked at.
        environment: versions, instruction set and threads, by name.
        groups: in execution order.
        outside: the operators in no group, in execution order.
        conversions: changes of layout and data type at the groups' borders.
        fallbacks: groups that run in the interpreter.
        edges: what reads what, as pairs of positions (`Group.position`, `Node.index`).
        summary: the figures.
        notes: what else one should know.
    """

    model: str
    inputs: tuple[TensorInfo, ...]
    environment: Mapping[str, Any]
    groups: tuple[Group, ...]
    outside: tuple[Node, ...]
    conversions: tuple[Conversion, ...]
    fallbacks: tuple[Fallback, ...]
    edges: tuple[tuple[int, int], ...]
    summary: Summary
    notes: tuple[str, ...]

    @property
    def partitions(self) -> list[Partition]:
        """The partitions of all groups, in execution order."""
        return [p for group in self.groups for p in group.partitions]

    def __str__(self) -> str:
        from llga_fuser._report.text import render

        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON data; docs/report.md lists the fields, `SCHEMA` is their version."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "inputs": [v.to_dict() for v in self.inputs],
            "environment": dict(self.environment),
            "summary": self.summary.to_dict(),
            "groups": [g.to_dict() for g in self.groups],
            "outside": [n.to_dict() for n in self.outside],
            "conversions": [c.to_dict() for c in self.conversions],
            "fallbacks": [f.to_dict() for f in self.fallbacks],
            "edges": [list(e) for e in self.edges],
            "notes": list(self.notes),
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """`to_dict` as text, written to `path` if given.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page with the graph, the times and the tables, written to `path` if given.

        It needs no network and no other file.

        Raises:
            OSError: the file cannot be written.
        """
        from llga_fuser._report.page import render

        text = render(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def diff(self, other: Report | Mapping[str, Any]) -> Any:
        """What is different in `other`: another build, data type, oneDNN or version of the model.

        Args:
            other: a report, or what its `to_dict` gave (a file read with `json.load`).

        Returns:
            A `ReportDiff`, which is False if nothing but times differs.

        Raises:
            TypeError: `other` is neither.
            ValueError: `other` is a dict of another schema.
        """
        from llga_fuser._report.diff import compare

        return compare(self, other)

    def check_strict(self) -> None:
        """Raises if an operator is outside the groups, or a group runs in the interpreter.

        Raises:
            UnfusedError: with one line for each.
        """
        lines = [
            named(n.op.kind, n.reason) + (f" ({n.op.source})" if n.op.source else "")
            for n in self.outside
        ]
        lines += [
            f"group {f.group} ({self.groups[f.group].name}) runs in the interpreter: {f.reason}"
            for f in self.fallbacks
        ]
        if lines:
            raise UnfusedError(
                f"{self.model}: {len(lines)} not fused\n" + "\n".join(f"  {t}" for t in lines)
            )

    def items(self) -> Iterator[Group | Node]:
        """Groups and operators outside, together in execution order."""
        merged: list[tuple[int, Group | Node]] = [(g.position, g) for g in self.groups]
        merged += [(n.index, n) for n in self.outside]
        for _, item in sorted(merged, key=lambda pair: pair[0]):
            yield item


def named(kind: str, reason: str) -> str:
    """The reason, with the operator's name in front unless it is there already."""
    return reason if reason.startswith((kind, kind.split("::")[-1])) else f"{kind}: {reason}"


# dnnl_fpmath_mode_t
_FPMATH = ("strict", "bf16", "f16", "any", "tf32")

_DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float64": "f64",
    "int64": "s64",
    "int32": "s32",
    "int8": "s8",
    "uint8": "u8",
}


def short_dtype(dtype: str) -> str:
    """As oneDNN calls it."""
    return _DTYPES.get(dtype, dtype)
