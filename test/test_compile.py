"""`llga_fuser.compile`: what goes in, what comes out, and what the first call finds done."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llga_fuser
from util import (
    TOLERANCES,
    Fused,
    Tolerance,
    assert_same,
    autocast_bf16,
    expect,
    fused_graph,
    fuses,
    net,
    randomize,
    restored,
    twin,
    walk,
)

IMAGE = (2, 8, 7, 6)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with restored(torch.get_num_threads, torch.set_num_threads):
        torch.set_num_threads(1)
        yield


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Off, unless a test says otherwise: `compile` does not need the switch."""
    with llga_fuser.fusion(False):
        yield
    gc.collect()
    llga_fuser.clear_cache()


def conv_relu() -> nn.Module:
    return net("torch.relu(self.c(x))", c=nn.Conv2d(8, 8, 3, padding=1)).eval()


def fused(made: Any, *inputs: Any) -> Fused:
    with torch.no_grad():
        return fused_graph(made, *(twin(x) for x in inputs))


def counted(fn: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result of `fn`, and how much the cache's figures grew."""
    before, why = llga_fuser.cache_info(), Counter(llga_fuser._C.fallbacks())
    result = fn()
    after = llga_fuser.cache_info()
    grown = Counter({name: getattr(after, name) - getattr(before, name) for name in COUNTERS})
    grown["reasons"] = len(Counter(llga_fuser._C.fallbacks()) - why)
    return result, +grown


COUNTERS = ("hits", "misses", "fallbacks")


# ------------------------------------------------------------------------------- the first call


def test_first_call_compiles_nothing() -> None:
    m, x = conv_relu(), torch.randn(IMAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = llga_fuser.compile(m, x)
        with torch.no_grad():
            result, grown = counted(lambda: made(x))
    assert_same(result, m(x).detach())
    assert grown == {"hits": 1}
    expect(fused(made, x), groups=1, fused="conv relu")


def test_every_example_is_prepared() -> None:
    m = conv_relu()
    examples = [torch.randn(shape) for shape in (IMAGE, (1, 8, 9, 9), (3, 8, 5, 12))]
    made = llga_fuser.compile(m, examples)
    with torch.no_grad():
        for x in examples:
            result, grown = counted(lambda x=x: made(x))
            assert_same(result, m(x))
            assert grown == {"hits": 1}
        x = torch.randn(4, 8, 3, 3)
        result, grown = counted(lambda: made(x))
        assert_same(result, m(x))
        assert grown == {"misses": 1}, "another shape compiles once"
        assert counted(lambda: made(x))[1] == {"hits": 1}


SWITCHES: dict[str, Callable[[bool], Any]] = {
    "_jit_set_profiling_executor": torch._C._jit_set_profiling_executor,
    "_jit_set_profiling_mode": torch._C._jit_set_profiling_mode,
}


@pytest.mark.parametrize("executor", [True, False])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_any_executor(executor: bool, mode: bool, optimized: bool, enabled: bool) -> None:
    """Neither when it is compiled nor when it is called."""
    m, x = conv_relu(), torch.randn(IMAGE)
    made = [llga_fuser.compile(m, x)]
    before = [switch(on) for switch, on in zip(SWITCHES.values(), (executor, mode), strict=True)]
    try:
        with (
            torch.no_grad(),
            torch.jit.optimized_execution(optimized),
            llga_fuser.fusion(enabled),
        ):
            made.append(llga_fuser.compile(m, x))
            made.append(llga_fuser.compile(torch.jit.script(m), x))
            for model in made:
                result, grown = counted(lambda model=model: [model(x) for _ in range(3)])
                assert_same(result, [m(x)] * 3)
                assert grown == {"hits": 3}
    finally:
        for switch, on in zip(SWITCHES.values(), before, strict=True):
            switch(on)


# --------------------------------------------------------------------------------- what goes in


def linear_relu(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)) + 1


def test_function() -> None:
    x, w = torch.randn(5, 16), torch.randn(8, 16)
    made = llga_fuser.compile(linear_relu, (x, w))
    assert isinstance(made, torch.jit.ScriptFunction)
    result, grown = counted(lambda: made(x, w))
    assert_same(result, linear_relu(x, w))
    assert grown == {"hits": 1}
    expect(fused(made, x, w), groups=1, fused="linear relu add")


def test_function_with_constants_and_lambda() -> None:
    w = torch.randn(8, 16)
    x = torch.randn(5, 16)
    made = llga_fuser.compile(lambda x: linear_relu(x, w), x)
    assert_same(made(x), linear_relu(x, w))
    assert_same(made(x[:3]), linear_relu(x[:3], w))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("not asked for")

    def encode(self, x: Tensor, gain: Tensor) -> Tensor:
        return torch.relu(self.c(x)) * gain


@pytest.mark.parametrize("keywords", [False, True])
def test_method(keywords: bool) -> None:
    """Of a module: its weights are constants, as in a forward."""
    m, x, gain = Encoder().eval(), torch.randn(IMAGE), torch.randn(1, 8, 1, 1)
    made = llga_fuser.compile(m.encode, {"x": x, "gain": gain} if keywords else (x, gain))
    with torch.no_grad():
        assert_same(made(x, gain), m.encode(x, gain))
        assert_same(made(x=x, gain=gain), m.encode(x, gain))
    expect(fused(made, x, gain), groups=1, fused="conv relu mul")
    assert "GetAttr" not in str(made.graph)


class Callme:
    def __call__(self, x: Tensor) -> Tensor:
        return linear_relu(x, torch.ones(4, 16))


def test_callable_object() -> None:
    x = torch.randn(5, 16)
    assert_same(llga_fuser.compile(Callme(), x)(x), Callme()(x))


class Branches(nn.Module):
    """Nested blocks, a `with` statement, a default argument."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3, padding=1)
        self.d = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor, n: int = 1, y: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        z = torch.relu(self.c(x))
        if n > 2:
            z = torch.relu(self.d(z)) + x
        elif y is not None:
            z = self.d(z) * y
        for _ in range(n):
            with torch.no_grad():
                z = torch.sigmoid(self.c(z) + x)
        return z


def test_script_keeps_its_control_flow() -> None:
    m, x = Branches().eval(), torch.randn(IMAGE)
    made = llga_fuser.compile(
        torch.jit.script(m), [(x,), (x, 3), {"x": x, "y": x}, {"n": 0, "x": x, "y": x}]
    )
    found = fused(made, x, 3)
    assert found.inside["aten::conv2d"] >= 4, found
    with torch.no_grad():
        for args, kwargs in (((x,), {}), ((x, 3), {}), ((x,), {"y": x}), ((x, 5), {"y": x})):
            result, grown = counted(lambda args=args, kwargs=kwargs: made(*args, **kwargs))
            assert_same(result, m(*args, **kwargs))
            assert set(grown) == {"hits"}, grown


def test_script_function_and_frozen_module() -> None:
    x, w = torch.randn(5, 16), torch.randn(8, 16)
    made = llga_fuser.compile(torch.jit.script(linear_relu), (x, w))
    assert_same(made(x, w), linear_relu(x, w))
    m, image = conv_relu(), torch.randn(IMAGE)
    frozen = torch.jit.freeze(torch.jit.script(m))
    made = llga_fuser.compile(frozen, image)
    for model in (made, frozen):  # the one that was given stays as it was
        assert_same(model(image), m(image).detach())
    expect(fused(made, image), groups=1, fused="conv relu")
    assert not fused(frozen, image).groups


class Counts(nn.Module):
    """Writes to itself: freezing keeps such attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.relu(self.c(x)) * self.calls


@pytest.mark.parametrize("scripted", [False, True])
def test_module_with_state(scripted: bool) -> None:
    m, x = Counts().eval(), torch.randn(IMAGE)
    plain = torch.relu(m.c(x)).detach()
    made = llga_fuser.compile(torch.jit.script(m) if scripted else m, x, check=False)
    with torch.no_grad():
        first = made(x)
        calls = float(made.calls)
        assert_same(first, plain * calls)
        assert_same(made(x), plain * (calls + 1))
        twin_of = copy.deepcopy(made)
        assert_same(twin_of(x), plain * (calls + 2))
        assert_same(made(x), plain * (calls + 2), "a copy has a state of its own")


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


STRUCTURES: dict[str, tuple[Callable[..., Any], Any]] = {
    "tuple": (lambda x: (x * 2 + 1, x), torch.randn(3, 4)),
    "nested": (lambda x: (x * 2 + 1, (x, [x, x + 1])), torch.randn(3, 4)),
    "list": (lambda x: [x * 2 + 1, x], torch.randn(3, 4)),
    "dict": (lambda x: {"a": x * 2 + 1, "b": x}, torch.randn(3, 4)),
    "input tuple": (lambda p: p[0] * 2 + p[1], ((torch.randn(3, 4), torch.randn(4)),)),
    "input list": (lambda p: p[0] * 2 + p[1], ([torch.randn(3, 4), torch.randn(4)],)),
    "input dict": (lambda p: p["a"] * 2 + p["b"], ({"a": torch.randn(3, 4), "b": torch.ones(4)},)),
    "named tuple": (lambda x: Pair(x * 2 + 1, x), torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    fn, example = STRUCTURES[name]
    args = example if isinstance(example, tuple) else (example,)
    made = llga_fuser.compile(fn, example)
    assert_same(made(*args), fn(*args))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, image: Tensor, other: Tensor | None = None) -> dict[str, Tensor]:
        y = torch.relu(self.c(image))
        return {"y": y} if other is None else {"y": y, "sum": y + other}


def test_keyword_arguments() -> None:
    m = Keywords().eval()
    examples = [{"image": torch.randn(s), "other": torch.randn(s)} for s in (IMAGE, (1, 8, 4, 4))]
    made = llga_fuser.compile(m, examples)
    with torch.no_grad():
        for example in examples:
            result, grown = counted(lambda example=example: made(**example))
            assert_same(result, m(**example))
            assert set(grown) == {"hits"}


def test_module_without_inputs() -> None:
    m = net("torch.relu(self.c(self.x))", "", c=nn.Conv2d(8, 8, 3), x=torch.randn(IMAGE)).eval()
    assert_same(llga_fuser.compile(m, ())(), m().detach())


def test_inputs_are_not_written_to() -> None:
    """The module writes to them, for each of the runs of compile: on copies."""
    x = torch.randn(IMAGE)
    before = x.clone()
    made = llga_fuser.compile(lambda x: F.relu(x.add_(1)) * 2 + x, x)
    assert torch.equal(x, before)
    y = x.clone()
    result = made(y)
    assert torch.equal(y, before + 1)
    assert_same(result, F.relu(before + 1) * 2 + before + 1)


STRIDES: dict[str, Callable[[], Tensor]] = {
    "channels_last": lambda: torch.randn(IMAGE).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 8, 7, 1).expand(IMAGE),
    "overlapping": lambda: torch.randn(1000).as_strided(IMAGE, (50, 20, 6, 1)),
    "sliced": lambda: torch.randn(4, 16, 7, 12)[1:3, ::2, :, 3:9],
    "zero-size": lambda: torch.randn(0, 8, 7, 6),
    "double": lambda: torch.randn(IMAGE, dtype=torch.double),
    "inference": lambda: torch.inference_mode()(torch.randn)(IMAGE),
    "gradient": lambda: torch.randn(IMAGE, requires_grad=True),
}


@pytest.mark.parametrize("kind", STRIDES)
def test_examples_of_any_kind(kind: str) -> None:
    x = STRIDES[kind]()
    m = conv_relu().to(x.dtype)
    made = llga_fuser.compile(m, x)
    with torch.no_grad():
        for value in (x, torch.randn(1, 8, 9, 9, dtype=x.dtype)):
            assert_same(made(value), m(value))


# ------------------------------------------------------------------------------------------ bf16


def two_convs() -> nn.Module:
    return net(
        "torch.relu(self.d(torch.relu(self.c(x))) + x)",
        c=nn.Conv2d(8, 8, 3, padding=1),
        d=nn.Conv2d(8, 8, 1),
    ).eval()


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_bf16(scripted: bool) -> None:
    """As under autocast: same data types, and numbers as near as bfloat16 allows."""
    m, x = two_convs(), torch.randn(IMAGE)
    made = llga_fuser.compile(torch.jit.script(m) if scripted else m, x, dtype=torch.bfloat16)
    kinds = Counter(n.kind() for n in walk(made.graph))
    assert kinds["aten::to"] + kinds["aten::_autocast_to_reduced_precision"] > 0, made.graph
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = m(x)
        for _ in range(3):
            assert_same(made(x), expected, tol=TOLERANCES[torch.bfloat16])


def test_bf16_of_a_script_with_attention() -> None:
    """Whose query, as of a rotary embedding, is float32, and key and value are not."""
    module = net(
        "k = self.k(x).view(2, 9, 4, 8).transpose(1, 2)\n"
        "q = (x * torch.cos(x)).view(2, 9, 4, 8).transpose(1, 2)\n"
        "mask = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1) > 0, -1e9)\n"
        "return F.scaled_dot_product_attention(q, k, k), "
        "F.scaled_dot_product_attention(q, k, k, attn_mask=mask)",
        k=nn.Linear(32, 32),
    ).eval()
    x = torch.randn(2, 9, 32)
    made = llga_fuser.compile(torch.jit.trace(module, x), x, dtype=torch.bfloat16)
    with torch.no_grad(), autocast_bf16():
        expected = module(x)
    for _ in range(3):
        assert_same(made(x), expected)


def test_bf16_module() -> None:
    m, x = two_convs().bfloat16(), torch.randn(IMAGE, dtype=torch.bfloat16)
    made = llga_fuser.compile(m, x)
    with torch.no_grad():
        assert_same(made(x), m(x))


# ------------------------------------------------------------------------------------- dynamics

DYNAMIC: dict[str, str] = {
    "adaptive": "F.adaptive_avg_pool2d(torch.relu(self.c(x)), (2, 3))",
    "adaptive to one": "F.adaptive_avg_pool2d(torch.relu(self.c(x)), 1).flatten(1)",
    "reshape": "torch.relu(self.c(x)).reshape(x.shape[0], -1, x.shape[3] * 2) * 2",
    "flatten": "F.relu(self.l(torch.relu(self.c(x)).flatten(2)[:, :, :24]))",
    "interpolate": "F.interpolate(self.c(x), scale_factor=2.0) + 1",
    "interpolate to": "F.interpolate(self.c(x), size=(x.shape[2] * 2, x.shape[3] * 3))",
    "broadcast": "self.c(x) * x.mean([2, 3], True) + x[:1, :1]",
    "expand": "self.c(x) + x.mean(1, True).expand(-1, x.shape[1], -1, -1)",
    "attention": "torch.softmax(torch.matmul(x, x.transpose(-1, -2)), -1) @ self.c(x)",
    "cat": "self.d(torch.cat([self.c(x), x.repeat(1, 2, 1, 1)], 1))",
}


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_types_of_the_example_bind_nobody(name: str, scripted: bool) -> None:
    """Attributes that depend on sizes are right, and fused, at other sizes."""
    m = net(
        DYNAMIC[name],
        c=nn.Conv2d(8, 8, 3, padding=1),
        d=nn.Conv2d(24, 8, 1),
        l=nn.Linear(24, 12),
    ).eval()
    examples = [torch.randn(2, 8, 8, 6), torch.randn(1, 8, 4, 12)]
    made = llga_fuser.compile(torch.jit.script(m) if scripted else m, examples)
    shapes = [(2, 8, 8, 6), (1, 8, 4, 12), (3, 8, 6, 9), (1, 8, 10, 12), (5, 8, 7, 5), (2, 8, 8, 6)]
    with torch.no_grad():
        for shape in shapes:
            x = torch.randn(shape)
            assert_same(made(x), m(x), str(shape))
    assert fused(made, examples[0]).groups


# --------------------------------------------------------------------------- an ordinary object


def test_save_and_load() -> None:
    """What is saved is the module without groups: it loads where this package is not."""
    m, x = conv_relu(), torch.randn(IMAGE)
    made = llga_fuser.compile(m, x)
    assert "FusionGroup" not in str(made.graph)
    file = io.BytesIO()
    torch.jit.save(made, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert "FusionGroup" not in str(loaded.graph)
    with torch.no_grad():
        assert_same(loaded(x), m(x))
        assert_same(made(x), m(x))


def test_copies_share_what_was_compiled() -> None:
    m, x = conv_relu(), torch.randn(IMAGE)
    made = llga_fuser.compile(m, x)
    copies = [copy.copy(made), copy.deepcopy(made)]
    del made
    for other in copies:
        result, grown = counted(lambda other=other: other(x))
        assert_same(result, m(x).detach())
        assert grown == {"hits": 1}


def test_pickling_error_is_torchs_own() -> None:
    m, x = conv_relu(), torch.randn(IMAGE)
    errors = []
    for script in (torch.jit.freeze(torch.jit.trace(m, x)), llga_fuser.compile(m, x)):
        with pytest.raises(RuntimeError, match="__getstate__") as error:
            pickle.dumps(script)
        errors.append(re.sub(r"_torch_mangle_\d+", "", str(error.value)))
    assert errors[0] == errors[1]


def test_called_from_another_script() -> None:
    m, x = conv_relu(), torch.randn(IMAGE)
    outer = net("self.inner(x) + x")
    outer.inner = llga_fuser.compile(m, x)
    with torch.no_grad():
        for script in (torch.jit.script(outer), torch.jit.trace(outer, x)):
            assert_same([script(x) for _ in range(3)], [m(x) + x] * 3)
            frozen = torch.jit.freeze(script.eval())
            assert "FusionGroup" not in str(frozen.graph)
            assert_same(frozen(x), m(x) + x)
            file = io.BytesIO()
            torch.jit.save(script, file)
            file.seek(0)
            assert_same(torch.jit.load(file)(x), m(x) + x)


def test_gradients_are_eagers() -> None:
    m, x = two_convs(), torch.randn(IMAGE)
    made = llga_fuser.compile(m, x)
    grads = []
    for fn in (m, made):
        leaf = x.clone().requires_grad_()
        fn(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        ("bij,bjk->bik", [(2, 4, 8), (2, 8, 6)]),
        ("...ij, ...kj", [(2, 4, 8), (2, 6, 8)]),
        ("ij,jk,kl->il", [(4, 8), (8, 6), (6, 5)]),
        ("bi,bj->bij", [(2, 4), (2, 6)]),  # no sum: nothing is cast
        ("bij->bji", [(2, 4, 6)]),
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_einsum_as_under_autocast(equation: str, sizes: list[tuple[int, ...]], mixed: bool) -> None:
    """Its casts are inside of it, where a trace does not see them."""
    names = "xyz"[: len(sizes)]
    first = "self.a(x)" if mixed else "x"
    code = f"torch.einsum({equation!r}, {', '.join([first, *names[1:]])})"
    m = net(code, ", ".join(names), a=nn.Linear(sizes[0][-1], sizes[0][-1])).eval()
    inputs = tuple(torch.randn(size) for size in sizes)
    made = llga_fuser.compile(m, inputs, dtype=torch.bfloat16)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = m(*inputs)
        for _ in range(3):
            assert_same(made(*inputs), expected, tol=TOLERANCES[torch.bfloat16])


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)


HIDDEN = {
    "lstm": ("self.m(x)[0]", nn.LSTM(16, 24, batch_first=True)),
    "lstm, states": ("y, (h, c) = self.m(x)\nreturn y, h, c", nn.LSTM(16, 24, 2)),
    "lstm, both ways": ("self.m(x)[0]", nn.LSTM(16, 24, bidirectional=True)),
    "lstm, no bias": ("self.m(x)[0]", nn.LSTM(16, 24, bias=False)),
    "lstm, given states": (
        "h = x[:1, :, :8] + 1\nreturn self.m(x, (h, h * 2))[0]",
        nn.LSTM(16, 8),
    ),
    "gru": ("self.m(x)[0]", nn.GRU(16, 24)),
    "encoder": ("self.m(x)", nn.TransformerEncoder(encoder_layer(), 2)),
    "encoder, norm first": ("self.m(x)", encoder_layer(norm_first=True)),
    "encoder, gelu": ("self.m(x)", encoder_layer(activation="gelu")),
    "encoder, mask": (
        "self.m(x, src_key_padding_mask=x[..., 0] > 2)",
        nn.TransformerEncoder(encoder_layer(), 2),
    ),
    "attention": ("self.m(x, x, x)[0]", nn.MultiheadAttention(16, 2, batch_first=True)),
    "attention, weights": ("self.m(x, x, x)", nn.MultiheadAttention(16, 2, batch_first=True)),
    "attention of a linear layer": (
        "y = self.l(x)\nreturn self.m(y, y, y)[0]",
        nn.MultiheadAttention(16, 2, batch_first=True),
    ),
}


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "script"])
@pytest.mark.parametrize("case", HIDDEN)
def test_layers_as_under_autocast(case: str, scripted: bool) -> None:
    """Eager casts inside of operators for whole layers, where a trace does not see it."""
    code, layer = HIDDEN[case]
    m = net(code, m=layer, l=nn.Linear(16, 16)).eval()
    x = torch.randn(3, 5, 16)
    with torch.no_grad():  # the layers' kernels for inference
        target = torch.jit.trace(m, x) if scripted else m
    made = llga_fuser.compile(target, x, dtype=torch.bfloat16)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = m(x)
        for _ in range(3):
            assert_same(made(x), expected, tol=TOLERANCES[torch.bfloat16])


