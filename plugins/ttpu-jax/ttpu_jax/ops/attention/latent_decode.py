"""Latent attention of one query a row to a contiguous cache, as a Pallas kernel that writes the query's token into the
cache and reads latents once. XLA reads them as keys and then as values."""

from __future__ import annotations

from functools import partial

import jax
from jax.sharding import PartitionSpec

from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.api import DECODE, REFERENCE
from ttpu_jax.ops.attention.blocks import LANES, SUBLANES
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.decode import unserved_context
from ttpu_jax.ops.attention.reference import visibility


def serves(spec: AttentionSpec, context: AttentionContext, queries: int, slots: int) -> str | None:
    """Why the kernel cannot compute this layer in the absorbed form, or None.

    Args:
        spec: of the absorbed form: one key of all features, of which the first are the value.
        context: devices and platform.
        queries: of each row.
        slots: of the cache.
    """
    if why := unserved_context(context):
        return why
    rank, rope_dim = spec.value_dim, spec.head_dim - spec.value_dim
    if context.platform == "tpu" and (rank % LANES or rope_dim % SUBLANES or rope_dim == 0):
        return (
            f"its latents have {rank} features and its rotated keys {rope_dim}, not multiples of {LANES} and {SUBLANES}"
        )
    if queries != 1:
        return "it takes one query of each row"
    if slots % LANES:
        return f"{slots:,} slots are not a multiple of {LANES}"
    return None


def chosen(name: str, spec: AttentionSpec, context: AttentionContext, queries: int, slots: int) -> bool:
    """Whether the kernel computes a layer of a model whose implementation is `name`: on a TPU unless that is the
    reference, elsewhere if it is the kernel for decode steps.

    Args:
        name: of the model's implementation.
        spec: see `serves`.
        context: see `serves`.
        queries: see `serves`.
        slots: see `serves`.
    """
    wanted = name == DECODE.name or (context.platform == "tpu" and name != REFERENCE.name)
    return wanted and serves(spec, context, queries, slots) is None


def latent_decode(
    query: jax.Array,
    turned: jax.Array,
    latent: jax.Array,
    rope_key: jax.Array,
    new: tuple[jax.Array, jax.Array],
    slot: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    context: AttentionContext,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write a token of each row, and attend to all, for layers that `serves` accepts.

    Args:
        query: [batch, 1, heads, rank], to which the keys' projection has been applied.
        turned: [batch, 1, heads, rope_dim], rotated.
        latent: [batch, slots, rank], donated, without the new token.
        rope_key: [batch, slots, rope_dim], rotated; as latent.
        new: the token's latent [batch, 1, rank] and rotated key [batch, 1, rope_dim].
        slot: int32 scalar, where it goes in all rows.
        query_positions: [batch, 1].
        key_positions: [batch, slots], with the new token's; those with a negative position are masked.
        spec: of the absorbed form.
        context: devices and platform. On a CPU the kernel is interpreted.

    Returns:
        [batch, 1, heads, rank] in the latents' dtype; the latents and the rotated keys with the new token.
    """
    from ttpu_jax.ops.attention.latent_kernel import attended_latents  # Pallas takes a tenth of a second to import

    visible = visibility(query_positions, key_positions, spec)
    local = partial(attended_latents, spec=spec, interpret=context.platform == "cpu")
    if context.mesh is not None:
        of_rows = PartitionSpec(context.batch_axes or None)
        of_heads = PartitionSpec(context.batch_axes or None, context.head_axes or None)
        specs = (of_heads, of_heads, of_rows, of_rows, of_rows, of_rows, PartitionSpec())
        local = jax.shard_map(
            local, mesh=context.mesh, in_specs=specs, out_specs=(of_heads, of_rows, of_rows), check_vma=False
        )
    new = new[0].astype(latent.dtype), new[1].astype(rope_key.dtype)
    mixed, latent, rope_key = local(query[:, 0], turned[:, 0], latent, rope_key, visible, new, slot)
    return mixed[:, None], latent, rope_key
