"""Quantized weights as data: what a user asks for, what a checkpoint holds, and how both become formats of kernels."""

from ttpu_core.quantization.config import QuantizationConfig
from ttpu_core.quantization.quantize import Choice, choices, quantize_architecture, quantize_spec

__all__ = ["Choice", "QuantizationConfig", "choices", "quantize_architecture", "quantize_spec"]
