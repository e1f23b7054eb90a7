"""How the tests of the fuser run something and look at what became of it.

`check` runs a module or a function eagerly and through TorchScript with the fuser on, and compares
every call; `net` writes a small module in one line of a test table.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import linecache
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import llga_fuser

GROUP = "llga::FusionGroup"
Make = Callable[[], Tensor]

MODES: dict[str, dict[str, Any]] = {
    "traced": {},
    "scripted": {"scripted": True},
    "channels_last": {"memory_format": torch.channels_last},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
}


class Tolerance(NamedTuple):
    """`relative` to each value, and to the largest value for those that cancellation made small."""

    relative: float


TOLERANCES = {
    # Another order of summation: about sqrt(terms) * 2**-24 of the terms' magnitude; a few thousand
    # terms stay under 1e-5, and a pattern chains two or three such ops.
    torch.float32: Tolerance(5e-5),
    # Eager rounds to 8 bits (2**-9 of the value) after each op, a fused group once at its end: the
    # two are apart by a few roundings of the largest intermediate value.
    torch.bfloat16: Tolerance(4 * 2.0**-8),
    # Nothing is fused: exactly eager's own numbers are expected.
    torch.float16: Tolerance(0.0),
    torch.float64: Tolerance(0.0),
    # Not fused either, but memory formats between two ops may differ from eager's.
    torch.complex64: Tolerance(5e-5),
}

# The same op has several names, by rank and by the way the graph was made.
NAMES = {
    "conv": (
        "aten::_convolution",
        "aten::_convolution_mode",
        "aten::convolution",
        "aten::conv1d",
        "aten::conv2d",
        "aten::conv3d",
        "aten::conv_transpose1d",
        "aten::conv_transpose2d",
        "aten::conv_transpose3d",
    ),
    # Behind a convolution of sequences, which becomes one of images.
    "adaptive_avg_pool1d": ("aten::adaptive_avg_pool1d", "aten::adaptive_avg_pool2d"),
    # The executor takes addmm apart (alpha = beta = 1) and a table need not know it.
    "addmm": ("aten::addmm", "aten::mm"),
    "einsum": ("aten::einsum", "llga::einsum"),
    # Scripting spells it as neg and add.
    "rsub": ("aten::rsub", "aten::neg"),
    "linear": ("aten::linear", "aten::addmm", "aten::mm"),
    **{f"traced_{c}_cell": (f"llga::{c}_cell",) for c in ("lstm", "gru")},
}

_counter = itertools.count()


def net(code: str, args: str = "x", **members: nn.Module | Tensor) -> nn.Module:
    """A module whose forward is `code` of `args`: an expression, or statements with a return.

    Submodules and tensors (kept as buffers) are named in the code as `self.name`. The source is
    registered with linecache, where TorchScript's compiler looks for it.
    """
    body = code if "return" in code else f"return {code}"
    source = f"class Net(nn.Module):\n    def forward(self, {args}):\n"
    source += "".join(f"        {line}\n" for line in body.splitlines())
    name = f"<net {next(_counter)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"nn": nn, "torch": torch, "F": nn.functional, "__name__": __name__}
    exec(compile(source, name, "exec"), scope)
    module: nn.Module = scope["Net"]()
    for key, value in members.items():
        if isinstance(value, nn.Module):
            module.add_module(key, value)
        else:
            module.register_buffer(key, value)
    return module


def randomize(module: nn.Module) -> nn.Module:
    """Give norms statistics and affine parameters that are not 0 and 1: those hide mistakes."""
    with torch.no_grad():
        for m in module.modules():
            for name, low, high in (("running_mean", -0.5, 0.5), ("running_var", 0.5, 2.0)):
                if isinstance(t := getattr(m, name, None), Tensor):
                    t.uniform_(low, high)
            if "Norm" in type(m).__name__ and isinstance(m.weight, Tensor):
                m.weight.uniform_(0.5, 1.5)
                if isinstance(getattr(m, "bias", None), Tensor):
                    m.bias.uniform_(-0.5, 0.5)
    return module


def special(*shape: int) -> Make:
    """NaN, infinities, zeros of both signs and ordinary numbers."""

    def make() -> Tensor:
        x = torch.randn(shape)
        flat = x.view(-1)
        for i, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, -0.0)):
            flat[i * 7 % flat.numel() :: 29] = value
        return x

    return make


def one_by_one(channels: int = 4, weight: float = 1.0) -> nn.Conv2d:
    """A convolution that only multiplies by `weight`: exact, and NaN stays in its pixel."""
    conv = nn.Conv2d(channels, channels, 1, groups=channels, bias=False)
    nn.init.constant_(conv.weight, weight)
    return conv


def twin(x: Any, scale: float = 1.0) -> Any:
    """A copy with the same strides, storage offset and overlaps; floats times `scale`."""
    if isinstance(x, (list, tuple)):
        return type(x)(twin(i, scale) for i in x)
    if not isinstance(x, Tensor):
        return x
    if x.device.type != "cpu" or x.layout != torch.strided or x.is_quantized:
        return x.clone()
    storage = x.untyped_storage().clone()
    if scale != 1.0 and x.is_floating_point():
        flat = torch.empty(0, dtype=x.dtype).set_(storage)
        flat.mul_(scale)
    y = torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.size(), x.stride())
    return y.requires_grad_(x.requires_grad)


def to(x: Any, dtype: torch.dtype, memory_format: torch.memory_format | None = None) -> Any:
    """Floating tensors in `dtype`; 4-d and 5-d ones in `memory_format`."""
    if isinstance(x, (list, tuple)):
        return type(x)(to(i, dtype, memory_format) for i in x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if x.dtype == torch.float32:
        x = x.to(dtype)
    if memory_format == torch.channels_last and x.dim() in (4, 5):
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x = x.contiguous(memory_format=last)
    return x


def leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, (list, tuple)):
        for i in x:
            yield from leaves(i)
    else:
        yield x


def assert_same(actual: Any, expected: Any, what: str = "", tol: Tolerance | None = None) -> None:
    """Same structure, dtype and shape; numbers within the tolerance; NaN and infinities alike."""
    ours, theirs = list(leaves(actual)), list(leaves(expected))
    assert len(ours) == len(theirs), f"{what}: {len(ours)} values, eager has {len(theirs)}"
    for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
        label = f"{what}, output {i}"
        if not isinstance(e, Tensor):
            assert type(a) is type(e) and a == e, f"{label}: {a!r}, eager has {e!r}"
            continue
        assert isinstance(a, Tensor), f"{label}: {a!r}, eager has a tensor"
        assert a.dtype == e.dtype, f"{label}: {a.dtype}, eager has {e.dtype}"
        assert a.shape == e.shape, f"{label}: {tuple(a.shape)}, eager has {tuple(e.shape)}"
        assert a.device == e.device, f"{label}: {a.device}, eager has {e.device}"
        if e.is_contiguous():  # or a .view() that eager allows would raise
            assert a.is_contiguous(), f"{label}: strides {a.stride()}, eager has {e.stride()}"
        if e.device.type != "cpu" or not e.numel():
            continue
        if not e.is_floating_point() and not e.is_complex():
            assert torch.equal(a, e), f"{label}: other integers than eager"
            continue
        t = tol or TOLERANCES[e.dtype]
        finite = e[e.isfinite()]
        largest = finite.abs().max().item() if finite.numel() else 0.0
        torch.testing.assert_close(
            a,
            e,
            rtol=t.relative,
            atol=t.relative * largest,
            equal_nan=True,
            msg=lambda m, label=label: f"{label}: {m}",
        )


def walk(block: Any) -> Iterator[Any]:
    """Every node of a graph or block and of its nested blocks, not of Subgraph attributes."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from walk(inner)


