"""llga::FusionGroup is total: any executor, shape, input, thread. Nothing notices that it is there.

`test_jit_llga_fuser.py` asks whether an op is fused and right; here the world around the group
changes, and what plain TorchScript (or eager) answers is what has to come out.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import itertools
import math
import os
import pickle
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llga_fuser
from util import (
    GROUP,
    assert_same,
    fuses,
    has_own_kernels,
    leaves,
    net,
    restored,
    to_script,
    twin,
    walk,
)

pytestmark = pytest.mark.usefixtures("fuser")

IMAGE = (2, 8, 7, 6)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with restored(torch.get_num_threads, torch.set_num_threads):
        torch.set_num_threads(1)
        yield


@pytest.fixture
def capacity() -> Iterator[None]:
    before = llga_fuser.cache_info()
    yield
    llga_fuser.set_cache_capacity(before.capacity_entries, before.capacity_bytes)


def two_convs() -> nn.Module:
    return net(
        "torch.relu(self.d(torch.relu(self.c(x))) + x)",
        c=nn.Conv2d(8, 8, 3, padding=1),
        d=nn.Conv2d(8, 8, 1),
    ).eval()


def groups(script: Any, *inputs: Any) -> int:
    graph = script.graph_for(*(twin(x) for x in inputs))
    return sum(node.kind() == GROUP for node in walk(graph))


def warmed(script: Any, *inputs: Any) -> Any:
    """Called until its plan with fusion groups is the one that runs."""
    with torch.no_grad():
        for _ in range(3):
            script(*(twin(x) for x in inputs))
        assert groups(script, *inputs), "nothing is fused, so the test would show nothing"
    return script


def counted(fn: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result of `fn`, and how much the cache's figures grew."""
    before = llga_fuser.cache_info()
    result = fn()
    after = llga_fuser.cache_info()
    names = ("hits", "misses", "evictions", "fallbacks")
    return result, +Counter({n: getattr(after, n) - getattr(before, n) for n in names})


@pytest.fixture
def speed_check() -> Iterator[None]:
    before = llga_fuser._C.check_speed(True)
    assumed = llga_fuser._C.assume_contention(False)  # by other tests at the same time
    yield
    llga_fuser._C.check_speed(before)
    llga_fuser._C.assume_contention(assumed)


# ------------------------------------------------------------------------------------- executors


@contextlib.contextmanager
def executor(name: str) -> Iterator[None]:
    """TorchScript's executors and the modes that turn their optimisation off."""
    profiling = name in ("profiling", "unoptimized", "no profiles")
    before = torch._C._jit_set_profiling_executor(profiling)
    mode = torch._C._jit_set_profiling_mode(name in ("profiling", "unoptimized"))
    try:
        with torch.jit.optimized_execution(name != "unoptimized"):
            yield
    finally:
        torch._C._jit_set_profiling_executor(before)
        torch._C._jit_set_profiling_mode(mode)


EXECUTORS = {"profiling": True, "legacy": True, "unoptimized": False, "no profiles": False}


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "unfrozen"])
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("name", EXECUTORS)
def test_executor(name: str, scripted: bool, freeze: bool) -> None:
    """Fused where TorchScript calls the passes, right everywhere; gradients are exact."""
    m, x = two_convs(), torch.randn(IMAGE)
    script = to_script(m, [x], scripted=scripted, freeze=freeze)
    with executor(name):
        with torch.no_grad():
            for shape in (IMAGE, IMAGE, IMAGE, (1, 8, 9, 5), IMAGE):
                y = torch.randn(shape)
                assert_same(script(y), m(y))
            assert (groups(script, x) > 0) == EXECUTORS[name]
        grads = []
        for fn in (m, script):
            leaf = x.clone().requires_grad_()
            fn(leaf).square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) * 2

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.c(x))


@pytest.mark.parametrize("name", EXECUTORS)
def test_method_other_than_forward(name: str) -> None:
    m, x = Methods().eval(), torch.randn(IMAGE)
    with executor(name), torch.no_grad():
        with torch.jit.optimized_execution(True):  # freezing needs the methods inlined
            script = torch.jit.freeze(torch.jit.script(m), preserved_attrs=["encode"])
        for _ in range(4):
            assert_same(script(x), m(x))
            assert_same(script.encode(x), m.encode(x))
        graph = torch._C._last_executed_optimized_graph()
        assert any(n.kind() == GROUP for n in walk(graph)) == EXECUTORS[name]


