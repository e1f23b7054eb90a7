"""Graphs as JSON: the format that oneDNN writes with ONEDNN_GRAPH_DUMP and benchdnn reads.

    g = dnnl_graph.load("graph-100001.json")    # path, open file, JSON text or dict
    dnnl_graph.dump(g, "copy.json")             # or without a path: the dict

The schema is written down in docs/dnnl_graph.md. What the format cannot hold:

* An opaque layout is a number that means something only inside the process that made it; the file
  says `opaque` without it. It is loaded as `any`: the library chooses again.
* The values of constants.
* A partly unknown shape: oneDNN writes a single unknown size, which is loaded as unknown rank.
  `dump` writes the sizes it knows, which `load` and benchdnn read back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ._dnnl_graph import (
    DNNL_GRAPH_UNKNOWN_DIM,
    engine,
    fpmath_mode,
    graph,
    logical_tensor,
    op,
    version,
)

Source = str | os.PathLike[str] | IO[str] | Mapping[str, Any]

# Attributes that oneDNN adds to its dump after partitioning; they are no attributes of the API.
_NOTES = ("partition_id", "backend")

# Attributes that a newer oneDNN writes with the value that means what an older one does without
# them: (kind or "" for any, name) -> value.
_LATER_DEFAULTS = {
    ("", "accumulation_mode"): "strict",
    ("SoftMax", "mode"): "none",
    ("GELU", "mode"): "gelu_erf",
    ("GELUBackward", "mode"): "gelu_erf",
}

# Type of an attribute's value in the file.
_TYPE_NAMES = ("bool", "s64", "s64[]", "f32", "f32[]", "string")

# oneDNN writes numbers with C++ streams: inf and nan without quotes, which JSON does not know.
_BARE_NUMBER = re.compile(r'"(?:\\.|[^"\\])*"|(-?)\b(inf|nan)\b')


def load(source: Source) -> graph:
    """Build a finalized graph from the JSON that oneDNN writes.

    source: path of a file, an open file, a JSON text (a str that starts with "{"), or the dict.
    Raises ValueError with the place in the file for what the format or this version of oneDNN does
    not know, dnnl_graph.error if the library refuses an op, OSError for a missing file.
    Source: oneDNN, Graph Dump; benchdnn, Graph Driver.
    """
    content = _read(source)
    kind = _member(engine.kind, content.get("engine_kind", "cpu"), "engine_kind")
    mode = _member(fpmath_mode, content.get("fpmath_mode", "strict"), "fpmath_mode")
    result = graph(kind, mode)
    if _flag(content.get("fpmath_mode_apply_to_int", "false"), "fpmath_mode_apply_to_int"):
        result.set_fpmath_mode(mode, True)
    ops = content.get("graph")
    if not isinstance(ops, list) or not ops:
        raise ValueError(f"graph: must be a list with at least one op, got {ops!r}")
    for index, entry in enumerate(ops):
        result.add_op(_load_op(entry, f"graph[{index}]"))
    result.finalize()
    return result


def dump(g: graph, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The graph in the JSON format of oneDNN; written to `path` if given.

    g: graph, finalized or not. Returns the content as a dict, which `load` takes as well.
    The file is laid out as oneDNN does, including `inf` for an infinite float.
    Raises TypeError for something else than a graph, OSError if the file cannot be written.
    """
    if not isinstance(g, graph):
        raise TypeError(f"dump: argument 'g' must be a graph, got {g!r} ({type(g).__name__})")
    ops = g.get_ops()
    produced = {lt.get_id() for o in ops for lt in o.get_outputs()}
    # An End op reads nothing; it marks a tensor as an output.
    readers = [o for o in ops if o.get_kind() != op.End]
    consumed = {lt.get_id() for o in readers for lt in o.get_inputs()}
    mode, apply_to_int = g.get_fpmath_mode()
    content: dict[str, Any] = {
        "version": ".".join(str(part) for part in version()[:3]),
        "engine_kind": g.get_engine_kind().name,
        "fpmath_mode": mode.name,
        "fpmath_mode_apply_to_int": "true" if apply_to_int else "false",
        "input_ports": _unique(
            lt.get_id() for o in ops for lt in o.get_inputs() if lt.get_id() not in produced
        ),
        "output_ports": _unique(
            lt.get_id() for o in ops for lt in o.get_outputs() if lt.get_id() not in consumed
        ),
        "graph": [_dump_op(o) for o in ops],
    }
    if path is not None:
        text = json.dumps(content, indent=2)
        text = re.sub(
            r'"(?:\\.|[^"\\])*"|-?Infinity|NaN',
            lambda m: {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(m[0], m[0]),
            text,
        )
        Path(path).write_text(text + "\n", encoding="utf-8")
    return content


def _unique(ids: Any) -> list[int]:
    return list(dict.fromkeys(ids))


def _read(source: Source) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str) and source.lstrip().startswith("{"):
        text, name = source, "text"
    elif isinstance(source, str | os.PathLike):
        text, name = Path(source).read_text(encoding="utf-8"), os.fspath(source)
    elif hasattr(source, "read"):
        text, name = source.read(), getattr(source, "name", "file")
    else:
        raise TypeError(
            "load: argument 'source' must be a path, an open file, a JSON text or a dict, got "
            f"{source!r} ({type(source).__name__})"
        )

    def quote(found: re.Match[str]) -> str:
        if found[2] is None:
            return found[0]
        return found[1] + ("Infinity" if found[2] == "inf" else "NaN").replace("-NaN", "NaN")

    try:
        content = json.loads(_BARE_NUMBER.sub(quote, text).replace("-NaN", "NaN"))
    except json.JSONDecodeError as e:
        raise ValueError(f"load: {name} is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise ValueError(f"load: {name} must hold a JSON object, got {type(content).__name__}")
    return content


def _member(enum: Any, name: object, where: str) -> Any:
    members = enum.__members__
    if not isinstance(name, str) or name not in members:
        raise ValueError(
            f"{where}: {name!r} is not known to oneDNN {'.'.join(map(str, version()[:3]))}; "
            f"it has {', '.join(members)}"
        )
    return members[name]


def _flag(value: object, where: str) -> bool:
    if value in (True, 1, "true"):
        return True
    if value in (False, 0, "false"):
        return False
    raise ValueError(f"{where}: must be 0, 1, true or false, got {value!r}")


def _field(entry: Mapping[str, Any], key: str, where: str) -> Any:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: must be an object, got {entry!r}")
    if key not in entry:
        raise ValueError(f"{where}: lacks {key!r}")
    return entry[key]


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where}: must be an int, got {value!r}")
    return value