class Fused(NamedTuple):
    """What the fuser made of a graph."""

    groups: list[Counter[str]]  # kinds of the nodes in each fusion group
    outside: Counter[str]  # kinds of the nodes in no group
    refused: dict[str, str]  # why, for the kinds that say so
    graph: Any

    @property
    def inside(self) -> Counter[str]:
        return sum(self.groups, Counter())

    def __str__(self) -> str:
        groups = "\n".join(f"  group {i}: {dict(g)}" for i, g in enumerate(self.groups))
        left = {k: n for k, n in self.outside.items() if k.startswith("aten::")}
        return f"{groups}\n  outside: {left}\n  refused: {self.refused}\n{self.graph}"


def fused_graph(scripted: Any, *inputs: Any) -> Fused:
    """Runs `scripted` once more and reads the optimised graph that ran."""
    graph = scripted.graph_for(*inputs)
    groups: list[Counter[str]] = []
    outside: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for node in walk(graph):
        if node.kind() == GROUP:
            groups.append(Counter(n.kind() for n in walk(node.g("Subgraph"))))
            continue
        outside[node.kind()] += 1
        if node.hasAttribute("llga_refused"):
            refused[node.kind()] = node.s("llga_refused")
    return Fused(groups, outside, refused, graph)


def kernels_of(module: nn.Module, *inputs: Tensor) -> list[str]:
    """What computes each group, in their order; nothing of groups that ran no primitive."""
    groups = llga_fuser.report(module, *inputs, rounds=1).groups
    return [group.main.implementation for group in groups if group.main is not None]


