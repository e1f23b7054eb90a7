"""Each pass alone: IR in, IR out."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import FileCheck

import llga_fuser
from llga_fuser import _C
from util import (
    autocast_bf16,
    check,
    fused_graph,
    fuses,
    has_matrix_units,
    has_own_attention,
    has_own_kernels,
    net,
    to_script,
    walk,
)

pytestmark = pytest.mark.usefixtures("fuser")

PASSES = [
    "specialize_types",
    "restore_cells",
    "remove_mutation",
    "fold_constants",
    "normalize_ops",
    "restore_linear",
    "restore_attention",
    "unstack",
    "fold_batch_norm",
    "fold_scale",
    "sink_permute",
    "widen_bfloat16",
    "widen_quantized",
    "drop_casts",
    "drop_copies",
    "sequences_as_images",
    "merge_parts",
    "merge_branches",
    "prepare_quantized",
    "prepare_binary",
    "sink_windows",
    "defer_size_check",
    "once_per_sizes",
    "join_sums",
    "join_gates",
    "graph_fuser",
    "join_concat",
    "join_depthwise",
    "join_excitation",
    "join_shuffle",
    "layout_propagation",
    "guard_values",
    "guard_shape",
]


@pytest.fixture(autouse=True, scope="module")
def _operators() -> None:
    """The first run of a pass registers what it puts in, which graphs of these tests name."""
    _C.run_pass("remove_mutation", torch._C.Graph())


def parsed(text: str) -> torch.Graph:
    return torch._C.parse_ir(text, parse_tensor_constants=True)


def after(name: str, text: str) -> torch.Graph:
    graph = parsed(text)
    _C.run_pass(name, graph)
    torch._C._jit_pass_lint(graph)
    return graph


def kinds(graph: torch.Graph) -> list[str]:
    skipped = ("prim::Constant", "prim::ListConstruct")
    return [n.kind() for n in walk(graph) if n.kind() not in skipped]


def test_the_order_is_declared() -> None:
    assert _C.pass_names() == PASSES


def test_unknown_pass_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown pass 'fuse'.*graph_fuser"):
        _C.set_pass_enabled("fuse", False)


@pytest.fixture
def all_on() -> Iterator[None]:
    yield
    for name in PASSES:
        _C.set_pass_enabled(name, True)


def scripted() -> tuple[torch.jit.ScriptModule, Tensor]:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    return torch.jit.freeze(torch.jit.trace(module, x)), x


@pytest.mark.parametrize("name", PASSES)
def test_each_can_be_switched_off(name: str, all_on: None) -> None:
    """The others cope: same numbers, and without the fuser pass no group."""
    _C.set_pass_enabled(name, False)
    assert not _C.is_pass_enabled(name)
    module, x = scripted()
    with torch.no_grad():
        first = module(x)
        results = [module(x) for _ in range(3)]
        graph = module.graph_for(x)
    for result in results:
        torch.testing.assert_close(result, first, rtol=1e-4, atol=1e-5)
    grouped = any(n.kind() == "llga::FusionGroup" for n in walk(graph))
    if name == "graph_fuser":
        assert not grouped
    elif name != "specialize_types":
        assert grouped


@pytest.mark.parametrize(
    ("value", "status", "message"),
    [("graph_fuser,prepare_binary", 0, ""), ("nonsense", 1, "unknown pass 'nonsense'")],
)
def test_environment_variable(value: str, status: int, message: str) -> None:
    code = (
        "import llga_fuser; llga_fuser.enable(); "
        "assert not llga_fuser._C.is_pass_enabled('graph_fuser'); "
        "assert llga_fuser._C.is_pass_enabled('guard_shape')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LLGA_FUSER_DISABLE_PASSES": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert message in done.stderr


def test_specialize_types() -> None:
    graph = after(
        "specialize_types",
        """
        graph(%x : Tensor):
          %1 : Tensor = prim::profile[profiled_type=Float(2, 3, strides=[3, 1])](%x)
          %2 : Tensor = aten::relu(%1)
          return (%2)
        """,
    )
    assert kinds(graph) == ["aten::relu"]


def test_remove_mutation() -> None:
    graph = after(
        "remove_mutation",
        """
        graph(%x : Tensor):
          %1 : Tensor = aten::sigmoid(%x)
          %2 : Tensor = aten::hardswish_(%1)
          return (%2)
        """,
    )
    assert kinds(graph) == ["aten::sigmoid", "aten::hardswish", "llga::as_target"]
    FileCheck().check("%4 : Tensor = aten::hardswish(%1)").check(
        "%5 : Tensor = llga::as_target(%4, %1)"
    ).check("return (%5)").run(str(graph))


def test_remove_mutation_behind_another_op() -> None:
    """Which TorchScript's pass brings in front of what makes the target."""
    graph = after(
        "remove_mutation",
        """
        graph(%x : Tensor, %z : Tensor):
          %one : int = prim::Constant[value=1]()
          %y : Tensor = aten::sigmoid(%x)
          %w : Tensor = aten::relu(%z)
          %r : Tensor = aten::add_(%y, %w, %one)
          return (%r)
        """,
    )
    assert sorted(kinds(graph)) == ["aten::add", "aten::relu", "aten::sigmoid", "llga::as_target"]
    function = torch._C._create_function_from_graph("forward", graph)
    x, z = torch.randn(3).bfloat16(), torch.randn(3)
    assert function(x, z).dtype == torch.bfloat16


def test_remove_mutation_twice_in_a_row() -> None:
    graph = after(
        "remove_mutation",
        """
        graph(%x : Tensor, %y : Tensor):
          %one : int = prim::Constant[value=1]()
          %1 : Tensor = aten::cos(%x)
          %2 : Tensor = aten::add_(%1, %y, %one)
          %3 : Tensor = aten::mul_(%2, %y)
          return (%1)
        """,
    )
    targets = ["aten::add", "llga::as_target", "aten::mul", "llga::as_target"]
    assert kinds(graph) == ["aten::cos", *targets]
    assert next(graph.outputs()).node().kind() == "llga::as_target"


def test_remove_mutation_keeps_what_others_see() -> None:
    graph = after(
        "remove_mutation",
        """
        graph(%x : Tensor):
          %1 : Tensor = aten::relu_(%x)
          return (%1)
        """,
    )
    assert kinds(graph) == ["aten::relu_"]


WRITE_TO_A_VIEW = """
graph(%x : Tensor, %y : Tensor):
  %none : NoneType = prim::Constant()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %1 : Tensor = SOURCE
  %2 : Tensor = aten::slice(%1, %one, %none, %two, %one)
  %3 : Tensor = aten::transpose(%2, %one, %two)
  %4 : Tensor = aten::add_(%3, %y, %one)
  REST
"""


@pytest.mark.parametrize(
    ("source", "rest", "pure"),
    [
        ("aten::cos(%x)", "return (%4)", True),
        ("aten::cos(%x)", "return (%3)", True),
        ("aten::cos(%x)", "%5 : Tensor = aten::relu_(%4); return (%5)", True),
        ("aten::cos(%x)", "%5 : Tensor = aten::sigmoid(%4); return (%5)", True),
        ("aten::add_(%x, %x, %one)", "return (%4)", False),
        ("aten::cos(%x)", "return (%2)", False),
        ("aten::cos(%x)", "%5 : Tensor = aten::sigmoid(%1); return (%5)", False),
        ("aten::cos(%x)", "%5 : Tensor = aten::t(%1); return (%5)", False),
        ("aten::cos(%x)", "%5 : Tensor[] = prim::ListConstruct(%4, %1); return (%5)", False),
        ("aten::relu_(%x)", "return (%4)", False),
        ("aten::t(%x)", "return (%4)", False),
    ],
)
def test_remove_mutation_of_a_view(source: str, rest: str, pure: bool) -> None:
    """Unless what it is a view of is read behind, or is not the graph's own."""
    text = WRITE_TO_A_VIEW.replace("SOURCE", source).replace("REST", rest.replace("; ", "\n  "))
    graph = after("remove_mutation", text)
    assert pure == ("aten::add" in kinds(graph)), graph
    assert pure != ("aten::add_" in kinds(graph)), graph
    assert pure == ("llga::as_target" in kinds(graph)), graph


@pytest.mark.parametrize(
    "code",
    [
        "y = torch.cos(x)\nz = y[:, :2]\nz += 1\nreturn torch.relu(z)",
        "y = torch.cos(x)\nz = y[:, :2]\nz += 1\nreturn torch.relu(y)",
        "y = torch.cos(x)\nz = y[:, :2]\nw = z[:, 1:]\nz += 1\nreturn torch.relu(z), w",
        "y = torch.cos(x)\nz = y[:, :2]\nz += 1\nz *= 2\nreturn z, z + 1",
        "y = torch.cos(x)\na, b = y.chunk(2, 1)\na += b\nb *= a\nreturn a, b",
        "y = torch.cos(x)\nz = y[0]\nz += y[1]\nreturn z",
        "y = torch.cos(x)\nz = y.view(-1)\nz.relu_()\nreturn z.sigmoid_()",
        "z = x[:, :2]\nz += 1\nreturn torch.relu(z)",
        "y = torch.cos(x)\nz = y[:, :2]\nz += y[:, 2:4]\nreturn z * 2",
        "y = torch.cos(x)\ny /= y.sum(-1, keepdim=True)\nreturn torch.relu(y)",
        "y = torch.cos(x)\nz = y + 1\ny *= z\ny += y\nreturn y, z",
        "y = torch.cos(x)\nz = y + 1\nw = y.view(-1)\ny *= z\nreturn y, w",
        "y = torch.cos(x)\ny.relu_()\na, b = y.split(3, 1)\nreturn a * b.sum(1)[:, None], y",
        "y = torch.cos(x)\na, b = y.chunk(2, 1)\ny.relu_()\nb += a\nreturn torch.sigmoid(a), b",
        "y = torch.cos(x)\na, b = y.chunk(2, 1)\na += 1\nb += 2\ny += 1\nreturn a * b",
        "y = torch.cos(x)\na = y.chunk(2, 1)\ny += 1\nb = a[1]\nb += 1\nreturn a[0] * a[1]",
        "y = torch.cos(x)\na = y.unbind(0)\nz = a[0] + a[-1]\nz += a[1]\nz.relu_()\nreturn z, a",
        "a, b = x.split(3, 1)\na += b\nreturn torch.relu(a) + b",
    ],
)
@pytest.mark.parametrize("scripted", [False, True])
def test_writes_are_seen(code: str, scripted: bool) -> None:
    check(net(code), [torch.randn(4, 6, 5)], scripted=scripted)


TAKEN_APART = """
graph(%x : Tensor, %y : Tensor):
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %1 : Tensor = aten::matmul(%x, %y)
  %2 : Tensor = aten::add_(%1, %x, %one)
  %3 : Tensor = aten::relu_(%2)
  %4 : Tensor[] = LIST
  READS
  %7 : Tensor = aten::matmul(%5, %6)
  %8 : Tensor = aten::add_(%7, %3, %one)
  return (%8)
"""


@pytest.mark.parametrize(
    "made", ["split(%3, %two, %one)", "chunk(%3, %two, %one)", "unbind(%3, %one)"]
)
@pytest.mark.parametrize(
    "reads",
    [
        ["%5 : Tensor, %6 : Tensor = prim::ListUnpack(%4)"],
        [f"%{i + 5} : Tensor = aten::__getitem__(%4, {n})" for i, n in enumerate(["%one", "%two"])],
    ],
)
def test_remove_mutation_of_what_is_split(made: str, reads: list[str]) -> None:
    """Parts are those of the pure result, and the list of them is still one."""
    made = f"aten::{made}"
    graph = after(
        "remove_mutation", TAKEN_APART.replace("LIST", made).replace("READS", "\n  ".join(reads))
    )
    pure = ["aten::add", "llga::as_target"]
    apart = [read.split("= ")[1].split("(")[0] for read in reads]
    assert kinds(graph) == [
        *["aten::matmul", *pure, "aten::relu", "llga::as_target"],
        *[made.split("(")[0], *apart, "aten::matmul", *pure],
    ]
    assert next(graph.findNode(made.split("(")[0]).inputs()).node().kind() == "llga::as_target"


SLICE_SUM = """
graph(%q : Tensor, %k : Tensor, %v : Tensor, %r : Tensor, %t : Tensor):
  %no : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %2 : int = prim::Constant[value=2]()
  %3 : int = prim::Constant[value=3]()
  %last : int = prim::Constant[value=-1]()
  %end : int = prim::Constant[value=9223372036854775807]()
  %scale : float = prim::Constant[value=0.5]()
  %sizes : int[] = prim::Constant[value=[1, -1, 2, 3, 2, 3]]()
  %back : int[] = prim::Constant[value=[1, -1, 6, 6]]()
  %scaled : Tensor = aten::mul(%q, %scale)
  %x : Tensor = aten::matmul(%scaled, %k)
  %all : Tensor = aten::slice(%x, %0, %0, %end, %1)
  %rows : Tensor = aten::slice(%all, %2, %1, %end, %1)
  %s : Tensor = aten::slice(%rows, %3, %1, %end, %1)
  WRITE
  %p : Tensor = aten::softmax(%x, %last, %none)
  %y : Tensor = aten::matmul(%p, %v)
  %o : (Tensor, Tensor) = prim::TupleConstruct(%y, OTHER)
  return (%o)
"""
ADD = "%w : Tensor = aten::add_(%s, %r, %1)"
COPY_OF_IT = [
    "%rows2 : Tensor = aten::slice(%x, %2, %1, %end, %1)",
    "%s2 : Tensor = aten::slice(%rows2, %3, %1, %end, %1)",
    "%c : Tensor = aten::copy_(%s2, %w, %no)",
]
SUMS = [
    "%apart : Tensor = aten::view(%s, %sizes)",
    "%a : Tensor = aten::add(%apart, %t, %1)",
    "%b : Tensor = aten::add(%a, %t, %1)",
    "%w : Tensor = aten::view(%b, %back)",
    *COPY_OF_IT,
]


@pytest.mark.parametrize(
    ("write", "other", "pure"),
    [
        ([ADD], "%y", True),
        ([ADD, *COPY_OF_IT], "%y", True),
        ([ADD, *COPY_OF_IT], "%x", True),
        (SUMS, "%y", True),
        # seen by another name
        ([ADD], "%rows", False),
        ([ADD], "%w", False),
        # other slices
        ([ADD, *(line.replace("%x, %2, %1", "%x, %2, %0") for line in COPY_OF_IT)], "%y", False),
        ([line.replace("%rows2, %3, %1", "%rows2, %3, %2") for line in SUMS], "%y", False),
        # with a factor, or of other numbers than those in the slice
        ([ADD.replace("%r, %1", "%r, %2")], "%y", False),
        ([line.replace("(%apart, %t", "(%t, %apart") for line in SUMS], "%y", False),
        # what is added is made before something is written
        ([*SUMS[:2], "%z : Tensor = aten::relu_(%x)", *SUMS[2:]], "%y", False),
    ],
)
def test_remove_mutation_of_a_slice_of_scores(write: list[str], other: str, pure: bool) -> None:
    text = SLICE_SUM.replace("WRITE", "\n  ".join(write)).replace("OTHER", other)
    graph = after("remove_mutation", text)
    left = {"aten::add_", "aten::copy_"} & set(kinds(graph))
    assert pure == (not left), graph
    assert pure == ("llga::within" in kinds(graph)), graph
    plain = torch._C._create_function_from_graph("plain", parsed(text))
    run = torch._C._create_function_from_graph("f", graph)
    q, k, v = torch.randn(1, 4, 7, 8), torch.randn(1, 4, 8, 7), torch.randn(1, 4, 7, 8)
    for r in (torch.randn(1, 4, 6, 6), torch.randn(6, 1), torch.tensor(2.0)):
        inputs = (q, k, v, r, torch.randn(1, 4, 2, 3, 2, 1))
        if "relu_" not in text and "%x, %2, %0" not in text and "%rows2, %3, %2" not in text:
            for got, want in zip(run(*inputs), plain(*inputs), strict=True):
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("code", "groups"),
    [
        ("x[:, :, 1:, 1:] += r\nreturn x.softmax(-1) @ v", 1),
        ("x = x.softmax(-1) @ v\nx[:, :, 1:, :] += q[:, :, 1:, :]\nreturn x * 2", None),
        ("x[:, :, :3, 2:5] += r[:, :, :3, :3]\nreturn x.softmax(-1) @ v", 1),
        ("x[:, :, 9:, 1:] += r[:, :, 9:]\nreturn x.softmax(-1) @ v", 1),
        (
            """
            r = r.view(2, 4, 2, 3, 2, 3)
            z = x[:, :, 1:, 1:].view(2, -1, 2, 3, 2, 3)
            x[:, :, 1:, 1:] = (z + r[..., :1] + r[..., :1, :]).view(2, -1, 6, 6)
            return x.softmax(-1) @ v
            """,
            1,
        ),
        ("y = q[1, 1, 1] @ k[0, 0].t()\ny[1:] += r[0, 0, 0]\nreturn y.softmax(-1), x + 1", None),
        (
            """
            y = q[:1] @ k[:1].transpose(2, 3)
            z = (y + r.sum((2, 3), keepdim=True)).softmax(-1) @ v[:1]
            z[:, :, 1:] += q[:, :, 1:]
            return z, x + 1
            """,
            None,
        ),
    ],
    ids=["scores", "result", "middle", "nothing", "sums", "of_a_vector", "larger_mask"],
)
def test_sums_with_a_slice_of_attention(code: str, groups: int | None, dtype: torch.dtype) -> None:
    """Attention stays whole, with what is added to a part of its scores as a mask."""
    code = textwrap.dedent(code).strip()
    m = net(f"q, k, v, r = x\nx = (q * 0.3) @ k.transpose(2, 3)\n{code}").eval()
    make = [torch.randn(2, 4, 7, 16) for _ in range(3)]
    check(m, [(*make, torch.randn(2, 4, 6, 6))], groups=groups, dtype=dtype)


class KeepsItsData(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cos(x)
        self.kept = y
        z = y[:, :2]
        z += 1
        return torch.relu(z)


def test_writes_are_seen_after_the_call() -> None:
    """What is written to is an attribute by then."""
    eager, x = KeepsItsData(), torch.randn(3, 4)
    script = torch.jit.script(KeepsItsData())
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(script(x), eager(x))
            assert torch.equal(script.kept, eager.kept)


FLOATS = "Float(2, 2, strides=[2, 1], requires_grad=0, device=cpu)"
OF_CONSTANTS = """
graph(%x : Tensor):
  %none : NoneType = prim::Constant()
  %one : int = prim::Constant[value=1]()
  %half : float = prim::Constant[value=0.5]()
  %yes : bool = prim::Constant[value=1]()
  %c : FLOATS = prim::Constant[value=<Tensor>]()
  %1 : Tensor = aten::linear(%c, %c, %none)
  %2 : Tensor = aten::relu(%1)
  %list : Tensor[] = prim::ListConstruct(%2, %c)
  %3 : Tensor = aten::cat(%list, %one)
  %4 : Tensor = aten::matmul(%x, %3)
  REST
""".replace("FLOATS", FLOATS)


def of_constants(rest: str = "return (%4)") -> str:
    return OF_CONSTANTS.replace("REST", rest.replace("; ", "\n  "))


def test_fold_constants() -> None:
    graph = after("fold_constants", of_constants())
    assert kinds(graph) == ["aten::matmul"]
    (matmul,) = (n for n in walk(graph) if n.kind() == "aten::matmul")
    assert list(matmul.inputs())[1].node().t("value").shape == (2, 4)


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        ("return (%2)", "relu"),
        ("return (%3)", "cat"),
        ("%5 : Tensor = aten::t(%1); return (%4, %5)", "linear t"),
        ("%5 : Tensor = aten::add_(%3, %x, %one); return (%4)", "cat"),
        ("%5 : Tensor = aten::dropout(%3, %half, %yes); return (%4, %5)", "dropout"),
        ("%5 : Tensor = aten::bernoulli(%c, %none); %6 : Tensor = aten::mul(%5, %x); return (%6)",
         "bernoulli"),
        ("%5 : Tensor = aten::mm(%c, %3); %6 : Tensor = aten::mm(%3, %5); return (%4, %6)", "mm"),
    ],
    ids=["returned", "copy returned", "view returned", "written to", "random", "noise", "error"],
)  # fmt: skip
def test_fold_constants_keeps(rest: str, kept: str) -> None:
    """What a caller or a later op could change, is not the same each time, or raises."""
    found = kinds(after("fold_constants", of_constants(rest)))
    assert {f"aten::{name}" for name in kept.split()} <= set(found)


OTHER_FILL = """%p : Tensor = aten::slice(%copy, %0, %end, %n, %1)
  %q : Tensor = aten::zero_(%p)
"""
FILLED = """
graph(%x : Tensor):
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %3 : Long(requires_grad=0, device=cpu) = prim::Constant[value={3}]()
  %table : Float(6, strides=[1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  %copy : Tensor = aten::clone(%table, %none)
  %n : int = aten::numel(%copy)
  %tensor : Tensor = prim::NumToTensor(%n)
  %third : Tensor = aten::floor_divide(%tensor, %3)
  %end : int = aten::Int(%third)
  %part : Tensor = aten::slice(%copy, %0, %0, %end, %1)
  %z : Tensor = aten::zero_(%part)
  %y : Tensor = aten::add(%x, %copy, %1)
  return (%y)"""


@pytest.mark.parametrize(
    ("old", "new", "folded"),
    [
        ("", "", True),
        ("%copy, %0, %0, %end", "%copy, %0, %1, %end", True),
        (
            "%y :",
            f"{OTHER_FILL}  %y :",
            True,
        ),
        ("%part :", "%v : Tensor = aten::view(%copy, %s)\n  %part :", False),
        ("%y :", "%q : Tensor = aten::relu_(%copy)\n  %y :", False),
        ("%y :", "%q : Tensor = aten::abs(%z)\n  %y :", False),
        (
            "%y : Tensor = aten::add(%x, %copy, %1)",
            "%y : Tensor = aten::add_(%copy, %x, %1)",
            False,
        ),
        ("aten::clone(%table, %none)", "aten::clone(%x, %none)", False),
    ],
    ids=[
        "fill",
        "bounds",
        "two",
        "seen by a view",
        "written",
        "result read",
        "written and returned",
        "input",
    ],
)
def test_fold_constants_with_a_part_filled(old: str, new: str, folded: bool) -> None:
    text = FILLED.replace(old, new, 1)
    assert not old or text != FILLED
    if "%v :" in text:
        text = text.replace("%copy :", "%s : int[] = prim::ListConstruct(%1, %1, %6)\n  %copy :")
        text = text.replace("%none :", "%6 : int = prim::Constant[value=6]()\n  %none :")
        text = text.replace("%x, %copy, %1", "%x, %v, %1")
    graph = parsed(text)
    for node in walk(graph):
        constant = node.kind() == "prim::Constant" and str(node.output().type()) == "Tensor"
        if constant and node.t("value").is_floating_point():  # the parser leaves it uninitialized
            node.t_("value", torch.arange(1.0, 7.0))
    plain = graph.copy()
    _C.run_pass("fold_constants", graph)
    torch._C._jit_pass_lint(graph)
    assert (kinds(graph) == ["aten::add"]) == folded
    x = torch.arange(6.0) * 10
    for _ in range(2):
        want = torch._C._create_function_from_graph("plain", plain)(x.clone())
        got = torch._C._create_function_from_graph("f", graph)(x.clone())
        torch.testing.assert_close(got, want)


def test_fold_constants_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert "aten::linear" in kinds(after("fold_constants", of_constants()))


def test_fold_constants_keeps_8_bit() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.dequantize()

    graph = llga_fuser.compile(Net().eval(), (torch.randn(2, 4),)).graph
    assert "aten::dequantize" in kinds(graph)
    _C.run_pass("fold_constants", graph)
    assert "aten::dequantize" in kinds(graph)


SPLIT_CONSTANT = """
graph(%x : Tensor):
  %none : NoneType = prim::Constant()
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %last : int = prim::Constant[value=-1]()
  %both : int[] = prim::Constant[value=[2, 4]]()
  %half : Long(requires_grad=0, device=cpu) = prim::Constant[value={2}]()
  %w : Float(6, 4, strides=[4, 1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  MADE
  %y : Tensor = aten::linear(%x, %a, %none)
  REST
"""
WAYS_TO_SPLIT = {  # how parts are made, and how many rows the first one has
    "sizes": ("aten::split_with_sizes(%w, %both, %zero)", 2),
    "size": ("aten::split(%w, %two, %zero)", 2),
    "chunks": ("aten::chunk(%w, %two, %zero)", 3),
    "uneven": ("aten::tensor_split(%w, %both, %zero)", 2),
}


def of_parts(made: str, rest: str = "return (%y)") -> str:
    count = 3 if made.startswith(("aten::tensor_split", "aten::split(")) else 2
    names = [f"%{name} : Tensor" for name in "abc"][:count]
    lines = f"%list : Tensor[] = {made}\n  {', '.join(names)} = prim::ListUnpack(%list)"
    return SPLIT_CONSTANT.replace("MADE", lines).replace("REST", rest.replace("; ", "\n  "))


