"""Predicts for the planner what an engine compiles and keeps on a TPU: step sizes, pages and sampling state. It
computes formulas only, without a device and without tracing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from ttpu_core.sharding.serving import ServedShapes, ServingLimits, StepSize
from ttpu_core.sharding.strategy import Strategy
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, axes
from ttpu_core.spec.arithmetic import BITS, CACHE_DTYPES
from ttpu_core.spec.latent_attention import LatentAttentionSpec, latent_pages
from ttpu_jax.model.paged import PagedLayout, group_page_bytes, paged_layout, state_bytes
from ttpu_jax.ops.paged_attention import serves, serves_own
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.placement import Placement
from ttpu_jax.runner.buckets import StepShape, buckets_for
from ttpu_jax.runner.build import RECURRENT_PREFILLS
from ttpu_jax.runner.memory import Demand

PENALTY_BYTES = BITS["bool"] // 8 + BITS["int32"] // 8
"""Of each token of the vocabulary and sequence: whether the prompt has it, and how often it was generated."""


@dataclass(frozen=True)
class _PlannedPlacement(Placement):
    """A placement on TPUs that need not be there; its mesh is abstract."""

    @property
    def platform(self) -> str:
        """Always tpu."""
        return "tpu"


def served_shapes(
    spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy, limits: ServingLimits, dtype: str
) -> ServedShapes:
    """Return the sizes of the steps that an engine compiles on TPUs, and the bytes of its cache and state.

    Args:
        spec: the architecture, padded for the mesh.
        mesh: mesh axis → devices along it, of one replica.
        strategy: the mesh axes that shard each logical axis.
        limits: of the engine.
        dtype: of weights, activations, and a cache that is not quantized.

    Raises:
        UnsupportedError: an engine cannot serve the model.
    """
    layout = _layout(spec, limits.max_model_len)
    buckets = buckets_for(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_prefills=RECURRENT_PREFILLS if layout.recurrent else None,
    )
    # Without an axis jax would look for this machine's devices.
    sizes = {axis: size for axis, size in mesh.items() if size > 1} or {"tensor": 1}
    abstract = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    placement = _PlannedPlacement(abstract, strategy)  # type: ignore[arg-type]
    held = model_dtype(dtype, platform="tpu")
    kept = held if limits.kv_cache is None else np.dtype(CACHE_DTYPES[limits.kv_cache])
    pages = group_page_bytes(spec, layout, limits.page_size, placement, kept)
    demand = Demand(
        tuple(group.window or group.chunk for group in layout.groups),
        limits.page_size,
        limits.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
    )
    counts = demand.counts(limits.max_num_seqs, demand.whole * limits.max_num_seqs)
    cache = sum((count + 1) * size for count, size in zip(counts, pages, strict=True))  # and the null page
    rows = spec.embedding.rows
    columns = rows // prod(mesh.get(axis, 1) for axis in placement.mesh_axes(axes.VOCAB, rows))
    return ServedShapes(
        decode=step_size(buckets.step(limits.max_num_seqs, limits.max_num_seqs, 1)),
        mixed=step_size(buckets.all()[0]),
        cache_bytes=cache + state_bytes(spec, limits.max_num_seqs, placement, held),
        state_bytes=(limits.max_num_seqs + 1) * (columns * PENALTY_BYTES + BITS["int32"] // 8),
    )


def served_kernels(spec: ArchitectureSpec, dtype: str = "bfloat16") -> dict[str, str]:
    """Return the implementation of each kind of attention layer in an engine's steps on a TPU, and why: with pages in
    `dtype`, and with pages in int8 and float8."""
    table: dict[str, str] = {}
    held = model_dtype(dtype, platform="tpu")

    def served(attention: AttentionSpec, kept: np.dtype[Any], in_key: bool) -> str:
        if serves_own(attention, "tpu", kept, value_in_key=in_key) is None:
            return "paged_decode_attention for decode steps, paged_prompt_attention for others: the default on a TPU"
        why = serves(attention, "tpu", kept, value_in_key=in_key)
        return "ragged_paged_attention: the default on a TPU" if why is None else f"paged eager attention: {why}"

    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec):
            attention, in_key = mixer, False
        elif isinstance(mixer, LatentAttentionSpec):
            attention, in_key = latent_pages(mixer), True
        else:
            continue
        kind, words = mixer.kind, served(attention, held, in_key)
        others: dict[str, list[str]] = {}
        for name, kept in (("int8", np.dtype(np.int8)), ("float8", np.dtype(jnp.float8_e4m3fn))):
            others.setdefault(served(attention, kept, in_key), []).append(name)
        words += "".join(f"; of {' and '.join(names)} pages {how}" for how, names in others.items() if how != words)
        if words not in table.get(kind, ""):
            table[kind] = f"{table[kind]}, or {words}" if kind in table else words
    return table


@lru_cache(maxsize=64)
def _layout(spec: ArchitectureSpec, max_model_len: int) -> PagedLayout:
    return paged_layout(spec, max_model_len)


def step_size(shape: StepShape) -> StepSize:
    """Convert a compiled shape to a plan's type."""
    return StepSize(shape.tokens, shape.sequences, shape.rows)