def autocast_bf16(on: bool = True) -> contextlib.AbstractContextManager[Any]:
    if not on:
        return contextlib.nullcontext()
    # The cache of casted weights would hide the casts from a trace.
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def to_script(
    fn: Any,
    inputs: Sequence[Any],
    *,
    scripted: bool = False,
    freeze: bool = True,
    autocast: bool = False,
) -> Any:
    """Trace (under bf16 autocast if asked to) or script `fn`; freeze what is a module."""
    if scripted:
        made = torch.jit.script(fn)
    else:
        with autocast_bf16(autocast):
            made = torch.jit.trace(fn, tuple(twin(i) for i in inputs), check_trace=False)
    # Not under autocast: freezing would run TorchScript's own autocast pass on top of the traced
    # casts, and that one's results have other dtypes than eager's.
    return torch.jit.freeze(made.eval()) if freeze and isinstance(fn, nn.Module) else made


def check(
    fn: Any,
    inputs: Sequence[Any],
    *,
    groups: int | None = None,
    fused: str = "",
    outside: str = "",
    dtype: torch.dtype = torch.float32,
    scripted: bool = False,
    freeze: bool = True,
    autocast: bool = False,
    memory_format: torch.memory_format | None = None,
    tol: Tolerance | None = None,
    fallbacks: bool = False,
    calls: int = 4,
) -> Fused:
    """Run `fn` eagerly and through TorchScript with the fuser on; every call has to agree.

    Calls take fresh copies of the inputs, the later ones other values; what a call did to its
    inputs, and whether an earlier result is still what it was, is compared too.

    groups     exact number of fusion groups that compute something; None: any
    fused      ops, all nodes of which must be in a group: "conv relu add"
    outside    ops of which no node may be in a group
    autocast   trace under bf16 autocast, weights and inputs stay fp32 (`dtype` is not used)
    fallbacks  groups may run in the interpreter, as they do for what oneDNN cannot take
    """
    if autocast:
        dtype = torch.float32
        tol = tol or TOLERANCES[torch.bfloat16]  # of fp32 results too: they are made of bf16 ones
    if isinstance(fn, nn.Module):
        fn = copy.deepcopy(fn).eval().to(dtype)
        if memory_format is not None:
            for m in fn.modules():
                if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
                    m.to(memory_format=memory_format)
    inputs = [to(x, dtype, memory_format) for x in inputs]
    other = [twin(x, 0.5) for x in inputs]

    def eagerly(values: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        values = [twin(x) for x in values]
        with autocast_bf16(autocast):
            return twin(fn(*values)), values

    assert llga_fuser.is_enabled()
    before = Counter(llga_fuser._C.fallbacks())
    with torch.no_grad():
        expected = {False: eagerly(inputs), True: eagerly(other)}
        script = to_script(fn, inputs, scripted=scripted, freeze=freeze, autocast=autocast)
        results = []
        for call in range(calls):
            second = call % 2 == 1
            values = [twin(x) for x in (other if second else inputs)]
            result = script(*values)
            want, want_inputs = expected[second]
            assert_same(result, want, f"call {call}", tol)
            assert_same(values, want_inputs, f"inputs after call {call}", tol)
            results.append((result, want))
        for call, (result, want) in enumerate(results):
            assert_same(result, want, f"result of call {call}, looked at after the last", tol)
        found = fused_graph(script, *(twin(x) for x in inputs))

    if not fallbacks:
        happened = Counter(llga_fuser._C.fallbacks()) - before
        assert not happened, f"ran in the interpreter: {dict(happened)}\n{found}"
    # Elsewhere only what meets a constant of bf16 is computed, in float32: see widen_bfloat16.cpp.
    if fuses(torch.bfloat16) or (dtype != torch.bfloat16 and not autocast):
        expect(found, groups=groups, fused=fused, outside=outside)
    return found


CASTS = Counter({"aten::to": 99, "aten::type_as": 99})


def expect(found: Fused, *, groups: int | None = None, fused: str = "", outside: str = "") -> None:
    """Assert on the groups of an optimised graph; `groups` counts those that compute something."""
    if groups is not None:
        # A cast of the input makes a group of its own where that saves a copy.
        computing = [g for g in found.groups if any(k.startswith("aten::") for k in g - CASTS)]
        assert len(computing) == groups, f"{len(computing)} groups, not {groups}:\n{found}"
    inside = found.inside
    for name in fused.split():
        kinds = NAMES.get(name, (f"aten::{name}",))
        assert any(inside[k] for k in kinds), f"{name} did not go in:\n{found}"
        left = [k for k in kinds if found.outside[k]]
        assert not left, f"{left} left outside:\n{found}"
    for name in outside.split():
        kinds = NAMES.get(name, (f"aten::{name}",))
        assert not any(inside[k] for k in kinds), f"{name} went in:\n{found}"


def relative_error(actual: Any, expected: Any) -> float:
    """L2 norm of the difference over that of `expected`, all tensors together; NaN if one is."""
    ours = torch.cat([t.double().flatten() for t in leaves(actual)])
    theirs = torch.cat([t.double().flatten() for t in leaves(expected)])
    return float((ours - theirs).norm() / theirs.norm())


# Whole networks, by relative L2 error against eager fp32 (single values of a deep network have no
# tolerance of their own). Another order of summation moves a value by some 1e-7, and depth makes
# that up to a hundred times larger; a wrong operator is above 1e-2.
FP32_MODEL_LIMIT = 1e-4
# In bf16 what eager itself loses to rounding is the yardstick: a fused group rounds less often than
# eager, but elsewhere, and two such errors are alike in size only.
BF16_TIMES_EAGER, BF16_MODEL_LIMIT = 2.0, 1e-2


def check_model(
    module: nn.Module,
    make: Callable[[int], tuple[Tensor, ...]],
    mode: str,
    *,
    fused: str,
    outside: frozenset[str] | None = None,
) -> None:
    """A whole network, traced: fp32, bf16 ("autocast"), or as a bf16 module ("bfloat16").

    Two sets of inputs, made by `make` from a seed, in turns; all calls are compared, and after the
    warm-up no group may run in the interpreter.

    fused     ops, all nodes of which must be in a group
    outside   the only kinds of aten nodes that may be in no group; None: any
    """
    assert llga_fuser.is_enabled()
    autocast = mode == "autocast"
    inputs = [make(seed) for seed in (1, 2)]
    limit = FP32_MODEL_LIMIT
    with torch.no_grad():
        exact = [module(*x) for x in inputs]
        differ = relative_error(exact[1], exact[0])
        assert differ > 0.05, f"the output hardly depends on the input ({differ:.1e})"
        if mode == "bfloat16":
            module = copy.deepcopy(module).bfloat16()
            inputs = [to(x, torch.bfloat16) for x in inputs]
        if mode != "fp32":
            with autocast_bf16(autocast):
                eager = [relative_error(module(*x), e) for x, e in zip(inputs, exact, strict=True)]
            limit = BF16_TIMES_EAGER * max(eager) + BF16_MODEL_LIMIT
        script = to_script(module, inputs[0], autocast=autocast)
        before = Counter(llga_fuser._C.fallbacks())
        for call in range(6):
            which = call // 2 % 2
            error = relative_error(script(*inputs[which]), exact[which])
            assert error <= limit, f"call {call}: relative error {error:.1e}, over {limit:.1e}"
        found = fused_graph(script, *inputs[0])
    happened = Counter(llga_fuser._C.fallbacks()) - before
    assert not happened, f"ran in the interpreter: {dict(happened)}"
    expect(found, fused=fused)
    if outside is not None:
        left = {k for k in found.outside if k.startswith("aten::")} - outside
        assert not left, f"{left} left outside:\n{found}"


def fuses(dtype: torch.dtype) -> bool:
    """Whether groups compute in that type on this processor."""
    if dtype == torch.bfloat16:
        info = llga_fuser._C.runtime_info()
        widened = llga_fuser._C.is_pass_enabled("widen_bfloat16")
        return info["isa"].startswith("avx512") and bool(info["bf16"] or not widened)
    return dtype == torch.float32


def has_avx2_kernels() -> bool:
    """Whether the fuser has kernels of its own in the place of oneDNN's for AVX2."""
    return llga_fuser._C.runtime_info()["isa"] in {"avx2", "avx2_vnni"}


def has_own_kernels() -> bool:
    """Whether the fuser has those of its own kernels that are for AVX-512 as well."""
    isa = llga_fuser._C.runtime_info()["isa"]
    return has_avx2_kernels() or isa.startswith("avx512")


def has_matrix_units() -> bool:
    """Whether the processor has AMX, and oneDNN uses it."""
    return "amx" in llga_fuser._C.runtime_info()["isa"]


def has_narrow_products() -> bool:
    """Whether the fuser's own matrix products are for bfloat16 too."""
    isa = llga_fuser._C.runtime_info()["isa"]
    return has_matrix_units() or isa in {"avx512_core_bf16", "avx512_core_fp16"}


def has_vnni() -> bool:
    """Whether there are AVX-512's instructions for sums of 8-bit products, and oneDNN uses them."""
    return has_narrow_products() or llga_fuser._C.runtime_info()["isa"] == "avx512_core_vnni"


def has_quantized_kernels() -> bool:
    """Whether the fuser's own products are for 8 bit too."""
    return has_vnni() or llga_fuser._C.runtime_info()["isa"] == "avx2"


def has_own_attention(dtype: torch.dtype) -> bool:
    """Whether attention is the fuser's own: in bf16 only with AVX-512."""
    narrow = llga_fuser._C.runtime_info()["isa"].startswith("avx512")
    return has_own_kernels() and (dtype == torch.float32 or narrow)


def onednn_version() -> tuple[int, ...]:
    """Of the oneDNN that runs, for what only newer versions can do."""
    return tuple(int(i) for i in llga_fuser._C.runtime_info()["onednn"].split(".")[:2])


@contextlib.contextmanager
def restored(get: Callable[[], Any], put: Callable[[Any], Any]) -> Iterator[None]:
    """Put a global setting back at the end."""
    value = get()
    try:
        yield
    finally:
        put(value)
