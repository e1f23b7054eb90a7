"""python -m dnnl_graph run file.json: reproduce a graph that oneDNN or benchdnn wrote."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy

from . import error, partition, version
from .runner import profile, random_inputs
from .serialization import load


def make_parser() -> argparse.ArgumentParser:
    """The command line; the documentation shows its help and checks its examples with it."""
    parser = argparse.ArgumentParser(prog="python -m dnnl_graph", description=__doc__)
    parser.add_argument(
        "--version", action="version", version="oneDNN " + ".".join(map(str, version()[:3]))
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="print partitions, shapes and times of a graph")
    run.add_argument("file", help="JSON as written with ONEDNN_GRAPH_DUMP or read by benchdnn")
    run.add_argument("--policy", choices=list(partition.policy.__members__), default="fusion")
    run.add_argument("--repeat", type=int, default=20, help="executions to take the median of")
    run.add_argument("--seed", type=int, default=0, help="of the random inputs")
    run.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="ID=FILE.npy",
        help="array for the logical tensor with this id, instead of a random one",
    )
    run.add_argument("--save", type=Path, metavar="FILE.npz", help="write the outputs here")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; the result is the process' exit code."""
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except (error, ValueError, TypeError, KeyError, OSError) as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    policy = partition.policy.__members__[args.policy]
    g = load(args.file)
    inputs = random_inputs(g, args.seed, policy=policy)
    for item in args.input:
        tid, _, path = item.partition("=")
        if not tid.isdigit() or not path:
            raise ValueError(f"--input must be ID=FILE.npy, got {item!r}")
        inputs[int(tid)] = numpy.load(path)
    result = profile(g, inputs, policy=policy, repeat=args.repeat)
    print(f"oneDNN {'.'.join(map(str, version()[:3]))}, {len(g.get_ops())} ops")
    print(result)
    for tid, array in result.arrays.items():
        wide = array.astype(numpy.float64)
        print(f"output {tid}: {array.dtype} {list(array.shape)}, mean {wide.mean():.6g}")
    if args.save is not None:
        named: dict[str, Any] = {str(tid): array for tid, array in result.arrays.items()}
        numpy.savez(args.save, **named)
    return 0


if __name__ == "__main__":
    sys.exit(main())