@pytest.mark.parametrize(("made", "rows"), WAYS_TO_SPLIT.values(), ids=WAYS_TO_SPLIT)
def test_fold_constants_takes_parts(made: str, rows: int) -> None:
    graph = after("fold_constants", of_parts(made))
    assert kinds(graph) == ["aten::linear"]
    (linear,) = graph.findAllNodes("aten::linear")
    assert linear.inputsAt(1).node().t("value").shape == (rows, 4)


@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
def test_fold_constants_takes_chunks_and_rows(cast: bool) -> None:
    chunks = "%a : Tensor, %b : Tensor = prim::ConstantChunk[chunks=2, dim=0](%w)"
    text = SPLIT_CONSTANT.replace("MADE", chunks).replace("REST", "return (%y)")
    rows = of_parts("aten::unbind(%w, %one)")
    names = ", ".join(f"%{name} : Tensor" for name in "abcd")
    rows = re.sub(r"%a : Tensor, %b : Tensor(?= = prim::List)", names, rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        for source, shape in ((text, (3, 4)), (rows, (6,))):
            graph = after("fold_constants", source)
            assert kinds(graph) == ["aten::linear"]
            (linear,) = graph.findAllNodes("aten::linear")
            assert linear.inputsAt(1).node().t("value").shape == shape


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        ("return (%y, %b)", "slice"),
        ("%z : Tensor = aten::add_(%b, %y, %one); return (%y, %z)", "slice add_"),
        ("return (%y, %list)", "split_with_sizes"),
    ],
    ids=["returned", "written to", "list returned"],
)
def test_fold_constants_keeps_parts(rest: str, kept: str) -> None:
    text = of_parts(WAYS_TO_SPLIT["sizes"][0], rest)
    assert {f"aten::{name}" for name in kept.split()} <= set(kinds(after("fold_constants", text)))


ASKED_SIZE = """
graph(%x : Tensor, %on : bool):
  %none : NoneType = prim::Constant()
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %last : int = prim::Constant[value=-1]()
  %eps : float = prim::Constant[value=1e-5]()
  %width : int[] = prim::Constant[value=[4]]()
  %w : Float(6, 4, strides=[4, 1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  %n : int = aten::size(%x, %last)
  %t : Tensor = prim::NumToTensor(%n)
  %d : Tensor = aten::mul(%t, %one)
  %m : int = aten::Int(%d)
  READ
  return (%y, %m)
"""
READ_IN_BRANCH = """%y : Tensor = prim::If(%on)
    block0():
      %z : Tensor = aten::linear(%x, %w, %none)
      -> (%z)
    block1():
      -> (%x)"""


@pytest.mark.parametrize(
    ("read", "known"),
    [
        ("%y : Tensor = aten::linear(%x, %w, %none)", True),
        ("%y : Tensor = aten::layer_norm(%x, %width, %none, %none, %eps, %on)", True),
        ("%y : Tensor = aten::relu(%x)", False),
        ("%y : Tensor = aten::linear(%w, %x, %none)", False),
        (READ_IN_BRANCH, False),
    ],
    ids=["linear", "layer_norm", "relu", "weight", "branch"],
)
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
def test_fold_constants_knows_sizes(read: str, known: bool, cast: bool) -> None:
    """Of what a linear layer or layer norm reads, which raises for others."""
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        graph = after("fold_constants", ASKED_SIZE.replace("READ", read))
    assert ("aten::size" not in kinds(graph)) == known
    *_, size = graph.outputs()
    assert (size.toIValue() == 4) == known


def test_fold_constants_asks_what_is_written_to() -> None:
    """In place, its dimensions may change places."""
    text = ASKED_SIZE.replace("READ", "%v : Tensor = aten::t_(%x)\n  READ")
    text = text.replace("READ", "%y : Tensor = aten::linear(%x, %w, %none)")
    assert "aten::size" in kinds(after("fold_constants", text))


def test_fold_constants_asks_other_sizes() -> None:
    text = ASKED_SIZE.replace("READ", "%y : Tensor = aten::linear(%x, %w, %none)")
    text = text.replace("size(%x, %last)", "size(%x, %zero)")
    assert "aten::size" in kinds(after("fold_constants", text))


def test_what_was_folded_in_inference_mode_can_be_used_outside() -> None:
    graph = parsed(of_constants())
    with torch.inference_mode():
        _C.run_pass("fold_constants", graph)
    folded = [n.t("value") for n in walk(graph) if n.kind() == "prim::Constant" and n.outputsSize()]
    assert not any(t.is_inference() for t in folded)


def test_normalize_dropout() -> None:
    graph = after(
        "normalize_ops",
        """
        graph(%x : Tensor):
          %p : float = prim::Constant[value=0.5]()
          %train : bool = prim::Constant[value=0]()
          %1 : Tensor = aten::dropout(%x, %p, %train)
          %2 : Tensor = aten::relu(%1)
          return (%2)
        """,
    )
    assert kinds(graph) == ["aten::relu"]


def test_normalize_cat_of_one() -> None:
    graph = after(
        "normalize_ops",
        """
        graph(%x : Tensor):
          %dim : int = prim::Constant[value=1]()
          %list : Tensor[] = prim::ListConstruct(%x)
          %1 : Tensor = aten::cat(%list, %dim)
          %2 : Tensor = aten::relu(%1)
          return (%2)
        """,
    )
    assert kinds(graph) == ["aten::relu"]


@pytest.mark.parametrize(
    "rest",
    [
        ["return (%1)"],
        ["%2 : Tensor = aten::t(%1)", "return (%2)"],
        [
            "%2 : Tensor = aten::relu_(%1)",
            "%3 : Tensor = aten::add(%2, %x, %dim)",
            "return (%3)",
        ],
        [
            "%2 : Tensor = aten::relu_(%x)",
            "%3 : Tensor = aten::add(%2, %1, %dim)",
            "return (%3)",
        ],
    ],
    ids=["returned", "view returned", "copy written to", "original written to"],
)
def test_normalize_keeps_cat_of_one_whose_copy_matters(rest: list[str]) -> None:
    lines = [
        "graph(%x : Tensor):",
        "  %dim : int = prim::Constant[value=1]()",
        "  %list : Tensor[] = prim::ListConstruct(%x)",
        "  %1 : Tensor = aten::cat(%list, %dim)",
        *(f"  {line}" for line in rest),
    ]
    graph = after("normalize_ops", "\n".join(lines))
    assert "aten::cat" in kinds(graph)


@pytest.mark.parametrize(
    ("arguments", "result", "dropped"),
    [
        ("%none, %none, %one", "%2", True),
        ("%zero, %end, %one", "%2", True),
        ("%zero, %end, %two", "%2", False),
        ("%one, %end, %one", "%2", False),
        ("%zero, %two, %one", "%2", False),
        ("%zero, %end, %one", "%1", False),
    ],
)
def test_normalize_whole_slice(arguments: str, result: str, dropped: bool) -> None:
    """What is returned stays a tensor of its own."""
    graph = after(
        "normalize_ops",
        f"""
        graph(%x : Tensor):
          %none : NoneType = prim::Constant()
          %zero : int = prim::Constant[value=0]()
          %one : int = prim::Constant[value=1]()
          %two : int = prim::Constant[value=2]()
          %end : int = prim::Constant[value=9223372036854775807]()
          %1 : Tensor = aten::slice(%x, %two, {arguments})
          %2 : Tensor = aten::relu(%1)
          return ({result})
        """,
    )
    assert dropped == ("aten::slice" not in kinds(graph)), graph


def test_normalize_keeps_dropout_in_training() -> None:
    graph = after(
        "normalize_ops",
        """
        graph(%x : Tensor):
          %p : float = prim::Constant[value=0.5]()
          %train : bool = prim::Constant[value=1]()
          %1 : Tensor = aten::dropout(%x, %p, %train)
          return (%1)
        """,
    )
    assert kinds(graph) == ["aten::dropout"]


def test_normalize_multihead_attention() -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()

    class Self(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        module = torch.jit.freeze(torch.jit.trace(Self().eval(), x))
        assert "aten::_native_multi_head_attention" in kinds(module.graph)
        expected = module(x)
        graph = module.graph.copy()
        _C.run_pass("normalize_ops", graph)
        torch._C._jit_pass_lint(graph)
    assert "aten::_native_multi_head_attention" not in kinds(graph)
    FileCheck().check("aten::linear").check("aten::scaled_dot_product_attention").check(
        "aten::linear"
    ).run(str(graph))
    assert expected.shape == x.shape


@pytest.mark.parametrize("written", [False, True], ids=["", "written to"])
def test_normalize_multihead_attention_with_a_mask(written: bool) -> None:
    """Of booleans. What is written to it could be any number, which nn's kernel takes for True."""
    m = net(
        "self.a(x, x, x, attn_mask=m)[0]",
        args="x, m",
        a=nn.MultiheadAttention(8, 2, batch_first=True),
    )
    with torch.no_grad():
        example = (torch.randn(2, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1))
        graph = torch.jit.freeze(torch.jit.trace(m.eval(), example)).graph.copy()
    (native,) = graph.findAllNodes("aten::_native_multi_head_attention")
    if written:
        (filled,) = graph.findAllNodes("aten::masked_fill_")
        with graph.insert_point_guard(native):
            one = graph.insertConstant(1)
            graph.insertNode(graph.create("aten::add_", [filled.output(), filled.output(), one], 1))
    for name in PASSES[: PASSES.index("normalize_ops") + 1]:
        _C.run_pass(name, graph)
    torch._C._jit_pass_lint(graph)
    found = kinds(graph)
    assert ("aten::_native_multi_head_attention" in found) == written
    assert ("llga::scaled_dot_product_attention" in found) != written


@pytest.mark.parametrize(
    ("equation", "sizes", "same", "moves"),
    [
        ("bhid,bhjd->bhij", ((2, 3, 4, 5), (2, 3, 6, 5)), "bhid,bhjd->bhij", 0),
        ("b h i j, b h j d -> b h i d", ((2, 3, 4, 5), (2, 3, 5, 6)), None, 0),
        ("...ij,...jk->...ik", ((2, 3, 4, 5), (3, 5, 6)), "...ij,...jk->...ik", 0),
        ("bki,bkj->bij", ((2, 3, 4), (2, 3, 5)), "bik,bkj->bij", 1),
        ("ik,jk->ij", ((2, 3), (4, 3)), "ik,jk->ij", 0),
        ("bihd,bjhd->bhij", ((2, 4, 3, 5), (2, 6, 3, 5)), "bhid,bhjd->bhij", 2),
        ("bhij,bjhd->bihd", ((2, 3, 4, 5), (2, 5, 3, 6)), "bhij,bhjd->bhid", 2),
        ("ik,kj->ji", ((2, 3), (3, 4)), "jk,ik->ji", 1),
        ("bik,bjk->jbi", ((2, 3, 4), (2, 5, 4)), "bjk,bik->bji", 1),
        ("bij,bjk->bik", ((2, 4, 1), (2, 3, 5)), "bij,bjk->bik", 0),  # repeats a number
        # No product of matrices, or of unknown dimensions.
        ("bij,bjk->bk", ((2, 3, 4), (2, 4, 5)), "", 0),
        ("bijk,bjkl->bil", ((2, 3, 4, 5), (2, 4, 5, 6)), "", 0),
        ("bii,bij->bij", ((2, 3, 3), (2, 3, 4)), "", 0),
        ("bij,bij->bij", ((2, 3, 4), (2, 3, 4)), "", 0),
        ("i,j->ij", ((2,), (3,)), "", 0),
        ("ij,kj", ((2, 3), (4, 3)), "", 0),
        ("...ij,...jk->ik...", ((2, 4, 5), (2, 5, 6)), "", 0),
        ("i...j,...jk->...ik", ((4, 2, 5), (2, 5, 6)), "", 0),
        ("...ki,...kj->...ij", ((2, 3, 4), (2, 3, 5)), "", 0),
    ],
)
def test_normalize_ops_einsum(
    equation: str, sizes: Sequence[tuple[int, ...]], same: str | None, moves: int
) -> None:
    text = f"""
        graph(%a : Tensor, %b : Tensor):
          %none : NoneType = prim::Constant()
          %equation : str = prim::Constant[value="{equation}"]()
          %both : Tensor[] = prim::ListConstruct(%a, %b)
          %r : Tensor = aten::einsum(%equation, %both, %none)
          return (%r)
        """
    graph = after("normalize_ops", text)
    taken = same != ""
    assert Counter(kinds(graph)) == Counter(
        {"llga::einsum": taken, "aten::einsum": not taken, "aten::permute": moves}
    ), graph
    if taken:
        (node,) = graph.findAllNodes("llga::einsum")
        assert node.inputsAt(3).toIValue() == (same or equation)
    a, b = (torch.randn(size) for size in sizes)
    (result,) = results_of(graph, a, b)
    expected = torch.einsum(equation, a, b)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()


WIDEN = """
graph(%x : Tensor, %w : Tensor, %f : Tensor):
  %bf16 : int = prim::Constant[value=15]()
  %float : int = prim::Constant[value=6]()
  %half : int = prim::Constant[value=5]()
  %one : int = prim::Constant[value=1]()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %none : NoneType = prim::Constant()
  %eps : float = prim::Constant[value=0.5]()
  %sizes : int[] = prim::Constant[value=[2, -1]]()
  %four : int[] = prim::Constant[value=[4]]()
  %b : Tensor = aten::to(%x, %bf16, %no, %no, %none)
  %y : Tensor = aten::mm(%b, %w)
  REST
"""
PRODUCT = ["aten::to", "llga::wide", "aten::mm"]


def widened(rest: str) -> torch.Graph:
    return after("widen_bfloat16", WIDEN.replace("REST", rest.replace("; ", "\n  ")))


def results_of(graph: torch.Graph, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        results = torch._C._create_function_from_graph("forward", graph)(*inputs)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize(
    ("rest", "left"),
    [
        ("%r : Tensor = aten::relu(%y); return (%r)", ["aten::relu", "llga::narrow"]),
        (
            (
                "%r : Tensor = aten::relu(%y); %g : Tensor = aten::argmax(%y, %none, %no)"
                "; %t : (Tensor, Tensor) = prim::TupleConstruct(%r, %g); return (%t)"
            ),
            [
                *("llga::narrow", "aten::relu", "llga::narrow", "aten::argmax"),
                "prim::TupleConstruct",
            ],
        ),
        # A cast to float32 of what was computed does nothing, but for one that is returned.
        (
            (
                "%1 : Tensor = aten::to(%y, %float, %no, %no, %none); %r : Tensor = aten::exp(%1)"
                "; return (%r)"
            ),
            ["aten::exp"],
        ),
        (
            "%r : Tensor = aten::to(%y, %float, %no, %no, %none); return (%r)",
            ["llga::narrow", "aten::to"],
        ),
        (
            (
                "%1 : Tensor = aten::_autocast_to_full_precision(%y, %no, %yes)"
                "; %r : Tensor = aten::exp(%1); return (%r)"
            ),
            ["aten::exp"],
        ),
        # One that rounds is kept where something else computes.
        (
            (
                "%1 : Tensor = aten::exp(%y); %2 : Tensor = aten::to(%1, %bf16, %no, %no, %none)"
                "; %3 : Tensor = aten::erf(%2); return (%3)"
            ),
            ["llga::narrow", "aten::exp", "aten::to", "aten::erf"],
        ),
        # Sums of both types.
        (
            (
                "%e : Tensor = aten::to(%f, %float, %no, %no, %none)"
                "; %n : Tensor = aten::layer_norm(%e, %four, %none, %none, %eps, %no)"
                "; %r : Tensor = aten::add(%y, %n, %one); return (%r)"
            ),
            ["aten::to", "aten::layer_norm", "aten::add"],
        ),
        # Lists, in both directions.
        (
            (
                "%1 : Tensor[] = prim::ListConstruct(%y, %b); %r : Tensor = aten::cat(%1, %one)"
                "; return (%r)"
            ),
            ["aten::cat", "llga::narrow"],
        ),
        (
            (
                "%1 : Tensor[] = aten::chunk(%y, %one, %one); %2 : Tensor = prim::ListUnpack(%1)"
                "; %r : Tensor = aten::tanh(%2); return (%r)"
            ),
            ["aten::chunk", "prim::ListUnpack", "aten::tanh", "llga::narrow"],
        ),
        (
            (
                "%1 : Tensor = aten::relu(%y); %2 : Tensor = llga::as_target(%1, %y)"
                "; %r : Tensor = aten::tanh(%2); return (%r)"
            ),
            ["aten::relu", "llga::as_target", "aten::tanh", "llga::narrow"],
        ),
    ],
)
def test_widen_bfloat16(rest: str, left: list[str]) -> None:
    """What is computed in between is not rounded; types, where somebody sees them, stay."""
    graph = widened(rest)
    assert kinds(graph) == PRODUCT + left, graph
    x, w, f = torch.randn(2, 3), torch.randn(3, 4).bfloat16(), torch.randn(2, 4)
    plain = parsed(WIDEN.replace("REST", rest.replace("; ", "\n  ")))
    for ours, theirs in zip(results_of(graph, x, w, f), results_of(plain, x, w, f), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.04, atol=0.04)


@pytest.mark.parametrize(
    ("rest", "left"),
    [
        # What is written to.
        (
            "%r : Tensor = aten::relu_(%y); return (%y)",
            ["aten::to", "aten::mm", "aten::relu_"],
        ),
        # A view that is returned with what it is a view of.
        (
            "%r : Tensor = aten::view(%y, %sizes); return (%y, %r)",
            [*PRODUCT, "llga::narrow", "aten::view"],
        ),
        # Statistics that are updated, and all that may share memory with them.
        (
            (
                "%r : Tensor = aten::batch_norm(%y, %none, %none, %f, %f, %yes, %eps, %eps, %no)"
                "; return (%r)"
            ),
            ["aten::to", "aten::mm", "aten::batch_norm"],
        ),
        # Rounding that is asked for.
        (
            (
                "%1 : Tensor = aten::to(%f, %bf16, %no, %no, %none)"
                "; %2 : Tensor = aten::to(%1, %float, %no, %no, %none)"
                "; %3 : Tensor = aten::exp(%2); %r : Tensor = aten::relu(%y); return (%r, %3)"
            ),
            [*PRODUCT, "aten::to", "aten::to", "aten::exp", "aten::relu", "llga::narrow"],
        ),
    ],
)
def test_widen_bfloat16_keeps(rest: str, left: list[str]) -> None:
    assert kinds(widened(rest)) == left


def test_widen_bfloat16_of_other_types() -> None:
    """Known are only bfloat16 and what is computed of it; a call may bring anything else."""
    graph = parsed(
        """
        graph(%x : Tensor, %w : Tensor):
          %1 : Tensor = aten::mm(%x, %w)
          %2 : Tensor = aten::relu(%1)
          return (%2)
        """
    )
    _C.run_pass("widen_bfloat16", graph)
    assert kinds(graph) == ["aten::mm", "aten::relu"]
    graph = widened("%r : Tensor = aten::mul(%y, %f); return (%r)")
    x, w = torch.randn(2, 3), torch.randn(3, 4).bfloat16()
    for f in (torch.randn(2, 4).double(), torch.randn(2, 4), torch.ones(2, 4).long()):
        expected = (x.bfloat16() @ w) * f
        (result,) = results_of(graph, x, w, f)
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
    # As in eager; and as in eager under autocast, where that is no error.
    with pytest.raises(RuntimeError, match="BFloat16"):
        results_of(graph, x, w.float(), f)
    with torch.autocast("cpu", torch.bfloat16):
        (result,) = results_of(graph, x, w.float(), x[:, :1])
    torch.testing.assert_close(result, (x @ w.float()) * x[:, :1], rtol=0.02, atol=0.02)


AROUND_8_BIT = """
graph(%q : Tensor, %w : Tensor, %f : Tensor):
  %bf16 : int = prim::Constant[value=15]()
  %float : int = prim::Constant[value=6]()
  %quint8 : int = prim::Constant[value=13]()
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %no : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  %scale : float = prim::Constant[value=0.5]()
  %sizes : int[] = prim::Constant[value=[3]]()
  %d : Tensor = aten::dequantize(%q)
  %e : Tensor = aten::dequantize(%w)
  %x : Tensor = aten::to(%d, %bf16, %no, %no, %none)
  %v : Tensor = aten::to(%e, %bf16, %no, %no, %none)
  %b : Tensor = aten::to(%f, %bf16, %no, %no, %none)
  REST
"""


@pytest.mark.parametrize(
    ("rest", "left"),
    [
        (
            (
                "%y : Tensor = aten::linear(%x, %v, %none); %r : Tensor = aten::relu(%y)"
                "; return (%r)"
            ),
            [*("aten::dequantize",) * 2, "aten::linear", "aten::relu", "llga::narrow"],
        ),
        (  # up to where it is quantized
            (
                "%y : Tensor = aten::linear(%x, %v, %none); %r : Tensor = aten::relu(%y)"
                "; %s : Tensor = aten::to(%r, %float, %no, %no, %none)"
                "; %p : Tensor = aten::quantize_per_tensor(%s, %scale, %zero, %quint8)"
                "; return (%p)"
            ),
            [
                *("aten::dequantize",) * 2,
                *("aten::linear", "aten::relu", "aten::quantize_per_tensor"),
            ],
        ),
        (  # up to where other values of bfloat16 come in
            (
                "%y : Tensor = aten::linear(%x, %v, %none)"
                "; %r : Tensor = aten::add(%y, %b, %one); return (%r)"
            ),
            [
                *("aten::dequantize",) * 2,
                *("aten::to", "aten::linear", "llga::narrow", "aten::add"),
            ],
        ),
        (  # a sum in float32
            (
                "%y : Tensor = aten::linear(%x, %v, %none)"
                "; %g : Tensor = aten::layer_norm(%d, %sizes, %none, %none, %scale, %no)"
                "; %r : Tensor = aten::add(%y, %g, %one); return (%r)"
            ),
            [*("aten::dequantize",) * 2, "aten::linear", "aten::layer_norm", "aten::add"],
        ),
        (  # 8-bit weights alone: nothing multiplies them
            "%y : Tensor = aten::linear(%b, %v, %none); return (%y)",
            ["aten::dequantize", "aten::to", "aten::to", "aten::linear"],
        ),
    ],
)
def test_widen_quantized(rest: str, left: list[str]) -> None:
    """Products of 8-bit values lose the roundings around them, and nothing else does."""
    text = AROUND_8_BIT.replace("REST", rest.replace("; ", "\n  "))
    graph = parsed(text)
    _C.run_pass("widen_quantized", graph)
    torch._C._jit_pass_dce(graph)
    torch._C._jit_pass_lint(graph)
    assert kinds(graph) == left, graph
    x = torch.quantize_per_tensor(torch.rand(2, 3), 0.01, 3, torch.quint8)
    w = torch.quantize_per_tensor(torch.randn(3, 3), 0.05, 0, torch.qint8)
    f = torch.randn(2, 3)
    plain = parsed(text)
    for ours, theirs in zip(results_of(graph, x, w, f), results_of(plain, x, w, f), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.dequantize(), theirs.dequantize(), rtol=0.04, atol=0.04)


def test_widen_bfloat16_in_branches() -> None:
    """A branch that is not taken raises nothing."""
    graph = after(
        "widen_bfloat16",
        """
        graph(%x : Tensor, %c : bool):
          %no : bool = prim::Constant[value=0]()
          %none : NoneType = prim::Constant()
          %bf16 : int = prim::Constant[value=15]()
          %w : Tensor = aten::to(%x, %bf16, %no, %no, %none)
          %r : Tensor = prim::If(%c)
            block0():
              %1 : Tensor = aten::mm(%x, %w)
              -> (%1)
            block1():
              -> (%x)
          return (%r)
        """,
    )
    x = torch.randn(3, 3)
    function = torch._C._create_function_from_graph("forward", graph)
    assert torch.equal(function(x, False), x)
    with pytest.raises(RuntimeError, match="BFloat16"):
        function(x, True)
    half = x.bfloat16()
    torch.testing.assert_close(function(half, True), half @ half, rtol=0.02, atol=0.02)


def test_drop_casts_of_known() -> None:
    """The first cast fixes the type; the second has nothing to do, the third (fp32 input) has."""
    graph = after(
        "drop_casts",
        """
        graph(%x : Tensor):
          %bf16 : int = prim::Constant[value=15]()
          %half : int = prim::Constant[value=5]()
          %no : bool = prim::Constant[value=0]()
          %yes : bool = prim::Constant[value=1]()
          %none : NoneType = prim::Constant()
          %1 : Tensor = aten::to(%x, %bf16, %no, %no, %none)
          %2 : Tensor = aten::_autocast_to_reduced_precision(%1, %no, %yes, %half, %bf16)
          %3 : Tensor = aten::_autocast_to_reduced_precision(%x, %no, %yes, %half, %bf16)
          %4 : Tensor = aten::mm(%2, %3)
          return (%4)
        """,
    )
    assert kinds(graph) == ["aten::to", "aten::_autocast_to_reduced_precision", "aten::mm"]


TO_BF16 = """
graph(%x : Tensor, %w : Tensor):
  %bf16 : int = prim::Constant[value=15]()
  %half : int = prim::Constant[value=5]()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %eps : float = prim::Constant[value=0.5]()
  %none : NoneType = prim::Constant()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %b : Tensor = aten::to(%x, %bf16, %no, %no, %none)
  OP
  %cast : Tensor = aten::_autocast_to_reduced_precision(%y, %no, %yes, %half, %bf16)
  %r : Tensor = aten::mm(%cast, %w)
  return (%r)
"""


@pytest.mark.parametrize(
    "op",
    [
        "%1 : Tensor = aten::relu(%b); %y : Tensor = llga::as_target(%1, %b)",
        "%y : Tensor = aten::batch_norm(%b, %w, %w, %w, %w, %no, %eps, %eps, %no)",
        "%y : Tensor = aten::layer_norm(%b, %ones, %w, %w, %eps, %no)",
        (
            "%1 : Tensor = aten::mm(%b, %w); %2 : Tensor = aten::add(%1, %b, %one); "
            "%y : Tensor = llga::as_target(%2, %1)"
        ),
        "%1 : Tensor[] = prim::ListConstruct(%b, %b); %y : Tensor = aten::cat(%1, %one)",
        (
            "%1 : Tensor[] = aten::chunk(%b, %two, %one); %y : Tensor, %z : Tensor = "
            "prim::ListUnpack(%1)"
        ),
        "%y : Tensor = aten::softmax(%b, %one, %none)",
        "%y : Tensor = aten::clamp(%b, %eps, %none)",
    ],
)
def test_drop_casts_behind(op: str) -> None:
    graph = after("drop_casts", TO_BF16.replace("OP", op.replace("; ", "\n  ")))
    assert "aten::_autocast_to_reduced_precision" not in kinds(graph), graph


@pytest.mark.parametrize(
    "op",
    [
        "%y : Tensor = aten::cumsum(%b, %one, %none)",  # fp32 by autocast
        "%y : Tensor = aten::add(%b, %x, %one)",
        "%1 : Tensor[] = prim::ListConstruct(%b, %x); %y : Tensor = aten::cat(%1, %one)",
        "%six : int = prim::Constant[value=6](); %y : Tensor = aten::softmax(%b, %one, %six)",
        "%y : Tensor = aten::clamp(%b, %w, %none)",
        "%1 : Tensor = aten::relu(%b); %y : Tensor = llga::as_target(%1, %x)",
    ],
)
def test_drop_casts_keeps(op: str) -> None:
    graph = after("drop_casts", TO_BF16.replace("OP", op.replace("; ", "\n  ")))
    assert "aten::_autocast_to_reduced_precision" in kinds(graph), graph


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("aten::to(%x, %bf16, %no, %no, %none)", "aten::add"),
        ("aten::_autocast_to_reduced_precision(%x, %no, %yes, %half, %bf16)", "aten::to"),
    ],
    ids=["certain", "but for doubles"],
)
def test_drop_casts_behind_many_sums(first: str, last: str) -> None:
    """Of bfloat16 is a sum of what is, however far back that is known; then a cast does nothing."""
    sums = "; ".join(f"%y{i + 1} : Tensor = aten::add(%y{i}, %y0, %one)" for i in range(40))
    op = f"%y0 : Tensor = {first}; {sums}; %y : Tensor = aten::to(%y40, %bf16, %no, %no, %none)"
    graph = after("drop_casts", TO_BF16.replace("OP", op.replace("; ", "\n  ")))
    assert kinds(graph)[-2:] == [last, "aten::mm"], graph


