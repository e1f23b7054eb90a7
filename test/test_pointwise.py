"""Chains of pointwise functions by a kernel of our own: any broadcast, any order, any values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import llga_fuser
from util import check, fuses, has_own_kernels, kernels_of, net, to_script

pytestmark = pytest.mark.usefixtures("fuser", "few_threads")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

FUNCTIONS = {
    "abs": "(x + y).abs()",
    "add": "(x + y) * 0.5",
    "clamp": "torch.clamp(x + y, -0.5, 0.75)",
    "clamp_min": "torch.clamp_min(x + y, 0.1)",
    "div": "x / (y * y + 1.0)",
    "elu": "F.elu(x + y, 0.7)",
    "exp": "torch.exp(x - y)",
    "gelu": "F.gelu(x * y)",
    "hardsigmoid": "F.hardsigmoid(x * y)",
    "hardswish": "F.hardswish(x * y)",
    "leaky_relu": "F.leaky_relu(x + y, 0.2)",
    "maximum": "torch.maximum(x, y) * 2.0",
    "minimum": "torch.minimum(x, y) + 1.0",
    "mul": "x * y - x",
    "neg": "-(x + y)",
    "pow": "(x + y) ** 3",
    "relu": "F.relu(x + y)",
    "rsub": "1.5 - (x + y)",
    "rsqrt": "torch.rsqrt(x * x + y * y + 1.0)",
    "sigmoid": "torch.sigmoid(x + y)",
    "silu": "F.silu(x + y)",
    "sqrt": "torch.sqrt(x * x + y * y)",
    "sub": "(x - y) / 3.0",
    "tanh": "torch.tanh(x - y)",
}

# Sizes of x and y, of which oneDNN broadcasts none at speed.
SIZES = {
    "rows": ((2, 5, 7, 33), (2, 5, 7, 1)),
    "outer": ((1, 9, 1, 20), (1, 1, 6, 20)),
    "columns": ((3, 17, 1), (40,)),
    "batch": ((4, 3, 8, 8), (3, 1, 8)),
    "long": ((3, 2100), (3, 1)),
    "one": ((1, 1, 1), (1, 1)),
}


def own(m: nn.Module, *inputs: Tensor) -> bool:
    return all(kernel == "llga_pointwise" for kernel in kernels_of(m, *inputs))


@DTYPES
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_function(function: str, sizes: str, dtype: torch.dtype) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(FUNCTIONS[function], "x, y").eval()
    inputs = [2 * torch.randn(size) for size in SIZES[sizes]]
    check(m, inputs, dtype=dtype)
    if has_own_kernels():
        assert own(m, *(x.to(dtype) for x in inputs))


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "turned": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "part": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every_other": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "of_one": lambda x: x[:1, :1, :1, :1].expand_as(x),
}


@pytest.mark.usefixtures("all_threads")
@DTYPES
@pytest.mark.parametrize("second", ORDERS)
@pytest.mark.parametrize("first", ORDERS)
def test_order(first: str, second: str, dtype: torch.dtype) -> None:
    """Data lies anywhere; results lie as eager's do."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("torch.tanh(x) * y - 0.5", "x, y").eval()
    x, y = ORDERS[first](torch.randn(2, 6, 9, 35)), ORDERS[second](torch.randn(2, 6, 9, 35))
    x, y = x.to(dtype), y.to(dtype)
    script = to_script(m, [x, y])
    expected = m(x, y)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6  # eager rounds three times
    for _ in range(4):
        result = script(x, y)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_results_with_many_numbers() -> None:
    """Shares of several threads, strips that do not divide the sizes."""
    m = net("F.relu(x * y - 1.0)", "x, y").eval()
    check(m, [torch.randn(3, 50, 37, 41), torch.randn(3, 1, 37, 1)])
    check(m, [torch.randn(2, 7, 5000), torch.randn(7, 1)])


ACROSS = {
    "add": "x + y.transpose(-1, -2)",
    "two": "torch.tanh(x) * y.transpose(-1, -2) - y.transpose(-1, -2)",
    "select": "torch.where(mask.transpose(-1, -2), x, y.transpose(-1, -2))",
    "softmax": "F.softmax((x + y.transpose(-1, -2)).masked_fill(mask.mT, -9.0), dim=-1)",
}


