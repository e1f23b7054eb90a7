"""Every piece of code in docs/dnnl_graph.md does what the page says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dnnl_graph as dg

PAGE = Path(__file__).parents[2] / "docs" / "dnnl_graph.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"^    (python .*)$", TEXT, re.MULTILINE)
FILE = "graph-100001.json"


def run(block, scope):
    line = TEXT[: TEXT.index(block)].count("\n")
    exec(compile("\n" * line + block, str(PAGE), "exec"), scope)


def test_all_code_is_found():
    assert len(BLOCKS) == TEXT.count("```") // 2 and len(COMMANDS) == 1


def test_code(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in BLOCKS:
        if FILE in block:  # the page takes it from a framework; here it is the tutorial's graph
            dg.dump(scope["g"], FILE)
        run(block, scope)
    printed = capsys.readouterr().out
    assert re.search(r"^partition\(\d+, ops \[0, 1\], supported\)$", printed, re.MULTILINE)
    assert "partition" in printed and "execute" in printed and " us" in printed
    np.testing.assert_allclose(scope["out"][3], scope["zs"], rtol=1e-4, atol=1e-4)
    assert scope["out"]["relu"] is scope["out"][3]
    assert scope["view"].data_ptr() == scope["own"].get_data_handle()
    assert dg.dump(dg.load("copy.json")) == dg.dump(scope["g"])
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        assert program == "python"
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Convolution+ReLU" in done.stdout and " us" in done.stdout


def test_the_mapping_names_what_there_is():
    """Each Python name in the right column of the table C++ -> Python is there."""
    table = TEXT[TEXT.index("| C++ (") : TEXT.index("Beyond the C++ API")]
    names = set(re.findall(r"`((?:engine|op|partition|logical_tensor|stream)\.[\w.]+)`", table))
    assert len(names) > 8
    for name in names:
        eval(name, vars(dg))
