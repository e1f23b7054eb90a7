"""Choice by measurement: where there are several ways to compute a group, the fastest is taken."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from llga_fuser import _C

__all__ = ["AutotuneInfo", "autotune_here", "autotune_info", "set_autotune"]


class AutotuneInfo(NamedTuple):
    """What autotuning has chosen for this processor and these versions.

    Attributes:
        enabled: whether the process autotunes.
        path: the file that keeps the choices, which exists from the first one on; empty if there is
            no directory for it.
        choices: how many partitions and groups are computed in which way, by its name: "usual",
            what would have been done without; for partitions "onednn", "onednn_plain" (weights as
            they are), "onednn_copied" (data copied to the usual order of dimensions), "winograd2",
            "winograd4", "gemm"; for groups "onednn", "binaries_apart", "activations_fused" and
            "interpreter".
    """

    enabled: bool
    path: str
    choices: dict[str, int]


def set_autotune(enabled: bool, *, directory: str | os.PathLike[str] | None = None) -> bool:
    """Measures the ways to compute a fusion group when it is first compiled, and takes the fastest.

    Ways are the fuser's own kernels and oneDNN's, Winograd's algorithm with large tiles, small
    ones or not at all, weights packed or plain, data as it lies or copied first, several divisions
    of the group into partitions, and PyTorch's kernels. Without autotuning a choice follows from
    sizes. Numbers differ by rounding alone, and a group takes no longer than before.

    Acts on what is compiled from now on, by all threads of the process; `clear_cache()` lets groups
    compile again. Measuring takes a second or two for a large network, more for large batches, on
    an idle machine. Choices are written to a file for this processor and these versions, so that
    other processes need not measure again; delete it to start anew. LLGA_FUSER_AUTOTUNE=on in the
    environment does the same as calling this first; `llga_fuser.compile(..., autotune=True)` does
    it for one module.

    Args:
        enabled: whether to autotune.
        directory: for the file; it is made if it does not exist. None: where LLGA_FUSER_CACHE_DIR
            says, or else the user's cache directory (XDG_CACHE_HOME, ~/.cache). Where it can't be
            written there is a warning, and the choices hold for this process.

    Returns:
        Whether the process autotuned before.

    Raises:
        TypeError: `enabled` is not a bool, or `directory` not a path.
        ValueError: `directory` is something else than a directory.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: expected a bool, got {type(enabled).__name__}")
    if directory is not None:
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"directory: expected a path, got {type(directory).__name__}")
        directory = os.path.abspath(os.fspath(directory))
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise ValueError(f"directory: expected a directory, got the file {directory}")
    _C.use_choices_in(directory or "")
    return _C.autotune(enabled)


def autotune_info() -> AutotuneInfo:
    """Returns what has been chosen, by this process and by those that wrote the file before it."""
    path, known = _C.choices()
    return AutotuneInfo(_C.autotunes(), path, dict(collections.Counter(known.values())))


@contextmanager
def autotune_here() -> Iterator[None]:
    """Autotunes what this thread compiles inside."""
    here = _C.AutotuneHere()
    try:
        yield
    finally:
        del here
