"""Other engines to measure against. Adding one is one function here.

The function takes a `Context` and returns what is called with the inputs, float32 or int64 torch
tensors; conversions it needs are part of the timed call. It may return tensors or numpy arrays.

For int8 an engine brings its own way to quantize, a second function here (`quantizes`). It gets the
same samples to calibrate with as llga_fuser.quantize, and runs before the clock starts.

Imports neither torch nor the package at the top: the parent process reads the names here, and a
worker loads this file alone, without the fuser.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["PEERS", "Context", "Peer", "missing", "not_applicable", "packages"]

Run = Callable[..., Any]


class Context(NamedTuple):
    """What an engine is made from."""

    # An nn.Module in evaluation mode, float32, which may be changed; for the making of an int8
    # engine, what its quantizing function returned.
    module: Any
    inputs: tuple[Any, ...]  # of the timed calls
    dtype: str
    threads: int
    folder: pathlib.Path  # for files; removed at the end
    calibration: Sequence[tuple[Any, ...]] = ()  # int8: inputs as `inputs`, 32 samples in all


class Peer(NamedTuple):
    """One engine."""

    name: str
    make: Callable[[Context], Run]
    # Imported before the clock starts, as torch is. All but torch are in the extra "peers".
    modules: tuple[str, ...]
    refuses: Mapping[str, str]  # data types it does not run, and why
    script: bool  # whether it takes TorchScript modules
    quantize: Callable[[Context], Any] | None = None  # None: no int8
    quantize_modules: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        return (self.make.__doc__ or "").strip().splitlines()[0].rstrip(".")


PEERS: dict[str, Peer] = {}


def peer(
    *modules: str,
    refuses: Mapping[str, str] | None = None,
    script: bool = True,
) -> Callable[[Callable[[Context], Run]], Callable[[Context], Run]]:
    """Registers an engine under its function's name; the arguments are the fields of `Peer`."""

    def register(make: Callable[[Context], Run]) -> Callable[[Context], Run]:
        name = make.__name__
        PEERS[name] = Peer(name, make, modules, refuses or {}, script)
        return make

    return register


def quantizes(
    name: str, *modules: str
) -> Callable[[Callable[[Context], Any]], Callable[[Context], Any]]:
    """Registers the function that makes what the engine `name` runs in int8."""

    def register(quantize: Callable[[Context], Any]) -> Callable[[Context], Any]:
        PEERS[name] = PEERS[name]._replace(quantize=quantize, quantize_modules=modules)
        return quantize

    return register


def modules_of(name: str, dtype: str) -> tuple[str, ...]:
    """What is imported before the clock starts."""
    known = PEERS.get(name)
    if known is None:
        return ()
    return known.modules + (known.quantize_modules if dtype == "int8" else ())


def packages(name: str, dtype: str) -> list[str]:
    """What the engine needs to be installed."""
    return list(dict.fromkeys(m.partition(".")[0] for m in modules_of(name, dtype)))


def missing(name: str, dtype: str) -> str | None:
    """A package that the engine needs and that is not installed."""
    needed = packages(name, dtype)
    return next((p for p in needed if importlib.util.find_spec(p) is None), None)


def not_applicable(name: str, dtype: str, *, script: bool = False) -> str | None:
    """Why the engine does not run this data type, or a TorchScript module, at all."""
    known = PEERS.get(name)
    if known is None:
        return None
    if script and not known.script:
        return "takes no TorchScript modules"
    if dtype not in ("fp32", "bf16", *(("int8",) if known.quantize else ())):
        return f"not set up for {dtype}"
    return known.refuses.get(dtype)


def quantized(name: str, context: Context) -> Context:
    """With what the engine makes of the module before the clock starts."""
    quantize = PEERS[name].quantize
    return context._replace(module=quantize(context)) if quantize else context


def prepare(name: str, context: Context) -> Run:
    return PEERS[name].make(context)


