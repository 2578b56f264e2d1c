"""How a caller says that a model is to be cut over devices. In: a strategy, a mesh, or a plan, of which one is given;
out: a `Placement` on the devices that are there. "auto" asks the planner."""

from __future__ import annotations

from os import PathLike
from typing import Any

import jax

from ttpu_core.errors import RequestError
from ttpu_core.plan.hardware import Topology, chip_named, chip_of_device_kind, slice_sizes
from ttpu_core.plan.parallelism import AUTO, Rules, resolve_parallelism, strategy_with
from ttpu_core.plan.plan import Plan, load_plan
from ttpu_core.plan.planner import Request, best_plan
from ttpu_core.spec import ArchitectureSpec
from ttpu_jax.params.placement import Placement, local_placement

STAND_IN = "v5p"
"""The chip whose figures "auto" takes where the devices are no TPUs: one with much memory."""


def placement_for(
    spec: ArchitectureSpec,
    *,
    parallelism_strategy: Any = None,
    sharding_strategy: Any = None,
    mesh: Any = None,
    plan: Any = None,
    sharding_rules: Rules | None = None,
) -> Placement:
    """The placement that a caller asks for; one device where nothing is.

    Args:
        parallelism_strategy: what `resolve_parallelism` reads, or "auto".
        sharding_strategy: the same.
        mesh: the same, or a jax Mesh.
        plan: a `Plan`, or the file that `ttpu plan --save` wrote.
        sharding_rules: logical axis → mesh axes, in place of the usual ones.

    Raises:
        RequestError: more than one of them.
        PlanError: the plan is damaged, or was made for another model.
        UnsupportedError: what these devices cannot do.
    """
    given = {
        name: value
        for name, value in (
            ("parallelism_strategy", parallelism_strategy),
            ("sharding_strategy", sharding_strategy),
            ("mesh", mesh),
            ("plan", plan),
        )
        if value is not None
    }
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(given)} were given, but each of them says how the model is cut: pass one of them."
        )
    if plan is not None:
        if sharding_rules:
            raise RequestError("plan and sharding_rules were given, but a plan has its own rules: pass one of them.")
        read = _read(plan)
        read.check(spec)
        return local_placement(read.parallelism)
    strategy = strategy_with(sharding_rules)
    asked = next(iter(given.values()), None)
    if isinstance(asked, str) and asked.strip().lower() == AUTO:
        return local_placement(planned(spec, jax.devices(), Request(strategy=strategy)).parallelism)
    if isinstance(asked, str):
        return local_placement(resolve_parallelism(asked, len(jax.devices()), sharding_rules))
    return local_placement(asked, strategy)


def planned(spec: ArchitectureSpec, devices: list[jax.Device], request: Request) -> Plan:
    """The planner's fastest plan for these devices, which are taken for a slice that has as many.

    Raises:
        UnsupportedError: the model fits in no way.
    """
    chip = chip_of_device_kind(devices[0].device_kind) or chip_named(STAND_IN)
    count = max(1, len(devices) // chip.devices_per_chip)
    flat = (*(1 for _ in range(chip.dimensions - 1)), count)
    size = next((size for size in slice_sizes(chip) if Topology(chip, size).num_chips == count), flat)
    return best_plan(spec, Topology(chip, size), request)


def _read(plan: Any) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | PathLike):
        return load_plan(plan)
    raise RequestError(
        f"plan is the {type(plan).__name__} {str(plan)[:60]!r}, but a ttpu_core.plan.plan.Plan or the path of a file "
        "that `ttpu plan --save` wrote is needed: pass one of those."
    )
