"""A layer's cache during one step. It writes the step's keys and values, or its recurrent states, and returns the keys
and values that queries attend to. `NoCache`, `ContiguousCache` and `PagedCache` have the same methods, so that mixers
need not know which one they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import AttentionSpec, axes
from ttpu_jax.model.cache import LayerCache, StateCache, slots_of_ring, write_slots
from ttpu_jax.model.modules import Runtime, Step
from ttpu_jax.model.ragged import on_rows
from ttpu_jax.ops import attention as attention_ops
from ttpu_jax.ops.attention.api import REFERENCE
from ttpu_jax.ops.paged_attention import PagedKV, RaggedBatch, paged_attention, write, write_pairs
from ttpu_jax.ops.parts import Part, part
from ttpu_jax.optimizations import Optimization
from ttpu_jax.params.placement import Placement

Mixer = Callable[[jax.Array, Step, Any], tuple[jax.Array, Any]]
"""A recurrent mixer, see `ttpu_jax.model.custom`."""


# What queries attend to


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenKeys:
    """Keys and values that queries attend to.

    Attributes:
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, value_dim].
        positions: [batch, keys].
        own: the keys are those of the step's own tokens, not of the slots of a cache.
        segments: [batch, keys], the sequence of each key where a row holds several; None where each row holds one.
        of_stack: they are a layer's part of the keys of stacked layers.
    """

    key: jax.Array
    value: jax.Array
    positions: jax.Array
    own: bool = field(metadata={"static": True})
    segments: jax.Array | None = None
    of_stack: bool = field(default=False, metadata={"static": True})

    @part(Part.ATTENTION)
    def attend(
        self,
        query: jax.Array,
        query_positions: jax.Array,
        spec: AttentionSpec,
        runtime: Runtime,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attend to these keys and values.

        Args:
            query: [batch, seq, kv_heads, q_per_kv, head_dim].
            query_positions: [batch, seq].
            spec: the attention of the layer.
            runtime: the placement of arrays and the attention implementation.
            sinks: [kv_heads, q_per_kv], a logit per query head that takes probability and adds
                no value; None for models without sinks.

        Returns:
            [batch, seq, kv_heads, q_per_kv, value_dim].
        """
        segments = self.segments
        return attention_ops.attend(
            runtime.attention,
            query,
            self.key,
            self.value,
            query_positions,
            self.positions,
            spec,
            sinks=sinks,
            segment_ids=None if segments is None else (segments[:, -query.shape[1] :], segments),
            context=self.context(query.shape[1], spec, runtime),
        )

    def context(self, queries: int, spec: AttentionSpec, runtime: Runtime) -> attention_ops.AttentionContext:
        """The devices and the platform of attention to these keys, of so many queries of each row."""
        placement = runtime.placement
        sequence = queries if self.own else self.key.shape[2]  # whichever may be sharded
        return attention_ops.AttentionContext(
            mesh=placement.mesh,
            batch_axes=placement.mesh_axes(axes.BATCH, self.key.shape[0]),
            head_axes=placement.mesh_axes(axes.KV_HEADS, spec.num_kv_heads),
            sequence_axes=placement.mesh_axes(axes.SEQUENCE, sequence),
            platform=placement.platform,
            own_keys=self.own,
            of_stack=self.of_stack,
            options=runtime.attention_options,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKeys:
    """The keys and values of many sequences in pages, this step's tokens included."""

    pages: PagedKV
    batch: RaggedBatch

    @part(Part.ATTENTION)
    def attend(
        self,
        query: jax.Array,
        query_positions: jax.Array,
        spec: AttentionSpec,
        runtime: Runtime,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attend to these pages.

        Args:
            query: [1, tokens, kv_heads, q_per_kv, head_dim], the tokens of all sequences one after another.
            query_positions: [1, tokens]; not read, because the batch has the positions.
            spec: the attention of the layer.
            runtime: the placement of arrays, and the attention implementation: `eager` leaves out our kernels
                for combined pages.
            sinks: [kv_heads, q_per_kv], a logit per query head that takes probability and adds
                no value; None for models without sinks.

        Returns:
            [1, tokens, kv_heads, q_per_kv, value_dim].
        """
        context = _pages_context(runtime.placement, spec.num_kv_heads)
        own = runtime.attention != REFERENCE.name
        mixed = paged_attention(query[0], self.pages, self.batch, spec, sinks=sinks, context=context, own=own)
        return mixed[None]


def _pages_context(placement: Placement, kv_heads: int) -> attention_ops.AttentionContext:
    return attention_ops.AttentionContext(
        mesh=placement.mesh,
        head_axes=placement.mesh_axes(axes.KV_HEADS, kv_heads),
        platform=placement.platform,
        own_keys=False,
    )


Keys = TokenKeys | PagedKeys


class LatentQueries(NamedTuple):
    """Queries of latent attention: `values` [batch, queries, heads, qk_nope_head_dim + qk_rope_head_dim] at `positions`
    [batch, queries]. Of many sequences in pages, the tokens are one row, [1, tokens, ...]."""

    values: jax.Array
    positions: jax.Array


class Latents(NamedTuple):
    """The latents of tokens: `latent` [batch, keys, kv_lora_rank] and `rope_key` [batch, keys, qk_rope_head_dim]."""

    latent: jax.Array
    rope_key: jax.Array

    def written(self, new: Latents, slot: jax.Array) -> Latents:
        """Those of a cache [batch, slots, ...] with new ones [batch, seq, ...] from `slot` on, an int32 scalar."""
        return Latents(*(write_slots(kept, one, slot) for kept, one in zip(self, new, strict=True)))


class LatentReader(Protocol):
    """The forms of latent attention. Each cache calls the form that suits its contents. The result of all of them is
    [batch, queries, heads, v_head_dim]."""

    def expanded(
        self, queries: LatentQueries, latents: Latents, key_positions: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Expand the step's own latents to keys and values of each head and attend to them; key_positions and segments
        [batch, keys], result [batch, queries, heads, v_head_dim]."""
        ...

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
        ...

    def over_pages(self, queries: LatentQueries, pages: PagedKV, batch: RaggedBatch) -> jax.Array:
        """Attend to latents and rotated keys in a layer's pages, which hold this step's tokens too; result
        [1, tokens, heads, v_head_dim]."""
        ...


# Caches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoCache:
    """Keeps nothing between steps: the tokens at `positions` [batch, seq] attend to each other, to those of the same
    of `segments` [batch, seq] if these are given, and states start from zeros."""

    positions: jax.Array
    held: None = None
    segments: jax.Array | None = None

    def write(self, key: jax.Array, value: jax.Array) -> tuple[NoCache, Keys]:
        """Return the step's own key [batch, kv_heads, seq, head_dim] and value [batch, kv_heads, seq, value_dim] for
        queries to attend to."""
        return self, TokenKeys(key, value, self.positions, own=True, segments=self.segments)

    @part(Part.ATTENTION)
    def attend_latents(
        self, reader: LatentReader, queries: LatentQueries, latents: Latents
    ) -> tuple[jax.Array, NoCache]:
        """Attend to the step's own latents; the result is [batch, queries, heads, v_head_dim], and this cache."""
        packed = {} if self.segments is None else {"segments": self.segments}
        return reader.expanded(queries, latents, self.positions, **packed), self

    def recur(self, mixer: Mixer, x: jax.Array, step: Step) -> tuple[jax.Array, NoCache]:
        """Run a recurrent mixer on x [batch, seq, hidden] from zero states; the output has the same shape.

        Raises:
            UnsupportedError: a row holds several sequences, between which the mixer does not reset its state.
        """
        if step.segments is not None and not getattr(mixer, "resets_state", False):
            raise UnsupportedError(
                f"rows of several sequences were given to a model whose {type(mixer).__name__} layers carry a state "
                "from each token to the next, but they do not reset it where a sequence begins: train with "
                "packing=False, or set `resets_state = True` on a mixer that reads `step.starts`."
            )
        return mixer(x, step, None)[0], self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContiguousCache:
    """One layer's part of a `KVCache`, whose rows all advance by the same number of tokens.

    Attributes:
        held: a `LayerCache` for attention, a `StateCache` for another mixer, None for a layer that reads another
            layer's keys.
        positions: [batch, slots] of all slots; [batch, seq] of the step's tokens where the cache is `fresh`.
        slot: int32 scalar, the slot of the step's first token.
        layer_index: scalar, the index among stacked layers; None where layers are not stacked.
        slots: number of slots of each row. A layer that has fewer is a ring of the newest tokens.
        fresh: the cache is empty, so that queries attend to the step's own tokens only.
    """

    held: Any
    positions: jax.Array
    slot: jax.Array
    layer_index: jax.Array | None
    slots: int = field(metadata={"static": True})
    fresh: bool = field(metadata={"static": True})

    @part(Part.CACHE)
    def write(self, key: jax.Array, value: jax.Array) -> tuple[ContiguousCache, Keys]:
        """Write the step's keys and values, and return the updated cache and the keys and values that queries attend
        to.

        Args:
            key: [batch, kv_heads, seq, head_dim].
            value: [batch, kv_heads, seq, value_dim].
        """
        before: LayerCache = self.held
        if before.slots < self.slots:
            held = before.write_ring(key, value, self.slot, self.layer_index, fresh=self.fresh)
        else:
            held = before.write(key, value, self.slot, self.layer_index)
        if self.fresh:
            return replace(self, held=held), TokenKeys(key, value, self.positions, own=True)
        if before.slots < self.slots:
            return replace(self, held=held), self._in_ring(before, held, key, value)
        return replace(self, held=held), self._read(held, self.positions)

    def is_written_while_read(self, tokens: int, spec: AttentionSpec, runtime: Runtime) -> bool:
        """Whether `write_and_attend` serves a step of so many tokens of each row."""
        if self.held is None or self.fresh or Optimization.CACHE_WRITE in runtime.without:
            return False
        keys = self._read(self.held, self.positions)
        context = keys.context(tokens, spec, runtime)
        item = keys.key.dtype.itemsize
        return attention_ops.writes_cache(runtime.attention, spec, context, tokens, self.held.slots, item)

    @part(Part.ATTENTION)
    def write_and_attend(
        self,
        query: jax.Array,
        query_positions: jax.Array,
        pairs: jax.Array,
        spec: AttentionSpec,
        runtime: Runtime,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, ContiguousCache, Keys]:
        """Write the step's keys and values, and attend to all of them, as `write` and the keys' `attend` do, in one
        kernel.

        Args:
            query: [batch, 1, kv_heads, q_per_kv, head_dim].
            query_positions: [batch, 1].
            pairs: [batch, 1, kv_heads, 2, width] of a key and a value, of which the narrower is padded at its end.
            spec: the attention of the layer.
            runtime: the placement of arrays.
            sinks: [kv_heads, q_per_kv], see `TokenKeys.attend`.

        Returns:
            [batch, 1, kv_heads, q_per_kv, value_dim]; the updated cache; its keys and values.
        """
        before: LayerCache = self.held
        keys, slot = self._read(before, self._positions_after(before, 1)), self.slot % before.slots
        mixed, *written = attention_ops.write_and_attend(
            query,
            before.key,
            before.value,
            pairs,
            slot,
            query_positions,
            keys.positions,
            spec,
            sinks=sinks,
            context=keys.context(1, spec, runtime),
        )
        held = LayerCache(*written)
        return mixed, replace(self, held=held), self._read(held, keys.positions)

    def _positions_after(self, held: LayerCache, seq: int) -> jax.Array:
        """Positions [batch, slots] of what each slot of a layer holds after `seq` tokens more."""
        if held.slots == self.slots:
            return self.positions
        return self.positions[:, :1] + slots_of_ring(held.slots, self.slot + seq)[None]

    def _read(self, held: LayerCache, positions: jax.Array) -> TokenKeys:
        """All keys and values of the layer, at positions [batch, slots]."""
        return TokenKeys(*held.layer(self.layer_index), positions, own=False, of_stack=self.layer_index is not None)

    def _in_ring(self, before: LayerCache, held: LayerCache, key: jax.Array, value: jax.Array) -> TokenKeys:
        """The keys and values of a ring, before and after the step's own, key and value [batch, kv_heads, seq, dim],
        were written."""
        first, seq = self.positions[:, :1], key.shape[-2]  # the first slot's
        if seq == 1:
            return self._read(held, self._positions_after(held, 1))
        # The last of several tokens are written over what the first of them still see.
        slots = jnp.concatenate([slots_of_ring(held.slots, self.slot), self.slot + jnp.arange(seq)])
        keys, values = (
            jnp.concatenate([kept, new.astype(kept.dtype)], axis=-2)
            for kept, new in zip(before.layer(self.layer_index), (key, value), strict=True)
        )
        return TokenKeys(keys, values, first + slots[None], own=False)

    @part(Part.ATTENTION)
    def attend_latents(
        self, reader: LatentReader, queries: LatentQueries, latents: Latents
    ) -> tuple[jax.Array, ContiguousCache]:
        """Write the step's latents, and attend to them and to the cached ones; the result is [batch, queries, heads,
        v_head_dim], and the updated cache."""
        before: StateCache = self.held
        state = before.layer(self.layer_index)
        cached = Latents(*(state[name] for name in Latents._fields))
        if self.fresh:
            mixed, written = reader.expanded(queries, latents, self.positions), cached.written(latents, self.slot)
        else:
            of_stack = self.layer_index is not None
            mixed, written = reader.absorbed(
                queries, cached, latents, self.slot, self.positions, of_stack=of_stack
            )
        return mixed, replace(self, held=before.write(written._asdict(), self.layer_index))

    def recur(self, mixer: Mixer, x: jax.Array, step: Step) -> tuple[jax.Array, ContiguousCache]:
        """Run a recurrent mixer on x [batch, seq, hidden] from the cached states, and store the new states."""
        before: StateCache = self.held
        mixed, state = mixer(x, step, before.layer(self.layer_index))
        return mixed, replace(self, held=before.write(state, self.layer_index))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """One layer's pages or recurrent states, for a flat batch [1, tokens] with the tokens of many sequences.

    Attributes:
        held: a `PagedKV` for attention, a `StateCache` for another mixer, None for a layer that reads another layer's
            pages.
        batch: the sequence of each token, and the page table and state slot of each sequence.
        placement: of the pages.
        kernels: whether kernels write combined pages that are not quantized, else XLA's scatter. Split pages are always
            written by one.
        in_ring: the devices of a ring exchange the tokens' rows, and lay keys and values out with tokens within heads.
    """

    held: Any
    batch: RaggedBatch
    placement: Placement = field(metadata={"static": True})
    kernels: bool = field(default=True, metadata={"static": True})
    in_ring: bool = field(default=False, metadata={"static": True})

    @part(Part.CACHE)
    def write(self, key: jax.Array, value: jax.Array) -> tuple[PagedCache, Keys]:
        """Write key [1, kv_heads, tokens, head_dim] and value [1, kv_heads, tokens, value_dim] to the pages, and return
        the updated cache and the pages for queries to attend to."""
        context = _pages_context(self.placement, key.shape[1])
        rows = key[0].swapaxes(0, 1), value[0].swapaxes(0, 1)
        pages = write(
            self.held, *rows, self.batch, context=context, by_kernel=self.kernels, heads_outside=self.in_ring
        )
        return replace(self, held=pages), PagedKeys(pages, self.batch)

    @property
    def takes_pairs(self) -> bool:
        """Whether `write_pairs` writes a step's keys and values in fewer operations than `write`."""
        pages, by_kernel = self.held, self.kernels and self.placement.platform == "tpu"
        return by_kernel and isinstance(pages, PagedKV) and bool(pages.combined) and pages.scales is None

    @part(Part.CACHE)
    def write_pairs(self, pairs: jax.Array) -> tuple[PagedCache, Keys]:
        """`write` for pairs [1, tokens, kv_heads, 2, head_dim] of a key and a value, where this cache takes them."""
        context = _pages_context(self.placement, pairs.shape[2])
        pages = write_pairs(self.held, pairs[0], self.batch, context, heads_outside=self.in_ring)
        return replace(self, held=pages), PagedKeys(pages, self.batch)

    @part(Part.ATTENTION)
    def attend_latents(
        self, reader: LatentReader, queries: LatentQueries, latents: Latents
    ) -> tuple[jax.Array, PagedCache]:
        """Write the step's latents to the pages, and attend to the pages.

        The pages have one key head, which holds the latent and the rotated key; its first kv_lora_rank features are the
        value.

        Returns:
            [1, tokens, heads, v_head_dim], and the updated cache.
        """
        keys, context = jnp.concatenate(latents, axis=-1)[0][:, None], _pages_context(self.placement, 1)
        pages = write(self.held, keys, None, self.batch, context=context, by_kernel=self.kernels)
        return reader.over_pages(queries, pages, self.batch), replace(self, held=pages)

    def recur(self, mixer: Mixer, x: jax.Array, step: Step) -> tuple[jax.Array, PagedCache]:
        """Run a recurrent mixer on x [1, tokens, hidden], each sequence from its own state, and store the new states.
        """
        states: Mapping[str, jax.Array] = self.held.arrays
        mixed, after = on_rows(mixer, x, step, states, self.batch)
        return mixed, replace(self, held=StateCache(after))


StepCache = NoCache | ContiguousCache | PagedCache