SUM = """
graph(%x : Tensor, %w : Tensor):
  %bf16 : int = prim::Constant[value=15]()
  %half : int = prim::Constant[value=5]()
  %one : int = prim::Constant[value=1]()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %eps : float = prim::Constant[value=0.5]()
  %none : NoneType = prim::Constant()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %a : Tensor = aten::to(%x, %bf16, %no, %no, %none)
  %b : Tensor = aten::mm(%a, %w)
  %full_a : Tensor = aten::_autocast_to_full_precision(%a, %no, %yes)
  %full_b : Tensor = aten::_autocast_to_full_precision(%b, %no, %yes)
  %full_x : Tensor = aten::_autocast_to_full_precision(%x, %no, %yes)
  %s : Float(*, *) = aten::add(%full_a, %full_b, %one)
  REST
  %cast : Tensor = aten::_autocast_to_reduced_precision(%r, %no, %yes, %half, %bf16)
  %result : Tensor = aten::mm(%cast, %w)
  return (RESULTS)
"""

TO_FULL = "aten::_autocast_to_full_precision"


def with_sum(rest: str, results: str = "%result") -> str:
    rest = re.sub(r"FULL\((%\w+)\)", rf"{TO_FULL}(\1, %no, %yes)", rest.replace("; ", "\n  "))
    return SUM.replace("REST", rest).replace("RESULTS", results)


@pytest.mark.parametrize(
    "rest",
    [
        "%r = aten::relu(%s)",
        "%n : int = aten::size(%s, %one); %r = aten::clamp(%s, %eps, %none)",
        "%t = aten::mul(%s, %s); %r = aten::layer_norm(%t, %ones, %w, %w, %eps, %no)",
        # one sum after another
        "%t = FULL(%s); %r = aten::mul(%t, %full_a)",
        "%l : Tensor[] = prim::ListConstruct(%s, %b); %r = aten::cat(%l, %one)",
        "%l : Tensor[] = aten::chunk(%s, %one, %one); %r = prim::ListUnpack(%l)",
        "%two : Long(device=cpu) = prim::Constant[value={2}](); %r = aten::mul(%s, %two)",
        "%r = aten::add(%s, %one, %one)",
    ],
)
def test_drop_casts_of_sums(rest: str) -> None:
    """A sum of two bf16 tensors that is rounded to bf16 later is computed in bf16."""
    graph = after("drop_casts", with_sum(rest))
    assert TO_FULL not in kinds(graph), graph
    assert "aten::_autocast_to_reduced_precision" not in kinds(graph), graph
    assert graph.findNode("aten::add").output().type().scalarType() == "BFloat16", graph


@pytest.mark.parametrize(
    ("rest", "results"),
    [
        ("%r = aten::relu(%s)", "%result, %s"),  # the caller sees fp32
        ("%r = aten::relu(%s)", "%result, %r"),
        ("%r = aten::relu(%s); %g = aten::gt(%s, %eps)", "%result, %g"),
        # not known to keep the data type
        ("%t = aten::exp(%s); %r = aten::relu(%t)", "%result"),
        # Two sums, of which one can't be narrowed: neither can the other.
        (
            "%t = FULL(%s); %r = aten::mul(%t, %full_x)",
            "%result",
        ),
        (
            "%t = FULL(%s); %r = aten::layer_norm(%t, %ones, %w, %w, %eps, %no)",
            "%result",
        ),
        ("%r = aten::relu_(%s)", "%result"),
        ("%w1 = aten::add_(%b, %x, %one); %r = aten::relu(%s)", "%result"),
        (
            "%l : Tensor[] = prim::ListConstruct(%s, %x); %r = aten::cat(%l, %one)",
            "%result",
        ),
        (
            "%l : Tensor[] = prim::ListConstruct(%s, %b); %r = aten::cat(%l, %one)",
            "%r, %l",
        ),
    ],
)
def test_drop_casts_keeps_sums(rest: str, results: str) -> None:
    graph = after("drop_casts", with_sum(rest, results))
    add = graph.findNode("aten::add")
    assert [i.node().kind() for i in add.inputs()][:2] == [TO_FULL, TO_FULL], graph
    assert add.output().type().scalarType() == "Float", graph


NARROWED = ("gelu", "silu", "exp", "layer_norm", "constant_pad_nd", "clamp_min", "max_pool1d")
GELU = '%g : str = prim::Constant[value="none"](); '


@pytest.mark.parametrize(
    ("rest", "results", "dropped"),
    [
        (GELU + "%r = aten::gelu(%full_b, %g)", "%result", True),
        (GELU + "%t = aten::gelu(%full_b, %g); %r = aten::relu(%t)", "%result", True),
        ("%t = aten::silu(%full_b); %u = FULL(%t); %r = aten::mul(%u, %full_a)", "%result", True),
        (GELU + "%r = aten::gelu(%full_b, %g)", "%result, %r", False),  # the caller sees fp32
        (GELU + "%t = aten::gelu(%full_b, %g); %r = aten::exp(%t)", "%result", False),
        (GELU + "%r = aten::gelu(%full_x, %g)", "%result", False),  # of any data type
        ("%r = aten::exp(%full_b)", "%result", False),
        ("%r = aten::layer_norm(%full_b, %ones, %w, %w, %eps, %no)", "%result", True),
        ("%r = aten::layer_norm(%full_b, %ones, %w, %w, %eps, %no)", "%result, %r", False),
        ("%r = aten::layer_norm(%full_x, %ones, %w, %w, %eps, %no)", "%result", False),
        ("%r = aten::constant_pad_nd(%full_b, %ones, %one)", "%result", True),
        ("%r = aten::constant_pad_nd(%full_b, %ones, %one)", "%result, %r", False),
        ("%r = aten::clamp_min(%full_b, %eps)", "%result", True),
        ("%r = aten::clamp_min(%full_b, %x)", "%result", False),  # a bound that promotes
        ("%r = aten::max_pool1d(%full_b, %ones, %ones, %ones, %ones, %no)", "%result", True),
    ],
)
def test_drop_casts_of_activations(rest: str, results: str, dropped: bool) -> None:
    """An activation of bf16 that is rounded to bf16 later is computed in bf16."""
    graph = after("drop_casts", with_sum(rest, results))
    activation = next(graph.findNode(f"aten::{n}") for n in NARROWED if n in rest)
    kind = next(activation.inputs()).node().kind()
    assert kind == ("aten::mm" if dropped else TO_FULL), graph
    if dropped:
        assert activation.output().type().scalarType() == "BFloat16", graph


@pytest.mark.parametrize(
    ("items", "results", "dropped"),
    [
        ("%full_a, %full_b", "%result", True),
        ("%full_a, %b", "%result", True),
        ("%full_a, %full_b", "%result, %r", False),
        ("%full_a, %full_x", "%result", False),  # of any data type
        ("%full_a, %x", "%result", False),
        ("%full_a, %full_b", "%result, %l", False),
    ],
)
def test_drop_casts_of_concatenation(items: str, results: str, dropped: bool) -> None:
    """What is concatenated and rounded is rounded first."""
    rest = f"%l : Tensor[] = prim::ListConstruct({items}); %r = aten::cat(%l, %one)"
    graph = after("drop_casts", with_sum(rest, results))
    (cat,) = (n for n in walk(graph) if n.kind() == "aten::cat")
    sources = [i.node().kind() for i in next(cat.inputs()).node().inputs()]
    assert (TO_FULL not in sources) == dropped, graph


@pytest.mark.parametrize(
    ("rest", "results", "dropped"),
    [
        ("%r = aten::to(%full_b, %bf16, %no, %no, %none)", "%result", True),
        ("%r = aten::to(%full_b, %bf16, %no, %no, %none)", "%result, %full_b", True),
        ("%r = aten::to(%full_x, %bf16, %no, %no, %none)", "%result", False),
        # a double would still be one
        (
            (
                "%n = aten::_autocast_to_reduced_precision(%x, %no, %yes, %half, %bf16); "
                "%r = aten::to(%n, %bf16, %no, %no, %none)"
            ),
            "%result",
            False,
        ),
        (
            (
                "%n = aten::_autocast_to_reduced_precision(%x, %no, %yes, %half, %bf16); "
                "%m = aten::mm(%a, %n); %r = aten::to(%m, %bf16, %no, %no, %none)"
            ),
            "%result",
            True,
        ),
        ("%r = aten::to(%full_b, %half, %no, %no, %none)", "%result", False),
        ("%r = aten::to(%b, %bf16, %no, %no, %none)", "%result", True),
        ("%r = aten::to(%b, %bf16, %no, %yes, %none)", "%result", False),
        (
            "%r = aten::to(%full_b, %bf16, %no, %no, %none); %q = aten::relu_(%r)",
            "%result",
            False,
        ),
    ],
)
def test_drop_casts_back(rest: str, results: str, dropped: bool) -> None:
    """What is widened and rounded again is what it was, unless a copy is wanted, or made of it."""
    graph = after("drop_casts", with_sum(rest, results))
    casts = [n for n in walk(graph) if n.kind() == "aten::to"]
    assert len(casts) == (1 if dropped else 2), graph


PARTS_IN_FLOAT = {
    "some": ("torch.cat((y[:, :4], self.d(y[:, 4:]).float()), 1)", "cat batch_norm"),
    "all": ("torch.cat((y[:, :4].float(), self.d(y[:, 4:]).float()), 1)", "cat batch_norm"),
    "one_is_wide": ("torch.cat((y[:, :4], self.d(y[:, 4:]).float() + w), 1)", "batch_norm"),
}


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("case", PARTS_IN_FLOAT)
def test_drop_casts_of_parts(case: str, rounded: bool) -> None:
    """What is concatenated is widened behind, and a batch norm reads what is not widened."""
    code, fused = PARTS_IN_FLOAT[case]
    n = nn.BatchNorm2d(8)
    nn.init.uniform_(n.weight, 0.5, 1.5)
    nn.init.uniform_(n.running_var, 0.5, 2.0)
    m = net(
        f"y = self.c(x)\nw = y.sum().float()\ny = self.n({code})\n"
        f"return {'self.e(y)' if rounded else 'y'}",
        c=nn.Conv2d(3, 8, 1), d=nn.Conv2d(4, 4, 3, padding=1, groups=4), e=nn.Conv2d(8, 5, 1), n=n,
    ).eval()  # fmt: skip
    check(m, [torch.randn(2, 3, 9, 8)], autocast=True, fused=fused if fuses(torch.bfloat16) else "")


PLANES = "y = self.a(x).permute(0, 3, 1, 2).contiguous()\n"
ROWS = "return self.b({}.permute(0, 2, 3, 1).contiguous())"
COPIED = {
    "convolutions": (f"{PLANES}{ROWS.format('self.d(F.gelu(self.c(y)))')}", True),
    "parts": (
        f"{PLANES}p, q = y.chunk(2, 1)\n{ROWS.format('(self.c(torch.cat((q, p), 1)) * y)')}",
        True,
    ),
    "norm": (f"{PLANES}y = y + y.mean((2, 3), True)\nreturn self.b(y.permute(0, 2, 3, 1))", True),
    "sizes": (f"{PLANES}return self.b(y.permute(0, 2, 3, 1)) * (y.shape[2] * y.shape[0])", True),
    "of_convolution": (
        (
            f"{PLANES.replace('.contiguous()', '')}z = F.relu(self.c(y)).contiguous()\n"
            f"{ROWS.format('self.d(torch.cat((z[:, :8], y[:, 8:]), 1))')}"
        ),
        True,
    ),
    "pixels": (f"{PLANES}return self.b(self.c(y).flatten(2).transpose(1, 2))", True),
    "view": (f"{PLANES}return self.b(self.c(y).view(x.shape[0], 16, -1).mT)", False),
    "result": (f"{PLANES}return self.c(y)", False),
    "also_a_result": (f"{PLANES}{ROWS.format('self.c(y)')}, y", False),
    "written_to": (f"{PLANES}z = y[:, :3]\nz.mul_(2)\n{ROWS.format('self.c(y)')}", False),
    "other_order": (
        f"{PLANES.replace('0, 3, 1, 2', '0, 3, 2, 1')}{ROWS.format('self.c(y)')}",
        False,
    ),
}


@pytest.mark.parametrize("mode", ["traced", "scripted", "autocast"])
@pytest.mark.parametrize("case", COPIED)
def test_drop_copies(case: str, mode: str) -> None:
    code, dropped = COPIED[case]
    m = net(
        code, a=nn.Linear(8, 16), b=nn.Linear(16, 8), c=nn.Conv2d(16, 16, 3, padding=1),
        d=nn.Conv2d(16, 16, 1),
    ).eval()  # fmt: skip
    x = torch.randn(2, 9, 7, 8)
    how = {"scripted": mode == "scripted", "autocast": mode == "autocast"}
    graph = to_script(m, [x], **how).inlined_graph.copy()
    _C.run_pass("remove_mutation", graph)
    before = copies_in(graph)
    _C.run_pass("drop_copies", graph)
    assert before - copies_in(graph) == dropped, graph
    check(m, [x], **how)


def copies_in(graph: Any) -> int:
    return sum(node.kind() == "aten::contiguous" for node in walk(graph))


POOLED = """
graph(%x : Tensor):
  %float : int = prim::Constant[value=6]()
  %bf16 : int = prim::Constant[value=15]()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %none : NoneType = prim::Constant()
  %ones : int[] = prim::Constant[value=[1, 1, 1]]()
  %zeros : int[] = prim::Constant[value=[0, 0, 0]]()
  %twos : int[] = prim::Constant[value=[2, 2, 2]]()
  %b : Tensor = aten::to(%x, %bf16, %no, %no, %none)
  WIDENED
  %p : Tensor = aten::max_pool3d(%w, %twos, %ones, %zeros, %ones, %no)
  REST
  return (%r)
"""
POOL_WIDENED = "%w : Tensor = aten::to(%b, %float, %no, %no, %none)"
AGAIN = "%r : Tensor = aten::max_pool3d(%p, %twos, %ones, %zeros, %ones, %no)"


@pytest.mark.parametrize(
    ("widen", "rest", "moved", "casts"),
    [
        (POOL_WIDENED, "%r : Tensor = aten::relu(%p)", True, 2),
        (POOL_WIDENED, "%r : Tensor = aten::to(%p, %bf16, %no, %no, %none)", True, 1),
        (POOL_WIDENED, "%r : Tensor = aten::to(%p, %bf16, %no, %yes, %none)", True, 3),
        (POOL_WIDENED, AGAIN, True, 2),
        # not of bfloat16 for sure, a copy, or written to
        (POOL_WIDENED.replace("%b", "%x"), "%r : Tensor = aten::relu(%p)", False, 1),
        (
            POOL_WIDENED.replace("%no, %none", "%yes, %none"),
            "%r : Tensor = aten::relu(%p)",
            False,
            2,
        ),
        (
            POOL_WIDENED + "; %q : Tensor = aten::relu_(%w)",
            "%r : Tensor = aten::relu(%p)",
            False,
            2,
        ),
        (
            POOL_WIDENED + "; %q : Tensor = aten::relu_(%b)",
            "%r : Tensor = aten::relu(%p)",
            False,
            2,
        ),
        (POOL_WIDENED, "%r : Tensor = aten::relu_(%p)", False, 2),
    ],
)
def test_drop_casts_behind_pooling(widen: str, rest: str, moved: bool, casts: int) -> None:
    """A trace under autocast widens what it pools in three dimensions."""
    text = POOLED.replace("WIDENED", widen.replace("; ", "\n  ")).replace("REST", rest)
    graph = after("drop_casts", text)
    for pool in graph.findAllNodes("aten::max_pool3d"):
        source = next(pool.inputs()).node()
        widened = source.kind() == "aten::to" and list(source.inputs())[1].toIValue() == 6
        assert moved != widened, graph
    left = [n for n in graph.findAllNodes("aten::to") if n.output().uses()]
    assert len(left) == casts, graph
    run = torch._C._create_function_from_graph("f", graph)
    plain = torch._C._create_function_from_graph("plain", parsed(text))
    x = torch.randn(1, 2, 3, 4, 5)
    x[0, 0, 1, 2] = math.nan
    assert torch.equal(run(x).nan_to_num(9), plain(x).nan_to_num(9))


def test_drop_casts_of_float() -> None:
    """A cast of what is float is dropped; of a product, which autocast may compute in bf16, not."""
    rest = "%r = aten::exp(%s); %f = FULL(%s); %m = aten::mm(%s, %f); %n = FULL(%m)"
    graph = after("drop_casts", with_sum(rest, "%result, %m, %n"))
    casts = [next(node.inputs()).node().kind() for node in graph.findAllNodes(TO_FULL)]
    assert sorted(casts) == ["aten::mm", "aten::mm", "aten::to"], graph


@pytest.mark.parametrize(
    ("code", "dropped"),
    [
        ("%n = aten::linalg_vector_norm(%full_b, %one, %ones, %yes, %none)", True),
        # the rounded one is float32 where autocast is on
        ("%n = aten::linalg_vector_norm(%b, %one, %ones, %yes, %none)", False),
        ("%n = aten::linalg_vector_norm(%full_b, %one, %ones, %yes, %half)", False),
        ("%n = aten::addcmul(%full_b, %full_b, %s, %one)", True),
        ("%n = aten::addcmul(%full_b, %x, %s, %one)", False),
    ],
)
def test_drop_casts_of_what_stays_float(code: str, dropped: bool) -> None:
    graph = after("drop_casts", with_sum(f"{code}; %r = FULL(%n)", "%result, %r, %s"))
    kind = code.split("aten::")[1].split("(")[0]
    read = [use.user.kind() for use in next(graph.findNode(f"aten::{kind}").outputs()).uses()]
    assert (TO_FULL not in read) == dropped, graph


def test_drop_casts_in_place() -> None:
    graph = after("remove_mutation", with_sum("%r = aten::relu_(%s)"))
    assert "llga::as_target" in kinds(graph)
    _C.run_pass("drop_casts", graph)
    assert TO_FULL not in kinds(graph), graph


def test_drop_casts_numbers() -> None:
    """What the pass makes of a chain of sums is what eager computes under autocast, bit by bit."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, w)
        for _ in range(5):
            y = y + torch.mm(y.relu(), w)
            y = y * torch.sigmoid(torch.mm(y, w))
        return torch.mm(y, w)

    x, w = torch.randn(8, 8), torch.randn(8, 8) / 3
    with torch.no_grad():
        graph = torch.jit.trace(chain, (x, w)).graph.copy()
        torch._C._jit_pass_erase_shape_information(graph)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            expected = chain(x, w)
            torch._C._jit_pass_autocast(graph)
        assert TO_FULL in kinds(graph)
        _C.run_pass("drop_casts", graph)
        torch._C._jit_pass_lint(graph)
        assert TO_FULL not in kinds(graph)
        result = torch._C._create_function_from_graph("chain", graph)(x, w)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


BINARY = """
graph(%x : Float(2, 3, strides=[3, 1], requires_grad=0, device=cpu),
      %y : BFloat16(2, 3, strides=[3, 1], requires_grad=0, device=cpu)):
  %one : int = prim::Constant[value=1]()
  %1 : Tensor = aten::add(%x, %y, %one)
  return (%1)
"""


# ------------------------------------------------------------------------------ restore_attention


class MultiHead(nn.Module):
    """nn.MultiheadAttention before a sum and a norm."""

    def __init__(self, read: str, first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=first)
        self.norm, self.read = nn.LayerNorm(8), read

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = {
            "self": (x, x, x),
            "cross": (x, y, y),
            "positions": (x * 2, x * 2, x),
            "three": (x, y, y * 2),
        }[self.read]
        attended: Tensor = self.attention(q, k, v, need_weights=False)[0]
        return self.norm(x + attended)


def of_multihead(module: nn.Module, first: bool) -> torch.Graph:
    """With all passes before, and without nn's kernel for inference, which needs no_grad."""
    x, y = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    if not first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    script = torch.jit.trace(module.eval(), (x, y), check_trace=False)
    graph: torch.Graph = torch.jit.freeze(script).graph.copy()
    assert "aten::_native_multi_head_attention" not in kinds(graph)
    for name in PASSES[: PASSES.index("restore_attention")]:
        _C.run_pass(name, graph)
    return graph


@pytest.mark.parametrize("first", [True, False], ids=["batch_first", "sequence_first"])
@pytest.mark.parametrize(
    ("read", "layers", "parts"),
    [("self", 1, 3), ("cross", 2, 2), ("positions", 3, 0), ("three", 3, 0)],
    ids=["self", "cross", "positions", "three"],
)
def test_restore_attention(read: str, layers: int, parts: int, first: bool) -> None:
    graph = of_multihead(MultiHead(read, first), first)
    _C.run_pass("restore_attention", graph)
    torch._C._jit_pass_lint(graph)
    found = Counter(k.removeprefix("aten::") for k in kinds(graph))
    assert found["linear"] == layers + 1
    assert found["slice"] == parts
    assert found["scaled_dot_product_attention"] == 1
    # Of operands, and of the result; sequence first it stays as it is.
    assert (found["transpose"], found["permute"]) == ((4, 0) if first else (0, 4))
    assert not found["contiguous"] + found["unflatten"] + found["select"]


SPELLED = """
y = x.transpose(0, 1)
n, b, e = y.shape
q, k, v = self.q(y), self.k(y), self.v(y)
def heads(z):
    return z.reshape(n, b * 2, e // 2).transpose(0, 1).reshape(b, 2, n, e // 2)
a = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
z = self.o(a.permute(2, 0, 1, 3).reshape(n * b, e)).reshape(n, b, e).transpose(0, 1)
return F.layer_norm(x + z, [8])
"""


