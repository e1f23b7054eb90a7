"""torch.compile(net, backend="llga")."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llga_fuser
from llga_fuser import _models
from llga_fuser._dynamo import dynamo_backend
from models.small_transformers import ARCHITECTURES
from util import TOLERANCES, assert_same

# Whole networks: another order of summation, many layers deep.
NETWORK = TOLERANCES[torch.float32]._replace(relative=2e-3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    llga_fuser._C.reset_stats()
    yield
    torch._dynamo.reset()


def compiled(net: Any, **options: Any) -> Any:
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", True)
    return torch.compile(
        net, backend=dynamo_backend, options=options or None, dynamic=dynamic, fullgraph=fullgraph
    )


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return self.head(x.mean((2, 3)).view(x.size(0), -1))


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@torch.no_grad()
def test_fused_with_weights_as_constants(small: Small) -> None:
    model = compiled(small)
    x = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        assert_same(model(x), small(x))
    info = llga_fuser.cache_info()
    assert info.packed_bytes > 0, "weights of an input could not be packed"
    assert info.hits > 0
    assert info.fallbacks == 0
    assert info.misses == info.entries


@pytest.mark.skipif(
    not any(
        e.name == "llga" for e in importlib.metadata.entry_points(group="torch_dynamo_backends")
    ),
    reason="llga_fuser is imported from a directory, not installed: it has no entry points",
)
def test_found_by_name_without_import() -> None:
    code = """
import sys, torch
assert "llga_fuser" not in sys.modules
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
x = torch.randn(1, 3, 8, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(net, backend="llga")(x), net(x))
import llga_fuser
assert llga_fuser.cache_info().misses == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
def test_changed_and_replaced_weights_are_seen(small: Small) -> None:
    model = compiled(small)
    x = torch.randn(2, 3, 8, 8)
    model(x)
    small.head.weight.mul_(2)
    assert_same(model(x), small(x))
    small.conv.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
    assert_same(model(x), small(x))


@torch.no_grad()
def test_dynamic_sizes_do_not_recompile_the_graph(small: Small) -> None:
    model = compiled(small, dynamic=True)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    for batch, size in ((2, 8), (3, 9), (5, 12), (3, 9), (7, 8)):
        x = torch.randn(batch, 3, size, size + 1)
        assert_same(model(x), small(x))
    assert counters["unique_graphs"] == 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        return {"y": F.relu(self.linear(x)), "calls": self.calls * 1, "none": None, "two": 2}


@torch.no_grad()
def test_written_buffers_and_other_outputs() -> None:
    net = Counting().eval()
    model = compiled(net)
    x = torch.randn(3, 4)
    for call in range(1, 5):
        result = model(x)
        assert_same(result["y"], F.relu(net.linear(x)))
        assert result["calls"] == call
        assert net.calls == call
        assert result["none"] is None
        assert result["two"] == 2


@torch.no_grad()
def test_input_written_in_place(small: Small) -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return small(x)

    x = torch.randn(2, 3, 8, 8)
    model = compiled(f)
    for _ in range(3):
        ours, theirs = x.clone(), x.clone()
        assert_same(model(ours), f(theirs))
        assert_same(ours, theirs)


@torch.no_grad()
def test_graph_breaks(small: Small) -> None:
    def f(x: Tensor) -> Tensor:
        y = small(x)
        torch._dynamo.graph_break()
        return F.softmax(y, -1)

    model = compiled(f, fullgraph=False)
    x = torch.randn(2, 3, 8, 8)
    for _ in range(2):
        assert_same(model(x), f(x))
    assert llga_fuser.cache_info().entries > 0


