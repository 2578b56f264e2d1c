"""Which rows of a batch are a process's, and how they are put on devices."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.spec import axes
from ttpu_jax.model.loss import TokenBatch
from ttpu_jax.params.placement import Placement

if TYPE_CHECKING:
    from ttpu_train.runner import Batch


@dataclass(frozen=True)
class Rows:
    """Which rows of a batch are this process's; see `ttpu_train.runner.RowLayout`. `readers` are, of each share, the
    first process that reads it."""

    shards: int = 1
    process_index: int = 0
    process_count: int = 1
    device_count: int = 1
    share_index: int = 0
    share_count: int = 1
    readers: tuple[int, ...] = (0,)


def row_layout(placement: Placement) -> Rows:
    """Which rows of a batch a placement gives this process.

    Raises:
        UnsupportedError: a process holds a part of another one's rows, or none.
    """
    if placement.mesh is None:
        return Rows()
    shards = prod(placement.mesh.shape[axis] for axis in placement.axes_of(axes.BATCH))
    processes = jax.process_count()
    if processes == 1:
        return Rows(shards, 0, 1, placement.mesh.size)
    sharding: Any = placement.sharding((axes.BATCH,), (shards,), "the rows")
    rows_of: dict[int, set[int]] = {}
    for device, index in sharding.devices_indices_map((shards,)).items():
        rows_of.setdefault(device.process_index, set()).add(index[0].start or 0)
    shares: dict[tuple[int, ...], int] = {}  # in the order of rows
    for process, rows in sorted(rows_of.items(), key=lambda one: (sorted(one[1]), one[0])):
        shares.setdefault(tuple(sorted(rows)), process)
    if sum(map(len, shares)) != shards or len({len(rows) for rows in shares}) != 1 or len(rows_of) != processes:
        raise UnsupportedError(
            f"{processes} processes were to train with rows divided over {shards} devices, but some hold a part of "
            "each other's rows or none: use a mesh of all devices, whose axes data, fsdp and expert together divide "
            "the processes or are a multiple of them."
        )
    own = tuple(sorted(rows_of[jax.process_index()]))
    readers = tuple(shares.values())
    index = list(shares).index(own)
    return Rows(shards, jax.process_index(), processes, placement.mesh.size, index, len(shares), readers)


def placed_batch(
    batch: Batch, layout: Rows, placement: Placement, parts: int = 1, together: int = 1, *, on_host: bool = False
) -> TokenBatch:
    """A batch on devices, each process giving its own rows.

    Args:
        batch: this process's rows.
        layout: which rows these are.
        placement: of the model.
        parts: that the batch is computed in.
        together: rows of one example, which stay on one device and in one part.
        on_host: leave the arrays of a single process to the program that they are given to, which was compiled for
            `row_shardings` and takes them to the devices in less time.

    Raises:
        RequestError: rows that the layout's shards and the parts do not divide.
    """
    rows = batch.tokens.shape[0] * layout.share_count
    least = layout.shards * parts * together
    if rows % least or not rows:
        raise RequestError(
            f"a batch of {rows} rows was given, but {layout.shards} devices take equal shares of it"
            f"{f' in {parts} parts' if parts > 1 else ''}{f', {together} rows together' if together > 1 else ''}: "
            f"give a multiple of {least} rows."
        )

    def host(array: np.ndarray, dtype: Any) -> Any:
        return np.ascontiguousarray(array, dtype)

    own = TokenBatch(
        host(batch.tokens, np.int32),
        host(batch.weights, np.float32),
        host(batch.positions, np.int32),
        None if batch.segments is None else host(batch.segments, np.int32),
        {name: host(array, np.float32) for name, array in batch.extra.items()},
    )
    if layout.process_count == 1:
        return own if on_host else jax.device_put(own, row_shardings(own, placement))

    def joined(array: np.ndarray) -> jax.Array:
        shape = (rows, *array.shape[1:])
        return jax.make_array_from_process_local_data(_row_sharding(shape, placement), array, shape)

    placed: TokenBatch = jax.tree.map(joined, own)
    return placed


def row_shardings(batch: TokenBatch, placement: Placement) -> TokenBatch:
    """Where a program finds each array of a batch: rows over the devices; what is there already stays."""

    def of(array: np.ndarray | jax.Array) -> Sharding:
        return array.sharding if isinstance(array, jax.Array) else _row_sharding(array.shape, placement)

    shardings: TokenBatch = jax.tree.map(of, batch)
    return shardings


def _row_sharding(shape: tuple[int, ...], placement: Placement) -> Sharding:
    return placement.sharding((axes.BATCH, *(None for _ in shape[1:])), shape, "the rows")


def form(batch: TokenBatch) -> Any:
    """What a program is compiled for."""
    shapes = tuple((name, array.shape) for name, array in sorted(batch.extra.items()))
    return batch.tokens.shape, batch.segments is None, shapes


def own_rows(array: jax.Array) -> np.ndarray:
    """The rows of `array` [all rows, ...] that this process's devices hold: [rows, ...]."""
    if array.is_fully_addressable:
        return np.asarray(array)
    rows = {shard.index[0].start or 0: np.asarray(shard.data) for shard in array.addressable_shards}
    return np.concatenate([rows[start] for start in sorted(rows)])