@pytest.mark.parametrize(
    ("old", "new", "restored"),
    [
        ("", "", True),
        ("q, k, v =", "w = y[:1]\nq, k, v =", True),
        ("return F.layer_norm(x + z, [8])", "return z", True),  # but for the result
        ("return F.layer_norm(x + z, [8])", "return F.layer_norm(x + z, [8]), k", False),
        ("a = F", "q += 1\na = F", False),
        ("a = F", "y.mul_(2)\na = F", False),
        (".reshape(b, 2, n,", ".reshape(n, 2, b,", False),
        (".reshape(n, b * 2,", ".reshape(b, n * 2,", False),
        (".transpose(0, 1).reshape(b, 2,", ".transpose(0, 1).reshape(b, -1,", False),
        ("heads(q), heads(k)", "heads(q), heads(k.relu())", False),
    ],
    ids=[
        "as it is",
        "read beside",
        "returned",
        "keys returned",
        "written",
        "data written",
        "other sizes",
        "other rows",
        "unknown heads",
        "no layer",
    ],
)
def test_restore_attention_that_is_spelled_out(old: str, new: str, restored: bool) -> None:
    assert old in SPELLED
    layers = {name: nn.Linear(8, 8) for name in "qkvo"}
    module = net(SPELLED.replace(old, new, 1) if old else SPELLED, **layers)
    x = torch.randn(2, 2, 8)  # so that any of these fits
    graph = torch.jit.freeze(torch.jit.trace(module.eval(), (x,), check_trace=False)).graph.copy()
    for name in PASSES[: PASSES.index("restore_attention")]:
        _C.run_pass(name, graph)
    torch._C._jit_pass_dce(graph)
    before = Counter(kinds(graph))
    _C.run_pass("restore_attention", graph)
    torch._C._jit_pass_lint(graph)
    assert (Counter(kinds(graph)) != before) == restored
    check(module, [x], scripted=False)


# ------------------------------------------------------------------------------ prepare_quantized

QUANTIZED = """
          %s : float = prim::Constant[value=0.5]()
          %z : int = prim::Constant[value=3]()
          %u8 : int = prim::Constant[value=13]()
          %none : NoneType = prim::Constant()
          %zero : int = prim::Constant[value=0]()
          %one : int = prim::Constant[value=1]()
          %size : int[] = prim::Constant[value=[2, 6]]()
"""


def test_prepare_quantized_finds_parameters() -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor):
          {QUANTIZED}
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %y : Tensor = aten::relu(%d)
          return (%y)
        """,
    )
    (node,) = (n for n in walk(graph) if n.kind() == "aten::dequantize")
    assert node.fs("llga_scales") == [0.5] and node.i("llga_quantized_dtype") == 13
    assert node.i("llga_axis") == -1
    FileCheck().check("llga_zero_points=[3]").run(str(graph))


def test_prepare_quantized_cancels_equal_parameters_only() -> None:
    text = """
        graph(%x : Tensor):
          {0}
          %other : float = prim::Constant[value=0.25]()
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %q2 : Tensor = aten::quantize_per_tensor(%d, {1}, %z, %u8)
          %y : Tensor = aten::int_repr(%q2)
          return (%y)
        """
    equal = after("prepare_quantized", text.format(QUANTIZED, "%s"))
    assert kinds(equal) == ["aten::quantize_per_tensor", "aten::int_repr"]
    different = after("prepare_quantized", text.format(QUANTIZED, "%other"))
    assert kinds(different).count("aten::quantize_per_tensor") == 2


def test_prepare_quantized_sinks_dequantize() -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %w : Tensor):
          {QUANTIZED}
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %v : Tensor = aten::view(%d, %size)
          %t : Tensor = aten::transpose(%v, %zero, %one)
          %y : Tensor = aten::linear(%t, %w, %none)
          return (%y)
        """,
    )
    moved = ["aten::reshape", "aten::transpose", "aten::dequantize", "aten::linear"]
    assert kinds(graph) == ["aten::quantize_per_tensor", *moved]


PARTS = {
    "split": "aten::split(%d, %three, %one)",
    "split_with_sizes": "aten::split_with_sizes(%d, %sizes, %one)",
    "chunk": "aten::chunk(%d, %two, %one)",
    "unbind": "aten::unbind(%d, %one)",
}


@pytest.mark.parametrize("name", PARTS)
def test_prepare_quantized_sinks_dequantize_below_parts(name: str) -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %w : Tensor):
          {QUANTIZED}
          %two : int = prim::Constant[value=2]()
          %three : int = prim::Constant[value=3]()
          %sizes : int[] = prim::Constant[value=[3, 3]]()
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %l : Tensor[] = {PARTS[name]}
          %a : Tensor, %b : Tensor = prim::ListUnpack(%l)
          %qa : Tensor = aten::quantize_per_tensor(%a, %s, %z, %u8)
          %da : Tensor = aten::dequantize(%qa)
          %y : Tensor = aten::matmul(%da, %w)
          %t : Tensor = aten::tanh(%b)
          %all : (Tensor, Tensor) = prim::TupleConstruct(%y, %t)
          return (%all)
        """,
    )
    parts = ["aten::quantize_per_tensor", f"aten::{name}", "prim::ListUnpack"]
    readers = ["aten::dequantize", "aten::matmul", "aten::dequantize", "aten::tanh"]
    assert sorted(kinds(graph)) == sorted([*parts, *readers, "prim::TupleConstruct"])
    dequantizes = [n for n in walk(graph) if n.kind() == "aten::dequantize"]
    assert all(n.inputsAt(0).node().kind() == "prim::ListUnpack" for n in dequantizes)
    x, w = (
        (torch.randn(6, 2), torch.randn(6))
        if name == "unbind"
        else (torch.randn(2, 6), torch.randn(3, 2))
    )
    run = torch._C._create_function_from_graph("parts", graph)
    y, z = run(x, w)
    q = torch.quantize_per_tensor(x, 0.5, 3, torch.quint8).dequantize()
    a, b = q.unbind(1) if name == "unbind" else q.split(3, 1)
    torch.testing.assert_close(y, a @ w)
    assert torch.equal(z, torch.tanh(b))


@pytest.mark.parametrize("reader", ["%l2 : Tensor[] = aten::list(%l)", ""])
def test_prepare_quantized_leaves_parts(reader: str) -> None:
    """Of a list that others read; and where nothing computes with them."""
    product = "aten::matmul(%a, %w)" if reader else "aten::tanh(%a)"
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %w : Tensor):
          {QUANTIZED}
          %three : int = prim::Constant[value=3]()
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %l : Tensor[] = aten::split(%d, %three, %one)
          %a : Tensor, %b : Tensor = prim::ListUnpack(%l)
          {reader}
          %y : Tensor = {product}
          return (%y, {"%l2" if reader else "%b"})
        """,
    )
    (split,) = (n for n in walk(graph) if n.kind() == "aten::split")
    assert split.inputsAt(0).node().kind() == "aten::dequantize"


PAD = "aten::pad(%y, %pad, %how, %none)"


@pytest.mark.parametrize(
    ("old", "new", "lifted"),
    [
        ("", "", True),
        ("%none)", "%nothing)", True),
        ("%none)", "%s)", False),  # not with zeros
        ("%how", "%other", False),
        ("%i : Tensor", "%j : Tensor = aten::relu(%p)\n          %i : Tensor", False),
    ],
    ids=["zeros", "zero", "half", "mirrored", "read twice"],
)
def test_prepare_quantized_lifts_quantize_above_padding(old: str, new: str, lifted: bool) -> None:
    text = f"""
        graph(%x : Tensor):
          {QUANTIZED}
          %how : str = prim::Constant[value="constant"]()
          %other : str = prim::Constant[value="reflect"]()
          %nothing : float = prim::Constant[value=0.]()
          %pad : int[] = prim::Constant[value=[0, 1]]()
          %y : Tensor = aten::tanh(%x)
          %p : Tensor = {PAD.replace(old, new) if old else PAD}
          %q : Tensor = aten::quantize_per_tensor(%p, %s, %z, %u8)
          %i : Tensor = aten::int_repr(%q)
          return (%i)
        """
    graph = parsed(text.replace(old, new) if "relu" in new else text)
    plain = graph.copy()
    _C.run_pass("prepare_quantized", graph)
    order = ["aten::tanh", "aten::quantize_per_tensor", "llga::padded", "aten::int_repr"]
    assert (kinds(graph) == order) == lifted, graph
    x = 5 * torch.randn(2, 3)
    run = torch._C._create_function_from_graph("f", graph)
    assert torch.equal(run(x), torch._C._create_function_from_graph("plain", plain)(x))


def test_prepare_quantized_leaves_views_of_results() -> None:
    """Nothing computes on them: the strides of a result stay eager's."""
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor):
          {QUANTIZED}
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %v : Tensor = aten::view(%d, %size)
          return (%v)
        """,
    )
    assert kinds(graph) == ["aten::quantize_per_tensor", "aten::dequantize", "aten::view"]


def test_prepare_quantized_lifts_quantize() -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %w : Tensor):
          {QUANTIZED}
          %y : Tensor = aten::linear(%x, %w, %none)
          %t : Tensor = aten::transpose(%y, %zero, %one)
          %v : Tensor = aten::reshape(%t, %size)
          %q : Tensor = aten::quantize_per_tensor(%v, %s, %z, %u8)
          %i : Tensor = aten::int_repr(%q)
          return (%i)
        """,
    )
    moved = ["aten::quantize_per_tensor", "aten::transpose", "aten::reshape", "aten::int_repr"]
    assert kinds(graph) == ["aten::linear", *moved]


def test_prepare_quantized_before_max_pool() -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %w : Tensor):
          {QUANTIZED}
          %two : int[] = prim::Constant[value=[2, 2]]()
          %no : int[] = prim::Constant[value=[0, 0]]()
          %unit : int[] = prim::Constant[value=[1, 1]]()
          %false : bool = prim::Constant[value=0]()
          %y : Tensor = aten::linear(%x, %w, %none)
          %p : Tensor = aten::max_pool2d(%y, %two, %two, %no, %unit, %false)
          %q : Tensor = aten::quantize_per_tensor(%p, %s, %z, %u8)
          %i : Tensor = aten::int_repr(%q)
          return (%i)
        """,
    )
    quantize = "aten::quantize_per_tensor"
    around = [quantize, "aten::dequantize", "aten::max_pool2d", quantize]
    assert kinds(graph) == ["aten::linear", *around, "aten::int_repr"]


def test_prepare_quantized_behind_cat() -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %y : Tensor, %w : Tensor):
          {QUANTIZED}
          %q1 : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d1 : Tensor = aten::dequantize(%q1)
          %q2 : Tensor = aten::quantize_per_tensor(%y, %s, %z, %u8)
          %d2 : Tensor = aten::dequantize(%q2)
          %l : Tensor[] = prim::ListConstruct(%d1, %d2)
          %c : Tensor = aten::cat(%l, %one)
          %r : Tensor = aten::linear(%c, %w, %none)
          return (%r)
        """,
    )
    pair = ["aten::quantize_per_tensor", "aten::dequantize"]
    assert kinds(graph) == [*pair, *pair, "aten::cat", *pair, "aten::linear"]


def test_prepare_quantized_gives_each_reader_its_own() -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %w : Tensor):
          {QUANTIZED}
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %y : Tensor = aten::linear(%d, %w, %none)
          %r : Tensor = aten::add(%y, %d, %one)
          return (%r)
        """,
    )
    readers = [n for n in walk(graph) if n.kind() in ("aten::linear", "aten::add")]
    sources = [next(n.inputs()).debugName() for n in readers[:1]]
    sources.append(list(readers[1].inputs())[1].debugName())
    assert kinds(graph).count("aten::dequantize") == 2 and len(set(sources)) == 2


def test_prepare_quantized_leaves_what_is_written_to() -> None:
    text = f"""
        graph(%x : Tensor, %w : Tensor):
          {QUANTIZED}
          %q : Tensor = aten::quantize_per_tensor(%x, %s, %z, %u8)
          %d : Tensor = aten::dequantize(%q)
          %r : Tensor = aten::relu_(%d)
          %y : Tensor = aten::linear(%d, %w, %none)
          return (%y)
        """
    graph = after("prepare_quantized", text)
    assert kinds(graph).count("aten::dequantize") == 1
    (node,) = (n for n in walk(graph) if n.kind() == "aten::dequantize")
    assert not node.hasAttribute("llga_scales")


def test_prepare_quantized_refuses_what_is_not_constant() -> None:
    graph = after(
        "prepare_quantized",
        f"""
        graph(%x : Tensor, %scale : float, %q : Tensor):
          {QUANTIZED}
          %1 : Tensor = aten::quantize_per_tensor(%x, %scale, %z, %u8)
          %2 : Tensor = aten::dequantize(%1)
          %3 : Tensor = aten::dequantize(%q)
          return (%2, %3)
        """,
    )
    assert not any(n.hasAttribute("llga_scales") for n in walk(graph))


def test_prepare_binary_spells_promotion() -> None:
    graph = after("prepare_binary", BINARY)
    assert kinds(graph) == ["aten::to", "aten::add"]
    FileCheck().check("value=6").check("aten::to").check("llga_inserted=1").run(str(graph))


@pytest.mark.parametrize(
    ("types", "casts"),
    [
        (("Float", "Float", "BFloat16"), 1),
        (("BFloat16", "Float", "BFloat16"), 2),
        (("BFloat16",) * 3, 0),
        (("Float",) * 3, 0),
        (("Float", "Double", "BFloat16"), 0),
    ],
)
def test_prepare_binary_spells_promotion_of_three(types: tuple[str, ...], casts: int) -> None:
    x, y, z = (f"{t}(2, 3, strides=[3, 1], requires_grad=0, device=cpu)" for t in types)
    graph = after(
        "prepare_binary",
        f"""
        graph(%x : {x}, %y : {y}, %z : {z}):
          %one : int = prim::Constant[value=1]()
          %r : Tensor = aten::addcmul(%x, %y, %z, %one)
          return (%r)
        """,
    )
    assert kinds(graph) == ["aten::to"] * casts + ["aten::addcmul"]
    if casts:
        operands = list(next(n for n in walk(graph) if n.kind() == "aten::addcmul").inputs())[:3]
        assert {o.type().scalarType() for o in operands} == {"Float"}


def test_unfused_casts_are_taken_out_again() -> None:
    graph = parsed(BINARY.replace("BFloat16(2, 3, strides=[3, 1]", "BFloat16(3, strides=[1]"))
    _C.run_pass("prepare_binary", graph)
    _C.run_pass("graph_fuser", graph)
    assert kinds(graph) == ["aten::add"]


@pytest.mark.skipif(
    not (has_own_kernels() and fuses(torch.bfloat16)), reason="needs AVX2, and bf16 in groups"
)
def test_a_cast_goes_with_what_reads_it() -> None:
    """One pass of our own kernel; PyTorch's converts a tensor of its own first."""
    graph = parsed(BINARY)
    _C.run_pass("prepare_binary", graph)
    _C.run_pass("graph_fuser", graph)
    assert kinds(graph) == ["llga::FusionGroup"]


@pytest.mark.parametrize("op", ["expand", "expand_as"])
def test_expansions_of_other_sizes(op: str) -> None:
    """The other operand no longer has the sizes that the operand is expanded to."""
    sizes = {"expand": "2, 3, 5, 5", "expand_as": "y"}[op]
    code = f"y = self.c(x); return torch.relu(y + t.{op}({sizes}))"
    m = net(code, "x, t", c=torch.nn.Conv2d(3, 3, 1)).eval()
    x, t = torch.randn(2, 3, 5, 5), torch.randn(1, 3, 1, 1)
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(m, (x, t)))
        for _ in range(3):
            torch.testing.assert_close(script(x, t), m(x, t))
        graph = script.graph_for(x, t)
        assert [k for k in kinds(graph) if "aten" in k] == [], graph
        torch.testing.assert_close(script(x[:1], t), m(x[:1], t))
        many = torch.randn(2, 3, 1, 1)
        torch.testing.assert_close(script(x, many), m(x, many))
        if op == "expand_as":
            with pytest.raises(RuntimeError, match="expanded size"):
                script(x[:1], many)
        else:
            torch.testing.assert_close(script(x[:1], many), m(x[:1], many))


@pytest.mark.parametrize(("op", "mirrored"), [("sub", "rsub"), ("add", "add"), ("mul", "mul")])
def test_prepare_binary_numbers_go_right(op: str, mirrored: str) -> None:
    def function(x: Tensor) -> Tensor:
        return getattr(torch, op)(torch.tensor(2.0), x)

    x = torch.randn(2, 3)
    graph = torch.jit.trace(function, x).graph.copy()
    torch._C._jit_pass_complete_shape_analysis(graph, (x,), False)
    torch._C._jit_pass_constant_propagation(graph)
    _C.run_pass("prepare_binary", graph)
    node = next(n for n in walk(graph) if n.kind() == f"aten::{mirrored}")
    inputs = list(node.inputs())
    assert inputs[0].debugName() == "x"
    assert inputs[1].toIValue() == 2.0


@pytest.mark.parametrize("op", ["expand", "expand_as"])
@pytest.mark.parametrize(("beside", "dropped"), [("x", True), ("y", False)])
def test_prepare_binary_drops_expansions(op: str, beside: str, dropped: bool) -> None:
    """Where the other operand has the result's sizes: not if this one alone has them."""
    whole, part = (
        f"Float({sizes}, strides=[{strides}], requires_grad=0, device=cpu)"
        for sizes, strides in (("2, 3, 4", "12, 4, 1"), ("1, 3, 1", "3, 1, 1"))
    )
    arguments = "%x" if op == "expand_as" else "%sizes, %no"
    graph = after(
        "prepare_binary",
        f"""
        graph(%x : {whole}, %y : {part}):
          %sizes : int[] = prim::Constant[value=[2, 3, 4]]()
          %no : bool = prim::Constant[value=0]()
          %1 : {whole} = aten::{op}(%y, {arguments})
          %2 : {whole} = aten::mul(%{beside}, %1)
          return (%2)
        """,
    )
    (mul,) = (n for n in walk(graph) if n.kind() == "aten::mul")
    kind = list(mul.inputs())[1].node().kind()
    assert kind == ("llga::operand" if dropped else f"aten::{op}")
    assert (f"aten::{op}" in kinds(graph)) != dropped  # nor left behind, reading both


def test_defer_size_check() -> None:
    graph = after(
        "defer_size_check",
        """
        graph(%x : Tensor):
          %1 : Tensor = aten::relu(%x)
          %2 : Tensor = aten::sigmoid(%1)
          %3 : int[] = aten::size(%2)
          return (%2, %3)
        """,
    )
    FileCheck().check("aten::size(%x)").run(str(graph))


def test_defer_size_check_reads_behind_a_chain() -> None:
    graph = after(
        "defer_size_check",
        """
        graph(%x : Tensor):
          %1 : Tensor = aten::cos(%x)
          %2 : Tensor = aten::relu(%1)
          %3 : Tensor = aten::sigmoid(%2)
          %4 : int[] = aten::size(%1)
          %5 : Tensor = aten::tanh(%3)
          return (%5, %4)
        """,
    )
    FileCheck().check("aten::size(%3)").run(str(graph))


def test_defer_size_check_reads_behind_an_op_in_place() -> None:
    """llga::as_target, which stands for its target, reads no numbers of that."""
    graph = after(
        "defer_size_check",
        """
        graph(%x : Tensor):
          %1 : Tensor = aten::cos(%x)
          %2 : Tensor = aten::relu(%1)
          %3 : Tensor = llga::as_target(%2, %1)
          %4 : int[] = aten::size(%3)
          return (%3, %4)
        """,
    )
    FileCheck().check("aten::size(%3)").run(str(graph))


CONV = """
graph(%x : Float(1, 3, 8, 8, strides=[192, 64, 8, 1], requires_grad=0, device=cpu),
      %w : Float(3, 3, 3, 3, strides=[27, 9, 3, 1], requires_grad=0, device=cpu)):
  %none : NoneType = prim::Constant()
  %one : int = prim::Constant[value=1]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %1 : Float(1, 3, 8, 8, strides=[192, 64, 8, 1], requires_grad=0, device=cpu) = aten::conv2d(%x, %w, %none, %ones, %ones, %ones, %one)
  %2 : Float(1, 3, 8, 8, strides=[192, 64, 8, 1], requires_grad=0, device=cpu) = aten::relu(%1)
  %3 : Float(1, 3, 8, 8, strides=[192, 64, 8, 1], requires_grad=0, device=cpu) = aten::conv2d(%2, %w, %none, %ones, %ones, %ones, %one)
  %4 : Float(1, 3, 8, 8, strides=[192, 64, 8, 1], requires_grad=0, device=cpu) = aten::cos(%3)
  %5 : Float(1, 3, 8, 8, strides=[192, 64, 8, 1], requires_grad=0, device=cpu) = aten::relu(%4)
  return (%5)
"""  # noqa: E501


def test_graph_fuser() -> None:
    graph = after("graph_fuser", CONV)
    assert kinds(graph) == ["llga::FusionGroup", "llga::FusionGroup", "aten::cos", "aten::relu"]
    first, second, _, lone = (n for n in walk(graph) if n.kind() != "prim::Constant")
    assert kinds(first.g("Subgraph")) == ["aten::conv2d", "aten::relu"]
    assert kinds(second.g("Subgraph")) == ["aten::conv2d"]
    assert "lone elementwise" in lone.s("llga_refused")


def test_graph_fuser_leaves_constants_alone() -> None:
    graph = after("graph_fuser", of_constants("%5 : Tensor = aten::relu(%4); return (%5)"))
    left = {n.kind(): n.s("llga_refused") for n in walk(graph) if n.hasAttribute("llga_refused")}
    assert "all that it reads are constants" in left["aten::linear"], left
    (group,) = (n for n in walk(graph) if n.kind() == "llga::FusionGroup")
    assert kinds(group.g("Subgraph"))[0] == "aten::matmul"


def test_graph_fuser_leaves_written_values_alone() -> None:
    graph = after("graph_fuser", CONV.replace("aten::cos(%3)", "aten::cos_(%3)"))
    assert kinds(graph)[0] == "llga::FusionGroup"
    left = next(n for n in walk(graph) if n.kind() == "aten::conv2d")
    assert "in-place" in left.s("llga_refused")


