"""Tries an installed llga_fuser: what it loads, from where, and that a graph is fused."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

BINDING_ALONE = """
import sys
import dnnl_graph
assert "torch" not in sys.modules, "dnnl_graph must not need torch"
"""


def loaded(name: str) -> set[Path]:
    """The files of that shared library in this process; more than one is one too many."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {
        Path(line.split(maxsplit=5)[5]) for line in lines if line.count(" ") > 4 and "/" in line
    }
    return {path.resolve() for path in paths if path.name.startswith(name)}


def main() -> None:
    packages = Path(sysconfig.get_path("purelib")).resolve()
    subprocess.run([sys.executable, "-c", BINDING_ALONE], check=True)

    import torch

    import dnnl_graph
    import llga_fuser

    for module in (llga_fuser, dnnl_graph):
        assert Path(module.__file__ or "").is_relative_to(packages), module.__file__
    assert loaded("libdnnl") == {packages / "llga_fuser/lib/libdnnl.so.3"}, loaded("libdnnl")
    gomp = loaded("libgomp")
    assert len(gomp) == 1 and gomp.pop().is_relative_to(packages / "torch"), loaded("libgomp")
    assert not loaded("libiomp") and not loaded("libomp"), "a second OpenMP runtime"

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    x = torch.rand(1, 3, 16, 16)
    with torch.no_grad(), llga_fuser.fusion(True):
        model = torch.jit.freeze(torch.jit.trace(net, x))
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x))
        assert "llga::FusionGroup" in str(torch.jit.last_executed_optimized_graph())
    print(llga_fuser.show_config())


if __name__ == "__main__":
    main()