def test_inside_autocast() -> None:
    """TorchScript takes another executor there; the numbers are those of a plain frozen module."""
    m, x = two_convs(), torch.randn(IMAGE)
    made = llga_fuser.compile(m, x)
    plain = torch.jit.freeze(torch.jit.trace(m, x))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(made(x), plain(x), tol=TOLERANCES[torch.bfloat16])
        result, grown = counted(lambda: made(x))
        assert_same(result, m(x))
        assert set(grown) == {"hits"}


def test_compile_inside_autocast_and_inference_mode() -> None:
    """The state of the caller does not get into the module."""
    m, x = two_convs(), torch.randn(IMAGE)
    with torch.autocast("cpu", torch.bfloat16):
        made = llga_fuser.compile(m, x)
    assert made(x).dtype == torch.float32
    with torch.inference_mode():
        other = llga_fuser.compile(m, x)
        inside = other(x)
    with torch.no_grad():
        assert_same([made(x), other(x), inside], [m(x)] * 3)


def test_odd_inputs_afterwards() -> None:
    """What a group can't take runs in the interpreter, as in the plain module."""
    m, x = conv_relu(), torch.randn(IMAGE)
    made = llga_fuser.compile(m, x)
    with torch.no_grad():
        for make in STRIDES.values():
            y = make()
            if y.dtype == torch.float32:
                assert_same(made(y), m(y))
        with pytest.raises(RuntimeError, match=r"double|Double|type"):
            made(x.double())
        with pytest.raises(RuntimeError, match="channels"):
            made(x[:, :4])
        for odd in (float("nan"), float("inf"), -float("inf")):
            y = x.clone()
            y[1, 2, 3, 4] = odd
            assert_same(made(y), m(y))


