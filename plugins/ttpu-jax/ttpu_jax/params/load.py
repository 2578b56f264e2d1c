"""Reads a checkpoint into device buffers: a dict from Flax path to a sharded `jax.Array`. A process reads only the
bytes of its own devices' shards, several parameters at a time. Each byte is read once, however many devices need
it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ttpu_core.checkpoint import Checkpoint
from ttpu_core.checkpoint.decoded import DecodedTensor
from ttpu_core.checkpoint.header import TensorReader
from ttpu_core.checkpoint.slices import StoredTensor, read_boxes
from ttpu_core.mapping import Expression, FlaxMapping
from ttpu_core.mapping.padding import Box
from ttpu_core.quantization.mapping import StoredMapping
from ttpu_core.spec import Parameter
from ttpu_core.spec.kernel_format import PartName
from ttpu_jax.ops.kernels import kernel_from_parts
from ttpu_jax.params.dtypes import stored_dtype, values_dtype
from ttpu_jax.params.placement import Placement
from ttpu_jax.params.quantized import (
    Groupings,
    held_parameters,
    parts_as_read,
    placed_as_held,
    rounded,
    rounded_by_blocks,
)

Progress = Callable[[int, int], None]
Tensors = Mapping[str, StoredTensor | DecodedTensor]
ALIGNMENT = 64  # XLA:CPU takes over a host buffer without a copy if it is aligned to this many bytes

BLOCK = 2**18
"""Number of weights, at least, that are read and rounded at a time on one device."""

BLOCKS = 64
"""Larger kernels are rounded in about as many blocks as this."""

THREADS = min(8, 2 * (os.cpu_count() or 1))
"""Number of parameters that are read at a time: enough to keep a disk busy while others are transferred to a device."""

HOST_BYTES = 2**30
"""Limit of the bytes on the host that wait for their transfer to devices. A single parameter may exceed it."""


def load_parameters(
    checkpoint: Checkpoint,
    mapping: FlaxMapping | StoredMapping,
    parameters: Mapping[str, Parameter],
    placement: Placement,
    dtype: np.dtype[Any],
    progress: Progress | None = None,
    *,
    reader: TensorReader | None = None,
    groupings: Groupings | None = None,
) -> dict[str, Any]:
    """Every parameter of the table, on its devices: Flax path → array, or `QuantizedKernel` for a parameter with a
    format. On one device, a large dense kernel with a format is rounded block by block while it is read; on a mesh, as
    soon as it is on its devices, one kernel per thread at a time.

    Args:
        checkpoint: the checkpoint.
        mapping: the mapping for the table's shapes; with padding, the result of `ttpu_core.mapping.pad_mapping`. For a
            quantized checkpoint, the result of `ttpu_core.quantization.mapping.stored_mapping`.
        parameters: the parameter table.
        placement: the devices.
        dtype: dtype of the parameters, except for those that have their own.
        progress: called with (bytes placed so far, bytes in all) after each parameter.
        reader: reads the files; None opens a reader and closes it afterwards.
        groupings: see `ttpu_jax.params.quantized.groupings_for`; needed for kernels that are rounded.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
        MappingError: tensors and parameters do not match.
    """
    tensors: Tensors
    if isinstance(mapping, StoredMapping):
        tensors, mapping = _quantized_tensors(mapping), mapping.mapping
    else:
        tensors = stored_tensors(checkpoint, mapping)
    total = sum(p.size * _dtype(p, dtype).itemsize for p in held_parameters(parameters, placement).values())
    done, placed = 0, {}
    with TensorReader() as own:
        jobs = _jobs(mapping, parameters, placement, dtype, tensors, reader or own, groupings or {})
        for path, array in _in_parallel(jobs):
            placed[path] = array
            done += sum(part.nbytes for part in jax.tree.leaves(array))
            if progress is not None:
                progress(done, total)
    return {path: placed[path] for path in parameters}


def stored_tensors(checkpoint: Checkpoint, mapping: FlaxMapping) -> dict[str, StoredTensor]:
    """The tensors that the rules read, by the rules' names.

    Raises:
        CheckpointError: a tensor is not stored as floating point.
        MappingError: the checkpoint lacks a tensor that the rules need, or holds an unknown one.
    """
    infos = checkpoint.tensors
    names = mapping.resolve({name: info.shape for name, info in infos.items()}, str(checkpoint.source))
    return {
        name: StoredTensor(infos[actual], stored_dtype(infos[actual].dtype, name)) for name, actual in names.items()
    }


def _quantized_tensors(stored: StoredMapping) -> Tensors:
    dense = {name: StoredTensor(info, stored_dtype(info.dtype, name)) for name, info in stored.dense.items()}
    return dense | {
        name: one if isinstance(one, DecodedTensor) else StoredTensor(one, values_dtype(one.dtype))
        for name, one in stored.sources.items()
    }


def device_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[jax.Device]]:
    """The boxes of an array that this process's devices hold, each with its devices."""
    boxes: dict[Box, list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        box = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        boxes[box].append(device)
    return boxes


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised array [*shape] whose memory XLA:CPU can use without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


Job = tuple[str, int, Callable[[], Any]]  # path, bytes on the host, function that reads it


def _jobs(
    mapping: FlaxMapping,
    parameters: Mapping[str, Parameter],
    placement: Placement,
    dtype: np.dtype[Any],
    tensors: Tensors,
    reader: TensorReader,
    groupings: Groupings,
) -> Iterator[Job]:
    read_from = dict(mapping.rules)
    for path, parameter in parameters.items():
        if f"{path}.values" in read_from:
            parts = parts_as_read(parameter, placement)
            rules = {f"{path}.{name}": part for name, part in parts.items()}
            of_parts = {name: job for name, _, job in _jobs(mapping, rules, placement, dtype, tensors, reader, {})}
            nbytes = sum(part.size * _dtype(part, dtype).itemsize for part in parts.values())
            yield path, nbytes, partial(_load_parts, path, parameter, placement, of_parts)
            continue
        kind, sharding = _dtype(parameter, dtype), placement.parameter(path, parameter)
        boxes = device_boxes(sharding, parameter.shape)
        nbytes = sum(_elements(box) for box in boxes) * kind.itemsize
        padding = 1 if path.endswith(".kernel.scale") else 0
        load = partial(_load, mapping[path], parameter.shape, kind, sharding, boxes, tensors, reader, padding)
        if parameter.format is not None and placement.mesh is None and parameter.size > BLOCK:
            blocks = row_blocks(parameter.shape, max(BLOCK, parameter.size // BLOCKS))
            nbytes = _elements(blocks[0][1]) * kind.itemsize
            load = partial(_load_by_blocks, mapping[path], kind, blocks, tensors, reader, path, parameter, placement)
        elif parameter.format is not None:
            load = partial(_load_rounded, load, path, parameter, placement, groupings[path])
        yield path, nbytes, load


def _load_parts(
    path: str, parameter: Parameter, placement: Placement, jobs: Mapping[str, Callable[[], jax.Array]]
) -> Any:
    """Read the parts of a quantized kernel."""
    assert parameter.format is not None
    parts: dict[PartName, jax.Array] = {}
    for name, job in jobs.items():
        parts[cast(PartName, name.removeprefix(f"{path}."))] = job()
    return placed_as_held(kernel_from_parts(parameter.format, parts), parameter, placement)


def _load_rounded(load: Callable[[], jax.Array], *how: Any) -> Any:
    """Read a dense kernel and round it; `how` are the further arguments of `rounded`."""
    return jax.block_until_ready(rounded(load(), *how))


def row_blocks(shape: tuple[int, ...], most: int) -> list[tuple[int, Box]]:
    """Boxes of equal shape and at most `most` elements, or one row, that cover a kernel [*out, in]; each with the
    number of its first row. The last ones may overlap the others."""
    axis = next(axis for axis in range(len(shape)) if prod(shape[axis + 1 :]) <= most or axis == len(shape) - 2)
    high = min(shape[axis], max(1, most // prod(shape[axis + 1 :])))
    found = []
    for lead in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], high):
            begin = min(start, shape[axis] - high)
            first = [*lead, begin, *(0 for _ in shape[axis + 1 : -1])]
            box = (*((one, one + 1) for one in lead), (begin, begin + high), *((0, size) for size in shape[axis + 1 :]))
            found.append((int(np.ravel_multi_index(first, shape[:-1])), box))
    return found


def _load_by_blocks(
    rule: Expression,
    dtype: np.dtype[Any],
    blocks: Sequence[tuple[int, Box]],
    tensors: Tensors,
    reader: TensorReader,
    *what: Any,
) -> Any:
    """Read a dense kernel and round it block by block; `what` are the further arguments of `rounded_by_blocks`."""

    def read() -> Iterator[tuple[int, np.ndarray]]:
        for start, box in blocks:
            array = np.empty([stop - begin for begin, stop in box], dtype)
            read_boxes(rule, {box: array}, tensors, reader)
            yield start, array.reshape(-1, array.shape[-1])

    return rounded_by_blocks(read(), *what)


def _load(
    rule: Expression,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: Sharding,
    boxes: Mapping[Box, list[jax.Device]],
    tensors: Tensors,
    reader: TensorReader,
    padding: int = 0,
) -> jax.Array:
    """Read one parameter from the files to this process's devices."""
    parts = {box: aligned_empty(tuple(stop - start for start, stop in box), dtype) for box in boxes}
    read_boxes(rule, parts, tensors, reader, padding)
    shards = [jax.device_put(parts[box], device) for box, devices in boxes.items() for device in devices]
    array = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    return array.block_until_ready()  # the host's memory is free only after the transfer


def _in_parallel(jobs: Iterator[Job]) -> Iterator[tuple[str, Any]]:
    """Results of the jobs in the order in which they finish, with a bound on their memory."""
    running: dict[Future[Any], tuple[str, int]] = {}
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="load")
    try:
        for path, nbytes, job in jobs:
            while running and sum(size for _, size in running.values()) + nbytes > HOST_BYTES:
                yield from _finished(running)
            running[pool.submit(job)] = path, nbytes
            while len(running) > 2 * THREADS:
                yield from _finished(running)
        while running:
            yield from _finished(running)
    finally:
        pool.shutdown(cancel_futures=True)


def _finished(running: dict[Future[Any], tuple[str, int]]) -> Iterator[tuple[str, Any]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        path, _ = running.pop(future)
        yield path, future.result()


def _elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def _dtype(parameter: Parameter, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return jnp.dtype(parameter.dtype) if parameter.dtype else dtype
