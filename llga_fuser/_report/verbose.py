"""What oneDNN (ONEDNN_VERBOSE, from 3.2 on) and the fuser say about the kernels they run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from llga_fuser import _C
from llga_fuser._report.model import Primitive

__all__ = ["parse", "users_verbosity"]

# Longest first: avx2 is part of avx2_vnni.
_ISA = re.compile(
    r"avx512_core_amx_fp16|avx512_core_amx|avx512_core_fp16|avx512_core_bf16|avx512_core_vnni"
    r"|avx512_core|avx10_\w+|avx2_vnni_2|avx2_vnni|avx2|avx512|avx|sse41"
)
# "src_f32:a:blocked:acdb::f0" in 3.2, "src:f32:a:blocked:acdb::f0" in later ones.
_MEMORY = re.compile(
    r"^(\w+?)[_:](f64|f32|bf16|f16|f8_\w+|s64|s32|s8|u8|s4|u4|boolean|undef):[^:]*:(\w*):([^:]*)"
)


def users_verbosity() -> int:
    """The level that the user's ONEDNN_VERBOSE (or DNNL_VERBOSE) asks for: 0, 1 or 2."""
    text = os.environ.get("ONEDNN_VERBOSE", os.environ.get("DNNL_VERBOSE", "")).lower()
    if text in ("", "0", "none"):
        return 0
    if text in ("2", "all") or "create" in text:
        return 2
    return 1


def _isa(implementation: str) -> str:
    found = _ISA.search(implementation)
    if found:
        return found[0]
    if implementation.startswith(("ref", "simple")) or implementation.endswith(":any"):
        return "any"
    return str(_C.runtime_info()["isa"])


def _layouts(text: str) -> dict[str, str]:
    layouts = {}
    for memory in text.split():
        found = _MEMORY.match(memory)
        if found:
            name, dtype, kind, tag = found.groups()
            layouts[name] = f"{dtype} {tag or kind}".strip()
    return layouts


def _primitive(line: str) -> Primitive | None:
    """The kernel that one line tells of, or None for a line of another kind."""
    fields = line.split(",")
    if not fields[0].startswith("onednn_verbose") or "exec" not in fields[:6]:
        return None
    at = fields.index("exec")
    # Later versions also tell of whole partitions.
    if "graph" in fields[:at] or len(fields) < at + 6:
        return None
    kind, implementation, memory = fields[at + 2], fields[at + 3], fields[at + 5]
    return Primitive(
        kind=kind,
        implementation=implementation,
        isa=_isa(implementation),
        layouts=_layouts(memory),
        problem=fields[-2],
    )


def _own_primitive(line: str) -> Primitive:
    kind, implementation, source, result, problem = line.split(",")[2:]
    layouts = {"src": source, "dst": result}
    return Primitive(kind, implementation, _isa(implementation), layouts, problem)


def parse(text: str) -> tuple[list[tuple[int, list[Primitive]]], str]:
    """What ran between the lines that mark where a group begins and ends.

    Returns:
        (kernel id of the group, its kernels) in the order of execution, the fuser's own behind
        oneDNN's; and the lines that are somebody else's.
    """
    executions: list[tuple[int, list[Primitive]]] = []
    inside = False
    others = []
    for line in _lines(text):
        if line.startswith("llga_fuser,begin,"):
            executions.append((int(line.split(",")[2]), []))
            inside = True
        elif line.startswith("llga_fuser,exec,"):
            executions[-1][1].append(_own_primitive(line))
        elif line.startswith("llga_fuser,end"):
            inside = False
        elif line.startswith("onednn_verbose"):
            primitive = _primitive(line)
            if primitive is not None and inside:
                executions[-1][1].append(primitive)
        else:
            others.append(line)
    return executions, "\n".join(others)


def _lines(text: str) -> Iterator[str]:
    yield from text.splitlines()