OF_PARTS = """
graph(%a : Float(1, 2, 4, 4, strides=[32, 1, 8, 2], requires_grad=0, device=cpu),
      %b : Float(1, 2, 4, 4, strides=[32, 1, 8, 2], requires_grad=0, device=cpu),
      %w : Float(4, strides=[1], requires_grad=0, device=cpu)):
  %dim : int = prim::Constant[value=DIM]()
  %no : bool = prim::Constant[value=0]()
  %eps : float = prim::Constant[value=1e-05]()
  %list : Tensor[] = prim::ListConstruct(%a, %b)
  %1 : Float(1, 4, 4, 4, strides=[64, 1, 16, 4], requires_grad=0, device=cpu) = aten::cat(%list, %dim)
  %2 : Float(1, 4, 4, 4, strides=[64, 1, 16, 4], requires_grad=0, device=cpu) = aten::batch_norm(%1, %w, %w, %w, %w, %no, %eps, %eps, %no)
  %3 : Float(1, 4, 4, 4, strides=[64, 1, 16, 4], requires_grad=0, device=cpu) = aten::FUNCTION(%2)
  return (%3RESULT)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("function", "dim", "result", "groups"),
    [
        ("relu", "1", "", 1),
        ("silu", "1", "", 1),
        ("relu", "2", "", 2),
        ("silu", "2", "", 2),
        ("relu", "1", ", %1", 2),
        ("silu", "1", ", %2", 2),
    ],
)
def test_join_concat(function: str, dim: str, result: str, groups: int) -> None:
    code = OF_PARTS.replace("DIM", dim).replace("RESULT", result).replace("FUNCTION", function)
    graph = parsed(code)
    _C.run_pass("graph_fuser", graph)
    assert kinds(graph) == ["llga::FusionGroup"] * (2 if function == "relu" else 3)
    _C.run_pass("join_concat", graph)
    torch._C._jit_pass_lint(graph)
    assert kinds(graph) == ["llga::FusionGroup"] * groups
    if groups == 1:
        (group,) = (n for n in walk(graph) if n.kind() == "llga::FusionGroup")
        inside = kinds(group.g("Subgraph"))
        assert inside == ["aten::cat", "aten::batch_norm", f"aten::{function}"]


EXCITATION = """
graph(%x : Float(1, 8, 4, 4, strides=[128, 1, 32, 8], requires_grad=0, device=cpu)):
  %w : Float(8, 8, 1, 1, strides=[8, 1, 1, 1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  %none : NoneType = prim::Constant()
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %zeros : int[] = prim::Constant[value=[0, 0]]()
  %1 : Float(1, 8, 4, 4, strides=[128, 1, 32, 8], requires_grad=0, device=cpu) = aten::conv2d(%x, %w, %none, %ones, %zeros, %ones, %one)
  %2 : Float(1, 8, 1, 1, strides=[8, 1, 8, 8], requires_grad=0, device=cpu) = aten::adaptive_avg_pool2d(%1, %ones)
  %3 : Float(1, 8, 1, 1, strides=[8, 1, 8, 8], requires_grad=0, device=cpu) = aten::conv2d(%2, %w, %none, %ones, %zeros, %ones, %one)
  %4 : Float(1, 8, 1, 1, strides=[8, 1, 8, 8], requires_grad=0, device=cpu) = aten::relu(%3)
  %5 : Float(1, 8, 1, 1, strides=[8, 1, 8, 8], requires_grad=0, device=cpu) = aten::conv2d(%4, %w, %none, %ones, %zeros, %ones, %one)
  %6 : Float(1, 8, 1, 1, strides=[8, 1, 8, 8], requires_grad=0, device=cpu) = aten::sigmoid(%5)
  %7 : Float(1, 8, 4, 4, strides=[128, 1, 32, 8], requires_grad=0, device=cpu) = aten::mul(FACTOR, %6)
  return (%7RESULT)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("factor", "result", "joined"),
    [("%1", "", True), ("%1", ", %1", True), ("%x", "", False), ("%1", ", %4", False)],
    ids=["joined", "data read by others", "scales something else", "read by others"],
)
def test_join_excitation(factor: str, result: str, joined: bool) -> None:
    graph = parsed(EXCITATION.replace("FACTOR", factor).replace("RESULT", result))
    _C.run_pass("graph_fuser", graph)
    assert kinds(graph) == ["llga::FusionGroup"] * 4
    _C.run_pass("join_excitation", graph)
    torch._C._jit_pass_lint(graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert len(groups) == (2 if joined else 4)
    if joined:
        inside = [kind for kind in kinds(groups[1].g("Subgraph")) if kind != "prim::Constant"]
        assert inside == [
            *("aten::adaptive_avg_pool2d", "aten::conv2d", "aten::relu"),
            *("aten::conv2d", "aten::sigmoid", "aten::mul"),
        ]


EXPANSION = """
graph(%x : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu)):
  %w : Float(8, 4, 1, 1, strides=[4, 1, 1, 1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  %d : Float(8, 1, 3, 3, strides=[9, 9, 3, 1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  %p : Float(4, 8, 1, 1, strides=[8, 1, 1, 1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  %none : NoneType = prim::Constant()
  %one : int = prim::Constant[value=1]()
  %eight : int = prim::Constant[value=8]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %zeros : int[] = prim::Constant[value=[0, 0]]()
  %1 : Float(1, 8, 6, 6, strides=[288, 1, 48, 8], requires_grad=0, device=cpu) = aten::conv2d(%x, %w, %none, %ones, %zeros, %ones, %one)
  %2 : Float(1, 8, 6, 6, strides=[288, 1, 48, 8], requires_grad=0, device=cpu) = aten::relu(%1)
  %3 : Float(1, 8, 6, 6, strides=[288, 1, 48, 8], requires_grad=0, device=cpu) = aten::conv2d(%2, %d, %none, %ones, %ones, %ones, %eight)
  %4 : Float(1, 8, 6, 6, strides=[288, 1, 48, 8], requires_grad=0, device=cpu) = aten::relu(%3)
  %5 : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu) = aten::conv2d(%4, %p, %none, %ones, %zeros, %ones, %one)
  %6 : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu) = aten::add(%5, %x, %one)
  return (%6RESULT)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("result", "left"),
    [("", 1), (", %4", 2), (", %2", 3)],
    ids=["joined", "read by others behind", "read by others"],
)
def test_join_depthwise(result: str, left: int) -> None:
    graph = parsed(EXPANSION.replace("RESULT", result))
    _C.run_pass("graph_fuser", graph)
    assert kinds(graph) == ["llga::FusionGroup"] * 3
    _C.run_pass("join_depthwise", graph)
    torch._C._jit_pass_lint(graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert len(groups) == left
    if left == 1:
        inside = [kind for kind in kinds(groups[0].g("Subgraph")) if kind != "prim::Constant"]
        assert inside == [*("aten::conv2d", "aten::relu") * 2, "aten::conv2d", "aten::add"]


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"aten::relu(": "aten::prelu("}, 1),
        ({"%2": "aten::prelu(", "%4": "aten::relu("}, 1),
        ({"%2": "aten::relu(", "%4": "aten::prelu("}, 1),
        ({"aten::relu(": "aten::prelu(", "RESULT": ", %1"}, 5),
        ({"aten::relu(": "aten::prelu(", "RESULT": ", %3"}, 3),
        ({"aten::relu(": "aten::prelu(", "RESULT": ", %4"}, 2),
    ],
    ids=["both", "first", "second", "first read", "second read", "sloped read"],
)
def test_join_depthwise_with_slopes(changes: dict[str, str], left: int) -> None:
    text = EXPANSION.replace("RESULT", changes.get("RESULT", ""))
    slopes = "  %s : Float(8, strides=[1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()\n"  # noqa: E501
    text = text.replace("  %none :", f"{slopes}  %none :")
    for value in ("%2", "%4"):
        op = changes.get(value, changes.get("aten::relu("))
        if op == "aten::prelu(":
            line = next(line for line in text.splitlines() if line.startswith(f"  {value} "))
            text = text.replace(line, line.replace("aten::relu(", op)[:-1] + ", %s)")
    graph = parsed(text)
    _C.run_pass("graph_fuser", graph)
    _C.run_pass("join_depthwise", graph)
    torch._C._jit_pass_lint(graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert len(groups) == left


@pytest.mark.parametrize(
    ("parts", "dim", "result", "left"),
    [
        ("%2, %4", 1, "", 1),
        ("%4, %2", 1, "", 3),
        ("%2, %4", 2, "", 3),
        ("%2, %4, %2", 1, "", 3),
        ("%2, %4", 1, ", %4", 3),
        ("%2, %4", 1, ", %2", 3),
        ("%2, %3", 1, "", 1),
    ],
)
def test_join_depthwise_with_a_concatenation(parts: str, dim: int, result: str, left: int) -> None:
    head = EXPANSION[: EXPANSION.index("  %5 ")]
    if "%3" in parts:
        head = head[: head.index("  %4 ")]
    concat = f"""\
  %dim : int = prim::Constant[value={dim}]()
  %list : Tensor[] = prim::ListConstruct({parts})
  %5 : Float(1, 16, 6, 6, strides=[576, 1, 96, 16], requires_grad=0, device=cpu) = aten::cat(%list, %dim)
  return (%5{result})
"""  # noqa: E501
    if dim == 2:
        concat = concat.replace("(1, 16, 6, 6, strides=[576,", "(1, 8, 12, 6, strides=[576,")
        concat = concat.replace("96, 16]", "48, 8]")
    graph = parsed(head + concat)
    _C.run_pass("graph_fuser", graph)
    assert kinds(graph).count("llga::FusionGroup") == 3
    _C.run_pass("join_depthwise", graph)
    torch._C._jit_pass_lint(graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert len(groups) == left
    if left == 1:
        inside = [kind for kind in kinds(groups[0].g("Subgraph")) if kind != "prim::Constant"]
        assert inside[-1] == "aten::cat"
        assert inside.count("aten::conv2d") == 2


@pytest.mark.parametrize(("planes", "left"), [(2, 1), (4, 1), (5, 3)])
def test_join_depthwise_behind_the_first_convolution(planes: int, left: int) -> None:
    text = EXPANSION.replace("RESULT", "").replace("%x, %one)", "%5, %one)")
    images = f"1, {planes}, 6, 6, strides=[{36 * planes}, 36, 6, 1]"
    text = text.replace("%x : Float(1, 4, 6, 6, strides=[144, 1, 24, 4]", f"%x : Float({images}")
    weight = f"8, {planes}, 3, 3, strides=[{9 * planes}, 9, 3, 1]"
    text = text.replace("8, 4, 1, 1, strides=[4, 1, 1, 1]", weight)
    text = text.replace("(%x, %w, %none, %ones, %zeros", "(%x, %w, %none, %ones, %ones")
    graph = parsed(text)
    _C.run_pass("graph_fuser", graph)
    assert kinds(graph) == ["llga::FusionGroup"] * 3
    _C.run_pass("join_depthwise", graph)
    torch._C._jit_pass_lint(graph)
    assert kinds(graph) == ["llga::FusionGroup"] * left


SHUFFLE = """
graph(%x : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu)):
  %w : Float(4, 4, 1, 1, strides=[4, 1, 1, 1], requires_grad=0, device=cpu) = prim::Constant[value=<Tensor>]()
  %none : NoneType = prim::Constant()
  %zero : int = prim::Constant[value=0]()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %three : int = prim::Constant[value=3]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %zeros : int[] = prim::Constant[value=[0, 0]]()
  %a : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu) = aten::conv2d(%x, %w, %none, %ones, %zeros, %ones, %one)
  %b : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu) = aten::conv2d(%a, %w, %none, %ones, %zeros, %ones, %one)
  %list : Tensor[] = prim::ListConstruct(%a, %b)
  %1 : Float(1, 8, 6, 6, strides=[288, 1, 48, 8], requires_grad=0, device=cpu) = aten::cat(%list, %DIM)
  %n : int = aten::size(%1, %zero)
  %c : int = aten::size(%1, %one)
  %h : int = aten::size(%1, %two)
  %v : int = aten::size(%1, %three)
  %g : int = aten::floordiv(%c, %two)
  %split : int[] = prim::ListConstruct(%n, %two, %g, %h, %v)
  %whole : int[] = prim::ListConstruct(%n, %c, %h, %v)
  %2 : Float(1, 2, 4, 6, 6, strides=[288, 4, 1, 48, 8], requires_grad=0, device=cpu) = aten::view(%1, %split)
  %3 : Float(1, 4, 2, 6, 6, strides=[288, 1, 4, 48, 8], requires_grad=0, device=cpu) = aten::transpose(%2, %one, %SWAPPED)
  %4 : Float(1, 4, 2, 6, 6, strides=[288, 72, 36, 6, 1], requires_grad=0, device=cpu) = aten::contiguous(%3, %zero)
  %5 : Float(1, 8, 6, 6, strides=[288, 36, 6, 1], requires_grad=0, device=cpu) = aten::view(%4, %whole)
  %6 : Float(1, 4, 6, 6, strides=[288, 36, 6, 1], requires_grad=0, device=cpu), %7 : Float(1, 4, 6, 6, strides=[288, 36, 6, 1], requires_grad=0, device=cpu) = prim::ConstantChunk[chunks=2, dim=1](%5)
  %8 : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu) = aten::conv2d(%6, %w, %none, %ones, %zeros, %ones, %one)
  %9 : Float(1, 4, 6, 6, strides=[144, 1, 24, 4], requires_grad=0, device=cpu) = aten::conv2d(%7, %w, %none, %ones, %zeros, %ones, %one)
  return (%8, %9RESULT)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("dim", "swapped", "result", "joined"),
    [
        ("one", "two", "", True),
        ("one", "two", ", %c", False),
        ("one", "two", ", %7", False),
        ("one", "two", ", %5", False),
        ("one", "two", ", %1", False),
        ("one", "three", "", False),
        ("two", "two", "", False),
    ],
    ids=["joined", "size", "chunk", "whole", "concatenation", "other transpose", "other dimension"],
)
def test_join_shuffle(dim: str, swapped: str, result: str, joined: bool) -> None:
    text = SHUFFLE.replace("DIM", dim).replace("SWAPPED", swapped).replace("RESULT", result)
    graph = parsed(text)
    _C.run_pass("graph_fuser", graph)
    before = kinds(graph).count("llga::FusionGroup")
    _C.run_pass("join_shuffle", graph)
    torch._C._jit_pass_lint(graph)
    after = kinds(graph)
    assert after.count("llga::FusionGroup") == before
    assert ("prim::ConstantChunk" not in after) == joined
    if joined:
        assert set(after) == {"llga::FusionGroup"}


SIZES = """
graph(%x : Tensor, %n : int):
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %two : Long(requires_grad=0, device=cpu) = prim::Constant[value={2}]()
  %size : int = aten::size(%x, %0)
  %a : Tensor = prim::NumToTensor(%size)
  %b : Tensor = prim::NumToTensor(%n)
  %c : Tensor = aten::floor_divide(%a, %two)
  %d : Tensor = aten::add(%c, %b, %1)
  %e : int = aten::Int(%d)
  return (%e)
"""


@pytest.mark.parametrize(
    ("old", "new", "untraced"),
    [
        ("", "", True),
        ("aten::Int(%d)", "aten::Int(%a)", True),
        ("add(%c, %b, %1)", "mul(%c, %b)", True),
        ("add(%c, %b, %1)", "add_(%c, %b, %1)", False),
        ("add(%c, %b, %1)", "remainder(%a, %two)", True),
        ("add(%c, %b, %1)", "remainder(%a, %1)", True),
        ("add(%c, %b, %1)", "rsub(%a, %1, %1)", True),
        ("add(%c, %b, %1)", "rsub(%a, %1, %n)", False),
        ("add(%c, %b, %1)", "remainder(%a, %0)", False),
        ("aten::Int(%d)", "aten::Int(%x)", False),
        ("value={2}", "value={0}", False),
        ("%b, %1)", "%b, %n)", False),
        ("floor_divide(%a, %two)", "add(%x, %two, %1)", False),
    ],
    ids=[
        "sum",
        "size",
        "product",
        "in-place",
        "remainder",
        "remainder by a number",
        "difference from a number",
        "scaled difference",
        "remainder by zero",
        "a tensor",
        "by zero",
        "scaled",
        "of a tensor",
    ],
)
def test_normalize_ops_sizes(old: str, new: str, untraced: bool) -> None:
    """Tracing computes with sizes as 0-dim tensors."""
    text = SIZES.replace(old, new) if old else SIZES
    graph = after("normalize_ops", text)
    torch._C._jit_pass_dce(graph)
    assert ("aten::Int" not in kinds(graph)) == untraced
    if untraced:
        plain = torch._C._create_function_from_graph("plain", parsed(text))
        run = torch._C._create_function_from_graph("f", graph)
        for rows in (7, 8):
            inputs = torch.zeros(rows, 3), 5
            assert run(*inputs) == plain(*inputs)


LAYER = """
graph(%i : Tensor, %j : Tensor, %n : int):
  %last : int = prim::Constant[value=-1]()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %4 : int = prim::Constant[value=4]()
  %no : bool = prim::Constant[value=0]()
  %table : Float(9, 3, strides=[3, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %weight : Float(3, 4, strides=[4, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %bias : Float(4, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %length : int = aten::size(%i, %1)
  %ids : int[] = prim::ListConstruct(%last, %length)
  %k : Tensor = aten::view(%i, %ids)
  %e : Tensor = aten::embedding(%table, %k, %last, %no, %no)
  %x : Tensor = aten::add(%e, %e, %1)
  %c : int = aten::size(%x, %last)
  %rows : int[] = prim::ListConstruct(%last, %c)
  %flat : Tensor = aten::view(%x, %rows)
  %p : Tensor = aten::addmm(%bias, %flat, %weight, %1, %1)
  %a : int = aten::size(%x, %0)
  %b : int = aten::size(%x, %1)
  %sizes : int[] = prim::ListConstruct(%a, %b, %4)
  %y : Tensor = aten::view(%p, %sizes)
  return (%y)
"""


ADDMM = "%p : Tensor = aten::addmm(%bias, %flat, %weight, %1, %1)"
CAST = """%none : NoneType = prim::Constant()
  %float : int = prim::Constant[value=6]()
  %cast : Tensor = aten::to({1}, {0}, %no, %no, %none)
  """
CASTS = """%none : NoneType = prim::Constant()
  %float : int = prim::Constant[value=6]()
  %other : Tensor = aten::to(%flat, %float, %no, %no, %none)
  %cast : Tensor = aten::_autocast_to_reduced_precision(%other, %no, %no, %float, %float)
  """
WIDE = """%wide : Tensor = aten::_autocast_to_full_precision(%e, %no, %no)
  %x : Tensor = aten::add(%wide, %e, %1)"""
MM_ADD = """%m : Tensor = aten::mm(%flat, %weight)
  %p : Tensor = aten::add({})"""


@pytest.mark.parametrize(
    ("old", "new", "restored"),
    [
        ("", "", True),
        ("aten::view(%p", "aten::reshape(%p", True),
        (ADDMM, MM_ADD.format("%bias, %m, %1"), True),
        (ADDMM, MM_ADD.format("%m, %bias, %1"), True),
        (ADDMM, MM_ADD.format("%m, %bias, %4"), False),
        (ADDMM, MM_ADD.format("%m, %j, %1"), False),
        ("%y : Tensor", "%z : Tensor = aten::relu(%p)\n  %y : Tensor", False),
        ("%y : Tensor", "%z : Tensor = aten::relu_(%x)\n  %y : Tensor", False),
        ("return (%y)", "%z : Tensor = aten::relu_(%y)\n  return (%y)", False),
        ("%weight, %1, %1)", "%weight, %1, %4)", False),
        ("ListConstruct(%last, %c)", "ListConstruct(%n, %c)", False),
        ("ListConstruct(%a, %b, %4)", "ListConstruct(%b, %a, %4)", False),
        ("ListConstruct(%a, %b, %4)", "ListConstruct(%a, %b, %n)", False),
        ("aten::add(%e, %e, %1)", "aten::add(%e, %j, %1)", False),
        ("%e, %e", "%e, %n", True),
        ("%table, %k,", "%table, %i,", False),
        (ADDMM, CAST.format("%float", "%flat") + ADDMM.replace("%flat", "%cast"), True),
        (ADDMM, CASTS + ADDMM.replace("%flat", "%cast"), True),
        ("%x : Tensor = aten::add(%e, %e, %1)", WIDE, True),
        (ADDMM, CAST.format("%n", "%flat") + ADDMM.replace("%flat", "%cast"), False),
        (ADDMM, CAST.format("%float", "%x") + ADDMM.replace("%flat", "%cast"), False),
    ],
    ids=[
        "layer",
        "reshape",
        "bias and product",
        "product and bias",
        "scaled bias",
        "bias of an input",
        "product wanted",
        "data written to",
        "result written to",
        "scaled",
        "other rows",
        "other sizes",
        "other outputs",
        "unknown rank",
        "number added",
        "rank of an input",
        "cast",
        "two casts",
        "rank behind a cast",
        "cast to an unknown type",
        "cast without a view",
    ],
)
def test_restore_linear(old: str, new: str, restored: bool) -> None:
    """A linear layer as transformers' Conv1D has it."""
    torch.manual_seed(0)
    text = LAYER.replace(old, new) if old else LAYER
    assert not old or text != LAYER
    graph = parsed(text)
    for node in walk(graph):
        known = node.kind() == "prim::Constant" and node.hasAttribute("value")
        if known and node.kindOf("value") == "t":
            node.t_("value", torch.randn(node.t("value").shape))  # it was uninitialized
    plain = graph.copy()
    _C.run_pass("restore_linear", graph)
    torch._C._jit_pass_lint(graph)
    assert ("aten::linear" in kinds(graph)) == restored
    assert any(kind in kinds(graph) for kind in ("aten::addmm", "aten::mm")) != restored
    if restored:
        inputs = torch.tensor([[1, 2, 8, 0], [5, 5, 3, 7]]), torch.zeros(3), 2
        want = torch._C._create_function_from_graph("plain", plain)(*inputs)
        got = torch._C._create_function_from_graph("f", graph)(*inputs)
        torch.testing.assert_close(got, want)


def check_fold(text: str, x: Tensor, folded: bool) -> None:
    """Whether fold_batch_norm leaves no batch norm, and what it computes then of x."""
    torch.manual_seed(0)
    graph = parsed(text)
    for node in walk(graph):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            node.t_("value", torch.rand(node.t("value").shape) + 0.5)  # it was uninitialized
    plain = graph.copy()
    _C.run_pass("fold_batch_norm", graph)
    torch._C._jit_pass_lint(graph)
    assert ("aten::batch_norm" not in kinds(graph)) == folded
    if folded:
        want = torch._C._create_function_from_graph("plain", plain)(x)
        got = torch._C._create_function_from_graph("f", graph)(x)
        torch.testing.assert_close(got, want)


NORM = """
graph(%i : Tensor):
  %t : Float(3, 6, strides=[6, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %w : Float(5, 6, strides=[6, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %b : Float(5, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %g : Float(5, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %none : NoneType = prim::Constant()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %end : int = prim::Constant[value=-1]()
  %small : float = prim::Constant[value=0.001]()
  %sizes : int[] = prim::Constant[value=[2, 4, 6]]()
  %x : Tensor = aten::reshape(%i, %sizes)
  %l : Tensor = aten::linear(%x, %w, %b)
  %f : Tensor = aten::flatten(%l, %0, %1)
  %n : Tensor = aten::batch_norm(%f, %g, %b, %b, %g, %no, %small, %small, %yes)
  %y : Tensor = aten::reshape_as(%n, %l)
  return (%y)
"""


@pytest.mark.parametrize(
    ("old", "new", "folded"),
    [
        ("", "", True),
        ("(%x, %w, %b)", "(%x, %w, %none)", True),
        ("%g, %b, %b, %g", "%none, %none, %b, %g", True),
        ("%y : Tensor = aten::reshape_as(%n, %l)", "%y : Tensor = aten::relu(%n)", True),
        (
            "%y : Tensor = aten::reshape_as(%n, %l)",
            "%z : int = aten::size(%l, %0)\n  %y : Tensor = aten::mul(%n, %z)",
            True,
        ),
        ("%no, %small", "%yes, %small", False),
        ("%b, %g, %no", "%none, %none, %yes", False),
        (
            "%y : Tensor = aten::reshape_as(%n, %l)",
            "%z : Tensor = aten::reshape_as(%n, %l)\n  %y : Tensor = aten::add(%z, %l, %1)",
            False,
        ),
        ("%y : Tensor = aten::reshape_as(%n, %l)", "%y : Tensor = aten::add(%n, %f, %1)", False),
        ("%y : Tensor = aten::reshape_as(%n, %l)", "%y : Tensor = aten::relu_(%n)", False),
        ("aten::linear(%x,", "aten::linear(%i,", False),
        ("value=[2, 4, 6]", "value=[2, 2, 5, 6]", False),
        ("%x, %w, %b", "%x, %t, %none", False),
    ],
    ids=[
        "layer",
        "no bias",
        "no parameters",
        "rows wanted",
        "sizes wanted",
        "training",
        "statistics of the batch",
        "layer wanted",
        "rows of the layer wanted",
        "written to",
        "unknown rank",
        "other channels",
        "other size",
    ],
)
def test_fold_batch_norm(old: str, new: str, folded: bool) -> None:
    """A batch norm of a linear layer's rows becomes part of the layer, where it is one for sure."""
    text = NORM.replace(old, new, 1) if old else NORM
    assert not old or text != NORM
    check_fold(text, torch.randn(2, 4, 6), folded)


NORM_OF_IMAGES = """
graph(%x : Tensor):
  %w : Float(5, 2, 3, 4, strides=[24, 12, 4, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %b : Float(5, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %g : Float(5, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %none : NoneType = prim::Constant()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %1 : int = prim::Constant[value=1]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %same : str = prim::Constant[value="same"]()
  %small : float = prim::Constant[value=0.001]()
  %c : Tensor = aten::_convolution_mode(%x, %w, %b, %ones, %same, %ones, %1)
  %n : Tensor = aten::batch_norm(%c, %g, %b, %b, %g, %no, %small, %small, %yes)
  %y : Tensor = aten::relu(%n)
  return (%y)
"""


@pytest.mark.parametrize(
    ("old", "new", "folded"),
    [
        ("", "", True),
        ("(%x, %w, %b,", "(%x, %w, %none,", True),
        ("aten::relu(%n)", "aten::add(%n, %c, %1)", False),
        ("aten::relu(%n)", "aten::relu_(%n)", False),
        ("%no, %small", "%yes, %small", False),
        # It takes images without a batch, too, of which the norm's channels are another dimension.
        ("_convolution_mode(%x, %w, %b, %ones, %same,", "conv2d(%x, %w, %b, %ones, %ones,", False),
    ],
    ids=["layer", "no bias", "layer wanted", "written to", "training", "unknown rank"],
)
def test_fold_batch_norm_of_images(old: str, new: str, folded: bool) -> None:
    """Of a convolution that pads by itself, which torch.jit.freeze does not know."""
    text = NORM_OF_IMAGES.replace(old, new, 1) if old else NORM_OF_IMAGES
    assert not old or text != NORM_OF_IMAGES
    check_fold(text, torch.randn(3, 2, 7, 6), folded)


# ---------------------------------------------------------------------------- sequences_as_images

