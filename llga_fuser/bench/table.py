"""The result of one model as text of at most 100 columns."""

from __future__ import annotations

import math

from llga_fuser.bench.run import INT8_LEAST_SQNR, Engine, ModelResult, Options

__all__ = ["configuration", "heading", "render"]

_COLUMNS = (  # heading, width
    ("engine", -12),
    ("median", 9),
    ("min", 9),
    ("noise", 6),
    ("vs TS", 7),
    ("vs builtin", 11),
    ("warm-up", 8),
    ("peak", 7),
    ("max err", 9),
    ("rel err", 9),
    ("groups", 7),
    ("", 6),
)


def _time(seconds: float) -> str:
    if seconds < 1e-4:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.{3 if seconds < 1e-2 else 2}f}"


def _ratio(base: Engine | None, engine: Engine) -> str:
    return f"{engine.times_as_fast_as(base):.2f}x" if base else "-"


def _error(value: float | None) -> str:
    return "nan" if value is None else f"{value:.1e}"


def _accuracy(result: ModelResult, e: Engine) -> list[str]:
    """The cells of the two columns; in int8 they are headed SQNR and top-1."""
    if result.options.dtype != "int8":
        return [_error(e.max_abs_error), _error(e.relative_error)]
    if not e.relative_error:
        sqnr = "nan" if e.relative_error is None else "inf"
    else:
        sqnr = f"{-20 * math.log10(e.relative_error):.1f} dB"
    return [sqnr, "-" if e.top1 is None else f"{100 * e.top1:.0f}%"]


def _headings(result: ModelResult) -> list[str]:
    names = {"max err": "SQNR", "rel err": "top-1"} if result.options.dtype == "int8" else {}
    return [names.get(name, name) for name, _ in _COLUMNS]


def _row(cells: list[str]) -> str:
    parts = []
    for cell, (_, width) in zip(cells, _COLUMNS, strict=True):
        parts.append(cell.ljust(-width) if width < 0 else cell.rjust(width))
    return "".join(parts).rstrip()


def configuration(o: Options) -> str:
    """What results have in common that may be summed up together."""
    dtype = f"{o.dtype} (fpmath {o.fpmath})" if o.fpmath else o.dtype
    return f"{dtype}  batch {o.batch}  {o.threads} thread{'s' if o.threads > 1 else ''}"


def heading(result: ModelResult) -> str:
    return f"{result.model}  input {result.size}  {configuration(result.options)}"


def render(result: ModelResult) -> str:
    """The table, and what has to be said about it."""
    script, builtin = result.engine("torchscript"), result.engine("builtin")
    lines = [heading(result), _row(_headings(result))]
    for e in result.engines:
        if e.failure is not None:
            lines.append(f"{e.name:12}  failed: {e.failure}"[:100])
            continue
        if e.not_applicable is not None:
            lines.append(f"{e.name:12}  not applicable: {e.not_applicable}"[:100])
            continue
        lines.append(
            _row(
                [
                    e.name,
                    _time(e.median),
                    _time(e.minimum),
                    f"{100 * e.spread:.0f}%",
                    _ratio(script, e),
                    _ratio(builtin, e),
                    f"{e.warm_up:.2f} s",
                    "-" if e.peak_memory is None else f"{e.peak_memory / 2**20:.0f} M",
                    *_accuracy(result, e),
                    "-" if e.groups is None else str(e.groups),
                    "ok" if e.agrees else "WRONG",
                ]
            )
        )
    return "\n".join([*lines, *_notes(result)])


def _notes(result: ModelResult) -> list[str]:
    notes = ["times in ms; vs: how many times as fast; noise: interquartile range of the calls"]
    for e in result.engines:
        if e.groups is not None and e.failure is None:
            fused, total = e.nodes_fused or 0, (e.nodes_fused or 0) + (e.nodes_outside or 0)
            notes.append(f"{e.name}: {fused} of {total} operators in {e.groups} fusion groups")
        if e.fallbacks:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in e.fallbacks.items())
            notes.append(
                f"{e.name}: groups ran in the interpreter after the warm-up: {reasons}"[:100]
            )
    limit = f"numbers agree up to a relative error of {result.limit:.1e} against eager fp32"
    if result.bf16_rounding is not None:
        limit += f" (eager's own bf16: {result.bf16_rounding:.1e})"
    if result.fpmath_limit is not None:
        limit += f", llga_fuser's up to {result.fpmath_limit:.1e}"
    if result.options.dtype == "int8":
        limit = (
            f"int8 agrees from {INT8_LEAST_SQNR:g} dB against eager fp32 on inputs not used in "
            "calibration"
        )
    notes.append(limit)
    noise = f"{result.rounds} rounds, {result.rounds_left_out} left out as others kept the CPU busy"
    if result.foreign_load is not None:
        noise += f"; foreign load up to {100 * result.foreign_load:.0f}% of one CPU"
    notes.append(noise)
    return notes
