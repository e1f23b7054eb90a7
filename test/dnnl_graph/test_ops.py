"""Numbers of every op kind against numpy and scipy, and the kinds the CPU does not have."""

from dataclasses import dataclass, field

import cases
import numpy as np
import pytest
from cases import LT, VERSION, normal, positive
from scipy import special

import dnnl_graph as dg

F32 = LT.f32
S8, U8, S32, BOOL = LT.s8, LT.u8, LT.s32, LT.boolean


@dataclass
class Case:
    kind: str
    inputs: list
    expected: list  # arrays; the first ones are checked, None for an output whose value is not
    attrs: dict = field(default_factory=dict)
    dtypes: list | None = None
    tol: float = 1e-4
    since: tuple = (3, 2)
    shapes: list | None = None

    @property
    def id(self):
        return self.kind


CASES = []
_x = normal(2, 3, 4)
_dy = normal(2, 3, 4, seed=1)


def add(kind, inputs, expected, **kw):
    CASES.append(Case(kind, inputs, expected if isinstance(expected, list) else [expected], **kw))


# Elementwise, forward and backward. The gradient is taken by differences, away from corners.
def _hardswish(x):
    return x * np.clip(x + 3, 0, 6) / 6


def _hardsigmoid(x):
    return np.clip(0.2 * x + 0.5, 0, 1)


def _mish(x):
    return x * np.tanh(np.log1p(np.exp(x)))


def _gelu(x):
    return 0.5 * x * (1 + special.erf(x / np.sqrt(2)))


def _softplus(x):
    return np.log1p(np.exp(2 * x)) / 2


def _elu(x):
    return np.where(x > 0, x, 0.7 * np.expm1(x))


ELTWISE = {
    # name: (function, attrs, input, backward: "src", "dst" or "both" for use_dst)
    "Abs": (np.abs, {}, _x, "src"),
    "Clamp": (lambda x: np.clip(x, -0.5, 0.8), {"min": -0.5, "max": 0.8}, _x, "src"),
    "Elu": (_elu, {"alpha": 0.7}, _x, "dst"),
    "GELU": (_gelu, {}, _x, "src"),
    "HardSigmoid": (_hardsigmoid, {"alpha": 0.2, "beta": 0.5}, _x * 2, "src"),
    "HardSwish": (_hardswish, {}, _x * 3, "src"),
    "Mish": (_mish, {}, _x, "src"),
    "ReLU": (lambda x: np.maximum(x, 0), {}, _x, "src"),
    "Sigmoid": (special.expit, {}, _x, "dst"),
    "SoftPlus": (_softplus, {"beta": 2.0}, _x, "src"),
    "Sqrt": (np.sqrt, {}, positive(2, 3, 4), "dst"),
    "Tanh": (np.tanh, {}, _x, "dst"),
    "Exp": (np.exp, {}, _x, None),
    "Log": (np.log, {}, positive(2, 3, 4), None),
    "LeakyReLU": (lambda x: np.where(x > 0, x, 0.1 * x), {"alpha": 0.1}, _x, None),
    "Round": (np.rint, {}, _x * 3, None),
    "Square": (np.square, {}, _x, None),
}
_HAS_USE_DST = {"Clamp", "Elu", "HardSigmoid", "ReLU", "Sigmoid", "Sqrt", "Tanh"}
for _name, (_f, _attrs, _input, _back) in ELTWISE.items():
    add(_name, [_input], _f(_input.astype(float)), attrs=_attrs)
    if _back is None:
        continue
    _first = _input if _back == "src" else _f(_input.astype(float)).astype(np.float32)
    _extra = {"use_dst": _back == "dst"} if _name in _HAS_USE_DST - {"HardSigmoid"} else {}
    add(
        _name + "Backward",
        [_first, _dy],
        cases.vjp(_f, _input, _dy),
        attrs={**_attrs, **_extra},
        tol=1e-3,
    )

