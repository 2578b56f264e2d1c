"""A language model as pure functions of its parameters, made in one place. `causal_model` takes an architecture and a
runtime; what it returns fits `ttpu_core.backend.CausalModel` and serves generation, engine, compiler and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ttpu_core.spec import ArchitectureSpec, Parameter
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_jax.model.cache import KVCache, empty_cache
from ttpu_jax.model.decoder import Caches, Decoder
from ttpu_jax.model.modules import Runtime
from ttpu_jax.model.paged import PagedLayout, empty_caches
from ttpu_jax.ops.paged_attention import RaggedBatch

Params = Mapping[str, Any]
"""Flax path → kernel or other array."""


@dataclass(frozen=True)
class DecoderModel:
    """The shared decoder of one architecture on one placement.

    Attributes:
        spec: the architecture, padded as the mesh needs it.
        runtime: where arrays live and which attention runs.
        stacked: equal layers are stacked and scanned over instead of unrolled.
        remat: a layer's activations are computed again for its gradient instead of being kept.
    """

    spec: ArchitectureSpec
    runtime: Runtime
    stacked: bool = False
    remat: bool = False

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Flax path → shape, logical axes and initialization of each parameter."""
        return stacked_parameters(self.spec) if self.stacked else self.spec.parameters

    @cached_property
    def placements(self) -> Mapping[str, Sharding]:
        """Flax path → sharding of each parameter.

        Raises:
            UnsupportedError: a parameter that the mesh does not divide.
        """
        placement = self.runtime.placement
        return {path: placement.parameter(path, parameter) for path, parameter in self.parameters.items()}

    def empty_cache(self, batch: int, slots: int, dtype: np.dtype[Any], *, abstract: bool = False) -> KVCache:
        """A contiguous cache of zeros for `batch` rows of `slots` tokens, or only its shapes."""
        return empty_cache(
            self.spec, batch, slots, self.runtime.placement, dtype, stacked=self.stacked, abstract=abstract
        )

    def empty_paged_cache(
        self,
        layout: PagedLayout,
        num_pages: tuple[int, ...],
        max_num_seqs: int,
        page_size: int,
        dtype: np.dtype[Any],
        state_dtype: np.dtype[Any],
        *,
        abstract: bool = False,
    ) -> Caches:
        """The caches that `ragged_forward` reads and writes, zeros or only their shapes.

        Args:
            layout: which page group each layer belongs to.
            num_pages: pages of each group, with the null page.
            max_num_seqs: sequences that have a recurrent state at once.
            page_size: tokens per page.
            dtype: of keys and values.
            state_dtype: of recurrent states whose spec names none.
            abstract: only shapes, dtypes and shardings.
        """
        return empty_caches(
            self.spec,
            layout,
            num_pages,
            max_num_seqs,
            page_size,
            self.runtime.placement,
            dtype,
            state_dtype,
            abstract=abstract,
        )

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
        *,
        last_only: bool = False,
        fresh: bool = False,
    ) -> tuple[jax.Array, KVCache | None]:
        """Logits float32 [batch, seq, vocab] of the next token, and the cache with these tokens in it.

        Args:
            params: Flax path → array.
            tokens: [batch, seq].
            positions: [batch, seq], negative for padding; None where there is a cache, which knows them.
            cache: where earlier keys and values are, and where these go.
            last_only: logits of the last token only, [batch, 1, vocab].
            fresh: the cache is empty, so that attention reads these tokens' own keys and values instead of it.
        """
        return self.module(params)(tokens, positions, cache, last_only=last_only, fresh=fresh)

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
        *,
        last_only: bool = False,
        fresh: bool = False,
    ) -> tuple[jax.Array, KVCache | None]:
        """The residual stream [batch, seq, hidden] after the final norm, and the cache. Arguments as of `forward`."""
        return self.module(params).hidden(tokens, positions, cache, last_only=last_only, fresh=fresh)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 logits [batch, seq, vocab] of a residual stream [batch, seq, hidden] after the final norm."""
        return self.module(params).logits(hidden)

    def ragged_forward(
        self, params: Params, tokens: jax.Array, batch: RaggedBatch, caches: Caches
    ) -> tuple[jax.Array, Caches]:
        """One step of many sequences of different lengths over paged caches.

        Args:
            params: Flax path → array.
            tokens: [tokens] of all sequences, one after another, then padding.
            batch: which tokens belong to which sequence, and where each sequence's pages are.
            caches: of `empty_paged_cache`, with earlier tokens in them.

        Returns:
            The residual stream after the final norm [tokens, hidden], and the caches with these tokens in them.
        """
        return self.module(params).ragged(tokens, batch, caches)

    def module(self, params: Params) -> Decoder:
        """The decoder as a Flax NNX module over these parameters."""
        return Decoder(self.spec, params, self.parameters, self.runtime, stacked=self.stacked, remat=self.remat)


def causal_model(
    spec: ArchitectureSpec,
    runtime: Runtime,
    *,
    stacked: bool = False,
    remat: bool = False,
) -> DecoderModel:
    """The model of an architecture: the one place where a decoder is made.

    Args:
        spec: as `ttpu_jax.params.padding.pad_for` gives it for the runtime's mesh.
        runtime: where arrays live and which attention runs.
        stacked: equal layers are stacked and scanned over instead of unrolled.
        remat: a layer's activations are computed again for its gradient instead of being kept.
    """
    return DecoderModel(spec, runtime, stacked, remat)
