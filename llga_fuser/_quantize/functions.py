"""What quantized modules call. Importable by name, as a saved `GraphModule` asks for them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["greater_size", "quantize_per_tensor", "smaller_size"]


def quantize_per_tensor(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """`torch.quantize_per_tensor` of float32, and of bfloat16 too (under autocast)."""
    # Not `x.float()`, which a trace would keep where nothing has to be cast.
    return torch.quantize_per_tensor(
        x if x.dtype == torch.float32 else x.float(), scale, zero_point, dtype
    )


def greater_size(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    """`torch.sym_max`, which knows no sizes that are being traced: those are tensors."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return max(a, b)


def smaller_size(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    """`torch.sym_min`, likewise."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    return min(a, b)
