"""Math mode of float32 groups: whether oneDNN may compute in a narrower type inside."""

from __future__ import annotations

from typing import Literal, get_args

from llga_fuser import _C

__all__ = ["FpmathMode", "fpmath_mode", "fpmath_value", "set_fpmath_mode"]

FpmathMode = Literal["strict", "bf16", "f16", "tf32", "any"]

# dnnl_fpmath_mode_t
_VALUES = {"strict": 0, "bf16": 1, "f16": 2, "any": 3, "tf32": 4}


def fpmath_value(mode: str, name: str = "mode") -> int:
    """The number oneDNN has for a mode; `name` is the argument that an error is about."""
    if not isinstance(mode, str):
        raise TypeError(f"{name}: expected a str, got {type(mode).__name__}")
    if mode not in _VALUES:
        raise ValueError(
            f"{name}: expected one of {', '.join(map(repr, get_args(FpmathMode)))}, got {mode!r}"
        )
    return _VALUES[mode]


def set_fpmath_mode(mode: FpmathMode) -> FpmathMode:
    """Lets float32 convolutions and matrix products compute in a narrower type.

    Tensors, weights and results stay float32; oneDNN may convert operands of convolutions and
    matrix products to the named type where that is faster (AMX). Other modes than
    "strict" cost accuracy: about 3 significant digits remain with "bf16". On a processor without
    such instructions nothing changes. Acts on all groups of the process, all threads, from their
    next call on; groups compile anew for another mode. `llga_fuser.compile(..., fpmath_mode=...)`
    sets it for one module.

    The counterpart for eager PyTorch is `torch.set_float32_matmul_precision`; oneDNN describes the
    modes under "Primitive Attributes: floating-point math mode".

    Args:
        mode: "strict" (the default: float32 all through), "bf16", "f16", "tf32" or "any".

    Returns:
        The mode before.

    Raises:
        TypeError: `mode` is not a str.
        ValueError: it is none of these.
    """
    before = fpmath_mode()
    _C.set_fpmath_mode(fpmath_value(mode))
    return before


def fpmath_mode() -> FpmathMode:
    """The current mode of the process, as `set_fpmath_mode` takes it."""
    value = _C.fpmath_mode()
    return next(name for name in get_args(FpmathMode) if _VALUES[name] == value)
