"""Symbolic tracing, and torch.ao's FX flow with the oneDNN backend's configuration."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import ObserverBase, QConfig, QConfigMapping
from torch.ao.quantization.backend_config import BackendConfig, get_onednn_backend_config
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.fx.tracer import QuantizationTracer
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_fx
from torch.fx import Graph, GraphModule, Node

from llga_fuser._quantize.batch_norms import fold_batch_norms
from llga_fuser._quantize.config import QuantizationConfig
from llga_fuser._quantize.ops import (
    Kind,
    constants_of,
    kind_of,
    use_linear_layers,
    use_results_of_in_place_ops,
)
from llga_fuser._quantize.windows import take_windows_apart

__all__ = ["WHOLE", "FxFlow", "pads"]

_TRANSPOSED: tuple[Callable[..., Any], ...] = (
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
)
# Modules that symbolic tracing leaves whole, and so in float, but `torch.export` takes apart.
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def pads(module: nn.Module) -> bool:
    """Whether a convolution repeats or mirrors its input at the borders."""
    return getattr(module, "padding_mode", "zeros") != "zeros"


class FxFlow:
    """A copy of a module on its way to 8 bits.

    torch.ao's part is: folding batch norms, observers of weights, and modules that quantize and
    dequantize their weights. Its observers of activations are removed; `placement` puts others.
    """

    def __init__(
        self, net: nn.Module, arguments: dict[str, Any], config: QuantizationConfig
    ) -> None:
        # torch.ao's reference modules know no padding but zeros.
        names = [*config.names_in_float(net), *(n for n, m in net.named_modules() if pads(m))]
        traced = _trace(net, arguments, names)
        _drop_assertions(traced)
        use_results_of_in_place_ops(traced)
        fold_batch_norms(traced)
        take_windows_apart(traced, config.function_in_float)
        use_linear_layers(traced, config.function_in_float)
        names += _called_with_constants(traced)
        custom = PrepareCustomConfig().set_non_traceable_module_names(names)
        self.net: GraphModule = prepare_fx(
            traced, _mapping(config, names), (), custom, backend_config=_backend()
        )
        attributes = self.net.meta["_observed_graph_module_attrs"]
        self._observed: set[str] = attributes.observed_node_names
        self._config = config
        self._modules = dict(self.net.named_modules(remove_duplicate=False))
        self._remove_observers_of_activations()

    def modules(self) -> dict[str, nn.Module]:
        """Those that the graph calls, by name."""
        return self._modules

    def is_quantized(self, node: Node) -> bool:
        """Whether an operator that could have 8-bit inputs (and weights) is to have them."""
        if self._config.function_in_float(node):
            return False
        modules = self.modules()
        kind = kind_of(node, modules)
        if kind in (Kind.MATMUL, Kind.ATTENTION):
            return not self._config.reduces_range()
        if kind is Kind.ADD:
            return True
        if node.name not in self._observed:
            return False
        if node.op == "call_module":
            return getattr(modules[str(node.target)], "qconfig", None) is not None
        weight = node.args[1] if len(node.args) > 1 else None
        return isinstance(weight, Node) and _is_observer(weight, modules)

    def convert(self) -> GraphModule:
        """With weights that are quantized and dequantized."""
        return convert_to_reference_fx(self.net, backend_config=_backend())

    def _remove_observers_of_activations(self) -> None:
        modules = self.modules()
        for node in list(self.net.graph.nodes):
            if not _is_observer(node, modules):
                continue
            source = node.args[0]
            assert isinstance(source, Node)
            if source.op == "get_attr":
                continue  # weights of a function
            node.replace_all_uses_with(source)
            self.net.graph.erase_node(node)
        self.net.recompile()


def _is_observer(node: Node, modules: dict[str, nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], ObserverBase)


def _backend() -> BackendConfig:
    return get_onednn_backend_config()


def _mapping(config: QuantizationConfig, names: list[str]) -> QConfigMapping:
    # What observes activations here is removed again; oneDNN's configuration wants to see quint8.
    activation = torch.ao.quantization.MinMaxObserver.with_args(dtype=torch.quint8)
    mapping = QConfigMapping()
    mapping.set_global(QConfig(activation=activation, weight=config.weight_observer()))
    whole = QConfig(activation=activation, weight=config.weight_observer(per_channel=False))
    for transposed in _TRANSPOSED:
        mapping.set_object_type(transposed, whole)
    for function in config.float_functions:
        mapping.set_object_type(function, None)
    for name in names:
        mapping.set_module_name(name, None)
    return mapping


def _trace(net: nn.Module, arguments: dict[str, Any], leaves: list[str]) -> GraphModule:
    """Symbolic tracing of a copy; arguments that calibration leaves out keep their defaults."""
    net = copy.deepcopy(net)
    left_out = {
        name: parameter.default
        for name, parameter in inspect.signature(net.forward).parameters.items()
        if name not in arguments and parameter.default is not inspect.Parameter.empty
    }
    tracer = QuantizationTracer(leaves, [])
    graph = tracer.trace(net, concrete_args=left_out or None)
    for node in list(graph.nodes):
        if node.op == "placeholder" and _base_name(node) in left_out:
            _erase_assertions(graph, node)
    return GraphModule(net, graph)


def _called_with_constants(net: GraphModule) -> list[str]:
    """Modules that see no input of the network."""
    constants = constants_of(net.graph)
    calls = [n for n in net.graph.nodes if n.op == "call_module"]
    others = {str(n.target) for n in calls if n not in constants}
    return [str(n.target) for n in calls if n in constants and str(n.target) not in others]


def _drop_assertions(net: GraphModule) -> None:
    """`torch._assert(x.ndim == 4, ...)`: a trace of the result would have none, either."""
    pure = (getattr, operator.eq, operator.and_, operator.mod)
    for node in reversed(net.graph.nodes):
        if node.target is torch._assert or (node.target in pure and not node.users):
            net.graph.erase_node(node)
    net.recompile()


def _erase_assertions(graph: Graph, node: Node) -> None:
    """A value that tracing was told, and everything that asserts that it is that one."""
    for user in list(node.users):
        _erase_assertions(graph, user)
    graph.erase_node(node)


def _base_name(node: Node) -> str:
    """Tracing with a concrete value adds a number to the name of an argument."""
    target = str(node.target)
    base, _, number = target.rpartition("_")
    return base if number.isdigit() and base else target
