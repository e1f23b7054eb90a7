"""The model that the examples run: a name, or a file that torch.jit.save wrote."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import nn

import llga_fuser


def tiny() -> nn.Module:
    """Two convolutions and a classifier of 10 classes, to try things out."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


def _torchvision() -> Any:
    # `import torchvision`, and it works where its own C++ operators do not load too.
    from llga_fuser._models import load_torchvision

    return load_torchvision().models


def check(name: str) -> str:
    """The name, if `load` knows it.

    Raises:
        ValueError: there is no such model or file; the message is one line.
    """
    if name.endswith(".pt"):
        if not pathlib.Path(name).is_file():
            raise ValueError(f"{name}: no such file")
    elif name != "tiny" and name not in _torchvision().list_models(module=_torchvision()):
        raise ValueError(f"{name!r} is not tiny, a classification model of torchvision, or *.pt")
    return name


def load(name: str, weights: str | None = None) -> Any:
    """A module in evaluation mode.

    Args:
        name: "tiny", a classification model of torchvision, or a file that ends in .pt.
        weights: of a torchvision model, for example "DEFAULT", which downloads them; None: random
            ones, the same each time.

    Raises:
        ValueError: there is no such model, or the file is none of torch.jit.save.
    """
    check(name)
    torch.manual_seed(0)
    if name == "tiny":
        return tiny().eval()
    if not name.endswith(".pt"):
        return _torchvision().get_model(name, weights=weights).eval()
    try:
        return torch.jit.load(name, map_location="cpu").eval()
    except RuntimeError as error:
        raise ValueError(f"{name}: not a file that torch.jit.save wrote") from error


def compiled(name: str, shape: tuple[int, ...], dtype: str, weights: str | None = None) -> Any:
    """The model, fused for inputs of this shape and ready at full speed."""
    types = {"fp32": None, "bf16": torch.bfloat16}
    return llga_fuser.compile(load(name, weights), torch.rand(shape), dtype=types[dtype])
