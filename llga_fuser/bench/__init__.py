"""`python -m llga_fuser bench`: this fuser beside eager, TorchScript and other engines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, get_args

from llga_fuser._fpmath import FpmathMode
from llga_fuser._models import is_file
from llga_fuser._report.command import parse_shape
from llga_fuser.bench import compare, peers, plot
from llga_fuser.bench.run import (
    ENGINES,
    INT8_ENGINES,
    KNOWN,
    BenchError,
    ModelResult,
    Options,
    run_model,
)
from llga_fuser.bench.summary import render_summary, summary_dict
from llga_fuser.bench.table import render

__all__ = ["add_arguments", "main"]

AGREE, DIFFER, FAILED = 0, 1, 2

# What a statement about speed should rest on.
SUITE = (
    *("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0"),
    *("densenet121", "shufflenet_v2_x1_0", "vgg16", "inception_v3", "regnet_y_400mf"),
    *("convnext_tiny", "vit_b_16", "swin_t", "bert-base", "gpt2", "unet", "mlp", "tinyconv"),
)

DESCRIPTION = """\
Builds each model with seeded random weights, runs it through every engine - each in a process of
its own, timed blocks taking turns - and prints latency, warm-up time, memory, fusion groups and the
error against eager fp32. Of several results, a summary follows: medians, how many times as fast
llga_fuser is as each other engine and as the fastest of them, times to the first result.
"""
EPILOG = """\
models: any torchvision classification, segmentation or video model (resnet50, lraspp, r3d_18, ...),
        bert-base and gpt2 (need transformers), unet, mlp, tinyconv, conv_relu (what one call of a
        group costs); or "suite":
        {suite}
        or FILE.py:FUNCTION, a function of yours without arguments that returns a module and a tuple
        of its inputs, or in its place a function of a batch size and a seed that makes one;
        or a file that torch.jit.save wrote, whose inputs --shape describes
engines: eager
         torchscript: traced and frozen
         builtin: torch's own oneDNN Graph fuser
{peers}
         llga_fuser
         or "all"; by default {engines}
         (openvino and onnxruntime come with the extra "peers")

int8:   llga_fuser.quantize with 32 samples, once for torchscript, which runs the int8 graph without
        fusion, and llga_fuser, which runs it fused. eager and llga_fp32 (this fuser) compute in
        fp32; inductor (needs torchao), openvino (nncf) and onnxruntime quantize with their own
        tools, from the same samples, before the clock starts.
        SQNR (signal to quantization noise against eager fp32, in dB) and top-1 (share of inputs
        with the same class as eager fp32) are of inputs that were not used in calibration; the
        numbers agree from 10 dB on.

exit code: 0  the numbers agree with eager's; --compare: nothing is worse beyond the noise
           1  they do not, or a fusion group of llga_fuser ran in the interpreter once warm (for
              another reason than that oneDNN is slower there);
              --compare: something is slower, or fails or is wrong and was not
           2  wrong usage, or an engine failed, or a file cannot be used
           (llga_fuser's numbers decide, if it is among the engines; else those of all. That
           another fuser or framework fails on a model is shown, and does not change the code.)

examples: python -m llga_fuser bench resnet50 mobilenet_v2 --dtype bf16 --threads 1,2 --json a.json
          python -m llga_fuser bench resnet50 --engines all --plot resnet50.png
          python -m llga_fuser bench my_model.py:make --engines all
          python -m llga_fuser bench --compare a.json b.json
