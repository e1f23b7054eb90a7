"""README.md and docs/ do what they say: every block of code, every command line, every link.

The blocks of a page run in order, in one namespace, in a process and a directory of their own:
`python test/test_docs.py docs/guide.md` does that. What is not run says why, in front of the block:

    <!-- not run: the reason -->       nothing is done, but commands must have options that exist
    <!-- quoted: csrc/jit/file.cpp --> the block stands in that file, word for word; "..." is a gap

Python that readers need not see (a file that they would have, a check of the result) stands in a
comment that begins with `<!-- python` and runs like a block.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
BESIDE = ["CONTRIBUTING.md", "CHANGELOG.md"]  # their links and commands are checked, nothing is run


# ------------------------------------------------------------------------------------- the blocks


class Block(NamedTuple):
    """A fenced block, or a hidden one in a comment (`language` "python")."""

    language: str
    code: str
    line: int  # of the first line of code, from 1
    not_run: str = ""
    quoted: str = ""


BLOCK = re.compile(
    r"^<!-- python\n(?P<hidden>(?:(?!-->).)*?)^-->$"
    r"|(?:^<!-- (?P<mark>not run|quoted): (?P<text>(?:(?!-->).)*?)\s*-->\n\n?)?"
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        group = "code" if match["hidden"] is None else "hidden"
        line = text.count("\n", 0, match.start(group)) + 1
        language = (match["language"] or "").strip() if match["hidden"] is None else "python"
        marks = {(match["mark"] or "").replace(" ", "_"): " ".join((match["text"] or "").split())}
        marks.pop("", None)
        found.append(Block(language, match[group], line, **marks))
    return found


def is_directive(block: Block) -> bool:
    return block.language.startswith("{")  # for Sphinx, which checks it when it builds the pages


def complaints(text: str) -> list[str]:
    """What of a page's code is neither run nor excused, with its line."""
    found = blocks(text)
    wrong = []
    fences = len(re.findall(r"^\s*(?:`{3,}|~{3,})", text, re.MULTILINE))
    shown = [b for b in found if not text.splitlines()[b.line - 2].startswith("<!--")]
    if fences != 2 * len(shown):
        wrong.append(f"{fences} fences for {len(shown)} blocks: indented or unusual ones?")
    for number, line in enumerate(text.splitlines()[1:], 2):
        before = text.splitlines()[number - 2]
        inside = any(b.line - 1 <= number <= b.line + b.code.count("\n") for b in found)
        if not inside and not before.strip() and re.match(r"(?: {4,}|\t)\S", line):
            wrong.append(f"{number}: an indented block; use a fence, which says the language")
    for block in shown:
        runs = block.language in ("python", "bash") or is_directive(block)
        if not runs and not block.quoted and not block.not_run:
            wrong.append(f"{block.line}: {block.language or 'a block'} is not run, and no reason")
        if block.not_run and len(block.not_run.split()) < 3:
            wrong.append(f"{block.line}: {block.not_run!r} is no reason")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_all_code_is_run_or_excused(page: str) -> None:
    assert not complaints((ROOT / page).read_text(encoding="utf-8"))


def test_code_that_is_not_run_is_found() -> None:
    excused = "<!-- not run: needs another machine -->\n```cpp\nint i;\n```\n"
    assert complaints(excused) == []
    assert complaints("```python\n1\n```\n\n```bash\ntrue\n```\n") == []
    assert complaints("```cpp\nint i;\n```\n") == ["2: cpp is not run, and no reason"]
    assert complaints("```\nshown\n```\n") == ["2: a block is not run, and no reason"]
    assert complaints(excused + "\n```cpp\nint j;\n```\n") == ["7: cpp is not run, and no reason"]
    assert complaints(excused.replace("needs another machine", "no")) == ["3: 'no' is no reason"]
    assert complaints("Text:\n\n    python x.py\n")[0].startswith("3: an indented block")
    assert complaints("1. Text\n   ```cpp\n   int i;\n   ```\n")[0].startswith("2 fences for 0")


@pytest.mark.parametrize("page", PAGES)
def test_quoted_code_is_there(page: str) -> None:
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        if block.quoted:
            source = (ROOT / block.quoted).read_text(encoding="utf-8")
            for part in re.split(r"^ *\.\.\.\n", block.code, flags=re.MULTILINE):
                assert part.strip("\n") in source, f"{page}:{block.line}: not in {block.quoted}"


# ------------------------------------------------------------------------------------ running them


