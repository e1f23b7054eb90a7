"""`llga_fuser.quantize` and `from_pt2e`: what gets 8 bits, how exact it is, and what is refused."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import HistogramObserver

import llga_fuser
from llga_fuser import QuantizationConfig, _models
from llga_fuser._quantize.functions import quantize_per_tensor
from llga_fuser._quantize.observers import PairedMinMaxObserver, PairedPerChannelMinMaxObserver
from llga_fuser._quantize.windows import take_windows_apart
from util import fused_graph, has_vnni, restored

IMAGE = (2, 8, 8, 8)
FLOWS = ("fx", "export")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with restored(torch.get_num_threads, torch.set_num_threads):
        torch.set_num_threads(1)
        yield


def sqnr(actual: Tensor, expected: Tensor) -> float:
    """Signal to quantization noise, in dB."""
    noise = (actual.double() - expected.double()).square().sum().clamp_min(1e-30)
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def config(flow: str, **more: Any) -> QuantizationConfig:
    return QuantizationConfig(capture=flow, **more)  # type: ignore[arg-type]


def frozen(net: nn.Module, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return torch.jit.freeze(torch.jit.trace(net, inputs, check_trace=False).eval())


def readers(graph: Any) -> list[tuple[str, str, list[str]]]:
    """Of each quantization of an activation: what it rounds, and who reads the result."""
    found = []
    for node in graph.findAllNodes("aten::quantize_per_tensor"):
        users = [
            use.user.kind()
            for dequantize in node.output().uses()
            for use in dequantize.user.output().uses()
        ]
        found.append((node.inputsAt(0).node().kind(), node.inputsAt(0).debugName(), sorted(users)))
    return found


def kinds_before_rounding(net: nn.Module, *inputs: Tensor) -> list[str]:
    return [kind.removeprefix("aten::") for kind, _, _ in readers(frozen(net, *inputs).graph)]


def conv(inputs: int = 8, outputs: int = 8, size: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **more)


class Residual(nn.Module):
    """A ResNet block with a projection: both operands of the sum are convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = conv(bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = conv(bias=False), nn.BatchNorm2d(8)
        self.project = conv(size=1)
        self.last = conv()
        for norm in (self.norm, self.norm2):
            nn.init.uniform_(norm.running_mean, -0.5, 0.5)  # type: ignore[arg-type]
            nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.norm(self.first(x)))
        y = self.norm2(self.second(y))
        y += self.project(x)
        return self.last(F.relu(y, inplace=True))


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Any:
        b, n, c = x.shape
        q, k, v = (
            f(x).view(b, n, self.heads, c // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1)
        y = torch.matmul(weights, v).transpose(1, 2).reshape(b, n, c)
        return self.norm(x + self.out(y))


class Branches(nn.Module):
    """Concatenation, pools and views between 8-bit operators."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.line = conv(size=1), conv(), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        y = torch.cat([F.relu(self.a(x)), self.b(x)], 1)
        return self.line(torch.flatten(F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1), 1))


def transposed() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ReLU(), conv())


def depthwise() -> nn.Module:
    return nn.Sequential(conv(groups=8), nn.Hardswish(), conv(size=1), nn.SiLU(), conv(size=1))


class Functional(nn.Module):
    """Weights are parameters of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3) / 8)
        self.matrix = nn.Parameter(torch.randn(4, 8) / 3)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(F.conv2d(x, self.weight, padding=1))
        return F.linear(y.mean((2, 3)), self.matrix)


IMAGES = {
    "residual": Residual,
    "branches": Branches,
    "transposed": transposed,
    "depthwise": depthwise,
    "functional": Functional,
    "conv1d": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(8, 8, 3), nn.GELU(), nn.Conv1d(8, 4, 1)
    ),
}


def example(name: str) -> tuple[nn.Module, Tensor]:
    if name == "attention":
        return Attention().eval(), torch.randn(3, 6, 16)
    return IMAGES[name]().eval(), torch.randn(IMAGE)


EXAMPLES = [*IMAGES, "attention"]


# ----------------------------------------------------------------------------------------- accuracy


def fake_quantized(net: nn.Module, *inputs: Tensor) -> Any:
    """The same graph in floats: `torch.fake_quantize_*` in the place of 8-bit tensors."""

    class Simulation(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            args, _ = self.fetch_args_kwargs_from_env(n)
            if n.target is quantize_per_tensor:
                x, scale, zero_point, dtype = args
                low, high = (0, 255) if dtype == torch.quint8 else (-128, 127)
                return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)
            if n.target == "dequantize":
                return args[0].dequantize() if args[0].is_quantized else args[0]
            return super().run_node(n)

    with torch.no_grad():
        return Simulation(net).run(*inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_close_to_fp32_and_equal_to_its_simulation(name: str, flow: str) -> None:
    net, x = example(name)
    # None for one of the flows: numbers as the kernels of this processor have them.
    settings = config(flow, reduce_range=None if flow == "fx" else False)
    quantized = llga_fuser.quantize(net, [x], config=settings)
    with torch.no_grad():
        expected = net(x)
        result = quantized(x)
    assert sqnr(result, expected) > 28
    assert result.dtype == torch.float32 and not quantized.training
    # Up to values in the middle between two steps, which are frequent behind average pools.
    simulated = fake_quantized(quantized, x)
    assert sqnr(simulated, result) > (30 if name == "branches" else 50)
    fast = llga_fuser.compile(quantized, x)
    assert sqnr(fast(x), result) > 40


def test_both_flows_give_the_same_network() -> None:
    for name in ("residual", "branches", "attention"):
        net, x = example(name)
        with torch.no_grad():
            fx, export = (llga_fuser.quantize(net, [x], config=config(f))(x) for f in FLOWS)
        assert sqnr(fx, export) > 38  # batch norms are folded in another order


@pytest.mark.parametrize("observer", ["histogram", "minmax"])
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8])
@pytest.mark.parametrize("scheme", ["affine", "symmetric"])
@pytest.mark.parametrize("granularity", ["per_channel", "per_tensor"])
def test_config(observer: Any, dtype: torch.dtype, scheme: Any, granularity: Any) -> None:
    net, x = example("branches")
    quantized = llga_fuser.quantize(
        net,
        [x],
        config=QuantizationConfig(
            observer=observer,
            activation_dtype=dtype,
            activation_scheme=scheme,
            weight_granularity=granularity,
            reduce_range=False,
        ),
    )
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 22
    graph = frozen(quantized, x).graph
    for node in graph.findAllNodes("aten::quantize_per_tensor"):
        _, scale, zero_point, code = (i.toIValue() for i in node.inputs())
        assert code == (13 if dtype == torch.quint8 else 12)
        assert scale > 0
        if scheme == "symmetric":
            assert zero_point == (128 if dtype == torch.quint8 else 0)
    weights = [
        n.output().toIValue()
        for n in graph.findAllNodes("prim::Constant")
        if "QInt8" in str(n.output().type()) or n.output().toIValue() is not None
    ]
    weights = [w for w in weights if isinstance(w, Tensor) and w.is_quantized]
    assert len(weights) == 3
    wanted = torch.per_channel_affine if granularity == "per_channel" else torch.per_tensor_affine
    assert {w.qscheme() for w in weights} == {wanted}
    assert {w.dtype for w in weights} == {torch.qint8}


