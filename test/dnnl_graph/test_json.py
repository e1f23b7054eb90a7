"""load, dump, run and the command, on graphs that oneDNN wrote (data/, and live by torch)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cases
import numpy as np
import pytest
from cases import LT, normal
from scipy import special

import dnnl_graph as dg
from dnnl_graph import engine, op
from dnnl_graph.runner import graph_inputs, random_inputs

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*.json"))  # written by oneDNN 3.12 with ONEDNN_GRAPH_DUMP


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_dumps_of_onednn(path):
    g = dg.load(path)
    raw = json.loads(path.read_text())
    assert [o.get_id() for o in g.get_ops()] == [o["id"] for o in raw["graph"]]
    assert [o.get_kind().name for o in g.get_ops()] == [o["kind"] for o in raw["graph"]]
    again = dg.dump(g)
    assert dg.dump(dg.load(again)) == again
    for ours, theirs in zip(again["graph"], raw["graph"], strict=True):
        assert ours["inputs"] == theirs["inputs"] and ours["outputs"] == theirs["outputs"]
        for name, attr in ours["attrs"].items():
            assert attr == theirs["attrs"][name]
    assert set(again["output_ports"]) == set(raw["output_ports"])
    profile = dg.profile(g, repeat=2)
    assert any(p.supported for p in profile.partitions)
    assert all(np.isfinite(a).all() for a in profile.arrays.values())


def test_numbers_of_a_dump():
    g = dg.load(DATA / "conv_relu_conv.json")
    arrays = random_inputs(g, seed=3)
    (out,) = dg.run(g, arrays).values()
    by_shape = {a.shape: a for a in arrays.values()}
    ones = ([1, 1], [0, 0], [0, 0], [1, 1])
    hidden = cases.conv(
        by_shape[2, 3, 10, 10], by_shape[8, 3, 3, 3], [1, 1], [1, 1], [1, 1], [1, 1]
    )
    hidden = np.maximum(hidden + by_shape[8,][:, None, None], 0)
    want = cases.conv(hidden, by_shape[4, 8, 1, 1], *ones) + by_shape[4,][:, None, None]
    np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-3)


def test_numbers_of_a_dump_with_infinite_sizes():
    g = dg.load(DATA / "linear_gelu_linear.json")
    arrays = random_inputs(g, seed=3)
    out = dg.run(g, list(arrays.values()))
    assert len(out) == 1 and np.isfinite(next(iter(out.values()))).all()


def test_live_dump_by_torch(tmp_path):
    pytest.importorskip("torch")
    code = """
import torch
if not hasattr(torch.jit, "enable_onednn_fusion"): raise SystemExit(3)
torch.jit.enable_onednn_fusion(True)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU()).eval()
x = torch.randn(4, 16)
with torch.no_grad():
    m = torch.jit.freeze(torch.jit.trace(net, x))
    for _ in range(3): y = m(x)
