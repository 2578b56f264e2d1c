"""Softmax attention by name. In: grouped queries, keys and values with their positions; out: one vector per query head.

`implementation` finds one by its name; `eager` is the reference that every other one is held against. An implementation
is a function of the same signature, built in or named by import string (`package.module:function`) in a plugin's
`ttpu_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import jax
import jax.numpy as jnp

from ttpu_core.errors import PluginError
from ttpu_core.spec import AttentionSpec

CAUSAL_BLOCKS, SMALLEST_BLOCK = 4, 128  # blocks of queries, and queries in the smallest one worth cutting off
MASKED = -1e30  # finite: a row whose keys are all masked (a padding query) stays a number

AttentionFunction = Callable[..., jax.Array]


def eager(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    *,
    sinks: jax.Array | None = None,
    compute_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Reference attention.

    Args:
        query: [batch, seq, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, keys, head_dim], rotated.
        value: [batch, kv_heads, keys, value_dim].
        query_positions: [batch, seq].
        key_positions: [batch, keys]; a negative position is never attended to.
        spec: scale, softcap, window, chunk, causality.
        sinks: [kv_heads, q_per_kv] logits of a sink that takes probability and gives nothing.
        compute_dtype: dtype of the products' operands (XLA:CPU wants float32); None keeps the inputs'.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.
    """
    if compute_dtype is not None:
        key, value = key.astype(compute_dtype), value.astype(compute_dtype)
    seq = query.shape[1]
    block = max(SMALLEST_BLOCK, -(-seq // CAUSAL_BLOCKS))
    if not spec.causal or key.shape[2] != seq or seq <= block:
        return _attend(query, key, value, query_positions, key_positions, spec, sinks)
    # A sequence that attends to itself: no query sees a later key, so that a block of queries needs the keys up to its
    # own end only: five eighths of all scores.
    blocks = []
    for begin in range(0, seq, block):
        end = min(begin + block, seq)
        queries = query[:, begin:end], query_positions[:, begin:end]
        keys = key[:, :, :end], value[:, :, :end], key_positions[:, :end]
        blocks.append(_attend(queries[0], keys[0], keys[1], queries[1], keys[2], spec, sinks))
    return jnp.concatenate(blocks, axis=1)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    spec: AttentionSpec,
    sinks: jax.Array | None,
) -> jax.Array:
    """`eager` with all scores at once."""
    batch, seq, kv, group, dim = query.shape
    # Queries of one KV head become the rows of one matrix: batched products with leading batch dimensions are what both
    # XLA:TPU and XLA:CPU run without copying the cache.
    rows = query.transpose(0, 2, 3, 1, 4).reshape(batch, kv, group * seq, dim).astype(key.dtype)
    scores = jax.lax.dot_general(rows, key, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv, group, seq, -1) * spec.softmax_scale
    if spec.logit_softcap is not None:
        scores = jnp.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    visible = visibility(query_positions, key_positions, spec)[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, :, None, None], (batch, kv, group, seq, 1))
        probabilities = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    else:
        probabilities = jax.nn.softmax(scores, axis=-1)
    probabilities = probabilities.reshape(batch, kv, group * seq, -1).astype(value.dtype)
    mixed = jax.lax.dot_general(
        probabilities, value, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    mixed = mixed.reshape(batch, kv, group, seq, -1).transpose(0, 3, 1, 2, 4)
    return mixed.astype(query.dtype)


def visibility(query_positions: jax.Array, key_positions: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Which keys a query sees: bool [batch, seq, keys]. Window and chunk count positions, not cache slots."""
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    visible = key >= 0
    if spec.causal:
        visible = visible & (key <= query)
    if spec.window is not None:
        visible = visible & (query - key < spec.window)
        if not spec.causal:
            visible = visible & (key - query < spec.window)
    if spec.chunk is not None:
        visible = visible & (query // spec.chunk == key // spec.chunk)
    return visible


IMPLEMENTATIONS: dict[str, AttentionFunction] = {"eager": eager}


def implementation(name: str) -> AttentionFunction:
    """The attention function of a name, or of an import string.

    Raises:
        PluginError: no such name, or an import string that leads to no function.
    """
    if name in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[name]
    module, _, attribute = str(name).partition(":")
    try:
        if not module or not attribute:
            raise ImportError("it is neither a built-in name nor of the form 'package.module:function'")
        function: AttentionFunction = getattr(import_module(module), attribute)
        if not callable(function):
            raise ImportError("it is not a function")
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"attention implementation {name!r} was asked for, but it cannot be had ({error}): use one of "
            f"{', '.join(IMPLEMENTATIONS)}, or correct the plugin that names it."
        ) from error
    return function