def test_histogram_cuts_outliers_and_minmax_does_not() -> None:
    net = nn.Sequential(nn.Linear(64, 8)).eval()
    x = torch.randn(8192, 64)
    x[0, 0] = 10.0
    scale = {}
    for observer in ("histogram", "minmax"):
        quantized = llga_fuser.quantize(
            net, [x], config=QuantizationConfig(observer=observer, reduce_range=False)
        )
        (node,) = frozen(quantized, x).graph.findAllNodes("aten::quantize_per_tensor")
        scale[observer] = node.inputsAt(1).toIValue()
    low = float(x.min())
    assert scale["minmax"] == pytest.approx((10 - low) / 255, rel=1e-3)
    assert scale["histogram"] < 0.95 * scale["minmax"]


def test_bias_correction() -> None:
    """Inputs with a mean: rounded weights move the outputs by constants."""
    net = nn.Sequential(nn.Linear(256, 32, bias=False)).eval()
    x = torch.rand(64, 256) + 3
    error = {}
    for on in (False, True):
        settings = QuantizationConfig(weight_granularity="per_tensor", bias_correction=on)
        quantized = llga_fuser.quantize(net, [x[:32]], config=settings)
        with torch.no_grad():
            error[on] = (quantized(x[32:]) - net(x[32:])).mean(0).norm()
    assert error[True] < 0.3 * error[False]


def test_one_sample_corrects_no_bias() -> None:
    net = nn.Sequential(nn.Linear(16, 4)).eval()
    quantized = llga_fuser.quantize(net, [torch.randn(1, 16)])
    (layer,) = (m for m in quantized.modules() if hasattr(m, "get_weight"))
    assert torch.equal(layer.bias, net[0].bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [False, True])
def test_paired_observers_leave_room(transposed: bool) -> None:
    weight = torch.randn(16, 15, 3, 3)  # an odd number: the last has no neighbour
    weight[0, 4] = weight[0, 5] = 4.0
    if transposed:
        observer: Any = PairedMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
        observer(weight)
        scale, zero_point = observer.calculate_qparams()
        made = torch.quantize_per_tensor(weight, float(scale), int(zero_point), torch.qint8)
        rows = made.int_repr().int().transpose(0, 1)
    else:
        observer = PairedPerChannelMinMaxObserver(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        )
        observer(weight)
        scale, zero_point = observer.calculate_qparams()
        made = torch.quantize_per_channel(weight, scale, zero_point, 0, torch.qint8)
        rows = made.int_repr().int()
    pairs = rows[:, 0:-1:2] + rows[:, 1::2] if rows.shape[1] % 2 else rows[:, 0::2] + rows[:, 1::2]
    assert 255 * pairs.abs().max() < 2**15
    if not transposed:  # one scale for both, the second axis is the tighter one here
        assert 255 * pairs.abs().max() > 0.9 * 2**15
    assert float((made.dequantize() - weight).abs().max()) <= float(scale.max()) / 2 + 1e-6


def test_reduced_range_by_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for saturates in (True, False):
        monkeypatch.setattr(
            llga_fuser._C, "runtime_info", lambda now=saturates: {"int8_saturates": now}
        )
        assert QuantizationConfig().reduces_range() is saturates
        assert QuantizationConfig(reduce_range=not saturates).reduces_range() is not saturates
        net, x = example("attention")
        graph = frozen(llga_fuser.quantize(net, [x]), x).graph
        products = [
            i.node().kind() == "aten::dequantize"
            for n in graph.findAllNodes("aten::matmul")
            for i in n.inputs()
        ]
        assert products == [not saturates] * 4


# ---------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize("flow", FLOWS)
def test_activations_stay_with_their_convolution(flow: str) -> None:
    net, x = example("depthwise")
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    assert kinds_before_rounding(quantized, x) == ["Param", "hardswish", "silu"] or (
        kinds_before_rounding(quantized, x) == ["prim::Param", "hardswish", "silu"]
    )


@pytest.mark.parametrize("flow", FLOWS)
def test_residual_sum_reads_8_bits_and_rounds_once(flow: str) -> None:
    net, x = example("residual")
    graph = frozen(llga_fuser.quantize(net, [x], config=config(flow)), x).graph
    found = readers(graph)
    # The input, behind the first ReLU, one operand of the sum, and behind the second ReLU.
    assert len(found) == 4
    sums = [n for n in graph.nodes() if n.kind() in ("aten::add", "aten::add_")]
    assert len(sums) == 1
    operands = sorted(i.node().kind() for i in list(sums[0].inputs())[:2])
    assert operands == ["aten::_convolution", "aten::dequantize"] or operands == [
        "aten::conv2d",
        "aten::dequantize",
    ]
    assert [k for k, _, _ in found].count("aten::relu") + [k for k, _, _ in found].count(
        "aten::relu_"
    ) == 2


