"""The entry suite: every op and pattern the fuser takes, and what it has to leave alone.

A row of a table below is one op or pattern; each runs traced, scripted, channels last and in bf16
(both ways people get it), and is compared with eager on every call. To add an op, add a row.

    python test/test_jit_llga_fuser.py -k test_conv2d_eltwise

also runs the models marked `slow`, which a plain `pytest` leaves out.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llga_fuser
from llga_fuser import _models
from models.small_transformers import ARCHITECTURES
from util import (
    GROUP,
    TOLERANCES,
    Tolerance,
    assert_same,
    autocast_bf16,
    check,
    check_model,
    expect,
    fused_graph,
    fuses,
    has_avx2_kernels,
    has_matrix_units,
    has_narrow_products,
    has_own_attention,
    has_own_kernels,
    leaves,
    net,
    onednn_version,
    randomize,
    restored,
    to_script,
    twin,
    walk,
)

pytestmark = pytest.mark.usefixtures("fuser")


@pytest.fixture
def all_threads() -> None:
    """Asked for by tests that run with as many threads as torch takes by itself."""


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for the others: on a busy machine two threads wait for each other, op by op."""
    with restored(torch.get_num_threads, torch.set_num_threads):
        if "all_threads" not in request.fixturenames:
            torch.set_num_threads(1)
        yield


MODES: dict[str, dict[str, Any]] = {
    "traced": {},
    "scripted": {"scripted": True},
    "channels_last": {"memory_format": torch.channels_last},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": True},
}
PLAIN = ("traced", "scripted", "channels_last", "bf16")  # autocast adds nothing to a lone op
Shape = tuple[int, ...]
Make = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A row: what runs, on what, and what has to go in."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Sequence[Shape | Make]
    fused: str = ""
    groups: int | None = None
    outside: str = ""
    modes: Sequence[str] = PLAIN
    tol: Tolerance | None = None
    fallbacks: bool = False  # may run in the interpreter
    numbers_only: Sequence[str] = ()  # modes in which going in is not asked for
    marks: Sequence[Any] = field(default=())

    def run(self, mode: str) -> None:
        torch.manual_seed(0)
        module = randomize(self.build())
        inputs = [torch.randn(i) if isinstance(i, tuple) else i() for i in self.inputs]
        wanted = {"fused": self.fused, "groups": self.groups, "outside": self.outside}
        if mode in self.numbers_only:
            wanted = {}
        check(module, inputs, tol=self.tol, fallbacks=self.fallbacks, **wanted, **MODES[mode])


def table(cases: Iterable[Case]) -> Any:
    """Parametrises a test with the rows of a table, each in all its modes."""
    params = []
    for case in cases:
        ranks = [len(i) for i in case.inputs if isinstance(i, tuple)]
        for mode in case.modes:
            if mode == "channels_last" and not any(r in (4, 5) for r in ranks):
                continue
            params.append(pytest.param(case, mode, id=f"{case.name}-{mode}", marks=case.marks))
    return pytest.mark.parametrize(("case", "mode"), params)


def positive(*shape: int) -> Make:
    return lambda: torch.rand(shape) + 0.2


def quarters(*shape: int) -> Make:
    """Exact in every dtype and order of summation, and never at a tie of rounding."""
    return lambda: torch.randint(-8, 8, shape) * 1.0 + 0.25


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


# ---------------------------------------------------------------------------------- convolution

CONV = (None, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONV_TRANSPOSE = (None, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SIZES = (None, (2, 8, 15), (2, 8, 15, 11), (2, 8, 7, 9, 6))

CONV_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2},
    "groups": {"groups": 4},
    "depthwise": {"groups": 8},
    "depthwise_multiplier": {"groups": 8, "out_channels": 24},
    "pointwise": {"kernel_size": 1},
    "all": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False},
    "same": {"padding": "same"},
    "same_dilation": {"padding": "same", "dilation": 2},
    "same_even_kernel": {"padding": "same", "kernel_size": 4},  # pads more on one side
    "valid": {"padding": "valid"},
}
CONV_TRANSPOSE_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2},
    "groups": {"groups": 4},
    "depthwise": {"groups": 8, "out_channels": 8},
    "output_padding": {"stride": 2, "output_padding": 1},
    "all": {"stride": 3, "padding": 1, "dilation": 2, "groups": 2, "output_padding": 2},
}


def conv(layers: Sequence[Any], dim: int, options: dict[str, Any]) -> nn.Module:
    return layers[dim](**{"in_channels": 8, "out_channels": 16, "kernel_size": 3, **options})


@table(
    Case(
        f"conv{dim}d_{name}",
        lambda dim=dim, options=options: conv(CONV, dim, options),
        [SIZES[dim]],
        fused="conv",
        # An even kernel needs a pad op of its own, which stays outside.
        groups=None if name == "same_even_kernel" else 1,
        modes=(*PLAIN, "autocast"),
    )
    for dim in (1, 2, 3)
    for name, options in CONV_OPTIONS.items()
)
def test_conv(case: Case, mode: str) -> None:
    case.run(mode)


@table(
    Case(
        f"conv_transpose{dim}d_{name}",
        lambda dim=dim, options=options: conv(CONV_TRANSPOSE, dim, options),
        [SIZES[dim]],
        fused="conv",
        groups=1,
    )
    for dim in (1, 2, 3)
    for name, options in CONV_TRANSPOSE_OPTIONS.items()
)
def test_conv_transpose(case: Case, mode: str) -> None:
    case.run(mode)


@table(
    [
        Case(
            "asymmetric",
            lambda: nn.Conv2d(8, 16, (3, 5), (2, 1), (0, 2), (1, 2)),
            [(2, 8, 15, 19)],
            fused="conv",
            groups=1,
        ),
        Case(
            "no_batch",
            lambda: nn.Conv2d(8, 16, 3),
            [(8, 9, 9)],
            modes=("traced", "scripted", "bf16"),
        ),
        Case(
            "weight_is_input",
            lambda: net("F.conv2d(x, w, b, padding=1)", "x, w, b"),
            [(2, 8, 9, 9), (16, 8, 3, 3), (16,)],
            fused="conv",
            groups=1,
        ),
        Case(
            "reflect_padding",
            lambda: nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect"),
            [(2, 8, 9, 9)],
            fused="conv",
            groups=1,
        ),
        Case(
            "transpose_output_size",
            lambda: net("self.c(x, [16, 18])", c=nn.ConvTranspose2d(8, 4, 3, 2)),
            [(1, 8, 7, 8)],
            fused="conv",
            modes=("traced",),
        ),
        Case("one_pixel", lambda: nn.Conv2d(8, 16, 1), [(1, 8, 1, 1)], fused="conv", groups=1),
        Case(
            "one_channel",
            lambda: nn.Conv2d(1, 1, 3, padding=1),
            [(2, 1, 8, 8)],
            fused="conv",
            groups=1,
        ),
    ]
)
def test_conv_special(case: Case, mode: str) -> None:
    case.run(mode)


# -------------------------------------------------------------------------------------- pooling

