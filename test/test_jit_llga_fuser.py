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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llga_fuser
from llga_fuser import _models
from models.small_transformers import ARCHITECTURES
from util import (
    GROUP,
    MODES,
    TOLERANCES,
    Make,
    Tolerance,
    assert_same,
    autocast_bf16,
    check,
    check_model,
    expect,
    fused_graph,
    fuses,
    has_own_kernels,
    kernels_of,
    leaves,
    net,
    one_by_one,
    onednn_version,
    randomize,
    restored,
    special,
    to_script,
    twin,
    walk,
)

pytestmark = pytest.mark.usefixtures("fuser", "few_threads")

PLAIN = ("traced", "scripted", "channels_last", "bf16")  # autocast adds nothing to a lone op
Shape = tuple[int, ...]


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
        *[
            Case(
                f"einsum_with_a_weight {equation}",
                functools.partial(
                    net, f"torch.einsum('{equation}', x, self.w)", w=torch.randn(*weight)
                ),
                [size],
                modes=("traced", "scripted", "bf16"),
                fused=fused,
                outside="einsum",
            )
            for equation, size, weight, fused in [
                ("bnd,de->bne", (2, 3, 6), (6, 5), "linear"),
                ("nd,ed->ne", (3, 6), (5, 6), "linear"),
                ("ibh,hnd->ibnd", (4, 2, 6), (6, 3, 5), "linear"),
                ("ibnd,hnd->ibh", (4, 2, 3, 5), (6, 3, 5), "linear"),
                ("bntd,hnd->bth", (4, 3, 2, 5), (6, 3, 5), "linear"),
                ("btd,edf->ebtf", (2, 3, 6), (4, 6, 5), "linear"),
                ("ebtf,efd->ebtd", (4, 2, 3, 5), (4, 5, 6), "matmul"),
                ("bthd,hde->bthe", (2, 3, 4, 5), (4, 5, 6), "matmul"),
            ]
        ],
        Case(
            "einsum_with_a_weight_first",
            lambda: net("torch.einsum('hnd,ibh->ibnd', self.w, x)", w=torch.randn(6, 3, 5)),
            [(4, 2, 6)],
            fused="linear",
        ),
        Case(
            "einsum_with_a_weight_to_columns",
            lambda: net("torch.einsum('nd,ed->en', x, self.w)", w=torch.randn(5, 6)),
            [(3, 6)],
            fused="einsum",
        ),
        Case(
            "einsum_with_a_weight_that_repeats_a_number",
            lambda: net("torch.einsum('ibh,hnd->ibnd', x, self.w)", w=torch.randn(6, 3, 5)),
            [(4, 2, 1)],
        ),
        Case(
            "einsum_with_a_weight_and_a_sum",
            lambda: net("torch.einsum('ibh,hnd->bnd', x, self.w)", w=torch.randn(6, 3, 5)),
            [(4, 2, 6)],
        ),
        Case(
            "einsum_with_a_weight_without_elements",
            lambda: net("torch.einsum('ibh,hnd->ibnd', x, self.w)", w=torch.randn(6, 0, 5)),
            [(4, 2, 6)],
        ),
        Case(
            "einsum_with_a_weight_of_vectors",
            lambda: net("torch.einsum('bd,d->b', x, self.w)", w=torch.randn(6)),
            [(4, 6)],
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
                f"{op}_{dim}{'_keepdim' if keep else ''}_{read}",
                lambda op=op, dim=dim, keep=keep, read=read: net(
                    f"torch.{op}(self.c(x), {dim}, {keep}){read}", c=nn.Conv2d(8, 8, 1)
                ),
                [(2, 8, 6, 5)],
                fused=f"conv {op}" if read == "[0]" else "conv",
                outside="" if read == "[0]" else op,
            )
            for op in ("max", "min")
            for dim in (1, 2, -1)
            for keep in (False, True)
            for read in ("[0]", "[1]", "")
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


# Options, dims of the image, whether it is fused (None: depends on what is known of the sizes, or
# on whether there is a kernel of our own).
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
    "bilinear_corners": ("size=[13, 9], mode='bilinear', align_corners=True", 2, None),
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


