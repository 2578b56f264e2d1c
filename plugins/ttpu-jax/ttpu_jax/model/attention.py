"""Softmax attention as a Flax NNX module: projections, norms, rope, cache and output, around
`ttpu_jax.ops.attention`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ttpu_core.sharding.training_state import ATTENTION
from ttpu_core.spec import AttentionSpec, axes
from ttpu_core.spec.parameters import fused_slots
from ttpu_jax.model.modules import (
    Linear,
    Norm,
    Parameters,
    Runtime,
    Step,
    maybe,
    ring_of,
    value_of,
    with_whole_rows,
)
from ttpu_jax.model.step_cache import ContiguousCache, Keys, PagedCache, PagedKeys, StepCache
from ttpu_jax.ops.attention import paired
from ttpu_jax.ops.matmul.rings import Ring, gathered_product, heads_outside, scattered_product
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.ops.rope import rotate
from ttpu_jax.ops.temperature import query_factor

TURNS_VALUES_TO = 512
"""Up to so many rows of a device, values go through the product of the rope too: each operation on heads then takes a
TPU about as long as for one row."""


class Attention(nnx.Module):
    """Grouped-query attention over a sequence or a cache."""

    def __init__(self, spec: AttentionSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.qkv = Linear(values.at("qkv"), runtime, fused_slots(spec), saved_as=ATTENTION)
        own_keys = spec.kv_from_layer is None
        separate = own_keys and not spec.value_is_key and spec.value_dim != spec.head_dim
        self.value = Linear(values.at("value"), runtime, saved_as=ATTENTION) if separate else None
        self.gate = Linear(values.at("gate"), runtime, saved_as=ATTENTION) if spec.output_gate else None
        # Statistics over all heads run over the axes (kv_heads, q_per_kv, head_dim) of queries, one fewer of keys.
        over_q, over_k = (3, 2) if spec.qk_norm_scope == "full" else (1, 1)
        of_q, of_k = spec.norm_features or (None, None)
        norm = partial(Norm, by_feature=runtime.fuses_norms)
        self.q_norm = norm(spec.q_norm, values.at("q_norm"), over_q, of_q) if spec.q_norm else None
        self.k_norm = norm(spec.k_norm, values.at("k_norm"), over_k, of_k) if spec.k_norm and own_keys else None
        self.v_norm = norm(spec.v_norm, values.at("v_norm")) if spec.v_norm and own_keys else None
        self.sinks = values.get("sinks")
        lambdas = values.at("lambda")
        self.lambda_query, self.lambda_key = lambdas.get("query"), lambdas.get("key")
        self.map_norm = norm(spec.differential.norm, values.at("map_norm")) if spec.differential else None
        self.output_norm = norm(spec.output_norm, values.at("output_norm"), 3) if spec.output_norm else None
        self.output = Linear(values.at("output"), runtime, saved_as=ATTENTION)

    @part(Part.PROJECTIONS)
    def __call__(
        self, x: jax.Array, step: Step, cache: StepCache, others: Keys | None = None
    ) -> tuple[jax.Array, StepCache, Keys]:
        """x [batch, seq, hidden]: the same shape (or the last token's, [batch, 1, hidden]), the cache with this step's
        keys and values in it, and the keys and values that were attended to.

        `others` are another layer's, for a layer that has none of its own.

        Raises:
            ValueError: neither this layer nor another gave keys.
        """
        spec, takes_pairs = self.spec.one_map_each, False
        if isinstance(cache, PagedCache):
            takes_pairs = cache.takes_pairs
        elif isinstance(cache, ContiguousCache):
            takes_pairs = cache.is_written_while_read(x.shape[1], spec, self.runtime)
        in_ring = self.ring(x) is not None
        if not in_ring:
            x = with_whole_rows(x, self.runtime)  # once for several products
        query, own = self._project(x, step, pairs=takes_pairs)
        positions = step.wanted.query_positions
        x = x[:, -positions.shape[1] :]
        query, sinks = self._one_map_each(query), value_of(self.sinks)
        if own is not None and isinstance(cache, ContiguousCache) and takes_pairs:
            pairs = paired(*own) if isinstance(own, tuple) else own
            mixed, cache, keys = cache.write_and_attend(query, positions, pairs, spec, self.runtime, sinks)
        else:
            cache, keys = self._written(cache, own, others)
            mixed = keys.attend(query, positions, spec, self.runtime, sinks)
        out = self._finish(self._difference(mixed), x)
        if isinstance(keys, PagedKeys) and keys.batch.max_queries > 1:
            # A kernel may leave padding uninitialised. Here zeros cost nothing: the residual stream is added next.
            out = jnp.where(step.valid[..., None], out, 0)
        return out, cache, keys

    def _written(
        self, cache: StepCache, own: tuple[jax.Array, jax.Array] | jax.Array | None, others: Keys | None
    ) -> tuple[StepCache, Keys]:
        """The cache with what `_project` gave of keys and values, and what queries attend to: these or `others`."""
        if isinstance(own, tuple):
            return cache.write(*own)
        if own is not None:
            assert isinstance(cache, PagedCache)
            return cache.write_pairs(own)
        if others is None:
            raise ValueError(
                "a layer without keys of its own was run without those of another: give it, as `inputs.keys`, what "
                "the layer returned that its spec names in kv_from_layer."
            )
        return cache, others

    def _project(
        self, x: jax.Array, step: Step, pairs: bool
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | jax.Array | None]:
        """query [batch, wanted, kv_heads, q_per_kv, dim] of wanted tokens; key and value [batch, kv_heads, seq, dim] if
        this layer has its own, or with `pairs` in one array [batch, seq, kv_heads, 2, dim] if that takes nothing
        more."""
        spec, constrain = self.spec, self.runtime.placement.constrain
        fused = constrain(self._fused(x), axes.BATCH, axes.SEQUENCE, axes.KV_HEADS, None, None)
        group, own_keys, _ = fused_slots(spec)
        ring = self.ring(x)
        both, slots = None, fused  # slots: where values are taken from
        # Of few tokens queries and keys are normed and turned together. Of many, whose rows a ring exchanges, slices of
        # the result would be copied.
        if own_keys and self.runtime.rotates_by_product and self._normed_alike and ring is None:
            both, has_values = self._turned_together(fused, step)
            slots = both if has_values else fused
        wanted = step.wanted
        tokens = slice(-wanted.query_positions.shape[1], None)
        if both is None:
            query = self._position(fused[:, tokens, :, :group], self.q_norm, wanted)
        else:
            query = both[:, tokens, :, :group]
        if ring is not None and not step.last_only:
            query = heads_outside(query, ring)
        if spec.query_temperature is not None:
            factor = query_factor(spec.query_temperature, wanted.query_positions)
            query = (query * factor[:, :, None, None, None]).astype(query.dtype)
        if not own_keys:
            return query, None
        if pairs and self._keeps_values:
            # Keys and values lie beside one another, as pages hold them.
            if slots is both:
                return query, slots[..., group:, :]
            if ring is not None and self.k_norm is None:
                turned = self._position(fused[..., group:, :], None, step)
                return query, _but_for_last(turned, fused[..., group:, :])
        key = fused[..., group, :]
        if spec.value_is_key:
            value = key
        elif self.value is not None:
            value = self.value(x)
        else:
            value = slots[..., group + 1, :]
        if spec.value_scale != 1.0:
            value = value * spec.value_scale
        value = self._clip(maybe(self.v_norm, value))
        turned = self._position(key, self.k_norm, step) if both is None else both[..., group, :]
        return query, (_heads_first(turned), _heads_first(value))

    def _turned_together(self, fused: jax.Array, step: Step) -> tuple[jax.Array, bool]:
        """Queries and keys of fused [batch, seq, kv_heads, slots, dim], normed and turned in the same operations:
        [batch, seq, kv_heads, q_per_kv + 1, dim]; and whether a slot of values follows them.

        Of few rows values follow: they go through the same operations, and are then taken as they were. So a TPU takes
        nothing apart before the end, where one operation gives keys and values: a layer of a decode step has four
        operations less."""
        group, _, values_follow = fused_slots(self.spec)
        rows = self.runtime.placement.part(axes.BATCH, fused.shape[0]) * fused.shape[1]
        has_values = bool(values_follow) and rows <= TURNS_VALUES_TO
        heads = fused if has_values else fused[..., : group + 1, :]
        normed = heads
        if self.q_norm is not None and self.k_norm is not None:
            normed = self.q_norm.but_for(group, self.k_norm, heads)
        turned = self._position(normed, None, step)
        return (_but_for_last(turned, heads) if has_values else turned), has_values

    @property
    def _normed_alike(self) -> bool:
        """Whether queries and keys are normed head by head in the same way, if at all, before they are turned."""
        query, key = self.q_norm, self.k_norm
        if query is None or key is None:
            return query is key
        return not self.spec.qk_norm_after_rope and query.is_like(key)

    @property
    def _keeps_values(self) -> bool:
        """Whether values come out of the fused projection, and are cached unchanged."""
        spec = self.spec
        _, _, values_follow = fused_slots(spec)
        as_they_are = self.v_norm is None and spec.clip_qkv is None and spec.value_scale == 1.0
        return bool(values_follow) and as_they_are

    def _fused(self, x: jax.Array) -> jax.Array:
        """Queries, keys and values of x [batch, seq, hidden]: [batch, seq, kv_heads, slots, dim]."""
        ring = self.ring(x)
        return self.qkv(x) if ring is None else gathered_product(x, *self.qkv.arrays, ring)

    def ring(self, x: jax.Array) -> Ring | None:
        """The devices that exchange the rows of x [batch, seq, hidden] while they compute queries, keys and values."""
        alone = self.gate is None and self.value is None and self.qkv.is_plain
        return ring_of(x, self.runtime) if alone else None

    def _clip(self, x: jax.Array) -> jax.Array:
        bound = self.spec.clip_qkv
        return x if bound is None else jnp.clip(x, -bound, bound)

    def _position(self, x: jax.Array, norm: Norm | None, step: Step) -> jax.Array:
        """Norm and rope of queries or keys [batch, seq, kv_heads, ..., dim], in the order that the spec asks for."""
        after, rope = self.spec.qk_norm_after_rope, self.spec.rope
        x = self._clip(x if after else maybe(norm, x))
        if rope is not None and rope.type != "none":
            cos, sin = step.angles[self.runtime.ropes.index(rope)]
            # With a dimension of one map XLA:TPU would copy what the product of a rope reads.
            maps = x if self.spec.maps == 1 else x.reshape(*x.shape[:-1], self.spec.maps, self.spec.map_dim)
            with part(Part.ROPE):
                x = rotate(maps, cos, sin, rope, by_product=self.runtime.rotates_by_product).reshape(x.shape)
        return maybe(norm, x) if after else x

    def _one_map_each(self, query: jax.Array) -> jax.Array:
        """Queries [batch, seq, kv_heads, q_per_kv, dim] with a head for each softmax map: first those that read the
        first halves of the keys, then those that read the second."""
        if self.spec.maps == 1:
            return query
        first = jnp.arange(query.shape[-1]) < self.spec.map_dim
        return jnp.concatenate([jnp.where(first, query, 0), jnp.where(first, 0, query)], axis=-2)

    def _difference(self, mixed: jax.Array) -> jax.Array:
        """What the first maps give minus lambda times what the second give, normed, of mixed [batch, seq, kv_heads,
        maps * q_per_kv, value_dim]; the result has one head for both."""
        spec, query, key = self.spec.differential, value_of(self.lambda_query), value_of(self.lambda_key)
        if spec is None or query is None or key is None:
            return mixed
        first, second = jnp.exp((query * key).astype(jnp.float32).sum(-1)).astype(mixed.dtype)
        one, other = jnp.split(mixed, 2, axis=-2)
        difference = one - (first - second + spec.initial).astype(mixed.dtype) * other
        return ((1 - spec.initial) * maybe(self.map_norm, difference)).astype(mixed.dtype)

    def _finish(self, mixed: jax.Array, x: jax.Array) -> jax.Array:
        """Gate, inner norm and output projection of mixed [batch, seq, kv_heads, q_per_kv, value_dim]."""
        if self.gate is not None and self.spec.output_gate is not None:
            gate = self.gate(x, jnp.dtype(jnp.float32))
            gate = jax.nn.sigmoid(gate) if self.spec.output_gate.activation == "sigmoid" else jax.nn.softplus(gate)
            mixed = (mixed * (gate if gate.ndim == mixed.ndim else gate[..., None])).astype(mixed.dtype)
        if self.output_norm is not None:
            mixed = self.output_norm(mixed)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        ring = ring_of(mixed, self.runtime)
        if ring is None or not self.output.is_plain:
            return self.output(mixed)
        return scattered_product(mixed, *self.output.arrays, ring)


@part(Part.ROPE)
def _but_for_last(turned: jax.Array, before: jax.Array) -> jax.Array:
    """turned [..., slots, dim], but the last slot, which holds values, as it was before: the same shape."""
    is_value = jnp.arange(turned.shape[-2])[:, None] == turned.shape[-2] - 1
    return jnp.where(is_value, before, turned)


def _heads_first(x: jax.Array) -> jax.Array:
    """[batch, seq, heads, dim] → [batch, heads, seq, dim], as caches are laid out."""
    return x.transpose(0, 2, 1, 3)
