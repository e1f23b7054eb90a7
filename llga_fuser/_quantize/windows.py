"""Attention in shifted windows (torchvision's Swin Transformers), taken apart.

Symbolic tracing takes `torchvision.models.swin_transformer.shifted_window_attention` for one
operator, and so its two linear layers would stay in float. They compute each pixel alone, whatever
the order of pixels, and so can be computed outside, where they are quantized:

    linear(projection, attention_in_windows(linear(qkv, padded_to_windows(image))))

What stays whole computes in float: sizes decide what it does, for which it has to run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from llga_fuser._quantize.constants import attribute

__all__ = ["attention_in_windows", "padded_to_windows", "take_windows_apart"]


def padded_to_windows(image: Tensor, window_size: list[int]) -> Tensor:
    """Zeros at the right and at the bottom, to whole windows.

    Args:
        image: batch x height x width x channels.
        window_size: height and width of a window, in pixels.
    """
    _, height, width, _ = image.shape
    high, wide = window_size
    return F.pad(image, (0, 0, 0, (wide - width % wide) % wide, 0, (high - height % high) % high))


def attention_in_windows(
    qkv: Tensor,
    image: Tensor,
    relative_position_bias: Tensor,
    window_size: list[int],
    num_heads: int,
    shift_size: list[int],
    logit_scale: Tensor | None = None,
) -> Tensor:
    """What `shifted_window_attention` computes between its linear layers.

    Args:
        qkv: query, key and value of each pixel: batch x rows x columns x (3 * channels), of an
            image of whole windows.
        image: batch x height x width x channels, before it was padded.
        relative_position_bias: added to the scores; 1 x heads x pixels x pixels of a window.
        window_size: height and width of a window, in pixels.
        num_heads: of the attention.
        shift_size: how far windows are shifted, in pixels, along the height and the width.
        logit_scale: logarithm of what cosines are multiplied with, by head (Swin V2); None: scores
            are products.

    Returns:
        batch x height x width x channels.
    """
    batch, height, width, channels = image.shape
    _, rows, columns, _ = qkv.shape
    high, wide = window_size
    # An image of one window is not shifted.
    down, right = (
        0 if window >= size else shift
        for shift, window, size in zip(shift_size, window_size, (rows, columns), strict=True)
    )
    shifted = down + right > 0
    if shifted:
        qkv = torch.roll(qkv, (-down, -right), (1, 2))
    windows = (rows // high) * (columns // wide)
    pixels = high * wide
    qkv = qkv.view(batch, rows // high, high, columns // wide, wide, 3 * channels)
    qkv = qkv.permute(0, 1, 3, 2, 4, 5).reshape(batch * windows, pixels, 3 * channels)
    heads = qkv.reshape(batch * windows, pixels, 3, num_heads, channels // num_heads)
    heads = heads.permute(2, 0, 3, 1, 4)
    query, key, value = heads[0], heads[1], heads[2]
    if logit_scale is None:
        query = query * (channels // num_heads) ** -0.5
        scores = query.matmul(key.transpose(-2, -1))
    else:
        scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(logit_scale, max=math.log(100.0)).exp()
    scores = scores + relative_position_bias
    if shifted:
        mask = _mask(relative_position_bias, (rows, columns), (high, wide), (down, right))
        scores = scores.view(batch, windows, num_heads, pixels, pixels)
        scores = scores + mask.unsqueeze(1).unsqueeze(0)
        scores = scores.view(-1, num_heads, pixels, pixels)
    result = F.softmax(scores, dim=-1).matmul(value).transpose(1, 2)
    result = result.reshape(batch * windows, pixels, channels)
    result = result.view(batch, rows // high, columns // wide, high, wide, channels)
    result = result.permute(0, 1, 3, 2, 4, 5).reshape(batch, rows, columns, channels)
    if shifted:
        result = torch.roll(result, (down, right), (1, 2))
    return result[:, :height, :width, :].contiguous()


def _mask(
    like: Tensor, sizes: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> Tensor:
    """-100 between pixels that the shift has brought together, windows x pixels x pixels."""
    regions = like.new_zeros(sizes)
    number = 0
    ends = [(slice(-w), slice(-w, -s), slice(-s, None)) for w, s in zip(window, shift, strict=True)]
    for row in ends[0]:
        for column in ends[1]:
            regions[row, column] = number
            number += 1
    rows, columns = sizes
    high, wide = window
    regions = regions.view(rows // high, high, columns // wide, wide).permute(0, 2, 1, 3)
    regions = regions.reshape((rows // high) * (columns // wide), high * wide)
    apart = regions.unsqueeze(1) - regions.unsqueeze(2)
    return apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)


def take_windows_apart(net: GraphModule, stays: Callable[[Node], bool]) -> None:
    """Replaces torchvision's function by what computes the same, its linear layers apart.

    Args:
        net: a graph that has its weights as attributes.
        stays: whether an operator is to be left as it is.
    """
    for node in list(net.graph.nodes):
        if _is_window_attention(node) and not stays(node):
            _replace(net, node)
    net.graph.eliminate_dead_code()
    net.recompile()


def _is_window_attention(node: Node) -> bool:
    target: Any = node.target
    return (
        node.op == "call_function"
        and getattr(target, "__name__", "") == "shifted_window_attention"
        and getattr(target, "__module__", "") == "torchvision.models.swin_transformer"
    )


def _replace(net: GraphModule, node: Node) -> None:
    target: Any = node.target
    bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    weights = [given[name] for name in ("qkv_weight", "proj_weight")]
    if not all(isinstance(w, Node) and w.op == "get_attr" for w in weights):
        return
    bias = given["qkv_bias"]
    graph = net.graph
    with graph.inserting_before(node):
        if given["logit_scale"] is not None and bias is not None:
            bias = graph.get_attr(_without_key_bias(net, node, bias))
        image, size = given["input"], given["window_size"]
        padded = graph.call_function(padded_to_windows, (image, size))
        qkv = graph.call_function(F.linear, (padded, given["qkv_weight"], bias))
        more = [given[n] for n in ("num_heads", "shift_size", "logit_scale")]
        attention = graph.call_function(
            attention_in_windows, (qkv, image, given["relative_position_bias"], size, *more)
        )
        layer = (attention, given["proj_weight"], given["proj_bias"])
        result = graph.call_function(F.linear, layer)
    for whole in (padded, attention):
        whole.meta["is_wrapped"] = True  # torch.ao traces the graph again, as with torch.fx.wrap
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _without_key_bias(net: GraphModule, node: Node, bias: Node) -> str:
    """The name of a bias of query and value alone, as Swin V2 has it."""
    value = attribute(net, str(bias.target))
    assert isinstance(value, Tensor)
    third = value.numel() // 3
    changed = value.detach().clone()
    changed[third : 2 * third] = 0
    name = f"_{node.name}_bias"
    net.register_buffer(name, changed)
    return name
