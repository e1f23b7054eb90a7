"""Runs the engines of one model side by side, each in its own process, and judges their numbers."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llga_fuser.bench.peers import PEERS, not_applicable

__all__ = [
    "ENGINES",
    "INT8_ENGINES",
    "KNOWN",
    "BenchError",
    "Engine",
    "ModelResult",
    "Options",
    "run_model",
]

ENGINES = ("eager", "torchscript", "builtin", "llga_fuser")  # by default
KNOWN = (*ENGINES[:-1], *PEERS, ENGINES[-1])

# Relative (L2) error against eager fp32 up to which numbers agree. In fp32 another order of
# summation moves a value by some 1e-7, and the deepest networks make that a hundred times larger.
# In bf16 the yardstick is what eager's own bf16 loses on the same network and inputs: a fused group
# rounds less often than eager, but elsewhere. A wrong operator is above 1e-2 in both.
FP32_LIMIT = 1e-4
BF16_TIMES_EAGER, BF16_LIMIT = 2.0, 1e-2
# In int8 the yardstick is the signal-to-quantization-noise ratio (SQNR, dB) against eager fp32 on
# inputs that were not used in calibration. Random weights keep less of it than trained ones:
# resnet50 has about 20 and mobilenet_v2 about 11, while a wrong operator leaves 0.
INT8_LEAST_SQNR = 10.0
INT8_ENGINES = ("eager", "llga_fp32", "torchscript", "llga_fuser")

# A round in which other processes used more of one CPU than this is left out, if enough are left.
FOREIGN_LIMIT = 0.2
ROUNDS_NEEDED = 3


class BenchError(Exception):
    """A process died, raised or hung; one line for the user."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    dtype: str
    batch: int
    image_size: int | None
    threads: int
    rounds: int
    seconds: float
    engines: tuple[str, ...]
    timeout: float
    verbose: bool
    fpmath: str | None = None  # of llga_fuser alone
    shapes: tuple[tuple[tuple[int, ...], str], ...] = ()  # of the inputs of a file

    def not_applicable(self, engine: str) -> str | None:
        """Why the engine is not asked to run this at all; None if it is."""
        return not_applicable(engine, self.dtype, script=bool(self.shapes))


@dataclass
class Engine:
    """Figures of one engine; times are in seconds, memory in bytes."""

    name: str
    failure: str | None = None
    not_applicable: str | None = None  # why it was not asked to run this at all
    median: float = 0.0
    minimum: float = 0.0
    spread: float = 0.0  # interquartile range of a round's calls, relative to its median
    first_result: float = 0.0  # from the module to the first result, compilation included
    warm_up: float = 0.0
    warm_up_calls: int = 0
    max_abs_error: float | None = 0.0  # None: not finite, or of another shape
    relative_error: float | None = 0.0
    agrees: bool = False
    groups: int | None = None
    nodes_fused: int | None = None
    nodes_outside: int | None = None
    peak_memory: int | None = None
    fallbacks: dict[str, int] | None = None
    top1: float | None = None  # share of held-out inputs with eager's class
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        return self.failure is None and self.not_applicable is None

    def times_as_fast_as(self, other: Engine) -> float:
        """Median, over the rounds that count, of the quotient of that round's two medians.

        What slows a machine for seconds slows both in a round, and leaves the quotient alone.
        Both have run.
        """
        quotients = [
            float(theirs["median"] / own["median"])
            for own, theirs in zip(self.rounds, other.rounds, strict=True)
            if own["counts"]
        ]
        return statistics.median(quotients)


