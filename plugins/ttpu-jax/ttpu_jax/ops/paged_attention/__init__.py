"""Attention over keys and values in pages, for flat batches of sequences that each advance by a different number of
tokens."""

from ttpu_jax.ops.paged_attention.api import paged_attention, serves, serves_own
from ttpu_jax.ops.paged_attention.batch import NULL_PAGE, PagedKV, RaggedBatch
from ttpu_jax.ops.paged_attention.layout import empty_pages, page_bytes
from ttpu_jax.ops.paged_attention.write import write, write_pairs

__all__ = [
    "NULL_PAGE",
    "PagedKV",
    "RaggedBatch",
    "empty_pages",
    "page_bytes",
    "paged_attention",
    "serves",
    "serves_own",
    "write",
    "write_pairs",
]
