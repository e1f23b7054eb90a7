"""Compares engines on many networks: less careful than `python -m llga_fuser bench`, but quick.

    python benchmarks/quick.py [options] SPEC [SPEC ...]
    python benchmarks/quick.py --list

For the specs see networks.py. Each network has one process, in which all engines are built,
compared with eager float32, and timed in turn. "1.30 (1.05/1.03)" is the median in milliseconds,
and how many times as long as ours: the median over the rounds of the medians' ratio, and the ratio
of the shortest calls.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

OURS = "llga_fuser"
SETTLE = 0.06
CHECK_SEEDS, TIMED_SEED = (1000, 1001), 1

Run = Callable[..., Any]


def message(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:80]


# ------------------------------------------------------------------------------------------ child


class Child:
    """Measures one network."""

    def __init__(self, options: argparse.Namespace, folder: pathlib.Path) -> None:
        import torch
        from networks import build

        import llga_fuser

        torch.set_num_threads(options.threads)
        torch.set_grad_enabled(False)
        if options.fpmath:
            llga_fuser.set_fpmath_mode(options.fpmath)
        self.options, self.folder = options, folder
        with llga_fuser.fusion(False):
            self.net = build(options.specs[0])
            self.inputs = self.net.inputs(options.batch, TIMED_SEED)
            self.checks = [self.net.inputs(options.batch, seed) for seed in CHECK_SEEDS]
            self.answers = self.flat(self.net.module)
        self.int8: Any = None

    def flat(self, run: Run) -> Any:
        """What it answers, as one vector."""
        import torch

        from llga_fuser.bench import worker

        return torch.cat([worker.flat(run(*check)).clone() for check in self.checks]).double()

    def samples(self, batch: int) -> list[tuple[Any, ...]]:
        """To calibrate with, in batches, as the bench command has them."""
        from llga_fuser.bench.worker import CALIBRATION_SAMPLES, CALIBRATION_SEED

        seeds = range(CALIBRATION_SEED, CALIBRATION_SEED + CALIBRATION_SAMPLES // batch)
        return [self.net.inputs(batch, seed) for seed in seeds]

    def script(self) -> Any:
        import llga_fuser
        from llga_fuser.bench import worker

        module = self.net.module
        if self.options.dtype == "int8":
            if self.int8 is None:
                quantize: Any = llga_fuser.quantize
                self.int8 = quantize(copy.deepcopy(module), self.samples(4), progress=False)
            module = self.int8
        return worker.TorchScript(self.options.dtype == "bf16").prepare(module, self.inputs)

    def scripted(self, fused: bool) -> Run:
        """Traced, frozen, and called until TorchScript has optimised it."""
        import llga_fuser

        with llga_fuser.fusion(fused):
            run: Run = self.script()
            for _ in range(5):
                run(*self.inputs)
        return run

    def peer(self, name: str) -> Run:
        from llga_fuser.bench import peers

        options = self.options
        reason = peers.not_applicable(name, options.dtype)
        if reason is not None:
            raise ValueError(reason)
        folder = self.folder / name
        folder.mkdir()
        context = peers.Context(
            copy.deepcopy(self.net.module), self.inputs, options.dtype, options.threads, folder
        )
        if options.dtype == "int8":
            samples = self.samples(options.batch)
            context = peers.quantized(name, context._replace(calibration=samples))
        import llga_fuser

        with llga_fuser.fusion(False):  # some make a trace
            run = peers.prepare(name, context)
            for _ in range(3):
                run(*self.inputs)
        return run

    def engine(self, name: str) -> Run:
        if name == "eager":
            run: Run = self.net.module
            return run
        if name in (OURS, "torchscript"):
            return self.scripted(name == OURS)
        return self.peer(name)

    def error(self, run: Run) -> float:
        """Relative, against eager; not a number if it is of another shape."""
        got = self.flat(run)
        if got.shape != self.answers.shape:
            return float("nan")
        return float((got - self.answers).norm() / self.answers.norm())

    def timed(self, run: Run) -> list[float]:
        """Seconds of the calls of one round."""
        clock, inputs = time.perf_counter, self.inputs
        time.sleep(SETTLE)  # until the threads of the engine before have stopped waiting
        for _ in range(2):
            run(*inputs)
        calls: list[float] = []
        end = clock() + self.options.seconds
        while not calls or clock() < end:
            start = clock()
            run(*inputs)
            calls.append(clock() - start)
        return calls

    def measure(self) -> dict[str, Any]:
        import llga_fuser
        from llga_fuser.bench import worker

        runs: dict[str, Run] = {}
        found: dict[str, Any] = {}
        for name in self.options.engines:
            try:
                runs[name] = self.engine(name)
                found[name] = {"error": self.error(runs[name]), "medians": [], "least": []}
            except Exception as error:
                runs.pop(name, None)
                found[name] = {"failed": message(error)}
        if OURS in runs:
            graph: Any = runs[OURS].graph_for(*self.inputs)  # type: ignore[attr-defined]
            found[OURS] |= worker.count_fused(graph, "llga::FusionGroup")
        gc.collect()
        gc.disable()
        before = dict(llga_fuser._C.fallbacks())
        for number in range(self.options.rounds):
            order = list(runs) if number % 2 == 0 else list(reversed(runs))
            for name in order:
                calls = self.timed(runs[name])
                found[name]["medians"].append(statistics.median(calls))
                found[name]["least"].append(min(calls))
        if OURS in runs:
            after = dict(llga_fuser._C.fallbacks())
            grown = {reason: count - before.get(reason, 0) for reason, count in after.items()}
            found[OURS]["fallbacks"] = {reason: count for reason, count in grown.items() if count}
        return found


def child(options: argparse.Namespace) -> None:
    # Standard output for the answer alone: what libraries print there goes to standard error.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = Child(options, pathlib.Path(folder)).measure()
        except Exception as error:
            import traceback

            traceback.print_exc()
            found = {"": {"failed": message(error)}}
    channel.write(json.dumps(found))
    channel.close()
    sys.stderr.flush()
    os._exit(0)  # what the engines do at the end does not matter


# ----------------------------------------------------------------------------------------- parent


def ask(options: argparse.Namespace, spec: str) -> dict[str, Any]:
    """Starts the process that measures one network."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, __file__, "--child", "--engines", ",".join(options.engines)]
    for name in ("dtype", "threads", "batch", "rounds", "seconds"):
        command += [f"--{name}", str(getattr(options, name))]
    if options.fpmath:
        command += ["--fpmath", options.fpmath]
    with tempfile.TemporaryFile("w+", errors="replace") as noise:
        process = subprocess.Popen(
            [*command, spec],
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else noise,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            return {"": {"failed": f"killed after {options.timeout:g} s"}}
        finally:
            with contextlib.suppress(ProcessLookupError):  # and what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0 and answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        noise.seek(0)
        last = (noise.read().strip().splitlines() or [""])[-1]
        return {"": {"failed": f"ended with {process.returncode}: {last}"[:120]}}


def ratios(ours: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """How many times as long as ours: by the medians, and by the shortest calls."""
    medians = zip(other["medians"], ours["medians"], strict=True)
    return statistics.median(a / b for a, b in medians), min(other["least"]) / min(ours["least"])


def line(spec: str, found: dict[str, Any]) -> str:
    if "" in found:
        return f"{spec}  FAILED {found['']['failed']}"
    parts = []
    ours = found.get(OURS, {})
    for name, result in found.items():
        label = "ours" if name == OURS else name
        if "failed" in result:
            parts.append(f"{label} {result['failed']}")
            continue
        milliseconds = 1e3 * statistics.median(result["medians"])
        error = f"err {result['error']:.0e}"
        if name == OURS:
            counts = f"groups {result['groups']} fallbacks {result['fallbacks']}"
            parts.append(f"{label} {milliseconds:.3f} ms {error} {counts}")
        elif "medians" in ours:
            median, least = ratios(ours, result)
            parts.append(f"{label} {milliseconds:.3f} ({median:.2f}/{least:.2f}) {error}")
        else:
            parts.append(f"{label} {milliseconds:.3f} {error}")
    return f"{spec}  {' | '.join(parts)}"


def summary(everything: dict[str, dict[str, Any]], engines: Sequence[str]) -> list[str]:
    """Of each peer, and of the fastest peer of each network: geometric mean, and the least."""
    found: dict[str, dict[str, float]] = {name: {} for name in engines if name != OURS}
    fastest: dict[str, float] = {}
    for spec, results in everything.items():
        ours = results.get(OURS, {})
        if "medians" not in ours:
            continue
        for name, result in results.items():
            if name != OURS and "medians" in result:
                found[name][spec] = ratios(ours, result)[0]
        here = [by_spec[spec] for by_spec in found.values() if spec in by_spec]
        if here:
            fastest[spec] = min(here)
    rows = [(name, by_spec) for name, by_spec in found.items() if by_spec]
    if len(rows) > 1:
        rows.append(("the fastest peer of each", fastest))
    lines = []
    for name, by_spec in rows:
        least = min(by_spec, key=lambda spec: by_spec[spec])
        mean = statistics.geometric_mean(by_spec.values())
        lines.append(
            f"{name}: geometric mean {mean:.3f} of {len(by_spec)}, "
            f"the least {by_spec[least]:.3f} ({least})"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", metavar="SPEC", help="networks, see networks.py")
    parser.add_argument("--list", action="store_true", help="list the specs and end")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "int8"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one engine in one round")
    parser.add_argument(
        "--engines",
        type=lambda text: text.split(","),
        default=[OURS, "openvino", "onnxruntime", "torchscript"],
        help="separated by commas: llga_fuser, torchscript, eager (float32), and those of peers.py",
    )
    parser.add_argument("--fpmath", help="llga_fuser.set_fpmath_mode of this")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one network")
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if options.list:
        from networks import NAMES

        for group in NAMES.values():
            print(*group, sep="\n")
        return
    if not options.specs:
        parser.error("no SPEC is given")
    everything: dict[str, dict[str, Any]] = {}
    for spec in options.specs:
        everything[spec] = ask(options, spec)
        print(line(spec, everything[spec]), flush=True)
    if len(everything) > 1:
        print(*summary(everything, options.engines), sep="\n", flush=True)


if __name__ == "__main__":
    main()
