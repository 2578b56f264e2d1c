"""Quantized checkpoints as people download them: which scheme the config names, and its tensors as decoded parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ttpu_core.checkpoint import Checkpoint, TensorInfo
from ttpu_core.config import ModelConfig
from ttpu_core.errors import CheckpointError
from ttpu_core.quantization.schemes.awq import read_awq
from ttpu_core.quantization.schemes.compressed_tensors import read_compressed_tensors
from ttpu_core.quantization.schemes.fp8 import read_fp8
from ttpu_core.quantization.schemes.gptq import read_gptq
from ttpu_core.quantization.schemes.mxfp4 import read_mxfp4
from ttpu_core.quantization.schemes.refused import refuse, refuse_again
from ttpu_core.quantization.schemes.tensor import QuantizedCheckpoint, QuantizedTensor

__all__ = ["QuantizedCheckpoint", "QuantizedTensor", "open_quantized", "quantization_of", "refuse_again"]

Read = Callable[[str, ModelConfig, Mapping[str, TensorInfo]], QuantizedCheckpoint]
SCHEMES: Mapping[str, Read] = {
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
}


def quantization_of(config: ModelConfig) -> ModelConfig | None:
    """The `quantization_config` of a config, which counts as read; None if the weights are not quantized.

    Raises:
        UnsupportedError: the scheme is not read.
        CheckpointError: it names none.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        return None
    _mark_read(found)
    method = found.get("quant_method") if isinstance(found, ModelConfig) else None
    if not isinstance(found, ModelConfig) or not isinstance(method, str):
        raise CheckpointError(
            f"{config.source} has a quantization_config without a quant_method, so that its weights cannot be read: "
            "copy the config.json of the checkpoint again."
        )
    if method not in SCHEMES:
        raise refuse(config.source, method)
    return found


def open_quantized(checkpoint: Checkpoint) -> QuantizedCheckpoint | None:
    """The tensors of a quantized checkpoint; None if it is not quantized. No weight is read.

    Raises:
        CheckpointError: a part is missing or malformed.
        ConfigError: a key of the `quantization_config` has a value of another kind.
        UnsupportedError: the scheme, or a variant of it, is not read.
    """
    config = quantization_of(checkpoint.config)
    if config is None:
        return None
    found = SCHEMES[config.text("quant_method")](checkpoint.source, config, checkpoint.tensors)
    return found if found.weights else None


def _mark_read(value: Any) -> None:
    """Count everything in a section as read."""
    if isinstance(value, ModelConfig):
        for key in value:
            _mark_read(value.get(key))
    elif isinstance(value, tuple):
        for one in value:
            _mark_read(one)