# Binary, with broadcast.
_row = normal(1, 3, 1, seed=2)
for _name, _f in {
    "Add": np.add,
    "Subtract": np.subtract,
    "Multiply": np.multiply,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
}.items():
    add(_name, [_x, _row], _f(_x, _row))
add("Divide", [_x, positive(1, 3, 1)], _x / positive(1, 3, 1))
add("SquaredDifference", [_x, _row], (_x - _row) ** 2)
add("BiasAdd", [_x, _row.reshape(3)], _x + _row, attrs={"data_format": "NCX"})
_slope = positive(3, seed=5) / 4
add(
    "PReLU",
    [_x, _slope],
    np.where(_x > 0, _x, _x * _slope[:, None]),
    attrs={"data_format": "NCX", "per_channel_broadcast": True},
)
_slope4, _x4, _dy4 = positive(1, 3, 1, 1) / 4, normal(2, 3, 2, 2), normal(2, 3, 2, 2, seed=1)
add(
    "PReLUBackward",
    [_x4, _slope4.reshape(3), _dy4],
    [
        np.where(_x4 > 0, _dy4, _dy4 * _slope4),
        np.where(_x4 > 0, 0, _dy4 * _x4).sum((0, 2, 3)),
    ],
    attrs={"data_format": "NCX"},
)
add("GreaterEqual", [_x, _dy], _x >= _dy, dtypes=[BOOL], since=(3, 7))
_cond = _x > 0
add("Select", [_cond, _x, _dy], np.where(_cond, _x, _dy), since=(3, 7))
add(
    "GenIndex",
    [_x],
    np.broadcast_to(np.arange(3, dtype=np.int32)[:, None], (2, 3, 4)),
    attrs={"axis": 1},
    dtypes=[S32],
    since=(3, 7),
)

# Matrix product, convolution and their gradients.
_a, _b = normal(2, 3, 5), normal(4, 5, seed=1)
add("MatMul", [_a, _b], _a @ _b.T, attrs={"transpose_b": True})
_img, _wei = normal(1, 4, 6, 6), normal(6, 2, 3, 3, seed=1)
_geometry = {"strides": [2, 1], "pads_begin": [1, 0], "pads_end": [1, 1], "dilations": [1, 2]}
_conv_attrs = {**_geometry, "groups": 2, "data_format": "NCX", "weights_format": "OIX"}


def _conv(x, w):
    return cases.conv(x, w, [2, 1], [1, 0], [1, 1], [1, 2], groups=2)


_out = _conv(_img, _wei)
_dout = normal(*_out.shape, seed=2)
add("Convolution", [_img, _wei], _out, attrs=_conv_attrs)
_wide = normal(6, 4, 3, 3, seed=6)  # 3.2 infers no shape for the data gradient with groups


def _conv_1(x):
    return cases.conv(x, _wide, [2, 1], [1, 0], [1, 1], [1, 2])


add(
    "ConvolutionBackwardData",
    [_dout, _wide],
    cases.vjp(_conv_1, _img, _dout),
    attrs={**_conv_attrs, "groups": 1, "dst_shape": [1, 4, 6, 6]},
    tol=1e-3,
)
add(
    "ConvolutionBackwardWeights",
    [_img, _dout],
    cases.vjp(lambda w: _conv(_img, w), _wei, _dout),
    attrs={**_conv_attrs, "weights_shape": [6, 2, 3, 3]},
    tol=1e-3,
)
# A transposed convolution is the gradient of a convolution by its data: [in, out, ...] weights.
_ty = normal(1, 4, 3, 3)
_tw = normal(4, 2, 3, 3, seed=3)
_t_geometry = {"strides": [2, 2], "pads_begin": [1, 1], "pads_end": [1, 1], "dilations": [1, 1]}
_t_attrs = {**_t_geometry, "data_format": "NCX", "weights_format": "IOX"}


