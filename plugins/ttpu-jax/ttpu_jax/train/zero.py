"""The stages of ZeRO (arXiv 1910.02054) as placements over one mesh. Mesh axes that shard the batch divide, from stage
to stage, the optimizer's state, the gradients and the weights; the axes of tensors divide all three in every stage, and
those of experts all three of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ttpu_core.errors import RequestError
from ttpu_core.sharding.shares import FEATURES, shared_dimension
from ttpu_core.sharding.strategy import SHARES_WEIGHTS, Strategy
from ttpu_core.spec import Parameter, axes
from ttpu_jax.params.placement import Placement


@dataclass(frozen=True)
class ZeroPlacements:
    """Where a training step holds each parameter, its gradient and its optimizer state.

    Attributes:
        stage: of ZeRO, 0 to 3.
        weights: of the weights that the model computes with.
        batch_axes: the mesh axes that shard the batch and, in stages 1 and 2, masters and moments.
    """

    stage: int
    weights: Placement
    batch_axes: tuple[str, ...]

    def weight(self, path: str, parameter: Parameter) -> Sharding:
        """The sharding of a weight as the model computes with it."""
        return self.weights.parameter(path, parameter)

    def gradient(self, path: str, parameter: Parameter) -> Sharding:
        """The sharding of a gradient as the optimizer is given it."""
        return self.state(path, parameter) if self.stage >= 2 else self.weight(path, parameter)

    def state(self, path: str, parameter: Parameter) -> Sharding:
        """The sharding of a master weight and of each of its moments."""
        whole = self.weight(path, parameter)
        if self.stage not in (1, 2) or not isinstance(whole, NamedSharding):
            return whole
        held = [() if by is None else (by,) if isinstance(by, str) else tuple(by) for by in whole.spec]
        held += [()] * (len(parameter.shape) - len(held))
        sizes = dict(whole.mesh.shape)
        of_weights = {axis for by in held for axis in by}
        for axis in (one for one in self.batch_axes if one not in of_weights):
            ways = [prod(sizes[one] for one in by) for by in held]
            place = shared_dimension(parameter.axes, parameter.shape, ways, sizes[axis])
            if place is not None:
                held[place] = (*held[place], axis)
        return NamedSharding(whole.mesh, PartitionSpec(*(by or None for by in held)))


def zero_placements(placement: Placement, stage: int | None) -> ZeroPlacements:
    """The placements of a stage; None is stage 3 where an axis "fsdp" or "expert" divides rows, else 0.

    Stage 3 shards weights as the placement does where that shards any by an axis of the batch, else by all axes of the
    batch.

    Raises:
        RequestError: a stage above 0 on a mesh without several devices along an axis of the batch.
    """
    batch = placement.axes_of(axes.BATCH)
    if stage is None:
        stage = 3 if SHARES_WEIGHTS.intersection(batch) else 0
    if stage and not batch:
        raise RequestError(
            f"zero_stage={stage} divides the optimizer's state over the devices that rows are divided over, but here "
            "one device computes all rows: use a mesh with several devices on the axis data, fsdp or expert, or "
            "zero_stage=0."
        )
    rules = dict(placement.strategy.rules)
    if stage < 3:
        placement = without_batch(placement)
    elif not set(batch) & {axis for name in FEATURES for axis in rules.get(name, ())}:
        placement = _with_features(placement, {name: (*rules.get(name, ()), *batch) for name in FEATURES})
    return ZeroPlacements(stage, placement, batch)


def spread(placement: Placement) -> Placement:
    """The placement, with features that are sharded by all axes of the batch too, so that no two devices hold the same
    weights."""
    rules, batch = dict(placement.strategy.rules), placement.axes_of(axes.BATCH)
    return _with_features(
        placement, {name: (*_without(rules.get(name, ()), batch), *batch) for name in FEATURES}
    )


def without_batch(placement: Placement) -> Placement:
    """The placement, with features that the axes of the batch do not shard."""
    rules, batch = dict(placement.strategy.rules), placement.axes_of(axes.BATCH)
    return _with_features(placement, {name: _without(rules.get(name, ()), batch) for name in FEATURES})


def _without(mesh_axes: tuple[str, ...], batch: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in mesh_axes if axis not in batch)


def _with_features(placement: Placement, features: Mapping[str, tuple[str, ...]]) -> Placement:
    rules = {**dict(placement.strategy.rules), **features}
    return replace(placement, strategy=Strategy(tuple(rules.items())))