class Blocks(nn.Module):
    """If, Loop and `with`, in one another."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3, padding=1)
        self.d = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor, n: int, y: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        z = x
        for i in range(n):
            if i % 2 == 0:
                with torch.no_grad():
                    z = torch.relu(self.c(z) + x)
            else:
                w = self.d(z)
                while bool(w.sum() > 1e6):
                    w = torch.relu(self.d(w)) * 0.5
                z = torch.sigmoid(w)
            if y is not None:
                z = torch.relu(self.d(z)) * y
        return z


@pytest.mark.parametrize("name", EXECUTORS)
def test_nested_blocks(name: str) -> None:
    m, x = Blocks().eval(), torch.randn(IMAGE)
    script = to_script(m, [x, 3], scripted=True)
    with executor(name), torch.no_grad():
        for args in ((x, 3), (x, 3), (x, 3, x), (x, 0), (x[:1], 4), (x[:1], 2, x[:1])):
            for _ in range(2):
                assert_same(script(*args), m(*args))
        assert (groups(script, x, 3) >= 2) == EXECUTORS[name]


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_function(name: str, scripted: bool) -> None:
    with executor(name), torch.no_grad():
        x, w = torch.randn(5, 16), torch.randn(8, 16)

        def linear_gelu(x: Tensor, w: Tensor) -> Tensor:  # TorchScript keeps what it has scripted
            return F.gelu(F.linear(x, w)) * 2

        fn = to_script(linear_gelu, [x, w], scripted=scripted)
        for _ in range(4):
            assert_same(fn(x, w), linear_gelu(x, w))
        assert (groups(fn, x, w) > 0) == EXECUTORS[name]


@pytest.mark.parametrize("first", ["inference", "training"])
@pytest.mark.parametrize("name", EXECUTORS)
def test_gradients_of_everything(name: str, first: str) -> None:
    """Of weights and inputs, whatever came first and was optimised for."""
    m = net(
        "self.l(torch.relu(self.n(self.c(x))).mean([2, 3]) * y)",
        "x, y",
        c=nn.Conv2d(8, 8, 3),
        n=nn.BatchNorm2d(8),
        l=nn.Linear(8, 4),
    ).eval()
    x, y = torch.randn(IMAGE), torch.randn(2, 8)

    def infer(fn: Any) -> None:
        with torch.no_grad():
            for _ in range(3):
                assert_same(fn(x, y), m(x, y))

    def train(fn: Any) -> list[Tensor]:
        found = []
        for _ in range(3):
            m.zero_grad()
            leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
            fn(*leaves).square().sum().backward()
            found = [t.grad.clone() for t in (*leaves, *m.parameters()) if t.grad is not None]
        return found

    with executor(name):
        script = to_script(m, [x, y], freeze=False)
        for step in (infer, train) if first == "inference" else (train, infer):
            step(script)
        ours, theirs = train(script), train(m)
        infer(script)
    assert len(ours) == len(theirs) == 8
    for a, e in zip(ours, theirs, strict=True):
        assert_same(a, e)  # the order of summation may be autodiff's


# ------------------------------------------------------------------------------ saved and copied


def saved(script: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "unfrozen"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", [saved, copy.deepcopy, copy.copy], ids=lambda f: f.__name__)
def test_save_load_copy(how: Callable[[Any], Any], when: str, freeze: bool) -> None:
    m, x = two_convs(), torch.randn(IMAGE)
    script = to_script(m, [x], freeze=freeze)
    if when == "after":
        warmed(script, x)
    other = warmed(how(script), x)
    warmed(script, x)
    with torch.no_grad():
        for model in (script, other, how(other)):
            for shape in (IMAGE, (1, 8, 4, 4)):
                y = torch.randn(shape)
                assert_same(model(y), m(y))


def test_pickling_errors_are_torchs_own() -> None:
    m, x = two_convs(), torch.randn(IMAGE)
    errors = []
    for enabled in (False, True):
        with llga_fuser.fusion(enabled):
            script = to_script(m, [x])
            with torch.no_grad():
                script(x), script(x), script(x)
            with pytest.raises(RuntimeError) as error:
                pickle.dumps(script)
            errors.append(re.sub(r"_torch_mangle_\d+", "", str(error.value)))
    assert errors[0] == errors[1]


# -------------------------------------------------------------------------------- dynamic shapes

DYNAMIC = {
    "conv": "torch.relu(self.c(x)) + x",
    "adaptive": "F.adaptive_avg_pool2d(torch.relu(self.c(x)), (1, 1)) * 2",
    "reshape": "torch.relu(self.c(x)).reshape(x.shape[0], 4, -1) * 2",
    "interpolate": "F.interpolate(torch.relu(self.c(x)), scale_factor=2.0)",
    "broadcast": "torch.relu(self.c(x)) * x.mean([2, 3], True) + x[:1, :1]",
    "expand": "self.c(x) + x.mean(1, True).expand(-1, x.shape[1], -1, -1)",
    "attention": "torch.softmax(x @ x.transpose(-1, -2), -1) @ self.c(x)",
    "cat": "self.d(torch.cat([self.c(x), x], 1))",
    "pool": "F.avg_pool2d(F.max_pool2d(self.c(x), 3, 1, 1), 2)",
    "sequence": "F.relu(self.l(self.c(x).flatten(2).transpose(1, 2)))",
}
SIZES = [(1, 8, 8, 6), (5, 8, 8, 6), (2, 8, 4, 10), (2, 8, 10, 4), (3, 8, 6, 16), (1, 8, 2, 2)]


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_shapes_change(name: str, scripted: bool) -> None:
    """Each new shape compiles once and is fused from then on; old ones are not forgotten."""
    m = net(
        DYNAMIC[name],
        c=nn.Conv2d(8, 8, 3, padding=1),
        d=nn.Conv2d(16, 8, 1),
        l=nn.Linear(8, 12),
    ).eval()
    script = warmed(
        to_script(m, [torch.randn(2, 8, 8, 6)], scripted=scripted), torch.randn(SIZES[0])
    )
    number = groups(script, torch.randn(SIZES[0]))
    with torch.no_grad():
        for shape in SIZES[1:]:
            x = torch.randn(shape)
            result, grown = counted(functools.partial(script, x))
            assert_same(result, m(x), str(shape))
            assert 0 < grown["misses"] <= number, grown
            assert not grown["fallbacks"], llga_fuser._C.fallbacks()
        for shape in SIZES:
            x = torch.randn(shape)
            result, grown = counted(functools.partial(script, x))
            assert_same(result, m(x), str(shape))
            assert grown == {"hits": number}, (shape, grown)


def test_host_values_are_part_of_the_signature() -> None:
    """Numbers and lists that reach a group from outside, NaN and minus zero included."""

    def scaled(x: Tensor, a: float, n: int) -> Tensor:
        return torch.relu(x * a) + x.reshape(n, -1).reshape(x.size(0), x.size(1)) * 2

    script = torch.jit.script(scaled)
    x = torch.randn(4, 6)
    with torch.no_grad():
        for a in (1.0, 2.0, 0.5, -0.0, 0.0, float("inf"), float("nan")):
            for n in (1, 2, 3):
                for _ in range(2):
                    assert_same(script(x, a, n), scaled(x, a, n), f"{a}, {n}")
        _, grown = counted(lambda: [script(x, float("nan"), 2) for _ in range(5)])
        assert not grown["misses"], "NaN is equal to itself here"


# ---------------------------------------------------------------------------------- the cache


@pytest.mark.usefixtures("capacity")
def test_least_recently_used_goes_first() -> None:
    m = two_convs()
    llga_fuser.clear_cache()
    xs = [torch.randn(1, 8, 4 + i, 5) for i in range(6)]
    script = warmed(to_script(m, [xs[0]]), xs[0])
    per_shape = llga_fuser.cache_info().entries
    llga_fuser.set_cache_capacity(3 * per_shape)
    with torch.no_grad():
        for x in xs[1:3]:
            script(x)
        script(xs[0])  # now the second one is the oldest
        _, grown = counted(lambda: script(xs[3]))
        assert grown["evictions"] == per_shape
        assert counted(lambda: script(xs[0]))[1] == {"hits": per_shape}
        assert counted(lambda: script(xs[1]))[1]["misses"] == per_shape
        for x in xs * 2:
            assert_same(script(x), m(x))
            assert llga_fuser.cache_info().entries <= 3 * per_shape


@pytest.mark.usefixtures("capacity")
def test_capacity_in_bytes() -> None:
    """Packed weights are what counts; the module in use is always there."""
    llga_fuser.clear_cache()
    # Wide enough to be packed on every processor.
    modules = [net("self.c(x)", c=nn.Conv2d(64, 64, 3)).eval() for _ in range(4)]
    x = torch.randn(1, 64, 9, 9)
    held = llga_fuser.cache_info().packed_bytes  # by modules of other tests
    scripts = [warmed(to_script(m, [x]), x) for m in modules]
    one = (llga_fuser.cache_info().packed_bytes - held) // 4
    if not one:
        pytest.skip("oneDNN packs no weights on this processor")
    llga_fuser.set_cache_capacity(4096, 2 * one)
    assert llga_fuser.cache_info().packed_bytes - held <= 2 * one
    with torch.no_grad():
        for script, m in zip(scripts * 2, modules * 2, strict=True):
            assert_same(script(x), m(x))
            assert llga_fuser.cache_info().packed_bytes - held <= 2 * one
        llga_fuser.set_cache_capacity(4096, 1)
        for script, m in zip(scripts, modules, strict=True):
            assert_same(script(x), m(x))
            assert llga_fuser.cache_info().packed_bytes - held <= one


def test_identical_constants_share_packed_weights() -> None:
    """One weight in two modules and in two layers; shapes and threads share it anyway."""
    conv = nn.Conv2d(64, 64, 3, padding=1)
    m = net("torch.relu(self.c(torch.relu(self.c(x))))", c=conv).eval()
    x = torch.randn(1, 64, 9, 9)
    llga_fuser.clear_cache()
    held = llga_fuser.cache_info().packed_bytes  # by modules of other tests
    scripts = [warmed(to_script(m, [x]), x) for _ in range(2)]
    with torch.no_grad():
        for script in scripts:
            assert_same(script(x), m(x))
    assert llga_fuser.cache_info().packed_bytes - held <= conv.weight.nbytes


def test_equal_structure_and_reused_addresses() -> None:
    """A new model whose weights lie where those of a deleted one lay."""
    x = torch.randn(1, 64, 5, 5)
    seen: Counter[int] = Counter()
    for seed in range(12):
        torch.manual_seed(seed)
        conv = nn.Conv2d(64, 64, 3)
        seen[conv.weight.data_ptr()] += 1
        made = llga_fuser.compile(conv.eval(), x)
        with torch.no_grad():
            assert_same(made(x), conv(x), f"model {seed}")
        del made, conv
        gc.collect()
    assert max(seen.values()) > 1, "no address came twice, so the test shows nothing"


def test_weights_of_an_unfrozen_module_change_in_place() -> None:
    m, x = two_convs(), torch.randn(IMAGE)
    script = warmed(to_script(m, [x], freeze=False), x)
    with torch.no_grad():
        for change in (
            lambda: m.c.weight.mul_(-2),
            lambda: m.c.bias.zero_(),
            lambda: m.d.weight[:, :4].add_(1),
            lambda: m.load_state_dict(two_convs().state_dict()),
            lambda: setattr(m.c.weight, "data", torch.randn(8, 8, 3, 3)),
        ):
            change()
            assert_same(script(x), m(x))


# --------------------------------------------------------------------------------------- inputs


class Logged(Tensor):
    """A subclass with a __torch_function__ of its own, which TorchScript does not call."""


class Wrapper(Tensor):
    """A subclass that sees every operator (__torch_dispatch__)."""

    calls: ClassVar[Counter[str]] = Counter()
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls[str(func)] += 1

        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        result = func(*map(unwrap, args), **{k: unwrap(v) for k, v in (kwargs or {}).items()})
        return Wrapper(result) if isinstance(result, Tensor) else result


def test_subclasses() -> None:
    m, x = two_convs(), torch.randn(IMAGE)
    script = warmed(to_script(m, [x]), x)
    with torch.no_grad():
        result = script(x.clone().as_subclass(Logged))
        assert_same(result.as_subclass(Tensor), m(x))
        Wrapper.calls.clear()
        wrapped = script(Wrapper(x))
    assert isinstance(wrapped, Wrapper), "the subclass is what comes out"
    assert_same(wrapped.inner, m(x).detach())
    assert any("convolution" in name for name in Wrapper.calls), "it saw the operators"


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(IMAGE),
    "channels_last": lambda: torch.randn(IMAGE).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 8, 6, 7).transpose(2, 3),
    "expanded": lambda: torch.randn(1, 8, 1, 6).expand(IMAGE),
    "overlapping": lambda: torch.randn(200).as_strided(IMAGE, (50, 10, 6, 1)),
    "sliced": lambda: torch.randn(4, 16, 7, 12)[1:3, ::2, :, 3:9],
    "backwards": lambda: torch.randn(IMAGE).flip(3),
    "negative": lambda: torch.randn(IMAGE, dtype=torch.cfloat).conj().imag,
    "offset": lambda: torch.randn(700)[3 : 3 + 672].view(IMAGE),
    "gradient": lambda: torch.randn(IMAGE, requires_grad=True),
    "inference": lambda: torch.inference_mode()(torch.randn)(IMAGE),
    "batch of one": lambda: torch.randn(7, 6, 8).permute(2, 0, 1)[None],
    "no images": lambda: torch.randn(0, 8, 7, 6),
    "view of itself": lambda: torch.randn(8, 7, 6).expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_inputs_of_any_layout(kind: str, scripted: bool) -> None:
    """The first one the group meets, and then one of many."""
    m = net(
        "y = torch.relu(self.c(x)) + x\nreturn y, F.max_pool2d(y, 2, 1), y.mean([2, 3])",
        c=nn.Conv2d(8, 8, 3, padding=1),
    ).eval()
    with torch.no_grad():
        first = to_script(m, [torch.randn(IMAGE)], scripted=scripted)
        later = warmed(to_script(m, [torch.randn(IMAGE)], scripted=scripted), torch.randn(IMAGE))
        for script in (first, later):
            for _ in range(3):
                x = LAYOUTS[kind]()
                before = x.clone()
                assert_same(script(x), m(x))
                assert torch.equal(x, before), "the input is as it was"


ZERO_DIM: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "both": (lambda a, b: torch.relu(a * b) + a, (torch.tensor(2.0), torch.tensor(3.0))),
    "one": (lambda a, b: torch.relu(a * b) + a, (torch.randn(3, 4), torch.tensor(3.0))),
    "result": (lambda a, b: (a * b).sum() * 2, (torch.randn(3), torch.randn(3))),
    "double": (lambda a, b: a * b + 1, (torch.randn(3, 4), torch.tensor(3.0, dtype=torch.double))),
    "integer": (lambda a, b: a * b + a, (torch.randn(3, 4), torch.tensor(3))),
    "mask": (lambda a, b: torch.where(b, a * 2, a - 1), (torch.randn(3, 4), torch.tensor(True))),
}


@pytest.mark.parametrize("name", ZERO_DIM)
def test_zero_dim(name: str) -> None:
    fn, inputs = ZERO_DIM[name]
    script = torch.jit.trace(fn, inputs)
    with torch.no_grad():
        for _ in range(4):
            assert_same(script(*inputs), fn(*inputs))


OTHER = ["double", "half", "complex", "int", "sparse", "quantized", "meta", "mkldnn"]


def other(kind: str) -> Tensor:
    x = torch.randn(IMAGE)
    return {
        "double": lambda: x.double(),
        "half": lambda: x.half(),
        "complex": lambda: x.cfloat(),
        "int": lambda: torch.randint(-5, 5, IMAGE),
        "sparse": lambda: x.relu().to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8),
        "meta": lambda: x.to("meta"),
        "mkldnn": lambda: x.to_mkldnn(),
    }[kind]()


@pytest.mark.parametrize("kind", OTHER)
def test_other_tensors_after_warm_up(kind: str) -> None:
    """A function without weights takes many of them; the answer, or the error, is TorchScript's."""

    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * 2 + x

    x = torch.randn(IMAGE)
    script = warmed(torch.jit.trace(body, x), x)
    with llga_fuser.fusion(False):
        plain = torch.jit.trace(body, x)

    def outcome(fn: Callable[..., Any]) -> Any:
        try:
            return fn(value)
        except Exception as error:
            return type(error), str(error).splitlines()[-1]

    with torch.no_grad():
        value = other(kind)
        for _ in range(3):
            want, got = outcome(plain), outcome(script)
            if not isinstance(want, Tensor):
                assert got == want
            elif want.device.type == "meta":
                assert got.shape == want.shape and got.device == want.device
            else:
                assert got.layout == want.layout
                dense = [t.dequantize() if t.is_quantized else t for t in (got, want)]
                assert_same(*(t if t.layout == torch.strided else t.to_dense() for t in dense))
        assert_same(script(x), body(x))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["first", "last"])