def run_page(page: str) -> None:
    """Runs a page's blocks in this process and the current directory."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [b for b in blocks(text) if not b.not_run and not b.quoted]
    code = "\n".join(b.code for b in found if b.language == "python")
    _prepare(code)
    # TorchScript reads sources: it gets the page, with nothing on it but the Python code so far.
    lines = [""] * (text.count("\n") + 1)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        if block.language == "python":
            first = block.line - 1
            lines[first : first + block.code.count("\n")] = block.code.splitlines()
            source = [line + "\n" for line in lines]
            linecache.cache[page] = (len(text), None, source, page)
            exec(compile("\n" * first + block.code, page, "exec"), scope)
        elif block.language == "bash":
            print(f"{page}:{block.line}", flush=True)
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                env={**os.environ, "PATH": path},
                check=False,
            )
            assert done.returncode == 0, f"{page}:{block.line}: exit code {done.returncode}"


def _prepare(code: str) -> None:
    """What a page may take for granted: an installed package, a torchvision that loads."""
    if "torchvision" in code:
        from llga_fuser import _models

        _models.load_torchvision()
    if 'backend="llga"' in code and not [
        e for e in entry_points(group="torch_dynamo_backends") if e.name == "llga"
    ]:  # imported from a directory, without entry points; test_dynamo.py looks at those
        import torch._dynamo

        from llga_fuser._dynamo import dynamo_backend

        torch._dynamo.register_backend(dynamo_backend, name="llga")  # type: ignore[no-untyped-call]


def runnable(page: str) -> bool:
    found = blocks((ROOT / page).read_text(encoding="utf-8"))
    return any(b.language in ("python", "bash") and not b.not_run and not b.quoted for b in found)


def in_a_process(page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__)), page],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        # One thread: two on busy cores spend their time in barriers.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)])
def test_code(page: str, tmp_path: Path) -> None:
    done = in_a_process(page, tmp_path)
    assert done.returncode == 0, f"{page}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", 'page.md", line 6'),
        ("<!-- python\nassert False\n-->\n", 'page.md", line 2'),
        ("```bash\nfalse\n```\n", "page.md:2: exit code 1"),
        ("```bash\npython -c 'import sys; sys.exit(3)'\n```\n", "page.md:2: exit code 3"),
    ],
)
def test_code_that_fails_is_found(code: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(code)
    done = in_a_process(str(page), tmp_path)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr


# ---------------------------------------------------------------------------------- command lines


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block as words, without assignments in front."""
    for line in re.sub(r"\\\n", " ", block.code).splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((i for i, w in enumerate(words) if w in ("&&", "||", ";", "|")), len(words))
            command, words = words[:end], words[end + 1 :]
            while command and re.match(r"\w+=", command[0]):
                command = command[1:]
            if command:
                yield command


def check_command(words: list[str]) -> None:
    """Raises if the command is one of this project's and is not spelled right."""
    program, *arguments = words
    if program.startswith(".ci/"):
        assert (ROOT / program).is_file(), f"no {program}"
    if program != "python":
        return
    while arguments and re.fullmatch(r"-[uW]", arguments[0]):
        del arguments[0]
    if arguments[:1] == ["-m"]:
        module, arguments = arguments[1], arguments[2:]
        if module in ("llga_fuser", "dnnl_graph"):
            _parse(module, arguments)
        elif module == "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            for name in re.findall(r"^\.\[([\w,]+)\]$", "\n".join(arguments), re.MULTILINE):
                assert set(name.split(",")) <= set(extras["optional-dependencies"]), name
        elif module == "pytest":
            for path in (a for a in arguments if a.startswith("test")):
                assert (ROOT / path).exists(), f"no {path}"
    elif (ROOT / arguments[0].partition("/")[0]).is_dir():
        source = (ROOT / arguments[0]).read_text(encoding="utf-8")
        for option in (a for a in arguments if a.startswith("--")):
            assert f'"{option}"' in source, f"{arguments[0]} has no option {option}"


def _parse(module: str, arguments: list[str]) -> None:
    import importlib

    parser = importlib.import_module(f"{module}.__main__").make_parser()
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            parser.parse_args(arguments)
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{shlex.join(arguments)}: {errors.getvalue()}") from end


@pytest.mark.parametrize("page", [*PAGES, *BESIDE])
def test_commands_are_spelled_right(page: str) -> None:
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        if block.language == "bash":
            for words in commands(block):
                check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "python -m llga_fuser bench resnet50 --thread-count 1",
        "python -m dnnl_graph walk graph.json",
        "A=1 python -u test/no_such_file.py",
        "true && python -m pip install '.[nothing]'",
        "python -m pytest test/no_such_file.py",
        ".ci/no_such_script",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    *others, last = commands(Block("bash", line + "\n", 1))
    for words in others:
        check_command(words)
    with pytest.raises((AssertionError, OSError)):
        check_command(last)


# ------------------------------------------------------------------------------------------ links


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = BLOCK.sub("", text)
    names = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", n.lower()).replace(" ", "-") for n in names}


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "``", BLOCK.sub("", page.read_text(encoding="utf-8")))
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        there = file.exists()
        if there and anchor:
            there = anchor in anchors(file.read_text(encoding="utf-8"))
        if not there:
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", [*PAGES, *BESIDE])
def test_links(page: str) -> None:
    assert broken_links(ROOT / page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One `b.c`, two\n[x](b.md) [y](#one-bc-two) [z](#three)\n")
    assert broken_links(tmp_path / "a.md") == ["b.md", "#three"]


# -------------------------------------------------------------------------------------- contents


def test_the_reference_has_every_public_name() -> None:
    import dnnl_graph
    import llga_fuser

    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/api").glob("*.md"))
    shown = set(
        re.findall(r"^\.\. (?:auto(?:function|class|exception)|py:data):: ([\w.]+)", text, re.M)
    )
    for package in (llga_fuser, dnnl_graph):
        names = {f"{package.__name__}.{n}" for n in package.__all__ if not n.startswith("__")}
        later = {f"dnnl_graph.{n}" for n in ("graph_dump_mode", "set_dump_mode")}
        assert names - later <= shown, sorted(names - later - shown)


def test_the_table_of_dnnl_graph_names_what_there_is() -> None:
    """Each Python name in the right column of the table C++ -> Python is there."""
    import dnnl_graph

    text = (ROOT / "docs/dnnl_graph.md").read_text(encoding="utf-8")
    table = text[text.index("| C++ (") : text.index("Beyond the C++ API")]
    names = set(re.findall(r"`((?:engine|op|partition|logical_tensor|stream)\.[\w.]+)`", table))
    assert len(names) > 8
    for name in names:
        eval(name, vars(dnnl_graph))


if __name__ == "__main__":
    run_page(sys.argv[1])
