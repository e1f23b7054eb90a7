"""Ahead-of-time compilation: a module that is fused and ready before its first call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llga_fuser import _C
from llga_fuser._autotune import autotune_here
from llga_fuser._fpmath import FpmathMode, fpmath_value
from llga_fuser._trace import autocast_to, cast_in_attention, cast_in_layers, freeze, trace_frozen

__all__ = ["compile"]


class _Example(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# Relative L2 error (of all elements of an output together) above which a compiled module computes
# something else than the original: rounding stays far below, a shape that was traced in does not.
_LIMITS = {torch.float32: 1e-2, torch.bfloat16: 0.2}
# Of a graph that rounds to 8 bits: where a value is near the middle between two steps, another
# order of summation decides, and what comes after it goes on from there.
_QUANTIZED_LIMIT = 0.5


# Tracing keeps state of its own in globals, and so does the filter of warnings.
_lock = threading.Lock()


def compile(  # noqa: A001
    module_or_fn: Callable[..., Any],
    example_inputs: Any,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    check: bool = True,
    release_weights: bool = False,
    fpmath_mode: FpmathMode | None = None,
    autotune: bool = False,
) -> Any:
    """Makes a TorchScript module (or function) that is fused and runs at full speed from the start.

    Traces, freezes, fuses and compiles for each example. The result is an ordinary `ScriptModule`
    or `ScriptFunction`: other shapes, strides and data types than those of the examples are
    compiled when they are first met, gradients are right, and it may be saved, copied and called
    from other scripts, where it acts as the same module without fusion groups. It does not
    matter whether the fuser is enabled, nor which executor TorchScript uses. Called inside
    `torch.autocast`, it runs unfused: use `dtype` instead.

    Args:
        module_or_fn: an `nn.Module` in eval mode, a function or a method, which are traced; or a
            `ScriptModule` or `ScriptFunction`, whose control flow is kept.
        example_inputs: one call's arguments: a tensor, a tuple of positional arguments, or a dict
            of keyword arguments. Or a list of such examples: the shapes of each are prepared. The
            first one is traced. Any shapes and data types that the module takes; the tensors are
            not written to.
        dtype: `torch.bfloat16` for what tracing under autocast would give: convolutions and matrix
            products in bfloat16, inputs as they are. None (or `torch.float32`): as the module is.
        strict: as in `torch.jit.trace`: raise for outputs that are dicts or lists.
        check: compare what was traced with the original on each example, so that shapes or values
            that were baked into the trace are found. Turn it off for modules that draw random
            numbers.
        release_weights: free the plain copy of weights that fusion groups have packed. Whatever
            needs one later (a new shape, the fallback) unpacks it for as long as it takes. Memory
            is freed only if nobody else, such as the original module, holds the weights. The
            result can no longer be saved.
        fpmath_mode: see `llga_fuser.set_fpmath_mode`, for this module alone; None: whatever the
            process' mode is when the module is called.
        autotune: measure the ways to compute each group on the examples and take the fastest, see
            `llga_fuser.set_autotune`. Takes seconds, once for each kind of machine.

    Returns:
        A `torch.jit.ScriptModule` for a module, a `torch.jit.ScriptFunction` for a function.

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: no example, a module in training mode, an unknown `dtype` or `fpmath_mode`, or a
            `dtype` for a module that is frozen already or for a `ScriptFunction`.
        RuntimeError: the result differs from the original on an example (see `check`), or what
            tracing, freezing or the module itself raises.

    See also `torch.jit.trace`, `torch.jit.freeze`, and `torch.autocast` for `dtype`.
    """
    switches = {
        "strict": strict,
        "check": check,
        "release_weights": release_weights,
        "autotune": autotune,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    autocast = _autocast_dtype(dtype)
    math = None if fpmath_mode is None else fpmath_value(fpmath_mode, "fpmath_mode")
    examples = _examples(example_inputs)
    target = _target(module_or_fn)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        # Freezing needs methods inlined, which is an optimisation.
        with _lock, _quiet(), torch.jit.optimized_execution(True):  # type: ignore[attr-defined]
            script, ours = _script(target, examples[0], autocast, strict)
        calls = [_twin(example) for example in examples]
        quantized = script.graph.findAllNodes("aten::quantize_per_tensor")
        # A layer norm makes float32 of what was rounded before.
        rounding = _QUANTIZED_LIMIT if quantized else _LIMITS[autocast] if autocast else 0
        if isinstance(script, torch.jit.ScriptModule):
            made = torch.jit._recursive.wrap_cpp_module(
                _C.compile_module(script._c, calls, ours, release_weights, math)
            )
        else:
            made = _C.compile_function(script, calls, ours, release_weights, math)
        del script
        for index, example in enumerate(examples):
            args, kwargs = _twin(example)
            with autotune_here() if autotune else contextlib.nullcontext():
                result = made(*args, **kwargs)  # compiles its partitions
            if check and not _is_script(target):
                args, kwargs = _twin(example)
                with autocast_to(autocast):
                    expected = target(*args, **kwargs)
                _compare(result, expected, index, rounding)
        if release_weights:
            _release(made)
    return made


# ------------------------------------------------------------------------------------ arguments


def _autocast_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None or dtype == torch.float32:
        return None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype or None, got {type(dtype).__name__}")
    if dtype != torch.bfloat16:
        raise ValueError(f"dtype: expected torch.bfloat16, torch.float32 or None, got {dtype}")
    return torch.bfloat16


def _examples(inputs: Any) -> list[_Example]:
    if not isinstance(inputs, list):
        return [_example(inputs, "example_inputs")]
    if not inputs:
        raise ValueError("example_inputs: expected at least one example, got an empty list")
    return [_example(value, f"example_inputs[{i}]") for i, value in enumerate(inputs)]


def _example(value: Any, name: str) -> _Example:
    if isinstance(value, Tensor):
        return _Example((value,), {})
    if isinstance(value, tuple):
        return _Example(tuple(value), {})
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"{name}: expected names of arguments as keys, got {type(key).__name__}"
                )
        return _Example((), dict(value))
    raise TypeError(
        f"{name}: expected a tensor, a tuple of arguments or a dict of keyword arguments, "
        f"got {type(value).__name__}"
    )


def _is_script(target: Any) -> bool:
    return isinstance(target, (torch.jit.ScriptModule, torch.jit.ScriptFunction))


def _target(given: Any) -> Callable[..., Any]:
    """What is traced: a module, a script, or a plain function."""
    if isinstance(given, type) or not callable(given):
        raise TypeError(
            "module_or_fn: expected a module or a function, got "
            + (f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__)
        )
    if isinstance(given, torch.jit.ScriptFunction):
        return given
    owner = getattr(given, "__self__", None)
    module = given if isinstance(given, nn.Module) else owner
    if isinstance(module, nn.Module) and getattr(module, "training", False):
        raise ValueError(
            f"module_or_fn: {type(module).__name__} is in training mode, expected eval mode; "
            "call .eval() on it first"
        )
    if isinstance(given, nn.Module) or inspect.isfunction(given):
        return given
    if isinstance(owner, nn.Module):
        return _Method(owner, given).eval()

    @functools.wraps(given, updated=())
    def function(*args: Any, **kwargs: Any) -> Any:
        return given(*args, **kwargs)

    return function


class _Method(nn.Module):
    """A method of a module as a module of its own, whose weights are then frozen like others."""

    def __init__(self, owner: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.owner = owner

        @functools.wraps(method)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        self.forward = forward


def _twin(example: _Example) -> _Example:
    """A copy for one call: the module may write to it."""
    return _Example(private_copy(example.args), private_copy(example.kwargs))


def private_copy(value: Any) -> Any:
    """A copy of (structures of) tensors that nobody else has, with the same strides."""
    if isinstance(value, dict):
        return type(value)((k, private_copy(v)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(private_copy(v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(private_copy(v) for v in value)
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    plain = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    if not plain or value.is_quantized or not value.numel():
        return value.clone()
    # With the same strides, which are what is compiled for.
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((span,), (1,), value.storage_offset()).clone()
    return flat.as_strided(value.shape, value.stride())


# ------------------------------------------------------------------------------------ scripting


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice to use something else than TorchScript."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.", DeprecationWarning)
        yield


def _script(
    target: Any, example: _Example, autocast: torch.dtype | None, strict: bool
) -> tuple[Any, bool]:
    """A frozen module or a function, and whether nobody else has it."""
    if _is_script(target):
        is_module = isinstance(target, torch.jit.ScriptModule)
        # A frozen module has no attribute `training` any more; it can't be frozen again.
        frozen = is_module and not hasattr(target, "training")
        script = freeze(target) if is_module and not frozen else target
        ours = script is not target
        if autocast is not None:
            if not ours:
                raise ValueError(
                    "dtype: expected None for a frozen ScriptModule or a ScriptFunction, whose "
                    f"data types are given, got {autocast}; pass the module before freezing"
                )
            _insert_casts(script, autocast)
        return script, ours
    args, kwargs = _twin(example)
    return trace_frozen(target, args, kwargs, dtype=autocast, strict=strict), True


def _insert_casts(frozen: Any, dtype: torch.dtype) -> None:
    """TorchScript's own autocast, for code that has not been through eager's."""
    before = torch._C._jit_set_autocast_mode(True)
    try:
        with autocast_to(dtype):
            torch._C._jit_pass_autocast(frozen.graph)  # type: ignore[attr-defined]
    finally:
        torch._C._jit_set_autocast_mode(before)
    cast_in_attention(frozen.graph, dtype)
    cast_in_layers(frozen.graph, dtype)
    torch._C._jit_pass_constant_propagation(frozen.graph)  # of weights


def _release(made: Any) -> None:
    _C.release_weights(made._c if isinstance(made, torch.jit.ScriptModule) else made)
    _forbid_saving(made)


def _forbid_saving(made: Any) -> None:
    """An error where it is saved; a module that contains it raises when its file is loaded."""

    def save(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "a module compiled with release_weights=True can't be saved: its weights are no longer "
            "there in a form that others could read; compile it without to save it"
        )

    def copied(memo: dict[int, Any]) -> Any:
        copy = type(made).__deepcopy__(made, memo)
        _forbid_saving(copy)
        return copy

    made.__dict__.update(save=save, save_to_buffer=save)
    if isinstance(made, torch.jit.ScriptModule):
        made.__dict__["__deepcopy__"] = copied


# ------------------------------------------------------------------------------------- checking


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def first_difference(result: Any, expected: Any, *, rounding: float = 0) -> str:
    """In words, the first one that rounding does not explain; empty if there is none.

    `rounding` is the relative error that the computation may have, where that is more than what the
    data type of an output tells.
    """
    ours, theirs = list(_leaves(result)), list(_leaves(expected))
    trouble = ""
    if len(ours) != len(theirs):
        trouble = f"{len(ours)} outputs instead of {len(theirs)}"
    for i, (a, e) in enumerate(zip(ours, theirs, strict=False)):
        if not trouble and isinstance(a, Tensor) and isinstance(e, Tensor):
            difference = _difference(a, e, rounding)
            trouble = f"output {i} has {difference}" if difference else ""
    return trouble


def _compare(result: Any, expected: Any, index: int, rounding: float) -> None:
    trouble = first_difference(result, expected, rounding=rounding)
    if trouble:
        raise RuntimeError(
            f"example_inputs[{index}]: the compiled module gives {trouble}. A trace keeps the "
            "shapes and the branches of the first example where they pass through Python; script "
            "the module, or pass check=False if it draws random numbers."
        )


def _difference(actual: Tensor, expected: Tensor, rounding: float) -> str:
    if actual.shape != expected.shape:
        return f"the shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"the data type {actual.dtype} instead of {expected.dtype}"
    # Integers may come from floats by comparison or rounding, and then differ by chance.
    strided = expected.layout == torch.strided and expected.device.type == "cpu"
    if not expected.is_floating_point() or not strided:
        return ""
    limit = max(rounding, _LIMITS.get(expected.dtype, _LIMITS[torch.float32]))
    finite = expected.isfinite() & actual.isfinite()
    theirs = expected[finite].double()
    error = float((actual[finite].double() - theirs).norm() / theirs.norm().clamp_min(1e-30))
    if not torch.equal(actual.isnan(), expected.isnan()):
        return "NaN in other places"
    return f"a relative error of {error:.1e}" if error > limit and not math.isnan(error) else ""
