"""The engines of `llga_fuser/bench/peers.py`, each in a process of its own."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import torch
from torch import nn

from llga_fuser import _models
from llga_fuser.bench import AGREE, peers
from test_bench import QUICK, run
from util import has_own_kernels

INSTALLED = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                peers.missing(name, "int8") is not None,
                reason=f"needs the extra peers for {name}",
            ),
            *([pytest.mark.slow] if name == "inductor" else []),  # compiles for 20 seconds
            *(
                [pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")]
                if name == "inductor"
                else []
            ),
        ],
    )
    for name in peers.PEERS
]


def measure(tmp_path: pathlib.Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    done = run("bench", *arguments, *QUICK, "--json", str(file))
    assert done.returncode == AGREE, done.stdout + done.stderr
    (model,) = json.loads(file.read_text())["models"]
    return {e["name"]: e for e in model["engines"]}


@pytest.mark.parametrize("name", INSTALLED)
def test_a_peer_agrees_with_eager(name: str, tmp_path: pathlib.Path) -> None:
    engine = measure(tmp_path, "tinyconv", "--batch", "2", "--engines", name)[name]
    assert engine["failure"] is None
    assert engine["agrees"]
    assert 0 < engine["minimum"] <= engine["median"]
    assert engine["first_result"] > 0
    assert engine["warm_up"] > 0


@pytest.mark.slow  # one process of each, four times over
@pytest.mark.parametrize("name", INSTALLED)
def test_a_peer_in_bf16(name: str, tmp_path: pathlib.Path) -> None:
    engines = measure(tmp_path, "mlp", "--dtype", "bf16", "--engines", f"eager,{name},llga_fuser")
    engine = engines[name]
    reason = peers.not_applicable(name, "bf16")
    assert engine["not_applicable"] == reason
    if reason is None and engine["failure"] is not None:
        # OpenVINO says which type it takes where the processor has no bf16.
        assert "computes in f32" in engine["failure"]
    elif reason is None:
        assert engine["agrees"], engine
        assert engine["relative_error"] > 1e-4, "it did not round to bf16"


@pytest.mark.slow  # quantizes with three frameworks
@pytest.mark.parametrize("name", INSTALLED)
def test_a_peer_in_int8(name: str, tmp_path: pathlib.Path) -> None:
    engine = measure(
        tmp_path, "tinyconv", "--dtype", "int8", "--engines", f"{name},llga_fp32,llga_fuser"
    )[name]
    assert engine["not_applicable"] == peers.not_applicable(name, "int8")
    if engine["not_applicable"] is None:
        assert engine["failure"] is None
        # 10 dB; and it is quantized. Each framework has its own idea of what to leave in float.
        assert 1e-3 < engine["relative_error"] < 0.32
        assert 0 <= engine["top1"] <= 1


def test_what_is_not_applicable() -> None:
    assert peers.not_applicable("onnxruntime", "bf16") == "its CPU kernels are float32"
    assert peers.not_applicable("onnxruntime", "fp32") is None
    assert peers.not_applicable("onnxruntime", "int8") is None
    assert peers.not_applicable("ofi", "int8") == "not set up for int8"
    assert peers.not_applicable("onnxruntime", "fp32", script=True) is not None
    for name in peers.PEERS:
        assert peers.not_applicable(name, "int4") == "not set up for int4"
    assert peers.not_applicable("eager", "int4") is None  # no peer: the worker decides


def test_what_a_peer_needs() -> None:
    assert peers.packages("openvino", "fp32") == ["openvino"]
    assert peers.packages("openvino", "int8") == ["openvino", "nncf"]
    assert peers.packages("onnxruntime", "int8") == ["onnxruntime", "onnx", "onnxscript"]
    assert peers.packages("llga_fuser", "int8") == []


def test_each_peer_is_described() -> None:
    for name, peer in peers.PEERS.items():
        assert peer.name == name
        assert peer.what


def test_a_sweep_with_fpmath(tmp_path: pathlib.Path) -> None:
    """One entry for each batch; the mode is for our engine alone."""
    file = tmp_path / "result.json"
    arguments = ["mlp", "--batch", "1,3", "--fpmath", "bf16", "--engines", "torchscript,llga_fuser"]
    done = run("bench", *arguments, *QUICK, "--json", str(file))
    assert done.returncode == AGREE, done.stdout + done.stderr
    data = json.loads(file.read_text())
    assert [m["options"]["batch"] for m in data["models"]] == [1, 3]
    for model in data["models"]:
        script, ours = model["engines"]
        assert script["relative_error"] < 1e-4 < model["fpmath_limit"]
        assert ours["relative_error"] < model["fpmath_limit"]
    labels = [s["configuration"] for s in data["summary"]]
    assert labels == [f"fp32 (fpmath bf16)  batch {b}  1 thread" for b in (1, 3)]
    assert done.stdout.count("summary  fp32") == 2


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_file(frozen: bool, tmp_path: pathlib.Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(2, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) + self.table(index)

    script = torch.jit.script(Net().eval())
    script = torch.jit.freeze(script) if frozen else script
    script.save(str(tmp_path / "net.pt"))
    shapes = ("--shape", "4,8", "--shape", "4:int64")
    engines = ("--engines", "eager,inductor,llga_fuser")
    got = measure(tmp_path, str(tmp_path / "net.pt"), *shapes, *engines)
    assert got["inductor"]["not_applicable"] == "takes no TorchScript modules"
    assert got["eager"]["agrees"]
    assert got["llga_fuser"]["agrees"]
    assert got["llga_fuser"]["groups"] == 1 + (frozen and has_own_kernels())  # and a constant table


def test_a_function(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "made.py"
    file.write_text(
        "import torch\n\n"
        "def make():\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())\n"
        "    return net, lambda batch, seed: (torch.full((batch, 16), 1.0 + seed),)\n"
    )
    engines = ("--engines", "eager,ofi,llga_fuser", "--batch", "3")
    got = measure(tmp_path, f"{file}:make", *engines)
    assert all(engine["agrees"] for engine in got.values()), got
    assert got["llga_fuser"]["groups"] == 1


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([((4, 8), "float32")], "its forward takes 2 inputs, --shape is given 1 times"),
        ([((4, 8), "float32")] * 3, "its forward takes 2 inputs, --shape is given 3 times"),
    ],
)
def test_a_file_takes_as_many_inputs_as_it_does(
    shapes: list[tuple[tuple[int, ...], str]], message: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "net.pt"
    torch.jit.trace(torch.add, (torch.rand(1), torch.rand(1))).save(str(file))
    with pytest.raises(_models.ModelError, match=message):
        _models.from_file(str(file), shapes)