def test_interpolate_before_what_is_not_fused() -> None:
    """Nothing in the profile tells the sizes of its result: the factor does."""
    m = net(
        "y = F.interpolate(F.relu(self.c(x)), scale_factor=2.0)\n"
        "return self.d(F.pad(y, [1, 1, 1, 1], mode='reflect'))",
        c=nn.Conv2d(8, 8, 1), d=nn.Conv2d(8, 8, 3),
    )  # fmt: skip
    check(m, [torch.randn(2, 8, 6, 5)], fused="_convolution relu upsample_nearest2d")


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_interpolate_of_one_pixel(mode: str) -> None:
    """As DeepLab's pooled features: oneDNN 3.7 mistakes the order of their channels."""
    m = net(f"F.relu(F.interpolate(self.c(x), size=(6, 5), mode='{mode}'))", c=nn.Conv2d(8, 16, 1))
    for images in (1, 2):
        check(m.eval(), [torch.randn(images, 8, 1, 1)])


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
    "max": "torch.max({}, 1)[0]",
    "min": "torch.min({}, 3)[0]",
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
        "sum_of_two_convs",
        "torch.relu(self.c(x) + self.d(self.e(x)))",
        "conv add relu",
        3,
        d=(8, 8, 1),
        e=(8, 8, 1),
    ),
    pattern("sum_of_branches", "torch.relu(self.c(x) + self.d(x))", "conv relu", 1, d=(8, 8, 1)),
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
    pattern(  # as in Swin V2; oneDNN 3.7 would forget the sum
        "residual_behind_norm",
        "x = x + self.n(self.l(x)); return self.o(self.m(x)) + x",
        "linear layer_norm",
        inputs=[(2, 5, 16)],
        l=(16, 16),
        m=(16, 16),
        n=lambda: nn.LayerNorm(16),
        o=lambda: nn.LayerNorm(16),
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
        "expand_as",
        "y = self.c(x); return y * torch.sigmoid(y.mean((2, 3), True)).expand_as(y)",
        "conv mul",
    ),
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


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "size", [(2, 16, 14, 9), (2, 16, 1, 1), (1, 16, 1, 1), (1, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize(
    "op",
    [
        *("F.avg_pool2d({}, 3, 1, 1)", "F.max_pool2d({}, 3, 1, 1)", "F.interpolate({}, (14, 9))"),
        *("F.relu(F.interpolate({}, (14, 9)))", "torch.softmax({}, 1)", "torch.softmax({}, -1)"),
    ],
)
def test_operand_in_another_order(op: str, size: tuple[int, ...], order: str) -> None:
    """Of memory than the result has: oneDNN's kernels take it for one in the same."""
    orders = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    x, y = torch.randn(2, 16, 14, 9), torch.randn(size).contiguous(memory_format=orders[order])
    for code in (f"{op.format('x')} + y", f"y - {op.format('x')}", f"{op.format('x')} * x"):
        m = net(code, "x, y").eval()
        check(m, [x, y])
        check(m, [x.contiguous(memory_format=torch.channels_last), y])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(2, 6, 1, 1), (3, 6, 1), (2, 6, 1, 1, 1)], ids=str)
def test_operand_of_images_of_one_pixel(size: tuple[int, ...], dtype: torch.dtype) -> None:
    """oneDNN confuses channels and images of what it adds behind another sum or product."""
    m = net("return torch.relu(x * y) + z, torch.sigmoid(x) * 0.5 - z", "x, y, z").eval()
    x, z = torch.randn(size), torch.randn(1, *size[1:])
    check(m, [x, torch.randn(size), z], dtype=dtype)
    check(m, [x, z * 0.5, z[0]], dtype=dtype)


