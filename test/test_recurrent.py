"""LSTM, GRU and plain recurrent layers, which our own kernel computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import llga_fuser
from util import (
    TOLERANCES,
    assert_same,
    autocast_bf16,
    check,
    expect,
    fused_graph,
    fuses,
    has_own_kernels,
    kernels_of,
    net,
    to_script,
)

pytestmark = pytest.mark.usefixtures("fuser", "few_threads")

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}


class Layers(NamedTuple):
    """Layers, and the sequences that they get: steps, sequences, inputs."""

    units: int
    size: tuple[int, int, int] = (7, 2, 12)
    layers: int = 1
    batch_first: bool = False
    bidirectional: bool = False
    bias: bool = True

    def options(self) -> dict[str, Any]:
        return {
            "num_layers": self.layers,
            "batch_first": self.batch_first,
            "bidirectional": self.bidirectional,
            "bias": self.bias,
        }

    def data(self) -> Tensor:
        steps, sequences, inputs = self.size
        rows = (sequences, steps) if self.batch_first else (steps, sequences)
        return torch.randn(*rows, inputs)


LAYERS = {
    "one": Layers(16),
    "batch_first": Layers(24, batch_first=True),
    "several": Layers(32, layers=3, batch_first=True),
    "both_directions": Layers(16, bidirectional=True),
    "several_in_both": Layers(40, (5, 3, 8), layers=2, bidirectional=True, batch_first=True),
    "no_bias": Layers(16, layers=2, bias=False),
    "part_of_a_vector": Layers(5, (4, 3, 3), layers=2, bidirectional=True),
    "one_unit": Layers(1, (3, 2, 1)),
    "one_step": Layers(32, (1, 4, 6), layers=2),
    "one_sequence": Layers(72, (9, 1, 17), batch_first=True),
    "many_sequences": Layers(19, (3, 29, 5), bidirectional=True),
    "chunks": Layers(150, (3, 53, 5)),
    "many_chunks": Layers(530, (2, 131, 4)),
    "several_threads": Layers(200, (6, 2, 30), layers=2),
    "both_on_threads": Layers(136, (6, 5, 30), bidirectional=True, batch_first=True),
}


def randomized(layers: nn.RNNBase) -> nn.RNNBase:
    """Biases that are not small, so that one in the wrong place is seen."""
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.5)
    return layers


def made(kind: str, case: Layers) -> nn.RNNBase:
    return randomized(KINDS[kind](case.size[2], case.units, **case.options())).eval()


def is_ours(m: nn.Module, *inputs: Tensor) -> bool:
    return any(name.startswith("llga_recurrent") for name in kernels_of(m, *inputs))


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", LAYERS)
def test_layers(case: str, kind: str, scripted: bool) -> None:
    """All that a layer gives, the states behind the last step included."""
    c = LAYERS[case]
    m = net("return self.l(x)", l=made(kind, c)).eval()
    check(m, [c.data()], scripted=scripted, fused=op(kind) if has_own_kernels() else "")
    assert is_ours(m, c.data()) == has_own_kernels()


def op(kind: str) -> str:
    return kind if kind in {"lstm", "gru"} else f"rnn_{kind}"


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["batch_first", "several_in_both", "part_of_a_vector"])
def test_layers_in_bfloat16(case: str, kind: str) -> None:
    c = LAYERS[case]
    m = net("return self.l(x)", l=made(kind, c)).eval()
    check(m, [c.data()], dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_given_states(kind: str) -> None:
    """Those before the first step come from the caller, who keeps them, in any order."""
    c = LAYERS["several_in_both"]
    layers = made(kind, c)
    h = torch.randn(3, 4, c.units).transpose(0, 1)
    if kind == "lstm":
        m = net("return self.l(x, (h, c))", "x, h, c", l=layers)
        check(m, [c.data(), h, torch.randn(4, 3, 2 * c.units)[..., ::2]])
    else:
        check(net("return self.l(x, h)", "x, h", l=layers), [c.data(), h])


@pytest.mark.parametrize("kind", KINDS)
def test_constant_states(kind: str) -> None:
    """As of a network for one sequence at a time, whose trace has them."""
    c = Layers(24, (5, 2, 12), layers=2, batch_first=True)
    code = (
        "return self.l(x, (self.h, self.h * 2))" if kind == "lstm" else "return self.l(x, self.h)"
    )
    h = torch.randn(2, 24, 2).transpose(1, 2)
    m = net(code, l=made(kind, c), h=h).eval()
    check(m, [c.data()], fused=op(kind) if has_own_kernels() else "")


def test_states_of_other_sizes_raise() -> None:
    """As in eager, whose error it is. Of an LSTM oneDNN would read what is not there."""
    code = "return torch.gru(x, h, [self.a, self.b], False, 1, 0.0, False, False, False)"
    m = net(code, "x, h", a=torch.randn(24, 6), b=torch.randn(24, 8)).eval()
    x = torch.randn(5, 3, 6)
    script = to_script(m, [x, torch.randn(1, 3, 8)])
    for _ in range(3):
        script(x, torch.randn(1, 3, 8))
    for fn in (m, script):
        with pytest.raises(RuntimeError):
            fn(x, torch.randn(1, 1, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "code",
    [
        "return self.l(x)[0]",
        "return self.l(x)[0][:, -1]",
        "y, h = self.l(x)\nreturn h",
        "y, h = self.l(x)\nreturn h[0] + h[1]",
        "y, h = self.l(x)\nreturn y, h[1]",
        "y, h = self.l(self.f(x))\nreturn torch.relu(self.g(y))",
        "return self.l(x)[0] + self.l(x * 2)[0]",
    ],
)
def test_parts_of_the_result(code: str, kind: str) -> None:
    c = Layers(24, (5, 3, 12), layers=2, batch_first=True)
    m = net(code, l=made(kind, c), f=nn.Linear(12, 12), g=nn.Linear(24, 9)).eval()
    check(m, [c.data()])


CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": nn.RNNCell,
    "relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}


STEPS = {
    "lstm": "for _ in range(3):\n    h, c = self.l(x, (h, c))\nreturn h, c",
    "gru": "for _ in range(3):\n    h = self.l(x, h)\nreturn h",
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("size", [(1, 12, 40), (3, 7, 5), (2, 30, 200)], ids=str)
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_single_steps(
    kind: str, size: tuple[int, int, int], bias: bool, dtype: torch.dtype
) -> None:
    """As scripted decoders have them in a loop, and a trace one by one."""
    sequences, inputs, units = size
    cell = randomized(CELLS[kind](inputs, units, bias=bias)).eval()
    states = [torch.randn(sequences, units) for _ in range(2 if kind == "lstm" else 1)]
    code = STEPS.get(kind, STEPS["gru"])
    m = net(code, "x, h, c" if kind == "lstm" else "x, h", l=cell).eval()
    data = [torch.randn(sequences, inputs), *states]
    ours = f"{op(kind)}_cell" if has_own_kernels() and dtype == torch.float32 else ""
    check(m, data, dtype=dtype, fused=f"traced_{ours}" if ours and kind in STEPS else "")
    check(m, data, dtype=dtype, scripted=True, fused=ours)
    code = "return self.l(x)[1]" if kind == "lstm" else "return self.l(x)"
    m = net(code, l=cell).eval()
    check(m, [torch.randn(inputs, sequences).t()], dtype=dtype, scripted=True)
    check(m, [data[0][0]], dtype=dtype, scripted=True)


@pytest.mark.parametrize("order", ["gaps", "transposed", "last_first", "expanded", "one_sequence"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_order_of_the_data(order: str, batch_first: bool) -> None:
    x = torch.randn(6, 3, 8)
    x = {
        "gaps": lambda: torch.randn(6, 3, 16)[..., ::2],
        "transposed": lambda: x.transpose(0, 1).contiguous().transpose(0, 1),
        "last_first": lambda: torch.randn(8, 3, 6).transpose(0, 2),
        "expanded": lambda: torch.randn(6, 1, 8).expand(6, 3, 8),
        "one_sequence": lambda: torch.randn(6, 2, 8)[:, :1],
    }[order]()
    for kind in ("lstm", "gru"):
        c = Layers(16, (6, 3, 8), batch_first=batch_first, layers=2)
        check(net("return self.l(x)", l=made(kind, c)), [x])


@pytest.mark.parametrize("kind", KINDS)
def test_other_sizes_later(kind: str) -> None:
    """Steps and sequences may change from call to call."""
    c = Layers(32, layers=2, batch_first=True, bidirectional=True)
    m = net("return self.l(x)", l=made(kind, c)).eval()
    script = to_script(m, [c.data()])
    for size in ((2, 7, 12), (1, 7, 12), (2, 1, 12), (5, 3, 12), (2, 7, 12)):
        x = torch.randn(size)
        for _ in range(3):
            assert_same(script(x), m(x), str(size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("of", ["data", "weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_special_values(of: str, value: float, kind: str) -> None:
    """They reach their sequence from their step on, or all, and become what they do in eager."""
    c = Layers(12, (5, 2, 8))
    layers = made(kind, c)
    x = c.data()
    if of == "data":
        x[2, 1, 3] = value
    else:
        with torch.no_grad():
            getattr(layers, of).view(-1)[5] = value
    check(net("return self.l(x)", l=layers), [x])


@pytest.mark.parametrize(
    ("code", "layers"),
    [
        ("self.l(x)", nn.LSTM(8, 16, proj_size=4)),
        ("self.l(x)", nn.LSTM(8, 16, 2, dropout=0.5)),
        ("torch.lstm(x, (h, h), [w, v], False, 1, 0.0, False, False, False)", None),
    ],
    ids=["projection", "dropout", "weights_of_the_call"],
)
def test_what_others_compute(code: str, layers: nn.Module | None) -> None:
    """Projections and weights that are no constants are PyTorch's; dropout does nothing."""
    if layers is not None:
        m = net(code, l=layers).eval()
        check(m, [torch.randn(3, 2, 8)])
        assert is_ours(m, torch.randn(3, 2, 8)) == (
            has_own_kernels() and "proj" not in repr(layers)
        )
    else:
        m = net(code, "x, h, w, v")
        inputs = torch.randn(3, 2, 8), torch.randn(1, 2, 4), torch.randn(16, 8), torch.randn(16, 4)
        check(m, inputs, scripted=True, outside="lstm")