SEQUENCES = """
graph(%x : Tensor, %i : Tensor):
  %no : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %2 : int = prim::Constant[value=2]()
  %end : int = prim::Constant[value=-4]()
  %last : int = prim::Constant[value=-1]()
  %one : int[] = prim::Constant[value=[1]]()
  %two : int[] = prim::Constant[value=[2]]()
  %four : int[] = prim::Constant[value=[4]]()
  %w : Float(4, 4, 3, strides=[12, 3, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %b : Float(4, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %3 : Tensor = aten::conv1d(%x, %w, %b, %one, %one, %one, %1)
  %4 : Tensor = aten::relu(%3)
  %5 : Tensor = aten::conv1d(%4, %w, %b, %one, %four, %two, %1)
  %6 : Tensor = aten::slice(%5, %last, %none, %end, %1)
  %7 : Tensor = aten::add(%6, %x, %1)
  return (%7)
"""
SEQUENCES_TRACED = "_convolution(%x, %w, %b, %one, %one, %one, %no, %one, %1, %no, %no, %no, %no)"
SEQUENCES_FIRST = "conv1d(%x, %w, %b, %one, %one, %one, %1)"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], "unsqueeze conv2d relu pad conv2d add squeeze"),
        ([("%end, %1)", "%end, %2)")], "unsqueeze conv2d relu conv2d slice add squeeze"),
        ([("%none, %end", "%1, %end")], "unsqueeze conv2d relu conv2d slice add squeeze"),
        ([("%none, %end", "%0, %end")], "unsqueeze conv2d relu pad conv2d add squeeze"),
        ([("value=-4", "value=-5")], "unsqueeze conv2d relu conv2d slice add squeeze"),
        ([("value=-4", "value=4")], "unsqueeze conv2d relu conv2d slice add squeeze"),
        ([("(%7)", "(%7, %5)")], "unsqueeze conv2d relu conv2d squeeze slice add squeeze"),
        # Without a batch, the dimension would be another one.
        ([("%5, %last", "%5, %2")], "unsqueeze conv2d relu conv2d squeeze slice add"),
        (
            [("%5, %last", "%5, %2"), (SEQUENCES_FIRST, SEQUENCES_TRACED)],
            "unsqueeze _convolution relu pad conv2d add squeeze",
        ),
        # Of any number of dimensions, none included.
        ([("%6, %x", "%6, %i")], "unsqueeze conv2d relu pad conv2d llga::with_row add squeeze"),
        ([("%6, %x", "%6, %b")], "unsqueeze conv2d relu pad conv2d unsqueeze add squeeze"),
        # Somebody writes to it.
        ([("aten::relu(", "aten::relu_(")], None),
        ([("%x, %w, %b", "%x, %i, %b")], None),
    ],
)
def test_sequences_as_images(changes: list[tuple[str, str]], expected: str | None) -> None:
    text = SEQUENCES
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    found = [k.removeprefix("aten::") for k in kinds(after("sequences_as_images", text))]
    assert expected is None or " ".join(found) == expected


def test_convolutions_of_images_are_no_sequences() -> None:
    text = SEQUENCES.replace("conv1d", "conv2d").replace(
        "Float(4, 4, 3, strides=[12, 3, 1]", "Float(4, 4, 3, 3, strides=[36, 9, 3, 1]"
    )
    before = parsed(text)
    assert kinds(after("sequences_as_images", text)) == kinds(before)


SCALE = """
graph(%x : Tensor, %i : Tensor):
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %float : int = prim::Constant[value=6]()
  %dims : int[] = prim::Constant[value=[2, 0, 1]]()
  %ones : int[] = prim::Constant[value=[1]]()
  %zeros : int[] = prim::Constant[value=[0]]()
  %w : Float(5, 3, strides=[3, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %v : Float(5, 4, 1, strides=[4, 1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %b : Float(5, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %f : Float(5, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %g : Float(5, 1, strides=[1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %h : Float(5, 1, 1, strides=[1, 1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %k : Float(1, 5, 1, strides=[5, 1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %r : Float(4, 5, strides=[5, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %l : Tensor = aten::linear(%x, %w, %b)
  %y : Tensor = aten::mul(%l, %f)
  return (%y)
"""
ROWS_LINEAR = "%l : Tensor = aten::linear(%x, %w, %b)"
ROWS_CONV = "%l : Tensor = aten::conv1d(%x, %v, %b, %ones, %zeros, %ones, %1)"
ROWS_TRACED = ROWS_CONV.replace("conv1d", "_convolution").replace(
    "%1)", "%no, %zeros, %1, %no, %no, %no, %no)"
)
ROWS_PERMUTED = ROWS_LINEAR.replace("%l", "%m") + "\n  %l : Tensor = aten::permute(%m, %dims)"


@pytest.mark.parametrize(
    ("changes", "folded"),
    [
        ([], True),
        ([("(%l, %f)", "(%f, %l)")], True),
        ([("(%x, %w, %b)", "(%x, %w, %none)")], True),
        ([(ROWS_LINEAR, ROWS_PERMUTED), ("(%l, %f)", "(%l, %h)")], True),
        ([(ROWS_LINEAR, ROWS_CONV), ("(%l, %f)", "(%l, %g)")], True),
        ([(ROWS_LINEAR, ROWS_TRACED), ("(%l, %f)", "(%l, %k)")], True),
        ([("aten::mul(%l, %f)", "aten::div(%l, %f)")], False),
        ([("(%l, %f)", "(%l, %l)")], False),
        ([("(%l, %f)", "(%l, %i)")], False),
        ([("(%l, %f)", "(%l, %g)")], False),  # makes two dimensions of one
        ([("(%l, %f)", "(%l, %r)")], False),
        ([(ROWS_LINEAR, ROWS_PERMUTED)], False),
        ([(ROWS_LINEAR, ROWS_CONV)], False),
        (
            [(ROWS_LINEAR, ROWS_CONV), ("(%l, %f)", "(%l, %h)")],
            False,
        ),  # more than an image without batch has
        ([(ROWS_LINEAR, ROWS_CONV), ("(%l, %f)", "(%l, %k)")], False),
        ([("(%x, %w, %b)", "(%x, %i, %b)")], False),
        ([("(%x, %w, %b)", "(%x, %w, %i)")], False),
        ([("(%y)", "(%y, %l)")], False),
        ([("return", "%z : Tensor = aten::linear(%x, %w, %b)\n  return")], False),
        ([("return", "%z : Tensor = aten::relu_(%y)\n  return")], False),
    ],
    ids=[
        "last dimension",
        "factor first",
        "no bias",
        "permuted",
        "convolution",
        "traced convolution",
        "quotient",
        "square",
        "other factor",
        "more dimensions",
        "factor of each row",
        "other dimension",
        "other dimension of an image",
        "other dimension of maybe more",
        "maybe more dimensions",
        "other weight",
        "other bias",
        "product wanted",
        "weight read twice",
        "written to",
    ],
)
def test_fold_scale(changes: list[tuple[str, str]], folded: bool) -> None:
    """A constant factor of each output becomes part of the layer, where it is one for sure."""
    torch.manual_seed(0)
    text = SCALE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    graph = parsed(text)
    for node in walk(graph):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            node.t_("value", torch.randn(node.t("value").shape))  # it was uninitialized
    plain = graph.copy()
    _C.run_pass("fold_scale", graph)
    torch._C._jit_pass_lint(graph)
    assert ("aten::mul" not in kinds(graph) and plain.findNode("aten::mul") is not None) == folded
    if folded:
        x = torch.randn(2, 4, 3)
        want = torch._C._create_function_from_graph("plain", plain)(x, x)
        got = torch._C._create_function_from_graph("f", graph)(x, x)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("number", [0.0, math.inf, math.nan, 1e38])
def test_fold_scale_keeps_what_rounds_to_other_numbers(number: float) -> None:
    """An infinity times 0 is NaN, and parameters must not overflow."""
    graph = parsed(SCALE)
    for node in walk(graph):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            node.t_("value", torch.full(node.t("value").shape, 100.0))
    factor = list(graph.findNode("aten::mul").inputs())[1].node()
    factor.t_("value", torch.tensor([1, 1, number, 1, 1]))
    _C.run_pass("fold_scale", graph)
    assert "aten::mul" in kinds(graph)


@pytest.mark.parametrize("size", [(8,), ()], ids=str)
def test_fold_scale_that_makes_float32_of_bfloat16(size: tuple[int, ...]) -> None:
    """LayerScale under autocast: its factor is float32. A tensor without dimensions widens none."""
    m = net("x + self.g * self.l(x)", l=torch.nn.Linear(8, 8), g=torch.rand(size) + 0.5).eval()
    x = torch.randn(5, 8)
    with torch.no_grad():
        with autocast_bf16():
            traced = torch.jit.trace(m, x, check_trace=False)
        graph = torch.jit.freeze(traced).graph.copy()
    _C.run_pass("fold_scale", graph)
    torch._C._jit_pass_lint(graph)
    assert ("aten::mul" in kinds(graph)) == (size == ())
    check(m, [x], autocast=True)


HALF_STEPS = {
    # Code, and whether the factor becomes part of the layer.
    "half a step": ("x + 0.5 * self.l(x)", True),
    "in the other order": ("self.l(x) * 0.1 + x", True),
    "an integer": ("self.c(x) * 2 + x", True),
    "a difference": ("x - 0.5 * self.l(x)", False),
    "no sum": ("0.5 * self.l(x)", False),
    "zero": ("x + 0.0 * self.l(x)", False),
    "read twice": ("y = self.l(x)\nreturn x + 0.5 * y, y", False),
}


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "scripted"])
@pytest.mark.parametrize("case", HALF_STEPS)
def test_fold_scale_of_half_steps(case: str, traced: bool) -> None:
    """A number in front of a sum is part of the layer (Conformers, Inception-ResNet)."""
    code, folded = HALF_STEPS[case]
    m = net(code, l=torch.nn.Linear(8, 8), c=torch.nn.Conv2d(3, 3, 3, padding=1)).eval()
    x = torch.randn(2, 3, 5, 8)
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(m, x) if traced else torch.jit.script(m))
        graph = script.graph.copy()
        _C.run_pass("fold_scale", graph)
        torch._C._jit_pass_lint(graph)
        assert ("aten::mul" not in kinds(graph)) == folded, graph
        got = torch._C._create_function_from_graph("f", graph)(script, x)
        torch.testing.assert_close(got, m(x))
    check(m, [x], scripted=not traced)


class LearnableAffine(torch.nn.Module):
    """PP-HGNet's: a number behind ReLU, and one that is added."""

    def __init__(self, scale: Tensor, shift: Tensor, layer: torch.nn.Module, code: str) -> None:
        super().__init__()
        self.layer, self.code = layer, code
        self.scale, self.shift = torch.nn.Parameter(scale), torch.nn.Parameter(shift)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.layer(x))
        return eval(self.code, {"y": y, "s": self.scale, "t": self.shift})


CONVOLVED = torch.nn.Conv2d(3, 5, 3, bias=False)


