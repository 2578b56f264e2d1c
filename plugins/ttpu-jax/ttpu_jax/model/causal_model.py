"""A causal language model as pure functions of its parameters. `causal_model` takes an architecture and a runtime and
returns a `DecoderModel`, which implements `ttpu_core.backend.CausalModel`. Generation, the serving engine, the
ahead-of-time compiler and the trainer all use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.sharding.training_state import Recomputation
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MLPSpec, MoESpec, Parameter
from ttpu_core.spec.arithmetic import REWOUND
from ttpu_core.spec.parameters import LAYERS, stacked_parameters, stacked_paths
from ttpu_jax.compiler_flags import program_options
from ttpu_jax.model.cache import KVCache, empty_cache
from ttpu_jax.model.decoder import Caches, Decoder, head_logits
from ttpu_jax.model.modules import Runtime
from ttpu_jax.model.paged import PagedLayout, empty_caches
from ttpu_jax.model.pipeline import pipelined
from ttpu_jax.ops.attention.api import REFERENCE
from ttpu_jax.ops.paged_attention import RaggedBatch
from ttpu_jax.optimizations import Optimization
from ttpu_jax.params.quantized import shardings_of
from ttpu_jax.platform import multiplies_bfloat16_tiles

Params = Mapping[str, Any]
"""Flax path → kernel or other array."""


@dataclass(frozen=True)
class DecoderModel:
    """The shared decoder for one architecture on one placement.

    Attributes:
        spec: the architecture, padded for the mesh.
        runtime: the placement of arrays and the attention implementation.
        stacked: stack equal layers and scan over them instead of unrolling them.
        remat: what the backward pass computes again.
        slices: parameters are given stacked, but layers are unrolled: each reads its own part of the stacks.
        microbatches: that `hidden` divides a batch into, where the mesh divides the layers into stages; None runs all
            layers on all rows.
    """

    spec: ArchitectureSpec
    runtime: Runtime
    stacked: bool = False
    remat: Recomputation = "none"
    slices: bool = False
    microbatches: int | None = None

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The shape, logical axes and initialization of each parameter, by Flax path."""
        return stacked_parameters(self.spec) if self.stacked or self.slices else self.spec.parameters

    @property
    def takes_masters(self) -> bool:
        """Whether parameters of layers, and the table of tokens, may be `ttpu_jax.ops.masters.Master`s."""
        return self.microbatches is None and not self.slices

    @cached_property
    def placements(self) -> Mapping[str, Any]:
        """The sharding of each parameter, by Flax path; of a quantized kernel, a kernel of its parts' shardings.

        Raises:
            UnsupportedError: the mesh does not divide a parameter.
        """
        placement = self.runtime.placement
        return {path: shardings_of(placement, path, parameter) for path, parameter in self.parameters.items()}

    def empty_cache(
        self, batch: int, slots: int, dtype: np.dtype[Any], *, rewound: int = REWOUND, abstract: bool = False
    ) -> KVCache:
        """Make a contiguous cache of zeros.

        Args:
            batch: number of rows.
            slots: number of tokens that each row can hold.
            dtype: of keys and values, and of states whose spec names no dtype.
            rewound: newest tokens that can be taken back.
            abstract: return `jax.ShapeDtypeStruct`s instead of arrays.
        """
        spec, placement, stacked = self.spec, self.runtime.placement, self.stacked
        if Optimization.WINDOW_CACHE in self.runtime.without:
            rewound = slots
        return empty_cache(spec, batch, slots, placement, dtype, rewound=rewound, stacked=stacked, abstract=abstract)

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
        """Make the paged caches of zeros that `ragged_forward` reads and updates.

        Args:
            layout: the page group of each layer.
            num_pages: number of pages of each group, the null page included.
            max_num_seqs: the most sequences that have a recurrent state at once.
            page_size: tokens per page.
            dtype: of keys and values.
            state_dtype: of recurrent states whose spec names no dtype.
            abstract: return `jax.ShapeDtypeStruct`s instead of arrays.
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
        """Return the next-token logits, float32 [batch, seq, vocab], and the cache with these tokens in it.

        Args:
            params: Flax path → array.
            tokens: [batch, seq].
            positions: [batch, seq], negative for padding; None with a cache, which determines the positions.
            cache: keys and values of earlier tokens; None to run without a cache.
            last_only: return the logits of the last token only, [batch, 1, vocab].
            fresh: the cache is empty, so attention reads the keys and values of these tokens instead of the cache.

        Raises:
            RequestError: neither positions nor a cache is given.
        """
        return self.module(params)(tokens, positions, cache, last_only=last_only, fresh=fresh)

    def hidden(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Return the residual stream [batch, seq, hidden] after the final norm, without a cache.

        Args:
            params: Flax path → array.
            tokens: [batch, seq].
            positions: [batch, seq], from 0 in each sequence; negative for padding.
            segments: int32 [batch, seq], the sequence of each token in its row, from 1; 0 for padding. Tokens attend to
                their own sequence alone. None: each row holds one.

        Raises:
            UnsupportedError: segments for a model whose recurrent mixers do not reset their states.
        """
        if self.microbatches is not None:
            return pipelined(self, params, tokens, positions, segments)[0]
        return self.module(params).packed(tokens, positions, segments)[0]

    def hidden_and_loads(
        self, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return `hidden`, and the loads of experts, float32 [layers, 2, experts]: the sums over the tokens of each
        layer of `ttpu_jax.model.moe.ExpertLoads`; None for a model without experts.

        Args:
            params: Flax path → array.
            tokens: [batch, seq].
            positions: [batch, seq], from 0 in each sequence; negative for padding.
            segments: [batch, seq], as for `hidden`.

        Raises:
            UnsupportedError: as `hidden`.
        """
        if self.microbatches is not None:
            return pipelined(self, params, tokens, positions, segments, routing=True)
        return self.module(params).packed(tokens, positions, segments, routing=True)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Return float32 logits [batch, seq, vocab] for `hidden` [batch, seq, hidden], the residual stream after the
        final norm."""
        return self.module(params).logits(hidden)

    @property
    def head_paths(self) -> tuple[str, ...]:
        """The paths of the parameters that `logits` reads; the first is the kernel's."""
        own = [path for path in ("head.kernel", "head.bias") if path in self.parameters]
        return tuple(own) if "head.kernel" in own else ("embed.embedding", *own)

    def head_logits(self, ends: Params, hidden: jax.Array) -> jax.Array:
        """Return `logits` [batch, seq, vocab] for `hidden` [batch, seq, hidden], of the parameters at `head_paths`
        alone, whose vocabulary may have more padding."""
        table = {path: self.parameters[path] for path in self.head_paths}
        return head_logits(self.spec, ends, table, self.runtime, hidden)

    def ragged_forward(
        self, params: Params, tokens: jax.Array, batch: RaggedBatch, caches: Caches
    ) -> tuple[jax.Array, Caches]:
        """Run one step of many sequences of different lengths over paged caches.

        Args:
            params: Flax path → array.
            tokens: [tokens], the tokens of all sequences one after another, then padding.
            batch: the sequence of each token, and the page table of each sequence.
            caches: made by `empty_paged_cache`; they hold the keys and values of earlier tokens.

        Returns:
            The residual stream after the final norm [tokens, hidden], and the caches with these tokens in them.

        Raises:
            UnsupportedError: the model stacks its layers.
        """
        return self.module(params).ragged(tokens, batch, caches)

    def module(self, params: Params) -> Decoder:
        """Build the decoder as a Flax NNX module over these parameters."""
        if not self.slices:
            return Decoder(self.spec, params, self.parameters, self.runtime, stacked=self.stacked, remat=self.remat)
        copies = dict(stacked_paths(self.spec, self.spec.parameters))
        layers = {
            name: jax.tree.map(lambda array, place=place: array[place], params[path])
            for path, names in copies.items()
            for place, name in enumerate(names)
        }
        others = {path: value for path, value in params.items() if path not in copies}
        return Decoder(self.spec, {**others, **layers}, self.spec.parameters, self.runtime, remat=self.remat)


def causal_model(
    spec: ArchitectureSpec,
    runtime: Runtime,
    *,
    stacked: bool = False,
    remat: Recomputation = "none",
    slices: bool = False,
) -> DecoderModel:
    """Make the model of an architecture. No other function makes a decoder.

    Args:
        spec: the architecture, padded for the runtime's mesh by `ttpu_jax.params.padding.pad_for`.
        runtime: the placement of arrays and the attention implementation.
        stacked: stack equal layers and scan over them instead of unrolling them.
        remat: what the backward pass computes again.
        slices: unrolled layers read their own parts of stacked parameters.
    """
    if runtime.placement.platform == "tpu" and _rounds_all_inputs(spec):
        runtime = replace(runtime, cuts_stream=True)
    if runtime.stream != "whole" and not _has_plain_layers(spec):
        runtime = replace(runtime, stream="whole")
    return DecoderModel(spec, runtime, stacked, remat, slices)


def _rounds_all_inputs(spec: ArchitectureSpec) -> bool:
    """Whether all layers are softmax attention and a dense MLP whose products round their inputs, with one scale per
    output channel."""
    plain = all(
        isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, MLPSpec) and not layer.block.custom
        for layer in spec.layers
    )
    forms = [form for path, form in spec.kernel_formats if path.startswith(LAYERS)]
    return plain and bool(forms) and all(form.activation is not None and form.group_size is None for form in forms)


def cache_dtype(spec: ArchitectureSpec, runtime: Runtime, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a contiguous cache: the model's, but float32 on a CPU, where XLA would convert the cache at every
    step. bfloat16 stays where the processor has AMX, the reference computes attention, all layers are plain, and writes
    can be in place."""
    if runtime.placement.platform != "cpu":
        return dtype
    kept = (
        dtype == np.dtype(jnp.bfloat16)
        and multiplies_bfloat16_tiles()
        and runtime.attention == REFERENCE.name
        and _has_plain_layers(spec)
        and Optimization.BFLOAT16_CACHE not in runtime.without
        and bool(program_options("cpu", writes_bfloat16=True))
    )
    return dtype if kept else np.dtype(np.float32)


def _has_plain_layers(spec: ArchitectureSpec) -> bool:
    """Whether all layers are softmax attention and a dense MLP or experts, if any, with kernels that are not
    quantized."""
    return not spec.kernel_formats and all(
        isinstance(layer.mixer, AttentionSpec)
        and isinstance(layer.mlp, MLPSpec | MoESpec | None)
        and layer.block.beside is None
        and layer.block.custom is None
        for layer in spec.layers
    )
