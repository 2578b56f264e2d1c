"""The sharding of a generation's tensors. The cache is sharded like activations, and results are replicated, so that
every step has the same shardings as the one before and the host can read the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from ttpu_core.spec import axes
from ttpu_torch_xla.generation.cache import FixedCache, FixedLayer
from ttpu_torch_xla.sharding.apply import Sharding

KEYS = (axes.BATCH, axes.KV_HEADS, axes.SEQUENCE, axes.HEAD_DIM)


@dataclass(frozen=True)
class Placement:
    """The sharding of a model's generation; on one device it does nothing.

    Attributes:
        sharding: the model's, or None where it is on one device.
    """

    sharding: Sharding | None = None

    def shard(self, cache: FixedCache) -> None:
        """Shard keys and values along batch and heads, and states of other mixers along the batch."""
        if self.sharding is None:
            return
        for layer in cache.layers:
            if isinstance(layer, FixedLayer):
                for tensor in (layer.keys, layer.values):
                    self._hold(tensor, KEYS)
            if isinstance(layer, LinearAttentionLayer):
                for tensor in (*layer.conv_states.values(), *layer.recurrent_states.values()):
                    self._hold(tensor, (axes.BATCH,))

    def whole(self, *tensors: torch.Tensor | None) -> None:
        """Replicate these tensors on every device, because reading a sharded tensor compiles a program each time."""
        for tensor in tensors:
            if self.sharding is not None and tensor is not None:
                self.sharding.runtime.shard(tensor, self.sharding.mesh, (None,) * tensor.ndim)

    def _hold(self, tensor: torch.Tensor | None, logical: tuple[str, ...]) -> None:
        if self.sharding is None or tensor is None:
            return
        named = (*logical, *(None,) * (tensor.ndim - len(logical)))
        partition_spec = self.sharding.partition_spec(named, tuple(tensor.shape))
        self.sharding.runtime.shard(tensor, self.sharding.mesh, partition_spec)


ONE_DEVICE = Placement()


def placement_of(model: Any) -> Placement:
    """Return the placement of a model by its handle; one device without a handle."""
    handle = getattr(model, "ttpu", None)
    if handle is None or handle.mesh is None or handle.parallelism is None:
        return ONE_DEVICE
    return Placement(Sharding(handle.parallelism, handle.mesh, handle.runtime))
