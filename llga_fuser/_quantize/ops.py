"""What an operator does to the question whether a value is worth 8 bits.

The same operator has several spellings in `torch.fx` graphs: a module, a function, a method, or an
operator of `torch.ops.aten` (in exported graphs). `describe` finds one name for all of them.
"""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

__all__ = [
    "CONCATENATIONS",
    "TUPLES",
    "Kind",
    "describe",
    "kind_of",
    "use_results_of_in_place_ops",
]


class Kind(enum.Enum):
    """How placement treats an operator."""

    CONVOLUTION = enum.auto()  # weights; reads 8 bits
    LINEAR = enum.auto()  # weights; reads 8 bits
    MATMUL = enum.auto()  # two activations; reads 8 bits
    ADD = enum.auto()
    # A post-operation: computed on what the kernel before it has in registers, so nothing between.
    ELEMENTWISE = enum.auto()
    # The result has the range of the input and, after rounding, its scale and zero point.
    SAME_RANGE = enum.auto()
    UNIT_RANGE = enum.auto()  # results from 0 to 1
    OTHER = enum.auto()  # float


_BY_NAME = {
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        Kind.CONVOLUTION,
    ),
    "linear": Kind.LINEAR,
    **dict.fromkeys(("matmul", "bmm"), Kind.MATMUL),
    **dict.fromkeys(("add", "iadd"), Kind.ADD),
    **dict.fromkeys(
        ("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "leaky_relu", "elu")
        + ("gelu", "silu", "mish", "hardswish", "hardsigmoid", "tanh", "mul", "imul", "batch_norm"),
        Kind.ELEMENTWISE,
    ),
    **dict.fromkeys(
        ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
        + ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "cat", "concat")
        + ("view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "t")
        + ("contiguous", "chunk", "split", "getitem", "slice", "select", "dropout", "identity")
        + ("clone", "detach", "dropout2d", "swapaxes", "movedim", "expand", "channel_shuffle")
        + ("pixel_shuffle", "unflatten", "stochastic_depth"),
        Kind.SAME_RANGE,
    ),
    **dict.fromkeys(("softmax", "sigmoid"), Kind.UNIT_RANGE),
}

# Results of these are tuples: their elements are quantized instead.
TUPLES = frozenset({"chunk", "split"})
CONCATENATIONS = frozenset({"cat", "concat"})

# Modules whose name is not the function's.
_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.ELU: "elu",
    **{c: "batch_norm" for c in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)},
}


def _module_name(module: nn.Module) -> str:
    known = _MODULES.get(type(module))
    if known is not None:
        return known
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(module).__name__).lower()


def describe(node: Node, modules: Mapping[str, nn.Module]) -> str:
    """The operator's name in lower case, as the function in `torch.nn.functional` has it."""
    target: Any = node.target
    if node.op == "call_module":
        module = modules[str(target)]
        inner = module[0] if isinstance(module, nn.Sequential) and len(module) else module
        return _module_name(inner)
    if node.op == "call_method":
        return str(target).removesuffix("_")
    if node.op != "call_function":
        return node.op
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__).removesuffix("_")
    name = str(getattr(target, "__name__", target)).strip("_")
    if target is getattr:
        return "getattr"
    return name if target in (operator.iadd, operator.imul) else name.removesuffix("_")


def kind_of(node: Node, modules: Mapping[str, nn.Module]) -> Kind:
    """What `describe` says, without looking at arguments."""
    return _BY_NAME.get(describe(node, modules), Kind.OTHER)


def use_results_of_in_place_ops(net: GraphModule) -> None:
    """`x.relu_()`, then `x`: the second `x` becomes the result of the first line.

    A value is quantized where it is made, which is before it is written to.
    """
    modules = dict(net.named_modules())
    order = {node: i for i, node in enumerate(net.graph.nodes)}
    for node in net.graph.nodes:
        if not node.args or not isinstance(node.args[0], Node) or not _writes(node, modules):
            continue
        node.args[0].replace_all_uses_with(
            node, delete_user_cb=lambda user, here=order[node]: order[user] > here
        )
    net.recompile()


def _writes(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    if node.kwargs.get("inplace", False) is True:
        return True
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function" or isinstance(node.target, str):
        return False
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket.__name__).endswith("_")
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":
        return name in ("iadd", "isub", "imul", "itruediv")
    return name.endswith("_") and not name.endswith("__")
