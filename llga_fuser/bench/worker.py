"""One engine in one process: started by the parent as a script, speaks JSON lines with it.

It is a script, not a module of the package, so that only the engine that needs the fuser imports
it. Commands are read from standard input, one line each, and each has one answer:

    load         import torch, build the network          (reference: also calibrate, save, compute)
    build        prepare the engine and call it until it is steady
    round        one timed block
    finish       compare once more, look at memory, end
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

Run = Callable[..., Any]
clock = time.perf_counter

# A timed sample is at least this long, or the clock itself would be part of it.
SAMPLE_SECONDS = 50e-6
# ONNX Runtime's threads keep a CPU busy for 20 ms after a call, waiting for the next.
SETTLE = 0.05
CHECK_SEED, TIMED_SEED, CALIBRATION_SEED = 1000, 1, 5000
CALIBRATION_SAMPLES = 32


def sibling(path: str) -> Any:
    """A module of the package, without the package (whose import loads the fuser)."""
    file = pathlib.Path(__file__).parent / path
    if file.stem in sys.modules:
        return sys.modules[file.stem]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def models() -> Any:
    return sibling("../_models.py")


def peers() -> Any:
    return sibling("peers.py")


def flat(output: Any) -> Any:
    """One float32 vector of all tensors of a result."""
    import torch

    if isinstance(output, torch.Tensor):
        return output.detach().float().flatten()
    if hasattr(output, "__array__"):  # of another engine, perhaps in memory that it uses again
        return torch.tensor(output).float().flatten()
    values = output.values() if isinstance(output, dict) else output
    return torch.cat([flat(v) for v in values])


def peak_memory() -> int | None:
    """Highest resident size of this process in bytes, since the last `forget_peak`."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def forget_peak() -> None:
    """Loading holds the weights twice for a moment: that is not the engine's memory."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
        refs.write("5")


def machine_busy() -> float | None:
    """CPU seconds that all processes of the machine have used."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            user, nice, system, _, _, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    ticks: int = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / ticks


def own_busy() -> float:
    times = os.times()
    return times.user + times.system