def _integers(value: object, where: str) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: must be a list of int, got {value!r}")
    return [_integer(item, where) for item in value]


def _load_op(entry: Mapping[str, Any], where: str) -> op:
    kind = _member(op.kind, _field(entry, "kind", where), f"{where}.kind")
    identity = _integer(_field(entry, "id", where), f"{where}.id")
    result = op(identity, kind, str(entry.get("name", "")))
    attrs = entry.get("attrs", {})
    if not isinstance(attrs, Mapping):
        raise ValueError(f"{where}.attrs: must be an object, got {attrs!r}")
    for name, attr in attrs.items():
        if name in _NOTES:
            continue
        place = f"{where}.attrs.{name}"
        later = _LATER_DEFAULTS.get((kind.name, name), _LATER_DEFAULTS.get(("", name)))
        if later is not None and _field(attr, "value", place) == later:
            continue
        which = _member(op.attr, name, place)
        type_name = _field(attr, "type", place)
        if type_name not in _TYPE_NAMES:
            raise ValueError(f"{place}.type: {type_name!r} is none of {', '.join(_TYPE_NAMES)}")
        value = _field(attr, "value", place)
        if isinstance(value, list) and not value:
            # The library takes no empty list; one that it wrote says that the attribute was absent.
            continue
        try:
            result.set_attr(which, _flag(value, place) if type_name == "bool" else value)
        except (TypeError, ValueError) as e:
            raise ValueError(f"{place}: {e}") from e
    for key, add in (("inputs", result.add_input), ("outputs", result.add_output)):
        entries = entry.get(key, [])
        if not isinstance(entries, list):
            raise ValueError(f"{where}.{key}: must be a list, got {entries!r}")
        for index, lt in enumerate(entries):
            add(_load_logical_tensor(lt, f"{where}.{key}[{index}]"))
    return result


