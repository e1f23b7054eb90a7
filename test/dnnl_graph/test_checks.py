"""What partition.compile refuses because oneDNN would crash, hang or read outside of its tensors.

That nothing right is refused is what test_ops and test_fusion show: all of it goes through the same
checks.
"""

import os
import subprocess
import sys
from pathlib import Path

import cases
import numpy as np
import pytest
import test_ops
from cases import LT, VERSION, normal

import dnnl_graph as dg
from dnnl_graph import engine, op, partition

E = engine(engine.cpu, 0)
F32 = LT.f32


def compile_changed(kind, inputs=None, attrs=None, outputs=None):
    """Compile the op of test_ops with other sizes (index -> shape) or attributes."""
    case = next(c for c in test_ops.CASES if c.kind == kind)
    ins = [dg.logical_tensor_like(i, x) for i, x in enumerate(case.inputs)]
    for i, shape in (inputs or {}).items():
        lt = LT(i, ins[i].get_data_type(), shape, LT.strided, LT.variable)
        ins[i:] = [lt, *ins[i + 1 :]]
    dtypes = case.dtypes or [F32] * len(case.expected)
    outs = [LT(100 + i, t, -1, LT.strided, LT.variable) for i, t in enumerate(dtypes)]
    for i, shape in (outputs or {}).items():
        outs[i] = LT(100 + i, dtypes[i], shape, LT.strided, LT.variable)
    o = op(0, getattr(op, kind), ins, outs, kind)
    for name, value in {**case.attrs, **(attrs or {})}.items():
        o.set_attr(getattr(op.attr, name), value)
    p = partition(o, engine.cpu)
    assert p.is_supported()
    return p.compile(ins, outs, E)


