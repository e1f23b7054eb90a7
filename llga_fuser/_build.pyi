"""Written by CMake."""

VERSION: str
TORCH_VERSION: str
ONEDNN_VERSION: str
