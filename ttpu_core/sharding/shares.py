"""Along which dimension devices divide a parameter that they share, as those along `fsdp` do, which gather it for each
use and scatter the sum of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ttpu_core.spec import axes

FEATURES = (axes.EMBED, axes.LATENT)
"""Logical axes of parameters that devices divide where they share a parameter."""

TILE_ROWS = 16
"""Rows of a tile of two-byte numbers in a TPU's memory."""

LANES = 128
"""Numbers in a row of a tile in a TPU's memory."""


def shared_dimension(
    logical: Sequence[str | None], shape: Sequence[int], ways: Sequence[int], devices: int
) -> int | None:
    """Return the dimension of a parameter that devices divide which share it; None if they divide none.

    Kernels of experts are divided by experts or, where devices do not divide these, by rows of whole tiles: grouped
    products read kernels as they are stored, so that parts of the last dimension would be copied to their places
    (docs/decisions/0049-devices-share-whole-experts.md).

    Args:
        logical: the logical axis of each dimension.
        shape: the size of each dimension.
        ways: into how many parts other devices divide each dimension.
        devices: that share the parameter.
    """
    for place in _candidates(logical):
        each, left = divmod(shape[place], ways[place] * devices)
        if not left and (logical[place] != axes.MLP or each % TILE_ROWS == 0):
            return place
    return None


def _candidates(logical: Sequence[str | None]) -> Iterator[int]:
    """The dimensions that may be divided, the best first."""
    if axes.EXPERT in logical:
        yield logical.index(axes.EXPERT)
        if axes.MLP in logical[:-1]:
            yield logical.index(axes.MLP)
    yield from (place for place, axis in enumerate(logical) if axis in FEATURES)