# kind, changed inputs, changed attributes, what the message has to say
WRONG = [
    ("BatchNormInference", {1: [3]}, {}, r"gamma must have shape \[4\], got \[3\]"),
    ("BatchNormInference", {2: [1]}, {}, r"beta must have shape \[4\], got \[1\]"),
    ("BatchNormInference", {3: [2, 2]}, {}, r"mean must have shape \[4\], got \[2, 2\]"),
    ("BatchNormInference", {4: []}, {}, r"variance must have shape \[4\], got \[\]"),
    ("BatchNormInference", {}, {"data_format": "NXC"}, r"gamma must have shape \[3\]"),
    ("BatchNormForwardTraining", {1: [3]}, {}, r"mean must have shape \[4\]"),
    ("BatchNormForwardTraining", {4: [5]}, {}, r"beta must have shape \[4\]"),
    ("BatchNormTrainingBackward", {1: [2, 4, 3, 2]}, {}, "diff_dst must have shape"),
    ("BatchNormTrainingBackward", {4: [2]}, {}, r"gamma must have shape \[4\]"),
    ("LayerNorm", {1: [3]}, {}, r"gamma must have shape \[4\]"),
    ("LayerNorm", {2: [2]}, {}, r"beta must have shape \[4\]"),
    ("LayerNormBackward", {2: [2, 2]}, {}, r"mean must have shape \[2, 3\]"),
    ("LayerNormBackward", {5: [3]}, {}, r"beta must have shape \[4\]"),
    ("GroupNorm", {1: [2]}, {}, r"gamma must have shape \[4\]"),
    ("GroupNorm", {}, {"groups": 3}, "groups must divide the 4 channels, got 3"),
    ("PReLU", {1: [2]}, {}, r"slope must have shape \[3\], got \[2\]"),
    ("PReLU", {1: [2]}, {"per_channel_broadcast": False}, r"broadcasts to \[2, 3, 4\], got \[2\]"),
    ("PReLU", {0: [4], 1: [1]}, {}, "src must have at least 2 dimensions"),
    ("PReLUBackward", {1: [2]}, {}, r"slope must have shape \[3\]"),
    ("BiasAdd", {1: [4]}, {}, r"bias must have shape \[3\], got \[4\]"),
    ("Add", {1: [1, 2, 1]}, {}, r"broadcasts with \[2, 3, 4\], got \[1, 2, 1\]"),
    ("Add", {}, {"auto_broadcast": "none"}, r"must have shape \[2, 3, 4\], got \[1, 3, 1\]"),
    ("ReLUBackward", {1: [2, 3, 3]}, {}, r"must have shape \[2, 3, 4\], got \[2, 3, 3\]"),
    ("MatMul", {1: [4, 4]}, {}, r"weights must have 5 rows"),
    ("MatMul", {1: []}, {}, r"weights must have at least 1 dimensions"),
    ("Convolution", {0: [1, 3, 6, 6]}, {}, "2 groups do not fit 3 channels"),
    ("Convolution", {}, {"groups": 3}, "3 groups do not fit 4 channels"),
    ("Convolution", {}, {"groups": 2**62}, "do not fit 4 channels"),
    ("Convolution", {}, {"strides": [1]}, r"strides must have 2 numbers, got \[1\]"),
    ("Convolution", {}, {"dilations": [1, 1, 1]}, "dilations must have 2 numbers"),
    ("Convolution", {}, {"dilations": [1, 2**31]}, "dilations must have numbers from 1 to"),
    ("Convolution", {}, {"pads_end": [0]}, "pads_end must have 2 numbers"),
    ("Convolution", {}, {"dilations": [9, 1]}, "the window .* is larger than the image"),
    ("Convolution", {0: [1, 4, 6]}, {}, "weights must have 3 dimensions"),
    ("Convolution", {1: [6, 2, 0, 3]}, {}, "the window must not be empty"),
    ("ConvolutionBackwardData", {0: [1, 6, 4, 4]}, {}, "diff_dst must have shape"),
    ("ConvolutionBackwardData", {}, {"dst_shape": [1, 4, 6]}, "dst_shape must have 4 numbers"),
    ("ConvolutionBackwardWeights", {}, {"weights_shape": [6, 3, 3, 3]}, "do not fit 4 channels"),
    ("ConvTranspose", {0: [1, 3, 3, 3]}, {}, "do not fit 3 channels"),
    ("ConvTranspose", {}, {"pads_begin": [9, 9]}, "leave nothing of dst"),
    ("ConvTranspose", {}, {"output_padding": [1]}, "output_padding must have 2 numbers"),
    ("ConvTransposeBackwardData", {0: [1, 3, 5, 5]}, {}, "do not fit 3 channels"),
    ("ConvTransposeBackwardWeights", {0: [1, 4, 2, 3]}, {}, "src must have shape"),
    ("MaxPool", {}, {"kernel": [3]}, "kernel must have 2 numbers"),
    ("MaxPool", {}, {"strides": [2, 2, 2]}, "strides must have 2 numbers"),
    ("AvgPool", {}, {"kernel": [30, 3]}, "the window .* is larger than the image"),
    ("AvgPool", {0: [1, 4]}, {}, "src must have at least 3 dimensions"),
    ("MaxPoolBackward", {1: [1, 4, 2, 2]}, {}, "diff_dst must have shape"),
    ("AvgPoolBackward", {}, {"src_shape": [1, 4, 6]}, "src_shape must have 4 numbers"),
    ("Interpolate", {}, {"sizes": [12]}, "sizes must have 2 numbers"),
    ("Interpolate", {0: [1, 2**33, 6, 6]}, {}, "src must have sizes up to 2147483647"),
    ("InterpolateBackward", {1: [1, 4, 12, 11]}, {}, "diff_dst must have shape"),
    ("SoftMax", {}, {"axis": 3}, "axis must be between -3 and 2, got 3"),
    ("SoftMax", {}, {"axis": -4}, "axis must be between -3 and 2, got -4"),
    ("LogSoftmaxBackward", {}, {"axis": 7}, "axis must be between"),
    ("SoftMaxBackward", {1: [2, 3]}, {}, r"must have shape \[2, 3, 4\]"),
    ("Concat", {}, {"axis": 3}, "axis must be between -3 and 2, got 3"),
    ("Concat", {1: [2, 3, 5]}, {}, "each input, but for the axis, must have shape"),
    ("ReduceSum", {}, {"axes": [0, 3]}, "axes must be between -3 and 2, got 3"),
    ("ReduceSum", {}, {"axes": [0, -3]}, "a dimension twice"),
    ("Quantize", {}, {"scales": [1.0, 1.0], "zps": [0, 0], "qtype": "per_channel"},
     "scales must have 3 numbers, got 2"),
    ("Dequantize", {}, {"scales": [1.0] * 4, "zps": [0] * 4, "qtype": "per_channel"},
     "scales must have 3 numbers, got 4"),
    ("Dequantize", {}, {"qtype": "per_channel", "axis": 3}, "axis must be between -3 and 2"),
    ("Dequantize", {}, {"qtype": "per_row"}, "qtype must be per_tensor or per_channel"),
    ("DynamicDequantize", {}, {"qtype": "per_channel"}, r"scales must have shape \[3\]"),
    ("DynamicQuantize", {}, {"qtype": "per_channel"}, r"scales must have shape \[3\]"),
]  # fmt: skip
LATER = [  # kinds that 3.2 does not compute
    ("StaticReshape", {}, {"shape": [5, -1]}, r"shape \[5, -1\] is no other shape"),
    ("StaticReshape", {}, {"shape": [-1, -1]}, "is no other shape"),
    ("StaticReshape", {}, {"shape": [2**40, 2**40]}, "is no other shape"),
    ("StaticReshape", {0: [2**30, 4]}, {}, "src has more elements than the library counts"),
    ("StaticTranspose", {}, {"order": [0, 1, 3]}, "order must be between -3 and 2"),
    ("StaticTranspose", {}, {"order": [0, 1, 1]}, "order must have each dimension"),
    ("Select", {0: [2, 2, 4]}, {}, r"cond must have a shape that broadcasts to \[2, 3, 4\]"),
    ("GenIndex", {}, {"axis": 3}, "axis must be between"),
    ("GreaterEqual", {1: [2]}, {}, "broadcasts with"),
]


