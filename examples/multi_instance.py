"""Throughput of several small instances on one machine, against one that has all its cores.

    python examples/multi_instance.py resnet50 --instances 4

starts the instances with PyTorch's launcher, `python -m torch.backends.xeon.run_cpu`, which binds
each to cores of its own (and, with numactl, to the memory beside them). First one instance runs on
all cores, then several share the same cores. See examples/README.md for what the launcher needs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any


def cores() -> list[int]:
    """One CPU of each physical core that this process may use.

    The launcher by itself takes the numbers of the cores for numbers of CPUs, which is wrong where
    the two hardware threads of a core have neighbouring numbers.
    """
    allowed = os.sched_getaffinity(0)
    try:
        listed = subprocess.run(
            ["lscpu", "--parse=CPU,Core,Socket"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"multi_instance: lscpu (of util-linux), which the launcher needs: {error}"
        ) from None
    first: dict[str, int] = {}
    for line in listed.splitlines():
        cpu, _, core = line.partition(",")
        if cpu.isdecimal() and int(cpu) in allowed:
            first.setdefault(core, int(cpu))
    return sorted(first.values())


# --------------------------------------------------------------------------------- one instance


def instance(options: argparse.Namespace) -> int:
    """What each instance runs: compile, wait for the others, and call for a while."""
    import torch
    from model import compiled

    shape = (options.batch, 3, options.image_size, options.image_size)
    net = compiled(options.model, shape, options.dtype)
    x = torch.rand(shape)
    folder = pathlib.Path(options.folder)
    (folder / f"ready-{os.getpid()}").touch()
    while len(list(folder.glob("ready-*"))) < options.instances:  # all of them at the same time
        time.sleep(0.01)
    calls: list[float] = []
    with torch.inference_mode():
        begin = time.perf_counter()
        while not calls or time.perf_counter() - begin < options.seconds:
            start = time.perf_counter()
            net(x)
            calls.append(time.perf_counter() - start)
        elapsed = time.perf_counter() - begin
    result = {
        "inputs_per_second": len(calls) * options.batch / elapsed,
        "median_seconds": statistics.median(calls),
        "threads": torch.get_num_threads(),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    (folder / f"result-{os.getpid()}.json").write_text(json.dumps(result))
    return 0


# ------------------------------------------------------------------------------- all of them


def launch(
    options: argparse.Namespace, instances: int, cpus: Sequence[int]
) -> list[dict[str, Any]]:
    """Runs instances on these CPUs; one result for each."""
    each = len(cpus) // instances
    with tempfile.TemporaryDirectory(prefix="multi_instance_") as folder:
        command = [
            *(sys.executable, "-m", "torch.backends.xeon.run_cpu"),
            *("--core-list", ",".join(map(str, cpus[: each * instances]))),
            *("--ninstances", str(instances), "--ncores-per-instance", str(each)),
            # llga_fuser and torch share GNU OpenMP; Intel's in front of it would be a second one.
            "--disable-iomp",
            *(() if options.allocator == "any" else (ALLOCATORS[options.allocator],)),
            *(__file__, options.model, "--folder", folder, "--instances", str(instances)),
            *("--batch", str(options.batch), "--image-size", str(options.image_size)),
            *("--seconds", str(options.seconds), "--dtype", options.dtype),
        ]
        # The launcher leaves OMP_NUM_THREADS alone where it is set.
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=options.timeout
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"multi_instance: no result within {options.timeout:g} s") from None
        files = list(pathlib.Path(folder).glob("result-*.json"))
        # Its exit code is 0 too when an instance has failed.
        if done.returncode or len(files) != instances:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            own = [line for line in said if "Error" in line or "error" in line] or said[-1:]
            raise SystemExit(f"multi_instance: an instance failed: {' | '.join(own[:2])}")
        return [json.loads(file.read_text()) for file in files]


ALLOCATORS = {
    "default": "--use-default-allocator",
    "tcmalloc": "--enable-tcmalloc",
    "jemalloc": "--enable-jemalloc",
}


def row(name: str, results: Sequence[dict[str, Any]]) -> str:
    threads = {r["threads"] for r in results}
    return (
        f"{name:14}{len(results):10}{'/'.join(map(str, sorted(threads))):>9}"
        f"{sum(r['inputs_per_second'] for r in results):12.1f}"
        f"{1e3 * statistics.median(r['median_seconds'] for r in results):12.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="one big instance against several small ones")
    add = parser.add_argument
    add("model", help="tiny, a torchvision classification model, or a file of torch.jit.save")
    add("--instances", type=int, default=2, metavar="N", help="default: 2")
    add("--batch", type=int, default=1, metavar="N", help="of each instance, default: 1")
    add("--image-size", type=int, default=224, metavar="N", help="default: 224")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--seconds", type=float, default=5.0, metavar="S", help="how long to measure, default: 5")
    add(
        "--allocator",
        choices=("any", *ALLOCATORS),
        default="any",
        help="any: tcmalloc or jemalloc if the launcher finds them, else the C library's",
    )
    add("--timeout", type=float, default=900.0, metavar="S", help="for each of both, default: 900")
    add("--json", metavar="FILE", help="write the figures there too")
    add("--folder", help=argparse.SUPPRESS)  # set in the instances
    options = parser.parse_args(arguments)
    for name in ("instances", "batch", "image_size", "seconds", "timeout"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} is not above 0")
    if options.folder:
        return instance(options)
    from model import check

    try:
        check(options.model)
    except ValueError as error:
        parser.error(str(error))
    cpus = cores()
    if options.instances > len(cpus):
        parser.error(f"--instances: {options.instances} on {len(cpus)} cores, each needs one")
    used = cpus[: len(cpus) // options.instances * options.instances]
    big = launch(options, 1, used)
    small = launch(options, options.instances, used)
    print(f"{options.model}  {options.dtype}  batch {options.batch}  {len(used)} cores")
    print(f"{'':14}{'instances':>10}{'threads':>9}{'inputs/s':>12}{'median ms':>12}")
    print(row("one big", big))
    print(row("several small", small))
    ratio = sum(r["inputs_per_second"] for r in small) / big[0]["inputs_per_second"]
    print(f"throughput of the small ones: {ratio:.2f} times that of the big one")
    if options.json:
        data = {"one_big": big, "several_small": small, "ratio": ratio}
        pathlib.Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