@dataclass
class ModelResult:
    """What the table of one model shows."""

    model: str
    size: str
    options: Options
    engines: list[Engine] = field(default_factory=list)
    bf16_rounding: float | None = None  # relative error of eager's own bf16
    limit: float = FP32_LIMIT
    fpmath_limit: float | None = None  # for llga_fuser, with --fpmath
    rounds: int = 0
    rounds_left_out: int = 0
    foreign_load: float | None = None  # the highest of the rounds that count, in CPUs

    def limit_of(self, engine: str) -> float:
        """The relative error up to which that engine's numbers agree."""
        if engine == "llga_fuser" and self.fpmath_limit is not None:
            return self.fpmath_limit
        quantized = self.options.dtype == "int8" and engine not in ("eager", "llga_fp32")
        return 10 ** (-INT8_LEAST_SQNR / 20) if quantized else self.limit

    def engine(self, name: str) -> Engine | None:
        """The engine, if it ran to the end."""
        return next((e for e in self.engines if e.name == name and e.ran), None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Process:
    """A worker process, and the conversation with it."""

    def __init__(self, engine: str, model: str, folder: str, options: Options) -> None:
        self.engine = engine
        self.timeout = options.timeout
        self._buffer = b""
        package = pathlib.Path(__file__).parent.parent
        arguments = {
            "engine": engine,
            "model": model,
            "dtype": options.dtype,
            "batch": options.batch,
            "image_size": options.image_size,
            "threads": options.threads,
            "seconds": options.seconds,
            "fpmath": options.fpmath,
            "shapes": options.shapes,
            "folder": folder,
            "root": str(package.parent),
        }
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(options.threads),
            "MKL_NUM_THREADS": str(options.threads),
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            # What an earlier run has compiled would make this warm-up look short.
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, f"inductor_{engine}"),
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(package / "bench" / "worker.py"), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else self._log,
            env=environment,
        )

    def send(self, command: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died: `answer` says how
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise BenchError(f"no answer within {self.timeout:g} s")
            chunk = os.read(pipe, 65536)
            if not chunk:
                raise BenchError(self._epitaph())
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.answer()

    def _epitaph(self) -> str:
        code = self._process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the process died ({how})" + (f": {lines[-1]}" if lines else "")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()


def run_model(model: str, options: Options, progress: Callable[[str], None]) -> ModelResult:
    """Runs one model through all engines.

    All are warm before the first timed block, and blocks take turns, so that what changes on the
    machine meanwhile changes all of them.

    Raises:
        BenchError: the model cannot be built. An engine that fails is part of the result instead.
    """
    with tempfile.TemporaryDirectory(prefix="llga_fuser_bench_") as folder:
        progress("start processes")
        reference = Process("reference", model, folder, options)
        processes: list[Process] = []
        try:
            reference.send("load")
            processes += [
                Process(e, model, folder, options)
                for e in options.engines
                if options.not_applicable(e) is None
            ]
            # Loading takes as long as all the rest together and is not timed: all at once.
            for p in processes:
                p.send("load")
            progress("weights and eager fp32 answers")
            answer = reference.answer()
            reference.close()
            result = ModelResult(answer["name"], answer["size"], options)
            if options.dtype == "bf16":
                result.bf16_rounding = answer["bf16_rounding"]
                result.limit = BF16_TIMES_EAGER * answer["bf16_rounding"] + BF16_LIMIT
            elif options.fpmath:
                result.fpmath_limit = BF16_TIMES_EAGER * answer["bf16_rounding"] + BF16_LIMIT
            _run_engines(result, processes, progress)
        finally:
            for p in (reference, *processes):
                p.close()
    return result


def _run_engines(
    result: ModelResult, processes: Sequence[Process], progress: Callable[[str], None]
) -> None:
    options = result.options
    live: list[tuple[Process, Engine]] = []
    by_name = {name: Engine(name) for name in options.engines}
    result.engines.extend(by_name.values())
    for engine in result.engines:
        engine.not_applicable = options.not_applicable(engine.name)
    for p in processes:
        engine = by_name[p.engine]
        progress(f"load {p.engine}")
        try:
            p.answer()
        except BenchError as failure:
            engine.failure = str(failure)
        else:
            live.append((p, engine))

    def each(what: str, action: Callable[[Process, Engine], None], first: int = 0) -> None:
        for p, engine in [*live[first:], *live[:first]]:
            progress(f"{what}: {p.engine}")
            try:
                action(p, engine)
            except BenchError as failure:
                engine.failure = str(failure)
                live.remove((p, engine))
                p.close()

    def warm_up(p: Process, engine: Engine) -> None:
        answer = p.ask("build")
        engine.first_result = answer["first_result_seconds"]
        engine.warm_up = answer["warm_up_seconds"]
        engine.warm_up_calls = answer["warm_up_calls"]
        engine.groups = answer.get("groups")
        engine.nodes_fused = answer.get("nodes")
        engine.nodes_outside = answer.get("outside")
        _judge(result, engine, answer)

    def timed(p: Process, engine: Engine) -> None:
        engine.rounds.append(p.ask("round"))

    def finish(p: Process, engine: Engine) -> None:
        answer = p.ask("finish")
        engine.peak_memory = answer["peak_bytes"]
        engine.fallbacks = answer["fallbacks"]
        _judge(result, engine, answer)

    each("warm up", warm_up)
    for i in range(options.rounds):
        # Each engine follows each other one: what one leaves behind is nobody's burden alone.
        each(f"round {i + 1} of {options.rounds}", timed, first=i % max(1, len(live)))
    each("compare", finish)
    _summarise(result)


def _judge(result: ModelResult, engine: Engine, answer: dict[str, Any]) -> None:
    """Takes the errors over if they are worse than those before."""
    for field_name, value in (
        ("max_abs_error", answer["max_abs"]),
        ("relative_error", answer["relative"]),
    ):
        before = getattr(engine, field_name)
        worse = None if value is None or before is None else max(value, before)
        setattr(engine, field_name, worse)
    limit = result.limit_of(engine.name)
    engine.agrees = engine.relative_error is not None and engine.relative_error <= limit
    engine.top1 = answer.get("top1")


def _summarise(result: ModelResult) -> None:
    """Medians over the rounds in which the machine was quiet, or over all if too few were."""
    done = [e for e in result.engines if e.ran]
    result.rounds = result.options.rounds
    foreign = [
        max((e.rounds[i]["foreign"] or 0.0 for e in done), default=0.0)
        for i in range(result.rounds)
    ]
    chosen = [i for i, load in enumerate(foreign) if load <= FOREIGN_LIMIT]
    if len(chosen) < min(ROUNDS_NEEDED, result.rounds):
        chosen = list(range(result.rounds))
    result.rounds_left_out = result.rounds - len(chosen)
    if done and all(e.rounds[0]["foreign"] is not None for e in done):
        result.foreign_load = max(foreign[i] for i in chosen)
    for engine in done:
        for i, one in enumerate(engine.rounds):
            one["counts"] = i in chosen
        rounds = [engine.rounds[i] for i in chosen]
        engine.median = statistics.median(r["median"] for r in rounds)
        engine.minimum = min(r["min"] for r in rounds)
        engine.spread = statistics.median(r["spread"] / r["median"] for r in rounds)
