"""Softmax attention by name: `attend` takes one implementation or, where that does not serve, the reference."""

from ttpu_jax.ops.attention.api import IMPLEMENTATIONS, attend, implementation
from ttpu_jax.ops.attention.context import AttentionContext, Implementation
from ttpu_jax.ops.attention.reference import SMALLEST_BLOCK, eager, visibility

__all__ = [
    "IMPLEMENTATIONS",
    "SMALLEST_BLOCK",
    "AttentionContext",
    "Implementation",
    "attend",
    "eager",
    "implementation",
    "visibility",
]