POOL_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": 1},
    "padding": {"stride": 2, "padding": 1},
    "ceil": {"stride": 2, "ceil_mode": True},
    "ceil_padding": {"stride": 2, "padding": 1, "ceil_mode": True},
}
MAX_OPTIONS = {**POOL_OPTIONS, "dilation": {"stride": 1, "dilation": 2}}
AVG_OPTIONS = {
    **POOL_OPTIONS,
    "exclude_pad": {"stride": 2, "padding": 1, "count_include_pad": False},
    "ceil_exclude_pad": {"stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
}
POOLS = {
    "max": (None, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    "avg": (None, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
}


@table(
    Case(
        f"{kind}_pool{dim}d_{name}",
        lambda kind=kind, dim=dim, options=options: POOLS[kind][dim](3, **options),
        # Sizes for which ceil_mode makes a difference.
        [(2, 8, 14, 12, 10)[: dim + 2]],
        # oneDNN cannot round up and count the padding at once (aten does not count what it rounds).
        **(
            {"outside": f"avg_pool{dim}d"}
            if kind == "avg" and name in ("ceil", "ceil_padding")
            else {"fused": f"{kind}_pool{dim}d", "groups": 1}
        ),
        # aten has no avg_pool3d for bf16.
        modes=PLAIN[:-1] if (kind, dim) == ("avg", 3) else PLAIN,
    )
    for kind, kinds in (("max", MAX_OPTIONS), ("avg", AVG_OPTIONS))
    for dim in (1, 2, 3)
    for name, options in kinds.items()
)
def test_pool(case: Case, mode: str) -> None:
    case.run(mode)


ADAPTIVE = (None, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


@table(
    [
        *(
            Case(
                f"adaptive_avg_pool{dim}d_to_{size}",
                lambda dim=dim, size=size: nn.Sequential(CONV[dim](8, 8, 1), ADAPTIVE[dim](size)),
                [(2, 8, 6, 9, 12)[: dim + 2]],
                fused=f"conv adaptive_avg_pool{dim}d",
            )
            for dim in (1, 2, 3)
            for size in (1, 3)
        ),
        *(
            Case(
                f"adaptive_avg_pool{dim}d_uneven",
                lambda dim=dim: nn.Sequential(CONV[dim](8, 8, 1), ADAPTIVE[dim](4)),
                [(2, 8, 7, 9, 10)[: dim + 2]],
                fused="conv",
                # The sizes are only known at run time: a group that took it falls back.
                fallbacks=True,
            )
            for dim in (1, 2, 3)
        ),
        Case(
            "adaptive_avg_pool2d_one_dim",
            lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d((None, 1))),
            [(2, 8, 6, 9)],
            fused="conv",
            modes=("traced", "channels_last", "bf16"),
        ),
        Case(
            "adaptive_max_pool2d",
            lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.AdaptiveMaxPool2d(3)),
            [(2, 8, 9, 9)],
            fused="conv",
            outside="adaptive_max_pool2d",
        ),
        Case(
            "avg_pool2d_divisor",
            lambda: nn.AvgPool2d(3, divisor_override=5),
            [(2, 8, 9, 9)],
            outside="avg_pool2d",
        ),
        Case(
            "max_pool2d_indices",
            lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(2, return_indices=True)),
            [(2, 8, 9, 9)],
            fused="conv",
            outside="max_pool2d_with_indices",
            # A value that rounds another way can move the index: exact numbers only.
            modes=("traced", "scripted"),
        ),
        Case(
            "max_pool2d_indices_unused",
            lambda: net("F.max_pool2d_with_indices(self.c(x), 2)[0]", c=nn.Conv2d(8, 8, 1)),
            [(2, 8, 9, 9)],
            fused="conv",
            modes=("traced", "channels_last", "bf16"),
        ),
        Case("max_pool2d_no_batch", lambda: nn.MaxPool2d(2), [(8, 9, 9)]),
    ]
)
def test_pool_special(case: Case, mode: str) -> None:
    case.run(mode)


# ------------------------------------------------------------------------------- linear, matmul


@table(
    Case(
        f"linear_{len(shape)}d_{'bias' if bias else 'no_bias'}",
        lambda bias=bias: nn.Linear(16, 24, bias=bias),
        [shape],
        # One dimension is less than oneDNN takes.
        **({"fused": "linear", "groups": 1} if len(shape) > 1 else {}),
        modes=("traced", "scripted", "bf16", "autocast"),
    )
    for shape in ((16,), (5, 16), (3, 5, 16), (2, 3, 5, 16))
    for bias in (True, False)
)
def test_linear(case: Case, mode: str) -> None:
    case.run(mode)


MATMULS: tuple[tuple[Shape, Shape], ...] = (
    ((6,), (6,)),
    ((6,), (6, 5)),
    ((4, 6), (6,)),
    ((4, 6), (6, 5)),
    ((6,), (3, 6, 5)),
    ((3, 4, 6), (6,)),
    ((4, 6), (3, 6, 5)),
    ((3, 4, 6), (6, 5)),
    ((3, 4, 6), (3, 6, 5)),
    ((1, 4, 6), (3, 6, 5)),
    ((3, 4, 6), (1, 6, 5)),
    ((2, 3, 4, 6), (6,)),
    ((6,), (2, 3, 6, 5)),
    ((2, 3, 4, 6), (6, 5)),
    ((4, 6), (2, 3, 6, 5)),
    ((2, 3, 4, 6), (3, 6, 5)),
    ((3, 4, 6), (2, 3, 6, 5)),
    ((2, 3, 4, 6), (2, 3, 6, 5)),
    ((2, 1, 4, 6), (1, 3, 6, 5)),
    ((2, 2, 3, 4, 6), (2, 2, 3, 6, 5)),
)


@table(
    Case(
        f"matmul_{'x'.join(map(str, a))}_{'x'.join(map(str, b))}",
        lambda: net("torch.matmul(x, y)", "x, y"),
        [a, b],
        # A product without dimensions is left to aten.
        **({"fused": "matmul", "groups": 1} if len(a) + len(b) > 2 else {}),
        modes=("traced", "scripted", "bf16"),
    )
    for a, b in MATMULS
)
def test_matmul(case: Case, mode: str) -> None:
    case.run(mode)


@table(
    [
        *(
            Case(
                f"addmm_beta_{beta}_alpha_{alpha}_{'x'.join(map(str, shape))}",
                lambda beta=beta, alpha=alpha: net(
                    f"torch.addmm(x, y, z, beta={beta}, alpha={alpha})", "x, y, z"
                ),
                [shape, (4, 6), (6, 5)],
                # Scaling both sides takes more than one partition.
                fused="addmm" if beta in (0, 1) else "",
                modes=("traced", "scripted", "bf16"),
            )
            for beta, alpha in ((1, 1), (2, 3), (0.5, 1.5), (1, 0.5), (0, 1), (1, 0))
            for shape in ((5,), (4, 5), (1, 5), (4, 1), ())
        ),
        *(
            Case(
                f"baddbmm_beta_{beta}_alpha_{alpha}",
                lambda beta=beta, alpha=alpha: net(
                    f"torch.baddbmm(x, y, z, beta={beta}, alpha={alpha})", "x, y, z"
                ),
                [(3, 4, 5), (3, 4, 6), (3, 6, 5)],
                fused="baddbmm" if beta in (0, 1) else "",
                modes=("traced", "scripted", "bf16"),
            )
            for beta, alpha in ((1, 1), (2, 3), (0.5, 1.5), (0, 1))
        ),
        Case(
            "addmm_beta_0_ignores_nan",
            lambda: net("torch.addmm(x, y, z, beta=0)", "x, y, z"),
            [lambda: torch.full((4, 5), torch.nan), (4, 6), (6, 5)],
            modes=("traced", "scripted", "bf16"),
        ),
        Case("mm", lambda: net("torch.mm(x, y)", "x, y"), [(4, 6), (6, 5)], fused="mm", groups=1),
        Case(
            "bmm",
            lambda: net("torch.bmm(x, y)", "x, y"),
            [(3, 4, 6), (3, 6, 5)],
            fused="bmm",
            groups=1,
        ),
        Case(
            "transposed_right",
            lambda: net("torch.matmul(x, y.transpose(-1, -2))", "x, y"),
            [(2, 3, 4, 6), (2, 3, 5, 6)],
            fused="matmul",
            groups=1,
        ),
        Case(
            "transposed_left",
            lambda: net("torch.matmul(x.t(), y)", "x, y"),
            [(6, 4), (6, 5)],
            fused="matmul",
            groups=1,
        ),
        Case(
            "constant_right",
            lambda: net("torch.matmul(x, self.w)", w=torch.randn(6, 5)),
            [(2, 4, 6)],
            fused="matmul",
            groups=1,
        ),
        Case(
            "linear_weight_is_input",
            lambda: net("F.linear(x, y, z)", "x, y, z"),
            [(4, 6), (5, 6), (5,)],
            fused="linear",
            groups=1,
        ),
        Case(
            "einsum",
            lambda: net("torch.einsum('bij,bjk->bik', x, y)", "x, y"),
            [(3, 4, 6), (3, 6, 5)],
            modes=("traced", "scripted", "bf16"),
            fused="einsum",
        ),
        Case(
            "einsum_of_transposed",
            lambda: net("torch.einsum('kib,bjk->jib', x, y)", "x, y"),
            [(6, 4, 3), (3, 5, 6)],
            fused="einsum",
        ),
        Case(
            "einsum_with_ellipsis",
            lambda: net("torch.einsum('...ij,...kj->...ik', x, y)", "x, y"),
            [(2, 3, 4, 6), (3, 5, 6)],
            fused="einsum",
        ),
        Case(
            "einsum_that_repeats_a_number",
            lambda: net("torch.einsum('bij,bjk->bik', x, y).relu()", "x, y"),
            [(3, 4, 1), (3, 6, 5)],
        ),
        Case(
            "einsum_of_vectors", lambda: net("torch.einsum('i,j->ij', x, y)", "x, y"), [(4,), (5,)]
        ),
        Case(
            "einsum_over_two",
            lambda: net("torch.einsum('bijk,bjkl->bil', x, y)", "x, y"),
            [(2, 3, 4, 5), (2, 4, 5, 6)],
        ),
        Case(
            "einsum_of_a_diagonal",
            lambda: net("torch.einsum('bii,bij->bij', x, y)", "x, y"),
            [(2, 4, 4), (2, 4, 5)],
        ),
        Case(
            "einsum_with_a_sum",
            lambda: net("torch.einsum('bij,bjk->bk', x, y)", "x, y"),
            [(2, 3, 4), (2, 4, 5)],
        ),
    ]
)
def test_matmul_family(case: Case, mode: str) -> None:
    case.run(mode)


# ------------------------------------------------------------------------------------------ norm

NORMS = {
    "batch_norm1d_2d": (lambda: nn.BatchNorm1d(8), (4, 8)),
    "batch_norm1d": (lambda: nn.BatchNorm1d(8), (4, 8, 5)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(8), (2, 8, 5, 7)),
    "batch_norm3d": (lambda: nn.BatchNorm3d(8), (2, 8, 3, 5, 4)),
    "batch_norm2d_eps": (lambda: nn.BatchNorm2d(8, eps=0.1), (2, 8, 5, 7)),
    "batch_norm2d_no_affine": (lambda: nn.BatchNorm2d(8, affine=False), (2, 8, 5, 7)),
    "layer_norm_2d": (lambda: nn.LayerNorm(16), (5, 16)),
    "layer_norm_3d": (lambda: nn.LayerNorm(16), (2, 5, 16)),
    "layer_norm_4d": (lambda: nn.LayerNorm(16), (2, 3, 5, 16)),
    "layer_norm_5d": (lambda: nn.LayerNorm(16), (2, 3, 2, 5, 16)),
    "layer_norm_eps": (lambda: nn.LayerNorm(16, eps=0.1), (2, 5, 16)),
    "layer_norm_no_affine": (lambda: nn.LayerNorm(16, elementwise_affine=False), (2, 5, 16)),
    "layer_norm_no_bias": (lambda: nn.LayerNorm(16, bias=False), (2, 5, 16)),
    "layer_norm_two_dims": (lambda: nn.LayerNorm((5, 16)), (2, 3, 5, 16)),
    "layer_norm_all_dims": (lambda: nn.LayerNorm((3, 5, 16)), (3, 5, 16)),
    "layer_norm_1d": (lambda: nn.LayerNorm(16), (16,)),
}
# Ranks and forms that oneDNN has no op for.
NORM_NUMBERS_ONLY = ("layer_norm_1d", "layer_norm_all_dims", "layer_norm_two_dims")


@table(
    [
        *(
            Case(
                name,
                build,
                [shape],
                fused="" if name in NORM_NUMBERS_ONLY else f"{name[:10]}",
                modes=(*PLAIN, "autocast"),
            )
            for name, (build, shape) in NORMS.items()
        ),
        Case(
            "batch_norm2d_own_statistics",
            lambda: nn.BatchNorm2d(8, track_running_stats=False),
            [(2, 8, 5, 7)],
            outside="batch_norm",
        ),
        *(
            Case(
                f"group_norm_{groups}_{'affine' if affine else 'no_affine'}",
                lambda groups=groups, affine=affine: nn.GroupNorm(groups, 8, affine=affine),
                [(2, 8, 5, 7)],
                # oneDNN 3.6 was the first with the op.
                **({"fused": "group_norm"} if affine and onednn_version() >= (3, 6) else {}),
            )
            for groups in (1, 4, 8)
            for affine in (True, False)
        ),
        Case("instance_norm", lambda: nn.InstanceNorm2d(8, affine=True), [(2, 8, 5, 7)]),
        Case("rms_norm", lambda: nn.RMSNorm(16), [(2, 5, 16)], modes=("traced", "bf16")),
    ]
)
def test_norm(case: Case, mode: str) -> None:
    case.run(mode)


# ---------------------------------------------------------------------------------------- binary

# {0} is a convolution's result, {1} the other operand. A scaled other operand ("") is an op of its
# own that nothing fuses, and the sum may stay out with it.
BINARIES = {
    "add": ("torch.add({0}, {1})", "add"),
    "add_reversed": ("torch.add({1}, {0})", "add"),
    "add_alpha": ("torch.add({0}, {1}, alpha=2)", ""),
    "add_alpha_float": ("torch.add({0}, {1}, alpha=0.5)", ""),
    "add_alpha_reversed": ("torch.add({1}, {0}, alpha=3)", "add"),
    "add_": ("{0}.add_({1})", "add"),
    "add_alpha_": ("{0}.add_({1}, alpha=2)", ""),
    "sub": ("torch.sub({0}, {1})", "sub"),
    "sub_alpha": ("torch.sub({0}, {1}, alpha=2)", ""),
    "sub_": ("{0}.sub_({1})", "sub"),
    "mul": ("torch.mul({0}, {1})", "mul"),
    "mul_": ("{0}.mul_({1})", "mul"),
    "div": ("torch.div({0}, {1})", "div"),
    "div_": ("{0}.div_({1})", "div"),
    "maximum": ("torch.maximum({0}, {1})", "maximum"),
    "minimum": ("torch.minimum({0}, {1})", "minimum"),
}
# Not commutative: the convolution is the second operand, which oneDNN cannot take as a post-op.
BINARIES_REVERSED = {
    "rsub_tensor": "torch.rsub({0}, {1})",
    "rsub_alpha": "torch.rsub({0}, {1}, alpha=2)",
    "sub_reversed": "{1} - {0}",
    "div_reversed": "{1} / ({0}.abs() + 1)",
}
OPERANDS: dict[str, Shape] = {
    "same": (2, 8, 6, 5),
    "channel": (1, 8, 1, 1),
    "channel_3d": (8, 1, 1),
    "batch_channel": (2, 8, 1, 1),
    "pixel": (1, 1, 6, 5),
    "row": (5,),
    "one": (1,),
    "zero_dim": (),
}


def away_from_zero(shape: Shape) -> Make:
    return lambda: (torch.rand(shape) + 0.5) * (torch.randint(0, 2, shape) * 2.0 - 1)


@table(
    [
        *(
            Case(
                f"{name}_{size}",
                lambda code=code: net(code.format("self.c(x)", "y"), "x, y", c=nn.Conv2d(8, 8, 1)),
                [(2, 8, 6, 5), away_from_zero(shape)],
                fused=f"conv {kind}",
                groups=1 if size == "same" and "alpha" not in name else None,
                modes=PLAIN if size in ("same", "channel", "zero_dim") else ("traced", "bf16"),
            )
            for name, (code, kind) in BINARIES.items()
            for size, shape in OPERANDS.items()
        ),
        *(
            Case(
                f"{name}_{size}",
                lambda code=code: net(code.format("self.c(x)", "y"), "x, y", c=nn.Conv2d(8, 8, 1)),
                [(2, 8, 6, 5), away_from_zero(OPERANDS[size])],
                fused="conv",
                modes=("traced", "bf16"),
            )
            for name, code in BINARIES_REVERSED.items()
            for size in ("same", "channel", "zero_dim")
        ),
        *(
            # The convolution's result is the smaller operand: the sum is larger than it.
            Case(
                f"{name}_conv_broadcast",
                lambda code=code: net(code.format("self.c(x)", "y"), "x, y", c=nn.Conv2d(8, 8, 1)),
                [(1, 8, 1, 5), away_from_zero((3, 8, 6, 5))],
                fused="conv",
                modes=("traced", "scripted", "bf16"),
            )
            for name, (code, _) in BINARIES.items()
            if not name.endswith("_")
        ),
        *(
            Case(
                f"{name}_self",
                lambda code=code: net(
                    "y = self.c(x) + 3\nreturn " + code.format("y", "y"), c=nn.Conv2d(8, 8, 1)
                ),
                [(2, 8, 6, 5)],
                # Written in place, and read: left to aten.
                fused="" if name.endswith("_") else "conv",
                modes=("traced", "bf16"),
            )
            for name, (code, _) in BINARIES.items()
        ),
    ]
)
def test_binary(case: Case, mode: str) -> None:
    case.run(mode)


SCALARS = {
    "add_int": ("{} + 2", "add"),
    "add_float": ("{} + 0.3", "add"),
    "radd": ("2 + {}", "add"),
    "add_alpha": ("torch.add({}, 3, alpha=2)", "add"),
    "add_": ("{}.add_(1.5)", "add"),
    "sub_int": ("{} - 2", "sub"),
    "sub_alpha": ("torch.sub({}, 3, alpha=0.5)", "sub"),
    "rsub": ("1 - {}", "rsub"),
    "rsub_alpha": ("torch.rsub({}, 2.5, alpha=3)", "rsub"),
    "mul_int": ("{} * 3", "mul"),
    "mul_float": ("{} * 0.3", "mul"),
    "rmul": ("0.7 * {}", "mul"),
    "mul_": ("{}.mul_(0.5)", "mul"),
    "div_int": ("{} / 3", "div"),
    "div_float": ("{} / 0.3", "div"),
    "div_": ("{}.div_(8.0)", "div"),
    "rdiv": ("1.0 / ({}.abs() + 1)", "reciprocal"),
    "add_tensor": ("{} + torch.tensor(2.0)", "add"),
    "mul_tensor": ("{} * torch.tensor(2.0)", "mul"),
    "mul_int_tensor": ("{} * torch.tensor(2)", "mul"),
}


@table(
    Case(
        name,
        # Freezing folds what comes right behind a convolution into its weights.
        lambda code=code: net(code.format("torch.relu(self.c(x))"), c=nn.Conv2d(8, 8, 1)),
        [(2, 8, 6, 5)],
        fused=f"conv relu {kind}" if name not in ("rdiv", "mul_int_tensor") else "conv relu",
        modes=(*PLAIN, "autocast"),
    )
    for name, (code, kind) in SCALARS.items()
)
def test_scalar(case: Case, mode: str) -> None:
    case.run(mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "other",
    [
        torch.tensor(2.5, dtype=torch.double),
        torch.tensor(3),
        torch.tensor(True),
        torch.randn(2, 8, 6, 5, dtype=torch.double),
        torch.randn(2, 8, 6, 5, dtype=torch.float),
        torch.randn(2, 8, 6, 5, dtype=torch.bfloat16),
        torch.randn(2, 8, 6, 5, dtype=torch.half),
        torch.randn(2, 8, 6, 5, dtype=torch.cfloat),
        torch.randint(-3, 4, (2, 8, 6, 5)),
        torch.randint(0, 2, (2, 8, 6, 5), dtype=torch.bool),
    ],
    ids=lambda t: f"{str(t.dtype).removeprefix('torch.')}_{t.dim()}d",
)
@pytest.mark.parametrize("code", ["self.c(x) + y", "y - self.c(x)", "self.c(x) * y"])
def test_binary_type_promotion(dtype: torch.dtype, other: Tensor, code: str) -> None:
    # The float32 operand keeps its dtype (`check` casts float32 inputs to `dtype`).
    code = code.replace("y", "y.float()") if other.dtype == torch.float else code
    tol = Tolerance(4 * 2.0**-8) if dtype == torch.bfloat16 else Tolerance(5e-5)
    if other.dtype in (torch.half, torch.bfloat16):
        tol = Tolerance(4 * 2.0**-8)
    if other.dtype == torch.bool and " - " in code:
        # aten refuses to subtract a bool, and what is divided by may not be nearly 0.
        code = code.replace("- self.c(x)", "/ (self.c(x).relu() + 1)")
    check(
        net(code, "x, y", c=nn.Conv2d(8, 8, 1)),
        [torch.randn(2, 8, 6, 5), other],
        dtype=dtype,
        fused="conv",
        tol=tol,
    )


def test_div_rounding_mode() -> None:
    """Is not a division to oneDNN."""
    m = net("torch.div(self.c(x), 2, rounding_mode='floor')", c=one_by_one())
    check(m, [quarters(2, 4, 5, 5)()], fused="conv", outside="div")


@pytest.mark.parametrize("value", [0.5, -2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_addcmul(value: float, dtype: torch.dtype) -> None:
    m = net(f"torch.addcmul(self.c(x), y, z, value={value})", "x, y, z", c=nn.Conv2d(8, 8, 1))
    inputs = [torch.randn(2, 8, 6, 5), torch.randn(1, 8, 1, 1), torch.randn(2, 8, 6, 5)]
    check(m, inputs, dtype=dtype, fused="conv")


# ------------------------------------------------------------------------------------- reduction


@table(
    [
        *(
            Case(
                f"{op}_{'_'.join(str(d) for d in dims)}{'_keepdim' if keep else ''}",
                lambda op=op, dims=dims, keep=keep: net(
                    f"torch.{op}(self.c(x), {list(dims)}, {keep})", c=nn.Conv2d(8, 8, 1)
                ),
                [(2, 8, 6, 5)],
                # A result without dimensions is left to aten.
                fused="conv" if len(dims) == 4 and not keep else f"conv {op}",
            )
            for op in ("mean", "sum", "amax", "amin")
            for dims in ((2, 3), (-1, -2), (1,), (0, 1, 2, 3), (0,), (-1,))
            for keep in (False, True)
        ),
        *(
            Case(
                f"{op}_all",
                lambda op=op: net(f"torch.{op}(self.c(x))", c=nn.Conv2d(8, 8, 1)),
                [(2, 8, 6, 5)],
                fused="conv",
            )
            for op in ("mean", "sum", "amax", "amin", "max", "min")
        ),
        Case(
            "sum_dtype",
            lambda: net("torch.sum(self.c(x), [2, 3], dtype=torch.double)", c=nn.Conv2d(8, 8, 1)),
            [(2, 8, 6, 5)],
            fused="conv",
            tol=Tolerance(4 * 2.0**-8),
        ),
        Case(
            "mean_dtype",
            lambda: net("torch.mean(self.c(x), [2, 3], dtype=torch.float)", c=nn.Conv2d(8, 8, 1)),
            [(2, 8, 6, 5)],
            fused="conv",
            tol=Tolerance(4 * 2.0**-8),
        ),
        Case(
            "vector_norm",
            lambda: net(
                "torch.linalg.vector_norm(self.c(x), 2, [2, 3], True)", c=nn.Conv2d(8, 8, 1)
            ),
            [(2, 8, 6, 5)],
            fused="conv",
            modes=("traced", "channels_last", "bf16"),
        ),
        Case(
            "var",
            lambda: net("torch.var(self.c(x), [2, 3])", c=nn.Conv2d(8, 8, 1)),
            [(2, 8, 6, 5)],
            fused="conv",
        ),
    ]
)
def test_reduction(case: Case, mode: str) -> None:
    case.run(mode)


# --------------------------------------------------------------------------- softmax, cat, resize


@table(
    [
        *(
            Case(
                f"{op}_{rank}d_{dim}",
                lambda op=op, dim=dim: net(f"torch.{op}(x, {dim})"),
                [(3, 4, 5, 6)[:rank]],
                fused=f"{op}",
                groups=1,
            )
            for op in ("softmax", "log_softmax")
            for rank in (1, 2, 3, 4)
            for dim in range(-rank, rank)
        ),
        Case(
            "softmax_to_float",
            lambda: net("torch.softmax(x, -1, dtype=torch.float)"),
            [(3, 4, 5)],
            modes=("traced", "scripted", "bf16"),
            tol=Tolerance(4 * 2.0**-8),
        ),
        Case(
            "softmax_masked",
            lambda: net("torch.softmax(x, -1)"),
            [lambda: torch.randn(4, 6).masked_fill(torch.ones(4, 6).tril() == 0, -torch.inf)],
            fused="softmax",
            modes=("traced", "bf16"),
        ),
        Case(
            "softmax_all_masked",
            lambda: net("torch.softmax(x, -1)"),
            [lambda: torch.cat([torch.full((2, 6), -torch.inf), torch.randn(2, 6)])],
            modes=("traced", "bf16"),
        ),
        Case(
            "log_softmax_large",
            lambda: net("torch.log_softmax(x, -1)"),
            [lambda: torch.randn(4, 6) * 100],
            modes=("traced", "bf16"),
        ),
    ]
)
def test_softmax(case: Case, mode: str) -> None:
    case.run(mode)


@table(
    [
        *(
            Case(
                f"{n}_dim_{dim}",
                lambda dim=dim, n=n: net(
                    f"torch.cat([{', '.join(f'self.c{i}(x)' for i in range(n))}], {dim})",
                    **{f"c{i}": nn.Conv2d(8, 8, 1) for i in range(n)},
                ),
                [(2, 8, 6, 5)],
                fused="conv cat",
            )
            for dim in range(-4, 4)
            for n in (2, 3)
        ),
        Case("lone", lambda: net("torch.cat([x, y, x], 1)", "x, y"), [(2, 8, 6, 5), (2, 3, 6, 5)]),
        Case(
            "one",
            lambda: net("torch.cat([self.c(x)], 1)", c=nn.Conv2d(8, 8, 1)),
            [(2, 8, 6, 5)],
            fused="conv",
        ),
        Case(
            "legacy_empty",
            lambda: net(
                "torch.cat([self.c(x), torch.empty(0, dtype=x.dtype)], 1)", c=nn.Conv2d(8, 8, 1)
            ),
            [(2, 8, 6, 5)],
            fused="conv",
            fallbacks=True,
        ),
        Case(
            "mixed_dtypes",
            lambda: net("torch.cat([self.c(x), x.double()], 1).float()", c=nn.Conv2d(8, 8, 1)),
            [(2, 8, 6, 5)],
            fused="conv",
            tol=Tolerance(4 * 2.0**-8),
        ),
        Case(
            "into_conv",
            lambda: net(
                "self.d(torch.cat([self.c(x), x], 1))",
                c=nn.Conv2d(8, 8, 3, padding=1),
                d=nn.Conv2d(16, 8, 1),
            ),
            [(2, 8, 6, 5)],
            fused="conv cat",
        ),
    ]
)
def test_cat(case: Case, mode: str) -> None:
    case.run(mode)


# Options, dims of the image, whether oneDNN can (None: depends on what is known of the sizes).
RESIZES: dict[str, tuple[str, int, bool | None]] = {
    "nearest": ("scale_factor=2.0", 2, True),
    "nearest_1d": ("scale_factor=2.0", 1, True),
    "nearest_3d": ("scale_factor=2.0", 3, True),
    "nearest_size": ("size=[12, 15]", 2, True),
    "nearest_uneven": ("size=[7, 8]", 2, False),
    "nearest_down": ("size=[3, 2]", 2, False),
    "nearest_exact": ("size=[7, 8], mode='nearest-exact'", 2, False),
    "bilinear": ("scale_factor=2.0, mode='bilinear'", 2, True),
    "bilinear_size": ("size=[13, 9], mode='bilinear'", 2, True),
    "bilinear_down": ("size=[4, 3], mode='bilinear'", 2, True),
    "bilinear_corners": ("size=[13, 9], mode='bilinear', align_corners=True", 2, False),
    "bilinear_antialias": ("size=[4, 3], mode='bilinear', antialias=True", 2, False),
    "linear": ("scale_factor=2.0, mode='linear'", 1, True),
    "trilinear": ("scale_factor=2.0, mode='trilinear'", 3, True),
    "bicubic": ("scale_factor=2.0, mode='bicubic'", 2, False),
    # Given the factor, aten does not divide sizes: 6 * 1.3 is 7 rows, scaled by 1.3 and not 7 / 6.
    "bilinear_fraction": ("scale_factor=1.3, mode='bilinear'", 2, False),
    "bilinear_recompute": (
        "scale_factor=1.3, mode='bilinear', recompute_scale_factor=True",
        2,
        None,
    ),
}


@table(
    Case(
        name,
        lambda options=options, dim=dim: net(
            f"F.interpolate(self.c(x), {options})", c=CONV[dim](8, 8, 1)
        ),
        [(2, 8, 6, 5, 4)[: dim + 2]],
        fused="conv",
        groups=1 if can is False else None,
        fallbacks=not can,
        modes=PLAIN[:-1] if "antialias" in name else PLAIN,  # aten has none for bf16
    )
    for name, (options, dim, can) in RESIZES.items()
)
def test_interpolate(case: Case, mode: str) -> None:
    case.run(mode)


@pytest.mark.parametrize("name", [n for n, (_, _, can) in RESIZES.items() if can])
def test_interpolate_goes_in(name: str) -> None:
    options, dim, _ = RESIZES[name]
    m = net(f"F.interpolate(self.c(x), {options})", c=CONV[dim](8, 8, 1))
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[dim]
    kind = f"nearest{dim}d" if "nearest" in name else f"{mode}{dim}d"
    check(m, [torch.randn((2, 8, 6, 5, 4)[: dim + 2])], fused=f"conv upsample_{kind}")


# ----------------------------------------------------------------------------------------- sdpa

Q, K, V = (2, 3, 7, 16), (2, 3, 9, 16), (2, 3, 9, 16)


def bool_mask() -> Tensor:
    mask = torch.rand(2, 1, 7, 9) > 0.3
    mask[..., 0] = True
    return mask


def row_masked(kind: torch.dtype) -> Make:
    """One query may look at nothing: eager's answer is zeros, a plain softmax's NaN."""

    def make() -> Tensor:
        mask = torch.ones(7, 9, dtype=torch.bool)
        mask[2] = False
        if kind == torch.bool:
            return mask
        return torch.zeros(7, 9).masked_fill(~mask, -torch.inf)

    return make


SDPA: dict[str, tuple[str, list[Any]]] = {
    "none": ("", []),
    "scale": ("scale=0.3", []),
    "float_mask": ("attn_mask=m", [(2, 1, 7, 9)]),
    "float_mask_2d": ("attn_mask=m", [(7, 9)]),
    "float_mask_full": ("attn_mask=m", [(2, 3, 7, 9)]),
    "bool_mask": ("attn_mask=m", [bool_mask]),
    "bool_mask_empty_row": ("attn_mask=m", [row_masked(torch.bool)]),
    "float_mask_empty_row": ("attn_mask=m", [row_masked(torch.float)]),
    "causal": ("is_causal=True", []),
}


@table(
    [
        *(
            Case(
                f"{name}{tail and '_tail'}",
                lambda options=options, mask=mask, tail=tail: net(
                    f"F.scaled_dot_product_attention(q, k, v, {options}){tail}",
                    "q, k, v, m" if mask else "q, k, v",
                ),
                [Q, K, V, *mask],
                modes=("traced", "scripted", "bf16"),
            )
            for name, (options, mask) in SDPA.items()
            for tail in ("", ".transpose(1, 2).reshape(2, 7, 48)")
        ),
        Case(
            "3d",
            lambda: net("F.scaled_dot_product_attention(q, k, v)", "q, k, v"),
            [Q[1:], K[1:], V[1:]],
            modes=("traced", "bf16"),
        ),
        Case(
            "gqa",
            lambda: net("F.scaled_dot_product_attention(q, k, v, enable_gqa=True)", "q, k, v"),
            [(2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16)],
            modes=("traced", "bf16"),
        ),
        Case(
            "by_hand",
            lambda: net("torch.softmax(q @ k.transpose(-2, -1) / 4.0 + m, -1) @ v", "q, k, v, m"),
            [Q, K, V, (2, 1, 7, 9)],
            fused="matmul softmax",
            modes=("traced", "scripted", "bf16"),
        ),
        Case(
            "by_hand_masked_fill",
            lambda: net(
                "s = q @ k.transpose(-2, -1) * 0.25\n"
                "return torch.softmax(s.masked_fill(m, -1e9), -1) @ v",
                "q, k, v, m",
            ),
            [Q, K, V, lambda: ~bool_mask()],
            fused="matmul softmax",
            modes=("traced", "scripted", "bf16"),
        ),
        Case(
            "by_hand_where",
            lambda: net(
                "s = q @ k.transpose(-2, -1) * 0.25\n"
                "return torch.softmax(torch.where(m, s, torch.full_like(s, -1e9)), -1) @ v",
                "q, k, v, m",
            ),
            [Q, K, V, bool_mask],
            fused="matmul softmax",
            modes=("traced", "scripted", "bf16"),
        ),
    ]
)
def test_sdpa(case: Case, mode: str) -> None:
    case.run(mode)


class Attention(NamedTuple):
    """Sizes of one attention, and how it is written down."""

    batch: int = 1
    heads: int = 2
    queries: int = 40
    keys: int = 40
    size: int = 16
    value_size: int | None = None
    key_heads: int | None = None
    options: str = ""
    mask: Callable[[int, int], Tensor] | None = None
    own: bool = True
    dtype: torch.dtype = torch.float32


def lower(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def some_rows(queries: int, keys: int) -> Tensor:
    """Of few keys each, and one of none."""
    mask = (torch.arange(keys) % 7 == 3).repeat(queries, 1)
    mask[queries // 2] = False
    return mask


ATTENTION = {
    "odd": Attention(queries=13, keys=37, size=9),
    "wide": Attention(2, 3, 197, 197, 64),
    "blocks_of_keys": Attention(queries=70, keys=1100, size=24),
    "blocks_and_mask": Attention(queries=70, keys=1030, options="attn_mask=m", mask=lower),
    "one_query": Attention(2, 4, 1, 77, 32, 41),
    "one_query_and_mask": Attention(2, 4, 1, 77, 32, options="attn_mask=m", mask=some_rows),
    "one_query_causal": Attention(queries=1, options="is_causal=True"),
    "two_queries": Attention(2, 4, 2, 77, 32),
    "few_keys": Attention(keys=8, size=3),
    "fewer_keys": Attention(keys=7),
    "fewer_keys_and_mask": Attention(keys=5, options="attn_mask=m", mask=lower),
    "one_key": Attention(keys=1, queries=1),
    "other_values": Attention(value_size=40),
    "scale": Attention(options="scale=0.3"),
    "lower": Attention(queries=130, keys=130, options="attn_mask=m", mask=lower),
    "lower_and_more_keys": Attention(keys=60, options="attn_mask=m", mask=lower),
    "rows": Attention(keys=50, options="attn_mask=m", mask=some_rows),
    "head_mask": Attention(
        3, options="attn_mask=m", mask=lambda q, k: torch.rand(3, 1, 1, k) > 0.5
    ),
    "batch_mask": Attention(
        3, options="attn_mask=m", mask=lambda q, k: torch.rand(3, 2, q, k) > 0.5
    ),
    "expanded_mask": Attention(
        3, options="attn_mask=m.expand(3, 2, 40, 40)", mask=lambda q, k: torch.rand(3, 1, q, k)
    ),
    "float_mask": Attention(keys=45, options="attn_mask=m", mask=lambda q, k: torch.randn(2, q, k)),
    "mask_of_a_column": Attention(
        options="attn_mask=m", mask=lambda q, k: torch.randn(q, 1), own=False
    ),
    "causal": Attention(queries=100, keys=100, options="is_causal=True"),
    "causal_and_more_keys": Attention(keys=90, options="is_causal=True"),
    "causal_and_fewer_keys": Attention(queries=90, keys=20, options="is_causal=True"),
    "grouped": Attention(2, 8, key_heads=2, options="enable_gqa=True"),
    "large": Attention(1, 1, 300, 300, options="scale=40.0"),
}
ATTENTION |= {
    f"bf16_{name}": ATTENTION[name]._replace(dtype=torch.bfloat16)
    for name in (
        *("odd", "wide", "blocks_of_keys", "one_query", "one_query_and_mask", "two_queries"),
        *(
            "few_keys",
            "fewer_keys",
            "one_key",
            "other_values",
            "lower",
            "rows",
            "causal",
            "grouped",
        ),
    )
} | {
    "bf16_mask": Attention(
        queries=30,
        keys=45,
        options="attn_mask=m",
        mask=lambda q, k: torch.randn(2, q, k).bfloat16(),
        dtype=torch.bfloat16,
    ),
    "bf16_float_mask": Attention(
        keys=45,
        options="attn_mask=m",
        mask=lambda q, k: torch.randn(2, q, k),
        dtype=torch.bfloat16,
    ),
}


def attention_kernel(products: torch.dtype) -> str:
    """The name of the fuser's own, by the data type that it multiplies in."""
    if has_avx2_kernels():
        return "llga_attention:avx2"
    if products == torch.float32 or not has_narrow_products():
        return "llga_attention:avx512"
    return f"llga_attention:{'amx' if has_matrix_units() else 'avx512'}_bf16"


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_by_own_kernel(case: str) -> None:
    """Of heads that lie side by side, as one linear layer computes them: none is copied."""
    c = ATTENTION[case]
    code = f"F.scaled_dot_product_attention({{}}, {c.options})"
    split = [f"{name}.transpose(1, 2)" for name in "qkv"]
    m = net(code.format(", ".join(split)), "q, k, v, m").eval()
    key_heads = c.key_heads or c.heads
    size = c.value_size or c.size
    q = torch.randn(c.batch, c.queries, c.heads, 3 * c.size).to(c.dtype)[..., : c.size]
    both = torch.randn(c.batch, c.keys, key_heads, c.size + size).to(c.dtype)
    k, v = both.split([c.size, size], -1)
    mask = c.mask(c.queries, c.keys) if c.mask else torch.zeros(1)
    with torch.no_grad():
        script = to_script(m, [q, k, v, mask])
        before = llga_fuser.cache_info().fallbacks
        for _ in range(3):
            assert_same(script(q, k, v, mask), m(q, k, v, mask))
    own = c.own and has_own_attention(c.dtype)
    assert (attention_kernel(c.dtype) in kernels_of(m, q, k, v, mask)) == own
    assert llga_fuser.cache_info().fallbacks == before or not own


MASKS_OF_RANK_5 = {
    "causal": None,
    "one": (1, 1, 3, 20, 25),
    "each": (2, 3, 3, 20, 25),
    "groups": (1, 3, 1, 20, 25),
    "groups_of_rank_4": (3, 3, 20, 25),
    "matrix": (20, 25),
    "keys": (25,),
    "first": (2, 1, 1, 20, 25),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["numbers", "booleans"])
@pytest.mark.parametrize("mask", MASKS_OF_RANK_5)
def test_attention_in_five_dimensions(mask: str, kind: str, swapped: bool) -> None:
    """The first two are one where they lie so, and else in a copy."""
    size = MASKS_OF_RANK_5[mask]
    options = "is_causal=True" if size is None else "attn_mask=m"
    m = net(f"F.scaled_dot_product_attention(q, k, v, {options})", "q, k, v, m").eval()
    q, k, v = (torch.randn(2, 3, 3, n, 16) for n in (20, 25, 25))
    if swapped:
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    numbers = torch.randn(size or (1,))
    inputs = [q, k, v, numbers if kind == "numbers" else numbers > -1]
    with torch.no_grad():
        script = to_script(m, inputs)
        for _ in range(3):
            assert_same(script(*inputs), m(*inputs))
    own = has_own_attention(torch.float32) and mask != "first"
    assert (attention_kernel(torch.float32) in kernels_of(m, *inputs)) == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("keys", [70, 5])
@pytest.mark.parametrize("options", ["", "attn_mask=m", "is_causal=True"])
def test_attention_with_special_values(
    options: str, keys: int, value: float, dtype: torch.dtype
) -> None:
    """What float32 gives: of an infinite score, PyTorch's kernel for bfloat16 makes 0.

    Where a key or value may be hidden by its place, that kernel itself runs.
    """
    m = net(f"F.scaled_dot_product_attention(q, k, v, {options})", "q, k, v, m").eval()
    mask = lower(keys, keys)
    all_heads = torch.randn(1, keys, 2, 3 * 16).to(dtype).transpose(1, 2)
    tensors = list(all_heads.split(16, -1))
    with torch.no_grad():
        script = to_script(m, [*tensors, mask])
        for _ in range(3):
            script(*tensors, mask)
        for i in range(3):
            for place in (0, keys // 2, keys - 1):
                changed = [tensor.clone() for tensor in tensors]
                changed[i][0, 1, place, 3] = value
                own = has_own_attention(dtype) and not ("is_causal" in options and i > 0)
                wide = torch.float32 if own else dtype
                want = m(*[tensor.to(wide) for tensor in changed], mask).to(dtype)
                for _ in range(3):
                    assert_same(script(*changed, mask), want)


class Written(NamedTuple):
    """Attention that a model writes out, of (batch, head, place, number) q, k and v."""

    code: str
    masks: Sequence[Tensor] = ()
    queries: int = 40
    keys: int = 40
    batch: int = 2
    own: bool = True
    dtype: torch.dtype = torch.float32


HIDDEN = torch.full((40, 40), -math.inf).triu(1)
LENGTH_1 = "F.normalize({}, dim=-1)"
SIDE_BY_SIDE = "(({}).softmax(-1) @ v).transpose(1, 2).reshape({}, 40, -1)"
WRITTEN = {
    "plain": Written("(q @ k.transpose(-2, -1)).softmax(-1) @ v"),
    "more_keys": Written("torch.matmul(q, k.transpose(2, 3)).softmax(3) @ v", keys=75),
    "blocks_of_keys": Written("(q @ k.transpose(-2, -1)).softmax(-1) @ v", keys=1030, queries=70),
    "one_query": Written("(q @ k.transpose(-2, -1)).softmax(-1) @ v", queries=1),
    "one_query_across": Written("(q @ k.mT.contiguous()).softmax(-1) @ v", queries=1, keys=33),
    "across": Written("(q @ k.mT.contiguous()).softmax(-1) @ v", keys=75),
    "scaled": Written("(q @ k.transpose(-2, -1) / 4).softmax(-1) @ v"),
    "scaled_before": Written("(0.3 * (q * 0.7 @ k.transpose(-2, -1))).softmax(-1) @ v"),
    "scaled_by_size": Written("(q * q.size(-1) ** -0.5 @ k.transpose(-2, -1)).softmax(-1) @ v"),
    "mask": Written("(q @ k.transpose(-2, -1) + m).softmax(-1) @ v", [HIDDEN]),
    "mask_first": Written(
        "(m + q @ k.transpose(-2, -1)).softmax(-1) @ v", [torch.randn(3, 40, 40)]
    ),
    "mask_of_keys": Written(
        "(q @ k.transpose(-2, -1) / 4 + m).softmax(-1) @ v",
        [torch.finfo(torch.float32).min * (torch.rand(2, 1, 1, 53) > 0.7)],
        keys=53,
    ),
    "mask_in_place": Written(
        "s = q @ k.transpose(-2, -1)\ns += m\nreturn F.softmax(s.float(), dim=-1).type_as(s) @ v",
        [torch.randn(1, 3, 40, 40)],
    ),
    "nothing_met": Written(
        "(q @ k.transpose(-2, -1) + m).softmax(-1) @ v",
        [torch.zeros(40, 40).index_fill(0, torch.tensor([3, 39]), -math.inf)],
    ),
    "two_masks": Written(
        "(q @ k.transpose(-2, -1) + m + n).softmax(-1) @ v",
        [torch.randn(3, 40, 40), torch.randn(2, 1, 40, 40)],
    ),
    "windows": Written(
        "s = q @ k.transpose(-2, -1) + m\ns = s.view(2, 3, 3, 40, 40) + n.unsqueeze(1).unsqueeze(0)"
        "\ns = F.softmax(s.view(-1, 3, 40, 40), dim=-1)\n"
        "return (s @ v).transpose(1, 2).reshape(6, 40, 48)",
        [torch.randn(1, 3, 40, 40), torch.where(torch.rand(3, 40, 40) > 0.5, -100.0, 0.0)],
        batch=6,
    ),
    "filled": Written(
        "(q @ k.transpose(-2, -1)).masked_fill(m == 0, float('-inf')).softmax(-1) @ v",
        [lower(40, 40).float()],
    ),
    "filled_with_number": Written(
        "(q @ k.transpose(-2, -1)).masked_fill(m, -1e9).softmax(-1) @ v", [~some_rows(40, 40)]
    ),
    "filled_all": Written(
        "(q @ k.transpose(-2, -1)).masked_fill(m, float('-inf')).softmax(-1) @ v",
        [~some_rows(40, 40)],
    ),
    "where": Written(
        "torch.where(m, q @ k.transpose(-2, -1), n).softmax(-1) @ v",
        [lower(40, 40), torch.tensor(-1e4)],
        own=False,  # n is no constant
    ),
    "where_constant": Written(
        "torch.where(m, q @ k.transpose(-2, -1), float('-inf')).softmax(-1) @ v", [lower(40, 40)]
    ),
    "side_by_side": Written(SIDE_BY_SIDE.format("q @ k.transpose(-2, -1)", 2)),
    "image": Written(
        "y = (q @ k.transpose(-2, -1)).softmax(-1) @ v\n"
        "return y.transpose(1, 2).reshape(2, 5, 8, 48)"
    ),
    "flattened": Written("((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)"),
    "other_views": Written(
        "q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)\n"
        "y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)\n"
        "return y.transpose(1, 2).reshape(1, 40, 96)",
        own=False,
    ),
    "one_query_side_by_side": Written(
        "y = (q @ k.transpose(-2, -1)).softmax(-1) @ v\nreturn y.transpose(1, 2).reshape(2, 1, 48)",
        queries=1,
    ),
    "contiguous": Written(
        "y = (q @ k.transpose(-2, -1)).softmax(-1) @ v\n"
        "return y.transpose(1, 2).contiguous().view(2, 40, 48)"
    ),
    "rank_3": Written(
        "q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)\n"
        "return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)"
    ),
    "rank_3_and_mask": Written(
        "q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)\n"
        "s = torch.bmm(q, k.transpose(1, 2)).view(2, 3, 40, 40) + m\n"
        "return torch.bmm(s.view(6, 40, 40).softmax(-1), v)",
        [torch.randn(2, 1, 40, 40)],
    ),
    "other_dimension": Written("(q @ k.transpose(-2, -1)).softmax(-2) @ v", own=False),
    "scaled_behind_mask": Written(
        "((q @ k.transpose(-2, -1) + m) * 0.5).softmax(-1) @ v", [HIDDEN], own=False
    ),
    "scaled_by_head": Written(
        "(q @ k.mT * torch.tensor([0.3, 1, 2]).view(3, 1, 1).to(q.dtype)).softmax(-1) @ v"
    ),
    "scaled_by_an_input": Written(
        "(q @ k.transpose(-2, -1) * m).softmax(-1) @ v", [torch.rand(3, 1, 1)], own=False
    ),
    "scaled_by_key": Written(
        "(q @ k.transpose(-2, -1) * m).softmax(-1) @ v", [torch.rand(1, 1, 40)], own=False
    ),
    "divided_by_head": Written(
        "s = q @ k.transpose(-2, -1) / torch.tensor([0.3, 1.0, 2.0]).view(1, 3, 1, 1) + m\n"
        "return s.softmax(-1) @ v",
        [HIDDEN],
    ),
    "scaled_by_head_in_groups": Written(
        "s = (q @ k.mT).view(1, 2, 3, 40, 40) * torch.tensor([0.3, 1, 2]).view(3, 1, 1)\n"
        "return s.view(2, 3, 40, 40).softmax(-1) @ v",
        own=False,
    ),
    "normalized": Written(f"({LENGTH_1.format('q')} @ {LENGTH_1.format('k')}.mT).softmax(-1) @ v"),
    "normalized_and_scaled": Written(
        f"s = {LENGTH_1.format('q')} @ {LENGTH_1.format('k')}.transpose(-2, -1)\n"
        "s = s * torch.tensor([2.0, 4.0, 8.0]).view(3, 1, 1).to(q.dtype) + m\n"
        "return s.softmax(-1) @ v",
        [torch.randn(1, 3, 40, 75)],
        keys=75,
    ),
    "one_query_normalized": Written(
        f"(9 * ({LENGTH_1.format('q')} @ {LENGTH_1.format('k')}.mT)).softmax(-1) @ v", queries=1
    ),
    "keys_normalized": Written(
        f"(q @ {LENGTH_1.format('k')}.transpose(-2, -1)).softmax(-1) @ v", keys=33
    ),
    "queries_normalized": Written(f"({LENGTH_1.format('q')} @ k.mT).softmax(-1) @ v"),
    "other_norm": Written(
        "(F.normalize(q, p=1.0, dim=-1) @ F.normalize(k, dim=-2).mT).softmax(-1) @ v"
    ),
    "norm_read": Written(
        f"n = {LENGTH_1.format('q')}\nreturn (n @ k.mT).softmax(-1) @ v + n.mean()"
    ),
    "einsum": Written(
        "s = torch.einsum('bhid,bhjd->bhij', q, k) * 0.3\n"
        "return torch.einsum('bhij, bhjd -> bhid', s.softmax(-1), v)",
        keys=75,
    ),
    "einsum_with_ellipsis": Written(
        "s = torch.einsum('...id,...jd->...ij', q, k) + m\n"
        "return torch.einsum('...ij,...jd->...id', s.softmax(-1), v)",
        [HIDDEN],
    ),
    "einsum_by_place": Written(
        "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)\n"
        "s = torch.einsum('bqhd,bkhd->bhqk', q * 0.25, k).masked_fill(m, float('-inf'))\n"
        "return torch.einsum('bhqk,bkhd->bqhd', s.softmax(-1), v).reshape(2, 40, 48)",
        [~lower(40, 40)],
    ),
    "einsum_of_columns": Written(
        "s = torch.einsum('bhid,bhdj->bhij', q, k.mT)\n"
        "return torch.einsum('bhij,bhjd->bhid', s.softmax(-1), v)"
    ),
    "einsum_of_normalized": Written(
        f"s = 5 * torch.einsum('bhid,bhjd->bhij', q, {LENGTH_1.format('k')})\n"
        "return torch.einsum('bhij,bhjd->bhid', s.softmax(-1), v)"
    ),
    "einsum_of_the_transposed": Written(
        "s = torch.einsum('bhdi,bhjd->bhij', q.mT, k)\n"
        "return torch.einsum('bhij,bhjd->bhid', s.softmax(-1), v)",
    ),
    "rank_5": Written(
        "q, k, v = [x.unflatten(0, (2, 3)) for x in (q, k, v)]\n"
        "s = torch.einsum('BGHID,BGHJD->BGHIJ', q, k * 0.25)\n"
        "y = torch.einsum('BGHIJ,BGHJD->BGHID', F.softmax(s + m, dim=-1), v)\n"
        "return y.permute(0, 1, 3, 2, 4).reshape(2, 3, 40, 48)",
        [torch.randn(1, 3, 40, 40)],
        batch=6,
    ),
    "rank_5_and_masks": Written(
        "q, k, v = [x.unflatten(0, (2, 3)) for x in (q, k, v)]\n"
        "return ((q @ k.mT / 4 + m).masked_fill(n, -1e9)).softmax(-1) @ v",
        [torch.randn(3, 1, 40, 40), torch.rand(1, 3, 1, 1, 40) > 0.8],
        batch=6,
    ),
    "rank_5_of_other_strides": Written(
        "q, k, v = [x.unflatten(0, (3, 2)).transpose(0, 1) for x in (q, k, v)]\n"
        "return (q @ k.mT).softmax(-1) @ v",
        batch=6,
    ),
    "column": Written(
        "(q @ k.transpose(-2, -1) + m).softmax(-1) @ v", [torch.randn(40, 1)], own=False
    ),
    "double": Written("(q @ k.mT).softmax(-1, dtype=torch.float64).to(q.dtype) @ v", own=False),
    "weights_read": Written(
        "w = (q @ k.transpose(-2, -1)).softmax(-1)\nreturn w @ v, w.mean(1)", own=False
    ),
    "scores_read": Written(
        "s = q @ k.transpose(-2, -1)\nreturn s.softmax(-1) @ v + s.mean()", own=False
    ),
    "three_masks": Written(
        "(q @ k.transpose(-2, -1) + m + m + n).softmax(-1) @ v", [HIDDEN, HIDDEN], own=False
    ),
}
WRITTEN |= {
    f"bf16_{name}": WRITTEN[name]._replace(dtype=torch.bfloat16)
    for name in (
        *("plain", "more_keys", "one_query", "across", "scaled", "scaled_before", "mask"),
        *("mask_in_place", "windows", "filled", "side_by_side", "rank_3_and_mask"),
        *("scaled_by_head", "normalized", "normalized_and_scaled", "queries_normalized"),
        *("blocks_of_keys", "nothing_met", "two_masks", "filled_all"),
        *("einsum", "einsum_by_place", "rank_5"),
    )
}


def heads_of_one_layer(c: Written, size: int = 16) -> list[Tensor]:
    """Queries, keys and values that lie side by side; of scores that eager can round to bf16."""
    q = torch.randn(c.batch, c.queries, 3, 3 * size)[..., :size]
    q = q / 4 if c.dtype == torch.bfloat16 else q
    k, v = torch.randn(c.batch, c.keys, 3, 2 * size).split(size, -1)
    return [x.to(c.dtype).transpose(1, 2) for x in (q, k, v)]


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("case", WRITTEN)
def test_attention_written_out(case: str) -> None:
    """One group, with the kernel that scaled_dot_product_attention has."""
    c = WRITTEN[case]
    m = net(c.code, "q, k, v, m, n").eval()
    masks = [x.to(c.dtype) if x.is_floating_point() else x for x in c.masks]
    inputs = [*heads_of_one_layer(c), *masks, *[torch.zeros(1)] * (2 - len(masks))]
    with torch.no_grad():
        script = to_script(m, inputs)
        before = llga_fuser.cache_info().fallbacks
        for _ in range(3):
            assert_same(script(*inputs), m(*inputs))
    own = c.own and has_own_attention(c.dtype)
    wide = case in {"bf16_across", "bf16_normalized", "bf16_normalized_and_scaled"}
    kernel = attention_kernel(torch.float32 if wide else c.dtype)
    assert (kernel in kernels_of(m, *inputs)) == own
    assert llga_fuser.cache_info().fallbacks == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "case",
    ["plain", "mask", "filled", "across", "nothing_met", "normalized", "one_query_normalized"],
)
def test_attention_written_out_with_special_values(case: str, value: float) -> None:
    c = WRITTEN[case]
    m = net(c.code, "q, k, v, m, n").eval()
    tensors = heads_of_one_layer(c)
    masks = [*c.masks, *[torch.zeros(1)] * (2 - len(c.masks))]
    with torch.no_grad():
        script = to_script(m, [*tensors, *masks])
        for i in range(3):
            for place in {0, tensors[i].size(2) // 2, tensors[i].size(2) - 1}:
                changed = [tensor.clone() for tensor in tensors]
                changed[i][0, 1, place, 3] = value
                for _ in range(3):
                    assert_same(script(*changed, *masks), m(*changed, *masks))


def test_attention_written_out_of_other_sizes() -> None:
    """What is fused for one set of sizes is right for all others."""
    m = net("(q @ k + m).softmax(-1) @ v", "q, k, v, m").eval()
    with torch.no_grad():
        script = to_script(
            m,
            [
                torch.randn(2, 3, 9, 16),
                torch.randn(2, 3, 16, 9),
                torch.randn(2, 3, 9, 16),
                torch.randn(9, 9),
            ],
        )
        for q, k, v, mask in (
            ((1, 3, 20, 16), (1, 3, 16, 33), (1, 3, 33, 8), (20, 33)),
            ((1, 3, 20, 16), (1, 3, 16, 33), (1, 3, 33, 8), (20, 1)),
            ((1, 3, 20, 16), (1, 3, 16, 33), (1, 3, 33, 8), (1,)),
            ((4, 3, 20, 16), (1, 1, 16, 33), (33, 8), (4, 1, 20, 33)),
            ((20, 16), (16, 33), (33, 8), (20, 33)),
            ((20, 16), (16, 33), (33, 8), (5, 3, 20, 33)),
            ((2, 2, 2, 5, 16), (2, 2, 2, 16, 6), (2, 2, 2, 6, 8), (5, 6)),
        ):
            inputs = [torch.randn(size) for size in (q, k, v, mask)]
            for _ in range(2):
                assert_same(script(*inputs), m(*inputs))


class Heads(nn.Module):
    """Self-attention as transformers write it: views, transposes, sdpa, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.view(b, s, 4, 8).transpose(1, 2)
        k = k.view(b, s, 4, 8).transpose(1, 2)
        v = v.view(b, s, 4, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, s, 32))


@table(
    [
        Case(
            "heads",
            Heads,
            [(2, 10, 32)],
            fused="linear",
            modes=("traced", "scripted", "bf16", "autocast"),
        )
    ]
)
def test_attention(case: Case, mode: str) -> None:
    case.run(mode)


class Windows(NamedTuple):
    """An image of 32 channels, and what attends to it window by window."""

    image: tuple[int, ...] = (2, 32, 8, 12)
    window: int = 4
    shift: int = 0
    version: int = 1

    def module(self) -> nn.Module:
        """As in a block of a Swin Transformer, with all biases."""
        _models.load_torchvision()
        from torchvision.models import swin_transformer
        from torchvision.ops import Permute

        name = "ShiftedWindowAttention" + ("V2" if self.version == 2 else "")
        m = getattr(swin_transformer, name)(32, [self.window] * 2, [self.shift] * 2, 4)
        if self.version == 1:
            nn.init.normal_(m.relative_position_bias_table)
        before = nn.Conv2d(32, 32, 1), Permute([0, 2, 3, 1]), nn.LayerNorm(32)
        m = randomize(nn.Sequential(*before, m))
        if self.version == 2:  # eager rounds what is multiplied with it to bf16
            nn.init.uniform_(m[-1].logit_scale, -1, 1)
        return m


WINDOWS = {
    "aligned": Windows(),
    "shifted": Windows(shift=2),
    "padded": Windows((2, 32, 7, 10)),
    "padded_and_shifted": Windows((1, 32, 7, 10), shift=1),
    "one_window": Windows((3, 32, 4, 4), shift=2),
    "rows_of_windows": Windows((1, 32, 4, 16), shift=2),
    "v2": Windows(version=2),
    "v2_shifted": Windows(shift=2, version=2),
    "v2_padded_and_shifted": Windows((1, 32, 7, 10), shift=1, version=2),
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", ["traced", "bf16", "autocast", "scripted"])
@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case: str, mode: str) -> None:
    """What cuts an image into windows, and puts it together again, is in the attention's group."""
    c = WINDOWS[case]
    found = check(c.module(), [torch.randn(*c.image)], **MODES[mode])
    dtype = torch.float32 if mode == "traced" else torch.bfloat16
    if mode == "scripted" or not has_own_attention(dtype) or not fuses(dtype):
        return
    moves = {"aten::roll", "aten::reshape", "aten::select", "aten::zero_", "aten::clone"}
    assert not moves & set(found.outside), found
    assert any(group["aten::softmax"] and group["aten::permute"] for group in found.groups), found
    assert found.outside["aten::pad"] == 0, found


@pytest.mark.parametrize("case", ["shifted", "v2_shifted", "padded"])
def test_windows_of_other_sizes(case: str) -> None:
    """Sizes that need a padding or none, for a trace that saw the other."""
    c = WINDOWS[case]
    m = c.module()
    with torch.no_grad():
        script = to_script(m, [torch.randn(*c.image)])
        for batch, rows, columns in ((2, 8, 12), (1, 12, 8), (2, 9, 11), (3, 5, 16), (0, 8, 8)):
            x = torch.randn(batch, 32, rows, columns)
            for _ in range(3):
                assert_same(script(x), m(x))
            x = x.contiguous(memory_format=torch.channels_last)
            assert_same(script(x), m(x))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("case", ["shifted", "v2_shifted"])
def test_windows_with_special_values(case: str, value: float) -> None:
    c = WINDOWS[case]
    m = c.module()
    x = torch.randn(*c.image)
    with torch.no_grad():
        script = to_script(m, [x])
        for row, column in ((0, 0), (5, 3), (7, 11)):
            changed = x.clone()
            changed[1, 7, row, column] = value
            for _ in range(3):
                assert_same(script(changed), m(changed))


@pytest.mark.parametrize("case", ["padded", "aligned"])
def test_windows_leave_their_image_alone(case: str) -> None:
    """A padding of nothing may be the image itself; nobody can tell, whoever writes to what."""
    c = WINDOWS[case]
    attention = c.module()

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x + 1
            y = self.attention(x)
            x.mul_(2)
            return x, y.add_(x.permute(0, 2, 3, 1))

    check(Written(), [torch.randn(*c.image)])


# Autocast with the fast path: plain TorchScript's result has another dtype than eager's.
@pytest.mark.parametrize(
    ("mode", "fast"),
    [("traced", True), ("traced", False), ("bf16", True), ("bf16", False), ("autocast", False)],
)
def test_torch_multihead_attention(mode: str, fast: bool) -> None:
    """nn.TransformerEncoderLayer traces to one node, unless its fast path is off."""
    with restored(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled):
        torch.backends.mha.set_fastpath_enabled(fast)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
        found = check(randomize(layer), [torch.randn(2, 10, 32)], **MODES[mode])
    if not fast:
        expect(found, fused="linear")


# ----------------------------------------------------------------------------------- elementwise


@dataclass(frozen=True)
class Eltwise:
    code: str  # of {}
    kind: str
    domain: str = "any"  # any | positive | exact
    one_group: bool = True  # known to be a post-op of a convolution in every version
    numbers_only: tuple[str, ...] = ()


ELTWISE: dict[str, Eltwise] = {
    "relu": Eltwise("torch.relu({})", "relu"),
    "relu_": Eltwise("F.relu({}, inplace=True)", "relu"),
    "sigmoid": Eltwise("torch.sigmoid({})", "sigmoid"),
    "sigmoid_": Eltwise("{}.sigmoid_()", "sigmoid"),
    "tanh": Eltwise("torch.tanh({})", "tanh"),
    "tanh_": Eltwise("{}.tanh_()", "tanh"),
    "gelu": Eltwise("F.gelu({})", "gelu"),
    # Of several ops of oneDNN, and a group of its own.
    "gelu_tanh": Eltwise("F.gelu({}, approximate='tanh')", "gelu", one_group=False),
    "elu": Eltwise("F.elu({})", "elu"),
    "elu_alpha": Eltwise("F.elu({}, alpha=0.3)", "elu"),
    "elu_": Eltwise("F.elu({}, inplace=True)", "elu"),
    "selu": Eltwise("F.selu({})", "", one_group=False),
    "celu": Eltwise("F.celu({}, alpha=0.5)", "", one_group=False),
    "leaky_relu": Eltwise("F.leaky_relu({})", "leaky_relu"),
    "leaky_relu_slope": Eltwise("F.leaky_relu({}, 0.3)", "leaky_relu"),
    "leaky_relu_": Eltwise("F.leaky_relu({}, 0.1, inplace=True)", "leaky_relu"),
    "hardswish": Eltwise("F.hardswish({} * 4)", "hardswish"),
    "hardswish_": Eltwise("F.hardswish({} * 4, inplace=True)", "hardswish"),
    "hardsigmoid": Eltwise("F.hardsigmoid({} * 4)", "hardsigmoid"),
    "hardsigmoid_": Eltwise("F.hardsigmoid({} * 4, inplace=True)", "hardsigmoid"),
    "hardtanh": Eltwise("F.hardtanh({})", "hardtanh"),
    "hardtanh_range": Eltwise("F.hardtanh({}, -0.2, 0.5)", "hardtanh"),
    "hardtanh_": Eltwise("F.hardtanh({}, -0.2, 0.5, inplace=True)", "hardtanh"),
    "relu6": Eltwise("F.relu6({} * 8)", "relu6"),
    # The module's in-place form calls hardtanh_.
    "relu6_": Eltwise("F.relu6({} * 8, inplace=True)", ""),
    "clamp": Eltwise("torch.clamp({}, -0.3, 0.4)", "clamp"),
    "clamp_int": Eltwise("torch.clamp({} * 4, -1, 1)", "clamp"),
    "clamp_kw_min": Eltwise("torch.clamp({}, min=-0.1)", "clamp"),
    "clamp_kw_max": Eltwise("torch.clamp({}, max=0.2)", "clamp"),
    "clamp_": Eltwise("{}.clamp_(-0.3, 0.4)", "clamp"),
    "clamp_min": Eltwise("torch.clamp_min({}, 0.1)", "clamp_min"),
    "clamp_min_": Eltwise("{}.clamp_min_(0.1)", "clamp_min"),
    "clamp_max": Eltwise("torch.clamp_max({}, 0.1)", "clamp_max"),
    "clamp_max_": Eltwise("{}.clamp_max_(0.1)", "clamp_max"),
    # Eager: the upper bound wins.
    "clamp_crossed": Eltwise("torch.clamp({}, 0.5, -0.5)", "", one_group=False),
    "clamp_tensor": Eltwise(
        "torch.clamp({}, torch.tensor(-0.1), torch.tensor(0.2))", "", one_group=False
    ),
    "silu": Eltwise("F.silu({})", "silu"),
    "silu_": Eltwise("F.silu({}, inplace=True)", "silu"),
    "sigmoid_mul": Eltwise("torch.sigmoid({0}) * {0}", "", one_group=False),
    "mish": Eltwise("F.mish({})", "mish"),
    "mish_": Eltwise("F.mish({}, inplace=True)", "mish"),
    "softplus": Eltwise("F.softplus({})", "softplus"),
    "softplus_beta": Eltwise("F.softplus({}, beta=2)", "softplus"),
    # Beyond the threshold eager is the identity, which the default's 20 makes no difference to.
    "softplus_large": Eltwise("F.softplus({} * 60)", "", one_group=False),
    "softplus_threshold": Eltwise("F.softplus({}, threshold=30)", "", "exact", one_group=False),
    "softplus_half": Eltwise("F.softplus({} * 60, beta=0.5)", "", one_group=False),
    "sqrt": Eltwise("torch.sqrt({})", "sqrt", "positive"),
    "sqrt_": Eltwise("{}.sqrt_()", "sqrt", "positive"),
    "square": Eltwise("torch.square({})", "square"),
    "square_": Eltwise("{}.square_()", "square"),
    "abs": Eltwise("torch.abs({})", "abs"),
    "abs_": Eltwise("{}.abs_()", "abs"),
    "exp": Eltwise("torch.exp({})", "exp"),
    "exp_": Eltwise("{}.exp_()", "exp"),
    "log": Eltwise("torch.log({})", "log", "positive"),
    "round": Eltwise("torch.round({})", "round", "exact", numbers_only=("bf16", "autocast")),
    "round_half": Eltwise("torch.round({} + 0.25)", "", "exact", one_group=False),
    "round_decimals": Eltwise("torch.round({}, decimals=1)", "", "exact", one_group=False),
    "pow_2": Eltwise("torch.pow({}, 2)", "pow"),
    "pow_2_float": Eltwise("{} ** 2.0", "pow"),
    "pow_3": Eltwise("torch.pow({}, 3)", "pow", one_group=False),
    "pow_half": Eltwise("torch.pow({}, 0.5)", "pow", "positive"),
    "pow_other": Eltwise("torch.pow({}, 1.7)", "", "positive", one_group=False),
    "pow_negative": Eltwise("torch.pow({}, -1)", "", "positive", one_group=False),
    # No post-ops of a convolution in every version, and alone left to aten.
    "rsqrt": Eltwise("torch.rsqrt({})", "", "positive", one_group=False),
    "reciprocal": Eltwise("torch.reciprocal({})", "", "positive", one_group=False),
    "neg": Eltwise("torch.neg({})", "neg"),
    "prelu": Eltwise("F.prelu({}, self.slope)", "", one_group=False),
    "prelu_one": Eltwise("F.prelu({}, self.one)", "", one_group=False),
    "erf": Eltwise("torch.erf({})", "", one_group=False),
    "sin": Eltwise("torch.sin({})", "", one_group=False),
    "threshold": Eltwise("F.threshold({}, 0.1, 20.0)", "", "exact", one_group=False),
    "log_sigmoid": Eltwise("F.logsigmoid({})", "", one_group=False),
}


def eltwise_case(
    name: str, layer: Callable[[], nn.Module], layer_kind: str, channels: int, shape: Shape
) -> Case:
    op = ELTWISE[name]

    def build() -> nn.Module:
        m = layer()
        if op.domain == "positive":
            for p in m.parameters():
                p.data.abs_()
        elif op.domain == "exact":  # sums of a few multiples of a quarter
            for p in m.parameters():
                p.data.copy_(torch.randint(-1, 2, p.shape) * 1.0)
        return net(
            op.code.format("self.c(x)"),
            c=m,
            slope=torch.rand(channels) * 0.5,
            one=torch.tensor([0.25]),
        )

    source: Shape | Make = shape
    if op.domain == "positive":
        source = positive(*shape)
    elif op.domain == "exact":
        source = quarters(*shape)
    return Case(
        f"{layer_kind}_{name}",
        build,
        [source],
        fused=f"{layer_kind} {op.kind}",
        groups=1 if op.one_group else None,
        modes=(*PLAIN, "autocast"),
        numbers_only=op.numbers_only,
    )


@table(
    eltwise_case(name, lambda: nn.Conv2d(8, 16, 3, padding=1), "conv", 16, (2, 8, 7, 6))
    for name in ELTWISE
)
def test_conv2d_eltwise(case: Case, mode: str) -> None:
    case.run(mode)


@table(eltwise_case(name, lambda: nn.Linear(16, 24), "linear", 24, (5, 16)) for name in ELTWISE)
def test_linear_eltwise(case: Case, mode: str) -> None:
    case.run(mode)


@table(
    # Alone, an elementwise op may be left to aten, whose kernel is as good.
    Case(
        name,
        lambda code=op.code: net(code.format("x"), slope=torch.rand(8), one=torch.tensor([0.25])),
        [
            {"any": (2, 8, 7, 6), "positive": positive(2, 8, 7, 6), "exact": quarters(2, 8, 7, 6)}[
                op.domain
            ]
        ],
    )
    for name, op in ELTWISE.items()
)
def test_lone_eltwise(case: Case, mode: str) -> None:
    case.run(mode)


NAN_OPS = {
    name: ELTWISE[name].code
    for name in (
        *("relu", "relu_", "relu6", "relu6_", "hardtanh", "hardtanh_", "leaky_relu", "elu"),
        *("clamp", "clamp_", "clamp_kw_min", "clamp_kw_max", "clamp_min", "clamp_max"),
        *("sigmoid", "tanh", "gelu", "silu", "hardswish", "hardsigmoid", "mish", "softplus"),
        *("sqrt", "abs", "exp", "log", "square", "round", "neg", "reciprocal", "rsqrt", "pow_half"),
    )
} | {
    "max_pool2d": "F.max_pool2d({}, 2)",
    "max_pool2d_padded": "F.max_pool2d({}, 3, 2, 1)",
    "relu_max_pool2d": "F.max_pool2d(torch.relu({}), 2)",
    "avg_pool2d": "F.avg_pool2d({}, 2)",
    "maximum": "torch.maximum({0}, -{0})",
    "minimum": "torch.minimum({0}, x)",
    "add_relu": "torch.relu({} + x)",
    "amax": "torch.amax({}, [2, 3])",
    "amin": "torch.amin({}, [2, 3])",
    "softmax": "torch.softmax({}, 1)",
}


@pytest.mark.parametrize("lone", [False, True], ids=["conv", "lone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAN_OPS)
def test_nan_and_infinity(name: str, dtype: torch.dtype, lone: bool) -> None:
    """They come out where eager has them."""
    code = NAN_OPS[name].format("x" if lone else "self.c(x)")
    check(
        net(code, c=one_by_one()),
        [special(2, 4, 8, 8)()],
        dtype=dtype,
        fused="" if lone else "conv",
        memory_format=torch.channels_last,
        fallbacks=True,  # a group that would lose a NaN steps aside
    )


def test_linear_relu_nan() -> None:
    m = net("torch.relu(self.l(x))", l=nn.Linear(8, 8))
    x = torch.randn(6, 8)
    x[2, 3], x[4, 1] = torch.nan, torch.inf
    check(m, [x], groups=1, fused="linear relu", fallbacks=True)


# -------------------------------------------------------------------------------------- patterns


LAYERS: dict[str, Any] = {
    "b": lambda: nn.BatchNorm2d(8),
    "c": (8, 8, 3),
    "d": (8, 8, 3),
    "e": (8, 8, 3),
}


def pattern(
    name: str,
    code: str,
    fused: str,
    groups: int | None = None,
    *,
    inputs: Sequence[Shape | Make] = ((2, 8, 7, 6),),
    outside: str = "",
    modes: Sequence[str] = tuple(MODES),
    f32_residual: bool = False,
    **layers: Any,
) -> Case:
    """`code` of x over layers.

    A layer is a zero-argument function, a tensor, an (in, out) Linear or an (in, out, kernel)
    convolution that keeps the size. self.b, .c, .d and .e need not be given. `f32_residual`: under
    autocast a bf16 and an fp32 tensor are added, which only newer versions of oneDNN can.
    """

    def build() -> nn.Module:
        made: dict[str, nn.Module | Tensor] = {}
        usual = {key: layer for key, layer in LAYERS.items() if f"self.{key}" in code}
        for key, layer in (usual | layers).items():
            match layer:
                case Tensor():
                    made[key] = layer
                case (fan_in, fan_out):
                    made[key] = nn.Linear(fan_in, fan_out)
                case (channels_in, channels_out, kernel):
                    padding = kernel // 2
                    made[key] = nn.Conv2d(channels_in, channels_out, kernel, padding=padding)
                case _:
                    made[key] = layer()
        return net(code, **made)

    numbers_only = ("autocast",) if f32_residual else ()
    return Case(name, build, inputs, fused, groups, outside, modes, numbers_only=numbers_only)


IMAGE = (2, 8, 7, 6)


PATTERNS = [
    pattern("conv_bn", "self.b(self.c(x))", "conv", 1),
    pattern("conv_bn_relu", "torch.relu(self.b(self.c(x)))", "conv relu", 1),
    pattern("conv_bn_silu", "F.silu(self.b(self.c(x)))", "conv silu", 1),
    pattern("conv_sum", "self.c(x) + x", "conv add", 1, f32_residual=True),
    pattern("conv_sum_relu", "torch.relu(self.c(x) + x)", "conv add relu", 1, f32_residual=True),
    pattern(
        "conv_bn_sum_relu_in_place",
        "y = self.b(self.c(x)); y += x; return F.relu(y, inplace=True)",
        "conv add relu",
        1,
        f32_residual=True,
    ),
    # Densenet: the norm cannot be folded.
    pattern("bn_relu_conv", "self.c(torch.relu(self.b(x)))", "conv batch_norm relu"),
    pattern(
        "bottleneck",
        "y = F.relu(self.b(self.c(x)), inplace=True); "
        "y = F.relu(self.b2(self.d(y)), inplace=True); y = self.b3(self.e(y)); y += x; "
        "return F.relu(y, inplace=True)",
        "conv add relu",
        None,  # 3; with AVX2 oneDNN 3.7 computes the first two convolutions in one partition
        c=(8, 8, 1),
        e=(8, 8, 1),
        b2=lambda: nn.BatchNorm2d(8),
        b3=lambda: nn.BatchNorm2d(8),
        f32_residual=True,
    ),
    pattern(
        "sum_of_two_convs", "torch.relu(self.c(x) + self.d(x))", "conv add relu", 2, d=(8, 8, 1)
    ),
    # An in-place sum into a value that is still needed.
    pattern(
        "skip_read_twice", "y = self.c(x); z = self.d(y) + y; return self.e(z) + y", "conv add"
    ),
    pattern(
        "skip_read_twice_relu",
        "y = torch.relu(self.c(x)); z = torch.relu(self.d(y) + y); "
        "return torch.relu(self.e(z) + y), z",
        "conv add relu",
    ),
    pattern(
        "skip_is_input_and_output",
        "y = self.c(x); return self.d(y) + y, y, x",
        "conv add",
        modes=PLAIN,
    ),
    pattern("sum_into_own_source", "torch.relu(self.c(x) + x) + x", "conv", modes=PLAIN),
    pattern(
        "broadcast_skip_is_not_overwritten",
        "y = self.c(x); return self.d(x) + y.mean([2, 3], True), y",
        "conv",
        modes=PLAIN,
    ),
    pattern("conv_read_twice", "y = self.c(x); return torch.relu(y) + torch.sigmoid(y)", "conv"),
    pattern("conv_is_output_too", "y = self.c(x); return torch.relu(y), y", "conv"),
    pattern(
        "several_outputs",
        "y = torch.relu(self.c(x)); return y, torch.relu(self.d(y)), self.e(y)",
        "conv relu",
        3,
    ),
    pattern(
        "same_output_twice", "y = torch.relu(self.c(x)); return y, y", "conv relu", 1, modes=PLAIN
    ),
    pattern(
        "list_output",
        "y = torch.relu(self.c(x)); return [y, self.d(y)]",
        "conv relu",
        2,
        modes=PLAIN,
    ),
    pattern(
        "dict_output",
        "y = torch.relu(self.c(x)); return {'a': y, 'b': self.d(y)}",
        "conv relu",
        2,
        modes=("scripted",),
    ),
    # Cumsum is not for oneDNN.
    pattern(
        "wildcard_cut",
        "self.d(torch.cumsum(torch.relu(self.c(x)), 1))",
        "conv relu",
        2,
        outside="cumsum",
    ),
    # What is fused must not run before what it waits for.
    pattern(
        "wildcard_around",
        "y = torch.relu(self.c(x)); z = torch.cumsum(y, 1); return self.d(y) + self.e(z) + y",
        "conv relu",
        outside="cumsum",
    ),
    pattern(
        "wildcard_in_place_on_input",
        "y = self.c(x); x.add_(1); return torch.relu(self.d(x)) + y",
        "",
        modes=PLAIN,
    ),
    pattern(
        "in_place_on_view",
        "y = self.c(x); y[:, :2].mul_(3); return torch.relu(self.d(y))",
        "",
        modes=PLAIN,
    ),
    pattern(
        "in_place_after_reader",
        "y = self.c(x); z = torch.relu(y); y.add_(1); return self.d(y) + z",
        "",
        modes=PLAIN,
    ),
    pattern("in_place_on_input", "F.relu(x, inplace=True); return self.c(x)", "", modes=PLAIN),
    pattern("in_place_sum_on_input", "x += self.c(x); return self.d(x)", "", modes=PLAIN),
    pattern("input_returned", "x, self.c(x)", "conv", 1, modes=PLAIN),
    pattern(
        "view_of_input_in_place",
        "y = x.view(-1); y.mul_(2); return self.c(x)",
        "",
        modes=("traced", "scripted", "bf16"),
    ),
    pattern(
        "squeeze_excite",
        "s = F.adaptive_avg_pool2d(x, 1); s = torch.sigmoid(self.d(F.silu(self.c(s)))); "
        "return self.e(x * s)",
        "conv silu sigmoid",
        c=(8, 4, 1),
        d=(4, 8, 1),
        e=(8, 8, 1),
    ),
    pattern(
        "squeeze_excite_hard",
        "y = F.hardswish(self.b(self.a(x))); "
        "s = F.hardsigmoid(self.d(torch.relu(self.c(y.mean([2, 3], True))))); "
        "return self.e(s * y) + x",
        "conv relu hardsigmoid hardswish add",
        a=(8, 8, 3),
        c=(8, 4, 1),
        d=(4, 8, 1),
        e=(8, 8, 1),
        f32_residual=True,
    ),
    pattern(
        "conv_max_pool", "F.max_pool2d(torch.relu(self.c(x)), 3, 2, 1)", "conv relu max_pool2d"
    ),
    pattern(
        "conv_pool_flatten_linear",
        "y = F.adaptive_avg_pool2d(torch.relu(self.c(x)), 1); return self.l(torch.flatten(y, 1))",
        "conv relu linear",
        l=(8, 5),
    ),
    # View, unlike flatten, needs eager's strides.
    pattern(
        "conv_view_linear",
        "y = torch.relu(self.c(x)); return self.l(y.view(y.size(0), -1))",
        "conv relu linear",
        modes=("traced", "scripted", "bf16", "autocast"),
        l=(8 * 42, 5),
    ),
    pattern(
        "conv_transpose_conv",
        "self.d(torch.relu(self.u(self.c(x))))",
        "conv relu",
        3,
        u=lambda: nn.ConvTranspose2d(8, 8, 2, 2),
    ),
    # A U-Net's way up.
    pattern(
        "upsample_cat",
        "y = self.c(F.max_pool2d(x, 2)); "
        "y = F.interpolate(y, scale_factor=2.0, mode='nearest'); "
        "return self.d(torch.cat([x, y], 1))",
        "conv max_pool2d cat",
        inputs=[(2, 8, 8, 6)],
        d=(16, 8, 3),
    ),
    pattern(
        "channel_shuffle",
        "y = torch.relu(self.c(x)); b, c, h, w = y.shape; "
        "y = y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w); "
        "return self.d(y)",
        "conv relu",
    ),
    pattern(
        "chunk",
        "a, b = x.chunk(2, 1); return torch.cat([a, self.c(b)], 1)",
        "conv",
        modes=("traced", "channels_last", "bf16"),
        c=(4, 4, 3),
    ),
    pattern(
        "mlp",
        "self.m(F.gelu(self.l(x)))",
        "linear gelu",
        2,
        inputs=[(2, 5, 16)],
        l=(16, 32),
        m=(32, 16),
    ),
    pattern(
        "gated_mlp",
        "self.d(F.silu(self.g(x)) * self.u(x))",
        "linear silu mul",
        inputs=[(2, 5, 16)],
        g=lambda: nn.Linear(16, 32, bias=False),
        u=lambda: nn.Linear(16, 32, bias=False),
        d=lambda: nn.Linear(32, 16, bias=False),
    ),
    pattern(
        "pre_norm_residual",
        "x = x + self.l(self.n(x)); return x + self.m(self.o(x))",
        "linear layer_norm add",
        inputs=[(2, 5, 16)],
        l=(16, 16),
        m=(16, 16),
        n=lambda: nn.LayerNorm(16),
        o=lambda: nn.LayerNorm(16),
        f32_residual=True,
    ),
    pattern(
        "post_norm_residual",
        "self.n(x + self.m(F.gelu(self.l(x))))",
        "linear layer_norm gelu add",
        inputs=[(2, 5, 16)],
        l=(16, 32),
        m=(32, 16),
        n=lambda: nn.LayerNorm(16),
        f32_residual=True,
    ),
    pattern(
        "convnext_block",
        "y = self.n(self.c(x).permute(0, 2, 3, 1)); "
        "y = (self.m(F.gelu(self.l(y))) * self.s).permute(0, 3, 1, 2); return x + y",
        "conv linear gelu layer_norm",
        c=lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8),
        n=lambda: nn.LayerNorm(8),
        l=(8, 32),
        m=(32, 8),
        s=torch.full((8,), 0.3),
    ),
    pattern(
        "scale_and_shift",
        "torch.relu(self.c(x) * self.s + self.t)",
        "conv relu",
        s=torch.rand(8, 1, 1) + 0.5,
        t=torch.rand(8, 1, 1),
    ),
    pattern(
        "rms_norm_by_hand",
        "v = x.pow(2).mean(-1, keepdim=True); return self.l(x * torch.rsqrt(v + 1e-6) * self.w)",
        "linear",
        inputs=[(2, 5, 16)],
        l=(16, 16),
        w=torch.rand(16) + 0.5,
    ),
    pattern(
        "dropout", "self.c(F.dropout(torch.relu(self.d(x)), 0.5, self.training))", "conv relu", 2
    ),
    pattern(
        "identity_ops",
        "self.d(torch.relu(self.c(x)).contiguous().to(x.dtype).detach())",
        "conv relu",
    ),
    pattern("expand", "self.c(x) + self.t.expand(2, 8, 7, 6)", "conv", t=torch.rand(1, 8, 1, 1)),
    pattern(
        "shape_arithmetic",
        "y = self.c(x); return torch.relu(y) * (y.size(2) * y.size(3) / 7)",
        "conv relu",
    ),
    # Makes the built-in fuser raise.
    pattern(
        "zero_dim_tensor_arithmetic",
        "t = torch.tensor(2.0) * torch.tensor(3.0); return torch.relu(self.c(x) * t)",
        "conv",
    ),
    # Rounding another way would flip the integer: eager's own numbers.
    pattern(
        "float_to_int_bucket",
        "self.e[(torch.log(x.abs() + 1) * 4).to(torch.long).clamp(0, 7)] + self.l(x).sum()",
        "linear",
        inputs=[(5, 16)],
        modes=("traced", "scripted"),
        e=torch.randn(8),
        l=(16, 16),
    ),
]


@table(PATTERNS)
def test_pattern(case: Case, mode: str) -> None:
    case.run(mode)


# ------------------------------------------------------------------------- control flow, scripts


class Branches(nn.Module):
    """Convolutions inside prim::If and prim::Loop."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d, self.e = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor, n: int) -> Tensor:
        y = torch.relu(self.c(x))
        if n > 2:
            y = torch.relu(self.d(y)) + x
        else:
            y = torch.sigmoid(self.e(y))
        for _ in range(n):
            y = torch.relu(self.c(y) + x)
        return y


IN_PLACE = {
    "same": (torch.float32, torch.float32, IMAGE),
    "keeps_bf16": (torch.bfloat16, torch.float32, IMAGE),
    "keeps_f32": (torch.float32, torch.bfloat16, IMAGE),
    "keeps_f64": (torch.float64, torch.float32, IMAGE),
    "integer": (torch.int64, torch.int64, IMAGE),
    "not_into_integer": (torch.int64, torch.float32, IMAGE),
    "broadcast": (torch.float32, torch.float32, (1, 1, 1, 1)),
    "not_broadcast": (torch.float32, torch.float32, (3, *IMAGE)),
}


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place_result_type(case: str, scripted: bool) -> None:
    """An in-place op casts its result to the type of its target, or raises, whatever is fused."""
    module = net("y = x.abs(); y += z; return y.mul_(z).abs()", "x, z")
    warm = torch.randn(IMAGE), torch.randn(IMAGE)
    dtype, other, size = IN_PLACE[case]
    values = (torch.randn(IMAGE) * 9).to(dtype), (torch.randn(size) * 9).to(other)
    with torch.no_grad():
        script = to_script(module, warm, scripted=scripted, freeze=False)
        for _ in range(3):
            script(*twin(warm))
        for _ in range(2):
            try:
                expected = module(*twin(values))
            except RuntimeError as error:
                message = str(error).split(" [")[0].split("\n")[0]
                with pytest.raises(RuntimeError, match=re.escape(message)):
                    script(*twin(values))
            else:
                assert_same(script(*twin(values)), expected)


@pytest.mark.parametrize("code", ["x + (x * y) * 0.5", "(x * y) + x", "x + (x / y)"])
def test_tensor_from_outside_is_added_without_a_copy(code: str) -> None:
    m = net(f"F.relu(torch.tanh({code}))", "x, y").eval()
    inputs = [torch.rand(3, 40, 50) + 1, torch.rand(3, 40, 50) + 1]
    check(m, inputs, groups=1, fused="add")
    report = llga_fuser.report(m, *inputs, rounds=1)
    kinds = [p.kind for g in report.groups for p in g.primitives]
    assert kinds and "reorder" not in kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code", ["y + t", "torch.relu(y) * t", "t - y"])
@pytest.mark.parametrize(
    "operand",
    [
        *((2, 4, 6, 5), (1, 4, 6, 5), (4, 6, 5), (2, 1, 6, 5), (2, 4, 1, 5), (2, 4, 6, 1)),
        *((1, 1, 1, 5), (1, 4, 6, 1), (4, 1, 5), (6, 5), (6, 1), (5,), (1,), ()),
    ],
    ids=str,
)
def test_operand_of_a_linear_layer(operand: tuple[int, ...], code: str, dtype: torch.dtype) -> None:
    """Whose rows oneDNN folds to two dimensions, those of an operand that is fused to it too."""
    module = net(f"y = self.l(x)\nreturn {code}", "x, t", l=nn.Linear(7, 5)).to(dtype)
    check(module, [torch.randn(2, 4, 6, 7).to(dtype), torch.randn(operand).to(dtype)], dtype=dtype)


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


def kernels_of(module: nn.Module, *inputs: Tensor) -> list[str]:
    groups = llga_fuser.report(module, *inputs, rounds=1).groups
    return [group.main.implementation for group in groups if group.main is not None]


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


def residual_network() -> nn.Module:
    return net(
        """
        x = torch.relu_(self.n(self.c(x)))
        y = self.e(self.d(x)).add_(x)
        return self.l(F.gelu(y).mean((2, 3))), (y + 1).relu_().chunk(2, 1)[0]
        """,
        c=nn.Conv2d(3, 16, 3, padding=1),
        n=nn.BatchNorm2d(16),
        d=nn.Conv2d(16, 32, 1),
        e=nn.Conv2d(32, 16, 3, padding=1),
        l=nn.Linear(16, 10),
    ).eval()


@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_bfloat16_in_float32(mode: str) -> None:
    """Where there are no kernels for it, it is computed in float32, and looks as in eager."""
    if fuses(torch.bfloat16):
        pytest.skip("oneDNN has kernels for bf16; test_operator.py runs this without them")
    autocast = mode == "autocast"
    m, x = residual_network(), torch.randn(2, 3, 20, 24)
    exact = copy.deepcopy(m)
    if not autocast:
        m, x = m.bfloat16(), x.bfloat16()
        exact = copy.deepcopy(m).float()
    with torch.no_grad():
        with autocast_bf16(autocast):
            eager = m(x)
        best = exact(x.float())
        script = to_script(m, [x], autocast=autocast)
        before = llga_fuser._C.fallbacks()
        for image in (x, x.flip(0), x.contiguous(memory_format=torch.channels_last), x):
            results = script(image)
        assert llga_fuser._C.fallbacks() == before
        for ours, theirs, right in zip(results, eager, best, strict=True):
            assert ours.dtype == theirs.dtype == torch.bfloat16
            assert ours.stride() == theirs.stride()
            errors = [(y.float() - right).norm() for y in (ours, theirs)]
            assert errors[0] <= errors[1] + 1e-3 * right.norm()
        found = fused_graph(script, x)
    expect(found, fused="_convolution linear gelu")
    assert found.outside["llga::narrow"] == 2  # the results
    assert found.outside["llga::wide"] == (0 if autocast else 1)


class Attending(nn.Module):
    """Attention between linear layers, with what it reads and gives as heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, tokens, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(n, tokens, 32))


@pytest.mark.parametrize("m", [residual_network(), Attending().eval()], ids=["images", "attention"])
def test_bfloat16_in_float32_within_autocast(m: nn.Module) -> None:
    """Eager's autocast, which rounds in PyTorch's products, has no say in groups."""
    if fuses(torch.bfloat16):
        pytest.skip("groups compute in bf16; test_operator.py runs this without")
    x = torch.randn(2, 9, 32) if isinstance(m, Attending) else torch.randn(2, 3, 20, 24)

    def same_as_eager(result: Any) -> None:
        """But for data types: TorchScript's autocast adds in float32."""
        ours, theirs = ([y.double() for y in leaves(values)] for values in (result, m(x)))
        assert_same(ours, theirs, tol=TOLERANCES[torch.bfloat16])

    with torch.no_grad(), autocast_bf16(True):
        script = torch.jit.freeze(torch.jit.trace(m, x, check_trace=False))
        before = llga_fuser._C.fallbacks()
        for _ in range(4):
            result = script(x)
        assert llga_fuser._C.fallbacks() == before
        same_as_eager(result)
        found = fused_graph(script, x)
        products = ("aten::linear", "aten::_convolution", "aten::scaled_dot_product_attention")
        assert found.inside["llga::as_float"] == sum(found.inside[kind] for kind in products) > 0
        assert not any(found.outside[kind] for kind in (*products, "llga::as_float")), found
        x[0] = math.nan  # in the interpreter
        same_as_eager(script(x))


def test_bfloat16_in_float32_of_other_inputs() -> None:
    """What eager raises for raises; gradients and autocast are as they were."""
    if fuses(torch.bfloat16):
        pytest.skip("oneDNN has kernels for bf16; test_operator.py runs this without them")
    m, x = residual_network().bfloat16(), torch.randn(2, 3, 20, 24)
    narrow = x.bfloat16()
    with torch.no_grad():
        script = to_script(m, [narrow])
        for _ in range(3):
            script(narrow)
        for wrong in (x, x.double()):
            for f in (m, script):
                with pytest.raises(RuntimeError, match=r"type|BFloat16"):
                    f(wrong)
        with torch.autocast("cpu", torch.bfloat16):
            for y in (narrow, x):  # TorchScript's autocast adds in float32
                results = [r.bfloat16() for r in script(y)]
                assert_same(results, list(m(y)), tol=TOLERANCES[torch.bfloat16])
    gradients = []
    for f in (m, script):
        y = narrow.clone().requires_grad_()
        f(y)[0].square().sum().backward()
        gradients.append(y.grad)
    assert gradients[0].dtype == gradients[1].dtype == torch.bfloat16
    difference = (gradients[0] - gradients[1]).float().norm() / gradients[0].float().norm()
    assert difference < 0.05
    compiled = llga_fuser.compile(m, (narrow,), release_weights=True)
    with torch.no_grad():
        assert_same(compiled(narrow), m(narrow), tol=TOLERANCES[torch.bfloat16])


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
    "silu_and_sum": Direct((1, 16, 12, 11), 16, code="F.silu(self.c(x)) + x", own=False),
    "two_planes": Direct((1, 2, 24, 25), 32, window=5, padding=2, code="F.silu(self.c(x))"),
    "planes_large_window": Direct((1, 3, 113, 112), 64, window=7, stride=2, own=False),
    "large": Direct((1, 32, 32, 32), 32, own=False),
    "heavy": Direct((1, 64, 4, 4), 64, own=False),
    "short": Direct((1, 1, 9, 9), 16, own=False),
    "few": Direct((1, 16, 9, 9), 3, own=False),
}


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
    m, size = direct(case), DIRECT[case].size
    x = torch.randn(*size[:3], 2 * size[3])[..., ::2]
    if layout == "transposed":
        x = torch.randn(size[1], size[0], size[3], size[2]).permute(1, 0, 3, 2)
    elif layout != "gaps":
        last = layout == "channels_last"
        form = torch.channels_last if last else torch.contiguous_format
        x = x.contiguous(memory_format=form)
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
    "one": Direct((1, 1, 99, 98), 24, window=8, padding=3, own=False),
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
    x = torch.randn(*c.size[:3], 2 * c.size[3])[..., ::2]
    if layout != "gaps":
        last = layout == "channels_last"
        x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        check(m, [x], groups=2, fused="_convolution")
        with_silu = "silu" in c.code and not has_avx2_kernels()  # else it is a step of its own
        own = c.own and (threads > 1 or with_silu)
        assert is_direct(kernels_of(m, x)[0]) == (own and has_own_kernels())


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
        assert ("llga_mean" in kernels_of(m, x)) == (c.own and has_own_kernels())


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
    "residual": Applied("self.c(x) + x", (1, 16, 17, 19), apart=True),
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
    if case == "residual" and function == "F.silu":
        apart = False  # in no pattern of oneDNN, so in no group with the sum
    if case == "read twice" and function in {"gate", "F.gelu", "tanh gelu"}:
        apart = True  # groups of their own
    slow = has_own_kernels() if function == "tanh gelu" else has_avx2_kernels()
    assert ("llga_activation:avx2" in kernels) == (apart and slow), kernels


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
    [("none", torch.float32), ("tanh", torch.float32), ("tanh", torch.bfloat16)],
    ids=["erf", "tanh", "tanh-bf16"],
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
    slow = has_own_kernels() if approximate == "tanh" else has_avx2_kernels()
    assert (kernels == ["llga_activation:avx2"]) == (case != "few" and slow), kernels


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


@pytest.mark.parametrize("call", ["outside", "inside"])
@pytest.mark.parametrize("freeze", ["outside", "inside"])
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_torchscript_autocast(scripted: bool, freeze: str, call: str) -> None:
    """Freezing or calling under autocast, TorchScript puts casts before products and sums."""
    m = net(
        "y = self.p(F.relu(self.b(self.c(x)), inplace=True))\n"
        "z = F.relu(self.d(y), inplace=True)\nz = self.e(z)\nz += y\n"
        "y = z + self.e(F.relu(z))\ny = y + self.e(y)\ny = y * torch.sigmoid(self.e(y))\n"
        "return self.f(torch.flatten(F.relu(y, inplace=True), 1))",
        c=nn.Conv2d(8, 16, 3, bias=False),
        b=nn.BatchNorm2d(16),
        p=nn.MaxPool2d(3, 2, 1),
        d=nn.Conv2d(16, 16, 3, padding=1),
        e=nn.Conv2d(16, 16, 1),
        f=nn.Linear(96, 5),
    ).eval()
    x = torch.randn(IMAGE)
    with torch.no_grad():
        with autocast_bf16():
            expected = m(x)
            script = torch.jit.script(m) if scripted else torch.jit.trace(m, x, check_trace=False)
        with autocast_bf16(freeze == "inside"):
            script = torch.jit.freeze(script)
        with autocast_bf16(call == "inside"):
            for _ in range(4):
                result = script(x)
            found = fused_graph(script, x)
    reduced = not scripted or "inside" in (freeze, call)
    assert result.dtype == (torch.bfloat16 if reduced else torch.float32)
    assert_same(result.to(expected.dtype), expected, tol=TOLERANCES[torch.bfloat16])
    # The image's, which both may do; all else is done once or has nothing to do.
    casts = found.outside["aten::_autocast_to_reduced_precision"] + found.outside["aten::to"]
    assert casts <= 1, found
    assert "aten::_autocast_to_full_precision" not in found.outside + found.inside, found
    expect(found, fused="conv linear max_pool2d")


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "convolutions"), [(0, 2), (1, 3), (3, 3)])
def test_control_flow(n: int, convolutions: int, dtype: torch.dtype) -> None:
    """Nested blocks are fused inside, at least what the first call has run."""
    found = check(Branches(), [torch.randn(IMAGE), n], scripted=True, dtype=dtype)
    assert found.inside["aten::conv2d"] >= convolutions, found


class Growing(nn.Module):
    """Lists of tensors in a script, as in a dense block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(8 * (i + 1), 8, 3, padding=1) for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(torch.relu(layer(torch.cat(features, 1))))
        return torch.cat(features, 1)


@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_dense_block(scripted: bool) -> None:
    found = check(Growing(), [torch.randn(IMAGE)], scripted=scripted, fused="conv relu")
    if not scripted:  # the first one has nothing to concatenate
        assert found.inside["aten::cat"] >= 3, found


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
    kind = "gemv:avx2" if math.prod(outer) == 1 and "y" not in code else "gemm"
    assert len(narrow) == has_own_kernels()
    assert all(name.startswith("llga_" + kind.replace(":", "_bf16_weight:")) for name in narrow)
    with torch.no_grad():
        m.l.weight[-1, -1] += 2.0**-20  # one number is enough
    assert not any("_bf16_weight" in name for name in kernels_of(m, x, y))
    check(m, [x, y], groups=1, fused="linear")


@pytest.mark.parametrize("special", [math.nan, math.inf, 3e38, 1e-40])
def test_special_numbers_of_a_narrow_weight(special: float) -> None:
    m = net("self.l(x)", l=nn.Linear(40, 24)).eval()
    m.l.weight.data = m.l.weight.detach().bfloat16()
    m.l.weight.data[3, 5] = special
    m.l.weight.data = m.l.weight.data.float()
    for rows in (1, 3):
        check(m, [torch.randn(rows, 40)])


TILED = "llga_gemm:amx_bf16"


class Tiled(NamedTuple):
    """A linear layer of bfloat16, or of images a pointwise convolution, and what follows it."""

    size: tuple[int, ...]
    outputs: int
    code: str = "self.l(x)"
    bias: bool = True
    threads: int = 2
    own: bool = True


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
    "sum": Tiled((40, 64), 64, "self.l(x) + x"),
    "sum first": Tiled((40, 64), 64, "x + self.l(x)"),
    "sum over its addend": Tiled((70, 64), 64, "z = torch.tanh(x * 2)\nreturn z + self.l(x)"),
    "relu": Tiled((40, 64), 96, "F.relu(self.l(x))"),
    "relu of a sum": Tiled((40, 64), 64, "F.relu(self.l(x) + x)"),
    "gelu": Tiled((50, 64), 1000, "F.gelu(self.l(x))"),
    "gelu, tanh": Tiled((50, 64), 300, "F.gelu(self.l(x), approximate='tanh')"),
    "silu": Tiled((50, 64), 83, "F.silu(self.l(x))"),
    "sigmoid": Tiled((50, 64), 83, "torch.sigmoid(self.l(x))"),
    "tanh": Tiled((50, 64), 83, "torch.tanh(self.l(x))"),
    "hardswish": Tiled((50, 64), 83, "F.hardswish(self.l(x))"),
    "images": Tiled((2, 32, 9, 11), 72),
    "images, sum": Tiled((1, 32, 9, 11), 32, "F.relu(self.l(x) + x)"),
    "images, silu": Tiled((2, 34, 9, 11), 33, "F.silu(self.l(x))"),
    "one pixel": Tiled((20, 32, 1, 1), 8, "F.relu(self.l(x))"),
    # What stays with oneDNN.
    "odd inputs": Tiled((40, 63), 96, own=False),
    "few rows by a large weight": Tiled((15, 768), 768, own=False),
    "many products": Tiled((1100, 704), 704, own=False),
    "other activation": Tiled((40, 64), 96, "F.elu(self.l(x))", own=False),
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
    """With matrix units they have a kernel of our own."""
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
    assert (TILED in found) == (c.own and has_matrix_units()), found


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
    "copied": Rows((2, 20, 64), 48, code="self.l(x).transpose(0, 1).reshape(40, 48)", own=""),
    "images": Rows((1, 512, 7, 9), 260, own="avx512"),
    "images_and_relu": Rows((2, 400, 5, 7), 333, code="F.relu(self.l(x))", own="avx512"),
    "images_and_relu6": Rows((1, 512, 7, 7), 256, code="F.relu6(self.l(x))", own="avx512"),
    "images_and_silu": Rows((1, 512, 7, 7), 256, code="F.silu(self.l(x))", own="avx512"),
    "images_and_skip": Rows(
        (1, 512, 7, 7), 256, code="F.relu(self.l(x) + y)", bias=False, own="avx512"
    ),
    "one_pixel_and_skip": Rows((1, 512, 1, 1), 256, code="F.relu(self.l(x) + y)", own="avx512"),
    "pixels": Rows((30, 512, 1, 1), 256, own="avx512"),
    "large_images": Rows((1, 512, 20, 11), 256, own=""),
    "images_of_few_channels": Rows((1, 256, 7, 7), 256, own=""),
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


@pytest.mark.usefixtures("all_threads")
def test_linear_of_changing_rows() -> None:
    """All sizes share one weight in panels."""
    m = net("self.d(F.relu(self.c(x)))", c=nn.Linear(40, 50), d=nn.Linear(50, 30)).eval()
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
        assert panels <= llga_fuser.cache_info().packed_bytes - before <= 3 * panels


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
    groups: int = 1  # fusion groups
    threads: int = 2
    own: bool = True
    narrow: bool = False  # in bfloat16 too, without matrix units

    @property
    def pays(self) -> bool:
        """In float32: reading the weights is not most of it."""
        pixels = math.prod(self.size[2:])
        fewest = (24 if has_avx2_kernels() else 96) * self.threads
        return pixels >= 40 and self.size[0] * pixels >= fewest


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
    "large": Expansion((4, 16, 72, 64), 128, 24, narrow=True),
    "large, stride": Expansion((4, 16, 73, 64), 128, 19, stride=2, narrow=True),
    "large, residual": Expansion((4, 16, 72, 64), 144, 16, sum="+ x", narrow=True),
    "large, silu": Expansion((4, 16, 72, 64), 128, 24, inner="F.silu", outer="F.silu", narrow=True),
    "large, one thread": Expansion((4, 16, 72, 64), 128, 24, threads=1, bias=False, narrow=True),
    "large, odd inputs": Expansion((4, 15, 72, 64), 128, 24),
    "large, two": Expansion((4, 16, 72, 64), 128, outer="F.hardswish", narrow=True),
    "large, two, five": Expansion(
        (4, 8, 72, 64),
        144,
        window=5,
        stride=2,
        padding=2,
        inner="F.silu",
        outer="F.silu",
        narrow=True,
    ),
    "two": Expansion((1, 16, 96, 80), 112),
    "two, stride": Expansion((1, 16, 96, 80), 112, stride=2, inner="F.silu", outer="F.silu"),
    "two, one thread": Expansion((1, 16, 96, 80), 112, inner="F.silu", outer="", threads=1),
    "two, five": Expansion((1, 8, 61, 80), 176, window=5, padding=2, outer="F.silu"),
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
    "one vector and a bit": Expansion((1, 16, 14, 14), 17, 24, window=5, padding=2),
    "large, other channels": Expansion((4, 16, 72, 64), 138, 24, narrow=True),
    "other number of channels": Expansion((1, 16, 96, 80), 97, own=False),
    "window": Expansion((1, 16, 14, 14), 96, 24, window=7, padding=3, own=False),
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
        code,
        c=nn.Conv2d(c.size[1], c.channels, 1, bias=c.bias),
        d=d,
        e=nn.Conv2d(c.channels, max(c.outputs, 1), 1, bias=c.bias),
        a=nn.Conv2d(c.size[1], max(c.outputs, 1), 1),
        b=nn.Conv2d(c.size[1], max(c.outputs, 1), 1, c.stride),
    )
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
    pays = c.own and c.pays
    activated = "F.silu" in (c.inner, c.outer)
    expanded = c.channels * c.size[0] * math.prod(c.size[2:])
    even = c.size[1] % 2 == 0 and c.channels % 2 == 0
    if dtype == torch.bfloat16 and has_matrix_units():
        slow = c.outputs == 0 and not activated  # where oneDNN is as fast
        many = c.stride != 1 or expanded > 2**19
        pays = c.own and even and not (slow and many)
    elif dtype == torch.bfloat16:
        worth = c.own and even and activated and expanded >= 2**17
        pays = (c.narrow or worth) and has_narrow_products()
    assert len(own) == (pays and has_own_kernels()), found


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
    "odd channels": First((1, 3, 57, 64), 33, own=False),
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
    x = torch.randn(*c.size[:3], 2 * c.size[3])[..., ::2]
    if layout != "gaps":
        last = layout == "channels_last"
        x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    check(m, [x], groups=2 if c.own else None, fused="_convolution")
    found = kernels_of(m, x)
    with torch.no_grad():
        pixels = math.prod(m.c(x).shape[2:])
    fewest = (24 if has_avx2_kernels() else 96) * c.threads
    pays = pixels >= 40 and c.size[0] * pixels >= fewest
    own = [name for name in found if name.startswith("llga_expansion")]
    assert len(own) == (c.own and pays and has_own_kernels()), found
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
@pytest.mark.parametrize("case", ["plain", "stride", "residual", "two", "two, five"])
def test_expansion_of_contiguous_images(case: str) -> None:
    """They are not channels last, and so not for the kernel: oneDNN's, one after the other."""
    c = EXPANSIONS[case]
    check(expansion(c), [torch.randn(c.size)], groups=1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
@pytest.mark.parametrize("activation", ["F.relu6", "F.silu", "F.hardswish", ""])
def test_expansion_of_special_values(activation: str, value: float, threads: int) -> None:
    c = EXPANSIONS["batch"]._replace(inner=activation, outer=activation, sum="+ self.a(x)")
    m = expansion(c).to(memory_format=torch.channels_last)
    x = torch.randn(c.size).to(memory_format=torch.channels_last)
    check_second_image(m, x, value, threads)


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


NO_COPY = """
import sys, torch, llga_fuser
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.d, self.e = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 3), nn.Conv2d(32, 8, 1)
        self.n = nn.BatchNorm2d(32)

    def forward(self, x):
        return self.e(torch.relu(self.n(torch.cat([self.c(x), self.d(x)], 1))))

llga_fuser.compile(Net().eval(), torch.rand(1, 3, 64, 64))
"""


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "not joined"])
def test_concat_and_batch_norm_do_not_copy(joined: bool) -> None:
    ran = primitives(NO_COPY, LLGA_FUSER_DISABLE_PASSES="" if joined else "join_concat")
    copied = any(",concat," in line or ",batch_normalization," in line for line in ran)
    assert copied is not joined, ran


def primitives(code: str, **environment: str) -> list[str]:
    """Those that oneDNN executes for a program with convolutions."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "ONEDNN_VERBOSE": "1",
            **environment,
        },
    )
    ran = [line for line in done.stdout.splitlines() if ",exec," in line]
    assert any(",convolution," in line for line in ran), done.stdout
    return ran


RESIDUAL = """
import torch, llga_fuser
from torch import nn
class Block(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.a, self.b = nn.Conv2d(inputs, 64, 1), nn.Conv2d(64, 64, 3, padding=1)
        self.c = nn.Conv2d(64, 256, 1)
        self.d = nn.Conv2d(inputs, 256, 1) if inputs != 256 else nn.Identity()

    def forward(self, x):
        return torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x))))) + self.d(x))

