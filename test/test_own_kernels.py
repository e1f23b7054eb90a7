"""Kernels of our own but those of attention: taken where they are meant to be, and right there.

Each is compared with eager, in each data type and instruction set that has it, with the sizes at
which its code branches, and with NaN and infinity, which must reach what they reach in eager.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llga_fuser
from llga_fuser import _models
from util import (
    MODES,
    TOLERANCES,
    Tolerance,
    assert_same,
    autocast_bf16,
    check,
    fuses,
    has_avx2_kernels,
    has_matrix_units,
    has_narrow_products,
    has_own_kernels,
    kernels_of,
    net,
    one_by_one,
    randomize,
    restored,
    to_script,
)

pytestmark = pytest.mark.usefixtures("fuser", "few_threads")


class Grouped(NamedTuple):
    """A convolution in groups: size of the input, and what it does."""

    size: tuple[int, ...]
    groups: int
    kernel: Any = 3
    stride: Any = 1
    padding: Any = 1
    dilation: Any = 1
    bias: bool = True


GROUPED = {
    "of_4": Grouped((2, 24, 9, 13), 6),
    "of_4_strided": Grouped((1, 128, 15, 8), 32, stride=2),
    "of_4_odd_number": Grouped((1, 12, 9, 9), 3),
    "of_4_in_rows": Grouped((1, 16, 5, 30), 4, kernel=(1, 5), padding=(0, 2), stride=(3, 1)),
    "of_4_dilated": Grouped((3, 8, 20, 11), 2, dilation=(2, 3), padding=3, bias=False),
    "of_4_mostly_padding": Grouped((1, 8, 2, 3), 2, padding=5),
    "of_4_stride_3": Grouped((1, 8, 12, 12), 2, stride=3),
    "of_8": Grouped((2, 128, 7, 17), 16),
    "of_8_strided": Grouped((1, 128, 14, 9), 16, stride=2, kernel=5, padding=2),
    "of_8_few_large": Grouped((1, 40, 6, 57), 5, bias=False),
    "of_8_small": Grouped((3, 104, 7, 7), 13),
    "of_8_one_tile": Grouped((1, 24, 5, 14), 3),
    "of_8_strided_tiles": Grouped((1, 24, 9, 30), 3, stride=(1, 2), dilation=2, padding=2),
    "of_16": Grouped((1, 128, 7, 7), 8),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("relu", [False, True], ids=["alone", "relu"])
@pytest.mark.parametrize("case", GROUPED)
def test_grouped_convolution(case: str, relu: bool) -> None:
    """Small groups of channels-last images have a kernel of our own on processors with AVX2."""
    c = GROUPED[case]
    channels = c.size[1]
    options = {"stride": c.stride, "padding": c.padding, "dilation": c.dilation, "bias": c.bias}
    conv = nn.Conv2d(channels, channels, c.kernel, groups=c.groups, **options)
    x = torch.randn(c.size).to(memory_format=torch.channels_last)
    m = net("F.relu(self.c(x))" if relu else "self.c(x)", c=conv)
    check(m, [x], groups=1, fused="_convolution")
    gc.collect()
    llga_fuser.clear_cache()
    others = llga_fuser.cache_info().packed_bytes
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(4):
            script(x)
    packed = llga_fuser.cache_info().packed_bytes - others
    own = case not in {"of_4_odd_number", "of_4_stride_3", "of_16"}
    # oneDNN's weights of grouped convolutions are not packed.
    assert (packed > 0) == (own and has_avx2_kernels())


@pytest.mark.parametrize("function", ["leaky_relu({}, 0.2)", "mish({})"])
def test_grouped_convolution_with_a_function_apart(function: str) -> None:
    """Of what its kernel does not compute, which oneDNN would take into its own one."""
    conv = nn.Conv2d(32, 32, 3, padding=1, groups=4)
    x = torch.randn(2, 32, 9, 11).to(memory_format=torch.channels_last)
    m = net("F." + function.format("self.c(x)"), c=conv).eval()
    check(m, [x], groups=1, fused="_convolution")
    found = [p.implementation for g in llga_fuser.report(m, x).groups for p in g.primitives]
    assert ("llga_grouped:avx2" in found) == has_avx2_kernels(), found


NARROW_GROUPED = GROUPED | {
    "of_4_many": Grouped((2, 36, 9, 13), 9, stride=(1, 2)),
    "of_8_uneven": Grouped((1, 440, 7, 9), 55),
    "of_8_in_columns": Grouped((1, 24, 40, 3), 3, kernel=(5, 1), padding=(2, 0), dilation=(2, 1)),
    "of_8_large_window": Grouped((1, 24, 20, 40), 3, kernel=7, padding=3, stride=2, bias=False),
    "of_16_wide": Grouped((1, 48, 5, 300), 3),
    "of_16_one_pixel": Grouped((2, 32, 1, 1), 2),
    "of_2": Grouped((1, 32, 7, 7), 16),
    "window_of_4": Grouped((1, 32, 7, 7), 4, kernel=4),
}
# Fewer channels than a tile takes, pixels apart, other groups, other windows, contiguous as well.
NOT_BY_TILES = {"of_4_odd_number", "of_4_dilated", "of_4_mostly_padding", "of_4_stride_3"}
NOT_BY_TILES |= {"of_8_strided_tiles", "of_2", "window_of_4", "of_16_one_pixel"}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("relu", [False, True], ids=["alone", "relu"])
@pytest.mark.parametrize("case", NARROW_GROUPED)
def test_bfloat16_grouped_convolution(case: str, relu: bool) -> None:
    """Small groups of channels-last images have a kernel of our own with matrix units."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = NARROW_GROUPED[case]
    channels = c.size[1]
    options = {"stride": c.stride, "padding": c.padding, "dilation": c.dilation, "bias": c.bias}
    conv = nn.Conv2d(channels, channels, c.kernel, groups=c.groups, **options)
    x = torch.randn(c.size)
    m = net("F.relu(self.c(x))" if relu else "self.c(x)", c=conv).eval()
    layout = torch.channels_last
    check(m, [x], groups=1, fused="_convolution", dtype=torch.bfloat16, memory_format=layout)
    found = kernels_of(m.bfloat16(), x.to(torch.bfloat16, memory_format=layout))
    own = case not in NOT_BY_TILES and has_matrix_units()
    assert ("llga_grouped:amx_bf16" in found) == own, found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_bfloat16_grouped_convolution_with_special_values(value: float) -> None:
    """They reach the results of their group, and no others."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("self.c(x)", c=nn.Conv2d(40, 40, 3, padding=1, groups=5)).eval().bfloat16()
    x = torch.randn(2, 40, 9, 70).bfloat16().to(memory_format=torch.channels_last)
    with torch.no_grad():
        script = to_script(m, [x])
        for place in ((0, 0, 0, 0), (1, 39, 8, 69), (0, 25, 4, 33)):
            y = x.clone()
            y[place] = value
            for _ in range(3):
                assert_same(script(y), m(y))
        m.c.weight[9, 3, 1, 1] = value
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))


def check_special_values(
    m: nn.Module, x: Tensor, value: float, places: Sequence[tuple[int, ...]]
) -> None:
    """Of the data, each in one of these places, and of the weight of a convolution `m.c`."""
    with torch.no_grad():
        script = to_script(m, [x])
        for place in places:
            y = x.clone()
            y[place] = value
            for _ in range(3):
                assert_same(script(y), m(y))
        alone = net("self.c(x)", c=m.c)
        m.c.weight[(9, 0, *(1,) * (x.dim() - 2))] = value
        script = to_script(alone, [x])
        for _ in range(3):
            assert_same(script(x), alone(x))


class Multiplied(NamedTuple):
    """A depthwise convolution: size of the image, results of a channel, and what it does."""

    size: tuple[int, ...]
    times: int = 2
    window: Any = 3
    stride: Any = 1
    padding: Any = 1
    dilation: Any = 1
    bias: bool = True
    code: str = "self.c(x)"
    own: bool = True
    wide: bool = False  # in bfloat16 with AVX-512 our own kernel has it


MULTIPLIED = {
    "alone": Multiplied((1, 48, 9, 13)),
    "halves": Multiplied((2, 96, 15, 8), window=7, stride=2, padding=3, code="F.relu(self.c(x))"),
    "halves_even": Multiplied((1, 192, 16, 16), window=7, stride=2, padding=3, bias=False),
    "window_of_5": Multiplied((3, 80, 6, 7), times=3, window=5, padding=2),
    "of_4": Multiplied((1, 16, 40, 3), times=4, stride=2, code="F.hardswish(self.c(x))"),
    "mostly_padding": Multiplied((1, 16, 2, 3), window=5, padding=4),
    "no_padding": Multiplied((2, 160, 8, 9), padding=0, code="F.relu6(self.c(x))"),
    "one_row": Multiplied((1, 64, 1, 2), window=7, padding=3),
    "not_small": Multiplied((1, 64, 20, 20), times=1, own=False),  # oneDNN has that
    "small": Multiplied((1, 64, 5, 6), times=1),
    "small_strides": Multiplied((3, 16, 11, 12), 1, 5, 2, 2, bias=False, code="F.relu6(self.c(x))"),
    "small_of_7": Multiplied((1, 16, 9, 8), 1, 7, padding=3, code="F.hardtanh(self.c(x), -1., 2.)"),
    "small_leaky": Multiplied((1, 32, 8, 3), times=1, code="F.leaky_relu(self.c(x))"),
    "small_elu": Multiplied((2, 32, 8, 3), times=1, code="F.elu(self.c(x), 1.3)"),
    "elu": Multiplied((1, 48, 9, 13), code="F.elu(self.c(x))"),
    # Of bfloat16, which oneDNN widens once for each column.
    "of_5_rows": Multiplied(
        (2, 48, 33, 31), 1, 5, padding=2, code="F.relu(self.c(x))", own=False, wide=True
    ),
    "of_7_rows": Multiplied((1, 96, 30, 29), 1, 7, padding=3, own=False, wide=True),
    "of_7_rows_stride": Multiplied((1, 96, 30, 29), 1, 7, stride=2, padding=3, own=False),
    "of_7_rows_gelu": Multiplied(
        (1, 96, 30, 29), 1, 7, padding=3, code="F.gelu(self.c(x))", own=False
    ),
    "dilated": Multiplied((2, 48, 9, 13), times=1, padding=2, dilation=2, code="F.relu(self.c(x))"),
    "dilated_far": Multiplied((1, 144, 5, 21), times=1, padding=(3, 9), dilation=(3, 9)),
    "dilated_beyond": Multiplied((1, 16, 4, 7), times=1, padding=11, dilation=11),
    "dilated_without_padding": Multiplied((2, 32, 11, 13), 1, 5, 1, 0, (1, 3), bias=False),
    "dilated_of_7": Multiplied((1, 16, 20, 19), 1, 7, padding=(7, 5), dilation=2),
    "dilated_row": Multiplied((2, 96, 1, 100), 1, (1, 3), padding=(0, 16), dilation=(1, 16)),
    "dilated_rows": Multiplied((1, 16, 9, 13), 1, stride=2, padding=4, dilation=(3, 1)),
    "dilated_leaky": Multiplied(
        (1, 32, 1, 50), 1, (1, 3), padding=(0, 8), dilation=8, code="F.leaky_relu(self.c(x), 0.2)"
    ),
    "leaky": Multiplied((1, 48, 9, 13), code="F.leaky_relu(self.c(x))"),
    "dilated_to_2": Multiplied((1, 16, 9, 33), padding=(1, 4), dilation=(1, 4)),
    "dilated_strides": Multiplied((1, 16, 9, 9), 1, stride=2, padding=2, dilation=2, own=False),
    "of_5": Multiplied((1, 16, 5, 6), times=5, own=False),
    "few_channels": Multiplied((1, 12, 5, 6), own=False),
    "in_rows": Multiplied((1, 16, 5, 6), window=(1, 3), padding=(0, 1)),
    "in_columns": Multiplied((1, 16, 5, 6), window=(3, 1), padding=(1, 0), own=False),
    "strides": Multiplied((1, 16, 5, 6), stride=(1, 2), own=False),
    "stride_of_3": Multiplied((1, 16, 9, 9), stride=3, own=False),
    "long": Multiplied((2, 64, 1, 90), 1, (1, 33), padding=(0, 16), code="F.relu(self.c(x))"),
    "long_chunks": Multiplied((1, 80, 1, 50), 1, (1, 11), padding=(0, 5), bias=False),
    "long_stride": Multiplied((1, 48, 1, 61), 1, (1, 15), stride=(1, 2), padding=(0, 7)),
    "long_dilated": Multiplied((1, 32, 1, 80), 1, (1, 9), padding=(0, 8), dilation=(1, 2)),
    "longer_than_the_image": Multiplied((2, 32, 1, 20), 1, (1, 75), padding=(0, 37)),
    "long_far_outside": Multiplied((1, 16, 1, 3), 1, (1, 9), padding=(0, 20)),
    "long_even": Multiplied((1, 96, 1, 35), 1, (1, 8), padding=(0, 4), bias=False),
    "long_without_padding": Multiplied((1, 16, 1, 40), 1, (1, 31), padding=0),
    "long_rows": Multiplied((2, 16, 5, 40), 1, (1, 9), padding=(0, 4)),
    "long_rows_outside": Multiplied((1, 16, 2, 40), 1, (1, 9), padding=(2, 4)),
    "long_rows_stride": Multiplied((1, 32, 5, 41), 1, (1, 9), stride=2, padding=(0, 4)),
    "long_to_2": Multiplied((1, 32, 1, 40), window=(1, 9), padding=(0, 4)),
    "long_leaky": Multiplied(
        (1, 32, 1, 40), 1, (1, 9), padding=(0, 4), code="F.leaky_relu(self.c(x), 0.2)"
    ),
    "long_column": Multiplied((1, 32, 40, 1), 1, (9, 1), padding=(4, 0), own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", MULTIPLIED)
def test_depthwise_convolution_to_more_channels(case: str, dtype: torch.dtype) -> None:
    """Several results of each channel have a kernel of our own, and windows with gaps."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = MULTIPLIED[case]
    channels = c.size[1]
    options: dict[str, Any] = {"stride": c.stride, "padding": c.padding, "dilation": c.dilation}
    options |= {"bias": c.bias, "groups": channels}
    m = net(c.code, c=nn.Conv2d(channels, c.times * channels, c.window, **options)).eval()
    x, layout = torch.randn(c.size), torch.channels_last
    check(m, [x], groups=1, fused="_convolution", dtype=dtype, memory_format=layout)
    found = kernels_of(m.to(dtype), x.to(dtype, memory_format=layout))
    own = any(name.startswith("llga_depthwise:") for name in found)
    narrow = dtype == torch.bfloat16 and llga_fuser._C.runtime_info()["isa"].startswith("avx512")
    assert own == ((c.own or (c.wide and narrow)) and has_own_kernels()), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_depthwise_convolution_to_more_channels_with_special_values(
    value: float, dtype: torch.dtype
) -> None:
    """They reach the results of their channel, and no others."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("F.relu(self.c(x))", c=nn.Conv2d(48, 96, 3, padding=1, groups=48)).eval().to(dtype)
    x = torch.randn(2, 48, 9, 17).to(dtype, memory_format=torch.channels_last)
    check_special_values(m, x, value, [(0, 0, 0, 0), (1, 47, 8, 16), (0, 25, 4, 3)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_long_depthwise_convolution_of_sequences(dtype: torch.dtype) -> None:
    """As in networks for speech, between pointwise ones."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(
        "self.b(F.relu(self.c(self.a(x))))",
        a=nn.Conv1d(8, 32, 1),
        b=nn.Conv1d(32, 16, 1),
        c=nn.Conv1d(32, 32, 33, padding=16, groups=32),
    ).eval()
    x = torch.randn(2, 8, 70)
    check(m, [x], dtype=dtype, fused="conv relu")
    if has_own_kernels():
        found = kernels_of(m.to(dtype), x.to(dtype))
        assert any(name.startswith("llga_depthwise:") for name in found), found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_long_depthwise_convolution_with_special_values(value: float) -> None:
    conv = nn.Conv2d(32, 32, (1, 15), padding=(0, 7), groups=32)
    x = torch.randn(2, 32, 1, 40).to(memory_format=torch.channels_last)
    m = net("F.relu(self.c(x))", c=conv).eval()
    with torch.no_grad():
        script = to_script(m, [x])
        for place in [(0, 0, 0, 0), (1, 31, 0, 39), (0, 17, 0, 20)]:
            y = x.clone()
            y[place] = value
            for _ in range(3):
                assert_same(script(y), m(y))
        conv.weight[9, 0, 0, 3] = value
        alone = net("self.c(x)", c=conv)
        script = to_script(alone, [x])
        for _ in range(3):
            assert_same(script(x), alone(x))


class Transposed(NamedTuple):
    """A transposed convolution: size of the image, channels it makes, and what it does."""

    size: tuple[int, ...] = (1, 24, 9, 13)
    outputs: int = 3
    window: Any = 4
    stride: Any = 2
    padding: Any = 1
    extra: Any = 0  # at the bottom and on the right
    bias: bool = True
    code: str = "self.t(self.c(x))"
    own: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed


