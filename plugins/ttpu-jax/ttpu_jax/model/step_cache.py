"""A layer's cache during one step. It writes the step's keys and values, or its recurrent states, and returns what
queries attend to. No cache, a contiguous one and a paged one are three types with the same methods, so that mixers need
not know which of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.model.cache import LayerCache, StateCache
from ttpu_jax.model.modules import Runtime, Step
from ttpu_jax.model.ragged import on_rows
from ttpu_jax.ops import attention as attention_ops
from ttpu_jax.ops.paged_attention import PagedKV, RaggedBatch, paged_attention, write

Mixer = Callable[[jax.Array, Step, Any], tuple[jax.Array, Any]]
"""A recurrent mixer, see `ttpu_jax.model.custom`."""


# What queries attend to


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenKeys:
    """Keys [batch, kv_heads, keys, head_dim] and values [batch, kv_heads, keys, value_dim] of tokens at `positions`
    [batch, keys]: the step's own (`own`, static) or those of every slot of a cache."""

    key: jax.Array
    value: jax.Array
    positions: jax.Array
    own: bool = field(metadata={"static": True})

    def attend(
        self,
        query: jax.Array,
        query_positions: jax.Array,
        spec: AttentionSpec,
        runtime: Runtime,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """query [batch, seq, kv_heads, q_per_kv, head_dim] at positions [batch, seq]: [batch, seq, kv_heads, q_per_kv,
        value_dim]."""
        placement = runtime.placement
        return attention_ops.attend(
            runtime.attention,
            query,
            self.key,
            self.value,
            query_positions,
            self.positions,
            spec,
            sinks=sinks,
            context=attention_ops.AttentionContext(
                mesh=placement.mesh,
                batch_axes=placement.mesh_axes(axes.BATCH, query.shape[0]),
                head_axes=placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads),
                sequence_axes=placement.mesh_axes(axes.SEQUENCE, query.shape[1]),
                platform=placement.platform,
                own_keys=self.own,
                options=runtime.attention_options,
            ),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKeys:
    """Keys and values of many sequences in pages, this step's among them."""

    pages: PagedKV
    batch: RaggedBatch

    def attend(
        self,
        query: jax.Array,
        query_positions: jax.Array,
        spec: AttentionSpec,
        runtime: Runtime,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """query [1, tokens, kv_heads, q_per_kv, head_dim] of all sequences: [1, tokens, kv_heads, q_per_kv, value_dim];
        the batch knows their positions."""
        placement = runtime.placement
        context = attention_ops.AttentionContext(
            mesh=placement.mesh,
            head_axes=placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads),
            platform=placement.platform,
            own_keys=False,
        )
        return paged_attention(query[0], self.pages, self.batch, spec, sinks=sinks, context=context)[None]


Keys = TokenKeys | PagedKeys


class LatentReader(Protocol):
    """How latent attention reads latents: each cache calls the form that suits what it holds."""

    def expanded(
        self,
        query: jax.Array,
        query_positions: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
        key_positions: jax.Array,
    ) -> jax.Array:
        """Over keys and values that are made of the step's own latents."""
        ...

    def absorbed(
        self,
        query: jax.Array,
        query_positions: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
        key_positions: jax.Array,
    ) -> jax.Array:
        """Over cached latents as they lie."""
        ...

    def over_pages(self, query: jax.Array, pages: PagedKV, batch: RaggedBatch) -> jax.Array:
        """Over latents and rotated keys in pages."""
        ...


# Caches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoCache:
    """Nothing is kept: tokens at `positions` [batch, seq] attend to each other, and states start from zeros."""

    positions: jax.Array
    held: None = None

    def write(self, key: jax.Array, value: jax.Array) -> tuple[NoCache, Keys]:
        """key [batch, kv_heads, seq, head_dim] and value [batch, kv_heads, seq, value_dim] as what is attended to."""
        return self, TokenKeys(key, value, self.positions, own=True)

    def attend_latents(
        self,
        reader: LatentReader,
        query: jax.Array,
        query_positions: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
    ) -> tuple[jax.Array, NoCache]:
        """query [batch, seq, heads, dim] over latent [batch, seq, kv_lora_rank] and rope_key [batch, seq,
        qk_rope_head_dim]: [batch, seq, heads, v_head_dim]."""
        return reader.expanded(query, query_positions, latent, rope_key, self.positions), self

    def recur(self, mixer: Mixer, x: jax.Array, step: Step) -> tuple[jax.Array, NoCache]:
        """The recurrent mixer of x [batch, seq, hidden]."""
        return mixer(x, step, None)[0], self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContiguousCache:
    """A layer's part of a `KVCache`: rows that advance in step.

    held: `LayerCache` of attention, `StateCache` of another mixer, None for a layer that reads another's keys.
    positions: [batch, slots] of all slots, or where the cache is `fresh` (static) [batch, seq] of the step's tokens,
        which then are all that there is to attend to.
    slot: int32 scalar, where the first token goes.
    layer_index: place among stacked layers; None where layers are not stacked.
    """

    held: Any
    positions: jax.Array
    slot: jax.Array
    layer_index: jax.Array | None
    fresh: bool = field(metadata={"static": True})

    def write(self, key: jax.Array, value: jax.Array) -> tuple[ContiguousCache, Keys]:
        """As `NoCache.write`, with what is in the cache already."""
        held: LayerCache = self.held.write(key, value, self.slot, self.layer_index)
        read = (key, value) if self.fresh else held.layer(self.layer_index)
        return replace(self, held=held), TokenKeys(*read, self.positions, own=self.fresh)

    def attend_latents(
        self,
        reader: LatentReader,
        query: jax.Array,
        query_positions: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
    ) -> tuple[jax.Array, ContiguousCache]:
        """As `NoCache.attend_latents`, over the cached ones too."""
        before: StateCache = self.held
        state = before.layer(self.layer_index)
        state = {
            "latent": self._written(state["latent"], latent),
            "rope_key": self._written(state["rope_key"], rope_key),
        }
        if self.fresh:
            mixed = reader.expanded(query, query_positions, latent, rope_key, self.positions)
        else:
            mixed = reader.absorbed(query, query_positions, state["latent"], state["rope_key"], self.positions)
        return mixed, replace(self, held=before.write(state, self.layer_index))

    def recur(self, mixer: Mixer, x: jax.Array, step: Step) -> tuple[jax.Array, ContiguousCache]:
        """The recurrent mixer of x [batch, seq, hidden] from the states after earlier tokens."""
        before: StateCache = self.held
        mixed, state = mixer(x, step, before.layer(self.layer_index))
        return mixed, replace(self, held=before.write(state, self.layer_index))

    def _written(self, cache: jax.Array, new: jax.Array) -> jax.Array:
        """cache [batch, slots, features] with new [batch, seq, features] from `slot` on."""
        zero = jnp.zeros((), self.slot.dtype)
        return jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype), (zero, self.slot, zero))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """A layer's pages, or its states by request slot, for one row that holds tokens of many sequences.

    held: `PagedKV` of attention, `StateCache` of another mixer, None for a layer that reads another's pages.
    batch: which tokens belong to which sequence, and where each sequence's pages and states are.
    """

    held: Any
    batch: RaggedBatch

    def write(self, key: jax.Array, value: jax.Array) -> tuple[PagedCache, Keys]:
        """As `NoCache.write`, for key [1, kv_heads, tokens, head_dim] and value [1, kv_heads, tokens, value_dim]."""
        pages = write(self.held, key[0].swapaxes(0, 1), value[0].swapaxes(0, 1), self.batch)
        return replace(self, held=pages), PagedKeys(pages, self.batch)

    def attend_latents(
        self,
        reader: LatentReader,
        query: jax.Array,
        query_positions: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
    ) -> tuple[jax.Array, PagedCache]:
        """As `NoCache.attend_latents`, over pages with one key head that holds latent and rotated key, and whose first
        features are the value."""
        pages = write(self.held, jnp.concatenate([latent, rope_key], axis=-1)[0][:, None], None, self.batch)
        return reader.over_pages(query, pages, self.batch), replace(self, held=pages)

    def recur(self, mixer: Mixer, x: jax.Array, step: Step) -> tuple[jax.Array, PagedCache]:
        """The recurrent mixer of x [1, tokens, hidden], each sequence from its own state."""
        states: Mapping[str, jax.Array] = self.held.arrays
        mixed, after = on_rows(mixer, x, step, states, self.batch)
        return mixed, replace(self, held=StateCache(after))


StepCache = NoCache | ContiguousCache | PagedCache