x = torch.rand(1, 64, 56, 56).to(memory_format=torch.channels_last).bfloat16()
m = llga_fuser.compile(nn.Sequential(Block(64), Block(256), Block(256)).eval().bfloat16(), x)
print(m(x).isnan().any())
"""


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_is_written_over_what_its_group_has_read_before(dtype: torch.dtype) -> None:
    """The block's data is the addend as well; a block that somebody else reads keeps it."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    layers: dict[str, nn.Module] = {"s": nn.Conv2d(8, 24, 1), "e": nn.Conv2d(24, 144, 1)}
    layers["d"] = nn.Conv2d(144, 144, 3, padding=1, groups=144)
    layers["p"] = nn.Conv2d(144, 24, 1)
    block = "y + self.p(F.relu6(self.d(F.relu6(self.e(y)))))"
    x = torch.randn(1, 8, 9, 11)
    for result in ("z.sum((2, 3))", "z.sum((2, 3)) - y.mean((2, 3))"):
        m = net(f"y = F.relu(self.s(x))\nz = {block}\nreturn {result}", **layers).eval()
        check(m, [x], fused="_convolution", dtype=dtype)
        found = llga_fuser.report(m.to(dtype), x.to(dtype), rounds=1).conversions
        copies = [c for c in found if c.kind == "copy" and "1x24x9x11" in c.text]
        assert "mean" in result or not copies, found
        m.float()


