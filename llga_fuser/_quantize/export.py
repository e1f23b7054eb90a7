"""Capture by `torch.export`: for modules that symbolic tracing can't take, such as BERT."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from llga_fuser._quantize.batch_norms import fold_batch_norms
from llga_fuser._quantize.config import QuantizationConfig
from llga_fuser._quantize.constants import attribute, constant_of, put_weight, quantize_weight
from llga_fuser._quantize.functions import greater_size, smaller_size
from llga_fuser._quantize.ops import (
    Kind,
    constants_of,
    describe,
    kind_of,
    use_linear_layers,
    use_results_of_in_place_ops,
)

__all__ = ["ExportFlow", "plain_module", "without_unused"]

_OF_SIZES: dict[Any, Any] = {torch.sym_max: greater_size, torch.sym_min: smaller_size}

# The position of weights, the same for all operators that have them.
_WEIGHT = 1


class ExportFlow:
    """A copy of a module on its way to 8 bits, as a graph of `torch.ops.aten`.

    Sizes are left open where the module's code leaves them open; a 1 in the example stays a 1.
    """

    def __init__(
        self, net: nn.Module, arguments: dict[str, Any], config: QuantizationConfig
    ) -> None:
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # one operator that hides all products
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(
                    copy.deepcopy(net),
                    (),
                    arguments,
                    dynamic_shapes=_open_sizes(arguments),
                    strict=False,
                )
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
        self.net = plain_module(program.module(check_guards=False))
        self._config = config
        use_results_of_in_place_ops(self.net)
        use_linear_layers(self.net, config.function_in_float)
        fold_batch_norms(self.net)
        _drop_views_around_linear_layers(self.net)
        self._float_modules = set(config.names_in_float(net))
        self._constants = constants_of(self.net.graph)

    def modules(self) -> dict[str, nn.Module]:
        """Those that the graph calls, by name."""
        return dict(self.net.named_modules(remove_duplicate=False))

    def is_quantized(self, node: Node) -> bool:
        """Whether an operator that could have 8-bit inputs (and weights) is to have them."""
        if self._config.function_in_float(node) or node in self._constants:
            return False
        if any(name in self._float_modules for name in _scope(node)):
            return False
        kind = kind_of(node, {})
        if kind in (Kind.MATMUL, Kind.ATTENTION):
            return not self._config.reduces_range()
        if kind is Kind.ADD:
            return True
        return _constant_weight(self.net, node) is not None

    def convert(self) -> GraphModule:
        """With weights that are quantized constants."""
        net = self.net
        # Before observers went in, so did the decision which operators have 8-bit inputs.
        modules = self.modules()
        for node in list(net.graph.nodes):
            if kind_of(node, modules) not in (Kind.CONVOLUTION, Kind.LINEAR):
                continue
            if not self.is_quantized(node):
                continue
            weight = _constant_weight(net, node)
            assert weight is not None
            transposed = "transpose" in describe(node, modules)
            observer = self._config.weight_observer(per_channel=not transposed)()
            quantized = quantize_weight(weight.detach(), observer)
            node.update_arg(_WEIGHT, put_weight(net, node, quantized))
        net.graph.eliminate_dead_code()
        net.delete_all_unused_submodules()
        net.recompile()
        return without_unused(net)


def plain_module(exported: nn.Module) -> GraphModule:
    """Without checks of inputs, which tracing can't run and the module itself does not make."""
    assert isinstance(exported, GraphModule)
    for node in list(exported.graph.nodes):
        name = describe(node, dict(exported.named_modules()))
        checks = name.startswith(("_assert", "sym_constrain_range", "_guards_fn"))
        if (checks or str(node.target) == "_guards_fn") and not node.users:
            exported.graph.erase_node(node)
    exported.graph.eliminate_dead_code()
    for node in list(exported.graph.nodes):
        _keep_sizes_open(exported.graph, node)
    return GraphModule(exported, exported.graph).eval()


