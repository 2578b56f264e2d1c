"""Reads whole tensors of a checkpoint as numpy arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ttpu_core.checkpoint import TensorInfo, read_tensor_into
from ttpu_core.errors import CheckpointError

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BOOL": np.bool_,
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def read_tensor(info: TensorInfo) -> np.ndarray:
    """The tensor, [*shape], in the dtype in which it is stored.

    Raises:
        CheckpointError: its dtype has no numpy dtype, or the file cannot be read.
    """
    if info.dtype not in _DTYPES:
        raise CheckpointError(
            f"the tensor {info.name!r} is stored as {info.dtype}, which cannot be copied: it belongs to a checkpoint "
            "that is quantized already; start from the original one."
        )
    array: np.ndarray[Any, Any] = np.empty(info.shape, np.dtype(_DTYPES[info.dtype]))
    read_tensor_into(info, array.reshape(-1).view(np.uint8).data)
    return array


def read_weights(info: TensorInfo) -> np.ndarray:
    """A floating-point tensor as float32, [*shape].

    Raises:
        CheckpointError: it is no floating-point tensor, or holds infinities or what is not a number.
    """
    if info.dtype not in FLOATS:
        raise CheckpointError(
            f"the tensor {info.name!r} was to be quantized, but it is stored as {info.dtype}: start from a checkpoint "
            "in bfloat16, float16 or float32."
        )
    weights = read_tensor(info).astype(np.float32)
    if not np.isfinite(weights).all():
        raise CheckpointError(
            f"the tensor {info.name!r} was to be quantized, but it holds infinities or NaN: the file is damaged; "
            "download it once more."
        )
    return weights
