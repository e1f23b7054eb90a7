"""Bias correction: what rounding adds to the mean of a layer's output is taken off its bias.

Behind a ReLU inputs are positive, so the errors of rounded weights do not cancel: each output
channel moves by a constant, which the next layers see as a signal. Layer after layer, in the order
of execution, the mean of each channel is compared with the float network's on the same batches
(Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from llga_fuser._quantize.constants import attribute
from llga_fuser._quantize.ops import Kind, describe, kind_of

__all__ = ["ChannelMeans", "correct_biases"]

_BIAS = 2  # the position of biases, the same for all functions that have them


class ChannelMeans:
    """Of the outputs of some operators of a float network: a row for each sample.

    Args:
        net: whose operators are looked at.
        layers: names of the nodes that have weights.
    """

    def __init__(self, net: GraphModule, layers: Iterable[str]) -> None:
        self.rows: dict[str, list[Tensor]] = {name: [] for name in layers}
        self._net = net

    def run(self, arguments: dict[str, Any]) -> Any:
        """Calls the network with one batch; the result is its result."""
        interpreter = _Recorder(self._net, self._record)
        return interpreter.run(*arguments.values())

    def _record(self, node: Node, output: Tensor, axis: int) -> None:
        if node.name in self.rows:
            self.rows[node.name].append(_means(output, axis))


class _Recorder(Interpreter):
    """Shows the outputs of weighted operators, as they are before a fused activation."""

    def __init__(self, net: GraphModule, show: Callable[[Node, Tensor, int], None]) -> None:
        super().__init__(net)
        self._modules = dict(net.named_modules(remove_duplicate=False))
        self._show = show

    def run_node(self, n: Node) -> Any:
        kind = kind_of(n, self._modules)
        if kind not in (Kind.CONVOLUTION, Kind.LINEAR):
            return super().run_node(n)
        spatial = int(describe(n, self._modules)[-2]) if kind is Kind.CONVOLUTION else 0
        axis = -1 - spatial  # of channels, also where there is no axis of samples
        if n.op != "call_module":
            output = super().run_node(n)
            self._show(n, output, axis)
            return output
        layer = _layer(self._modules[str(n.target)])
        handle = layer.register_forward_hook(lambda _, __, output: self._show(n, output, axis))
        try:
            return super().run_node(n)
        finally:
            handle.remove()


def correct_biases(net: GraphModule, expected: ChannelMeans, batches: list[dict[str, Any]]) -> None:
    """Changes the biases of a quantized network, and adds them where there are none.

    Args:
        net: made of the network `expected` comes from, with the same names of nodes.
        expected: the float means on `batches`.
        batches: run side by side, so that each layer sees inputs that are corrected already.
    """
    seen: list[Tensor] = []

    def show(_: Node, output: Tensor, axis: int) -> None:
        seen.append(_means(output, axis))

    runs = [_Recorder(net, show) for _ in batches]
    for run, arguments in zip(runs, batches, strict=True):
        run.env = {}
        run.args_iter = iter(net.graph.process_inputs(*arguments.values()))
    changed = False
    calls = Counter(n.target for n in net.graph.nodes if n.op == "call_module")
    for node in list(net.graph.nodes):
        if node.op == "output":
            break
        # A module that is called twice has one bias for two means.
        rows = expected.rows.get(node.name) if calls[node.target] < 2 else None
        seen.clear()
        for run in runs:
            run.env[node] = run.run_node(node)
        if rows and len(seen) == len(rows):
            shift = _shift(torch.cat(rows) - torch.cat(seen))
            if shift is not None:
                added = _add_to_bias(net, node, shift)
                changed = True
                for run in runs:
                    if added is not None:
                        run.env[added] = run.run_node(added)
                    run.env[node] = run.run_node(node)
        for run in runs:
            for dead in run.user_to_last_uses.get(node, ()):
                run.env.pop(dead, None)
    if changed:
        net.graph.eliminate_dead_code()
        net.recompile()


def _layer(module: nn.Module) -> nn.Module:
    """The one with the weights, of a module fused with what follows."""
    return module[0] if isinstance(module, nn.Sequential) else module


def _means(output: Tensor, axis: int) -> Tensor:
    """A row for each sample, a column for each channel."""
    moved = output.detach().float().movedim(axis, -1)
    rows = len(moved) if moved.dim() > 1 else 1
    return moved.reshape(rows, -1, moved.shape[-1]).mean(1)


def _shift(differences: Tensor) -> Tensor | None:
    """The mean of the rows, shrunk by what it owes to chance with so few samples (James, Stein)."""
    count = len(differences)
    if count < 2:
        return None
    shift = differences.mean(0)
    chance = differences.var(0).sum() / count
    kept = float((1 - chance / shift.square().sum().clamp_min(1e-30)).clamp_min(0.0))
    return shift * kept if kept > 0 else None


def _add_to_bias(net: GraphModule, node: Node, shift: Tensor) -> Node | None:
    """The node that reads a bias from now on, if that is a new one."""
    if node.op == "call_module":
        layer: Any = _layer(dict(net.named_modules(remove_duplicate=False))[str(node.target)])
        bias = shift if layer.bias is None else layer.bias.detach() + shift
        layer.bias = nn.Parameter(bias, requires_grad=False)
        return None
    old = node.args[_BIAS] if len(node.args) > _BIAS else node.kwargs.get("bias")
    value: Any = attribute(net, str(old.target)) if isinstance(old, Node) else None
    name = f"_bias_{node.name}"
    net.register_buffer(name, shift if value is None else value.detach() + shift)
    with net.graph.inserting_before(node):
        read = net.graph.get_attr(name)
    node.args = (*node.args[:_BIAS], read, *node.args[_BIAS + 1 :])
    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "bias"}
    return read
