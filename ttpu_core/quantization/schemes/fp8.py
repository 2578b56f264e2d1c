"""Fine-grained FP8 as DeepSeek-V3 has it, and transformers' quant_method "fp8": float8_e4m3fn weights, and beside each
of them `weight_scale_inv`, which despite its name multiplies, for each block of 128 x 128 weights (or for all)."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from ttpu_core.checkpoint.header import TensorInfo
from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization.schemes.section import BLOCK, block
from ttpu_core.quantization.schemes.tensor import (
    QuantizedCheckpoint,
    QuantizedTensor,
    exact_scale_dtype,
    missing,
    scale_source,
)
from ttpu_core.spec.kernel_format import ActivationFormat

SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = ("input_scale", "activation_scale")
"""Static scales of activations. Activations stay in the model's dtype, which is more exact."""


def read_fp8(source: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> QuantizedCheckpoint:
    """Read a checkpoint of FP8 weights; no weight is read.

    Raises:
        CheckpointError: scales are missing or have a wrong shape.
        ConfigError: a key of `config` has a value of another kind.
        UnsupportedError: another dtype than e4m3.
    """
    form = config.text("fmt", default=config.text("weight_format", default="e4m3")).lower()
    if form not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedError(f"{source} holds weights in {form}, but FP8 weights are read in e4m3: take such ones.")
    sizes = config.converted("weight_block_size", BLOCK, block, None)
    weights: dict[str, QuantizedTensor] = {}
    used: set[str] = set()
    for name, info in tensors.items():
        if info.dtype == "F8_E4M3" and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            weights[name] = fp8_weight(name, info, sizes, tensors)
            used |= {name, *(f"{module}.{part}" for part in (*SCALES, *UNUSED))}
    dense = {name: info for name, info in tensors.items() if name not in used}
    return QuantizedCheckpoint(source, "fine-grained FP8" if sizes else "FP8", weights, dense)


def fp8_weight(
    name: str,
    info: TensorInfo,
    block: tuple[int, int] | None,
    tensors: Mapping[str, TensorInfo],
    activation: ActivationFormat | None = None,
) -> QuantizedTensor:
    """A weight in float8_e4m3fn with its scales, which become scales per row and group of inputs.

    Args:
        name: of the weight in a dense checkpoint, ending in ".weight".
        info: the stored values, [*lead, out, in].
        block: outputs and inputs that share a scale; None for one per tensor or per output channel.
        tensors: every tensor of the checkpoint by name.
        activation: how the input of the product is quantized.

    Raises:
        CheckpointError: the scales are missing or have a wrong shape.
    """
    module = name.removesuffix(".weight")
    scales = next((tensors[f"{module}.{part}"] for part in SCALES if f"{module}.{part}" in tensors), None)
    if scales is None:
        raise missing(name, f"{module}.{SCALES[0]}")
    inputs = info.shape[-1]
    if scales.size == 1 or block is None:
        scale = scale_source(scales, info.shape)
        groups = scale.shape[-1]
        size = None if groups == 1 else inputs // groups
    else:
        scale = scale_source(scales, info.shape, block)
        # The last block of a weight may be narrower.
        size = None if scale.shape[-1] == 1 else gcd(block[1], inputs)
    parts: Any = {"values": info, "scale": scale}
    wide = None if size is None or block is None or scales.size == 1 else block[1]
    return QuantizedTensor(
        name, info.shape, "float8_e4m3fn", size, exact_scale_dtype(scales), parts, activation, scale_width=wide
    )
