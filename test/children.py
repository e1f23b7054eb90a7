"""What may crash or hang, to be run in a process of its own: `python test/children.py SCENARIO`.

A scenario passes if the process ends with exit code 0 in time (see `test_operator.py`).
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import llga_fuser

warnings.simplefilter("ignore")


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 8),
        nn.GELU(),
    ).eval()


def frozen(module: nn.Module) -> Any:
    with torch.no_grad():
        return torch.jit.freeze(torch.jit.trace(module, image(2, 7), check_trace=False))


def image(batch: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 8, size, size, generator=generator)


def expect_same(actual: Tensor, expected: Tensor, what: str) -> None:
    difference = float((actual - expected).abs().max())
    # Sums of a few hundred terms of size 1, in another order.
    assert difference < 1e-4, f"{what}: off by {difference}"


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(0..count-1)` at the same time and raises the first error."""
    failures: list[BaseException] = []
    ready = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            ready.wait()
            with torch.no_grad():
                work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def shapes_of(index: int) -> list[tuple[int, int]]:
    """The same ones for all, each thread in another order."""
    shapes = [(1 + i % 3, 4 + i % 5) for i in range(12)]
    return shapes[index % 12 :] + shapes[: index % 12]


def cold_start() -> None:
    """16 threads through one module that nobody has called yet."""
    module = small_net()
    script = frozen(module)

    def work(index: int) -> None:
        for batch, size in shapes_of(index):
            x = image(batch, size, index)
            for _ in range(3):
                expect_same(script(x), module(x), f"thread {index}, {tuple(x.shape)}")

    in_threads(16, work)
    assert llga_fuser.cache_info().hits > 0


def ten_modules() -> None:
    """10 modules in 10 threads, some of them with equal structure, all with other weights."""
    modules = [small_net(seed) for seed in range(10)]
    # Making them is for one thread: the tracer has global state.
    scripts = [frozen(module) for module in modules]

    def work(index: int) -> None:
        for batch, size in shapes_of(index):
            x = image(batch, size, index)
            for _ in range(3):
                expect_same(scripts[index](x), modules[index](x), f"module {index}")

    in_threads(10, work)


def set_num_threads() -> None:
    """Changed between calls and, by another thread, during calls."""
    module = small_net()
    script = frozen(module)
    x = image(2, 9)
    with torch.no_grad():
        expected = module(x)
        for count in (1, 2, 3, 1, 2):
            torch.set_num_threads(count)
            for _ in range(3):
                expect_same(script(x), expected, f"{count} threads")

    def work(index: int) -> None:
        for call in range(60):
            if index == 0:
                torch.set_num_threads(1 + call % 3)
            expect_same(script(x), expected, f"call {call}")

    in_threads(3, work)


def fork() -> None:
    """The child computes, with one thread as after any fork of a process that has used OpenMP."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        module = small_net()
        script = frozen(module)
        made = llga_fuser.compile(module, image(2, 7))
        with torch.no_grad():
            for batch, size in shapes_of(0)[:4]:
                x = image(batch, size)
                expect_same(script(x), module(x), "parent")
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)
                for batch, size in shapes_of(0):
                    x = image(batch, size)
                    expect_same(script(x), module(x), "child")
                    expect_same(made(x), module(x), "child, compiled ahead of time")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, "the child failed"
            expect_same(script(x), module(x), "parent, afterwards")


def switching() -> None:
    """Enabled and disabled, the cache cleared and limited, while others run new modules."""
    stop = threading.Event()

    def switch() -> None:
        on = False
        while not stop.is_set():
            on = not on
            llga_fuser.enable(on)
            llga_fuser.clear_cache()
            llga_fuser.set_cache_capacity(3 if on else 4096)
            llga_fuser.cache_info()
            time.sleep(0.001)

    switcher = threading.Thread(target=switch)
    switcher.start()
    tracer = threading.Lock()

    def work(index: int) -> None:
        for seed in range(3):
            module = small_net(seed)
            with tracer:
                script = frozen(module)
            for batch, size in shapes_of(index)[:6]:
                x = image(batch, size, index)
                for _ in range(3):
                    expect_same(script(x), module(x), f"thread {index}, module {seed}")

    try:
        in_threads(4, work)
    finally:
        stop.set()
        switcher.join()


def exit_while_running() -> None:
    """The main thread ends while others are inside groups, some of them compiling.

    Python waits for its threads, torch for its own. Daemon threads are another matter: one that
    is inside TorchScript by then crashes the process, with or without this package.
    """
    torch.set_num_threads(1)
    module = small_net()
    script = frozen(module)
    made = llga_fuser.compile(module, image(2, 7))
    inside = threading.Barrier(3)

    def work(model: Any) -> None:
        with torch.no_grad():
            for call in range(40):
                model(image(1 + call % 3, 4 + call % 20))
                if call == 3:
                    inside.wait()

    with torch.no_grad():
        for _ in range(3):
            script(image(2, 7))
        tasks = [
            torch.jit.fork(model, image(1, 30 + i)) for i in range(4) for model in (script, made)
        ]
    for model in (script, made):
        threading.Thread(target=work, args=(model,)).start()
    inside.wait()
    assert len(tasks) == 8, "nobody has waited for them"


class ConvThenAttention(nn.Module):
    """Some kernels of oneDNN keep arguments of two kinds for each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        return nn.functional.scaled_dot_product_attention(y, y, y)


