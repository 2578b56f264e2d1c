"""Moves batches to the mesh. It takes batches of host tensors, as torch's `DataLoader` yields them, and yields them on
the device, sharded along the batch, and along the sequence where the mesh shards it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ttpu_core.errors import RequestError
from ttpu_core.spec import axes
from ttpu_torch_xla.handle import Handle
from ttpu_torch_xla.sharding.apply import Sharding


class ShardedLoader:
    """An iterable of batches on the devices of a prepared model.

    Each tensor travels in parts: a device receives its rows only. Before a batch is handed out, what was recorded with
    the one before is sent to the device, so that a training loop needs no call of its own for that.

    With several processes each must yield the same batch, of which it sends the rows of its own devices.
    """

    def __init__(self, batches: Iterable[Any], model: Any) -> None:
        """Make a loader.

        Args:
            batches: tensors [batch, ...] or [batch, sequence, ...], alone or in mappings, lists and tuples. Mappings
                such as a `BatchEncoding` come out as dicts.
            model: a model that this backend loaded.

        Raises:
            RequestError: this backend did not load the model.
        """
        handle = getattr(model, "ttpu", None)
        if not isinstance(handle, Handle):
            raise RequestError(
                f"a loader for {type(model).__name__} was asked for, but it was not loaded by this backend: pass what "
                "AutoModelForTPU.from_pretrained(..., backend='torch_xla') returns."
            )
        self._batches, self._runtime = batches, handle.runtime
        self._sharding: Sharding | None = None
        if handle.parallelism is not None:
            self._sharding = Sharding(handle.parallelism, handle.mesh, handle.runtime)

    def __len__(self) -> int:
        """Batches, where the iterable knows."""
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            there = self._there(batch)
            self._runtime.sync()
            yield there
        self._runtime.sync()

    def _there(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {name: self._there(value) for name, value in batch.items()}
        if isinstance(batch, torch.Tensor):
            return self._send(batch)
        return tree_map(
            lambda one: self._there(one) if isinstance(one, torch.Tensor | Mapping) else one,
            batch,
            is_leaf=lambda one: isinstance(one, Mapping),
        )

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        there = self._runtime.put(tensor)
        if self._sharding is not None and there.ndim:
            logical = (axes.BATCH, axes.SEQUENCE, *((None,) * there.ndim))[: there.ndim]
            partition_spec = self._sharding.partition_spec(logical, tuple(there.shape))
            if any(partition_spec):
                self._runtime.shard(there, self._sharding.mesh, partition_spec)
        return there
