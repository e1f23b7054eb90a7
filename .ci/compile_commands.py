"""Rewrites CMake's compile_commands.json so that clang-tidy can read it.

    compile_commands.py <build directory> <output directory>

The build uses a header precompiled by g++, which clang cannot load; it gets the header itself. It
has no omp.h, either, and reads the code as if without OpenMP.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def without_pch(command: str) -> list[str] | None:
    """The command for clang; None for the one that builds the precompiled header."""
    words = shlex.split(command)
    if "c++-header" in words:
        return None
    result = []
    for word in words:
        if word.endswith("cmake_pch.hxx"):
            result.append(str(ROOT / "csrc/jit/onednn/pch.h"))
        elif not word.startswith(("-W", "-fopenmp")):  # the warnings, too, are chosen for g++
            result.append(word)
    return result


def main(build: Path, output: Path) -> None:
    entries = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        arguments = without_pch(entry["command"])
        if arguments and Path(entry["file"]).is_relative_to(ROOT / "csrc"):
            entries.append(
                {"directory": entry["directory"], "file": entry["file"], "arguments": arguments}
            )
    output.mkdir(parents=True, exist_ok=True)
    (output / "compile_commands.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
