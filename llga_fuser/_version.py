"""The version of this package."""

from llga_fuser._build import VERSION as __version__

__all__ = ["__version__"]
