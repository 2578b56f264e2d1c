"""Latent attention (`ttpu_core.spec.latent_attention`) as a Flax NNX module.

Without cached tokens, the latents are expanded to keys and values of each head, and attention runs as usual. A cache
keeps the latents, which all heads share as keys and values (the "absorbed" form: arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ttpu_core.sharding.training_state import ATTENTION
from ttpu_core.spec import AttentionSpec, axes
from ttpu_core.spec.latent_attention import LatentAttentionSpec, latent_pages
from ttpu_jax.model.custom import CachingMixer
from ttpu_jax.model.modules import Linear, Norm, Parameters, Runtime, Step, value_of
from ttpu_jax.model.step_cache import LatentQueries, Latents, StepCache, TokenKeys
from ttpu_jax.ops import attention as attention_ops
from ttpu_jax.ops.attention import latent_decode
from ttpu_jax.ops.attention.api import REFERENCE
from ttpu_jax.ops.attention.reference import MASKED
from ttpu_jax.ops.kernels import dense
from ttpu_jax.ops.paged_attention import PagedKV, RaggedBatch, paged_attention
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.ops.rope import rotate
from ttpu_jax.ops.temperature import query_factor


class LatentAttention(CachingMixer):
    """Attention whose cache holds one latent vector and one rotated key per token."""

    def __init__(self, spec: LatentAttentionSpec, values: Parameters, runtime: Runtime) -> None:
        self.spec, self.runtime = spec, runtime
        self.heads, self.rank, self.plain = spec.num_heads, spec.kv_lora_rank, spec.qk_nope_head_dim
        self.attention = AttentionSpec(
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.plain + spec.qk_rope_head_dim,
            v_head_dim=spec.v_head_dim,
            scale=spec.scale,
        )
        norm, short = partial(Norm, spec.norm, by_feature=runtime.fuses_norms), spec.q_lora_rank is not None

        def linear(name: str) -> Linear:
            return Linear(values.at(name), runtime, saved_as=ATTENTION)

        self.query_down = linear("query_down") if short else None
        self.query_norm = norm(values.at("query_norm")) if short else None
        self.query = linear("query_up" if short else "query")
        self.kv_down, self.kv_norm = linear("kv_down"), norm(values.at("kv_norm"))
        self.key_up, self.value_up = linear("key_up"), linear("value_up")
        self.output = linear("output")

    @part(Part.PROJECTIONS)
    def __call__(self, x: jax.Array, step: Step, cache: StepCache) -> tuple[jax.Array, StepCache]:
        """Attend among the tokens of x [batch, seq, hidden] and those in the cache.

        Returns:
            An output shaped as x (with `step.last_only`, of the last token, [batch, 1, hidden]), and the cache with
                these tokens' latents [batch, seq, kv_lora_rank] and rotated keys [batch, seq, qk_rope_head_dim] in it.
        """
        mixed, cache = cache.attend_latents(self, self._queries(x, step), self._compress(x, step))
        return self.output(mixed.reshape(*mixed.shape[:2], -1)), cache

    def over_pages(self, queries: LatentQueries, pages: PagedKV, batch: RaggedBatch) -> jax.Array:
        """Attend to latents and rotated keys in a layer's pages, in the absorbed form (see `absorbed`); result
        [1, tokens, heads, v_head_dim]."""
        query = queries.values
        key_up, value_up = (dense(value_of(each.kernel), query.dtype) for each in (self.key_up, self.value_up))
        if self.runtime.placement.platform == "cpu":
            key_up, value_up = (a.astype(jnp.float32) for a in (key_up, value_up))
        dtype = key_up.dtype
        taken = _product("bshd,hdr->bshr", query[..., : self.plain].astype(dtype), key_up).astype(dtype)
        narrow = jnp.concatenate([self._shard(taken), query[..., self.plain :].astype(dtype)], axis=-1)
        placement = self.runtime.placement
        context = attention_ops.AttentionContext(
            mesh=placement.mesh,
            query_axes=placement.mesh_axes(axes.Q_HEADS, self.heads),
            platform=placement.platform,
            own_keys=False,
        )
        spec, own = latent_pages(self.spec), self.runtime.attention != REFERENCE.name
        mixed = paged_attention(narrow[0][:, None], pages, batch, spec, context=context, own=own)[:, 0][None]
        mixed = _product("bshr,hvr->bshv", self._shard(mixed.astype(dtype)), value_up).astype(query.dtype)
        return self._shard(mixed)

    def _compress(self, x: jax.Array, step: Step) -> Latents:
        """The latents of the tokens of x [batch, seq, hidden]."""
        both = self.kv_down(x)
        latent = self.kv_norm(both[..., : self.rank])
        if self.spec.latent_scale != 1.0:
            latent = (latent.astype(jnp.float32) * self.spec.latent_scale).astype(latent.dtype)
        return Latents(latent, self._rotated(both[..., self.rank :], step))

    def _queries(self, x: jax.Array, step: Step) -> LatentQueries:
        """The queries of the tokens of x [batch, seq, hidden], or of the last one."""
        wanted = step.wanted
        x = x[:, -wanted.query_positions.shape[1] :]
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        query = self._shard(self.query(x))
        rotated = self._rotated(query[..., self.plain :], wanted)
        query = jnp.concatenate([query[..., : self.plain], rotated], axis=-1)
        temperature = self.spec.query_temperature
        if temperature is not None:
            factor = query_factor(temperature, wanted.query_positions)
            query = (query * factor[:, :, None, None]).astype(query.dtype)
        return LatentQueries(query, wanted.query_positions)

    def expanded(
        self, queries: LatentQueries, latents: Latents, key_positions: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Expand the latents to keys and values of each head and attend to them; key_positions and segments
        [batch, keys], result [batch, queries, heads, v_head_dim]."""
        latent, rope_key = latents
        key = self._shard(self.key_up(latent))
        shared = jnp.broadcast_to(rope_key[:, :, None], (*key.shape[:3], rope_key.shape[-1]))
        key, value = jnp.concatenate([key, shared], axis=-1), self._shard(self.value_up(latent))
        heads_first = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        keys = TokenKeys(*heads_first, key_positions, own=True, segments=segments)
        mixed = keys.attend(queries.values[:, :, :, None], queries.positions, self.attention, self.runtime)
        return mixed[:, :, :, 0]

    def absorbed(
        self,
        queries: LatentQueries,
        cached: Latents,
        new: Latents,
        slot: jax.Array,
        key_positions: jax.Array,
        *,
        of_stack: bool = False,
    ) -> tuple[jax.Array, Latents]:
        """Write the step's latents to cached ones, and attend to all without expanding them.

        `key_up` is applied to the queries, whose keys are then the latents, and `value_up` is applied to the attention
        output. Each cached token is read once for all heads.

        Args:
            queries: of the step's tokens.
            cached: of all slots.
            new: of the step's tokens.
            slot: int32 scalar, the slot of the first new one.
            key_positions: [batch, slots].
            of_stack: the latents are those of one layer of a stack.

        Returns:
            [batch, queries, heads, v_head_dim], and the latents with the new ones.
        """
        query, query_positions = queries
        key_up, value_up = (dense(value_of(each.kernel), query.dtype) for each in (self.key_up, self.value_up))
        dtype = cached.latent.dtype
        if self.runtime.placement.platform == "cpu":  # XLA:CPU wants float32 operands
            key_up, value_up, dtype = key_up.astype(jnp.float32), value_up.astype(jnp.float32), jnp.dtype(jnp.float32)
        taken = _product("bshd,hdr->bshr", query[..., : self.plain].astype(dtype), key_up).astype(dtype)
        taken, turned = self._shard(taken), query[..., self.plain :].astype(dtype)
        spec, context = latent_pages(self.spec), self._context(query, cached.latent, of_stack)
        tokens, slots = new.latent.shape[1], cached.latent.shape[1]
        if latent_decode.chosen(self.runtime.attention, spec, context, tokens, slots):
            positions = query_positions, key_positions
            mixed, *found = latent_decode.latent_decode(
                taken, turned, *cached, (new.latent, new.rope_key), slot, *positions, spec, context
            )
            written = Latents(*found)
        else:
            written = cached.written(new, slot)
            latent, rope_key = (each.astype(dtype) for each in written)
            scores = _product("bshr,bkr->bhsk", taken, latent) + _product("bshr,bkr->bhsk", turned, rope_key)
            visible = attention_ops.visibility(query_positions, key_positions, self.attention)[:, None]
            scores = jnp.where(visible, scores * self.attention.softmax_scale, MASKED)
            probabilities = jax.nn.softmax(scores, axis=-1).astype(dtype)
            mixed = _product("bhsk,bkr->bshr", probabilities, latent).astype(dtype)
        mixed = self._shard(mixed)
        return self._shard(_product("bshr,hvr->bshv", mixed, value_up)).astype(query.dtype), written

    def _context(self, query: jax.Array, latent: jax.Array, of_stack: bool) -> attention_ops.AttentionContext:
        placement = self.runtime.placement
        return attention_ops.AttentionContext(
            mesh=placement.mesh,
            batch_axes=placement.mesh_axes(axes.BATCH, query.shape[0]),
            head_axes=placement.mesh_axes(axes.Q_HEADS, self.heads),
            sequence_axes=placement.mesh_axes(axes.SEQUENCE, latent.shape[1]),
            platform=placement.platform,
            own_keys=False,
            of_stack=of_stack,
        )

    def _rotated(self, x: jax.Array, step: Step) -> jax.Array:
        """x [batch, seq, ..., qk_rope_head_dim] at the queries' positions."""
        rope = self.spec.rope
        if rope is None or rope.type == "none":
            return x
        cos, sin = step.angles[self.runtime.ropes.index(rope)]
        return rotate(x, cos, sin, rope, by_product=self.runtime.rotates_by_product)

    def _shard(self, x: jax.Array) -> jax.Array:
        """x [batch, seq, heads, features], sharded by heads."""
        return self.runtime.placement.constrain(x, axes.BATCH, axes.SEQUENCE, axes.Q_HEADS, None)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum with a float32 result."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
