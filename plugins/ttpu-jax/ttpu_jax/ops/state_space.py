"""The selective state space of Mamba-2 (arXiv 2405.21060), token by token and by chunks of tokens.

Heads are grouped by the vectors b and c that they share, as `[groups, heads of a group]`. Everything is float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens; a larger chunk means more work per token and fewer sequential steps
# A TPU rounds float32 operands to bfloat16 unless told otherwise; three passes keep the state near float32.
PRECISION = jax.lax.Precision.HIGH


def recurrent_state_space(
    x: jax.Array, decay: jax.Array, b: jax.Array, c: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state space of one token: S ← exp(decay) S + x ⊗ b;  y = S c.

    Args:
        x: [batch, 1, groups, heads, head_dim], times the step.
        decay: [batch, 1, groups, heads], a logarithm, at most 0.
        b: [batch, 1, groups, state_size].
        c: [batch, 1, groups, state_size].
        state: [batch, groups, heads, head_dim, state_size].

    Returns:
        y in x's shape, and the state after the token.
    """
    x, decay, b, c = (each[:, 0] for each in (x, decay, b, c))
    # Sums of products run on the vector unit: a matrix unit is not faster for one row, and would round.
    state = state * jnp.exp(decay)[..., None, None] + x[..., None] * b[:, :, None, None]
    return (state * c[:, :, None, None]).sum(-1)[:, None], state


def chunked_state_space(
    x: jax.Array,
    decay: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array,
    *,
    chunk: int = CHUNK,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The state space by matrix products over chunks of tokens, so that only chunks are sequential. The results are
    those of `recurrent_state_space` for each token in turn.

    Within a chunk, token i reads from each token j up to i the value x_j, times c_i · b_j and the decay from j to i,
    and from the state before the chunk what is left of it.

    Args:
        x: [batch, seq, groups, heads, head_dim], times the step; 0 leaves the state unchanged if decay is 0 too.
        decay: [batch, seq, groups, heads], a logarithm, at most 0.
        b: [batch, seq, groups, state_size].
        c: [batch, seq, groups, state_size].
        state: [batch, groups, heads, head_dim, state_size], before the first token.
        chunk: tokens per chunk; the sequence may have any length.
        starts: bool [batch, seq], true for tokens before which the state becomes zero; None is nowhere.

    Returns:
        y in x's shape, and the state after the last token.
    """
    batch, seq = x.shape[:2]
    chunk = min(chunk, seq)
    x, decay, b, c = (_in_chunks(each, chunk) for each in (x, decay, b, c))
    # b batch, n chunk, i and j tokens of a chunk, g groups, h heads of a group, p features of x, s of the state
    decay = jnp.moveaxis(decay, 2, 4)  # [b, n, g, h, i]
    since, pairs = jnp.exp(jnp.cumsum(decay, axis=-1)), segment_sums(decay)
    kept, until = since[..., -1:], jnp.exp(pairs[..., -1, :])
    if starts is not None:  # the state before a chunk reaches its first sequence, and the last one the state after it
        number = jnp.cumsum(_in_chunks(starts, chunk), axis=-1)[:, :, None, None]  # [b, n, 1, 1, i], starts so far
        same, last = number[..., :, None] == number[..., None, :], number[..., -1:]
        pairs = jnp.where(same, pairs, -jnp.inf)
        since, kept = jnp.where(number == 0, since, 0.0), jnp.where(last == 0, kept, 0.0)
        until = jnp.where(number == last, until, 0.0)
    weights = _product("bnigs,bnjgs->bngij", c, b)[:, :, :, None] * jnp.exp(pairs)
    within = _product("bnghij,bnjghp->bnighp", weights, x)
    added = _product("bnjghp,bnjgs->bnghps", x * jnp.moveaxis(until, 4, 2)[..., None], b)

    def step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        c, added, kept = inputs
        return state * kept[..., None] + added, _product("bigs,bghps->bighp", c, state)

    inputs = jax.tree.map(lambda each: each.swapaxes(0, 1), (c, added, kept))
    after, before = jax.lax.scan(step, state, inputs)
    y = within + before.swapaxes(0, 1) * jnp.moveaxis(since, 4, 2)[..., None]
    return y.reshape(batch, -1, *y.shape[3:])[:, :seq], after


def segment_sums(values: jax.Array) -> jax.Array:
    """Sums of values [..., n] over j < k <= i for each i and j: [..., n, n], -inf where j is after i. Differences of
    running sums would lose what is small beside the sums before it."""
    size = values.shape[-1]
    later = jnp.tri(size, k=-1, dtype=bool)
    sums = jnp.cumsum(jnp.where(later, values[..., :, None], 0.0), axis=-2)
    return jnp.where(jnp.tri(size, dtype=bool), sums, -jnp.inf)


def _in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[batch, seq, ...] → [batch, chunks, chunk, ...]. Padding tokens are zeros, which have no effect."""
    padding = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=PRECISION)