def _tconv(y, w):
    grad = np.zeros((1, 2, 7, 7))
    for i, j in np.ndindex(3, 3):
        grad[0, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += np.tensordot(y[0, :, i, j], w, 1)
    return grad[:, :, 1:-1, 1:-1]


_tout = _tconv(_ty, _tw)
_tdout = normal(*_tout.shape, seed=4)
add("ConvTranspose", [_ty, _tw], _tout, attrs=_t_attrs)
add(
    "ConvTransposeBackwardData",
    [_tdout, _tw],
    cases.vjp(lambda y: _tconv(y, _tw), _ty, _tdout),
    attrs=_t_attrs,
    tol=1e-3,
)
add(
    "ConvTransposeBackwardWeights",
    [_ty, _tdout],
    cases.vjp(lambda w: _tconv(_ty, w), _tw, _tdout),
    attrs={**_t_attrs, "weights_shape": [4, 2, 3, 3]},
    tol=1e-3,
)

# Pooling and interpolation.
_pool = {"strides": [2, 2], "pads_begin": [1, 1], "pads_end": [0, 0], "kernel": [3, 3]}
_pool_attrs = {**_pool, "data_format": "NCX"}


def _max_pool(x):
    return cases.pool(x, (3, 3), (2, 2), (1, 1), (0, 0), "max")


def _avg_pool(x):
    return cases.pool(x, (3, 3), (2, 2), (1, 1), (0, 0), "avg_exclude")


_max_attrs = {**_pool_attrs, "dilations": [1, 1]}  # 3.2 infers no shape without dilations
_pout = _max_pool(_img)
_dpool = normal(*_pout.shape, seed=1)
add("MaxPool", [_img], _pout, attrs=_pool_attrs)
add("AvgPool", [_img], _avg_pool(_img), attrs={**_pool_attrs, "exclude_pad": True})
add("MaxPoolBackward", [_img, _dpool], cases.vjp(_max_pool, _img, _dpool), attrs=_max_attrs)
add(
    "AvgPoolBackward",
    [_dpool],
    cases.vjp(_avg_pool, _img, _dpool),
    attrs={**_pool_attrs, "exclude_pad": True, "src_shape": [1, 4, 6, 6]},
)


def _nearest(x):
    return x.repeat(2, axis=2).repeat(2, axis=3)


_interpolate = {"mode": "nearest", "sizes": [12, 12], "data_format": "NCX"}
_dinter = normal(1, 4, 12, 12, seed=1)
add("Interpolate", [_img], _nearest(_img), attrs=_interpolate)
add("InterpolateBackward", [_img, _dinter], cases.vjp(_nearest, _img, _dinter), attrs=_interpolate)

# Normalisation.
_gamma, _beta = positive(4), normal(4, seed=7)
_ln = cases.layer_norm(_x.astype(float), _gamma, _beta)
_mean, _var = _x.mean(-1), _x.var(-1)
add("LayerNorm", [_x, _gamma, _beta], [_ln, _mean, _var], attrs={"epsilon": 1e-5})
add(
    "LayerNormBackward",
    [_x, _dy, _mean, _var, _gamma, _beta],
    [
        cases.vjp(lambda x: cases.layer_norm(x, _gamma, _beta), _x, _dy),
        cases.vjp(lambda g: cases.layer_norm(_x.astype(float), g, _beta), _gamma, _dy),
        _dy.sum((0, 1)),
    ],
    attrs={"epsilon": 1e-5},
    tol=1e-3,
)
_xg, _gg, _bg = normal(2, 4, 3, 3), positive(4), normal(4, seed=9)
_grouped = _xg.astype(float).reshape(2, 2, -1)
_gn = (_grouped - _grouped.mean(-1, keepdims=True)) / np.sqrt(
    _grouped.var(-1, keepdims=True) + 1e-5
)
add(
    "GroupNorm",
    [_xg, _gg, _bg],
    [_gn.reshape(_xg.shape) * cases.channels(_gg, 4) + cases.channels(_bg, 4)],
    attrs={"groups": 2, "keep_stats": False, "epsilon": 1e-5, "data_format": "NCX"},
    since=(3, 6),
)
_m, _v = normal(4, seed=2), positive(4, seed=3)
_norm = (_xg - cases.channels(_m, 4)) / np.sqrt(cases.channels(_v, 4) + 1e-5)
_bn_attrs = {"epsilon": 1e-5, "data_format": "NCX"}
add(
    "BatchNormInference",
    [_xg, _gg, _bg, _m, _v],
    _norm * cases.channels(_gg, 4) + cases.channels(_bg, 4),
    attrs=_bn_attrs,
)
_bmean, _bvar = _xg.mean((0, 2, 3)), _xg.var((0, 2, 3))
_count = _xg.size // 4
add(
    "BatchNormForwardTraining",
    [_xg, _m, _v, _gg, _bg],
    [
        cases.batch_norm(_xg.astype(float), _gg, _bg),
        0.9 * _m + 0.1 * _bmean,
        0.9 * _v + 0.1 * _bvar,
        _bmean,
        _bvar,
    ],
    attrs={**_bn_attrs, "momentum": 0.9},
    tol=1e-3,
)
_dxg = normal(*_xg.shape, seed=11)
add(
    "BatchNormTrainingBackward",
    [_xg, _dxg, _bmean, _bvar, _gg],
    [
        cases.vjp(lambda x: cases.batch_norm(x, _gg, _bg), _xg, _dxg),
        cases.vjp(lambda g: cases.batch_norm(_xg.astype(float), g, _bg), _gg, _dxg),
        _dxg.sum((0, 2, 3)),
    ],
    attrs=_bn_attrs,
    tol=2e-3,
)
_sm = cases.softmax(_x.astype(float), 1)
add("SoftMax", [_x], _sm, attrs={"axis": 1})
add(
    "SoftMaxBackward",
    [_dy, _sm.astype(np.float32)],
    cases.vjp(lambda x: cases.softmax(x, 1), _x, _dy),
    attrs={"axis": 1},
)
add("LogSoftmax", [_x], np.log(_sm), attrs={"axis": 1})
add(
    "LogSoftmaxBackward",
    [_dy, np.log(_sm).astype(np.float32)],
    cases.vjp(lambda x: np.log(cases.softmax(x, 1)), _x, _dy),
    attrs={"axis": 1},
)

# Reductions.
for _name, _f in {
    "ReduceL1": lambda x: np.abs(x).sum((0, 2), keepdims=True),
    "ReduceL2": lambda x: np.sqrt((x * x).sum((0, 2), keepdims=True)),
    "ReduceMax": lambda x: x.max((0, 2), keepdims=True),
    "ReduceMean": lambda x: x.mean((0, 2), keepdims=True),
    "ReduceMin": lambda x: x.min((0, 2), keepdims=True),
    "ReduceProd": lambda x: x.prod((0, 2), keepdims=True),
    "ReduceSum": lambda x: x.sum((0, 2), keepdims=True),
}.items():
    add(_name, [_x], _f(_x.astype(float)), attrs={"axes": [0, 2], "keep_dims": True})

# Data movement and types.
add("Concat", [_x, _dy], np.concatenate([_x, _dy], 1), attrs={"axis": 1})
add("Reorder", [_x.transpose(2, 0, 1)], _x.transpose(2, 0, 1), tol=0)
add(
    "StaticReshape",
    [_x],
    _x.reshape(6, 4),
    attrs={"shape": [-1, 4], "special_zero": False},
    tol=0,
    since=(3, 3),
)
add(
    "StaticTranspose",
    [_x],
    np.ascontiguousarray(_x.transpose(2, 0, 1)),
    attrs={"order": [2, 0, 1]},
    tol=0,
    since=(3, 3),
)
add("TypeCast", [_x], _x, dtypes=[LT.bf16], tol=1e-2)
_q = np.clip(np.rint(_x / 0.05) + 3, 0, 255).astype(np.uint8)
_per_tensor = {"scales": [0.05], "zps": [3], "qtype": "per_tensor"}
add("Quantize", [_x], _q, attrs=_per_tensor, dtypes=[U8], tol=1)
add("Dequantize", [_q], (_q.astype(float) - 3) * 0.05, attrs=_per_tensor)
_dyn_scale, _dyn_zp = np.array([0.05], np.float32), np.array([3], np.int32)
_dyn = {"qtype": "per_tensor"}
add("DynamicQuantize", [_x, _dyn_scale, _dyn_zp], _q, attrs=_dyn, dtypes=[U8], tol=1)
add("DynamicDequantize", [_q, _dyn_scale, _dyn_zp], (_q.astype(float) - 3) * 0.05, attrs=_dyn)

# Kinds that no CPU build computes: name -> (reason, first version that does or None).
UNSUPPORTED = {
    "BiasAddBackward": ("only together with ConvolutionBackwardWeights", None),
    "Wildcard": ("stands for an op outside the graph; nothing to compute", None),
    "End": ("marks a tensor as read outside the graph; nothing to compute", None),
    "Reciprocal": ("no kernel of its own, only within patterns", None),
    "Pow": ("has a schema but no kernel", None),
}
# Kinds of a newer oneDNN than this file was checked with: name -> reason.
UNCHECKED = {
    "RMSNorm": "since 3.12; no build of it to check against",
    "Dropout": "since 3.12; no build of it to check against",
}


# A build for inference only (ONEDNN_ENABLE_WORKLOAD=INFERENCE) leaves all of these out.
TRAINING = (
    cases.one_op(dg.op.ReLUBackward, [_x, _dy], [(_x.shape, F32)])
    .get_partitions()[0]
    .is_supported()
)


def is_training(kind):
    return "Backward" in kind or kind == "BatchNormForwardTraining"


def test_every_kind_is_covered():
    kinds = set(dg.op.kind.__members__) - {"LastSymbol"}
    assert kinds <= {c.kind for c in CASES} | set(UNSUPPORTED) | set(UNCHECKED)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_op(case):
    if case.kind not in dg.op.kind.__members__:
        pytest.skip(f"{case.kind} is not in oneDNN {VERSION}")
    kind = getattr(dg.op, case.kind)
    dtypes = case.dtypes or [F32] * len(case.expected)
    specs = [(e.shape, d) for e, d in zip(case.expected, dtypes, strict=True)]
    if case.since > VERSION or (is_training(case.kind) and not TRAINING):
        assert not any(
            p.is_supported()
            for p in cases.one_op(kind, case.inputs, specs, case.attrs).get_partitions()
        )
        return
    results = cases.run_one(kind, case.inputs, specs, case.attrs)
    for got, want in zip(results, case.expected, strict=True):
        assert got.shape == want.shape
        got, want = got.astype(float), np.asarray(want, dtype=float)
        np.testing.assert_allclose(got, want, rtol=case.tol, atol=case.tol)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name):
    reason, since = UNSUPPORTED[name]
    if since is not None and since <= VERSION:
        pytest.fail(f"{name} is said to be supported from {since} on: move it to CASES")
    kind = getattr(dg.op, name)
    shape = (3,) if name == "BiasAddBackward" else _x.shape
    outputs = [] if name == "End" else [(shape, F32)]
    attrs = {"Pow": {"beta": 2.0}, "BiasAddBackward": {"data_format": "NCX"}}.get(name, {})
    g = cases.one_op(kind, [_x], outputs, attrs)
    parts = g.get_partitions()
    assert [p.is_supported() for p in parts] == [False], reason
    with pytest.raises(dg.error) as e:
        cases.compile_like(parts[0])
    assert e.value.status == dg.status.invalid_arguments
