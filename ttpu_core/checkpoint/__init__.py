"""Checkpoints on disk: config.json and safetensors files, read without a framework."""

from ttpu_core.checkpoint.checkpoint import (
    DTYPE_ALIASES,
    DTYPES,
    INDEX,
    WEIGHTS,
    Checkpoint,
    open_checkpoint,
    open_config,
)
from ttpu_core.checkpoint.header import TensorInfo, read_tensor_into

__all__ = [
    "DTYPES",
    "DTYPE_ALIASES",
    "INDEX",
    "WEIGHTS",
    "Checkpoint",
    "TensorInfo",
    "open_checkpoint",
    "open_config",
    "read_tensor_into",
]