PARTS = {
    "chunk": "a, b = y.chunk(2, 1)\nreturn self.e(torch.cat([self.d(a), b], 1))",
    "split": "a, b = y.split([8, 8], 1)\nreturn self.e(torch.cat([self.d(a), self.d(b)], 1))",
    "slice": "return self.d(y[:, :8]), F.relu(self.d(y[:, 8:]) + y[:, 8:])",
    "steps": "return self.d(y[:, ::2, 1:, ::2]), self.d(y[:, 1::2, ::2, :-1])",
    "images": "return self.d(y[:1, 8:]), self.d(y[1:, 4:12])",
    "gate": "a, b = y.chunk(2, 1)\nreturn self.d(a * torch.sigmoid(b))",
    "part_of_part": "a, b = y[:, :, 1:].chunk(2, 1)\nreturn self.d(b), self.f(a[:, 2:6])",
    "sum": "return self.d(y[:, :8] + y[:, 8:])",
    "sum_among_parts": (  # as DPN
        "a = y[:, :8] + self.d(y[:, 8:])\nz = self.e(torch.cat([a, y[:, 8:]], 1))\n"
        "return z + a[:, :4], self.d(a)"
    ),
    "sums_of_chunks": (  # as Res2Net
        "a, b = y.chunk(2, 1)\na = self.d(a)\nb = F.relu(self.d(a + b))\n"
        "return self.e(torch.cat([a, b], 1))"
    ),
    "one_returned": "a, b = y.chunk(2, 1)\nreturn self.d(a), b",
    "sizes": "a, b = y.chunk(2, 1)\nreturn self.d(a).reshape(a.size(0), -1), self.d(b)",
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", PARTS)
def test_parts_of_channels_last_images(case: str, mode: str) -> None:
    """Groups read parts of what other groups give in any layout."""
    layers = {"c": nn.Conv2d(3, 16, 3), "d": nn.Conv2d(8, 8, 3, padding=1), "f": nn.Conv2d(4, 4, 1)}
    m = net(f"y = F.relu(self.c(x))\n{PARTS[case]}", **layers, e=nn.Conv2d(16, 4, 1)).eval()
    check(m, [torch.randn(2, 3, 11, 9)], **MODES[mode])
    if mode == "traced":
        check(m, [torch.randn(1, 3, 11, 9)])


FILLED = {
    "zeros": "F.pad(y, [0, 1, 0, 1])",
    "ones": "F.pad(y, [1, 1, 0, 2], value=1.0)",
    "reflected": "F.pad(y, [1, 1, 1, 1], mode='reflect')",
    "replicated": "F.pad(y, [1, 0, 2, 1], mode='replicate')",
    "circular": "F.pad(y, [1, 0, 2, 1], mode='circular')",
    "module": "self.z(y)",
    "channels": "F.pad(y, [0, 1, 0, 0, 4, 4])[:, 4:12]",
    "part": "F.pad(y[:, :, 1:], [0, 1, 0, 1])",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("columns", [5, 16, 50, 5000])
def test_nan_in_and_around_a_part(columns: int, dtype: torch.dtype) -> None:
    """Of rows with memory between them: what is there is nobody's business."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net("F.relu(x @ self.w)", w=torch.randn(columns, 3).to(dtype)).eval()
    whole = torch.randn(3, 2, 70, columns + 9).to(dtype)
    script = to_script(m, [whole[..., 4:-5]])
    for _ in range(3):
        script(whole[..., 4:-5])
    outside = whole.clone()
    outside[..., 3] = outside[..., -5] = torch.nan
    before = llga_fuser.cache_info().fallbacks
    assert_same(script(outside[..., 4:-5]), m(whole[..., 4:-5]))
    assert llga_fuser.cache_info().fallbacks == before
    for place in ((0, 0, 0, 4), (2, 1, 69, columns + 3), (1, 1, 65, 4 + columns // 2)):
        inside = whole.clone()
        inside[place] = torch.nan
        before = llga_fuser.cache_info().fallbacks
        assert_same(script(inside[..., 4:-5]), m(inside[..., 4:-5]))
        assert llga_fuser.cache_info().fallbacks == before + 1


BETWEEN = {
    "cast": "return F.relu(self.d(y.to(torch.bfloat16).float()))",
    "cast_part": "a = y[:, 8:].to(torch.bfloat16)\nreturn F.relu(self.e(a.float())), self.d(y)",
    "lone_factor": "return self.l((y * 2.0).flatten(2).transpose(1, 2))",
    "lone_sum": "return self.l((y + x).flatten(2).transpose(1, 2))",
    "lone_sum_of_tokens": (  # as CoaT's position encodings
        "z = [self.t.expand(2, -1, -1), (y + x).flatten(2).transpose(1, 2)]\n"
        "return self.l(torch.cat(z, 1))"
    ),
    "lone_product_padded": (  # as CoaT's relative ones
        "z = y.reshape(2, 4, 4, -1).transpose(-1, -2)\nz = F.pad(z * self.w, (0, 0, 1, 0))\n"
        "return torch.relu(z) + 0.5"
    ),
    "turned_and_padded": "return torch.relu(F.pad(y.transpose(2, 3), [1, 0])) * 2.0",
    "turned_and_cast": "return torch.relu(y.transpose(1, 3).to(torch.bfloat16)) * 2.0",
    "heads_cast_and_padded": (  # as EfficientViT's linear attention
        "q, k, v = torch.cat([y, self.d(y), y], 1).reshape(2, 4, 12, -1).mT.chunk(3, -1)\n"
        "q, k = F.relu(q).to(torch.float32), F.relu(k).to(torch.float32)\n"
        "v = F.pad(v.to(torch.float32), (0, 1), value=1.0)\n"
        "z = q @ (k.transpose(-1, -2) @ v)\nreturn z[..., :-1] - z[..., -1:]"
    ),
    "viewed": "z = y.view(2, 4, 4, 90).transpose(-1, -2)\nreturn F.softmax(z, -1) * 2.0",
    "views_back": "return self.d(F.relu(y.flatten(2)).view(2, 16, 9, 10)) + y",
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("case", BETWEEN)
def test_layouts_through_what_is_between_groups(
    case: str, autocast: bool, layout: torch.memory_format
) -> None:
    """Casts, paddings, views, lone pointwise ops: results lie as in eager all the same."""
    if autocast and not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(
        f"y = self.c(x)\n{BETWEEN[case]}",
        c=nn.Conv2d(16, 16, 3, padding=1), d=nn.Conv2d(16, 16, 1), e=nn.Conv2d(8, 4, 1),
        l=nn.Linear(16, 8), t=torch.randn(1, 1, 16), w=torch.randn(90, 4),
    ).eval().to(memory_format=layout)  # fmt: skip
    x = torch.randn(2, 16, 9, 10).to(memory_format=layout)
    check(m, [x], autocast=autocast, memory_format=layout, fallbacks=True)
    if autocast:
        return
    script, expected = to_script(m, [x]), m(x)
    for _ in range(4):
        for got, want in zip(leaves(script(x)), leaves(expected), strict=True):
            assert got.stride() == want.stride()


# Autocast pads by reflection in float32, which TorchScript's does not know.
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "autocast"])
@pytest.mark.parametrize("case", FILLED)
def test_padding_between_groups(case: str, mode: str) -> None:
    """PyTorch's, in the order that the groups around it like."""
    m = net(
        f"y = F.relu(self.c(x))\ny = {FILLED[case]}\nreturn F.max_pool2d(y, 2, 1) + self.d(y)",
        c=nn.Conv2d(3, 8, 3), d=nn.Conv2d(8, 8, 2), z=nn.ReflectionPad2d(2),
    ).eval()  # fmt: skip
    check(m, [torch.randn(2, 3, 11, 9)], **MODES[mode])
    if mode == "traced" and case != "circular":
        x = torch.randn(2, 3, 11, 9)
        groups = llga_fuser.report(to_script(m, [x]), x, rounds=1).groups
        assert groups[0].outputs[0].layout == "channels last", groups[0]


PADDED = {
    "same_as_tf": ("self.c(F.pad(x, [0, 1, 0, 1]))", "pad _convolution"),
    "one_side": ("F.relu(self.c(F.pad(x, [1, 0, 2, 3])))", "pad _convolution relu"),
    "width_alone": ("self.c(F.pad(x, [2, 1]))", "pad _convolution"),
    "padded_twice": ("self.p(F.pad(x, [0, 1, 0, 1]))", "pad _convolution"),
    "depthwise": ("self.d(F.pad(self.c(x), [1, 2, 1, 2]))", "pad _convolution"),
    "module": ("self.c(self.z(x))", "pad _convolution"),
    "by_sizes": (
        "h = x.shape[2] % 2 + 1\nreturn self.c(F.pad(x, [0, h, x.shape[3] // 5, h]))",
        "pad _convolution",
    ),
    "one_pixel": ("self.e(F.pad(x.mean((2, 3), keepdim=True), [0, 1, 0, 1]))", "pad _convolution"),
    "sum": ("self.c(F.pad(x, [0, 1, 0, 1])) + self.c(F.pad(x, [1, 0, 1, 0]))", "pad _convolution"),
    # A stride as wide as the padding: the one result has nothing of the pixel.
    "pixel_left_out": (
        (
            "y = self.u(x)\nz = self.q(F.pad(y.mean((2, 3), True), [1] * 4))\n"
            "return y * torch.sigmoid(self.g(F.relu(z)))"
        ),
        "pad _convolution",
    ),
    "read_twice": ("y = F.pad(x, [0, 1, 0, 1])\nreturn self.c(y), y", ""),
    "ones": ("self.c(F.pad(x, [0, 1, 0, 1], value=1.0))", ""),
    "reflected": ("self.c(F.pad(x, [0, 1, 0, 1], mode='reflect'))", ""),
    "cropped": ("self.c(F.pad(x, [0, -1, 0, 1]))", ""),
    "channels": ("self.w(F.pad(x, [0, 0, 0, 0, 0, 1]))", ""),
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", PADDED)
def test_padding_before_a_convolution(case: str, mode: str) -> None:
    """Zeros that it alone reads are its own padding; others are a kernel of our own."""
    code, fused = PADDED[case]
    m = net(
        code if "return" in code else f"return {code}",
        c=nn.Conv2d(4, 8, 3, stride=2), p=nn.Conv2d(4, 8, 3, padding=1), w=nn.Conv2d(5, 8, 3),
        d=nn.Conv2d(8, 8, 3, stride=2, groups=8), e=nn.Conv2d(4, 8, 1),
        z=nn.ZeroPad2d((0, 1, 0, 1)), u=nn.Conv2d(4, 8, 1), q=nn.Conv2d(8, 8, 1, stride=3),
        g=nn.Conv2d(8, 8, 1),
    ).eval()  # fmt: skip
    x = torch.randn(2, 4, 12, 15)
    left = case in ("cropped", "channels")  # found out when the group is compiled
    check(m, [x], **MODES[mode], fused=fused if mode == "traced" else "", fallbacks=left)
    if mode == "traced" and not fused and not left:
        check(m, [x], **{"fused" if has_own_kernels() else "outside": "pad"})


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d])
def test_padding_before_a_convolution_of_other_dimensions(kind: Any) -> None:
    dims = 1 if kind is nn.Conv1d else 3
    m = net(f"self.c(F.pad(x, [1, 2] * {dims}))", c=kind(4, 8, 3)).eval()
    check(m, [torch.randn(2, 4, *(9, 7, 8)[:dims])], fused="pad _convolution")


MASKED = {
    "attention": "self.a(x, x, x, attn_mask=m)[0]",
    "keys": "self.a(x, x, x, key_padding_mask=p)[0]",
    "layer": "self.e(x, src_mask=m)",
    "layer_keys": "self.e(x, src_key_padding_mask=p)",
    "both": "self.a(x, x, x, attn_mask=m, key_padding_mask=p)[0]",
    "weights": "torch.cat(self.a(x, x, x, attn_mask=m), -1)",
    "none": "self.a(x, x, x)[0]",
}


@pytest.mark.parametrize("mode", ["traced", "bf16"])
@pytest.mark.parametrize("first", [True, False], ids=["batch_first", "sequence_first"])
@pytest.mark.parametrize("mask", ["", "attn_mask=m", "key_padding_mask=p"])
@pytest.mark.parametrize("operands", ["x, x, x", "x, y, y", "x, y, y * 2", "x * 2, x * 2, x"])
def test_multihead_attention(operands: str, mask: str, first: bool, mode: str) -> None:
    """Traced with gradients, which keeps it from nn's kernel for inference."""
    m = net(
        f"self.n(x + self.a({operands}, need_weights=False, {mask})[0])",
        args="x, y, m, p",
        a=nn.MultiheadAttention(32, 4, batch_first=first),
        n=nn.LayerNorm(32),
    ).eval()
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    m.to(dtype)

    def inputs(batch: int, queries: int, others: int) -> list[Tensor]:
        keys = others if "y" in operands else queries
        x, y = (torch.randn(batch, n, 32, dtype=dtype) for n in (queries, others))
        if not first:
            x, y = (t.transpose(0, 1).contiguous() for t in (x, y))
        padding = torch.zeros(batch, keys, dtype=torch.bool)
        padding[:, -2:] = True
        return [x, y, torch.ones(queries, keys, dtype=torch.bool).triu(1), padding]

    script = torch.jit.freeze(torch.jit.trace(m, inputs(2, 9, 7), check_trace=False))
    assert "aten::_native_multi_head_attention" not in str(script.graph)
    limit = TOLERANCES[dtype].relative
    with torch.no_grad():
        for sizes in [(2, 9, 7)] * 3 + [(1, 9, 7), (3, 5, 11), (2, 9, 7)]:
            x = inputs(*sizes)
            expected = m(*x)
            atol = limit * float(expected.abs().max())
            torch.testing.assert_close(script(*x), expected, rtol=limit, atol=atol)


@pytest.mark.parametrize("masked", ["some", "all of a row"])
@pytest.mark.parametrize("code", MASKED, ids=MASKED)
def test_masked_kernels_of_nn(code: str, masked: str) -> None:
    """Where all keys are masked it is NaN, as in nn's kernels, and not 0."""
    m = net(
        MASKED[code],
        args="x, m, p",
        a=nn.MultiheadAttention(32, 4, batch_first=True),
        e=nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
    ).eval()
    x, mask = torch.randn(2, 9, 32), torch.ones(9, 9, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[:, -2:] = True
    if masked != "some":
        mask[4] = padding[1] = True
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(m, (x, mask, padding), check_trace=False))
        for _ in range(4):
            expected = m(x, mask, padding)
            torch.testing.assert_close(
                script(x, mask, padding), expected, equal_nan=True, rtol=1e-4, atol=1e-5
            )
        assert bool(expected.isnan().any()) == (masked != "some" and code != "none")
        found = fused_graph(script, x, mask, padding)
    split = code not in ("both", "weights")
    assert bool(found.inside["aten::linear"]) == split


@pytest.mark.parametrize("mode", ["traced", "bf16", "autocast"])
def test_branches_that_are_weighed(mode: str) -> None:
    """SKNet: what is stacked and summed stays images of two convolutions."""
    m = net(
        "s = torch.stack([F.relu(self.a(x)), F.relu(self.b(x))], 1)\n"
        "w = self.d(F.relu(self.c(s.sum(1).mean((2, 3), keepdim=True))))\n"
        "w = w.view(w.shape[0], 2, 8, w.shape[2], w.shape[3]).softmax(1)\n"
        "return F.relu(self.e((s * w).sum(1)))",
        a=nn.Conv2d(4, 8, 3, padding=1, groups=2),
        b=nn.Conv2d(4, 8, 3, padding=2, dilation=2),
        c=nn.Conv2d(8, 4, 1),
        d=nn.Conv2d(4, 16, 1),
        e=nn.Conv2d(8, 4, 1),
    ).eval()
    found = check(m, [torch.randn(2, 4, 9, 11)], fallbacks=True, **MODES[mode])
    assert not (found.inside + found.outside)["aten::stack"]


SEQUENCE = {
    "c": lambda: nn.Conv1d(8, 16, 3, padding=1),
    "d": lambda: nn.Conv1d(16, 8, 3, padding=2, dilation=2, groups=4),
    "p": lambda: nn.Conv1d(16, 16, 1),
    "same": lambda: nn.Conv1d(16, 16, 4, padding="same"),
    "causal": lambda: nn.Conv1d(16, 16, 3, padding=4, dilation=2),
    "s": lambda: nn.Conv1d(16, 8, 5, stride=2, padding=2),
    "t": lambda: nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1, output_padding=1),
    "b": lambda: nn.BatchNorm1d(16, eps=0.1),
    "g": lambda: nn.GroupNorm(4, 16),
    "i": lambda: nn.InstanceNorm1d(16, affine=True),
    "r": lambda: nn.PReLU(16),
    "l": lambda: nn.Linear(16, 4),
}
SEQUENCES = {  # code, and what is in a group when traced
    "chain": ("self.p(F.relu(self.c(x)))", "conv relu"),
    "residual": ("x + self.d(torch.tanh(self.c(x)))", "conv add tanh"),
    "of_rows": ("self.p(F.gelu(self.c(x.transpose(1, 2)))).transpose(1, 2)", "conv gelu"),
    "stride": ("F.leaky_relu(self.s(self.c(x)), 0.1) * 0.5", "conv"),
    "same": ("F.relu(self.same(self.c(x)))", "conv relu"),
    "transposed": ("F.relu(self.t(self.c(x)))", "conv relu"),
    "causal": ("y = self.c(x)\ny + F.relu(self.causal(y)[..., :-4])", "conv relu add"),
    "causal_and_copied": (
        "y = self.c(x)\ny + F.relu(self.causal(y)[..., :-4].contiguous())",
        "conv relu add",
    ),
    "copied_for_others": (
        "y = self.causal(self.c(x))[..., :-4].contiguous()\ny.view(-1, 20) * 2, F.relu(y)",
        "conv",
    ),
    "copied_and_returned": (
        "y = self.causal(self.c(x))[..., :-4].contiguous()\ny, F.relu(y)",
        "conv",
    ),
    "cut": ("F.relu(self.causal(self.c(x))[..., :-3])", "conv"),
    "cut_further": ("F.relu(self.causal(self.c(x))[..., :-5])", "conv"),
    "cut_in_front": ("F.relu(self.causal(self.c(x))[..., 4:])", "conv"),
    "cut_and_seen": ("y = self.causal(self.c(x))\nF.relu(y[..., :-4]), y", "conv"),
    "padded": ("self.p(F.pad(F.pad(self.c(x), [3, 0]), [1, 2, 0, 0], value=1.0))", "conv"),
    "gated": ("a, b = self.p(self.c(x)).chunk(2, 1)\nF.relu(a) * torch.sigmoid(b)", "mul"),
    "split": ("a, b = self.c(x).split([10, 6], -2)\na[:, 2:8] * torch.sigmoid(b)", "mul"),
    "joined": ("y = self.c(x)\nF.relu(torch.cat([y, x, self.d(y)], 1))", "conv cat"),
    "joined_behind": ("y = self.c(x)\ntorch.cat([y, y + 1], -1)", "conv"),
    "norms": ("self.g(F.relu(self.b(self.p(self.r(self.c(x))))))", "conv group_norm"),
    "instances": ("F.relu(self.i(self.c(x)))", "conv"),
    "pools": (
        "F.avg_pool1d(F.max_pool1d(self.c(x), 3, 2, 1), 2, count_include_pad=False)",
        "max_pool1d avg_pool1d",
    ),
    "dilated_pool": ("F.max_pool1d(self.c(x), 3, dilation=2, ceil_mode=True)", "max_pool1d"),
    "adaptive": ("self.l(F.adaptive_avg_pool1d(self.c(x), 1).flatten(1))", "linear"),
    "mean": ("self.l(self.c(x).mean(-1))", "conv mean linear"),
    "excited": (
        "y = self.c(x)\ny * torch.sigmoid(self.p(F.relu(self.p(y.mean(2, keepdim=True)))))",
        "conv mean sigmoid mul",
    ),
    "over_channels": ("self.c(x).mean(1), self.c(x).mean((1, 2))", "conv"),
    "greatest": ("self.c(x).max(2)[0], self.c(x).amax(-1, keepdim=True)", "conv"),
    "with_a_number": ("self.c(x) * torch.tensor(2.0) + 1", "conv"),
    "with_a_vector": ("self.c(x) * torch.arange(20)", "conv"),
    "with_more_dimensions": ("self.c(x) + torch.ones(3, 1, 1, 20, dtype=x.dtype)", "conv"),
    "written": ("y = self.c(x)\nz = y.relu()\ny += 1\ny.mul_(z)\ny + z", "conv"),
}


