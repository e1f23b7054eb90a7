"""`bench --compare OLD NEW`: what has changed between two result files, beyond their noise."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from llga_fuser.bench.summary import OURS

__all__ = ["FORMAT", "VERSION", "Change", "ResultFileError", "changes", "compare", "load"]

FORMAT = "llga_fuser bench"
# Grows when a key that is documented in docs/benchmark.md changes its meaning or goes.
VERSION = 1

# What two runs of the same build differ by beside the noise inside each: where the processes'
# memory happens to lie.
FLOOR = 0.03

SAME, SLOWER = 0, 1


class ResultFileError(Exception):
    """A file cannot be used; one line for the user."""


class Change(NamedTuple):
    """One engine on one model, in both files."""

    key: str
    engine: str
    old: float | None  # median in seconds; None: it failed
    new: float | None
    limit: float  # relative change up to which it may be noise
    verdict: str  # "", "slower", "faster", "fails now", "runs now", "wrong now", "right now"

    @property
    def bad(self) -> bool:
        return self.verdict in ("slower", "fails now", "wrong now")


def load(path: str) -> dict[str, Any]:
    """Reads and checks a file that `bench --json` wrote.

    Raises:
        ResultFileError: it cannot be read, or is something else.
    """
    try:
        data = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ResultFileError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ResultFileError(f"{path}: not a file that bench --json wrote")
    if data.get("version") != VERSION:
        raise ResultFileError(
            f"{path}: version {data.get('version')} of the format, this program reads {VERSION}"
        )
    try:
        for model in data["models"]:
            _key(model)
            for engine in model["engines"]:
                _noise(engine)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ResultFileError(f"{path}: damaged ({type(error).__name__}: {error})") from error
    return data


def _key(model: dict[str, Any]) -> str:
    o = model["options"]
    fpmath = f" fpmath {o['fpmath']}" if o.get("fpmath") else ""
    return (
        f"{model['model']} {model['size']} {o['dtype']}{fpmath} batch {o['batch']}, "
        f"{o['threads']} thread{'s' if o['threads'] > 1 else ''}"
    )


def _usable(engine: dict[str, Any]) -> bool:
    return engine["failure"] is None and engine["median"] > 0


def _noise(engine: dict[str, Any]) -> float:
    """Of one file's median: how far the rounds are apart, and how far the calls of a round."""
    if not _usable(engine):
        return 0.0
    medians = [r["median"] for r in engine["rounds"]]
    rounds = 0.0
    if len(medians) > 1:
        low, _, high = statistics.quantiles(medians, n=4, method="inclusive")
        rounds = (high - low) / engine["median"]
    return max(rounds, float(engine["spread"]))


def _change(key: str, old: dict[str, Any], new: dict[str, Any]) -> Change:
    name = old["name"]
    limit = max(FLOOR, math.hypot(_noise(old), _noise(new)))
    was, now = _usable(old), _usable(new)
    verdict = ""
    if was != now:
        verdict = "runs now" if now else "fails now"
    elif was and old["agrees"] != new["agrees"]:
        verdict = "right now" if new["agrees"] else "wrong now"
    elif was and new["median"] > old["median"] * (1 + limit):
        verdict = "slower"
    elif was and old["median"] > new["median"] * (1 + limit):
        verdict = "faster"
    return Change(
        key, name, old["median"] if was else None, new["median"] if now else None, limit, verdict
    )


def _engines(data: dict[str, Any], models: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (_key(m), e["name"]): e
        for m in data["models"]
        if not models or m["model"] in models
        for e in m["engines"]
        if e.get("not_applicable") is None
    }


def changes(
    old: dict[str, Any], new: dict[str, Any], models: Sequence[str] = ()
) -> tuple[list[Change], list[str]]:
    """All that both files have, and names of what only one of them has."""
    before, after = _engines(old, models), _engines(new, models)
    both = [_change(at[0], e, after[at]) for at, e in before.items() if at in after]
    alone = [f"only in the first: {k}, {n}" for k, n in before if (k, n) not in after]
    alone += [f"only in the second: {k}, {n}" for k, n in after if (k, n) not in before]
    return both, alone


def _ratio(change: Change) -> str:
    if change.old is None or change.new is None:
        return "-"
    return f"{change.new / change.old:.3f}"


def _time(seconds: float | None) -> str:
    return "failed" if seconds is None else f"{seconds * 1e3:.4g}"


def _environments(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    before, after = old.get("environment", {}), new.get("environment", {})
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]


def compare(old_path: str, new_path: str, models: Sequence[str] = ()) -> tuple[str, int]:
    """The comparison as text, and the exit code.

    Args:
        old_path: a result file.
        new_path: a later one.
        models: compares these alone; empty: all.

    Raises:
        ResultFileError: a file cannot be used, or the two have nothing in common.
    """
    old, new = load(old_path), load(new_path)
    found, alone = changes(old, new, models)
    if not found:
        raise ResultFileError(f"{old_path} and {new_path} have no model and engine in common")
    lines = _environments(old, new)
    key = ""
    for change in found:
        if change.key != key:
            key = change.key
            lines += ["", key]
            lines.append(f"  {'engine':14}{'old ms':>10}{'new ms':>10}{'new/old':>9}{'noise':>8}")
        lines.append(
            f"  {change.engine:14}{_time(change.old):>10}{_time(change.new):>10}"
            f"{_ratio(change):>9}{100 * change.limit:7.0f}%  {change.verdict}".rstrip()
        )
    lines.append("")
    for engine in dict.fromkeys(c.engine for c in found):
        values = [c.new / c.old for c in found if c.engine == engine and c.old and c.new]
        if len(values) > 1:
            mean = statistics.geometric_mean(values)
            lines.append(f"{engine}: {len(values)} results, geometric mean of new/old {mean:.3f}")
    lines += alone
    ours = [c for c in found if c.engine == OURS]
    judged = ours or found
    count = {
        word: sum(c.verdict == word for c in judged)
        for word in dict.fromkeys(c.verdict for c in judged)
    }
    told = ", ".join(f"{n} {word or 'within the noise'}" for word, n in count.items())
    lines.append(f"{OURS if ours else 'all engines'}: {told}")
    return "\n".join(lines).strip(), SLOWER if any(c.bad for c in judged) else SAME
