"""Checks the arguments of `from_pretrained` that say how a model is sharded. Every backend uses these functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.sharding.hardware import Chip, Topology, slice_sizes

STAND_IN = "v5p"
"""The chip that "auto" assumes if the devices are no TPUs: one with much memory."""


def the_one_given(rules: Any, **arguments: Any) -> tuple[str, Any] | None:
    """Name and value of the one argument that is not None, or None if all are None.

    Args:
        rules: the caller's sharding rules, which need one of the arguments.
        arguments: the arguments that say how the model is sharded, by name.

    Raises:
        RequestError: more than one is given, rules alone, or rules with a plan.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(given)} were given, but each of them says how the model is sharded: pass one of them."
        )
    if rules and "plan" in given:
        raise RequestError("plan and sharding_rules were given, but a plan has its own rules: pass one of them.")
    if rules and not given:
        raise RequestError(
            f"sharding_rules for {', '.join(map(str, rules))} were given, but nothing says that the model is sharded: "
            "pass a parallelism_strategy too, such as 'fsdp', or leave the rules out."
        )
    return next(iter(given.items()), None)


def topology_of(chip: Chip, devices: int, slices: int) -> Topology | None:
    """The topology of `devices` devices in `slices` slices, assumed to have a size that can be ordered. None for a
    part of one chip."""
    if devices < chip.devices_per_chip:
        return None
    count = devices // chip.devices_per_chip // slices
    flat = (*(1 for _ in range(chip.dimensions - 1)), count)
    size = next((size for size in slice_sizes(chip) if Topology(chip, size).num_chips == count), flat)
    return Topology(chip, size, slices)


def refuse_idle_axes(model_type: str, mesh: Mapping[str, int], busy: Collection[str]) -> None:
    """Refuse a mesh axis along which neither parameters nor tokens are sharded, because its devices would all
    compute the same.

    Args:
        model_type: the model's type, for the error message.
        mesh: mesh axis → devices along it.
        busy: mesh axes along which anything is sharded.

    Raises:
        UnsupportedError: such an axis has several devices.
    """
    for axis, size in mesh.items():
        if size > 1 and axis not in busy:
            raise UnsupportedError(
                f"the mesh has {size} devices along {axis!r}, but nothing of this {model_type} is sharded along it, so "
                f"they would all compute the same: use {', '.join(sorted(busy)) or 'no mesh'} instead, or shard a "
                "logical axis along it in sharding_rules."
            )
