"""A report as text of at most 100 columns."""

from __future__ import annotations

from collections import Counter

from llga_fuser._report.model import Group, Node, Report, TensorInfo, named

__all__ = ["duration", "heading", "render"]

WIDTH = 100


def duration(seconds: float) -> str:
    """Three digits and a unit that suits."""
    scale, unit = next(
        (pair for pair in ((1.0, "s"), (1e-3, "ms")) if seconds >= pair[0]), (1e-6, "us")
    )
    value = seconds / scale
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}" if seconds else "0"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _cut_left(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def heading(report: Report) -> str:
    """What was run, on what."""
    e = report.environment
    inputs = ", ".join(str(v) for v in report.inputs)
    return (
        f"{report.model}({inputs})  oneDNN {e['onednn']} {e['isa']}  torch {e['torch']}  "
        f"{e['threads']} thread{'s' if e['threads'] != 1 else ''}"
    )


def _values(values: tuple[TensorInfo, ...]) -> str:
    tensors = [v for v in values if v.dtype]
    shown = ", ".join(str(v) for v in tensors[:2])
    return shown + (f", {len(tensors) - 2} more" if len(tensors) > 2 else "")


def _layouts(values: tuple[TensorInfo, ...]) -> str:
    return ", ".join(dict.fromkeys(v.layout for v in values if v.layout))


def _where(sources: list[str], scopes: list[str], width: int) -> str:
    lines: dict[str, list[str]] = {}
    for source in sources:
        path, _, line = source.rpartition(":")
        lines.setdefault(path.rsplit("/", 1)[-1], []).append(line)
    source = ", ".join(f"{name}:{','.join(numbers)}" for name, numbers in lines.items())
    return _cut_left(f"{scopes[0]}  {source}".strip() if scopes else source, width)


def _group(g: Group) -> list[str]:
    main = g.main
    implementation = f"{main.implementation} ({main.isa})" if main else ""
    if main and main.isa in main.implementation:
        implementation = main.implementation
    head = f"{g.index:4}  {_cut(g.name, 42):42}  {_cut(implementation, 28):28}"
    first = f"{head}{duration(g.seconds):>12}{_percent(g.share):>10}"
    flow = f"{_values(g.inputs)} -> {_values(g.outputs)}"
    layout = _layouts(g.outputs)
    block = f"  in {g.block}" if g.block else ""
    second = _cut(f"{flow} {layout}{block}", 58)
    rows = [first.rstrip(), f"      {second:58}  {_where(g.sources, g.scopes, 34):>34}".rstrip()]
    if g.note:
        rows.append(_cut(f"      {g.note}", WIDTH))
    return rows


def _outside(report: Report) -> list[str]:
    """One line for each operator; equal reasons of one kind together when there are many."""
    if not report.outside:
        return ["Nothing stayed outside."]
    lines = [f"{len(report.outside)} outside the groups:"]
    together: dict[tuple[str, str], list[Node]] = {}
    for node in report.outside:
        together.setdefault((node.op.kind, node.reason), []).append(node)
    for (kind, reason), nodes in together.items():
        text = named(kind, reason)
        seconds = sum(n.seconds for n in nodes)
        count = f"{len(nodes)} x " if len(nodes) > 1 else ""
        where = _where(list(dict.fromkeys(n.op.source for n in nodes if n.op.source))[:3], [], 30)
        tail = f"{duration(seconds):>12}{_percent(sum(n.share for n in nodes)):>10}"
        room = 78 - len(where) - 2
        for i, row in enumerate(_wrap(f"      {count}{text}", room)):
            lines.append(f"{row:{room}}  {where}{tail}" if i == 0 else row)
    return lines


def _wrap(text: str, width: int) -> list[str]:
    rows, row = [], ""
    for word in text.split(" "):
        if row.strip() and len(row) + 1 + len(word) > width:
            rows.append(row)
            row = "         "
        row = f"{row} {word}" if row.strip() else f"{row}{word}" if word else f"{row} "
    return [_cut(r, width) for r in [*rows, row]]


def _conversions(report: Report) -> list[str]:
    if not report.conversions:
        return []
    counted = Counter((c.kind, c.text, c.group) for c in report.conversions)
    lines = [f"{len(report.conversions)} changes of layout or data type at the groups' borders:"]
    shown = list(counted.items())
    for (kind, text, group), n in shown[:12]:
        times = f"{n} x " if n > 1 else ""
        lines.append(_cut(f"      group {group}: {times}{kind} {text}", WIDTH))
    if len(shown) > 12:
        lines.append(f"      and {len(shown) - 12} more: see to_dict() or to_html()")
    return lines


def render(report: Report) -> str:
    """All of it."""
    s = report.summary
    sections = [
        [_cut(heading(report), WIDTH), f"{s}, {duration(s.seconds)} per call"],
        [_cut(f"note: {note}", 4 * WIDTH) for note in report.notes],
        [row for g in report.groups for row in _group(g)],
        _outside(report),
        _conversions(report),
        [
            _cut(
                f"group {f.group} ({report.groups[f.group].name}) ran in the interpreter, "
                f"{f.calls:g} times per call: {f.reason}",
                2 * WIDTH,
            )
            for f in report.fallbacks
        ],
    ]
    lines = []
    for section in filter(None, sections):
        lines += [*(row for long in section for row in _wrap_to(long)), ""]
    return "\n".join(lines[:-1])


def _wrap_to(line: str) -> list[str]:
    return [line] if len(line) <= WIDTH else _wrap(line, WIDTH)
