"""The flash kernel of `jax.experimental.pallas.ops.tpu`, which is also torch_xla's `flash_attention`. Its memory is
linear in the sequence length. It lacks the splash kernel's windows, softcap and sinks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ttpu_core.errors import RequestError
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention.blocks import LANES, fit, flash_block
from ttpu_jax.ops.attention.context import AttentionContext, Options
from ttpu_jax.ops.attention.reference import SegmentIds
from ttpu_jax.ops.attention.shards import PADDING, not_own_keys, over_mesh, pad_sequence, segments_of


def serves(spec: AttentionSpec, context: AttentionContext, queries: int, keys: int) -> str | None:
    """Why the flash kernel cannot compute this layer, or None."""
    if spec.alibi is not None:
        return "it adds no position biases (ALiBi)"
    if spec.window is not None and spec.window < keys:
        return "it has no windows"
    if spec.logit_softcap is not None:
        return "it has no softcap"
    if spec.sinks:
        return "it has no sinks"
    if context.sequence_axes:
        return "it needs the whole sequence on one device"
    return not_own_keys(context, queries, keys)


def check_options(options: Options) -> None:
    """Refuse options, since this kernel has none.

    Raises:
        RequestError: there are options.
    """
    if options:
        raise RequestError(
            f"attention_config sets {', '.join(name for name, _ in options)}, but xla_flash_attention has no settings: "
            "leave it out, or use splash_attention."
        )


def flash_attention(
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
    On a CPU the kernel is interpreted.

    Args:
        query: [batch, seq, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, seq, head_dim], rotated.
        value: [batch, kv_heads, seq, value_dim].
        query_positions: [batch, seq].
        key_positions: [batch, seq].
        spec: scale, causality.
        sinks: [kv_heads, q_per_kv]; layers with sinks are not served.
        segment_ids: [batch, seq] and [batch, seq], see `eager`.
        context: devices and platform.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    length, sizes = fit(query.shape[1], {"block": flash_block(context)})
    local = partial(_local, spec=spec, length=length, block=sizes["block"], interpret=context.platform == "cpu")
    segments = segments_of(spec, query_positions, key_positions, segment_ids)
    return over_mesh(local, context, query, key, value, segments, sinks)


def _local(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    sinks: jax.Array | None,
    *,
    spec: AttentionSpec,
    length: int,
    block: int,
    interpret: bool,
) -> jax.Array:
    """Attention of one device's rows and heads."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    batch, seq, kv, group, dim = query.shape
    value_dim = value.shape[-1]
    # Keys and values get one common width, in whole registers, and one KV head per query head.
    width = -(-max(dim, value_dim) // LANES) * LANES

    def prepared(x: jax.Array) -> jax.Array:
        x = pad_sequence(pad_sequence(x.astype(query.dtype), length, 2), width, 3)
        return x if x.shape[1] == kv * group else jnp.repeat(x, group, axis=1)

    queries = prepared(query.transpose(0, 2, 3, 1, 4).reshape(batch, kv * group, seq, dim))
    ids = flash.SegmentIds(*(pad_sequence(ids, length, 1, PADDING) for ids in (query_segments, key_segments)))
    blocks = flash.BlockSizes(
        block_q=block,
        block_k_major=block,
        block_k=block,
        block_b=1,
        block_q_major_dkv=block,
        block_k_major_dkv=block,
        block_k_dkv=block,
        block_q_dkv=block,
        block_k_major_dq=block,
        block_k_dq=block,
        block_q_dq=block,
    )
    kernel = partial(
        flash.flash_attention,
        causal=spec.causal,
        sm_scale=spec.softmax_scale,
        block_sizes=blocks,
    )
    attend = _interpreted(kernel) if interpret else kernel
    mixed = attend(queries, prepared(key), prepared(value), segment_ids=ids)
    return mixed[:, :, :seq, :value_dim].reshape(batch, kv, group, seq, value_dim).transpose(0, 3, 1, 2, 4)


def _interpreted(kernel: Any) -> Any:
    """The kernel without a TPU, forward and backward. The kernel has no argument for this."""
    from jax.experimental.pallas import tpu as pltpu

    # The value becomes pallas_call's `interpret`. The default, a simulation of a TPU, is slow, and it deadlocks if a
    # program runs on several virtual devices.
    plain: Any = True

    @jax.custom_vjp
    def run(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: Any) -> jax.Array:
        with pltpu.force_tpu_interpret_mode(plain):
            return kernel(q, k, v, segment_ids=segment_ids)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: Any) -> tuple[jax.Array, Any]:
        with pltpu.force_tpu_interpret_mode(plain):
            return jax.vjp(partial(kernel, segment_ids=segment_ids), q, k, v)

    def backward(gradient_of: Any, gradient: jax.Array) -> Any:
        with pltpu.force_tpu_interpret_mode(plain):
            return (*gradient_of(gradient), None)

    run.defvjp(forward, backward)
    return run
