"""`torch.compile(net, backend="llga")`: dynamo's graphs through TorchScript to this fuser.

Dynamo hands over an FX graph whose parameters and buffers are inputs. They are bound as constants
(looked at in each call: a new or changed one binds again), the graph is traced, or scripted where
sizes are inputs, and compiled by `llga_fuser.compile`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from llga_fuser._compile import compile as compile_ahead
from llga_fuser._fpmath import FpmathMode, fpmath_value

__all__ = ["dynamo_backend"]

_log = logging.getLogger("llga_fuser")

# Sizes for which one graph is traced, where it can't be scripted.
_TRACES = 64


class _Options(NamedTuple):
    dtype: torch.dtype | None = None
    fpmath_mode: FpmathMode | None = None
    fallback: str = "eager"


def dynamo_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that `torch.compile(..., backend="llga")` calls for each graph.

    For inference: call the compiled model under `torch.no_grad()` or `torch.inference_mode()`.
    Graphs in which a gradient is wanted, and graphs that TorchScript cannot take, go to another
    backend, with a warning of the logger "llga_fuser". Results have the data types that eager gives
    them.

    Args:
        graph_module: dynamo's graph.
        example_inputs: its inputs, fake or real.
        mode: not used; `torch.compile` passes it on if it is given.
        options: a dict with any of these keys:

            * "dtype": `torch.bfloat16` computes convolutions and matrix products in bfloat16, as
              autocast does; `torch.float32` or None (the default) leaves data types as they are.
            * "fpmath_mode": see `llga_fuser.set_fpmath_mode`; None (the default) is the mode of
              the process.
            * "fallback": the name of the backend for what this one leaves; "eager" by default.

    Returns:
        A function of the graph's inputs.

    Raises:
        ValueError: an unknown option, or a value that it can't have.
        TypeError: "fpmath_mode" is not a str.
        torch._dynamo.exc.InvalidBackend: an unknown `fallback`.
    """
    unknown = set(options or {}) - set(_Options._fields)
    if unknown:
        raise ValueError(
            f"options: unknown {', '.join(sorted(unknown))}; expected any of "
            f"{', '.join(_Options._fields)}"
        )
    chosen = _Options(**(options or {}))
    if chosen.fpmath_mode is not None:
        fpmath_value(chosen.fpmath_mode, "options['fpmath_mode']")
    if chosen.dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(
            f"options['dtype']: expected torch.bfloat16, torch.float32 or None, got {chosen.dtype}"
        )
    reason = _unsuitable(graph_module, example_inputs)
    if reason:
        return _other_backend(graph_module, example_inputs, chosen.fallback, reason)
    return _Runner(graph_module, example_inputs, chosen)


# ------------------------------------------------------------------------------ what is not taken


