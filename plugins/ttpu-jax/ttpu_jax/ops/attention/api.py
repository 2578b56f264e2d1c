"""Attention by name: a built-in name or an import string selects an implementation. What it does not serve is computed
by the kernel for decode steps, on a TPU and where that serves it, else by the reference."""

from __future__ import annotations

from importlib import import_module

import jax

from ttpu_core.errors import PluginError, RequestError
from ttpu_core.sharding.training_state import ATTENTION
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import decode, flash, ring, splash
from ttpu_jax.ops.attention.blocks import check_splash_options
from ttpu_jax.ops.attention.context import AttentionContext, Implementation, Options
from ttpu_jax.ops.attention.reference import SegmentIds, eager
from ttpu_jax.ops.saved import saved


def _no_options(options: Options) -> None:
    if options:
        raise RequestError(
            f"attention_config sets {', '.join(name for name, _ in options)}, but eager, ring and decode attention "
            "have no settings: leave it out, or use splash_attention."
        )


REFERENCE = Implementation("eager", eager, check_options=_no_options)
RING = Implementation("ring_attention", ring.ring_attention, ring.serves, _no_options)
DECODE = Implementation("decode_attention", decode.decode_attention, decode.serves, _no_options)
IMPLEMENTATIONS: dict[str, Implementation] = {
    one.name: one
    for one in (
        REFERENCE,
        Implementation("xla_flash_attention", flash.flash_attention, flash.serves, flash.check_options),
        Implementation("splash_attention", splash.splash_attention, splash.serves, check_splash_options, True),
        RING,
        DECODE,
    )
}


def attend(
    name: str,
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
    """Attention by the implementation `name`, or by another one if that does not serve the layer, see `serving`.

    Args:
        name: one of `IMPLEMENTATIONS`, or an import string `package.module:function`.
        query: [batch, seq, kv_heads, q_per_kv, head_dim], rotated.
        key: [batch, kv_heads, keys, head_dim], rotated.
        value: [batch, kv_heads, keys, value_dim].
        query_positions: [batch, seq].
        key_positions: [batch, keys]; keys with a negative position are masked.
        spec: scale, softcap, window, chunk, causality.
        sinks: [kv_heads, q_per_kv] logits of attention sinks.
        segment_ids: [batch, seq] and [batch, keys] segments of packed sequences, see `eager`.
        context: devices and platform.

    Returns:
        [batch, seq, kv_heads, q_per_kv, value_dim] in the query's dtype.

    Raises:
        PluginError: there is no such implementation.
    """
    chosen = serving(implementation(name), spec, context, query.shape[1], key.shape[2])
    mixed: jax.Array = chosen.function(
        query,
        key,
        value,
        query_positions,
        key_positions,
        spec,
        sinks=sinks,
        segment_ids=segment_ids,
        context=context,
    )
    return mixed if chosen.names_results else saved(mixed, ATTENTION)


def serving(
    chosen: Implementation, spec: AttentionSpec, context: AttentionContext, queries: int, keys: int
) -> Implementation:
    """What computes a layer of a model whose implementation is `chosen`: that, or ring attention of a sequence that is
    sharded, or on a TPU the kernel for decode steps, or the reference. The reference, where it is chosen, computes all.

    Args:
        chosen: the model's implementation.
        spec: the layer's attention.
        context: devices and platform.
        queries: number of queries of each row.
        keys: number of keys of each row.
    """
    if chosen.serves(spec, context, queries, keys) is None:
        return chosen
    if chosen is not REFERENCE and context.sequence_axes and RING.serves(spec, context, queries, keys) is None:
        return RING
    decodes = context.platform == "tpu" and DECODE.serves(spec, context, queries, keys) is None
    return DECODE if decodes else REFERENCE


def writes_cache(
    name: str, spec: AttentionSpec, context: AttentionContext, queries: int, keys: int, item: int
) -> bool:
    """Whether `decode.write_and_attend` computes a layer of a model whose implementation is `name`, and writes the
    step's tokens into its cache.

    Args:
        name: see `attend`.
        spec: the layer's attention.
        context: devices and platform.
        queries: number of queries of each row.
        keys: number of slots of each row.
        item: bytes of a number in the cache.
    """
    chosen = serving(implementation(name), spec, context, queries, keys)
    return chosen is DECODE and decode.writes(spec, context, queries, keys, item)


def implementation(name: str) -> Implementation:
    """The implementation of a built-in name or of an import string. An imported function may have an attribute
    `serves`, a function of the type `Serves`.

    Raises:
        PluginError: an unknown name, or an import string that does not lead to a function. (An ImportError is its
            cause.)
    """
    if name in IMPLEMENTATIONS:
        return IMPLEMENTATIONS[name]
    module, _, attribute = str(name).partition(":")
    try:
        if not module or not attribute:
            raise ImportError("it is neither a built-in name nor of the form 'package.module:function'")
        function = getattr(import_module(module), attribute)
        if not callable(function):
            raise ImportError("it is not a function")
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"attention implementation {name!r} was asked for, but it cannot be loaded ({error}): use auto, "
            f"{', '.join(IMPLEMENTATIONS)}, or correct the plugin that names it."
        ) from error
    if serves := getattr(function, "serves", None):
        return Implementation(name, function, serves)
    return Implementation(name, function)