@pytest.mark.parametrize("flow", FLOWS)
def test_pools_views_and_concatenations_keep_scale_and_zero_point(flow: str) -> None:
    net, x = example("branches")
    graph = frozen(llga_fuser.quantize(net, [x], config=config(flow)), x).graph
    parameters = [
        tuple(i.toIValue() for i in list(n.inputs())[1:3])
        for n in graph.findAllNodes("aten::quantize_per_tensor")
    ]
    assert len(parameters) == 1 + 2 + 4
    assert len(set(parameters[1:])) == 1


class Averaged(nn.Module):
    """A squeeze and excitation, a mean before a classifier, and a sum behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 8), conv(8, 8)
        self.c, self.d = conv(8, 4, 1), conv(4, 8, 1)
        self.e = nn.Linear(8, 5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        s = torch.sigmoid(self.d(F.relu(self.c(x.mean((2, 3), keepdim=True)))))
        y = self.dropout(self.b(x * s)) + x
        return self.e(F.relu(y).mean((2, 3)))


@pytest.mark.parametrize("flow", FLOWS)
def test_means_and_dropouts(flow: str) -> None:
    """A mean that keeps dimensions reads 8 bits, as what multiplies with it does; another one does
    not. What a dropout would do is nothing to a residual sum.
    """
    net, x = Averaged().eval(), torch.randn(2, 3, 9, 9)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 20
    graph = frozen(quantized, x).graph
    means = [n.inputsAt(0).node().kind() for n in graph.findAllNodes("aten::mean")]
    assert sorted(means)[0] == "aten::dequantize" and len(means) == 2
    assert means[1] != "aten::dequantize"
    (add,) = graph.findAllNodes("aten::add")
    assert "aten::dequantize" in [i.node().kind() for i in list(add.inputs())[:2]]


@pytest.mark.parametrize("flow", FLOWS)
def test_matrix_products(flow: str) -> None:
    net, x = example("attention")
    settings = config(flow, reduce_range=False)
    graph = frozen(llga_fuser.quantize(net, [x], config=settings), x).graph
    products = graph.findAllNodes("aten::matmul")
    assert len(products) == 2
    for product in products:
        first, second = (i.node() for i in product.inputs())
        assert first.kind() == second.kind() == "aten::dequantize"
        rounding = [n.inputsAt(0).node() for n in (first, second)]
        # The second operand: qint8 (12), symmetric.
        assert rounding[0].inputsAt(3).toIValue() == 13
        assert [rounding[1].inputsAt(i).toIValue() for i in (2, 3)] == [0, 12]
    (softmax,) = (n for k, n, _ in readers(graph) if k == "aten::softmax")
    assert softmax
    # The sum behind a linear layer and what it adds stay in float.
    (add,) = graph.findAllNodes("aten::add")
    assert "aten::dequantize" not in [i.node().kind() for i in add.inputs()]


class ByMatrix(nn.Module):
    """Linear layers as products with a matrix, one spelling after the other."""

    def __init__(self) -> None:
        super().__init__()
        names = ("conv1d", "mm", "matmul", "turned", "scaled", "plane")
        for name in names:
            setattr(self, name, nn.Parameter(torch.randn(8, 8) / 3))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        y = torch.addmm(self.bias, x.view(-1, 8), self.conv1d).relu()
        y = torch.mm(y, self.mm).view(x.shape).relu()
        y = torch.matmul(y, self.matmul) + (y @ self.turned.t())
        z = torch.addmm(self.bias, y.view(-1, 8), self.scaled, alpha=0.5)  # a factor
        z = torch.addmm(self.plane[:1], z, self.plane)  # no vector is added
        return self.plane @ z.view(-1, 8).t()  # the matrix comes first


@pytest.mark.parametrize("flow", FLOWS)
def test_products_with_matrices_are_linear_layers(flow: str) -> None:
    torch.manual_seed(0)
    net, x = ByMatrix().eval(), torch.randn(2, 3, 8)
    before = copy.deepcopy(net.state_dict())
    quantized = llga_fuser.quantize(net, [x], config=config(flow, reduce_range=False))
    graph = frozen(quantized, x).graph
    layers = graph.findAllNodes("aten::linear")
    assert len(layers) == 4
    for layer in layers:
        assert [i.node().kind() for i in list(layer.inputs())[:2]] == ["aten::dequantize"] * 2
    assert len(graph.findAllNodes("aten::addmm")) == 2
    (product,) = graph.findAllNodes("aten::matmul")
    assert "aten::dequantize" not in [i.node().kind() for i in product.inputs()]
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 25
        longer = torch.randn(5, 4, 8)
        assert sqnr(quantized(longer), net(longer)) > 20
    after = net.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)

    kept = config(flow, keep_float=(torch.addmm, torch.mm), reduce_range=False)
    graph = frozen(llga_fuser.quantize(net, [x], config=kept), x).graph
    assert len(graph.findAllNodes("aten::linear")) == 2
    assert len(graph.findAllNodes("aten::addmm")) == 3


class Conv1D(nn.Module):
    """As transformers' GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Any:
        sizes = (*x.size()[:-1], self.outputs)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(sizes)


