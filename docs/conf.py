"""Makes pages of README.md, docs/ and the docstrings of the installed packages.

    sphinx-build -n -W --keep-going -c docs . build/docs

The source directory is the checkout, so that links between its pages are links between the built
ones. `sphinx-build` does not put it on `sys.path`: docstrings are those of what is installed.
"""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import dnnl_graph
import llga_fuser

project = "llga_fuser"
release = version = llga_fuser.__version__
author = "the authors of llga_fuser"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "examples/*.md"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = f"llga_fuser {release}"

myst_heading_anchors = 4  # named as on GitHub
default_role = "code"  # docstrings are read as plain text, too: `name`, not ``name``
autodoc_docstring_signature = False  # they begin with a sentence
# The new implementation in Sphinx 9.0.4 fails where `autodoc-process-signature` gives a signature
# to something that has none (IndexError in _dynamic/_signatures.py).
autodoc_use_legacy_class_based = True
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Types of other projects, whose pages the build doesn't fetch.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|os|collections|argparse|typing)\b.*"),
    ("py:.*", r"(Any|Callable|Mapping|Sequence|Iterator|PathLike|SupportsIndex|_DLPack)"),
]


# ------------------------------------------------------------------------------------ dnnl_graph
# Its classes are compiled: signatures come from the stub file. Its docstrings name an argument at
# the beginning of a line, and show calls as indented text.


def _stub_signatures() -> dict[str, tuple[str, str]]:
    """Arguments and result by qualified name, of what has one signature."""
    found: dict[str, list[tuple[str, str]]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                arguments = node.args
                if prefix and not any(
                    isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
                ):
                    arguments.args = arguments.args[1:]
                made = node.name == "__init__"
                name = prefix[:-1] if made else prefix + node.name
                result = "" if made or node.returns is None else ast.unparse(node.returns)
                found.setdefault(name, []).append((f"({ast.unparse(arguments)})", result))

    stub = Path(dnnl_graph.__file__ or "").with_name("_dnnl_graph.pyi").read_text(encoding="utf-8")
    visit(ast.parse(stub).body, "")
    aliases = dict(re.findall(r"^(_\w+): TypeAlias = (.+)$", stub, re.MULTILINE))

    def spelled_out(text: str) -> str:
        return re.sub(r"\b_\w+", lambda m: aliases.get(m[0], m[0]), text)

    return {
        name: (spelled_out(each[0][0]), each[0][1])
        for name, each in found.items()
        if len(each) == 1
    }


_SIGNATURES = _stub_signatures()


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, given: Any, result: Any
) -> tuple[str, str] | None:
    package, _, name = name.partition(".")
    compiled = not isinstance(obj, types.FunctionType)
    return _SIGNATURES.get(name) if package == dnnl_graph.__name__ and compiled else None


def _is_enum(obj: Any) -> bool:
    return isinstance(obj, type) and "__members__" in vars(obj)


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Values of enumerations are listed in the text of their class."""
    return True if _is_enum(type(obj)) or name == "_pybind11_conduit_v1_" else None


_ARGUMENT = re.compile(r"([a-z]\w*(?:, [a-z]\w*)*): ")
_BORDER = re.compile(
    rf"(?<=[;.]) (?={_ARGUMENT.pattern})|(?<=[.]) (?=Raises |Returns |Source: )", re.MULTILINE
)


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if not name.startswith("dnnl_graph."):
        return
    text = "\n".join(lines).strip()
    if _is_enum(obj):
        members = ", ".join(f"`{member}`" for member in obj.__members__)
        text = f"{text.partition('Members:')[0]}Members: {members}."
    lines.clear()
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("    "):
            lines += ["::", "", *paragraph.splitlines(), ""]
        elif _ARGUMENT.match(paragraph):
            start = 0
            line = " ".join(paragraph.split())
            for end in [*(m.start() for m in _BORDER.finditer(line)), len(line)]:
                part = line[start:end].strip().rstrip(";")
                is_argument = _ARGUMENT.match(part)
                lines += ["* " + _ARGUMENT.sub(r"**\1**: ", part, count=1) if is_argument else part]
                lines += [""]
                start = end
        else:
            lines += [*paragraph.splitlines(), ""]


# -------------------------------------------------------------------------------------- commands


class CommandHelp(SphinxDirective):
    """`{command-help} llga_fuser report`: what `--help` prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        import importlib
        import os

        module, *command = self.arguments[0].split()
        parser = importlib.import_module(f"{module}.__main__").make_parser()
        for name in command:
            (subparsers,) = (a for a in parser._actions if a.choices and a.dest == "command")
            parser = subparsers.choices[name]
        os.environ["COLUMNS"] = "90"
        text = parser.format_help()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-skip-member", _skip)
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
