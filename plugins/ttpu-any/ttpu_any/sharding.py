"""Shards the stock model's tensors. transformers' own plan for tensor and expert parallelism says which dimension lies
along the axes "tensor" and "expert"; the axis "fsdp" takes the largest dimension that is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from ttpu_core.errors import UnsupportedError
from ttpu_jax.params.placement import Placement

COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
FIRST = ("grouped_gemm", "embedding_rowwise")
USED = ("data", "fsdp", "expert", "tensor")


def check_axes(placement: Placement) -> None:
    """Refuse mesh axes that mean nothing here.

    Raises:
        UnsupportedError: the mesh has one.
    """
    idle = [axis for axis in _sizes(placement) if axis not in USED]
    if idle:
        raise UnsupportedError(
            f"the mesh has the axis {idle[0]!r}, but a model without a plugin is sharded along {', '.join(USED)}: use "
            "those."
        )


def tensor_sharding(model: Any, placement: Placement, name: str, shape: Sequence[int]) -> jax.sharding.Sharding:
    """Where a tensor of the model lies."""
    if placement.mesh is None:
        return placement.whole()
    return NamedSharding(placement.mesh, partition(plan_of(model), _sizes(placement), name, shape))


def plan_of(model: Any) -> dict[str, str]:
    """transformers' plan: the pattern of a module's or parameter's name → how it is sharded."""
    return {**dict(getattr(model, "tp_plan", None) or {}), **dict(getattr(model, "ep_plan", None) or {})}


def partition(
    plan: Mapping[str, str], mesh: Mapping[str, int], name: str, shape: Sequence[int]
) -> PartitionSpec:
    """The mesh axis along each dimension of a tensor.

    Args:
        plan: transformers' plan.
        mesh: axis → devices along it, more than one.
        name: of the tensor, as in "model.layers.0.mlp.up_proj.weight".
        shape: of the tensor.
    """
    found: list[str | None] = [None] * len(shape)
    pattern = replace_layer_number_by_wildcard(name)
    style = plan.get(pattern) or plan.get(pattern.rpartition(".")[0])
    dim = _dimension(style, len(shape), name.endswith("bias"))
    axis = "expert" if style == "grouped_gemm" and "expert" in mesh else "tensor"
    if dim is not None and axis in mesh and shape[dim] % mesh[axis] == 0:
        found[dim] = axis
    # Where transformers has no plan, tensor parallelism becomes one more axis that weights are spread over.
    spread = ["fsdp"] if plan else ["fsdp", "tensor", "expert"]
    for each in (axis for axis in spread if axis in mesh and len(shape) > 1):
        free = [place for place, taken in enumerate(found) if taken is None and shape[place] % mesh[each] == 0]
        if free:
            found[max(free, key=lambda place: shape[place])] = each
    return PartitionSpec(*found)


def batch_sharding(placement: Placement, batch: int, rank: int) -> jax.sharding.Sharding:
    """Where an array [batch, ...] lies: rows along "data" and "fsdp" where these divide them."""
    if placement.mesh is None:
        return placement.whole()
    return NamedSharding(placement.mesh, PartitionSpec(_of_rows(_sizes(placement), batch), *(None,) * (rank - 1)))


def cache_sharding(placement: Placement, shape: Sequence[int]) -> jax.sharding.Sharding:
    """Where a tensor of the cache lies."""
    if placement.mesh is None:
        return placement.whole()
    return NamedSharding(placement.mesh, cache_partition(_sizes(placement), shape))


def cache_partition(mesh: Mapping[str, int], shape: Sequence[int]) -> PartitionSpec:
    """The mesh axes along each dimension of a tensor of the cache: rows as in `batch_sharding`, and the heads of keys
    and values [batch, heads, slots, features] along "tensor" where it divides them.

    Args:
        mesh: mesh axis → devices along it, more than one.
        shape: of the tensor.
    """
    if not shape:
        return PartitionSpec()
    found: list[Any] = [_of_rows(mesh, shape[0]), *(None,) * (len(shape) - 1)]
    if len(shape) == 4 and "tensor" in mesh and shape[1] % mesh["tensor"] == 0:
        found[1] = "tensor"
    return PartitionSpec(*found)


def slot_sharding(placement: Placement, count: int, shape: Sequence[int]) -> jax.sharding.Sharding:
    """Where the caches of `count` request slots lie, each of which has a tensor of this shape: slots along "data" and
    "fsdp", and the rest as in `cache_partition`."""
    if placement.mesh is None:
        return placement.whole()
    sizes = _sizes(placement)
    own = [None, *cache_partition(sizes, shape)[1:]] if shape else []
    return NamedSharding(placement.mesh, PartitionSpec(_of_rows(sizes, count), *own))


def constrain_cache(placement: Placement, array: jax.Array) -> jax.Array:
    """`array`, a tensor of the cache of any shape, sharded by `cache_sharding`; the result has the same shape. For use
    inside jit."""
    if placement.mesh is None:
        return array
    return jax.lax.with_sharding_constraint(array, cache_sharding(placement, array.shape))


def _of_rows(mesh: Mapping[str, int], batch: int) -> tuple[str, ...] | None:
    axes: list[str] = []
    count = 1
    for axis in ("data", "fsdp"):
        if axis in mesh and batch % (count * mesh[axis]) == 0:
            axes.append(axis)
            count *= mesh[axis]
    return tuple(axes) or None


def _dimension(style: str | None, rank: int, bias: bool) -> int | None:
    if style in COLUMNS:
        return rank - 1 if rank == 1 or bias else rank - 2
    if style in ROWS:
        return None if rank == 1 or bias else rank - 1
    return 0 if style in FIRST and rank else None


def _sizes(placement: Placement) -> dict[str, int]:
    return {} if placement.mesh is None else {axis: n for axis, n in placement.mesh.shape.items() if n > 1}