class Block(nn.Module):
    """A layer of GPT-2: query, key and value are parts of one result."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Conv1D(16, 48), Conv1D(16, 16)
        self.wide, self.narrow = Conv1D(16, 64), Conv1D(64, 16)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).split(16, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.narrow(F.gelu(self.wide(x), approximate="tanh"))


def test_layers_of_gpt2_are_fused() -> None:
    """Nothing stands between a product and what follows it, and parts of 8-bit values are such."""
    torch.manual_seed(0)
    net, x = Block().eval(), torch.randn(2, 6, 16)
    quantized = llga_fuser.quantize(net, [x], config=config("export", reduce_range=False))
    graph = frozen(quantized, x).graph
    layers = graph.findAllNodes("aten::linear")
    assert len(layers) == 4 and not graph.findAllNodes("aten::addmm")
    after = {use.user.kind() for layer in layers for use in layer.output().uses()}
    assert after == {"aten::quantize_per_tensor", "aten::add", "aten::gelu"}
    with torch.no_grad():
        fast = llga_fuser.compile(quantized, x)
        for size in ((2, 6), (3, 9)):
            y = torch.randn(*size, 16)
            assert sqnr(fast(y), net(y)) > 20
        report = llga_fuser.report(fast, x)
    if has_vnni():
        names = [g.name for g in report.groups]
        layer = "dequantize+dequantize+linear"
        assert names.count(f"{layer}+add") == 2
        assert f"{layer}+gelu+quantize_per_tensor" in names
        assert f"{layer}+quantize_per_tensor" in names
        assert "dequantize+dequantize+dequantize+attention+quantize_per_tensor" in names


def swin_blocks(version: int) -> nn.Module:
    """One block whose windows lie as they come, and one whose windows are shifted."""
    _models.load_torchvision()
    swin = importlib.import_module("torchvision.models.swin_transformer")
    block = swin.SwinTransformerBlockV2 if version == 2 else swin.SwinTransformerBlock
    blocks = nn.Sequential(*(block(16, 2, [4, 4], [s, s]) for s in (0, 2))).eval()
    for name, parameter in blocks.named_parameters():
        if name.endswith(("bias", "bias_table")):
            nn.init.normal_(parameter, std=0.3)
    return blocks


def quantized_layers(net: nn.Module, x: Tensor) -> int:
    """How many linear layers have 8-bit data; those of constants, as position biases, have none."""
    layers = frozen(net, x).graph.findAllNodes("aten::linear")
    kinds = [{i.node().kind() for i in list(layer.inputs())[:2]} for layer in layers]
    return kinds.count({"aten::dequantize"})


@pytest.mark.skipif(
    not importlib.util.find_spec("torchvision"), reason="torchvision is not installed"
)
@pytest.mark.parametrize("version", [1, 2])
def test_window_attention_is_taken_apart(version: int) -> None:
    torch.manual_seed(0)
    net, x = swin_blocks(version), torch.randn(2, 10, 9, 16)
    traced = torch.fx.symbolic_trace(net)
    take_windows_apart(traced, lambda _: False)
    names = [getattr(n.target, "__name__", "") for n in traced.graph.nodes]
    assert names.count("attention_in_windows") == 2 and "shifted_window_attention" not in names
    with torch.no_grad():
        for size in ((2, 10, 9), (1, 8, 12), (3, 4, 3), (1, 5, 2)):  # the last two are not shifted
            y = torch.randn(*size, 16)
            torch.testing.assert_close(traced(y), net(y))

    quantized = llga_fuser.quantize(net, [x], config=config("fx", reduce_range=False))
    assert quantized_layers(quantized, x) == 8
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 20
        fast = llga_fuser.compile(quantized, x)
        for size in ((2, 10, 9), (1, 8, 12), (3, 9, 15)):
            y = torch.randn(*size, 16)
            assert sqnr(fast(y), quantized(y)) > 30

    function = importlib.import_module("torchvision.models.swin_transformer")
    kept = config("fx", keep_float=(function.shifted_window_attention,), reduce_range=False)
    assert quantized_layers(llga_fuser.quantize(net, [x], config=kept), x) == 4


@pytest.mark.parametrize("flow", FLOWS)
def test_what_is_constant_stays_in_float(flow: str) -> None:
    """Freezing computes it: a layer of constants is none that runs."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4))
            self.inner, self.line = nn.Linear(4, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.line(x) + self.inner(self.table).sum(0)

    net, x = Module().eval(), torch.randn(3, 8)
    graph = frozen(llga_fuser.quantize(net, [x], config=config(flow)), x).graph
    assert len(graph.findAllNodes("aten::linear")) == 1


class Attended(Attention):
    """With PyTorch's own attention."""

    def forward(self, x: Tensor) -> Any:
        b, n, c = x.shape
        q, k, v = (
            f(x).view(b, n, self.heads, c // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, value=v)
        return self.norm(x + self.out(y.transpose(1, 2).reshape(b, n, c)))


@pytest.mark.parametrize("flow", FLOWS)
def test_attention_reads_8_bits(flow: str) -> None:
    net, x = Attended().eval(), torch.randn(3, 6, 16)

    def operands(**settings: Any) -> list[str]:
        quantized = llga_fuser.quantize(net, [x], config=config(flow, **settings))
        with torch.no_grad():
            assert sqnr(quantized(x), net(x)) > 25
        (node,) = frozen(quantized, x).graph.findAllNodes("aten::scaled_dot_product_attention")
        return [i.node().kind() for i in list(node.inputs())[:3]]

    assert operands(reduce_range=False) == ["aten::dequantize"] * 3
    assert "aten::dequantize" not in operands(reduce_range=True)
    kept = (F.scaled_dot_product_attention,)
    assert "aten::dequantize" not in operands(reduce_range=False, keep_float=kept)


class NormFunction(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: the function, behind a check of the sizes."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4 dimensions, got {x.ndim}")
        y = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            0.1,
            self.eps,
        )
        return F.relu(y)


def norm_function(**more: Any) -> nn.Module:
    norm = NormFunction(8, **more).eval()
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)  # type: ignore[arg-type]
    nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return norm


class NormsBehind(nn.Module):
    """Of convolutions that are modules, with and without bias, and of one that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(bias=False), conv(), conv(bias=False)
        self.norms = nn.ModuleList([norm_function(), norm_function(affine=False), norm_function()])

    def forward(self, x: Tensor) -> Any:
        x = self.norms[0](self.a(x))
        x = self.norms[1](self.b(x))
        return self.norms[2](F.conv2d(F.pad(x, [0, 1, 0, 1]), self.c.weight, self.c.bias, 2))


class NormsThatStay(nn.Module):
    """Behind a convolution that is called twice, and one whose result is read without the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()
        self.first, self.second = norm_function(), norm_function()

    def forward(self, x: Tensor) -> Any:
        y = self.first(self.a(x)) * self.a(x + 1)
        z = self.b(y)
        return z * self.second(z)


@pytest.mark.parametrize("flow", FLOWS)
def test_norms_that_are_functions_are_folded(flow: str) -> None:
    net, x = NormsBehind().eval(), torch.randn(IMAGE)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    graph = frozen(quantized, x).graph
    assert graph.findNode("aten::batch_norm") is None, graph
    assert len(graph.findAllNodes("aten::_convolution")) == 3
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 30


@pytest.mark.parametrize("flow", FLOWS)
def test_norms_that_can_not_be_folded(flow: str) -> None:
    net, x = NormsThatStay().eval(), torch.randn(IMAGE)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    # Each call that torch.export sees is a convolution of its own.
    left = len(frozen(quantized, x).graph.findAllNodes("aten::batch_norm"))
    assert left == {"fx": 2, "export": 1}[flow]
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 30


def test_networks_with_norms_that_are_functions_stay_as_they_are() -> None:
    net, x = NormsBehind().eval(), torch.randn(IMAGE)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for flow in FLOWS:
        llga_fuser.quantize(net, [x], config=config(flow))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Upsampled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = conv(), conv(), how
        self.resize = nn.ModuleDict(
            {"module": nn.Upsample(scale_factor=2), "older": nn.UpsamplingNearest2d(scale_factor=2)}
        )

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        if self.how in self.resize:
            return self.b(self.resize[self.how](y))
        return self.b(F.interpolate(y, scale_factor=2.0, mode=self.how))


class SamePadding(nn.Module):
    """As timm spells it: what has to be padded depends on the sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = conv(), nn.Conv2d(8, 8, 3, 2), norm_function()

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        by = [max((-(-n // 2) - 1) * 2 + 3 - n, 0) for n in x.shape[-2:]]
        x = self.norm(x)
        return self.b(F.pad(x, [by[1] // 2, by[1] - by[1] // 2, by[0] // 2, by[0] - by[0] // 2]))


def test_padding_that_depends_on_sizes() -> None:
    net, x = SamePadding().eval(), torch.randn(IMAGE)
    quantized = llga_fuser.quantize(net, [x])
    script = frozen(quantized, x)
    assert script.graph.findNode("aten::batch_norm") is None
    with torch.no_grad():
        assert sqnr(script(x), net(x)) > 25
        other = torch.randn(3, 8, 7, 5)
        assert sqnr(quantized(other), net(other)) > 25


class Excited(nn.Module):
    """A block of an SE-ResNet."""

    def __init__(self, gate: type[nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.last = conv(), conv(), conv()
        self.squeeze, self.excite, self.gate = conv(size=1), conv(size=1), gate()

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.a(x))
        y = self.b(x)
        y = y * self.gate(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y += x
        return self.last(F.relu(y))


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("gate", [nn.Sigmoid, nn.Hardsigmoid, nn.Tanh])
def test_sum_behind_a_gate_is_of_8_bits(flow: str, gate: type[nn.Module]) -> None:
    """Both of its operands are; tanh is no gate."""
    net, x = Excited(gate).eval(), torch.randn(IMAGE)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    rounded = kinds_before_rounding(quantized, x)
    assert ("mul" in rounded) == (gate is not nn.Tanh), rounded
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 25


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("how", ["nearest", "module", "older", "bilinear"])
def test_nearest_upsampling_is_of_8_bits(flow: str, how: str) -> None:
    """Other resizings compute new numbers."""
    net, x = Upsampled(how).eval(), torch.randn(IMAGE)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    rounded = kinds_before_rounding(quantized, x)
    assert ("_convolution" in rounded) == (how != "bilinear"), rounded
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 30


def test_writes_in_place_come_before_rounding() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(), conv()

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            F.relu_(y)
            y.mul_(2)
            return self.b(y)

    net = Net().eval()
    x = torch.randn(IMAGE)
    for flow in FLOWS:
        quantized = llga_fuser.quantize(net, [x], config=config(flow))
        with torch.no_grad():
            assert sqnr(quantized(x), net(x)) > 30


@pytest.mark.parametrize("flow", ["auto", *FLOWS])
def test_padding_modes(flow: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        conv(),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
    ).eval()
    x = torch.randn(IMAGE)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 28
    # torch.ao's reference modules pad with zeros only: `torch.export` is asked first.
    assert len(readers(frozen(quantized, x).graph)) == (1 if flow == "fx" else 3)


@pytest.mark.parametrize("flow", FLOWS)
def test_one_module_called_twice(flow: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Any:
            return self.a(torch.relu(self.a(x)))

    net, x = Twice().eval(), torch.rand(64, 32)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 28


@pytest.mark.parametrize("flow", FLOWS)
def test_parts_of_tuples(flow: str) -> None:
    class Tuples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.line, self.pool = nn.Linear(8, 8), nn.MaxPool1d(2, return_indices=True)

        def forward(self, x: Tensor) -> Any:
            a, b = self.gru(x)[0].chunk(2, 1)
            return self.line(self.pool(self.line(a) + self.line(b))[0].repeat(1, 1, 2))

    net, x = Tuples().eval(), torch.randn(4, 6, 8)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 25


@pytest.mark.parametrize("flow", FLOWS)
def test_without_an_axis_of_samples(flow: str) -> None:
    net = nn.Sequential(conv(), nn.ReLU(), conv(8, 4)).eval()
    batches = [torch.rand(8, 9, 7) for _ in range(3)]
    quantized = llga_fuser.quantize(net, batches, config=config(flow))
    with torch.no_grad():
        assert sqnr(quantized(batches[0]), net(batches[0])) > 28


def test_keep_float() -> None:
    net, x = example("residual")
    total = len(readers(frozen(llga_fuser.quantize(net, [x]), x).graph))
    for flow in FLOWS:
        settings = config(flow, keep_float=("last",))
        graph = frozen(llga_fuser.quantize(net, [x], config=settings), x).graph
        assert len(readers(graph)) == total - 1
        with pytest.raises(ValueError, match=r"nothing to quantize.*keep_float"):
            llga_fuser.quantize(net, [x], config=config(flow, keep_float=(nn.Conv2d,)))

    block = nn.Sequential(conv(), nn.Sequential(conv(), nn.ReLU(), conv()), conv()).eval()
    for flow in FLOWS:
        settings = config(flow, keep_float=("1",))
        graph = frozen(llga_fuser.quantize(block, [x], config=settings), x).graph
        assert len(readers(graph)) == 2

    attention, tokens = example("attention")
    for flow in FLOWS:
        settings = config(flow, keep_float=(torch.matmul,), reduce_range=False)
        graph = frozen(llga_fuser.quantize(attention, [tokens], config=settings), tokens).graph
        # `q @ k` is another function when traced symbolically, and the same when exported.
        floats = [
            p
            for p in graph.findAllNodes("aten::matmul")
            if all(i.node().kind() != "aten::dequantize" for i in p.inputs())
        ]
        assert len(floats) == (1 if flow == "fx" else 2)


# ------------------------------------------------------------------------------- arguments, results


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        z = torch.relu(self.a(x)) + self.b(y) * scale
        if mask is not None:
            z = z * mask
        return {"z": z, "sum": z.sum(-1)}


@pytest.mark.parametrize("flow", FLOWS)
def test_several_inputs(flow: str) -> None:
    net = Two().eval()
    batches = [
        {"y": torch.randn(n, 8), "x": torch.randn(n, 8), "mask": torch.ones(n, 8)} for n in (40, 60)
    ]
    quantized = llga_fuser.quantize(net, iter(batches), config=config(flow))
    for n in (2, 5):
        batch = {"x": torch.randn(n, 8), "y": torch.randn(n, 8), "mask": torch.rand(n, 8)}
        with torch.no_grad():
            result, expected = quantized(**batch), net(**batch)
        assert sqnr(result["z"], expected["z"]) > 25
    tuples = [(torch.randn(40, 8), torch.randn(40, 8))]
    quantized = llga_fuser.quantize(net, tuples, config=config(flow))
    fast = llga_fuser.compile(quantized, {"x": tuples[0][0], "y": tuples[0][1]})
    x, y = tuples[0]
    with torch.no_grad():
        assert sqnr(fast(x=x, y=y)["z"], net(x, y)["z"]) > 25


@pytest.mark.parametrize("flow", FLOWS)
def test_the_original_is_not_changed(flow: str) -> None:
    net, x = example("residual")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        expected = net(x)
    batch = x.clone()
    names = [n for n, _ in net.named_modules()]
    llga_fuser.quantize(net, [batch], config=config(flow))
    assert torch.equal(batch, x)
    assert [n for n, _ in net.named_modules()] == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    with torch.no_grad():
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("flow", FLOWS)
def test_copy_and_save(flow: str) -> None:
    net, x = example("residual")
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    with torch.no_grad():
        expected = quantized(x)
        twin = copy.deepcopy(quantized)
        del quantized
        assert torch.equal(twin(x), expected)
    for made in (frozen(twin, x), llga_fuser.compile(twin, x)):
        with torch.no_grad():
            result = made(x)
            file = io.BytesIO()
            torch.jit.save(made, file)
            file.seek(0)
            again = torch.jit.load(file)
            assert sqnr(again(x), result) > 40
            weights = list(again.graph.findAllNodes("aten::dequantize"))
            assert len(weights) == 4 + 4


def test_compiled_holds_8_bit_weights() -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    x = torch.randn(4, 512)
    made = frozen(llga_fuser.quantize(net, [x]), x)
    file = io.BytesIO()
    torch.jit.save(made, file)
    assert file.tell() < 2 * 512 * 512 * 1.3  # bytes; in float32 four times as many


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", ["residual", "attention"])
def test_bf16(name: str, flow: str) -> None:
    net, x = example(name)
    quantized = llga_fuser.quantize(net, [x], config=config(flow))
    fast = llga_fuser.compile(quantized, x, dtype=torch.bfloat16)
    with torch.no_grad():
        assert sqnr(fast(x).float(), net(x)) > 25
        for _ in range(3):
            fast(x)
        found = fused_graph(fast, x)
    layers = [
        group for group in found.groups if group["aten::linear"] + group["aten::_convolution"]
    ]
    assert len(layers) == 4, str(found)
    for group in layers:  # of 8-bit values, without a cast in between
        assert group["aten::dequantize"] >= 2 and not group["aten::to"], str(found)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    net, x = example("branches")
    llga_fuser.quantize(net, [x, x], progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"quantize \[ +\d+ s\]: capture the graph", lines[0])
    steps = [line.split("]: ")[1] for line in lines]
    assert steps[2:4] == ["batch 1 of 2", "batch 2 of 2"]
    llga_fuser.quantize(net, [x], progress=False)
    llga_fuser.quantize(net, [x])  # not a terminal
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("name", "size", "least"),
    [
        ("resnet18", 64, 20.0),
        pytest.param("resnet50", 224, 20.0, marks=pytest.mark.slow),
        pytest.param("mobilenet_v2", 224, 10.0, marks=pytest.mark.slow),
    ],
)
def test_networks(name: str, size: int, least: float) -> None:
    """SQNR on inputs that were not used in calibration, with the whole range of 8 bits."""
    model = _models.build(name, size)
    batches = [model.inputs(4, 100 + i) for i in range(8)]
    quantized = llga_fuser.quantize(
        model.module, batches, config=QuantizationConfig(reduce_range=False)
    )
    x = model.inputs(8, 2000)
    with torch.no_grad():
        expected, result = model.module(*x), quantized(*x)
    assert sqnr(result, expected) >= least


def test_bert() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    _models.load_torchvision()
    from models.small_transformers import bert

    inner, inputs = bert("sdpa")

    class Named(nn.Module):
        """With names in the place of `*args`."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            return self.inner(ids, mask)

    net = Named().eval()
    quantized = llga_fuser.quantize(net, [inputs(i) for i in range(4)])
    with torch.no_grad():
        assert sqnr(quantized(*inputs(9)), net(*inputs(9))) > 25
        fast = llga_fuser.compile(quantized, inputs(0))
        ids = torch.randint(100, (5, 7))
        mask = torch.ones_like(ids)
        assert sqnr(fast(ids, mask), net(ids, mask)) > 20


def test_whole_attention_modules_are_taken_apart() -> None:
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    quantized = llga_fuser.quantize(net, [x])
    graph = frozen(quantized, x).graph
    assert len(graph.findAllNodes("aten::linear")) == 4
    with torch.no_grad():
        assert sqnr(quantized(x), net(x)) > 25


# ---------------------------------------------------------------------------------- others' modules


def test_qat() -> None:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.backend_config import get_onednn_backend_config
    from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_qat_fx

    backend = get_onednn_backend_config()
    net = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    x, labels = torch.randn(IMAGE), torch.tensor([1, 3])
    mapping = get_default_qat_qconfig_mapping("onednn")
    prepared = prepare_qat_fx(net.train(), mapping, (x,), backend_config=backend)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(prepared(x), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))
    assert losses[1] < losses[0]
    prepared.eval()
    with torch.no_grad():
        expected = prepared(x)  # with fake quantization
    converted = convert_to_reference_fx(prepared, backend_config=backend)
    fast = llga_fuser.compile(converted, x)
    assert sqnr(fast(x), expected) > 30
    assert len(fast.graph_for(x).findAllNodes("aten::relu")) <= 1


