"""Names of dtypes: as users write them, as safetensors files store them, and as numpy spells them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ttpu_core.checkpoint import Checkpoint, dtype_name
from ttpu_core.errors import CheckpointError

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


def model_dtype(name: Any, checkpoint: Checkpoint | None = None) -> np.dtype[Any]:
    """The dtype for parameters: from a name, "auto" (the checkpoint's dtype), or a numpy, jax or torch dtype.

    Raises:
        RequestError: models do not run in this dtype.
    """
    return np.dtype(_MODEL[dtype_name(name, checkpoint)])
