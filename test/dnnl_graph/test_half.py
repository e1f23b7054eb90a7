"""Numbers in bf16 and f16: numpy arrays of ml_dtypes, torch tensors through DLPack, fusion.

What the processor has no kernel for is skipped; `cases.is_native` says on which ones it may be. The
same tests run in f32, on every processor.
"""

from dataclasses import dataclass, field

import cases
import numpy as np
import pytest
from cases import CONV, LT, normal, positive
from scipy import special

import dnnl_graph as dg
from dnnl_graph import engine, op, stream, tensor

ml_dtypes = pytest.importorskip("ml_dtypes")
E = engine(engine.cpu, 0)

# name -> (numpy type, distance of 1 to the next number)
HALF = {"bf16": (ml_dtypes.bfloat16, 2.0**-7), "f16": (np.float16, 2.0**-10)}
TYPES = {"f32": (np.float32, 2.0**-18), **HALF}  # 32 times the distance: the order of sums differs


@dataclass
class Case:
    """An op; its reference computes in float64 what the rounded inputs give."""

    kind: str
    inputs: list
    reference: object
    attrs: dict = field(default_factory=dict)


POOL = {"strides": [2, 2], "kernel": [2, 2], "pads_begin": [0, 0], "pads_end": [0, 0]}
_x, _img = normal(4, 16), normal(1, 4, 6, 6)
CASES = [
    Case("MatMul", [_x, normal(16, 8, seed=1)], lambda a, b: a @ b),
    Case("MatMul", [_x, normal(8, 16, seed=1)], lambda a, b: a @ b.T, {"transpose_b": True}),
    Case(
        "Convolution",
        [_img, normal(8, 4, 3, 3, seed=1)],
        lambda x, w: cases.conv(x, w, [1, 1], [1, 1], [1, 1], [1, 1]),
        CONV,
    ),
    Case("ReLU", [_x], lambda x: np.maximum(x, 0)),
    Case("Tanh", [_x], np.tanh),
    Case("GELU", [_x], lambda x: 0.5 * x * (1 + special.erf(x / np.sqrt(2)))),
    Case("Add", [_x, normal(1, 16, seed=2)], np.add),
    Case("Multiply", [_x, normal(4, 1, seed=2)], np.multiply),
    Case("SoftMax", [_x], lambda x: cases.softmax(x, 1), {"axis": 1}),
    Case("ReduceMean", [_x], lambda x: x.mean(1, keepdims=True), {"axes": [1], "keep_dims": True}),
    Case(
        "MaxPool",
        [_img],
        lambda x: cases.pool(x, (2, 2), (2, 2), (0, 0), (0, 0), "max"),
        {**POOL, "data_format": "NCX"},
    ),
    Case("Concat", [_x, _x + 1], lambda a, b: np.concatenate([a, b], 1), {"axis": 1}),
    Case("Reorder", [_x.T], lambda x: x),
]


def check(got, want, step):
    np.testing.assert_allclose(got, want, rtol=2 * step, atol=2 * step * np.abs(want).max())


def rounded(case, name):
    dtype, step = TYPES[name]
    inputs = [x.astype(dtype) for x in case.inputs]
    return inputs, case.reference(*(x.astype(np.float64) for x in inputs)), step


def graph_of(case, inputs, want, name):
    return cases.one_op(
        getattr(op, case.kind), inputs, [(want.shape, getattr(LT, name))], case.attrs
    )


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.kind)
def test_numpy(case, name):
    inputs, want, step = rounded(case, name)
    g = graph_of(case, inputs, want, name)
    with cases.kernels_of(name, g):
        got = dg.run(g, inputs)[100]
    assert got.dtype == TYPES[name][0]
    check(got.astype(np.float64), want, step)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.kind)
def test_torch(case, name):
    torch = pytest.importorskip("torch")
    inputs, want, step = rounded(case, name)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[name]
    xs = [torch.from_numpy(x.astype(np.float32)).to(dtype) for x in inputs]
    y = torch.full(want.shape, torch.nan, dtype=dtype)
    g = graph_of(case, xs, want, name)
    with cases.kernels_of(name, g):
        c = cases.compile_like(g.get_partitions()[0])
    c.execute(
        stream(E),
        [tensor(c.query_logical_tensor(i), E, x) for i, x in enumerate(xs)],
        [tensor(c.query_logical_tensor(100), E, y)],  # written in place: nothing is copied
    )
    check(y.double().numpy(), want, step)


@pytest.mark.parametrize("name", HALF)
def test_typecast_both_ways(name):
    dtype, _ = TYPES[name]
    x = normal(3, 5)
    half = x.astype(dtype)
    there = cases.one_op(op.TypeCast, [x], [(x.shape, getattr(LT, name))])
    back = cases.one_op(op.TypeCast, [half], [(x.shape, LT.f32)])
    with cases.kernels_of(name, there, back):
        got, got_back = dg.run(there, [x])[100], dg.run(back, [half])[100]
    # Rounding to nearest, ties to even: bit for bit what ml_dtypes and numpy do.
    np.testing.assert_array_equal(got.view(np.uint16), half.view(np.uint16))
    np.testing.assert_array_equal(got_back, half.astype(np.float32))


@pytest.mark.parametrize("name", TYPES)
def test_statistics_stay_in_f32(name):
    """A batch norm of halves with f32 statistics, as frameworks have it."""
    dtype, step = TYPES[name]
    x = normal(2, 4, 3, 3).astype(dtype)
    gamma, beta, mean, variance = positive(4), normal(4, seed=1), normal(4, seed=2), positive(4)
    want = (x.astype(np.float64) - cases.channels(mean, 4)) / np.sqrt(
        cases.channels(variance, 4) + 1e-5
    ) * cases.channels(gamma, 4) + cases.channels(beta, 4)
    inputs = [x, gamma, beta, mean, variance]
    g = cases.one_op(
        op.BatchNormInference,
        inputs,
        [(x.shape, getattr(LT, name))],
        {"epsilon": 1e-5, "data_format": "NCX"},
    )
    with cases.kernels_of(name, g):
        got = dg.run(g, inputs)[100]
    check(got.astype(np.float64), want, step)


@pytest.mark.parametrize("name", TYPES)
def test_matmul_bias_relu_in_one_partition(name):
    dtype, step = TYPES[name]
    x, w, bias = (a.astype(dtype) for a in (_x, normal(16, 8, seed=1), normal(8, seed=2)))
    lts = [dg.logical_tensor_like(i, a) for i, a in enumerate((x, w, bias))]
    y, z = (LT(i, getattr(LT, name), [4, 8], LT.strided, LT.variable) for i in (3, 4))
    g = dg.graph(engine.cpu)
    g.add_op(op(0, op.MatMul, lts, [y]))
    g.add_op(op(1, op.ReLU, [y], [z]))
    g.finalize()
    with cases.kernels_of(name, g):
        assert [p.get_ops() for p in g.get_partitions()] == [[0, 1]]
        got = dg.run(g, [x, w, bias])[4]
    x, w, bias = (a.astype(np.float64) for a in (x, w, bias))
    check(got.astype(np.float64), np.maximum(x @ w + bias, 0), step)