def test_nan_and_infinity_pass_through(value: float, where: str) -> None:
    """A chain of groups, with what oneDNN's kernels would turn into a number."""
    m = net(
        "y = F.max_pool2d(torch.relu(self.c(x)), 3, 1, 1)\nz = self.d(y)\n"
        "return torch.clamp(z + y, -2, 2), F.hardtanh(self.c(z))",
        c=nn.Conv2d(8, 8, 3, padding=1),
        d=nn.Conv2d(8, 8, 1),
    ).eval()
    x = torch.randn(IMAGE)
    script = warmed(to_script(m, [x]), x)
    x.view(-1)[0 if where == "first" else -1] = value
    with torch.no_grad():
        for _ in range(3):
            assert_same(script(x), m(x))
        assert_same(script(torch.ones(IMAGE)), m(torch.ones(IMAGE)))


VIEWED = {
    "pixels": "y = torch.relu(self.c(x)).flatten(2)\nreturn torch.relu(y.view(2, -1))",
    "rows": "y = torch.relu(self.c(x)).flatten(2).transpose(1, 2)\nreturn F.relu(y) * self.n(y)",
    "channels last": "return F.relu(self.c(F.relu(self.c(x)).permute(0, 2, 1, 3)).transpose(2, 1))",
    # Nothing lies side by side that becomes one dimension: eager copies.
    "copied": "y = torch.relu(self.c(x)).transpose(1, 2)\nreturn F.relu(y.flatten(2)) + 1",
    "copy of channels last": "y = F.relu(self.m(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)\n"
    "return F.relu(F.relu(y.contiguous()).view(2, -1)), F.relu(self.c(y.contiguous()))",
    "written behind the copy": "y = F.relu(self.m(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)\n"
    "z = y.contiguous()\ny[:, :1].mul_(2)\nreturn F.relu(self.c(z)), y",
}


