"""Rewrites CMake's compile_commands.json so that clang-tidy can read it.

    compile_commands.py <build directory> <output directory>

The build uses a header precompiled by g++, which clang cannot load. It gets the header itself, as a
module: clang-tidy parses that once and keeps it in the output directory, where the parsing of
torch's headers for each source would take three quarters of its time. It has no omp.h, either, and
reads the code as if without OpenMP.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRECOMPILED_HEADER = ROOT / "csrc/jit/onednn/pch.h"


def for_clang(command: str, module_map: Path) -> list[str] | None:
    """The command for clang; None for the one that builds the precompiled header."""
    words = shlex.split(command)
    if "c++-header" in words:
        return None
    result = []
    for word in words:
        if word.endswith("cmake_pch.hxx"):
            result.append(str(PRECOMPILED_HEADER))
        elif not word.startswith(("-W", "-fopenmp")):  # the warnings, too, are chosen for g++
            result.append(word)
    if str(PRECOMPILED_HEADER) in result:
        cache = module_map.with_name("modules")
        result[1:1] = [
            "-fmodules",
            f"-fmodule-map-file={module_map}",
            f"-fmodules-cache-path={cache}",
        ]
    return result


def main(build: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    module_map = output.resolve() / "precompiled.modulemap"
    module_map.write_text(f'module precompiled {{ header "{PRECOMPILED_HEADER}" export * }}\n')
    entries = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        arguments = for_clang(entry["command"], module_map)
        if arguments and Path(entry["file"]).is_relative_to(ROOT / "csrc"):
            entries.append(
                {"directory": entry["directory"], "file": entry["file"], "arguments": arguments}
            )
    (output / "compile_commands.json").write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