def test_packed_sequences_are_computed_by_pytorch() -> None:
    layers = nn.LSTM(6, 8, batch_first=True)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = layers

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([5, 3])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.l(packed)[0], batch_first=True)[0]

    check(Packed().eval(), [torch.randn(2, 5, 6)])


def test_a_sequence_without_a_batch() -> None:
    m = net("return self.l(x)", l=made("lstm", Layers(16))).eval()
    check(m, [torch.randn(7, 12)])


def test_training_gives_gradients() -> None:
    """A call that wants gradients is PyTorch's."""
    m = net("return self.l(x)[0]", l=made("gru", Layers(16)))
    script = torch.jit.trace(m, torch.randn(7, 2, 12))
    x = torch.randn(7, 2, 12, requires_grad=True)
    for _ in range(3):
        x.grad = None
        script(x).sum().backward()
        expected = torch.autograd.grad(m(x).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)


@pytest.mark.usefixtures("all_threads")
def test_threads_that_call_at_once() -> None:
    """Each call has memory of its own."""
    from concurrent.futures import ThreadPoolExecutor

    c = Layers(96, (20, 2, 16), layers=2, batch_first=True)
    m = net("return self.l(x)[0]", l=made("lstm", c)).eval()
    script = to_script(m, [c.data()])
    inputs = [c.data() for _ in range(8)]
    with torch.no_grad():
        expected = [m(x) for x in inputs]
        for x in inputs[:3]:
            script(x)
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                for result, want in zip(pool.map(script, inputs), expected, strict=True):
                    assert_same(result, want)


