"""What differs between two reports: builds, data types, versions of oneDNN or of the model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llga_fuser._report.model import SCHEMA, Report, named
from llga_fuser._report.text import duration

__all__ = ["ReportDiff", "compare"]


@dataclass(frozen=True)
class ReportDiff:
    """The differences, first report to second.

    Attributes:
        environment: (before, after) of what differs in versions, instruction set, threads.
        summary: (before, after) of the figures that differ; times always.
        groups: (change, name before, name after), where change is "removed" (no name after),
            "added" (no name before) or "kernel" (the same ops and another implementation, which
            then stand in the place of the names).
        outside: (change, operator and reason, how many): "added" or "removed".
        fallbacks: the same for fallbacks.
    """

    environment: dict[str, tuple[Any, Any]]
    summary: dict[str, tuple[Any, Any]]
    groups: tuple[tuple[str, str, str], ...]
    outside: tuple[tuple[str, str, int], ...]
    fallbacks: tuple[tuple[str, str, int], ...]

    def __bool__(self) -> bool:
        figures = set(self.summary) - {"seconds", "fused_seconds", "share"}
        return bool(self.environment or figures or self.groups or self.outside or self.fallbacks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "environment": {k: list(v) for k, v in self.environment.items()},
            "summary": {k: list(v) for k, v in self.summary.items()},
            "groups": [list(g) for g in self.groups],
            "outside": [list(n) for n in self.outside],
            "fallbacks": [list(f) for f in self.fallbacks],
        }

    def __str__(self) -> str:
        lines = [f"{key}: {a} -> {b}" for key, (a, b) in self.environment.items()]
        before, after = self.summary["seconds"]
        ratio = f" ({before / after:.2f}x)" if after else ""
        lines.append(f"time per call: {duration(before)} -> {duration(after)}{ratio}")
        names = {"operators": "operators", "fused": "operators in groups", "groups": "groups"}
        lines += [
            f"{text}: {self.summary[key][0]} -> {self.summary[key][1]}"
            for key, text in names.items()
            if key in self.summary
        ]
        for change, a, b in self.groups:
            lines.append(
                f"- group {a}"
                if change == "removed"
                else f"+ group {b}"
                if change == "added"
                else f"~ {a} -> {b}"
            )
        for sign, items in (("outside", self.outside), ("fallback", self.fallbacks)):
            for change, text, n in items:
                times = f" ({n} times)" if n > 1 else ""
                lines.append(f"{'+' if change == 'added' else '-'} {sign}: {text}{times}")
        if not self:
            lines.append("the same groups, operators outside and kernels")
        return "\n".join(line if len(line) <= 100 else line[:97] + "..." for line in lines)


def _counts(before: list[str], after: list[str]) -> tuple[tuple[str, str, int], ...]:
    old, new = Counter(before), Counter(after)
    removed = [("removed", text, n) for text, n in (old - new).items()]
    return (*removed, *(("added", text, n) for text, n in (new - old).items()))


def _kernels(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{p['kind']} {p['implementation']}" for p in group["primitives"])


def _signature(group: Mapping[str, Any]) -> str:
    """The ops, and the data type they work in."""
    dtypes = dict.fromkeys(v["dtype"] for v in group["outputs"] if v["dtype"])
    return f"{group['name']} {'/'.join(dtypes)}".strip()


def _groups(
    before: list[Mapping[str, Any]], after: list[Mapping[str, Any]]
) -> tuple[tuple[str, str, str], ...]:
    old, new = [_signature(g) for g in before], [_signature(g) for g in after]
    changes: list[tuple[str, str, str]] = []
    matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            for a, b in zip(before[i1:i2], after[j1:j2], strict=True):
                if _kernels(a) != _kernels(b):
                    name = _signature(a)
                    changes.append(("kernel", f"{name}: {_kernels(a)}", _kernels(b)))
            continue
        changes += [("removed", name, "") for name in old[i1:i2]]
        changes += [("added", "", name) for name in new[j1:j2]]
    return tuple(changes)


def _data(report: Report | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(report, Report):
        return report.to_dict()
    if not isinstance(report, Mapping):
        raise TypeError(f"other: expected a Report or a dict, got {type(report).__name__}")
    if report.get("schema") != SCHEMA:
        raise ValueError(f"other: expected schema {SCHEMA}, got {report.get('schema')!r}")
    return report


def compare(first: Report | Mapping[str, Any], second: Report | Mapping[str, Any]) -> ReportDiff:
    """See `Report.diff`."""
    a, b = _data(first), _data(second)
    keys = dict.fromkeys([*a["environment"], *b["environment"]])
    environment = {
        k: (a["environment"].get(k), b["environment"].get(k))
        for k in keys
        if a["environment"].get(k) != b["environment"].get(k)
    }
    summary = {
        k: (a["summary"][k], b["summary"][k])
        for k in ("operators", "fused", "groups", "seconds", "fused_seconds", "share")
        if k in ("seconds", "fused_seconds", "share") or a["summary"][k] != b["summary"][k]
    }

    def outside(report: Mapping[str, Any]) -> list[str]:
        return [named(n["kind"], n["reason"]) for n in report["outside"]]

    def fallbacks(report: Mapping[str, Any]) -> list[str]:
        return [
            f"{report['groups'][f['group']]['name']}: {f['reason']}" for f in report["fallbacks"]
        ]

    return ReportDiff(
        environment=environment,
        summary=summary,
        groups=_groups(a["groups"], b["groups"]),
        outside=_counts(outside(a), outside(b)),
        fallbacks=_counts(fallbacks(a), fallbacks(b)),
    )
