"""Traces what eager runs, with autocast's casts if asked to."""

from __future__ import annotations

from typing import Any

import torch


def autocast_to(dtype: torch.dtype | None) -> torch.autocast:
    """Eager's autocast, such that a trace sees all of its casts; off if `dtype` is None."""
    # Its cache of cast weights would hide some.
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


def trace_frozen(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dtype: torch.dtype | None,
    strict: bool,
) -> Any:
    """The frozen trace of a module, or the trace of a function.

    Args:
        target: a module in evaluation mode, or a function.
        args: what it is called with.
        kwargs: the same by name, in their place; TorchScript traces with one or the other.
        dtype: what autocast casts to; None traces without.
        strict: as in `torch.jit.trace`.
    """
    example = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    with autocast_to(dtype):
        traced: Any = torch.jit.trace(target, check_trace=False, strict=strict, **example)
    # Freezing inside would put the casts of TorchScript's own autocast on top.
    return torch.jit.freeze(traced.eval()) if isinstance(traced, torch.nn.Module) else traced