@pytest.mark.usefixtures("all_threads")
@DTYPES
@pytest.mark.parametrize(
    "sizes", [(12, 64, 64), (2, 17, 1031), (1, 3, 2100, 9), (40, 500)], ids=str
)
@pytest.mark.parametrize("case", ACROSS)
def test_across(case: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows of one operand lie side by side, number by number: many more than what is gathered."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(ACROSS[case], "x, y, mask").eval()
    turned = (*sizes[:-2], sizes[-1], sizes[-2])
    x, y = torch.randn(sizes).to(dtype), torch.randn(turned).to(dtype)
    mask = torch.rand(turned[-2:]) > 0.5
    check(m, [x, y, mask], dtype=dtype)
    if has_own_kernels():
        assert set(kernels_of(m, x, y, mask)) <= {"llga_pointwise", "llga_softmax"}


def test_several_results() -> None:
    m = net("z = x - y\nreturn torch.exp(z), z", "x, y").eval()
    inputs = [torch.randn(4, 6, 50), torch.randn(4, 6, 1)]
    check(m, inputs)
    if has_own_kernels():
        assert own(m, *inputs)


def test_results_of_other_sizes() -> None:
    """A value that only later ones are broadcast to, and one that is read at its own size, too."""
    m = net("z = x * 2.0\nreturn z + y", "x, y").eval()
    check(m, [torch.randn(4, 6, 1), torch.randn(4, 6, 50)])
    m = net("z = x * 2.0\nreturn z + y, z", "x, y").eval()
    check(m, [torch.randn(4, 6, 1), torch.randn(4, 6, 50)])


@pytest.mark.parametrize("size", [(2, 1, 1, 9), (2, 4, 8, 9), (9,)], ids=str)
def test_select(size: tuple[int, ...]) -> None:
    mask = torch.rand(size) > 0.5
    m = net("torch.where(mask, x, y) * 0.5 + y", "x, y, mask").eval()
    inputs = [torch.randn(2, 4, 8, 9), torch.randn(2, 4, 8, 1), mask]
    check(m, inputs)
    m = net("x.masked_fill(mask, float('-inf')) + y", "x, y, mask").eval()
    check(m, inputs)


# What oneDNN has no kernel for, or leaves apart.
LINKS = {
    "where": "torch.where(mask, x, y)",
    "where_number": "torch.where(mask, x, 0.5)",
    "filled": "(x + y).masked_fill(mask, -1e4)",
    "masked_softmax": "F.softmax(x.masked_fill(mask, -1e9), dim=-1)",
    "hidden_rows": "F.softmax(x.masked_fill(mask, float('-inf')), -1).masked_fill(mask, 0.0)",
    "biased_softmax": "F.softmax(x * 0.5 + y, dim=-1)",
    "scaled_softmax": "F.softmax(torch.tanh(x) * 5.0, dim=-1) * y",
    "log_softmax": "F.log_softmax(x + y, dim=-1) * 0.5",
    "two_softmaxes": "F.softmax(F.softmax(x, -1) * 8.0, dim=-1)",
    "casts": "(torch.sigmoid(x.float()) - 0.25).to(x.dtype) * y",
    "mixed": "x.bfloat16() + y.float()",
    "both_types": "z = torch.tanh(x * y)\nreturn z.float(), z.bfloat16()",
    "other_sizes": "F.softmax(y.masked_fill(mask[..., :1], 0.5) * x, dim=-1)",
    "rows_of_one_number": "F.softmax(y.masked_fill(mask[..., :1], 0.5), dim=-1) + x",
    "in_a_row": "w = F.softmax(x.masked_fill(mask, -9.0), -1)\nreturn torch.where(w > 0.1, w, y)",
}


@pytest.mark.usefixtures("all_threads")
@DTYPES
@pytest.mark.parametrize("columns", [33, 300])
@pytest.mark.parametrize("case", LINKS)
def test_links(case: str, columns: int, dtype: torch.dtype) -> None:
    narrow = dtype == torch.bfloat16 or case in ("mixed", "both_types")
    if narrow and not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(LINKS[case], "x, y, mask").eval()
    mask = torch.rand(2, 1, 40, columns) > 0.5
    mask[0, 0, 3] = True  # hides a row
    x, y = torch.randn(2, 6, 40, columns).to(dtype), torch.randn(2, 6, 40, 1).to(dtype)
    script = to_script(m, [x, y, mask])
    want = m(x, y, mask)
    before = llga_fuser.cache_info().fallbacks
    tolerance = 2e-2 if narrow else 1e-5
    for _ in range(4):
        got = script(x, y, mask)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert llga_fuser.cache_info().fallbacks == before
    if has_own_kernels() and case != "rows_of_one_number":  # a softmax that is broadcast
        found = kernels_of(m, x, y, mask)
        assert found
        assert set(found) <= {"llga_pointwise", "llga_softmax"}, found


@pytest.mark.parametrize(
    "results",
    [
        # It comes back by way of a group, which would have to be inside of it.
        "F.softmax(a.float() * torch.matmul(a, x), dim=-1)",
        "torch.matmul(F.softmax(a, dim=-1), x), torch.matmul(a, x)",
    ],
)
def test_links_that_others_read(results: str) -> None:
    m = net(f"a = x.masked_fill(mask, 0.5)\nreturn {results}", "x, mask").eval()
    check(m, [torch.randn(3, 24, 24), torch.rand(3, 24, 24) > 0.5])


def test_links_of_other_sizes_later() -> None:
    m = net("F.softmax(x.masked_fill(mask, -9.0) + y, dim=-1)", "x, y, mask").eval()
    inputs = [torch.randn(2, 8, 20), torch.randn(2, 8, 20), torch.rand(8, 20) > 0.5]
    script = to_script(m, inputs)
    for sizes in ((2, 8, 20), (1, 8, 20), (5, 3, 7), (2, 8, 1), (2, 0, 20), (4, 300)):
        x, y = torch.randn(sizes), torch.randn(sizes[-1])
        mask = torch.rand(sizes[-2:]) > 0.5
        for _ in range(3):
            torch.testing.assert_close(script(x, y, mask), m(x, y, mask))


def test_constants() -> None:
    m = net("(x - self.mean) / self.scale", mean=torch.randn(5, 1), scale=torch.rand(5, 1) + 0.5)
    check(m.eval(), [torch.randn(3, 5, 40)])


SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 88.6, -88.6, -120.0, 3e38, -3e38, 1e-30]