def _has_vnni() -> bool:
    """Without, sums of two products of 8-bit numbers saturate in 16 bit: smaller weights help."""
    import torch

    return bool(torch.cpu._is_vnni_supported())  # PyTorch has no public name for it


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
    if context.dtype != "bf16":
        run: Run = torch.compile(module, dynamic=False)
        return run
    module = module.to(torch.bfloat16)

    @torch.compile(dynamic=False)
    def in_bfloat16(*inputs: Any) -> Any:  # with the casts, so that they can be fused
        return module(*(x.bfloat16() if x.is_floating_point() else x for x in inputs))

    return in_bfloat16


@quantizes("inductor", "torchao")
def _for_inductor(context: Context) -> Any:
    """The PT2E flow of torchao, with its quantizer for x86."""
    import torch
    import torchao.quantization.pt2e as pt2e
    from torchao.quantization.pt2e import quantize_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(
        x86.get_default_x86_inductor_quantization_config(reduce_range=not _has_vnni())
    )
    exported = torch.export.export(context.module, context.inputs).module()
    observed = quantize_pt2e.prepare_pt2e(exported, quantizer)
    for sample in context.calibration:
        observed(*sample)
    module = quantize_pt2e.convert_pt2e(observed)
    pt2e.move_exported_model_to_eval(module)
    return module


def _to_openvino(context: Context) -> Any:
    import openvino as ov

    return ov.convert_model(
        context.module,
        example_input=context.inputs,
        input=[list(x.shape) for x in context.inputs],
    )


@peer("openvino")
def openvino(context: Context) -> Run:
    """OpenVINO's CPU plugin, latency hint, fixed shapes."""
    import openvino as ov

    # What int8 leaves in floating point is float32, as it is with llga_fuser.
    precision = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}[context.dtype]
    model = context.module if context.dtype == "int8" else _to_openvino(context)
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


@quantizes("openvino", "nncf")
def _for_openvino(context: Context) -> Any:
    """NNCF's post-training quantization, preset "mixed"."""
    import nncf

    attention = any("Attention" in type(m).__name__ for m in context.module.modules())
    fix = nncf.OverflowFix.DISABLE if _has_vnni() else nncf.OverflowFix.ENABLE
    return nncf.quantize(
        _to_openvino(context),
        nncf.Dataset(context.calibration, lambda sample: [x.numpy() for x in sample]),
        subset_size=len(context.calibration),
        preset=nncf.QuantizationPreset.MIXED,
        model_type=nncf.ModelType.TRANSFORMER if attention else None,
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    )


def _names(context: Context) -> list[str]:
    return [f"x{i}" for i in range(len(context.inputs))]


def _to_onnx(context: Context) -> str:
    import torch

    path = str(context.folder / "model.onnx")
    torch.onnx.export(
        context.module,
        context.inputs,
        path,
        input_names=_names(context),
        dynamo=True,
        verbose=False,
    )
    return path


@peer(
    *("onnxruntime", "onnx", "onnxscript"),
    refuses={"bf16": "its CPU kernels are float32"},
    script=False,
)
def onnxruntime(context: Context) -> Run:
    """ONNX Runtime's CPU provider, all graph optimisations, after torch.onnx.export."""
    import onnxruntime as ort

    names = _names(context)
    path = context.module if context.dtype == "int8" else _to_onnx(context)
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


@quantizes("onnxruntime", "onnxruntime.quantization")
def _for_onnxruntime(context: Context) -> str:
    """Its static quantization: Q-DQ pairs, unsigned activations, signed weights per channel."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]  # has no types
        def __init__(self) -> None:
            self.left = iter(context.calibration)

        def get_next(self) -> dict[str, Any] | None:
            sample = next(self.left, None)
            if sample is None:
                return None
            return {n: x.numpy() for n, x in zip(_names(context), sample, strict=True)}

    prepared, path = (str(context.folder / name) for name in ("prepared.onnx", "int8.onnx"))
    quant_pre_process(_to_onnx(context), prepared)
    quantization.quantize_static(
        prepared,
        path,
        Samples(),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
        reduce_range=not _has_vnni(),
    )
    return path
