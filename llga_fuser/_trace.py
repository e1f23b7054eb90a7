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
        cast_in_layers(result.graph, dtype)
        torch._C._jit_pass_constant_propagation(result.graph)  # of weights
    return result


def _cast_in_einsum(graph: Any, dtype: torch.dtype) -> None:
    """Puts casts before einsums that add up products: eager's are inside, hidden from a trace."""
    for node in graph.findAllNodes("aten::einsum", recurse=True):
        equation, operands = node.inputsAt(0).toIValue(), node.inputsAt(1).node()
        if equation is None or operands.kind() != "prim::ListConstruct" or not _adds_up(equation):
            continue
        for i in range(len(list(operands.inputs()))):
            _cast(graph, operands, i, dtype)


# What eager's autocast casts inside of these: arguments by their names.
_CAST_INSIDE = {
    "aten::_transformer_encoder_layer_fwd": (
        "src",
        *("qkv_weight", "qkv_bias", "proj_weight", "proj_bias"),
        *("ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2"),
    ),
    "aten::_native_multi_head_attention": (
        *("query", "key", "value"),
        *("qkv_weight", "qkv_bias", "proj_weight", "proj_bias"),
    ),
    "aten::lstm": ("input", "hx", "params"),
}


def cast_in_layers(graph: Any, dtype: torch.dtype) -> None:
    """Puts casts before layers that are one operator: eager's are inside, hidden from a trace."""
    for kind, names in _CAST_INSIDE.items():
        for node in graph.findAllNodes(kind, recurse=True):
            if kind == "aten::lstm" and not _is_cast_lstm(node):
                continue
            given = _argument_names(node)
            for name in names:
                _cast_argument(graph, node, given.index(name), dtype)


def _argument_names(node: Any) -> list[str]:
    return [argument.name for argument in torch._C.parse_schema(node.schema()).arguments]


def _cast_argument(graph: Any, node: Any, index: int, dtype: torch.dtype) -> None:
    """Likewise of a tensor, or of all tensors in a list; None stays."""
    value = node.inputsAt(index)
    if value.type().isSubtypeOf(torch._C.TensorType.get()):
        _cast(graph, node, index, dtype)
        return
    held, made = value.toIValue(), value.node()
    if held is not None:
        tensors = [graph.insertConstant(tensor) for tensor in held]
        for tensor in tensors:
            tensor.node().moveBefore(node)
    elif made.kind() == "prim::ListConstruct":
        tensors = list(made.inputs())
    else:
        return
    operands = graph.create("prim::ListConstruct", tensors, 1).insertBefore(node)
    operands.output().setType(value.type())
    node.replaceInput(index, operands.output())
    for i in range(len(tensors)):
        _cast(graph, operands, i, dtype)


def _is_cast_lstm(node: Any) -> bool:
    """Whether eager computes it by oneDNN, which is what autocast casts for.

    That has neither projections nor packed sequences.
    """
    if "batch_sizes" in _argument_names(node):
        return False
    options = (node.namedInput(n).toIValue() for n in ("has_biases", "num_layers", "bidirectional"))
    biases, layers, both = options
    if biases is None or layers is None or both is None:
        return False
    params = node.namedInput("params")
    held = params.toIValue()
    count = len(list(params.node().inputs())) if held is None else len(held)
    return bool(count == layers * (2 if both else 1) * (4 if biases else 2))


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
