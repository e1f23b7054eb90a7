"""`llga_fuser.from_pt2e`: modules that torchao's PT2E flow has quantized."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from llga_fuser._quantize.constants import attribute, put_weight
from llga_fuser._quantize.export import plain_module, without_unused
from llga_fuser._quantize.functions import quantize_per_tensor
from llga_fuser._quantize.ops import describe

__all__ = ["from_pt2e"]

# 8-bit integers by the data type of quantized tensors that are made of them.
_QUANTIZED = {torch.uint8: torch.quint8, torch.int8: torch.qint8}


def from_pt2e(converted: nn.Module | torch.export.ExportedProgram) -> GraphModule:
    """Makes what torchao's PT2E flow has quantized ready to be traced or compiled.

    Takes the result of `torchao.quantization.pt2e.quantize_pt2e.convert_pt2e`, with any quantizer
    that uses 8-bit integers and static scales, such as `X86InductorQuantizer`. Its
    `quantized_decomposed::quantize_per_tensor` and `dequantize_per_tensor` become
    `aten::quantize_per_tensor` and `aten::dequantize`, and integer weights become quantized
    constants: `torch.jit.freeze` would expand them to float otherwise. A quantization to less than
    the whole range of its data type becomes a clamp and a quantization. The numbers stay the same,
    but for values in the middle between two steps (behind average pools), which may be rounded to
    the other one.

    Args:
        converted: the module from `convert_pt2e`, or a program exported from it. Not changed.

    Returns:
        A `torch.fx.GraphModule` in eval mode with the arguments and results of `converted`.

    Raises:
        TypeError: `converted` is neither a `torch.fx.GraphModule` nor an `ExportedProgram`.
        ValueError: it has observers left (not converted yet); or no quantized operator; or a scale
            that is not a positive number (an observer that no batch has reached); or one that
            is computed from the input (dynamic quantization).
    """
    if isinstance(converted, torch.export.ExportedProgram):
        net = plain_module(converted.module(check_guards=False))
    elif isinstance(converted, GraphModule):
        net = plain_module(copy.deepcopy(converted))
    else:
        raise TypeError(
            "converted: expected the GraphModule from convert_pt2e or an ExportedProgram, got "
            + type(converted).__name__
        )
    left = [name for name, m in net.named_modules() if _is_observer(m)]
    if left:
        raise ValueError(
            f"converted: expected a converted module, got one with the observer {left[0]!r}; call "
            "convert_pt2e on it first"
        )
    found = 0
    quantized: dict[Node, Node] = {}
    for node in list(net.graph.nodes):
        name = _decomposed(node)
        if name:
            scales = _known(net, node.args[1])
            _check_scales(node, scales if isinstance(scales, list) else [scales])
        if name.startswith("dequantize"):
            _replace(net, node, name, quantized)
            found += 1
    if not found:
        raise ValueError(
            "converted: has no quantized_decomposed operator; was it prepared (prepare_pt2e) with "
            "a quantizer that knows its operators?"
        )
    net.graph.eliminate_dead_code()
    remaining = [n for n in net.graph.nodes if _decomposed(n)]
    if remaining:
        raise ValueError(
            f"converted: {remaining[0].name} ({_decomposed(remaining[0])}) is not followed by a "
            "dequantization with the same scale and zero point"
        )
    return without_unused(net)


def _is_observer(module: nn.Module) -> bool:
    """torch.ao's, or torchao's class of the same name."""
    return any(c.__name__ in ("ObserverBase", "FakeQuantizeBase") for c in type(module).__mro__)


def _decomposed(node: Node) -> str:
    """`quantize_per_tensor` and so on, if it is an operator of that library."""
    known = str(node.target).startswith("quantized_decomposed.")
    return describe(node, {}) if node.op == "call_function" and known else ""


def _replace(net: GraphModule, node: Node, name: str, quantized: dict[Node, Node]) -> None:
    """One dequantization, with the quantization (if it is not `quantized` yet) or the constant."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = _decomposed(source)
    if source.op == "get_attr":
        result = put_weight(net, node, _constant(net, node, name))
    elif before == name.removeprefix("de"):
        same = [_known(net, a) for a in source.args[1:]] == [_known(net, a) for a in node.args[1:]]
        if not same:
            return
        if before.endswith("per_channel"):
            weight = source.args[0]
            if not isinstance(weight, Node) or weight.op != "get_attr":
                raise ValueError(f"converted: {source.name} quantizes an activation per channel")
            value = attribute(net, str(weight.target))
            result = put_weight(net, node, _constant(net, node, name, value))
        else:
            if source not in quantized:
                quantized[source] = _quantized(net, source)
            with net.graph.inserting_before(node):
                result = net.graph.call_method("dequantize", (quantized[source],))
    else:
        return
    node.replace_all_uses_with(result)
    net.graph.erase_node(node)