def of_sequences(code: str) -> nn.Module:
    *before, last = code.split("\n")
    members = {name: make() for name, make in SEQUENCE.items() if f"self.{name}(" in code}
    return net("\n".join([*before, f"return {last}"]), **members).eval()


@pytest.mark.parametrize("mode", ["traced", "scripted", "bf16", "autocast"])
@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences(case: str, mode: str) -> None:
    """They become images of one row, which have the sequences' numbers."""
    code, fused = SEQUENCES[case]
    x = torch.randn(2, 20, 8) if case == "of_rows" else torch.randn(2, 8, 20)
    m = of_sequences(code)
    found = check(m, [x], fused="conv", fallbacks=True, **MODES[mode])
    kinds = found.inside + found.outside
    assert not any(kinds[f"aten::{k}"] for k in ("conv1d", "conv_transpose1d")), found
    if mode == "traced":
        names = {"max_pool1d": "max_pool2d", "avg_pool1d": "avg_pool2d"}
        expect(found, fused=" ".join(names.get(name, name) for name in fused.split()))


@pytest.mark.parametrize("case", ["chain", "residual", "stride", "with_a_vector", "mean", "causal"])
def test_sequence_without_a_batch(case: str) -> None:
    """Its channels are the first dimension, which scripts may tell only when they run."""
    m = of_sequences(SEQUENCES[case][0])
    check(m, [torch.randn(8, 20)], scripted=True, fallbacks=True)
    script = torch.jit.freeze(torch.jit.script(m))
    for shape in [(2, 8, 20), (8, 20), (1, 8, 20), (8, 20)]:
        x = torch.randn(shape)
        torch.testing.assert_close(script(x), m(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_sequence_with_special_values(value: float) -> None:
    m = of_sequences("self.p(F.relu(self.causal(self.c(x))[..., :-4]))")
    x = torch.randn(2, 8, 20)
    x[1, 3, 7] = value
    check(m, [x], fallbacks=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (20,), (16, 1), (2, 16, 20), (3, 1, 16, 20)], ids=str)
def test_sequence_and_something_else(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Which has any number of dimensions, and types are promoted as without a row."""
    m = net("F.relu(self.c(x) + y) * y", args="x, y", c=nn.Conv1d(8, 16, 3, padding=1)).eval()
    x = torch.randn(2, 8, 20)
    for trace_with in (torch.zeros(()), torch.ones(2, 16, 20)):
        script = to_script(m, [x, trace_with])
        y = (torch.randn(shape) * 4).to(dtype)
        for _ in range(3):
            got, expected = script(x, y), m(x, y)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_sequence_of_one_channel() -> None:
    """An image of one channel lies in either order at once."""
    m = net("self.p(F.relu(self.c(x)))", c=nn.Conv1d(1, 1, 3), p=nn.Conv1d(1, 4, 5, 2)).eval()
    for shape in [(1, 1, 50), (3, 1, 50)]:
        check(m, [torch.randn(shape)], groups=2)


@pytest.mark.parametrize("window", [3, (1, 4)])
@pytest.mark.parametrize("scripted", [False, True])
def test_batch_norm_behind_same_padding(scripted: bool, window: Any) -> None:
    m = nn.Sequential(nn.Conv2d(3, 8, window, padding="same"), nn.BatchNorm2d(8), nn.ReLU()).eval()
    with torch.no_grad():
        for tensor in (*m[1].parameters(), *m[1].buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    check(m, [torch.randn(2, 3, 9, 12)], scripted=scripted, groups=None if scripted else 1)


def test_sequences_of_other_lengths() -> None:
    m = of_sequences("y = self.c(x)\nself.s(y + F.relu(self.causal(y)[..., :-4]))")
    script = to_script(m, [torch.randn(2, 8, 20)])
    for length in (20, 33, 5, 1, 64, 20):
        x = torch.randn(2, 8, length)
        torch.testing.assert_close(script(x), m(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(8,), (2, 7, 20), (2, 2, 8, 20), ()])
def test_sequence_that_does_not_fit(shape: tuple[int, ...]) -> None:
    """It raises, as in eager, and the next one is computed."""
    m = of_sequences("self.p(F.relu(self.c(x)))")
    x = torch.randn(2, 8, 20)
    script = to_script(m, [x])
    for _ in range(3):
        script(x)
    with pytest.raises(RuntimeError):
        m(torch.randn(shape))
    with pytest.raises(RuntimeError):
        script(torch.randn(shape))
    torch.testing.assert_close(script(x), m(x), rtol=1e-4, atol=1e-5)


LEAST = {
    "same_as_tf": ("F.pad(y, [0, 1, 0, 1], value=-torch.inf), 3, 2", True),
    "more": ("F.pad(y, [1, 0, 2, 1], value=-torch.inf), 5, 3, 2", True),
    "dilated": ("F.pad(y, [2, 3, 4, 1], value=-torch.inf), 3, 1, 0, 2", True),
    "ceil": ("F.pad(y, [0, 1, 1, 1], value=-torch.inf), 3, 2, 1, 1, True", True),
    "of_width": ("F.pad(y, [1, 1], value=-torch.inf), 2", True),
    "nothing_under_a_window": ("F.pad(y, [0, 3, 0, 1], value=-torch.inf), 3, 1", False),
    "cropped": ("F.pad(y, [0, -1, 0, 1], value=-torch.inf), 3, 1", False),
    "zeros": ("F.pad(y, [0, 1, 0, 1]), 3, 2", None),
    "large": ("F.pad(y, [0, 1, 0, 1], value=-1e30), 3, 2", None),
}


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("case", LEAST)
def test_padding_before_max_pooling(case: str, mode: str) -> None:
    """By what is less than any number, which poolings pad with themselves."""
    pooled, taken = LEAST[case]
    m = net(
        f"y = self.c(x)\ny = F.max_pool2d({pooled})\nreturn self.d(F.relu(y))",
        c=nn.Conv2d(4, 8, 3), d=nn.Conv2d(8, 8, 1),
    ).eval()  # fmt: skip
    x = torch.randn(2, 4, 11, 14)
    if taken is None:
        return check(m, [x], outside="" if has_own_kernels() else "pad", **MODES[mode])
    fused = "_convolution pad max_pool2d relu" if taken and mode == "traced" else ""
    check(m, [x], **MODES[mode], fused=fused, fallbacks=not taken)
    x[0, 1, 5, 6] = math.nan
    return check(m, [x], **MODES[mode], fallbacks=True)


def test_infinities_that_a_fallback_ends() -> None:
    """What is behind it is computed by groups again."""
    m = net(
        "y = F.max_pool2d(torch.where(x > 0, x, -torch.inf), 5)\nreturn F.relu(self.c(y))",
        c=nn.Conv2d(4, 8, 3, padding=1),
    ).eval()  # fmt: skip
    x = torch.randn(2, 4, 20, 20)
    found = llga_fuser.report(to_script(m, [x]), x, rounds=1)
    kinds = [group.ops[0].kind for group in found.groups]
    pool = kinds.index("aten::max_pool2d")  # behind our own kernel's where, or the first group
    assert kinds[pool:] == ["aten::max_pool2d", "aten::_convolution"]
    assert [(f.group, f.reason) for f in found.fallbacks] == [
        (pool, "an input holds NaN or an infinity")
    ]
    check(m, [x], fallbacks=True)
    check(m, [x - 10], fallbacks=True)


@pytest.mark.parametrize(
    "code",
    [
        "torch.where(x > 0, x, -torch.inf)",
        "torch.where(x > 0, x, self.least)",
        "x.masked_fill(x < 0, float('-inf'))",
        "x.masked_fill(x < 0, float('nan')) * 2.0",
        "torch.where(x > 0, x, self.least) + x",
    ],
)
@pytest.mark.parametrize("reader", ["F.max_pool2d(y, 5)", "torch.relu(self.c(y))", "y.amax(1)"])
def test_infinities_that_a_group_makes(code: str, reader: str) -> None:
    """Of constants. The next one looks for them, as for those of an input."""
    m = net(
        f"y = {code}\nreturn {reader}",
        c=nn.Conv2d(4, 8, 3, padding=1), least=torch.tensor(-torch.inf),
    ).eval()  # fmt: skip
    x = torch.randn(2, 4, 20, 20)
    x[0, :, :9] -= 10
    script = to_script(m, [x])
    for at in (x, x.abs(), x):
        for _ in range(4):
            torch.testing.assert_close(script(at), m(at), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_padded_blocks_of_a_mobilenet() -> None:
    """Of TensorFlow's kind: the kernel for the whole block pads as well."""
    m = net(
        "y = F.silu(self.a(x))\ny = F.silu(self.b(F.pad(y, [0, 1, 0, 1])))\nreturn self.c(y)",
        a=nn.Conv2d(16, 96, 1), b=nn.Conv2d(96, 96, 3, stride=2, groups=96), c=nn.Conv2d(96, 24, 1),
    ).eval()  # fmt: skip
    x = torch.randn(1, 16, 32, 30).contiguous(memory_format=torch.channels_last)
    if has_own_kernels():
        check(m, [x], groups=1)
        assert "llga_expansion" in kernels_of(m, x)[0]
    else:
        check(m, [x])


@pytest.mark.parametrize("mode", list(MODES))
def test_silu_whose_data_others_read_too(mode: str) -> None:
    """It is a group of its own, though oneDNN has no op for it."""
    m = net(
        "y = self.c(x)\nz = F.silu(y) * 0.9\nreturn self.e(F.silu(self.d(z))) * 0.5 + y",
        c=nn.Conv2d(4, 16, 1), d=nn.Conv2d(16, 16, 1), e=nn.Conv2d(16, 16, 3, padding=1),
    ).eval()  # fmt: skip
    check(m, [torch.randn(2, 4, 30, 22)], **MODES[mode], fused="silu")


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "heads", ["self.h(a)", "self.l(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"]
)
def test_softmax_of_rows_that_do_not_lie_together(heads: str, mode: str) -> None:
    """Attention whose heads talk: as pixels' channels, they lie side by side in memory."""
    m = net(
        f"a = x @ x.transpose(-2, -1)\na = {heads}\nreturn torch.softmax(a, -1) @ x",
        h=nn.Conv2d(4, 4, 1), l=nn.Linear(4, 4),
    ).eval()  # fmt: skip
    check(m, [torch.randn(2, 4, 33, 8)], **MODES[mode], fallbacks=mode in ("bf16", "autocast"))


def test_batch_norm_that_nobody_folded() -> None:
    """oneDNN 3.2 can't scale a weight that it packed."""
    m = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    randomize(m)
    x = torch.randn(2, 8, 9, 7)
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(m, x), optimize_numerics=False)
        for _ in range(4):
            assert_same(script(x), m(x))
        kernels = kernels_of(script, x)
    assert fused_graph(script, x).inside["aten::batch_norm"] == 1
    assert len(kernels) == 1, "ran in the interpreter"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(2, 5, 2, 8), (2, 5, 8, 2), (1, 5, 2, 8), (2, 5, 2, 2)], ids=str)
