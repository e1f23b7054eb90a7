"""`bench --plot FILE`: a bar chart of how much faster each engine is than the first one."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Sequence

from llga_fuser.bench.run import ModelResult
from llga_fuser.bench.table import configuration

__all__ = ["FORMATS", "PlotError", "check", "write"]

FORMATS = (".png", ".svg")
# Colours that differ for colour-blind readers too; this fuser's stands out.
_COLOURS = ("#bbbbbb", "#888888", "#66ccee", "#4477aa", "#228833", "#ccbb44", "#aa3377", "#000000")
_OURS = "#ee6677"


class PlotError(Exception):
    """The chart cannot be drawn; one line for the user."""


def check(path: str) -> None:
    """Before the work, not after it.

    Raises:
        PlotError: the file's name says no known format, or matplotlib is missing.
    """
    if pathlib.Path(path).suffix.lower() not in FORMATS:
        raise PlotError(f"--plot: {path!r} does not end in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError(
            "--plot needs matplotlib, which comes with the extra 'plot': "
            "python -m pip install 'llga_fuser[plot]'"
        )


def speedups(results: Sequence[ModelResult]) -> tuple[str, dict[str, list[float | None]]]:
    """The engine that counts as 1, and for each engine a ratio for each result."""
    names = list(dict.fromkeys(e.name for r in results for e in r.engines))
    base = names[0]
    values: dict[str, list[float | None]] = {name: [] for name in names}
    for result in results:
        first = result.engine(base)
        for name in names:
            engine = result.engine(name)
            ratio = None
            if first is not None and engine is not None and engine.agrees and engine.median > 0:
                ratio = engine.times_as_fast_as(first)
            values[name].append(ratio)
    return base, values


def labels(results: Sequence[ModelResult]) -> list[str]:
    """The model, and what its run was if not all are the same."""
    various = len({configuration(r.options) for r in results}) > 1
    return [f"{r.model}\n{configuration(r.options)}" if various else r.model for r in results]


def write(path: str, results: Sequence[ModelResult]) -> None:
    """Draws all results into one chart."""
    # Not through pyplot: nothing global, and no display is looked for.
    from matplotlib.figure import Figure

    base, values = speedups(results)
    width = 0.8 / len(values)
    figure = Figure(figsize=(max(6.0, 1.5 + len(results) * (0.4 + 0.16 * len(values))), 4.5))
    axes = figure.add_subplot()
    for i, (name, ratios) in enumerate(values.items()):
        colour = _OURS if name == "llga_fuser" else _COLOURS[i % len(_COLOURS)]
        at = [k - 0.4 + width * (i + 0.5) for k in range(len(results))]
        axes.bar(at, [r or 0.0 for r in ratios], width, label=name, color=colour)
        for x, ratio in zip(at, ratios, strict=True):
            if ratio is not None and name != base:
                text = f" {ratio:.2f}"
                axes.text(x, ratio, text, ha="center", va="bottom", fontsize=6, rotation=90)
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(results)), labels(results), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(f"times as fast as {base}")
    if len({configuration(r.options) for r in results}) == 1:
        axes.set_xlabel(configuration(results[0].options), fontsize=8)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0)}  # above the bars
    axes.legend(fontsize=7, ncols=len(values), columnspacing=1.0, frameon=False, **place)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
