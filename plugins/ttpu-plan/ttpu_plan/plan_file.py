"""A plan as JSON and as a file: written by `ttpu plan --save`, and read wherever a plan is accepted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ttpu_core.config import parse_json_object
from ttpu_core.errors import PlanError, TTPUError
from ttpu_core.files import check_target, write_whole
from ttpu_core.sharding.parallelism import strategy_with
from ttpu_core.sharding.serving import StepSize
from ttpu_core.sharding.strategy import MESH_AXES, Strategy
from ttpu_core.sharding.training_state import UpdateSettings
from ttpu_plan.estimate import MemoryEstimate, TimeEstimate
from ttpu_plan.plan import Plan, ProgramEstimate
from ttpu_plan.workload import Workload

VERSION = 3


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON values. Derived values are included for people and other programs."""
    return {
        "version": VERSION,
        "model_type": plan.model_type,
        "fingerprint": plan.fingerprint,
        "topology": plan.topology,
        "mesh": dict(plan.mesh),
        "dcn": dict(plan.dcn),
        "rules": {logical: list(by) for logical, by in plan.strategy.rules},
        "programs": [
            {
                "workload": asdict(one.workload),
                "memory": {**asdict(one.memory), "total": one.memory.total},
                "time": {**asdict(one.time), "bound": one.time.bound},
            }
            for one in plan.programs
        ],
        "new_tokens": plan.new_tokens,
        "replicas": plan.replicas,
        "total_bytes": plan.memory.total,
        "hbm_bytes": plan.hbm_bytes,
        "fits": plan.fits,
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "note": plan.note,
    }


def read_plan(value: Any, source: str = "the plan") -> Plan:
    """Read the result of `plan_json`.

    Args:
        value: the parsed JSON.
        source: name of the plan in error messages.

    Raises:
        PlanError: another version, a missing or malformed value, or a mesh that does not fit the slices.
    """
    if not isinstance(value, Mapping) or "version" not in value:
        raise PlanError(
            f"{source} was to be read as a plan, but it has no version, so it is not a plan: make one with "
            "`ttpu plan CHECKPOINT --save PLAN.json`."
        )
    if value["version"] != VERSION:
        raise PlanError(
            f"{source} is a plan of version {value['version']}, but this ttpu reads version {VERSION}: make it "
            "again with `ttpu plan CHECKPOINT --save PLAN.json`."
        )
    again = "make it again with `ttpu plan CHECKPOINT --save PLAN.json`."
    missing = [name for name in _READ if name not in value]
    if missing:
        raise PlanError(f"{source} cannot be read as a plan, because it lacks {', '.join(missing)}: {again}")
    try:
        plan = Plan(
            model_type=str(value["model_type"]),
            fingerprint=str(value["fingerprint"]),
            topology=str(value["topology"]),
            mesh=_sizes(value["mesh"]),
            dcn=_sizes(value["dcn"]),
            strategy=_strategy(value["rules"]),
            programs=tuple(_program(one) for one in value["programs"]),
            new_tokens=None if value.get("new_tokens") is None else int(value["new_tokens"]),
        )
        slices = plan.slices
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, TTPUError) as error:
        why = str(error).rstrip(".")
        raise PlanError(f"{source} cannot be read as a plan ({type(error).__name__}: {why}): {again}") from error
    wanted, joined = plan.parallelism.num_devices, plan.parallelism.num_slices
    if slices.num_devices != wanted or not plan.programs:
        raise PlanError(
            f"{source} has a mesh of {wanted} devices and {len(plan.programs)} programs for {plan.topology}, which "
            f"has {slices.num_devices} devices: {again}"
        )
    if slices.slices != joined:
        raise PlanError(
            f"{source} joins {joined} slices by dcn {dict(plan.dcn)}, but {plan.topology} is {slices.slices}: "
            f"{again}"
        )
    for axis, size in plan.dcn:
        along = dict(plan.mesh).get(axis, 1)
        if along % size:
            raise PlanError(
                f"{source} lays {size} slices along {axis}, but its mesh has {along} devices there, which they "
                f"cannot share evenly: {again}"
            )
    return plan


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as a file. A reader sees the old file or the new one, never a part.

    Raises:
        PlanError: the file cannot be written.
    """
    text = json.dumps(plan_json(plan), indent=2) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise _unwritable(path, error) from error


def check_plan_file(path: str | os.PathLike[str]) -> None:
    """Check that a plan can be saved at this path, before it is computed.

    Raises:
        PlanError: it cannot be saved there.
    """
    try:
        check_target(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `save_plan` wrote.

    Raises:
        PlanError: the file is missing or not a plan of this version.
    """
    try:
        value = parse_json_object(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise PlanError(
            f"the plan {str(path)!r} was asked for, but it cannot be read ({error.strerror or error}): write one with "
            "`ttpu plan CHECKPOINT --save PLAN.json`."
        ) from error
    except ValueError as error:
        raise PlanError(
            f"the plan {str(path)!r} was asked for, but it {error}: write one with `ttpu plan CHECKPOINT --save "
            "PLAN.json`."
        ) from error
    return read_plan(value, f"the plan {str(path)!r}")


_READ = ("model_type", "fingerprint", "topology", "mesh", "dcn", "rules", "programs")


def _unwritable(path: str | os.PathLike[str], error: OSError) -> PlanError:
    return PlanError(
        f"the plan was to be saved as {str(path)!r}, but it cannot be written ({error.strerror or error}): name a file "
        "in a folder that exists and may be written to."
    )


def _strategy(rules: Any) -> Strategy:
    """The whole table. A logical axis that it omits is not sharded."""
    if not isinstance(rules, Mapping):
        raise TypeError(f"the rules {rules!r} are no table of logical axes")
    for logical, by in rules.items():
        if not isinstance(by, list) or len(set(map(str, by))) < len(by):
            raise ValueError(f"the rule of {logical!r} is {by!r}, but it has to be a list of different mesh axes")
    return strategy_with(rules, Strategy(()))


def _program(value: Mapping[str, Any]) -> ProgramEstimate:
    memory = {name: int(size) for name, size in value["memory"].items() if name != "total"}
    seconds = {name: float(number) for name, number in value["time"].items() if name != "bound"}
    workload = dict(value["workload"])
    for name, kind in (("step", StepSize), ("update", UpdateSettings)):
        given = workload.pop(name, None)
        workload[name] = None if given is None else kind(**given)
    return ProgramEstimate(Workload(**workload), MemoryEstimate(**memory), TimeEstimate(**seconds))


def _sizes(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, Mapping) or not all(
        axis in MESH_AXES and type(size) is int and size >= 1  # JSON's true is an int to Python
        for axis, size in value.items()
    ):
        raise ValueError(f"{value} are no sizes of {', '.join(MESH_AXES)}")
    return tuple((axis, value[axis]) for axis in MESH_AXES if axis in value)
