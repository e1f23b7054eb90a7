"""`python -m llga_fuser report`: what was fused in a model, and what was not and why."""

from __future__ import annotations

import argparse
import dataclasses
import io
import pathlib
import sys
import warnings
from typing import Any

__all__ = ["add_arguments", "main"]

DONE, NOT_FUSED, FAILED = 0, 1, 2

DESCRIPTION = """\
Runs a model and prints its fusion groups with their kernels and times, and each operator that
stayed outside with the reason.
"""
EPILOG = """\
MODEL   a torchvision classification, segmentation or video model (resnet50, ...), bert-base or gpt2
        (need transformers), unet, mlp, tinyconv, conv_relu: built with seeded random weights; or
        FILE.py:FUNCTION, a function of yours without arguments that returns a module and a tuple of
        its inputs; or a file that torch.jit.save wrote, whose inputs --shape describes

exit code: 0  done
           1  --strict, and something is not fused or runs in the interpreter
           2  wrong usage, the model cannot be loaded or run, a file cannot be written

examples: python -m llga_fuser report resnet50 --html out.html
          python -m llga_fuser report model.pt --shape 1,3,224,224 --shape 1,10:int64 --json out
"""


def parse_shape(text: str) -> tuple[tuple[int, ...], str]:
    sizes, _, dtype = text.partition(":")
    try:
        shape = tuple(int(s) for s in sizes.replace("x", ",").split(",") if s)
    except ValueError:
        shape = (-1,)
    if any(s < 0 for s in shape):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape like 1,3,224,224 or 1,10:int64")
    if dtype not in ("", "float32", "bfloat16", "float64", "int64", "int32", "bool"):
        raise argparse.ArgumentTypeError(
            f"{dtype!r} is none of float32, bfloat16, float64, int64, int32, bool"
        )
    return shape, dtype or "float32"


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name or a file, see below")
    add(
        "--shape",
        type=parse_shape,
        action="append",
        default=[],
        metavar="1,3,224,224[:DTYPE]",
        help="of one input, for each input in order; random numbers, small ones if integers",
    )
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of a named model, default: fp32")
    add("--batch", type=_at_least_one, default=1, metavar="N", help="of a named model, default: 1")
    add("--image-size", type=_at_least_one, metavar="N", help="height and width for a named model")
    add("--threads", type=_at_least_one, metavar="N", help="default: as many as torch takes")
    add("--rounds", type=_at_least_one, default=10, metavar="N", help="timed calls, default: 10")
    add("--strict", action="store_true", help="exit code 1 if something is not fused")
    add("--json", metavar="FILE", help="write the data there ('-': instead of the text)")
    add("--html", metavar="FILE", help="write a page with the graph there")
    add(
        "--partitions",
        metavar="DIRECTORY",
        help="write each oneDNN partition there, as dnnl_graph.load and benchdnn read it",
    )
    add("--compare", metavar="FILE", help="a file of --json: also say what has changed since")


class _CommandError(Exception):
    """The message is for the user."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("The following operation failed"):
        return lines[-1]
    return lines[0] if lines else type(error).__name__


def _model(options: argparse.Namespace) -> tuple[str, Any, tuple[Any, ...], Any]:
    """Name, module, inputs, data type to trace in."""
    import torch

    torch.manual_seed(0)
    from llga_fuser import _models

    path = options.model
    if _models.is_file(path):
        for flag, given in (
            ("--dtype", options.dtype != "fp32"),
            ("--batch", options.batch != 1),
            ("--image-size", options.image_size is not None),
        ):
            if given:
                raise _CommandError(f"{flag} is for named models; {path} has its own")
        try:
            loaded = _models.from_file(path, options.shape)
        except _models.ModelError as error:
            raise _CommandError(str(error)) from error
        module = loaded.module
        # A frozen module has lost the attribute, and cannot be frozen again.
        module = torch.jit.freeze(module) if hasattr(module, "training") else module
        return loaded.name, module, loaded.inputs(1, 0), None
    if options.shape:
        raise _CommandError("--shape is for files; a named model has its own inputs (--image-size)")
    try:
        model = _models.build(path, options.image_size)
    except _models.ModelError as error:
        raise _CommandError(str(error)) from error
    dtype = torch.bfloat16 if options.dtype == "bf16" else None
    return path, model.module, model.inputs(options.batch, 1), dtype


def _run(options: argparse.Namespace) -> int:
    import json

    import torch

    import llga_fuser
    from llga_fuser._report.diff import compare

    previous = None
    if options.compare:
        try:
            previous = json.loads(pathlib.Path(options.compare).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _CommandError(f"{options.compare}: {_first_line(error)}") from error
    for file in (options.json, options.html):
        if file and file != "-":  # before the work, not after it
            try:
                pathlib.Path(file).touch()
            except OSError as error:
                raise _CommandError(f"cannot write {file}: {error.strerror}") from error
    if options.threads:
        torch.set_num_threads(options.threads)
    name, module, inputs, dtype = _model(options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = llga_fuser.report(module, *inputs, rounds=options.rounds, dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _CommandError(f"{name}: {_first_line(error)}") from error
    report = dataclasses.replace(report, model=name)
    if options.json == "-":
        print(report.to_json())
    else:
        print(report)
        if options.json:
            report.to_json(options.json)
    if options.html:
        report.to_html(options.html)
    if options.partitions:
        _write_partitions(report, pathlib.Path(options.partitions))
    if previous is not None:
        try:
            difference = compare(previous, report)
        except (ValueError, KeyError, TypeError) as error:
            raise _CommandError(f"{options.compare}: {_first_line(error)}") from error
        print(f"\nagainst {options.compare}:\n{difference}")
    if options.strict:
        try:
            report.check_strict()
        except llga_fuser.UnfusedError as error:
            print(f"llga_fuser report: {_first_line(error)}", file=sys.stderr)
            return NOT_FUSED
    return DONE


def _write_partitions(report: Any, folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for p in report.partitions:
            p.to_json(folder / f"partition-{p.index:03}.json")
    except OSError as error:
        raise _CommandError(f"cannot write to {folder}: {error.strerror}") from error


def main(options: argparse.Namespace) -> int:
    """Runs the command; the result is the exit code."""
    try:
        return _run(options)
    except _CommandError as error:
        print(f"llga_fuser report: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("llga_fuser report: interrupted", file=sys.stderr)
    except BrokenPipeError:  # the reader of standard output has gone
        sys.stdout = io.StringIO()
        return DONE
    return FAILED
