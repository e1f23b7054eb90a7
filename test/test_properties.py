"""Random programs from the op table, fused against eager, traced and scripted and ahead of time.

The default run is small and the same each time. To look for more:

    python -m pytest -m slow test/test_properties.py

A program that fails is printed; it belongs into REGRESSIONS, smaller if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import llga_fuser
from util import Tolerance, assert_same, net, restored, to_script, twin

pytestmark = pytest.mark.usefixtures("fuser")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with restored(torch.get_num_threads, torch.set_num_threads):
        torch.set_num_threads(1)
        yield


# What a step may do. {v} is an earlier value, {w} one that broadcasts with it, {i} the step's
# number; layers are made for the shape of {v}. All are continuous functions, as two roundings of
# one number may end up on both sides of a jump, and none of them makes numbers much larger.
ELEMENTWISE = (
    "torch.relu({v})",
    "F.relu6({v})",
    "F.hardtanh({v}, -0.7, 0.6)",
    "torch.clamp({v}, -1.5, 2.0)",
    "torch.clamp({v}, min=-0.5)",
    "F.leaky_relu({v}, 0.1)",
    "F.elu({v})",
    "F.gelu({v})",
    "F.gelu({v}, approximate='tanh')",
    "F.silu({v})",
    "F.mish({v})",
    "F.softplus({v})",
    "torch.sigmoid({v})",
    "F.hardsigmoid({v})",
    "F.hardswish({v})",
    "torch.tanh({v})",
    "torch.abs({v})",
    "torch.neg({v})",
    "torch.square(torch.tanh({v}))",
    "torch.sqrt({v}.abs() + 0.1)",
    "torch.reciprocal({v}.abs() + 0.5)",
    "torch.exp(torch.tanh({v}))",
    "{v} * 0.5 + 0.25",
    "2.0 - {v}",
    "{v} / 1.5",
    "torch.cumsum({v}, 0) * 0.3",  # not in the table
)
BINARY = (
    "{v} + {w}",
    "{v} - {w}",
    "torch.add({v}, {w}, alpha=0.5)",
    "torch.rsub({v}, {w})",
    "torch.tanh({v}) * {w}",
    "{v} / ({w}.abs() + 1.0)",
    "torch.maximum({v}, {w})",
    "torch.minimum({v}, {w})",
    "torch.addcmul({v}, torch.tanh({w}), {v}, value=0.5)",
)
IN_PLACE = (
    "{v}.relu_()",
    "{v}.add_(0.5)",
    "{v}.mul_(0.5)",
    "{v}.sigmoid_()",
    "F.hardswish({v}, inplace=True)",
    "{v}[..., :1].mul_(0.5)",
    "{v}[:, :1].add_(0.25)",
    "{v}.copy_({w})",
)
SHAPES = (
    "{v}.flatten(1)",
    "{v}.transpose(-1, -2)",
    "{v}.permute(0, 2, 3, 1)",
    "{v}.unsqueeze(1)",
    "{v}.reshape({v}.shape[0], -1)",
    "{v}.contiguous()",
    "{v}.chunk(2, 1)[0]",
    "{v}[:, 1:]",
    "{v}[:, :, ::2]",
    "{v}.mean(-1, True)",
    "{v}.mean([2, 3])",
    "{v}.amax(-1)",
    "{v}.sum(1, True) * 0.25",
    "torch.cat([{v}, {v}], 1)",
    "torch.cat([{v}, torch.relu({v}), {v}], -1)",
)
LAYERS: dict[str, Callable[[torch.Size], nn.Module]] = {
    "conv": lambda s: nn.Conv2d(s[1], 6, 3, padding=1),
    "strided": lambda s: nn.Conv2d(s[1], 8, 3, stride=2, padding=1, bias=False),
    "pointwise": lambda s: nn.Conv2d(s[1], s[1], 1),
    "depthwise": lambda s: nn.Conv2d(s[1], s[1], 3, padding=1, groups=s[1]),
    "transposed": lambda s: nn.ConvTranspose2d(s[1], 4, 2, stride=2),
    "batch norm": lambda s: nn.BatchNorm2d(s[1]),
    "linear": lambda s: nn.Linear(s[-1], 6),
    "layer norm": lambda s: nn.LayerNorm(s[-1]),
    "prelu": lambda s: nn.PReLU(s[1]),
    "max pool": lambda s: nn.MaxPool2d(2, padding=1),
    "max pool of the same size": lambda s: nn.MaxPool2d(3, 1, 1),
    "average pool": lambda s: nn.AvgPool2d(2),
    "average pool of the same size": lambda s: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "adaptive": lambda s: nn.AdaptiveAvgPool2d(2),
    "softmax": lambda s: nn.Softmax(-1),
    "softmax of channels": lambda s: nn.Softmax(1),
    "upsample": lambda s: nn.Upsample(scale_factor=2),
}
MATRIX = ("torch.matmul({v}, {v}.transpose(-1, -2)) * 0.2", "torch.matmul({v}, {w}) * 0.2")


@dataclass
class Program:
    """A straight-line program, run step by step while it is made: shapes are known from that."""

    names: list[str]
    values: dict[str, Tensor]
    lines: list[str] = field(default_factory=list)
    layers: dict[str, nn.Module] = field(default_factory=dict)

    def add(self, code: str, keep: bool) -> bool:
        """Appends a step if it can be computed."""
        try:
            result = self.run(code)
        except (RuntimeError, IndexError, ValueError):
            self.layers.pop(f"m{len(self.lines)}", None)
            return False
        if keep:
            large = not result.numel() or result.numel() > 20_000
            if not isinstance(result, Tensor) or large or float(result.abs().max()) > 50:
                return False
            name = f"v{len(self.lines)}"
            self.names.append(name)
            self.values[name] = result
            code = f"{name} = {code}"
        self.lines.append(code)
        return True

    def run(self, code: str) -> Any:
        scope = {"torch": torch, "F": F, "self": type("Layers", (), self.layers), **self.values}
        return eval(code, {}, scope)


INPUT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda t: torch.cat([t, t], 3)[..., : t.shape[3]],
    "expanded": lambda t: t[:1].expand(t.shape),
}
SIDES = (8, 5, 3, 2, 1)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[Tensor], torch.dtype]:
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    shape = tuple(draw(st.sampled_from(SIDES)) for _ in range(4))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(draw(st.integers(1, 3))):
        # Some dimensions of the others are 1: they broadcast.
        sides = [1 if inputs and draw(st.integers(0, 3)) == 0 else n for n in shape]
        x = torch.randn(sides, generator=generator).to(dtype)
        inputs.append(INPUT_LAYOUTS[draw(st.sampled_from(sorted(INPUT_LAYOUTS)))](x))
    names = [f"x{i}" for i in range(len(inputs))]
    program = Program(list(names), dict(zip(names, map(twin, inputs), strict=True)))
    torch.manual_seed(seed)
    with torch.no_grad():
        for _ in range(draw(st.integers(4, 12 if dtype == torch.float32 else 7))):
            kind = draw(
                st.sampled_from(["layer", "layer", "elementwise", "binary", "shape", "rest"])
            )
            # Mostly the newest: what nobody reads is no part of the program.
            v = program.names[-1 - draw(st.integers(0, min(2, len(program.names) - 1)))]
            w = draw(st.sampled_from(program.names))
            if kind == "layer":
                name = draw(st.sampled_from(sorted(LAYERS)))
                try:
                    layer = LAYERS[name](program.values[v].shape).eval().to(dtype)
                except (IndexError, ValueError):
                    continue
                program.layers[f"m{len(program.lines)}"] = layer
                program.add(f"self.m{len(program.lines)}({v})", keep=True)
                continue
            table = {"elementwise": ELEMENTWISE, "binary": BINARY, "shape": SHAPES}.get(kind)
            code = draw(st.sampled_from(table or IN_PLACE + MATRIX)).format(v=v, w=w)
            # What an in-place op writes to is a value of the program, with memory of its own.
            written = table is None and "matmul" not in code
            if written and (v in names or not program.values[v].is_contiguous()):
                continue
            program.add(code, keep=not written)
    results = draw(st.lists(st.sampled_from(program.names), min_size=1, max_size=2, unique=True))
    results = sorted({*results, program.names[-1]})
    program.lines.append(f"return {', '.join(results)},")
    return program, inputs, dtype


def draw_image(draw: st.DrawFn, sides: Sequence[int], generator: torch.Generator) -> Tensor:
    x = torch.randn(*sides, generator=generator)
    return INPUT_LAYOUTS[draw(st.sampled_from(sorted(INPUT_LAYOUTS)))](x)


@st.composite
def operands(draw: st.DrawFn) -> tuple[Program, list[Tensor], torch.dtype]:
    """An op, and others behind it whose operands broadcast and lie in memory in any order.

    oneDNN fuses them, and has kernels that take an operand for one that lies like the result.
    """
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    torch.manual_seed(generator.initial_seed())
    sides = [draw(st.sampled_from(n)) for n in ((1, 2, 3), (1, 2, 4, 8, 16, 17), SIDES, SIDES)]
    inputs = [draw_image(draw, sides, generator).to(dtype)]
    program = Program(["x0"], {"x0": twin(inputs[0])})
    with torch.no_grad():
        name = draw(st.sampled_from(["none", *sorted(LAYERS)]))
        if name != "none":
            program.layers["m0"] = LAYERS[name](inputs[0].shape).eval().to(dtype)
            program.add("self.m0(x0)", keep=True)
        for i in range(1, draw(st.integers(2, 4))):
            v, w = program.names[-1], f"x{i}"
            shape = program.values[v].shape
            sides = [1 if draw(st.integers(0, 2)) == 0 else n for n in shape]
            if draw(st.booleans()):
                sides = list(shape)
            inputs.append(draw_image(draw, sides, generator).to(dtype))
            program.values[w] = twin(inputs[-1])
            program.add(draw(st.sampled_from(BINARY)).format(v=v, w=w), keep=True)
            if draw(st.booleans()):
                code = draw(st.sampled_from(ELEMENTWISE[:5])).format(v=program.names[-1])
                program.add(code, keep=True)
    program.lines.append(f"return {program.names[-1]},")
    return program, inputs, dtype


# In bfloat16 each of the few steps rounds, in eager more often than fused.
TOLERANCES = {torch.float32: Tolerance(2e-4), torch.bfloat16: Tolerance(0.08)}


def compare(program: Program, inputs: list[Tensor], dtype: torch.dtype) -> None:
    arguments = ", ".join(f"x{i}" for i in range(len(inputs)))
    module = net("\n".join(program.lines), arguments, **program.layers).eval()
    print(f"{dtype}, {[(tuple(x.shape), x.stride()) for x in inputs]}, {program.layers}")
    print("\n".join(program.lines))
    fresh = lambda: [twin(x) for x in inputs]  # noqa: E731
    with torch.no_grad():
        values = fresh()
        expected = [twin(t) for t in module(*values)]
        for how, script in {
            "traced": to_script(module, inputs),
            "scripted": to_script(module, inputs, scripted=True),
            "unfrozen": to_script(module, inputs, freeze=False),
            "compiled": llga_fuser.compile(module, tuple(inputs), check=False),
        }.items():
            for call in range(3):
                mine = fresh()
                assert_same(script(*mine), expected, f"{how}, call {call}", TOLERANCES[dtype])
                assert_same(mine, values, f"{how}, inputs after call {call}", TOLERANCES[dtype])


COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


@settings(max_examples=40, derandomize=True, **COMMON)
@given(programs())
def compare_some(program: tuple[Program, list[Tensor], torch.dtype]) -> None:
    compare(*program)


@settings(max_examples=100, derandomize=True, **COMMON)
@given(operands())
def compare_some_operands(program: tuple[Program, list[Tensor], torch.dtype]) -> None:
    compare(*program)


@settings(max_examples=1500, **COMMON)
@given(programs() | operands())
def compare_many(program: tuple[Program, list[Tensor], torch.dtype]) -> None:
    compare(*program)


@pytest.mark.parametrize("some", [compare_some, compare_some_operands])
def test_random_graphs(some: Callable[[], None]) -> None:
    before = llga_fuser.cache_info().hits
    some()
    hits = llga_fuser.cache_info().hits - before
    # Which programs are drawn depends on hypothesis' version, what is fused on the processor.
    assert hits > 20, f"hardly anything was fused: {hits} calls of groups"


@pytest.mark.slow
def test_many_random_graphs() -> None:
    compare_many()
