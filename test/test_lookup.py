"""Embeddings, which our own kernel looks up."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import llga_fuser
from util import assert_same, check, has_own_kernels, kernels_of, net, to_script

pytestmark = pytest.mark.usefixtures("fuser", "few_threads")

ROWS = 50


def table(columns: int = 12, **options: bool | int) -> nn.Embedding:
    return nn.Embedding(ROWS, columns, **options)  # type: ignore[arg-type]  # mixed options


def indices(*shape: int) -> Tensor:
    return torch.randint(0, ROWS, shape)


def is_ours(m: nn.Module, *inputs: Tensor) -> bool:
    return "llga_lookup" in kernels_of(m, *inputs)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (2, 9), (3, 1, 5), (2, 3, 4, 2, 3), (40, 70)], ids=str
)
@pytest.mark.parametrize("columns", [1, 12, 300])
def test_shapes(columns: int, shape: tuple[int, ...], dtype: torch.dtype, scripted: bool) -> None:
    m = net("return self.e(i)", "i", e=table(columns)).eval()
    check(m, [indices(*shape)], dtype=dtype, scripted=scripted, fused="embedding")
    assert is_ours(m, indices(*shape)) == has_own_kernels()


@pytest.mark.parametrize(
    "i",
    [
        indices(4, 6).t(),
        indices(4, 6)[:, 2],
        indices(4, 6)[::2, 1::2],
        indices(5, 1).expand(5, 3),
        indices(3, 4, 5).permute(2, 0, 1),
        indices(9).to(torch.int32),
        indices(4, 6).to(torch.int32).t(),
    ],
    ids=["transposed", "column", "gaps", "expanded", "permuted", "int32", "int32_transposed"],
)
def test_order_of_the_indices(i: Tensor) -> None:
    m = net("return torch.relu(self.e(i)) + 1", "i", e=table()).eval()
    check(m, [i], fused="embedding")


def test_views_inside_the_network() -> None:
    """As recommender models have them: one table for each column."""
    code = "return torch.cat([self.a(i[:, 0]), self.b(i[:, 1]), self.c(i[:, 2])], 1)"
    m = net(code, "i", a=table(), b=table(5), c=table(7)).eval()
    check(m, [indices(6, 3)], fused="embedding")


@pytest.mark.parametrize("i", [-1, ROWS, ROWS + 7, -(2**40), 2**40])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_indices_out_of_range_raise(i: int, first: bool) -> None:
    """What eager raises; later calls are right again."""
    m = net("return self.e(i)", "i", e=table()).eval()
    script = to_script(m, [indices(2, 3)])
    wrong = indices(2, 3)
    wrong[1, 2] = i
    with torch.no_grad():
        for _ in range(0 if first else 4):
            good = indices(2, 3)
            assert_same(script(good), m(good))
        for _ in range(4):
            with pytest.raises((IndexError, RuntimeError), match="range"):
                script(wrong)
        good = indices(2, 3)
        assert_same(script(good), m(good))


def test_other_sizes_later() -> None:
    m = net("return self.e(i)", "i", e=table()).eval()
    script = to_script(m, [indices(2, 3)])
    with torch.no_grad():
        for shape in [(2, 3), (4, 3), (1, 1), (0, 3), (2, 3), (7,)]:
            i = indices(*shape)
            assert_same(script(i), m(i), str(shape))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_special_values_in_the_table(value: float) -> None:
    """oneDNN's relu would make a number of NaN."""
    e = table()
    with torch.no_grad():
        e.weight[3, 4] = value
    i = torch.tensor([[1, 3], [2, 4]])
    for code in (
        "return self.e(i)",
        "return torch.relu(self.e(i))",
        "return torch.relu(self.l(self.e(i)))",
    ):
        check(net(code, "i", e=e, l=nn.Linear(12, 3)).eval(), [i], fallbacks=True)


def test_options_that_change_nothing_here() -> None:
    m = net("return self.e(i)", "i", e=table(padding_idx=3, scale_grad_by_freq=True)).eval()
    check(m, [torch.tensor([[1, 3], [3, 4]])], fused="embedding")


@pytest.mark.parametrize(
    "weight",
    [torch.randn(12, ROWS).t(), torch.randn(ROWS, 20)[:, 3:15], torch.randn(ROWS, 4).double()],
    ids=["transposed", "gaps", "double"],
)
def test_tables_in_other_orders(weight: Tensor) -> None:
    m = net("return F.embedding(i, self.w)", "i", w=weight)
    check(m, [indices(3, 2)])


def test_a_table_that_is_no_constant() -> None:
    m = net("return F.embedding(i, w)", "i, w")
    check(m, [indices(3, 2), torch.randn(ROWS, 4)], outside="embedding")


def test_training_gives_gradients() -> None:
    m = net("return self.e(i)", "i", e=table())
    script = torch.jit.trace(m, (indices(4),))
    i = indices(4)
    for _ in range(4):
        m.zero_grad()
        script(i).sum().backward()
        gradient = m.e.weight.grad.clone()  # type: ignore[union-attr]
        m.zero_grad()
        m(i).sum().backward()
        assert_same(gradient, m.e.weight.grad)  # type: ignore[union-attr]


def test_a_result_that_is_written_to() -> None:
    m = net("y = self.e(i)\ny.mul_(2)\nz = self.e(i)\nreturn y, z", "i", e=table()).eval()
    check(m, [indices(3, 2)])


def test_compiled_with_released_weights() -> None:
    """A head that is the embedding too: its packed copy cannot stand in for the table."""
    e = table(32)
    head = nn.Linear(32, ROWS, bias=False)
    head.weight = e.weight
    m = net("return self.h(torch.tanh(self.e(i)))", "i", e=e, h=head).eval()
    compiled = llga_fuser.compile(m, indices(2, 3), release_weights=True)
    with torch.no_grad():
        for shape in [(2, 3), (4, 5), (2, 3)]:
            i = indices(*shape)
            assert_same(compiled(i), m(i))
