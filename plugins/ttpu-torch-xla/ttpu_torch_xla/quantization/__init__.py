"""Weights in 4 or 8 bits: the configuration, the quantized layer, and the replacement of layers in a model."""

from ttpu_torch_xla.quantization.config import QuantizationConfig
from ttpu_torch_xla.quantization.linear import QuantizedLinear
from ttpu_torch_xla.quantization.swap import Report, quantize

__all__ = ["QuantizationConfig", "QuantizedLinear", "Report", "quantize"]
