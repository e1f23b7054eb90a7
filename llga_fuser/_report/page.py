"""A report as one HTML page: nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from llga_fuser._report.model import Group, Node, Report
from llga_fuser._report.text import duration, heading

__all__ = ["render"]

# Of the drawing, in its own units (pixels before zooming).
BOX_WIDTH, BOX_HEIGHT = 232, 40
COLUMN, ROW, MARGIN = 262, 58, 24

_COLD, _WARM, _HOT = (226, 236, 247), (253, 224, 130), (240, 104, 52)


def _colour(share: float, largest: float) -> str:
    """From pale blue (no time) to red (the largest share), by the square root."""
    x = math.sqrt(share / largest) if largest > 0 else 0.0
    low, high, t = (_COLD, _WARM, 2 * x) if x < 0.5 else (_WARM, _HOT, 2 * x - 1)
    return "#" + "".join(f"{round(a + (b - a) * t):02x}" for a, b in zip(low, high, strict=True))


# -------------------------------------------------------------------------------------- the layout


def layout(count: int, edges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(column, row) of each node: rows by the longest path, a chain stays in its column."""
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for a, b in edges:
        if a < b:  # not the way back of a loop
            before[b].append(a)
            after[a].append(b)
    rows = [0] * count
    for i in range(count):
        rows[i] = max((rows[p] + 1 for p in before[i]), default=0)
    for i in range(count):
        if not before[i] and after[i]:  # right above its first reader
            rows[i] = max(0, min(rows[n] for n in after[i]) - 1)
    below = [0] * count  # how much hangs below a node: that branch keeps the column
    for i in reversed(range(count)):
        below[i] = max((below[n] + 1 for n in after[i]), default=0)
    columns = [0] * count
    taken: dict[int, set[int]] = defaultdict(set)
    for i in sorted(range(count), key=lambda i: (rows[i], -below[i], i)):
        close = [p for p in before[i] if rows[p] == rows[i] - 1]
        wanted = (
            columns[max(close or before[i], key=lambda p: (rows[p], below[p]))] if before[i] else 0
        )
        step = 0
        while wanted + step in taken[rows[i]]:
            step = -step if step > 0 and wanted - step >= 0 else abs(step) + 1
        columns[i] = wanted + step
        taken[rows[i]].add(columns[i])
    return list(zip(columns, rows, strict=True))


def _edge(a: tuple[int, int], b: tuple[int, int]) -> str:
    """The path of one edge between two (column, row)."""
    ax, ay = MARGIN + a[0] * COLUMN, MARGIN + a[1] * ROW
    bx, by = MARGIN + b[0] * COLUMN, MARGIN + b[1] * ROW
    if a[0] == b[0] and abs(b[1] - a[1]) > 1:  # around what lies between
        x, y1, y2 = ax + BOX_WIDTH, ay + BOX_HEIGHT * 0.7, by + BOX_HEIGHT * 0.3
        bulge = 18 + 10 * math.sqrt(abs(b[1] - a[1]))
        return (
            f"M{x} {y1:.0f}C{x + bulge:.0f} {y1 + 8:.0f} {x + bulge:.0f} {y2 - 8:.0f} {x} {y2:.0f}"
        )
    x1, y1, x2, y2 = ax + BOX_WIDTH / 2, ay + BOX_HEIGHT, bx + BOX_WIDTH / 2, float(by)
    bend = max(8.0, (y2 - y1) / 2)
    return f"M{x1:.0f} {y1}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _label(item: Group | Node) -> tuple[str, str]:
    if isinstance(item, Group):
        shapes = ", ".join(str(v) for v in item.outputs if v.dtype)
        return item.name, shapes or item.note
    return item.op.kind.removeprefix("aten::"), item.op.scope or item.op.source.rsplit("/", 1)[-1]