def is_here(kind):
    case = next(c for c in test_ops.CASES if c.kind == kind)
    return case.since <= VERSION and (test_ops.TRAINING or not test_ops.is_training(kind))


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "message"),
    [row for row in WRONG + LATER if is_here(row[0])],
    ids=lambda x: x if isinstance(x, str) and x.isalpha() else None,
)
def test_sizes_and_attributes(kind, inputs, attrs, message):
    with pytest.raises(ValueError, match=rf"'inputs' does not fit op\(0, {kind}.*{message}"):
        compile_changed(kind, inputs, attrs)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("ReLU", [2, 3, 3]), ("MatMul", [2, 3, 5]), ("Convolution", [1, 6, 9, 9]), ("Concat", [2, 6])],
)
def test_outputs(kind, shape):
    with pytest.raises(ValueError, match=rf"'outputs' does not fit op\(0, {kind}.*output 0 has"):
        compile_changed(kind, outputs={0: shape})


def test_lists_that_say_not_given():
    """oneDNN's dumps write absent lists as DNNL_MAX_NDIMS equal numbers."""
    compile_changed("MaxPool", attrs={"dilations": [1] * 12})
    compile_changed("ConvTranspose", attrs={"output_padding": [0] * 12})


def test_sizes_inside_a_partition():
    """The statistics are compared with channels that only the inference of sizes knows."""
    x, w = normal(1, 3, 8, 8), normal(4, 3, 3, 3, seed=1)
    hidden = LT(2, F32, -1, LT.strided, LT.variable)
    g = dg.graph(engine.cpu)
    conv = op(0, op.Convolution, [dg.logical_tensor_like(i, a) for i, a in enumerate((x, w))],
              [hidden])  # fmt: skip
    for name in ("strides", "dilations", "pads_begin", "pads_end"):
        conv.set_attr(getattr(op.attr, name), [1, 1])
    conv.set_attr(op.data_format, "NCX").set_attr(op.weights_format, "OIX")
    g.add_op(conv)
    vectors = [LT(3 + i, F32, 1, LT.strided, LT.constant) for i in range(4)]
    norm = op(1, op.BatchNormInference, [hidden, *vectors], [LT(7, F32, -1, LT.strided)])
    g.add_op(norm.set_attr(op.epsilon, 1e-5).set_attr(op.data_format, "NCX"))
    good = {i: np.full(4, 0.5, np.float32) for i in range(3, 7)}
    (y,) = dg.run(g, {0: x, 1: w, **good}).values()
    one = [1, 1]
    want = (cases.conv(x, w, one, one, one, one) - 0.5) / np.sqrt(0.5 + 1e-5) * 0.5 + 0.5
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)
    for i in good:
        with pytest.raises(ValueError, match=r"op\(1, BatchNormInference.*must have shape \[4\]"):
            dg.run(g, {0: x, 1: w, **good, i: np.ones(3, np.float32)})


