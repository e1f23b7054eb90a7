"""int8: static post-training quantization, and modules that others have quantized."""

from llga_fuser._quantize.config import QuantizationConfig
from llga_fuser._quantize.pt2e import from_pt2e
from llga_fuser._quantize.quantize import quantize

__all__ = ["QuantizationConfig", "from_pt2e", "quantize"]