@pytest.mark.parametrize(
    ("scale", "shift", "code", "bound"),
    [
        ([1.7], [0.3], "s * y + t", "aten::clamp_min"),
        ([[1.7]], [[0.3]], "t + y * s", "aten::clamp_min"),
        ([-1.7], [0.3], "s * y + t", "aten::clamp_max"),
        ([-1.7], [0.3], "s * y", "aten::clamp_max"),
        ([1.7], [0.3], "s * y", "aten::relu"),
        ([1.7], [0.0], "s * y + t", "aten::relu"),
        ([1.7], [[[[0.3]]]], "s * y + t", "aten::clamp_min"),
        ([0.0], [0.3], "s * y + t", None),
        ([math.nan], [0.3], "s * y + t", None),
        ([1.7], [math.inf], "s * y + t", "aten::relu"),
        (
            [[[1.7], [1.6], [1.5], [1.4], [1.3], [1.2], [1.1], [1.0], [0.9]]],
            [0.3],
            "s[:, :y.size(-2)] * y + t",
            None,
        ),
        ([1.7], [0.3], "(s * y + t, y)", None),
        ([[[[[1.7]]]]], [0.3], "s * y + t", None),
    ],
)
@pytest.mark.parametrize("layer", [CONVOLVED, torch.nn.Linear(7, 5)], ids=["conv", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_fold_scale_through_relu(
    scale: Any,
    shift: Any,
    code: str,
    bound: str | None,
    layer: torch.nn.Module,
    dtype: torch.dtype,
) -> None:
    """relu(x) * s + t is max(x * s + t, t), or min where s is negative."""
    linear = isinstance(layer, torch.nn.Linear)
    if linear and isinstance(scale[0], list):
        bound = None  # the result may have more dimensions than rows
    elif linear and isinstance(shift[0], list):
        bound = "aten::relu"
    m = LearnableAffine(torch.tensor(scale), torch.tensor(shift), layer, code).eval()
    x = torch.randn(2, 3, 9, 7)
    x[0, 0, 0, 0] = math.nan
    narrow = dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow, cache_enabled=False):
        script = torch.jit.freeze(torch.jit.trace(m, x))
    plain, graph = script.graph.copy(), script.graph.copy()
    for each in (plain, graph):
        torch._C._jit_pass_constant_propagation(each)
    _C.run_pass("fold_scale", graph)
    torch._C._jit_pass_lint(graph)
    folded = "aten::mul" not in kinds(graph)
    assert folded == (bound is not None), graph
    if bound:
        assert bound in kinds(graph), graph
    want, got = (torch._C._create_function_from_graph("f", g)(script, x) for g in (plain, graph))
    if isinstance(want, tuple):
        want, got = want[0], got[0]
    assert got.dtype == want.dtype
    tolerance = 0.02 if narrow else 1e-6
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


class Scaled(torch.nn.Module):
    """Two blocks of ConvNeXt."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2)
        for second in self.second:
            y = F.gelu(self.first(x.permute(0, 2, 3, 1)))
            y = self.scale * second(y).permute(0, 3, 1, 2)
            x = y.add_(x) if self.in_place else y + x
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "autocast"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("fuser")
def test_scaled_layers_take_the_sum(in_place: bool, dtype: torch.dtype) -> None:
    """Factor, permutation and casts do not part a linear layer and the sum behind it."""
    m = Scaled(in_place).eval()
    x = torch.randn(2, 5, 6, 8)
    context = torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False)
    with torch.no_grad(), context:
        expected = m(x)
        script = torch.jit.freeze(torch.jit.trace(m, x, check_trace=False))
    with torch.no_grad():
        for _ in range(3):
            actual = script(x)
        report = llga_fuser.report(script, x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert actual.stride() == expected.stride()
    names = [group.name for group in report.groups]
    assert not any("mul" in name for name in names), report
    # In bf16 a layer takes a float32 sum only with the kernel for matrix units.
    joined = sum("linear" in name and "add" in name for name in names)
    assert joined == 2 or (dtype == torch.bfloat16 and not has_matrix_units()), report


BRANCHES = """
graph(%x : Tensor, %i : Tensor):
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %2 : int = prim::Constant[value=2]()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %some : float = prim::Constant[value=0.125]()
  %zeros : int[] = prim::Constant[value=[0]]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %twos : int[] = prim::Constant[value=[2, 2]]()
  %w : Float(4, 4, 3, 3, strides=[36, 9, 3, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %d : Float(4, 2, 3, 3, strides=[18, 9, 3, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %v : Float(4, 4, 1, 1, strides=[4, 1, 1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %b : Float(4, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %p : Float(4, strides=[1], device=cpu) = prim::Constant[value=<Tensor>]()
  %h : Float(4, 1, 1, strides=[1, 1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %k : Float(1, 4, 1, 1, strides=[4, 1, 1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %c : Tensor = aten::conv2d(%x, %w, %b, %ones, %ones, %ones, %1)
  %e : Tensor = aten::conv2d(%x, %v, %none, %ones, %zeros, %ones, %1)
  %a : Tensor = aten::batch_norm(%x, %p, %b, %b, %p, %no, %some, %some, %no)
  %s : Tensor = aten::add(%c, %e, %1)
  %t : Tensor = aten::add(%s, %a, %1)
  return (%t)
"""
STRIDED = [("%ones, %ones, %ones", "%twos, %ones, %ones"), ("%ones, %zeros", "%twos, %zeros")]
WITHOUT_NORM = [("(%t)", "(%s)")]


def returns(values: str) -> str:
    return f"%both : (Tensor, Tensor) = prim::TupleConstruct({values})\n  return (%both)"


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([], 1),
        ([("aten::add(%s, %a, %1)", "aten::sub(%s, %a, %2)")], 1),
        ([("aten::add(%c, %e, %1)", "aten::sub(%e, %c, %2)")], 1),
        ([("(%s, %a, %1)", "(%s, %e, %2)")], 1),
        ([("(%s, %a, %1)", "(%a, %s, %1)")], 1),
        ([("aten::add(%s, %a, %1)", "aten::add(%s, %some, %2)")], 1),
        ([("aten::add(%s, %a, %1)", "aten::mul(%s, %h)")], 1),
        ([("aten::add(%s, %a, %1)", "aten::mul(%h, %s)")], 1),
        ([("aten::add(%s, %a, %1)", "aten::mul(%s, %some)")], 1),
        ([("aten::add(%s, %a, %1)", "aten::mul(%c, %some)")], 1),
        ([("(%s, %a, %1)", "(%a, %a, %1)"), ("return (%t)", returns("%t, %s"))], 1),
        ([*STRIDED, *WITHOUT_NORM], 1),
        ([("%ones, %ones, %ones", "%ones, %twos, %twos"), *WITHOUT_NORM], 1),
        ([("%w, %b", "%d, %b"), ("%1)", "%2)"), ("(%c, %e, %2)", "(%c, %a, %1)")], 1),
        ([("aten::add(%s, %a, %1)", "aten::mul(%s, %k)")], 1),  # of a batch for sure? It stays
        ([*STRIDED], 1),  # the norm is of other sizes: it stays
        ([*WITHOUT_NORM, ("%ones, %zeros", "%twos, %zeros")], 2),
        ([*WITHOUT_NORM, ("%ones, %ones, %ones", "%ones, %zeros, %ones")], 2),
        ([*WITHOUT_NORM, ("(%x, %v", "(%i, %v")], 2),
        ([*WITHOUT_NORM, ("%v, %none", "%v, %i")], 2),
        ([*WITHOUT_NORM, ("aten::add(%c, %e, %1)", "aten::div(%c, %e)")], 2),
        ([*WITHOUT_NORM, ("return (%s)", returns("%s, %c"))], 2),
        ([("return", "%z : Tensor = aten::relu_(%x)\n  return")], 2),
        ([("return", "%z : Tensor = aten::relu_(%c)\n  return")], 2),
        ([("%p, %b, %b, %p, %no", "%p, %b, %none, %none, %yes")], 1),  # the norm stays
    ],
    ids=[
        "three branches",
        "difference",
        "difference of the larger",
        "branch twice",
        "norm first",
        "number",
        "factors",
        "factors first",
        "factor",
        "factor of one branch",
        "two sums",
        "strides",
        "dilated",
        "groups",
        "factors of more dimensions",
        "norm of other sizes",
        "other strides",
        "other padding",
        "other input",
        "other bias",
        "quotient",
        "branch wanted",
        "input written to",
        "branch written to",
        "training",
    ],
)
def test_merge_branches(changes: list[tuple[str, str]], left: int) -> None:
    """Branches that are added become one convolution, where they are linear for sure."""
    text = BRANCHES
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    graph = parsed(text)
    torch.manual_seed(0)
    for node in walk(graph):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            node.t_("value", torch.rand(node.t("value").shape) + 0.5)  # it was uninitialized
    torch._C._jit_pass_dce(graph)
    plain = graph.copy()
    _C.run_pass("merge_branches", graph)
    torch._C._jit_pass_lint(graph)
    assert [node.kind() for node in walk(graph)].count("aten::conv2d") == left
    functions = [
        torch._C._create_function_from_graph(name, g) for name, g in (("f", graph), ("p", plain))
    ]
    compared = 0
    # The last one has no batch: a norm takes its rows for channels.
    for sizes in ((2, 4, 4, 5), (2, 4, 3, 3), (2, 4, 1, 1), (4, 4, 5)):
        x = torch.randn(sizes)
        i = torch.rand(4) if "%v, %i" in text else x.roll(1, 0)
        try:
            want = functions[1](x.clone(), i)
        except RuntimeError:  # branches of different sizes
            with pytest.raises(RuntimeError):
                functions[0](x.clone(), i)
        else:
            got = functions[0](x.clone(), i)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared


@pytest.mark.parametrize("number", [math.inf, math.nan, 3e38])
def test_merge_branches_keeps_what_is_not_finite(number: float) -> None:
    """Parameters must not become infinite by being added."""
    graph = parsed(BRANCHES)
    for node in walk(graph):
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            node.t_("value", torch.full(node.t("value").shape, number))
    _C.run_pass("merge_branches", graph)
    assert [node.kind() for node in walk(graph)].count("aten::conv2d") == 2


APART = "p, q = torch.split(x, [8, 8], 1)\nreturn self.n(torch.cat([self.a(p), self.b(q)], 1))"
MERGED_PARTS = {
    # Code, and what is left of convolutions, norms and concatenations.
    "norm": (APART, (1, 0, 0)),
    "activation": (APART.replace("self.n(", "F.relu("), (1, 0, 0)),
    "one bias": (APART.replace("self.b", "self.c"), (1, 0, 0)),
    "chunks": (APART.replace("torch.split(x, [8, 8], 1)", "x.chunk(2, 1)"), (1, 0, 0)),
    "equal parts": (APART.replace("[8, 8]", "8"), (1, 0, 0)),
    "depthwise": (APART.replace("self.a", "self.d").replace("self.b", "self.d"), (1, 0, 0)),
    "zeros": (APART.replace("self.n", "self.z"), (1, 1, 0)),
    "norm of other values": (APART.replace("1))", "1) + 1.0)"), (1, 1, 0)),
    "one after the other": (
        """p, q = torch.split(x, [8, 8], 1)
x = torch.cat([self.e(p), self.e(q)], 1)
r, s = torch.split(x, [8, 8], 1)
return torch.cat([self.e(r), self.e(s)], 1)""",
        (2, 0, 0),
    ),
    "other outputs": (APART.replace("self.b", "self.e").replace("self.n", "F.relu"), (2, 0, 1)),
    "other dilation": (APART.replace("self.b(q)", "self.s(q)"), (2, 1, 1)),
    "windows": (APART.replace("self.a", "self.w").replace("self.b", "self.w"), (2, 1, 1)),
    "other order": (APART.replace("[self.a(p), self.b(q)]", "[self.b(q), self.a(p)]"), (2, 1, 1)),
    "more parts": (
        APART.replace("p, q", "p, q, r").replace("[8, 8]", "[8, 6, 2]").replace("(q)", "(p)"),
        (2, 1, 1),
    ),
    "part of a part": (
        APART.replace("self.n", "p.sum() + self.n"),
        (2, 1, 1),
    ),
    "result wanted": (
        """p, q = torch.split(x, [8, 8], 1)
y = self.a(p)
return self.n(torch.cat([y, self.b(q)], 1)).sum() + y""",
        (2, 1, 1),
    ),
    "other dimension": (APART.replace("[8, 8], 1", "[4, 4], 2"), (2, 1, 1)),
    "other concatenation": (APART.replace("1))", "2))").replace("self.n", "F.relu"), (2, 0, 1)),
    "written to": (APART.replace("return", "p.mul_(2.0)\nreturn"), (2, 1, 1)),
}


@pytest.mark.parametrize("case", MERGED_PARTS)
def test_merge_parts(case: str) -> None:
    """Convolutions of parts become one in groups, where they are all parts, and in order."""
    code, left = MERGED_PARTS[case]
    torch.manual_seed(0)
    m = net(
        code,
        a=nn.Conv2d(8, 12, 1, bias=False),
        b=nn.Conv2d(8, 12, 1, bias=False),
        c=nn.Conv2d(8, 12, 1),
        d=nn.Conv2d(8, 8, 3, 1, 1, groups=8),
        e=nn.Conv2d(8, 8, 1),
        n=nn.BatchNorm2d(16 if case == "depthwise" else 24),
        s=nn.Conv2d(8, 12, 1, dilation=2),
        w=nn.Conv2d(8, 12, 3, padding=1),
        z=nn.BatchNorm2d(24),
    ).eval()
    with torch.no_grad():
        for name in ("running_mean", "running_var", "weight", "bias"):
            getattr(m.n, name).uniform_(0.5, 1.5)
        m.z.weight[3] = 0
    x = torch.randn(2, 8 if case == "other dimension" else 16, 8, 7)
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(m, x, check_trace=False), optimize_numerics=False)
    graph = script.graph.copy()
    graph.eraseInput(0)
    _C.run_pass("merge_parts", graph)
    torch._C._jit_pass_lint(graph)
    found = Counter(node.kind() for node in walk(graph))
    assert (
        found["aten::_convolution"],
        found["aten::batch_norm"],
        found["aten::cat"],
    ) == left
    function = torch._C._create_function_from_graph("f", graph)
    for size in (x.shape, (1, x.shape[1], 8, 1)):
        y = torch.randn(size)
        with torch.no_grad():
            torch.testing.assert_close(function(y.clone()), m(y.clone()), rtol=1e-5, atol=1e-5)


class Branched(torch.nn.Module):
    """Blocks of RepVGG, MobileOne (depthwise) and FastViT, as they are trained."""

    def __init__(self, groups: int, in_place: bool) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(16, 16, 1)
        self.large = torch.nn.Conv2d(16, 16, 3, padding=1, groups=groups, bias=False)
        self.small = torch.nn.Conv2d(16, 16, 1, groups=groups)
        for name in ("mean", "variance", "gamma", "beta"):
            self.register_buffer(name, torch.rand(16) + 0.5)
        self.scale = torch.nn.Parameter(torch.rand(16, 1, 1) + 0.5)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for _ in range(2):
            y = self.small(x)
            norm = F.batch_norm(x, self.mean, self.variance, self.gamma, self.beta)
            if self.in_place:
                y += self.large(x)
                y += norm
                x = F.relu_(y)
            else:
                x = F.gelu(x + self.scale * (y + norm + 0 + self.large(x) - norm))
        return x


@pytest.mark.parametrize(
    ("in_place", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)],
    ids=["pure", "in place", "autocast"],
)
@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "scripted"])
def test_branches_become_a_convolution(
    traced: bool, groups: int, in_place: bool, dtype: torch.dtype
) -> None:
    """One convolution a block is left, and no norm. A norm takes the rows of an image without a
    batch for channels, which is no mistake where there are as many.
    """
    torch.manual_seed(0)
    m = Branched(groups, in_place).eval()
    x = torch.randn(2, 16, 16, 10)
    context = torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False)
    with torch.no_grad(), context:
        scripted = torch.jit.trace(m, x, check_trace=False) if traced else torch.jit.script(m)
        script, plain = torch.jit.freeze(scripted), torch.jit.freeze(scripted)
    images = [x] if traced else [x, x[0]]  # traced, that one raises
    with torch.no_grad():
        llga_fuser.enable(False)
        expected = [plain(image) for image in images]
        llga_fuser.enable()
        for _ in range(3):
            actual = script(x)
        report = llga_fuser.report(script, x)
        found = fused_graph(script, x)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(actual, expected[0], rtol=tolerance, atol=tolerance)
    names = "+".join(group.name for group in report.groups)
    assert names.count("conv2d") == 3, report
    # In bf16 a norm would not be as exact; where that is computed in float32, it is.
    narrow = dtype == torch.bfloat16 and fuses(dtype)
    assert ("batch_norm" in names) == narrow, report
    assert not found.outside["aten::batch_norm"] and not found.outside["llga::of_batch"], found
    with torch.no_grad():
        for image, want in zip(images, expected, strict=True):
            torch.testing.assert_close(script(image), want, rtol=tolerance, atol=tolerance)


class TokenMixer(Branched):
    """FastViT's, without the MLP behind it; `in_place`: into what is of bfloat16 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for _ in range(2):
            y = self.small(x)
            norm = F.batch_norm(x, self.mean, self.variance, self.gamma, self.beta)
            if self.in_place:
                y += norm
                y += self.large(x)
            else:
                y = y + norm + self.large(x)
            x = x + self.scale * (y - F.batch_norm(x, self.beta, self.gamma))
        return x


@pytest.mark.parametrize("frozen_inside", [True, False], ids=["frozen inside", "frozen outside"])
@pytest.mark.parametrize("in_place", [False, True], ids=["pure", "in place"])
@pytest.mark.parametrize("groups", [1, 16])
def test_branches_of_bfloat16_that_are_added_in_float32(
    groups: int, in_place: bool, frozen_inside: bool
) -> None:
    """Depthwise ones become one convolution of float32, for which nothing is rounded."""
    if not fuses(torch.bfloat16):
        pytest.skip("bfloat16 is computed in float32 on this processor")
    torch.manual_seed(0)
    m = TokenMixer(groups, in_place).eval()
    x = torch.randn(2, 16, 16, 10)
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    scripts = []
    with torch.no_grad():
        with autocast:
            traced = torch.jit.trace(m, x, check_trace=False)
        for _ in range(2):
            with autocast if frozen_inside else contextlib.nullcontext():
                scripts.append(torch.jit.freeze(traced))
        script, plain = scripts
        llga_fuser.enable(False)
        rounded, exact = plain(x), m.double()(x.double())
        llga_fuser.enable()
        for _ in range(3):
            actual = script(x)
        with autocast:  # which would round what PyTorch computes of a product
            within = script(x)
        cut = script(x[:1, :, 3:, 2:])
        report = llga_fuser.report(script, x)
    assert actual.dtype == within.dtype == rounded.dtype == torch.float32

    def error(result: Tensor) -> float:
        return (result - exact).norm().item()

    assert error(actual) < 1.05 * error(rounded)
    assert error(within) < 1.05 * error(rounded)
    assert cut.shape == (1, 16, 13, 8)
    torch.testing.assert_close(cut[:, :, 4:, 4:], actual[:1, :, 7:, 6:], rtol=0.02, atol=0.02)
    names = "+".join(group.name for group in report.groups)
    assert names.count("conv") == (3 if groups == 16 else 5), report
    assert ("batch_norm" in names) == (groups != 16), report


RESIDUALS = {
    # Code, and what is left of convolutions and additions.
    "residual": ("return x + self.d(x)", (1, 0)),
    "in the other order": ("return self.d(x) + x", (1, 0)),
    "difference": ("return self.d(x) - x", (1, 0)),
    "one after the other": ("x = x + self.d(x)\nreturn x + self.e(x)", (2, 0)),
    "twice the image": ("return x + (self.d(x) + x)", (1, 0)),
    "gate": ("return x + self.s * (self.d(x) - x)", (1, 0)),
    "dilated": ("return x + self.g(x)", (1, 0)),
    "dense": ("return x + self.c(x)", (1, 1)),
    "strided": ("return x[..., ::2, ::2] + self.h(x)", (1, 1)),
    "of another image": ("return x.flip(-1) + self.d(x)", (1, 1)),
    "one of two windows at a corner": ("return x + self.b(F.pad(x, [0, 1, 0, 1]))", (1, 1)),
    "result wanted": ("y = self.d(x)\nreturn torch.cat([x + y, y])", (1, 1)),
    "written to": ("y = x + self.d(x)\nx.mul_(2.0)\nreturn y", (1, 1)),
}


@pytest.mark.parametrize("case", RESIDUALS)
def test_residuals_of_depthwise_convolutions(case: str) -> None:
    """What is added to what is computed of it is one more of the window's factors."""
    code, left = RESIDUALS[case]
    torch.manual_seed(0)
    m = net(
        code,
        b=nn.Conv2d(8, 8, 2, groups=8),
        c=nn.Conv2d(8, 8, 3, 1, 1),
        d=nn.Conv2d(8, 8, 3, 1, 1, groups=8),
        e=nn.Conv2d(8, 8, (5, 1), 1, (2, 0), groups=8, bias=False),
        g=nn.Conv2d(8, 8, 3, 1, 2, dilation=2, groups=8),
        h=nn.Conv2d(8, 8, 3, 2, 1, groups=8),
        s=torch.rand(8, 1, 1),
    ).eval()
    x = torch.randn(2, 8, 10, 8)
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(m, x.clone(), check_trace=False))
    graph = script.graph.copy()
    graph.eraseInput(0)
    _C.run_pass("merge_branches", graph)
    torch._C._jit_pass_lint(graph)
    found = Counter(node.kind() for node in walk(graph))
    sums = found["aten::add"] + found["aten::sub"]
    assert (found["aten::_convolution"], sums) == left, graph
    function = torch._C._create_function_from_graph("f", graph)
    for size in (x.shape, (1, 8, 6, 12)):
        y = torch.randn(size)
        with torch.no_grad():
            torch.testing.assert_close(function(y.clone()), m(y.clone()), rtol=1e-5, atol=1e-5)


class Shifted(torch.nn.Module):
    """Sums that autocast computes in float32, and one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(
            torch.nn.Conv2d(8, 8, size, padding=size // 2) for size in (3, 1) * 3
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        a, b, c, d, e, f = [branch(x) for branch in self.branches]
        shifted = a + 1000.0
        shifted += b
        return [shifted, c + d, F.relu(e + f).bfloat16()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "autocast"])
def test_float32_sums_of_bfloat16_are_not_merged(dtype: torch.dtype) -> None:
    """They have more digits than a convolution in bfloat16 gives; where that is computed in
    float32, it gives them.
    """
    torch.manual_seed(0)
    m = Shifted().eval()
    x = torch.randn(2, 8, 9, 10)
    context = torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False)
    with torch.no_grad(), context:
        traced = torch.jit.trace(m, x, check_trace=False)
        script, plain = torch.jit.freeze(traced), torch.jit.freeze(traced)
    with torch.no_grad():
        llga_fuser.enable(False)
        expected = plain(x)
        llga_fuser.enable()
        for _ in range(3):
            actual = script(x)
        found = fused_graph(script, x)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype
        rounded = 2**-8 if want.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(got, want, rtol=rounded, atol=5 * tolerance)
    narrow = dtype == torch.bfloat16 and fuses(dtype)
    merged = 1 if narrow else 3
    assert found.inside["aten::_convolution"] == 6 - merged, found


QUANTIZED_PARTS = """
  %q{i} : Tensor = aten::quantize_per_tensor(%x{i}, %s, %z, %t)
  %d{i} : Tensor = aten::dequantize(%q{i})
  %a{i} : Tensor = aten::transpose(%d{i}, %0, %1)
  %r{i} : Tensor = aten::quantize_per_tensor(%a{i}, %s, %z, %t)
  %e{i} : Tensor = aten::dequantize(%r{i})
  %u{i} : Tensor = aten::slice(%e{i}, %0, %0, %2, %1)
  %v{i} : Tensor = aten::slice(%e{i}, %0, %0, %2, %1)
  %l{i} : Tensor[] = prim::ListConstruct(%u{i}, %v{i})
  %c{i} : Tensor = aten::cat(%l{i}, %1)
  %k{i} : Tensor = aten::quantize_per_tensor(%c{i}, %s, %z, %t)
  %f{i} : Tensor = aten::dequantize(%k{i})
  %x{j} : Tensor = aten::matmul(%f{i}, %f{i})
"""


@pytest.mark.parametrize("count", [1, 10])
def test_prepare_quantized_forgets_what_it_removes(count: int) -> None:
    """New nodes come to lie where removed ones were, and are not what those were (Swin V2's
    concatenations of slices).
    """
    parts = [QUANTIZED_PARTS.format(i=i, j=i + 1) for i in range(count)]
    graph = after(
        "prepare_quantized",
        "graph(%x0 : Tensor):\n"
        "  %s : float = prim::Constant[value=0.5]()\n"
        "  %z : int = prim::Constant[value=3]()\n"
        "  %t : int = prim::Constant[value=13]()\n"
        "  %0 : int = prim::Constant[value=0]()\n"
        "  %1 : int = prim::Constant[value=1]()\n"
        "  %2 : int = prim::Constant[value=2]()" + "".join(parts) + f"  return (%x{count})",
    )
    found = [n.kind() for n in graph.nodes()]
    assert found.count("aten::cat") == count and found.count("aten::matmul") == count


MASK = """
graph(%x : Tensor, %n : int):
  %none : NoneType = prim::Constant()
  %no : bool = prim::Constant[value=0]()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %2 : int = prim::Constant[value=2]()
  %half : float = prim::Constant[value=0.5]()
  %sizes : int[] = prim::ListConstruct(%n, %n)
  %z : Tensor = aten::new_zeros(%x, %sizes, %none, %none, %none, %no)
  %s : Tensor = aten::slice(%z, %0, %0, %2, %1)
  %f : Tensor = aten::fill_(%s, %half)
  %r : Tensor = aten::arange(%n, %none, %none, %none, %none)
  %a : Tensor = aten::unsqueeze(%r, %0)
  %b : Tensor = aten::unsqueeze(%r, %1)
  %m : Tensor = aten::le(%a, %b)
  %w : Tensor = aten::where(%m, %z, %0)
  %y : Tensor = aten::matmul(%x, %w)
  return (%y)
"""


COUNTED = """
graph(%x : Tensor, %n : int):
  %none : NoneType = prim::Constant()
  %no : bool = prim::Constant[value=0]()
  %long : int = prim::Constant[value=4]()
  %1 : int = prim::Constant[value=1]()
  %count : Tensor = prim::NumToTensor(%n)
  %twice : Tensor = aten::add(%count, %count, %1)
  %end : Scalar = aten::ScalarImplicit(%twice)
  %r : Tensor = aten::arange(%end, %long, %none, %none, %no)
  %w : Tensor = aten::sin(%r)
  %y : Tensor = aten::mul(%x, %w)
  return (%y)
"""


def test_once_per_sizes_of_what_counts_on_tensors() -> None:
    """A trace makes tensors of sizes, and numbers of these again."""
    graph = after("once_per_sizes", COUNTED)
    assert kinds(graph) == ["llga::OncePerSizes", "aten::mul"]
    text = COUNTED.replace("aten::mul(%x, %w)", "aten::mul(%x, %end)")
    left = kinds(after("once_per_sizes", text))
    assert "aten::ScalarImplicit" in left  # a result is a tensor
    text = COUNTED.replace("aten::add(%count, %count, %1)", "aten::add(%count, %x, %1)")
    assert "llga::OncePerSizes" not in kinds(after("once_per_sizes", text))


DIVIDED = """
graph(%x : Tensor, %n : int):
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %2 : int = prim::Constant[value=2]()
  %r : Tensor = aten::arange(%n, %none, %none, %none, %none)
  %s : Tensor[] = aten::split(%r, %2, %0)
  %a : Tensor, %b : Tensor, %c : Tensor = prim::ListUnpack(%s)
  %w : Tensor = aten::sin(%{})
  %y : Tensor = aten::mul(%x, %w)
  return (%y)
"""


@pytest.mark.parametrize("part", ["a", "b", "c"])
def test_once_per_sizes_of_one_part(part: str) -> None:
    """torch's merging takes the outputs of a node that are read for its first ones (BART)."""
    graph = after("once_per_sizes", DIVIDED.format(part))
    assert kinds(graph) == ["llga::OncePerSizes", "aten::mul"]


MEASURED = """
graph(%x : Tensor, %n : int):
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %r : Tensor = aten::arange(%n, %none, %none, %none, %none)
  %a : Tensor = aten::unsqueeze(%r, %0)
  %k : int = aten::size(%a, %1)
  %b : Tensor = aten::arange(%k, %none, %none, %none, %none)
  %w : Tensor = aten::mul(%a, %b)
  %y : Tensor = aten::mul(%x, %w)
  return (%y)
"""


def test_once_per_sizes_of_what_is_measured_inside() -> None:
    """A size of a tensor that depends on sizes alone, between such (BART's masks)."""
    graph = after("once_per_sizes", MEASURED)
    assert kinds(graph) == ["llga::OncePerSizes", "aten::mul"]
    # Between two nodes of one kind, what reads one and is read by the other: no cycle is made.
    text = MEASURED.replace("aten::size(%a, %1)", "aten::dim(%c)").replace(
        "  %k :", "  %c : Tensor = aten::bernoulli(%a, %none)\n  %k :"
    )
    graph = after("once_per_sizes", text)
    graph.lint()


TARGETED = """
graph(%x : Tensor, %n : int):
  %none : NoneType = prim::Constant()
  %float : int = prim::Constant[value=6]()
  %1 : int = prim::Constant[value=1]()
  %r : Tensor = aten::arange(%n, %float, %none, %none, %none)
  %s : Tensor = aten::sin(%r)
  %d : Tensor = aten::div(%s, %r)
  %t : Tensor = llga::as_target(%d, %s)
  %w : Tensor = aten::unsqueeze(%t, %1)
  %y : Tensor = aten::mul(%x, %w)
  return (%y)
"""


def test_once_per_sizes_of_what_was_computed_in_place() -> None:
    """DeBERTa divides its positions' queries in place."""
    graph = after("once_per_sizes", TARGETED)
    assert kinds(graph) == ["llga::OncePerSizes", "aten::mul"]
    once = next(n for n in graph.nodes() if n.kind() == "llga::OncePerSizes")
    inside = [n.kind() for n in once.g("Subgraph").nodes() if n.kind() != "prim::Constant"]
    assert inside == ["aten::arange", "aten::sin", "aten::div", "aten::unsqueeze"]
    # A target that others compute; a result that is written over what once was computed.
    text = TARGETED.replace("as_target(%d, %s)", "as_target(%d, %x)")
    assert "llga::as_target" in kinds(after("once_per_sizes", text))
    text = TARGETED.replace("%d : Tensor = aten::div(%s, %r)", "%d : Tensor = aten::div(%s, %x)")
    left = kinds(after("once_per_sizes", text))
    assert "aten::sin" in left and "llga::as_target" in left


def test_once_per_sizes_of_what_is_divided_in_place() -> None:
    m = net(
        "q = self.l(self.p[: x.size(1)]).view(x.size(1), 4, 8).transpose(0, 1)\n"
        "q /= torch.sqrt(torch.tensor(q.size(-1), dtype=torch.float) * 3)\n"
        "return torch.relu(x) @ q",
        l=nn.Linear(32, 32),
        p=torch.randn(20, 32),
    ).eval()
    with torch.no_grad():
        script = llga_fuser.compile(m, torch.randn(4, 7, 7))
        for size in (7, 5, 7):
            x = torch.randn(4, size, size)
            for _ in range(3):
                torch.testing.assert_close(script(x), m(x), rtol=1e-5, atol=1e-5)
        assert "llga::OncePerSizes" in kinds(torch.jit.last_executed_optimized_graph())
        assert "aten::div_" not in kinds(torch.jit.last_executed_optimized_graph())


RETURN_TWO = """%t : (Tensor, Tensor) = prim::TupleConstruct(%y, {})
  return (%t)"""


@pytest.mark.parametrize(
    ("old", "new", "outside"),
    [
        ("", "", []),
        ("return (%y)", RETURN_TWO.format("%m"), ["aten::le", "aten::where", "aten::fill_"]),
        ("return (%y)", RETURN_TWO.format("%w"), ["aten::where"]),
        ("return (%y)", "%v : Tensor = aten::neg_(%w)\n  return (%y)", ["aten::where"]),
        ("aten::matmul(%x, %w)", "aten::copy_(%w, %x, %no)", ["aten::where"]),
        (
            "aten::fill_(%s, %half)",
            "aten::copy_(%s, %x, %no)",
            ["aten::copy_", "aten::slice", "aten::new_zeros"],
        ),
        ("aten::le(%a, %b)", "aten::le(%a, %x)", ["aten::le", "aten::where"]),
        ("aten::le(%a, %b)", "aten::bernoulli(%a, %none)", ["aten::bernoulli", "aten::where"]),
    ],
    ids=[
        "mask",
        "part returned",
        "result returned",
        "written to later",
        "written to",
        "data written",
        "data read",
        "random",
    ],
)
def test_once_per_sizes(old: str, new: str, outside: list[str]) -> None:
    text = MASK.replace(old, new) if old else MASK
    assert not old or text != MASK
    graph = after("once_per_sizes", text)
    merged = [n for n in graph.nodes() if n.kind() == "llga::OncePerSizes"]
    assert len(merged) == 1 or outside
    left = {n.kind() for n in graph.nodes()}
    assert set(outside) <= left
    assert ("prim::layout" in left) != ("aten::new_zeros" in left)
    if not outside:
        assert not left & {"aten::le", "aten::arange", "aten::where", "aten::fill_", "aten::zeros"}
    plain = torch._C._create_function_from_graph("plain", parsed(text))
    run = torch._C._create_function_from_graph("f", graph)
    for size in (4, 6, 4, 4):
        x = torch.rand(size, size)
        if "copy_(%s" in text:
            x = torch.rand(size)
        if "bernoulli" not in text:
            for got, want in zip(run(x, size), plain(x, size), strict=True):
                assert torch.equal(got, want)


TABLE = """
graph(%x : Tensor, %n : int):
  %none : NoneType = prim::Constant()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %r : Tensor = aten::arange(%n, %none, %none, %none, %none)
  %q : Tensor = aten::arange(%n, %none, %none, %none, %none)
  %l : Tensor?[] = prim::ListConstruct(%none, %q)
  %i : Tensor = aten::index(%x, %l)
  %k : Tensor?[] = prim::ListConstruct(%r)
  %j : Tensor = aten::index(%r, %k)
  %y : Tensor = aten::mul(%i, %j)
  return (%y)
"""


def test_once_per_sizes_of_a_table() -> None:
    """Numbers that are looked up at positions; those of an input each time."""
    graph = after("once_per_sizes", TABLE)
    lookup = ["aten::arange", "aten::index"]
    assert sorted(kinds(graph)) == sorted([*lookup, "llga::OncePerSizes", "aten::mul"])
    run = torch._C._create_function_from_graph("f", graph)
    for n in (3, 5, 3):
        x = torch.rand(2, 6)
        assert torch.equal(run(x, n), x[:, :n] * torch.arange(n))


class Spelled(torch.nn.Module):
    """A function of what a linear layer computes."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 8)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.float()) if "integers" not in self.code else x
        result: Tensor = eval(self.code, {"y": y, "torch": torch, "math": math})
        return result


TANH_GELUS = {
    "transformers": "0.5 * y * (1.0 + torch.tanh("
    "math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))",
    "fast": "0.5 * y * (1.0 + torch.tanh(y * 0.7978845608 * (1.0 + 0.044715 * y * y)))",
    "bloom": "y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))",
    "cube by hand": "y * (0.5 * (torch.tanh(0.79788456 * (0.044715 * (y * (y * y)) + y)) + 1))",
    "half of all": "0.5 * (y * (torch.tanh(0.79788456 * y + 0.03567740814 * y ** 3) + 1))",
    "viewed": "(z := y.view(-1)) * 0.5 * (1 + torch.tanh(0.79788456 * z * (1 + 0.044715 * z * z)))",
    "float32": "0.5 * y * (1.0 + torch.tanh(torch.tensor(2 / math.pi).sqrt() * "
    "(y + torch.tensor(0.044715) * y ** 3)))",
}


@pytest.mark.parametrize("code", TANH_GELUS.values(), ids=TANH_GELUS)
def test_normalize_ops_tanh_gelu(code: str) -> None:
    """However people spell it."""
    x = 5 * torch.randn(6, 3)
    with torch.no_grad():
        module = torch.jit.freeze(torch.jit.trace(Spelled(code).eval(), x))
        expected = module(x)
        graph = module.graph.copy()
        _C.run_pass("normalize_ops", graph)
        torch._C._jit_pass_lint(graph)
        assert kinds(graph)[-1] == "aten::gelu"
        assert not {"aten::tanh", "aten::pow", "aten::mul"} & set(kinds(graph))
        run = torch._C._create_function_from_graph("f", graph)
        torch.testing.assert_close(run(module._c, x), expected)


@pytest.mark.parametrize("code", TANH_GELUS.values(), ids=TANH_GELUS)
def test_tanh_gelu_under_autocast(code: str) -> None:
    """Where each operand is a cast to float32."""
    x = 5 * torch.randn(6, 3)
    m = torch.nn.Sequential(Spelled(code), torch.nn.Flatten(0), torch.nn.LazyLinear(3))
    m(x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = m(x)
        module = torch.jit.freeze(torch.jit.trace(m.eval(), x, check_trace=False))
        graph = module.graph.copy()
        _C.run_pass("normalize_ops", graph)
        torch._C._jit_pass_lint(graph)
        assert "aten::gelu" in kinds(graph)
        assert not {"aten::tanh", "aten::pow", "aten::mul"} & set(kinds(graph))
        run = torch._C._create_function_from_graph("f", graph)
        actual = run(module._c, x)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


NO_TANH_GELUS = {
    "other scale": "0.5 * y * (1 + torch.tanh(0.8 * (y + 0.044715 * y ** 3)))",
    "other cube": "0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.0447 * y ** 3)))",
    "no half": "y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3)))",
    "half of the sum": "0.5 * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3)))",
    "minus": "0.5 * y * (1 - torch.tanh(0.79788456 * (y + 0.044715 * y ** 3)))",
    "two": "0.5 * y * (2 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3)))",
    "fourth power": "0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3 + y ** 4)))",
    "gate wanted": "(g := 1 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3))) * y * 0.5 + g",
    "of another": "0.5 * y.flip(0) * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3)))",
    "maybe integers": "0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3)))#integers",
    "written to": "0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y ** 3))), y.add_(1)",
}


@pytest.mark.parametrize("code", NO_TANH_GELUS.values(), ids=NO_TANH_GELUS)
def test_normalize_ops_keeps_what_is_no_tanh_gelu(code: str) -> None:
    with torch.no_grad():
        module = torch.jit.freeze(torch.jit.trace(Spelled(code).eval(), torch.randn(6, 3)))
    graph = module.graph.copy()
    _C.run_pass("normalize_ops", graph)
    assert "aten::tanh" in kinds(graph)
    assert "aten::gelu" not in kinds(graph)


def test_layout_propagation_and_guards() -> None:
    graph = parsed(CONV)
    for name in ("graph_fuser", "layout_propagation", "guard_values", "guard_shape"):
        _C.run_pass(name, graph)
    first, second = (n for n in walk(graph) if n.kind() == "llga::FusionGroup")
    assert len(list(first.outputs())) == 1
    text = str(graph)
    FileCheck().check("llga_any_layout=[1]").check("llga_group_owned=[0, 0]").check(
        "llga_must_be_finite=[1, 1]"
    ).check("llga_any_layout=[0]").run(text)
    assert "Float(1, 3, 8, 8" not in text, "guard_shape erases the observed types"
    assert len(list(second.outputs())) == 1


@pytest.mark.parametrize(("op", "free"), [("size", 1), ("dim", 1), ("is_contiguous", 0)])
def test_layout_propagation_of_what_is_asked_for_its_sizes(op: str, free: int) -> None:
    """Sizes are the same in any layout; what tells of strides is not."""
    read = f"%s : {'bool' if op == 'is_contiguous' else 'int'} = aten::{op}(%2"
    read += ", %one)" if op == "size" else ")"
    text = CONV.replace("  %3 : Float", f"  {read}\n  %3 : Float", 1)
    kind = "bool" if op == "is_contiguous" else "int"
    text = text.replace(
        "return (%5)",
        f"%t : (Tensor, {kind}) = prim::TupleConstruct(%5, %s)\n  return (%t)",
    )
    graph = parsed(text)
    for name in ("graph_fuser", "layout_propagation", "guard_values"):
        _C.run_pass(name, graph)
    first = next(n for n in walk(graph) if n.kind() == "llga::FusionGroup")
    assert f"llga_any_layout=[{free}]" in str(first)


VIEWS = """
graph(%x : Float(1, 4, 8, 8, strides=[256, 64, 8, 1], requires_grad=0, device=cpu)):
  %none : NoneType = prim::Constant()
  %how : str = prim::Constant[value='none']()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %last : int = prim::Constant[value=-1]()
  %order : int[] = prim::Constant[value=[0, 2, 1]]()
  %shape : int[] = prim::Constant[value={shape}]()
  %1 : Float(1, 4, 8, 8, strides=[256, 64, 8, 1]) = aten::relu(%x)
  %2 : Float(1, 4, 8, 8, strides=[256, 64, 8, 1]) = aten::mul(%1, %x)
  %3 : Float(1, 4, 64, strides=[256, 64, 1]) = aten::{flatten}
  %4 : Float(1, 64, 4, strides=[256, 1, 64]) = aten::{swap}
  %5 : Float(1, 64, 4, strides=[256, 1, 64]) = aten::{reader}
  return (%5)
"""


@pytest.mark.parametrize(
    ("flatten", "swap", "reader", "free"),
    [
        ("flatten(%2, %two, %last)", "transpose(%3, %one, %two)", "gelu(%4, %how)", True),
        ("reshape(%2, %shape)", "permute(%3, %order)", "gelu(%4, %how)", True),
        ("flatten(%2, %two, %last)", "transpose(%3, %last, %one)", "gelu(%4, %how)", True),
        ("view(%2, %shape)", "permute(%3, %order)", "gelu(%4, %how)", True),  # by reshape then
        # A reader that is no group may look at strides.
        ("flatten(%2, %two, %last)", "transpose(%3, %one, %two)", "cumsum(%4, %one, %none)", False),
    ],
)
def test_layout_propagation_through_views(flatten: str, swap: str, reader: str, free: bool) -> None:
    text = VIEWS.format(flatten=flatten, swap=swap, reader=reader, shape=[1, 4, -1])
    graph = parsed(text)
    for name in ("graph_fuser", "layout_propagation"):
        _C.run_pass(name, graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert f"llga_any_layout=[{int(free)}]" in str(groups[0])
    # Memory in the order 0, 2, 1: octal digits, the first one last, behind a one.
    assert free == (f"llga_viewed_order=[{0o1120}]" in str(groups[-1])), graph


PADDED = ("value=[0, 0]", "value=[1, 1]")
OF_PIXELS = """
graph(%x : Float(1, 4, 8, 8, strides=[256, 64, 8, 1], requires_grad=0, device=cpu)):
  %none : NoneType = prim::Constant()
  %how : str = prim::Constant[value='none']()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %last : int = prim::Constant[value=-1]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %pad : int[] = prim::Constant[value=[0, 0]]()
  %w : Float(4, 4, 1, 1, strides=[4, 1, 1, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %l : Float(4, 4, strides=[4, 1], device=cpu) = prim::Constant[value=<Tensor>]()
  %c : Float(1, 4, 8, 8, strides=[256, 64, 8, 1]) = aten::conv2d(%x, %w, %none, %ones, %pad, %ones, %one)
  %3 : Float(1, 4, 64, strides=[256, 64, 1]) = aten::flatten(%c, %two, %last)
  %4 : Float(1, 64, 4, strides=[256, 1, 64]) = aten::transpose(%3, %one, %two)
  %5 : Tensor = aten::matmul(%4, %3)
  return (%5)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ([], False),
        ([("matmul(%4, %3)", "softmax(%3, %last, %none)")], False),
        ([("matmul(%4, %3)", "matmul(%3, %4)")], False),
        ([("matmul(%4, %3)", "linear(%4, %l, %none)")], True),  # it reads channels
        ([("matmul(%4, %3)", "gelu(%4, %how)")], True),
        (
            [
                (
                    "(1, 4, 8, 8, strides=[256, 64, 8, 1], r",
                    "(1, 4, 8, 8, strides=[256, 1, 32, 4], r",
                )
            ],
            True,
        ),
        ([("4, 4, 1, 1, strides=[4, 1, 1, 1]", "4, 4, 3, 3, strides=[36, 9, 3, 1]"), PADDED], True),
    ],
)
def test_layout_propagation_keeps_planes_for_products(
    changes: list[tuple[str, str]], free: bool
) -> None:
    """Images in planes, a convolution of each pixel, and what multiplies or normalizes planes."""
    text = OF_PIXELS
    for old, new in changes:
        text = text.replace(old, new)
    assert all(new in text for _, new in changes)
    graph = parsed(text)
    for name in ("graph_fuser", "layout_propagation"):
        _C.run_pass(name, graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert f"llga_any_layout=[{int(free)}]" in str(groups[0]), graph


HEADS = """
graph(%x : Float(6, 4, 2, 3, 3, strides=[72, 18, 9, 3, 1], requires_grad=0, device=cpu)):
  %how : str = prim::Constant[value='none']()
  %two : int = prim::Constant[value=2]()
  %last : int = prim::Constant[value=-1]()
  %shape : int[] = prim::Constant[value={shape}]()
  %1 : Float(6, 4, 2, 3, 3, strides=[72, 18, 9, 3, 1]) = aten::relu(%x)
  %2 : Float(6, 4, 2, 3, 3, strides=[72, 18, 9, 3, 1]) = aten::mul(%1, %x)
  %3 : Float({sizes}, strides={strides}) = aten::reshape(%2, %shape)
  %4 : Tensor = aten::transpose(%3, %last, %two)
  %5 : Tensor = aten::gelu(%4, %how)
  return (%5)
"""


@pytest.mark.parametrize(
    ("sizes", "strides", "order"),
    [
        ([2, 3, 4, 18], [216, 72, 18, 1], 0o12310),
        ([3, 2, 2, 2, 18], [144, 72, 36, 18, 1], 0o123410),
        ([6, 4, 18], [72, 18, 1], 0o1210),
        # what is joined is of one image's channel no more
        ([2, 12, 18], [216, 18, 1], None),
        ([6, 4, 2, 9], [72, 18, 9, 1], None),
    ],
)
def test_layout_propagation_through_heads(
    sizes: list[int], strides: list[int], order: int | None
) -> None:
    """Pixels of a volume as one dimension, whose images, and channels, are divided."""
    shape = [*sizes[:-1], -1]
    graph = parsed(HEADS.format(shape=shape, sizes=", ".join(map(str, sizes)), strides=strides))
    for name in ("graph_fuser", "layout_propagation"):
        _C.run_pass(name, graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert f"llga_any_layout=[{int(order is not None)}]" in str(groups[0]), graph
    assert order is None or f"llga_viewed_order=[{order}]" in str(groups[-1]), graph


IMAGE_PARTS = """
graph(%x : Float(1, 4, 8, 8, strides=[256, 64, 8, 1], requires_grad=0, device=cpu)):
  %none : NoneType = prim::Constant()
  %how : str = prim::Constant[value='none']()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %sizes : int[] = prim::Constant[value=[2, 2]]()
  %1 : Float(1, 4, 8, 8, strides=[256, 64, 8, 1]) = aten::relu(%x)
  %2 : Float(1, 4, 8, 8, strides=[256, 64, 8, 1]) = aten::mul(%1, %x)
  PARTS
  %5 : Float(1, 2, 8, 8, strides=[128, 64, 8, 1]) = aten::gelu(%3, %how)
  %6 : Tensor = aten::OTHER(%4, %one, %none)
  return (%5, %6)
"""


@pytest.mark.parametrize(
    ("parts", "other", "free"),
    [
        (["%4 : Tensor = aten::slice(%2, %one, %none, %two, %one)"], "", True),
        (["%4 : Tensor = aten::narrow(%2, %one, %one, %two)"], "", True),
        (["%3 : Tensor, %4 : Tensor = prim::ConstantChunk[chunks=2, dim=1](%2)"], "", True),
        (
            [
                "%l : Tensor[] = aten::split_with_sizes(%2, %sizes, %one)",
                "%3 : Tensor, %4 : Tensor = prim::ListUnpack(%l)",
            ],
            "",
            True,
        ),
        (
            [
                "%s : Tensor = aten::slice(%2, %two, %one, %none, %two)",
                "%4 : Tensor = aten::slice(%s, %one, %none, %two, %one)",
            ],
            "",
            True,
        ),
        (["%3 : Tensor, %4 : Tensor = prim::ConstantChunk[chunks=2, dim=1](%2)"], "cumsum", False),
    ],
)
def test_layout_propagation_through_parts(parts: list[str], other: str, free: bool) -> None:
    text = IMAGE_PARTS.replace("PARTS", "\n  ".join(parts))
    if not other:
        text = text.replace("  %6 : Tensor = aten::OTHER(%4, %one, %none)\n", "")
        text = text.replace("(%5, %6)", "(%5)").replace("gelu(%3", "gelu(%4")
    graph = parsed(text.replace("OTHER", other))
    for name in ("graph_fuser", "layout_propagation"):
        _C.run_pass(name, graph)
    groups = [n for n in walk(graph) if n.kind() == "llga::FusionGroup"]
    assert f"llga_any_layout=[{int(free)}]" in str(groups[0]), graph
    assert free == (f"llga_viewed_order=[{0o13210}]" in str(groups[-1])), graph


SUM_OF_PARTS = """
graph(%x : Float(1, 4, 8, 8, strides=[256, 64, 8, 1], requires_grad=0, device=cpu)):
  %none : NoneType = prim::Constant()
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %1 : Float(1, 4, 8, 8, strides=[256, 64, 8, 1]) = aten::relu(%x)
  %2 : Float(1, 4, 8, 8, strides=[256, 64, 8, 1]) = aten::mul(%1, %x)
  %3 : Tensor, %4 : Tensor = prim::ConstantChunk[chunks=2, dim=1](%2)
  %5 : Float(1, 2, 8, 8, strides=[128, 64, 8, 1]) = aten::add(%3, %4, %one)
  %6 : Tensor = READ
  %7 : Float(1, 2, 8, 8, strides=[128, 64, 8, 1]) = aten::relu(%6)
  %8 : Float(1, 2, 8, 8, strides=[128, 64, 8, 1]) = aten::mul(%7, %6)
  return (%8)
"""


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        ("aten::slice(%5, %one, %none, %two, %one)", True),
        ("aten::narrow(%5, %one, %one, %one)", True),
        ("aten::cumsum(%5, %one, %none)", False),
    ],
)
def test_graph_fuser_keeps_what_joins_parts(read: str, kept: bool) -> None:
    """A lone sum of parts of what one group gives, and of which another reads a part."""
    graph = parsed(SUM_OF_PARTS.replace("READ", read))
    _C.run_pass("graph_fuser", graph)
    assert ("aten::add" in kinds(graph)) == (not kept), graph
    assert kinds(graph).count("llga::FusionGroup") == (3 if kept else 1), graph


ATTENTION = """
graph(%x : {qkv}):
  %none : NoneType = prim::Constant()
  %p : float = prim::Constant[value={dropout}]()
  %no : bool = prim::Constant[value=0]()
  %yes : bool = prim::Constant[value=1]()
  %0 : int = prim::Constant[value=0]()
  %all : Tensor[] = aten::unbind(%x, %0)
  %q : Tensor, %k : Tensor, %v : Tensor = prim::ListUnpack(%all)
  %y : Tensor = aten::scaled_dot_product_attention(%q, %k, %v, %none, %p, {causal}, %none, %no)
  %z : Tensor = aten::abs(%y)
  return (%z)"""
QKV = "Float(3, 1, 2, 20, 16, strides=[640, 640, 320, 16, 1])"


@pytest.mark.skipif(not has_own_attention(torch.float32), reason="attention is PyTorch's")
@pytest.mark.parametrize(("causal", "finite"), [("%no", "[0, 0, 0]"), ("%yes", "[0, 1, 1]")])
def test_attention_is_a_group(causal: str, finite: str) -> None:
    """Keys and values are looked at where a causal mask hides some of them."""
    graph = parsed(ATTENTION.format(qkv=QKV, dropout="0.", causal=causal))
    for name in ("graph_fuser", "layout_propagation", "guard_values", "guard_shape"):
        _C.run_pass(name, graph)
    FileCheck().check(f"llga_must_be_finite={finite}").run(str(graph))
    assert kinds(graph).count("llga::FusionGroup") == 1
    assert "aten::scaled_dot_product_attention" not in kinds(graph)


@pytest.mark.skipif(not has_own_attention(torch.float32), reason="attention is PyTorch's")
@pytest.mark.parametrize(
    ("qkv", "dropout"),
    [
        (QKV, "0.1"),
        (QKV.replace("Float", "Half"), "0."),
        (QKV.replace("Float", "Double"), "0."),
    ],
    ids=["dropout", "half", "double"],
)
def test_attention_is_no_group(qkv: str, dropout: str) -> None:
    """The data type is that of the tensor that query, key and value are views of."""
    graph = parsed(ATTENTION.format(qkv=qkv, dropout=dropout, causal="%no"))
    _C.run_pass("graph_fuser", graph)
    assert "llga::FusionGroup" not in kinds(graph)


def test_attention_in_bf16_is_a_group_where_our_kernel_takes_it() -> None:
    qkv = QKV.replace("Float", "BFloat16")
    graph = parsed(ATTENTION.format(qkv=qkv, dropout="0.", causal="%no"))
    _C.run_pass("graph_fuser", graph)
    assert ("llga::FusionGroup" in kinds(graph)) == has_own_attention(torch.bfloat16)


WINDOWS = """
x = x.reshape(2, 8, 8, 32)
r = torch.roll(x, (-2, -2), (1, 2))
r = r.view(2, 2, 4, 2, 4, 32).permute(0, 1, 3, 2, 4, 5).reshape(8, 16, 32)
h = F.linear(r, w).reshape(8, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
q, k, v = h[0], h[1], h[2]
y = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(8, 16, 32)
y = F.linear(y, w[:32]).view(2, 2, 2, 4, 4, 32).permute(0, 1, 3, 2, 4, 5).reshape(2, 8, 8, 32)
y = torch.roll(y, (2, 2), (1, 2))
return y * 2
"""


def with_windows_sunk(code: str) -> torch.Graph:
    """The graph of some code of an image x and a weight w behind the pass. It computes the same."""
    known = {"torch": torch, "F": F, "w": torch.randn(96, 32) / 8, "__name__": "windows"}
    exec("def windows(x):\n" + textwrap.indent(code, "  "), known)
    x = torch.randn(2, 8, 8, 32)
    graph = torch.jit.trace(known["windows"], (x,), check_trace=False).graph
    torch._C._jit_pass_constant_propagation(graph)
    plain = graph.copy()
    _C.run_pass("sink_windows", graph)
    torch._C._jit_pass_lint(graph)
    want = torch._C._create_function_from_graph("plain", plain)(x.clone())
    got = torch._C._create_function_from_graph("f", graph)(x.clone())
    torch.testing.assert_close(got, want)
    return graph


@pytest.mark.skipif(not has_own_attention(torch.float32), reason="attention is PyTorch's")
@pytest.mark.parametrize(
    ("old", "new", "lifted", "sunk"),
    [
        ("", "", True, True),
        ("q, k, v = h[0], h[1], h[2]", "q, k, v = h[0] * 2, h[1], h[2]", True, True),
        ("x = x.reshape(2, 8, 8, 32)", "x = F.layer_norm(x, [32])", False, True),
        ("(-2, -2), (1, 2))", "(-2, -2), (1, 3))", False, True),
        ("(2, 2), (1, 2))", "(2, 2), (1, 3))", True, False),
        (
            ".permute(0, 1, 3, 2, 4, 5).reshape(8",
            ".permute(0, 1, 5, 2, 4, 3).reshape(8",
            False,
            True,
        ),
        ("return y * 2", "return y * r.sum()", False, True),
        ("return y * 2", "return y * x", True, True),
        ("return y * 2", "return y * h.sum()", False, True),
        ("y = torch.roll(y", "z = y\ny = torch.roll(y", True, True),
        ("return y * 2", "return y.add_(1)", True, False),
        ("return y * 2", "x.add_(1)\nreturn y", False, True),
        ("F.linear(r, w)", "F.linear(r, x[0, 0, 0, :1].expand(96, 32))", False, True),
        ("8, 16, 32)\ny = F.linear(y", "8, 16, 32)\ny = F.linear(y.tanh()", True, False),
    ],
    ids=[
        "windows",
        "scaled",
        "unknown rank",
        "rolled within rows",
        "rolled back within rows",
        "rows torn apart",
        "windows read",
        "image read",
        "heads read",
        "named",
        "result written to",
        "image written to",
        "weight of an input",
        "function between",
    ],
)
def test_sink_windows(old: str, new: str, lifted: bool, sunk: bool) -> None:
    """The linear layers around attention change places with what cuts out windows."""
    assert not old or old in WINDOWS
    graph = with_windows_sunk(WINDOWS.replace(old, new, 1))
    moves = ("aten::roll", "aten::linear", "aten::softmax")
    order = [kind.removeprefix("aten::") for kind in kinds(graph) if kind in moves]
    before = ["linear", "roll"] if lifted else ["roll", "linear"]
    behind = ["roll", "linear"] if sunk else ["linear", "roll"]
    assert order == [*before, "softmax", *behind]


PADDED = """
x = F.layer_norm(x, [32]).reshape(-1, 8, 8, 32)
x = F.pad(x, (0, 0, 0, 0, 0, 0))
""" + WINDOWS.split("\n", 2)[2]


@pytest.mark.skipif(not has_own_attention(torch.float32), reason="attention is PyTorch's")
@pytest.mark.parametrize(
    ("old", "new", "padded"),
    [
        ("", "", True),
        ("return y * 2", "return y * 2, x", False),
        ("return y * 2", "return y * x", False),
        ("return y * 2", "return y * x.add_(1)", False),
    ],
    ids=["windows", "returned", "read", "written to"],
)
def test_padding_of_nothing(old: str, new: str, padded: bool) -> None:
    graph = with_windows_sunk(PADDED.replace(old, new, 1))
    assert ("llga::padded" in kinds(graph)) == padded
    assert ("aten::pad" in kinds(graph)) != padded


# Name: what becomes of %a, the result of a group, and whether it dies with the call.
FATES = {
    "returned": ("return (%a)", False),
    "read": ("%b : Tensor = aten::abs(%a)\nreturn (%b)", True),
    "view": ("%b : Tensor = aten::transpose(%a, %0, %1)\nreturn (%b)", False),
    "view_read": (
        "%b : Tensor = aten::transpose(%a, %0, %1)\n%c : Tensor = aten::abs(%b)\nreturn (%c)",
        True,
    ),
    "list": ("%b : Tensor[] = prim::ListConstruct(%a)\nreturn (%b)", False),
    "list_read": (
        "%b : Tensor[] = prim::ListConstruct(%a)\n%c : Tensor = aten::cat(%b, %1)\nreturn (%c)",
        True,
    ),
    "parts": ("%b : Tensor[] = aten::unbind(%a, %1)\nreturn (%b)", False),
    "parts_read": (
        "%b : Tensor[] = aten::unbind(%a, %1)\n%c : Tensor = aten::cat(%b, %1)\nreturn (%c)",
        True,
    ),
    "appended": (
        """\
        %b : Tensor[] = prim::ListConstruct()
        %c : Tensor[] = aten::append(%b, %a)
        %d : Tensor = aten::abs(%a)
        return (%d)""",
        False,
    ),
    "size": ("%b : int = aten::dim(%a)\nreturn (%b)", True),
    "unknown": ("%b : Tensor = test::unknown(%a)\nreturn (%b)", False),
    "branch": (
        """\
        %b : Tensor = prim::If(%flag)
          block0():
            -> (%a)
          block1():
            -> (%x)
        %c : Tensor = aten::abs(%b)
        return (%c)""",
        False,
    ),
}


@pytest.mark.parametrize("fate", FATES)
def test_what_dies_with_the_call(fate: str) -> None:
    code, local = FATES[fate]
    graph = parsed(f"""
graph(%x : Tensor, %flag : bool):
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %a : Tensor = llga::FusionGroup(%x)
{textwrap.indent(textwrap.dedent(code), "  ")}""")
    _C.run_pass("layout_propagation", graph)
    FileCheck().check(f"llga_call_local=[{int(local)}]").run(str(graph))


# ---------------------------------------------------------------------------------------- unstack


STACKED = """
graph(%x : Tensor):
  %none : NoneType = prim::Constant()
  %no : bool = prim::Constant[value=0]()
  %0 : int = prim::Constant[value=0]()
  %1 : int = prim::Constant[value=1]()
  %2 : int = prim::Constant[value=2]()
  %4 : int = prim::Constant[value=4]()
  %f : int = prim::Constant[value=6]()
  %ones : int[] = prim::Constant[value=[1, 1]]()
  %zeros : int[] = prim::Constant[value=[0, 0]]()
  %dim : int[] = prim::Constant[value=[1]]()
  %w : Float(4, WEIGHT) = prim::Constant[value=<Tensor>]()
  %v : Float(8, WEIGHT) = prim::Constant[value=<Tensor>]()
  %a : Tensor = aten::convolution(%x, %w, %none, %ones, %zeros, %ones, %no, %zeros, %1)
  %c : Tensor = aten::convolution(%x, %w, %none, %ones, %zeros, %ones, %no, %zeros, %1)
  %b : Tensor = aten::relu(%c)
  %list : Tensor[] = prim::ListConstruct(%a, %b)
  %s : Tensor = aten::stack(%list, %1)
  %sum : Tensor = aten::sum(%s, %dim, %no, %none)
  %y : Tensor = aten::convolution(%sum, %v, %none, %ones, %zeros, %ones, %no, %zeros, %1)
  %n : int = aten::size(%y, %0)
  %h : int = aten::size(%y, %2)
  %sizes : int[] = prim::ListConstruct(%n, %2, %4, %h, %h)
  %z : Tensor = aten::view(%y, %sizes)
  %p : Tensor = aten::softmax(%z, %1, %none)
  %m : Tensor = aten::mul(%s, %p)
  %r : Tensor = aten::sum(%m, %dim, %no, %none)
  %q : Tensor = aten::relu(%r)
  return (%q)
""".replace("WEIGHT", "4, 1, 1, strides=[4, 1, 1, 1], requires_grad=0, device=cpu")


@pytest.mark.parametrize(
    ("old", "new", "taken"),
    [
        ("", "", True),
        ("aten::mul(%s, %p)", "aten::mul(%p, %s)", True),
        (
            "%r : Tensor = aten::sum(%m,",
            "%k : Tensor = aten::to(%m, %f, %no, %no, %none)\n  %r : Tensor = aten::sum(%k,",
            True,
        ),
        ("return (%q)", "return (%q, %s)", False),
        ("return (%q)", "return (%q, %m)", False),
        ("ListConstruct(%a, %b)", "ListConstruct(%a, %b, %a)", False),
        ("ListConstruct(%a, %b)", "ListConstruct(%a, %x)", False),
        ("aten::stack(%list, %1)", "aten::stack(%list, %2)", False),
        ("aten::mul(%s, %p)", "aten::mul(%s, %y)", False),
        ("aten::mul(%s, %p)", "aten::mul(%s, %s)", False),
        ("(%n, %2, %4, %h, %h)", "(%n, %n, %4, %h, %h)", False),
        ("aten::sum(%m, %dim, %no, %none)", "aten::sum(%m, %ones, %no, %none)", False),
        (
            "%q : Tensor = aten::relu(%r)",
            "%e : Tensor = aten::relu_(%a)\n  %q : Tensor = aten::relu(%r)",
            False,
        ),
    ],
    ids=[
        "as it is",
        "turned",
        "cast",
        "stack returned",
        "product returned",
        "three",
        "of the input",
        "another dimension",
        "other weights",
        "squared",
        "unknown weights",
        "another sum",
        "written to",
    ],
)
def test_unstack(old: str, new: str, taken: bool) -> None:
    assert old in STACKED
    found = kinds(after("unstack", STACKED.replace(old, new, 1) if old else STACKED))
    assert ("aten::stack" not in found) == taken
    if taken:
        assert Counter(found)["aten::add"] == 2
        assert Counter(found)["aten::select"] == Counter(found)["aten::mul"] == 2
