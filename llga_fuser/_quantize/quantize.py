"""`llga_fuser.quantize`: static post-training quantization."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from llga_fuser._compile import first_difference, private_copy
from llga_fuser._quantize.batches import Batches
from llga_fuser._quantize.bias import ChannelMeans, correct_biases
from llga_fuser._quantize.config import QuantizationConfig
from llga_fuser._quantize.export import ExportFlow
from llga_fuser._quantize.functions import quantize_per_tensor
from llga_fuser._quantize.fx import WHOLE, FxFlow, pads
from llga_fuser._quantize.ops import Kind, kind_of
from llga_fuser._quantize.placement import find_places, insert_observers, replace_observers
from llga_fuser._quantize.progress import Progress

__all__ = ["quantize"]

# For bias correction, which holds the values of all of them at once.
_SAMPLES = 32

# Symbolic tracing patches what it traces through.
_lock = threading.Lock()


class _Flow(Protocol):
    net: GraphModule

    def modules(self) -> dict[str, nn.Module]: ...

    def is_quantized(self, node: Node) -> bool: ...

    def convert(self) -> GraphModule: ...


def quantize(
    net: nn.Module,
    calibration_batches: Iterable[Any],
    *,
    config: QuantizationConfig | None = None,
    progress: bool | None = None,
) -> GraphModule:
    """Makes an int8 version of a float32 module, to be traced or compiled.

    Static post-training quantization: the calibration batches show which range the inputs of
    convolutions, linear layers, matrix products and attention have; these get 8-bit inputs and
    weights, and values between them are kept in 8 bits. What else there is computes in float. The
    graph is found by `torch.fx` and torch.ao's FX flow (`prepare_fx`, `convert_to_reference_fx`)
    with `get_onednn_backend_config()`, or by `torch.export` where symbolic tracing fails.

    Args:
        net: a module in eval mode with float32 weights. It is not changed.
        calibration_batches: an iterable of batches, each one call's arguments: a tensor, a tuple
            of positional arguments or a dict of keyword arguments, of any shapes that `net` takes.
            All of them name the same arguments; those left out keep their defaults for good.
            One to a few hundred samples that look like the real inputs. Iterated once. Not
            written to.
        config: observers, data types, and what stays in float; None: `QuantizationConfig()`.
        progress: show on standard error how far calibration has come; None: only on a terminal.

    Returns:
        A `torch.fx.GraphModule` in eval mode that takes and returns float tensors as `net` does,
        made of `aten::quantize_per_tensor`, `aten::dequantize` and float operators (a reference
        model in torch.ao's terms). It is slow by itself: use `llga_fuser.compile`, or
        `torch.jit.trace` and `freeze`. It can be copied, and traced under autocast.

    Raises:
        TypeError: an argument has the wrong type, or a batch does not fit `net`.
        ValueError: `net` is in training mode or is not float32; there is no batch; a batch leads to
            NaN or infinite values; `keep_float` has a name that `net` does not have; or nothing is
            left to quantize.
        RuntimeError: no graph could be found, or the graph gives other numbers than `net`; or no
            batch has reached a value that has to be measured.
    """
    config = _config(config)
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"progress: expected a bool or None, got {type(progress).__name__}")
    _check_module(net, config)
    batches = Batches(calibration_batches, net)
    show = Progress(progress, batches.count)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            first = batches.first()
            show("capture the graph")
            with _lock, _quiet():
                flow = _capture(net, first, config)
                modules = flow.modules()
                places = find_places(flow.net.graph, modules, flow.is_quantized)
                if not places.groups:
                    raise ValueError(
                        f"net: {type(net).__name__} has nothing to quantize: no convolution, "
                        "linear layer or matrix product"
                        + (" that keep_float does not exclude" if config.keep_float else "")
                    )
                weighted = [n for n in flow.net.graph.nodes if _has_weights(n, flow, modules)]
                observed = insert_observers(flow.net, places, config, modules)
            show("compare the graph with the module")
            _compare(flow.net(**private_copy(first)), net(**private_copy(first)))
            means = ChannelMeans(flow.net, [n.name for n in weighted])
            kept: list[dict[str, Any]] = []
            samples = 0
            for number, arguments in enumerate(itertools.chain([first], batches), 1):
                show("batch", number)
                if config.bias_correction and samples < _SAMPLES:
                    kept.append(private_copy(arguments))
                    samples += _batch_size(arguments)
                    means.run(private_copy(arguments))
                else:
                    flow.net(**private_copy(arguments))
            show(f"find ranges of {len({id(o.observer) for o in observed})} values")
            with _lock, _quiet():
                replace_observers(flow.net, quantize_per_tensor)
                result = flow.convert().eval()
            if kept:
                show("correct biases")
                correct_biases(result, means, kept)
            return result
    finally:
        show.clear()


# ---------------------------------------------------------------------------------------- arguments


def _config(given: Any) -> QuantizationConfig:
    if given is None:
        return QuantizationConfig()
    if not isinstance(given, QuantizationConfig):
        raise TypeError(
            f"config: expected a llga_fuser.QuantizationConfig or None, got {type(given).__name__}"
        )
    return given


def _check_module(net: Any, config: QuantizationConfig) -> None:
    if isinstance(net, torch.jit.ScriptModule):
        raise TypeError("net: expected an nn.Module that is not scripted yet, got a ScriptModule")
    if not isinstance(net, nn.Module):
        got = f"the class {net.__name__}" if isinstance(net, type) else type(net).__name__
        raise TypeError(f"net: expected an nn.Module, got {got}")
    training = [name for name, module in net.named_modules() if module.training]
    if training:
        where = f" (in its part {training[0]!r})" if training[0] else ""
        raise ValueError(
            f"net: {type(net).__name__} is in training mode{where}, expected eval mode; call "
            ".eval() on it first"
        )
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"net: expected float32 parameters, {name} is {parameter.dtype}; quantize the "
                "float32 module, and compile the result with dtype=torch.bfloat16"
            )
        if parameter.device.type != "cpu":
            raise ValueError(
                f"net: expected parameters on the CPU, {name} is on {parameter.device}"
            )
    names = {name for name, _ in net.named_modules()}
    unknown = [name for name in config.float_names if name not in names]
    if unknown:
        raise ValueError(f"config.keep_float: {type(net).__name__} has no module {unknown[0]!r}")


# ------------------------------------------------------------------------------------------ capture


def _capture(net: nn.Module, arguments: dict[str, Any], config: QuantizationConfig) -> _Flow:
    failures: list[str] = []
    causes: list[Exception] = []
    flows: list[tuple[str, type[FxFlow] | type[ExportFlow]]] = [
        ("fx", FxFlow),
        ("export", ExportFlow),
    ]
    if config.capture != "auto":
        flows = [f for f in flows if f[0] == config.capture]
    else:
        in_float = set(config.names_in_float(net))
        for name, module in net.named_modules():
            if name not in in_float and (isinstance(module, WHOLE) or pads(module)):
                flows = [flows[1], flows[0]]
                break
    for name, make in flows:
        try:
            flow: _Flow = make(net, private_copy(arguments), config)
        except Exception as error:  # tracing runs the user's code: anything may come
            failures.append(f"{name}: {type(error).__name__}: {_first_line(error)}")
            causes.append(error)
        else:
            return flow
    raise RuntimeError(
        f"net: could not find the graph of {type(net).__name__} ({'; '.join(failures)}). Keep the "
        "module that is named in the traceback in float (config.keep_float), or quantize a part "
        "of the network"
    ) from causes[-1]


def _has_weights(node: Node, flow: _Flow, modules: dict[str, nn.Module]) -> bool:
    return kind_of(node, modules) in (Kind.CONVOLUTION, Kind.LINEAR) and flow.is_quantized(node)


def _batch_size(arguments: dict[str, Any]) -> int:
    """The first size of the first tensor."""
    return next((len(v) for v in arguments.values() if isinstance(v, Tensor) and v.dim()), 1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice to use something else, which has no TorchScript."""
    with warnings.catch_warnings():
        for words in (
            r"[\s\S]*torch\.ao\.quantization is deprecated",
            r"torch\.quantize_per_tensor,",
        ):
            warnings.filterwarnings("ignore", words)
        warnings.filterwarnings("ignore", r"Please use quant_min and quant_max")
        # That sigmoid, tanh and softmax could have fixed parameters: what is observed serves, too.
        warnings.filterwarnings("ignore", r"QConfig must specify a FixedQParamsObserver")
        # The second one comes with the first such tensor of the process, and never again.
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)
        yield


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _compare(result: Any, expected: Any) -> None:
    trouble = first_difference(result, expected)
    if trouble:
        raise RuntimeError(
            f"net: its graph gives {trouble} on the first batch, before quantization. Branches and "
            "loops that depend on values can't be captured: keep the module that has them in float "
            "(config.keep_float), or quantize a part of the network"
        )
