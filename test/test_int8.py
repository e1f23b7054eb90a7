"""8-bit graphs: what goes into one group, and that numbers agree to one quantization step.

The graphs are written by hand, as torch.ao's reference flow and others leave them: values are
quantized and dequantized between float operators, weights are dequantized constants.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dnnl_graph
import llga_fuser
from llga_fuser import _C
from util import (
    Fused,
    fused_graph,
    has_matrix_units,
    has_own_kernels,
    has_quantized_kernels,
    has_vnni,
    onednn_version,
    to_script,
)

pytestmark = pytest.mark.usefixtures("fuser", "one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_numbers() -> Iterator[None]:
    """For tests whose 8-bit numbers are so small that sums of two products fit into 16 bit."""
    before = _C.allow_int8_saturation(True)
    yield
    _C.allow_int8_saturation(before)


def qdq(x: Tensor, scale: float, zero_point: int = 0, dtype: torch.dtype = torch.quint8) -> Tensor:
    return torch.quantize_per_tensor(x, scale, zero_point, dtype).dequantize()


def weight(*shape: int, per_channel: bool = True, axis: int = 0, largest: int = 64) -> Tensor:
    """QInt8; two neighbours are at most 128 together unless `largest` is more than 64."""
    integers = torch.randint(-largest, largest, shape, dtype=torch.int8)
    integers.flatten()[0] = -largest
    if not per_channel:
        return torch._make_per_tensor_quantized_tensor(integers, 0.02, 0)
    channels = shape[axis]
    scales = torch.linspace(0.01, 0.03, channels, dtype=torch.double)
    zeros = torch.zeros(channels, dtype=torch.long)
    return torch._make_per_channel_quantized_tensor(integers, scales, zeros, axis)


class Layer(nn.Module):
    """Data in 8 bits -> a multiplying op with an 8-bit weight -> what follows."""

    def __init__(
        self,
        op: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        w: Tensor,
        bias: int | None,
        post: Callable[..., Tensor] = lambda y, other: y,
        out: tuple[float, int, torch.dtype] | None = None,
        data: tuple[float, int, torch.dtype] = (0.02, 3, torch.quint8),
    ) -> None:
        super().__init__()
        self.op, self.w, self.post, self.out, self.data = op, w, post, out, data
        self.bias = None if bias is None else nn.Parameter(torch.randn(bias), False)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = self.op(qdq(x, *self.data), self.w.dequantize(), self.bias)
        y = self.post(y, other)
        return y if self.out is None else qdq(y, *self.out)


OPS: dict[str, tuple[Any, ...]] = {
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (16, 8, 3, 3), 16, (2, 8, 9, 9)),
    "conv1x1": (lambda x, w, b: F.conv2d(x, w, b), (32, 16, 1, 1), 32, (2, 16, 7, 7)),
    "strided": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), (16, 3, 3, 3), 16, (1, 3, 16, 16)),
    "depthwise": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=16),
        (16, 1, 3, 3),
        16,
        (2, 16, 9, 9),
    ),
    "grouped": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2),
        (16, 8, 3, 3),
        16,
        (1, 16, 8, 8),
    ),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (16, 8, 3), 16, (2, 8, 20)),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b), (8, 4, 3, 3, 3), 8, (1, 4, 6, 6, 6)),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        (8, 16, 3, 3),
        16,
        (1, 8, 7, 7),
    ),
    "linear": (F.linear, (24, 32), 24, (5, 32)),
    "linear3d": (F.linear, (24, 32), 24, (2, 5, 32)),
    "matmul": (lambda x, w, b: torch.matmul(x, w), (32, 24), None, (2, 5, 32)),
}

POSTS: dict[str, tuple[Any, int]] = {  # what follows, and with how many ops more
    "none": (lambda y, other: y, 0),
    "relu": (lambda y, other: F.relu(y), 0),
    "clamp": (lambda y, other: torch.clamp(y, 0.0, 6.0), 0),
    "silu": (lambda y, other: F.silu(y), 0),
    "hardswish": (lambda y, other: F.hardswish(y), 0),
    "gelu": (lambda y, other: F.gelu(y), 0),
    "sigmoid": (lambda y, other: torch.sigmoid(y), 0),
    "add": (lambda y, other: y + qdq(other, 0.05, 7), 0),
    "add_relu": (lambda y, other: F.relu(y + qdq(other, 0.05, 7)), 0),
}

OUTPUTS: dict[str, tuple[float, int, torch.dtype] | None] = {
    "float": None,
    "quint8": (0.09, 11, torch.quint8),
    "qint8": (0.13, -4, torch.qint8),
}


def computing(found: Fused) -> list[Counter[str]]:
    """The groups, without those that only quantize what comes in."""
    quantizing = {"prim::Constant", "aten::quantize_per_tensor"}
    return [group for group in found.groups if not quantizing.issuperset(group)]


def run(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    step: float | None = None,
    apart: float = 0.02,
    groups: int | None = 1,
    inside: str = "",
    fallbacks: bool = False,
) -> Fused:
    """Compares with eager, call by call; `step` is what one quantization step may change, `apart`
    the share of the numbers that may differ by one.
    """
    before = Counter(_C.fallbacks())
    with torch.no_grad():
        expected = module(*inputs)
        script = to_script(module, inputs)
        for _ in range(4):
            result = script(*inputs)
            assert result.dtype == expected.dtype and result.shape == expected.shape
            if result.is_quantized:
                assert result.qscheme() == expected.qscheme()
                assert result.q_scale() == expected.q_scale()
                assert result.q_zero_point() == expected.q_zero_point()
            a, e = result.dequantize(), expected.dequantize()
            # Sums of integers are exact in both; scales are multiplied in another order.
            slack = 2e-5 * float(e.abs().max())
            limit = slack if step is None else 1.001 * step + slack
            assert float((a - e).abs().max()) <= limit
            if step is not None:  # a step apart only where the value lies between two
                assert float(((a - e).abs() > step / 2).float().mean()) < apart
        found = fused_graph(script, *inputs)
    happened = Counter(_C.fallbacks()) - before
    assert fallbacks or not happened, f"ran in the interpreter: {dict(happened)}\n{found}"
    if groups is not None:
        assert len(computing(found)) == groups, str(found)
    for name in inside.split():
        assert any(k.startswith(f"aten::{name}") for k in found.inside), str(found)
        assert not any(k.startswith(f"aten::{name}") for k in found.outside), str(found)
    return found


def other_operand(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.randn_like(module(x, torch.zeros(())))


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("op", OPS)
def test_pattern(op: str, post: str, out: str) -> None:
    function, shape, bias, data_shape = OPS[op]
    w = weight(*shape, per_channel=op != "matmul", axis=1 if op == "transposed" else 0)
    x = torch.rand(data_shape) * 4 - 0.05
    plain = Layer(function, w, bias)
    other = other_operand(plain, x)
    target = OUTPUTS[out]
    if target is not None:  # values that fill the range of the output
        with torch.no_grad():
            low, high = torch.aminmax(POSTS[post][0](plain(x, other), other))
        target = (max(float(high - low) / 200, 1e-3), *target[1:])
    module = Layer(function, w, bias, POSTS[post][0], target)
    found = run(module, (x, other), step=None if target is None else target[0])
    # Only the quantization of what comes in may be left to aten, and views of sequences.
    left = {k for k in found.outside if k.startswith("aten::")}
    views = {"aten::unsqueeze", "aten::squeeze"} if op == "conv1d" else set()
    assert left <= {"aten::quantize_per_tensor", "aten::dequantize"} | views, str(found)
    # oneDNN adds 8-bit data only where the sum becomes 8 bits wide as well.
    lone = target is not None or post.startswith("add")
    assert found.outside["aten::dequantize"] <= lone, str(found)


@pytest.mark.parametrize("data", [(0.02, 0, torch.quint8), (0.02, 128, torch.quint8)])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("op", ["conv", "depthwise", "linear", "transposed"])
def test_parameters(op: str, per_channel: bool, data: tuple[float, int, torch.dtype]) -> None:
    function, shape, bias, data_shape = OPS[op]
    w = weight(*shape, per_channel=per_channel, axis=1 if op == "transposed" else 0)
    x = torch.randn(data_shape)
    module = Layer(function, w, bias, data=data)
    run(module, (x, torch.zeros(())), inside=F.conv2d.__name__ if op == "none" else "")
    run(Layer(function, w, None, data=data), (x, torch.zeros(())))


@pytest.mark.usefixtures("small_numbers")
@pytest.mark.parametrize("op", ["conv", "linear"])
def test_signed_data(op: str) -> None:
    function, shape, bias, data_shape = OPS[op]
    if _C.runtime_info()["isa"] == "avx2":
        pytest.skip("oneDNN halves the weights of signed data here, which rounds them")
    w = weight(*shape, largest=32)
    run(
        Layer(function, w, bias, data=(0.02, 5, torch.qint8)),
        (torch.randn(data_shape), torch.zeros(())),
    )


class Product(nn.Module):
    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.op(qdq(a, 0.05, 10), qdq(b, 0.05, 0, torch.qint8))


@pytest.mark.usefixtures("small_numbers")
@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (torch.matmul, ((2, 3, 7, 16), (2, 3, 16, 5))),
        (torch.bmm, ((4, 7, 16), (4, 16, 5))),
        (torch.mm, ((7, 16), (16, 5))),
    ],
)
def test_products_of_data(op: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (torch.randn(s) for s in shapes)
    run(Product(op), (a, b), inside=op.__name__)


class Attention(nn.Module):
    """Self-attention as quantization leaves it: two products of data, softmax between."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weight(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv = qdq(F.linear(qdq(x, 0.05, 60), self.w.dequantize()), 0.4, 0, torch.qint8)
        q, k, v = (p.view(b, t, 4, 8).transpose(1, 2) for p in qkv.chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * 0.05
        attended = qdq(scores.softmax(-1), 1 / 255, 0) @ v
        return qdq(attended.transpose(1, 2).reshape(b, t, c), 0.2, 0, torch.qint8)


@pytest.mark.usefixtures("small_numbers")
def test_attention() -> None:
    found = run(
        Attention(),
        (torch.randn(2, 10, 32),),
        step=0.2,
        groups=None,
        inside="linear matmul softmax",
    )
    # Views are of 8-bit values: nothing float lies between the linear layer and the products.
    assert found.outside["aten::dequantize"] <= 1, str(found)


class Attended(nn.Module):
    """`scaled_dot_product_attention` of 8-bit values whose heads lie side by side."""

    def __init__(
        self,
        dtype: torch.dtype,
        zero_points: tuple[int, int, int],
        out: bool,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dtype, self.out, self.options = dtype, out, options
        self.least = 0 if dtype == torch.quint8 else -128
        self.zero_points = [z + self.least for z in zero_points]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            qdq(x, scale, zero_point, self.dtype).transpose(1, 2)
            for x, scale, zero_point in zip(
                (q, k, v), (0.03, 0.025, 0.02), self.zero_points, strict=True
            )
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        if not self.out:
            return y
        return qdq(y.transpose(1, 2).flatten(2), 0.01, self.least + 100, self.dtype)


def attended_inputs(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of so many heads of queries and of keys, numbers of a key and of a value."""
    queries, keys = lengths
    return (
        torch.randn(batch, queries, heads[0], sizes[0]),
        torch.randn(batch, keys, heads[1], sizes[0]),
        torch.randn(batch, keys, heads[1], sizes[1]),
    )


def hidden(queries: int, keys: int) -> Tensor:
    """Every other key, at random, and all of one query."""
    mask = torch.rand(queries, keys) > 0.5
    mask[queries // 2] = False
    return mask


def lower(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def added(queries: int, keys: int) -> Tensor:
    return torch.randn(queries, keys)


ATTENDED: dict[str, tuple[Any, ...]] = {  # batch, heads, lengths, sizes, mask, options
    "whole registers": (2, (2, 2), (64, 128), (64, 64), None, {}),
    "odd sizes": (1, (3, 3), (70, 33), (18, 21), None, {}),
    "few numbers": (2, (1, 1), (5, 3), (1, 2), None, {}),
    "many keys": (1, (2, 2), (65, 1100), (32, 24), None, {}),
    "causal": (1, (2, 2), (200, 200), (32, 32), None, {"is_causal": True}),
    "triangle": (1, (2, 2), (700, 700), (16, 16), lower, {}),
    "hidden": (2, (2, 2), (70, 33), (20, 17), hidden, {}),
    "added": (1, (2, 2), (40, 600), (16, 16), added, {}),
    "one query": (1, (2, 2), (1, 50), (18, 16), added, {}),
    "large values": (1, (1, 1), (9, 20), (16, 600), None, {}),
    "scale": (1, (2, 2), (40, 40), (16, 16), None, {"scale": 0.7}),
    "grouped heads": (1, (4, 2), (40, 40), (16, 16), None, {"enable_gqa": True}),
}


@pytest.mark.parametrize("out", [False, True], ids=["float", "8bit"])
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8], ids=["quint8", "qint8"])
@pytest.mark.parametrize("case", ATTENDED)
@pytest.mark.skipif(not has_vnni(), reason="attention of 8 bits needs VNNI")
def test_attention_of_8_bits(case: str, dtype: torch.dtype, out: bool) -> None:
    """One group with what dequantizes before it and quantizes behind. Exponentials are multiplied
    as 16 bits, which is an error of 2^-17 for each: 3e-5 of the largest value, at random."""
    batch, heads, lengths, sizes, mask, options = ATTENDED[case]
    for zero_points in ((128, 128, 128), (10, 200, 90)):
        inputs = attended_inputs(batch, heads, lengths, sizes)
        if mask is not None:
            inputs = (*inputs, mask(*lengths))
        m = Attended(dtype, zero_points, out, **options)
        step, apart = (0.01, 0.02) if out else (1e-4, 0.2)
        found = run(m, inputs, step=step, apart=apart, groups=None, inside="scaled_dot")
        (group,) = (g for g in found.groups if g["aten::scaled_dot_product_attention"])
        assert group["aten::dequantize"] == 3
        assert group["aten::quantize_per_tensor"] == int(out)


@pytest.mark.skipif(not has_vnni(), reason="attention of 8 bits needs VNNI")
def test_attention_of_8_bits_by_own_kernel() -> None:
    m = Attended(torch.quint8, (128, 120, 130), True)
    inputs = attended_inputs(2, (2, 2), (96, 96), (32, 32))
    script = to_script(m, inputs)
    assert "llga_attention:avx512_vnni" in str(llga_fuser.report(script, *inputs))


@pytest.mark.skipif(not has_vnni(), reason="attention of 8 bits needs VNNI")
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_attention_of_8_bits_with_a_mask_that_is_not_finite(number: float) -> None:
    """The query that meets it has NaN as its result, and no other one."""
    m = Attended(torch.quint8, (128, 128, 128), False)
    inputs = attended_inputs(1, (2, 2), (20, 40), (16, 16))
    mask = torch.zeros(20, 40)
    mask[3, 7] = number
    with torch.no_grad():
        script = to_script(m, (*inputs, mask))
        result, expected = script(*inputs, mask), m(*inputs, mask)
    assert expected[:, :, 3].isnan().all()
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0, equal_nan=True)


def test_attention_of_some_8_bit_values_is_left_in_float() -> None:
    """Of three operands one is float: each is dequantized, and numbers are as in eager."""

    class Mixed(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(qdq(q, 0.03, 128), k, qdq(v, 0.02, 128))

    run(Mixed(), tuple(torch.randn(1, 2, 30, 16) for _ in range(3)), groups=None)


def test_saturation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of full range: exact where the processor has VNNI, else left in float."""
    function, _, bias, data_shape = OPS["conv"]
    w = weight(16, 8, 3, 3, largest=127)
    module = Layer(function, w, bias, data=(0.02, 0, torch.quint8))
    x = torch.rand(data_shape) * 5
    saturates = _C.runtime_info()["int8_saturates"]
    found = run(module, (x, torch.zeros(())), groups=0 if saturates else 1)
    assert not saturates or "16 bit" in str(found.refused), str(found)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = weight(width, width, 3, 3), weight(width, width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = qdq(F.relu(F.conv2d(x, self.a.dequantize(), None, padding=1)), 0.5)
        return qdq(F.relu(F.conv2d(y, self.b.dequantize()) + x), 0.5)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = weight(16, 3, 3, 3)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = weight(10, 16 * 16)

    def forward(self, x: Tensor) -> Tensor:
        x = qdq(F.relu(F.conv2d(qdq(x, 0.02, 128), self.stem.dequantize(), None, 2, 1)), 0.05)
        x = self.blocks(x)
        x = qdq(F.max_pool2d(x, 2), 0.5)
        x = qdq(torch.flatten(x, 1), 0.5)
        return F.linear(x, self.head.dequantize())


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_of_few_planes(channels: int) -> None:
    """They are brought into the order of channels last in 8 bits."""
    last = weight(8, 32, 1, 1)

    def layers(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = F.relu(F.conv2d(x, w, bias, stride=2))
        return F.conv2d(qdq(y, 0.09), last.dequantize())

    module = Layer(layers, weight(32, channels, 3, 3), 32).eval()
    x, other = torch.rand(2, channels, 33, 35) * 4 - 0.05, torch.zeros(())
    # A number of the first layer that lies between two steps moves all results of a pixel.
    run(module, (x, other), groups=None, step=0.09 * 0.03 * 64, apart=0.02)
    found = llga_fuser.report(module, x, other, rounds=1).conversions
    owns = channels > 1 and has_own_kernels()
    assert any("llga_interleave" in c.text for c in found) == owns, found


@pytest.mark.parametrize("scale", [0.25, 0.02])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "size",
    [(2, 3, 33, 35), (1, 2, 40, 40), (1, 4, 150, 64), (3, 3, 8, 8), (1, 1, 64, 50), (2, 30, 9, 7)],
    ids=str,
)
def test_quantizing_what_comes_in(size: tuple[int, ...], last: bool, scale: float) -> None:
    """Exactly as PyTorch rounds it, NaN and infinities included."""
    one = torch.eye(size[1]).reshape(size[1], size[1], 1, 1)
    w = torch.quantize_per_tensor(one, 1.0, 0, torch.qint8)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(qdq(x, scale, 31), w.dequantize())

    x = torch.randint(-200, 600, size) * (scale / 2)  # half of them between two steps
    specials = torch.tensor([math.inf, -math.inf, math.nan])
    x = x.to(memory_format=torch.channels_last) if last else x
    with torch.no_grad():
        expected = Module()(x)
        script = to_script(Module(), (x,))
        for _ in range(3):
            torch.testing.assert_close(script(x), expected, rtol=1e-6, atol=0)
        found = kernels(script, x)
        x[0, 0, 0, :3], x[-1, -1, -1, -3:] = specials, specials
        torch.testing.assert_close(script(x), Module()(x), rtol=1e-6, atol=0)
    assert ("llga_quantize" in found) == has_own_kernels(), found


def test_quantizing_what_others_read() -> None:
    """What is handed out keeps the order that eager gives it."""
    w = weight(8, 3, 3, 3)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q = torch.quantize_per_tensor(x, 0.02, 128, torch.quint8)
            return q, F.conv2d(q.dequantize(), w.dequantize())

    x = torch.randn(1, 3, 40, 40)
    with torch.no_grad():
        expected, _ = Module()(x)
        script = to_script(Module(), (x,))
        for _ in range(3):
            q, _ = script(x)
            assert q.stride() == expected.stride() and q.q_scale() == expected.q_scale()
            assert torch.equal(q.int_repr(), expected.int_repr())


def test_residual_blocks_stay_in_8_bits() -> None:
    module, x = Residual().eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = module(x)
        script = llga_fuser.compile(module, x)
        torch.testing.assert_close(
            script(x), expected, rtol=0.02, atol=0.02 * float(expected.abs().max())
        )
    report = llga_fuser.report(script, x).to_dict()
    types = [o["dtype"] for g in report["groups"] for o in g["outputs"]]
    assert types[:-1] and set(types[:-1]) == {"quint8"}, types
    # The input is quantized; 5 convolutions, pool, linear.
    assert report["summary"]["groups"] == 8, report["summary"]


def test_groups_run_in_dnnl_graph() -> None:
    module, x = Residual().eval(), torch.randn(2, 3, 16, 16)
    report = llga_fuser.report(module, x)
    assert len(report.partitions) >= 4
    for partition in report.partitions:
        graph = dnnl_graph.load(json.loads(partition.to_json()))
        result = dnnl_graph.run(graph, {**partition.constants, **partition.inputs})
        for tid, value in partition.outputs.items():
            assert torch.equal(torch.from_numpy(result[tid]), value)


@pytest.mark.parametrize("scripted", [False, True])
def test_any_shape_and_thread_count(scripted: bool) -> None:
    function, shape, bias, _ = OPS["conv"]
    module = Layer(function, weight(*shape), bias, out=(0.2, 3, torch.quint8))
    script = to_script(module, (torch.rand(2, 8, 9, 9), torch.zeros(())))
    before = Counter(_C.fallbacks())
    for size in ((2, 8, 9, 9), (2, 8, 9, 9), (1, 8, 5, 7), (3, 8, 12, 4), (2, 8, 9, 9)):
        for strides in ("plain", "channels_last", "sliced"):
            x = torch.rand(size) * 4
            if strides == "channels_last":
                x = x.contiguous(memory_format=torch.channels_last)
            elif strides == "sliced":
                x = torch.rand(size[0], 16, *size[2:])[:, ::2] * 4
            with torch.no_grad():
                a, e = script(x, torch.zeros(())), module(x, torch.zeros(()))
            assert float((a - e).abs().max()) <= 0.2001
    assert not Counter(_C.fallbacks()) - before


class ReadsQuantized(nn.Module):
    """A quantized tensor leaves the group, and other quantized ops read it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weight(16, 8, 3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.conv2d(qdq(x, 0.02), self.w.dequantize())
        q = torch.quantize_per_tensor(y, 0.3, 5, torch.quint8)
        return q, q.int_repr(), torch.relu(q).dequantize()


def test_results_are_quantized_tensors() -> None:
    module, x = ReadsQuantized(), torch.rand(1, 8, 9, 9) * 4
    with torch.no_grad():
        script = to_script(module, (x,))
        for _ in range(3):
            q, integers, positive = script(x)
            eq, _, _ = module(x)
            assert q.is_quantized and q.q_scale() == eq.q_scale() and q.q_zero_point() == 5
            assert torch.equal(q.int_repr(), integers)
            assert torch.equal(positive, torch.relu(q).dequantize())
            assert int((q.int_repr().int() - eq.int_repr().int()).abs().max()) <= 1
        found = fused_graph(script, x)
    assert len(computing(found)) == 1, str(found)
    copied = copy.deepcopy(q)
    assert copied.q_scale() == q.q_scale() and (q.dequantize() + 1).shape == q.shape


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
}


@pytest.mark.parametrize("name", POOLS)
def test_pool(name: str) -> None:
    def module(x: Tensor) -> Tensor:
        return qdq(POOLS[name](qdq(x, 0.03, 100)), 0.03, 100)

    run_function(module, torch.randn(2, 8, 12, 12), 0.03, name)


def run_function(function: Callable[[Tensor], Tensor], x: Tensor, step: float, inside: str) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    run(Module(), (x,), step=step, inside=inside)


def test_cat() -> None:
    def module(x: Tensor) -> Tensor:
        parts = [qdq(x[:, i : i + 3], 0.03, 100) for i in (0, 3)]
        return qdq(torch.cat(parts, 1), 0.03, 100)

    run_function(module, torch.randn(2, 6, 8, 8), 0.03, "cat")


class Pooled(NamedTuple):
    size: tuple[int, int, int, int]
    window: Any = 3
    stride: Any = 2
    padding: Any = 1
    dilation: Any = 1
    ceil_mode: bool = False


MAX_POOLS = {
    "usual": Pooled((2, 64, 17, 18)),
    "no padding": Pooled((1, 32, 16, 20), 2, 2, 0),
    "uneven channels": Pooled((3, 83, 9, 8)),
    "few channels": Pooled((1, 3, 12, 12)),
    "many channels": Pooled((1, 300, 7, 7), 3, 1),
    "uneven window": Pooled((1, 24, 13, 20), (5, 2), (1, 3), (2, 0)),
    "dilated": Pooled((1, 24, 15, 15), 3, 1, 1, 2),
    "ceil_mode": Pooled((1, 24, 12, 13), 3, 2, 0, ceil_mode=True),
    "all of an image": Pooled((2, 24, 6, 6), 6, 1, 0),
}


@pytest.mark.parametrize("case", MAX_POOLS)
def test_max_pool_of_channels_last_images(case: str) -> None:
    """They have a kernel of our own."""
    c = MAX_POOLS[case]

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.max_pool2d(
                qdq(x, 0.03, 100), c.window, c.stride, c.padding, c.dilation, c.ceil_mode
            )
            return qdq(y, 0.03, 100)

    x = torch.randn(c.size).to(memory_format=torch.channels_last)
    run(Module(), (x,), step=0.03, apart=1e-9, inside="max_pool2d")
    with torch.no_grad():
        found = kernels(to_script(Module(), (x,)), x)
    assert ("llga_max_pool" in found) == has_own_kernels(), found


class Joined(nn.Module):
    """Images of 8 bits, all with the same scale -> their channels."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return qdq(torch.cat([qdq(x, 0.03, 100), qdq(y, 0.03, 100)], 1), 0.03, 100)


@pytest.mark.parametrize("channels", [(16, 32), (4, 68), (3, 7), (1, 70)])
def test_cat_of_channels_last_images(channels: tuple[int, int]) -> None:
    """A kernel of our own copies them, four numbers at a time."""
    x, y = (torch.randn(2, c, 8, 9).mul(3).to(memory_format=torch.channels_last) for c in channels)
    run(Joined(), (x, y), step=0.03, apart=1e-9, inside="cat")
    with torch.no_grad():
        found = kernels(to_script(Joined(), (x, y)), x, y)
    own = has_own_kernels() and all(c % 4 == 0 for c in channels)
    assert ("llga_concat" in found) == own, found


class Picks(nn.Module):
    """Float convolution results -> max pooling and cat -> 8 bits, and 8 bits -> both -> linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight(8, 8, 3, 3), weight(8, 8, 1, 1)
        self.c = weight(10, 64)

    def forward(self, x: Tensor) -> Tensor:
        d = qdq(x, 0.02, 100)
        branches = [
            F.max_pool2d(F.conv2d(d, self.a.dequantize(), padding=1), 2),
            F.relu(F.conv2d(d, self.b.dequantize(), stride=2)),
        ]
        y = qdq(torch.cat(branches, 1), 0.2, 60)
        pooled = torch.cat([F.max_pool2d(y, 2), F.max_pool2d(y.flip(-1), 2)], 1)
        return F.linear(pooled[:, ::2].flatten(1), self.c.dequantize())


def test_max_pool_and_cat_take_8_bits() -> None:
    module, x = Picks(), torch.randn(2, 8, 8, 8)
    with torch.no_grad():
        expected = module(x)
        script = to_script(module, (x,))
        for _ in range(3):
            # A rounding that falls to the other side moves a sum by 0.2 times a weight.
            torch.testing.assert_close(script(x), expected, rtol=0, atol=0.4)
        found = fused_graph(script, x)
    with_8_bits = [g for g in found.groups if g["aten::quantize_per_tensor"]]
    kinds = [
        k for g in with_8_bits for k in ("conv", "max_pool2d", "cat") if any(k in n for n in g)
    ]
    assert kinds.count("conv") == 2 and "max_pool2d" in kinds and "cat" in kinds, str(found)


def test_softmax_and_layer_norm_quantize() -> None:
    run_function(
        lambda x: qdq(torch.softmax(x, -1), 1 / 255), torch.randn(4, 32), 1 / 255, "softmax"
    )
    run_function(
        lambda x: qdq(F.layer_norm(x, (32,)), 0.03, 128), torch.randn(4, 32), 0.03, "layer_norm"
    )


MOVES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "view": ((2, 4, 32), lambda x: x.view(8, 32)),
    "reshape": ((2, 32, 4), lambda x: x.transpose(1, 2).reshape(8, 32)),
    "flatten": ((2, 8, 2, 2), lambda x: x.flatten(1)),
    "squeeze": ((4, 1, 32), lambda x: x.squeeze()),
    "squeeze.dim": ((4, 1, 32), lambda x: x.squeeze(1)),
    "squeeze.dims": ((4, 1, 1, 32), lambda x: x.squeeze((1, 2))),
    "unsqueeze": ((4, 32), lambda x: x.unsqueeze(1)),
    "transpose": ((2, 32, 4), lambda x: x.transpose(1, 2)),
    "permute": ((32, 2, 4), lambda x: x.permute(1, 2, 0)),
    "t": ((32, 4), lambda x: x.t()),
    "slice": ((4, 40), lambda x: x[:, 4:36]),
    "select": ((4, 3, 32), lambda x: x[:, 1]),
    "contiguous": ((2, 32, 4), lambda x: x.transpose(1, 2).contiguous()),
    "chunk": ((4, 64), lambda x: x.chunk(2, -1)[1]),
    "view_of_transposed": ((2, 32, 4), lambda x: x.transpose(1, 2).contiguous().view(8, 32)),
}


class Moved(nn.Module):
    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.move, self.w = move, weight(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.move(qdq(x, 0.02, 100)), self.w.dequantize())


@pytest.mark.parametrize("name", MOVES)
def test_numbers_are_moved_in_8_bits(name: str) -> None:
    shape, move = MOVES[name]
    found = run(Moved(move), (torch.randn(shape),), inside="linear")
    assert not found.outside["aten::dequantize"], str(found)


@pytest.mark.parametrize("name", [n for n in MOVES if n not in ("slice", "select", "chunk")])
def test_results_are_moved_in_8_bits(name: str) -> None:
    shape, move = MOVES[name]
    width = shape[-1]

    class Lifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight(width, width)

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(qdq(x, 0.02, 100), self.w.dequantize())
            return torch.quantize_per_tensor(move(y), 0.3, 90, torch.quint8)

    found = run(Lifted(), (torch.randn(shape),), step=0.3, inside="linear quantize")
    (group,) = computing(found)
    assert group["aten::quantize_per_tensor"] == 1, str(found)


def test_both_operands_are_one_value() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            d = qdq(x, 0.02, 100)
            return F.relu(d + d) * d

    run(Twice(), (torch.randn(3, 8, 4, 4),), groups=None)


def test_parameters_that_are_not_constant_stay_outside() -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight(16, 8, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            scale = x.abs().max() / 100
            zero = torch.zeros((), dtype=torch.long)
            q = torch.quantize_per_tensor(x, scale, zero, torch.quint8)
            return F.conv2d(q.dequantize(), self.w.dequantize())

    found = run(Dynamic(), (torch.rand(1, 8, 9, 9),), groups=None, fallbacks=True)
    assert not any(k == "aten::quantize_per_tensor" for k in found.inside), str(found)


def test_wide_and_narrow_quantization() -> None:
    """32 bit is not for oneDNN; numbers are eager's."""

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(qdq(x, 0.01, 0, torch.qint32))

    run(Wide(), (torch.randn(3, 4),), groups=0)


def test_a_dequantized_value_that_is_written_to() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight(16, 8, 3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            d = qdq(x, 0.02)
            d[:, 0] = 1.0
            return F.conv2d(d, self.w.dequantize()), d

    module, x = Writes(), torch.rand(1, 8, 9, 9) * 4
    with torch.no_grad():
        script = to_script(module, (x,))
        for _ in range(3):
            for a, e in zip(script(x), module(x), strict=True):
                torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_nan_is_quantized_as_in_eager() -> None:
    function, shape, bias, data_shape = OPS["conv"]
    module = Layer(function, weight(*shape), bias, out=(0.2, 3, torch.quint8))
    x = torch.rand(data_shape)
    with torch.no_grad():
        script = to_script(module, (x, torch.zeros(())))
        for value in (float("nan"), float("inf"), -float("inf"), 0.0):
            x[0, 0, 4, 4] = value
            for _ in range(3):
                a, e = script(x, torch.zeros(())), module(x, torch.zeros(()))
                assert float((a - e).abs().max()) <= 0.2001


PACKED: dict[str, tuple[Any, ...]] = {
    "conv": (OPS["conv"][0], (64, 32, 3, 3), (1, 32, 8, 8), (2, 32, 9, 9)),
    "linear": (F.linear, (96, 64), (40, 64), (70, 64)),
}


@pytest.mark.parametrize("case", PACKED)
def test_weights_are_packed_once_in_8_bits(case: str) -> None:
    function, shape, *sizes = PACKED[case]
    w = weight(*shape)
    module = Layer(function, w, None, data=(0.02, 0, torch.quint8)).eval()
    x, y = (torch.rand(size) for size in sizes)
    before = llga_fuser.cache_info().packed_bytes
    made = llga_fuser.compile(module, [(x, torch.zeros(())), (y, torch.zeros(()))])
    grown = llga_fuser.cache_info().packed_bytes - before
    assert w.numel() <= grown <= 1.5 * w.numel()  # blocks may be padded; not 4 bytes each
    with torch.no_grad():
        torch.testing.assert_close(
            made(x, torch.zeros(())), module(x, torch.zeros(())), rtol=1e-4, atol=1e-4
        )


def test_release_of_weights_around_8_bits() -> None:
    """Those of float32 are freed; those in 8 bit, per channel, stay as they are."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 48)
            self.second = weight(40, 48)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(qdq(self.first(x), 0.05, 128), self.second.dequantize())

    module, x = Mixed().eval(), torch.randn(6, 64)
    with torch.no_grad():
        expected = module(x)
        fast = llga_fuser.compile(module, x, release_weights=True)
        for rows in (6, 3):
            torch.testing.assert_close(fast(x[:rows]), expected[:rows], rtol=0, atol=0.1)


def test_bf16_around_8_bits() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight(16, 8, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            data = qdq(x, 0.02).to(torch.bfloat16)
            y = F.relu(F.conv2d(data, self.w.dequantize().to(torch.bfloat16)))
            return qdq(y.float(), 0.3)

    # The group does not round to bf16 what it quantizes. Up to 32 eager does, to a multiple of 1/8:
    # on average by 1/32, which is a tenth of a step.
    run(Mixed(), (torch.rand(1, 8, 9, 9) * 4,), step=0.3, apart=0.1, inside="_convolution")


# Not those that add an input: a tensor without dimensions would not make float32 of a sum.
@pytest.mark.parametrize("post", [post for post in POSTS if not post.startswith("add")])
@pytest.mark.parametrize("op", ["conv", "depthwise", "linear", "matmul"])
def test_autocast(op: str, post: str) -> None:
    """The casts of autocast part no group: products are those of 8 bits."""
    function, shape, bias, data_shape = OPS[op]
    x = torch.rand(data_shape) * 4

    def finish(y: Tensor, other: Tensor) -> Tensor:
        return qdq(POSTS[post][0](y, other).float(), 0.1, 11)

    w = weight(*shape, per_channel=op != "matmul")
    module = Layer(function, w, bias, finish)
    inputs = (x, torch.zeros(()))
    target = (0.1, 11, torch.quint8)
    plain = run(Layer(function, w, bias, POSTS[post][0], target), inputs, step=0.1)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            expected = module(*inputs)
        script = to_script(module, inputs, autocast=True)
        for _ in range(4):
            apart = (script(*inputs) - expected).abs() / 0.1
            # Eager rounds data, weights and sums, here up to 25, to bfloat16: sums by 0.06 at most.
            assert apart.max() < 2.1 and apart.mean() < 0.25
        found = fused_graph(script, *inputs)
        with torch.autocast("cpu", torch.bfloat16):  # for which TorchScript has a graph of its own
            for _ in range(4):
                assert (script(*inputs) - expected).abs().max() < 0.21
    assert found.groups == plain.groups, f"{plain}\n{found}"
    assert not found.outside["aten::to"], str(found)


@pytest.mark.parametrize("op", ["conv", "linear", "depthwise"])
def test_float_data_with_8_bit_weights(op: str) -> None:
    """Nothing multiplies them: the group makes floats of them, once."""
    function, shape, _bias, data_shape = OPS[op]

    class WeightOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight(*shape, largest=127)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(function(x, self.w.dequantize(), None))

    found = run(WeightOnly(), (torch.randn(data_shape),))
    assert not found.outside["aten::dequantize"], str(found)


# ---------------------------------------------------------------------------- kernels of our own


def own_kernels(script: Any, *inputs: Tensor) -> list[bool]:
    """Of each product, whether a kernel of our own computes it."""
    groups = llga_fuser.report(script, *inputs, rounds=1).groups
    kinds = ("convolution", "matmul")
    return [
        primitive.implementation.startswith("llga_quantized:")
        for group in groups
        for primitive in group.primitives
        if primitive.kind in kinds
    ]


class Blocks(NamedTuple):
    """A depthwise convolution in 8 bit, and maybe pointwise ones around it."""

    size: tuple[int, int, int, int]
    channels: int  # of the depthwise one
    expands: bool = True
    outputs: int = 0  # of the projection; 0: there is none
    window: int = 3
    stride: int = 1
    padding: int = 1
    inner: Callable[[Tensor], Tensor] = F.relu6
    outer: Callable[[Tensor], Tensor] = F.relu6
    last: Callable[[Tensor], Tensor] = nn.Identity()
    residual: str = ""  # "x + " or "+ x"
    zero_point: int = 3
    per_channel: bool = True
    bias: bool = True
    threads: int = 2
    own: bool = True


def plain(x: Tensor) -> Tensor:
    return x


BLOCKS = {
    "plain": Blocks((1, 16, 14, 14), 96, outputs=24),
    "stride": Blocks((1, 16, 29, 14), 96, outputs=24, stride=2),
    "residual": Blocks((2, 24, 14, 15), 144, outputs=24, residual="+ x"),
    "residual first": Blocks((1, 24, 14, 15), 64, outputs=24, residual="x + "),
    "residual, relu": Blocks((1, 24, 14, 15), 64, outputs=24, residual="+ x", last=F.relu),
    "five": Blocks((1, 8, 15, 14), 64, outputs=40, window=5, padding=2),
    "five, stride": Blocks((1, 8, 23, 20), 160, outputs=40, window=5, stride=2, padding=2),
    "no padding": Blocks((1, 8, 15, 16), 80, outputs=40, padding=0),
    "much padding": Blocks((1, 8, 6, 7), 16, outputs=4, window=5, padding=4),
    "one row": Blocks((1, 8, 1, 220), 32, outputs=7),
    "one column": Blocks((1, 8, 220, 1), 32, outputs=7),
    "many images": Blocks((5, 8, 7, 7), 208, outputs=16),
    "one thread": Blocks((1, 16, 30, 32), 80, outputs=24, threads=1),
    "odd channels": Blocks((1, 16, 14, 14), 97, outputs=19),
    "few channels": Blocks((1, 8, 14, 14), 5, outputs=3),
    # No whole tiles of inputs.
    "uneven inputs": Blocks((1, 148, 9, 15), 264, outputs=24),
    "zero point of zero": Blocks((1, 16, 14, 14), 96, outputs=24, zero_point=0),
    "large zero point": Blocks((1, 16, 14, 14), 96, outputs=24, zero_point=140, inner=plain),
    "one scale": Blocks((1, 16, 14, 14), 96, outputs=24, per_channel=False),
    "no bias": Blocks((1, 16, 14, 14), 96, outputs=24, bias=False),
    "no activation": Blocks((1, 16, 14, 14), 96, outputs=24, inner=plain, outer=plain),
    "relu": Blocks((1, 16, 14, 14), 96, outputs=24, inner=F.relu, outer=F.relu),
    "hardtanh": Blocks((1, 16, 14, 14), 96, outputs=24, inner=F.hardtanh, zero_point=9),
    "hardswish": Blocks((1, 16, 14, 14), 96, outputs=24, inner=F.hardswish, outer=F.hardswish),
    "silu": Blocks((1, 16, 14, 14), 96, outputs=24, inner=F.silu, outer=F.silu),
    "gelu": Blocks((1, 16, 14, 14), 40, outputs=24, inner=F.gelu, outer=torch.sigmoid),
    "two": Blocks((1, 16, 30, 20), 112),
    "two, five": Blocks((2, 8, 31, 20), 75, window=5, stride=2, padding=2, outer=F.hardswish),
    "depthwise first": Blocks((1, 32, 30, 20), 32, expands=False, outputs=16),
    "depthwise first, odd": Blocks((2, 35, 15, 20), 35, expands=False, outputs=16, stride=2),
    "depthwise": Blocks((1, 72, 15, 20), 72, expands=False, outer=F.silu),
    "depthwise, few": Blocks((1, 3, 15, 20), 3, expands=False, window=5, padding=2),
    # What stays with oneDNN.
    "one pixel": Blocks((1, 8, 1, 1), 32, outputs=7, own=False),  # contiguous as well
    "wide": Blocks((1, 8, 2, 4100), 32, outputs=7, own=False),
    "more padding than window": Blocks((1, 8, 6, 7), 16, outputs=4, padding=3, own=False),
    "odd inputs": Blocks((1, 18, 14, 14), 48, outputs=24, own=False),
    "window": Blocks((1, 16, 14, 14), 96, outputs=24, window=7, padding=3, own=False),
    "stride of 3": Blocks((1, 16, 14, 14), 96, outputs=24, stride=3, own=False),
    "other activation": Blocks((1, 16, 14, 14), 96, outputs=24, inner=torch.tanh, own=False),
}


class Filled(nn.Module):
    """Scales are such that each value fills its range for the data of the first call."""

    def __init__(self, zero_point: int) -> None:
        super().__init__()
        self.zero_point = zero_point
        self.steps: list[float] = []

    def rounded(self, y: Tensor, index: int) -> Tensor:
        if len(self.steps) <= index:
            low, high = torch.aminmax(y)
            self.steps.append(max(float(high - low) / 240, 1e-3))
        return qdq(y, self.steps[index], self.zero_point)


class QuantizedBlock(Filled):
    def __init__(self, case: Blocks, x: Tensor) -> None:
        super().__init__(case.zero_point)
        c = case
        self.case = c
        before = c.size[1] if c.expands else c.channels
        shapes = [(c.channels, before, 1, 1), (c.channels, 1, c.window, c.window)]
        shapes.append((c.outputs, c.channels, 1, 1))
        self.weights = [
            weight(*shape, per_channel=c.per_channel) if shape[0] else None for shape in shapes
        ]
        self.biases = [
            nn.Parameter(torch.randn(s[0]), False) if c.bias and s[0] else None for s in shapes
        ]
        with torch.no_grad():
            self(x)

    def forward(self, x: Tensor) -> Tensor:
        c = self.case
        first, second, third = (None if w is None else w.dequantize() for w in self.weights)
        x = y = qdq(x, 0.02, c.zero_point)
        assert second is not None
        if c.expands:
            assert first is not None
            y = self.rounded(c.inner(F.conv2d(y, first, self.biases[0])), 0)
        else:
            self.steps = self.steps or [0.0]
        y = F.conv2d(y, second, self.biases[1], c.stride, c.padding, 1, c.channels)
        y = self.rounded(c.outer(y), 1)
        if third is not None:
            y = F.conv2d(y, third, self.biases[2])
            y = y + x if c.residual == "+ x" else x + y if c.residual else y
            y = self.rounded(c.last(y), 2)
        return y


@pytest.fixture
def all_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", BLOCKS)
def test_block(case: str) -> None:
    """Up to three convolutions are one group, and one kernel."""
    c = BLOCKS[case]
    torch.set_num_threads(c.threads)
    x = (torch.rand(c.size) * 4).to(memory_format=torch.channels_last)
    module = QuantizedBlock(c, x).eval()
    # A number that lies between two steps may pass on to all that is made of it.
    found = run(module, (x,), step=module.steps[-1], apart=0.05)
    assert found.inside["aten::_convolution"] == 1 + c.expands + bool(c.outputs), str(found)
    with torch.no_grad():
        own = own_kernels(to_script(module, (x,)), x)
    if case != "one pixel":  # its pointwise convolutions are ours, one after the other
        assert all(own) == (c.own and has_quantized_kernels()), own
    if c.own and all(own):
        assert len(own) == 1


@pytest.mark.parametrize("window", [3, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_depthwise_sums_of_the_largest_products(window: int, sign: int) -> None:
    """Neighbours under a window are given no room in 16 bit, and need none."""
    integers = torch.full((24, 1, window, window), sign * 127, dtype=torch.int8)
    w = torch._make_per_tensor_quantized_tensor(integers, 1e-4, 0)

    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.conv2d(qdq(x, 1.0, 0), w.dequantize(), padding=1, groups=24)
            return qdq(y, 1.0, 0 if sign > 0 else 255)

    x = torch.full((1, 24, 10, 10), 255.0).to(memory_format=torch.channels_last)
    run(Largest(), (x,), step=1.0)


@pytest.mark.parametrize("case", ["plain", "residual", "two", "depthwise"])
def test_block_of_contiguous_images(case: str) -> None:
    """They are not channels last, and so not for the kernel: oneDNN's, one after the other."""
    c = BLOCKS[case]
    x = torch.rand(c.size) * 4
    module = QuantizedBlock(c, x).eval()
    run(module, (x,), step=module.steps[-1], apart=0.05)


@pytest.mark.usefixtures("all_threads")
def test_block_of_changing_sizes() -> None:
    """One set of weights for all sizes and numbers of threads; the results stay apart."""
    x = (torch.rand(1, 24, 14, 15) * 4).to(memory_format=torch.channels_last)
    module = QuantizedBlock(BLOCKS["residual"], x).eval()
    with torch.no_grad():
        script = to_script(module, (x,))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for size in ((1, 24, 14, 15), (3, 24, 9, 8), (1, 24, 40, 33), (1, 24, 14, 15)):
                x = (torch.rand(size) * 4).to(memory_format=torch.channels_last)
                for _ in range(3):
                    apart = (script(x) - module(x)).abs() / module.steps[-1]
                    assert float(apart.max()) < 1.01 and float((apart > 0.5).float().mean()) < 0.05


class Shared(nn.Module):
    """What is expanded, or what of it is projected, has another reader."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code
        self.a, self.b, self.c = weight(32, 8, 1, 1), weight(32, 1, 3, 3), weight(8, 32, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = qdq(x, 0.02, 0)
        y = qdq(F.relu(F.conv2d(x, self.a.dequantize())), 0.1, 0)
        z = qdq(F.conv2d(y, self.b.dequantize(), None, 1, 1, 1, 32), 0.7, 128)
        p = F.conv2d(z, self.c.dequantize())
        if self.code == "expanded":
            return qdq(p, 3.0, 128), y + 1
        if self.code == "convolved":
            return qdq(p, 3.0, 128), z * 2
        if self.code == "sum":
            return qdq(p + x, 3.0, 128), p
        return qdq(p + qdq(F.conv2d(y, self.c.dequantize()), 1.0, 128), 3.0, 128), x


@pytest.mark.parametrize("code", ["expanded", "convolved", "sum", "both"])
def test_block_beside_others(code: str) -> None:
    module = Shared(code).eval()
    x = (torch.rand(2, 8, 12, 13) * 4).to(memory_format=torch.channels_last)
    with torch.no_grad():
        script = to_script(module, (x,))
        for _ in range(3):
            for result, expected in zip(script(x), module(x), strict=True):
                torch.testing.assert_close(result, expected, rtol=0, atol=3.01)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


PRODUCTS: dict[str, tuple[Any, ...]] = {  # what is multiplied, what follows, whether it is ours
    "rows": ((7, 64), 80, plain, True),
    "one row": ((1, 64), 1000, plain, True),
    "many rows": ((3, 300, 16), 40, F.relu, True),
    "few inputs": ((9, 4), 5, F.relu, True),
    "uneven inputs": ((45, 148), 90, F.relu, True),
    "many outputs": ((129, 320), 300, plain, True),
    "clamp": ((9, 32), 48, F.relu6, True),
    "gelu": ((2, 31, 64), 272, F.gelu, True),
    "gelu, tanh": ((2, 31, 64), 272, tanh_gelu, True),
    "silu": ((2, 31, 64), 72, F.silu, True),
    "hardswish": ((2, 31, 64), 72, F.hardswish, True),
    "sigmoid": ((2, 31, 64), 72, torch.sigmoid, True),
    "images": ((2, 32, 9, 11), 72, F.relu, True),
    "images, silu": ((2, 32, 9, 11), 33, F.silu, True),
    "one pixel": ((2, 32, 1, 1), 8, F.silu, True),
    # What stays with oneDNN.
    "odd inputs": ((7, 63), 80, plain, False),
    "tanh": ((7, 64), 80, torch.tanh, False),
    "odd inputs, tanh gelu": ((70, 63), 80, tanh_gelu, False),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("out", ["float", "quint8", "qint8"])
@pytest.mark.parametrize("addend", ["none", "float", "quint8"])
@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.usefixtures("all_threads")
def test_product(case: str, addend: str, out: str, threads: int) -> None:
    """Linear layers and pointwise convolutions, by the kernels for them where there are any."""
    torch.set_num_threads(threads)
    size, outputs, function, own = PRODUCTS[case]
    images = len(size) == 4
    x = torch.rand(size) * 4
    if images:
        x = x.to(memory_format=torch.channels_last)

    def op(data: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(data, w, bias) if images else F.linear(data, w, bias)

    def post(y: Tensor, other: Tensor) -> Tensor:
        other = qdq(other, 0.05, 7) if addend == "quint8" else other
        return function(y if addend == "none" else y + other)

    shape = (outputs, size[1], 1, 1) if images else (outputs, size[-1])
    w = weight(*shape)
    target = None
    plain_layer = Layer(op, w, outputs)
    other = other_operand(plain_layer, x)
    if out != "float":
        with torch.no_grad():
            low, high = torch.aminmax(post(plain_layer(x, other), other))
        step = max(float(high - low) / 200, 1e-3)
        target = (step, 100, torch.quint8) if out == "quint8" else (step, -20, torch.qint8)
    module = Layer(op, w, outputs, post, target)
    # SiLU behind a sum is a group of its own, as oneDNN fuses no more than the sum.
    groups = None if function is F.silu and addend != "none" else 1
    run(module, (x, other), step=None if target is None else target[0], groups=groups)
    with torch.no_grad():
        found = own_kernels(to_script(module, (x, other)), x, other)
    clamps = function in (F.relu, F.relu6)
    alike = addend != "float" if out == "quint8" else out == "float" and addend == "none"
    if not own or not has_quantized_kernels():
        assert not any(found)
    elif alike and not (out == "float" and clamps):
        assert all(found), found


def test_many_products() -> None:
    """Beside matrix units they are oneDNN's, whose kernels do more in the same time."""
    x, other = torch.rand(1100, 704) * 4, torch.zeros(())
    module = Layer(F.linear, weight(700, 704), 700, out=(3.0, 100, torch.quint8))
    run(module, (x, other), step=3.0)
    with torch.no_grad():
        found = own_kernels(to_script(module, (x, other)), x, other)
    assert all(found) == (has_quantized_kernels() and not has_matrix_units()), found


class Convolved(NamedTuple):
    """A convolution in 8 bit."""

    size: tuple[int, ...]
    outputs: int
    window: Any = 3
    stride: Any = 1
    padding: Any = 1
    dilation: Any = 1
    post: Callable[[Tensor], Tensor] = F.relu
    zero_point: int = 3
    threads: int = 2
    own: bool = True
    transposed: bool = False


def enlarging(size: tuple[int, ...], outputs: int, window: Any = 2, **more: Any) -> Convolved:
    """A transposed one whose windows do not overlap, unless `more` says so."""
    arguments = {"stride": window, "padding": 0, "transposed": True, **more}
    return Convolved(size, outputs, window, **arguments)


CONVOLUTIONS = {
    "plain": Convolved((1, 32, 28, 28), 64),
    "zero point of zero": Convolved((1, 32, 28, 28), 64, zero_point=0),
    "large zero point": Convolved((1, 32, 28, 28), 64, post=plain, zero_point=140),
    "no padding": Convolved((2, 32, 30, 34), 64, padding=0),
    "last tile overlaps": Convolved((1, 32, 9, 35), 32),
    "strided": Convolved((2, 16, 29, 57), 40, stride=2),
    "strided, pointwise": Convolved((2, 64, 28, 28), 96, window=1, stride=2, padding=0),
    "columns": Convolved((1, 24, 17, 30), 32, window=(7, 1), padding=(3, 0)),
    "joined": Convolved((2, 64, 7, 7), 96),
    "gathered": Convolved((1, 32, 8, 8), 40, window=5, padding=2),
    "gathered, dilated": Convolved((1, 32, 20, 20), 32, padding=2, dilation=2),
    "dilated": Convolved((1, 64, 32, 32), 32, padding=2, dilation=2),
    "dilated, no padding": Convolved((2, 64, 21, 35), 48, padding=0, dilation=(2, 3)),
    "dilated, mostly padding": Convolved(
        (1, 64, 33, 33), 40, padding=12, dilation=12, post=plain, zero_point=140
    ),
    "gathered, uneven": Convolved((1, 76, 28, 28), 32),
    "uneven outputs": Convolved((1, 32, 28, 28), 83),
    "few outputs": Convolved((1, 32, 28, 28), 7),
    "few inputs": Convolved((1, 4, 28, 28), 32),
    "large weight": Convolved((1, 512, 14, 14), 160),
    "large weight, small images": Convolved((5, 256, 7, 7), 288),
    "large weight, small images, gathered": Convolved((6, 256, 14, 14), 288, stride=2),
    "first layer": Convolved((2, 3, 41, 40), 32, stride=2),
    "first layer, large window": Convolved((2, 3, 40, 41), 32, 7, 2, 3),
    "first layer, large window, large zero point": Convolved(
        (1, 3, 37, 40), 64, 7, 2, 3, post=plain, zero_point=140
    ),
    "first layer, even window": Convolved((1, 3, 40, 42), 33, 6, 2, 2, post=plain, zero_point=140),
    "first layer, patches": Convolved((1, 3, 64, 48), 32, 8, 8, 0),
    "first layer, small image": Convolved((3, 3, 9, 7), 16, 7, 2, 3),
    "first layer, seven channels": Convolved((1, 7, 20, 21), 24, 4, 2, 1, zero_point=90),
    "one channel": Convolved((1, 1, 28, 28), 24, window=5, padding=2),
    "pointwise, many products": Convolved((1, 512, 34, 34), 1024, window=1, padding=0),
    "nine threads": Convolved((3, 64, 28, 28), 64, threads=9),
    "silu": Convolved((1, 32, 28, 28), 64, post=F.silu),
    "transposed": enlarging((1, 32, 16, 32), 16),
    "transposed, images": enlarging((3, 64, 9, 10), 32, post=plain),
    "transposed, last tile overlaps": enlarging((2, 32, 5, 37), 48),
    "transposed, gathered": enlarging((2, 76, 12, 13), 32, post=plain, zero_point=140),
    "transposed, columns": enlarging((1, 32, 17, 20), 64, (3, 1)),
    "transposed, large weight": enlarging((3, 512, 9, 8), 256),
    "transposed, nine threads": enlarging((1, 32, 40, 40), 32, threads=9),
    # What stays with oneDNN.
    "transposed, windows overlap": enlarging((1, 32, 16, 16), 32, 3, stride=2, own=False),
    "odd inputs": Convolved((1, 34, 28, 28), 32, own=False),
    "first layer, many lines": Convolved((1, 3, 40, 40), 32, 7, 1, 3, own=False),
    "other activation": Convolved((1, 32, 28, 28), 32, post=F.elu, own=False),
}


@pytest.mark.parametrize("out", ["float", "quint8"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "sum"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.usefixtures("all_threads")
def test_convolution(case: str, adds: bool, out: str) -> None:
    """With matrix units they have a kernel of our own."""
    c = CONVOLUTIONS[case]
    torch.set_num_threads(c.threads)
    x = (torch.rand(c.size) * 4).to(memory_format=torch.channels_last)
    window = c.window if isinstance(c.window, tuple) else (c.window, c.window)

    def op(data: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if c.transposed:
            return F.conv_transpose2d(data, w, bias, c.stride, c.padding, dilation=c.dilation)
        return F.conv2d(data, w, bias, c.stride, c.padding, c.dilation)

    def post(y: Tensor, other: Tensor) -> Tensor:
        return c.post(y + qdq(other, 0.05, 7) if adds else y)

    channels = (c.size[1], c.outputs) if c.transposed else (c.outputs, c.size[1])
    w = weight(*channels, *window, axis=1 if c.transposed else 0)
    data = (0.02, c.zero_point, torch.quint8)
    plain_layer = Layer(op, w, c.outputs, data=data)
    with torch.no_grad():
        other = torch.rand_like(plain_layer(x, x)) * 8
    target = None
    if out != "float":
        with torch.no_grad():
            low, high = torch.aminmax(post(plain_layer(x, other), other))
        target = (max(float(high - low) / 200, 1e-3), 100, torch.quint8)
    module = Layer(op, w, c.outputs, post, target, data)
    step = None if target is None else target[0]
    # SiLU behind a sum is a group of its own with oneDNN 3.2.
    # With AMX, oneDNN 3.7 gets no dilated ones, as it writes beyond its memory.
    left = c.dilation != 1 and has_matrix_units() and onednn_version() >= (3, 3)
    groups = None if adds and c.post is F.silu else 1
    run(module, (x, other), step=step, groups=groups, fallbacks=left)
    with torch.no_grad():
        groups = llga_fuser.report(to_script(module, (x, other)), x, other, rounds=1).groups
    found = [p.implementation for group in groups for p in group.primitives]
    if out == "quint8":
        assert ("llga_tiled:amx_int8" in found) == (c.own and has_matrix_units()), found
    elif not adds:  # what is cut off in float32 stays with oneDNN
        ours = c.own and c.post is not F.relu and has_matrix_units()
        assert ("llga_tiled:amx_int8" in found) == ours, found


@pytest.mark.parametrize("scale", [1e-9, 1e3])
def test_sums_far_out_of_range(scale: float) -> None:
    """They become the least and the greatest number, or zero."""
    w = weight(32, 16)
    module = Layer(F.linear, w, 32, out=(scale, 5, torch.quint8))
    x, other = torch.rand(6, 16) * 4, torch.zeros(())
    run(module, (x, other), step=scale)
    with torch.no_grad():
        numbers = set((to_script(module, (x, other))(x, other) / scale + 5).round().int().flatten())
    assert {int(n) for n in numbers} <= ({0, 255} if scale < 1 else {5})


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_biases_that_are_not_finite(value: float) -> None:
    """They are oneDNN's, and other outputs are what they were."""
    module = Layer(F.linear, weight(32, 16), 32, out=(0.5, 5, torch.quint8))
    assert module.bias is not None
    module.bias[3] = value
    x, other = torch.rand(6, 16) * 4, torch.zeros(())
    with torch.no_grad():
        script = to_script(module, (x, other))
        for _ in range(3):
            result, expected = script(x, other), module(x, other)
            rest = [i for i in range(32) if i != 3]
            assert float((result - expected)[:, rest].abs().max()) <= 0.51
        assert not any(own_kernels(script, x, other))


def kernels(script: Any, *inputs: Tensor) -> list[str]:
    """What computes the groups, without what it is compiled for."""
    groups = llga_fuser.report(script, *inputs, rounds=1).groups
    return [p.implementation.split(":")[0] for group in groups for p in group.primitives]


class Normed(NamedTuple):
    size: tuple[int, ...]
    weight: bool = True
    dtype: torch.dtype = torch.quint8
    mean: float = 0.0
    own: bool = True
    code: str = "rows"


NORMED = {
    "rows": Normed((3, 7, 96)),
    "uneven": Normed((40, 37)),
    "few numbers": Normed((9, 5)),
    "many rows": Normed((2, 900, 64)),
    "plain": Normed((6, 48), weight=False),
    "mean far from zero": Normed((6, 83), mean=1e4),
    "signed": Normed((6, 48), dtype=torch.qint8, own=False),
    "transposed": Normed((4, 48, 6), own=False, code="transposed"),
    "read twice": Normed((6, 48), own=False, code="twice"),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", NORMED)
@pytest.mark.usefixtures("all_threads")
def test_layer_norms_that_are_rounded(case: str, threads: int) -> None:
    """One pass over the data, by a kernel of our own."""
    torch.set_num_threads(threads)
    c = NORMED[case]
    columns = c.size[-2] if c.code == "transposed" else c.size[-1]
    norm = nn.LayerNorm(columns, elementwise_affine=c.weight).requires_grad_(False)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, -2, 2)
    zero = 0 if c.dtype == torch.qint8 else 110

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = norm(x.transpose(1, 2) if c.code == "transposed" else x)
            z = qdq(y, 0.03, zero, c.dtype)
            return z + y if c.code == "twice" else z

    x = torch.randn(c.size) + c.mean
    x.view(-1)[: c.size[-1]] = 3  # all alike
    module = Module().eval()
    run(module, (x,), step=0.03, apart=0.05, groups=None)
    with torch.no_grad():
        script = to_script(module, (x,))
        for _ in range(3):
            script(x)
    own = "llga_layer_norm" in kernels(script, x)
    assert own == (c.own and has_own_kernels())


class Excited(NamedTuple):
    """A squeeze and excitation in 8 bit: sizes of the images, hidden channels, what it does."""

    size: tuple[int, int, int, int]
    hidden: int
    mean: str = "F.adaptive_avg_pool2d(x, 1)"
    before: Callable[[Tensor], Tensor] = F.relu
    inner: Callable[[Tensor], Tensor] = F.relu
    gate: Callable[[Tensor], Tensor] = torch.sigmoid
    product: str = "x * s"
    zero_point: int = 3
    bias: bool = True
    threads: int = 2
    own: bool = True


EXCITED = {
    "plain": Excited((1, 32, 9, 7), 8),
    "mean": Excited((1, 48, 9, 7), 16, mean="x.mean([2, 3], keepdim=True)"),
    "mean behind a sum": Excited(
        (1, 48, 9, 7),
        16,
        mean="x.mean([2, 3], keepdim=True)",
        before=lambda y: F.silu(y * y + torch.cat(y.chunk(2, 1)[::-1], 1)),
    ),
    "hard": Excited((1, 72, 28, 28), 24, gate=F.hardsigmoid, product="s * x"),
    "silu": Excited((1, 96, 56, 56), 4, inner=F.silu),
    "odd": Excited((3, 13, 6, 5), 3),
    "uneven": Excited((1, 40, 6, 5), 10, inner=F.silu, gate=F.hardsigmoid),
    "no bias": Excited((2, 24, 5, 3), 31, bias=False),
    "one thread": Excited((1, 96, 40, 30), 24, threads=1),
    "many images": Excited((5, 40, 8, 9), 10),
    "wide": Excited((1, 700, 7, 7), 176),
    "zero point of zero": Excited((1, 32, 9, 7), 8, zero_point=0),
    "large zero point": Excited((1, 32, 9, 7), 8, zero_point=140),
    # What stays with oneDNN.
    "mean of rows": Excited((1, 32, 9, 7), 8, mean="x.mean([2], keepdim=True)", own=False),
    "other gate": Excited((1, 32, 9, 7), 8, gate=torch.tanh, own=False),
    "squared": Excited((1, 32, 9, 7), 8, product="x * s * s", own=False),
}


class QuantizedExcitation(Filled):
    def __init__(self, case: Excited, x: Tensor) -> None:
        super().__init__(case.zero_point)
        self.case, channels = case, case.size[1]
        self.before = weight(channels, 4, 1, 1)
        self.squeeze = weight(case.hidden, channels, 1, 1)
        self.excite = weight(channels, case.hidden, 1, 1)
        self.behind = weight(8, channels, 1, 1)
        self.mean = eval(f"lambda x: {case.mean}", {"F": F})
        self.product = eval(f"lambda x, s: {case.product}")
        self.biases = [
            nn.Parameter(torch.randn(n), False) if case.bias else None
            for n in (case.hidden, channels)
        ]
        with torch.no_grad():
            self(x)

    def forward(self, x: Tensor) -> Tensor:
        c = self.case
        x = F.conv2d(qdq(x, 0.02, 3), self.before.dequantize())
        x = self.rounded(c.before(x), 0)
        s = self.rounded(self.mean(x), 1)
        s = c.inner(F.conv2d(s, self.squeeze.dequantize(), self.biases[0]))
        s = F.conv2d(self.rounded(s, 2), self.excite.dequantize(), self.biases[1])
        x = self.rounded(self.product(x, c.gate(s)), 3)
        return self.rounded(F.conv2d(x, self.behind.dequantize()), 4)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", EXCITED)
def test_excitation(case: str) -> None:
    """Mean, two convolutions and the product are one group and one kernel."""
    c = EXCITED[case]
    torch.set_num_threads(c.threads)
    x = (torch.rand(c.size[0], 4, *c.size[2:]) * 4).to(memory_format=torch.channels_last)
    module = QuantizedExcitation(c, x).eval()
    # A mean that lies between two steps moves a gate, and so many numbers a little.
    found = run(
        module, (x,), step=2 * module.steps[-1], groups=3 if c.own and c.before is F.relu else None
    )
    if c.own:
        assert found.outside["aten::dequantize"] == 1, str(found)  # of the result
    with torch.no_grad():
        own = "llga_excitation" in kernels(to_script(module, (x,)), x)
    assert own == (c.own and has_quantized_kernels())


def test_excitation_beside_others() -> None:
    """Its data has another reader, and stays what it is."""
    c = EXCITED["plain"]
    x = (torch.rand(2, 4, 9, 7) * 4).to(memory_format=torch.channels_last)
    m = QuantizedExcitation(c, x).eval()

    class Beside(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = m.rounded(F.relu(F.conv2d(qdq(x, 0.02, 3), m.before.dequantize())), 0)
            s = F.relu(F.conv2d(m.rounded(m.mean(y), 1), m.squeeze.dequantize(), m.biases[0]))
            s = F.conv2d(m.rounded(s, 2), m.excite.dequantize(), m.biases[1])
            return m.rounded(y * torch.sigmoid(s), 3), y + 1

    module = Beside().eval()
    with torch.no_grad():
        script = to_script(module, (x,))
        for _ in range(3):
            for result, expected in zip(script(x), module(x), strict=True):
                torch.testing.assert_close(result, expected, rtol=0, atol=1.01 * m.steps[3])


@pytest.mark.parametrize("function", [F.silu, F.gelu, tanh_gelu, torch.sigmoid, F.hardswish])
@pytest.mark.parametrize("largest", [0.5, 6, 100])
def test_functions_are_exact_to_a_step(function: Any, largest: float) -> None:
    """Where 8 bit are made of them, the kernels for VNNI compute pieces of cubics: over ranges much
    wider and much narrower than where the function bends, few numbers fall to the other side.
    """
    w = torch._make_per_tensor_quantized_tensor(
        torch.eye(64, dtype=torch.int8) * 64, largest / 127 / 64 / 0.02, 0
    )
    values = torch.linspace(-127, 128, 256).repeat(64)[: 64 * 200] * 0.02
    bias = torch.linspace(-1, 1, 64) * largest / 127
    low, high = torch.aminmax(function(torch.linspace(-largest, largest, 1001)))
    step = float(high - low) / 250
    zero = min(255, max(0, round(-float(low) / step)))

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(qdq(x, 0.02, 127), w.dequantize(), bias)
            return qdq(function(y), step, zero)

    run(Module(), (values.reshape(200, 64),), step=step, apart=0.01)


class Norms(nn.Module):
    """Batch norms that stay: of one value or of what is concatenated, in float or in 8 bit."""

    def __init__(self, parts: tuple[int, ...], narrow: bool, function: Any) -> None:
        super().__init__()
        self.narrow, self.function = narrow, function
        self.weights = [weight(n, 8, 1, 1) for n in parts]
        self.norm = nn.BatchNorm2d(sum(parts))
        self.last = weight(8, sum(parts), 1, 1)
        for tensor in (self.norm.weight, self.norm.bias, self.norm.running_mean):
            nn.init.uniform_(tensor, -1, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = qdq(x, 0.02, 3)
        parts = [F.conv2d(x, w.dequantize()).tanh() for w in self.weights]
        if self.narrow:
            parts = [qdq(y, 0.01 * (i + 1), 120 - i) for i, y in enumerate(parts)]
        y = self.norm(parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        y = qdq(self.function(y), 0.06, 0 if self.function is F.relu else 128)
        return qdq(F.conv2d(y, self.last.dequantize()), 0.5, 128)


def same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("function", [F.relu, same, F.silu, F.gelu, tanh_gelu, torch.sigmoid])
@pytest.mark.parametrize("narrow", [True, False], ids=["8bit", "float"])
@pytest.mark.parametrize("parts", [(32,), (16, 5), (64, 32, 32)], ids=str)
def test_norm_that_is_rounded(parts: tuple[int, ...], narrow: bool, function: Any) -> None:
    """Concatenation, batch norm, an activation and rounding are one group and one kernel."""
    module = Norms(parts, narrow, function).eval()
    x = (torch.rand(2, 8, 15, 13) * 4).to(memory_format=torch.channels_last)
    # A norm's number that lies between two steps moves a sum by its weight.
    found = run(module, (x,), step=1.5, groups=None)
    rounded = [g for g in found.groups if g["aten::batch_norm"]]
    assert len(rounded) == 1 and rounded[0]["aten::quantize_per_tensor"], str(found)
    assert rounded[0]["aten::dequantize"] == (len(parts) if narrow else 0), str(found)
    with torch.no_grad():
        assert ("llga_affine" in kernels(to_script(module, (x,)), x)) == has_own_kernels()


class Summed(NamedTuple):
    """What `a` and `b`, from 8 bit, `c`, of a convolution, and `d`, from outside, all of one size,
    are made into by code that may use two batch norms, n and o.
    """

    code: str
    size: tuple[int, int, int, int] = (2, 24, 9, 7)
    own: bool = True
    threads: int = 2


SUMMED = {
    "RepVGG": Summed("F.relu(a + c + n(b))"),
    "in place": Summed("(a + c).add_(n(b)).relu_()"),
    "norm first": Summed("F.relu(n(b) + (c + a))"),
    "two norms": Summed("n(a) + o(b)"),
    "norm of what is added": Summed("F.relu(a + n(a))"),
    "SiLU": Summed("F.silu(c + n(b))"),
    "GELU": Summed("tanh_gelu(a + c + n(b) + c)"),
    "odd": Summed("F.relu(a + c + n(b))", (1, 13, 31, 17)),
    "large": Summed("F.relu(a + c + n(b))", (1, 96, 56, 56)),
    "one thread": Summed("F.relu(a + c + n(b))", (1, 48, 40, 30), threads=1),
    "wide": Summed("F.relu(a + c + n(b))", (1, 5000, 2, 3)),
    "one pixel": Summed("F.relu(a + c + n(b))", (3, 24, 1, 1)),
    "no norm": Summed("F.relu(a + d)"),
    "no norm, odd": Summed("a + d", (1, 13, 31, 17)),
    # What stays with oneDNN.
    "broadcast": Summed("c + n(b.mean((2, 3), keepdim=True).add(b))", own=False),
    "behind a product": Summed("F.relu(a + c)", own=False),
    "other factor": Summed("F.relu(torch.add(c, n(b), alpha=2))", own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", SUMMED)
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_sum_that_is_rounded(case: str, value: float) -> None:
    """The sum, batch norms of its operands, an activation and rounding are one kernel."""
    c = SUMMED[case]
    torch.set_num_threads(c.threads)
    n, o = nn.BatchNorm2d(c.size[1]), nn.BatchNorm2d(c.size[1])
    for norm in (n, o):
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.uniform_(tensor, -1, 1)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    first, second, third = (weight(c.size[1], 8, 1, 1) for _ in range(3))
    last = torch.quantize_per_tensor(torch.eye(c.size[1])[:8, :, None, None], 1, 0, torch.qint8)
    compute = eval(
        f"lambda a, b, c, d, n, o: {c.code}", {"F": F, "torch": torch, "tanh_gelu": tanh_gelu}
    )

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.o = n, o

        def forward(self, x: Tensor, d: Tensor) -> Tensor:
            x = qdq(x, 0.02, 3)
            a = qdq(F.conv2d(x, first.dequantize()), 0.06, 120)
            b = qdq(F.relu(F.conv2d(x, second.dequantize())), 0.04, 0)
            y = compute(a, b, F.conv2d(x, third.dequantize()), d, self.n, self.o)
            return F.conv2d(qdq(y, 0.05, 20), last.dequantize())

    x = torch.rand(c.size[0], 8, *c.size[2:]) * 4
    d = torch.randn(c.size)
    x, d = (y.to(memory_format=torch.channels_last) for y in (x, d))
    module = Module().eval()
    with torch.no_grad():
        script = to_script(module, (x, d))
        for i in range(4):
            if i == 3:
                d[0, 3, 0, 0] = value
            y, expected = script(x, d), module(x, d)
            # A number that lies between two steps may fall to either side: of the sum, or of an
            # operand, whose steps are those of 0.06, and 0.04 times what a norm makes of it.
            assert float((y - expected).abs().max()) <= 0.05 * 3.001
            assert float(((y - expected).abs() > 0.01).float().mean()) < 0.02
        found = kernels(script, x, d)
    assert ("llga_sum" in found) == (c.own and has_own_kernels()), found


def test_sum_of_other_sizes() -> None:
    """An operand that has one number in the place of many: the group is computed by its ops."""
    norm = nn.BatchNorm2d(24)
    w, last = weight(24, 8, 1, 1), weight(8, 24, 1, 1)

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y = self.norm(qdq(F.conv2d(qdq(y, 0.02, 3), w.dequantize()), 0.06, 120))
            y = F.relu(F.conv2d(qdq(x, 0.02, 3), w.dequantize()) + y)
            return qdq(F.conv2d(qdq(y, 0.05), last.dequantize()), 0.5, 128)

    x, y = torch.rand(2, 8, 9, 7) * 4, torch.rand(2, 8, 1, 1) * 4
    run(Module().eval(), (x, y), step=0.5, groups=None)


class Shuffled(nn.Module):
    """ShuffleNetV2's unit: chunks, a convolution of one, concatenation and shuffle."""

    def __init__(self, groups: int, scales: tuple[float, float]) -> None:
        super().__init__()
        self.groups, self.scales = groups, scales
        self.a, self.b = weight(32, 8, 1, 1), weight(16, 16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = qdq(F.relu(F.conv2d(qdq(x, 0.02, 3), self.a.dequantize())), 0.05, 0)
        for _ in range(2):
            a, b = x.chunk(2, 1)
            b = qdq(F.relu(F.conv2d(b, self.b.dequantize())), self.scales[0], 0)
            y = qdq(torch.cat([a, b], 1), self.scales[1], 0)
            n, c, h, w = y.shape
            x = y.view(n, self.groups, c // self.groups, h, w)
            x = x.transpose(1, 2).contiguous().view(n, c, h, w)
        a, b = x.chunk(2, 1)
        b = F.conv2d(b, self.b.dequantize())
        return qdq(F.conv2d(a, self.b.dequantize()) + qdq(b, 0.1, 128), 0.1, 128)


@pytest.mark.parametrize("lifted", [True, False], ids=["quantized behind", "quantized before"])
def test_pixel_shuffle(lifted: bool) -> None:
    """It is done to 8-bit numbers, and channels stay last."""
    a, b = weight(32, 8, 3, 3), weight(8, 8, 3, 3)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.conv2d(qdq(x, 0.02, 3), a.dequantize(), padding=1)
            if lifted:
                y = qdq(F.pixel_shuffle(y, 2), 0.05, 100)
            else:
                y = F.pixel_shuffle(qdq(y, 0.05, 100), 2)
            return qdq(F.conv2d(y, b.dequantize()), 0.5, 128)

    x = (torch.rand(2, 8, 7, 5) * 4).to(memory_format=torch.channels_last)
    found = run(Module(), (x,), step=0.5, groups=2)
    assert found.outside["llga::shuffled"] == 1 and "aten::pixel_shuffle" not in found.outside
    with torch.no_grad():
        groups = llga_fuser.report(to_script(Module(), (x,)), x, rounds=1).groups
    assert groups[0].outputs[0].layout == "channels last"
    assert groups[1].inputs[0].layout == "channels last"


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8], ids=str)
@pytest.mark.parametrize("pad", [(1, 2, 0, 1), (0, -1, 2, 0), (0, 0, 0, 0)], ids=str)
def test_padding_of_8_bit_numbers(pad: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = weight(16, 8, 1, 1), weight(8, 16, 3, 3)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.conv2d(qdq(x, 0.02, 3, dtype), a.dequantize())
            y = qdq(F.pad(y, pad), 0.05, 100, dtype)
            return qdq(F.conv2d(y, b.dequantize()), 0.5, 12, dtype)

    x = (torch.rand(2, 8, 7, 6) * 4).to(memory_format=torch.channels_last)
    run(Module(), (x,), step=0.5, groups=None, fallbacks=True)


@pytest.mark.parametrize(
    ("pad", "own"),
    [((1, 0), True), ((2, 1, 0, 1), True), ((1, -1), False), ((0, 0, 0, 0, 1, 0), False)],
    ids=str,
)
@pytest.mark.parametrize("behind", [False, True], ids=["before rounding", "behind rounding"])
def test_padding_in_front_of_a_convolution(behind: bool, pad: tuple[int, ...], own: bool) -> None:
    """It is the convolution's own, which reads 8-bit numbers."""
    channels = 17 if len(pad) > 4 else 16
    a, b = weight(16, 8, 1, 1), weight(8, channels, 3, 3)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.conv2d(qdq(x, 0.02, 3), a.dequantize())
            y = F.pad(qdq(y, 0.05, 100), pad) if behind else qdq(F.pad(y, pad), 0.05, 100)
            return qdq(F.conv2d(y, b.dequantize(), padding=1), 0.5, 12)

    x = torch.rand(2, 8, 7, 6) * 4
    found = run(Module(), (x,), step=0.5, groups=None, fallbacks=not own)
    if own:
        assert not {"aten::pad", "llga::padded"} & set(found.outside), found
        with torch.no_grad():
            groups = llga_fuser.report(to_script(Module(), (x,)), x, rounds=1).groups
        assert [str(g.inputs[0].dtype) for g in groups][-1] == "quint8", groups


class Sum(NamedTuple):
    code: str
    own: bool = True
    dtype: torch.dtype = torch.quint8


SUMS = {
    "relu": Sum("F.relu(a + b)"),
    "plain": Sum("a + b"),
    "swapped": Sum("b + a"),
    "in_place": Sum("F.relu_(a.add_(b))"),
    "read_twice": Sum("(lambda y: F.relu(y) + y.mean())(a + b)", own=False),
    "difference": Sum("a - b", own=False),
    "twice": Sum("a + a"),
    "with_a_number": Sum("a + 1.5", own=False),
    "of_sizes": Sum("a + b[:, :, :1]", own=False),
    "signed": Sum("F.relu(a + b)", own=False, dtype=torch.qint8),
}


@pytest.mark.parametrize("size", [(2, 48, 9, 7), (1, 3, 5, 3), (1, 64, 56, 56)], ids=str)
@pytest.mark.parametrize("case", SUMS)
def test_sum_of_two(case: str, size: tuple[int, ...]) -> None:
    """Of values that no convolution is about to give, as behind a squeeze and excitation."""
    c = SUMS[case]
    w = weight(8, size[1], 1, 1)

    class Module(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            zero = 0 if c.dtype == torch.qint8 else 20
            a, b = qdq(a, 0.0313, zero, c.dtype), qdq(b, 0.0517, zero, c.dtype)
            y = qdq(eval(c.code, {"a": a, "b": b, "F": F}), 0.0623, zero, c.dtype)
            return qdq(F.conv2d(y, w.dequantize()), 0.5, 128)

    inputs = tuple((3 * torch.randn(size)).to(memory_format=torch.channels_last) for _ in range(2))
    run(Module(), inputs, step=0.5, groups=None, fallbacks=not c.own)
    with torch.no_grad():
        found = kernels(to_script(Module(), inputs), *inputs)
    assert ("llga_sum" in found) == (c.own and has_own_kernels()), found


class Parts(nn.Module):
    """A block of YOLO: parts of an image, one of them with a residual sum behind SiLU, and all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = weight(32, 8, 1, 1), weight(16, 16, 3, 3), weight(8, 48, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(F.conv2d(qdq(x, 0.02, 3), self.a.dequantize()), inplace=True)
        p, q = qdq(y, 0.05, 20).chunk(2, 1)
        p, q = qdq(p, 0.05, 20), qdq(q, 0.05, 20)
        r = q + F.silu(F.conv2d(q, self.b.dequantize(), padding=1), inplace=True)
        y = torch.cat([p, q, qdq(r, 0.05, 20)], 1)
        y = F.interpolate(qdq(y, 0.05, 20), scale_factor=2.0)
        return qdq(F.conv2d(qdq(y, 0.05, 20), self.c.dequantize()), 0.5, 128)


def test_parts_stay_in_channels_last() -> None:
    """No float32 between groups, and no other order of dimensions."""
    x = (torch.rand(2, 8, 12, 10) * 4).to(memory_format=torch.channels_last)
    run(Parts(), (x,), step=0.5, groups=None)
    with torch.no_grad():
        script = to_script(Parts(), (x,))
        found = llga_fuser.report(script, x, rounds=1)
    inside = found.groups[:-1]
    assert len(inside) == 4  # the first one quantizes the input
    outputs = [value for group in inside for value in group.outputs]
    assert {(v.dtype, v.layout) for v in outputs} == {("quint8", "channels last")}, str(found)
    assert ("llga_concat" in kernels(script, x)) == has_own_kernels()


@pytest.mark.parametrize("scales", [(0.05, 0.05), (0.05, 0.06)], ids=["alike", "rescaled"])
@pytest.mark.parametrize("groups", [2, 4])
def test_channel_shuffle(groups: int, scales: tuple[float, float]) -> None:
    """Of values with one scale, one kernel moves bytes; others are rounded first."""
    module = Shuffled(groups, scales).eval()
    x = (torch.rand(2, 8, 10, 9) * 4).to(memory_format=torch.channels_last)
    run(module, (x,), step=0.5, groups=None, fallbacks=scales[0] != scales[1])
    with torch.no_grad():
        found = kernels(to_script(module, (x,)), x)
    assert ("llga_shuffle" in found) == (has_own_kernels() and scales[0] == scales[1]), found


@pytest.mark.parametrize("size", [(1, 64, 7, 7), (3, 13, 9, 5)], ids=str)
def test_mean_over_pixels(size: tuple[int, ...]) -> None:
    w = weight(size[1], 8, 1, 1)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = qdq(F.relu(F.conv2d(qdq(x, 0.02, 3), w.dequantize())), 0.05, 9)
            return qdq(F.adaptive_avg_pool2d(y, 1), 0.03, 2)

    x = (torch.rand(size[0], 8, *size[2:]) * 4).to(memory_format=torch.channels_last)
    run(Module(), (x,), step=0.03, groups=2)
    with torch.no_grad():
        found = kernels(to_script(Module(), (x,)), x)
    assert ("llga_reduction" in found) == has_own_kernels(), found
