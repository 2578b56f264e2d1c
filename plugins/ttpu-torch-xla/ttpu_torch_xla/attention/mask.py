"""Masks with a meaning attached, so that a kernel need not read them. `kernel_mask` takes the arguments with which
transformers makes a mask, and returns that mask: a lazy tensor, which costs nothing unless it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from transformers import masking_utils as masks

MEANING = "_ttpu_meaning"


@dataclass(frozen=True, eq=False)
class MaskMeaning:
    """The meaning of a mask.

    Attributes:
        queries, keys: its size.
        first_query: which key the first query is, where that is known; None where a tensor holds it.
        causal: no query sees a later key.
        window: tokens that a query sees, itself included; without `causal` as far ahead as back.
        chunk: a query sees its own block of that many tokens, counted from `left_padding` [batch] on.
        padding: [batch, at least keys] bool, false where a key is padding.
        packed: rows hold several sequences; `segments` and `positions` within them are [batch, queries].
        version: of the tensor when it was made: a mask that was changed in place since means something else.
    """

    queries: int
    keys: int
    first_query: int | None
    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    left_padding: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    packed: bool = False
    segments: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    version: int = 0


def kernel_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masks.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Make a mask, bool [batch, 1, queries, keys], for transformers' AttentionMaskInterface, with its meaning attached.

    Args:
        batch_size: number of rows.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: the key index of the first query.
        kv_offset: the index of the first key.
        mask_function: transformers' function of batch, head, query and key index that is true where a query sees a key.
        attention_mask: bool [batch, keys], false at padding; None where there is none.
        options: further arguments of transformers' `sdpa_mask`.
    """
    options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask = masks.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    assert mask is not None
    at_start = isinstance(kv_offset, int) and kv_offset == 0
    first = q_offset if isinstance(q_offset, int) and at_start else None
    meaning = _understood(mask_function, MaskMeaning(q_length, kv_length, first))
    if meaning is not None and at_start and meaning.packed == (meaning.segments is not None):
        padding = masks.prepare_padding_mask(attention_mask, kv_length, 0)
        left = None if padding is None or meaning.chunk is None else (padding.long().cumsum(-1) == 0).sum(-1)
        meaning = replace(meaning, padding=padding, left_padding=left, version=_version(mask))
        setattr(mask, MEANING, meaning)
    return mask


def meaning_of(mask: torch.Tensor) -> MaskMeaning | None:
    """Return the meaning of a mask [batch, 1 or heads, queries, keys].

    It is None for a mask that `kernel_mask` did not make or that was changed since; such a mask has to be read.
    """
    meaning: MaskMeaning | None = getattr(mask, MEANING, None)
    return meaning if meaning is not None and meaning.version == _version(mask) else None


def _version(mask: torch.Tensor) -> int:
    """How often a tensor was changed in place. Under `torch.inference_mode` nobody counts; torch_xla cannot change such
    a mask in place at all, which is a view of bools."""
    return 0 if mask.is_inference() else mask._version


def _understood(function: Callable[..., Any], meaning: MaskMeaning) -> MaskMeaning | None:
    """`meaning` with what a mask function of transformers adds to it; None for a function that is not known here."""
    if function is masks.bidirectional_mask_function:
        return meaning
    if function is masks.causal_mask_function:
        return replace(meaning, causal=True)
    kind = _KINDS.get(function.__code__) if hasattr(function, "__code__") else None
    if kind is None:
        return None
    held = _held(function)
    if kind == "and":
        found: MaskMeaning | None = meaning
        for part in held["mask_functions"]:
            found = _understood(part, found) if found is not None else None
        return found
    if kind == "window":
        return replace(meaning, window=_narrower(meaning.window, held["sliding_window"]))
    if kind == "window both ways":
        return replace(meaning, window=_narrower(meaning.window, held["sliding_window"] + 1))
    if kind == "chunk":
        return replace(meaning, chunk=held["chunk_size"])
    if kind == "packed":
        return replace(meaning, packed=True)
    positions = held["position_ids"]
    inside = _understood(held["mask_function"], meaning)  # a function of positions within packed sequences
    return None if inside is None else replace(inside, positions=positions, segments=_segments(positions))


def _segments(positions: torch.Tensor) -> torch.Tensor:
    """Which sequence of its row each token belongs to, by positions that do not go on. As transformers'
    `find_packed_sequence_indices`, but counted in whole numbers: torch_xla sums up bools to a bool."""
    before = torch.cat([positions[:, :1] - 1, positions[:, :-1]], dim=-1)
    return (positions - before != 1).long().cumsum(-1)


def _held(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a closure holds."""
    cells: Any = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _narrower(one: int | None, other: int) -> int:
    return other if one is None else min(one, other)


def _codes() -> Iterator[tuple[CodeType, str]]:
    """The closures of `masking_utils`, by their code: each makes a new function, but always of the same code."""
    nothing: Any = None
    yield masks.and_masks(masks.causal_mask_function).__code__, "and"
    yield masks.sliding_window_overlay(1).__code__, "window"
    yield masks.sliding_window_bidirectional_overlay(1).__code__, "window both ways"
    yield masks.chunked_overlay(1, nothing).__code__, "chunk"
    yield masks.packed_sequence_mask_function(nothing).__code__, "packed"
    yield masks.remap_positions_for_packed_sequence(masks.causal_mask_function, nothing).__code__, "positions"


_KINDS = dict(_codes())
