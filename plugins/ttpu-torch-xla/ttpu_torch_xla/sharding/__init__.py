"""Shards a stock model over the devices of a mesh."""

from ttpu_torch_xla.sharding.apply import Sharding, shard_model
from ttpu_torch_xla.sharding.axes import parameter_axes
from ttpu_torch_xla.sharding.fsdp import wrap
from ttpu_torch_xla.sharding.loader import ShardedLoader
from ttpu_torch_xla.sharding.resolve import resolve

__all__ = ["ShardedLoader", "Sharding", "parameter_axes", "resolve", "shard_model", "wrap"]
