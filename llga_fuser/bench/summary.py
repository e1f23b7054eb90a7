"""Many results in one place: medians, ratios and geometric means, as text and as data."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from llga_fuser.bench.run import Engine, ModelResult
from llga_fuser.bench.table import configuration

__all__ = ["OURS", "fastest_peer", "ratios", "render_summary", "summary_dict"]

OURS = "llga_fuser"

LABEL = 22  # columns of a model's name


class Ratios(NamedTuple):
    """How many times as fast this fuser is as each other engine on one model."""

    engines: dict[str, float]
    fastest: str | None  # of the others whose numbers agree
    versus_fastest: float | None


def _ran(result: ModelResult) -> list[Engine]:
    return [e for e in result.engines if e.ran and e.median > 0]


def fastest_peer(result: ModelResult) -> Engine | None:
    """The other engine that comes closest to this fuser, or is ahead of it most.

    Without this fuser the one with the lowest median. One with wrong numbers does not count.
    """
    peers = [e for e in _ran(result) if not e.name.startswith("llga_") and e.agrees]
    ours = result.engine(OURS)
    if ours is None:
        return min(peers, key=lambda e: e.median, default=None)
    return min(peers, key=ours.times_as_fast_as, default=None)


def ratios(result: ModelResult) -> Ratios | None:
    """None if this fuser did not run."""
    ours = result.engine(OURS)
    if ours is None or not ours.median:
        return None
    others = {e.name: ours.times_as_fast_as(e) for e in _ran(result) if e is not ours}
    best = fastest_peer(result)
    if best is None:
        return Ratios(others, None, None)
    return Ratios(others, best.name, others[best.name])


def _means(results: Iterable[ModelResult]) -> dict[str, float]:
    """Geometric means over the models on which both ran; "fastest": over their fastest peers."""
    values: dict[str, list[float]] = {}
    for r in map(ratios, results):
        if r is None:
            continue
        for name, ratio in r.engines.items():
            values.setdefault(name, []).append(ratio)
        if r.versus_fastest is not None:
            values.setdefault("fastest", []).append(r.versus_fastest)
    return {name: statistics.geometric_mean(v) for name, v in values.items()}


def _groups(results: Sequence[ModelResult]) -> dict[str, list[ModelResult]]:
    """By data type, batch and threads: only such results have a mean together."""
    groups: dict[str, list[ModelResult]] = {}
    for r in results:
        groups.setdefault(configuration(r.options), []).append(r)
    return groups


def _names(results: Iterable[ModelResult]) -> list[str]:
    return list(dict.fromkeys(e.name for e in itertools.chain(*(r.engines for r in results))))


def summary_dict(results: Sequence[ModelResult]) -> list[dict[str, Any]]:
    """For JSON: one entry for each data type, batch and number of threads."""
    entries = []
    for label, group in _groups(results).items():
        rows = []
        for result in group:
            r = ratios(result)
            rows.append(
                {
                    "model": result.model,
                    "medians": {e.name: e.median for e in _ran(result)},
                    "ratios": {} if r is None else r.engines,
                    "fastest_peer": None if r is None else r.fastest,
                    "versus_fastest_peer": None if r is None else r.versus_fastest,
                }
            )
        entries.append({"configuration": label, "models": rows, "geometric_means": _means(group)})
    return entries


# ------------------------------------------------------------------------------------------- text


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.{4 if value < 0.1 else 3 if value < 10 else 2 if value < 100 else 1}f}"


def _line(label: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = label if len(label) < LABEL else label[: LABEL - 2] + "~"
    columns = (c.rjust(w) for c, w in zip(cells, widths, strict=True))
    return (shown.ljust(LABEL) + "".join(columns)).rstrip()


def _median_cell(engine: Engine | None, best: Engine | None) -> str:
    if engine is None:
        return "- "
    if engine.not_applicable is not None:
        return "n/a "
    if engine.failure is not None:
        return "failed "
    mark = "*" if engine is best else " " if engine.agrees else "!"
    return _milliseconds(engine.median) + mark


def render_summary(results: Sequence[ModelResult]) -> str:
    """Three tables for each data type, batch and number of threads."""
    parts = []
    for label, group in _groups(results).items():
        names = _names(group)
        widths = [max(len(n) + 1, 8) for n in names]
        lines = [f"summary  {label}  median in ms", _line("", [n + " " for n in names], widths)]
        for result in group:
            engines = {e.name: e for e in result.engines}
            best = fastest_peer(result)
            cells = [_median_cell(engines.get(n), best) for n in names]
            lines.append(_line(result.model, cells, widths))
        lines.append("*: fastest peer; !: wrong numbers; n/a: does not run this data type")
        parts.append("\n".join(lines))
        if any(ratios(result) is not None for result in group) and len(names) > 1:
            parts.append(_ratio_table(group, [n for n in names if n != OURS]))
        parts.append(_first_result_table(group, names, widths))
    return "\n\n".join(parts)


def _first_result_table(
    group: Sequence[ModelResult], names: Sequence[str], widths: Sequence[int]
) -> str:
    lines = [
        "seconds from the module to the first result",
        _line("", [n + " " for n in names], widths),
    ]
    for result in group:
        engines = {e.name: e for e in _ran(result)}
        cells = [f"{engines[n].first_result:.2f} " if n in engines else "- " for n in names]
        lines.append(_line(result.model, cells, widths))
    return "\n".join(lines)


def _ratio_table(group: Sequence[ModelResult], names: Sequence[str]) -> str:
    columns = [*names, "fastest"]
    widths = [max(len(n) + 1, 8) for n in columns]

    def cells(values: dict[str, float]) -> list[str]:
        return [f"{values[n]:.2f}x" if n in values else "-" for n in columns]

    lines = [f"times as fast: {OURS} against", _line("", columns, widths)]
    for result in group:
        r = ratios(result)
        values = {} if r is None else dict(r.engines)
        if r is not None and r.versus_fastest is not None:
            values["fastest"] = r.versus_fastest
        lines.append(_line(result.model, cells(values), widths))
    lines.append(_line("geometric mean", cells(_means(group)), widths))
    return "\n".join(lines)
