"""Streams a checkpoint into device buffers. In: a checkpoint, its mapping, the parameter table and a placement; out: a
dict from Flax path to a sharded `jax.Array`. One parameter at a time is on the host, in its final dtype and layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ttpu_core.checkpoint import Checkpoint, read_tensor_into
from ttpu_core.mapping import FlaxMapping, gather
from ttpu_core.spec import Parameter
from ttpu_jax.params.dtypes import stored_dtype
from ttpu_jax.params.placement import Placement

Progress = Callable[[int, int], None]
ALIGNMENT = 64  # XLA:CPU takes over a host buffer without a copy if it is aligned to this many bytes


def load_parameters(
    checkpoint: Checkpoint,
    mapping: FlaxMapping,
    parameters: Mapping[str, Parameter],
    placement: Placement,
    dtype: np.dtype[Any],
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Every parameter of the table, on its devices.

    Args:
        dtype: what parameters are held in, unless a parameter keeps its own.
        progress: called with (bytes placed so far, bytes in all) after each parameter.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
        MappingError: tensors and parameters do not account for each other.
    """
    infos = checkpoint.tensors
    names = mapping.resolve({name: info.shape for name, info in infos.items()}, str(checkpoint.source))

    def read(name: str) -> np.ndarray:
        info = infos[names[name]]
        buffer = aligned_empty(info.shape, stored_dtype(info.dtype, name))
        if info.nbytes:
            read_tensor_into(info, buffer.reshape(-1).view(np.uint8).data)
        return buffer

    total = sum(p.size * _dtype(p, dtype).itemsize for p in parameters.values())
    done, placed = 0, {}
    for path, parameter in parameters.items():
        value = aligned_empty(parameter.shape, _dtype(parameter, dtype))
        gather(mapping[path], read, value)
        placed[path] = jax.device_put(value, placement.parameter(path, parameter))
        done += value.nbytes
        if progress is not None:
            progress(done, total)
    return placed


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised array whose memory XLA:CPU can take over."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _dtype(parameter: Parameter, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(parameter.dtype) if parameter.dtype else dtype
