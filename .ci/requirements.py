"""Prints requirements from pyproject.toml, one to a line, for `pip install -r`.

    requirements.py <extra or "build-system"> ...

pip can install the extras of a package only together with the package.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main(names: list[str]) -> None:
    settings = tomllib.loads(PYPROJECT.read_text())
    groups = {
        "build-system": settings["build-system"]["requires"],
        **settings["project"]["optional-dependencies"],
    }
    for name in names:
        print(*groups[name], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