pt2e = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed (pip install llga_fuser[pt2e])",
)


def prepared_pt2e(net: nn.Module, x: Tensor, reduce_range: bool = False) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    settings = x86.get_default_x86_inductor_quantization_config(reduce_range=reduce_range)
    quantizer = x86.X86InductorQuantizer().set_global(settings)
    with torch.no_grad():
        return prepare_pt2e(torch.export.export(net, (x,), strict=False).module(), quantizer)


@pt2e
@pytest.mark.parametrize("reduce_range", [False, True])
@pytest.mark.parametrize("name", ["residual", "branches", "attention"])
def test_pt2e(name: str, reduce_range: bool) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    net, x = example(name)
    prepared = prepared_pt2e(net, x, reduce_range)
    with torch.no_grad():
        prepared(x)
        converted = convert_pt2e(prepared)
        wild = 3 * x  # beyond the calibrated range: clamped alike
        quantized = llga_fuser.from_pt2e(converted)
        for value in (x, wild):
            assert sqnr(quantized(value), converted(value)) > 38
        assert sqnr(quantized(x), net(x)) > 25
    graph = frozen(quantized, x).graph
    assert graph.findAllNodes("aten::quantize_per_tensor")
    assert "quantized_decomposed" not in str(graph)
    kinds = [
        n.output().type().scalarType()
        for n in graph.findAllNodes("prim::Constant")
        if n.output().type().kind() == "TensorType"
    ]
    floats = [n for n in graph.findAllNodes("prim::Constant") if _is_large_float(n)]
    assert kinds and not floats
    fast = llga_fuser.compile(quantized, x)
    assert sqnr(fast(x), quantized(x)) > 15
    twin = copy.deepcopy(quantized)
    with torch.no_grad():
        assert torch.equal(twin(x), quantized(x))


