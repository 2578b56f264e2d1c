"""Rotary position embedding on device: cos and sin from positions and a `RopeSpec`, and the rotation of queries and
keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.spec.rope import RopeSpec, dynamic_base, inverse_frequencies

from .trigonometry import cos_and_sin


def rope_angles(
    spec: RopeSpec, positions: jax.Array, lengths: jax.Array, *, by_feature: bool = False
) -> tuple[jax.Array, jax.Array]:
    """cos and sin: [batch, seq, rotary_dim / 2] in float32, or with `by_feature` [batch, seq, rotary_dim].

    If frequencies depend on the length (dynamic, longrope), each sequence has its own frequencies. A prompt's result
    therefore does not depend on the rest of the batch, nor on the chunks in which it is read.

    Args:
        spec: the rope.
        positions: [batch, seq].
        lengths: [batch], the number of tokens of each whole sequence.
        by_feature: give each feature the values of its pair, as products with them read it.
    """
    frequencies, scale = _frequencies(spec, lengths)
    if by_feature:
        frequencies = _by_feature(frequencies, spec)
    angles = positions[..., None].astype(jnp.float32) * frequencies * spec.sign
    cos, sin = cos_and_sin(angles)
    return cos * scale, sin * scale


def rotate(
    x: jax.Array, cos: jax.Array, sin: jax.Array, spec: RopeSpec, *, by_product: bool = False
) -> jax.Array:
    """Rotate the leading features of each head; the result has the same shape as x.

    Args:
        x: [batch, seq, ..., head_dim].
        cos: [batch, seq, rotary_dim / 2], or by feature: [batch, seq, rotary_dim].
        sin: [batch, seq, rotary_dim / 2], or by feature as cos is.
        spec: the rope.
        by_product: swap the features of each pair by a product with a signed permutation, which for a TPU is one
            operation where slices are many small ones. In bfloat16 the result is the same to the last bit; in other
            dtypes, which products round, the features are sliced.
    """
    if by_product and x.dtype == jnp.bfloat16:
        return _rotate_by_product(x, cos, sin, spec)
    between = (1,) * (x.ndim - 3)
    cos, sin = (_by_pair(t, spec) for t in (cos, sin))
    cos, sin = (t.reshape(*t.shape[:2], *between, t.shape[-1]) for t in (cos, sin))
    turned, kept = x[..., : spec.rotary_dim].astype(jnp.float32), x[..., spec.rotary_dim :]
    if spec.layout == "half":
        first, second = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = [first * cos - second * sin, second * cos + first * sin]
        turned = jnp.stack(pairs, axis=-1).reshape(turned.shape)
    turned = turned.astype(x.dtype)
    return turned if kept.shape[-1] == 0 else jnp.concatenate([turned, kept], axis=-1)


def _rotate_by_product(x: jax.Array, cos: jax.Array, sin: jax.Array, spec: RopeSpec) -> jax.Array:
    features, pairs = x.shape[-1], np.arange(spec.rotary_dim // 2)
    first, second = (pairs, pairs + len(pairs)) if spec.layout == "half" else (2 * pairs, 2 * pairs + 1)
    swap = np.zeros((features, features), np.float32)
    swap[second, first], swap[first, second] = -1.0, 1.0

    def wide(turned: jax.Array, kept: float) -> jax.Array:
        """[batch, seq, ..., features] of values of pairs or of turned features, and what kept features have."""
        if turned.shape[-1] != spec.rotary_dim:
            turned = _by_feature(turned, spec)
        padding = [(0, 0), (0, 0), (0, features - spec.rotary_dim)]
        whole = jnp.pad(turned, padding, constant_values=kept)
        return whole.reshape(*whole.shape[:2], *(1,) * (x.ndim - 3), features)

    swapped = jnp.matmul(x, jnp.asarray(swap, x.dtype), preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * wide(cos, 1.0) + swapped * wide(sin, 0.0)).astype(x.dtype)


def _by_feature(of_pairs: jax.Array, spec: RopeSpec) -> jax.Array:
    """[..., rotary_dim] of values of pairs [..., rotary_dim / 2]."""
    if spec.layout == "half":
        return jnp.concatenate([of_pairs, of_pairs], axis=-1)
    return jnp.repeat(of_pairs, 2, axis=-1)


def _by_pair(values: jax.Array, spec: RopeSpec) -> jax.Array:
    """The inverse of `_by_feature`. Values of pairs are returned as they are."""
    pairs = spec.rotary_dim // 2
    if values.shape[-1] == pairs:
        return values
    return values[..., :pairs] if spec.layout == "half" else values[..., ::2]


def _frequencies(spec: RopeSpec, lengths: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    within, scale = inverse_frequencies(spec)
    if not spec.depends_on_length:
        return jnp.asarray(within), scale
    length = lengths[:, None]  # [batch, 1]
    if spec.type == "longrope":
        original = spec.original_max_position_embeddings or spec.max_position_embeddings
        beyond, beyond_scale = inverse_frequencies(spec, original + 1)
        is_beyond = (length > original)[..., None]  # [batch, 1, 1]
        return jnp.where(is_beyond, beyond, within), jnp.where(is_beyond, beyond_scale, scale)
    length = jnp.maximum(length, spec.max_position_embeddings).astype(jnp.float32)
    base = dynamic_base(spec, length)[..., None]
    exponent = jnp.arange(0, spec.rotary_dim, 2, dtype=jnp.float32) / spec.rotary_dim
    return 1.0 / base**exponent, scale
