"""What quantized modules call. Importable by name, as a saved `GraphModule` asks for them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["quantize_per_tensor"]


def quantize_per_tensor(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """`torch.quantize_per_tensor` of float32, and of bfloat16 too (under autocast)."""
    # Not `x.float()`, which a trace would keep where nothing has to be cast.
    return torch.quantize_per_tensor(
        x if x.dtype == torch.float32 else x.float(), scale, zero_point, dtype
    )