@pytest.mark.parametrize("fallback", ["eager", "aot_eager"])
def test_gradients_come_from_another_backend(
    small: Small, fallback: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = compiled(small, fallback=fallback)
    x = torch.randn(2, 3, 8, 8)
    with caplog.at_level(logging.WARNING, "llga_fuser"):
        model(x).sum().backward()
    ours = [p.grad.clone() for p in small.parameters()]
    small.zero_grad()
    small(x).sum().backward()
    assert_same(ours, [p.grad for p in small.parameters()])
    (record,) = caplog.records
    assert "gradient is wanted" in record.getMessage()
    assert fallback in record.getMessage()
    assert llga_fuser.cache_info().misses == 0


def test_inference_mode(small: Small) -> None:
    model = compiled(small)
    with torch.inference_mode():
        x = torch.randn(2, 3, 8, 8)
        for _ in range(2):
            assert_same(model(x), small(x))
    assert llga_fuser.cache_info().fallbacks == 0


@torch.no_grad()
def test_bf16_keeps_the_outputs_type(small: Small) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = compiled(small, dtype=torch.bfloat16)
    result = model(x)
    assert result.dtype == torch.float32
    assert_same(result, small(x), tol=TOLERANCES[torch.bfloat16]._replace(relative=0.05))
    assert not torch.equal(result, small(x)), "nothing was computed in bfloat16"
    assert llga_fuser.cache_info().entries > 0


@torch.no_grad()
def test_what_cannot_be_traced_runs_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.fft.rfft(x).real.to_sparse().to_dense()

    x = torch.randn(4, 4)
    assert_same(compiled(f, fullgraph=False)(x), f(x))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"precision": 1}, "unknown precision; expected any of dtype, fpmath_mode, fallback"),
        ({"dtype": torch.float16}, r"options\['dtype'\]: expected torch.bfloat16"),
        ({"fpmath_mode": "fp8"}, r"options\['fpmath_mode'\]: expected one of 'strict'"),
    ],
)
@torch.no_grad()
def test_wrong_options(small: Small, options: dict[str, Any], error: str) -> None:
    with pytest.raises(Exception, match=error):
        compiled(small, **options)(torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x1_0"])
@torch.no_grad()
def test_torchvision(name: str) -> None:
    model = _models.build(name, 64)
    net = compiled(model.module)
    for seed in (1, 2):
        x = model.inputs(2, seed)
        assert_same(net(*x), model.module(*x), tol=NETWORK)
    info = llga_fuser.cache_info()
    assert info.entries > 0
    assert info.fallbacks == 0


@pytest.mark.parametrize("name", ["bert", "vit"])
@torch.no_grad()
def test_transformers(name: str) -> None:
    pytest.importorskip("transformers", reason="an optional extra of the tests")
    _models.load_torchvision()  # which transformers imports
    module, inputs = ARCHITECTURES[name]("sdpa")
    module.eval()
    net = compiled(module)
    for seed in (1, 2):
        assert_same(net(*inputs(seed)), module(*inputs(seed)), tol=NETWORK)
    assert llga_fuser.cache_info().entries > 0


# ---------------------------------------------------------------------------------- fpmath modes


@pytest.mark.parametrize("mode", ["strict", "bf16", "f16", "tf32", "any"])
@torch.no_grad()
def test_fpmath_modes(mode: Any, small: Small) -> None:
    """Narrower arithmetic at most, and only where it was asked for."""
    assert llga_fuser.fpmath_mode() == "strict"
    x = torch.randn(4, 3, 16, 16)
    limit = 5e-5 if mode == "strict" else 0.05
    tolerance = TOLERANCES[torch.float32]._replace(relative=limit)
    alone = llga_fuser.compile(small, x, fpmath_mode=mode)
    plain = llga_fuser.compile(small, x)
    assert_same(alone(x), small(x), tol=tolerance)
    misses = llga_fuser.cache_info().misses
    before = llga_fuser.set_fpmath_mode(mode)
    try:
        assert before == "strict"
        assert llga_fuser.fpmath_mode() == mode
        assert_same(plain(x), small(x), tol=tolerance)
    finally:
        llga_fuser.set_fpmath_mode("strict")
    again = llga_fuser.cache_info().misses - misses
    assert (again > 0) == (mode != "strict"), "groups have a plan for each mode"
    assert_same(plain(x), small(x))


def test_wrong_fpmath_mode() -> None:
    with pytest.raises(ValueError, match=r"mode: expected one of 'strict', .*, got 'fp32'"):
        llga_fuser.set_fpmath_mode("fp32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mode: expected a str, got int"):
        llga_fuser.set_fpmath_mode(1)  # type: ignore[arg-type]