def _is_large_float(node: Any) -> bool:
    value = node.output().toIValue()
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 1


@pt2e
def test_pt2e_refusals() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    net, x = example("branches")
    prepared = prepared_pt2e(net, x)
    with pytest.raises(ValueError, match=r"observer.*convert_pt2e"):
        llga_fuser.from_pt2e(prepared)
    with torch.no_grad():
        prepared(x)
        converted = convert_pt2e(prepared)
    for node in converted.graph.nodes:
        if "quantize_per_tensor" in str(node.target):
            node.args = (node.args[0], float("nan"), *node.args[2:])
    with pytest.raises(ValueError, match=r"scale of .* is nan.*has the prepared module seen"):
        llga_fuser.from_pt2e(converted)


def test_from_pt2e_refuses_other_things() -> None:
    with pytest.raises(TypeError, match=r"converted: expected the GraphModule .* got Linear"):
        llga_fuser.from_pt2e(nn.Linear(2, 2))
    exported = torch.export.export(nn.Linear(2, 2).eval(), (torch.randn(3, 2),))
    with pytest.raises(ValueError, match="converted: has no quantized_decomposed operator"):
        llga_fuser.from_pt2e(exported)


# ----------------------------------------------------------------------------------------- refusals


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.a(x) if x.sum() > 0 else self.b(x)


