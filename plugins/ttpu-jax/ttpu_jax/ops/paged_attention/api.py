"""Paged attention by platform. In: pages, a flat batch and its arrays; out: pages with more in them, or what the
queries mixed of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.reference import reference


def paged_attention(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    context: AttentionContext,
) -> jax.Array:
    """Causal attention of a flat batch over its sequences' pages, in which this step's keys and values are already.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim], rotated.
        spec: scale, softcap, window, chunk.
        sinks: [kv_heads, q_per_kv] logits of a sink that takes probability and gives nothing.
        context: the mesh, the axes that cut KV heads, the platform.

    Returns:
        [tokens, kv_heads, q_per_kv, value_dim] in the query's type; finite numbers for padding.
    """
    local = partial(reference, spec=spec, platform=context.platform)

    def attend(query: jax.Array, kv: PagedKV, batch: RaggedBatch, sinks: jax.Array | None) -> jax.Array:
        return local(query, kv, batch, sinks=sinks)

    if context.mesh is None:
        return attend(query, kv, batch, sinks)
    heads = context.head_axes or None
    pages: Any = PartitionSpec(None, None, heads)
    run = jax.shard_map(
        attend,
        mesh=context.mesh,
        in_specs=(PartitionSpec(None, heads), pages, PartitionSpec(), PartitionSpec(heads)),
        out_specs=PartitionSpec(None, heads),
        check_vma=False,
    )
    return run(query, kv, batch, sinks)
