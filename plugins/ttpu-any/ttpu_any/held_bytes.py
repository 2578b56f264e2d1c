"""What a device holds of a stock model on a mesh, by its config alone: for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec

from ttpu_any.aten.table import jax_dtype
from ttpu_any.report import traced_steps
from ttpu_any.sharding import cache_partition, partition, plan_of
from ttpu_any.stock import empty_model, is_encoder, stock_class
from ttpu_any.trace import tensors_of
from ttpu_core.backend import HeldBytes
from ttpu_core.config import ModelConfig
from ttpu_core.errors import UnsupportedError
from ttpu_core.spec.arithmetic import BITS
from ttpu_jax.params.dtypes import model_dtype


def held_bytes(
    config: ModelConfig, meshes: Sequence[Mapping[str, int]], *, batch: int, context: int, dtype: str
) -> list[HeldBytes]:
    """See `ttpu_core.backend.PlansWithoutPlugin`. The cache is that of the first manner in which the model can be
    traced.

    Raises:
        UnsupportedError: the model cannot be traced, is an encoder, or has fewer positions than `context`.
    """
    if is_encoder(stock_class(config)[1]):
        raise UnsupportedError(
            f"a plan for a model of type {config.model_type!r} was asked for, but it is a text encoder, which keeps no "
            "cache, and plans are of decoders: `ttpu compile-report --task prefill` says what it takes."
        )
    model = empty_model(config, getattr(torch, model_dtype(dtype).name))
    plan, tensors = plan_of(model), tensors_of(model)
    cache = traced_steps(model, batch, context, decode=True).prefill.cache
    found = []
    for mesh in meshes:
        sizes = {axis: size for axis, size in mesh.items() if size > 1}
        gathered = {"tensor": sizes.get("tensor", 1)} if plan else {}  # what is spread over the other axes is gathered
        weights = read = 0
        for name, tensor in tensors.items():
            where = partition(plan, sizes, name, tensor.shape)
            weights += _bytes(tensor.shape, tensor.dtype, where, sizes)
            read += _bytes(tensor.shape, tensor.dtype, where, gathered)
        kept = sum(_bytes(each.shape, each.dtype, cache_partition(sizes, each.shape), sizes) for each in cache)
        found.append(HeldBytes(weights, read, kept))
    return found


def _bytes(shape: Sequence[int], dtype: torch.dtype, where: PartitionSpec, mesh: Mapping[str, int]) -> int:
    """Of one device's part."""
    axes = [axis for each in where if each is not None for axis in ((each,) if isinstance(each, str) else each)]
    return prod(shape) * BITS[jnp.dtype(jax_dtype(dtype)).name] // 8 // prod(mesh.get(axis, 1) for axis in axes)
