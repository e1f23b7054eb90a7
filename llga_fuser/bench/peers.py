"""Other engines to measure against. Adding one is one function here.

The function takes a `Context` and returns what is called with the inputs, float32 or int64 torch
tensors; conversions it needs are part of the timed call. It may return tensors or numpy arrays.

Imports neither torch nor the package at the top: the parent process reads the names here, and a
worker loads this file alone, without the fuser.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["PEERS", "Context", "Peer", "missing", "not_applicable"]

Run = Callable[..., Any]


class Context(NamedTuple):
    """What an engine is made from."""

    module: Any  # an nn.Module in evaluation mode, float32; may be changed
    inputs: tuple[Any, ...]  # of the timed calls
    dtype: str
    threads: int
    folder: pathlib.Path  # for files; removed at the end


class Peer(NamedTuple):
    """One engine."""

    name: str
    make: Callable[[Context], Run]
    # Imported before the clock starts, as torch is. All but torch are in the extra "peers".
    modules: tuple[str, ...]
    # Data types it does not run, and why. Others than fp32 and bf16 are those in `also` alone.
    refuses: Mapping[str, str]
    also: tuple[str, ...]
    script: bool  # whether it takes TorchScript modules

    @property
    def what(self) -> str:
        return (self.make.__doc__ or "").strip().splitlines()[0].rstrip(".")


PEERS: dict[str, Peer] = {}


def peer(
    *modules: str,
    refuses: Mapping[str, str] | None = None,
    also: tuple[str, ...] = (),
    script: bool = True,
) -> Callable[[Callable[[Context], Run]], Callable[[Context], Run]]:
    """Registers an engine under its function's name; the arguments are the fields of `Peer`."""

    def register(make: Callable[[Context], Run]) -> Callable[[Context], Run]:
        name = make.__name__
        PEERS[name] = Peer(name, make, modules, refuses or {}, also, script)
        return make

    return register


def missing(name: str) -> str | None:
    """A package that the engine needs and that is not installed."""
    known = PEERS.get(name)
    packages = [m.partition(".")[0] for m in known.modules] if known else []
    return next((p for p in packages if importlib.util.find_spec(p) is None), None)


def not_applicable(name: str, dtype: str, *, script: bool = False) -> str | None:
    """Why the engine does not run this data type, or a TorchScript module, at all."""
    known = PEERS.get(name)
    if known is None:
        return None
    if script and not known.script:
        return "takes no TorchScript modules"
    if dtype not in ("fp32", "bf16", *known.also):
        return f"not set up for {dtype}"
    return known.refuses.get(dtype)


def prepare(name: str, context: Context) -> Run:
    return PEERS[name].make(context)


# ---------------------------------------------------------------------------------------- engines


@peer()
def ofi(context: Context) -> Run:
    """torch.jit.optimize_for_inference, on top of what torchscript does."""
    import contextlib

    import torch

    autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if context.dtype == "bf16":
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with autocast:
        traced = torch.jit.trace(context.module, context.inputs, check_trace=False)
    # Freezes what is not frozen.
    run: Run = torch.jit.optimize_for_inference(traced)
    return run


@peer("torch._dynamo", "torch._inductor.compile_fx", script=False)
def inductor(context: Context) -> Run:
    """torch.compile with freezing; needs a C++ compiler."""
    import torch
    import torch._inductor.config as settings

    settings.freezing = True
    module = context.module
    if context.dtype == "fp32":
        run: Run = torch.compile(module, dynamic=False)
        return run
    module = module.to(torch.bfloat16)

    @torch.compile(dynamic=False)
    def in_bfloat16(*inputs: Any) -> Any:  # with the casts, so that they can be fused
        return module(*(x.bfloat16() if x.is_floating_point() else x for x in inputs))

    return in_bfloat16


@peer("openvino")
def openvino(context: Context) -> Run:
    """OpenVINO's CPU plugin, latency hint, fixed shapes."""
    import openvino as ov

    precision = {"fp32": "f32", "bf16": "bf16"}[context.dtype]
    model = ov.convert_model(
        context.module,
        example_input=context.inputs,
        input=[list(x.shape) for x in context.inputs],
    )
    compiled = ov.Core().compile_model(
        model,
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": context.threads,
        },
    )
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if taken != precision:
        raise RuntimeError(f"openvino computes in {taken} on this processor")
    request = compiled.create_infer_request()
    count = len(compiled.outputs)

    def run(*inputs: Any) -> Any:
        got = request.infer([x.numpy() for x in inputs], share_inputs=True, share_outputs=True)
        return got[0] if count == 1 else [got[i] for i in range(count)]

    return run


@peer(
    *("onnxruntime", "onnx", "onnxscript"),
    refuses={"bf16": "its CPU kernels are float32"},
    script=False,
)
def onnxruntime(context: Context) -> Run:
    """ONNX Runtime's CPU provider, all graph optimisations, after torch.onnx.export."""
    import onnxruntime as ort
    import torch

    path = str(context.folder / "model.onnx")
    names = [f"x{i}" for i in range(len(context.inputs))]
    torch.onnx.export(
        context.module, context.inputs, path, input_names=names, dynamo=True, verbose=False
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = context.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    taken = {i.name for i in session.get_inputs()}  # one that nothing reads is not there

    def run(*inputs: Any) -> Any:
        feed = {n: x.numpy() for n, x in zip(names, inputs, strict=True) if n in taken}
        got = session.run(None, feed)
        return got[0] if len(got) == 1 else got

    return run
