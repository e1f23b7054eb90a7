"""Which values become 8 bits wide, and the observers that measure them.

Demand decides. Convolutions, linear layers, matrix products and attention want 8-bit inputs; pools,
views and concatenations pass that wish on to what they read; everything else computes in float and
wishes nothing. So the activation behind a convolution stays between it and the rounding, where
oneDNN computes it as a post-operation, and the model's result is not rounded:

    conv -> relu -> Q -> DQ -> max_pool -> Q -> DQ -> conv        (Q: quantize, DQ: dequantize)

A residual sum is added by the convolution that computes one of its operands. The other operand is
read from memory, and so in 8 bits:

    conv --------------------> add -> relu -> Q
    ... -> Q -> DQ ------------^

So are both operands of a sum behind a squeeze and excitation, whose product is in 8 bits as well.

Sums after linear layers (transformers) are read in float: what little time that takes buys much of
the accuracy, as all later layers see the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.ao.quantization import FixedQParamsObserver, HistogramObserver, ObserverBase
from torch.fx import GraphModule, Node

from llga_fuser._quantize.config import QuantizationConfig
from llga_fuser._quantize.ops import CONCATENATIONS, IDENTITIES, TUPLES, Kind, describe, kind_of

__all__ = ["Observe", "Places", "find_places", "insert_observers", "replace_observers"]


@dataclass
class Places:
    """Values to quantize, and who reads them quantized."""

    # Values in groups of equal scale and zero point.
    groups: list[list[Node]] = field(default_factory=list)
    # By value: the operators that read it in 8 bits.
    readers: dict[Node, list[Node]] = field(default_factory=dict)
    # Values that a matrix product reads as its second operand.
    second: set[Node] = field(default_factory=set)


class Observe(nn.Module):
    """Shows a value to an observer; several of them may share one."""

    def __init__(self, observer: ObserverBase, place: str, active: bool) -> None:
        super().__init__()
        self.observer = observer
        self.place = place
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        if self.active:
            value = x.detach().float()
            if not value.isfinite().all():
                raise ValueError(
                    f"calibration_batches: the value of {self.place} has NaN or infinite elements"
                )
            self.observer(value)
        return x


def find_places(
    graph: torch.fx.Graph,
    modules: Mapping[str, nn.Module],
    is_quantized: Callable[[Node], bool],
) -> Places:
    """Goes through the graph from its end to its begin, from who reads to what is read.

    Args:
        graph: of float operators.
        modules: by name, those that `graph` calls.
        is_quantized: whether an operator that could have 8-bit inputs and weights is to have them.
    """
    kinds = {n: kind_of(n, modules) for n in graph.nodes}
    names = {n: describe(n, modules) for n in graph.nodes}
    order = {n: i for i, n in enumerate(graph.nodes)}
    wanted: set[Node] = set()
    second: set[Node] = set()
    root: dict[Node, Node] = {}  # union-find of values with equal parameters
    demands: dict[Node, list[Node]] = {}

    def find(node: Node) -> Node:
        while root.setdefault(node, node) is not node:
            node = root[node]
        return node

    def fused_operand(node: Node) -> Node | None:
        return _fused_operand(node, kinds, names, order, is_quantized)

    def demand(value: object, reader: Node) -> None:
        if isinstance(value, Node) and value.op != "get_attr":
            wanted.add(value)
            demands.setdefault(value, []).append(reader)

    for node in reversed(graph.nodes):
        kind = kinds[node]
        inputs = [a for a in node.args if isinstance(a, Node)]
        if kind in (Kind.CONVOLUTION, Kind.LINEAR) and is_quantized(node):
            demand(node.args[0], node)
            # torch.ao's fused module of convolution and sum
            if node.op == "call_module" and len(inputs) > 1:
                demand(inputs[1], node)
        elif kind is Kind.MATMUL and is_quantized(node) and _multiplies_activations(inputs):
            demand(inputs[0], node)
            demand(inputs[1], node)
            second.add(inputs[1])
        elif kind is Kind.ATTENTION and is_quantized(node):
            for value in _operands(node):
                demand(value, node)
        elif kind is Kind.ADD and is_quantized(node) and _is_plain_sum(node):
            fused = fused_operand(node)
            if fused is not None:
                demand(next(i for i in inputs if i is not fused), node)
            elif _is_rounded(node, kinds, wanted) and any(
                _is_gated(i, kinds, names) for i in inputs
            ):
                for value in inputs:
                    demand(value, node)
        elif kind is Kind.SAME_RANGE and node in wanted:
            if names[node] == "getitem" and inputs and kinds[inputs[0]] is Kind.OTHER:
                continue  # maybe of a tuple
            for value in _concatenated(node) if names[node] in CONCATENATIONS else inputs[:1]:
                demand(value, node)
                if value in wanted:
                    root[find(value)] = find(node)

    # Sums and functions of one value take what is there in 8 bits anyway.
    residual = {n for n in graph.nodes if kinds[n] is Kind.ADD and fused_operand(n) is not None}
    places = Places()
    groups: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node not in wanted:
            continue
        if names[node] not in TUPLES:
            also = (u for u in node.users if kinds[u] is Kind.ELEMENTWISE or u in residual)
            places.readers[node] = list(dict.fromkeys([*demands[node], *also]))
        groups.setdefault(find(node), []).append(node)
    places.groups = list(groups.values())
    second_roots = {find(n) for n in second if n in wanted}
    places.second = {n for n in wanted if find(n) in second_roots}
    return places


def _multiplies_activations(inputs: list[Node]) -> bool:
    """Rather than a constant, which stays in float, and so the product does."""
    return len(inputs) == 2 and all(i.op != "get_attr" for i in inputs)


def _concatenated(node: Node) -> Iterable[object]:
    first = node.args[0] if node.args else node.kwargs.get("tensors", ())
    return first if isinstance(first, (list, tuple)) else ()


def _operands(attention: Node) -> list[object]:
    """Query, key and value."""
    names = ("query", "key", "value")
    given = attention.args[: len(names)]
    return [*given, *(attention.kwargs.get(name) for name in names[len(given) :])]


def _is_plain_sum(node: Node) -> bool:
    """Of two different values, without a factor."""
    operands = node.args[:2]
    return (
        len(operands) == 2
        and all(isinstance(a, Node) for a in operands)
        and operands[0] is not operands[1]
        and bool(node.kwargs.get("alpha", 1) == 1)
        and len(node.args) == 2
    )


def _is_rounded(node: Node, kinds: Mapping[Node, Kind], wanted: set[Node]) -> bool:
    """Whether it, or a function of it alone, is wanted in 8 bits."""
    return node in wanted or any(
        kinds[user] is Kind.ELEMENTWISE and len(user.all_input_nodes) == 1 and user in wanted
        for user in node.users
    )


def _is_gated(node: Node, kinds: Mapping[Node, Kind], names: Mapping[Node, str]) -> bool:
    """Whether it is a product with a gate, as a squeeze and excitation gives."""
    inputs = node.all_input_nodes
    return (
        names[node] in ("mul", "imul")
        and len(inputs) == 2
        and any(kinds[i] is Kind.UNIT_RANGE or names[i] == "hardsigmoid" for i in inputs)
    )


def _fused_operand(
    node: Node,
    kinds: Mapping[Node, Kind],
    names: Mapping[Node, str],
    order: Mapping[Node, int],
    is_quantized: Callable[[Node], bool],
) -> Node | None:
    """The operand of a sum that an 8-bit convolution computes last before it, for it alone."""
    if kinds.get(node) is not Kind.ADD or not _is_plain_sum(node):
        return None
    operands = [a for a in node.args if isinstance(a, Node)]
    for operand in sorted(operands, key=lambda n: -order[n]):
        value = operand
        while len(value.users) == 1 and (
            kinds[value] is Kind.ELEMENTWISE or names[value] in IDENTITIES
        ):
            inputs = value.all_input_nodes
            if len(inputs) != 1:
                break
            value = inputs[0]
        convolution = kinds[value] is Kind.CONVOLUTION and is_quantized(value)
        if convolution and len(value.users) == 1:
            return operand
    return None


# ---------------------------------------------------------------------------------------- observers


def insert_observers(
    net: GraphModule, places: Places, config: QuantizationConfig, modules: Mapping[str, nn.Module]
) -> list[Observe]:
    """Puts an `Observe` behind each value, and the readers behind it; returns them."""
    made: list[Observe] = []
    for group in places.groups:
        observer = _observer(group, places, config, modules)
        members = set(group)
        for value in group:
            if value not in places.readers:
                continue
            passed_on = kind_of(value, modules) is Kind.SAME_RANGE
            active = not passed_on or not members.intersection(value.all_input_nodes)
            active = active and not isinstance(observer, FixedQParamsObserver)
            observe = Observe(observer, f"{value.name} ({describe(value, modules)})", active)
            name = f"_observe_{len(made)}"
            while hasattr(net, name):
                name += "_"
            net.add_module(name, observe)
            made.append(observe)
            with net.graph.inserting_after(value):
                node = net.graph.call_module(name, (value,))
            for reader in places.readers[value]:
                reader.replace_input_with(value, node)
    net.graph.lint()
    net.recompile()
    return made


def _observer(
    group: list[Node],
    places: Places,
    config: QuantizationConfig,
    modules: Mapping[str, nn.Module],
) -> ObserverBase:
    second = not places.second.isdisjoint(group)
    observer = config.activation_observer(second_operand=second)
    sources = [n for n in group if kind_of(n, modules) is not Kind.SAME_RANGE]
    if sources and all(kind_of(n, modules) is Kind.UNIT_RANGE for n in sources):
        # From 0 to 1 by definition: nothing to measure.
        affine = observer.qscheme == torch.per_tensor_affine
        low, high = int(observer.quant_min), int(observer.quant_max)
        unsigned = observer.dtype == torch.quint8
        zero = low if affine else (low + high + 1) // 2 if unsigned else 0
        return FixedQParamsObserver(
            scale=1.0 / (high - zero),
            zero_point=zero,
            dtype=observer.dtype,
            qscheme=observer.qscheme,
            quant_min=low,
            quant_max=high,
        )
    return observer


def replace_observers(
    net: GraphModule, quantize: Callable[[Tensor, float, int, torch.dtype], Tensor]
) -> None:
    """Each `Observe` becomes quantize and dequantize, with constants.

    Raises:
        RuntimeError: an observer has seen no value; the message names the operator.
    """
    parameters: dict[ObserverBase, tuple[float, int]] = {}
    modules = dict(net.named_modules(remove_duplicate=False))
    for node in list(net.graph.nodes):
        observe = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(observe, Observe):
            continue
        if observe.observer not in parameters:
            parameters[observe.observer] = _parameters(observe)
        scale, zero_point = parameters[observe.observer]
        with net.graph.inserting_before(node):
            args = (node.args[0], scale, zero_point, observe.observer.dtype)
            quantized = net.graph.call_function(quantize, args)
            result = net.graph.call_method("dequantize", (quantized,))
        node.replace_all_uses_with(result)
        net.graph.erase_node(node)
        net.delete_submodule(str(node.target))
    net.graph.lint()
    net.recompile()


def _parameters(observe: Observe) -> tuple[float, int]:
    observer = observe.observer
    if not isinstance(observer, FixedQParamsObserver):
        seen = isinstance(observer.min_val, Tensor) and bool(observer.min_val.isfinite().all())
        if not seen:
            raise RuntimeError(
                f"calibration_batches: no batch has reached {observe.place}, whose range is "
                "needed; pass batches that run all branches, or keep its module in float"
            )
    if isinstance(observer, HistogramObserver) and bool(observer.min_val == observer.max_val):
        # A constant: nothing to search, and its histogram has one bin only.
        low, high = observer.min_val.clamp(max=0.0), observer.max_val.clamp(min=0.0)
        scale, zero_point = observer._calculate_qparams(low, high)
    else:
        scale, zero_point = observer.calculate_qparams()
    return float(scale), int(zero_point)
