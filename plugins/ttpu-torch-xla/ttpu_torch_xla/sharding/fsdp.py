"""Wraps the decoder layers of a sharded model in torch_xla's FSDPv2 (`SpmdFullyShardedDataParallel`), in place. The
`state_dict` keeps the parameters' names."""

from __future__ import annotations

from typing import Any

import torch

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_torch_xla.runtime import current
from ttpu_torch_xla.sharding.apply import decoder_layers

AXIS = "fsdp"
INNER = "_orig_module."
"""What FSDPv2 writes into the names of what it wraps."""


def has_fsdp_axis(parallelism: Parallelism | None) -> bool:
    """Whether a mesh has devices along the axis that FSDPv2 shards."""
    return parallelism is not None and dict(parallelism.mesh).get(AXIS, 1) > 1


def refuse_without_axis(parallelism: Parallelism | None) -> None:
    """Refuse FSDPv2 on a mesh without its axis, before the model is loaded.

    Raises:
        UnsupportedError: the mesh has no axis for FSDPv2.
    """
    if not has_fsdp_axis(parallelism):
        found = "the model is on one device" if parallelism is None else f"the mesh is {parallelism}"
        raise UnsupportedError(
            f"use_fsdp_wrap=True was asked for, but {found}, and FSDPv2 shards along {AXIS!r}: pass "
            "sharding_strategy='fsdp', '2d' or '3d', or leave it out."
        )


def wrap(model: Any, mesh: Any, architecture: Architecture) -> Any:
    """Wrap each decoder layer and return the model.

    `shard_model` has sharded the parameters and the activations; FSDPv2 adds a barrier behind each
    layer's gradients, so that the compiler does not gather them all before it sends the first. The model itself is
    not wrapped, and stays an instance of its class. `state_dict`, `load_state_dict` and checkpoints have the names of
    before; `named_parameters` and `named_modules` say `_orig_module` within each layer, and a layer's own attributes
    are those of the layer that it wraps.

    Args:
        mesh: the runtime's mesh, of which one axis is "fsdp".

    Raises:
        UnsupportedError: the model has no list of layers.
    """
    layers = decoder_layers(model, architecture)
    if layers is None:
        raise UnsupportedError(
            f"use_fsdp_wrap=True was asked for, but no list of decoder layers was found in {type(model).__name__}: "
            "leave it out."
        )
    current().wrap_fsdp(layers, mesh)
    for layer in layers:
        layer.register_state_dict_post_hook(_without_inner)
        layer.register_load_state_dict_pre_hook(_with_inner)
    return model


def _without_inner(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + INNER)]:
        state[prefix + name.removeprefix(prefix + INNER)] = state.pop(name)


def _with_inner(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(prefix + INNER)]:
        state[prefix + INNER + name.removeprefix(prefix)] = state.pop(name)
