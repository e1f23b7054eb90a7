"""`python -m llga_fuser bench`: this fuser beside eager, TorchScript and torch's own fuser."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any, TextIO

from llga_fuser.bench.run import (
    ENGINES,
    INT8_ENGINES,
    BenchError,
    ModelResult,
    Options,
    run_model,
)
from llga_fuser.bench.table import render

__all__ = ["add_arguments", "main"]

AGREE, DIFFER, FAILED = 0, 1, 2

DESCRIPTION = """\
Builds each model with seeded random weights, runs it through every engine - each in a process of
its own, timed blocks taking turns - and prints latency, warm-up time, memory, fusion groups and the
error against eager fp32.
"""
EPILOG = """\
models: any torchvision classification, segmentation or video model (resnet50, lraspp, r3d_18, ...),
        bert-base (needs transformers), mlp, tinyconv, conv_relu (what one call of a group costs)
engines: eager, torchscript (traced and frozen), builtin (torch's own oneDNN Graph fuser),
        llga_fuser

int8:   llga_fuser.quantize with 32 samples, once for all engines. eager and llga_fp32 (this fuser)
        compute in fp32, torchscript the int8 graph without fusion, llga_fuser the same one fused.
        SQNR (signal to quantization noise against eager fp32, in dB) and top-1 (share of inputs
        with the same class as eager fp32) are of inputs that were not used in calibration; the
        numbers agree from 10 dB on.

exit code: 0  the numbers agree with eager's
           1  they do not, or a fusion group of llga_fuser ran in the interpreter once warm
           2  wrong usage, or an engine failed
           (llga_fuser's numbers decide, if it is among the engines; else those of all. That the
           built-in fuser fails on a model is shown, and does not change the code.)

example: python -m llga_fuser bench resnet50 mobilenet_v2 --dtype bf16 --threads 1 --json out.json
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


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(n for n in text.split(",") if n))
    everything = (*ENGINES, "llga_fp32")
    unknown = [n for n in names if n not in everything]
    if unknown or not names:
        wrong, known = unknown[0] if unknown else text, ", ".join(everything)
        raise argparse.ArgumentTypeError(f"{wrong!r} is not an engine (choose from {known})")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    count = _at_least(1, int)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="one or several, see below")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "int8"), default="fp32", help="default: fp32"
    )
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--image-size",
        type=count,
        metavar="N",
        help="height and width (default: what the published weights were trained for)",
    )
    parser.add_argument(
        "--threads", type=count, metavar="N", help="default: as many as torch takes by itself"
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


class _Progress:
    """Says on standard error what happens now: on a terminal always in the same line."""

    def __init__(self, stream: TextIO, on: bool) -> None:
        self._stream, self._on = stream, on
        self._terminal = stream.isatty()
        self._begin = time.monotonic()
        self.model = ""

    def __call__(self, step: str) -> None:
        if not self._on:
            return
        text = f"[{time.monotonic() - self._begin:4.0f} s] {self.model}: {step}"
        if self._terminal:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
            self._stream.write("\r\x1b[K" + text[: columns - 1])
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
    if any(e.failure is not None for e in result.engines if e.name != "builtin" or not ours):
        return FAILED
    if any(not e.agrees or e.fallbacks for e in judged):
        return DIFFER
    return AGREE


def environment() -> dict[str, Any]:
    from llga_fuser._config import config

    return {key: value for key, value in config().items() if key not in ("enabled", "threads")}


def _fail(message: str) -> int:
    print(f"llga_fuser bench: {message}", file=sys.stderr)
    return FAILED


def main(arguments: argparse.Namespace) -> int:
    """Runs the command; the result is the exit code."""
    import torch

    threads = arguments.threads or torch.get_num_threads()
    engines = arguments.engines or (INT8_ENGINES if arguments.dtype == "int8" else ENGINES)
    if arguments.dtype == "int8" and "builtin" in engines:
        return _fail("--engines: builtin has no int8; choose from " + ", ".join(INT8_ENGINES))
    options = Options(
        dtype=arguments.dtype,
        batch=arguments.batch,
        image_size=arguments.image_size,
        threads=threads,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        engines=engines,
        timeout=arguments.timeout,
        verbose=arguments.verbose,
    )
    if arguments.json and arguments.json != "-":
        try:  # before the work, not after it
            pathlib.Path(arguments.json).touch()
        except OSError as error:
            return _fail(f"cannot write {arguments.json}: {error.strerror}")
    facts = environment()
    shown = ("torch", "oneDNN", "instruction set")
    if arguments.json != "-":
        print("  ".join(f"{key} {facts[key]}" for key in shown))

    progress = _Progress(sys.stderr, not arguments.no_progress)
    results: list[ModelResult] = []
    codes: list[int] = []
    for name in dict.fromkeys(arguments.models):
        progress.model = name
        try:
            result = run_model(name, options, progress)
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
        if arguments.json:
            _write_json(arguments.json, facts, results)
    return max(codes)


def _write_json(path: str, facts: dict[str, Any], results: list[ModelResult]) -> None:
    text = json.dumps({"environment": facts, "models": [r.as_dict() for r in results]}, indent=1)
    if path == "-":
        print(text)
    else:
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
