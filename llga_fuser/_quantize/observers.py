"""Observers of weights whose products do not saturate in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

__all__ = ["PairedMinMaxObserver", "PairedPerChannelMinMaxObserver"]

# What a sum in 16 bits leaves to two weights together if activations go up to `levels`.
_SUMS = 2**15 - 1


def _room(weight: Tensor, input_axis: int, levels: int) -> Tensor:
    """By element: what it and its neighbour along the input channels have together."""
    moved = weight.detach().movedim(input_axis, -1)
    even, odd = moved[..., 0::2], moved[..., 1::2]
    both = even.clone()
    both[..., : odd.shape[-1]] += odd  # of opposite signs the larger one alone is the worst case
    largest = _SUMS // levels - 1  # as rounding adds up to a half to each of them
    # An observer makes `127.5 * scale` of the largest value it meets.
    limit = both.abs() * (127.5 / largest)
    return limit.repeat_interleave(2, -1)[..., : moved.shape[-1]].movedim(-1, input_axis)


class PairedPerChannelMinMaxObserver(PerChannelMinMaxObserver):
    """`PerChannelMinMaxObserver` whose scales leave room for sums of two products.

    Processors without VNNI multiply unsigned 8-bit activations with signed 8-bit weights and add
    two neighbouring products in 16 bits (VPMADDUBSW). With these scales two neighbouring weights
    (along the input channels) and the largest activation, `levels`, have a sum that fits.

    Args:
        levels: the largest activation, at most 255.
        arguments: those of `PerChannelMinMaxObserver`.
    """

    def __init__(self, levels: int = 255, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.levels = levels

    def forward(self, x_orig: Tensor) -> Tensor:
        room = x_orig
        if x_orig.dim() > 1:
            room = torch.maximum(x_orig.detach().abs(), _room(x_orig, 1, self.levels))
        super().forward(room)  # type: ignore[no-untyped-call]
        return x_orig


class PairedMinMaxObserver(MinMaxObserver):
    """The same with one scale, for weights whose input channels are the first or second axis."""

    def __init__(self, levels: int = 255, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.levels = levels

    def forward(self, x_orig: Tensor) -> Tensor:
        room = x_orig
        if x_orig.dim() > 1:
            room = torch.maximum(_room(x_orig, 0, self.levels), _room(x_orig, 1, self.levels))
            room = torch.maximum(x_orig.detach().abs(), room)
        super().forward(room)  # type: ignore[no-untyped-call]
        return x_orig