def test_filters_without_spatial_sizes_are_refused_early():
    """oneDNN takes two sizes off a filter when it partitions a graph."""
    o = op(0, op.Convolution, [LT(0, F32, -1, LT.strided), LT(1, F32, [6], LT.strided)],
           [LT(2, F32, -1, LT.strided)])  # fmt: skip
    for name in ("strides", "dilations", "pads_begin", "pads_end"):
        o.set_attr(getattr(op.attr, name), [1, 1])
    with pytest.raises(ValueError, match="weights of less than 3 dimensions"):
        dg.graph(engine.cpu).add_op(o)
    assert dg.graph(engine.cpu).add_op(o, False) == dg.status.invalid_arguments


@pytest.mark.parametrize("quantized", [0, 1])
def test_convolution_with_one_quantized_factor(quantized):
    """oneDNN 3.7 follows a null pointer to the producer of the other factor."""
    x = cases.rng(0).integers(-64, 64, (1, 4, 6, 6)).astype(np.int8)
    w = cases.rng(1).integers(-64, 64, (8, 4, 3, 3)).astype(np.int8)
    arrays = [x, w]
    arrays[1 - quantized] = arrays[1 - quantized].astype(np.float32)
    lts = [dg.logical_tensor_like(i, a) for i, a in enumerate(arrays)]
    real = LT(2, F32, list(arrays[quantized].shape), LT.strided, LT.variable)
    g = dg.graph(engine.cpu)
    dequantize = op(0, op.Dequantize, [lts[quantized]], [real])
    g.add_op(dequantize.set_attr(op.scales, [0.5]).set_attr(op.zps, [3]))
    lts[quantized] = real
    conv = op(1, op.Convolution, lts, [LT(3, F32, [1, 8, 6, 6], LT.strided)], "conv")
    for name in ("strides", "dilations", "pads_begin", "pads_end"):
        conv.set_attr(getattr(op.attr, name), [1, 1])
    g.add_op(conv.set_attr(op.data_format, "NCX").set_attr(op.weights_format, "OIX"))
    y = dg.run(g, dict(enumerate(arrays)))["conv"]
    assert [o.get_id() for o in g.get_ops()] == [0, 1]
    assert sorted(i for p in g.get_partitions() for i in p.get_ops()) == [0, 1]
    wide = [a.astype(float) for a in arrays]
    wide[quantized] = (wide[quantized] - 3) * 0.5
    want = cases.conv(*wide, [1, 1], [1, 1], [1, 1], [1, 1])
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 4), (0, 2**31, 4)])
def test_nothing_to_compute(shape):
    (y,) = cases.run_one(op.Sigmoid, [np.empty(shape, np.float32)], [(shape, F32)])
    assert y.shape == shape


# Layouts ------------------------------------------------------------------------------------------


def compile_strided(kind, shape, strides, attrs=None):
    lts = [LT(0, F32, shape, strides), LT(1, F32, -1, LT.strided)]
    o = op(0, kind, lts[:1], lts[1:])
    for name, value in (attrs or {}).items():
        o.set_attr(name, value)
    return partition(o, engine.cpu).compile(lts[:1], lts[1:], E)


