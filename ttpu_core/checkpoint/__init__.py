"""Checkpoints on disk: config.json and safetensors files, read without a framework."""

from ttpu_core.checkpoint.checkpoint import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    open_checkpoint,
    open_config,
)
from ttpu_core.checkpoint.dtypes import DTYPE_ALIASES, DTYPES, dtype_in_config, dtype_name
from ttpu_core.checkpoint.header import TensorInfo, read_tensor_into

__all__ = [
    "DTYPES",
    "DTYPE_ALIASES",
    "INDEX",
    "WEIGHTS",
    "Checkpoint",
    "TensorInfo",
    "dtype_in_config",
    "dtype_name",
    "open_checkpoint",
    "open_config",
    "read_tensor_into",
]
