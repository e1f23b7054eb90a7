"""Python binding of the oneDNN Graph API. Needs numpy; does not need torch.

Two parts, kept apart:

* One to one with the C++ API (`dnnl_graph.hpp`), written in C++: `engine`, `stream`, `graph`, `op`,
  `logical_tensor`, `tensor`, `partition`, `compiled_partition`, `status`, `fpmath_mode`, `error`,
  and the functions on caches and the version. This is what `from dnnl_graph import *` gives.
* A thin layer of convenience in Python: `load` and `dump` for the JSON that oneDNN writes
  (`dnnl_graph.serialization`), `run` and `profile` (`dnnl_graph.runner`), and the command
  `python -m dnnl_graph run file.json`.

Names and meanings: docs/dnnl_graph.md, and oneDNN's own Graph API pages.
"""

from __future__ import annotations

from . import _dnnl_graph
from ._dnnl_graph import (
    DNNL_GRAPH_UNKNOWN_DIM,
    DNNL_GRAPH_UNKNOWN_NDIMS,
    allocator,
    compiled_partition,
    engine,
    error,
    fpmath_mode,
    get_compiled_partition_cache_capacity,
    get_constant_tensor_cache,
    get_constant_tensor_cache_capacity,
    graph,
    header_version,
    logical_tensor,
    make_engine_with_allocator,
    op,
    partition,
    set_compiled_partition_cache_capacity,
    set_constant_tensor_cache,
    set_constant_tensor_cache_capacity,
    status,
    stream,
    tensor,
    version,
    version_t,
)
from .runner import Profile, logical_tensor_like, profile, run
from .serialization import dump, load

# Classes show the package they are imported from, not the extension module behind it.
for _item in list(vars(_dnnl_graph).values()):
    if isinstance(_item, type) and _item.__module__ == _dnnl_graph.__name__:
        for _class in (_item, *(v for v in vars(_item).values() if isinstance(v, type))):
            _class.__module__ = __name__
del _item, _class

__all__ = [
    "DNNL_GRAPH_UNKNOWN_DIM",
    "DNNL_GRAPH_UNKNOWN_NDIMS",
    "allocator",
    "compiled_partition",
    "engine",
    "error",
    "fpmath_mode",
    "get_compiled_partition_cache_capacity",
    "get_constant_tensor_cache",
    "get_constant_tensor_cache_capacity",
    "graph",
    "header_version",
    "logical_tensor",
    "make_engine_with_allocator",
    "op",
    "partition",
    "set_compiled_partition_cache_capacity",
    "set_constant_tensor_cache",
    "set_constant_tensor_cache_capacity",
    "status",
    "stream",
    "tensor",
    "version",
]

# Only in newer versions of oneDNN.
for _name in ("graph_dump_mode", "set_dump_mode"):
    if hasattr(_dnnl_graph, _name):
        globals()[_name] = getattr(_dnnl_graph, _name)
        __all__ += [_name]
del _name

# The convenience layer, not part of `import *`.
_CONVENIENCE = (Profile, dump, load, logical_tensor_like, profile, run, version_t)