def test_operand_of_images_of_one_row(size: tuple[int, ...], dtype: torch.dtype) -> None:
    """Or column. Its stride says nothing, and oneDNN's own choice of it confuses its kernels."""
    m = net("y = F.avg_pool2d(x, 2)\nreturn y * a, F.relu(y * a + z)", "x, a, z").eval()
    n, c, h, w = size
    a, z = torch.randn(1, 1, h // 2, w // 2), torch.randn(n, c, h // 2, w // 2)
    for order in itertools.permutations(range(4)):
        x = torch.randn([size[i] for i in order]).permute([order.index(i) for i in range(4)])
        check(m, [x, a, z], dtype=dtype)


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


@pytest.mark.parametrize("rank", [3, 4])
def test_batch_norm_of_rows(rank: int) -> None:
    """LeViT's linear layers: the norm is part of them, where its channels are theirs."""
    m = net(
        "y = x.flatten(2).transpose(1, 2)\ny = self.a(y)\n"
        "y = self.c(y.flatten(0, 1)).reshape_as(y)\ny = F.hardswish(y)\nz = self.b(y)\n"
        "return y + self.d(z.flatten(0, 1)).reshape_as(z)"
        if rank == 3
        # Of four dimensions the norm's are the third one's, which are as many here.
        else "y = self.a(x)\ny = self.c(y.flatten(0, 1)).reshape_as(y)\nreturn self.b(y)",
        a=nn.Linear(8, 16),
        b=nn.Linear(16, 16, bias=False),
        c=nn.BatchNorm1d(16),
        d=nn.BatchNorm1d(16),
    ).eval()
    x = torch.randn(2, 8, 5, 7) if rank == 3 else torch.randn(2, 3, 16, 8)
    found = check(m, [x], fused="linear")
    assert bool(found.inside["aten::batch_norm"] + found.outside["aten::batch_norm"]) == (rank == 4)
    if rank == 3:
        assert len(found.groups) == 2, str(found)


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
    apart = {"LLGA_FUSER_DISABLE_PASSES": "join_concat", "LLGA_FUSER_OWN_KERNELS": "off"}
    ran = primitives(NO_COPY, **({} if joined else apart))
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
    """Or read by our kernels: oneDNN would copy one to where it writes the sum, 1x256x56x56
    numbers.
    """
    if not fuses(torch.bfloat16):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    ran = primitives(RESIDUAL, LLGA_FUSER_ARENA=arena)
    assert not any(",reorder," in line and ",1x256x56x56," in line for line in ran), ran


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
    passes = ("fold_constants", "once_per_sizes")
    for name in passes:
        llga_fuser._C.set_pass_enabled(name, folded)
    try:
        found = check(module, [torch.randn(2, 4, 6, 6)], scripted=scripted)
    finally:
        for name in passes:
            llga_fuser._C.set_pass_enabled(name, True)
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
