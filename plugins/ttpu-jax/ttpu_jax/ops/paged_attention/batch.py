"""What ragged paged attention is told beside the arrays: which tokens of a flat batch belong to which sequence, and
which pages hold each sequence's keys and values. In and out: plain arrays of fixed shapes, whatever the requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

NULL_PAGE = 0
"""The page that belongs to nobody: padding tokens are written there, and table entries that are not used name it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """`tokens` T of up to `sequences` S, those of one sequence lying next to each other, in the order of the sequences.

    query_starts: int32 [S + 1], the first token of each sequence; those of sequences that are not there, and the last
        entry, are the number of real tokens.
    kv_lens: int32 [S], tokens of each sequence in its pages, with this step's; 0 for sequences that are not there.
    num_sequences: int32 [1], how many are there.
    positions: int32 [T], of each token in its sequence; negative for padding, which lies after the real tokens.
    lengths: int32 [T], tokens of its sequence for ropes that depend on the length.
    rows: int32 [T], the sequence of each token, S - 1 or less; anything for padding.
    tables: per page group int32 [S, pages]: entry i holds positions i * page_size and on; `NULL_PAGE` where a page
        does not exist yet, or is behind the group's window and was given back.
    slots: per page group int32 [T], page * page_size + offset, where each token's keys and values go; padding's lie
        in `NULL_PAGE`.
    states: int32 [S], where each sequence's recurrent state lies; 0 belongs to nobody.
    adapters: int32 [T], the LoRA adapter of each token, 0 for none; None where no adapters are loaded.
    max_queries: the most tokens that one sequence may have in this batch; 1 in a decode step. Static.
    max_prefills: how many sequences may have more than one token. Static.
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
    """Keys and values of one layer in pages. How `pages` is laid out is this package's own affair, and may differ by
    platform (`empty_pages`).

    pages: the keys and values of all pages, or keys alone where values are their first features (`value_in_key`).
    scales: what quantized entries are multiplied by; None where they are not.
    group: the page group, an index into `RaggedBatch.tables` and `slots`. Static.
    combined: 0, or where all heads of a token lie together, as on TPUs (`layout`), the number of devices that heads are
        sharded over. Static.
    """

    pages: jax.Array
    scales: jax.Array | None = None
    group: int = field(default=0, metadata={"static": True})
    value_in_key: bool = field(default=False, metadata={"static": True})
    combined: int = field(default=0, metadata={"static": True})
