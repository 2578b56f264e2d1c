"""The caches of a serving engine. `paged_layout` assigns the layers of an architecture to page groups, and
`empty_caches` makes one cache per layer: pages for attention, one state per request slot for recurrent mixers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import NO_MIXER, ArchitectureSpec, AttentionSpec, LayerSpec, MixerSpec, StateSpec, axes
from ttpu_core.spec.latent_attention import LatentAttentionSpec, latent_pages
from ttpu_jax.model.cache import BothCaches, StateCache
from ttpu_jax.ops.paged_attention import PagedKV, empty_pages, page_bytes
from ttpu_jax.params.placement import Placement


@dataclass(frozen=True)
class GroupSpec:
    """Layers that keep the keys and values of the same tokens: all tokens, those in a window, or those in a chunk.
    `layers` are the layers of the group that have pages of their own."""

    name: str
    window: int | None
    chunk: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class PagedLayout:
    """The page group of each layer; None for layers without pages (recurrent ones, and those that read another
    layer's)."""

    groups: tuple[GroupSpec, ...]
    group_of: tuple[int | None, ...]
    recurrent: bool
    """Whether some layer carries a state that cannot be taken back to an earlier token."""


def paged_layout(spec: ArchitectureSpec, max_model_len: int) -> PagedLayout:
    """Assign the layers of an architecture to page groups. A window or chunk of at least `max_model_len` tokens counts
    as none.

    Raises:
        UnsupportedError: a mixer keeps something for every token that pages cannot hold, or attention is not causal.
    """
    found: dict[tuple[int | None, int | None], list[int]] = {}
    keys: list[tuple[int | None, int | None] | None] = []
    recurrent = False
    for index, layer in enumerate(spec.layers):
        mixer, key = layer.mixer, None
        recurrent = recurrent or layer.block.beside is not None
        if isinstance(mixer, AttentionSpec):
            if not mixer.causal:
                raise UnsupportedError(
                    f"serving this {spec.model_type!r} model was asked for, but its layer {index} also looks ahead, "
                    "which tokens that are made one by one do not allow: use it for embeddings with another tool."
                )
            if mixer.kv_from_layer is None:
                key = tuple(None if n is None or n >= max_model_len else n for n in (mixer.window, mixer.chunk))
        elif isinstance(mixer, LatentAttentionSpec):
            key = (None, None)
        elif mixer == NO_MIXER:
            pass
        elif any(axes.SEQUENCE in state.axes for state in mixer.state):
            raise UnsupportedError(
                f"serving this {spec.model_type!r} model was asked for, but the mixer {mixer.name!r} of layer {index} "
                "keeps something for every token that the engine has no pages for: use generate() without "
                "enable_paged_attention."
            )
        else:
            recurrent = True
        keys.append(key)  # type: ignore[arg-type]
        if key is not None:
            found.setdefault(key, []).append(index)  # type: ignore[arg-type]
    order = sorted(found, key=lambda key: (key[0] is not None, key[1] is not None, key[0] or 0, key[1] or 0))
    groups = tuple(GroupSpec(_name(*key), *key, tuple(found[key])) for key in order)
    return PagedLayout(groups, tuple(None if key is None else order.index(key) for key in keys), recurrent)


def empty_caches(
    spec: ArchitectureSpec,
    layout: PagedLayout,
    num_pages: tuple[int, ...],
    max_num_seqs: int,
    page_size: int,
    placement: Placement,
    dtype: np.dtype[Any],
    state_dtype: np.dtype[Any],
    *,
    abstract: bool = False,
) -> tuple[PagedKV | StateCache | BothCaches | None, ...]:
    """Make one cache of zeros per layer.

    Args:
        spec: the architecture, padded for the placement's mesh.
        layout: the page group of each layer.
        num_pages: number of pages of each group, the null page included.
        max_num_seqs: number of request slots for recurrent states.
        page_size: tokens per page.
        placement: the mesh, and the axes that shard each array.
        dtype: of keys and values.
        state_dtype: of recurrent states whose spec names no dtype.
        abstract: return `jax.ShapeDtypeStruct`s instead of arrays.
    """

    def layer(index: int, of: LayerSpec) -> PagedKV | StateCache | BothCaches | None:
        mixer = of.block.beside
        if mixer is None:
            return own(index, of)
        return BothCaches(own(index, of), states(mixer))

    def states(mixer: MixerSpec) -> StateCache:
        arrays = {state.name: _state(state, max_num_seqs, placement, state_dtype, abstract) for state in mixer.state}
        return StateCache(arrays)

    def own(index: int, of: LayerSpec) -> PagedKV | StateCache | None:
        group = layout.group_of[index]
        if group is not None:
            attention, in_key = _attention(of)
            return empty_pages(
                attention, num_pages[group], page_size, placement, dtype, group, value_in_key=in_key, abstract=abstract
            )
        if isinstance(of.mixer, AttentionSpec):
            return None
        return states(of.mixer)

    return tuple(layer(index, of) for index, of in enumerate(spec.layers))


def group_page_bytes(
    spec: ArchitectureSpec, layout: PagedLayout, page_size: int, placement: Placement, dtype: np.dtype[Any]
) -> tuple[int, ...]:
    """Return the bytes that one page of each group takes on one device, summed over the layers of the group.

    Args:
        spec: the architecture, padded for the placement's mesh.
        layout: the page group of each layer.
        page_size: tokens per page.
        placement: the mesh, and the axes that shard each array.
        dtype: of keys and values.
    """
    total = [0] * len(layout.groups)
    for index, of in enumerate(spec.layers):
        group = layout.group_of[index]
        if group is not None:
            attention, in_key = _attention(of)
            size, ways = page_bytes(attention, page_size, placement, dtype, value_in_key=in_key)
            total[group] += size // ways
    return tuple(total)


def state_bytes(spec: ArchitectureSpec, max_num_seqs: int, placement: Placement, dtype: np.dtype[Any]) -> int:
    """Return the bytes that the recurrent states of all request slots take on one device."""
    total = 0
    kept = (mixer for layer in spec.layers for mixer in layer.mixers if not isinstance(mixer, LatentAttentionSpec))
    for mixer in kept:
        for state in mixer.state:
            array = _state(state, max_num_seqs, placement, dtype, True)
            total += int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
    return total


def _attention(layer: LayerSpec) -> tuple[AttentionSpec, bool]:
    """A layer's attention as its pages see it, and whether values lie in the keys."""
    if isinstance(layer.mixer, AttentionSpec):
        return layer.mixer, False
    return latent_pages(cast(LatentAttentionSpec, layer.mixer)), True


def _state(
    state: StateSpec, max_num_seqs: int, placement: Placement, dtype: np.dtype[Any], abstract: bool
) -> Any:
    shape = (max_num_seqs + 1, *state.shape)
    kind = np.dtype(state.dtype) if state.dtype else dtype
    logical = placement.divisible((None, *state.axes), shape)
    sharding = placement.sharding(logical, shape, "a recurrent state")
    if abstract:
        return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
    return jnp.zeros(shape, kind, device=sharding)


def _name(window: int | None, chunk: int | None) -> str:
    if window is None and chunk is None:
        return "full"
    return " ".join([*([f"window {window}"] if window else []), *([f"chunk {chunk}"] if chunk else [])])