def test_compiled_with_released_weights() -> None:
    c = Layers(32, layers=2, batch_first=True)
    m = net("return self.l(x)[0]", l=made("lstm", c)).eval()
    x = c.data()
    compiled = llga_fuser.compile(m, x, release_weights=True)
    with torch.no_grad():
        for y in (x, torch.randn(1, 4, 12), x):
            assert_same(compiled(y), m(y))


def frozen_under_autocast(m: nn.Module, *inputs: Tensor) -> Any:
    """Frozen outside, a trace of an LSTM raises in plain TorchScript on some processors."""
    with autocast_bf16():
        return torch.jit.freeze(torch.jit.trace(m, inputs, check_trace=False))


def test_autocast() -> None:
    """Eager's autocast computes in bfloat16; what the fuser does agrees with it."""
    if not fuses(torch.bfloat16):
        pytest.skip("eager's autocast has no LSTM on this processor")
    c = Layers(24, layers=2, batch_first=True)
    m = net("return self.g(self.l(x)[0])", l=made("lstm", c), g=nn.Linear(24, 8)).eval()
    x = c.data()
    with torch.no_grad():
        script = frozen_under_autocast(m, x)
        with autocast_bf16():
            want = m(x)
        for _ in range(4):
            assert_same(script(x), want, tol=TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("inside", [True, False], ids=["frozen_under_it", "frozen_outside"])
@pytest.mark.parametrize("kind", STEPS)
def test_traced_steps_under_autocast(kind: str, inside: bool) -> None:
    """An LSTM's and a GRU's states are float32 then, and all is computed in that."""
    cell = randomized(CELLS[kind](12, 40)).eval()
    states = [torch.randn(3, 40) for _ in range(2 if kind == "lstm" else 1)]
    m = net(STEPS.get(kind, STEPS["gru"]), "x, h, c=None", l=cell).eval()
    x = torch.randn(3, 12)
    with torch.no_grad():
        script = (
            frozen_under_autocast(m, x, *states)
            if inside
            else to_script(m, [x, *states], autocast=True)
        )
        with autocast_bf16():
            want = m(x, *states)
        for _ in range(4):
            assert_same(script(x, *states), want, tol=TOLERANCES[torch.bfloat16])
        found = fused_graph(script, x, *states)
    if fuses(torch.bfloat16) and has_own_kernels():
        expect(found, fused=f"traced_{op(kind)}_cell")


@pytest.mark.parametrize(
    "code",
    [
        "h, c = self.l(x, (h, c))\nx.add_(1)\nh, c = self.l(x, (h, c))\nreturn h, c, x",
        "d = c\nh, c = self.l(x, (h, c))\nd.add_(1)\nreturn h, c, d",
        "h, c = self.l(x, (h, c))\nc.mul_(2)\nreturn h, c",
        (
            "y = torch.zeros(3, 2, 40)\n"
            "for i in range(2):\n    h, c = self.l(x, (h, c))\n    y[:, i] = h\nreturn y, c"
        ),
        "h, c = self.l(x, (c, c))\nreturn h + self.l(x, (h, c))[0]",
    ],
    ids=["data", "state_before", "state_behind", "collected", "one_state"],
)
def test_traced_steps_beside_writes(code: str) -> None:
    cell = randomized(nn.LSTMCell(12, 40)).eval()
    m = net(code, "x, h, c", l=cell).eval()
    check(m, [torch.randn(3, 12), torch.randn(3, 40), torch.randn(3, 40)], fallbacks=True)


def test_traced_steps_of_other_sizes_later() -> None:
    m = net(STEPS["lstm"], "x, h, c", l=randomized(nn.LSTMCell(12, 40))).eval()
    make = [torch.randn(n, size) for n in (3, 1, 8) for size in (12, 40, 40)]
    script = to_script(m, make[:3])
    with torch.no_grad():
        for i in (0, 3, 6, 0):
            assert_same(script(*make[i : i + 3]), m(*make[i : i + 3]))


def test_traced_steps_with_weights_that_are_no_constants() -> None:
    cell = randomized(nn.LSTMCell(12, 40))
    m = net(STEPS["lstm"], "x, h, c", l=cell).eval()
    check(m, [torch.randn(3, 12), torch.randn(3, 40), torch.randn(3, 40)], freeze=False)


def test_a_sum_of_layers_that_is_read_elsewhere_is_no_step() -> None:
    """What a plain recurrent cell is made of, and more."""
    m = net(
        "y = self.a(x).add_(self.b(h))\nreturn torch.tanh(y), y",
        "x, h",
        a=nn.Linear(12, 40),
        b=nn.Linear(40, 40),
    ).eval()
    check(m, [torch.randn(3, 12), torch.randn(3, 40)])


def test_a_step_that_begins_in_front_of_its_loop() -> None:
    """The layer of the data is in another block than the rest of it."""
    code = (
        "y = F.linear(x, self.l.weight_ih, self.l.bias_ih)\n"
        "for _ in range(1):\n"
        "    g = F.linear(h, self.l.weight_hh, self.l.bias_hh).add_(y)\n"
        "    i, f, c2, o = g.unsafe_chunk(4, 1)\n"
        "    c = torch.mul(f.sigmoid_(), c).add_(torch.mul(i.sigmoid_(), c2.tanh_()))\n"
        "    h = torch.mul(o.sigmoid_(), c.tanh())\n"
        "return h, c"
    )
    m = net(code, "x, h, c", l=randomized(nn.LSTMCell(12, 40))).eval()
    data = [torch.randn(3, 12), torch.randn(3, 40), torch.randn(3, 40)]
    check(m, data, fallbacks=True)
    m = net(code.replace("range(1)", "range(n)"), "x, h, c, n: int", l=m.l).eval()
    check(m, [*data, 2], scripted=True, fallbacks=True)
