"""Observers of weights whose products do not saturate in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

__all__ = ["PairedMinMaxObserver", "PairedPerChannelMinMaxObserver"]

# Of two neighbouring weights: 255 * 128 < 2 ** 15, and rounding adds up to a half to each of them.
_LARGEST_SUM = 127


def _room(weight: Tensor, input_axis: int) -> Tensor:
    """By element: what it and its neighbour along the input channels have together."""
    moved = weight.detach().movedim(input_axis, -1)
    even, odd = moved[..., 0::2], moved[..., 1::2]
    both = even.clone()
    both[..., : odd.shape[-1]] += odd  # of opposite signs the larger one alone is the worst case
    # An observer makes `127.5 * scale` of the largest value it meets.
    limit = both.abs() * (127.5 / _LARGEST_SUM)
    return limit.repeat_interleave(2, -1)[..., : moved.shape[-1]].movedim(-1, input_axis)


class PairedPerChannelMinMaxObserver(PerChannelMinMaxObserver):
    """`PerChannelMinMaxObserver` whose scales leave room for sums of two products.

    Processors without VNNI multiply unsigned 8-bit activations with signed 8-bit weights and add
    two neighbouring products in 16 bits (VPMADDUBSW). With these scales two neighbouring weights
    (along the input channels) are at most 128 together, and the sum of their products fits.
    """

    def forward(self, x_orig: Tensor) -> Tensor:
        room = x_orig
        if x_orig.dim() > 1:
            room = torch.maximum(x_orig.detach().abs(), _room(x_orig, 1))
        super().forward(room)  # type: ignore[no-untyped-call]
        return x_orig


class PairedMinMaxObserver(MinMaxObserver):
    """The same with one scale, for weights whose input channels are the first or second axis."""

    def forward(self, x_orig: Tensor) -> Tensor:
        room = x_orig
        if x_orig.dim() > 1:
            room = torch.maximum(_room(x_orig, 0), _room(x_orig, 1))
            room = torch.maximum(x_orig.detach().abs(), room)
        super().forward(room)  # type: ignore[no-untyped-call]
        return x_orig
