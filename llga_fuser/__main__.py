"""`python -m llga_fuser`: the package's commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """The command line; the documentation shows its help and checks its examples with it."""
    from llga_fuser import bench
    from llga_fuser._report import command as report

    parser = argparse.ArgumentParser(
        prog="python -m llga_fuser", description="oneDNN Graph fuser for TorchScript on CPU"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench.add_arguments(
        commands.add_parser("bench", help="time models side by side with other engines")
    )
    report.add_arguments(
        commands.add_parser("report", help="what is fused in a model, what not and why")
    )
    commands.add_parser("env", help="versions and capabilities, for a bug report")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the result is the process' exit code."""
    from llga_fuser import bench, show_config
    from llga_fuser._report import command as report

    options = make_parser().parse_args(arguments)
    if options.command == "env":
        print(show_config())
        return 0
    if options.command == "report":
        return report.main(options)
    return bench.main(options)


if __name__ == "__main__":
    sys.exit(main())
