"""The tokens that a device computes with: those of its rows, and those that it multiplies by its experts. Where a
strategy shards experts along the axes of the rows too, devices exchange the tokens, or gather few of them, and not the
experts (`ttpu_jax.model.moe.Experts`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log, prod, sqrt

from ttpu_core.sharding.experts import exchanges, gathers_own_rows, room_for_rows
from ttpu_core.sharding.hardware import Chip
from ttpu_core.spec import MoESpec, axes
from ttpu_plan.shards import ModelShards, ParameterShard
from ttpu_plan.workload import Workload


def local_tokens(model: ModelShards, workload: Workload) -> tuple[int, int]:
    """Return the number of rows, and of tokens of each row, on one device."""
    if workload.step is not None:  # whole on each device of a replica
        return 1, workload.step.tokens
    rows = workload.rows_at_once // model.devices(axes.BATCH, workload.rows_at_once)
    return rows, workload.tokens // model.devices(axes.SEQUENCE, workload.tokens)


def axes_of_rows(model: ModelShards, workload: Workload) -> set[str]:
    """Return the mesh axes that shard rows or their tokens."""
    return set(model.axes_of(axes.BATCH, workload.rows_at_once)) | set(model.axes_of(axes.SEQUENCE, workload.tokens))


def gathered_along(model: ModelShards, experts: Iterable[ParameterShard], workload: Workload) -> tuple[str, ...]:
    """Return the mesh axes along which a layer's tokens are gathered for experts, or exchanged, in the mesh's order.

    Args:
        model: on one device.
        experts: the layer's parameters; those of experts count.
        workload: the program.
    """
    sharding = {axis for one in experts if one.of_experts for by in one.multiplied_axes for axis in by}
    return tuple(axis for axis in model.mesh if axis in sharding & axes_of_rows(model, workload))


def expert_tokens(model: ModelShards, experts: Iterable[ParameterShard], workload: Workload) -> int:
    """Return the number of tokens that one device multiplies by its experts, if these are all of its tokens' choice.

    Args:
        model: on one device.
        experts: the layer's parameters; those of experts count.
        workload: the program.
    """
    rows, tokens = local_tokens(model, workload)
    return rows * tokens * prod(model.mesh[axis] for axis in gathered_along(model, experts, workload))


@dataclass(frozen=True)
class Exchange:
    """How devices send a layer's tokens to their experts.

    Attributes:
        along: the mesh axes that divide tokens and experts.
        devices: that exchange their tokens.
        same: that have the same tokens, and other experts.
    """

    along: tuple[str, ...]
    devices: int
    same: int


def exchange_for(model: ModelShards, experts: Iterable[ParameterShard], workload: Workload) -> Exchange | None:
    """Return how devices send a layer's tokens to their experts; None where they gather all of them, or none.

    Args:
        model: on one device.
        experts: the layer's parameters; those of experts count.
        workload: the program.
    """
    by_experts = _axes_of_experts(experts)
    along = tuple(axis for axis in by_experts if axis in axes_of_rows(model, workload))
    devices = prod(model.mesh[axis] for axis in along)
    if not exchanges(expert_tokens(model, experts, workload), devices):
        return None
    return Exchange(along, devices, prod(model.mesh[axis] for axis in by_experts) // devices)


def _axes_of_experts(parameters: Iterable[ParameterShard]) -> tuple[str, ...]:
    """Return the mesh axes that shard experts, the slowest first."""
    return next((one.multiplied_axes[0] for one in parameters if one.of_experts and one.is_matrix), ())


def expert_rows(model: ModelShards, experts: Iterable[ParameterShard], workload: Workload, mlp: MoESpec) -> int:
    """Return the rows of a device's buffers of what experts are given: each token has one for each of its experts, also
    for those elsewhere, unless tokens are exchanged, or devices gather the rows of their own experts only.

    Args:
        model: on one device.
        experts: the layer's parameters; those of experts count.
        workload: the program.
        mlp: the mixture.
    """
    exchange = exchange_for(model, experts, workload)
    if exchange is None:
        tokens, choices = expert_tokens(model, experts, workload), mlp.experts_per_token
        devices = prod(model.mesh[axis] for axis in _axes_of_experts(experts))
        narrow = workload.bytes_per_element == 2  # TPUs add up wider rows otherwise
        if workload.task == "train" or not narrow or not gathers_own_rows(tokens, devices):
            return tokens * choices
        held = mlp.num_experts // devices
        return room_for_rows(tokens, choices, held, 1, mlp.choices / held)
    rows, tokens = local_tokens(model, workload)
    held = mlp.num_experts // (exchange.devices * exchange.same)
    return room_for_rows(rows * tokens, mlp.experts_per_token, held, exchange.devices, exchange.same)


def busiest_share(mlp: MoESpec, tokens: int, devices: int) -> float:
    """Return how often the busiest device's experts are chosen, as a multiple of the mean over devices that have
    different experts, if tokens choose at random: the expected maximum of as many normal variables is at most
    sqrt(2 ln devices) deviations above the mean, and of choices a deviation is the root of the mean.

    Args:
        mlp: the mixture.
        tokens: that choose.
        devices: that share the experts.
    """
    mean = tokens * mlp.experts_per_token / devices
    return min(float(devices), 1 + sqrt(2 * log(devices) / mean))


def summed_in_ring(one: ParameterShard, of_rows: set[str], chip: Chip | None) -> bool:
    """Whether devices sum a kernel's gradient in a ring, so that it is whole on none of them: those along one axis that
    divides rows, if it alone shards one dimension of the kernel.

    Args:
        one: the kernel.
        of_rows: the mesh axes that divide rows.
        chip: of the devices; on those with SparseCores the compiler sums a gradient that is whole.
    """
    if chip is not None and chip.sums_on_sparse_cores:
        return False
    shared = [by for by in one.mesh_axes if of_rows.intersection(by)]
    return len(shared) == len(shared[0]) == 1 if shared else False
