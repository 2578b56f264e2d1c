"""What `ttpu_jax.ops.fetch` copies, and what its kernels are called in a compiled program."""

from __future__ import annotations

import jax

FETCH_BEGIN, FETCH_END = "fetch_begin", "fetch_end"
"""Names of the kernels that begin copies, and that wait for them."""

Groups = tuple[tuple[tuple[jax.Array, ...], ...], ...]
"""Of each group, of each of its choices, an array of each turn."""


def of_turn(groups: Groups, turn: int) -> tuple[tuple[jax.Array, ...], ...]:
    """The arrays of a turn, by group."""
    return tuple(tuple(choices[turn] for choices in group) for group in groups)
