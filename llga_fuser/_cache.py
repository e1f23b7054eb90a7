"""What the fuser keeps between calls: compiled partitions, packed weights, memory."""

from __future__ import annotations

from typing import NamedTuple

from llga_fuser import _C

__all__ = ["CacheInfo", "cache_info", "clear_cache", "set_cache_capacity"]


class CacheInfo(NamedTuple):
    """Figures of this process, all modules together.

    Attributes:
        entries: plans alive: one for each fusion group and signature (shapes, strides and data
            types of the inputs, values of other inputs, threads, autocast state, math mode).
        hits: calls of fusion groups that found their plan.
        misses: calls that compiled one.
        evictions: plans dropped because a capacity was passed.
        fallbacks: calls that ran in the TorchScript interpreter instead.
        compile_seconds: time spent compiling, in seconds.
        packed_bytes: memory of packed weights alive, in bytes; weights that several plans share
            count once.
        arena_bytes: memory kept for values that die with a call, in bytes, in use or not. It grows
            to what the calls need that run at the same time.
        capacity_entries: the limit on `entries`.
        capacity_bytes: the limit on `packed_bytes`; 0 is no limit.
    """

    entries: int
    hits: int
    misses: int
    evictions: int
    fallbacks: int
    compile_seconds: float
    packed_bytes: int
    arena_bytes: int
    capacity_entries: int
    capacity_bytes: int


def cache_info() -> CacheInfo:
    """Returns the current figures, all modules and threads together since the process began."""
    return CacheInfo(**_C.cache_info())


def clear_cache() -> None:
    """Drops all compiled plans, and the memory kept for values between groups.

    Each signature compiles again when it is next met.
    """
    _C.clear_cache()


def set_cache_capacity(entries: int, bytes: int = 0) -> None:
    """Limits what is kept; the least recently used plans go first.

    Args:
        entries: number of plans, at least 1.
        bytes: packed weights that plans hold, in bytes; 0 is no limit.

    Raises:
        ValueError: `entries` is below 1 or `bytes` is negative.
        TypeError: one of them is not an integer.
    """
    for name, value, least in (("entries", entries, 1), ("bytes", bytes, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    _C.set_cache_capacity(entries, bytes)
