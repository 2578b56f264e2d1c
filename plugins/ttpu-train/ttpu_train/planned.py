"""Plans that runs follow, and what the planner predicts of their memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

from ttpu_core.errors import MissingDependencyError, RequestError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.services import Planner
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.parallelism import Parallelism
from ttpu_core.sharding.training_state import PlannedUpdate, UpdateSettings
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_train.arguments import TrainingArguments


def following_plan(args: TrainingArguments, model: Any, load_options: Mapping[str, Any]) -> TrainingArguments:
    """The arguments of a run with the stage of ZeRO of its plan, if it has one. Warns of what the run does otherwise
    than the plan, so that it takes other memory.

    Args:
        args: of the run.
        model: as the trainer was given it.
        load_options: for opening it, which may name the plan too.

    Raises:
        RequestError: the plan contradicts zero_stage, or the model was opened already.
        PlanError: the plan is damaged, or is not one to train.
    """
    plan = args.plan if args.plan is not None else load_options.get("plan")
    if plan is None:
        return args
    if not isinstance(model, str | Path):
        raise RequestError(
            f"a plan was given with a loaded {type(model).__name__}, which lies on its mesh already: pass the "
            "checkpoint's folder or Hub id, or leave plan out."
        )
    planned = _planner().planned_update(plan)
    stage, ours = planned.settings.zero_stage, args.update_settings()
    if ours.zero_stage not in (None, stage):
        raise RequestError(
            f"zero_stage={ours.zero_stage} was given with a plan of {planned.parallelism} for stage {stage}: leave "
            f"zero_stage out, or make the plan with `ttpu plan --task training --zero-stage {ours.zero_stage}`."
        )
    pairs = {name: (getattr(planned.settings, name), getattr(ours, name)) for name in _compared(ours)}
    differ = [f"{name}={asked!r} and not {was!r}" for name, (was, asked) in pairs.items() if was != asked]
    shards = prod(dict(planned.parallelism.mesh).get(axis, 1) for axis in _batch_axes(planned.parallelism))
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * shards
    for what, asked, was in (("rows", rows, planned.rows), ("tokens of a row", args.max_length, planned.length)):
        if asked > was:
            differ.append(f"{asked:,} {what} and not {was:,}")
    if differ:
        warnings.warn(
            f"the run has {', '.join(differ)} as its plan for {planned.topology}: it takes other memory than the plan "
            "says",
            stacklevel=3,
        )
    return replace(args, plan=plan, zero_stage=stage)  # type: ignore[arg-type]


def _compared(ours: UpdateSettings) -> list[str]:
    """The settings of a run that are compared with a plan's. With remat="auto" a run takes what fits, and momentum
    changes the state of sgd alone."""
    skipped = {"zero_stage"} | ({"remat"} if ours.remat == "auto" else set())
    if ours.optim != "sgd":
        skipped.add("momentum")
    return [one.name for one in fields(ours) if one.name not in skipped]


def _batch_axes(parallelism: Parallelism) -> tuple[str, ...]:
    return tuple(dict(parallelism.strategy.rules).get(axes.BATCH, ()))


def planned_mesh(args: TrainingArguments) -> str | None:
    """The mesh of a run as text, for models beside the one in training: parallelism_strategy, or its plan's."""
    if args.plan is None:
        strategy: str | None = args.parallelism_strategy
        return strategy
    found = _planner().planned_update(args.plan).parallelism
    return str(found) if found.mesh else None


def planned_slice(args: TrainingArguments, topology: str) -> Parallelism | None:
    """The mesh of a run's plan, which has to be one for a slice; None without a plan.

    Raises:
        RequestError: it is one for other slices.
        PlanError: the plan is damaged, or is not one to train.
        UnsupportedError: no such slice.
    """
    if args.plan is None:
        return None
    planned = _planner().planned_update(args.plan)
    if planned.topology != parse_topology(topology).name:
        raise RequestError(
            f"an update was to be compiled for {topology} with a plan for {planned.topology}: pass --topology "
            f"{planned.topology}, or leave plan out."
        )
    return planned.parallelism


def predicted_memory(
    args: TrainingArguments, spec: ArchitectureSpec, topology: str, parallelism: Parallelism, rows: int
) -> dict[str, Any]:
    """What the planner predicts of a device's memory in an update.

    Args:
        args: of the run.
        spec: of the model.
        topology: name of the slices.
        parallelism: the mesh.
        rows: of an update, of all devices and parts.

    Returns:
        plan_bytes, the peak, and plan_held_bytes; or both None, and plan_note with the reason.
    """
    trains_part = "adapters" if args.adapters is not None else "trainable" if args.trainable is not None else None
    if trains_part is not None:
        return {"plan_bytes": None, "plan_held_bytes": None, "plan_note": f"the planner does not know {trains_part}"}
    update = PlannedUpdate(topology, parallelism, rows, args.max_length, args.update_settings())
    try:
        found = _planner().training_memory(spec, update, "float32" if args.bf16 is False else "bfloat16")
    except (MissingDependencyError, UnsupportedError) as error:
        return {"plan_bytes": None, "plan_held_bytes": None, "plan_note": str(error)}
    return {"plan_bytes": sum(found.values()), "plan_held_bytes": found["weights"] + found["optimizer"]}


def _planner() -> Planner:
    planner: Planner = default_registry().service("planner")
    return planner
