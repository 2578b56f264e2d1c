"""Lightning attention (arXiv 2401.04658) for JAX: linear attention whose state, one matrix per head, decays by a
constant factor a token."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import ActivationSpec, MixerSpec, NormSpec, axes
from ttpu_jax.model.modules import Linear, Norm, Parameters, Runtime, Step
from ttpu_jax.ops.activation import activate

CHUNK = 128  # tokens; a larger chunk means more work per token and fewer sequential steps
PRECISION = jax.lax.Precision.HIGH
NORM = NormSpec(eps=1e-6)
"""`MiniMaxLightningAttention` leaves the epsilon of its norm at the class's default."""
State = dict[str, jax.Array]


class LightningAttention(nnx.Module):
    """Linear attention with a decay per head, a norm over all heads, and a gate on each feature of the output."""

    resets_state = True

    def __init__(self, spec: MixerSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.qkv, self.gate = Linear(values.at("qkv"), runtime), Linear(values.at("gate"), runtime)
        self.norm, self.output = Norm(NORM, values.at("norm")), Linear(values.at("output"), runtime)

    def __call__(self, x: jax.Array, step: Step, state: State | None = None) -> tuple[jax.Array, State | None]:
        """The mixer's output [batch, seq, hidden], or that of the last token only, and the state "recurrent" [batch,
        heads, head_dim, head_dim].

        Args:
            x: [batch, seq, hidden].
            step: the step's positions.
            state: the state after earlier tokens, or None.
        """
        valid = step.valid[..., None]
        heads, dim = self.spec.option("heads"), self.spec.option("head_dim")
        qkv = activate(self.qkv(x, jnp.dtype(jnp.float32)), ActivationSpec(self.spec.option("activation")))
        # Each token depends on the previous one, so the sequence is not sharded.
        qkv = self.runtime.placement.constrain(
            jnp.where(valid[..., None], qkv, 0).astype(x.dtype), axes.BATCH, None, axes.KV_HEADS, None
        )
        query, key, value = (qkv[..., part * dim : (part + 1) * dim] for part in range(3))
        slopes = self.spec.option("decay") * 2.0 ** (-8.0 / heads * jnp.arange(1, heads + 1))
        decay = jnp.where(valid, -slopes.astype(jnp.float32), 0.0)
        out, after = decayed_attention(
            query, key, value, decay, None if state is None else state["recurrent"], starts=step.starts
        )
        out = out.astype(x.dtype).reshape(*out.shape[:2], heads * dim)
        if step.last_only:
            out, x = out[:, -1:], x[:, -1:]
        gate = jax.nn.sigmoid(self.gate(x)).reshape(out.shape)
        return self.output(gate * self.norm(out)), None if state is None else {"recurrent": after}


def decayed_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    state: jax.Array | None = None,
    *,
    chunk: int = CHUNK,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention with decay, by matrix products over chunks of tokens, so that only chunks are sequential:

    S ← exp(decay) S + key ⊗ value;  out = query S

    Args:
        query: [batch, seq, heads, key_dim].
        key: [batch, seq, heads, key_dim].
        value: [batch, seq, heads, value_dim].
        decay: [batch, seq, heads], a logarithm, at most 0.
        state: [batch, heads, key_dim, value_dim]; None is zeros.
        chunk: tokens per chunk; the sequence may have any length.
        starts: bool [batch, seq], true for tokens before which the state becomes zero; None is nowhere.

    Returns:
        float32 [batch, seq, heads, value_dim], and the float32 state after the last token.
    """
    batch, seq = key.shape[:2]
    chunk = min(chunk, seq)
    in_chunks = partial(_in_chunks, chunk=chunk)
    query, key, value, decay = (in_chunks(each.astype(jnp.float32)) for each in (query, key, value, decay))
    if state is None:
        state = jnp.zeros((batch, key.shape[3], key.shape[-1], value.shape[-1]), jnp.float32)
    # b batch, n chunk, i and j tokens of a chunk, h heads, k and v features
    total = jnp.cumsum(decay, axis=2).swapaxes(2, 3)  # [b, n, h, i]
    pairs = jnp.where(jnp.tri(chunk, dtype=bool), total[..., :, None] - total[..., None, :], -jnp.inf)
    since, kept, until = total, total[..., -1:], total[..., -1:] - total
    if starts is not None:  # the state before a chunk reaches its first sequence, and the last one the state after it
        number = jnp.cumsum(in_chunks(starts), axis=2)[:, :, None]  # [b, n, 1, i], starts so far
        pairs = jnp.where(number[..., :, None] == number[..., None, :], pairs, -jnp.inf)
        since, kept = jnp.where(number == 0, since, -jnp.inf), jnp.where(number[..., -1:] == 0, kept, -jnp.inf)
        until = jnp.where(number == number[..., -1:], until, -jnp.inf)
    scores = _product("bnihk,bnjhk->bnhij", query, key) * jnp.exp(pairs)
    within = _product("bnhij,bnjhv->bnihv", scores, value)
    query, key = query * jnp.exp(since).swapaxes(2, 3)[..., None], key * jnp.exp(until).swapaxes(2, 3)[..., None]
    written = _product("bnjhk,bnjhv->bnhkv", key, value)

    def step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, written, kept = inputs
        return state * kept[..., None] + written, _product("bihk,bhkv->bihv", query, state)

    inputs = (query, written, jnp.exp(kept))
    after, before = jax.lax.scan(step, state.astype(jnp.float32), jax.tree.map(lambda one: one.swapaxes(0, 1), inputs))
    out = within + before.swapaxes(0, 1)
    return out.reshape(batch, -1, *out.shape[3:])[:, :seq], after


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=PRECISION)


def _in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[batch, seq, ...] → [batch, chunks, chunk, ...]. Padding tokens are zeros, which have no effect."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
