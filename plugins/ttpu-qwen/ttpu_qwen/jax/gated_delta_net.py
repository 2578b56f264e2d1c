"""Gated DeltaNet (arXiv 2412.06464) for JAX: a linear attention whose state is one matrix per value head.

Value heads are grouped by the key head that they share, as `[key_heads, values_per_key]`, so that tensor parallelism
shards between groups. Everything between the projections is computed in float32, as in transformers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.spec import ActivationSpec, MixerSpec, NormSpec, axes
from ttpu_jax.model.modules import Linear, Norm, Parameters, Runtime, Step
from ttpu_jax.ops.activation import activate
from ttpu_jax.ops.convolution import causal_convolution

CHUNK = 64  # tokens; a larger chunk means more work per token and fewer sequential steps
# A TPU rounds float32 operands to bfloat16 unless told otherwise; three passes keep the state near float32.
PRECISION = jax.lax.Precision.HIGH
L2_EPS = 1e-6
State = dict[str, jax.Array]


class GatedDeltaNet(nnx.Module):
    """A short causal convolution over queries, keys and values, the gated delta rule, and a gated norm."""

    resets_state = True

    def __init__(self, spec: MixerSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.qkvz, self.ba = Linear(values.at("qkvz"), runtime), Linear(values.at("ba"), runtime)
        self.conv = values["conv.kernel"]
        self.decay_log, self.decay_bias = values["decay_log"], values["decay_bias"]
        self.norm = Norm(NormSpec(eps=spec.option("norm_eps")), values.at("norm"))
        self.output = Linear(values.at("output"), runtime)

    def __call__(self, x: jax.Array, step: Step, state: State | None = None) -> tuple[jax.Array, State | None]:
        """The mixer's output [batch, seq, hidden], or that of the last token only, and the state: "conv" [batch,
        kernel - 1, key_heads, features] and "recurrent" [batch, key_heads, values_per_key, key_dim, value_dim].

        Args:
            x: [batch, seq, hidden].
            step: the step's positions and masks.
            state: the state after earlier tokens, or None.
        """
        valid = step.valid[..., None]
        x = jnp.where(valid, x, 0)
        # Each token depends on the previous one, so the sequence is not sharded.
        fused = self._whole_sequence(self.qkvz(x))
        ba = self._whole_sequence(self.ba(x, jnp.dtype(jnp.float32)))  # [batch, seq, key_heads, 2, values_per_key]
        features = self.conv.shape[-1]
        mixed, window = causal_convolution(
            fused[..., :features], self.conv[...], None if state is None else state["conv"], step.valid, step.segments
        )
        query, key, value = self._heads(activate(mixed, ActivationSpec(self.spec.option("activation"))))
        decay = -jnp.exp(self.decay_log[...]) * jax.nn.softplus(ba[..., 1, :] + self.decay_bias[...])
        decay = jnp.where(valid[..., None], decay, 0.0)
        beta = jnp.where(valid[..., None], jax.nn.sigmoid(ba[..., 0, :]), 0.0)
        before = None if state is None else state["recurrent"]
        rule = recurrent_gated_delta_rule if x.shape[1] == 1 else partial(chunk_gated_delta_rule, starts=step.starts)
        out, recurrent = rule(l2_normalize(query), l2_normalize(key), value, decay, beta, before)
        gate = fused[..., features:].reshape(out.shape)
        if step.last_only:
            out, gate = out[:, -1:], gate[:, -1:]
        out = (self.norm(out) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
        after = None if state is None else {"conv": window, "recurrent": recurrent}
        return self.output(out.reshape(*out.shape[:2], -1)), after

    def _whole_sequence(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, key_heads, ...], sharded along batch and heads only."""
        return self.runtime.placement.constrain(x, axes.BATCH, None, axes.KV_HEADS, *(None,) * (x.ndim - 3))

    def _heads(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys [..., key_heads, key_dim], values [..., key_heads, values_per_key, value_dim]."""
        dim = self.spec.option("key_dim")
        query, key, value = mixed[..., :dim], mixed[..., dim : 2 * dim], mixed[..., 2 * dim :]
        return query, key, value.reshape(*value.shape[:-1], self.spec.option("values_per_key"), -1)


def l2_normalize(x: jax.Array) -> jax.Array:
    """`x`: [..., features] divided by its length, in float32. The result is [..., features]."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + L2_EPS)


def recurrent_gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule, token by token: the state S decays by exp(decay), its recall for the key moves towards
    the value by the fraction beta, and the query reads it.

    S ← exp(decay) S;  S ← S + key ⊗ beta (value - key S);  out = query S / sqrt(key_dim)

    Args:
        query: [batch, seq, key_heads, key_dim].
        key: [batch, seq, key_heads, key_dim].
        value: [batch, seq, key_heads, values_per_key, value_dim].
        decay: [batch, seq, key_heads, values_per_key], a logarithm, at most 0. The state does not change if decay
            and beta are 0.
        beta: [batch, seq, key_heads, values_per_key].
        state: [batch, key_heads, values_per_key, key_dim, value_dim]; None is zeros.

    Returns:
        float32 [batch, seq, key_heads, values_per_key, value_dim], and the float32 state after the last token.
    """
    query, key, value, decay, beta = _float32(query, key, value, decay, beta)
    query = query * query.shape[-1] ** -0.5
    before = _initial_state(key, value) if state is None else state.astype(jnp.float32)

    def token(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value, decay, beta = inputs
        # Sums of products run on the vector unit: a matrix unit is not faster for one row, and would round.
        query, key = query[:, :, None, :, None], key[:, :, None, :, None]
        state = state * jnp.exp(decay)[..., None, None]
        delta = (value - (state * key).sum(-2)) * beta[..., None]
        state = state + key * delta[..., None, :]
        return state, (state * query).sum(-2)

    inputs = (query, key, value, decay, beta)
    if query.shape[1] == 1:
        after, out = token(before, jax.tree.map(lambda each: each[:, 0], inputs))
        return out[:, None], after
    after, out = jax.lax.scan(token, before, jax.tree.map(lambda each: each.swapaxes(0, 1), inputs))
    return out.swapaxes(0, 1), after


def chunk_gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None = None,
    *,
    chunk: int = CHUNK,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule by matrix products over chunks of tokens, so that only chunks are sequential (arXiv
    2412.06464). The results are those of `recurrent_gated_delta_rule`.

    Within a chunk, with c the running sum of decay, token i writes

        new_i = beta_i (value_i - exp(c_i) key_i S) - sum over j < i of beta_i exp(c_i - c_j) (key_i · key_j) new_j

    which is a unit lower triangular system in `new`, the same for every feature of the values.

    Args:
        query: [batch, seq, key_heads, key_dim].
        key: [batch, seq, key_heads, key_dim].
        value: [batch, seq, key_heads, values_per_key, value_dim].
        decay: [batch, seq, key_heads, values_per_key].
        beta: [batch, seq, key_heads, values_per_key].
        state: [batch, key_heads, values_per_key, key_dim, value_dim]; None is zeros.
        chunk: tokens per chunk, a power of two; the sequence may have any length.
        starts: bool [batch, seq], true for tokens before which the state becomes zero; None is nowhere.

    Returns:
        float32 [batch, seq, key_heads, values_per_key, value_dim], and the float32 state after the last token.
    """
    batch, seq = key.shape[:2]
    chunk = min(chunk, 1 << (seq - 1).bit_length())
    query, key, value, decay, beta = (_in_chunks(each, chunk) for each in _float32(query, key, value, decay, beta))
    query = query * query.shape[-1] ** -0.5
    before = _initial_state(key[:, 0], value[:, 0]) if state is None else state.astype(jnp.float32)
    # b batch, n chunk, i and j tokens of a chunk, h key heads, r values per key, k and v features
    decay, beta, value = (jnp.moveaxis(each, 2, 4) for each in (decay, beta, value))  # [b, n, h, r, i(, v)]
    query, key = query.swapaxes(2, 3)[:, :, :, None], key.swapaxes(2, 3)[:, :, :, None]  # [b, n, h, 1, i, k]
    total = jnp.cumsum(decay, axis=-1)
    pairs = total[..., :, None] - total[..., None, :]
    earlier_or_same = jnp.tri(chunk, dtype=bool)
    if starts is not None:
        number = jnp.cumsum(_in_chunks(starts, chunk), axis=-1)[:, :, None, None]  # [b, n, 1, 1, i], starts so far
        earlier_or_same = earlier_or_same & (number[..., :, None] == number[..., None, :])
    pairs = jnp.exp(jnp.where(earlier_or_same, pairs, -jnp.inf))  # masked first: later tokens would overflow
    coupling = _product("...ik,...jk->...ij", key, key) * pairs * beta[..., None]
    solve = unit_lower_inverse(jnp.where(jnp.tri(chunk, k=-1, dtype=bool), coupling, 0.0))
    written = _product("...ij,...jv->...iv", solve, value * beta[..., None])
    last = total[..., -1:]
    since, kept, until = jnp.exp(total), jnp.exp(last), jnp.exp(last - total)
    if starts is not None:  # the state before a chunk reaches its first sequence, and the last one the state after it
        since, kept = jnp.where(number == 0, since, 0.0), jnp.where(number[..., -1:] == 0, kept, 0.0)
        until = jnp.where(number == number[..., -1:], until, 0.0)
    recalled = _product("...ij,...jk->...ik", solve, key * (beta * since)[..., None])
    attention = _product("...ik,...jk->...ij", query, key) * pairs
    query, key = query * since[..., None], key * until[..., None]

    def step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        written, recalled, attention, query, key, kept = inputs
        new = written - _product("...ik,...kv->...iv", recalled, state)
        out = _product("...ik,...kv->...iv", query, state) + _product("...ij,...jv->...iv", attention, new)
        return state * kept[..., None] + _product("...ik,...iv->...kv", key, new), out

    inputs = (written, recalled, attention, query, key, kept)
    after, out = jax.lax.scan(step, before, jax.tree.map(lambda each: each.swapaxes(0, 1), inputs))
    out = out.transpose(1, 0, 4, 2, 3, 5)  # [n, b, h, r, i, v] → [b, n, i, h, r, v]
    return out.reshape(batch, -1, *out.shape[3:])[:, :seq], after


@jax.custom_jvp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(1 + lower)⁻¹ for strictly lower triangular matrices `lower`: [..., n, n], n a power of two. The result is
    [..., n, n].

    Inverses of the diagonal blocks of one size give those of twice the size: the block below the diagonal of [[A,
    0], [B, D]]⁻¹ is -D⁻¹ B A⁻¹. This is as stable as forward substitution (a power series in `lower` is not), and
    takes log2(n) pairs of products instead of n steps."""
    size = lower.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        same_pair = index[:, None] // (2 * block) == index // (2 * block)
        below = jnp.where(same_pair & (index[:, None] // block != index // block), lower, 0.0)
        if block == 1:
            inverse = inverse - below
        else:
            product = _product("...ij,...jk->...ik", below, inverse)
            inverse = inverse - _product("...ij,...jk->...ik", inverse, product)
        block *= 2
    return inverse


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """d(X⁻¹) = -X⁻¹ dX X⁻¹: the gradient needs only the inverse."""
    inverse = unit_lower_inverse(*primals)
    product = _product("...ij,...jk->...ik", tangents[0], inverse)
    return inverse, -_product("...ij,...jk->...ik", inverse, product)


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=PRECISION)


def _float32(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(array.astype(jnp.float32) for array in arrays)


def _in_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[batch, seq, ...] → [batch, chunks, chunk, ...]. Padding tokens are zeros, which have no effect."""
    padding = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _initial_state(key: jax.Array, value: jax.Array) -> jax.Array:
    """Zeros [batch, key_heads, values_per_key, key_dim, value_dim] for key [batch, seq, key_heads, key_dim]."""
    return jnp.zeros((key.shape[0], *value.shape[2:4], key.shape[-1], value.shape[-1]), jnp.float32)