def _load_logical_tensor(entry: Mapping[str, Any], where: str) -> logical_tensor:
    tid = _integer(_field(entry, "id", where), f"{where}.id")
    dtype = _member(logical_tensor.data_type, _field(entry, "dtype", where), f"{where}.dtype")
    ptype = _member(
        logical_tensor.property_type, entry.get("property_type", "undef"), f"{where}.property_type"
    )
    layout = entry.get("layout_type", "strided")
    ltype = _member(logical_tensor.layout_type, layout, f"{where}.layout_type")
    if ltype == logical_tensor.opaque:
        ltype = logical_tensor.any
    shape = _integers(_field(entry, "shape", where), f"{where}.shape")
    try:
        if shape == [DNNL_GRAPH_UNKNOWN_DIM]:
            return logical_tensor(tid, dtype, -1, ltype, ptype)
        strides = _integers(entry.get("stride", []), f"{where}.stride")
        if ltype == logical_tensor.strided and strides and len(strides) == len(shape):
            return logical_tensor(tid, dtype, shape, strides, ptype)
        return logical_tensor(tid, dtype, shape, ltype, ptype)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{where}: {e}") from e


def _dump_op(o: op) -> dict[str, Any]:
    return {
        "id": o.get_id(),
        "name": o.get_name(),
        "kind": o.get_kind().name,
        "attrs": {name.name: _dump_attr(value) for name, value in o.get_attrs().items()},
        "inputs": [_dump_logical_tensor(lt) for lt in o.get_inputs()],
        "outputs": [_dump_logical_tensor(lt) for lt in o.get_outputs()],
    }


def _dump_attr(value: bool | int | float | str | list[int] | list[float]) -> dict[str, Any]:
    # "type" first: benchdnn's reader depends on it.
    if isinstance(value, bool):
        return {"type": "bool", "value": int(value)}
    if isinstance(value, int):
        return {"type": "s64", "value": value}
    if isinstance(value, float):
        return {"type": "f32", "value": _short(value)}
    if isinstance(value, str):
        return {"type": "string", "value": value}
    if all(isinstance(item, int) for item in value):
        return {"type": "s64[]", "value": list(value)}
    return {"type": "f32[]", "value": [_short(item) for item in value]}


def _short(value: float) -> float:
    """The shortest decimal number that is the same 32-bit float."""
    import numpy

    return value if not math.isfinite(value) else float(str(numpy.float32(value)))


def _dump_logical_tensor(lt: logical_tensor) -> dict[str, Any]:
    unknown = [DNNL_GRAPH_UNKNOWN_DIM]
    layout = lt.get_layout_type()
    try:
        shape = lt.get_dims()
    except RuntimeError:  # unknown number of dimensions
        shape = unknown
    strides = unknown
    if layout == logical_tensor.strided and shape != unknown:
        strides = lt.get_strides()
        if DNNL_GRAPH_UNKNOWN_DIM in strides:
            strides = unknown
    return {
        "id": lt.get_id(),
        "dtype": lt.get_data_type().name,
        "shape": shape,
        "stride": strides,
        "layout_type": layout.name,
        "property_type": lt.get_property_type().name,
    }
