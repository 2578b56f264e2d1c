"""The data types of ragged paged attention: `RaggedBatch` says which tokens of a flat batch belong to which sequence
and which pages hold each sequence's keys and values; `PagedKV` holds the pages. All arrays have fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

NULL_PAGE = 0
"""The null page: padding tokens are written there, and unused block table entries point to it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """A flat batch of T tokens of up to S sequences. The tokens of a sequence are contiguous, in the order of the
    sequences.

    Args:
        query_starts: int32 [S + 1], the first token of each sequence. Entries of absent sequences, and the last
            entry, equal the number of real tokens.
        kv_lens: int32 [S], tokens of each sequence in its pages, including this step's; 0 for absent sequences.
        num_sequences: int32 [1], number of sequences present.
        positions: int32 [T], each token's position in its sequence; negative for padding, which follows the real
            tokens.
        lengths: int32 [T], tokens of the token's sequence, for ropes that depend on the length.
        rows: int32 [T], the sequence of each token, at most S - 1; arbitrary for padding.
        tables: one block table per page group, int32 [S, pages]: entry i holds positions from i * page_size on.
            `NULL_PAGE` marks a page that does not exist yet, or that was freed because it lies behind the group's
            window.
        slots: per page group int32 [T], page * page_size + offset: where each token's keys and values are written.
            Padding goes to `NULL_PAGE`.
        states: int32 [S], the slot of each sequence's recurrent state; slot 0 belongs to no sequence.
        adapters: int32 [T], the LoRA adapter of each token, 0 for none; None if no adapters are loaded.
        max_queries: maximum number of tokens of one sequence in this batch; 1 in a decode step. Static.
        max_prefills: number of sequences that may have more than one token. Static.
        page_size: tokens per page. Static.
    """

    query_starts: jax.Array
    kv_lens: jax.Array
    num_sequences: jax.Array
    positions: jax.Array
    lengths: jax.Array
    rows: jax.Array
    tables: tuple[jax.Array, ...]
    slots: tuple[jax.Array, ...]
    states: jax.Array
    adapters: jax.Array | None = None
    max_queries: int = field(default=1, metadata={"static": True})
    max_prefills: int = field(default=1, metadata={"static": True})
    page_size: int = field(default=16, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKV:
    """Keys and values of one layer in pages. The layout of `pages` is private to this package and depends on the
    platform (`empty_pages`).

    Args:
        pages: keys and values of all pages, or keys only if values are their first features (`value_in_key`).
        scales: scales of quantized entries, or None.
        group: the page group, an index into `RaggedBatch.tables` and `slots`. Static.
        value_in_key: whether values are the first features of the keys. Static.
        combined: 0 for split pages. For combined pages, where all heads of a token lie together, as in most on TPUs
            (`layout`), the number of devices that share the heads. Static.
    """

    pages: jax.Array
    scales: jax.Array | None = None
    group: int = field(default=0, metadata={"static": True})
    value_in_key: bool = field(default=False, metadata={"static": True})
    combined: int = field(default=0, metadata={"static": True})
