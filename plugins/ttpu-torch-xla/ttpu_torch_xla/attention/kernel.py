"""Runs the attention kernels of ttpu_jax on torch tensors. It takes queries, keys and values of whole sequences with
their positions and segments; each device computes its own rows and heads."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from math import prod
from typing import Any

import torch

from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.spec import AttentionSpec, axes
from ttpu_torch_xla.bridge import abstract_mesh, differentiable, target

Options = tuple[tuple[str, object], ...]


def attend(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    segments: torch.Tensor | None,
    sinks: torch.Tensor | None,
    spec: AttentionSpec,
    *,
    options: Options = (),
    parallelism: Parallelism | None = None,
) -> torch.Tensor:
    """Compute the attention of whole sequences to themselves by a kernel of ttpu_jax.

    Args:
        name: of the implementation in `ttpu_jax.ops.attention`.
        query: [batch, heads, seq, head_dim], rotated.
        key, value: [batch, kv_heads, seq, ...], rotated.
        positions: [batch, seq] within each sequence; negative: padding.
        segments: [batch, seq] of packed sequences, or None.
        sinks: [heads] or None.
        spec: head counts and sizes as the tensors have them, scale, softcap, window, chunk, causality.
        options: `attention_config`.
        parallelism: the mesh, and the axes that shard each dimension where the sizes allow it.

    Returns:
        [batch, seq, heads, value_dim].
    """
    batch, heads, seq, dim = query.shape
    kv = spec.num_kv_heads
    grouped = query.reshape(batch, kv, spec.q_per_kv, seq, dim).permute(0, 3, 1, 2, 4)
    static: dict[str, Hashable] = {
        "name": name,
        "spec": spec,
        "options": options,
        "platform": target().platform,
        "batch_axes": _mesh_axes(parallelism, axes.BATCH, batch),
        "head_axes": _mesh_axes(parallelism, axes.KV_HEADS, kv),
    }
    mesh = abstract_mesh(dict(parallelism.mesh)) if parallelism is not None and parallelism.num_devices > 1 else None
    grouped_sinks = None if sinks is None else sinks.reshape(kv, spec.q_per_kv)
    mixed = _attention()(
        grouped, key, value, positions, segments, grouped_sinks, static={**static, "mesh": mesh}, mesh=mesh
    )
    return mixed.reshape(batch, seq, heads, spec.value_dim)


def objection(name: str, spec: AttentionSpec, queries: int, keys: int) -> str | None:
    """Return why the kernel of that name does not serve this layer on the program's devices, or None."""
    from ttpu_jax.ops.attention import AttentionContext, implementation

    return implementation(name).serves(spec, AttentionContext(platform=target().platform), queries, keys)


def _mesh_axes(parallelism: Parallelism | None, axis: str, size: int) -> tuple[str, ...]:
    """The mesh axes that shard a dimension of this logical axis; none where they do not divide it."""
    if parallelism is None:
        return ()
    mesh = dict(parallelism.mesh)
    found = tuple(one for one in dict(parallelism.strategy.rules).get(axis, ()) if mesh.get(one, 1) > 1)
    return found if size % prod(mesh[one] for one in found) == 0 else ()


@cache
def _attention() -> Any:
    return differentiable(_kernel, name="attention")


def _kernel(
    query: Any,
    key: Any,
    value: Any,
    positions: Any,
    segments: Any,
    sinks: Any,
    *,
    name: str,
    spec: AttentionSpec,
    options: Options,
    platform: str,
    mesh: Any,
    batch_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
) -> Any:
    """What JAX traces: the one kernel library, told where it runs."""
    from ttpu_jax.ops.attention import AttentionContext, attend

    context = AttentionContext(
        mesh=mesh, batch_axes=batch_axes, head_axes=head_axes, platform=platform, options=options
    )
    ids = None if segments is None else (segments, segments)
    return attend(name, query, key, value, positions, positions, spec, sinks=sinks, segment_ids=ids, context=context)
