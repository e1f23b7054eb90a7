"""What a fusion group costs beside its kernels: the table in docs/performance.md.

    python benchmarks/operator_costs.py [--quick]

Times are CPU times of one thread, but for the scaling, which needs an idle machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import llga_fuser
from llga_fuser import _models

warnings.filterwarnings("ignore", category=DeprecationWarning)


def resident() -> int:
    """Memory of this process in bytes, but for files: their pages come and go."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = [int(number) for number in file.read().split()]
    return (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(fn: Callable[[], Any], rounds: int = 15) -> float:
    """Of one call in this thread, median: other processes do not count."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        fn()
        times.append(time.thread_time() - start)
    return statistics.median(times)


class Repeated(nn.Module):
    """Many calls of one tiny group, over some tensors in turn, without Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 8, 1)

    def forward(self, xs: list[Tensor], calls: int) -> Tensor:
        y = xs[0]
        for i in range(calls):
            y = torch.relu(self.c(xs[i % len(xs)]))
        return y


class Empty(nn.Module):
    """What the loop itself costs."""

    def forward(self, xs: list[Tensor], calls: int) -> Tensor:
        y = xs[0]
        for i in range(calls):
            y = xs[i % len(xs)]
        return y


def hit_cost(alive: int, calls: int = 6400) -> tuple[float, float]:
    """Seconds of a call of a group with `alive` signatures: always the same one, and in turn.

    The kernel (a 1x1 convolution of 8 channels and a few pixels, with relu) is part of it.
    """
    tensors = [torch.randn(1, 8, 2, 2 + i % 8, dtype=torch.float32) for i in range(alive)]
    tensors = [x.repeat(1, 1, 1 + i // 8, 1) for i, x in enumerate(tensors)]
    net = torch.jit.script(Repeated().eval())
    made = llga_fuser.compile(net, [([x], 1) for x in tensors])
    loop = torch.jit.script(Empty())
    costs = []
    with torch.no_grad():
        for chosen in (tensors[:1], tensors):
            before = llga_fuser.cache_info()
            made(chosen, calls)
            after = llga_fuser.cache_info()
            assert after.hits - before.hits == calls and after.misses == before.misses
            empty, full = (cpu_seconds(lambda f=f, xs=chosen: f(xs, calls)) for f in (loop, made))
            costs.append((full - empty) / calls)
    return costs[0], costs[1]


def model(name: str, image_size: int = 64) -> tuple[nn.Module, Tensor]:
    built = _models.build(name, image_size=image_size)
    return built.module, built.inputs(1, 0)[0]


def compile_times(net: nn.Module, x: Tensor) -> tuple[int, float, float]:
    """Groups, CPU seconds per group for the first shape, and for another one, a call included."""
    llga_fuser.clear_cache()
    made = llga_fuser.compile(net, x)
    llga_fuser.clear_cache()
    gc.collect()
    before = llga_fuser.cache_info().misses
    with torch.no_grad():
        first = cpu_seconds(lambda: made(x), rounds=1)
        second = cpu_seconds(lambda: made(torch.cat([x, x])), rounds=1)
    groups = (llga_fuser.cache_info().misses - before) // 2
    return groups, first / groups, second / groups


def fallback_share(net: nn.Module, x: Tensor, calls: int) -> float:
    """Of all calls of groups, over batches and sizes that change: those that were interpreted."""
    made = llga_fuser.compile(net, x)
    before = llga_fuser.cache_info()
    with torch.no_grad():
        for call in range(calls):
            size = x.shape[2] + 8 * (call % 3)
            made(torch.randn(1 + call % 4, x.shape[1], size, size))
    after = llga_fuser.cache_info()
    done = {n: getattr(after, n) - getattr(before, n) for n in ("hits", "misses", "fallbacks")}
    return done["fallbacks"] / sum(done.values())


def throughput(script: Any, x: Tensor, workers: int, seconds: float) -> float:
    """Calls per second of `workers` threads together."""
    counts = [0] * workers
    ready = threading.Barrier(workers + 1)
    stop = threading.Event()

    def work(index: int) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            script(x)
            ready.wait()
            while not stop.is_set():
                script(x)
                counts[index] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


def memory_growth(calls: int, shapes: int, capacity: int) -> tuple[int, int]:
    """Bytes that the process grew from the first third to the end, and evictions."""
    before = llga_fuser.cache_info()
    llga_fuser.set_cache_capacity(capacity)
    net = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.ReLU()).eval()
    made = llga_fuser.compile(net, torch.randn(1, 8, 5, 5))
    start = 0
    with torch.no_grad():
        for call in range(calls):
            shape = call * 7 % shapes
            made(torch.randn(1 + shape % 4, 8, 5 + shape // 4, 5 + shape // 4))
            if call == calls // 3:
                gc.collect()
                start = resident()
    gc.collect()
    grown = resident() - start
    evictions = llga_fuser.cache_info().evictions - before.evictions
    llga_fuser.set_cache_capacity(before.capacity_entries, before.capacity_bytes)
    return grown, evictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer calls; the figures are rougher")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| figure | value |\n|---|---|")

    def row(figure: str, value: str) -> None:
        print(f"| {figure} | {value} |", flush=True)

    for alive in (1, 8, 64):
        same, in_turn = hit_cost(alive)
        row(
            f"call of a group, kernel included, {alive} signature{'s' * (alive > 1)} alive",
            f"{same * 1e6:.2f} us" + (f"; all in turn: {in_turn * 1e6:.2f} us" * (alive > 1)),
        )
    for name in ("resnet50", "vit_b_16") if not quick else ("resnet50",):
        net, x = model(name, 224 if name == "vit_b_16" else 64)
        groups, first, another = compile_times(net, x)
        row(
            f"compiling a partition, {name} ({groups})",
            f"{first * 1e3:.1f} ms with packing; another shape: {another * 1e3:.1f} ms",
        )
    net, x = model("resnet50")
    calls = 24 if quick else 240
    row(
        f"fallback share, resnet50, {calls} calls, 12 shapes",
        f"{fallback_share(net, x, calls):.1%}",
    )

    seconds = 2.0 if quick else 10.0
    with torch.no_grad():
        plain = torch.jit.freeze(torch.jit.trace(net, x, check_trace=False))
        with llga_fuser.fusion(False):
            for _ in range(3):
                plain(x)
    made = llga_fuser.compile(net, x)
    rates: dict[str, list[float]] = {"plain": [], "fused": []}
    for workers in (1, 2, 4):
        for name, script in (("plain", plain), ("fused", made)):
            rates[name].append(throughput(script, x, workers, seconds))
    for name, found in rates.items():
        label = "TorchScript" if name == "plain" else "llga_fuser"
        row(
            f"resnet50 calls/s, 1, 2 and 4 workers, {os.cpu_count()} cores, {label}",
            ", ".join(f"{rate:.1f} ({rate / found[0]:.2f}x)" for rate in found),
        )
    calls, shapes, capacity = (1000, 40, 10) if quick else (10_000, 200, 50)
    grown, evictions = memory_growth(calls, shapes, capacity)
    row(
        f"growth over {calls} calls, {shapes} shapes, capacity {capacity}",
        f"{grown / 2**20:.1f} MiB ({evictions} evictions)",
    )


if __name__ == "__main__":
    main()