@pytest.mark.parametrize("arena", ["on", "off"])
def test_sums_are_written_over_their_addends(arena: str) -> None:
    """Else oneDNN copies an addend to where it writes the sum, 1x256x56x56 numbers."""
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    ran = primitives(RESIDUAL, LLGA_FUSER_ARENA=arena)
    copied = any(",reorder," in line and ",1x256x56x56," in line for line in ran)
    apart = has_narrow_products() and not has_matrix_units()  # else it is one partition
    assert copied == (arena == "off" and apart), ran


def nothing() -> Tensor:
    return torch.ones(2, 3) * 2 + 1


def constants() -> list[int]:
    return [1, 2]


@pytest.mark.parametrize("fn", [nothing, constants])
def test_script_without_inputs(fn: Callable[[], Any]) -> None:
    """The built-in fuser crashes here."""
    check(fn, [], scripted=True)


class NoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 3)
        self.register_buffer("x", torch.randn(IMAGE))

    def forward(self) -> Tensor:
        return torch.relu(self.c(self.x))


@pytest.mark.parametrize("freeze", [False, True], ids=["unfrozen", "frozen"])
def test_module_without_inputs(freeze: bool) -> None:
    check(NoInputs(), [], scripted=True, freeze=freeze)


def raises_on_negative(x: Tensor) -> Tensor:
    if bool((x < 0).any()):
        raise ValueError("negative")
    return torch.relu(torch.matmul(x, x))


