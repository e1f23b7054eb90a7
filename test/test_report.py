"""`llga_fuser.report`: every field, the reasons, the page, the command, profilers, partitions."""

from __future__ import annotations

import contextlib
import copy
import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llga_fuser
from llga_fuser import _models
from llga_fuser._report import page, verbose
from llga_fuser._report.model import SCHEMA
from llga_fuser._report.text import duration
from util import GROUP, assert_same, has_avx2_kernels
from util import net as training_net


class Net(nn.Module):
    """Four groups (conv+relu, conv+add+relu, mean, linear+gelu), sort and a flatten outside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        z = (self.second(y) + y).relu()
        z = torch.sort(z, dim=1)[0]
        return nn.functional.gelu(self.linear(z.mean((2, 3))))


X = torch.rand(2, 8, 24, 24)  # smaller ones have kernels of the fuser's own


def net(code: str, args: str = "x", **members: Any) -> nn.Module:
    return training_net(code, args, **members).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, and two threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def report(one_thread: None) -> llga_fuser.Report:
    torch.manual_seed(0)
    return llga_fuser.report(Net().eval(), X, rounds=3)


# ------------------------------------------------------------------------------------------ fields


def test_groups(report: llga_fuser.Report) -> None:
    assert report.model == "Net"
    names = ["conv2d+relu", "conv2d+add+relu", "mean", "linear+gelu"]
    assert [g.name for g in report.groups] == names
    first, second, _, last = report.groups
    assert [o.kind for o in first.ops] == ["aten::_convolution", "aten::relu"]
    # The line of the model that calls the module, not torch's.
    lines = pathlib.Path(__file__).read_text().splitlines()
    wanted = 1 + next(i for i, t in enumerate(lines) if "y = self.conv(x).relu()" in t)
    assert first.sources == [f"test_report.py:{wanted}"]
    assert first.scopes == ["conv"]
    (x,) = first.inputs
    assert (x.dtype, x.shape, x.stride) == ("float32", (2, 8, 24, 24), (4608, 576, 24, 1))
    assert x.layout == "contiguous"
    (y,) = first.outputs
    assert (y.shape, y.layout) == ((2, 16, 24, 24), "channels last")
    assert y.name in [v.name for v in second.inputs]
    assert len(last.outputs) == 1 and last.outputs[0].shape == (2, 8)
    for i, g in enumerate(report.groups):
        assert g.index == i
        assert g.calls == 1
        assert 0 < g.seconds < report.summary.seconds
        assert g.share == pytest.approx(g.seconds / report.summary.seconds)
        assert not g.note and not g.block
        assert [p.group for p in g.partitions] == [i]
    assert first.partitions[0].op_kinds == ["Convolution", "ReLU"]


def test_kernels_are_onednns(report: llga_fuser.Report) -> None:
    first, _, _, last = report.groups
    assert first.main is not None and last.main is not None
    assert first.main.kind == "convolution"
    assert last.main.kind == "matmul"
    for g in report.groups:
        assert g.primitives, g.name
        for p in g.primitives:
            assert p.implementation and p.isa and p.problem
            assert all(re.fullmatch(r"f32 \w+", text) for text in p.layouts.values()), p.layouts
    assert {"wei", "dst"} <= set(first.main.layouts)


def test_own_kernels_are_named() -> None:
    x = torch.rand(1, 8, 6, 6).to(memory_format=torch.channels_last)
    grouped = net("F.relu(self.c(x))", c=nn.Conv2d(8, 8, 3, groups=2))
    (group,) = llga_fuser.report(grouped, x, rounds=1).groups
    assert group.main is not None
    assert group.main.kind == "convolution"
    assert group.main.implementation.startswith("llga_") == has_avx2_kernels()

    joined = net(
        "self.b(torch.cat([F.relu(self.c(x)), self.d(x)], 1))",
        b=nn.BatchNorm2d(16),
        c=nn.Conv2d(8, 8, 1),
        d=nn.Conv2d(8, 8, 3, padding=1),
    )
    *_, group = llga_fuser.report(joined, x, rounds=1).groups
    (primitive,) = group.primitives
    assert (primitive.kind, primitive.implementation) == ("concat", "llga_affine")
    assert primitive.isa != "any" and primitive.problem == "1x8x6x6"
    assert primitive.layouts["src"] == "f32 acdb"


def test_outside_has_the_exact_reasons() -> None:
    pool = net("F.adaptive_avg_pool2d(x, 3) + y**5", "x, y")
    found = llga_fuser.report(pool, torch.rand(1, 2, 7, 7), torch.rand(1, 2, 3, 3), rounds=1)
    reasons = {n.op.kind: n.reason for n in found.outside}
    with torch.no_grad(), llga_fuser.fusion(True):
        script = torch.jit.freeze(
            torch.jit.trace(pool, (torch.rand(1, 2, 7, 7), torch.rand(1, 2, 3, 3))).eval()
        )
        for _ in range(3):
            script(torch.rand(1, 2, 7, 7), torch.rand(1, 2, 3, 3))
        graph = script.graph_for(torch.rand(1, 2, 7, 7), torch.rand(1, 2, 3, 3))
    recorded = {
        n.kind(): n.s("llga_refused") for n in graph.nodes() if n.hasAttribute("llga_refused")
    }
    assert len(recorded) == 3
    assert reasons == recorded
    assert "exponent 5" in reasons["aten::pow"]


def test_outside_of_the_op_table(report: llga_fuser.Report) -> None:
    (sort,) = report.outside
    assert sort.op.kind == "aten::sort"
    assert sort.reason == "sort: not in the op table"
    assert sort.op.source.startswith("test_report.py:")
    assert sort.calls == 1 and 0 < sort.share < 1
    position = [g.position for g in report.groups]
    assert position[1] < sort.index < position[2]


def test_summary(report: llga_fuser.Report) -> None:
    s = report.summary
    assert (s.operators, s.fused, s.groups) == (9, 8, 4)
    assert s.fused_seconds == pytest.approx(sum(g.seconds for g in report.groups))
    assert s.share == pytest.approx(s.fused_seconds / s.seconds)
    assert str(s) == f"8 of 9 nodes in 4 groups, {100 * s.share:.1f} % of time"


def test_edges(report: llga_fuser.Report) -> None:
    a, b, c, d = (g.position for g in report.groups)
    (sort,) = (n.index for n in report.outside)
    assert set(report.edges) == {(a, b), (b, sort), (sort, c), (c, d)}


def test_conversions() -> None:
    conv = net("self.c(x).relu()", c=nn.Conv2d(8, 8, 3)).eval()
    gaps = torch.rand(1, 8, 60, 80)[..., ::2]
    found = llga_fuser.report(conv, gaps, rounds=1)
    assert any(c.kind == "copy" and "gaps" in c.text and c.group == 0 for c in found.conversions)
    plain = llga_fuser.report(conv, gaps.contiguous(), rounds=1)
    assert not any("gaps" in c.text for c in plain.conversions)
    assert any(c.kind == "reorder" and "abcd -> f32 acdb" in c.text for c in plain.conversions)
    convs = {name: nn.Conv2d(128, 128, 1 if name != "b" else 3, padding="same") for name in "abc"}
    code = "s = self.a(x).relu(); return self.c(self.b(s).relu()).add(s).relu().sum((2, 3))"
    residual = net(code, **convs)
    found = llga_fuser.report(residual.eval(), torch.rand(1, 128, 28, 28), rounds=1)
    assert not any(c.kind == "copy" for c in found.conversions), "the sum overwrites its addend"
    outside = net("self.c(x.to(torch.float32)).relu()", c=nn.Conv2d(8, 8, 3)).eval()
    half = llga_fuser.report(outside, gaps.contiguous().double(), rounds=1)
    assert any(c.kind == "aten::to" for c in half.conversions), half


def test_fallbacks() -> None:
    x = X.clone()
    x[0, 0, 0, 0] = float("nan")
    found = llga_fuser.report(Net().eval(), x, rounds=2)
    assert {f.reason for f in found.fallbacks} == {"an input holds NaN or an infinity"}
    first = found.fallbacks[0]
    assert (first.group, first.calls) == (0, 1)
    assert "interpreter" in found.groups[0].note
    assert not found.groups[0].primitives and not found.groups[0].partitions
    assert "NaN or an infinity" in str(found)
    assert not llga_fuser.report(Net().eval(), X, rounds=1).fallbacks


def test_optimised_before_the_fuser_was_on() -> None:
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(Net().eval(), X))
        for _ in range(3):
            script(X)
    found = llga_fuser.report(script, X, rounds=1)
    assert not found.groups
    assert any("before the fuser was on" in n for n in found.notes)
    assert any("the fuser was off" in n.reason for n in found.outside)


# ------------------------------------------------------------------------------- kinds of models


def test_scripted_with_control_flow() -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)
            self.other = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor, n: int, flag: bool) -> Tensor:
            for _ in range(n):
                x = self.conv(x).relu()
            if flag:
                x = self.other(x).relu()
            else:
                x = torch.sort(x)[0]
            return x

    script = torch.jit.freeze(torch.jit.script(Flow().eval()))
    x = torch.rand(1, 4, 8, 8)
    found = llga_fuser.report(script, x, n=3, flag=True, rounds=2)
    by_block = {g.block: g for g in found.groups}
    assert by_block["loop"].calls == 3
    assert by_block["if"].calls == 1
    (sort,) = [n for n in found.outside if n.op.kind == "aten::sort"]
    assert (sort.block, sort.calls) == ("else", 0)
    assert (by_block["loop"].position, by_block["if"].position) in found.edges
    assert by_block["loop"].sources[0].startswith("test_report.py:")
    other = llga_fuser.report(script, x, n=1, flag=False, rounds=1)
    (idle,) = [g for g in other.groups if g.block == "if"]
    assert idle.calls == 0 and idle.note == "did not run for these inputs"


def test_functions_and_script_functions() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w)

    x, w = torch.rand(4, 8), torch.rand(8, 8)
    for target in (function, torch.jit.script(function)):
        found = llga_fuser.report(target, x, w, rounds=1)
        assert [g.name for g in found.groups] == ["matmul+relu"]
        assert found.model == "function"


@pytest.mark.parametrize("release", [False, True])
def test_compiled_ahead_of_time(release: bool) -> None:
    module = net(
        "torch.cumsum(F.gelu(self.l(self.c(x).relu().mean((2, 3)))), 1)",
        c=nn.Conv2d(8, 16, 3),
        l=nn.Linear(16, 8),
    )
    compiled = llga_fuser.compile(module, X, release_weights=release)
    found = llga_fuser.report(compiled, X, rounds=1)
    assert [g.name for g in found.groups] == ["conv2d+relu", "mean", "linear+gelu"]
    assert [g.calls for g in found.groups] == [1] * 3
    assert [n.reason for n in found.outside] == ["cumsum: not in the op table"]
    dnnl_graph = pytest.importorskip("dnnl_graph")
    for p in found.partitions:
        result = dnnl_graph.run(dnnl_graph.load(p.to_json()), {**p.constants, **p.inputs})
        for tid, tensor in p.outputs.items():
            assert relative(result[tid], tensor) < 1e-5


def test_fpmath_mode_of_a_partition() -> None:
    compiled = llga_fuser.compile(net("torch.relu(x @ x)"), torch.rand(8, 8), fpmath_mode="bf16")
    (part,) = llga_fuser.report(compiled, torch.rand(8, 8), rounds=1).partitions
    assert part.to_dict()["fpmath_mode"] == "bf16"


def test_the_switch_and_the_inputs_stay_as_they_were() -> None:
    def writes(x: Tensor) -> Tensor:
        x.add_(1)
        return torch.relu(x @ x)

    x = torch.rand(8, 8)
    kept = x.clone()
    assert not llga_fuser.is_enabled()
    llga_fuser.report(writes, x, rounds=1)
    assert not llga_fuser.is_enabled()
    assert torch.equal(x, kept)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="rounds"):
        llga_fuser.report(Net().eval(), X, rounds=0)
    with pytest.raises(TypeError, match="rounds"):
        llga_fuser.report(Net().eval(), X, rounds=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strict"):
        llga_fuser.report(Net().eval(), X, strict=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="training mode"):
        llga_fuser.report(Net().train(), X)
    with pytest.raises(TypeError, match="module"):
        llga_fuser.report(3, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype"):
        llga_fuser.report(Net().eval(), X, dtype=torch.int32)


def test_a_model_that_raises_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        llga_fuser.report(torch.jit.freeze(torch.jit.script(Net().eval())), torch.rand(2, 3, 4, 4))
    assert llga_fuser.report(Net().eval(), X, rounds=1).groups
    print("printing works")
    os.write(1, b"writing works\n")
    out = capfd.readouterr().out
    assert "printing works" in out and "writing works" in out and "onednn_verbose" not in out


def test_other_threads_go_on() -> None:
    with torch.no_grad(), llga_fuser.fusion(True):
        script = torch.jit.freeze(torch.jit.trace(Net().eval(), X))
        expected = [script(X) for _ in range(3)][-1]
    stop, failures, calls = threading.Event(), [], 0

    def work() -> None:
        nonlocal calls
        with torch.no_grad():
            while not stop.is_set():
                if not torch.equal(script(X), expected):
                    failures.append(1)
                calls += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = llga_fuser.report(script, X, rounds=3)
    finally:
        stop.set()
        thread.join()
    assert calls > 0 and not failures
    assert [g.calls for g in found.groups] == [1, 1, 1, 1]


# ------------------------------------------------------------------------------------------ strict


def test_strict(report: llga_fuser.Report) -> None:
    with pytest.raises(llga_fuser.UnfusedError, match="sort: not in the op table") as caught:
        llga_fuser.report(Net().eval(), X, rounds=1, strict=True)
    assert "test_report.py:" in str(caught.value)
    fused = net("self.c(x).relu()", c=nn.Conv2d(8, 8, 3)).eval()
    assert len(llga_fuser.report(fused, X, rounds=1, strict=True).groups) == 1
    x = X.clone()
    x[0] = float("inf")
    with pytest.raises(llga_fuser.UnfusedError, match="runs in the interpreter: an input holds"):
        llga_fuser.report(fused, x, rounds=1, strict=True)


def strict_block(x: Tensor, w: Tensor) -> Tensor:
    with torch.jit.strict_fusion():
        y = torch.relu(torch.matmul(x, w))
    return torch.sort(y)[0]


def strict_block_with_sort(x: Tensor, w: Tensor) -> Tensor:
    with torch.jit.strict_fusion():
        y = torch.sort(torch.relu(torch.matmul(x, w)))[0]
    return y  # noqa: RET504 (TorchScript does not return from within a with block)


def test_strict_fusion_blocks(fuser: None) -> None:
    x, w = torch.rand(4, 8), torch.rand(8, 8)
    good, bad = torch.jit.script(strict_block), torch.jit.script(strict_block_with_sort)
    with torch.no_grad():
        results = [good(x, w) for _ in range(3)]
        assert_same(results[-1], strict_block(x, w))
        assert GROUP in str(good.graph_for(x, w))
        bad(x, w)  # observed
        with pytest.raises(RuntimeError, match="strict_fusion: not fused\n  aten::sort: not in"):
            bad(x, w)
    with pytest.raises(RuntimeError, match="aten::sort: not in the op table"):
        llga_fuser.report(bad, x, w)
    assert llga_fuser.report(torch.jit.script(strict_block), x, w, rounds=1).groups


# ------------------------------------------------------------------------------------------- forms


def test_text_fits_100_columns(report: llga_fuser.Report) -> None:
    text = str(report)
    assert all(len(line) <= 100 for line in text.splitlines()), text
    assert str(report.summary) in text
    for g in report.groups:
        assert g.name in text
        assert g.main is not None and g.main.implementation in text
    assert "sort: not in the op table" in text
    assert "2x16x24x24 f32 channels last" in text


def test_text_of_long_names_and_many_reasons() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = torch.sort(torch.relu(x @ x) + 1)[0]
            return x

    found = llga_fuser.report(Deep().eval(), torch.rand(8, 8), rounds=1)
    lines = str(found).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert sum("12 x aten::sort" in line or "12 x sort" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2e-7, "0.20 us"), (1.234e-3, "1.23 ms"), (0.0999, "99.9 ms"), (12.0, "12.0 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Fields are added, never renamed or removed: docs/report.md lists them.
FIELDS = {
    "": "schema model inputs environment summary groups outside conversions fallbacks edges notes",
    "inputs": "name dtype shape stride layout value",
    "environment": "llga_fuser torch onednn isa threads fpmath_mode",
    "summary": "operators fused groups seconds fused_seconds share text",
    "groups": "index position name ops sources inputs outputs primitives partitions calls seconds "
    "share block note",
    "ops": "kind source scope",
    "primitives": "kind implementation isa layouts problem",
    "outside": "index kind source scope reason outputs calls seconds share block",
    "conversions": "group kind text",
    "fallbacks": "group reason calls",
}


def test_json_has_the_documented_fields(tmp_path: pathlib.Path) -> None:
    x = X.clone()
    x[0, 0, 0, 0] = float("inf")
    file = tmp_path / "report.json"
    found = llga_fuser.report(Net().eval(), x, rounds=1)
    found.to_json(file)
    data = json.loads(file.read_text())
    assert data == found.to_dict()
    assert data["schema"] == SCHEMA == 1
    good = llga_fuser.report(Net().eval(), X, rounds=1).to_dict()
    samples = {
        "": data,
        "inputs": data["inputs"][0],
        "environment": data["environment"],
        "summary": data["summary"],
        "groups": data["groups"][0],
        "ops": data["groups"][0]["ops"][0],
        "primitives": good["groups"][0]["primitives"][0],
        "outside": data["outside"][0],
        "conversions": good["conversions"][0],
        "fallbacks": data["fallbacks"][0],
    }
    docs = (pathlib.Path(__file__).parent.parent / "docs" / "report.md").read_text()
    for name, fields in FIELDS.items():
        assert list(samples[name]) == fields.split(), name
        for field in fields.split():
            assert f"`{field}`" in docs, f"docs/report.md says nothing of {field}"


class Page(html.parser.HTMLParser):
    VOID = ("meta", "br", "input", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html(report: llga_fuser.Report, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "report.html"
    text = report.to_html(file)
    assert file.read_text() == text
    assert "{{" not in text
    parsed = Page(text)
    # Nothing from elsewhere.
    assert not re.search(r"https?://|@import|url\(", text)
    assert not [t for t, a in parsed.attributes if "src" in a or (t == "link")]
    nodes = {
        int(str(a["data-i"])): str(a["class"])
        for t, a in parsed.attributes
        if t == "g" and "node" in str(a.get("class"))
    }
    assert {i for i, c in nodes.items() if "group" in c} == {g.position for g in report.groups}
    assert {i for i, c in nodes.items() if "outside" in c} == {n.index for n in report.outside}
    drawn = {
        (int(str(a["data-a"])), int(str(a["data-b"]))) for t, a in parsed.attributes if t == "path"
    }
    assert drawn == set(report.edges)
    bars = [a for t, a in parsed.attributes if t == "rect" and "bar" in str(a.get("class"))]
    assert len(bars) == len(report.groups) + len(report.outside)
    data = json.loads(re.findall(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[0])
    assert [d["title"].split()[-1] for d in data if "kernels" in d] == [
        g.name for g in report.groups
    ]
    assert any("sort: not in the op table" in t for t in parsed.texts)


def test_html_escapes() -> None:
    name = "<script>alert(1)</script>"
    module = net("torch.relu(x @ x)")
    module.name = name
    found = llga_fuser.report(module, torch.rand(4, 4), rounds=1)
    import dataclasses

    text = dataclasses.replace(found, model=name, notes=(name,)).to_html()
    assert name not in text
    Page(text)


def test_layout_of_the_drawing() -> None:
    # A chain with a skip edge and a branch of one: the chain stays straight.
    places = page.layout(5, [(0, 1), (1, 2), (0, 2), (2, 4), (1, 3), (3, 4)])
    assert places[0] == (0, 0) and places[1] == (0, 1)
    assert {places[2], places[3]} == {(0, 2), (1, 2)}
    assert places[4][1] == 3
    many = page.layout(500, [(i, j) for i in range(500) for j in (i + 1, i + 7) if j < 500])
    assert len(set(many)) == 500


# -------------------------------------------------------------------------------------------- diff


def test_diff(report: llga_fuser.Report) -> None:
    same = report.diff(report.to_dict())
    assert not same
    assert "the same groups" in str(same)
    other = Net()
    other.second = nn.Identity()  # type: ignore[assignment]
    changed = report.diff(llga_fuser.report(other.eval(), X, rounds=1))
    assert changed
    assert ("removed", "conv2d+add+relu float32", "") in changed.groups
    assert changed.summary["fused"] == (8, 7)
    assert "- group conv2d+add+relu" in str(changed)
    assert all(len(line) <= 100 for line in str(changed).splitlines())

    data = copy.deepcopy(report.to_dict())
    data["groups"][0]["primitives"][-1]["implementation"] = "brgconv:another"
    data["environment"]["isa"] = "another"
    data["outside"] = []
    found = report.diff(data)
    assert found.environment == {"isa": (report.environment["isa"], "another")}
    assert [c for c, _, _ in found.groups] == ["kernel"]
    assert found.outside == (("removed", "sort: not in the op table", 1),)
    assert json.loads(json.dumps(found.to_dict()))["schema"] == SCHEMA
    with pytest.raises(ValueError, match="schema"):
        report.diff({"schema": 99})
    with pytest.raises(TypeError, match="other"):
        report.diff(3)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- partitions


def attention() -> nn.Module:
    """Whose weights are a result: else it would be the fuser's own kernel's."""
    code = "w = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)\nreturn w @ v, w"
    return net(code, "q, k, v")


def partition_cases() -> list[Any]:
    g = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    conv_add = net(
        "(self.d(self.c(x).relu()) + x).relu()",
        c=nn.Conv2d(8, 8, 3, padding=1),
        d=nn.Conv2d(8, 8, 3, padding=1, groups=2),
    )
    linear = net("F.gelu(self.l(x))", l=nn.Linear(16, 24))
    bf16 = llga_fuser._C.runtime_info()["bf16"]
    cases = [
        pytest.param(conv_add, (rand(2, 8, 9, 9),), None, id="conv_relu_add"),
        pytest.param(linear, (rand(3, 16),), None, id="linear_gelu"),
        pytest.param(attention(), tuple(rand(1, 2, 8, 16) for _ in range(3)), None, id="attention"),
        pytest.param(net("F.silu(x @ y) + 0.5", "x, y"), (rand(8, 8), rand(8, 8)), None, id="silu"),
        pytest.param(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            (rand(2, 6, 32),),
            None,
            id="encoder",
        ),
    ]
    for name, size, marks in (("resnet18", 32, ()), ("mobilenet_v3_small", 64, pytest.mark.slow)):
        model = _models.build(name, size)
        cases.append(pytest.param(model.module, model.inputs(1, 0), None, id=name, marks=marks))
    if bf16:
        cases.append(pytest.param(linear, (rand(3, 16),), torch.bfloat16, id="bf16"))
    return cases


def relative(actual: Any, expected: Tensor) -> float:
    array = torch.from_numpy(actual.astype("float32")).reshape(expected.shape)
    return float((array - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(("module", "inputs", "dtype"), partition_cases())
def test_partitions_reproduce_the_groups_numbers(
    module: nn.Module, inputs: tuple[Tensor, ...], dtype: Any, tmp_path: pathlib.Path
) -> None:
    dnnl_graph = pytest.importorskip("dnnl_graph")
    found = llga_fuser.report(module.eval(), *inputs, rounds=1, dtype=dtype)
    assert found.partitions and not found.fallbacks
    assert [p.index for p in found.partitions] == list(range(len(found.partitions)))
    file = tmp_path / "partition.json"
    sensitive = 0
    for p in found.partitions:
        assert json.loads(p.to_json(file).replace("inf", "Infinity"))["graph"]
        graph = dnnl_graph.load(file)
        constants, values, expected = p.constants, p.inputs, p.outputs
        assert values and expected
        result = dnnl_graph.run(graph, {**constants, **values})
        for tid, tensor in expected.items():
            assert relative(result[tid], tensor) < (1e-5 if dtype is None else 1e-2), p.op_kinds
        # Other numbers in give other numbers out: the comparison can fail.
        other = dnnl_graph.run(graph, {**constants, **{t: v**2 + 1 for t, v in values.items()}})
        sensitive += any(relative(other[t], e) > 1e-3 for t, e in expected.items())
    assert sensitive == len(found.partitions)


def test_partition_json_is_what_onednn_dumps(report: llga_fuser.Report) -> None:
    data = json.loads(report.partitions[0].to_json())
    assert list(data) == [
        "version",
        "engine_kind",
        "fpmath_mode",
        "fpmath_mode_apply_to_int",
        "input_ports",
        "output_ports",
        "graph",
    ]
    conv, relu = data["graph"]
    assert (conv["kind"], relu["kind"]) == ("Convolution", "ReLU")
    assert conv["attrs"]["strides"] == {"type": "s64[]", "value": [1, 1]}
    assert conv["attrs"]["data_format"] == {"type": "string", "value": "NCX"}
    assert conv["attrs"]["groups"] == {"type": "s64", "value": 1}
    x, weight, bias = conv["inputs"]
    assert x["stride"] == [4608, 576, 24, 1] and x["layout_type"] == "strided"
    assert weight["property_type"] == bias["property_type"] == "constant"
    assert data["output_ports"] == [relu["outputs"][0]["id"]]
    assert relu["outputs"][0]["stride"] == [9216, 1, 384, 16]  # channels last, as it was
    floats = llga_fuser.report(net("F.leaky_relu(x @ x, 0.1)"), torch.rand(4, 4), rounds=1)
    (part,) = floats.partitions
    (slope,) = [o["attrs"]["alpha"] for o in part.to_dict()["graph"] if "alpha" in o["attrs"]]
    assert slope == {"type": "f32", "value": 0.1}


# --------------------------------------------------------------------------------------- profilers


def test_profilers_show_groups(tmp_path: pathlib.Path, fuser: None) -> None:
    module = Net().eval()
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(module, X))
        script(X)
        with torch.profiler.profile(record_shapes=True) as first:
            script(X)
        with torch.profiler.profile() as warm:
            script(X)
    compiled = [e.key for e in first.key_averages() if e.key.startswith("llga::compile")]
    names = ["conv2d+relu", "conv2d+add+relu", "mean", "linear+gelu"]
    assert sorted(compiled) == sorted(f"llga::compile {n}" for n in names)
    counts = {e.key: e.count for e in warm.key_averages()}
    assert {n: counts.get(n) for n in names} == dict.fromkeys(names, 1)
    shapes = [e.input_shapes for e in first.events() if e.name == "conv2d+relu"]
    assert [[2, 8, 24, 24]] in shapes
    trace = tmp_path / "trace.json"
    warm.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e.get("name") for e in events} >= set(names)


def test_names_of_groups() -> None:
    cases = {
        # A sequence is an image of one row.
        "conv_transpose2d+relu": net("self.c(x).relu()", c=nn.ConvTranspose1d(4, 4, 3)),
        "conv3d+sigmoid": net("self.c(x).sigmoid()", c=nn.Conv3d(4, 4, 1)),
    }
    inputs = {
        "conv_transpose2d+relu": torch.rand(1, 4, 9),
        "conv3d+sigmoid": torch.rand(1, 4, 3, 3, 3),
    }
    for name, module in cases.items():
        found = llga_fuser.report(module.eval(), inputs[name], rounds=1)
        assert [g.name for g in found.groups] == [name]
    long = net("F.silu(F.silu(F.silu(F.silu(F.silu(x @ x)*2)*2)*2)*2)*2")
    (group,) = llga_fuser.report(long, torch.rand(4, 4), rounds=1).groups[:1]
    assert len(group.ops) < 8 or "more)" in group.name
    assert len(group.name) < 100


# ----------------------------------------------------------------------------------------- verbose

LINES = {
    "3.2": "onednn_verbose,exec,cpu,convolution,brgconv:avx2,forward_inference,"
    "src_f32::blocked:acdb::f0 wei_f32:a:blocked:Acdb16a::f0 dst_f32::blocked:acdb::f0,"
    "attr-post-ops:eltwise_relu ,alg:convolution_direct,mb1_ic8,0.03",
    "3.7": "onednn_verbose,v1,primitive,exec,cpu,convolution,brgconv:avx2,forward_inference,"
    "src:f32::blocked:acdb::f0 wei:f32:a:blocked:Acdb16a::f0 dst:f32::blocked:acdb::f0,"
    "attr-post-ops:eltwise_relu,alg:convolution_direct,mb1_ic8,0.03",
    "timestamp": "onednn_verbose,v1,1700000000.5,primitive,exec,cpu,convolution,brgconv:avx2,"
    "forward_inference,src:f32::blocked:acdb::f0 wei:f32:a:blocked:Acdb16a::f0 "
    "dst:f32::blocked:acdb::f0,,alg:convolution_direct,mb1_ic8,0.03",
}


@pytest.mark.parametrize("version", LINES)
def test_verbose_lines(version: str) -> None:
    noise = (
        "onednn_verbose,v1,graph,exec,cpu,100002,conv_post_ops,a;b,,in0_f32:1,fpm:strict,x,y,1\n"
        "onednn_verbose,create:cache_hit,cpu,reorder,simple:any,undef,a,b,,1x16,0.007\n"
        "somebody else's\n"
    )
    text = f"{noise}llga_fuser,begin,7\n{noise}{LINES[version]}\nllga_fuser,end\n{LINES[version]}\n"
    executions, others = verbose.parse(text)
    ((kernel, (primitive,)),) = executions
    assert kernel == 7
    assert (primitive.kind, primitive.implementation) == ("convolution", "brgconv:avx2")
    assert (primitive.isa, primitive.problem) == ("avx2", "mb1_ic8")
    assert primitive.layouts == {"src": "f32 acdb", "wei": "f32 Acdb16a", "dst": "f32 acdb"}
    assert others.splitlines() == ["somebody else's"] * 2


def test_own_kernels_come_behind_onednns() -> None:
    own = (
        "llga_fuser,exec,concat,llga_affine,f32 acdb,f32 acdb,1x8x4x4\n"
        "llga_fuser,exec,convolution,llga_grouped:avx2,f32 acdb,bf16 abcd,1x16x8x8"
    )
    text = f"llga_fuser,begin,7\n{LINES['3.7']}\n{own}\nllga_fuser,end\n"
    ((_, primitives),), others = verbose.parse(text)
    assert [p.implementation for p in primitives] == [
        "brgconv:avx2",
        "llga_affine",
        "llga_grouped:avx2",
    ]
    assert primitives[2].isa == "avx2"
    assert primitives[2].layouts == {"src": "f32 acdb", "dst": "bf16 abcd"}
    assert primitives[2].problem == "1x16x8x8"
    assert not others


@pytest.mark.parametrize(
    ("variable", "level"),
    [("", 0), ("0", 0), ("1", 1), ("2", 2), ("all", 2), ("profile_exec", 1), ("none", 0)],
)
def test_users_verbosity(variable: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNL_VERBOSE", raising=False)
    monkeypatch.setenv("ONEDNN_VERBOSE", variable)
    assert verbose.users_verbosity() == level


# ----------------------------------------------------------------------------------------- command


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    root = str(pathlib.Path(llga_fuser.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "llga_fuser", "report", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )


def test_command(tmp_path: pathlib.Path) -> None:
    files = {k: str(tmp_path / k) for k in ("r.json", "r.html", "parts")}
    done = run(
        *("tinyconv", "--rounds", "2", "--threads", "1", "--json", files["r.json"]),
        *("--html", files["r.html"], "--partitions", files["parts"]),
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "conv2d+relu" in done.stdout and "of 7 nodes in" in done.stdout
    data = json.loads(pathlib.Path(files["r.json"]).read_text())
    assert data["model"] == "tinyconv" and data["environment"]["threads"] == 1
    Page(pathlib.Path(files["r.html"]).read_text())
    assert len(os.listdir(files["parts"])) == len(data["groups"])

    model = str(tmp_path / "net.pt")
    torch.jit.save(torch.jit.trace(Net().eval(), X), model)
    done = run(
        model, "--shape", "2,8,10,10", "--rounds", "1", "--strict", "--compare", files["r.json"]
    )
    assert done.returncode == 1, done.stderr
    assert "net.pt" in done.stdout and "sort: not in the op table" in done.stdout
    assert "+ group conv2d+add+relu" in done.stdout
    assert done.stderr.count("\n") == 1 and "1 not fused" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_model"], "unknown model 'no_such_model'"),
        (["no_such_file.pt"], "no such file"),
        ([__file__], "not a file that torch.jit.save wrote"),
        (["mlp", "--shape", "1,3"], "--shape is for files"),
        (["mlp", "--json", "/no/such/place"], "cannot write /no/such/place"),
        (["mlp", "--compare", "/no/such/place"], "/no/such/place"),
    ],
)
def test_command_fails_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from llga_fuser.__main__ import main

    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_command_with_a_wrong_shape(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from llga_fuser.__main__ import main

    model = str(tmp_path / "net.pt")
    torch.jit.save(torch.jit.freeze(torch.jit.trace(Net().eval(), X)), model)
    assert main(["report", model]) == 2
    assert "takes 1 inputs, --shape is given 0 times" in capsys.readouterr().err
    assert main(["report", model, "--shape", "1,3,4,4"]) == 2
    err = capsys.readouterr().err
    assert "net.pt" in err and err.count("\n") == 1
    for wrong in ("a,b", "1,2:complex"):
        with contextlib.suppress(SystemExit):
            main(["report", model, "--shape", wrong])
        assert "argument --shape" in capsys.readouterr().err


def test_verbose_of_the_user_stays(tmp_path: pathlib.Path) -> None:
    options = ("tinyconv", "--batch", "16", "--rounds", "1", "--threads", "1")
    quiet = run(*options)
    loud = run(*options, ONEDNN_VERBOSE="1")
    assert "onednn_verbose" not in quiet.stdout
    assert ",exec,cpu,convolution," in loud.stdout


def test_what_is_computed_once_for_each_set_of_sizes() -> None:
    module = net(
        "n = torch.arange(x.size(1))\nreturn x @ torch.where(n[:, None] < n, 0.5, x.new_ones(1))"
    )
    found = llga_fuser.report(module, torch.randn(4, 6), rounds=1)
    (note,) = (n for n in found.notes if "sizes alone" in n)
    assert int(re.findall(r": (\d+)\.", note)[0]) >= 4
    assert not any("arange" in node.op for node in found.outside)
    assert note in found.to_dict()["notes"]