def _unsuitable(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Why the graph is left to another backend; "" if it is not."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a gradient is wanted; call the model under torch.no_grad()"
    if any(t.device.type != "cpu" for t in tensors):
        return "an input is not on the CPU"
    if any(m.training for n, m in graph_module.named_modules() if n):
        return "a submodule is in training mode"
    for value in _outputs(graph_module):
        if isinstance(value, fx.Node) and not _is_tensor(value):
            return f"output {value.name} is not a tensor"
    return ""


def _other_backend(
    graph_module: fx.GraphModule, inputs: Sequence[Any], name: str, reason: str
) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import lookup_backend

    _log.warning("torch.compile: a graph runs in the backend %r: %s", name, reason)
    backend = lookup_backend(name)
    return backend(graph_module, list(inputs))


def _outputs(graph_module: fx.GraphModule) -> Sequence[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    values = output.args[0]
    return values if isinstance(values, (tuple, list)) else (values,)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _is_static(node: fx.Node) -> bool:
    """A parameter or a buffer of the model."""
    attributes = node.meta.get("tensor_dict", {})
    return attributes.get("_dynamo_static_input_type") is not None or isinstance(
        node.meta.get("example_value"), torch.nn.Parameter
    )


def _version(tensor: Tensor) -> int:
    """Counts the writes to a tensor; nobody writes to an inference tensor outside that mode."""
    return 0 if tensor.is_inference() else tensor._version


def _written(graph_module: fx.GraphModule, inputs: tuple[Any, ...]) -> set[int]:
    """Indices of the inputs that the graph writes to, found by running it on fake tensors."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = detect_fake_mode(inputs) or FakeTensorMode()
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), mode:
            fakes = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
                if isinstance(x, Tensor)
                else x
                for x in inputs
            ]
            before = [_version(x) if isinstance(x, Tensor) else 0 for x in fakes]
            graph_module(*fakes)
    except Exception as error:  # an op without a fake kernel, a tensor attribute of the graph
        _log.info("torch.compile: parameters stay inputs, as the graph has no fake run: %s", error)
        return set(range(len(inputs)))
    return {i for i, x in enumerate(fakes) if isinstance(x, Tensor) and _version(x) != before[i]}


# ------------------------------------------------------------------------------------ the graph


def _bind(
    graph_module: fx.GraphModule, tensors: dict[int, Tensor], numbers: dict[int, Any]
) -> fx.GraphModule:
    """A copy with some inputs, given by index, as attributes; returns a tuple of tensors."""
    bound = fx.GraphModule(graph_module, fx.Graph())
    graph = bound.graph
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(graph_module.graph, copies)
    graph.output(tuple(v for v in _as_tuple(output) if isinstance(v, fx.Node)))
    for node in graph_module.graph.nodes:  # what fx.GraphModule copies for a graph it is given
        if node.op in ("get_attr", "call_module"):
            _copy_attribute(graph_module, bound, str(node.target))
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        node.type = Tensor
        if index in tensors:
            name = f"static_{index}"
            bound.register_buffer(name, tensors[index])
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(name))
            graph.erase_node(node)
        elif index in numbers:
            value = numbers[index]
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda n: value if n is node else n)  # noqa: B023
                user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)  # noqa: B023
            graph.erase_node(node)
        elif isinstance(node.meta.get("example_value"), (int, torch.SymInt)):
            node.type = int
    bound.recompile()
    bound.training = False
    return bound


def _copy_attribute(source: Any, target: Any, path: str) -> None:
    *parents, last = path.split(".")
    for name in parents:
        source = getattr(source, name)
        if not hasattr(target, name):
            setattr(target, name, torch.nn.Module())
        target = getattr(target, name)
    if not hasattr(target, last):
        setattr(target, last, getattr(source, last))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


class _Compiled(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[int, ...]  # inputs it takes


class _Runner:
    """Runs one of dynamo's graphs; compiled when it is first called, with real inputs."""

    def __init__(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: _Options
    ) -> None:
        self._graph_module = graph_module
        self._examples = tuple(example_inputs)
        self._options = options
        nodes = graph_module.graph.find_nodes(op="placeholder")
        written = _written(graph_module, self._examples)
        self._static = [i for i, n in enumerate(nodes) if _is_static(n) and i not in written]
        self._numbers = [i for i, n in enumerate(nodes) if not _is_tensor(n)]
        self._outputs = [
            v.meta["example_value"].dtype if isinstance(v, fx.Node) else v
            for v in _outputs(graph_module)
        ]
        self._lock = threading.Lock()
        self._bound: list[tuple[Tensor, int]] = []  # the static inputs and their versions
        self._scripted: bool | None = None  # not tried yet
        self._compiled: OrderedDict[tuple[Any, ...], _Compiled] = OrderedDict()
        self._failed: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._failed is not None:
            return self._failed(*inputs)
        with torch.no_grad():
            compiled = self._find(inputs)
            if compiled is None:
                return self._graph_module(*inputs)
            results = compiled.function(*(inputs[i] for i in compiled.arguments))
            return self._restore(results)

    def _find(self, inputs: tuple[Any, ...]) -> _Compiled | None:
        key = () if self._scripted else tuple(inputs[i] for i in self._numbers)
        compiled = self._compiled.get(key)
        if compiled is not None and self._is_current(inputs):
            return compiled
        with self._lock:
            if not self._is_current(inputs):
                self._compiled.clear()
                self._bound = [(inputs[i], _version(inputs[i])) for i in self._static]
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compile(inputs)
            return compiled

    def _is_current(self, inputs: tuple[Any, ...]) -> bool:
        if len(self._bound) != len(self._static):
            return False
        return all(
            inputs[i] is tensor and _version(tensor) == version
            for i, (tensor, version) in zip(self._static, self._bound, strict=True)
        )

    def _compile(self, inputs: tuple[Any, ...]) -> _Compiled | None:
        tensors = {i: inputs[i] for i in self._static}
        numbers = {i: inputs[i] for i in self._numbers}
        try:
            compiled = None
            if numbers and self._scripted is not False:
                compiled = self._try_script(tensors, inputs)
                self._scripted = compiled is not None
            if compiled is None:
                bound = _bind(self._graph_module, tensors, numbers)
                rest = [i for i in range(len(inputs)) if i not in tensors and i not in numbers]
                compiled = self._ahead(bound, inputs, rest)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            self._failed = _other_backend(
                self._graph_module, self._examples, self._options.fallback, reason
            )
            return None
        key = () if self._scripted else tuple(numbers.values())
        self._compiled[key] = compiled
        if len(self._compiled) > _TRACES:
            self._compiled.popitem(last=False)
        return compiled

    def _try_script(self, tensors: dict[int, Tensor], inputs: tuple[Any, ...]) -> _Compiled | None:
        bound = _bind(self._graph_module, tensors, {})
        rest = [i for i in range(len(inputs)) if i not in tensors]
        try:
            script = torch.jit.script(bound)
        except Exception as error:  # anything that TorchScript's compiler does not know
            _log.info("torch.compile: traced for each size, as scripting fails: %s", error)
            return None
        return self._ahead(script.eval(), inputs, rest)

    def _ahead(self, module: Any, inputs: tuple[Any, ...], arguments: list[int]) -> _Compiled:
        made = compile_ahead(
            module,
            tuple(inputs[i] for i in arguments),
            dtype=self._options.dtype,
            check=False,
            fpmath_mode=self._options.fpmath_mode,
        )
        return _Compiled(made, tuple(arguments))

    def _restore(self, results: Any) -> tuple[Any, ...]:
        """With the outputs that are no tensors, and in the data types that dynamo expects."""
        tensors = iter(_as_tuple(results))
        return tuple(
            next(tensors).to(wanted) if isinstance(wanted, torch.dtype) else wanted
            for wanted in self._outputs
        )