def walk(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from walk(inner)


def count_fused(graph: Any, group: str) -> dict[str, int]:
    """Fusion groups, the operators in them, and the operators outside."""

    def operators(nodes: Iterator[Any]) -> int:
        return sum(n.kind().split("::")[0] not in ("prim", "llga") for n in nodes)

    groups = [n for n in walk(graph) if n.kind() == group]
    inside = sum(operators(walk(n.g("Subgraph"))) for n in groups)
    return {"groups": len(groups), "nodes": inside, "outside": operators(walk(graph))}


# ---------------------------------------------------------------------------------------- engines


class Engine:
    """How to turn a module into something to call. One subclass each."""

    group = ""  # kind of its fusion groups

    def __init__(self, bf16: bool) -> None:
        self.bf16 = bf16

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        import torch

        if not self.bf16:
            return contextlib.nullcontext()
        # With its cache of casted weights the casts would be missing from a trace.
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    def prepare(self, module: Any, inputs: tuple[Any, ...]) -> Run:
        import torch

        self.switch_on()
        with self.autocast():
            traced = torch.jit.trace(module, inputs, check_trace=False)
        # A frozen module, as a file may hold, has lost the attribute and cannot be frozen again.
        script: Run = torch.jit.freeze(traced) if hasattr(traced, "training") else traced
        return script

    def switch_on(self) -> None:
        """What a user does before tracing."""

    def notes(self, run: Run, inputs: tuple[Any, ...]) -> dict[str, Any]:
        if not self.group:
            return {}
        graph: Any = run.graph_for(*inputs)  # type: ignore[attr-defined]
        return count_fused(graph, self.group)

    def fallbacks(self) -> dict[str, int] | None:
        """Calls of fusion groups that ran in the interpreter so far, by reason."""
        return None


class Eager(Engine):
    def prepare(self, module: Any, inputs: tuple[Any, ...]) -> Run:
        if not self.bf16:
            run: Run = module
            return run
        import torch

        def call(*args: Any) -> Any:  # with the cache, as people use it
            with torch.autocast("cpu", torch.bfloat16):
                return module(*args)

        return call


class TorchScript(Engine):
    pass


class Builtin(Engine):
    """torch's own oneDNN Graph fuser."""

    group = "prim::oneDNNFusionGroup"

    def switch_on(self) -> None:
        import torch

        if "llga_fuser" in sys.modules:
            raise RuntimeError("llga_fuser is imported, torch's switch would act on it")
        torch.jit.enable_onednn_fusion(True)
        # The casts are in the trace; with TorchScript's own pass on top it fuses nothing.
        torch._C._jit_set_autocast_mode(False)


class LlgaFuser(Engine):
    group = "llga::FusionGroup"

    def switch_on(self) -> None:
        import llga_fuser

        llga_fuser.enable(True)

    def fallbacks(self) -> dict[str, int]:
        import llga_fuser

        return dict(llga_fuser._C.fallbacks())


class Peer(Engine):
    """One of `peers.py`."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__(options["dtype"] == "bf16")
        self.name, self.options = name, options

    def context(self, module: Any, inputs: tuple[Any, ...]) -> Any:
        folder = pathlib.Path(self.options["folder"]) / self.name
        folder.mkdir(exist_ok=True)
        return peers().Context(
            module, inputs, self.options["dtype"], self.options["threads"], folder
        )

    def quantize(
        self, module: Any, inputs: tuple[Any, ...], calibration: list[tuple[Any, ...]]
    ) -> Any:
        context = self.context(module, inputs)._replace(calibration=calibration)
        return peers().quantized(self.name, context).module

    def prepare(self, module: Any, inputs: tuple[Any, ...]) -> Run:
        run: Run = peers().prepare(self.name, self.context(module, inputs))
        return run


class LlgaFp32(LlgaFuser):
    """In float32, where the others are in int8."""


ENGINES: dict[str, type[Engine]] = {
    "eager": Eager,
    "torchscript": TorchScript,
    "builtin": Builtin,
    "llga_fuser": LlgaFuser,
    "llga_fp32": LlgaFp32,
}


# ----------------------------------------------------------------------------------------- worker


class Worker:
    """Answers the parent's commands; the state between them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.folder = pathlib.Path(options["folder"])
        self.bf16 = options["dtype"] == "bf16"
        self.int8 = options["dtype"] == "int8"
        self.module: Any = None
        self.inputs: tuple[Any, ...] = ()
        self.checks: list[tuple[Any, ...]] = []
        self.calibration: list[tuple[Any, ...]] = []  # of peers; llga_fuser's is in quantize()
        self.run: Run = lambda *_: None
        self.repeat = 1

    def import_torch(self) -> Any:
        import torch

        torch.set_num_threads(self.options["threads"])
        torch.set_grad_enabled(False)
        return torch

    def make(self, *, calibrated: bool) -> Any:
        name, size = self.options["model"], self.options["image_size"]
        if self.options.get("shapes"):
            model = models().from_file(name, self.options["shapes"])
        else:
            model = models().build(name, size, calibrated=calibrated)
        batch = self.options["batch"]
        self.module = model.module
        self.inputs = model.inputs(batch, TIMED_SEED)
        count = max(4, 16 // batch) if self.int8 else max(2, min(4, 16 // batch))
        self.checks = [model.inputs(batch, CHECK_SEED + i) for i in range(count)]
        return model

    # ------------------------------------------------------------------ commands

    def load(self) -> dict[str, Any]:
        torch = self.import_torch()
        if self.options["engine"] == "reference":
            return self.reference(torch)
        if self.options["engine"].startswith("llga"):
            import llga_fuser

            if self.options.get("fpmath"):
                llga_fuser.set_fpmath_mode(self.options["fpmath"])
        elif self.options["engine"] in peers().PEERS:
            for module in peers().modules_of(self.options["engine"], self.options["dtype"]):
                importlib.import_module(module)
        model = self.make(calibrated=False)
        if self.int8 and self.options["engine"] in peers().PEERS:
            batch = self.options["batch"]
            seeds = range(CALIBRATION_SEED, CALIBRATION_SEED + -(-CALIBRATION_SAMPLES // batch))
            self.calibration = [model.inputs(batch, seed) for seed in seeds]
        return {}

    def make_engine(self) -> Engine:
        name = self.options["engine"]
        return Peer(name, self.options) if name not in ENGINES else ENGINES[name](self.bf16)

    def reference(self, torch: Any) -> dict[str, Any]:
        """Calibrates the weights, and answers in fp32 eager what the others have to answer."""
        model = self.make(calibrated=True)
        torch.save(self.module.state_dict(), self.folder / "weights.pt")
        answers = torch.stack([flat(self.module(*c)) for c in self.checks])
        torch.save(answers, self.folder / "answers.pt")
        if self.int8:
            self.quantize(torch, model)
        rounding = None
        if self.bf16 or self.options.get("fpmath"):
            eager = Eager(bf16=True).prepare(self.module, self.inputs)
            rounding = self.errors(torch, eager, answers)["relative"]
        return {
            "name": model.name,
            "size": model.size,
            "bf16_rounding": rounding,
            "varies": float(answers.std(0).norm() / answers[0].norm()),
        }

    def quantize(self, torch: Any, model: Any) -> None:
        """For all engines at once, as a frozen graph; from inputs that are not compared later."""
        import llga_fuser

        seeds = range(CALIBRATION_SEED, CALIBRATION_SEED + CALIBRATION_SAMPLES // 4)
        batches = [model.inputs(4, seed) for seed in seeds]
        quantized = llga_fuser.quantize(self.module, batches, progress=False)
        traced = torch.jit.trace(quantized, self.inputs, check_trace=False)
        torch.jit.save(torch.jit.freeze(traced.eval()), str(self.folder / "int8.pt"))

    def build(self) -> dict[str, Any]:
        import torch

        # Into the memory it has: a mapped file is slower to read than the allocator's pages.
        weights = torch.load(self.folder / "weights.pt", mmap=True)
        self.module.load_state_dict(weights)
        del weights
        self.engine = self.make_engine()
        if self.int8 and isinstance(self.engine, Peer):
            self.module = self.engine.quantize(self.module, self.inputs, self.calibration)
            self.calibration = []
        forget_peak()

        start = clock()
        if self.int8 and self.options["engine"] in ("torchscript", "llga_fuser"):
            self.engine.switch_on()
            self.run = torch.jit.load(str(self.folder / "int8.pt"))
        else:
            self.run = self.engine.prepare(self.module, self.inputs)
        prepared = clock() - start
        if self.options["engine"] != "eager":
            self.module = None  # as a user would: what the script needs, it holds
            gc.collect()  # torch.jit.trace leaves cycles that hold the module's parameters
        calls: list[float] = []
        while len(calls) < 5 or (sum(calls) < 1.0 and len(calls) < 1000):
            start = clock()
            self.run(*self.inputs)
            calls.append(clock() - start)
        usual = statistics.median(calls[len(calls) // 2 :])
        # Warm from the first call on after which all are near the usual time.
        late = [i for i, t in enumerate(calls[: len(calls) // 2]) if t > 1.5 * usual]
        first = late[-1] + 1 if late else 0
        self.repeat = max(1, round(SAMPLE_SECONDS / usual))
        answers = torch.load(self.folder / "answers.pt")
        result = {
            "prepare_seconds": prepared,
            "first_result_seconds": prepared + calls[0],
            "warm_up_seconds": prepared + sum(calls[:first]),
            "warm_up_calls": first,
            **self.errors(torch, self.run, answers),
            **self.engine.notes(self.run, self.inputs),
        }
        self.fallbacks_before = self.engine.fallbacks()
        return result

    def errors(self, torch: Any, run: Run, answers: Any) -> dict[str, float | None]:
        """Against eager fp32; None if it is of another shape or not finite."""
        got = torch.stack([flat(run(*c)) for c in self.checks])
        if got.shape != answers.shape or not got.isfinite().all():
            return {"max_abs": None, "relative": None}
        difference = (got.double() - answers.double()).abs()
        result: dict[str, float | None] = {
            "max_abs": float(difference.max()),
            "relative": float(difference.norm() / answers.double().norm()),
        }
        output = run(*self.checks[0])
        # A tensor or an array of samples x classes.
        if len(getattr(output, "shape", ())) == 2:
            classes = [t.reshape(-1, output.shape[1]).argmax(1) for t in (got, answers)]
            result["top1"] = float((classes[0] == classes[1]).double().mean())
        return result

    def round(self) -> dict[str, Any]:
        run, inputs, repeat = self.run, self.inputs, self.repeat
        time.sleep(SETTLE)  # until the threads of the engine before have stopped waiting
        for _ in range(2 * repeat):  # the caches were another engine's
            run(*inputs)
        samples: list[float] = []
        busy, own, begin = machine_busy(), own_busy(), clock()
        end = begin + self.options["seconds"]
        while len(samples) < 3 or clock() < end:
            start = clock()
            for _ in range(repeat):
                run(*inputs)
            samples.append((clock() - start) / repeat)
        elapsed = clock() - begin
        own, after = own_busy() - own, machine_busy()
        foreign = None if busy is None or after is None else max(0.0, after - busy - own) / elapsed
        samples.sort()
        quarter = len(samples) // 4
        return {
            "calls": len(samples) * repeat,
            "median": statistics.median(samples),
            "min": samples[0],
            "spread": samples[-1 - quarter] - samples[quarter],
            "foreign": foreign,
        }

    def finish(self) -> dict[str, Any]:
        import torch

        peak = peak_memory()
        result = self.errors(torch, self.run, torch.load(self.folder / "answers.pt"))
        fallbacks = self.engine.fallbacks()
        if fallbacks is not None:
            before = self.fallbacks_before or {}
            fallbacks = {k: n - before.get(k, 0) for k, n in fallbacks.items()}
            fallbacks = {k: n for k, n in fallbacks.items() if n}
        return {**result, "peak_bytes": peak, "fallbacks": fallbacks}


def own_channel() -> IO[str]:
    """Standard output for answers alone: what libraries print there goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def main() -> int:
    channel = own_channel()
    options = json.loads(sys.argv[1])
    if options["root"] not in sys.path:
        sys.path.insert(0, options["root"])
    worker = Worker(options)
    for line in sys.stdin:
        command = line.strip()
        try:
            answer = getattr(worker, command)()
        except Exception as error:
            import traceback

            traceback.print_exc()
            text = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {text[-1]}"}
            command = "finish"
        channel.write(json.dumps(answer) + "\n")
        channel.flush()
        if command == "finish":
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