# ---------------------------------------------------------------------------------- life and death


def test_packed_bytes_of_bfloat16() -> None:
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m, x = nn.Linear(256, 512).eval().bfloat16(), torch.randn(40, 256).bfloat16()
    before = llga_fuser.cache_info().packed_bytes
    made = llga_fuser.compile(m, x)
    grown = llga_fuser.cache_info().packed_bytes - before
    assert grown == 2 * 256 * 512
    with torch.no_grad():
        assert_same(made(x), m(x))


def test_everything_goes_with_the_module() -> None:
    m, x = net("self.c(x)", c=nn.Conv2d(64, 64, 3)).eval(), torch.randn(1, 64, 9, 9)
    entries = llga_fuser.cache_info().entries
    made = [llga_fuser.compile(m, x) for _ in range(2)]
    made.append(copy.deepcopy(made[0]))
    assert llga_fuser.cache_info().packed_bytes >= 64 * 64 * 9 * 4
    assert llga_fuser.cache_info().entries == entries + 2
    del made
    gc.collect()
    assert llga_fuser.cache_info().packed_bytes == 0
    assert llga_fuser.cache_info().entries == entries


GROWTH = """
import gc, torch, llga_fuser
from torch import nn

def resident():
    with open("/proc/self/statm") as f:
        pages = [int(n) for n in f.read().split()]
    return (pages[1] - pages[2]) * 4096  # pages of files come and go

torch.set_num_threads(1)
x = torch.randn(1, 256, 4, 4)
for i in range(16):
    m = nn.Sequential(nn.Conv2d(256, 512, 3, padding=1), nn.BatchNorm2d(512)).eval()
    script = llga_fuser.compile(SCRIPT(m), x)
    script(x)
    del m, script
    gc.collect()
    if i == 5:
        start = resident()
print(resident() - start)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("script", ["", "torch.jit.script"])
def test_deleted_models_leave_nothing_behind(script: str) -> None:
    """Not even the constants, which TorchScript keeps for ever when a module is frozen."""
    command = [sys.executable, "-W", "ignore", "-c", GROWTH.replace("SCRIPT", script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    one_model = 512 * 256 * 9 * 4
    assert int(done.stdout) < 3 * one_model


RELEASED = net(
    "F.gelu(self.l(torch.relu(self.n(self.c(x))).transpose(1, 3))) + self.b",
    c=nn.Conv2d(64, 64, 3, padding=1),
    n=nn.BatchNorm2d(64),
    l=nn.Linear(64, 96),
    b=torch.randn(2048).view(8, 256)[:, :96].mean(0),
).eval()
RELEASED_IMAGE = (1, 64, 9, 9)


def test_released_weights() -> None:
    """New shapes, the fallback, autocast, other scripts, copies: all get them back."""
    m, x = RELEASED, torch.randn(RELEASED_IMAGE)
    made = llga_fuser.compile(m, x, release_weights=True)
    assert "llga::weight" in str(made.graph), "it can be printed"
    outer = net("self.inner(x) * 2")
    outer.inner = made
    script = torch.jit.script(outer)
    nan = x.clone()
    nan[0, 1, 2, 3] = float("nan")
    with torch.no_grad():
        assert counted(lambda: made(x))[1].keys() == {"hits"}
        for shape in (RELEASED_IMAGE, (2, 64, 5, 4), (1, 64, 30, 1)):
            y = torch.randn(shape)
            assert_same(made(y), m(y), str(shape))
        for y in (nan, x[:, :, ::2], x[:0]):
            assert_same(made(y), m(y))
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(made(x), m(x), tol=Tolerance(0.05))
        assert_same([script(x) for _ in range(3)], [m(x) * 2] * 3)
        llga_fuser.clear_cache()
        assert_same(copy.deepcopy(made)(x), m(x), "packed again")
    grads = []
    for fn in (m, made):
        leaf = x.clone().requires_grad_()
        fn(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert_same(grads[1], grads[0])  # the norm is folded, so not to the last bit
    assert_same(made(x), m(x).detach())


def test_released_weights_cannot_be_saved() -> None:
    made = llga_fuser.compile(RELEASED, torch.randn(RELEASED_IMAGE), release_weights=True)
    with pytest.raises(RuntimeError, match="release_weights=True can't be saved"):
        torch.jit.save(made, io.BytesIO())
    with pytest.raises(RuntimeError, match="release_weights=True can't be saved"):
        torch.jit.save(copy.deepcopy(made), io.BytesIO())
    outer = net("self.inner(x) * 2")
    outer.inner = made
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(outer), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match="release_weights=True"):
        torch.jit.load(file)(torch.randn(RELEASED_IMAGE))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_released_weights_of_functions_and_types(dtype: torch.dtype | None) -> None:
    x, w = torch.randn(5, 64), torch.randn(96, 64)
    made = llga_fuser.compile(lambda x: linear_relu(x, w), x, dtype=dtype, release_weights=True)
    for y in (x, x[:2], x * float("inf")):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            expected = linear_relu(y, w)
        assert_same(made(y), expected, tol=TOLERANCES[torch.bfloat16] if dtype else None)


def test_released_weights_of_a_restored_linear() -> None:
    """As transformers' Conv1D has it; the groups take the transpose of the weight."""
    m = net(
        "x = x.reshape(x.size(0), x.size(1), 64)\n"
        "y = torch.addmm(self.b, x.view(-1, x.size(-1)), self.w)\n"
        "return torch.relu(y.view(x.size(0), x.size(1), 96))",
        w=torch.randn(64, 96),
        b=torch.randn(96),
    ).eval()
    x = torch.randn(2, 9, 64)
    made = llga_fuser.compile(m, x, release_weights=True)
    assert "llga::weight" in str(made.graph)
    with torch.no_grad():
        assert counted(lambda: made(x))[1].keys() == {"hits"}
        for y in (x, x[:1], x * float("inf"), torch.randn(1, 30, 64)):
            assert_same(made(y), m(y))
    leaf = x.clone().requires_grad_()
    made(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == x.shape


def test_released_weights_and_threads() -> None:
    """Some threads compile new shapes, others fall back: the plain copies come and go."""
    m, x = RELEASED, torch.randn(RELEASED_IMAGE)
    made = llga_fuser.compile(m, x, release_weights=True)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with torch.no_grad():
                for call in range(6):
                    y = torch.randn(1 + index % 2, 64, 3 + call, 3 + index)
                    if (call + index) % 3 == 0:
                        y[0, 0, 0, 0] = float("inf")
                    assert_same(made(y), m(y))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


RELEASE = """
import gc, sys, torch, llga_fuser
from torch import nn

def resident():
    with open("/proc/self/statm") as f:
        pages = [int(n) for n in f.read().split()]
    return (pages[1] - pages[2]) * 4096  # pages of files come and go

torch.set_num_threads(1)
x = torch.randn(1, 512, 3, 3)
made = []
for i in range(8):
    m = nn.Conv2d(512, 512, 3, padding=1).eval()
    made.append(llga_fuser.compile(m, x, release_weights=sys.argv[1] == "True"))
    del m
    gc.collect()
    if i == 1:
        start = resident()
for m in made:
    m(x)
print(resident() - start, llga_fuser.cache_info().packed_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_released_weights_are_gone() -> None:
    """One copy of each weight stays, the packed one."""
    grown, packed = {}, {}
    for release in (False, True):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RELEASE, str(release)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            # What is freed goes back to the system, or the numbers would be those of the allocator.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        )
        grown[release], packed[release] = map(int, done.stdout.split())
    weight = 512 * 512 * 9 * 4
    if not packed[True]:
        pytest.skip("oneDNN packs no such weights on this processor")
    assert packed[True] == packed[False] >= 8 * weight
    assert grown[True] < grown[False] - 5 * weight


def test_threads_compile_and_call() -> None:
    """Ten modules in ten threads; then all threads call all modules."""
    x = torch.randn(IMAGE)
    modules = [two_convs() for _ in range(10)]
    made: list[Any] = [None] * len(modules)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with torch.no_grad():
                made[index] = llga_fuser.compile(modules[index], [x, x[:1]])
                assert_same(made[index](x), modules[index](x))
                for other, module in zip(made, modules, strict=True):
                    if other is not None:
                        assert_same(other(x[:1]), module(x[:1]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ------------------------------------------------------------------------------------------ errors


def bakes_a_shape_in(x: Tensor) -> Tensor:
    return torch.relu(x * 2)[: int(x.shape[0]) - 1 if x.shape[0] < 4 else 1]


ERRORS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "module": ((3, torch.ones(1)), {}, TypeError, "module_or_fn: .*got int"),
    "class": ((nn.ReLU, torch.ones(1)), {}, TypeError, "module_or_fn: .*class ReLU"),
    "training": (
        (nn.Linear(2, 2), torch.ones(1, 2)),
        {},
        ValueError,
        r"module_or_fn: Linear is in training mode.*eval",
    ),
    "no example": ((torch.relu, []), {}, ValueError, "example_inputs: .*at least one"),
    "example": ((torch.relu, 3), {}, TypeError, "example_inputs: expected a tensor.*got int"),
    "second example": (
        (linear_relu, [(torch.ones(1, 1),) * 2, "x"]),
        {},
        TypeError,
        r"example_inputs\[1\]: .*got str",
    ),
    "keys": ((linear_relu, {1: 2}), {}, TypeError, "example_inputs: .*names.*got int"),
    "dtype": ((torch.relu, torch.ones(1)), {"dtype": "bf16"}, TypeError, "dtype: .*got str"),
    "other dtype": (
        (torch.relu, torch.ones(1)),
        {"dtype": torch.float16},
        ValueError,
        "dtype: .*got torch.float16",
    ),
    "check": ((torch.relu, torch.ones(1)), {"check": 1}, TypeError, "check: .*got int"),
    "release": (
        (torch.relu, torch.ones(1)),
        {"release_weights": None},
        TypeError,
        "release_weights: .*got NoneType",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    args, kwargs, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        llga_fuser.compile(*args, **kwargs)


def test_a_shape_in_the_trace_is_found() -> None:
    examples = [torch.randn(3, 4), torch.randn(2, 4)]
    with pytest.warns(torch.jit.TracerWarning), pytest.raises(RuntimeError, match=r"\[1\].*shape"):
        llga_fuser.compile(bakes_a_shape_in, examples)
    with pytest.warns(torch.jit.TracerWarning):
        made = llga_fuser.compile(bakes_a_shape_in, examples, check=False)
    assert_same(made(examples[0]), bakes_a_shape_in(examples[0]))


def test_a_value_in_the_trace_is_found() -> None:
    def by_value(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 if float(x.sum()) > 0 else x * 3 + 1

    with pytest.warns(torch.jit.TracerWarning), pytest.raises(RuntimeError, match="relative error"):
        llga_fuser.compile(by_value, [torch.ones(3, 4), -torch.ones(3, 4)])


def test_what_the_module_raises_comes_through() -> None:
    m = conv_relu()
    with pytest.raises(RuntimeError, match="channels"):
        llga_fuser.compile(m, torch.randn(2, 4, 7, 6))
    with pytest.raises(RuntimeError, match="missing value for argument 'w'"):
        llga_fuser.compile(torch.jit.script(linear_relu), torch.randn(2, 4))


@pytest.mark.parametrize("scripted", [False, True], ids=["module", "script"])
@pytest.mark.parametrize("conv", [False, True], ids=["", "beside a convolution"])
def test_a_batch_norm_beside_other_readers(conv: bool, scripted: bool) -> None:
    """torch.jit.freeze puts the norm into the layer that the others read, too."""
    m = net(
        "y = self.l(self.c(x).flatten(1))\nreturn torch.sigmoid(self.b(y)) * y"
        if conv
        else "y = self.l(x)\nreturn torch.sigmoid(self.b(y)) * y",
        c=nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)),
        l=nn.Linear(16, 8),
        b=nn.BatchNorm1d(8),
    ).eval()
    randomize(m)
    x = torch.randn(3, 2, 4, 4) if conv else torch.randn(3, 16)
    with torch.no_grad():
        source = torch.jit.script(m) if scripted else m
        compiled = llga_fuser.compile(source, (x,))
        torch.testing.assert_close(compiled(x), m(x), rtol=1e-4, atol=1e-5)
    assert str(compiled.graph).count("aten::batch_norm") == 1  # not that of the convolution
