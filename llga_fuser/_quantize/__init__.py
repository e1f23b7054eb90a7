"""int8: static post-training quantization, and modules that others have quantized."""

import torch

from llga_fuser._quantize.config import QuantizationConfig
from llga_fuser._quantize.pt2e import from_pt2e
from llga_fuser._quantize.quantize import quantize

__all__ = ["QuantizationConfig", "from_pt2e", "quantize"]


def _forget_replaced_builtins() -> None:
    """Takes functions that are gone out of TorchScript's table of builtin functions.

    The table knows them by `id()`. torch.ao defines operators of several overloads, and each one
    makes PyTorch replace the function of the ones before. If a module's attribute, such as a list
    in a `Conv2d`, is later allocated in the old one's place, `torch.jit.script` takes it for a
    builtin function, and raises.
    """
    table = torch.jit._builtins._get_builtin_table()
    namespace = "quantized_decomposed"
    packets = getattr(torch.ops, namespace)
    for key, name in list(table.items()):
        library, _, operator = name.partition("::")
        if library == namespace and key != id(getattr(packets, operator)._op):
            del table[key]


_forget_replaced_builtins()