"""


def _at_least(least: float, kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least:g}")
        return value

    return parse


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_at_least(1, int)(part) for part in text.split(",")))


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(n for n in text.split(",") if n))
    if names == ("all",):
        names = KNOWN
    everything = (*KNOWN, "llga_fp32")
    unknown = [n for n in names if n not in everything]
    if unknown or not names:
        wrong, known = unknown[0] if unknown else text, ", ".join(everything)
        raise argparse.ArgumentTypeError(f"{wrong!r} is not an engine (choose from {known})")
    return names


def _models(names: Sequence[str]) -> list[str]:
    expanded = (SUITE if name == "suite" else (name,) for name in names)
    return list(dict.fromkeys(itertools.chain.from_iterable(expanded)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG.format(
        suite=("\n" + 8 * " ").join(textwrap.wrap(", ".join(SUITE), 92)),
        peers="\n".join(f"         {p.name}: {p.what}" for p in peers.PEERS.values()),
        engines=", ".join(ENGINES),
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    count = _at_least(1, int)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="one or several, see below")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "int8"), default="fp32", help="default: fp32"
    )
    parser.add_argument(
        "--fpmath",
        choices=get_args(FpmathMode),
        help="llga_fuser.set_fpmath_mode for llga_fuser, with --dtype fp32",
    )
    parser.add_argument(
        "--batch", type=_counts, default=(1,), metavar="N[,N]", help="one or several, default: 1"
    )
    parser.add_argument(
        "--image-size",
        type=count,
        metavar="N",
        help="height and width (default: what the published weights were trained for)",
    )
    parser.add_argument(
        "--shape",
        type=parse_shape,
        action="append",
        default=[],
        metavar="1,3,224,224[:DTYPE]",
        help="of one input of a file, for each input in order; random numbers",
    )
    parser.add_argument(
        "--threads",
        type=_counts,
        metavar="N[,N]",
        help="one or several, default: as many as torch takes by itself",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=5,
        metavar="N",
        help="timed blocks of each engine, default: 5",
    )
    parser.add_argument(
        "--seconds",
        type=_at_least(0.01, float),
        default=1.0,
        metavar="S",
        help="length of a timed block, default: 1",
    )
    parser.add_argument(
        "--engines",
        type=_engines,
        metavar="A,B",
        help=f"default: {','.join(ENGINES)}; for int8: {','.join(INT8_ENGINES)}",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write all figures there too ('-': instead of the tables)"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw how many times as fast each engine is as the first one, as .png or .svg "
        "(needs the extra 'plot')",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="run nothing: say what has changed between two files of --json, beyond their noise "
        "(with MODEL: on these alone)",
    )
    parser.add_argument("--no-progress", action="store_true", help="nothing on standard error")
    parser.add_argument(
        "--timeout",
        type=_at_least(1, float),
        default=900.0,
        metavar="S",
        help="longest wait for one step of one engine, default: 900",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="let the engines' own output through to standard error",
    )


def _columns(terminal: TextIO) -> int:
    return os.get_terminal_size(terminal.fileno()).columns or 80


class _Progress:
    """Says on standard error what happens now: on a terminal always in the same line, with a bar.

    Args:
        stream: where to.
        on: False says nothing.
        runs: how many models will be run.
        steps: how often each of them calls this object.
    """

    BAR = 20

    def __init__(self, stream: TextIO, on: bool, runs: int = 1, steps: int = 1) -> None:
        self._stream, self._on = stream, on
        self._terminal = stream.isatty()
        self._begin = time.monotonic()
        self._runs, self._steps = runs, steps
        self._run = self._step = 0
        self.model = ""

    def start(self, model: str) -> None:
        self.model = model
        self._run += 1
        self._step = 0

    def fraction(self) -> float:
        """Of the work that is done; a model counts the same as another."""
        return (max(self._run - 1, 0) + min(self._step / self._steps, 1.0)) / self._runs

    def __call__(self, step: str) -> None:
        if not self._on:
            return
        counter = f"{self._run}/{self._runs} " if self._runs > 1 else ""
        text = f"[{time.monotonic() - self._begin:4.0f} s] {counter}{self.model}: {step}"
        if self._terminal:
            done = round(self.BAR * self.fraction())
            text = "#" * done + "." * (self.BAR - done) + " " + text
        self._step += 1
        if self._terminal:
            self._stream.write("\r\x1b[K" + text[: _columns(self._stream) - 1])
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._on and self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def verdict(result: ModelResult) -> int:
    """The exit code for one model."""
    ours = [e for e in result.engines if e.name == "llga_fuser"]
    judged = ours or result.engines
    others = ("builtin", *peers.PEERS)
    if any(e.failure is not None for e in result.engines if e.name not in others or not ours):
        return FAILED
    if any(e.ran and (not e.agrees or unexpected(e.fallbacks)) for e in judged):
        return DIFFER
    return AGREE


def unexpected(fallbacks: Mapping[str, int] | None) -> bool:
    """Whether groups ran in the interpreter for another reason than that it is the faster one."""
    return any(not reason.startswith("oneDNN takes ") for reason in fallbacks or ())


def environment(engines: Sequence[str] = (), dtype: str = "fp32") -> dict[str, Any]:
    """What the figures depend on beside the options."""
    from llga_fuser._config import config

    facts = {key: value for key, value in config().items() if key not in ("enabled", "threads")}
    facts["processor"], facts["CPUs"] = _processor(), os.cpu_count()
    packages = {package for engine in engines for package in peers.packages(engine, dtype)}
    for package in sorted(packages - {"torch"}):
        facts[package] = importlib.metadata.version(package)
    return facts


def _processor() -> str | None:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None


def _fail(message: str) -> int:
    print(f"llga_fuser bench: {message}", file=sys.stderr)
    return FAILED


def _fail_early(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, before the work and not after it."""
    if not arguments.models:
        return "name at least one MODEL, or two files with --compare"
    files = [name for name in arguments.models if is_file(name)]
    if files and len(files) < len(arguments.models):
        return f"{files[0]} is a file: name files alone, or models alone"
    if files:
        for flag, given in (
            ("--dtype", arguments.dtype != "fp32"),
            ("--batch", arguments.batch != (1,)),
            ("--image-size", arguments.image_size is not None),
        ):
            if given:
                return f"{flag} is for named models; {files[0]} has its own"
        if not arguments.shape:
            return f"{files[0]}: --shape has to say which inputs it takes"
    elif arguments.shape:
        return "--shape is for files; a named model has its own inputs (--image-size)"
    if arguments.fpmath and arguments.dtype != "fp32":
        return f"--fpmath is for --dtype fp32, not for {arguments.dtype}"
    if arguments.dtype == "int8" and "builtin" in arguments.engines:
        return "--engines: builtin has no int8; choose from " + ", ".join(INT8_ENGINES)
    for name in arguments.engines:
        package = peers.missing(name, arguments.dtype)
        if package is not None:
            return (
                f"--engines: {name} needs {package}, which comes with the extra 'peers': "
                "python -m pip install 'llga_fuser[peers]'"
            )
    if arguments.plot:
        try:
            plot.check(arguments.plot)
        except plot.PlotError as error:
            return str(error)
    for file in (arguments.json, arguments.plot):
        if file and file != "-":
            try:
                pathlib.Path(file).touch()
            except OSError as error:
                return f"cannot write {file}: {error.strerror}"
    return None