def _keep_sizes_open(graph: Graph, node: Node) -> None:
    """Spells sizes as a trace can follow them: it takes those of `torch.ops` for constants."""
    if node.target in _OF_SIZES:
        node.target = _OF_SIZES[node.target]
    if not isinstance(node.target, OpOverload):
        return
    name = describe(node, {})
    open_sizes = any(isinstance(n.meta.get("val"), torch.SymInt) for n in node.all_input_nodes)
    with graph.inserting_before(node):
        if name == "sym_size":
            result = graph.call_method("size", node.args)
        elif not open_sizes:
            return
        elif name == "slice":
            value, axis, start, end, step, *_ = (*node.args, None, None, None, None)
            before = (slice(None),) * axis if isinstance(axis, int) else ()
            index = (*before, slice(start, end, step))
            result = graph.call_function(operator.getitem, (value, index))
        elif hasattr(torch, name) and not hasattr(Tensor, name):
            result = graph.call_function(getattr(torch, name), node.args, node.kwargs)
        elif hasattr(Tensor, name):
            result = graph.call_method(name, node.args, node.kwargs)
        else:
            return
    result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def without_unused(net: GraphModule) -> GraphModule:
    """A module with nothing but what its graph reads: float weights go."""
    used = {str(n.target) for n in net.graph.nodes if n.op == "get_attr"}
    return GraphModule({name: attribute(net, name) for name in used}, net.graph).eval()


def _open_sizes(value: Any) -> Any:
    """`dynamic_shapes` of `torch.export`: all that the module's code leaves open."""
    if isinstance(value, Tensor):
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)
    if isinstance(value, (list, tuple)):
        return type(value)(_open_sizes(item) for item in value)
    if isinstance(value, dict):
        return {key: _open_sizes(item) for key, item in value.items()}
    return None


def _scope(node: Node) -> Iterator[str]:
    """Names of the modules around an operator."""
    for name, _ in (node.meta.get("nn_module_stack") or {}).values():
        yield str(name)


def _constant_weight(net: GraphModule, node: Node) -> Tensor | None:
    """Floating-point weights that are an attribute of the module."""
    if len(node.args) <= _WEIGHT:
        return None
    weight = constant_of(net, node.args[_WEIGHT])
    return weight if weight is not None and weight.dtype == torch.float32 else None


def _drop_views_around_linear_layers(net: GraphModule) -> None:
    """`linear(x.view(-1, n)).view(*x.shape[:-1], m)` is `linear(x)`.

    Views would stand between the layer and the functions and sums that are computed with it.
    """
    for node in list(net.graph.nodes):
        if kind_of(node, {}) is not Kind.LINEAR or not isinstance(node.args[0], Node):
            continue
        first = node.args[0]
        if not _is_view(first) or not isinstance(first.args[0], Node):
            continue
        shape, inner, outer = (_shape(n) for n in (first.args[0], first, node))
        if shape is None or inner is None or outer is None or len(shape) < 2:
            continue
        result = (*shape[:-1], outer[-1])
        if not _is_same((shape[-1],), inner[-1:]):
            continue
        if not all(_is_view(u) and _is_same(_shape(u), result) for u in node.users):
            continue
        node.replace_input_with(first, first.args[0])
        for view in list(node.users):
            node.meta["val"] = view.meta["val"]
            view.replace_all_uses_with(node)
            net.graph.erase_node(view)
    net.graph.eliminate_dead_code()
    net.recompile()


def _is_view(node: Node) -> bool:
    return describe(node, {}) in ("view", "reshape", "_unsafe_view")


def _shape(node: Node) -> tuple[Any, ...] | None:
    """As far as `torch.export` knows it."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _is_same(sizes: tuple[Any, ...] | None, others: tuple[Any, ...]) -> bool:
    """Whatever the inputs are."""
    if sizes is None or len(sizes) != len(others):
        return False
    return all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))
