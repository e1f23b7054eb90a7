"""Attention, as an op or written out, with all that moves its operands: by kernels of our own.

What oneDNN has patterns for is in the entry suite, test_jit_llga_fuser.py, with the other ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
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
    has_own_attention,
    kernels_of,
    net,
    randomize,
    to_script,
)

pytestmark = pytest.mark.usefixtures("fuser", "few_threads")


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
    "one_head_of_keys": Attention(2, 8, key_heads=1),
    "one_head_of_keys_and_mask": Attention(2, 8, key_heads=1, options="attn_mask=m", mask=lower),
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
            "one_head_of_keys",
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
    "by_columns": Written("v.mT @ (q @ k.mT / 4).softmax(-1).mT", keys=75),
    "by_columns_of_channels": Written(  # LeViT's, and YOLO's since version 10
        "q, k, v = [x.mT.contiguous() for x in (q, k, v)]\n"
        "w = ((q * 0.25).transpose(-2, -1) @ k + m).softmax(-1)\n"
        "return (v @ w.transpose(-2, -1)).reshape(2, 48, 5, 8)",
        [torch.randn(3, 40, 40)],
    ),
    "by_columns_of_images": Written(  # the diffusion models'
        "q, k, v = [x.flatten(0, 1).mT.contiguous() for x in (q, k, v)]\n"
        "w = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * 0.25, dim=2)\n"
        "return torch.bmm(v, w.permute(0, 2, 1)).reshape(2, 48, 5, 8)",
        keys=33,
    ),
    "by_columns_and_moved": Written(
        "y = v.mT @ (q @ k.mT).softmax(-1).mT\nreturn y.permute(0, 3, 1, 2).reshape(2, 40, 48)"
    ),
    "by_columns_one_query": Written("v.mT @ (q @ k.mT).softmax(-1).mT", queries=1, keys=33),
    "by_columns_of_values": Written("v.mT @ (q @ k.mT).softmax(-1)", own=False),
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
    "of_channels": Written(  # XCiT's
        "q, k, v = q.mT, k.mT, v.mT\n"
        f"y = ({LENGTH_1.format('q')} @ {LENGTH_1.format('k')}.mT).softmax(-1) @ v\n"
        "return y.permute(0, 3, 1, 2).reshape(2, 40, 48)"
    ),
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
        *("by_columns", "by_columns_of_channels", "by_columns_of_images"),
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
    own = c.own and has_own_attention(c.dtype)
    with torch.no_grad():
        script = to_script(m, inputs)
        before = llga_fuser.cache_info().fallbacks
        want = m(*inputs)
        if own and c.dtype == torch.bfloat16:  # whose scores eager rounds, and the kernel does not
            want = m(*[x.float() if x.is_floating_point() else x for x in inputs]).to(c.dtype)
        for _ in range(3):
            assert_same(script(*inputs), want)
    wide = case in {"bf16_normalized", "bf16_normalized_and_scaled"}
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "code",
    [
        "x @ (x.mT @ x * 0.2).softmax(-1).mT",
        "y = x.mT\nreturn x @ (y @ x * 0.2).softmax(-1).mT",
        "y = x.mT\nreturn x @ (y @ y.mT * 0.2).softmax(-1).mT",
        "y = x.mT\nreturn ((y @ x * 0.2).softmax(-1) @ y).mT.contiguous()",
    ],
)
def test_attention_to_itself(code: str, dtype: torch.dtype) -> None:
    """One tensor, of which the query, the key and the value take copies of their own."""
    if not fuses(dtype):
        pytest.skip("oneDNN has no bf16 kernels on this processor")
    m = net(code).eval()
    for x in (torch.randn(2, 24, 35), torch.randn(2, 35, 24).mT, torch.randn(2, 24, 70)[..., ::2]):
        check(m, [x], dtype=dtype)


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
    dtype = torch.float32 if mode == "traced" else torch.bfloat16
    # Computed in float32, nothing is rounded for which eager's rounding would make up.
    tol = Tolerance(6 * 2.0**-8) if mode == "bf16" and not fuses(dtype) else None
    found = check(c.module(), [torch.randn(*c.image)], tol=tol, **MODES[mode])
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


def check_pixels(m: nn.Module, autocast: bool, layout: torch.memory_format) -> list[str]:
    """Checks it with images of 32 channels. What computes them: attention's kernel among others."""
    m = m.to(memory_format=layout)
    images = [torch.randn(2, 32, 6, 7), torch.randn(1, 32, 5, 8)]
    check(m, images[:1], autocast=autocast, memory_format=layout)
    x, other = (image.to(memory_format=layout) for image in images)
    with torch.no_grad():
        with autocast_bf16(autocast):
            script = torch.jit.freeze(torch.jit.trace(m, x, check_trace=False))
            expected, expected_of_other = m(x), m(other)
        before = llga_fuser.cache_info().fallbacks
        tol = TOLERANCES[torch.bfloat16] if autocast else None
        for _ in range(4):
            assert_same(script(x), expected, tol=tol)
        found: list[str] = []
        if has_own_attention(torch.float32):
            assert llga_fuser.cache_info().fallbacks == before
            groups = llga_fuser.report(script, x, rounds=1).groups
            found = [p.implementation for group in groups for p in group.primitives]
            assert any(name.startswith("llga_attention") for name in found), found
        for _ in range(3):
            assert_same(script(other), expected_of_other, tol=tol)
    return found