@pytest.mark.parametrize("value", [1.0, math.nan], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", VIEWED)
def test_views_of_values_between_groups(case: str, last: bool, value: float) -> None:
    """Groups choose their order in memory; the interpreter gets them, and gives others, as eager.

    Pixels that are channels last are no rows that view() could join, in eager.
    """
    last = last and case != "pixels"
    m = net(VIEWED[case], c=nn.Conv2d(8, 8, 1), n=nn.LayerNorm(8), m=nn.Linear(8, 8)).eval()
    x = torch.randn(2, 8, 8, 8)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    script = warmed(to_script(m, [x]), x)
    x = x.clone()
    x[1, 2, 3, 4] = value
    with torch.no_grad():
        for _ in range(3):
            result, figures = counted(lambda: script(x))
            expected = m(x)
            assert_same(result, expected)
            for mine, theirs in zip(leaves(result), leaves(expected), strict=True):
                assert mine.stride() == theirs.stride()
            if case not in {"channels last", "written behind the copy"}:
                assert (figures["fallbacks"] > 0) == math.isnan(value)


# ----------------------------------------------------------------------------- reference kernels


@pytest.mark.usefixtures("speed_check")
@pytest.mark.parametrize("sizes", [(1, 3, 9, 9), (4, 1, 9, 9), (4, 3, 9, 1), (1, 1, 1, 9), (9, 9)])
def test_product_with_an_addend_of_any_shape(sizes: tuple[int, ...]) -> None:
    """Swin adds its position bias like this, for which the gemm for AVX2 has no kernel."""
    addend = torch.randn(sizes)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(torch.matmul(q, k) * 0.25 + addend, -1)

    q = torch.randn(4, 9, 3, 16).transpose(1, 2)  # rows of a head are apart, as Swin's are
    k = torch.randn(4, 3, 16, 9)
    script = warmed(torch.jit.trace(attend, (q, k)), q, k)
    with torch.no_grad():
        result, figures = counted(lambda: script(q, k))
    # In an emulated AVX-512 the speed check left one number a row to PyTorch: a reference kernel.
    if sizes[-1] != 1 or "avx512" not in llga_fuser._C.runtime_info()["isa"]:
        assert figures["fallbacks"] == 0
    assert_same(result, attend(q, k))


SCORES = (2, 40, 40, 8)  # whose heads lie side by side, as where they talk
ANY_ORDER = {
    "left": (lambda x, y: torch.relu(x.permute(0, 3, 1, 2) @ y), SCORES, (2, 8, 40, 16)),
    "right": (lambda x, y: torch.relu(y @ x.permute(0, 3, 1, 2)), SCORES, (2, 8, 16, 40)),
    "both": (
        lambda x, y: torch.relu(x.permute(0, 3, 1, 2) @ y.permute(0, 3, 2, 1)),
        *(SCORES, (2, 16, 40, 8)),
    ),
    "result": (
        lambda x, y: (torch.relu(x) @ y).transpose(-2, -1).reshape(2, 128, 5, 8),
        *((2, 8, 40, 40), (2, 8, 40, 16)),
    ),
    "result by channels": (
        lambda x, y: torch.relu((x @ y).permute(0, 3, 1, 2)),
        *((2, 8, 40, 40), (2, 8, 40, 16)),
    ),
}


@pytest.mark.usefixtures("speed_check")
@pytest.mark.parametrize("case", ANY_ORDER)
def test_products_of_matrices_in_any_order(case: str) -> None:
    """By rows or by columns, or oneDNN has reference kernels, and for columns of the result."""
    function, *sizes = ANY_ORDER[case]
    x, y = (torch.randn(size) for size in sizes)
    script = warmed(torch.jit.trace(function, (x, y)), x, y)
    with torch.no_grad():
        result, figures = counted(lambda: script(x, y))
    assert_same(result, function(x, y))
    assert figures["fallbacks"] == 0
    report = llga_fuser.report(script, x, y, rounds=1)
    kernels = [p.implementation for group in report.groups for p in group.primitives]
    assert any(p.kind == "matmul" for group in report.groups for p in group.primitives), report
    assert not any("ref" in kernel for kernel in kernels), kernels


@pytest.mark.parametrize("code", ["self.d(x) * x", "self.d(x) * y", "self.d(self.c(x)) - x"])
def test_images_in_planes_behind_a_convolution(code: str) -> None:
    """As operands of binary ops: oneDNN has a reference kernel for depthwise convolutions then."""
    code = f"x, y = x.reshape(1, 192, 7, 7), y.reshape(1, 192, 7, 7)\nreturn self.c({code})"
    m = net(code, "x, y", c=nn.Conv2d(192, 192, 1), d=nn.Conv2d(192, 192, 3, 1, 1, groups=192))
    x, y = torch.randn(2, 1, 192, 49)
    script = warmed(to_script(m.eval(), [x, y], scripted=False, freeze=True), x, y)
    with torch.no_grad():
        assert_same(script(x, y), m(x, y))
    report = llga_fuser.report(script, x, y, rounds=1)
    kernels = [p.implementation for group in report.groups for p in group.primitives]
    # "ref_fused_convolution" of 3.7 runs two kernels of which neither is one.
    assert kernels and not any(kernel.startswith("ref:") for kernel in kernels), report


@pytest.mark.parametrize("pixels", [5, 12])
@pytest.mark.parametrize("order", ["x - y", "y - x"])
def test_pointwise_of_planes_and_channels_last(order: str, pixels: int) -> None:
    """Channels last, as what reads images takes them; where there are many, behind a copy."""
    channels = 144
    code = f"x = x.reshape(1, {channels}, {pixels}, -1)\ny = self.c(y)\n"
    code += f"return self.d(0.5 * ({order}) + x)"
    m = net(
        code,
        "x, y",
        c=nn.Conv2d(channels, channels, 1),
        d=nn.Conv2d(channels, channels, 3, 1, 1),
    ).eval()
    x, y = torch.randn(1, channels, pixels**2), torch.randn(1, channels, pixels, pixels)
    script = warmed(to_script(m, [x, y], scripted=False, freeze=True), x, y)
    with torch.no_grad():
        assert_same(script(x, y), m(x, y))
    report = llga_fuser.report(script, x, y, rounds=1)
    if not has_own_kernels():
        return
    for group in report.groups[:-1]:
        assert group.outputs[0].layout == "channels last", report


def largest_of_tokens(x: Tensor) -> Tensor:
    """oneDNN reduces dimensions that lie apart number by number, some 70 times slower than PyTorch.
    Our own kernels leave that to it.
    """
    return x.amax((0, 2))


def slow_in_onednn(tokens: int = 197) -> tuple[Any, Tensor]:
    x = torch.randn(8, tokens, 768)
    return warmed(torch.jit.trace(largest_of_tokens, x), x), x


@pytest.mark.usefixtures("speed_check")
def test_small_reference_kernels_are_left_to_pytorch() -> None:
    """A softmax between a network's branches (SKNet): the first call of either takes longest.
    Newer versions of oneDNN have another kernel.
    """
    x = torch.randn(1, 2, 2048, 1, 1)
    script = warmed(torch.jit.trace(lambda x: torch.softmax(x, 1), x), x)
    llga_fuser._C.reset_stats()
    with torch.no_grad():
        assert_same(script(x), torch.softmax(x, 1))
    reasons = llga_fuser._C.fallbacks()
    (group,) = llga_fuser.report(script, x, rounds=1).groups
    assert not any("ref" in primitive.implementation for primitive in group.primitives), group
    assert bool(reasons) == (not group.primitives)
    for reason in reasons:
        assert re.fullmatch(r"oneDNN takes \d+ times as long as PyTorch at these sizes", reason)


@pytest.mark.usefixtures("speed_check")
def test_reference_kernels_are_left_to_pytorch() -> None:
    script, x = slow_in_onednn()
    llga_fuser._C.reset_stats()
    with torch.no_grad():
        assert torch.equal(script(x), largest_of_tokens(x))
    (reason,) = llga_fuser._C.fallbacks()
    assert re.fullmatch(r"oneDNN takes \d+ times as long as PyTorch at these sizes", reason)


@pytest.mark.usefixtures("speed_check")
def test_groups_that_are_alike_are_measured_once() -> None:
    """The layers of a network; sizes of their own are measured."""
    x = torch.randn(6, 301, 640)

    def seconds(x: Tensor) -> float:
        """That compiling takes."""
        before = llga_fuser.cache_info()
        warmed(torch.jit.trace(largest_of_tokens, x), x)
        after = llga_fuser.cache_info()
        assert after.misses > before.misses and after.fallbacks > before.fallbacks
        return after.compile_seconds - before.compile_seconds

    with torch.no_grad():
        measured = seconds(x)
        assert seconds(x) < measured / 3
        assert seconds(x[:5]) > measured / 3


@pytest.mark.usefixtures("speed_check")
def test_what_was_too_slow_is_measured_again() -> None:
    """Under another's load anything may look slow. Here the check is off when it is repeated."""
    script, x = slow_in_onednn()
    llga_fuser._C.reset_stats()
    llga_fuser._C.check_speed(False)
    before = llga_fuser.cache_info()
    with torch.no_grad():
        calls = 0
        while llga_fuser.cache_info().misses == before.misses and calls < 100_000:
            script(x)
            calls += 1
        after = llga_fuser.cache_info()
        assert after.fallbacks == calls - 1  # how many there are depends on load
        result, figures = counted(lambda: script(x))
    assert (after.misses, after.entries) == (before.misses + 1, before.entries)
    assert figures["fallbacks"] == 0
    assert_same(result, largest_of_tokens(x))


@pytest.mark.usefixtures("speed_check")
def test_what_stays_too_slow_is_measured_less_and_less_often() -> None:
    script, x = slow_in_onednn()

    def seconds_until_measured(limit: float) -> float:
        llga_fuser._C.reset_stats()
        start = time.perf_counter()
        while not llga_fuser.cache_info().misses and time.perf_counter() < start + limit:
            script(x)
        return time.perf_counter() - start

    with torch.no_grad():
        seconds = seconds_until_measured(60)
        assert seconds < 60
        # Ten times as long, but for noise.
        assert seconds_until_measured(2 * seconds) >= 2 * seconds


@pytest.mark.usefixtures("speed_check")
def test_what_is_compiled_under_load_is_checked_again() -> None:
    """Then nothing is known of its speed: it is used for a while."""
    llga_fuser._C.assume_contention(True)
    script, x = slow_in_onednn(193)  # what is known of others is believed of those like them
    with torch.no_grad():
        result, figures = counted(lambda: script(x))
        assert figures["fallbacks"] == 0
        assert_same(result, largest_of_tokens(x))
        llga_fuser._C.assume_contention(False)
        llga_fuser._C.reset_stats()
        end = time.perf_counter() + 60
        while not llga_fuser.cache_info().misses and time.perf_counter() < end:
            assert_same(script(x), largest_of_tokens(x))
        assert_same(script(x), largest_of_tokens(x))
    (reason,) = llga_fuser._C.fallbacks()
    assert re.fullmatch(r"oneDNN takes \d+ times as long as PyTorch at these sizes", reason)


def test_speed_check_can_be_switched_off() -> None:
    """conftest.py has it off."""
    script, x = slow_in_onednn()
    with torch.no_grad():
        result, figures = counted(lambda: script(x))
    assert figures["fallbacks"] == 0
    assert_same(result, largest_of_tokens(x))


@pytest.mark.usefixtures("speed_check")
def test_reductions_of_channels_last_data_stay_fused() -> None:
    """The kernels want the reduced dimensions last in memory: such data is copied."""
    m = net("torch.relu(self.c(x)).mean((2, 3))", c=nn.Conv2d(8, 256, 1)).eval()
    x = torch.randn(4, 8, 20, 20)
    script = warmed(to_script(m, [x], scripted=False, freeze=True), x)
    with torch.no_grad():
        result, figures = counted(lambda: script(x))
        expected = m(x)
    assert figures["fallbacks"] == 0
    assert_same(result, expected)


@pytest.mark.parametrize("width", [512, 768])
def test_placement_of_weights(width: int) -> None:
    """On AVX2 the weight of some products lies off alignment, in a copy of its own."""
    m = net("torch.relu(self.c(x))", c=nn.Linear(64, width)).eval()
    x = torch.randn(128, 64)
    script = warmed(to_script(m, [x], scripted=False, freeze=True), x)
    with torch.no_grad():
        for rows in (1, 31, 32, 128, 262, 263):
            x = torch.randn(rows, 64)
            assert_same(script(x), m(x))


# ------------------------------------------------------------------- other instruction sets


def run_fuser_tests(chosen: str, **environment: str) -> None:
    """Those of the entry suite and of our kernels that `-k` chooses, in a process of its own."""
    files = ("test_jit_llga_fuser.py", "test_own_kernels.py")
    tests = [str(Path(__file__).with_name(name)) for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", chosen],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_own_kernels_of_older_processors(isa: str) -> None:
    """They exist once for each instruction set; the other tests run the best of them."""
    order = ["avx2", "avx512_core", "avx512_core_"]
    mine = llga_fuser._C.runtime_info()["isa"]
    if not mine.startswith(order[order.index(isa.lower()) + 1]):
        pytest.skip(f"this processor has no more than {mine}")
    chosen = "squeeze_and_excitation[ or concat_and_batch_norm_of or activation_of_special"
    chosen += " or test_small_convolution or mean_over_pixels or test_expansion[five"
    chosen += " or test_first_convolutions[ or test_linear_of_many_rows[ or n_by_winograd["
    run_fuser_tests(chosen, ONEDNN_MAX_CPU_ISA=isa)


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_bfloat16_without_kernels(isa: str) -> None:
    """As on processors without AVX-512, or without its instructions for bfloat16."""
    if not fuses(torch.bfloat16):
        pytest.skip("the other tests do all of bf16 so on this processor")
    chosen = "bfloat16_in_float32 or torchscript_autocast or test_conv2d_eltwise or test_linear["
    run_fuser_tests(chosen, ONEDNN_MAX_CPU_ISA=isa)


def test_bfloat16_as_it_is() -> None:
    """As on processors that are fast at it; on this one the other tests compute in float32."""
    if fuses(torch.bfloat16) or not llga_fuser._C.runtime_info()["isa"].startswith("avx512"):
        pytest.skip("the other tests do, or oneDNN has no kernels for bf16 on this processor")
    chosen = "torchscript_autocast or test_conv2d_eltwise or test_linear[ or by_winograd"
    run_fuser_tests(chosen, LLGA_FUSER_DISABLE_PASSES="widen_bfloat16")


def test_small_convolutions_of_onednn() -> None:
    """What the other tests do of convolutions is small enough for the fuser's own kernel."""
    run_fuser_tests("test_conv[ or test_conv2d_eltwise", LLGA_FUSER_OWN_KERNELS="off")


# --------------------------------------------------------------------------- threads, processes


def child(*arguments: str, timeout: float = 120, environment: dict[str, str] | None = None) -> str:
    """Runs a scenario of `children.py` in a process of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("children.py")), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "2",
            **(environment or {}),
        },
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "scenario",
    [
        "cold_start",
        "ten_modules",
        "set_num_threads",
        "switching",
        "compile_and_release",
        "exit_while_running",
    ],
)
def test_threads(scenario: str) -> None:
    child(scenario)


@pytest.mark.parametrize("own_kernels", ["on", "off"])
def test_threads_end_while_plans_are_dropped(own_kernels: str) -> None:
    child("ending_threads", environment={"LLGA_FUSER_OWN_KERNELS": own_kernels})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_fork() -> None:
    child("fork")


LINUX = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, counts page faults"
)


@LINUX
def test_memory_is_flat() -> None:
    """Plans hold the weights of one model and some kilobytes: ten more of them would show."""
    assert int(child("flat")) < 8 << 20


@LINUX
@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_calls() -> None:
    assert int(child("flat", "10000", "200", "50", timeout=900)) < 8 << 20


# ---------------------------------------------------------------------------------------- the arena


def large_convs(code: str = "self.d(self.c(x).relu()) + 1") -> nn.Module:
    """A value of 1.5 MiB passes between two groups."""
    return net(code, c=nn.Conv2d(3, 96, 3, padding=1), d=nn.Conv2d(96, 3, 1)).eval()


LARGE = (1, 3, 64, 64)
MIB = 1 << 20


@pytest.fixture
def arena() -> Callable[[], int]:
    gc.collect()
    llga_fuser.clear_cache()
    assert llga_fuser.cache_info().arena_bytes == 0, "a result that another test holds lies in it"
    return lambda: llga_fuser.cache_info().arena_bytes


def test_values_between_groups_come_from_the_arena(arena: Callable[[], int]) -> None:
    m, x = large_convs(), torch.randn(LARGE)
    with torch.no_grad():
        script = to_script(m, [x])
        results = [script(x) for _ in range(4)]
        assert 96 * 64 * 64 * 4 <= arena() < 8 * MIB
        for result in results:
            assert_same(result, m(x))
    del script
    gc.collect()
    llga_fuser.clear_cache()
    assert arena() == 0, "a result of the call lies in it"


@pytest.mark.parametrize(
    "code",
    [
        "self.c(x)",
        "self.c(x).relu().transpose(1, 2)",
        "(self.c(x).relu() + 1, x)",
        "self.c(x).chunk(2, 1)",
        "self.c(x) if x.size(0) > 3 else self.c(x) * 2",
    ],
)
def test_what_a_user_can_hold_does_not(code: str, arena: Callable[[], int]) -> None:
    m, x = large_convs(code), torch.randn(LARGE)
    with torch.no_grad():
        script = to_script(m, [x], scripted="if" in code)
        results = [script(x) for _ in range(4)]
    llga_fuser.clear_cache()
    assert arena() == 0
    for result in results:
        assert_same(result, m(x))


def test_a_large_call_is_forgotten(arena: Callable[[], int]) -> None:
    """What a batch of 32 needed goes back once smaller ones have come for a while."""
    script = to_script(large_convs(), [torch.randn(LARGE)])
    few, many = torch.randn(1, 3, 16, 24), torch.randn(32, 3, 64, 64)
    with torch.no_grad():
        for _ in range(3):
            script(few)
        for _ in range(3):
            script(many)
        assert arena() > 40 * MIB
        for _ in range(9000):
            script(few)
    assert arena() < 4 * MIB


@LINUX
def test_memory_is_not_cleared_anew() -> None:
    """48 MiB between two groups: the C library returns that much to the system after each call."""
    assert int(child("faults")) < 48 * MIB // 4096 // 20
    assert int(child("faults", environment={"LLGA_FUSER_ARENA": "off"})) > 48 * MIB // 4096 // 2


def test_arena_can_be_switched_off() -> None:
    assert int(child("arena_bytes", environment={"LLGA_FUSER_ARENA": "off"})) == 0
    assert int(child("arena_bytes")) > 0


@LINUX
def test_packed_weights_side_by_side() -> None:
    """In huge pages where the system has them; the pages of one that dies are free at once."""
    freed, advised = map(int, child("packed_memory").split())
    assert freed > 7 * MIB
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert advised >= 16 * MIB
    freed, advised = map(
        int, child("packed_memory", environment={"LLGA_FUSER_HUGE_PAGES": "off"}).split()
    )
    assert freed > 7 * MIB and advised == 0


@pytest.mark.parametrize("outputs", [4128, 4384, 4640])
def test_a_weight_larger_than_a_slab_has_room_wherever_it_begins(outputs: int) -> None:
    """Packed, it takes an eighth of a huge page more than whole ones."""
    m, x = nn.Linear(2048, outputs).eval(), torch.randn(16, 2048)
    before = llga_fuser.cache_info().fallbacks
    fused = llga_fuser.compile(m, x)
    assert_same(fused(x), m(x))
    assert llga_fuser.cache_info().fallbacks == before


def test_compiling_keeps_values_no_longer_than_the_graph() -> None:
    """A group of four ops is compiled for a new shape: not all of its values at once."""

    def chain(x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x * 0.5) * 0.5) * 0.25

    x = torch.randn(2, 512, 1024)
    fused = llga_fuser.compile(chain, x[:1])
    (group,) = llga_fuser.report(fused, x[:1]).groups
    assert len(group.ops) >= 4
    misses = llga_fuser.cache_info().misses
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = fused(x)
    assert_same(result, chain(x))
    assert llga_fuser.cache_info().misses == misses + 1
    allocated = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.nbytes()]
    assert 1 <= max(itertools.accumulate(allocated)) / x.nbytes < 4


def test_arena_serves_many_threads(arena: Callable[[], int]) -> None:
    m = large_convs()
    sizes = [(1, 3, 64, 64), (2, 3, 33, 65), (3, 3, 48, 31), (1, 3, 80, 80)]
    inputs = [torch.randn(size) for size in sizes]
    with torch.no_grad():
        expected = [m(x) for x in inputs]
        script = to_script(m, inputs[:1])

    def work(first: int) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            for i in range(first, first + 60):
                assert_same(script(inputs[i % 4]), expected[i % 4])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    llga_fuser.clear_cache()
    assert arena() == 0


# ------------------------------------------------------------------------------ once for each size


class Masked(nn.Module):
    """A product with a mask that is filled in place, and positions from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        mask = x.new_zeros(n, n)
        mask[: n // 2].fill_(0.5)
        mask = mask.masked_fill(torch.arange(n).unsqueeze(0) > torch.arange(n).unsqueeze(1), -2.0)
        positions = self.table(torch.arange(n).unsqueeze(0) + 1)
        return mask.unsqueeze(0) @ (x + positions)


def arange_calls(script: Any, x: Tensor) -> int:
    with torch.autograd.profiler.profile() as profile, torch.no_grad():
        script(x)
    return sum(event.name == "aten::arange" for event in profile.function_events or [])


def test_what_depends_on_sizes_alone_is_computed_once() -> None:
    module = Masked().eval()
    with torch.no_grad():
        script = warmed(to_script(module, [torch.randn(2, 6, 16)]), torch.randn(2, 6, 16))
        for n in (6, 9, 7, 6, 33):
            x = torch.randn(3, n, 16)
            for _ in range(3):
                assert_same(script(x), module(x))
            assert arange_calls(script, x) == 0
        assert arange_calls(script, torch.randn(3, 8, 16)) > 0, "sizes that are new"
        llga_fuser.clear_cache()
        assert arange_calls(script, torch.randn(3, 8, 16)) > 0, "the cache was cleared"
        for n in range(20, 40):  # more than are kept
            x = torch.randn(1, n, 16)
            assert_same(script(x), module(x))


def test_what_depends_on_sizes_alone_goes_with_other_surroundings() -> None:
    """Inference tensors are not for autograd, and other types are other tensors."""
    module = Masked().eval()
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        script = to_script(module, [x])
    with torch.inference_mode():
        for _ in range(4):
            assert_same(script(x), module(x))
    leaf = x.clone().requires_grad_()
    for _ in range(3):
        script(leaf).sum().backward()
    with torch.no_grad():
        for _ in range(3):
            assert_same(script(x), module(x))
            assert script(x.double()).dtype == torch.float64


@pytest.mark.parametrize("other", ["m", "x[0]"], ids=["read again", "not read again"])
@pytest.mark.parametrize("view", ["", ".unsqueeze(0)[0]"], ids=["tensor", "view"])
def test_what_is_written_to_is_computed_anew(view: str, other: str) -> None:
    """In-place ops that no group takes stay in-place where they write to a view."""
    module = net(
        "m = torch.ones(x.size(1), x.size(1)).triu() * 2.0\n"
        f"v = m{view}\n"
        "v.lerp_(x[0] @ x[0].t(), 0.5)\n"
        f"return torch.relu(v @ {other}) + 1"
    )
    x = torch.randn(2, 6, 6)
    with torch.no_grad():
        script = to_script(module, [x])
        for _ in range(6):
            assert_same(script(x), module(x))
        assert not view or any(n.kind() == "aten::lerp_" for n in walk(script.graph_for(x)))


def test_results_of_sizes_alone_may_be_large() -> None:
    """Beyond some megabytes they are computed anew."""
    module = net("x + torch.arange(x.size(0)).to(torch.float32) * 0.5")
    x = torch.randn(1 << 23)
    with torch.no_grad():
        script = to_script(module, [x])
        for _ in range(4):
            assert_same(script(x), module(x))
        assert arange_calls(script, x) > 0
