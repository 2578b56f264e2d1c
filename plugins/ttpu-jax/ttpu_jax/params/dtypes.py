"""Names of dtypes: as users write them, as safetensors files store them, and as numpy spells them."""

from __future__ import annotations

import logging
from typing import Any

import ml_dtypes
import numpy as np

from ttpu_core.checkpoint import Checkpoint, dtype_name
from ttpu_core.errors import CheckpointError

log = logging.getLogger(__name__)

_STORED: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}  # no integers: integer weights are quantized, and are useless without their scales
_QUANTIZED: dict[str, Any] = {"I8": np.int8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
_MODEL: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def stored_dtype(name: str, tensor: str) -> np.dtype[Any]:
    """The numpy dtype of a tensor in a safetensors file.

    Raises:
        CheckpointError: the storage format is not floating point.
    """
    if name not in _STORED:
        raise CheckpointError(
            f"tensor {tensor!r} is stored as {name}, but this backend reads {', '.join(_STORED)}: use a "
            "checkpoint that is not quantized."
        )
    return np.dtype(_STORED[name])


def values_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of quantized values that are stored as they are used."""
    return np.dtype(_QUANTIZED[name])


def model_dtype(name: Any, checkpoint: Checkpoint | None = None, platform: str = "") -> np.dtype[Any]:
    """The dtype for parameters: from a name, "auto" (the checkpoint's dtype), or a numpy, jax or torch dtype.

    On a TPU float16 becomes bfloat16, with a warning: kernels for TPUs compute in bfloat16 and float32.

    Raises:
        RequestError: models do not run in this dtype.
    """
    found = dtype_name(name, checkpoint)
    if found == "float16" and platform == "tpu":
        log.warning("the weights are in float16, which TPUs do not multiply: they are held in bfloat16")
        found = "bfloat16"
    return np.dtype(_MODEL[found])