@DTYPES
@pytest.mark.parametrize("function", FUNCTIONS)
def test_special_values(function: str, dtype: torch.dtype) -> None:
    """Each of them, beside each of them: as in eager, without a look for them in advance."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(FUNCTIONS[function], "x, y").eval()
    values = torch.tensor(SPECIAL).to(dtype)
    x, y = values.view(1, -1, 1), values.view(1, 1, -1)
    script = to_script(m, [x, y])
    for _ in range(4):
        result = script(x, y)
    if dtype == torch.bfloat16:  # eager rounds each function's result: to infinity, maybe
        finite = m(x, y).isfinite()
        torch.testing.assert_close(result[finite], m(x, y)[finite], rtol=2.0**-5, atol=1e-30)
        return
    torch.testing.assert_close(result, m(x, y), rtol=5e-6, atol=2e-7, equal_nan=True)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("code", ["z * torch.sigmoid(y)", "torch.tanh(z) * torch.sigmoid(z - y)"])
def test_special_values_for_the_next_group(code: str, value: float) -> None:
    """It may be one that loses NaN, and looks at none of a layout that it was free to choose."""
    m = net(
        f"z = self.c(x)\ny = z[:, :, :1]\nreturn F.relu(self.d({code}))",
        c=nn.Conv2d(4, 16, 3), d=nn.Conv2d(16, 8, 1),
    ).eval()  # fmt: skip
    x = torch.randn(2, 4, 5, 6)
    script = to_script(m, [x])
    for at in (x, x.index_fill(3, torch.tensor([4]), value), x):
        for _ in range(3):
            torch.testing.assert_close(script(at), m(at), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(25))
def test_random_chain(seed: int) -> None:
    rng = random.Random(seed)
    rank = rng.randint(1, 5)
    sizes = [rng.choice([1, 2, 3, 7, 16, 33]) for _ in range(rank)]
    inputs = []
    for _ in range(3):
        own_sizes = [size if rng.random() < 0.6 else 1 for size in sizes]
        x = torch.randn(own_sizes[rng.randint(0, rank - 1) :])
        order = rng.sample(range(x.dim()), x.dim())
        back = sorted(range(x.dim()), key=lambda i: order[i])
        inputs.append(x.permute(order).contiguous().permute(back))
    names = ["x", "y", "z"]
    lines = []
    for i in range(rng.randint(2, 7)):
        a, b = rng.choice(names), rng.choice(names)
        lines.append(
            f"v{i} = "
            + rng.choice(
                [
                    f"{a} + {b}", f"{a} - {b}", f"{a} * {b}", f"torch.maximum({a}, {b})",
                    f"torch.tanh({a})", f"torch.sigmoid({a})", f"F.relu({a} - 0.25)",
                    f"{a} * 0.5", f"torch.minimum({a}, {b})", f"{a}.abs()",
                ]
            )
        )  # fmt: skip
        names.append(f"v{i}")
    m = net("\n".join([*lines, f"return {names[-1]}"]), "x, y, z").eval()
    check(m, inputs, fallbacks=True)
    script = to_script(m, inputs)
    for _ in range(4):
        assert script(*inputs).stride() == m(*inputs).stride()


@pytest.mark.parametrize("operator", ["-", "/", "*", "+"])
def test_behind_a_product(operator: str) -> None:
    """One number for each row of it: oneDNN's own way takes a hundred times as long."""
    m = net(f"torch.matmul(x, y) {operator} z", "x, y, z").eval()
    inputs = [torch.randn(2, 3, 40, 16), torch.randn(2, 3, 16, 24), torch.rand(2, 3, 40, 1) + 1]
    check(m, inputs)
    if has_own_kernels():
        (group,) = llga_fuser.report(m, *inputs, rounds=1).groups
        found = [p.implementation for p in group.primitives]
        assert "llga_pointwise" in found and "ref:any" not in found, found


@DTYPES
def test_product_that_is_repeated(dtype: torch.dtype) -> None:
    """Graph attention's scores: what follows a product of few numbers is a chain of its own."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    code = "torch.softmax(F.leaky_relu(x @ self.a + (x @ self.b).transpose(1, 2), 0.2), -1)"
    a, b = torch.randn(16, 1), torch.randn(16, 1)
    m = net(code, a=a, b=b).eval()
    x = torch.randn(2, 40, 16)
    check(m, [x], dtype=dtype, fused="matmul add leaky_relu softmax", groups=3)
    if has_own_kernels():
        assert "llga_softmax" in kernels_of(m.to(dtype), x.to(dtype))
