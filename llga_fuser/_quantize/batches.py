"""Calibration batches: what is a batch, and the arguments it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch import Tensor, nn

__all__ = ["Batches"]

_WANTED = (
    "expected an iterable of batches, each a tensor, a tuple of arguments or a dict of keyword "
    "arguments"
)


class Batches:
    """Goes through them once, as dicts of keyword arguments.

    Raises:
        TypeError: not an iterable of batches, or a batch that does not fit the module's arguments;
            the message names it.
        ValueError: no batch.
    """

    def __init__(self, given: Any, net: nn.Module) -> None:
        if isinstance(given, (Tensor, Mapping, str, bytes)) or not isinstance(given, Iterable):
            hint = "; put the one batch into a list" if isinstance(given, (Tensor, Mapping)) else ""
            raise TypeError(f"calibration_batches: {_WANTED}, got {type(given).__name__}{hint}")
        if isinstance(given, tuple) and given and all(isinstance(v, Tensor) for v in given):
            raise TypeError(
                f"calibration_batches: {_WANTED}, got a tuple of tensors, which could be one batch "
                "or several; put them into a list: [batch] or [*batches]"
            )
        self.count = len(given) if isinstance(given, Sized) else None
        self._signature = inspect.signature(net.forward)
        self._iterator = enumerate(iter(given))
        self._names: list[str] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, batch in self._iterator:
            yield self._arguments(batch, f"calibration_batches[{index}]")

    def first(self) -> dict[str, Any]:
        """The first one, which is taken away from the iteration."""
        for arguments in self:
            return arguments
        raise ValueError("calibration_batches: expected at least one batch, got none")

    def _arguments(self, batch: Any, name: str) -> dict[str, Any]:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(batch, Tensor):
            args = (batch,)
        elif isinstance(batch, tuple):
            args = batch
        elif isinstance(batch, Mapping):
            kwargs = dict(batch)
        else:
            hint = "; make it a tuple" if isinstance(batch, list) else ""
            raise TypeError(
                f"{name}: expected a tensor, a tuple of arguments or a dict of keyword arguments, "
                f"got {type(batch).__name__}{hint}"
            )
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name}: does not fit the module's arguments {self._signature}: {error}"
            ) from None
        arguments = self._flat(bound, name)
        names = list(arguments)
        if self._names is None:
            self._names = names
        elif names != self._names:
            raise TypeError(
                f"{name}: expected the arguments of the first batch ({', '.join(self._names)}), "
                f"got {', '.join(names)}"
            )
        return arguments

    def _flat(self, bound: inspect.BoundArguments, name: str) -> dict[str, Any]:
        """By name; of `**kwargs` their content."""
        arguments: dict[str, Any] = {}
        for key, value in bound.arguments.items():
            kind = self._signature.parameters[key].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise TypeError(
                    f"{name}: the module's forward takes *{key}, which has no names to pass it by; "
                    "wrap it in a module whose forward names its arguments"
                )
            else:
                arguments[key] = value
        return arguments
