"""Turns the fuser on and off, under its own names and under torch's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from llga_fuser import _C

__all__ = ["enable", "fusion", "install_switches", "is_enabled"]

_lock = threading.Lock()
_builtin_set = torch._C._jit_set_llga_enabled
_builtin_get = torch._C._jit_llga_enabled


def enable(enabled: bool = True) -> bool:
    """Turns the fuser on or off for the whole process, all threads.

    Graphs that TorchScript has already optimised stay as they are; the switch acts on what is
    optimised from now on. torch's built-in fuser is turned off first if it was on: both want the
    same nodes. `torch.jit.enable_onednn_fusion` and `torch.jit.fuser("fuser3")` act on this fuser
    as well, once the package is imported.

    Args:
        enabled: the new state.

    Returns:
        The state before.

    Raises:
        TypeError: `enabled` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {type(enabled).__name__}")
    with _lock:
        if enabled and _builtin_get():
            _builtin_set(False)
        return bool(_C.set_enabled(enabled))


def is_enabled() -> bool:
    """Whether the fuser is on. `torch.jit.onednn_fusion_enabled` returns the same."""
    return bool(_C.is_enabled())


@contextlib.contextmanager
def fusion(enabled: bool = True) -> Iterator[None]:
    """Turns the fuser on (or off) within a `with` block, and back to what it was after it.

    For the whole process, all threads, as `enable` does.

    Args:
        enabled: the state within the block.

    Raises:
        TypeError: `enabled` is not a bool.
    """
    before = enable(enabled)
    try:
        yield
    finally:
        enable(before)


def install_switches() -> None:
    """Lets torch's switches of its built-in oneDNN Graph fuser act on this one.

    `torch.jit.enable_onednn_fusion`, `torch.jit.onednn_fusion_enabled` and
    `torch.jit.fuser("fuser3")` look these two functions up when they are called.
    """
    torch._C._jit_set_llga_enabled = enable  # type: ignore[assignment]
    torch._C._jit_llga_enabled = is_enabled
