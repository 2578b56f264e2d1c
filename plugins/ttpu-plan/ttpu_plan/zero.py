"""What a stage of ZeRO (arXiv 1910.02054) divides over the devices that rows are divided over, as strategies: the same
rules that a training step follows (`ttpu_jax.train.zero`)."""

from __future__ import annotations

from collections.abc import Mapping

from ttpu_core.sharding.shares import FEATURES
from ttpu_core.sharding.strategy import SHARES_WEIGHTS, Strategy
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_plan.shards import admissible


def batch_axes(mesh: Mapping[str, int], strategy: Strategy) -> tuple[str, ...]:
    """The mesh axes of several devices that divide rows."""
    return tuple(axis for axis in dict(strategy.rules).get(axes.BATCH, ()) if mesh.get(axis, 1) > 1)


def stage_of(mesh: Mapping[str, int], strategy: Strategy, stage: int | None) -> int:
    """The stage that None stands for: 3 where an axis "fsdp" or "expert" divides rows, else 0."""
    return stage if stage is not None else 3 if SHARES_WEIGHTS.intersection(batch_axes(mesh, strategy)) else 0


def weight_strategy(mesh: Mapping[str, int], strategy: Strategy, stage: int | None) -> Strategy:
    """How a training step divides the weights that it computes with."""
    stage, batch = stage_of(mesh, strategy, stage), batch_axes(mesh, strategy)
    rules = dict(strategy.rules)
    if stage < 3:
        return _with_features(strategy, {n: tuple(a for a in rules.get(n, ()) if a not in batch) for n in FEATURES})
    if set(batch) & {axis for name in FEATURES for axis in rules.get(name, ())}:
        return strategy
    return _with_features(strategy, {name: (*rules.get(name, ()), *batch) for name in FEATURES})


def state_strategy(
    spec: ArchitectureSpec, mesh: Mapping[str, int], strategy: Strategy, stage: int | None
) -> Strategy:
    """How a training step divides master weights and moments: in stages 1 and 2 as many axes of the batch as divide
    the model's features."""
    weights, batch = weight_strategy(mesh, strategy, stage), batch_axes(mesh, strategy)
    if stage_of(mesh, strategy, stage) not in (1, 2):
        return weights
    rules = dict(weights.rules)
    for count in range(len(batch), 0, -1):
        divided = _with_features(weights, {name: (*rules.get(name, ()), *batch[:count]) for name in FEATURES})
        if admissible(spec, mesh, divided):
            return divided
    return weights


def _with_features(strategy: Strategy, features: Mapping[str, tuple[str, ...]]) -> Strategy:
    return Strategy(tuple({**dict(strategy.rules), **features}.items()))