def _known(net: GraphModule, value: object) -> object:
    """A number or a list, also of a constant tensor."""
    if isinstance(value, Node) and value.op == "get_attr":
        value = attribute(net, str(value.target))
    return value.tolist() if isinstance(value, Tensor) else value


def _quantized(net: GraphModule, source: Node) -> Node:
    """The quantization of an activation, right behind the one that it replaces."""
    scale, zero_point, low, high, dtype = (_known(net, a) for a in source.args[1:6])
    quantized = _dtype(source, dtype)
    assert isinstance(scale, float) and isinstance(zero_point, int)
    assert isinstance(low, int) and isinstance(high, int) and isinstance(dtype, torch.dtype)
    value: Any = source.args[0]
    limits = torch.iinfo(dtype)
    with net.graph.inserting_before(source):
        if (low, high) != (limits.min, limits.max):
            ends = (scale * (low - zero_point), scale * (high - zero_point))
            value = net.graph.call_function(torch.clamp, (value, *ends))
        args = (value, scale, zero_point, quantized)
        return net.graph.call_function(quantize_per_tensor, args)


def _constant(net: GraphModule, node: Node, name: str, weight: object = None) -> Tensor:
    """The quantized tensor of integer weights, or of float ones that are still to be rounded."""
    assert isinstance(node.args[0], Node)
    scales: Any
    zero_points: Any
    scales, zero_points, *rest = (_known(net, a) for a in node.args[1:])
    axis: Any = rest.pop(0) if name.endswith("per_channel") else None
    low, high, dtype = rest[:3]
    _dtype(node, dtype)
    stored: Any = attribute(net, str(node.args[0].target)) if weight is None else weight
    if axis is None:
        if weight is not None:
            stored = torch.ops.quantized_decomposed.quantize_per_tensor(
                weight, scales, zero_points, low, high, dtype
            )
        return torch._make_per_tensor_quantized_tensor(stored, float(scales), int(zero_points))
    scale = torch.tensor(scales, dtype=torch.float64)
    zero_point = torch.tensor([int(z) for z in zero_points])
    if weight is not None:
        stored = torch.ops.quantized_decomposed.quantize_per_channel(
            weight, scale, zero_point, axis, low, high, dtype
        )
    return torch._make_per_channel_quantized_tensor(stored, scale, zero_point, axis)


def _dtype(node: Node, dtype: object) -> torch.dtype:
    found = _QUANTIZED.get(dtype) if isinstance(dtype, torch.dtype) else None
    if found is None:
        raise ValueError(f"converted: {node.name} quantizes to {dtype}, expected uint8 or int8")
    return found


def _check_scales(node: Node, scales: list[Any]) -> None:
    for scale in scales:
        if isinstance(scale, Node):
            raise ValueError(
                f"converted: the scale of {node.name} is computed from the input (dynamic "
                "quantization), expected a constant one"
            )
        if not (isinstance(scale, float) and math.isfinite(scale) and scale > 0):
            raise ValueError(
                f"converted: the scale of {node.name} is {scale}, expected a positive number; has "
                "the prepared module seen a batch?"
            )
