"""Names activations of a layer, and makes the policies of `jax.checkpoint` that keep them for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ttpu_core.sharding.training_state import SAVED


def saved(x: jax.Array, name: str | None) -> jax.Array:
    """x under a name, by which a policy keeps it; None gives it none. Values do not change.

    Args:
        x: [...].
        name: one of those in `SAVED`.
    """
    return x if name is None else checkpoint_name(x, name)


def policy_of(remat: str) -> Callable[..., Any] | None:
    """What `jax.checkpoint` keeps; None keeps a layer's input alone.

    Args:
        remat: one of `REMATS`, but none, which needs no policy.
    """
    if remat == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint_policies.save_only_these_names(*SAVED[remat]) if remat in SAVED else None
