"""Paged attention: uses the TPU kernel if it serves the layer and the batch, else the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import alibi
from ttpu_jax.ops.attention.blocks import device_kind
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.paged_attention import kernel, limits
from ttpu_jax.ops.paged_attention.batch import PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import has_tiled_scales
from ttpu_jax.ops.paged_attention.pieces import unserved_batch
from ttpu_jax.ops.paged_attention.reference import reference


def paged_attention(
    query: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    context: AttentionContext,
    own: bool = True,
) -> jax.Array:
    """Causal attention of a flat batch over its sequences' pages. The pages already hold this step's keys and
    values.

    Args:
        query: [tokens, kv_heads, q_per_kv, head_dim], rotated.
        kv: the layer's pages.
        batch: the flat batch.
        spec: scale, softcap, window, chunk, ALiBi.
        sinks: [kv_heads, q_per_kv] logits of attention sinks: each takes a share of the probability and has no
            value.
        context: the mesh, the axes that shard KV heads, the platform.
        own: use our kernels for combined pages; False leaves these to JAX's kernel or the reference.

    Returns:
        [tokens, kv_heads, q_per_kv, value_dim] in the query's dtype; those of padding tokens may be no
            numbers.
    """
    kept = kv.pages.dtype
    small = unserved_batch(spec, batch, kv.group) is None
    readable = small and limits.unserved_pages(kv) is None
    own = (own or not kv.combined) and readable
    ours = own and serves_own(spec, context.platform, kept, value_in_key=kv.value_in_key) is None
    other = small and bool(kv.combined) and serves(spec, context.platform, kept, value_in_key=kv.value_in_key) is None
    few = ours and limits.unserved_step(spec, batch, len(query)) is None
    kind = device_kind(context) if ours or other else ""

    def attend(
        query: jax.Array, kv: PagedKV, batch: RaggedBatch, sinks: jax.Array | None, slopes: jax.Array | None
    ) -> jax.Array:
        if few:
            from ttpu_jax.ops.paged_attention import decode_kernel

            return decode_kernel.attend(query, kv, batch, spec, kind, sinks=sinks)
        if ours:
            from ttpu_jax.ops.paged_attention import prompt_kernel

            return prompt_kernel.attend(query, kv, batch, spec, kind, sinks=sinks)
        if other:
            mixed = kernel.attend(query, kv, batch, spec, kind)
            # Which leaves padding uninitialised. Layers make zeros of it in steps of several queries.
            return mixed if batch.max_queries > 1 else jnp.where((batch.positions >= 0)[:, None, None, None], mixed, 0)
        return reference(query, kv, batch, spec, sinks=sinks, slopes=slopes, platform=context.platform)

    if context.mesh is None:
        return attend(query, kv, batch, sinks, alibi.slopes(spec))
    heads = context.head_axes or None
    of_pages: Any = PartitionSpec(None, None, heads)
    of_scales: Any = PartitionSpec(None, heads) if kv.combined else of_pages
    if has_tiled_scales(kv):
        of_scales = PartitionSpec(None, None, None, heads)
    of_query, of_sinks = PartitionSpec(None, heads, context.query_axes or None), PartitionSpec(heads)
    whole = PartitionSpec()
    run = jax.shard_map(  # the compiler can shard neither the kernel nor loops over pages
        attend,
        mesh=context.mesh,
        in_specs=(of_query, replace(kv, pages=of_pages, scales=of_scales), whole, of_sinks, of_sinks),
        out_specs=of_query,
        check_vma=False,
    )
    mixed: jax.Array = run(query, kv, batch, sinks, alibi.slopes(spec))
    return mixed


def serves(spec: AttentionSpec, platform: str, dtype: Any, *, value_in_key: bool = False) -> str | None:
    """Why JAX's TPU kernel does not serve a layer whose pages have this `dtype`, or None."""
    return kernel.unserved(spec, platform, dtype, value_in_key)


def serves_own(spec: AttentionSpec, platform: str, dtype: Any, *, value_in_key: bool = False) -> str | None:
    """Why our TPU kernels do not serve a layer whose pages have this `dtype`, or None: one for steps of one query or a
    few of each sequence, one for other steps."""
    if platform != "tpu":
        return "they are kernels for TPUs"
    return limits.unserved(spec, dtype, value_in_key)
