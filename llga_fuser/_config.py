"""What this installation consists of, for people and for bug reports."""

from __future__ import annotations

import os

import torch

from llga_fuser import _C

__all__ = ["config", "show_config"]


def _openmp_runtimes() -> list[str]:
    """The OpenMP runtime libraries loaded into this process (Linux)."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            files = {line.split()[-1] for line in maps if "/" in line}
    except OSError:
        return []
    names = {os.path.basename(name) for name in files}
    return sorted(n for n in names if n.startswith(("libgomp", "libiomp", "libomp")))


def config() -> dict[str, object]:
    """Versions, instruction set, OpenMP runtime, threads and capabilities, by name."""
    build = _C.build_info()
    runtime = _C.runtime_info()
    isa = str(runtime["isa"])
    version = tuple(int(part) for part in str(runtime["onednn"]).split("."))
    return {
        "llga_fuser": build["version"],
        "torch": torch.__version__,
        "torch (build)": build["torch"],
        "oneDNN": f"{runtime['onednn']} ({runtime['onednn_hash'][:10]})",
        "oneDNN (build)": build["onednn"],
        "instruction set": isa,
        "OpenMP": f"{runtime['cpu_runtime']}: {', '.join(_openmp_runtimes()) or 'unknown'}",
        "threads": runtime["threads"],
        "threads wait": "asleep" if _C.waits_asleep() else "awake",
        "enabled": _C.is_enabled(),
        "passes off": [n for n in _C.pass_names() if not _C.is_pass_enabled(n)],
        "operators": len(_C.op_names()),
        "bfloat16": runtime["bf16"],
        "bf16 matrix units (AMX)": "amx" in isa,
        "bf16 dot products (AVX-512)": "bf16" in isa or "fp16" in isa or "amx" in isa,
        "attention as one partition": version >= (3, 7, 0),
        "group norm": version >= (3, 6, 0),
    }


def show_config() -> str:
    """Returns, as text, what a bug report should contain: one `name: value` line each."""
    items = config()
    width = max(map(len, items))
    return "\n".join(f"{name:<{width}} : {value}" for name, value in items.items())