def test_script_that_raises() -> None:
    script = torch.jit.script(raises_on_negative)
    good, bad = torch.rand(4, 4), -torch.rand(4, 4)
    with torch.no_grad():
        for _ in range(3):
            assert_same(script(good), raises_on_negative(good))
            with pytest.raises(torch.jit.Error, match="negative"):
                script(bad)


def test_function_traced_with_constants() -> None:
    weight = torch.randn(8, 8, 3, 3)
    check(
        lambda x: torch.relu(F.conv2d(x, weight)), [torch.randn(IMAGE)], groups=1, fused="conv relu"
    )


@pytest.mark.parametrize("folded", [True, False], ids=["folded", "not folded"])
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_table_made_of_constants(scripted: bool, folded: bool) -> None:
    """Swin V2's position bias: the in-place op keeps torch from folding it when it freezes.

    oneDNN would compute it in the first call and leave the result of later ones unwritten.
    """
    table = net(
        "self.m(self.t)[self.i].permute(2, 0, 1)",
        args="",
        m=nn.Sequential(nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, 4, bias=False)),
        t=torch.randn(225, 2),
        i=torch.randint(0, 225, (6, 6)),
    )
    module = net("self.l(x) + 16 * torch.sigmoid(self.t())", l=nn.Linear(6, 6), t=table)
    llga_fuser._C.set_pass_enabled("fold_constants", folded)
    try:
        found = check(module, [torch.randn(2, 4, 6, 6)], scripted=scripted)
    finally:
        llga_fuser._C.set_pass_enabled("fold_constants", True)
    left = [k for k in found.outside if k.startswith("aten::")]
    assert folded == (not left), found


