"""The splash kernel of `jax.experimental.pallas.ops.tpu`: attention over whole sequences in memory linear in their
length. It skips blocks that a window or causality masks. Of a sequence that is sharded each device has the queries, and
gathers the keys and values, which are few where several queries share them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.sharding.training_state import ATTENTION
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.blocks import LANES, SplashBlocks, splash_blocks
from ttpu_jax.ops.attention.context import AttentionContext
from ttpu_jax.ops.attention.reference import SegmentIds
from ttpu_jax.ops.attention.shards import PADDING, not_own_keys, over_mesh, pad_sequence, segments_of


def serves(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """Why the splash kernel cannot compute this layer, or None."""
    if spec.alibi is not None:
        return "it adds no position biases (ALiBi)"
    if set(context.sequence_axes) & {*context.batch_axes, *context.head_axes}:
        return "one mesh axis shards both the sequence and rows or heads"
    if queries % (LANES * _devices(context, context.sequence_axes)) and context.sequence_axes:
        return f"the sequence is not a multiple of {LANES} on each device"
    return not_own_keys(context, queries, keys)


def _devices(context: AttentionContext, names: tuple[str, ...]) -> int:
    """How many devices there are along mesh axes; 1 where the mesh is not known."""
    return 1 if context.mesh is None else prod(context.mesh.shape[axis] for axis in names)


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    segment_ids: SegmentIds | None = None,
    context: AttentionContext,
) -> jax.Array:
    """The result of `eager` for layers that `serves` accepts, except that padding queries have other finite values.

    Block sizes come from `attention_config`, else from blocks.json. On a CPU the kernel is interpreted.

    Args:
        query: [batch, seq, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, seq, head_dim], rotated.
        value: [batch, kv_heads, seq, value_dim].
        query_positions: [batch, seq].
        key_positions: [batch, seq].
        spec: scale, softcap, window, chunk, causality.
        sinks: [kv_heads, q_per_kv] logits of attention sinks.
        segment_ids: [batch, seq] and [batch, seq], see `eager`.
        context: devices, platform and options.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    reach = min((size for size in (spec.window, spec.chunk) if size is not None), default=None)
    wider = -(-max(spec.head_dim, spec.value_dim) // LANES) * LANES
    parts = _devices(context, context.sequence_axes)
    blocks = splash_blocks(
        context, query.shape[1] // parts, wider * query.dtype.itemsize, reach, causal=spec.causal, whole=parts > 1
    )
    ahead = 0 if spec.causal else None if reach is None else reach - 1
    behind = None if reach is None else reach - 1
    heads = query.shape[2] * query.shape[3] // _devices(context, context.head_axes)
    # Made here, since nothing can be computed at once while `shard_map` traces.
    kernel = _kernel(heads, behind, ahead, spec.logit_softcap, blocks, context.platform == "cpu", parts)
    local = partial(_local, spec=spec, blocks=blocks, kernel=kernel)
    if parts > 1:
        cuts = (behind, ahead) != (None, None)  # else each part sees everything, and has the same tables
        local = partial(_on_part, local, kernel=kernel, parts=parts, axes=context.sequence_axes, cuts=cuts)
    segments = segments_of(spec, query_positions, key_positions, segment_ids)
    return over_mesh(local, context, query, key, value, segments, sinks)


def _on_part(
    local: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    sinks: jax.Array | None,
    *,
    kernel: Any,
    parts: int,
    axes: tuple[str, ...],
    cuts: bool,
) -> jax.Array:
    """Attention of one device's part of the queries to the keys of the whole sequence, in its order."""
    key, value = (jax.lax.all_gather(x, axes, axis=2, tiled=True) for x in (key, value))
    key_segments = jax.lax.all_gather(key_segments, axes, axis=1, tiled=True)
    own = _of_part(kernel, jax.lax.axis_index(axes), parts) if cuts else kernel
    return local(query, key, value, query_segments, key_segments, sinks, kernel=own)


def _local(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    sinks: jax.Array | None,
    *,
    spec: AttentionSpec,
    blocks: SplashBlocks,
    kernel: Any,
) -> jax.Array:
    """Attention of one device's rows and heads, padded to whole blocks. The keys of a sequence of which the queries are
    a part are as many as all parts have, and need no padding."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    batch, seq, kv, group, dim = query.shape
    heads = kv * group
    # The kernel has no scale argument: the queries are scaled, in float32 so that they are rounded once.
    scaled = (query.astype(jnp.float32) * spec.softmax_scale).astype(query.dtype)
    scaled = scaled.transpose(0, 2, 3, 1, 4).reshape(batch, heads, seq, dim)
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    length, keys = blocks.length, max(blocks.length, key.shape[2])
    arrays = [pad_sequence(x, size, 2) for x, size in ((scaled, length), (key, keys), (value, keys))]
    ids = [pad_sequence(x, size, 1, PADDING) for x, size in ((query_segments, length), (key_segments, keys))]
    flat_sinks = None if sinks is None else _own_dtype_gradient(sinks.reshape(heads))

    def row(q: jax.Array, k: jax.Array, v: jax.Array, of_q: jax.Array, of_k: jax.Array) -> jax.Array:
        mixed: jax.Array = kernel(q, k, v, segment_ids=splash.SegmentIds(of_q, of_k), sinks=flat_sinks)
        return mixed

    mixed = jax.vmap(row)(*arrays, *ids)[:, :, :seq]
    return mixed.reshape(batch, kv, group, seq, -1).transpose(0, 3, 1, 2, 4)


@jax.custom_vjp
def _own_dtype_gradient(x: jax.Array) -> jax.Array:
    """x, with a gradient in x's dtype. The kernel returns the gradient of sinks in the queries' dtype."""
    return x


def _keep_dtype(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.zeros((0,), x.dtype)


def _cast_gradient(like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (gradient.astype(like.dtype),)


_own_dtype_gradient.defvjp(_keep_dtype, _cast_gradient)


@lru_cache(maxsize=64)
def _kernel(
    heads: int,
    behind: int | None,
    ahead: int | None,
    softcap: float | None,
    blocks: SplashBlocks,
    interpret: bool,
    parts: int,
) -> Any:
    """The kernel of one static mask: a query attends to `behind` tokens before itself and `ahead` after it (None:
    all). Its tables are those of as many parts of the queries, each of `blocks.length`, one after another.

    Kernels are cached, so that equal layers are traced to equal programs. The tables are numpy arrays, which belong
    to no trace and no device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    from ttpu_jax.ops.attention.mask import Band

    # A fused backward kernel computes all gradients: the queries' gradient has no block sizes of its own.
    unused = ("sa_block_q_dq", "sa_block_kv_dq") if blocks.fused_backward else ()
    sizes = {name.removeprefix("sa_"): size for name, size in blocks.sizes if name not in unused}
    q_layout, k_layout, v_layout = (splash.QKVLayout[name] for name in blocks.layouts)
    mask: masks.Mask = Band(blocks.length * parts, behind, ahead)
    if parts > 1 and behind is None and ahead is None:  # the library makes no tables of parts that see everything
        mask, parts = masks.FullMask((blocks.length, blocks.length * parts)), 1
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=splash.BlockSizes(
                **sizes,
                use_fused_bwd_kernel=blocks.fused_backward,
                q_layout=q_layout,
                k_layout=k_layout,
                v_layout=v_layout,
            ),
            head_shards=1,
            q_seq_shards=parts,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=ATTENTION,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def _of_part(kernel: Any, number: jax.Array, parts: int) -> Any:
    """The kernel with the tables of one part of the queries."""

    def cut(table: Any, axis: int) -> Any:
        if table is None:
            return None
        size = table.shape[axis] // parts
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(table), number * size, size, axis)

    def tables(info: Any) -> Any:
        if info is None:
            return None
        by_blocks = {name: cut(getattr(info, name), 1) for name in ("data_next", "mask_next", "block_mask")}
        return info._replace(**by_blocks, q_sequence=cut(info.q_sequence, 0))

    infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    return type(kernel)(*map(tables, infos), **kernel.kwargs)
