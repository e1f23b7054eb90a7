"""Write the enum tables of the dnnl_graph module from the headers it is built against.

    generate_enums.py --include <directory with oneapi/dnnl/> --output dnnl_graph_enums.inc

Op kinds, attributes, data types and so on are whatever the found `dnnl_graph.hpp` and
`dnnl_common.hpp` declare, so that the names of a newer oneDNN appear without an edit here. Only
the standard library is used: CMake runs this script with any Python it finds.

The output holds, for each enum, one X-macro of the form

    #define DNNL_GRAPH_PY_OP_KINDS(X) X(Abs, dnnl::graph::op::kind::Abs) ...

one that pairs each attribute with the type of its value (`X(alpha, f32)`, read from the section
comments of `enum class attr`), and one `#define DNNL_GRAPH_PY_HAS_...` per optional API found.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

# (macro, header, path of the enum: enclosing class or "", enum name, C++ scope)
ENUMS = [
    ("ENGINE_KINDS", "dnnl_common.hpp", "engine", "kind", "dnnl::engine::kind"),
    ("STREAM_FLAGS", "dnnl_common.hpp", "stream", "flags", "dnnl::stream::flags"),
    ("FPMATH_MODES", "dnnl_common.hpp", "", "fpmath_mode", "dnnl::fpmath_mode"),
    ("STATUSES", "dnnl_graph.hpp", "", "status", "dnnl::graph::status"),
    (
        "DATA_TYPES",
        "dnnl_graph.hpp",
        "logical_tensor",
        "data_type",
        "dnnl::graph::logical_tensor::data_type",
    ),
    (
        "LAYOUT_TYPES",
        "dnnl_graph.hpp",
        "logical_tensor",
        "layout_type",
        "dnnl::graph::logical_tensor::layout_type",
    ),
    (
        "PROPERTY_TYPES",
        "dnnl_graph.hpp",
        "logical_tensor",
        "property_type",
        "dnnl::graph::logical_tensor::property_type",
    ),
    ("OP_KINDS", "dnnl_graph.hpp", "op", "kind", "dnnl::graph::op::kind"),
    ("OP_ATTRS", "dnnl_graph.hpp", "op", "attr", "dnnl::graph::op::attr"),
    ("POLICIES", "dnnl_graph.hpp", "partition", "policy", "dnnl::graph::partition::policy"),
]

# Enums that only newer headers have. Absent: an empty table.
OPTIONAL_ENUMS = [
    ("DUMP_MODES", "dnnl_graph.hpp", "", "graph_dump_mode", "dnnl::graph::graph_dump_mode"),
]

# Part of the API that not every supported version has: macro -> text that proves it.
FEATURES = {
    "SET_FPMATH_MODE": r"\bvoid set_fpmath_mode\(",
    "CONSTANT_CACHE_CAPACITY": r"\bset_constant_tensor_cache_capacity\(",
    "SCALAR_TENSOR": r"\bmake_scalar_tensor\(",
    "DUMP_MODE": r"\bstatus set_dump_mode\(",
}

# Section comments of `enum class attr`, in the words of the header -> type of the value.
ATTR_SECTIONS = [
    (r"float32 vector attributes", "f32_vector"),
    (r"float32 attributes", "f32"),
    (r"int64_t vector attributes", "s64_vector"),
    (r"int64_t attributes", "s64"),
    (r"bool attributes", "boolean"),
    (r"string attributes", "string"),
]


def enum_body(text: str, owner: str, name: str) -> str | None:
    """Text between the braces of `enum class <name>`, inside class `owner` if that is given."""
    start = 0
    if owner:
        found = re.search(rf"^(?:class|struct) {owner}\b[^;{{]*\{{", text, re.MULTILINE)
        if not found:
            return None
        start = found.end()
    found = re.compile(rf"enum class {name}\b[^{{;]*\{{").search(text, start)
    if not found:
        return None
    return text[found.end() : text.index("};", found.end())]


def enumerators(body: str) -> list[tuple[str, str]]:
    """(name, section) of each enumerator in order; section is the last attribute section seen."""
    # An enumerator behind a preprocessor condition (stream::flags::profiling) exists only in some
    # builds of the same header: it is left out instead of guessed.
    body = re.sub(r"^\s*#if.*?^\s*#endif[^\n]*$", "", body, flags=re.MULTILINE | re.DOTALL)
    result: list[tuple[str, str]] = []
    section = "any"
    comment: list[str] = []
    pending = ""
    for raw in body.splitlines():
        line = raw.strip()
        if line.startswith("//"):
            if not line.startswith("///"):
                comment.append(line.lstrip("/ "))
                text = " ".join(comment)
                for pattern, kind in ATTR_SECTIONS:
                    if re.search(pattern, text):
                        section = kind
                        break
            continue
        comment = []
        pending += " " + line.split("//")[0]
        if "," in pending:
            *complete, pending = pending.split(",")
        else:
            continue
        result += [(item, section) for item in map(enumerator_name, complete) if item]
    last = enumerator_name(pending)
    if last:
        result.append((last, section))
    return result


def enumerator_name(text: str) -> str:
    found = re.match(r"\s*([A-Za-z_]\w*)\s*(?:=[^,]*)?$", text)
    return found.group(1) if found else ""


def generate(include: Path) -> str:
    headers = {
        name: (include / "oneapi" / "dnnl" / name).read_text(encoding="utf-8")
        for name in ("dnnl_common.hpp", "dnnl_graph.hpp")
    }
    lines = [
        "// Written by generate_enums.py from the oneDNN headers of this build. Do not edit.",
        "",
    ]

    def table(macro: str, rows: list[str]) -> None:
        lines.append(f"#define DNNL_GRAPH_PY_{macro}(X) \\")
        lines.extend(f"  {row} \\" for row in rows)
        lines.extend(["  /* end */", ""])

    for macro, header, owner, name, scope in ENUMS:
        body = enum_body(headers[header], owner, name)
        found = enumerators(body) if body is not None else []
        if not found:
            raise SystemExit(f"generate_enums.py: no `enum class {scope}` in {header}")
        table(macro, [f"X({item}, {scope}::{item})" for item, _ in found])
        if macro == "OP_ATTRS":
            table("OP_ATTR_TYPES", [f"X({item}, {section})" for item, section in found])
    for macro, header, owner, name, scope in OPTIONAL_ENUMS:
        body = enum_body(headers[header], owner, name)
        found = enumerators(body) if body is not None else []
        table(macro, [f"X({item}, {scope}::{item})" for item, _ in found])
    for macro, pattern in FEATURES.items():
        present = int(bool(re.search(pattern, headers["dnnl_graph.hpp"])))
        lines.append(f"#define DNNL_GRAPH_PY_HAS_{macro} {present}")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--include", type=Path, required=True, help="directory with oneapi/dnnl/")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    text = generate(args.include)
    # An unchanged file keeps its time stamp, so that nothing is compiled again.
    if not args.output.exists() or args.output.read_text(encoding="utf-8") != text:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