LINEAR = nn.Linear(4, 4).eval()
X = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("net", "batches", "more", "error", "words"),
    [
        (LINEAR, X, {}, TypeError, "calibration_batches: .*got Tensor; put the one batch into a"),
        (LINEAR, {"input": X}, {}, TypeError, "calibration_batches: .*got dict; put"),
        (LINEAR, (X, X), {}, TypeError, "calibration_batches: .*tuple of tensors.*list"),
        (LINEAR, 3, {}, TypeError, "calibration_batches: expected an iterable.*got int"),
        (LINEAR, None, {}, TypeError, "calibration_batches: expected an iterable.*got NoneType"),
        (LINEAR, [], {}, ValueError, "calibration_batches: expected at least one batch, got none"),
        (LINEAR, iter([]), {}, ValueError, "calibration_batches: expected at least one batch"),
        (LINEAR, [[X]], {}, TypeError, r"calibration_batches\[0\]: .*got list; make it a tuple"),
        (LINEAR, [X, 1], {}, TypeError, r"calibration_batches\[1\]: .*got int"),
        (
            LINEAR,
            [(X, X)],
            {},
            TypeError,
            r"calibration_batches\[0\]: does not fit.*\(input: ",
        ),
        (LINEAR, [{"y": X}], {}, TypeError, r"calibration_batches\[0\]: does not fit"),
        (LINEAR, [X * torch.inf], {}, ValueError, "calibration_batches: the value of .*infinite"),
        (nn.Linear(4, 4), [X], {}, ValueError, "net: Linear is in training mode, expected eval"),
        (LINEAR.forward, [X], {}, TypeError, "net: expected an nn.Module, got method"),
        (nn.Linear, [X], {}, TypeError, "net: expected an nn.Module, got the class Linear"),
        (torch.jit.trace(LINEAR, X), [X], {}, TypeError, "net: .*not scripted yet"),
        (copy.deepcopy(LINEAR).bfloat16(), [X], {}, ValueError, "net: expected float32.*weight"),
        (nn.ReLU().eval(), [X], {}, ValueError, "net: ReLU has nothing to quantize"),
        (Branching().eval(), [X], {}, RuntimeError, "net: could not find the graph of Branching"),
        (LINEAR, [X], {"config": {}}, TypeError, "config: expected a llga_fuser.Quant.* got dict"),
        (LINEAR, [X], {"progress": 1}, TypeError, "progress: expected a bool or None, got int"),
        (
            LINEAR,
            [X],
            {"config": QuantizationConfig(keep_float=("layer9",))},
            ValueError,
            "config.keep_float: Linear has no module 'layer9'",
        ),
    ],
)
def test_refusals(net: Any, batches: Any, more: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        llga_fuser.quantize(net, batches, **more)


def test_training_mode_of_a_part() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout())).eval()
    net[1][0].train()  # type: ignore[index]
    with pytest.raises(ValueError, match=r"training mode \(in its part '1.0'\)"):
        llga_fuser.quantize(net, [X])


