"""Refuses to load the extension module beside libraries it was not built for.

TorchScript's C++ classes have no stable ABI: a build is bound to one torch minor release. oneDNN
is bundled, but LD_LIBRARY_PATH or LD_PRELOAD may put another one in front of it.
"""

from __future__ import annotations

import torch

from llga_fuser import _build

__all__ = ["check_versions"]


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def check_versions() -> None:
    """Compares the loaded torch and oneDNN with those of the build.

    Raises:
        ImportError: a version differs; the message names both.
    """
    if _minor(torch.__version__) != _minor(_build.TORCH_VERSION):
        raise ImportError(
            f"llga_fuser was built for torch {_build.TORCH_VERSION}, but torch {torch.__version__} "
            f"is installed. Install torch=={_build.TORCH_VERSION}, or rebuild llga_fuser beside "
            "the torch you want to use."
        )
    from llga_fuser import _C

    loaded = _C.runtime_info()["onednn"]
    built = _C.build_info()["onednn"]
    if _minor(loaded) != _minor(built):
        raise ImportError(
            f"llga_fuser was built for oneDNN {built}, but oneDNN {loaded} was loaded. Look for "
            "another libdnnl.so.3 in LD_LIBRARY_PATH or LD_PRELOAD."
        )
