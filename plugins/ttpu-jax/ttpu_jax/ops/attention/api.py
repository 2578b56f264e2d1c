"""Attention by name. In: a name or an import string, arrays and their context; out: the result of that implementation
where it serves the layer, else of the reference."""

from __future__ import annotations

from importlib import import_module

import jax

from ttpu_core.errors import PluginError, RequestError
from ttpu_core.spec import AttentionSpec
from ttpu_jax.ops.attention import flash, ring, splash
from ttpu_jax.ops.attention.blocks import check_splash_options
from ttpu_jax.ops.attention.context import AttentionContext, Implementation, Options
from ttpu_jax.ops.attention.reference import SegmentIds, eager


def _no_options(options: Options) -> None:
    if options:
        raise RequestError(
            f"attention_config has {', '.join(name for name, _ in options)}, but eager and ring attention have no "
            "settings: leave it out, or use splash_attention."
        )


REFERENCE = Implementation("eager", eager, check_options=_no_options)
IMPLEMENTATIONS: dict[str, Implementation] = {
    one.name: one
    for one in (
        REFERENCE,
        Implementation("xla_flash_attention", flash.flash_attention, flash.serves, flash.check_options),
        Implementation("splash_attention", splash.splash_attention, splash.serves, check_splash_options),
        Implementation("ring_attention", ring.ring_attention, ring.serves, _no_options),
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
    """Attention by the implementation of that name, or by the reference where it does not serve.

    Args:
        name: one of `IMPLEMENTATIONS`, or an import string `package.module:function`.

    The other arguments and the result are those of `eager`.

    Raises:
        PluginError: there is no such implementation.
    """
    chosen = implementation(name)
    if chosen.serves(spec, context, query.shape[1], key.shape[2]) is not None:
        chosen = REFERENCE
    return chosen.function(
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


def implementation(name: str) -> Implementation:
    """The implementation of a name, or of an import string; the function that this leads to may have an attribute
    `serves`, a function as `Serves` describes it.

    Raises:
        PluginError: no such name, or an import string that leads to no function.
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
            f"attention implementation {name!r} was asked for, but it cannot be had ({error}): use auto, "
            f"{', '.join(IMPLEMENTATIONS)}, or correct the plugin that names it."
        ) from error
    if serves := getattr(function, "serves", None):
        return Implementation(name, function, serves)
    return Implementation(name, function)
