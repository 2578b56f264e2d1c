"""Softmax attention by name: `attend` uses the named implementation if it serves the layer, else the reference."""

from ttpu_jax.ops.attention.api import IMPLEMENTATIONS, attend, implementation, writes_cache
from ttpu_jax.ops.attention.choice import AttentionChoice, KindChoice, attention_choice, canonical_options, choose
from ttpu_jax.ops.attention.context import AttentionContext, Implementation
from ttpu_jax.ops.attention.decode import paired, write_and_attend
from ttpu_jax.ops.attention.reference import SMALLEST_BLOCK, eager, visibility

__all__ = [
    "IMPLEMENTATIONS",
    "SMALLEST_BLOCK",
    "AttentionChoice",
    "AttentionContext",
    "Implementation",
    "KindChoice",
    "attend",
    "attention_choice",
    "canonical_options",
    "choose",
    "eager",
    "implementation",
    "paired",
    "visibility",
    "write_and_attend",
    "writes_cache",
]
