"""Patterns that become one partition, and their numbers."""

import cases
import numpy as np
import pytest
from cases import CONV, LT, VERSION, normal
from scipy import special

import dnnl_graph as dg
from dnnl_graph import engine, op


class Builder:
    """Ops in a row; each call gives the logical tensor of its output."""

    def __init__(self):
        self.graph = dg.graph(engine.cpu)
        self.arrays = {}
        self.next_id = 0

    def input(self, array, ptype=LT.variable):
        lt = dg.logical_tensor_like(self.new_id(), array, ptype)
        self.arrays[lt.get_id()] = array
        return lt

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def add(self, kind, inputs, shape, dtype=LT.f32, **attrs):
        out = LT(self.new_id(), dtype, list(shape), LT.strided, LT.variable)
        o = op(self.new_id(), kind, inputs, [out])
        for name, value in attrs.items():
            o.set_attr(getattr(op.attr, name), value)
        self.graph.add_op(o)
        return out

    def result(self, lt, partitions=1):
        self.graph.finalize()
        parts = self.graph.get_partitions()
        assert [p.is_supported() for p in parts] == [True] * partitions, parts
        return dg.run(self.graph, self.arrays)[lt.get_id()]


def test_conv_relu():
    x, w, bias = normal(1, 3, 8, 8), normal(4, 3, 3, 3, seed=1), normal(4, seed=2)
    b = Builder()
    y = b.add(
        op.Convolution,
        [b.input(x), b.input(w, LT.constant), b.input(bias, LT.constant)],
        (1, 4, 8, 8),
        **CONV,
    )
    y = b.add(op.ReLU, [y], (1, 4, 8, 8))
    want = cases.conv(x, w, [1, 1], [1, 1], [1, 1], [1, 1]) + bias[:, None, None]
    np.testing.assert_allclose(b.result(y), np.maximum(want, 0), rtol=1e-3, atol=1e-4)


def test_matmul_bias_gelu():
    x, w, bias = normal(4, 16), normal(16, 8, seed=1), normal(8, seed=2)
    b = Builder()
    y = b.add(op.MatMul, [b.input(x), b.input(w, LT.constant), b.input(bias)], (4, 8))
    y = b.add(op.GELU, [y], (4, 8))
    z = x @ w + bias
    want = 0.5 * z * (1 + special.erf(z / np.sqrt(2)))
    np.testing.assert_allclose(b.result(y), want, rtol=1e-3, atol=1e-4)


def int8_weights(*shape):
    """Of 7 bits: without VNNI two products of u8 and s8 are added in 16 bits, and saturate there.

    Source: oneDNN, Nuances of int8 Computations.
    """
    return cases.rng(1).integers(-64, 64, shape).astype(np.int8)


def test_int8_matmul():
    x = cases.rng(0).integers(0, 255, (4, 16)).astype(np.uint8)
    w = int8_weights(16, 8)
    b = Builder()
    scales = [0.01 + 0.001 * i for i in range(8)]
    src = b.add(op.Dequantize, [b.input(x)], (4, 16), scales=[0.02], zps=[10], qtype="per_tensor")
    wei = b.add(
        op.Dequantize,
        [b.input(w, LT.constant)],
        (16, 8),
        scales=scales,
        zps=[0] * 8,
        qtype="per_channel",
        axis=1,
    )
    y = b.add(op.MatMul, [src, wei], (4, 8))
    y = b.add(op.Quantize, [y], (4, 8), LT.s8, scales=[0.5], zps=[3], qtype="per_tensor")
    real = ((x.astype(float) - 10) * 0.02) @ (w.astype(float) * np.array(scales))
    want = np.clip(np.rint(real / 0.5) + 3, -128, 127)
    got = b.result(y).astype(float)
    assert np.abs(got - want).max() <= 1 and (got == want).mean() > 0.9


def test_int8_conv_relu():
    x = cases.rng(0).integers(0, 255, (1, 4, 6, 6)).astype(np.uint8)
    w = int8_weights(8, 4, 3, 3)
    b = Builder()
    src = b.add(op.Dequantize, [b.input(x)], x.shape, scales=[0.02], zps=[0], qtype="per_tensor")
    wei = b.add(
        op.Dequantize,
        [b.input(w, LT.constant)],
        w.shape,
        scales=[0.01] * 8,
        zps=[0] * 8,
        qtype="per_channel",
        axis=0,
    )
    y = b.add(op.Convolution, [src, wei], (1, 8, 6, 6), **CONV)
    y = b.add(op.ReLU, [y], (1, 8, 6, 6))
    y = b.add(op.Quantize, [y], (1, 8, 6, 6), LT.u8, scales=[0.1], zps=[0], qtype="per_tensor")
    real = cases.conv(x * 0.02, w * 0.01, [1, 1], [1, 1], [1, 1], [1, 1])
    want = np.clip(np.rint(np.maximum(real, 0) / 0.1), 0, 255)
    assert np.abs(b.result(y).astype(float) - want).max() <= 1


@pytest.mark.parametrize("mask", [False, True])
def test_sdpa(mask):
    q, k, v = (normal(1, 2, 6, 8, seed=s) for s in range(3))
    scale, add = np.float32([8**-0.5]), normal(1, 1, 6, 6, seed=4)
    b = Builder()
    s = b.add(op.MatMul, [b.input(q), b.input(k)], (1, 2, 6, 6), transpose_b=True)
    s = b.add(op.Multiply, [s, b.input(scale)], (1, 2, 6, 6))
    if mask:
        s = b.add(op.Add, [s, b.input(add)], (1, 2, 6, 6))
    s = b.add(op.SoftMax, [s], (1, 2, 6, 6), axis=-1)
    y = b.add(op.MatMul, [s, b.input(v)], (1, 2, 6, 8))
    b.graph.finalize()
    parts = b.graph.get_partitions()
    if VERSION >= (3, 7):
        assert len(parts) == 1
    assert all(p.is_supported() for p in parts)
    scores = q @ k.swapaxes(2, 3) * scale + (add if mask else 0)
    want = cases.softmax(scores.astype(float), -1) @ v
    got = dg.run(b.graph, b.arrays)[y.get_id()]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_debug_policy_does_not_fuse():
    b = Builder()
    y = b.add(op.MatMul, [b.input(normal(4, 8)), b.input(normal(8, 3, seed=1))], (4, 3))
    y = b.add(op.ReLU, [y], (4, 3))
    b.graph.finalize()
    want = np.maximum(normal(4, 8) @ normal(8, 3, seed=1), 0)
    for policy in (dg.partition.fusion, dg.partition.debug):
        got = dg.run(b.graph, b.arrays, policy=policy)[y.get_id()]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