@pytest.mark.parametrize(
    ("shape", "strides"), [([6], [0]), ([2, 3], [1, 1]), ([2, 3], [2, 1]), ([3, 2, 4], [0, 4, 1])]
)
def test_elements_in_one_place(shape, strides):
    with pytest.raises(ValueError, match="'inputs' has strides that put two elements in one place"):
        compile_strided(op.ReLU, shape, strides)
    lts = [LT(0, F32, shape, LT.strided), LT(1, F32, shape, strides)]
    p = partition(op(0, op.ReLU, lts[:1], lts[1:]), engine.cpu)
    with pytest.raises(ValueError, match="'outputs' has strides that put two elements"):
        p.compile(lts[:1], lts[1:], E)


def test_gaps_are_fine_up_to_5_dimensions():
    x = np.zeros((2, 3, 2, 3, 8), np.float32)[..., :4]
    x[...] = normal(2, 3, 2, 3, 4)
    (y,) = cases.run_one(op.ReLU, [x], [(x.shape, F32)])
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    with pytest.raises(ValueError, match="from 6 dimensions on, there must be no gaps"):
        compile_strided(op.ReLU, [2] * 6, [64, 32, 16, 8, 4, 2])
    x = np.ascontiguousarray(normal(2, 3, 2, 1, 2, 3).transpose(5, 1, 0, 3, 4, 2))
    (y,) = cases.run_one(op.ReLU, [x], [(x.shape, F32)])
    np.testing.assert_array_equal(y, np.maximum(x, 0))


def test_statistics_are_dense():
    x = LT(0, F32, [2, 4, 3, 3], LT.strided)
    ins = [x, *(LT(i, F32, [4], [2 if i == 3 else 1]) for i in range(1, 5))]
    outs = [LT(9, F32, -1, LT.strided)]
    o = op(0, op.BatchNormInference, ins, outs)
    o.set_attr(op.epsilon, 1e-5).set_attr(op.data_format, "NCX")
    with pytest.raises(ValueError, match="mean must be dense"):
        partition(o, engine.cpu).compile(ins, outs, E)


@pytest.mark.parametrize("gaps", [True, False], ids=["gaps", "transposed"])
def test_rows_of_a_layer_norm(gaps):
    """oneDNN 3.2 reads both of these as if they were row-major, and so computes nonsense."""
    x = np.zeros((2, 3, 7), np.float32)[..., :4] if gaps else np.zeros((2, 3, 4), np.float32, "F")
    x[...] = normal(2, 3, 4)
    gamma, beta = cases.positive(4), normal(4, seed=1)
    inputs, shape = [x, gamma, beta], [((2, 3, 4), F32)]
    if VERSION < (3, 7):
        with pytest.raises(ValueError, match="src must be dense"):
            cases.run_one(op.LayerNorm, inputs, shape, {"keep_stats": False})
    else:
        (y,) = cases.run_one(op.LayerNorm, inputs, shape, {"keep_stats": False})
        want = cases.layer_norm(x.astype(float), gamma, beta)
        np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)


def test_what_fails_once_fails_again_with_a_status():
    """oneDNN 3.7 lets a std::future_error out of the second compilation."""
    p = cases.relu_graph().get_partitions()[0]
    ins, outs = [LT(0, F32, [2, 3], LT.any)], [LT(1, F32, [2, 3], LT.strided)]
    for _ in range(3):
        with pytest.raises((dg.error, ValueError), match=r"partition\.compile") as e:
            p.compile(ins, outs, E)
        if VERSION >= (3, 7):
            assert isinstance(e.value.status, dg.status)


