"""What the dnnl_graph tests build on: one-op graphs, and references in numpy (float64)."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import dnnl_graph as dg

VERSION = dg.version()[:2]
LT = dg.logical_tensor

# Attributes of a 3x3 convolution that keeps the size.
CONV = {
    "strides": [1, 1],
    "pads_begin": [1, 1],
    "pads_end": [1, 1],
    "dilations": [1, 1],
    "data_format": "NCX",
    "weights_format": "OIX",
}


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return rng(seed).standard_normal(shape).astype(np.float32)


def positive(*shape, seed=0):
    return rng(seed).uniform(0.3, 2.0, shape).astype(np.float32)


def outputs_of(first_id, specs):
    """Logical tensors for (shape, dtype) pairs."""
    return [
        LT(first_id + i, dtype, list(shape), LT.strided, LT.variable)
        for i, (shape, dtype) in enumerate(specs)
    ]


def one_op(kind, inputs, outputs, attrs=None, constants=()):
    """Graph of one op: inputs are arrays (ids 0, 1, ...), outputs (shape, dtype) (ids 100, ...)."""
    o = dg.op(0, kind, kind.name)
    for name, value in (attrs or {}).items():
        o.set_attr(getattr(dg.op.attr, name), value)
    for i, array in enumerate(inputs):
        o.add_input(
            dg.logical_tensor_like(i, array, LT.constant if i in constants else LT.variable)
        )
    o.add_outputs(outputs_of(100, outputs))
    g = dg.graph(dg.engine.cpu)
    g.add_op(o)
    g.finalize()
    return g


def run_one(kind, inputs, outputs, attrs=None, constants=()):
    """Outputs of a graph of one op, in order."""
    g = one_op(kind, inputs, outputs, attrs, constants)
    result = dg.run(g, dict(enumerate(inputs)))
    return [result[100 + i] for i in range(len(outputs))]


def compile_like(p, inputs=None, eng=None):
    """Compile a partition with its own ports."""
    return p.compile(
        inputs if inputs is not None else p.get_input_ports(),
        p.get_output_ports(),
        eng or dg.engine(dg.engine.cpu, 0),
    )


# Data type -> the flag in /proc/cpuinfo of the processors for which oneDNN has kernels of the
# common ops, since 3.2. Others may have some.
NATIVE = {"f32": "sse4_1", "bf16": "avx512bw", "f16": "avx512_fp16"}


def is_native(dtype):
    """Whether oneDNN has to have kernels of this data type here."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ:
        return False
    return NATIVE[dtype] in Path("/proc/cpuinfo").read_text().split()


@contextlib.contextmanager
def kernels_of(dtype, *graphs):
    """Skip the test if the library has no kernel because the processor has none; fail otherwise.

    It says so when it partitions the graphs, or in an error when it compiles what is inside.
    """
    refused = [p for g in graphs for p in g.get_partitions() if not p.is_supported()]
    try:
        if refused:
            assert not is_native(dtype), refused
            pytest.skip(f"no {dtype} without {NATIVE[dtype]} in oneDNN {VERSION}: {refused}")
        yield
    except dg.error as e:
        if e.status != dg.status.unimplemented or is_native(dtype):
            raise
        pytest.skip(f"no {dtype} without {NATIVE[dtype]} in oneDNN {VERSION}: {e}")


def relu_graph(shape=(2, 3), layout=LT.strided):
    o = dg.op(0, dg.op.ReLU, "relu")
    o.add_input(LT(0, LT.f32, list(shape), layout, LT.variable))
    o.add_output(LT(1, LT.f32, list(shape), layout, LT.variable))
    g = dg.graph(dg.engine.cpu)
    g.add_op(o)
    g.finalize()
    return g


# References --------------------------------------------------------------------------------------


def pad_nc(x, begin, end, value=0.0):
    return np.pad(x, [(0, 0), (0, 0), *zip(begin, end, strict=True)], constant_values=value)


def conv(x, w, strides, begin, end, dilations, groups=1):
    """Convolution, NCX and OIX, any number of spatial dimensions."""
    x, w = pad_nc(np.asarray(x, float), begin, end), np.asarray(w, float)
    nd = x.ndim - 2
    kernel = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    windows = sliding_window_view(x, kernel, axis=tuple(range(2, 2 + nd)))
    index = (slice(None), slice(None))
    index += tuple(slice(None, None, s) for s in strides)
    index += tuple(slice(None, None, d) for d in dilations)
    windows = windows[index]
    c = x.shape[1]
    out = []
    per_group = c // groups
    for g in range(groups):
        part = windows[:, g * per_group : (g + 1) * per_group]
        weights = w[g * w.shape[0] // groups : (g + 1) * w.shape[0] // groups]
        axes = [1, *range(2 + nd, 2 + 2 * nd)]
        out.append(np.moveaxis(np.tensordot(part, weights, (axes, [1, *range(2, 2 + nd)])), -1, 1))
    return np.concatenate(out, axis=1)


def pool(x, kernel, strides, begin, end, how):
    """Max or average pooling; `how` is "max", "avg" (with padding) or "avg_exclude"."""
    fill = -np.inf if how == "max" else 0.0
    nd = x.ndim - 2
    axes = tuple(range(2, 2 + nd))
    steps = (slice(None), slice(None), *(slice(None, None, s) for s in strides))
    windows = sliding_window_view(pad_nc(x.astype(float), begin, end, fill), kernel, axis=axes)
    windows = windows[steps]
    inner = tuple(range(2 + nd, 2 + 2 * nd))
    if how == "max":
        return windows.max(inner)
    if how == "avg":
        return windows.mean(inner)
    ones = sliding_window_view(pad_nc(np.ones_like(x, float), begin, end), kernel, axis=axes)[steps]
    return windows.sum(inner) / ones.sum(inner)


def vjp(f, x, dy, eps=1e-5):
    """Gradient of sum(f(x) * dy) by central differences in float64."""
    x = np.array(x, dtype=float)
    dy = np.asarray(dy, dtype=float)
    grad = np.empty_like(x)
    for i in np.ndindex(x.shape):
        keep = x[i]
        x[i] = keep + eps
        up = (f(x) * dy).sum()
        x[i] = keep - eps
        down = (f(x) * dy).sum()
        x[i] = keep
        grad[i] = (up - down) / (2 * eps)
    return grad


def softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x, gamma, beta, eps=1e-5):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * gamma + beta


def channels(v, ndim):
    return np.reshape(v, [1, -1] + [1] * (ndim - 2))


def batch_norm(x, gamma, beta, eps=1e-5):
    axes = (0, *range(2, x.ndim))
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * channels(gamma, x.ndim) + channels(beta, x.ndim)
