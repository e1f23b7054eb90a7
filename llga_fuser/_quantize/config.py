"""What `llga_fuser.quantize` can be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._ops import OpOverload
from torch.ao.quantization import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
)
from torch.fx import Node

from llga_fuser._quantize.observers import PairedMinMaxObserver, PairedPerChannelMinMaxObserver
from llga_fuser._quantize.ops import describe

__all__ = ["QuantizationConfig"]

Observing = HistogramObserver | MinMaxObserver
Observer = Literal["histogram", "minmax"]
Scheme = Literal["affine", "symmetric"]
Granularity = Literal["per_channel", "per_tensor"]
Capture = Literal["auto", "fx", "export"]


@dataclass(frozen=True)
class QuantizationConfig:
    """How `llga_fuser.quantize` chooses scales, zero points and what stays in float.

    Weights are always qint8 and symmetric, from -128 to 127 with the zero point 0.

    Attributes:
        observer: how the range of an activation is taken from the calibration batches:
            "histogram" looks for the range with the least squared error
            (`torch.ao.quantization.HistogramObserver`), "minmax" takes the smallest and the largest
            value met (`MinMaxObserver`).
        activation_dtype: `torch.quint8` (0 to 255) or `torch.qint8` (-128 to 127). The second
            operand of a matrix product of two activations is always qint8 and symmetric, as oneDNN
            asks for it.
        activation_scheme: "affine" has a zero point, "symmetric" puts it into the middle of the
            range (0 for qint8, 128 for quint8).
        weight_granularity: "per_channel" has a scale for each output channel, "per_tensor" one for
            all. Transposed convolutions always have one (torch.ao's flow knows no other).
        reduce_range: for processors without VNNI, which add two 8-bit products in 16 bits, where
            they can saturate: the scale of each channel makes neighbours at most 128 together,
            and matrix products of two activations and attention stay in float. Fusion groups ask
            for it there.
            (torch.ao's `reduce_range` takes a bit from all activations instead, which costs more
            accuracy.) None: where this processor needs it.
        bias_correction: take what rounding the weights adds to the mean of each output channel off
            the biases. Needs at least two samples; up to 32 are used.
        keep_float: what is not quantized: types of modules (with all that is inside), names of
            modules as in `net.named_modules()`, and functions such as `torch.matmul`.
        capture: how the graph is found: "fx" by `torch.fx` symbolic tracing and torch.ao's FX flow,
            "export" by `torch.export`, "auto" by the first of them that takes the module.

    Raises:
        TypeError: a field has the wrong type; the message names it.
        ValueError: a field has a value that is not among those above.
    """

    observer: Observer = "histogram"
    activation_dtype: torch.dtype = torch.quint8
    activation_scheme: Scheme = "affine"
    weight_granularity: Granularity = "per_channel"
    reduce_range: bool | None = None
    bias_correction: bool = True
    keep_float: tuple[type[nn.Module] | str | Callable[..., Any], ...] = ()
    capture: Capture = "auto"

    def __post_init__(self) -> None:
        for name, choices in (
            ("observer", get_args(Observer)),
            ("activation_dtype", (torch.quint8, torch.qint8)),
            ("activation_scheme", get_args(Scheme)),
            ("weight_granularity", get_args(Granularity)),
            ("reduce_range", (None, True, False)),
            ("bias_correction", (True, False)),
            ("capture", get_args(Capture)),
        ):
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                wanted = ", ".join(map(repr, choices))
                raise ValueError(f"{name}: expected one of {wanted}, got {value!r}")
        if not isinstance(self.keep_float, tuple):
            raise TypeError(
                "keep_float: expected a tuple of types of modules, names of modules and functions, "
                f"got {type(self.keep_float).__name__}"
            )
        for index, item in enumerate(self.keep_float):
            wrong = isinstance(item, type) and not issubclass(item, nn.Module)
            if (
                wrong
                or isinstance(item, nn.Module)
                or not (isinstance(item, str) or callable(item))
            ):
                raise TypeError(
                    f"keep_float[{index}]: expected a type of modules, the name of a module or a "
                    f"function, got {item if wrong else type(item).__name__}"
                )

    @property
    def float_types(self) -> tuple[type[nn.Module], ...]:
        """The types in `keep_float`."""
        return tuple(item for item in self.keep_float if isinstance(item, type))

    @property
    def float_names(self) -> tuple[str, ...]:
        """The names in `keep_float`."""
        return tuple(item for item in self.keep_float if isinstance(item, str))

    @property
    def float_functions(self) -> tuple[Callable[..., Any], ...]:
        """The functions in `keep_float`."""
        return tuple(i for i in self.keep_float if not isinstance(i, (type, str)))

    def function_in_float(self, node: Node) -> bool:
        """Whether `keep_float` has the function that a node calls, or the operator is named so."""
        if node.target in self.float_functions:
            return True
        names = {getattr(f, "__name__", "") for f in self.float_functions}
        return isinstance(node.target, OpOverload) and describe(node, {}) in names

    def names_in_float(self, net: nn.Module) -> list[str]:
        """Of the modules that `keep_float` names or has the type of."""
        types, names = self.float_types, set(self.float_names)
        return [n for n, m in net.named_modules() if n in names or isinstance(m, types)]

    def reduces_range(self) -> bool:
        """`reduce_range`, or what this processor needs."""
        if self.reduce_range is not None:
            return self.reduce_range
        from llga_fuser import _C

        return bool(_C.runtime_info()["int8_saturates"])

    def activation_observer(self, *, second_operand: bool = False) -> Observing:
        """A new observer of activations."""
        kind: type[Observing] = (
            HistogramObserver if self.observer == "histogram" else MinMaxObserver
        )
        symmetric = second_operand or self.activation_scheme == "symmetric"
        return kind(
            dtype=torch.qint8 if second_operand else self.activation_dtype,
            qscheme=torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine,
        )

    def weight_observer(self, *, per_channel: bool = True) -> Any:
        """What makes observers of weights."""
        paired = self.reduces_range()
        if per_channel and self.weight_granularity == "per_channel":
            channels = PairedPerChannelMinMaxObserver if paired else PerChannelMinMaxObserver
            return channels.with_args(
                dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0
            )
        whole = PairedMinMaxObserver if paired else MinMaxObserver
        return whole.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
