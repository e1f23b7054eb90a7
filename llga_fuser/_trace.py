"""Traces what eager runs, with autocast's casts if asked to."""

from __future__ import annotations

from typing import Any

import torch


def autocast_to(dtype: torch.dtype | None) -> torch.autocast:
    """Eager's autocast, such that a trace sees all of its casts; off if `dtype` is None."""
    # Its cache of cast weights would hide some.
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


def freeze(script: Any) -> Any:
    """What `torch.jit.freeze` gives, but with the numbers of `script`, in evaluation mode.

    torch 2.13 puts a batch norm into the linear layer before it also where others read that.
    """
    frozen: Any = torch.jit.freeze(script, optimize_numerics=False)
    graph = frozen.graph
    if not any(_is_normed_for_some(n) for n in graph.findAllNodes("aten::linear", recurse=True)):
        torch._C._jit_pass_optimize_frozen_graph(graph, True)  # its numerics
        return frozen
    convolutions = (
        torch._C._jit_pass_fold_frozen_conv_bn,
        torch._C._jit_pass_fold_frozen_conv_add_or_sub,
        torch._C._jit_pass_fold_frozen_conv_mul_or_div,
    )
    changed = True
    while changed:
        done = [fold(graph) for fold in convolutions]
        changed = any(done)
    return frozen


def _is_normed_for_some(linear: Any) -> bool:
    """Whether not only a batch norm reads it."""
    readers = [use.user.kind() for use in linear.output().uses()]
    return len(readers) > 1 and "aten::batch_norm" in readers


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
    result = freeze(traced.eval()) if isinstance(traced, torch.nn.Module) else traced
    if dtype is not None:
        _cast_in_einsum(result.graph, dtype)
    return result


def _cast_in_einsum(graph: Any, dtype: torch.dtype) -> None:
    """Puts casts before einsums that add up products: eager's are inside, hidden from a trace."""
    for node in graph.findAllNodes("aten::einsum", recurse=True):
        equation, operands = node.inputsAt(0).toIValue(), node.inputsAt(1).node()
        if equation is None or operands.kind() != "prim::ListConstruct" or not _adds_up(equation):
            continue
        for i in range(len(list(operands.inputs()))):
            _cast(graph, operands, i, dtype)


def cast_in_attention(graph: Any, dtype: torch.dtype) -> None:
    """Puts casts before what eager's autocast casts for, and TorchScript's does not know."""
    for node in graph.findAllNodes("aten::scaled_dot_product_attention", recurse=True):
        for i, operand in enumerate(list(node.inputs())):
            if operand.type().isSubtypeOf(torch._C.TensorType.get()):
                _cast(graph, node, i, dtype)


def _cast(graph: Any, node: Any, index: int, dtype: torch.dtype) -> None:
    """Autocast's cast to `dtype` of what `node` takes at `index`, if it is floating point."""
    inputs = [node.inputsAt(index)]
    for value in (False, True, dtype, dtype):  # on the CPU alone
        constant = graph.insertConstant(value)
        constant.node().moveBefore(node)
        inputs.append(constant)
    cast = graph.create("aten::_autocast_to_reduced_precision", inputs, 1)
    node.replaceInput(index, cast.insertBefore(node).output())


def _adds_up(equation: str) -> bool:
    """Whether operands of an einsum share a label that its result does not have."""
    terms, arrow, result = equation.replace(" ", "").replace(".", "").partition("->")
    operands = terms.split(",")
    shared = {label for label in terms if sum(label in operand for operand in operands) > 1}
    return bool(shared - set(result)) if arrow else bool(shared)