def ending_threads() -> None:
    """Threads end while others drop what these executed."""
    torch.set_num_threads(1)
    module = ConvThenAttention().eval()
    made = llga_fuser.compile(module, image(1, 4))
    images = [image(1 + i % 3, 4 + i // 3) for i in range(30)]

    def work(order: int) -> None:
        torch.set_num_threads(1)
        with torch.no_grad():
            for x in images[::order]:
                expect_same(made(x), module(x), f"{tuple(x.shape)}")

    for round_ in range(20):
        threads = [threading.Thread(target=work, args=(order,)) for order in (1, -1)]
        for thread in threads[: 1 + round_ % 2]:
            thread.start()
        for thread in threads[: 1 + round_ % 2]:
            thread.join()  # comes back before the thread's C++ variables are destroyed
        llga_fuser.clear_cache()


def compile_and_release() -> None:
    """Compiled ahead of time in several threads; plain weights that come and go."""
    made: list[Any] = []
    modules = [small_net(seed) for seed in range(3)]
    for module in modules:
        made.append(llga_fuser.compile(module, image(2, 7), release_weights=True))

    def work(index: int) -> None:
        module = small_net(10 + index)
        own = llga_fuser.compile(module, [image(2, 7), image(1, 5)])
        for batch, size in shapes_of(index)[:6]:
            x = image(batch, size, index)
            expect_same(own(x), module(x), f"thread {index}, its own")
            for model, original in zip(made, modules, strict=True):
                expect_same(model(x), original(x), f"thread {index}, shared")
                y = x.clone()
                y[0, 0, 0, 0] = float("inf")  # takes the fallback
                model(y)

    in_threads(4, work)


def resident() -> int:
    """Memory of this process in bytes, but for files: their pages come and go."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = [int(number) for number in file.read().split()]
    return (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")


def flat(calls: str = "240", shapes: str = "24", capacity: str = "8") -> None:
    """Memory over many calls of more shapes than the cache may hold: prints its growth in bytes."""
    llga_fuser.set_cache_capacity(int(capacity))
    torch.set_num_threads(1)
    script = frozen(nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.ReLU()).eval())
    number, count = int(calls), int(shapes)
    with torch.no_grad():
        for call in range(number):
            shape = call * 7 % count
            script(image(1 + shape % 4, 5 + shape // 4))
            if call == number // 3:
                gc.collect()
                start = resident()
    gc.collect()
    info = llga_fuser.cache_info()
    assert info.entries <= int(capacity), info
    assert info.evictions > 0, info
    print(resident() - start)


def between_groups() -> Any:
    """A frozen and warm module and its input: 48 MiB pass from one group to the next."""
    module = nn.Sequential(nn.Conv2d(3, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 3, 1)).eval()
    x = torch.randn(32, 3, 64, 64)
    with torch.no_grad():
        script = torch.jit.freeze(torch.jit.trace(module, x, check_trace=False))
        for _ in range(5):
            script(x)
    return script, x


def faults() -> None:
    """Prints the number of minor page faults of a call."""
    script, x = between_groups()
    with torch.no_grad():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            script(x)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)


def packed_memory() -> None:
    """Two modules whose packed weights lie side by side, of which one dies.

    Prints how many bytes that freed, and how many of memory are advised to lie in huge pages.
    """
    modules = [nn.Conv2d(1024, 2048, 1).eval() for _ in range(2)]
    x = torch.randn(1, 1024, 7, 7)
    made = [llga_fuser.compile(module, x) for module in modules]
    expected = made[1](x)
    gc.collect()
    before, packed = resident(), llga_fuser.cache_info().packed_bytes
    del made[0]
    gc.collect()
    assert llga_fuser.cache_info().packed_bytes == packed // 2, packed
    freed = before - resident()
    assert torch.equal(made[0](x), expected)
    advised, size = 0, 0
    with open("/proc/self/smaps", encoding="ascii") as file:
        for name, value in (line.split(maxsplit=1) for line in file if ": " in line):
            if name == "Size:":
                size = int(value.split()[0]) * 1024
            elif name == "VmFlags:" and "hg" in value.split():
                advised += size
    print(freed, advised)


def arena_bytes() -> None:
    """Prints how much the arena holds when a model is warm."""
    _script, _x = between_groups()
    print(llga_fuser.cache_info().arena_bytes)


SCENARIOS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (
        cold_start,
        ten_modules,
        set_num_threads,
        fork,
        switching,
        compile_and_release,
        ending_threads,
        exit_while_running,
        flat,
        faults,
        packed_memory,
        arena_bytes,
    )
}


def main(arguments: Sequence[str]) -> None:
    llga_fuser.enable(True)
    SCENARIOS[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
