"""Softmax by kernels of our own: over a dimension that does not lie innermost, and over rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from util import check, fuses, has_own_kernels, kernels_of, net, to_script

pytestmark = pytest.mark.usefixtures("fuser", "few_threads")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FUNCTIONS = pytest.mark.parametrize("function", ["softmax", "log_softmax"])

# Sizes, the dimension, and the order in which the dimensions lie.
CASES = {
    "tokens": ((1, 8, 300, 8), 2, (0, 2, 1, 3)),
    "box": ((1, 16, 4, 103), 1, (0, 1, 2, 3)),
    "kernels": ((2, 2, 67, 1, 1), 1, (0, 1, 2, 3, 4)),
    "rows": ((150, 29), 0, (0, 1)),
    "negative": ((3, 5, 40, 7), -2, (0, 1, 2, 3)),
    "one_number": ((4, 1, 33), 1, (0, 1, 2)),
    "narrow": ((2, 9, 3), 1, (0, 1, 2)),
    "turned": ((6, 10, 35), 1, (1, 2, 0)),
    "wide": ((2, 12, 500), 1, (0, 1, 2)),
}


@pytest.mark.usefixtures("all_threads")
@FUNCTIONS
@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_softmax(case: str, dtype: torch.dtype, function: str) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    sizes, dim, order = CASES[case]
    back = sorted(range(len(order)), key=lambda i: order[i])
    x = 4 * torch.randn(sizes).permute(order).contiguous().permute(back)
    m = net(f"F.{function}(x, dim={dim})").eval()
    check(m, [x], dtype=dtype, fused=function)
    x = x.to(dtype)
    script, expected = to_script(m, [x]), m(x)
    for _ in range(4):
        assert script(x).stride() == expected.stride()
    if has_own_kernels():
        assert kernels_of(m, x) == ["llga_softmax"]


@pytest.mark.usefixtures("all_threads")
@FUNCTIONS
@pytest.mark.parametrize(
    "sizes", [(2, 21, 9, 7), (1, 70, 9, 15), (3, 2, 64, 65), (1, 5, 1, 200), (1, 3, 130, 1)]
)
def test_channels_last_to_planes(sizes: tuple[int, ...], function: str) -> None:
    """Of a convolution's channels, in eager's order: a copy of our own, and softmax of planes."""
    m = net(f"F.{function}(self.c(x), dim=1)", c=nn.Conv2d(8, sizes[1], 3, padding=1)).eval()
    x = torch.randn(sizes[0], 8, *sizes[2:])
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        check(m, [x], fused=function)
        assert kernels_of(m, x)[-1] == "llga_softmax" or not has_own_kernels()


ROWS = {
    "attention": (2, 3, 49, 49),
    "one_vector": (5, 16),
    "less": (300, 7),
    "two_numbers": (40, 3, 2),
    "a_vector_and_more": (3, 17),
    "classes": (1, 1000),
    "long": (3, 30001),
    "too_long": (2, 70000),
    "many": (2, 4, 256, 200),
    "vector": (33,),
}


@pytest.mark.usefixtures("all_threads")
@FUNCTIONS
@DTYPES
@pytest.mark.parametrize("case", ROWS)
def test_rows(case: str, dtype: torch.dtype, function: str) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    x = 4 * torch.randn(ROWS[case]) - 20
    m = net(f"F.{function}(x, dim=-1)").eval()
    check(m, [x], dtype=dtype, fused=function)
    if has_own_kernels() and case != "too_long":
        assert kernels_of(m, x.to(dtype)) == ["llga_softmax"]


@FUNCTIONS
def test_rows_of_few_numbers(function: str) -> None:
    """One to four vectors, which stay in registers, and all that the last one may be short of."""
    m = net(f"F.{function}(x * 2.0, dim=-1)").eval()
    script = to_script(m, [torch.randn(3, 5)])
    for columns in range(1, 70):
        x = 4 * torch.randn(3, columns) - 20
        for _ in range(3):
            torch.testing.assert_close(script(x), m(x), rtol=1e-5, atol=1e-6)


@DTYPES
def test_rows_of_a_part(dtype: torch.dtype) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("F.softmax(x[..., 3:40], dim=-1)").eval()
    check(m, [torch.randn(2, 5, 64)], dtype=dtype)
    m = net("F.softmax(x.transpose(1, 2), dim=-1)").eval()
    check(m, [torch.randn(2, 40, 64)], dtype=dtype)


@FUNCTIONS
@pytest.mark.parametrize("count", [1, 5, 16, 31, 40, 64, 100])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_special_values_in_rows(value: float, count: int, function: str) -> None:
    """At each place, behind larger numbers and smaller ones."""
    m = net(f"F.{function}(x, dim=-1)").eval()
    x = 50 * torch.randn(count + 2, count)
    x[torch.arange(count), torch.arange(count)] = value
    x[count] = value
    x[count + 1] = -1000.0
    x[count + 1, count // 2] = -math.inf
    script = to_script(m, [x])
    for _ in range(4):
        torch.testing.assert_close(script(x), m(x), rtol=1e-5, atol=1e-6, equal_nan=True)


@DTYPES
def test_part_of_a_tensor(dtype: torch.dtype) -> None:
    """It is read where it lies: keys of linear attention."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(
        "q, k, v = self.l(x).view(2, 50, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)\n"
        "return q @ (k.softmax(dim=2).transpose(-1, -2) @ v)",
        l=nn.Linear(32, 96),
    ).eval()  # fmt: skip
    check(m, [torch.randn(2, 50, 32)], dtype=dtype)


@FUNCTIONS
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_special_values(value: float, function: str) -> None:
    m = net(f"F.{function}(x, dim=1)").eval()
    x = torch.randn(3, 7, 40)
    x[1, 2, 3] = value
    x[2, :, 39] = value
    x[0, 1:, 5] = -math.inf
    script = to_script(m, [x])
    for _ in range(4):
        torch.testing.assert_close(script(x), m(x), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_long_columns() -> None:
    """Sums of many numbers, large and small ones."""
    m = net("F.softmax(x, dim=0)").eval()
    x = torch.randn(20000, 24)
    x[::2] -= 30
    result = to_script(m, [x])
    for _ in range(4):
        y = result(x)
    torch.testing.assert_close(y.double(), torch.softmax(x.double(), 0), rtol=2e-5, atol=1e-12)
