"""`llga_fuser.report`: what was fused, what was not and why, and where the time goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from llga_fuser import _C
from llga_fuser._compile import private_copy
from llga_fuser._fpmath import fpmath_mode
from llga_fuser._report.collect import describe_arguments, make_report
from llga_fuser._report.diff import ReportDiff
from llga_fuser._report.model import (
    Conversion,
    Fallback,
    Group,
    Node,
    Op,
    Partition,
    Primitive,
    Report,
    Summary,
    TensorInfo,
    UnfusedError,
)
from llga_fuser._switch import fusion
from llga_fuser._trace import trace_frozen

__all__ = [
    "Conversion",
    "Fallback",
    "Group",
    "Node",
    "Op",
    "Partition",
    "Primitive",
    "Report",
    "ReportDiff",
    "Summary",
    "TensorInfo",
    "UnfusedError",
    "report",
]


def report(
    module: Callable[..., Any],
    *inputs: Any,
    rounds: int = 10,
    strict: bool = False,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Report:
    """Runs a model and tells what the fuser made of it.

    The model is called some 20 times with the same arguments, without gradients and with the fuser
    on (afterwards it is what it was): until it is warm, `rounds` times against the clock, and twice
    more to look at values and at oneDNN's kernels. One report is made at a time in a process; other
    threads may go on. Standard output is redirected for the length of one call.

    Args:
        module: a `ScriptModule` or `ScriptFunction`, looked at as it is; or an `nn.Module` in eval
            mode or a function, which is traced and frozen first.
        *inputs: the arguments of a call. They are copied: a model that writes to them writes to the
            copies, which it gets in every call.
        rounds: calls to take the median time of, at least 1.
        strict: raise if an operator is outside the groups, or a group runs in the interpreter.
            A script's `torch.jit.strict_fusion` blocks are always held to it, by the fuser itself.
        dtype: `torch.bfloat16` to trace an `nn.Module` or a function under autocast.
        **kwargs: keyword arguments of the call.

    Returns:
        A `Report`.

    Raises:
        UnfusedError: strict mode; the message has the reasons.
        TypeError: `module` is not callable, `rounds` or `strict` has the wrong type.
        ValueError: `rounds` below 1, a module in training mode, or a `dtype` that does not apply.
        RuntimeError: what tracing or the model raises; a `torch.jit.strict_fusion` block with
            something that is not fused, and the reasons.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int):
        raise TypeError(f"rounds: expected an int, got {type(rounds).__name__}")
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected a bool, got {type(strict).__name__}")
    target: object = module
    if isinstance(target, type) or not callable(target):
        raise TypeError(f"module: expected a module or a function, got {module!r}")
    copies = private_copy(inputs)
    named = private_copy(kwargs)
    with torch.no_grad(), fusion(True):
        script = _script(module, copies, named, dtype)
        result = make_report(
            script,
            _Call(script, copies, named),
            model=_name(module),
            inputs=describe_arguments(copies, named),
            environment=_environment(),
            rounds=rounds,
        )
    if strict:
        result.check_strict()
    return result


class _Call:
    """One call of the model, later on as now."""

    def __init__(self, script: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._run = functools.partial(script, *args, **kwargs)

    def __call__(self) -> Any:
        with torch.no_grad(), fusion(True):
            return self._run()


def _name(module: Any) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    if isinstance(module, torch.jit.ScriptFunction):
        return str(module.name)
    return str(getattr(module, "__name__", type(module).__name__))


def _environment() -> dict[str, Any]:
    build, runtime = _C.build_info(), _C.runtime_info()
    return {
        "llga_fuser": build["version"],
        "torch": torch.__version__,
        "onednn": runtime["onednn"],
        "isa": runtime["isa"],
        "threads": torch.get_num_threads(),
        "fpmath_mode": fpmath_mode(),
    }


def _script(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> Any:
    scripted = isinstance(module, torch.jit.ScriptModule | torch.jit.ScriptFunction)
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: expected torch.bfloat16, torch.float32 or None, got {dtype}")
    if scripted:
        if dtype is not None:
            raise ValueError(f"dtype: a script has its data types, got {dtype}")
        return module
    if isinstance(module, nn.Module) and module.training:
        raise ValueError(
            f"module: {type(module).__name__} is in training mode, expected eval mode; call "
            ".eval() on it first"
        )
    reduced = None if dtype == torch.float32 else dtype
    return trace_frozen(module, args, kwargs, dtype=reduced, strict=False)
