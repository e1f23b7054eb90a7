"""Weights as quantized constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

__all__ = ["attribute", "constant_of", "put_weight", "quantize_weight"]


def attribute(net: nn.Module, name: str) -> object:
    """What a `get_attr` node of that name reads."""
    value: object = net
    for part in name.split("."):
        value = getattr(value, part)
    return value


def constant_of(net: GraphModule, value: object) -> Tensor | None:
    """The tensor that a `get_attr` node reads, detached; None for anything else."""
    if not isinstance(value, Node) or value.op != "get_attr":
        return None
    found = attribute(net, str(value.target))
    return found.detach() if isinstance(found, Tensor) else None


def put_weight(net: GraphModule, place: Node, quantized: Tensor) -> Node:
    """Before `place`: a quantized tensor as a buffer of `net`, dequantized. Returns the latter.

    Freezing folds `quantize` of a constant, and keeps `dequantize` of one.
    """
    index = 0
    while hasattr(net, f"_weight_{index}"):
        index += 1
    name = f"_weight_{index}"
    net.register_buffer(name, quantized)
    with net.graph.inserting_before(place):
        return net.graph.call_method("dequantize", (net.graph.get_attr(name),))


def quantize_weight(weight: Tensor, observer: Any) -> Tensor:
    """Per channel or per tensor, as the observer is."""
    observer(weight)
    scale, zero_point = observer.calculate_qparams()
    if observer.qscheme in (torch.per_channel_symmetric, torch.per_channel_affine):
        axis = int(observer.ch_axis)
        return torch.quantize_per_channel(weight, scale, zero_point, axis, observer.dtype)
    return torch.quantize_per_tensor(weight, float(scale), int(zero_point), observer.dtype)