def test_batches_must_name_the_same_arguments() -> None:
    net = Two().eval()
    batches = [(X.repeat(1, 2), X.repeat(1, 2)), (X.repeat(1, 2), X.repeat(1, 2), 2.0)]
    with pytest.raises(
        TypeError, match=r"calibration_batches\[1\]: .* first batch \(x, y\), got x, y, s"
    ):
        llga_fuser.quantize(net, batches)


def test_untraceable_part_can_stay_in_float() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Branching(), nn.Linear(4, 4)).eval()
    quantized = llga_fuser.quantize(net, [X], config=QuantizationConfig(keep_float=(Branching,)))
    with torch.no_grad():
        assert sqnr(quantized(X), net(X)) > 25


def test_an_observer_that_saw_nothing() -> None:
    from llga_fuser._quantize.placement import Observe, replace_observers

    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    graph_module.add_module("watch", Observe(HistogramObserver(), "x (linear)", True))
    node = next(n for n in graph_module.graph.nodes if n.op == "call_module")
    with graph_module.graph.inserting_before(node):
        watched = graph_module.graph.call_module("watch", (node.args[0],))
    node.args = (watched,)
    with pytest.raises(RuntimeError, match=r"no batch has reached x \(linear\)"):
        replace_observers(graph_module, quantize_per_tensor)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"observer": "mean"}, ValueError, "observer: expected one of 'histogram', 'minmax', got"),
        ({"activation_dtype": torch.int8}, ValueError, "activation_dtype: .*torch.qint8, got"),
        ({"activation_scheme": 1}, ValueError, "activation_scheme: expected one of 'affine'"),
        ({"weight_granularity": None}, ValueError, "weight_granularity: expected one of"),
        ({"reduce_range": 1}, ValueError, "reduce_range: expected one of None, True, False, got 1"),
        ({"capture": "script"}, ValueError, "capture: expected one of 'auto', 'fx', 'export'"),
        ({"keep_float": nn.Linear}, TypeError, "keep_float: expected a tuple.*got type"),
        ({"keep_float": (LINEAR,)}, TypeError, r"keep_float\[0\]: .*got Linear"),
        ({"keep_float": (int,)}, TypeError, r"keep_float\[0\]: .*got <class 'int'>"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        QuantizationConfig(**fields)


def test_importing_needs_no_torchao() -> None:
    """It is an optional extra; `from_pt2e` works on what torchao has made without it."""
    assert "llga_fuser._quantize.pt2e" in sys.modules
    source = importlib.util.find_spec("llga_fuser._quantize.pt2e")
    assert source is not None and source.origin is not None
    with open(source.origin, encoding="utf-8") as file:
        assert not re.search(r"^\s*(from|import) torchao", file.read(), re.MULTILINE)


BUILTINS = """
import torch, llga_fuser

def known():
    table = torch.jit._builtins._get_builtin_table()
    return {key: name for key, name in table.items() if name.startswith("quantized_decomposed")}

assert not known(), known()
assert "quantize" in dir(llga_fuser)
llga_fuser.quantize
packets = torch.ops.quantized_decomposed
for key, name in known().items():
    assert key == id(getattr(packets, name.split("::")[1])._op), name
print(len(known()))
"""


def test_no_builtin_function_is_left_behind() -> None:
    """Importing defines no operators; torch.ao's leave none of their replaced functions behind.

    TorchScript knows builtin functions by their id: with a stale one, scripting failed by chance.
    """
    command = [sys.executable, "-W", "ignore", "-c", BUILTINS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