def _graph(report: Report) -> str:
    items = list(report.items())
    if not items:
        return "<p>The graph has no operators.</p>"
    places = layout(len(items), list(report.edges))
    width = 2 * MARGIN + max(c for c, _ in places) * COLUMN + BOX_WIDTH
    arcs = [b[1] - a[1] for a, b in ((places[i], places[j]) for i, j in report.edges)]
    width += round(18 + 10 * math.sqrt(max([1, *map(abs, arcs)])))
    height = 2 * MARGIN + max(r for _, r in places) * ROW + BOX_HEIGHT
    largest = max((g.share for g in report.groups), default=0.0)
    lines = [f'<svg id="graph" viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    lines.append('<g class="edges">')
    for a, b in report.edges:
        near = ' class="near"' if abs(places[b][1] - places[a][1]) == 1 else ""
        path = _edge(places[a], places[b])
        lines.append(f'<path{near} data-a="{a}" data-b="{b}" d="{path}"/>')
    lines.append("</g>")
    for i, item in enumerate(items):
        c, r = places[i]
        x, y = MARGIN + c * COLUMN, MARGIN + r * ROW
        name, detail = _label(item)
        group = isinstance(item, Group)
        kind = "group" if group else "outside"
        if item.calls == 0:
            kind += " idle"
        fill = f' style="fill:{_colour(item.share, largest)}"' if group else ""
        time = duration(item.seconds) if item.calls else ""
        room = int((BOX_WIDTH - 28 - 6.2 * len(time)) / 7)
        lines.append(
            f'<g class="node {kind}" data-i="{i}" transform="translate({x},{y})" tabindex="0">'
            f'<rect width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"{fill}/>'
            f'<text x="10" y="17" class="name">{html.escape(_clip(name, room))}</text>'
            f'<text x="{BOX_WIDTH - 10}" y="17" class="time">{time}</text>'
            f'<text x="10" y="32" class="detail">{html.escape(_clip(detail, 36))}</text></g>'
        )
    lines.append("</svg>")
    return "\n".join(lines)


def _strip(report: Report) -> str:
    """All nodes as thin lines beside the graph: what is where, and a way to get there."""
    items = list(report.items())
    places = layout(len(items), list(report.edges))
    rows = 1 + max((r for _, r in places), default=0)
    largest = max((g.share for g in report.groups), default=0.0)
    heat: dict[int, float] = defaultdict(float)
    outside = set()
    for item, (_, row) in zip(items, places, strict=True):
        if isinstance(item, Group):
            heat[row] = max(heat[row], item.share)
        else:
            outside.add(row)
    lines = [f'<svg id="strip" viewBox="0 0 10 {rows}" preserveAspectRatio="none">']
    for row, share in sorted(heat.items()):
        colour = _colour(share, largest)
        lines.append(f'<rect x="0" y="{row}" width="7" height="1" style="fill:{colour}"/>')
    lines += [
        f'<rect x="7" y="{row}" width="3" height="1" class="gap"/>' for row in sorted(outside)
    ]
    return "".join([*lines, "</svg>"])


# --------------------------------------------------------------------------------------- the chart


def _chart(report: Report) -> str:
    """One bar for each group and operator outside that took time, in execution order."""
    items = [i for i in report.items() if isinstance(i, Group) or i.seconds > 0]
    if not items:
        return ""
    largest = max(i.seconds for i in items) or 1.0
    hottest = max((g.share for g in report.groups), default=0.0)
    width, height, top, left = 1000.0, 150, 8, 46
    step = (width - left) / len(items)
    bar = step * (0.86 if step > 3 else 1.0)
    lines = [f'<svg id="chart" viewBox="0 0 {width:.0f} {height + top + 4}" role="img">']
    for part in (1.0, 0.5):
        y = top + height * (1 - part)
        lines.append(f'<line x1="{left}" x2="{width:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{left - 5}" y="{y + 3:.1f}">{duration(largest * part)}</text>')
    for n, item in enumerate(items):
        tall = max(0.8, height * item.seconds / largest)
        group = isinstance(item, Group)
        fill = f' style="fill:{_colour(item.share, hottest)}"' if group else ""
        position = item.position if isinstance(item, Group) else item.index
        name, _ = _label(item)
        title = f"{name}: {duration(item.seconds)}, {100 * item.share:.1f} %"
        lines.append(
            f'<rect class="bar {"group" if group else "outside"}" data-i="{position}" '
            f'x="{left + n * step:.2f}" y="{top + height - tall:.2f}" width="{max(bar, 0.5):.2f}" '
            f'height="{tall:.2f}"{fill}><title>{html.escape(title)}</title></rect>'
        )
    lines.append("</svg>")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------- the tables


def _table(head: list[str], rows: list[tuple[int | None, list[str]]]) -> str:
    """Cells are HTML already; a row with a position selects that node."""
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    lines = [f"<table><thead><tr>{cells}</tr></thead><tbody>"]
    for position, row in rows:
        go = f' class="go" data-i="{position}"' if position is not None else ""
        lines.append(f"<tr{go}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>")
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _bar(share: float, largest: float) -> str:
    width = 100 * share / largest if largest else 0
    return (
        f'<span class="meter"><i style="width:{width:.1f}%;background:{_colour(share, largest)}">'
        f"</i></span>{100 * share:.1f} %"
    )


def _groups(report: Report) -> str:
    largest = max((g.share for g in report.groups), default=0.0)
    rows: list[tuple[int | None, list[str]]] = []
    for g in sorted(report.groups, key=lambda g: -g.seconds):
        main = g.main
        kernel = f"{main.implementation} <small>{html.escape(main.isa)}</small>" if main else ""
        rows.append(
            (
                g.position,
                [
                    str(g.index),
                    f"<b>{html.escape(g.name)}</b>",
                    html.escape(", ".join(str(v) for v in g.outputs if v.dtype)),
                    kernel or html.escape(g.note),
                    html.escape(", ".join(g.sources)),
                    duration(g.seconds),
                    _bar(g.share, largest),
                ],
            )
        )
    head = ["#", "group", "output", "kernel", "source", "time", "share"]
    return _table(head, rows)


def _outside(report: Report) -> str:
    if not report.outside:
        return "<p>Nothing: every operator is in a group.</p>"
    rows: list[tuple[int | None, list[str]]] = [
        (
            n.index,
            [
                f"<b>{html.escape(n.op.kind)}</b>",
                html.escape(n.reason),
                html.escape(n.op.scope),
                html.escape(n.op.source),
                duration(n.seconds) if n.seconds else "",
                f"{100 * n.share:.1f} %",
            ],
        )
        for n in report.outside
    ]
    return _table(["operator", "reason", "module", "source", "time", "share"], rows)


def _conversions(report: Report) -> str:
    if not report.conversions:
        return "<p>None.</p>"
    rows: list[tuple[int | None, list[str]]] = [
        (
            report.groups[c.group].position,
            [
                str(c.group),
                html.escape(report.groups[c.group].name),
                html.escape(c.kind),
                html.escape(c.text),
            ],
        )
        for c in report.conversions
    ]
    return _table(["#", "group", "kind", "what"], rows)


def _fallbacks(report: Report) -> str:
    if not report.fallbacks:
        return "<p>None: every group ran as oneDNN compiled it.</p>"
    rows: list[tuple[int | None, list[str]]] = [
        (
            report.groups[f.group].position,
            [
                str(f.group),
                html.escape(report.groups[f.group].name),
                f"{f.calls:g}",
                html.escape(f.reason),
            ],
        )
        for f in report.fallbacks
    ]
    return _table(["#", "group", "times per call", "cause"], rows)


def _cards(report: Report) -> str:
    s = report.summary
    cards = [
        (f"{s.fused} / {s.operators}", "operators in groups"),
        (str(s.groups), "groups"),
        (f"{100 * s.share:.1f} %", "of the time in groups"),
        (duration(s.seconds), "per call"),
        (str(len(report.conversions)), "conversions at borders"),
        (str(len(report.fallbacks)), "fallbacks"),
    ]
    return "".join(
        f'<div class="card"><b>{html.escape(number)}</b><span>{html.escape(text)}</span></div>'
        for number, text in cards
    )


def _data(report: Report) -> list[dict[str, Any]]:
    """What the panel beside the graph shows, by position."""
    changes: dict[int, list[str]] = defaultdict(list)
    for c in report.conversions:
        changes[c.group].append(f"{c.kind}: {c.text}")
    for f in report.fallbacks:
        changes[f.group].append(f"runs in the interpreter: {f.reason}")
    data = []
    for item in report.items():
        entry: dict[str, Any] = {
            "time": duration(item.seconds) if item.calls else "did not run",
            "share": f"{100 * item.share:.1f} %",
            "calls": f"{item.calls:g}",
            "block": item.block,
        }
        if isinstance(item, Group):
            entry |= {
                "title": f"{item.index}  {item.name}",
                "ops": [[o.kind, o.scope, o.source] for o in item.ops],
                "inputs": [_value(v) for v in item.inputs],
                "outputs": [_value(v) for v in item.outputs],
                "kernels": [
                    [p.kind, p.implementation, p.isa, "  ".join(map(" ".join, p.layouts.items()))]
                    for p in item.primitives
                ],
                "notes": [*filter(None, [item.note]), *changes[item.index]],
            }
        else:
            entry |= {
                "title": item.op.kind,
                "ops": [[item.op.kind, item.op.scope, item.op.source]],
                "reason": item.reason,
            }
        data.append(entry)
    return data


def _value(value: Any) -> list[str]:
    return [f"%{value.name}", str(value), value.layout]


def render(report: Report) -> str:
    """The page."""
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    e = report.environment
    data = json.dumps(_data(report), separators=(",", ":")).replace("</", "<\\/")
    parts = {
        "TITLE": html.escape(f"{report.model}: {report.summary}"),
        "MODEL": html.escape(report.model),
        "HEADING": html.escape(heading(report).split("  ", 1)[0]),
        "ENVIRONMENT": html.escape(
            f"oneDNN {e['onednn']} ({e['isa']}, fpmath {e['fpmath_mode']}) · torch {e['torch']} · "
            f"llga_fuser {e['llga_fuser']} · {e['threads']} threads"
        ),
        "NOTES": "".join(f'<p class="note">{html.escape(n)}</p>' for n in report.notes),
        "CARDS": _cards(report),
        "CHART": _chart(report),
        "GRAPH": _graph(report),
        "STRIP": _strip(report),
        "OUTSIDE_COUNT": str(len(report.outside)),
        "OUTSIDE": _outside(report),
        "CONVERSIONS": _conversions(report),
        "FALLBACKS": _fallbacks(report),
        "GROUPS": _groups(report),
        "DATA": data,
    }
    before, *rest = page.split("{{")
    pieces = [before]
    for piece in rest:
        name, after = piece.split("}}", 1)
        pieces += [parts[name], after]
    return "".join(pieces)
