"""Fuses TorchScript inference graphs on CPU with the oneDNN Graph API.

    import torch, llga_fuser
    torch.jit.enable_onednn_fusion(True)      # acts on this fuser once llga_fuser is imported
    model = torch.jit.freeze(torch.jit.trace(net.eval(), x))
    with torch.no_grad():
        model(x)

Importing changes nothing but what those switches act on: no graph is fused before one is used.
"""

from typing import TYPE_CHECKING, Any

from llga_fuser._check import check_versions

check_versions()

# The checks above come first: a module built against another torch fails to load, or worse.
from llga_fuser._autotune import (  # noqa: E402
    AutotuneInfo,
    autotune_info,
    set_autotune,
)
from llga_fuser._cache import (  # noqa: E402
    CacheInfo,
    cache_info,
    clear_cache,
    set_cache_capacity,
)
from llga_fuser._compile import compile  # noqa: A004, E402
from llga_fuser._config import show_config  # noqa: E402
from llga_fuser._fpmath import fpmath_mode, set_fpmath_mode  # noqa: E402
from llga_fuser._report import (  # noqa: E402
    Report,
    ReportDiff,
    UnfusedError,
    report,
)
from llga_fuser._switch import enable, fusion, install_switches, is_enabled  # noqa: E402
from llga_fuser._version import __version__  # noqa: E402

if TYPE_CHECKING:
    from llga_fuser._quantize import QuantizationConfig, from_pt2e, quantize

install_switches()


def __getattr__(name: str) -> Any:
    # They need torch.ao, which takes time to import and registers operators.
    if name in ("QuantizationConfig", "from_pt2e", "quantize"):
        from llga_fuser import _quantize

        return globals().setdefault(name, getattr(_quantize, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AutotuneInfo",
    "CacheInfo",
    "QuantizationConfig",
    "Report",
    "ReportDiff",
    "UnfusedError",
    "__version__",
    "autotune_info",
    "cache_info",
    "clear_cache",
    "compile",
    "enable",
    "fpmath_mode",
    "from_pt2e",
    "fusion",
    "is_enabled",
    "quantize",
    "report",
    "set_autotune",
    "set_cache_capacity",
    "set_fpmath_mode",
    "show_config",
]
