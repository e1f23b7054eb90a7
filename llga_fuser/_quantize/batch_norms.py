"""Batch norms behind convolutions, folded into the weights before those are quantized."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights

from llga_fuser._quantize.constants import constant_of
from llga_fuser._quantize.ops import Kind, describe, kind_of

__all__ = ["fold_batch_norms"]


class _Norm(NamedTuple):
    """`torch.nn.functional.batch_norm` in eval mode."""

    data: Node
    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def fold_batch_norms(net: GraphModule) -> None:
    """Those that are functions, of `torch.nn.functional` or of `torch.ops.aten`.

    A module that is called elsewhere too, and weights that are no constants, stay as they are.
    """
    modules = dict(net.named_modules(remove_duplicate=False))
    for node in list(net.graph.nodes):
        norm = _norm(net, node)
        if norm is None or any(u is not node and not _reads_sizes(u) for u in norm.data.users):
            continue
        name = describe(norm.data, modules)
        if kind_of(norm.data, modules) is not Kind.CONVOLUTION or "transpose" in name:
            continue
        into = _fold_into_module if norm.data.op == "call_module" else _fold_into_function
        if into(net, norm):
            node.replace_all_uses_with(norm.data)
            net.graph.erase_node(node)
    net.recompile()


def _reads_sizes(node: Node) -> bool:
    """The norm's result has the same."""
    name = str(node.args[1]) if node.target is getattr else describe(node, {})
    return name in ("size", "sym_size", "dim", "shape", "ndim")


def _norm(net: GraphModule, node: Node) -> _Norm | None:
    if node.op != "call_function" or describe(node, {}) != "batch_norm":
        return None
    if isinstance(node.target, OpOverload):
        data, weight, bias, mean, variance, training, _, eps = node.args[:8]
    else:
        bound = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        data, mean, variance, weight, bias, training, _, eps = bound.args
    means, variances = constant_of(net, mean), constant_of(net, variance)
    weights, biases = constant_of(net, weight), constant_of(net, bias)
    unknown = (weight is not None and weights is None) or (bias is not None and biases is None)
    if not isinstance(data, Node) or means is None or variances is None or unknown:
        return None
    if training or not isinstance(eps, float):
        return None
    return _Norm(data, means, variances, weights, biases, eps)


def _folded(weight: Tensor, bias: Tensor | None, norm: _Norm) -> tuple[nn.Parameter, nn.Parameter]:
    return fuse_conv_bn_weights(
        nn.Parameter(weight),
        None if bias is None else nn.Parameter(bias),
        norm.mean,
        norm.variance,
        norm.eps,
        norm.weight,
        norm.bias,
    )


def _fold_into_module(net: GraphModule, norm: _Norm) -> bool:
    module = net.get_submodule(str(norm.data.target))
    calls = [n for n in net.graph.nodes if n.op == "call_module"]
    if sum(net.get_submodule(str(n.target)) is module for n in calls) != 1:
        return False
    weight, bias = module.get_parameter("weight"), module._parameters["bias"]
    folded = _folded(weight.detach(), None if bias is None else bias.detach(), norm)
    module.weight, module.bias = folded
    return True


def _fold_into_function(net: GraphModule, norm: _Norm) -> bool:
    convolution = norm.data
    weight, bias = (
        constant_of(net, convolution.args[i] if len(convolution.args) > i else None) for i in (1, 2)
    )
    has_bias = len(convolution.args) > 2 and convolution.args[2] is not None
    if (
        weight is None
        or has_bias != (bias is not None)
        or {"weight", "bias"} & {*convolution.kwargs}
    ):
        return False
    places = []
    for part, value in zip(("weight", "bias"), _folded(weight, bias, norm), strict=True):
        net.register_buffer(f"_folded_{convolution.name}_{part}", value.detach())
        with net.graph.inserting_before(convolution):
            places.append(net.graph.get_attr(f"_folded_{convolution.name}_{part}"))
    convolution.args = (convolution.args[0], *places, *convolution.args[3:])
    return True