class AttentionOfPixels(nn.Module):
    """Of images whose channels are the heads' queries, keys and values, to images (Visformer)."""

    def __init__(self, channels: int, heads: int, parts: str, attention: str, *, norms: bool):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels) if norms else nn.Identity()
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.attention = net(f"q, k, v = {parts}\nreturn {attention}", "x").eval()
        self.proj = nn.Conv2d(channels, channels, 1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w)
        y = self.attention(qkv.permute(1, 0, 2, 4, 3))
        return x + self.proj(y.permute(0, 1, 3, 2).reshape(b, c, h, w))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "attention",
    [
        "(q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v",
        "F.scaled_dot_product_attention(q, k, v)",
    ],
    ids=["written_out", "op"],
)
@pytest.mark.parametrize("parts", ["x", "x.unbind(0)", "(x[0], x[1], x[2])"])
def test_attention_of_pixels(
    parts: str, attention: str, autocast: bool, layout: torch.memory_format
) -> None:
    """The convolutions around it give and take pixels one behind the other: nothing is copied."""
    m = randomize(AttentionOfPixels(32, 2, parts, attention, norms=True)).eval()
    assert "llga_copy" not in check_pixels(m, autocast, layout)


class AttentionByColumns(nn.Module):
    """Of images, by columns: YOLO's (heads side by side), or EfficientViT's (one head a part)."""

    def __init__(self, view: str, norms: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(32) if norms else nn.Identity()
        self.qkv = nn.Conv2d(32, 64, 1)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.proj = nn.Conv2d(32, 32, 1)
        self.attention = net(view, "x, b, h, w").eval()

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        y = self.attention(self.qkv(self.norm(x)), b, h, w)
        return x + self.proj(y + self.depthwise(y))


BY_COLUMNS = {
    "heads": (
        "q, k, v = x.view(b, 2, 32, h * w).split([8, 8, 16], dim=2)\n"
        "w_ = ((q.transpose(-2, -1) @ k) * 0.3).softmax(dim=-1)\n"
        "return (v @ w_.transpose(-2, -1)).view(b, 32, h, w)"
    ),
    "parts": (
        "q, k, v = x.view(b, -1, h, w).split([16, 16, 32], dim=1)\n"
        "q, k, v = q.flatten(2), k.flatten(2), v.flatten(2)\n"
        "w_ = ((q * 0.3).transpose(-2, -1) @ k).softmax(dim=-1)\n"
        "return (v @ w_.transpose(-2, -1)).view(b, 32, h, w)"
    ),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("norms", [False, True], ids=["first", "inside"])
@pytest.mark.parametrize("case", BY_COLUMNS)
def test_attention_by_columns(
    case: str, norms: bool, autocast: bool, layout: torch.memory_format
) -> None:
    """Pixels lie one behind the other there, too, and nothing is copied where they do before."""
    m = randomize(AttentionByColumns(BY_COLUMNS[case], norms)).eval()
    found = check_pixels(m, autocast, layout)
    assert "llga_copy" not in found or layout == torch.contiguous_format, found


def test_attention_of_pixels_whose_order_is_seen() -> None:
    """What others than groups read lies as it does in eager."""
    attention = "(q @ k.transpose(-2, -1)).softmax(-1) @ v"
    m = AttentionOfPixels(32, 2, "x", attention, norms=False).eval()
    whole = net("y = self.m.qkv(x)\nreturn self.m(x), y, y.reshape(2, 3, 2, 16, 42)", m=m).eval()
    check(whole, [torch.randn(2, 32, 6, 7)])
    ends = net(
        "q, k, v = self.c(x).reshape(2, 3, 2, 16, 42).permute(1, 0, 2, 4, 3)\n"
        "y = (q @ k.transpose(-2, -1)).softmax(-1) @ v\n"
        "return y.permute(0, 1, 3, 2).reshape(2, 32, 6, 7)",
        c=nn.Conv2d(32, 96, 1),
    ).eval()
    for layout in (torch.contiguous_format, torch.channels_last):
        check(ends, [torch.randn(2, 32, 6, 7)], memory_format=layout)


CHANNELS_FIRST = {
    "written": "y = ((q @ k) / 4 + m).softmax(-1) @ v.mT",
    "kernel": "y = F.scaled_dot_product_attention(q, k.mT, v.mT)",
}


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("case", CHANNELS_FIRST)
def test_attention_of_channels_first(case: str, heads: int, autocast: bool) -> None:
    """SqueezeBERT's: channels of all tokens come before the next one's, in the result as well.
    What lies so is copied.
    """
    m = net(
        f"q = self.q(x).view(2, {heads}, 16, 37).permute(0, 1, 3, 2)\n"
        f"k = self.k(x).view(2, {heads}, 16, 37)\n"
        f"v = self.v(x).view(2, {heads}, 16, 37)\n"
        f"{CHANNELS_FIRST[case]}\n"
        f"return y.permute(0, 1, 3, 2).contiguous().view(2, {16 * heads}, 37)",
        "x, m",
        q=nn.Conv1d(24, 16 * heads, 1),
        k=nn.Conv1d(24, 16 * heads, 1),
        v=nn.Conv1d(24, 16 * heads, 1),
    ).eval()
    inputs = [torch.randn(2, 24, 37), torch.randn(2, 1, 1, 37)]
    check(m, inputs, autocast=autocast)
    with torch.no_grad():
        with autocast_bf16(autocast):
            script = torch.jit.freeze(torch.jit.trace(m, inputs, check_trace=False))
        for _ in range(4):
            script(*inputs)
        report = llga_fuser.report(script, *inputs, rounds=1)
    if has_own_attention(torch.bfloat16 if autocast else torch.float32):
        found = [p.implementation for group in report.groups for p in group.primitives]
        assert any(name.startswith("llga_attention") for name in found), report


@pytest.mark.parametrize("name", ["normalized", "normalized_and_scaled", "queries_normalized"])
def test_attention_of_normalized_rows_frozen_under_autocast(name: str) -> None:
    """Which puts casts around the division, whose types it does not know."""
    code = WRITTEN[name].code
    m = net(
        "q, k, v = (y.transpose(1, 2) for y in self.l(x).reshape(2, 40, 3, 48).split(16, -1))\n"
        + (code if "return" in code else f"return {code}").replace("+ m", "+ self.m"),
        l=nn.Linear(32, 144),
        m=torch.randn(1, 3, 40, 40),
    ).eval()
    x = torch.randn(2, 40, 32)
    with torch.no_grad():
        with autocast_bf16():
            script = torch.jit.freeze(torch.jit.trace(m, x, check_trace=False))
            expected = m(x)
        for autocast in (False, False, False, True, True, True):
            with autocast_bf16(autocast):
                assert_same(script(x), expected, tol=TOLERANCES[torch.bfloat16])
        groups = llga_fuser.report(script, x, rounds=1).groups
    if has_own_attention(torch.bfloat16) and fuses(torch.bfloat16):
        kinds = [[op.kind for op in group.ops] for group in groups]
        attention = next(group for group in kinds if "aten::softmax" in group)
        norms = 1 if name == "queries_normalized" else 2
        assert attention.count("aten::linalg_vector_norm") == norms, kinds
