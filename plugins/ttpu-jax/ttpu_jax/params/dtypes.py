"""Names of dtypes: as users write them, as safetensors files write them, as numpy knows them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ttpu_core.checkpoint import DTYPE_ALIASES, Checkpoint
from ttpu_core.errors import CheckpointError, RequestError

_STORED: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}  # no integers: weights stored as such are quantized, and mean nothing without their scales
_MODEL: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def stored_dtype(name: str, tensor: str) -> np.dtype[Any]:
    """The numpy dtype of a tensor in a safetensors file.

    Raises:
        CheckpointError: a storage format that is not floating point.
    """
    if name not in _STORED:
        raise CheckpointError(
            f"tensor {tensor!r} is stored as {name}, but this backend reads {', '.join(_STORED)}: use a "
            "checkpoint that is not quantized."
        )
    return np.dtype(_STORED[name])


def model_dtype(name: Any, checkpoint: Checkpoint | None = None) -> np.dtype[Any]:
    """The dtype that parameters are held in: a name, "auto" (as the checkpoint says), or a numpy, jax or torch dtype.

    Raises:
        RequestError: a dtype that models do not run in.
    """
    if name is None or name == "auto":
        name = "float32" if checkpoint is None else checkpoint.dtype
    if isinstance(name, str):
        text = name.removeprefix("torch.").removeprefix("jnp.")
    elif type(name).__module__.startswith("torch"):
        text = str(name).removeprefix("torch.")
    else:
        try:
            text = np.dtype(name).name
        except TypeError:
            text = "no dtype"
    text = DTYPE_ALIASES.get(text, text)
    if text not in _MODEL:
        raise RequestError(f"dtype {name!r} was asked for, but models run in {', '.join(_MODEL)}: use one, or 'auto'.")
    return np.dtype(_MODEL[text])