TRANSPOSED = {
    "halves": Transposed(code="torch.tanh(self.t(self.c(x)))"),
    "one_channel": Transposed((2, 20, 7, 8), 1, 9, 2, 4, 1, bias=False),
    "far": Transposed((1, 8, 5, 6), 2, 3, 3, 0, (2, 1), code="F.relu(self.t(self.c(x)))"),
    "patches": Transposed((3, 17, 4, 5), 7, 2, 2, 0),
    "gaps": Transposed((1, 8, 5, 6), 2, 2, 3, 0, 2),
    "overlaps": Transposed((1, 8, 5, 6), 4, 5, 1, 2, code="F.relu6(self.t(self.c(x)))"),
    "strides": Transposed(
        (1, 8, 6, 5), 1, (3, 8), (1, 4), (1, 2), code="F.silu(self.t(self.c(x)))"
    ),
    "one_pixel": Transposed((2, 8, 1, 1), 3, 4, 1, 0, code="torch.sigmoid(self.t(self.c(x)))"),
    "cropped": Transposed((1, 8, 4, 5), 2, 6, 2, 5),
    "mostly_bias": Transposed((1, 8, 2, 2), 2, 1, 4, 0, 3, code="F.gelu(self.t(self.c(x)))"),
    "hardswish": Transposed(code="F.hardswish(self.t(self.c(x)))"),
    "read_twice": Transposed(code="y = self.t(self.c(x))\nreturn y, torch.tanh(y)"),
    "many_channels": Transposed(outputs=8, own=False),
    "dilated": Transposed(own=False, options={"dilation": 2}),
    "groups": Transposed(outputs=4, own=False, options={"groups": 2}),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolution_to_few_channels(case: str, layout: torch.memory_format) -> None:
    c = TRANSPOSED[case]
    channels = c.size[1]
    t = nn.ConvTranspose2d(
        channels, c.outputs, c.window, c.stride, c.padding, c.extra, bias=c.bias, **c.options
    )
    m = net(c.code, t=t, c=nn.Conv2d(channels, channels, 3, padding=1)).eval()
    x = torch.randn(c.size)
    check(m, [x], fused="conv", memory_format=layout)
    found = kernels_of(m, x.to(memory_format=layout))
    own = any(name.startswith("llga_transposed:") for name in found)
    assert own == (c.own and has_own_kernels()), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transposed_convolution_of_sequences(dtype: torch.dtype) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(
        "torch.tanh(self.t(F.relu(self.c(x))))",
        c=nn.Conv1d(8, 16, 3, padding=1),
        t=nn.ConvTranspose1d(16, 2, 8, 4, padding=2),
    ).eval()
    check(m, [torch.randn(2, 8, 30)], dtype=dtype, fused="conv relu tanh")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("activation", ["", "F.relu", "torch.tanh", "F.hardswish"])
def test_transposed_convolution_of_special_values(activation: str, value: float) -> None:
    t = nn.ConvTranspose2d(8, 2, 4, 2, padding=1)
    m = net(f"{activation}(self.t(x))", t=t).eval()
    x = torch.randn(2, 8, 5, 6).to(memory_format=torch.channels_last)
    with torch.no_grad():
        script = to_script(m, [x])
        for place in [(0, 0, 0, 0), (1, 7, 4, 5), (0, 3, 2, 3)]:
            y = x.clone()
            y[place] = value
            for _ in range(3):
                assert_same(script(y), m(y))


@pytest.mark.parametrize("dim", [0, 1, -1, (0, 2)], ids=str)
@pytest.mark.parametrize("code", ["x.sum({}) + y", "y * x.mean({})", "x.amax({}) - y"])
def test_reduction_and_a_binary_op(code: str, dim: Any) -> None:
    """oneDNN would have its reference kernel for both."""
    x = torch.randn(4, 6, 16)
    y = torch.randn(x.sum(dim).shape)
    m = net(code.format(dim), "x, y").eval()
    check(m, [x, y])
    if has_own_kernels() and "amax" not in code and dim != (0, 2):
        (group,) = llga_fuser.report(m, x, y, rounds=1).groups
        assert "llga_reduction" in [p.implementation for p in group.primitives]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_dilated_depthwise_convolution_with_special_values(value: float) -> None:
    conv = nn.Conv2d(32, 32, 3, padding=4, dilation=4, groups=32)
    x = torch.randn(2, 32, 9, 17).to(memory_format=torch.channels_last)
    m = net("F.relu(self.c(x))", c=conv).eval()
    check_special_values(m, x, value, [(0, 0, 0, 0), (1, 31, 8, 16), (0, 25, 4, 3)])


GATES = {  # what is multiplied, of which tensors, and whether a kernel of our own does it
    "wavenet": ("torch.tanh(a) * torch.sigmoid(b)", True),
    "glu": ("a * torch.sigmoid(b)", True),
    "turned": ("F.silu(b) * a", True),
    "gelu": ("F.gelu(a) * b", True),
    "of_glu": ("F.glu(y, {dim})", True),
    "of_the_same": ("a * torch.sigmoid(a)", False),
    "and_seen": ("s * a + s.sum(dim=1, keepdim=True)", False),
    "plain": ("a * b", False),
    "with_a_number": ("torch.sigmoid(a) * 2.0 + b", False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [(1, 24, 1, 300), (2, 8, 7, 9), (3, 8, 17)], ids=str)
@pytest.mark.parametrize("case", GATES)
def test_gate(case: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """Parts of channels that are multiplied, behind activations, are read where they lie."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    code, own = GATES[case]
    made, conv = size[1] * 2, nn.Conv1d if len(size) == 3 else nn.Conv2d
    product = code.format(dim=1 - len(size))
    m = net(
        f"y = self.c(x)\na, b = y.chunk(2, 1)\ns = torch.sigmoid(b)\nreturn self.d({product})",
        c=conv(6, made, 1), d=conv(size[1], 5, 1),
    ).eval()  # fmt: skip
    x = torch.randn(size[0], 6, *size[2:])
    check(m, [x], fused="mul" if own and case != "of_glu" else "", dtype=dtype, fallbacks=not own)
    found = kernels_of(m.to(dtype), x.to(dtype))
    assert ("llga_gate" in found) == (own and has_own_kernels()), found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_both", [False, True])
def test_gate_in_other_orders(of_both: bool, layout: torch.memory_format) -> None:
    """A part of a caller's tensor, and a product that the caller gets, lie as in eager."""
    m = net(
        "a, b = self.c(x).chunk(2, 1)\n"
        f"return torch.tanh({'a' if of_both else 'x[:, 2:10]'}) * torch.sigmoid(b)",
        c=nn.Conv2d(12, 16, 1),
    ).eval()  # fmt: skip
    x = torch.randn(2, 12, 5, 6).to(memory_format=layout)
    script = to_script(m, [x])
    for _ in range(4):
        y, expected = script(x), m(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert y.stride() == expected.stride()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_gate_with_special_values(value: float) -> None:
    m = net(
        "a, b = self.c(x).chunk(2, 1)\nreturn self.d(torch.tanh(a) * torch.sigmoid(b))",
        c=nn.Conv2d(4, 16, 3), d=nn.Conv2d(8, 8, 1),
    ).eval()  # fmt: skip
    check_special_values(m, torch.randn(2, 4, 5, 6), value, [(0, 0, 0, 0), (1, 3, 4, 5)])


class Volumes(NamedTuple):
    """A depthwise convolution of volumes: their size, and what it does."""

    size: tuple[int, ...]
    window: Any = 3
    stride: Any = 1
    padding: Any = 1
    bias: bool = True
    code: str = "self.c(x)"
    own: bool = True


VOLUMES = {
    "alone": Volumes((1, 48, 4, 9, 13)),
    "halves": Volumes((2, 96, 3, 8, 15), stride=(1, 2, 2), bias=False),
    "far_apart": Volumes((2, 40, 8, 17, 16), stride=(2, 8, 5), code="F.relu(self.c(x))"),
    "no_padding": Volumes((1, 17, 3, 4, 20), padding=0, code="F.relu6(self.c(x))"),
    "mostly_padding": Volumes((3, 16, 1, 2, 1), padding=(1, 2, 3), code="F.hardswish(self.c(x))"),
    "few_channels": Volumes((1, 7, 3, 5, 6), own=False),
    "of_images": Volumes((1, 16, 3, 5, 6), window=(1, 3, 3), padding=(0, 1, 1), own=False),
    "dilated": Volumes((1, 16, 6, 6, 6), padding=2, code="self.d(x)", own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", VOLUMES)
def test_depthwise_convolution_of_volumes(case: str, dtype: torch.dtype) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = VOLUMES[case]
    channels = c.size[1]
    options = {"stride": c.stride, "padding": c.padding, "bias": c.bias, "groups": channels}
    conv = nn.Conv3d(channels, channels, c.window, **options)
    dilated = nn.Conv3d(channels, channels, c.window, dilation=2, **options)
    m = net(c.code, c=conv, d=dilated).eval()
    x, layout = torch.randn(c.size), torch.channels_last_3d
    check(m, [x], groups=1, fused="_convolution", dtype=dtype, memory_format=layout)
    found = kernels_of(m.to(dtype), x.to(dtype, memory_format=layout))
    own = any(name.startswith("llga_depthwise_volume:") for name in found)
    assert own == (c.own and has_own_kernels()), found


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", ["traced", "bf16"])
@pytest.mark.parametrize("heads", [1, 3])
def test_depthwise_convolution_of_keys(heads: int, mode: str) -> None:
    """The keys of all heads, which lie between queries and values: MViT's pooling."""
    m = net(
        f"y = self.i(x).reshape(1, 61, 3, {heads}, 32).transpose(1, 3).unbind(2)[1]\n"
        "first, y = torch.tensor_split(y, (1,), dim=2)\n"
        f"y = y.transpose(2, 3).reshape({heads}, 32, 3, 4, 5).contiguous()\n"
        f"y = self.c(y).reshape(1, {heads}, 32, -1).transpose(2, 3)\n"
        "return self.n(torch.cat((first, y), 2))",
        i=nn.Linear(32, 96 * heads),
        c=nn.Conv3d(32, 32, 3, (1, 2, 2), padding=1, groups=32, bias=False),
        n=nn.LayerNorm(32),
    ).eval()
    x = torch.randn(1, 61, 32)
    check(m, [x], **MODES[mode])
    if mode == "traced" and has_own_kernels():
        found = kernels_of(m, x)
        assert any(name.startswith("llga_depthwise_volume:") for name in found), found
        assert "llga_copy" not in found, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_depthwise_convolution_of_volumes_with_special_values(
    value: float, dtype: torch.dtype
) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("F.relu(self.c(x))", c=nn.Conv3d(24, 24, 3, padding=1, groups=24)).eval().to(dtype)
    x = torch.randn(2, 24, 4, 5, 9).to(dtype, memory_format=torch.channels_last_3d)
    check_special_values(m, x, value, [(0, 0, 0, 0, 0), (1, 23, 3, 4, 8), (0, 15, 2, 3, 3)])


PARTS = {
    "channels": ((2, 20, 9, 7), "x[:, 4:12]"),
    "narrow channels": ((2, 9, 9, 7), "x[:, 1:4]"),
    "pixels": ((2, 8, 9, 17), "x[..., 3:9]"),
    "images": ((5, 8, 9, 7), "x[::2]"),
    "one image": ((1, 16, 9, 7), "x[:, 8:]"),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", PARTS)
def test_parts_of_a_tensor(case: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    """A plan copies them itself, and does not look at what is between their numbers."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    size, code = PARTS[case]
    part_of = net(code)
    inside = torch.zeros(size)
    part_of(inside).fill_(1)
    x = torch.randn(size).where(inside == 1, math.nan).to(dtype, memory_format=layout)
    part = part_of(x)
    m = net(f"F.relu(self.c({code}))", c=nn.Conv2d(part.shape[1], 5, 3, padding=1)).eval()
    m = m.to(dtype)
    groups = llga_fuser.report(m, x, rounds=1).groups
    found = [primitive.implementation for group in groups for primitive in group.primitives]
    dense = part.is_contiguous() or part.is_contiguous(memory_format=torch.channels_last)
    assert ("llga_copy" in found) != dense, found
    with torch.no_grad():
        script = to_script(m, [x])
        before = llga_fuser.cache_info().fallbacks
        for _ in range(3):
            assert_same(script(x), m(x))
        assert llga_fuser.cache_info().fallbacks == before
        part[0, 1, 2, 3] = math.nan
        assert_same(script(x), m(x))


class Winograd(NamedTuple):
    """A convolution of 3 x 3: size of the input, outputs, and what it does."""

    size: tuple[int, ...]
    outputs: int
    padding: Any = 1
    bias: bool = True
    code: str = "self.c(x)"
    fused: int = 1


WINOGRAD = {
    "alone": Winograd((1, 64, 28, 28), 64),
    "small_tiles": Winograd((1, 256, 14, 14), 256),
    "no_padding": Winograd((1, 64, 29, 31), 48, padding=0, code="F.relu(self.c(x))"),
    "much_padding": Winograd((2, 48, 27, 18), 80, padding=(2, 1), bias=False),
    "more_padding_than_image": Winograd((40, 128, 3, 3), 128, padding=4),
    "narrow": Winograd((1, 128, 60, 6), 128),
    "batch": Winograd((5, 32, 19, 22), 160, code="F.relu(self.c(x))"),
    "skip": Winograd((1, 64, 28, 28), 64, code="F.relu(self.c(x) + x)"),
    "skip_before": Winograd((3, 64, 15, 13), 64, bias=False, code="x + self.c(x)"),
    "chain": Winograd((1, 64, 28, 28), 64, code="F.relu(self.c(F.relu(self.c(x))) + x)", fused=2),
    "silu": Winograd((1, 64, 29, 31), 48, code="F.silu(self.c(x))"),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", WINOGRAD)
def test_convolution_by_winograd(case: str) -> None:
    c = WINOGRAD[case]
    conv = nn.Conv2d(c.size[1], c.outputs, 3, padding=c.padding, bias=c.bias)
    x = torch.randn(c.size).to(memory_format=torch.channels_last)
    m = net(c.code, c=conv).eval()
    check(m, [x], groups=c.fused, fused="_convolution")
    own = [name.startswith("llga_winograd:") for name in kernels_of(m, x)]
    assert own == [has_own_kernels()] * c.fused


# Larger ones: oneDNN multiplies numbers of bfloat16 twice as fast.
NARROW_WINOGRAD = {
    "alone": Winograd((1, 64, 56, 56), 64),
    "few_outputs": Winograd((1, 128, 45, 47), 80, padding=0, code="F.relu(self.c(x))"),
    "much_padding": Winograd((2, 64, 57, 48), 96, padding=(2, 1), bias=False),
    "batch": Winograd((5, 96, 32, 32), 96, code="F.relu(self.c(x))"),
    "large_weight": Winograd((2, 256, 28, 28), 256),
    "skip": Winograd((1, 64, 56, 56), 64, code="F.relu(self.c(x) + x)"),
    "skip_before": Winograd((3, 96, 35, 33), 96, bias=False, code="x + self.c(x)"),
    "chain": Winograd((1, 64, 56, 56), 64, code="F.relu(self.c(F.relu(self.c(x))) + x)"),
    "silu": Winograd((1, 64, 56, 56), 64, code="F.silu(self.c(x))"),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", NARROW_WINOGRAD)
def test_bfloat16_convolution_by_winograd(case: str) -> None:
    """Its arithmetic is that of float32: no further from the exact results than eager."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = NARROW_WINOGRAD[case]
    conv = nn.Conv2d(c.size[1], c.outputs, 3, padding=c.padding, bias=c.bias)
    x = torch.randn(c.size).to(memory_format=torch.channels_last)
    m = net(c.code, c=conv).eval()
    check(m, [x], fused="_convolution", dtype=torch.bfloat16)
    m, x = m.bfloat16(), x.bfloat16()
    own = [name == "llga_winograd:avx512_bf16" for name in kernels_of(m, x)]
    assert own
    # With matrix units oneDNN's are much faster.
    assert own == [has_narrow_products() and not has_matrix_units()] * len(own)
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(3):
            result = script(x)
        exact = copy.deepcopy(m).double()(x.double())
        errors = [(y.double() - exact).norm().item() for y in (result, m(x))]
    assert errors[0] <= 1.02 * errors[1]  # both round the result, which is most of it


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("code", ["x + F.silu(self.c(x))", "F.relu(F.silu(self.c(x)) + x)"])
def test_winograd_with_silu_before_a_sum(code: str, dtype: torch.dtype) -> None:
    """Of one partition or of two, as oneDNN's version has it."""
    m = net(code, c=nn.Conv2d(64, 64, 3, padding=1)).eval()
    x = torch.randn(1, 64, 56, 56).to(memory_format=torch.channels_last)
    check(m, [x], groups=1, fused="_convolution silu add", dtype=dtype)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("code", ["y + self.c(y)", "F.relu(self.c(y) + y)"])
def test_what_a_kernel_reads_is_not_written_over(code: str) -> None:
    """The addend may be overwritten by the result, unless it is the data as well."""
    image = torch.randn(2, 64, 28, 28)
    pixel, spatial = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3, padding=1)
    check(net(f"y = self.a(x)\nreturn self.b({code})", a=pixel, b=pixel, c=spatial), [image])
    rows, square = torch.randn(300, 64), nn.Linear(64, 64)
    check(net(f"y = self.a(x)\nreturn self.b({code})", a=square, b=square, c=square), [rows])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((1, 64, 28, 28), torch.float32),
        ((1, 256, 14, 14), torch.float32),
        ((1, 64, 56, 56), torch.bfloat16),
    ],
    ids=["large", "small", "bf16"],
)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("code", ["F.relu(self.c(x) + x)", "F.silu(self.c(x))"])
def test_winograd_spreads_nothing(
    code: str, size: tuple[int, ...], dtype: torch.dtype, value: float, threads: int
) -> None:
    """The transformed tile mixes all of its pixels; an infinity reaches its own neighbours only."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(code, c=nn.Conv2d(size[1], size[1], 3, padding=1)).eval().to(dtype)
    # An exact zero times an infinity is NaN, a small number times it is an infinity.
    m.c.weight.data[::3, ::2, 1, 1] = 0
    m.c.weight.data[1::3, ::2, 1, 1] = 1e-12
    x = torch.randn(size).to(memory_format=torch.channels_last).to(dtype)
    with restored(torch.get_num_threads, torch.set_num_threads), torch.no_grad():
        torch.set_num_threads(threads)
        script = to_script(m, [x])
        for _ in range(3):
            script(x)
        for place in ((0, 3, 0, 0), (0, 7, 5, 6), (0, 8, 13, 13)):
            y = x.clone(memory_format=torch.preserve_format)
            y[place] = value
            result, expected = script(y), m(y)
            assert_same(result, expected)
            assert result.isfinite().sum() > result.numel() // 2


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("stride", {"stride": 2}),
        ("dilation", {"dilation": 2}),
        ("groups", {"groups": 2}),
        ("kernel", {"kernel_size": 5}),
        ("channels", {"in_channels": 12}),
        ("few", {"in_channels": 16, "out_channels": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_convolutions_are_left_to_onednn(why: str, change: dict[str, Any]) -> None:
    options = {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1, **change}
    conv = nn.Conv2d(**options)
    x = torch.randn(1, conv.in_channels, 28, 28).to(memory_format=torch.channels_last)
    m = net("self.c(x)", c=conv).eval()
    check(m, [x], groups=1, fused="_convolution")
    assert not any(name.startswith("llga_winograd") for name in kernels_of(m, x)), why


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e38])
def test_winograd_is_not_for_such_weights(value: float) -> None:
    m = net("self.c(x)", c=nn.Conv2d(64, 64, 3, padding=1)).eval()
    m.c.weight.data[5, 6, 1, 1] = value
    x = torch.randn(1, 64, 28, 28).to(memory_format=torch.channels_last)
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))
    assert not any(name.startswith("llga_winograd") for name in kernels_of(m, x))


class Direct(NamedTuple):
    """A small convolution: size of the input, outputs, window, and what it does."""

    size: tuple[int, ...]
    outputs: int
    window: Any = 3
    stride: Any = 1
    padding: Any = 1
    bias: bool = True
    code: str = "self.c(x)"
    own: bool = True
    avx512: bool = True  # whether it is so with AVX-512, too


DIRECT = {
    "alone": Direct((1, 16, 16, 16), 16),
    "rgb": Direct((1, 3, 33, 30), 16, stride=2, code="F.relu(self.c(x))"),
    "pointwise": Direct((1, 8, 4, 4), 8, window=1, padding=0, code="F.relu6(self.c(x))"),
    "pointwise_stride": Direct((2, 20, 9, 7), 24, window=1, stride=2, padding=0),
    "one_pixel": Direct((1, 32, 1, 1), 70, window=1, padding=0),
    "no_padding": Direct((3, 17, 7, 6), 18, padding=0, bias=False, code="F.hardswish(self.c(x))"),
    "uneven": Direct((1, 5, 13, 19), 33, window=(3, 5), stride=(2, 3), padding=(2, 1)),
    "row": Direct((2, 16, 1, 40), 16, window=(1, 7), padding=(0, 3)),
    "tall": Direct((1, 8, 40, 2), 9, window=(5, 1), padding=(2, 0), stride=(3, 1)),
    "padding_alone": Direct((1, 8, 2, 2), 8, padding=4),
    "much_padding": Direct((1, 4, 3, 3), 8, window=3, padding=(7, 6), stride=5),
    "batch": Direct((31, 8, 3, 5), 8),
    "skip": Direct((1, 16, 12, 11), 16, code="F.relu(self.c(x) + x)"),
    "skip_before": Direct((2, 16, 7, 5), 16, bias=False, code="x + self.c(x)"),
    "silu": Direct((1, 16, 12, 11), 20, code="F.silu(self.c(x))"),
    "silu_and_sum": Direct((1, 16, 12, 11), 16, code="F.silu(self.c(x)) + x"),
    "two_planes": Direct((1, 2, 24, 25), 32, window=5, padding=2, code="F.silu(self.c(x))"),
    "planes_large_window": Direct((1, 3, 113, 112), 64, window=7, stride=2, own=False),
    "large": Direct((1, 32, 32, 32), 32, own=False),
    "heavy": Direct((1, 64, 4, 4), 64, own=False),
    "short": Direct((1, 1, 9, 9), 16, own=False),
    "few": Direct((1, 16, 9, 9), 3, own=False),
}


def images(size: tuple[int, ...], layout: str) -> Tensor:
    """Random ones: contiguous, channels_last, transposed, or with gaps between their columns."""
    if layout == "transposed":
        return torch.randn(size[1], size[0], size[3], size[2]).permute(1, 0, 3, 2)
    x = torch.randn(*size[:3], 2 * size[3])[..., ::2]
    if layout == "gaps":
        return x
    last = layout == "channels_last"
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def is_direct(name: str) -> bool:
    return name.startswith("llga_direct:")


def direct(case: str) -> nn.Module:
    c = DIRECT[case]
    conv = nn.Conv2d(c.size[1], c.outputs, c.window, c.stride, c.padding, bias=c.bias)
    return net(c.code, c=conv).eval()


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps", "transposed"])
@pytest.mark.parametrize("case", DIRECT)
def test_small_convolution(case: str, layout: str) -> None:
    """oneDNN's call would take longer than the arithmetic."""
    m = direct(case)
    x = images(DIRECT[case].size, layout)
    check(m, [x], groups=1, fused="_convolution")
    if layout == "channels_last" or "x" not in DIRECT[case].code.replace("self.c(x)", ""):
        owns = DIRECT[case].own and has_own_kernels()
        assert [is_direct(name) for name in kernels_of(m, x)] == [owns]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("where", ["image", "weight", "bias"])
def test_small_convolution_of_special_values(where: str, value: float) -> None:
    """What is padded are zeros: times an infinity they are NaN, as in eager."""
    m = direct("alone")
    x = torch.randn(DIRECT["alone"].size)
    if where == "image":
        x[0, 3, 0, 5] = value
    else:
        getattr(m.c, where).data.view(-1)[7] = value
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))
    assert any(map(is_direct, kernels_of(m, x))) == has_own_kernels()


def test_small_convolutions_one_behind_the_other() -> None:
    """Channels last between them, in the order of the input at the ends."""
    layers = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 12, 1)]
    m = nn.Sequential(*layers).eval()
    x = torch.randn(1, 3, 32, 32)
    check(m, [x], groups=3)
    assert [is_direct(name) for name in kernels_of(m, x)] == [has_own_kernels()] * 3


LARGE_PLANES = {
    "three": Direct((1, 3, 113, 160), 32, stride=2, code="F.silu(self.c(x))"),
    "two": Direct((2, 2, 120, 113), 32, window=5, padding=2, code="F.hardswish(self.c(x))"),
    "one": Direct((1, 1, 99, 98), 24, window=7, padding=3, own=False),
    "four": Direct((3, 4, 64, 96), 24, padding=0, bias=False, code="F.relu(self.c(x))"),
    "large_window": Direct((1, 3, 113, 112), 64, window=7, stride=2, own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps"])
@pytest.mark.parametrize("case", LARGE_PLANES)
def test_convolution_of_large_planes(case: str, layout: str) -> None:
    """Few of them, which oneDNN takes longer to read; results are channels last."""
    c = LARGE_PLANES[case]
    conv = nn.Conv2d(c.size[1], c.outputs, c.window, c.stride, c.padding, bias=c.bias)
    m = net(f"self.d({c.code})", c=conv, d=nn.Conv2d(c.outputs, 16, 1)).eval()
    x = images(c.size, layout)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        check(m, [x], groups=2, fused="_convolution")
        with_silu = "silu" in c.code and not has_avx2_kernels()  # else it is a step of its own
        own = c.own and (threads > 1 or with_silu)
        assert is_direct(kernels_of(m, x)[0]) == (own and has_own_kernels())


WIDE = {
    "plane": Direct((2, 1, 61, 70), 24, window=9, padding=4, avx512=False),
    "eight": Direct((1, 1, 99, 98), 24, window=8, padding=3, avx512=False),
    "spectrogram": Direct(
        *((1, 1, 80, 300), 32, (41, 11), 2, (20, 5)),
        code="F.hardtanh(self.c(x), 0.0, 20.0)",
        avx512=False,
    ),
    "long": Direct((1, 1, 40, 300), 32, (3, 20), padding=(1, 10), code="F.elu(self.c(x))"),
    "alexnet": Direct((1, 3, 127, 131), 96, 11, 4, 2, code="F.relu(self.c(x))"),
    "four": Direct((1, 4, 40, 50), 21, (3, 8), (1, 3), (0, 2), False, "F.silu(self.c(x))"),
    "row": Direct((1, 1, 1, 9000), 40, (1, 10), (1, 5), (0, 3)),
    # With AVX-512 oneDNN computes GELU behind its convolution.
    "row_as_it_is": Direct(
        (2, 1, 1, 9003), 40, (1, 10), (1, 5), 0, code="F.gelu(self.c(x))", avx512=False
    ),
    "wide": Direct((1, 2, 3, 20000), 16, (2, 16), 1, (1, 8), code="F.leaky_relu(self.c(x))"),
    "sum": Direct((1, 1, 60, 70), 16, (1, 9), 1, (0, 4), code="F.relu(self.c(x) + self.e(x))"),
    "even": Direct((3, 2, 64, 64), 16, window=8, stride=8, padding=0),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps"])
@pytest.mark.parametrize("case", WIDE)
def test_convolution_of_few_planes_by_a_wide_window(case: str, layout: str) -> None:
    """Without AVX-512 oneDNN writes down what is under each window."""
    c = WIDE[case]
    window = nn.Conv2d(c.size[1], c.outputs, c.window, c.stride, c.padding, bias=c.bias)
    x = images(c.size, layout)
    for code in (c.code, f"self.d({c.code})"):  # in the input's order, and in any
        parts = {"c": window, "d": nn.Conv2d(c.outputs, 8, 1), "e": nn.Conv2d(1, 16, 1)}
        m = net(code, **{name: part for name, part in parts.items() if f"self.{name}(" in code})
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            check(m.eval(), [x], fused="_convolution")
            found = [is_direct(name) for name in kernels_of(m, x)]
            own = has_own_kernels() if c.avx512 else has_avx2_kernels()
            assert any(found) or not own, (code, threads, found)


@pytest.mark.parametrize("outputs", [512, 520])
def test_wide_window_to_many_planes(outputs: int) -> None:
    """Eight columns of the result find room until they are brought into planes."""
    m = nn.Conv2d(1, outputs, (1, 9), padding=(0, 4)).eval()
    x = torch.randn(1, 1, 1, 90)
    check(m, [x])
    assert is_direct(kernels_of(m, x)[0]) == (has_own_kernels() and outputs == 512)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_wide_window_over_special_values(value: float) -> None:
    m = nn.Conv2d(2, 16, (3, 9), padding=(1, 4)).eval()
    x = torch.randn(1, 2, 5, 2000)
    with torch.no_grad():
        script = to_script(m, [x])
        for column in (0, 300, 1999):
            kept = x[0, 1, 2, column].item()
            x[0, 1, 2, column] = value
            for _ in range(3):
                assert_same(script(x), m(x))
            x[0, 1, 2, column] = kept


PLANES = {
    "two": (2, 2, 33, 35),
    "three": (1, 3, 64, 61),
    "four": (5, 4, 32, 33),
    "one": (1, 1, 40, 40),
    "five": (2, 5, 40, 40),
    "few_pixels": (2, 3, 30, 30),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PLANES)
def test_images_of_few_planes(case: str, dtype: torch.dtype) -> None:
    """oneDNN takes several times as long to bring them into the order of channels last."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    images, channels, height, width = PLANES[case]
    convs = {"c": nn.Conv2d(channels, 128, 7, 2, 3), "d": nn.Conv2d(128, 16, 1)}
    m = net("F.relu(self.d(F.relu(self.c(x))))", **convs).eval()
    x = torch.randn(images, channels, height, width)
    check(m, [x], fused="_convolution", dtype=dtype)
    m, x = m.to(dtype), x.to(dtype)
    owns = 2 <= channels <= 4 and height * width >= 1024 and has_own_kernels()
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        found = llga_fuser.report(m, image, rounds=1).conversions
        own = [c.text for c in found if "llga_interleave" in c.text]
        assert len(own) == (owns and image is x), found
        assert all("abcd ->" in text and "acdb (" in text for text in own)
    x[0, 0, 1, 2], x[-1, -1, -1, -1] = math.nan, math.inf
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))


class Mean(NamedTuple):
    """A mean over pixels: size of the data, and what it does."""

    size: tuple[int, ...]
    code: str = "F.adaptive_avg_pool2d(y, 1)"
    own: bool = True


MEAN = {
    "pool": Mean((1, 16, 9, 7)),
    "odd_channels": Mean((3, 21, 4, 5)),
    "mean": Mean((2, 40, 7, 7), "y.mean([2, 3], keepdim=True)"),
    "flat_mean": Mean((1, 40, 7, 7), "y.mean([2, 3])"),
    "many": Mean((3, 512, 13, 13), "y.mean((-2, -1))"),
    "other_dims": Mean((2, 40, 7, 7), "y.mean([1, 2])", own=False),
    "window": Mean((1, 16, 6, 8), "F.avg_pool2d(y, (6, 8))"),
    "large": Mean((1, 64, 40, 40), own=False),
    "part": Mean((1, 16, 6, 8), "F.avg_pool2d(y, (3, 8))", own=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan, 3e38])
@pytest.mark.parametrize("case", MEAN)
def test_mean_over_pixels(case: str, value: float, dtype: torch.dtype) -> None:
    c = MEAN[case]
    m = net(f"y = self.c(x)\nreturn {c.code}", c=nn.Conv2d(4, c.size[1], 1)).eval()
    x = torch.randn(c.size[0], 4, *c.size[2:])
    x[0, 1, 2, 3] = value
    check(m, [x], dtype=dtype)
    m, x = m.to(dtype), x.to(dtype)
    if fuses(dtype):
        assert ("llga_reduction" in kernels_of(m, x)) == (c.own and has_own_kernels())


class Reduced(NamedTuple):
    """A reduction of two tensors' sum: size, and what it does."""

    size: tuple[int, ...]
    code: str
    own: bool = True

    @property
    def is_watched(self) -> bool:
        """oneDNN would lose NaN; groups only run on what is finite."""
        return "max" in self.code or "min" in self.code


REDUCED = {
    "tokens": Reduced((2, 50, 24), "y.mean(1)"),
    "tokens_kept": Reduced((3, 7, 19), "y.mean(1, keepdim=True)"),
    "first": Reduced((40, 24), "y.sum(0)"),
    "sum": Reduced((2, 9, 7, 33), "y.sum((1, 2))"),
    "sum_kept": Reduced((2, 9, 7, 33), "y.sum((-2, -3), keepdim=True)"),
    "norm": Reduced((2, 9, 7, 33), "torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)"),
    "norm_of_many": Reduced((1, 60, 50, 40), "y.norm(p=2, dim=(1, 2), keepdim=True)"),
    "long": Reduced((1, 130, 128, 8), "y.mean((1, 2))", own=False),
    "last": Reduced((2, 9, 7, 33), "y.mean(-1)"),
    "last_kept": Reduced((300, 150), "y.sum(-1, keepdim=True)"),
    "last_two": Reduced((2, 9, 7, 33), "y.norm(dim=(2, 3))"),
    "few": Reduced((70, 3), "y.sum(1)"),
    "wide": Reduced((2, 3, 9001), "y.sum(1)"),
    "wide_mean": Reduced((3, 40, 150), "y.mean(0)"),
    "wide_norm": Reduced((2, 3, 9001), "y.norm(dim=1, keepdim=True)"),
    "apart": Reduced((2, 9, 7, 33), "y.mean((1, 3))", own=False),
    "images": Reduced((2, 9, 7, 33), "y.mean((0, 2))", own=False),
    "greatest": Reduced((2, 9, 7, 33), "y.amax((1, 2))"),
    "greatest_of_one": Reduced((2, 9, 7, 33), "y.max(1)[0]"),
    "greatest_of_many": Reduced((1, 20, 900, 40), "y.amax((1, 2), keepdim=True)"),
    "greatest_number": Reduced((40, 71), "y.max(-1, keepdim=True).values"),
    "greatest_of_few": Reduced((70, 3), "y.amax(1)"),
    "greatest_of_wide": Reduced((2, 3, 9001), "y.amax(1)"),
    "least": Reduced((2, 9, 7, 33), "y.amin((1, 2))"),
    "least_of_many": Reduced((1, 20, 900, 40), "y.amin((1, 2))"),
    "least_number": Reduced((300, 150), "y.min(-1)[0]"),
    "least_of_wide": Reduced((2, 3, 9001), "y.min(1)[0]"),
    "greatest_apart": Reduced((2, 9, 7, 33), "y.amax((1, 3))", own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("case", REDUCED)
def test_reduction_over_rows(case: str, value: float, dtype: torch.dtype) -> None:
    c = REDUCED[case]
    m = net(f"y = torch.tanh(x) + x\nreturn {c.code}").eval()
    x = torch.randn(c.size)
    x.view(-1)[17] = value
    check(m, [x], dtype=dtype, fallbacks=not c.own or c.is_watched)
    if fuses(dtype) and not (c.is_watched and value != 1):
        found = "llga_reduction" in kernels_of(m, x.to(dtype))
        assert found == (c.own and has_own_kernels())


class Norm(NamedTuple):
    """A group norm: size of its data, and what it does. `y` is a convolution's result."""

    size: tuple[int, ...]
    groups: int
    code: str = "self.n(y)"
    affine: bool = True
    instance: bool = False
    groups_of_ops: int = 2  # fusion groups


NORM = {
    "one_group": Norm((1, 24, 9, 7), 1),
    "of_one_channel": Norm((2, 24, 9, 7), 24),
    "of_three": Norm((3, 24, 5, 13), 8, affine=False),
    "many_channels": Norm((1, 520, 3, 5), 4),
    "large": Norm((1, 32, 70, 64), 32),
    "large_one_group": Norm((1, 32, 70, 64), 1, "F.silu(self.n(y))"),
    "large_images": Norm((4, 32, 40, 32), 2, "F.relu(self.n(y))"),
    "row": Norm((2, 16, 1, 70), 4),
    "one_pixel": Norm((2, 16, 1, 1), 4),
    "relu": Norm((2, 16, 9, 9), 4, "F.relu(self.n(y))"),
    "silu": Norm((2, 16, 9, 9), 4, "F.silu(self.n(y))"),
    "gelu": Norm((2, 16, 9, 9), 4, "F.gelu(self.n(y))"),
    "tanh_gelu": Norm((2, 16, 9, 9), 4, "F.gelu(self.n(y), approximate='tanh')"),
    "sigmoid": Norm((2, 16, 9, 9), 4, "torch.sigmoid(self.n(y))"),
    "tanh": Norm((2, 16, 9, 9), 4, "torch.tanh(self.n(y))"),
    "silu_in_place": Norm((2, 16, 9, 9), 4, "F.silu(self.n(y), inplace=True)"),
    "before_a_convolution": Norm((2, 16, 9, 9), 4, "self.d(F.silu(self.n(y)))", groups_of_ops=3),
    "read_twice": Norm((2, 16, 9, 9), 4, "z = self.n(y)\nreturn F.silu(z), z", groups_of_ops=3),
    "sizes_are_read": Norm(
        (2, 16, 9, 9), 4, "z = self.n(y)\nreturn F.silu(z).reshape(z.shape[0], -1)"
    ),
    "instance": Norm((2, 16, 9, 9), 16, instance=True),
    "instance_relu": Norm((1, 16, 30, 30), 16, "F.relu(self.n(y))", instance=True, affine=False),
}


def norm(c: Norm) -> nn.Module:
    channels = c.size[1]
    if c.instance:
        n: nn.Module = nn.InstanceNorm2d(channels, affine=c.affine)
    else:
        n = nn.GroupNorm(c.groups, channels, affine=c.affine)
    if c.affine:
        nn.init.normal_(n.weight)
        nn.init.normal_(n.bias)
    code = c.code if "return" in c.code else f"return {c.code}"
    return net(
        f"y = self.c(x)\n{code}", c=nn.Conv2d(4, channels, 1), n=n, d=nn.Conv2d(channels, 5, 1)
    ).eval()


class Resized(NamedTuple):
    """Images, the size they get, and how their corners lie."""

    size: tuple[int, ...]
    to: tuple[int, int]
    corners: bool = True
    threads: int = 2


RESIZED = {
    "twice": Resized((2, 24, 9, 11), (18, 22)),
    "any": Resized((1, 21, 13, 17), (40, 33)),
    "smaller": Resized((1, 40, 30, 31), (11, 7)),
    "one_row": Resized((1, 16, 9, 11), (1, 30)),
    "from_one_pixel": Resized((2, 16, 1, 1), (8, 5)),
    "to_one_pixel": Resized((2, 16, 9, 7), (1, 1)),
    "same": Resized((1, 8, 9, 7), (9, 7)),
    "one_channel": Resized((3, 1, 20, 30), (37, 61)),
    "three_channels": Resized((1, 3, 64, 50), (100, 101), threads=7),
    "wide": Resized((1, 40, 20, 150), (33, 310), threads=3),
    "wide_of_one_channel": Resized((1, 1, 3, 3000), (5, 6001), threads=3),
    "many_channels": Resized((1, 5000, 3, 4), (5, 7)),
    "many_images": Resized((20, 16, 7, 7), (14, 14), threads=7),
    "corners": Resized((2, 24, 9, 11), (18, 22), corners=False),
    "corners_any": Resized((1, 21, 13, 17), (40, 33), corners=False, threads=1),
    "corners_of_one_channel": Resized((3, 1, 20, 30), (37, 61), corners=False),
    "corners_smaller": Resized((1, 40, 30, 31), (11, 7), corners=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", RESIZED)
def test_bilinear_resizing(case: str, dtype: torch.dtype) -> None:
    """Between groups, of what comes from outside, and as a result of the module."""
    c = RESIZED[case]
    torch.set_num_threads(c.threads)
    resized = f"F.interpolate({{}}, size={c.to}, mode='bilinear', align_corners={c.corners})"
    channels = c.size[1]
    parts = {"a": nn.Conv2d(4, channels, 1), "b": nn.Conv2d(channels, 4, 1)}
    x = torch.randn(c.size[0], 4, *c.size[2:])
    ours = has_own_kernels() and fuses(dtype)
    for code in ("self.b({})", "{}", "self.b(torch.sin({}))"):
        m = net(code.format(resized.format("self.a(x)")), **parts).eval()
        check(m, [x], dtype=dtype, fused="upsample_bilinear2d" if ours else "")
        found = kernels_of(m.to(dtype), x.to(dtype))
        m.float()
        if ours and (c.corners or channels == 1 or code == "{}"):
            assert "llga_resampling" in found, (code, found)
    m = net(resized.format("x")).eval()
    for layout in ("contiguous", "channels_last", "gaps"):
        check(m, [images(c.size, layout)], dtype=dtype)


def test_bilinear_resizing_by_a_factor() -> None:
    """That is not the ratio of sizes: with aligned corners it does not matter."""
    for corners in (True, False):
        code = f"F.interpolate(x, scale_factor=1.7, mode='bilinear', align_corners={corners})"
        m = net(code).eval()
        check(m, [torch.randn(2, 8, 9, 11)], fallbacks=not corners)
        check(m, [torch.randn(2, 8, 9, 11)], scripted=True, fallbacks=not corners)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_bilinear_resizing_of_special_values(value: float, corners: bool) -> None:
    """Infinities whose share is 0 are not a number, as in eager."""
    code = f"F.interpolate(x, size=(9, 13), mode='bilinear', align_corners={corners})"
    m = net(code).eval()
    for channels, layout in ((1, "contiguous"), (8, "contiguous"), (8, "channels_last")):
        x = images((1, channels, 5, 7), layout)
        x[0, channels - 1, 2, 3] = value
        check(m, [x], fallbacks=not corners)


VARIANCE = {
    "rows": ((5, 40), "y.var(1)"),
    "columns": ((40, 71), "y.var(0, keepdim=True)"),
    "biased": ((3, 20, 33), "y.var(-1, unbiased=False)"),
    "corrected": ((3, 20, 33), "torch.var(y, (1,), correction=5, keepdim=True)"),
    "all": ((3, 20, 33), "y.std()"),
    "all_of_many": ((9, 100, 333), "y.std(unbiased=False)"),
    "middle": ((2, 300, 133), "y.std(1)"),
    "middle_of_many": ((1, 1000, 1036), "y.var(1)"),
    "wide": ((2, 3, 9001), "y.var(1)"),
    "pixels": ((2, 9, 7, 33), "torch.std(y, (2, 3), correction=0)"),
    "images": ((4, 9, 7, 33), "torch.var(y, dim=(0, 2, 3))"),
    "turned": ((6, 40, 9), "y.transpose(1, 2).std(1)"),
    "long_rows": ((3, 9000), "y.std(1)"),
    "two": ((2, 50), "y.var(0)"),
    "many_of_two": ((700, 2), "y.std(-1)"),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan, 1e20])
@pytest.mark.parametrize("case", VARIANCE)
def test_variance(case: str, value: float, dtype: torch.dtype) -> None:
    """Far from 0, where the mean of squares, less the square of the mean, would have no digits."""
    size, code = VARIANCE[case]
    m = net(f"y = torch.relu(x) + 30\nreturn {code}").eval()
    x = torch.randn(size)
    x.view(-1)[17] = value
    op = "var" if "var" in code else "std"
    check(m, [x], dtype=dtype, fused=op if has_own_kernels() else "", fallbacks=value != 1)
    if fuses(dtype) and value == 1:
        assert ("llga_reduction" in kernels_of(m, x.to(dtype))) == has_own_kernels()


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_variance_of_channels(scripted: bool) -> None:
    """Over the pixels of images that are channels last, and what is made of it."""
    code = "y = self.c(x)\nreturn (y - y.mean((2, 3), True)) / (y.std((2, 3), keepdim=True) + 1e-5)"
    m = net(code, c=nn.Conv2d(3, 32, 3)).eval()
    check(m, [torch.randn(2, 3, 15, 20)], scripted=scripted)


@pytest.mark.parametrize("code", ["x.var(1)", "x.std((0, 1), correction=4)", "x[:, :0].var(1)"])
def test_variance_of_too_few_numbers(code: str) -> None:
    """Not a number, or infinite, as in eager; empty ones are PyTorch's."""
    check(net(code).eval(), [torch.randn(3, 1)], fallbacks=True)
    check(net(code).eval(), [torch.randn(1, 3)], fallbacks=True)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", NORM)
def test_group_norm(case: str, mode: str) -> None:
    c = NORM[case]
    m = norm(c)
    x = torch.randn(c.size[0], 4, *c.size[2:])
    check(m, [x], **MODES[mode])
    if mode == "traced":
        check(m, [x.contiguous(memory_format=torch.channels_last)], groups=c.groups_of_ops)
        assert ("llga_group_norm" in kernels_of(m, x)) == has_own_kernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_group_norm_before_ops_in_place(dtype: torch.dtype) -> None:
    """The executor profiles nothing that only ops in place read; they are fused nevertheless."""
    sizes = {"c": (4, 16, 3), "e": (4, 16, 3), "d": (16, 8, 3)}
    parts = {name: nn.Conv2d(*size) for name, size in sizes.items()}
    parts["n"] = nn.GroupNorm(4, 16)
    x = torch.randn(2, 4, 13, 14)
    fused = "conv group_norm relu max_pool2d" if dtype == torch.float32 else ""
    code = "y = self.n(self.c(x))\ny += self.n(self.e(x))\nreturn F.max_pool2d(F.relu_(y), 2)"
    check(net(code, **parts), [x], fused=fused and f"{fused} add", dtype=dtype)
    # Asked for its sizes in between, as for a padding that depends on them.
    code = (
        "y = F.relu_(self.n(self.c(x)))\n"
        "y = F.pad(y, (0, (y.shape[-1] + 1) // 8, 0, 1), value=float('-inf'))\n"
        "return self.d(F.max_pool2d(y, 2))"
    )
    m = net(code, **parts).eval()
    check(m, [x], fused=fused, dtype=dtype)
    if has_own_kernels() and dtype == torch.float32:
        groups = llga_fuser.report(m, x, rounds=1).groups
        assert ["aten::group_norm", "aten::relu"] in [
            [op.kind for op in group.ops] for group in groups
        ]


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "code",
    [
        "F.scaled_dot_product_attention(x, x, x)",
        "F.softmax(x @ x.mT, -1) @ x",
        "self.n(x)",
        "self.g(x[:, 0])[0].unsqueeze(1)",
        "F.rms_norm(x, (16,))",
    ],
)
def test_what_only_an_op_in_place_reads(code: str, mode: str) -> None:
    parts = {"n": nn.GroupNorm(3, 3), "g": nn.GRU(16, 16, batch_first=True)}
    m = net(f"y = {code}\ny += x[:, :1]\nz = F.relu(y)\nreturn z * x[:, :1], y", **parts).eval()
    # What attention reads is taken for float32 where the executor has profiled none of it.
    narrow = mode in {"bf16", "autocast"}
    check(m, [torch.randn(2, 3, 9, 16)], fallbacks=narrow, **MODES[mode])


def test_embedding_that_only_an_op_in_place_reads() -> None:
    m = net("y = self.e(i)\ny += x\nreturn F.relu_(y) * 0.5", "i, x", e=nn.Embedding(20, 16))
    inputs = [torch.randint(0, 20, (3, 9)), torch.randn(3, 9, 16)]
    script = to_script(m.eval(), inputs)
    with torch.no_grad():
        for _ in range(4):
            assert_same(script(*inputs), m(*inputs))


def test_sum_of_parts_of_channels_stays_channels_last() -> None:
    """The parts have gaps; what becomes of them has none, in their order (DPN)."""
    code = (
        "y, z = self.c(x), self.d(x)\n"
        "return self.e(torch.cat((y[:, :16] + z[:, :16], y[:, 16:], z[:, 16:]), 1))"
    )
    convs = {"c": nn.Conv2d(4, 24, 3), "d": nn.Conv2d(4, 32, 3), "e": nn.Conv2d(40, 8, 3)}
    m = net(code, **convs).eval()
    x = torch.randn(1, 4, 19, 18)
    check(m, [x], groups=5)
    if has_own_kernels():
        found = llga_fuser.report(m, x, rounds=1).groups
        assert [g.main.implementation for g in found if g.main][2:4] == [
            "llga_pointwise",
            "llga_concat",
        ]


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["contiguous", "last", "gaps", "transposed"])
@pytest.mark.parametrize("size", [(2, 12, 67), (3, 12, 8, 9), (1, 12, 3, 40, 33), (2, 12)], ids=str)
def test_group_norm_alone(size: tuple[int, ...], order: str, dtype: torch.dtype) -> None:
    """Of data in any order: what the kernel does not take as it lies is copied."""
    x = torch.randn(size)
    if order == "last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif order == "gaps":
        x = torch.randn(*size[:-1], 2 * size[-1])[..., ::2]
    elif order == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    n = nn.GroupNorm(4, 12)
    nn.init.normal_(n.weight)
    nn.init.normal_(n.bias)
    for code in ("self.n(x)", "F.silu(self.n(x))", "F.group_norm(x, 3, None, self.n.bias)"):
        check(net(code, n=n), [x], dtype=dtype)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_group_norm_of_special_values(value: float, layout: str) -> None:
    """They reach their group of their image, and nothing else."""
    n = nn.GroupNorm(2, 4)
    x = torch.randn(2, 4, 9, 8)
    x[1, 1, 4, 5] = value
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    for code in ("self.n(x)", "F.silu(self.n(x))"):
        check(net(code, n=n), [x])
    # A group with ReLU does not get what the graph was called with, if it holds such a number.
    check(net("F.relu(self.n(x))", n=n), [x], fallbacks=True)
    check(net("F.relu(self.n(self.c(x)))", n=n, c=nn.Conv2d(4, 4, 1)), [x], fallbacks=True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_group_norm_far_from_zero(channels_last: bool) -> None:
    """The mean is much larger than what varies: sums of squares have no digit left, and eager's
    norm of channels-last data is made of those."""
    x = torch.randn(2, 8, 40, 30) + 4096
    exact = F.group_norm(x.double(), 2).float()
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    script = to_script(net("F.group_norm(x, 2)"), [x])
    with torch.no_grad():
        for _ in range(3):
            result = script(x)
    if has_own_kernels():
        # Of the data, a digit is 5e-4; the results are around 1.
        assert (result - exact).abs().max() < 5e-3


class Rms(NamedTuple):
    """A root-mean-square norm, written out or not."""

    code: str
    size: tuple[int, ...] = (2, 9, 48)
    own: bool = True


BY_HAND = "return h * torch.rsqrt(h.pow(2).mean(-1, True) + 1e-5) * self.w"
RMS = {
    "llama": Rms(
        "h = x.to(torch.float32)\nv = h.pow(2).mean(-1, keepdim=True)\n"
        "h = h * torch.rsqrt(v + 1e-6)\nreturn self.w * h.to(x.dtype)"
    ),
    "t5": Rms(
        "v = x.to(torch.float32).pow(2).mean(-1, keepdim=True)\n"
        "return self.w * (x * torch.rsqrt(v + 1e-6))"
    ),
    "plain": Rms("return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)", (300, 130)),
    "weight_behind": Rms("return torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5) * x * self.w"),
    "module": Rms("return self.n(x)"),
    "module_no_eps": Rms("return F.rms_norm(x, (48,))"),
    "residual": Rms("return x + x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5) * self.w"),
    "transposed": Rms("y = x.transpose(0, 1)\nreturn self.n(y)"),
    "heads": Rms(f"h = x.transpose(1, 2)\n{BY_HAND}", (2, 7, 4, 48)),
    "heads_of_one": Rms(f"h = x.transpose(1, 2)\n{BY_HAND}", (1, 7, 4, 48)),
    "heads_behind_a_group": Rms(f"h = x.relu().exp().transpose(1, 2)\n{BY_HAND}", (2, 7, 4, 48)),
    "heads_of_a_part": Rms(f"h = x[..., 3:51].transpose(1, 2)\n{BY_HAND}", (2, 7, 4, 60)),
    "expanded": Rms(f"h = x.expand(5, 9, 48)\n{BY_HAND}", (9, 48)),
    "columns": Rms(f"h = x.mT\n{BY_HAND}", (48, 7)),
    "one_row": Rms("return self.n(x)", (48,)),
    "root_is_read": Rms(
        "r = torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5)\nreturn x * r, r", own=False
    ),
    "double": Rms(
        "h = x.double()\nreturn (h * torch.rsqrt(h.pow(2).mean(-1, True) + 1e-5)).to(x.dtype)",
        own=False,
    ),
    "other_dim": Rms("return x * torch.rsqrt(x.pow(2).mean(1, True) + 1e-5)"),
    "cube": Rms("return x * torch.rsqrt(x.abs().pow(3).mean(-1, True) + 1e-5)", own=False),
    "other_data": Rms("return x.relu() * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5)", own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", RMS)
def test_rms_norm(case: str, mode: str) -> None:
    c = RMS[case]
    n = nn.RMSNorm(48, eps=1e-6)
    nn.init.normal_(n.weight)
    m = net(c.code.replace("self.w", "self.n.weight"), n=n).eval()
    x = torch.randn(c.size)
    refused = mode == "channels_last" and case.startswith("heads")  # rows lie apart
    fallbacks = mode in ("bf16", "autocast") or refused or not c.own
    check(m, [x], **MODES[mode], fallbacks=fallbacks)
    if mode == "bf16" and case == "llama" and fuses(torch.bfloat16):
        m, x = m.bfloat16(), x.bfloat16()
    elif mode != "traced":
        return
    with torch.no_grad():
        found = "llga_rms_norm" in kernels_of(to_script(m, [x]), x)
    assert found == (c.own and has_own_kernels())


class Written(NamedTuple):
    """A norm that is written out; w and b are a weight and a bias of its dimension."""

    kernel: str  # "" if none of our own computes it
    code: str
    size: tuple[int, ...] = (2, 24, 9, 7)
    dim: int = 1


CENTRED = "u = x.mean(1, True)\nv = (x - u).pow(2).mean(1, True)\n"
VARIED = "u, v = x.mean(1, True), x.var(1, unbiased=False, keepdim=True)\n"
AFFINE = "return self.w[:, None, None] * x + self.b[:, None, None]"
WRITTEN = {
    # As in ConvNeXt, in lucidrains' networks, in Restormer.
    "layer_norm": Written("layer_norm", f"{CENTRED}x = (x - u) / torch.sqrt(v + 1e-6)\n{AFFINE}"),
    "layer_norm_by_variance": Written(
        "layer_norm", f"{VARIED}x = (x - u) / (v + 1e-5).sqrt()\n{AFFINE}"
    ),
    "layer_norm_by_root": Written(
        "layer_norm", f"{VARIED}x = (x - u) * (v + 1e-5).rsqrt()\n{AFFINE}"
    ),
    "layer_norm_of_rows": Written(
        "layer_norm",
        "u, v = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)\n"
        "return (x - u) / torch.sqrt(v + 1e-5) * self.w + self.b",
        (2, 9, 40),
        -1,
    ),
    "layer_norm_alone": Written("layer_norm", f"{CENTRED}return (x - u) * torch.rsqrt(v + 1e-6)"),
    "layer_norm_and_gelu": Written(
        "layer_norm",
        f"{CENTRED}x = (x - u) / torch.sqrt(v + 1e-6)\n{AFFINE}".replace(
            "return ", "return F.gelu("
        )
        + ")",
    ),
    "layer_norm_of_many": Written(
        "layer_norm", f"{CENTRED}x = (x - u) / torch.sqrt(v + 1e-6)\n{AFFINE}", (1, 300, 40, 50)
    ),
    "rms_norm": Written(
        "rms_norm",
        "v = x.pow(2).mean(1, keepdim=True)\n"
        "return F.silu(x * torch.rsqrt(v + 1e-6) * self.w.reshape(1, -1, 1, 1))",
    ),
    "rms_norm_divided": Written(
        "rms_norm", "return torch.relu(x / torch.sqrt((x * x).mean(1, True) + 1e-6))"
    ),
    "normalize": Written("normalize", "return F.normalize(x, dim=1)"),
    "normalize_and_scale": Written(
        "normalize", "return F.normalize(x, dim=1) * self.w[:, None, None] * 5.0"
    ),
    "normalize_rows": Written("normalize", "return F.normalize(x, dim=-1)", (3, 33), -1),
    "length": Written(
        "normalize", "return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)", (3, 33), -1
    ),
    # Of a sample; outside of the root; over two dimensions; of other numbers.
    "sample": Written(
        "", "u, v = x.mean(1, True), x.var(1, keepdim=True)\nreturn (x - u) / torch.sqrt(v + 1e-5)"
    ),
    "outside": Written("", f"{VARIED}return (x - u) / (torch.sqrt(v) + 1e-5)"),
    "other_mean": Written("", f"{VARIED}return (x - x.mean(2, True)) / torch.sqrt(v + 1e-5)"),
    "variance_is_read": Written("", f"{CENTRED}return (x - u) / torch.sqrt(v + 1e-6), v"),
    "absolute": Written(
        "", "return x / torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True)", (3, 33), -1
    ),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", WRITTEN)
def test_norms_that_are_written_out(case: str, mode: str) -> None:
    """From outside, and between convolutions, whose images are channels last."""
    c = WRITTEN[case]
    channels = c.size[c.dim]
    w, b = torch.rand(channels) + 0.5, torch.randn(channels)
    m = net(c.code, w=w, b=b).eval()
    x = torch.randn(c.size)
    # An error of bfloat16 before the norm is one of the variance behind it: eager rounds each step.
    tol = Tolerance(8 * 2.0**-8) if mode in ("bf16", "autocast") else None
    check(m, [x], **MODES[mode], tol=tol, fallbacks=True)
    if mode == "traced":
        with torch.no_grad():
            found = kernels_of(to_script(m, [x]), x)
        assert (f"llga_{c.kernel}" in found) == (bool(c.kernel) and has_own_kernels()), found
    if len(c.size) == 4:
        convs = {"c": nn.Conv2d(4, channels, 1), "d": nn.Conv2d(channels, 3, 1)}
        code = f"x = self.c(x)\n{c.code}"
        if c.kernel:
            code = code.replace("return ", "return self.d(") + ")"
        m = net(code, w=w, b=b, **convs).eval()
        check(m, [torch.randn(c.size[0], 4, *c.size[2:])], **MODES[mode], tol=tol)


@pytest.mark.parametrize("case", [case for case, c in WRITTEN.items() if c.kernel])
def test_norms_of_special_values(case: str) -> None:
    """A row with one that is not finite is as in eager; others are not touched."""
    c = WRITTEN[case]
    channels = c.size[c.dim]
    m = net(c.code, w=torch.rand(channels) + 0.5, b=torch.randn(channels)).eval()
    for value in (math.nan, math.inf, -math.inf, 0.0):
        x = torch.randn(c.size)
        x.select(c.dim, 0).fill_(value)
        x.movedim(c.dim, -1)[-1, ..., :] = 0  # and rows without length or variance
        check(m, [x], fallbacks=True)  # before ReLU, and other ops that lose NaN in oneDNN


class PaddedBy(NamedTuple):
    """What is padded, with what, and whether our own kernel does it."""

    code: str
    size: tuple[int, ...] = (2, 5, 9, 7)
    own: bool = True


PADDED_BY = {
    "reflect": PaddedBy("F.pad(x, (1, 2, 3, 4), mode='reflect')"),
    "replicate": PaddedBy("F.pad(x, (10, 2, 0, 4), mode='replicate')"),
    "circular": PaddedBy("F.pad(x, (7, 2, 3, 9), mode='circular')"),
    "constant": PaddedBy("F.pad(x, (1, 2, 3, 4), value=-1.5)"),
    "infinite": PaddedBy("F.pad(x, (1, 2, 3, 4), value=float('-inf'))"),
    "rows": PaddedBy("F.pad(x, (0, 0, 3, 1), mode='reflect')"),
    "columns": PaddedBy("F.pad(x, (2, 0), value=3.0)"),
    "channels": PaddedBy("F.pad(x, (0, 0, 0, 0, 2, 3))"),
    "all": PaddedBy("F.pad(x, (1, 0, 0, 2, 2, 3, 1, 1), value=0.5)"),
    "module": PaddedBy("nn.ReflectionPad2d(2)(x)"),
    "sequence": PaddedBy("F.pad(x, (3, 2), mode='reflect')", (2, 3, 11)),
    "volume": PaddedBy("F.pad(x, (1, 2, 3, 0, 1, 1), mode='replicate')", (2, 3, 4, 5, 6)),
    "volume_of_ones": PaddedBy("F.pad(x, (1, 2, 3, 0, 1, 1), value=1.0)", (1, 3, 4, 5, 6)),
    "one_pixel": PaddedBy("F.pad(x, (1, 2, 3, 0), mode='replicate')", (2, 3, 1, 1)),
    "many": PaddedBy("F.pad(x, (3, 3, 3, 3), mode='reflect')", (3, 32, 60, 70)),
    "cropped": PaddedBy("F.pad(x, (-1, 2), value=2.0)", own=False),
    "nothing": PaddedBy("F.pad(x, (0, 0, 0, 0), value=2.0)", own=False),
    "integers": PaddedBy("F.pad((x > 0).long(), (1, 2))", own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", PADDED_BY)
def test_padding(case: str, dtype: torch.dtype) -> None:
    """Numbers are moved, and stay what they are."""
    c = PADDED_BY[case]
    m = net(c.code).eval()
    exact = Tolerance(0.0)
    layouts = ("contiguous", "channels_last", "gaps") if len(c.size) == 4 else ("contiguous",)
    for layout in layouts:
        x = images(c.size, layout) if len(c.size) == 4 else torch.randn(c.size)
        if layout == "contiguous":
            x[..., ::3] = math.nan
        check(m, [x], dtype=dtype, tol=exact)
        with torch.no_grad():
            x = x.to(dtype)
            found = kernels_of(to_script(m, [x]), x)
        assert ("llga_padding" in found) == (c.own and has_own_kernels()), found
    if len(c.size) == 4 and case != "integers":
        channels = m(torch.zeros(c.size)).shape[1]
        parts = {"c": nn.Conv2d(3, c.size[1], 1), "d": nn.Conv2d(channels, 4, 2)}
        m = net(f"x = F.relu(self.c(x))\nreturn self.d(torch.clamp({c.code}, -2, 2))", **parts)
        check(m.eval(), [torch.randn(c.size[0], 3, *c.size[2:])], dtype=dtype)


def test_padding_by_more_than_there_is() -> None:
    """PyTorch's error, also where an earlier call had sizes that are large enough."""
    m = net("F.pad(F.relu(x), (4, 4), mode='reflect')").eval()
    script = to_script(m, [torch.randn(1, 3, 9)])
    with torch.no_grad():
        for _ in range(3):
            script(torch.randn(1, 3, 9))
        with pytest.raises(RuntimeError, match=r"[Pp]adding size"):
            script(torch.randn(1, 3, 4))
        x = torch.randn(1, 3, 9)
        assert_same(script(x), m(x))


@pytest.mark.parametrize("mode", ["traced", "bf16", "autocast"])
@pytest.mark.parametrize("function", ["F.relu({})", "F.gelu({})", "{}"])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_windows_of_whole_images(stride: int, images: int, function: str, mode: str) -> None:
    """A linear layer of all numbers of an image, as VGG's first ones are in timm."""
    m = net(
        f"y = {function.format('self.c(F.relu(self.a(x)))')}\nreturn self.d(y)",
        a=nn.Conv2d(3, 96, 1), c=nn.Conv2d(96, 2000, (5, 7), stride), d=nn.Conv2d(2000, 10, 1),
    ).eval()  # fmt: skip
    x = torch.randn(images, 3, 5, 7)
    check(m, [x], **MODES[mode])
    if mode == "bf16" and images == 1 and has_own_kernels() and fuses(torch.bfloat16):
        assert "llga_gemv" in kernels_of(m.bfloat16(), x.bfloat16())[1]


class Embedded(NamedTuple):
    """A rotary position embedding of x, maybe of a view of it."""

    code: str = "y * cos + turned(y) * sin"
    size: tuple[int, ...] = (2, 3, 9, 32)  # of the view
    angles: tuple[int, ...] = (9, 32)
    view: str = "x"
    own: bool = True


HEADS = "x.transpose(1, 2)"
ROTARY = {
    "plain": Embedded(),
    "heads": Embedded(view=HEADS),
    "other order": Embedded("sin * turned(y) + cos * y", view=HEADS),
    "angles of each batch": Embedded(angles=(2, 1, 9, 32), view=HEADS),
    "angles of all heads": Embedded(angles=(2, 3, 9, 32)),
    "many rows": Embedded(size=(2, 8, 130, 64), angles=(1, 1, 130, 64), view=HEADS),
    "uneven": Embedded(size=(1, 2, 5, 46), angles=(5, 46)),
    "few": Embedded(size=(2, 7, 6), angles=(7, 6)),
    "part": Embedded(size=(1, 2, 5, 20), angles=(5, 20), view="torch.cat([x, x], -1)[..., 7:27]"),
    "negated end": Embedded("y * cos + turned(y, -16) * sin"),
    "rounded": Embedded("(y * cos + turned(y) * sin).to(torch.bfloat16)"),
    "chunks": Embedded("y * cos + torch.cat(of(*y.chunk(2, -1)), -1) * sin", view=HEADS),
    "chunks of a dimension": Embedded("y * cos + torch.cat(of(*y.chunk(2, 3)), 3) * sin"),
    "split": Embedded("y * cos + torch.cat(of(*y.split(16, -1)), -1) * sin", view=HEADS),
    "split unevenly": Embedded("y * cos + torch.cat(of(*y.split(20, -1)), -1) * sin", own=False),
    "chunks of another": Embedded(
        "y * cos + torch.cat(of(*y.abs().chunk(2, -1)), -1) * sin", own=False
    ),
    "chunks across": Embedded(
        "y * cos + torch.cat(of(*y.chunk(2, 2)), 2) * sin",
        size=(2, 3, 8, 32),
        angles=(8, 32),
        own=False,
    ),
    "chunks not turned": Embedded(
        "y * cos + torch.cat(of(*y.chunk(2, -1))[::-1], -1) * sin", own=False
    ),
    "other parts": Embedded("y * cos + turned(y, 10) * sin", own=False),
    "of another": Embedded("y.abs() * cos + turned(y) * sin", own=False),
    "turned back": Embedded("y * cos - turned(y) * sin", own=False),
    "not negated": Embedded("y * cos + torch.cat([y[..., 16:], y[..., :16]], -1) * sin", own=False),
    "turned is read": Embedded("(t := turned(y)) * sin + y * cos, t", own=False),
    "angles of columns": Embedded(angles=(2, 3, 9, 1), own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", ["fp32", "bf16", "narrow data"])
@pytest.mark.parametrize("case", ROTARY)
def test_rotary_embedding(case: str, mode: str) -> None:
    """Rotations by halves, as models of transformers have them, are one pass over the data."""
    c = ROTARY[case]

    def turned(y: Tensor, half: int | None = None) -> Tensor:
        half = y.shape[-1] // 2 if half is None else half
        return torch.cat((-y[..., half:], y[..., :half]), dim=-1)

    def of(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return -second, first

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        names = {"x": x, "cos": cos, "sin": sin, "turned": turned, "of": of, "torch": torch}
        return eval(c.code, names | {"y": eval(c.view, names)})

    size = list(c.size)
    if c.view == HEADS:
        size[1], size[2] = size[2], size[1]
    if "cat" in c.view:
        size[-1] = 20
    x, cos, sin = torch.randn(size), torch.randn(c.angles), torch.randn(c.angles)
    if mode != "fp32" and not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    if mode != "fp32":
        x = x.bfloat16()
    if mode == "bf16":
        cos, sin = cos.bfloat16(), sin.bfloat16()
    inputs = [x, cos, sin]
    tolerance = TOLERANCES[torch.bfloat16] if mode != "fp32" or case == "rounded" else None
    check(rotated, inputs, tol=tolerance, fallbacks=not c.own)
    with torch.no_grad():
        found = "llga_rotary" in kernels_of(to_script(rotated, inputs), *inputs)
    assert found == (c.own and has_own_kernels())


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_rotary_embedding_of_special_values(value: float) -> None:
    x = torch.randn(3, 8, 32)
    x[1, 4, 9] = value
    code = "x * y + torch.cat((-x[..., 16:], x[..., :16]), -1) * z"
    check(net(code, "x, y, z"), [x, torch.randn(8, 32), torch.randn(8, 32)])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_rms_norm_of_special_values(value: float) -> None:
    x = torch.randn(4, 40)
    x[1, 7] = value
    check(net("x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5)"), [x])


def test_instance_norm_with_running_statistics() -> None:
    """Is a batch norm, and has oneDNN's kernel."""
    n = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    randomize(n)
    check(
        net("F.relu(self.n(self.c(x)))", n=n, c=nn.Conv2d(8, 8, 1)),
        [torch.randn(2, 8, 9, 7)],
        groups=1,
        fused="_convolution instance_norm relu",
    )


def test_stages_of_a_resnet_are_taken_apart() -> None:
    """oneDNN has a pattern for them as a whole, in which no other kernel could do a convolution."""
    models = _models.load_torchvision().models.resnet
    beside = nn.Sequential(nn.Conv2d(128, 256, 1, stride=2, bias=False), nn.BatchNorm2d(256))
    blocks = [models.Bottleneck(256, 64) for _ in range(3)]
    m = nn.Sequential(models.Bottleneck(128, 64, 2, beside), *blocks).eval()
    groups = 13 if has_own_kernels() else None
    fused = check(m, [torch.randn(1, 128, 28, 28)], groups=groups, fused="_convolution relu add")
    if has_own_kernels():
        assert all(group["aten::_convolution"] == 1 for group in fused.groups)


@pytest.mark.usefixtures("all_threads")
def test_residual_blocks_in_bfloat16() -> None:
    """oneDNN would take them as a whole; their values lie one over the other, where they may."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    resnet = _models.load_torchvision().models.resnet
    beside = nn.Sequential(nn.Conv2d(64, 256, 1, bias=False), nn.BatchNorm2d(256))
    blocks = [resnet.Bottleneck(256, 64) for _ in range(2)]
    m = nn.Sequential(resnet.Bottleneck(64, 64, 1, beside), *blocks).eval()
    x = torch.randn(1, 64, 56, 56).to(memory_format=torch.channels_last)
    check(m, [x], fused="_convolution relu add", dtype=torch.bfloat16, calls=6)


def test_winograd_shares_its_weight() -> None:
    """Between signatures with the same tile; the module's own copy stays as it is."""
    m = net("self.c(x)", c=nn.Conv2d(64, 64, 3, padding=1)).eval()
    gc.collect()
    llga_fuser.clear_cache()
    others = llga_fuser.cache_info().packed_bytes
    with torch.no_grad():
        script = to_script(m, [torch.randn(1, 64, 28, 28)])
        for height in (28, 32, 40):
            x = torch.randn(1, 64, height, 28).to(memory_format=torch.channels_last)
            for _ in range(3):
                assert_same(script(x), m(x))
    packed = llga_fuser.cache_info().packed_bytes - others
    assert packed == (m.c.weight.nbytes * (4 if has_own_kernels() else 1))


class Applied(NamedTuple):
    """What an activation is applied to: some code, and whether that takes another pass."""

    code: str
    size: tuple[int, ...]
    apart: bool


APPLIED = {
    "conv": Applied("self.c(x)", (2, 16, 13, 11), apart=True),
    "residual": Applied("self.c(x.abs()) + x", (1, 16, 17, 19), apart=True),
    "linear": Applied("self.l(x)", (67, 8), apart=True),
    "few": Applied("self.c(x)", (1, 16, 5, 7), apart=False),
    "read twice": Applied("self.c(x)", (2, 16, 13, 11), apart=False),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "function", ["F.silu", "F.gelu", "tanh gelu", "torch.sigmoid", "torch.tanh", "gate"]
)
@pytest.mark.parametrize("case", APPLIED)
def test_activation_in_place(case: str, function: str, threads: int) -> None:
    """Large results get their activation from a kernel of our own, most of them without AVX-512."""
    torch.set_num_threads(threads)
    applied = APPLIED[case]
    special = {"gate": "z * torch.sigmoid(z)", "tanh gelu": "F.gelu(z, approximate='tanh')"}
    result = special.get(function, f"{function}(z)")
    result += ", z" if case == "read twice" else ""
    m = net(f"z = {applied.code}\nreturn {result}", c=one_by_one(16), l=nn.Linear(8, 67)).eval()
    x = 3 * torch.randn(applied.size)
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    check(m, [x], fused="linear" if case == "linear" else "conv")
    report = llga_fuser.report(m, x, rounds=1)
    kernels = [p.implementation for g in report.groups for p in g.primitives]
    apart = applied.apart
    if case == "read twice" and function in {"gate", "F.gelu", "F.silu", "tanh gelu"}:
        apart = True  # groups of their own
    alone = case == "read twice" or (case == "residual" and function in {"F.silu", "gate"})
    own = function == "tanh gelu" or alone
    slow = has_own_kernels() if own else has_avx2_kernels()
    if case == "linear" and function == "tanh gelu" and slow:
        assert len(kernels) == 1 and kernels[0].startswith("llga_gemm"), kernels
        return
    assert ("llga_activation" in kernels) == (apart and slow), kernels


def test_gate_that_is_read_elsewhere() -> None:
    """Its product with the value is no SiLU then: the gate itself is wanted, too."""
    m = net("z = self.c(x)\ng = torch.sigmoid(z)\nreturn z * g, g", c=one_by_one(16))
    check(m, [torch.randn(2, 16, 13, 11)], fused="conv")


ALONE = {
    "rows": (3, 5, 1024),
    "few": (3, 5, 16),
    "channels_last": (2, 16, 13, 17),
    "padded rows": (3, 5, 1024),
    "large": (9, 512, 512),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize(
    ("approximate", "dtype"),
    itertools.product(["none", "tanh"], [torch.float32, torch.bfloat16]),
    ids=["erf", "erf-bf16", "tanh", "tanh-bf16"],
)
def test_gelu_alone(approximate: str, dtype: torch.dtype, case: str, threads: int) -> None:
    """A group of its own: PyTorch's takes several times as long."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    torch.set_num_threads(threads)
    x = 3 * torch.randn(ALONE[case]).to(dtype)
    if case == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    if case == "padded rows":
        x = 3 * torch.randn(3, 5, 1030).to(dtype)[..., :1024]
    m = net(f"F.gelu(x, approximate='{approximate}')").eval()
    check(m, [x], fused="gelu", groups=1, dtype=dtype)
    report = llga_fuser.report(m, x, rounds=1)
    kernels = [p.implementation for g in report.groups for p in g.primitives]
    assert (kernels == ["llga_activation"]) == (case != "few" and has_own_kernels()), kernels


def test_gelu_alone_overwrites_only_what_is_its_own() -> None:
    m = net(
        "y = self.l(x)\nz = F.gelu(y, approximate='tanh')\nreturn z, F.gelu(x), self.m(z)",
        l=nn.Linear(64, 96),
        m=nn.Linear(96, 64),
    )
    check(m, [torch.randn(70, 64)], fused="gelu linear")
    m = net(
        "y = self.l(x).view(7, -1)\n"
        "return self.m(F.gelu(y, approximate='tanh').view(70, -1)) + y[0, 0]",
        l=nn.Linear(64, 96),
        m=nn.Linear(96, 64),
    )
    check(m, [torch.randn(70, 64)], fused="gelu linear")


@pytest.mark.parametrize("owned", [False, True])
def test_gelu_behind_and_before_others(owned: bool) -> None:
    """What oneDNN would fuse with its last op stays outside of its group."""
    m = net(
        "y = self.l(x)\nz = F.gelu(y, approximate='tanh') * 3 + x\n"
        + ("return z" if owned else "return z, y"),
        l=nn.Linear(64, 64),
    )
    check(m, [torch.randn(70, 64)], fused="gelu linear")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "outputs", "then", "groups"),
    [
        ((2, 35, 63), 80, "", 1),
        ((3, 350, 31), 2200, "", 1),  # more numbers than others are applied to in place
        ((2, 35, 64), 80, ".sum(-1)", 2),
        ((2, 35, 64), 80, " + y", None),  # the layer is read twice
        ((2, 35, 64), 80, ".view(70, -1)", 1),
    ],
)
def test_tanh_gelu_of_a_linear_layer(
    size: tuple[int, ...],
    outputs: int,
    then: str,
    groups: int | None,
    dtype: torch.dtype,
    threads: int,
) -> None:
    """One group, which oneDNN has no pattern for, and no kernel of its own for the function."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    torch.set_num_threads(threads)
    code = f"y = self.l(x)\nreturn F.gelu(y, approximate='tanh'){then}"
    m = net(code, l=nn.Linear(size[-1], outputs)).to(dtype).eval()
    check(m, [torch.randn(size).to(dtype)], fused="linear gelu", groups=groups, dtype=dtype)
    report = llga_fuser.report(m, torch.randn(size).to(dtype), rounds=1)
    kernels = [p.implementation for g in report.groups for p in g.primitives]
    if has_own_kernels() and groups == 1:
        assert all(not k.startswith(("jit", "ref")) for k in kernels[1:]), kernels


SPECIAL = {
    "silu": "F.silu({})",
    "gelu": "F.gelu({})",
    "tanh_gelu": "F.gelu({}, approximate='tanh')",
    "sigmoid": "torch.sigmoid({})",
    "tanh": "torch.tanh({})",
}


@pytest.mark.parametrize("function", SPECIAL)
def test_activation_of_special_values(function: str) -> None:
    """All of the range, infinities made on the way, small numbers to their last digits."""
    x = torch.logspace(-30, 38, 16 * 17 * 19).view(1, 17, 19, 16).permute(0, 3, 1, 2)
    x = torch.cat([x, -x, torch.linspace(-100, 100, x.numel()).view_as(x), torch.zeros_like(x)])
    m = net(SPECIAL[function].format("self.c(x)"), c=one_by_one(16, weight=16)).eval()
    expected = m(x)
    assert expected.isnan().any() == (function in {"silu", "gelu", "tanh_gelu"})  # infinity times 0
    check(m, [x], groups=2 if function == "tanh_gelu" else 1)
    with torch.no_grad():
        fast = llga_fuser.compile(m, x)(x)
    # Eager's own GELU has no digits left where it is as good as zero.
    double = net(SPECIAL[function].format("16 * x"))(x.double())
    error = (fast.double() - double).abs() / double.abs().clamp(min=1)
    assert error[expected.isfinite()].max() < 1e-6


def dense(rank: int = 4, widths: Sequence[int] = (8, 5, 32), relu: str = "torch.relu") -> nn.Module:
    """Layers of a dense block, each of which gives some more channels."""
    conv = {4: nn.Conv2d, 5: nn.Conv3d}[rank]
    norm = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[rank]
    lines, members, total = ["v = [self.c0(x)]"], {"c0": conv(3, widths[0], 3, padding=1)}, 0
    for i, width in enumerate(widths[1:], 1):
        total += widths[i - 1]
        lines.append(
            f"v = v + [self.c{i}({relu}(self.n{i}(torch.cat(v, 1) if {i} > 1 else v[0])))]"
        )
        members |= {f"c{i}": conv(total, width, 3, padding=1), f"n{i}": norm(total)}
    members |= {"n": norm(sum(widths)), "last": conv(sum(widths), 4, 1)}
    lines.append(f"return self.last({relu}(self.n(torch.cat(v, 1))))")
    return net("\n".join(lines), **members)


class Concat(NamedTuple):
    """Tensors x and y that are concatenated; whether by our kernel, which copies rows."""

    code: str
    x: Sequence[int] = (2, 5, 6, 7)
    y: Sequence[int] = (2, 5, 6, 3)
    own: bool = True


CONCATS = {
    "last": Concat("torch.cat([x, y, x], -1)"),
    "middle": Concat("torch.cat([x, y], 2)", y=(2, 5, 1, 7)),
    "planes": Concat("torch.cat([x, y], 1)", y=(2, 9, 6, 7)),
    "first": Concat("torch.cat([x, y])", y=(3, 5, 6, 7)),
    "rank_1": Concat("torch.cat([x, y])", x=(5,), y=(1,)),
    "large": Concat("torch.cat([x, y])", x=(300, 400), y=(77, 400)),
    "many": Concat("torch.cat([x, y, y], 1)", x=(3000, 33), y=(3000, 2)),
    "nothing": Concat("torch.cat([x, y], 1)", y=(2, 0, 6, 7), own=False),
    "expanded": Concat(
        "torch.cat([x[:, :, None].expand(-1, -1, 4, -1), x[:, None].expand(-1, 4, -1, -1), y], 3)",
        x=(2, 4, 6),
        y=(2, 4, 4, 3),
    ),
    "heads": Concat("torch.cat([x.transpose(1, 2), y.transpose(1, 2)], -1)"),
    "columns": Concat("torch.cat([x.mT, y.mT], 2)", own=False),
    "constant": Concat("torch.cat([self.c.expand(2, -1, -1), x], 1)", x=(2, 6, 8)),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CONCATS)
def test_concat_of_rows(case: str, dtype: torch.dtype) -> None:
    """As they lie, also where a row is there once for many."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = CONCATS[case]
    m = net(c.code, "x, y", c=torch.randn(1, 1, 8).to(dtype)).eval()
    inputs = [torch.randn(*c.x).to(dtype), torch.randn(*c.y).to(dtype)]
    script = to_script(m, inputs)
    for _ in range(4):
        assert torch.equal(script(*inputs), m(*inputs))
        assert script(*inputs).stride() == m(*inputs).stride()
    if has_own_kernels() and c.own:
        assert kernels_of(m, *inputs) == ["llga_concat"]


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "module",
    [
        dense(),
        dense(5),
        dense(widths=(1, 1, 1, 7)),
        dense(widths=(70, 64)),
        dense(relu=""),
        dense(relu="F.silu"),
    ],
    ids=["4d", "5d", "thin", "wide", "without relu", "silu"],
)
def test_concat_and_batch_norm(module: nn.Module, mode: str) -> None:
    """One group: oneDNN would copy, and then normalize."""
    torch.manual_seed(0)
    module = randomize(module)
    rank = module.c0.weight.dim()
    found = check(module, [torch.randn(2, 3, *(7, 5, 6)[: rank - 2])], fused="cat", **MODES[mode])
    if mode == "traced":
        alone = [ops for ops in found.groups if list(ops) == ["aten::cat"]]
        assert not alone, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_concat_and_batch_norm_of_special_values(dtype: torch.dtype) -> None:
    """Infinities, and NaN from a scale of zero; ReLU keeps NaN. The inputs are finite."""
    module = net(
        "self.last(torch.relu(self.n(torch.cat([self.p(x), self.q(x)], 1))))",
        p=one_by_one(weight=1e30),
        q=one_by_one(weight=-1.0),
        n=nn.BatchNorm2d(8),
        last=one_by_one(8),
    )
    with torch.no_grad():
        module.n.weight[2] = 0
        module.n.weight[3] = -1
    x = torch.randn(2, 4, 9, 7)
    x[0, :, ::3] *= 1e30
    expected = module.eval()(x)
    assert expected.isnan().any() and expected.isinf().any()
    check(module, [x], groups=4, dtype=dtype)


@pytest.mark.parametrize(
    "code",
    [
        "c = torch.cat([a, b], 1)\nreturn self.l(torch.relu(self.n(c))) + c.mean()",
        "c = torch.cat([a, b], 1)\nb.mul_(2)\nreturn self.l(torch.relu(self.n(c))) + b.mean()",
        "c = torch.cat([a, b], 2)\nreturn self.k(torch.relu(self.m(c)))",
        "c = torch.cat([a, a, b], 1)\nreturn self.l2(torch.relu(self.n2(c)))",
        "c = torch.cat([a, x], 1)\nreturn self.l3(torch.relu(self.n3(c)))",
    ],
    ids=["read twice", "part written to", "other dimension", "part twice", "part from outside"],
)
def test_concat_and_batch_norm_beside_others(code: str) -> None:
    module = net(
        "a, b = self.p(x), self.q(x)\n" + code,
        p=nn.Conv2d(3, 8, 3),
        q=nn.Conv2d(3, 8, 3),
        n=nn.BatchNorm2d(16),
        l=nn.Conv2d(16, 4, 1),
        m=nn.BatchNorm2d(8),
        k=nn.Conv2d(8, 4, 1),
        n2=nn.BatchNorm2d(24),
        l2=nn.Conv2d(24, 4, 1),
        n3=nn.BatchNorm2d(11),
        l3=nn.Conv2d(11, 4, 1),
    )
    if "[a, x]" in code:
        module.p.padding = (1, 1)
    check(randomize(module), [torch.randn(2, 3, 8, 6)])


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("activation", ["", "F.relu", "F.hardswish"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "size", [(1, 3, 5), (1, 8, 700), (1, 517, 96), (2, 64, 33), (1, 1, 1, 40, 9)], ids=str
)
def test_linear_of_one_row(size: tuple[int, ...], bias: bool, activation: str) -> None:
    """It has a kernel of our own, which takes the weight as it is."""
    *outer, inputs, outputs = size
    m = net(f"{activation}(self.l(x))", l=nn.Linear(inputs, outputs, bias=bias)).eval()
    x = torch.randn(*outer, inputs)
    check(m, [x], groups=1, fused="linear")
    own = math.prod(outer) == 1 and has_own_kernels()
    assert kernels_of(m, x) == ["llga_gemv:avx2"] or not own
    assert own or "llga_gemv:avx2" not in kernels_of(m, x)


BFLOAT16_ROWS = {
    "plain": (nn.Linear(900, 600), "self.l(x)", (1, 900)),
    "no bias": (nn.Linear(900, 600, bias=False), "self.l(x)", (1, 1, 900)),
    "uneven": (nn.Linear(517, 1023), "self.l(x)", (1, 517)),
    "relu": (nn.Linear(900, 600), "F.relu(self.l(x))", (1, 900)),
    "hardswish": (nn.Linear(900, 600), "F.hardswish(self.l(x))", (1, 900)),
    "gelu": (nn.Linear(900, 600), "F.gelu(self.l(x))", (1, 900)),
    "tanh gelu": (nn.Linear(900, 600), "F.gelu(self.l(x), approximate='tanh')", (1, 900)),
    "weight by inputs": (nn.Linear(900, 600), "x @ self.l.weight.view(900, 600)", (1, 900)),
    "one pixel": (nn.Conv2d(800, 700, 1), "F.silu(self.l(x))", (1, 800, 1, 1)),
    # What stays with others.
    "two rows, left": (nn.Linear(900, 600), "self.l(x)", (2, 900)),
    "small weight, left": (nn.Linear(64, 64), "self.l(x)", (1, 64)),
    "sum, left": (nn.Linear(800, 800), "x + self.l(x)", (1, 800)),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", BFLOAT16_ROWS)
def test_bfloat16_linear_of_one_row(case: str) -> None:
    """Where its weight is in no cache, all that counts is how fast that is read."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    layer, code, size = BFLOAT16_ROWS[case]
    m = net(code, l=copy.deepcopy(layer)).eval()
    x = torch.randn(size)
    check(m, [x], dtype=torch.bfloat16)
    found = kernels_of(m.bfloat16(), x.bfloat16())
    assert ("llga_gemv:avx2" in found) == (has_own_kernels() and "left" not in case), found


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize(
    "code", ["self.l(x)", "F.relu(self.l(x))", "F.silu(self.l(x))", "y + self.l(x)"]
)
@pytest.mark.parametrize(
    "size",
    [(1, 3, 5), (1, 517, 96), (2, 64, 33), (7, 300, 8), (13, 70, 50), (2, 8, 600, 64)],
    ids=str,
)
def test_few_rows_of_a_narrow_weight(size: tuple[int, ...], code: str) -> None:
    """A weight of bfloat16 is read as such, also if it is there in float32."""
    *outer, inputs, outputs = size
    m = net(code, "x, y", l=nn.Linear(inputs, outputs)).eval()
    m.l.weight.data = m.l.weight.detach().bfloat16().float()
    x, y = torch.randn(*outer, inputs), torch.randn(*outer, outputs)
    check(m, [x, y], groups=1, fused="linear")
    narrow = [name for name in kernels_of(m, x, y) if "_bf16_weight" in name]
    kind = "gemv:avx2" if math.prod(outer) == 1 else "gemm"
    assert len(narrow) == has_own_kernels()
    assert all(name.startswith("llga_" + kind.replace(":", "_bf16_weight:")) for name in narrow)
    with torch.no_grad():
        m.l.weight[-1, -1] += 2.0**-20  # one number is enough
    assert not any("_bf16_weight" in name for name in kernels_of(m, x, y))
    check(m, [x, y], groups=1, fused="linear")


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize(
    "code",
    [
        "self.l(x) * y",
        "y - self.l(x)",
        "torch.sigmoid(self.l(x)) * y",
        "F.relu(self.l(x)) * y + (1 - y) * z",
    ],
)
@pytest.mark.parametrize("size", [(1, 256, 256), (1, 1, 40, 30), (256, 512)], ids=str)
def test_linear_of_one_row_beside_other_tensors(size: tuple[int, ...], code: str) -> None:
    """Highway networks, gates: oneDNN's gemm takes others in, and ten times as long for that."""
    *outer, inputs, outputs = size
    m = net(code, "x, y, z", l=nn.Linear(inputs, outputs)).eval()
    x = torch.randn(*outer, inputs)
    y, z = torch.randn(2, *outer, outputs)
    check(m, [x, y, z], fused="linear")
    assert ("llga_gemv:avx2" in kernels_of(m, x, y, z)) == has_own_kernels()
    y.view(-1)[3], z.view(-1)[5] = math.inf, math.nan
    with torch.no_grad():
        script = to_script(m, [x, y, z])
        for _ in range(3):
            assert_same(script(x, y, z), m(x, y, z))


@pytest.mark.parametrize("special", [math.nan, math.inf, 3e38, 1e-40])
def test_special_numbers_of_a_narrow_weight(special: float) -> None:
    m = net("self.l(x)", l=nn.Linear(40, 24)).eval()
    m.l.weight.data = m.l.weight.detach().bfloat16()
    m.l.weight.data[3, 5] = special
    m.l.weight.data = m.l.weight.data.float()
    for rows in (1, 3):
        check(m, [torch.randn(rows, 40)])


class Tiled(NamedTuple):
    """A linear layer of bfloat16, or of images a pointwise convolution, and what follows it."""

    size: tuple[int, ...]
    outputs: int
    code: str = "self.l(x)"
    bias: bool = True
    threads: int = 2
    own: str = "amx avx512"  # the kernels that are used where they are there


TILED_LINEAR = {
    "plain": Tiled((40, 64), 96),
    "no bias": Tiled((40, 64), 96, bias=False),
    # No whole tiles of rows, outputs or inputs; several blocks of rows, and of inputs.
    "uneven rows": Tiled((2, 35, 64), 32),
    "uneven outputs": Tiled((20, 64), 83),
    "few outputs": Tiled((33, 32), 7),
    "uneven inputs": Tiled((45, 74), 60),
    "few inputs": Tiled((17, 2), 40),
    "many rows": Tiled((3, 219, 34), 50),
    "many inputs": Tiled((49, 1030), 70),
    "all uneven": Tiled((301, 550), 103),
    "few rows": Tiled((3, 64), 96),
    "one row": Tiled((1, 64), 96),
    "one thread": Tiled((150, 320), 200, threads=1),
    "two threads, by rows": Tiled((600, 130), 70),
    "two threads, by outputs": Tiled((90, 130), 700),
    "nine threads, by rows": Tiled((600, 290), 70, "F.relu(self.l(x))", threads=9),
    "nine threads, by outputs": Tiled((130, 130), 700, "F.gelu(self.l(x))", threads=9),
    "heads": Tiled((2, 20, 64), 48, "self.l(x).view(2, 20, 4, 12).transpose(1, 2)"),
    "heads of relu": Tiled(
        (2, 20, 64), 48, "F.relu(self.l(x)).view(2, 20, 4, 12).permute(2, 0, 3, 1)"
    ),
    "heads of a sum": Tiled((2, 20, 48), 48, "(self.l(x) + x).view(2, 20, 4, 12).transpose(1, 2)"),
    "sum": Tiled((40, 64), 64, "self.l(x) + x"),
    "sum first": Tiled((40, 64), 64, "x + self.l(x)"),
    "sum over its addend": Tiled((70, 64), 64, "z = torch.tanh(x * 2)\nreturn z + self.l(x)"),
    "relu": Tiled((40, 64), 96, "F.relu(self.l(x))"),
    "relu of a sum": Tiled((40, 64), 64, "F.relu(self.l(x) + x)"),
    "gelu": Tiled((50, 64), 1000, "F.gelu(self.l(x))"),
    "gated": Tiled((50, 64), 64, "F.silu(self.l(x)) * x"),
    "gated, uneven": Tiled((3, 37, 74), 74, "x * F.silu(self.l(x))"),
    "gated by a sigmoid": Tiled((130, 96), 96, "self.l(x).sigmoid() * x"),
    "product": Tiled((50, 64), 64, "self.l(x) * x"),
    "gated over its factor": Tiled(
        (70, 64), 64, "z = torch.tanh(x * 2)\nreturn F.silu(self.l(x)) * z"
    ),
    "gelu, tanh": Tiled((50, 64), 300, "F.gelu(self.l(x), approximate='tanh')"),
    "silu": Tiled((50, 64), 83, "F.silu(self.l(x))"),
    "sigmoid": Tiled((50, 64), 83, "torch.sigmoid(self.l(x))"),
    "tanh": Tiled((50, 64), 83, "torch.tanh(self.l(x))"),
    "hardswish": Tiled((50, 64), 83, "F.hardswish(self.l(x))"),
    "images": Tiled((2, 32, 9, 11), 72),
    "images, sum": Tiled((1, 32, 9, 11), 32, "F.relu(self.l(x) + x)"),
    "images, silu": Tiled((2, 34, 9, 11), 33, "F.silu(self.l(x))"),
    "one pixel": Tiled((20, 32, 1, 1), 8, "F.relu(self.l(x))"),
    # What stays with oneDNN, for some or all.
    "odd inputs": Tiled((40, 63), 96, own=""),
    "few rows by a large weight": Tiled((15, 768), 768, own="avx512"),
    "many products": Tiled((1100, 1024), 1024, threads=1, own="avx512"),
    "many products, threads": Tiled((1100, 1024), 1024),
    "other activation": Tiled((40, 64), 96, "F.elu(self.l(x))", own=""),
}


def tiled(case: Tiled) -> nn.Module:
    linear: nn.Module
    if len(case.size) == 4:
        linear = nn.Conv2d(case.size[1], case.outputs, 1, bias=case.bias)
    else:
        linear = nn.Linear(case.size[-1], case.outputs, bias=case.bias)
    code = case.code if "return" in case.code else f"return {case.code}"
    return net(code, l=linear).eval()


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", TILED_LINEAR)
def test_bfloat16_linear(case: str) -> None:
    """With instructions for bfloat16 they have a kernel of our own."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = TILED_LINEAR[case]
    torch.set_num_threads(c.threads)
    layout = torch.channels_last if len(c.size) == 4 else None
    m = tiled(c)
    x = torch.randn(c.size)
    check(m, [x], dtype=torch.bfloat16, memory_format=layout)
    x = x.to(torch.bfloat16, memory_format=layout or torch.preserve_format)
    found = kernels_of(m.bfloat16(), x)
    isa = "amx" if has_matrix_units() else "avx512"
    expected = has_narrow_products() and isa in c.own.split()
    assert (f"llga_gemm:{isa}_bf16" in found) == expected, found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("inputs", [64, 74])
def test_bfloat16_linear_with_special_values(inputs: int, value: float) -> None:
    """They reach the results of their row or output, and no others."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("self.l(x)", l=nn.Linear(inputs, 40)).eval().bfloat16()
    x = torch.randn(36, inputs).bfloat16()
    with torch.no_grad():
        script = to_script(m, [x])
        for place in ((0, 0), (35, inputs - 1), (17, 33)):
            y = x.clone()
            y[place] = value
            for _ in range(3):
                assert_same(script(y), m(y))
        m.l.weight[5, inputs - 1] = value
        m.l.weight[39, 0] = value
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))


@pytest.mark.parametrize("offset", range(3))
@pytest.mark.parametrize("gap", range(3))
def test_bfloat16_linear_of_a_weight_anywhere(offset: int, gap: int) -> None:
    """A part of a larger one, where pairs of numbers lie as no wider number would."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("self.l(x)", l=nn.Linear(64, 96)).eval().bfloat16()
    memory = torch.randn(offset + 96 * (64 + gap)).bfloat16()
    m.l.weight = nn.Parameter(memory.as_strided((96, 64), (64 + gap, 1), offset), False)
    x = torch.randn(40, 64).bfloat16()
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))


TILED_CONVOLUTION = "llga_tiled:amx_bf16"


class TiledConvolution(NamedTuple):
    """A convolution of bfloat16 images, and what follows it."""

    size: tuple[int, ...]
    outputs: int
    window: Any = 3
    stride: Any = 1
    padding: Any = 1
    dilation: Any = 1
    groups: int = 1
    code: str = "self.c(x)"
    bias: bool = True
    threads: int = 2
    own: bool = True
    transposed: bool = False


def enlarging(
    size: tuple[int, ...], outputs: int, window: Any = 2, **more: Any
) -> TiledConvolution:
    """A transposed one whose windows do not overlap, unless `more` says so."""
    arguments = {"stride": window, "padding": 0, "transposed": True, **more}
    return TiledConvolution(size, outputs, window, **arguments)


TILED_CONVOLUTIONS = {
    # Tiles of whole lines; of copied ones, or of images.
    "plain": TiledConvolution((1, 32, 28, 28), 64),
    "no bias": TiledConvolution((1, 32, 28, 28), 64, bias=False),
    "no padding": TiledConvolution((2, 32, 30, 34), 64, padding=0),
    "last tile overlaps": TiledConvolution((1, 32, 9, 35), 32),
    "odd number of tiles": TiledConvolution((1, 32, 5, 43), 32),
    "strided": TiledConvolution((2, 16, 29, 57), 40, stride=2),
    "strided, pointwise": TiledConvolution((2, 64, 28, 28), 96, window=1, stride=2, padding=0),
    "padded behind only": TiledConvolution((1, 32, 27, 27), 32, stride=3, padding=2),
    "dilated lines": TiledConvolution((1, 32, 20, 20), 32, padding=(2, 1), dilation=(2, 1)),
    "columns": TiledConvolution((1, 24, 17, 30), 32, window=(7, 1), padding=(3, 0)),
    "rows": TiledConvolution((1, 24, 17, 30), 32, window=(1, 7), padding=(0, 3)),
    "window of five": TiledConvolution((1, 48, 35, 35), 64, window=5, padding=2),
    # Lines that do not fill tiles: joined, with gaps and without, or what is under each window.
    "joined images": TiledConvolution((2, 32, 37, 37), 64, padding=0),
    "joined": TiledConvolution((2, 64, 7, 7), 96),
    "joined, one line": TiledConvolution((3, 64, 1, 7), 48),
    "joined without gaps": TiledConvolution((1, 32, 17, 17), 40, window=(7, 1), padding=(3, 0)),
    "gathered": TiledConvolution((1, 32, 8, 8), 40, window=5, padding=2),
    "gathered, strided": TiledConvolution((2, 64, 14, 14), 96, stride=2),
    "gathered, dilated": TiledConvolution((1, 32, 20, 20), 32, padding=2, dilation=2),
    "gathered, uneven": TiledConvolution((1, 74, 28, 28), 32),
    "gathered, narrow": TiledConvolution((1, 16, 40, 2), 24),
    "dilated": TiledConvolution((1, 32, 32, 32), 32, padding=2, dilation=2),
    "dilated, no padding": TiledConvolution((2, 64, 21, 35), 48, padding=0, dilation=(2, 3)),
    "dilated, strided": TiledConvolution((2, 32, 33, 64), 40, stride=2, padding=2, dilation=2),
    # Regions that see parts of the window.
    "mostly padding": TiledConvolution((1, 64, 33, 33), 40, padding=12, dilation=12),
    "mostly padding, images": TiledConvolution((3, 32, 20, 26), 72, padding=9, dilation=9),
    "mostly padding, lines": TiledConvolution((1, 48, 24, 32), 32, padding=(9, 2), dilation=(9, 2)),
    "mostly padding, wide window": TiledConvolution((2, 32, 20, 24), 32, 5, padding=12, dilation=6),
    "padding but for a pixel": TiledConvolution((1, 64, 17, 33), 40, padding=36, dilation=36),
    "uneven padding": TiledConvolution((1, 64, 33, 25), 40, padding=(12, 9), dilation=12),
    "mostly padding, nine threads": TiledConvolution(
        (1, 32, 33, 33), 16, padding=12, dilation=12, threads=9
    ),
    "mostly padding, sum": TiledConvolution(
        (2, 32, 30, 32), 32, padding=12, dilation=12, code="F.relu(self.c(x) + x)"
    ),
    "mostly padding, silu": TiledConvolution(
        (1, 32, 30, 32), 96, padding=12, dilation=12, code="F.silu(self.c(x))"
    ),
    # Panels and bands.
    "uneven outputs": TiledConvolution((1, 32, 28, 28), 83),
    "few outputs": TiledConvolution((1, 32, 28, 28), 7),
    "few inputs": TiledConvolution((1, 2, 28, 28), 32),
    "first layer": TiledConvolution((2, 3, 41, 40), 32, stride=2),
    "first layer, no padding": TiledConvolution((1, 3, 30, 31), 16, padding=0),
    "one channel": TiledConvolution((1, 1, 28, 28), 24, window=5, padding=2),
    "widened": TiledConvolution((2, 3, 41, 40), 32, window=4, stride=2),
    "widened, patches": TiledConvolution((1, 3, 40, 44), 33, window=4, stride=4, padding=0),
    "widened, one channel": TiledConvolution((2, 1, 31, 33), 24, window=6, stride=2, padding=2),
    "widened, smaller than a tile": TiledConvolution((3, 3, 9, 7), 16, window=4, stride=2),
    "pointwise, many products": TiledConvolution((1, 512, 34, 34), 1024, window=1, padding=0),
    "large weight": TiledConvolution((1, 256, 14, 14), 160),
    "large weight, large images": TiledConvolution((1, 192, 56, 57), 192),
    "large weight, small images": TiledConvolution((5, 128, 7, 7), 288),
    "large weight, small images, gathered": TiledConvolution((6, 128, 14, 14), 288, stride=2),
    "large weight, small images, no padding": TiledConvolution((4, 128, 9, 9), 288, padding=0),
    "many images": TiledConvolution((9, 16, 12, 13), 24),
    "one thread": TiledConvolution((1, 64, 28, 28), 64, threads=1),
    "nine threads": TiledConvolution((1, 64, 28, 28), 64, threads=9),
    # What follows.
    "relu": TiledConvolution((1, 32, 28, 28), 64, code="F.relu(self.c(x))"),
    "relu6": TiledConvolution((1, 32, 28, 28), 37, code="F.relu6(self.c(x))"),
    "hardswish": TiledConvolution((1, 32, 28, 28), 37, code="F.hardswish(self.c(x))"),
    "silu": TiledConvolution((1, 32, 28, 28), 64, code="F.silu(self.c(x))"),
    "sum": TiledConvolution((1, 32, 35, 35), 32, code="F.relu(self.c(x) + x)"),
    "sum, joined": TiledConvolution((2, 40, 7, 7), 40, code="x + self.c(x)"),
    "chain": TiledConvolution((1, 32, 35, 35), 32, code="F.relu(self.c(F.relu(self.c(x))) + x)"),
    # Transposed: lines of the result that are apart.
    "transposed": enlarging((1, 32, 16, 32), 16),
    "transposed, no bias": enlarging((1, 32, 16, 32), 16, bias=False),
    "transposed, images": enlarging((3, 64, 9, 10), 32),
    "transposed, last tile overlaps": enlarging((2, 32, 5, 37), 48),
    "transposed, gathered": enlarging((2, 74, 12, 13), 32),
    "transposed, window of four": enlarging((1, 32, 17, 20), 4, 4),
    "transposed, columns": enlarging((1, 32, 17, 20), 64, (3, 1)),
    "transposed, uneven panels": enlarging((1, 32, 17, 20), 24),
    "transposed, large weight": enlarging((3, 256, 9, 8), 256),
    "transposed, nine threads": enlarging((1, 32, 40, 40), 32, threads=9),
    "transposed, relu": enlarging((1, 32, 16, 32), 16, code="F.relu(self.c(x))"),
    "transposed, silu": enlarging((1, 32, 16, 32), 16, code="F.silu(self.c(x))"),
    # What stays with oneDNN.
    "transposed, windows overlap": enlarging((1, 32, 16, 16), 32, 3, stride=2, own=False),
    "transposed, padding": enlarging((1, 32, 16, 16), 32, padding=1, own=False),
    "transposed, few outputs": enlarging((1, 32, 16, 16), 5, own=False),
    "transposed, groups": enlarging((1, 32, 16, 16), 32, groups=2, own=False),
    "one pixel": TiledConvolution((2, 16, 3, 3), 24, padding=0, own=False),  # contiguous as well
    "pointwise, many products of few inputs": TiledConvolution(
        (1, 128, 70, 70), 1024, window=1, padding=0, own=False
    ),
    "first layer, large window": TiledConvolution((1, 3, 40, 40), 32, 7, 2, 3, own=False),
    "odd inputs": TiledConvolution((1, 33, 28, 28), 32, own=False),
    "groups": TiledConvolution((1, 32, 28, 28), 32, groups=2, own=False),
    "other activation": TiledConvolution((1, 32, 28, 28), 32, code="F.elu(self.c(x))", own=False),
}


def convolution(case: TiledConvolution) -> nn.Module:
    c = case
    layer: type[nn.Module] = nn.ConvTranspose2d if c.transposed else nn.Conv2d
    return net(
        c.code,
        c=layer(
            c.size[1],
            c.outputs,
            c.window,
            c.stride,
            c.padding,
            dilation=c.dilation,
            groups=c.groups,
            bias=c.bias,
        ),
    ).eval()


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", TILED_CONVOLUTIONS)
def test_bfloat16_convolution(case: str) -> None:
    """With matrix units they have a kernel of our own."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = TILED_CONVOLUTIONS[case]
    torch.set_num_threads(c.threads)
    m = convolution(c)
    x = torch.randn(c.size)
    check(m, [x], dtype=torch.bfloat16, memory_format=torch.channels_last)
    found = kernels_of(m.bfloat16(), x.to(torch.bfloat16, memory_format=torch.channels_last))
    assert (TILED_CONVOLUTION in found) == (c.own and has_matrix_units()), found


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_bfloat16_convolution_of_planes(channels: int) -> None:
    """They are interleaved first."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    code = "F.adaptive_avg_pool2d(F.relu(self.c(x)), 2)"
    m = convolution(TiledConvolution((2, channels, 40, 44), 32, stride=2, code=code))
    x = torch.randn(2, channels, 40, 44)
    check(m, [x], dtype=torch.bfloat16)
    groups = llga_fuser.report(m.bfloat16(), x.bfloat16(), rounds=1).groups
    found = [p.implementation for group in groups for p in group.primitives]
    assert (TILED_CONVOLUTION in found and "llga_interleave" in found) == has_matrix_units(), found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "joined",
        "gathered",
        "gathered, uneven",
        "last tile overlaps",
        "uneven outputs",
        "first layer",
        "dilated",
        "mostly padding",
        "padding but for a pixel",
        "widened",
        "widened, patches",
        "widened, one channel",
        "large weight, small images",
        "transposed",
        "transposed, images",
    ],
)
def test_bfloat16_convolution_with_special_values(case: str, value: float) -> None:
    """They reach the results that see their pixel, or of their output, and no others."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    if case == "widened, one channel" and not has_matrix_units():
        pytest.skip("oneDNN's kernels, also PyTorch's, multiply what lies beside the channel by 0")
    m = convolution(TILED_CONVOLUTIONS[case]).bfloat16()
    size = TILED_CONVOLUTIONS[case].size
    x = torch.randn(size).to(torch.bfloat16, memory_format=torch.channels_last)
    with torch.no_grad():
        script = to_script(m, [x])
        for place in ((0, 0, 0, 0), (size[0] - 1, size[1] - 1, size[2] - 1, size[3] - 1)):
            y = x.clone()
            y[place] = value
            for _ in range(3):
                assert_same(script(y), m(y))
        m.c.weight[5, -1, 0, 0] = value
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", ["joined", "large weight", "strided"])
def test_bfloat16_convolution_is_the_same_each_time(case: str) -> None:
    """Whatever a thread takes of it."""
    if not has_matrix_units():
        pytest.skip("this processor has no AMX")
    torch.set_num_threads(3)
    c = TILED_CONVOLUTIONS[case]
    m = convolution(c).bfloat16()
    x = torch.randn(c.size).to(torch.bfloat16, memory_format=torch.channels_last)
    with torch.no_grad():
        script = to_script(m, [x])
        first = [script(x) for _ in range(3)][-1]
        assert all(torch.equal(script(x), first) for _ in range(50))


@pytest.mark.parametrize("activation", ["", "F.relu", "F.hardswish"])
def test_linear_of_one_row_with_special_values(activation: str) -> None:
    m = net(f"{activation}(self.l(x))", l=nn.Linear(45, 20)).eval()
    x = torch.randn(1, 45)
    with torch.no_grad():
        m.l.weight[::2, 44] = 0  # behind the last whole vector
        m.l.weight[3, 2] = math.inf
        m.l.bias[7] = -math.inf
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))
        for place, value in ((44, math.inf), (0, math.nan), (20, 3e38), (37, -math.inf)):
            y = x.clone()
            y[0, place] = value
            assert_same(script(y), m(y))


WIDENED = {
    # Under autocast: code, and whether a kernel of our own computes the sum as well.
    "sum": ("self.l(x) + y", True),
    "other side": ("y + self.l(x)", True),
    "no bias": ("self.n(x) + y", True),
    "sum that is read twice": ("z = self.l(x) + y\nreturn z, torch.sin(z)", True),
    "broadcast": ("self.l(x) + y[:1, :1]", False),
    "difference": ("self.l(x) - y", False),
    "product": ("self.l(x) * y", False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("size", [(2, 37, 96), (1, 1, 96), (3, 2, 800), (1, 1, 800)], ids=str)
@pytest.mark.parametrize("case", WIDENED)
def test_bfloat16_linear_that_becomes_float32(case: str, size: tuple[int, ...]) -> None:
    """As in front of a residual sum in float32: by our kernels it is not rounded before."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    code, sums = WIDENED[case]
    inputs = size[-1]
    outputs = 72 if inputs == 96 else 700
    layers = {"l": nn.Linear(inputs, outputs), "n": nn.Linear(inputs, outputs, bias=False)}
    m = net(code, "x, y", **layers).eval()
    x, y = torch.randn(size), torch.randn(*size[:-1], outputs)
    check(m, [x, y], autocast=True)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            traced = torch.jit.trace(m, (x, y), check_trace=False)
            expected = m(x, y)
            script = torch.jit.freeze(traced)  # which puts casts before all binary ops
        for _ in range(4):
            assert_same(script(x, y), expected, tol=TOLERANCES[torch.bfloat16])
        groups = llga_fuser.report(script, x, y, rounds=1).groups
    if not has_narrow_products():
        return
    joined = next(group for group in groups if "linear" in group.name)
    assert "autocast_to_full_precision" in joined.name, joined.name
    found = [p.implementation for p in joined.primitives]
    row = math.prod(size[:-1]) == 1
    if inputs == 96:
        isa = "amx" if has_matrix_units() else "avx512"
        assert f"llga_gemm:{isa}_bf16" in found and (len(found) == 1 or not sums), found
    elif row and not sums:
        assert "llga_gemv:avx2" in found, found


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("code", ["self.l(x) + y", "F.relu(self.l(x) + y)", "self.l(x) * y"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_linear_with_an_operand_that_lies_otherwise(autocast: bool, code: str) -> None:
    """Its rows are not one behind the other (MobileViT's, which were images): they are copied,
    where oneDNN would have a reference kernel for a sum of both.
    """
    m = net(code, "x, y", l=nn.Linear(256, 72)).eval()
    x, y = torch.randn(3, 37, 256), torch.randn(3, 72, 37).transpose(1, 2)
    check(m, [x, y], autocast=autocast)
    with torch.no_grad():
        with autocast_bf16(autocast):
            script = torch.jit.freeze(torch.jit.trace(m, (x, y), check_trace=False))
        for _ in range(4):
            script(x, y)
        groups = llga_fuser.report(script, x, y, rounds=1).groups
    found = {p.implementation for group in groups for p in group.primitives}
    # Under autocast a sum alone joins the layer.
    ours = has_narrow_products() and code == "self.l(x) + y" if autocast else has_own_kernels()
    if ours:
        assert "llga_copy" in found and any("llga_gemm" in name for name in found), found
        assert not any("ref" in name for name in found), found


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [37, 64, 201])
def test_linear_layer_whose_rows_lie_otherwise(rows: int, dtype: torch.dtype) -> None:
    """Columns of images are copied to rows."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("F.relu(self.l(x))", l=nn.Linear(256, 72)).eval()
    x = torch.randn(3, 256, rows).transpose(1, 2)
    check(m, [x], dtype=dtype)
    own = has_own_kernels() if dtype == torch.float32 else has_narrow_products()
    groups = llga_fuser.report(m.to(dtype), x.to(dtype), rounds=1).groups
    found = {p.implementation for group in groups for p in group.primitives}
    if own:
        assert "llga_copy" in found and any("llga_gemm" in name for name in found), found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_bfloat16_linear_of_one_row_with_special_values(value: float) -> None:
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("F.relu(self.l(x))", l=nn.Linear(1021, 520)).eval().bfloat16()
    x = torch.randn(1, 1021).bfloat16()
    with torch.no_grad():
        m.l.weight[::2, 1020] = 0  # behind the last whole vector
        script = to_script(m, [x])
        for place in (0, 20, 1020):
            y = x.clone()
            y[0, place] = value
            for _ in range(3):
                assert_same(script(y), m(y))
        m.l.weight[5, 7] = m.l.bias[6] = value
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))


class Rows(NamedTuple):
    """A linear layer, or of images a pointwise convolution: size of the data, outputs, and how it
    is written down; and for which instruction sets it has a kernel of our own.
    """

    size: tuple[int, ...]
    outputs: int
    code: str = "self.l(x)"
    bias: bool = True
    own: str = "avx2 avx512"
    threads: int = 2
    options: tuple[tuple[str, int], ...] = ()  # of the convolution


ROWS = {
    "plain": Rows((8, 30), 16),
    "odd": Rows((13, 7), 41),
    "one_output": Rows((50, 33), 1),
    "one_input": Rows((9, 1), 20),
    "many_rows": Rows((2, 300, 40), 72, code="F.relu(self.l(x))", own="avx2"),
    "many_rows_of_many_inputs": Rows((3, 200, 200), 45, code="F.relu(self.l(x))"),
    "too_many_rows": Rows((1025, 192), 30, own="avx2"),
    "blocks": Rows((1000, 16), 50, bias=False, own="avx2"),
    "parts": Rows((128, 1500), 70, code="F.relu(self.l(x) + y)"),
    "parts_of_blocks": Rows((390, 1700), 33, code="F.gelu(self.l(x))"),
    "parts_without_bias": Rows((9, 5003), 40, code="F.hardtanh(self.l(x), 0, 6)", bias=False),
    "many_threads": Rows((50, 100), 70, code="F.relu(self.l(x) + y)", threads=9),
    "nine_threads": Rows((130, 300), 300, code="F.gelu(self.l(x) + y)", threads=9),
    "nine_threads_by_rows": Rows((1000, 300), 40, code="F.relu(self.l(x))", threads=9),
    "more_threads_than_panels": Rows((300, 200), 20, code="self.l(x) + y", threads=7),
    "batch": Rows((3, 2, 16, 64), 48, code="F.relu(self.l(x) + y)"),
    "skip_before": Rows((197, 200), 100, code="y + self.l(x)"),
    "skip_without_bias": Rows((20, 96), 31, code="self.l(x) + y", bias=False),
    "relu6": Rows((20, 96), 31, code="F.relu6(self.l(x))"),
    "hardswish": Rows((20, 96), 31, code="F.hardswish(self.l(x))"),
    "gelu": Rows((60, 96), 100, code="F.gelu(self.l(x))"),
    "few_of_gelu": Rows((8, 96), 10, code="F.gelu(self.l(x))"),
    "of_matmul": Rows((30, 24), 40, code="torch.matmul(x, self.w) + self.v"),
    "of_matmul_and_skip": Rows((30, 24), 40, code="torch.matmul(x, self.w) + self.v + y"),
    "and_a_vector": Rows((30, 24), 40, code="self.l(x) + self.v"),
    "scaled": Rows((30, 24), 40, code="(self.l(x) + y) * self.v + self.z"),
    "scaled_from_the_left": Rows((30, 24), 40, code="self.z + self.v * (y + self.l(x))"),
    "scaled_alone": Rows((30, 24), 41, code="(self.l(x) + y) * self.v", bias=False),
    "scaled_on_threads": Rows((300, 200), 70, code="(self.l(x) + y) * self.v + self.z", threads=7),
    "scaled_by_rows": Rows((1000, 300), 40, code="(self.l(x) + y) * self.v + self.z", threads=9),
    "scaled_twice": Rows((30, 24), 40, code="(self.l(x) + y) * self.v * self.z", own=""),
    "relu_of_scaled": Rows((30, 24), 40, code="F.relu((self.l(x) + y) * self.v)", own=""),
    "gated": Rows((30, 24), 40, code="F.silu(self.l(x)) * y"),
    "gated_from_the_left": Rows((2, 35, 24), 41, code="y * F.silu(self.l(x))", bias=False),
    "gated_by_a_sigmoid": Rows((50, 24), 40, code="torch.sigmoid(self.l(x)) * y"),
    "gated_by_gelu": Rows((50, 24), 40, code="F.gelu(self.l(x), approximate='tanh') * y"),
    "gated_on_threads": Rows((300, 200), 70, code="F.silu(self.l(x)) * y", threads=7),
    "gated_by_rows": Rows((1000, 300), 40, code="F.silu(self.l(x)) * y", threads=9),
    "product": Rows((30, 24), 40, code="self.l(x) * y"),
    "product_of_relu": Rows((30, 24), 40, code="F.relu(self.l(x)) * y"),
    "product_of_sum": Rows((30, 24), 40, code="(self.l(x) + y) * y", own=""),
    "few_rows": Rows((7, 30), 16, own="avx512"),
    # For AVX-512 oneDNN computes both at once.
    "column_bias": Rows((30, 24), 40, code="torch.matmul(x, self.w) + self.u", own="avx2"),
    "heads": Rows((2, 20, 64), 48, code="self.l(x).view(2, 20, 4, 12).transpose(1, 2)"),
    "heads_of_relu": Rows(
        (2, 20, 64), 48, code="F.relu(self.l(x)).view(2, 20, 4, 12).permute(2, 0, 3, 1)"
    ),
    "view_of_gelu": Rows((2, 20, 64), 48, code="F.gelu(self.l(x)).view(40, 6, 1, 8)"),
    "relu_of_heads": Rows(
        (2, 20, 64), 48, code="F.relu(self.l(x).view(2, 20, 4, 12).transpose(1, 2))"
    ),
    "heads_of_sum": Rows(
        (2, 20, 64), 48, code="(self.l(x) + y).view(2, 20, 4, 12).transpose(1, 2)"
    ),
    "copied": Rows((2, 20, 64), 48, code="self.l(x).transpose(0, 1).reshape(40, 48)"),
    "images": Rows((1, 512, 7, 9), 260),
    "images_and_relu": Rows((2, 400, 5, 7), 333, code="F.relu(self.l(x))"),
    "images_and_relu6": Rows((1, 512, 7, 7), 256, code="F.relu6(self.l(x))"),
    "images_and_silu": Rows((1, 512, 7, 7), 256, code="F.silu(self.l(x))"),
    "images_and_skip": Rows((1, 512, 7, 7), 256, code="F.relu(self.l(x) + y)", bias=False),
    "one_pixel_and_skip": Rows((1, 512, 1, 1), 256, code="F.relu(self.l(x) + y)", own="avx512"),
    "pixels": Rows((30, 512, 1, 1), 256),
    "large_images": Rows((1, 512, 20, 11), 256, own="avx2"),
    "images_of_few_channels": Rows((1, 256, 7, 7), 256, own="avx2"),
    "strided": Rows((1, 512, 7, 7), 256, own="", options=(("stride", 2),)),
    "padded": Rows((1, 512, 7, 7), 256, own="", options=(("padding", 1),)),
    "groups": Rows((1, 1024, 7, 7), 1024, own="", options=(("groups", 4),)),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", ROWS)
def test_linear_of_many_rows(case: str) -> None:
    """It has a kernel of our own, whose weights lie in panels."""
    c = ROWS[case]
    torch.set_num_threads(c.threads)
    images = len(c.size) == 4 and c.size[1] > 2
    inputs = c.size[1 if images else -1]
    linear: nn.Module
    if images:
        linear = nn.Conv2d(inputs, c.outputs, 1, bias=c.bias, **dict(c.options))
    else:
        linear = nn.Linear(inputs, c.outputs, bias=c.bias)
    m = net(
        c.code,
        "x, y",
        l=linear,
        w=torch.randn(inputs, c.outputs),
        v=torch.randn(c.outputs),
        u=torch.randn(c.size[-2], 1),
        z=torch.randn(c.outputs),
    ).eval()
    x = torch.randn(c.size)
    if images:
        m, x = (a.to(memory_format=torch.channels_last) for a in (m, x))
    with torch.no_grad():
        y = torch.randn_like(linear(x))
    check(m, [x, y], groups=1)
    groups = llga_fuser.report(m, x, y, rounds=1).groups
    found = {p.implementation for g in groups for p in g.primitives}
    isa = "avx2" if has_avx2_kernels() else "avx512" if has_own_kernels() else "none"
    own = {f"llga_gemm:{isa}"} if isa in c.own.split() else set()
    assert {name for name in found if name.startswith("llga_gemm")} == own


def own_gemm() -> set[str]:
    """Its name, if there is one for this processor."""
    isa = "avx2" if has_avx2_kernels() else "avx512"
    return {f"llga_gemm:{isa}"} if has_own_kernels() else set()


def gemms_of(module: nn.Module, *inputs: Tensor) -> set[str]:
    return {name for name in kernels_of(module, *inputs) if name.startswith("llga_gemm")}


class Product(NamedTuple):
    """A product of two matrices: sizes of the operands, how it is written down and how they lie;
    and the kernel of our own that it has, if any: avx2 is gemm, without AVX-512 alone.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    code: str = "torch.matmul(x, y)"
    own: str = "gemm"
    a_lies: str = "rows"
    b_lies: str = "rows"
    threads: int = 2


PRODUCTS = {
    "plain": Product((27, 16), (16, 27)),
    "by_columns": Product((27, 16), (16, 27), b_lies="columns"),
    "both_by_columns": Product((27, 17), (17, 30), a_lies="columns", b_lies="columns"),
    "with_gaps": Product((5, 27, 16), (5, 16, 27), a_lies="gaps", b_lies="gaps"),
    "one_output": Product((3, 27, 40), (3, 40, 1), own="gemv"),
    "one_output_by_columns": Product((3, 27, 40), (3, 40, 1), a_lies="columns"),
    "one_output_with_gaps": Product((3, 27, 40), (3, 40, 1), a_lies="gaps", b_lies="gaps"),
    "vectors_with_gaps": Product((3, 27, 40), (3, 40, 1), own="gemv", b_lies="gaps"),
    "one_row": Product((12, 1, 64), (12, 64, 50)),
    "one_row_by_columns": Product((12, 1, 64), (12, 64, 50), own="gemv", b_lies="columns"),
    "one_row_of_columns": Product((2, 1, 64), (2, 64, 50), a_lies="columns"),
    "one_number": Product((3, 1, 20), (3, 20, 1), own="gemv"),
    "few_rows": Product((4, 5, 33), (4, 33, 77)),
    "few_rows_by_columns": Product((4, 5, 33), (4, 33, 77), b_lies="columns"),
    "few_rows_of_many_inputs": Product((3, 1500), (1500, 70)),
    "many_inputs": Product((40, 1500), (1500, 70), a_lies="columns"),
    "capsules": Product((2, 30, 10, 16, 8), (2, 30, 1, 8, 1), own="gemv"),
    "short_vectors": Product((30, 7, 3), (30, 3, 1), own="gemv"),
    "few_inputs": Product((30, 7, 3), (30, 3, 5), own=""),
    "shared": Product((2, 3, 10, 16), (2, 1, 16, 24)),
    "shared_by_all": Product((2, 3, 1, 16), (1, 1, 16, 24)),
    "shared_a": Product((1, 10, 16), (5, 16, 24)),
    "missing_batches": Product((4, 3, 10, 16), (3, 16, 24)),
    "many_rows": Product((700, 64), (64, 10), own="avx2"),
    "many_rows_on_threads": Product((700, 200), (200, 100), own="avx2", threads=9),
    "few_rows_by_many": Product((9, 300), (300, 3000), threads=3),
    "few_rows_by_columns_of_many": Product((9, 30), (30, 600), own="avx2", b_lies="columns"),
    "one_row_on_threads": Product((1, 2000), (2000, 300), own="gemv", b_lies="columns", threads=7),
    "batches_on_threads": Product((50, 40, 32), (50, 32, 40), threads=7, b_lies="columns"),
    "large": Product((700, 700), (700, 700), own=""),
    "empty": Product((0, 20, 16), (0, 16, 24), own=""),
    "scaled": Product((4, 20, 16), (4, 16, 24), code="torch.matmul(x, y) * 0.3"),
    "divided": Product((4, 20, 16), (4, 16, 24), code="torch.bmm(x, y) / 7.0"),
    "divided_by_0": Product((4, 20, 16), (4, 16, 24), code="torch.bmm(x, y) / 0.0", own=""),
    "sum": Product((4, 20, 16), (4, 16, 24), code="torch.bmm(x, y) + z"),
    "scaled_sum": Product((4, 20, 16), (4, 16, 24), code="(torch.bmm(x, y) + z) / 3.0"),
    "sum_of_scaled": Product((4, 20, 16), (4, 16, 24), code="torch.bmm(x, y) * 0.3 + z"),
    "column_scaled": Product((4, 20, 16), (4, 16, 1), code="torch.bmm(x, y) * 3.0", own="gemv"),
    "sum_of_itself": Product((20, 20), (20, 20), code="torch.mm(y, x) + x"),
    "sum_of_what_is_made": Product((20, 20), (20, 20), code="torch.mm(y, x.exp()) + x.exp()"),
    "of_a_constant": Product((4, 20, 16), (4, 16, 24), code="torch.bmm(x, self.w)"),
    "constant_vectors": Product(
        (4, 20, 16), (4, 16, 24), code="torch.matmul(self.w.transpose(1, 2), x[:, 0:1].mT)"
    ),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", PRODUCTS)
def test_product_of_matrices(case: str) -> None:
    """Those of vectors have a kernel of our own, and small ones; with AVX-512 fewer of them."""
    c = PRODUCTS[case]
    torch.set_num_threads(c.threads)

    def lies(tensor: Tensor, how: str) -> Tensor:
        if how == "columns":
            return tensor.mT.contiguous().mT
        if how == "gaps":
            return torch.stack((tensor, tensor.neg()), -1)[..., 0]
        return tensor

    x, y = lies(torch.randn(c.a), c.a_lies), lies(torch.randn(c.b), c.b_lies)
    z = torch.randn(*c.a[:-1], c.b[-1])
    names = ["x", "y", "z"][: 3 if "z" in c.code else 2]
    m = net(c.code, ", ".join(names), w=torch.randn(c.b)).eval()
    inputs = [x, y, z][: len(names)]
    check(m, inputs)
    found = kernels_of(m, *inputs)
    if c.own == "gemv":
        expected = {"llga_gemv:avx2"} if has_own_kernels() else set()
    else:
        expected = own_gemm() if c.own == "gemm" or (c.own and has_avx2_kernels()) else set()
    assert {name for name in found if name.startswith("llga_gem")} == expected, found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("code", ["torch.bmm(x, y)", "torch.bmm(x, y[:, :, 0:1])"])
def test_product_of_matrices_with_special_values(code: str, value: float) -> None:
    """They reach what is computed of them; zeros of what a panel has too much of stay apart."""
    m = net(code, "x, y").eval()
    x, y = torch.randn(3, 9, 40), torch.randn(3, 40, 21)
    x[0, :, 7] = 0
    script = to_script(m, [x, y])
    with torch.no_grad():
        for where, place in ((x, (1, 8, 39)), (y, (0, 7, 0)), (y, (2, 39, 20))):
            kept = where[place].item()
            where[place] = value
            for _ in range(3):
                assert_same(script(x, y), m(x, y))
            where[place] = kept


OF_PLANES = {
    "alone": "self.c(x)",
    "relu": "F.relu(self.c(x))",
    "relu6": "F.relu6(self.c(x))",
    "hardswish": "F.hardswish(self.c(x))",
    "silu": "F.silu(self.c(x))",
    "sum_of_itself": "self.c(x) + x",
    "sum": "F.relu(self.c(x) + y)",
    "sum_of_what_dies": "self.c(x) + y.exp()",
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("sizes", "threads"), [((1, 50, 37), 1), ((3, 26, 27), 2), ((2, 1, 999), 2), ((1, 48, 48), 7)]
)
@pytest.mark.parametrize("case", OF_PLANES)
def test_pointwise_convolution_of_planes(
    case: str, sizes: tuple[int, int, int], threads: int, bias: bool
) -> None:
    """Images in planes are multiplied where they lie, and so is their result."""
    torch.set_num_threads(threads)
    images, *pixels = sizes
    code = OF_PLANES[case]
    m = net(code, "x, y", c=nn.Conv2d(24, 24, 1, bias=bias)).eval()
    inputs = [torch.randn(images, 24, *pixels) for _ in "xy"]
    check(m, inputs)
    own = case != "silu" or has_avx2_kernels()  # else oneDNN computes it behind its convolution
    assert gemms_of(m, *inputs) == (own_gemm() if own else set())


@pytest.mark.parametrize("outputs", [1, 3, 41])
def test_pointwise_convolution_of_planes_to_more_or_fewer(outputs: int) -> None:
    m = net("self.c(x)", c=nn.Conv2d(24, outputs, 1)).eval()
    x = torch.randn(2, 24, 31, 33)
    check(m, [x])
    assert gemms_of(m, x) == own_gemm()
    for small in (x, x[..., :9, :6].contiguous()):
        check(m, [small], memory_format=torch.channels_last)
        check(m, [small[..., ::2]])
        check(m, [small[0]], fallbacks=True)  # without a batch


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_pointwise_convolution_of_planes_with_special_values(value: float) -> None:
    m = net("F.relu(self.c(x))", c=nn.Conv2d(24, 17, 1)).eval()
    x = torch.randn(2, 24, 31, 33)
    script = to_script(m, [x])
    with torch.no_grad():
        assert gemms_of(script, x) == own_gemm()
        for place in ((0, 0, 0, 0), (1, 23, 30, 32)):
            kept = x[place].item()
            x[place] = value
            for _ in range(3):
                assert_same(script(x), m(x))
            x[place] = kept


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize(
    "function", ["leaky_relu({}, 0.2)", "elu({})", "elu({}, 1.3)", "mish({})", "softplus({})"]
)
@pytest.mark.parametrize("rows", [1, 5, 13, 200])
def test_linear_with_a_function_apart(rows: int, function: str) -> None:
    """Of what our gemm does not compute, which oneDNN would take into its own one."""
    m = net("F." + function.format("self.l(x)"), l=nn.Linear(48, 41)).eval()
    x = torch.randn(rows, 48)
    check(m, [x], groups=1)
    groups = llga_fuser.report(m, x, rounds=1).groups
    found = [p.implementation for g in groups for p in g.primitives]
    own = rows != 5 if has_avx2_kernels() else has_own_kernels() and rows != 200
    assert any(name.startswith("llga_gem") for name in found) == own, found
    convolution = net("F." + function.format("self.c(x)"), c=nn.Conv2d(48, 41, 1)).eval()
    check(convolution, [torch.randn(1, 48, 1, rows)], memory_format=torch.channels_last)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("rows", [1, 2, 200])
@pytest.mark.parametrize("code", ["F.silu(self.l(x)) * {}", "{} * self.l(x)"])
def test_gated_linear_of_what_groups_make(code: str, rows: int) -> None:
    """The factor dies there, but is read when the sums are there already."""
    for factor in ("F.relu(self.w(x))", "(x + 1.0).exp()", "x", "self.l(x)"):
        m = net(code.format(factor), l=nn.Linear(48, 48), w=nn.Linear(48, 48)).eval()
        check(m, [torch.randn(rows, 48)])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_gated_linear_with_special_values(value: float) -> None:
    m = net("F.silu(self.l(x)) * y", "x, y", l=nn.Linear(40, 48)).eval()
    x, y = torch.randn(30, 40), torch.randn(30, 48)
    with torch.no_grad():
        m.l.weight[:, 3] = 0
        script = to_script(m, [x, y])
        for where, place in ((x, 5), (x, 3), (y, 47)):
            where[7, place] = value
            for _ in range(3):
                assert_same(script(x, y), m(x, y))
            where[7, place] = 0.5


@pytest.mark.usefixtures("all_threads")
def test_linear_is_the_same_each_time() -> None:
    """Whatever rows a thread takes: sums of many inputs are added up in the same parts."""
    torch.set_num_threads(3)
    m = nn.Linear(3000, 48).eval()
    x = torch.randn(900, 3000)
    with torch.no_grad():
        script = to_script(m, [x])
        first = [script(x) for _ in range(3)][-1]
        assert all(torch.equal(script(x), first) for _ in range(50))


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("rounded", [False, True], ids=["", "of_bf16"])
def test_linear_of_changing_rows(rounded: bool) -> None:
    """All sizes share one weight in panels, few rows another one where bfloat16 has its numbers."""
    m = net("self.d(F.relu(self.c(x)))", c=nn.Linear(40, 50), d=nn.Linear(50, 30)).eval()
    if rounded:
        m.bfloat16().float()
    gc.collect()
    llga_fuser.clear_cache()
    before = llga_fuser.cache_info().packed_bytes
    with torch.no_grad():
        script = to_script(m, [torch.randn(20, 40)])
        for rows in (20, 8, 400, 2, 1, 33, 20):
            x = torch.randn(rows, 40)
            for _ in range(3):
                assert_same(script(x), m(x))
    if has_own_kernels():
        panels = 4 * (64 * 40 + 32 * 50)
        assert panels <= llga_fuser.cache_info().packed_bytes - before <= (3 + rounded) * panels


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("inputs", [45, 2500])
def test_linear_of_many_rows_with_special_values(inputs: int, value: float) -> None:
    m = net("F.relu(self.l(x))", l=nn.Linear(inputs, 20)).eval()
    x = torch.randn(31, inputs)
    with torch.no_grad():
        m.l.weight[::2, 7] = 0
        m.l.weight[3, 2] = math.inf
        m.l.bias[19] = -math.inf
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))
        for place in (0, 7, inputs - 1):
            y = x.clone()
            y[30, place] = value
            assert_same(script(y), m(y))


class Shuffle(NamedTuple):
    """Channels of what is concatenated, groups, and how it is written down."""

    parts: tuple[int, ...]
    groups: int = 2
    code: str = (
        "n, c, h, w = x.size()\n"
        "x = x.view(n, GROUPS, c // GROUPS, h, w)\n"
        "x = torch.transpose(x, 1, 2).contiguous().view(n, c, h, w)\n"
    )
    chunks: str = "a, b = x.chunk(2, dim=1)\nreturn self.d(a), self.e(b)"
    chunked: int = 2
    own: bool = True


RESHAPED = (
    "x = x.reshape(x.shape[0], GROUPS, x.shape[1] // GROUPS, x.shape[2], x.shape[3])\n"
    "x = x.transpose(1, 2).flatten(1, 2)\n"
)
SHUFFLES = {
    "plain": Shuffle((8, 8)),
    "whole": Shuffle((8, 8), chunks="return self.f(x)"),
    "odd_chunks": Shuffle((7, 7)),
    "unequal_parts": Shuffle((4, 12)),
    "three_groups": Shuffle((6, 6), groups=3),
    "three_parts": Shuffle((6, 6, 6), groups=3),
    "reshaped": Shuffle((8, 8), code=RESHAPED),
    "whole_read_too": Shuffle(
        (8, 8), chunks="a, b = x.chunk(2, dim=1)\nreturn self.d(a), self.f(x)", own=False
    ),
    "three_chunks": Shuffle(
        (9, 9),
        chunks="a, b, c = x.chunk(3, dim=1)\nreturn self.d(a), self.d(b) + self.d(c)",
        chunked=3,
    ),
    "other_dimension": Shuffle(
        (8, 8), chunks="a, b = x.chunk(2, dim=2)\nreturn self.f(a), self.f(b)", own=False
    ),
    "no_shuffle": Shuffle(
        (8, 8),
        code="n, c, h, w = x.size()\n"
        "x = x.view(n, 2, c // 4, h * 2, w).transpose(1, 2).contiguous().view(n, c, h, w)\n",
        own=False,
    ),
}


BATCH_NORMS = {
    "images": ((2, 24, 9, 7), nn.BatchNorm2d),
    "odd": ((1, 5, 30, 41), nn.BatchNorm2d),
    "large": ((2, 64, 40, 40), nn.BatchNorm2d),
    "volumes": ((1, 12, 3, 5, 4), nn.BatchNorm3d),
    "rows": ((9, 24), nn.BatchNorm1d),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("function", ["", "F.relu", "F.silu"])
@pytest.mark.parametrize("case", BATCH_NORMS)
def test_batch_norm_alone(case: str, function: str, value: float, dtype: torch.dtype) -> None:
    """Behind an activation nothing folds it away."""
    size, kind = BATCH_NORMS[case]
    n = kind(size[1])
    randomize(n)
    m = net(f"y = torch.tanh(x) + x\nreturn {function}(self.n(y))", n=n).eval()
    x = torch.randn(size)
    if x.dim() > 3:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x = x.contiguous(memory_format=last)
    x[0, 3] = value
    check(m, [x], dtype=dtype, fallbacks=bool(function))
    if fuses(dtype) and value == 1:
        kernels = kernels_of(copy.deepcopy(m).to(dtype), x.to(dtype))
        assert ("llga_affine" in kernels) == has_own_kernels()


class Cat(NamedTuple):
    """A concatenation of what convolutions compute: channels of each, and size of the images."""

    parts: tuple[int, ...]
    size: tuple[int, ...] = (2, 9, 7)  # images, height, width
    code: str = "torch.cat([{}], 1)"
    own: bool = True
    narrow: bool = True  # in bfloat16, if that is not computed in float32


CATS = {
    "two": Cat((8, 8)),
    "odd": Cat((5, 12, 1), narrow=False),
    "wide": Cat((130, 70), (1, 20, 30)),
    "many": Cat((16,) * 9, (3, 40, 33)),
    "of_one_pixel": Cat((8, 6), (3, 1, 1)),
    "parts": Cat((8, 6), code="torch.cat([x.chunk(2, 1)[0], x.chunk(2, 1)[1], {}], 1)"),
    "twice_the_same": Cat((8, 8), code="torch.cat([self.p0(x), x, x, self.p1(x)], 1)"),
    "rows": Cat((8, 8), code="torch.cat([{}], 2)", own=False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", CATS)
def test_concatenation(case: str, mode: str) -> None:
    c = CATS[case]
    images, *pixels = c.size
    parts = {f"p{i}": nn.Conv2d(4, n, 1) for i, n in enumerate(c.parts)}
    code = c.code.format(", ".join(f"self.{name}(x)" for name in parts))
    m = net(f"x = F.relu(self.a(x))\nreturn self.b({code})", a=nn.Conv2d(3, 4, 1), **parts,
            b=nn.LazyConv2d(5, 3, padding=1)).eval()  # fmt: skip
    x = torch.randn(images, 3, *pixels)
    m(x)
    check(m, [x], **MODES[mode])
    if mode in ("traced", "bf16"):
        dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        own = c.own and has_own_kernels() and (mode == "traced" or c.narrow)
        if fuses(dtype):
            kernels = kernels_of(copy.deepcopy(m).to(dtype), x.to(dtype))
            assert ("llga_concat" in kernels) == own


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", ["traced", "scripted", "bf16"])
@pytest.mark.parametrize("case", SHUFFLES)
def test_channel_shuffle(case: str, mode: str) -> None:
    c = SHUFFLES[case]
    channels = sum(c.parts)
    chunk = channels // c.chunked
    m = net(
        f"x = torch.cat([{', '.join(f'self.p{i}(x)' for i in range(len(c.parts)))}], 1)\n"
        + c.code.replace("GROUPS", str(c.groups))
        + c.chunks,
        **{f"p{i}": nn.Conv2d(4, part, 1) for i, part in enumerate(c.parts)},
        d=nn.Conv2d(chunk, 4, 1),
        e=nn.Conv2d(chunk, 4, 1),
        f=nn.Conv2d(channels, 4, 1),
    ).eval()
    x = torch.randn(2, 4, 30, 22)
    check(
        m,
        [x],
        scripted=mode == "scripted",
        dtype=torch.bfloat16 if mode == "bf16" else torch.float32,
        fallbacks=case == "no_shuffle",
    )
    if mode == "traced":
        assert ("llga_shuffle" in kernels_of(m, x)) == c.own
        with torch.no_grad():
            script = to_script(m, [x])
            for size in ((1, 4, 9, 9), (3, 4, 5, 8), (2, 4, 30, 22)):
                y = torch.randn(size)
                for _ in range(3):
                    assert_same(script(y), m(y))


def check_second_image(m: nn.Module, x: Tensor, value: float, threads: int) -> None:
    """`value` in one number of the second image reaches what it reaches in eager; not the first."""
    with restored(torch.get_num_threads, torch.set_num_threads), torch.no_grad():
        torch.set_num_threads(threads)
        script = to_script(m, [x])
        for _ in range(3):
            script(x)
        for row in (0, x.shape[2] // 2):
            y = x.clone()
            y[1, 3, row, 6] = value
            result = script(y)
            assert_same(result, m(y))
            assert result[0].isfinite().all()


def pays_to_expand(images: int, pixels: int, threads: int, dtype: torch.dtype) -> bool:
    """Reading the weights is not most of it; not for bfloat16 with matrix units."""
    good = has_matrix_units() or (dtype == torch.bfloat16 and not has_avx2_kernels())
    return pixels >= 40 and images * pixels >= (96 if good else 24) * threads


class Expansion(NamedTuple):
    """A pointwise, a depthwise and maybe another pointwise convolution."""

    size: tuple[int, ...]
    channels: int
    outputs: int = 0  # of the last one; 0: there is none
    window: int | tuple[int, int] = 3
    stride: int = 1
    padding: int = 1
    inner: str = "F.relu6"
    outer: str = "F.relu6"
    bias: bool = True
    sum: str = ""
    last: str = ""  # activation behind all
    groups: int = 1  # fusion groups
    threads: int = 2
    own: bool = True


EXPANSIONS = {
    "plain": Expansion((1, 16, 14, 14), 96, 24),
    "stride": Expansion((1, 16, 29, 14), 96, 24, stride=2),
    "residual": Expansion((1, 24, 14, 15), 144, 24, sum="+ x"),
    "residual first": Expansion((1, 24, 14, 15), 144, 24, sum="x + "),
    "five": Expansion((1, 8, 15, 14), 64, 40, window=5, padding=2),
    "five, stride": Expansion((1, 8, 23, 20), 64, 40, window=5, stride=2, padding=2),
    "no padding": Expansion((1, 8, 15, 16), 80, 40, padding=0),
    "more padding": Expansion((1, 8, 15, 14), 80, 40, padding=2),
    "much padding": Expansion((1, 8, 14, 14), 16, 4, window=5, padding=4),
    "one row": Expansion((1, 8, 1, 220), 32, 7),
    "one column": Expansion((1, 8, 220, 1), 32, 7),
    "two columns": Expansion((1, 8, 110, 2), 32, 7, window=5, padding=2),
    "no bias": Expansion((1, 16, 14, 14), 96, 24, bias=False),
    "odd inputs and outputs": Expansion((1, 13, 14, 14), 48, 19, inner="F.relu", outer="F.relu"),
    "more than 256 inputs": Expansion((1, 300, 14, 14), 32, 24),
    "more than 256 channels": Expansion((1, 16, 14, 14), 528, 24),
    # No whole tiles of inputs, and none of outputs.
    "uneven inputs": Expansion((1, 74, 14, 15), 184, 20),
    "hardswish": Expansion((1, 16, 14, 14), 96, 24, inner="F.hardswish", outer="F.hardswish"),
    "silu": Expansion((1, 16, 14, 14), 96, 24, inner="F.silu", outer="F.silu"),
    "no activation": Expansion((1, 16, 14, 14), 96, 24, inner="", outer=""),
    "batch": Expansion((3, 16, 24, 24), 240, 24, sum="+ self.a(x)", groups=2),
    "one thread": Expansion((1, 16, 64, 32), 80, 24, threads=1),
    "large": Expansion((4, 16, 72, 64), 128, 24),
    "large, stride": Expansion((4, 16, 73, 64), 128, 19, stride=2),
    "large, residual": Expansion((4, 16, 72, 64), 144, 16, sum="+ x"),
    "large, silu": Expansion((4, 16, 72, 64), 128, 24, inner="F.silu", outer="F.silu"),
    "large, one thread": Expansion((4, 16, 72, 64), 128, 24, threads=1, bias=False),
    "large, odd inputs": Expansion((4, 15, 72, 64), 128, 24),
    "large, two": Expansion((4, 16, 72, 64), 128, outer="F.hardswish"),
    "large, two, five": Expansion(
        (4, 8, 72, 64), 144, window=5, stride=2, padding=2, inner="F.silu", outer="F.silu"
    ),
    "two": Expansion((1, 16, 96, 80), 112),
    "two, stride": Expansion((1, 16, 96, 80), 112, stride=2, inner="F.silu", outer="F.silu"),
    "two, one thread": Expansion((1, 16, 96, 80), 112, inner="F.silu", outer="", threads=1),
    "two, five": Expansion((1, 8, 61, 80), 176, window=5, padding=2, outer="F.silu"),
    "prelu": Expansion((1, 16, 14, 14), 96, 24, inner="self.p", outer="self.q"),
    "prelu, residual": Expansion(
        (1, 24, 29, 15), 144, 24, inner="self.p", outer="self.q", sum="+ x"
    ),
    "prelu, first": Expansion((2, 16, 29, 14), 41, 24, inner="self.p", outer="F.relu", stride=2),
    "prelu, second": Expansion((1, 16, 29, 14), 96, 24, inner="F.silu", outer="self.q"),
    "prelu, two": Expansion((1, 16, 96, 80), 112, inner="self.p", outer="self.q"),
    "prelu, by channels": Expansion((1, 96, 14, 14), 576, inner="self.p", outer="self.q"),
    "large, prelu": Expansion((4, 16, 72, 64), 128, 24, inner="self.p", outer="self.q"),
    "relu behind": Expansion((1, 16, 25, 5), 96, 24, last="F.relu"),
    "relu6 behind a sum": Expansion((1, 24, 14, 14), 576, 24, sum="+ x", last="F.relu6", groups=2),
    "hardswish behind, rows": Expansion((2, 96, 14, 14), 576, 96, last="F.hardswish"),
    "two, odd channels": Expansion((1, 16, 96, 80), 97),
    "two, a few more channels than 64": Expansion((2, 16, 40, 42), 72, outer="F.silu"),
    "two, less than a vector with AVX-512": Expansion((1, 16, 40, 42), 12, stride=2),
    "two, few channels": Expansion((1, 16, 40, 42), 7, own=False),
    "two, batch": Expansion((5, 8, 33, 32), 160, inner="", outer="F.silu"),
    # Threads divide these channels, as weights are many for the pixels.
    "by channels": Expansion((1, 96, 14, 14), 576, 96, inner="", outer=""),
    "by channels, residual": Expansion((1, 96, 14, 14), 576, 96, sum="+ x"),
    "by channels, stride": Expansion(
        (1, 95, 14, 14), 576, 161, stride=2, sum="+ self.b(x)", groups=2
    ),
    "by channels and rows": Expansion((1, 96, 28, 14), 576, 96, sum="+ x", threads=4),
    "by channels, two": Expansion(
        (1, 112, 14, 14), 672, window=5, stride=2, padding=2, inner="F.silu", outer="F.silu"
    ),
    "three for two threads": Expansion((3, 16, 14, 14), 96, 24),
    # Few pixels.
    "few": Expansion((1, 16, 7, 7), 96, 24),
    "few for each of two": Expansion((1, 16, 10, 10), 96, 24),
    "few, two": Expansion((1, 16, 7, 7), 96),
    "few, batch": Expansion((5, 16, 7, 7), 96, 24, sum="+ self.a(x)", groups=2),
    "hardly any": Expansion((9, 16, 6, 6), 96, 24),
    # What stays with oneDNN.
    "odd channels": Expansion((1, 16, 14, 14), 97, 24),
    "a few more channels than 64": Expansion((1, 24, 14, 15), 72, 24, sum="+ x"),
    "a few more channels than 128": Expansion(
        (1, 16, 15, 29), 136, 24, stride=2, window=5, padding=2
    ),
    "gelu": Expansion((2, 24, 40, 41), 96, 24, inner="F.gelu", outer="F.gelu", sum="+ x"),
    "gelu, one": Expansion((1, 24, 40, 41), 96, 20, outer="F.gelu", threads=1),
    "one vector and a bit": Expansion((1, 16, 14, 14), 17, 24, window=5, padding=2),
    "large, other channels": Expansion((4, 16, 72, 64), 138, 24),
    "window": Expansion((1, 16, 14, 14), 96, 24, window=7, padding=3, own=False),
    "prelu, window": Expansion(
        (1, 16, 14, 14), 96, 24, window=7, padding=3, inner="self.p", outer="self.q", own=False
    ),
    "prelu, few channels": Expansion(
        (1, 16, 28, 29), 7, 24, inner="self.p", outer="self.q", own=False
    ),
    "oblong": Expansion((1, 16, 14, 14), 96, 24, window=(3, 5), padding=1, own=False),
    "stride of 3": Expansion((1, 16, 14, 14), 96, 24, stride=3, own=False),
    "other activation": Expansion((1, 16, 14, 14), 96, 24, inner="torch.tanh", own=False),
    "part of the sum": Expansion((1, 24, 14, 14), 96, 24, sum="+ x[:, :1]", own=False),
}


def expansion(case: Expansion) -> nn.Module:
    c = case
    d = nn.Conv2d(
        c.channels, c.channels, c.window, c.stride, c.padding, groups=c.channels, bias=c.bias
    )
    code = f"{c.outer}(self.d({c.inner}(self.c(x))))"
    code = f"self.e({code})" if c.outputs else code
    code = f"{c.sum}{code}" if c.sum.endswith(" ") else f"{code} {c.sum}"
    module = net(
        f"{c.last}({code})",
        c=nn.Conv2d(c.size[1], c.channels, 1, bias=c.bias),
        d=d,
        e=nn.Conv2d(c.channels, max(c.outputs, 1), 1, bias=c.bias),
        a=nn.Conv2d(c.size[1], max(c.outputs, 1), 1),
        b=nn.Conv2d(c.size[1], max(c.outputs, 1), 1, c.stride),
        p=nn.PReLU(c.channels),
        q=nn.PReLU(c.channels),
    )
    with torch.no_grad():
        for slopes in (module.p.weight, module.q.weight):
            slopes.uniform_(-0.5, 1.5)
    return module.eval()


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EXPANSIONS)
def test_expansion(case: str, dtype: torch.dtype) -> None:
    """Two or three convolutions are one group, and one kernel where that is the faster way."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = EXPANSIONS[case]
    m = expansion(c)
    x = torch.randn(c.size)
    torch.set_num_threads(c.threads)
    groups = c.groups if c.own else None
    check(m, [x], groups=groups, dtype=dtype, memory_format=torch.channels_last)
    last = m.to(memory_format=torch.channels_last).to(dtype)
    found = kernels_of(last, x.to(dtype, memory_format=torch.channels_last))
    own = [name for name in found if name.startswith("llga_expansion")]
    pays = c.own and pays_to_expand(c.size[0], math.prod(c.size[2:]), c.threads, dtype)
    activated = not {"F.silu", "F.gelu", "self.p", "self.q"}.isdisjoint((c.inner, c.outer))
    expanded = c.channels * c.size[0] * math.prod(c.size[2:])
    even = c.size[1] % 2 == 0 and c.channels % 2 == 0
    if dtype == torch.bfloat16 and has_matrix_units():
        slow = c.outputs == 0 and not activated  # where oneDNN is as fast
        many = c.stride != 1 or expanded > 2**19
        pays = c.own and even and not (slow and many)
    elif dtype == torch.bfloat16:
        pays = pays and even and has_narrow_products()
    assert len(own) == (pays and has_own_kernels()), found


@pytest.mark.parametrize("channels", [480, 536])
def test_expansion_by_large_weights(channels: int) -> None:
    """Those of Xception's blocks, which expand nothing, leave the caches: products of all rows read
    them once.
    """
    m = expansion(Expansion((1, channels, 10, 10), channels, channels))
    x = torch.randn(1, channels, 10, 10)
    torch.set_num_threads(1)
    check(m, [x], memory_format=torch.channels_last)
    last = m.to(memory_format=torch.channels_last)
    found = kernels_of(last, x.to(memory_format=torch.channels_last))
    own = any(name.startswith("llga_expansion") for name in found)
    assert own == (has_own_kernels() and (has_avx2_kernels() or channels == 480)), found


class Ghost(NamedTuple):
    """What is expanded, and a depthwise convolution of that, one behind the other."""

    size: tuple[int, ...]
    channels: int
    window: int = 3
    inner: str = "F.relu"
    outer: str = "F.relu"
    code: str = "y = INNER(self.c(x))\nreturn torch.cat([y, OUTER(self.d(y))], 1)"
    threads: int = 2
    bias: bool = True
    own: bool = True
    groups: int = 1


GHOSTS = {
    "plain": Ghost((1, 16, 28, 29), 24),
    "less than a vector with AVX-512": Ghost((1, 16, 28, 29), 8),
    "a vector and a half": Ghost((1, 16, 28, 29), 12),
    "no whole vectors": Ghost((2, 40, 14, 14), 100, inner="", outer=""),
    "odd inputs and channels": Ghost((1, 17, 14, 14), 41),
    "five": Ghost((1, 16, 23, 20), 48, window=5, bias=False),
    "by channels": Ghost((1, 160, 7, 7), 480),
    "by channels, activations": Ghost((1, 160, 7, 7), 96, inner="F.silu", outer="F.silu"),
    "a few rows": Ghost((3, 8, 2, 60), 16),
    "batch": Ghost((5, 8, 33, 32), 160, inner="", outer="F.silu"),
    "many threads": Ghost((1, 8, 40, 12), 72, threads=5),
    "one thread": Ghost((1, 16, 96, 80), 112, threads=1, inner="F.hardswish"),
    "prelu": Ghost((1, 16, 28, 29), 24, inner="self.p", outer="self.p", groups=5, own=False),
    # What stays with oneDNN.
    "one pixel": Ghost((2, 8, 1, 1), 16, own=False),
    "few channels": Ghost((1, 16, 28, 29), 7, own=False),
    "window": Ghost((1, 16, 28, 29), 24, window=7, own=False),
    "other activation": Ghost((1, 16, 28, 29), 24, inner="torch.tanh", own=False),
    "other way round": Ghost(
        (1, 16, 28, 29),
        24,
        code="y = INNER(self.c(x))\nreturn torch.cat([OUTER(self.d(y)), y], 1)",
        own=False,
        groups=3,
    ),
    "with another": Ghost(
        (1, 24, 28, 29),
        24,
        code="y = INNER(self.c(x))\nreturn torch.cat([y, OUTER(self.d(y)), x], 1)",
        own=False,
        groups=3,
    ),
    "read by others": Ghost(
        (1, 16, 28, 29),
        24,
        code="y = INNER(self.c(x))\nreturn torch.cat([y, OUTER(self.d(y))], 1), y",
        own=False,
        groups=3,
    ),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", GHOSTS)
def test_ghost(case: str, dtype: torch.dtype) -> None:
    """As in GhostNet."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = GHOSTS[case]
    torch.set_num_threads(c.threads)
    d = nn.Conv2d(
        c.channels, c.channels, c.window, 1, c.window // 2, groups=c.channels, bias=c.bias
    )
    m = net(
        c.code.replace("INNER", c.inner).replace("OUTER", c.outer),
        c=nn.Conv2d(c.size[1], c.channels, 1, bias=c.bias),
        d=d,
        p=nn.PReLU(c.channels),
    ).eval()
    x = torch.randn(c.size)
    check(m, [x], groups=c.groups, dtype=dtype, memory_format=torch.channels_last)
    check(m, [x], dtype=dtype)
    last = m.to(memory_format=torch.channels_last).to(dtype)
    found = kernels_of(last, x.to(dtype, memory_format=torch.channels_last))
    even = c.size[1] % 2 == 0 and c.channels % 2 == 0 and has_narrow_products()
    own = c.own and has_own_kernels() and (dtype == torch.float32 or even)
    if own:
        assert len(found) == 1
    assert any(name.startswith("llga_expansion") for name in found) == own, found


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "c", "d"])
def test_ghost_of_special_values(where: str, value: float) -> None:
    m = net(
        "y = self.c(x)\nreturn torch.cat([y, self.d(y)], 1)",
        c=nn.Conv2d(16, 24, 1),
        d=nn.Conv2d(24, 24, 3, 1, 1, groups=24),
    ).eval()
    x = torch.randn(1, 16, 20, 21).to(memory_format=torch.channels_last)
    if where == "x":
        x[0, 1, 19, 0] = value
    else:
        getattr(m, where).weight.data.view(-1)[7] = value
    with torch.no_grad():
        script = to_script(m.to(memory_format=torch.channels_last), [x])
        for _ in range(3):
            assert_same(script(x), m(x))


SUMMED = {
    # Under autocast: code, and whether our kernel is all that runs.
    "cast": ("EXPANSION.float()", True),
    "sum": ("x + EXPANSION", True),
    "other side": ("EXPANSION + x", True),
    "broadcast": ("EXPANSION + x[:, :1]", False),
    "difference": ("x - EXPANSION", False),
    "pointwise": ("x + self.p(x)", True),
    "pointwise, of an activation": ("x + F.relu(self.p(x))", False),
    "in place": ("y = self.p(x)\ny += x\nreturn y", False),
    "in place, behind another op": ("y = self.p(x)\nz = x[:, :24]\ny += z\nreturn y", False),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("frozen_inside", [False, True], ids=["frozen outside", "frozen inside"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("case", SUMMED)
def test_sum_in_float32_behind_bfloat16(
    case: str, layout: torch.memory_format, frozen_inside: bool
) -> None:
    """Of a residual in float32 and a block under autocast, which nothing rounds before it then."""
    if not (has_narrow_products() and fuses(torch.bfloat16)):
        pytest.skip("no products of bfloat16 on this processor")
    code, alone = SUMMED[case]
    m = net(
        code.replace("EXPANSION", "self.e(F.gelu(self.d(F.gelu(self.c(x)))))"),
        c=nn.Conv2d(24, 96, 1),
        d=nn.Conv2d(96, 96, 3, 1, 1, groups=96),
        e=nn.Conv2d(96, 24, 1),
        p=nn.Conv2d(24, 24, 1),
    ).eval()
    x = torch.randn(2, 24, 40, 41).to(memory_format=layout)
    before = llga_fuser.cache_info().fallbacks
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with torch.no_grad():
        with autocast:
            traced, expected = torch.jit.trace(m, x, check_trace=False), m(x)
            script = torch.jit.freeze(traced) if frozen_inside else traced
        script = script if frozen_inside else torch.jit.freeze(script)
        for _ in range(4):
            assert_same(script(x), expected, tol=TOLERANCES[torch.bfloat16])
        if case != "in place, behind another op":  # a part of x may be of any data type
            assert llga_fuser.cache_info().fallbacks == before
        y = x.clone()
        y[1, 5, 20, 3], y[0, 0, 0, 0] = math.inf, math.nan
        with autocast:
            special = m(y)
        assert_same(script(y), special, tol=TOLERANCES[torch.bfloat16])
        groups = llga_fuser.report(script, x, rounds=1).groups
    found = [p.implementation for group in groups for p in group.primitives]
    if alone and layout == torch.channels_last:
        isa = "amx" if has_matrix_units() else "avx512"
        kind = "gemm" if "pointwise" in case else "expansion"
        assert found == [f"llga_{kind}:{isa}_bf16"], found


class First(NamedTuple):
    """The first convolution of a network, a depthwise one and maybe a projection."""

    size: tuple[int, ...]
    channels: int
    outputs: int = 0  # of the projection; 0: there is none
    window: int = 3
    stride: int = 2
    padding: int = 1
    code: str = "F.relu6(self.d(F.relu6(self.c(x))))"
    threads: int = 2
    bias: bool = True
    own: bool = True


FIRST = {
    "plain": First((1, 3, 57, 64), 32, 16),
    "silu": First((1, 3, 64, 61), 32, code="F.silu(self.d(F.silu(self.c(x))))"),
    "batch": First((3, 4, 24, 25), 48, 24, stride=1),
    "one thread": First((1, 3, 41, 40), 96, 24, threads=1),
    "no padding": First((1, 2, 40, 41), 40, 19, padding=0, bias=False),
    "more padding": First((2, 3, 20, 33), 32, padding=3),
    "window of two": First((1, 3, 30, 31), 16, 8, window=2),
    "many threads": First((1, 3, 112, 60), 64, 16, threads=5),
    "odd channels": First((1, 3, 57, 64), 33),
    "few channels": First((1, 3, 57, 64), 7, own=False),
    "large window": First((1, 3, 57, 64), 32, 16, window=5, own=False),
    "five planes": First((1, 5, 57, 64), 32, 16, own=False),
    "few pixels": First((1, 3, 16, 16), 32, 16),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps"])
@pytest.mark.parametrize("case", FIRST)
def test_first_convolutions(case: str, layout: str) -> None:
    """Like a block of a MobileNet, whatever the order of the image."""
    c = FIRST[case]
    torch.set_num_threads(c.threads)
    code = f"self.e({c.code})" if c.outputs else c.code
    m = net(
        f"self.f({code})",
        c=nn.Conv2d(c.size[1], c.channels, c.window, c.stride, c.padding, bias=c.bias),
        d=nn.Conv2d(c.channels, c.channels, 3, 1, 1, groups=c.channels, bias=c.bias),
        e=nn.Conv2d(c.channels, max(c.outputs, 1), 1, bias=c.bias),
        f=nn.Conv2d(c.outputs or c.channels, 8, 3),
    ).eval()
    x = images(c.size, layout)
    check(m, [x], groups=2 if c.own else None, fused="_convolution")
    found = kernels_of(m, x)
    with torch.no_grad():
        pixels = math.prod(m.c(x).shape[2:])
    pays = c.own and pays_to_expand(c.size[0], pixels, c.threads, torch.float32)
    own = [name for name in found if name.startswith("llga_expansion")]
    assert len(own) == (pays and has_own_kernels()), found
    if fuses(torch.bfloat16):
        check(m, [x], dtype=torch.bfloat16)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["x", "c", "d", "e"])
def test_first_convolutions_of_special_values(where: str, value: float) -> None:
    """What is padded are zeros: times an infinity they are NaN, as in eager."""
    c = nn.Conv2d(3, 32, 3, 2, 1)
    d = nn.Conv2d(32, 32, 3, 1, 1, groups=32)
    m = net(
        "self.f(self.e(self.d(self.c(x))))",
        c=c,
        d=d,
        e=nn.Conv2d(32, 16, 1),
        f=nn.Conv2d(16, 8, 3),
    ).eval()
    x = torch.randn(1, 3, 44, 40)
    if where == "x":
        x[0, 1, 43, 0] = value
    else:
        getattr(m, where).weight.data.view(-1)[7] = value
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(3):
            assert_same(script(x), m(x))


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", ["plain", "stride", "residual", "prelu", "two", "two, five"])
def test_expansion_of_contiguous_images(case: str) -> None:
    """They are not channels last, and so not for the kernel: oneDNN's, one after the other."""
    c = EXPANSIONS[case]
    check(expansion(c), [torch.randn(c.size)], groups=1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("activation", ["F.relu6", "F.silu", "F.hardswish", "self.p", ""])
def test_expansion_of_special_values(activation: str, value: float, threads: int) -> None:
    c = EXPANSIONS["batch"]._replace(inner=activation, outer=activation, sum="+ self.a(x)")
    m = expansion(c).to(memory_format=torch.channels_last)
    x = torch.randn(c.size).to(memory_format=torch.channels_last)
    check_second_image(m, x, value, threads)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_expansion_of_subnormal_numbers(dtype: torch.dtype) -> None:
    """With matrix units they are zeros in a block of bfloat16, and nowhere else."""
    c = EXPANSIONS["batch"]
    m = expansion(c).to(memory_format=torch.channels_last, dtype=dtype)
    with torch.no_grad():
        for name in "abcde":
            getattr(m, name).bias.zero_()
    x = (torch.randn(c.size) * 1e-38).to(dtype).to(memory_format=torch.channels_last)
    with torch.no_grad():
        script = to_script(m, [x])
        for _ in range(3):
            torch.testing.assert_close(script(x), m(x), rtol=0, atol=1e-36)
    # All threads are as they were.
    assert ((torch.full((1 << 18,), 1e-38) * 0.5) > 0).all()


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", ["no activation", "by channels"])
def test_expansion_with_special_weights(case: str) -> None:
    """Of what is infinite, padding makes NaN. (With activations, oneDNN makes numbers of NaN.)"""
    c = EXPANSIONS[case]
    for value in (math.inf, math.nan):
        for name in "cde":
            m = expansion(c).to(memory_format=torch.channels_last)
            with torch.no_grad():
                getattr(m, name).weight[2, 0, 0, 0] = value
            x = torch.randn(c.size).to(memory_format=torch.channels_last)
            with torch.no_grad():
                script = to_script(m, [x])
                for _ in range(3):
                    assert_same(script(x), m(x))


@pytest.mark.usefixtures("all_threads")
def test_expansion_beside_others() -> None:
    """What is expanded has another reader, or what of it is projected; a weight is no constant."""
    torch.set_num_threads(2)
    members = {
        "c": nn.Conv2d(16, 96, 1),
        "d": nn.Conv2d(96, 96, 3, padding=1, groups=96),
        "e": nn.Conv2d(96, 16, 1),
    }
    for code in (
        "y = F.relu6(self.c(x))\nreturn self.e(F.relu6(self.d(y))), y",
        "y = F.relu6(self.c(x))\nz = F.relu6(self.d(y))\nreturn self.e(z), z",
        "y = F.relu6(self.c(x))\nreturn self.e(F.relu6(self.d(y))) + self.e(y)",
        "y = self.c(x)\nreturn self.e(F.relu6(self.d(F.relu6(y)))) + self.e(y)",
        "y = self.e(F.relu6(self.d(F.relu6(self.c(x)))))\nreturn y + y",
        "y = self.e(F.relu6(self.d(F.relu6(self.c(x)))))\nz = y + x\nx.mul_(2)\nreturn z",
        "y = F.relu6(self.c(x)) + x[:, :1]\nreturn self.e(F.relu6(self.d(y)))",
        "y = self.c(x)\nreturn self.e(F.conv2d(y, self.d.weight * 2, None, 1, 1, 1, 96))",
    ):
        m = net(code, **members).eval()
        check(m, [torch.randn(1, 16, 15, 14)], memory_format=torch.channels_last)
        check(m, [torch.randn(1, 16, 15, 14)])


@pytest.mark.usefixtures("all_threads")
def test_expansion_of_changing_sizes() -> None:
    """One set of weights for all sizes, and for other numbers of threads."""
    torch.set_num_threads(2)
    m = expansion(EXPANSIONS["residual"]).to(memory_format=torch.channels_last)
    gc.collect()
    with torch.no_grad():
        script = to_script(m, [torch.randn(1, 24, 14, 15)])
        packed = set()
        for size in ((1, 24, 14, 15), (2, 24, 40, 30), (1, 24, 33, 20), (1, 24, 14, 15)):
            y = torch.randn(size).to(memory_format=torch.channels_last)
            for _ in range(3):
                assert_same(script(y), m(y))
            packed.add(llga_fuser.cache_info().packed_bytes)
    assert len(packed) <= 2  # the first call has no plan yet


class Excitation(NamedTuple):
    """A squeeze and excitation: size of the data, hidden channels, and what it does."""

    size: tuple[int, ...]
    hidden: int
    mean: str = "F.adaptive_avg_pool2d(y, 1)"
    inner: str = "torch.relu"
    gate: str = "torch.sigmoid"
    product: str = "y * s"
    bias: bool = True
    own: bool = True


EXCITATION = {
    "plain": Excitation((1, 32, 9, 7), 8),
    "mean": Excitation((1, 48, 9, 7), 17, mean="y.mean([2, 3], keepdim=True)"),
    "hard": Excitation((1, 72, 28, 28), 24, gate="F.hardsigmoid", product="s * y"),
    "silu": Excitation((1, 96, 56, 56), 4, inner="F.silu"),
    "no_bias": Excitation((2, 24, 5, 3), 31, inner="F.silu", gate="F.hardsigmoid", bias=False),
    "odd": Excitation((3, 13, 6, 5), 3),
    "wide": Excitation((1, 700, 7, 7), 175),
    "batch": Excitation((5, 40, 8, 9), 10),
    "mean_of_rows": Excitation((1, 32, 9, 7), 8, mean="y.mean([2], keepdim=True)", own=False),
    "squared": Excitation((1, 32, 9, 7), 8, product="y * s * s", own=False),
    "other_inner": Excitation((1, 32, 9, 7), 8, inner="torch.tanh", own=False),
    "other_gate": Excitation((1, 32, 9, 7), 8, gate="torch.tanh", own=False),
}


def excitation(case: Excitation) -> nn.Module:
    channels = case.size[1]
    module = net(
        f"y = self.a(x)\ns = {case.mean}\ns = {case.gate}(self.d({case.inner}(self.c(s))))\n"
        f"return self.e({case.product})",
        a=nn.Conv2d(4, channels, 1),
        c=nn.Conv2d(channels, case.hidden, 1, bias=case.bias),
        d=nn.Conv2d(case.hidden, channels, 1, bias=case.bias),
        e=nn.Conv2d(channels, 4, 1),
    )
    return module.eval()


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EXCITATION)
def test_squeeze_and_excitation(case: str, dtype: torch.dtype) -> None:
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    c = EXCITATION[case]
    m = excitation(c).to(dtype)
    x = torch.randn(c.size[0], 4, *c.size[2:]).to(dtype)
    check(m, [x], groups=3 if c.own else None, dtype=dtype)
    own = [name for name in kernels_of(m, x) if name == "llga_excitation"]
    assert len(own) == (c.own and has_own_kernels())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("gate", ["torch.sigmoid", "F.hardsigmoid"])
def test_squeeze_and_excitation_of_special_values(gate: str, value: float, threads: int) -> None:
    m = excitation(EXCITATION["hard"]._replace(gate=gate))
    m.a = one_by_one(72)
    x = torch.randn(2, 72, 28, 28)
    check_second_image(m, x, value, threads)


@pytest.mark.usefixtures("all_threads")
def test_squeeze_and_excitation_beside_others() -> None:
    """Its data has another reader, in front of it or behind, or is the caller's own."""
    members = {name: nn.Conv2d(16, 16, 1) for name in "acde"}
    gate = "torch.sigmoid(self.d(torch.relu(self.c(F.adaptive_avg_pool2d(y, 1)))))"
    for code in (
        f"y = self.a(x)\nz = y * {gate}\nreturn self.e(z) + y",
        f"y = self.a(x)\nw = self.e(y)\nz = y * {gate}\nreturn z + w",
        f"y = self.a(x)\nz = y * {gate}\nreturn z, y",
        f"y = x\nreturn y * {gate}",
        f"y = self.a(x)\nz = y * {gate}\ny.mul_(2)\nreturn z + y",
    ):
        m = net(code, **members)
        x = torch.randn(2, 16, 12, 11).to(memory_format=torch.channels_last)
        before = x.clone()
        check(m, [x])
        assert torch.equal(x, before)