def test_hook_and_submodule_call() -> None:
    """A traced module scripted into another one."""
    inner = torch.jit.trace(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval(), torch.randn(IMAGE))
    check(
        net("self.inner(x).mean()", inner=inner),
        [torch.randn(IMAGE)],
        scripted=True,
        fused="conv relu",
    )


# ----------------------------------------------------------------- tensors oneDNN is not meant for


def conv_relu() -> nn.Module:
    return net("torch.relu(self.c(x))", c=nn.Conv2d(8, 8, 3, padding=1)).eval()


def warmed(module: nn.Module, *inputs: Tensor, freeze: bool = True) -> Any:
    """Traced, and called until its plan with fusion groups is the one that runs."""
    with torch.no_grad():
        script = to_script(module, inputs, freeze=freeze)
        for _ in range(3):
            script(*inputs)
        found = fused_graph(script, *inputs)
    assert found.groups, f"nothing is fused, so the test would show nothing:\n{found}"
    return script


def outcome(fn: Callable[..., Any], *inputs: Any) -> tuple[Any, str | None]:
    """The result, or the line of the error that says what was wrong (others are the traceback)."""
    try:
        result = fn(*(twin(x) for x in inputs))
    except Exception as error:
        return None, str(error).strip().splitlines()[-1]
    if isinstance(result, Tensor) and result.layout != torch.strided:
        return result.to_dense(), None
    if isinstance(result, Tensor) and result.is_quantized:
        return result.dequantize(), None
    return result, None


