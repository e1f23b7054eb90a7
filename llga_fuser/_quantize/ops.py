"""What an operator does to the question whether a value is worth 8 bits.

The same operator has several spellings in `torch.fx` graphs: a module, a function, a method, or an
operator of `torch.ops.aten` (in exported graphs). `describe` finds one name for all of them.
"""

from __future__ import annotations

import enum
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from llga_fuser._quantize.constants import constant_of

__all__ = [
    "CONCATENATIONS",
    "IDENTITIES",
    "TUPLES",
    "Kind",
    "constants_of",
    "describe",
    "kind_of",
    "use_linear_layers",
    "use_results_of_in_place_ops",
]


class Kind(enum.Enum):
    """How placement treats an operator."""

    CONVOLUTION = enum.auto()  # weights; reads 8 bits
    LINEAR = enum.auto()  # weights; reads 8 bits
    MATMUL = enum.auto()  # two activations; reads 8 bits
    ATTENTION = enum.auto()  # three of them: query, key and value
    ADD = enum.auto()
    # A post-operation: computed on what the kernel before it has in registers, so nothing between.
    ELEMENTWISE = enum.auto()
    # The result has the range of the input and, after rounding, its scale and zero point.
    SAME_RANGE = enum.auto()
    UNIT_RANGE = enum.auto()  # results from 0 to 1
    OTHER = enum.auto()  # float


_NAMES = {
    Kind.CONVOLUTION: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    Kind.LINEAR: "linear",
    Kind.MATMUL: "matmul bmm",
    Kind.ATTENTION: "scaled_dot_product_attention",
    Kind.ADD: "add iadd",
    Kind.ELEMENTWISE: (
        "relu relu6 hardtanh clamp clamp_min clamp_max leaky_relu elu gelu silu mish hardswish "
        "hardsigmoid tanh mul imul batch_norm"
    ),
    Kind.SAME_RANGE: (
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d mean cat concat view reshape flatten unflatten "
        "squeeze unsqueeze permute transpose t swapaxes movedim expand contiguous clone detach "
        "chunk split split_with_sizes unbind getitem slice select pixel_shuffle channel_shuffle "
        "dropout dropout2d identity stochastic_depth upsample_nearest2d"
    ),
    Kind.UNIT_RANGE: "softmax sigmoid",
}
_BY_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}

# Results of these are tuples: their elements are quantized instead.
TUPLES = frozenset({"chunk", "split", "split_with_sizes", "unbind"})
CONCATENATIONS = frozenset({"cat", "concat"})
# In eval mode.
IDENTITIES = frozenset({"dropout", "dropout2d", "identity", "stochastic_depth"})

# Modules whose name is not the function's.
_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.ELU: "elu",
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "batch_norm"),
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
    """What `describe` says, with hardly a look at arguments."""
    if node.kwargs.get("return_indices"):
        return Kind.OTHER
    if node.op == "call_module" and getattr(modules[str(node.target)], "return_indices", False):
        return Kind.OTHER
    name = describe(node, modules)
    if name in ("interpolate", "upsample", "upsampling_nearest2d") and _repeats_pixels(
        node, modules
    ):
        return Kind.SAME_RANGE
    if name == "mean" and not _keeps_dimensions(node):
        return Kind.OTHER  # before a classifier, say: one rounding, of the mean, is enough
    return _BY_NAME.get(name, Kind.OTHER)


def _repeats_pixels(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a resizing only repeats (or leaves out) numbers."""
    if node.op == "call_module":
        return getattr(modules[str(node.target)], "mode", None) == "nearest"
    mode = node.args[3] if len(node.args) > 3 else node.kwargs.get("mode", "nearest")
    return mode == "nearest"


def _keeps_dimensions(mean: Node) -> bool:
    """As in a squeeze and excitation, which multiplies with what it averages."""
    keepdim = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim", False)
    return keepdim is True


def constants_of(graph: Graph) -> set[Node]:
    """What is computed from the module's attributes alone.

    Freezing computes it once, in float; quantized weights would keep it from that.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def use_results_of_in_place_ops(net: GraphModule) -> None:
    """`x.relu_()`, then `x`: the second `x` becomes the result of the first line.

    A value is quantized where it is made, which is before it is written to.
    """
    modules = dict(net.named_modules())
    order = {node: i for i, node in enumerate(net.graph.nodes)}
    for node in net.graph.nodes:
        if not node.args or not isinstance(node.args[0], Node) or not _writes(node, modules):
            continue
        written = node.args[0]
        for user in [u for u in written.users if order[u] > order[node]]:
            user.replace_input_with(written, node)
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


def use_linear_layers(net: GraphModule, stays: Callable[[Node], bool]) -> None:
    """Products with a constant matrix become linear layers, whose weights are quantized.

    `torch.addmm(bias, x, weight)`, as GPT-2's `Conv1D` spells it, `torch.mm` and `x @ weight`; of
    float32, without factors.

    Args:
        net: a graph of float operators.
        stays: whether an operator is to be left as it is.
    """
    modules = dict(net.named_modules())
    for node in list(net.graph.nodes):
        found = None if stays(node) else _rows_by_matrix(node, describe(node, modules))
        weight = found and _constant_matrix(net, found[1], modules)
        if found is None or weight is None:
            continue
        rows, _, bias = found
        if bias is not None and not _is_vector(net, bias, weight.shape[1]):
            continue
        name = f"_linear_{node.name}_weight"
        net.register_buffer(name, weight.t().contiguous())
        exported = isinstance(node.target, OpOverload)
        linear: Any = torch.ops.aten.linear.default if exported else F.linear
        with net.graph.inserting_before(node):
            layer = net.graph.call_function(linear, (rows, net.graph.get_attr(name), bias))
        layer.meta.update(node.meta)
        node.replace_all_uses_with(layer)
        net.graph.erase_node(node)
    net.graph.eliminate_dead_code()
    net.recompile()


def _rows_by_matrix(node: Node, name: str) -> tuple[Node, Node, Node | None] | None:
    """Of a product of two values: the two, and what is added, if anything is."""
    if node.kwargs or not all(isinstance(a, Node) for a in node.args):
        return None
    nodes = [a for a in node.args if isinstance(a, Node)]
    if name == "addmm" and len(nodes) == 3:
        return nodes[1], nodes[2], nodes[0]
    if name in ("mm", "matmul") and len(nodes) == 2:
        return nodes[0], nodes[1], None
    return None


def _constant_matrix(
    net: GraphModule, node: Node, modules: Mapping[str, nn.Module]
) -> Tensor | None:
    """A float32 matrix that is an attribute of the module, or the transpose of one."""
    turned = describe(node, modules) == "t"
    value = constant_of(net, node.args[0] if turned else node)
    if value is None or value.dtype != torch.float32 or value.dim() != 2:
        return None
    return value.t() if turned else value


def _is_vector(net: GraphModule, node: Node, size: int) -> bool:
    value = constant_of(net, node)
    return value is not None and value.dtype == torch.float32 and value.shape == (size,)