torch.save((x, net[0].weight.detach(), net[0].bias.detach(), y), "io.pt")
"""
    env = {**os.environ, "ONEDNN_GRAPH_DUMP": "graph,subgraph"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=False,
                          capture_output=True, text=True)  # fmt: skip
    files = [f for f in tmp_path.glob("graph-*.json") if f.stem.count("-") == 2]
    subgraphs = [f for f in files if "partitioning" not in f.stem]
    if done.returncode == 3 or not subgraphs:
        pytest.skip("this torch does not dump oneDNN graphs")
    import torch

    x, w, b, y = torch.load(tmp_path / "io.pt")
    by_shape = {(4, 16): x, (16, 32): w.T, (32,): b}
    g = dg.load(subgraphs[0])
    inputs = {}
    for lt in graph_inputs(g):
        array = by_shape.get(tuple(lt.get_dims()), w)
        inputs[lt.get_id()] = array
    (out,) = dg.run(g, inputs).values()
    np.testing.assert_allclose(out, y.numpy(), rtol=1e-3, atol=1e-4)
    z = x.numpy() @ w.numpy().T + b.numpy()
    want = 0.5 * z * (1 + special.erf(z / np.sqrt(2)))
    np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-4)


def mixed_graph():
    g = dg.graph(engine.cpu)
    unknown = dg.DNNL_GRAPH_UNKNOWN_DIM
    clamp = op(3, op.Clamp, [LT(0, LT.f32, [2, 3], [1, 2], LT.constant)],
               [LT(1, LT.f32, [2, 3], LT.any)], "clamp")  # fmt: skip
    clamp.set_attr(op.min, -np.inf).set_attr(op.max, 0.1)
    g.add_op(clamp)
    tanh = op(4, op.Tanh, [LT(1, LT.f32, [2, 3], LT.any)], [LT(2, LT.f32, [unknown, 3], LT.any)])
    g.add_op(tanh)
    g.finalize()
    return g


def test_round_trip_through_a_file(tmp_path):
    g = mixed_graph()
    path = tmp_path / "g.json"
    content = dg.dump(g, path)
    text = path.read_text()
    assert '"value": -inf' in text and '"value": 0.1\n' in text
    for source in (path, str(path), text, content):
        assert dg.dump(dg.load(source)) == content
    with open(path) as f:
        assert dg.dump(dg.load(f)) == content
    x = np.asfortranarray(normal(2, 3))
    y = dg.run(dg.load(path), {"clamp:0": x})
    np.testing.assert_allclose(y["Tanh_4"], np.tanh(np.minimum(x, 0.1)), rtol=1e-4, atol=1e-5)
    assert y["Tanh_4:0"] is y[2]
    with pytest.raises(KeyError, match="'nothing'"):
        y["nothing"]


def test_constants_of_several_types_by_id_and_by_name(tmp_path):
    """int8 weights with f32 around them and a bf16 copy of the result, through a file."""

    def lt(tid, dtype, shape, ptype="variable"):
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        return {"id": tid, "dtype": dtype, "shape": shape, "stride": strides,
                "layout_type": "strided", "property_type": ptype}  # fmt: skip

    def quantization(scales, zps, **more):
        attrs = {
            "scales": {"type": "f32[]", "value": scales},
            "zps": {"type": "s64[]", "value": zps},
            "qtype": {"type": "string", "value": "per_channel" if more else "per_tensor"},
        }
        return {**attrs, **{k: {"type": "s64", "value": v} for k, v in more.items()}}

    x8, w8 = lt(0, "u8", [4, 16]), lt(1, "s8", [16, 8], "constant")
    x, w, bias = lt(2, "f32", [4, 16]), lt(3, "f32", [16, 8]), lt(4, "f32", [8], "constant")
    y, y8, half = lt(5, "f32", [4, 8]), lt(6, "s8", [4, 8]), lt(7, "bf16", [4, 8])
    scales = [0.01 + 0.001 * i for i in range(8)]
    ops = [
        ("Dequantize", "dq_x", [x8], [x], quantization([0.02], [10])),
        ("Dequantize", "dq_w", [w8], [w], quantization(scales, [0] * 8, axis=1)),
        ("MatMul", "fc", [x, w, bias], [y], {}),
        ("Quantize", "q_y", [y], [y8], quantization([0.5], [3])),
        ("TypeCast", "cast", [lt(8, "f32", [4, 8], "constant")], [half], {}),
    ]
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps({"engine_kind": "cpu", "graph": [
        {"id": i, "name": name, "kind": kind, "attrs": attrs, "inputs": ins, "outputs": outs}
        for i, (kind, name, ins, outs, attrs) in enumerate(ops)
    ]}))  # fmt: skip
    g = dg.load(path)
    a = cases.rng(0).integers(0, 255, (4, 16)).astype(np.uint8)
    b = cases.rng(1).integers(-64, 64, (16, 8)).astype(np.int8)
    c, d = normal(8, seed=2), normal(4, 8, seed=3)
    real = ((a - 10.0) * 0.02) @ (b * np.array(scales)) + c
    want = np.clip(np.rint(real / 0.5) + 3, -128, 127)
    for inputs in (
        {0: a, 1: b, 4: c, 8: d},
        {np.int64(0): a, 1: b, "fc:2": c, 8: d},
        {"dq_x:0": a, "dq_w:0": b, "fc:2": c, "cast:0": d},
    ):
        out = dg.run(g, inputs)
        assert np.abs(out["q_y"].astype(float) - want).max() <= 1 and out["q_y"].dtype == np.int8
        np.testing.assert_allclose(out["cast"].astype(float), d, rtol=2**-8)
    # Each call takes the constants that it is given.
    np.testing.assert_allclose(
        dg.run(g, {**inputs, "cast:0": 2 * d})["cast"].astype(float), 2 * d, rtol=2**-8
    )
    assert dg.dump(dg.load(dg.dump(g))) == dg.dump(g)


def test_opaque_is_loaded_as_any():
    content = dg.dump(mixed_graph())
    for o in content["graph"]:
        for lt in o["inputs"] + o["outputs"]:
            if lt["id"] == 1:
                lt["layout_type"] = "opaque"
    assert dg.load(content).get_ops()[0].get_outputs()[0].get_layout_type() == LT.any


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(graph=[]), "graph: must be a list with at least one op"),
        (lambda c: c.update(engine_kind="tpu"), "engine_kind: 'tpu'"),
        (lambda c: c.update(fpmath_mode=3), "fpmath_mode: 3"),
        (lambda c: c["graph"][0].update(kind="Clam"), r"graph\[0\].kind: 'Clam'"),
        (lambda c: c["graph"][0].pop("id"), r"graph\[0\]: lacks 'id'"),
        (lambda c: c["graph"][0]["attrs"].update(foo={"type": "f32", "value": 1}), "attrs.foo"),
        (lambda c: c["graph"][0]["attrs"]["min"].update(type="f64"), "attrs.min.type: 'f64'"),
        (lambda c: c["graph"][0]["attrs"]["min"].update(value="a"), "attrs.min: op.set_attr"),
        (lambda c: c["graph"][1]["inputs"][0].update(dtype="f33"), r"inputs\[0\].dtype: 'f33'"),
        (lambda c: c["graph"][1]["inputs"][0].update(shape=3), r"inputs\[0\].shape"),
        (lambda c: c["graph"][0]["inputs"][0].update(stride=[-3, 1]), r"inputs\[0\]"),
        (lambda c: c["graph"][1].update(inputs=3), r"graph\[1\].inputs"),
    ],
)
def test_bad_files(change, message):
    content = json.loads(json.dumps(dg.dump(mixed_graph())))
    change(content)
    with pytest.raises(ValueError, match=message):
        dg.load(content)


def test_bad_sources(tmp_path):
    with pytest.raises(OSError, match=r"none\.json"):
        dg.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="is not JSON"):
        dg.load("{,}")
    with pytest.raises(TypeError, match="'source'"):
        dg.load(3)
    with pytest.raises(TypeError, match="'g' must be a graph"):
        dg.dump(3)


def test_bad_inputs_of_run():
    g = mixed_graph()
    x = np.asfortranarray(normal(2, 3))
    for inputs, exception, message in [
        ({}, ValueError, "'inputs' lacks"),
        ([], ValueError, "'inputs' has 0 arrays"),
        ({"no:0": x}, KeyError, "no:0"),
        ({77: x}, KeyError, "77"),
        ({0: x, "clamp:0": x}, ValueError, "logical tensor 0 twice"),
        ({0: x[:1]}, ValueError, r"must have shape \[2, 3\]"),
        ({0: x.astype(np.float64)}, TypeError, "float64"),
        ({0: x.astype(np.int8)}, TypeError, "data type f32"),
        ({0: 3}, TypeError, "logical tensor 0"),
        (3, TypeError, "'inputs' must be a dict or a list"),
    ]:
        with pytest.raises(exception, match=message):
            dg.run(g, inputs)
    with pytest.raises(ValueError, match="supports none"):
        dg.run(cases.one_op(op.Wildcard, [x], [((2, 3), LT.f32)]), {})


def test_command(tmp_path):
    command = [sys.executable, "-m", "dnnl_graph", "run", str(DATA / "conv_relu_conv.json")]
    done = subprocess.run(
        [*command, "--repeat", "2", "--save", str(tmp_path / "o.npz")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Convolution+ReLU" in done.stdout and "[2, 8, 10, 10]" in done.stdout
    assert " us" in done.stdout and "not supported: not run" in done.stdout
    assert len(np.load(tmp_path / "o.npz").files) == 1
    bad = subprocess.run([*command[:-1], "no.json"], capture_output=True, text=True, check=False)
    assert bad.returncode == 1 and "no.json" in bad.stderr and "Traceback" not in bad.stderr