def assert_same_outcome(script: Any, plain: Any, *inputs: Any) -> None:
    """The same numbers, or the same error."""
    with llga_fuser.fusion(False):
        want, error = outcome(plain, *inputs)
    for _ in range(3):
        got, ours = outcome(script, *inputs)
        assert ours == error
        if error is None:
            assert_same(got, want)


ODD = {
    "double": lambda: torch.randn(IMAGE, dtype=torch.double),
    "half": lambda: torch.randn(IMAGE, dtype=torch.half),
    "complex": lambda: torch.randn(IMAGE, dtype=torch.cfloat),
    "int": lambda: torch.randint(-5, 5, IMAGE),
    "uint8": lambda: torch.randint(0, 5, IMAGE, dtype=torch.uint8),
    "bool": lambda: torch.randint(0, 2, IMAGE, dtype=torch.bool),
    "meta": lambda: torch.empty(IMAGE, device="meta"),
    "bfloat16": lambda: torch.randn(IMAGE, dtype=torch.bfloat16),
    "sparse": lambda: torch.randn(IMAGE).to_sparse(),
    "mkldnn": lambda: torch.randn(IMAGE).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(IMAGE), 0.1, 3, torch.qint8),
    "no_batch": lambda: torch.randn(IMAGE[1:]),
    "too_few_dims": lambda: torch.randn(8, 7),
    "too_many_dims": lambda: torch.randn(1, *IMAGE),
    "wrong_channels": lambda: torch.randn(2, 4, 7, 6),
    "too_small": lambda: torch.randn(2, 8, 1, 1),
    "no_images": lambda: torch.randn(0, 8, 7, 6),
    "no_pixels": lambda: torch.randn(2, 8, 0, 6),
    "no_channels": lambda: torch.randn(2, 0, 7, 6),
}
ODD_BODIES = {
    "conv_relu": conv_relu,
    "conv_valid": lambda: net("torch.relu(self.c(x))", c=nn.Conv2d(8, 8, 3)).eval(),
    "conv_add": lambda: net("self.c(x) + x", c=nn.Conv2d(8, 8, 3, padding=1)).eval(),
    "eltwise": lambda: net("torch.relu(x * 2 + 1) * x").eval(),
    "pool": lambda: net("F.max_pool2d(x, 2)").eval(),
    "matmul": lambda: net("torch.matmul(x, x.transpose(-1, -2))").eval(),
    "softmax": lambda: net("torch.softmax(x, -1)").eval(),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("body", ODD_BODIES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_odd_tensors(body: str, kind: str, when: str) -> None:
    """Met in the profiling run or by a compiled group: what plain TorchScript answers.

    Not what eager answers: to plain TorchScript too, a frozen convolution without its module's
    checks words some errors in another way.
    """
    module, odd = ODD_BODIES[body](), ODD[kind]()
    with torch.no_grad():
        plain = to_script(module, [torch.randn(IMAGE)])
        script = to_script(module, [torch.randn(IMAGE)])
        if when == "after":
            for _ in range(3):
                script(torch.randn(IMAGE))
        assert_same_outcome(script, plain, odd)
        assert_same_outcome(script, plain, torch.randn(IMAGE))  # what it was made for still works


@pytest.mark.parametrize(
    "dtype", [torch.double, torch.cfloat, torch.half], ids=["double", "complex", "half"]
)
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_whole_module_of_another_dtype(dtype: torch.dtype, scripted: bool) -> None:
    """Nothing goes in, and the numbers are eager's; a traced complex one is made of real ones."""
    m = net("y = self.c(x); return self.d(y * 2 + y)", c=nn.Conv2d(8, 8, 3), d=nn.Conv2d(8, 4, 1))
    groups = None if dtype == torch.cfloat and not scripted else 0
    check(m, [torch.randn(IMAGE)], dtype=dtype, scripted=scripted, groups=groups)


@pytest.mark.parametrize("kind", ["int", "uint8", "bool"])
def test_integer_function(kind: str) -> None:
    fn = torch.jit.trace(
        lambda x: torch.matmul(x.long(), x.long().transpose(-1, -2)) + 1, ODD[kind]()
    )
    x = ODD[kind]()
    with torch.no_grad():
        for _ in range(4):
            assert_same(fn(x), torch.matmul(x.long(), x.long().transpose(-1, -2)) + 1)


# ------------------------------------------------------------------------ inputs after the warm-up


def changed(case: str) -> Tensor:
    big = torch.randn(4, 16, 14, 12)
    return {
        "batch": lambda: torch.randn(5, 8, 7, 6),
        "size": lambda: torch.randn(2, 8, 11, 9),
        "channels_last": lambda: torch.randn(IMAGE).contiguous(memory_format=torch.channels_last),
        "sliced": lambda: big[:2, ::2, 3:10, :6],
        "strided": lambda: big[1:3, :8, ::2, ::2],
        "transposed": lambda: torch.randn(2, 8, 6, 7).transpose(2, 3),
        "permuted": lambda: torch.randn(7, 6, 8, 2).permute(3, 2, 0, 1),
        "expanded": lambda: torch.randn(1, 8, 7, 1).expand(IMAGE),
        "expanded_scalar": lambda: torch.randn(1, 1, 1, 1).expand(IMAGE),
        "offset": lambda: torch.randn(3, 8, 7, 6)[1:],
        "unaligned": lambda: torch.randn(2 * 8 * 7 * 6 + 1)[1:].view(IMAGE),
        "flipped_batch": lambda: torch.randn(IMAGE).flip(0),
        "one": lambda: torch.randn(1, 8, 7, 6),
        "one_channels_last": lambda: torch.randn(1, 7, 6, 8).permute(0, 3, 1, 2),
        "inference": lambda: torch.inference_mode()(torch.randn)(IMAGE),
    }[case]()


CHANGES = (
    *("batch", "size", "channels_last", "sliced", "strided", "transposed", "permuted"),
    *("expanded", "expanded_scalar", "offset", "unaligned", "flipped_batch", "one"),
    *("one_channels_last", "inference"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CHANGES)
def test_input_changes_after_warm_up(case: str, dtype: torch.dtype) -> None:
    """Another shape or layout is compiled again, not run in the interpreter."""
    m = net(
        "y = torch.relu(self.c(x) + x)\nreturn self.d(F.max_pool2d(y, 2)), y",
        c=nn.Conv2d(8, 8, 3, padding=1),
        d=nn.Conv2d(8, 4, 1),
    ).eval()
    m = m.to(dtype)
    x = torch.randn(IMAGE, dtype=dtype)
    script = warmed(m, x)
    before = llga_fuser._C.fallbacks()
    with torch.no_grad():
        y = changed(case)
        y = y if y.dtype == dtype else y.to(dtype)
        for value in (y, x, y, x, y):
            assert_same(script(value), m(value), case)
    assert llga_fuser._C.fallbacks() == before


@pytest.mark.parametrize("args", list(itertools.permutations(range(3))), ids=str)
def test_same_tensor_and_swapped_operands(args: tuple[int, ...]) -> None:
    m = net("self.c(x) + y * z", "x, y, z", c=nn.Conv2d(8, 8, 1)).eval()
    a, b = torch.randn(IMAGE), torch.randn(IMAGE)
    tensors = (a, b, a)
    script = warmed(m, *tensors)
    with torch.no_grad():
        chosen = [tensors[i] for i in args]
        assert_same(script(*chosen), m(*chosen))


def test_many_shapes() -> None:
    m = conv_relu()
    script = warmed(m, torch.randn(IMAGE))
    with torch.no_grad():
        for h in range(3, 23):
            x = torch.randn(1, 8, h, 25 - h)
            assert_same(script(x), m(x), f"height {h}")


def test_operand_becomes_a_scalar_tensor() -> None:
    """An operand of another rank than the one that was compiled."""
    m = net("self.c(x) * y", "x, y", c=nn.Conv2d(8, 8, 1)).eval()
    script = warmed(m, torch.randn(IMAGE), torch.randn(IMAGE))
    with torch.no_grad():
        for shape in ((), (1,), (6,), (7, 6), (8, 1, 1), (1, 8, 7, 6), (3, 2, 8, 7, 6), IMAGE):
            inputs = torch.randn(IMAGE), torch.randn(shape)
            assert_same(script(*inputs), m(*inputs), str(shape))


def test_output_is_a_fresh_tensor() -> None:
    """No later call writes to it, and writing to it changes no later call."""
    m = conv_relu()
    script = warmed(m, torch.randn(IMAGE))
    with torch.no_grad():
        x, z = torch.randn(IMAGE), torch.randn(IMAGE)
        y = script(x)
        kept = y.clone()
        script(z)
        assert torch.equal(y, kept)
        y.zero_()
        assert_same(script(x), m(x))


def test_view_of_an_output() -> None:
    """Its strides are eager's: .view() works wherever it works in eager."""
    m = conv_relu()
    script = warmed(m, torch.randn(IMAGE))
    with torch.no_grad():
        x = torch.randn(IMAGE)
        assert_same(script(x).view(2, -1), m(x).view(2, -1))


@pytest.mark.parametrize("threads", [1, 2])
def test_number_of_threads_changes(threads: int) -> None:
    m = conv_relu()
    x = torch.randn(IMAGE)
    with restored(torch.get_num_threads, torch.set_num_threads):
        torch.set_num_threads(3 - threads)
        script = warmed(m, x)
        torch.set_num_threads(threads)
        with torch.no_grad():
            for _ in range(3):
                assert_same(script(x), m(x))


@pytest.mark.usefixtures("all_threads")
def test_python_threads_share_a_module() -> None:
    """Different shapes at the same time, some of them compiled for the first time."""
    m = net("torch.relu(self.c(x)) + x", c=nn.Conv2d(8, 8, 3, padding=1)).eval()
    script = warmed(m, torch.randn(IMAGE))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for i in range(12):
                    x = torch.randn(1 + (seed + i) % 3, 8, 5 + i % 4, 9, generator=generator)
                    assert_same(script(x), m(x), f"thread {seed}, call {i}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


# --------------------------------------------------------------------------- gradients, switches


def test_gradients_through_an_unfrozen_module() -> None:
    """Fused under no_grad, then called where a gradient is wanted: eager's, to the last bit."""
    m = net(
        "self.l(torch.relu(self.c(x)).mean([2, 3]))", c=nn.Conv2d(8, 8, 3), l=nn.Linear(8, 4)
    ).eval()
    script = warmed(m, torch.randn(IMAGE), freeze=False)
    x = torch.randn(IMAGE)
    grads = []
    for fn in (m, script):
        m.zero_grad()
        leaf = x.clone().requires_grad_()
        out = fn(leaf)
        assert out.requires_grad
        out.square().sum().backward()
        grads.append([leaf.grad, *(p.grad.clone() for p in m.parameters() if p.grad is not None)])
    assert len(grads[0]) == len(grads[1]) == 5
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert_same(script(x), m(x))


def test_gradient_of_the_input_of_a_frozen_module() -> None:
    m = conv_relu()
    script = warmed(m, torch.randn(IMAGE))
    x = torch.randn(IMAGE)
    grads = []
    for fn in (m, script):
        leaf = x.clone().requires_grad_()
        fn(leaf).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_frozen_module_without_no_grad() -> None:
    """Nothing requires a gradient: fused as under no_grad."""
    m = conv_relu()
    x = torch.randn(IMAGE)
    script = to_script(m, [x])
    for _ in range(4):
        assert_same(script(x), m(x).detach())
    expect(fused_graph(script, x), groups=1, fused="conv relu")


def test_inference_mode() -> None:
    m = conv_relu()
    with torch.inference_mode():
        x = torch.randn(IMAGE)
        script = to_script(m, [x])
        for _ in range(4):
            assert_same(script(x), m(x))
        expect(fused_graph(script, x), groups=1, fused="conv relu")


def test_weights_of_an_unfrozen_module_are_followed() -> None:
    m = conv_relu()
    x = torch.randn(IMAGE)
    script = warmed(m, x, freeze=False)
    with torch.no_grad():
        m.c.weight.mul_(-2)
        assert_same(script(x), m(x), "written in place")
        script.c.bias.copy_(torch.randn(8))
        assert_same(script(x), m(x), "written through the script")


@pytest.mark.parametrize("profiling", [True, False], ids=["profiling", "legacy"])
def test_executors(profiling: bool) -> None:
    previous = torch._C._jit_set_profiling_executor(profiling)
    try:
        m = conv_relu()
        x = torch.randn(IMAGE)
        with torch.no_grad():
            script = to_script(m, [x])
            for _ in range(3):
                assert_same(script(x), m(x))
            groups = [n for n in walk(script.graph_for(x)) if n.kind() == GROUP]
        assert len(groups) == 1
    finally:
        torch._C._jit_set_profiling_executor(previous)


def test_off_means_off() -> None:
    x = torch.randn(IMAGE)
    with llga_fuser.fusion(False):
        assert not llga_fuser.is_enabled()
        m = conv_relu()
        with torch.no_grad():
            script = to_script(m, [x])
            for _ in range(3):
                assert torch.equal(script(x), m(x))
            assert not fused_graph(script, x).groups
    assert llga_fuser.is_enabled()


def test_what_was_fused_runs_after_the_fuser_is_off() -> None:
    m, x = conv_relu(), torch.randn(IMAGE)
    script = warmed(m, x)
    with llga_fuser.fusion(False), torch.no_grad():
        for shape in (IMAGE, (1, 8, 5, 5)):
            y = torch.randn(shape)
            assert_same(script(y), m(y))


def test_torch_switch_is_ours() -> None:
    torch.jit.enable_onednn_fusion(False)
    assert not llga_fuser.is_enabled()
    torch.jit.enable_onednn_fusion(True)
    assert llga_fuser.is_enabled()
    assert torch.jit.onednn_fusion_enabled()
    found = check(conv_relu(), [torch.randn(IMAGE)], groups=1, fused="conv relu")
    assert "prim::oneDNNFusionGroup" not in found.outside


def test_save_and_load() -> None:
    """A module that has run fused is saved as it was written."""
    m, x = conv_relu(), torch.randn(IMAGE)
    script = warmed(m, x)
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    with torch.no_grad():
        for _ in range(4):
            assert_same(loaded(x), m(x))
        expect(fused_graph(loaded, x), groups=1, fused="conv relu")


def test_optimize_for_inference() -> None:
    """Leaves MKL-DNN nodes of its own: they stay, and the numbers are right."""
    m, x = conv_relu(), torch.randn(IMAGE)
    with torch.no_grad():
        script = torch.jit.optimize_for_inference(to_script(m, [x]))
        for _ in range(4):
            assert_same(script(x), m(x))


@pytest.mark.parametrize("shape", [(1, 12, 12, 4), (2, 12, 12, 4)])
@pytest.mark.parametrize("order", [(0, 3, 1, 2), (0, 3, 2, 1), (0, 2, 3, 1)])
def test_permuted_operand(shape: Shape, order: Sequence[int]) -> None:
    """The position bias of T5, which oneDNN 3.7 adds to a product as if it were row-major."""
    back = [order.index(i) for i in range(4)]
    size = [(shape[0], 4, 12, 12)[i] for i in back]
    bias = torch.randn(size).permute(order)
    m = net("torch.matmul(x, y) * 0.5 + bias + mask", "x, y, bias, mask")
    inputs = [torch.randn(2, 4, 12, 16), torch.randn(2, 4, 16, 12), bias, torch.randn(2, 1, 12, 12)]
    check(m, inputs, fused="matmul")
    m = net("torch.relu(self.c(x) + bias)", "x, bias", c=nn.Conv2d(3, 4, 3, padding=1))
    check(m, [torch.randn(2, 3, 12, 12), bias], fused="conv add relu")


def test_packed_weights() -> None:
    """Packed once for all shapes, counted, and given back."""
    gc.collect()
    llga_fuser.clear_cache()
    others = llga_fuser.cache_info().packed_bytes  # of modules that have released their plain copy

    def packed() -> int:
        return llga_fuser.cache_info().packed_bytes - others

    m = net("torch.relu(self.c(x))", c=nn.Conv2d(64, 64, 3, padding=1)).eval()
    script = warmed(m, torch.randn(1, 64, 12, 12))
    weight = 64 * 64 * 9 * 4
    assert weight <= packed() < 2 * weight
    with torch.no_grad():
        for size in range(13, 23):
            x = torch.randn(1, 64, size, size)
            assert_same(script(x), m(x))
    # Another shape may ask for another layout (3.7 has three here), but not for a copy each time.
    assert packed() < 4 * weight
    llga_fuser.clear_cache()
    assert packed() == 0
    with torch.no_grad():
        assert_same(script(x), m(x), "packed again")


GROWTH = """
import gc, sys, torch
from torch import nn

if sys.argv[1] == "fused":
    import llga_fuser

    llga_fuser.enable(True)


def resident():
    with open("/proc/self/statm") as f:
        pages = [int(n) for n in f.read().split()]
    return (pages[1] - pages[2]) * 4096  # pages of files come and go


torch.set_num_threads(1)
x = torch.randn(1, 256, 4, 4)
for i in range(22):
    m = nn.Conv2d(256, 512, 3, padding=1).eval()
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(m, x, check_trace=False))
        for _ in range(3):
            script(x)
    del m, script
    gc.collect()
    if i == 1:
        start = resident()
print(resident() - start)
"""


@pytest.mark.parametrize("freeze", [False, True], ids=["unfrozen", "frozen"])
def test_plans_go_with_the_module(freeze: bool) -> None:
    """TorchScript keeps its functions, and with them the fusion groups, for ever."""
    m = net("torch.relu(self.c(x))", c=nn.Conv2d(16, 16, 3, padding=1)).eval()
    x = torch.randn(1, 16, 12, 12)
    before = llga_fuser.cache_info()
    script = warmed(m, x, freeze=freeze)
    called, waiting = copy.deepcopy(script), copy.deepcopy(script)
    with torch.no_grad():
        assert_same(called(x), m(x))
        one = llga_fuser.cache_info()
        assert one.entries == before.entries + 1
        del script
        gc.collect()
        assert_same(called(x), m(x))
        assert llga_fuser.cache_info().misses == one.misses, "the copy lost its plan"
        del called
        gc.collect()
        none = llga_fuser.cache_info()
        assert (none.entries, none.packed_bytes) == (before.entries, before.packed_bytes)
        for _ in range(2):
            assert_same(waiting(x), m(x))
    again = llga_fuser.cache_info()
    assert (again.entries, again.misses) == (one.entries, one.misses + 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_deleted_models_leave_nothing_behind() -> None:
    """More than plain TorchScript leaves, which keeps the graphs of frozen modules for ever."""
    growth = {}
    for how in ("plain", "fused"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", GROWTH, how],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        growth[how] = int(done.stdout)
    one_model = 512 * 256 * 9 * 4
    assert growth["fused"] < growth["plain"] + 3 * one_model, growth


# --------------------------------------------------------------------------------- random programs

STEPS = {  # what one step of a random program may do: v, w are earlier values of one shape
    "conv": "self.c{i}({v})",
    "relu": "torch.relu({v})",
    "relu_": "F.relu({v}, inplace=True)",
    "silu": "F.silu({v})",
    "sigmoid_": "{v}.sigmoid_()",
    "add": "{v} + {w}",
    "add_": "{v}.add_({w})",
    "sub": "{v} - {w}",
    "mul_sigmoid": "{v} * torch.sigmoid({w})",
    "scale": "{v} * 0.5 + 0.1",
    "gate": "{v} * torch.sigmoid({w}.mean([2, 3], True))",
    "pool": "F.max_pool2d({v}, 3, 1, 1)",
    "avg": "F.avg_pool2d({v}, 3, 1, 1)",
    "cat": "self.d{i}(torch.cat([{v}, {w}], 1))",
    "wildcard": "torch.cumsum({v}, 1) * 0.2",
    "slice_": "{v}[:, 1:3].mul_(0.5)",
    "softmax": "torch.softmax({v}, 1)",
    "clamp": "torch.clamp({v}, -1, 1)",
    "view": "{v}.view(2, -1).view(2, 4, 5, 6)",
    "linear": "self.l{i}({v})",
}


def random_program(seed: int) -> nn.Module:
    """Convolutions, in-place ops, views and skips in a random order, with several results."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options: Sequence[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    lines, values, members = ["v0 = x + 0"], ["v0"], {}
    for i in range(1, 13):
        step = pick(["conv", *STEPS] if i % 3 else ["conv"])
        code = STEPS[step].format(i=i, v=pick(values), w=pick(values))
        if step == "slice_":
            lines.append(code)
            continue
        if step == "conv":
            members[f"c{i}"] = nn.Conv2d(4, 4, pick([1, 3]), padding="same")
        elif step == "cat":
            members[f"d{i}"] = nn.Conv2d(8, 4, 1)
        elif step == "linear":
            members[f"l{i}"] = nn.Linear(6, 6)
        lines.append(f"v{i} = {code}")
        values.append(f"v{i}")
    results = {values[-1], pick(values), pick(values)}
    lines.append(f"return {', '.join(sorted(results))},")
    return net("\n".join(lines), **members)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("seed", range(60))
def test_random_program(seed: int, scripted: bool) -> None:
    torch.manual_seed(seed)
    program = random_program(seed)
    # Up to twelve ops in a row, some of them differences: a wider tolerance, far from a wrong read.
    # Which ops go in depends on where the in-place ones are; the numbers must not.
    check(
        program, [torch.randn(2, 4, 5, 6)], scripted=scripted, tol=Tolerance(1e-3), fallbacks=True
    )


# ----------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Net:
    """A torchvision network; small images, as fusion does not depend on their size."""

    name: str
    size: int = 96
    slow: bool = False
    fused: str = "conv"
    modes: tuple[str, ...] = ("fp32", "autocast")
    # What may stay outside of the groups; None: anything.
    outside: frozenset[str] | None = None


BOTH_BF16 = ("fp32", "autocast", "bfloat16")
# The cast of a bf16 network's input may be left alone, as it is no work to share.
TO_FLATTEN = frozenset({"aten::flatten", "aten::to"})

NETS = [
    Net("alexnet", size=224, outside=TO_FLATTEN),  # its pooling divides only this
    Net("resnet18", outside=TO_FLATTEN),
    Net("resnet50", outside=TO_FLATTEN, modes=BOTH_BF16),
    Net("resnext50_32x4d", outside=TO_FLATTEN),
    Net("densenet121", size=64),
    Net("googlenet"),
    Net("inception_v3"),
    Net("squeezenet1_0"),
    Net("squeezenet1_1"),
    Net("mobilenet_v2", outside=TO_FLATTEN),
    Net("mobilenet_v3_small"),
    Net("mobilenet_v3_large", outside=TO_FLATTEN, modes=BOTH_BF16),
    Net("mnasnet1_0"),
    Net("shufflenet_v2_x1_0"),
    Net("efficientnet_b0", outside=TO_FLATTEN, modes=BOTH_BF16),
    Net("regnet_y_400mf", outside=TO_FLATTEN),
    Net("vit_b_16", size=64, fused="conv layer_norm", modes=BOTH_BF16),
    Net("swin_t", size=64, fused="conv layer_norm"),
    Net("lraspp", size=64),
    Net("vgg16", size=224, slow=True, outside=TO_FLATTEN),  # likewise
    Net("resnext101_32x8d", slow=True, outside=TO_FLATTEN),
    Net("wide_resnet50_2", slow=True, outside=TO_FLATTEN),
    Net("densenet161", slow=True),
    Net("densenet169", slow=True),
    Net("densenet201", slow=True),
    *(Net(f"efficientnet_b{i}", slow=True, outside=TO_FLATTEN) for i in range(1, 8)),
    Net("efficientnet_v2_s", slow=True, outside=TO_FLATTEN),
    Net("convnext_tiny", slow=True, fused="conv linear layer_norm", modes=BOTH_BF16),
    Net("swin_v2_t", slow=True, fused="conv layer_norm"),
    # Traced under autocast its einsum keeps the casts to itself: TorchScript alone cannot run it.
    Net("maxvit_t", size=224, slow=True, modes=("fp32", "bfloat16")),
    Net("fcn_resnet50", slow=True),
    Net("deeplabv3_resnet50", slow=True),
    Net("r3d_18", size=64, slow=True, outside=TO_FLATTEN),
]


@functools.lru_cache(maxsize=1)
def network(name: str, size: int) -> _models.Model:
    return _models.build(name, size)


@pytest.mark.parametrize(
    ("net", "mode"),
    [
        pytest.param(net, mode, id=f"{net.name}-{mode}", marks=[pytest.mark.slow] * net.slow)
        for net in NETS
        for mode in net.modes
    ],
)
def test_model(net: Net, mode: str) -> None:
    model = network(net.name, net.size)
    make = functools.partial(model.inputs, 1)
    check_model(model.module, make, mode, fused=net.fused, outside=net.outside)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("mode", ["fp32", "autocast"])
def test_model_with_all_threads(mode: str) -> None:
    model = network("resnet18", 96)
    check_model(model.module, functools.partial(model.inputs, 2), mode, fused="conv linear")


@pytest.mark.parametrize("mode", BOTH_BF16)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformer(name: str, attention: str, mode: str) -> None:
    pytest.importorskip("transformers", reason="an optional extra of the tests")
    _models.load_torchvision()  # which transformers imports
    module, inputs = ARCHITECTURES[name](attention)
    module.eval()
    _models.randomize(module)
    _models.calibrate(module, inputs(0))
    check_model(module, inputs, mode, fused="linear")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-s", "-m", "", *sys.argv[1:]]))