def test_strides_of_sizes_of_1_mean_nothing():
    """Channels last with a width of 1, whose stride a framework may give as anything."""
    x = normal(4, 6, 1, 6)  # N, H, W, C
    attrs = {op.mode: "nearest", op.sizes: [12, 12], op.data_format: "NCX"}
    for strides in ([36, 1, 6, 1], [36, 1, 6, 6], [36, 1, 6, 99]):
        c = compile_strided(op.Interpolate, [4, 6, 6, 1], strides, attrs)
        assert c.query_logical_tensor(0).get_strides() == [36, 1, 6, 6]
        lt = LT(0, F32, [4, 6, 6, 1], strides)
        view = np.lib.stride_tricks.as_strided(x, (4, 6, 6, 1), [4 * s for s in strides])
        out = dg.tensor(c.query_logical_tensor(1), E)
        c.execute(dg.stream(E), [dg.tensor(lt, E, view)], [out])
        want = x.transpose(0, 3, 1, 2).repeat(2, axis=2).repeat(12, axis=3)
        np.testing.assert_array_equal(out.numpy(), want)


def compile_any(o, index):
    """Compile an op with one input left to the library."""
    ins = [
        LT(lt.get_id(), F32, lt.get_dims(), LT.any, LT.constant) if i == index else lt
        for i, lt in enumerate(o.get_inputs())
    ]
    return partition(o, engine.cpu).compile(ins, o.get_outputs(), E)


def conv_op(groups=1, data="NCX", weights="OIX"):
    shapes = {
        "NCX": [2, 8, 6, 6], "NXC": [2, 6, 6, 8],
        "OIX": [8, 8 // groups, 3, 3], "XIO": [3, 3, 8 // groups, 8],
    }  # fmt: skip
    o = op(0, op.Convolution)
    o.add_inputs([LT(i, F32, shapes[f], LT.strided) for i, f in enumerate((data, weights))])
    o.add_output(LT(9, F32, shapes[data], LT.strided))
    for name in ("strides", "dilations", "pads_begin", "pads_end"):
        o.set_attr(getattr(op.attr, name), [1, 1])
    o.set_attr(op.data_format, data).set_attr(op.weights_format, weights)
    return o.set_attr(op.groups, groups)


def matmul_op(transpose_a=False, transpose_b=False):
    o = op(0, op.MatMul, [LT(i, F32, [8, 8], LT.strided) for i in range(2)],
           [LT(9, F32, [8, 8], LT.strided)])  # fmt: skip
    return o.set_attr(op.transpose_a, transpose_a).set_attr(op.transpose_b, transpose_b)


@pytest.mark.parametrize(
    ("o", "index"),
    [(conv_op(), 0), (conv_op(), 1), (conv_op(data="NXC"), 1), (matmul_op(), 0), (matmul_op(), 1)],
)
def test_layouts_that_the_library_chooses(o, index):
    c = compile_any(o, index)
    assert c.query_logical_tensor(index).get_layout_type() in (LT.opaque, LT.layout_type.strided)


@pytest.mark.parametrize(
    ("o", "index"),
    [
        (conv_op(groups=2), 1),
        (conv_op(weights="XIO"), 1),
        (conv_op(data="NXC"), 0),
        (matmul_op(transpose_b=True), 1),
        (matmul_op(transpose_a=True), 0),
        (op(0, op.Add, [LT(0, F32, [2, 3], LT.strided), LT(1, F32, [1, 3], LT.strided)],
            [LT(2, F32, [2, 3], LT.strided)]), 1),
    ],
)  # fmt: skip
def test_layouts_that_nobody_chooses(o, index):
    """oneDNN 3.7 says so, 3.2 would look for one for ever."""
    if VERSION < (3, 7):
        with pytest.raises(ValueError, match=r"cannot choose a layout .* make it strided"):
            compile_any(o, index)
    else:
        with pytest.raises(dg.error) as e:
            compile_any(o, index)
        assert e.value.status == dg.status.invalid_arguments


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20000, 2000))
def test_random_graphs(first, tmp_path):
    """fuzz.py: a process of its own, so that a crash or a hang is a failure and no more."""
    program = Path(__file__).with_name("fuzz.py")
    log = tmp_path / "now.txt"
    command = [sys.executable, program, str(first), "2000", log]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the dnnl_graph of this process
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=env
    )
    last = log.read_text() if log.exists() else "nothing yet"
    assert done.returncode == 0, (done.returncode, last, done.stderr[-2000:])
    assert "executed" in done.stdout