def _compare(arguments: argparse.Namespace) -> int:
    old, new = arguments.compare
    try:
        text, code = compare.compare(old, new, _models(arguments.models))
    except compare.ResultFileError as error:
        return _fail(str(error))
    print(text)
    return DIFFER if code == compare.SLOWER else AGREE


def main(arguments: argparse.Namespace) -> int:
    """Runs the command; the result is the exit code."""
    import torch

    if arguments.compare:
        return _compare(arguments)
    int8 = arguments.dtype == "int8"
    engines = arguments.engines or (INT8_ENGINES if int8 else ENGINES)
    if int8 and engines == KNOWN:  # "all"
        engines = tuple(n for n in KNOWN if n != "builtin")
    arguments.engines = engines
    wrong = _fail_early(arguments)
    if wrong is not None:
        return _fail(wrong)
    sweep = list(
        itertools.product(
            _models(arguments.models),
            arguments.batch,
            arguments.threads or (torch.get_num_threads(),),
        )
    )
    options = Options(
        dtype=arguments.dtype,
        batch=sweep[0][1],
        image_size=arguments.image_size,
        threads=sweep[0][2],
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        engines=engines,
        timeout=arguments.timeout,
        verbose=arguments.verbose,
        fpmath=arguments.fpmath,
        shapes=tuple(arguments.shape),
    )
    facts = environment(options.engines, options.dtype)
    shown = ("torch", "oneDNN", "instruction set")
    if arguments.json != "-":
        print("  ".join(f"{key} {facts[key]}" for key in shown))

    # Start, weights, and for each engine: load, warm up, rounds, compare.
    steps = 2 + len(options.engines) * (3 + options.rounds)
    progress = _Progress(sys.stderr, not arguments.no_progress, len(sweep), steps)
    results: list[ModelResult] = []
    codes: list[int] = []
    for name, batch, threads in sweep:
        progress.start(name)
        try:
            result = run_model(
                name, dataclasses.replace(options, batch=batch, threads=threads), progress
            )
        except BenchError as failure:
            progress.clear()
            kind, _, text = str(failure).partition(": ")
            codes.append(_fail(text if kind == "ModelError" else f"{name}: {failure}"))
            continue
        except KeyboardInterrupt:
            progress.clear()
            return _fail("interrupted")
        progress.clear()
        results.append(result)
        codes.append(verdict(result))
        if arguments.json != "-":
            print("\n" + render(result), flush=True)
        if arguments.json and arguments.json != "-":  # after each, in case of an interruption
            pathlib.Path(arguments.json).write_text(_json(facts, results), encoding="utf-8")
    if arguments.json == "-":
        print(_json(facts, results), end="")
    elif len(results) > 1:
        print("\n" + render_summary(results), flush=True)
    if arguments.plot and results:
        plot.write(arguments.plot, results)
    return max(codes)


def _json(facts: dict[str, Any], results: list[ModelResult]) -> str:
    """See docs/benchmark.md."""
    data = {
        "format": compare.FORMAT,
        "version": compare.VERSION,
        "environment": facts,
        "models": [r.as_dict() for r in results],
        "summary": summary_dict(results),
    }
    return json.dumps(data, indent=1) + "\n"
