"""Keeps padding out of the states of convolutions and state spaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CONVOLUTIONS = ("conv1d", "conv")


@contextmanager
def padding_kept_out_of_states(model: Any, mask: torch.Tensor) -> Iterator[None]:
    """A context in which the inputs of convolutions are zero at padding.

    transformers sets the hidden states of padding to zero before a mixer projects them, but a projection with a bias
    makes the bias of them, which the convolution then reads as if it were a token. Here the projection's results are
    zero there, as if the sequence began after its padding.

    Args:
        model: of transformers.
        mask: [batch, tokens], 0 at padding.
    """
    seen = mask.bool()[..., None]

    def without_padding(module: torch.nn.Module, args: Any, projected: torch.Tensor) -> torch.Tensor:
        return projected.masked_fill(~seen, 0)

    hooks = [one.register_forward_hook(without_padding) for one in _projections_with_bias(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _projections_with_bias(model: Any) -> Iterator[torch.nn.Module]:
    """The projections whose results convolutions read."""
    for module in model.modules():
        projection: Any = getattr(module, "in_proj", None)
        if any(hasattr(module, name) for name in CONVOLUTIONS) and getattr(projection, "bias", None) is not None:
            yield projection
