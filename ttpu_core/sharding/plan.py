"""A plan: the layout of a model on TPU slices, and its predicted memory and time. The planner makes plans; they are
saved as JSON and accepted in place of a parallelism strategy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttpu_core.errors import PlanError, TTPUError
from ttpu_core.files import check_target, write_whole
from ttpu_core.sharding.estimate import MemoryEstimate, TimeEstimate
from ttpu_core.sharding.hardware import Topology, parse_topology
from ttpu_core.sharding.parallelism import Parallelism, strategy_with
from ttpu_core.sharding.serving import REPLICAS, StepSize, replica_mesh
from ttpu_core.sharding.strategy import MESH_AXES, Strategy
from ttpu_core.sharding.workload import Workload
from ttpu_core.spec import ArchitectureSpec

VERSION = 2

HEADROOM = 0.95
"""The share of a device's memory that a plan may use by prediction. Near the limit the compiler uses at most 4 %
more than predicted (60 programs, libtpu 0.0.42)."""


@dataclass(frozen=True)
class ProgramEstimate:
    """One program of a plan, with its predicted memory and time on each device."""

    workload: Workload
    memory: MemoryEstimate
    time: TimeEstimate


@dataclass(frozen=True)
class Plan:
    """The layout of a model on slices.

    Args:
        model_type: the model's type.
        fingerprint: fingerprint of the model's parameters, see `fingerprint_of`.
        topology: name of the slices, such as "v5e:2x4" or "2*v5e:4x4".
        mesh: mesh axis → devices along it, over all slices; empty for one device.
        dcn: mesh axis → slices along it.
        strategy: which mesh axes shard which logical axes.
        programs: an engine's decode step and its largest mixed step, of one replica; `generate`'s decode step and
            prefill; or the training step.
    """

    model_type: str
    fingerprint: str
    topology: str
    mesh: tuple[tuple[str, int], ...]
    dcn: tuple[tuple[str, int], ...]
    strategy: Strategy
    programs: tuple[ProgramEstimate, ...]

    @property
    def slices(self) -> Topology:
        """The plan's hardware."""
        return parse_topology(self.topology)

    @property
    def note(self) -> str | None:
        """A warning that slices of this size cannot be ordered, or None."""
        if self.slices.is_sold:
            return None
        return f"{self.slices.slice_name} is not a size that {self.slices.chip.name} comes in"

    @property
    def parallelism(self) -> Parallelism:
        """The mesh and strategy, as backends take them."""
        return Parallelism(self.mesh, self.dcn, self.strategy)

    @property
    def is_served(self) -> bool:
        """Whether the plan is for a serving engine."""
        return any(one.workload.step is not None for one in self.programs)

    @property
    def replicas(self) -> int:
        """Number of independent servers on the slices; 1 unless the plan is to serve."""
        return dict(self.mesh).get(REPLICAS, 1) if self.is_served else 1

    @property
    def replica(self) -> Parallelism:
        """The mesh of one replica of a plan to serve; of another plan the whole mesh."""
        if not self.is_served:
            return self.parallelism
        return Parallelism(tuple(replica_mesh(dict(self.mesh)).items()), (), self.strategy)

    @property
    def layout(self) -> str:
        """The mesh in words: "tensor=8", "data=2,tensor=4", and of a plan to serve "2 replicas × tensor=4"."""
        return str(self.parallelism) if self.replicas == 1 else f"{self.replicas} replicas × {self.replica}"

    @property
    def hbm_bytes(self) -> int:
        """Memory of a device that one program may use."""
        return self.slices.chip.hbm_bytes

    def program(self, task: str) -> ProgramEstimate | None:
        """The program of a task, or None."""
        return next((one for one in self.programs if one.workload.task == task), None)

    @property
    def memory(self) -> MemoryEstimate:
        """The estimate of the program that takes the most memory. While a prompt is read the caches of all rows are
        kept, so a prefill counts with the decode step's cache."""
        decode = self.program("decode")
        counted = [
            MemoryEstimate(**{**asdict(one.memory), "cache": max(one.memory.cache, decode.memory.cache)})
            if decode and one.workload.task == "prefill"
            else one.memory
            for one in self.programs
        ]
        return max(reversed(counted), key=lambda memory: memory.total)  # the last of equal ones

    @property
    def fits(self) -> bool:
        """Whether the programs are predicted to fit, with `HEADROOM`."""
        return self.memory.total <= HEADROOM * self.hbm_bytes

    @property
    def seconds(self) -> float:
        """The seconds by which plans are ranked, see `rank_seconds`."""
        return self.rank_seconds({one.workload.task: one.time.seconds for one in self.programs})

    def rank_seconds(self, seconds: Mapping[str, float]) -> float:
        """The ranking value for each program's seconds by task: the time of a training step; or of a decode step
        with its share of the prefill, if each row reads as many tokens as it writes."""
        decode, prefill, mixed = self.program("decode"), self.program("prefill"), self.program("mixed")
        if decode is not None and mixed is not None:
            return seconds["decode"] + seconds["mixed"] * decode.workload.batch / mixed.workload.tokens
        if decode is None or prefill is None:
            return sum(seconds.values())
        rows = decode.workload.batch / prefill.workload.batch
        return seconds["decode"] + seconds["prefill"] * rows / prefill.workload.context

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all rows, in training or generation."""
        first = self.programs[0].workload
        return self.replicas * first.batch * (first.context if first.task == "train" else 1) / self.seconds

    def check(self, spec: ArchitectureSpec) -> None:
        """Check that the plan was made for this model.

        Raises:
            PlanError: it was made for another one.
        """
        if self.fingerprint != fingerprint_of(spec):
            raise PlanError(
                f"the plan was made for a {self.model_type} with other parameters (fingerprint {self.fingerprint}) "
                f"than this {spec.model_type} ({fingerprint_of(spec)}), but a plan serves one model: make one with "
                "`ttpu plan CHECKPOINT --save PLAN.json`."
            )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values. Derived values are included for people and other programs."""
        return {
            "version": VERSION,
            "model_type": self.model_type,
            "fingerprint": self.fingerprint,
            "topology": self.topology,
            "mesh": dict(self.mesh),
            "dcn": dict(self.dcn),
            "rules": {logical: list(by) for logical, by in self.strategy.rules},
            "programs": [
                {
                    "workload": asdict(one.workload),
                    "memory": {**asdict(one.memory), "total": one.memory.total},
                    "time": {**asdict(one.time), "bound": one.time.bound},
                }
                for one in self.programs
            ],
            "replicas": self.replicas,
            "total_bytes": self.memory.total,
            "hbm_bytes": self.hbm_bytes,
            "fits": self.fits,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, value: Any, source: str = "the plan") -> Plan:
        """Read the result of `to_json`.

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
            plan = cls(
                model_type=str(value["model_type"]),
                fingerprint=str(value["fingerprint"]),
                topology=str(value["topology"]),
                mesh=_sizes(value["mesh"]),
                dcn=_sizes(value["dcn"]),
                strategy=_strategy(value["rules"]),
                programs=tuple(_program(one) for one in value["programs"]),
            )
            slices = plan.slices
        except (KeyError, TypeError, ValueError, AttributeError, TTPUError) as error:
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan. A reader sees the old file or the new one, never a part.

        Raises:
            PlanError: the file cannot be written.
        """
        text = json.dumps(self.to_json(), indent=2) + "\n"
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
    """Read a plan that `Plan.save` wrote.

    Raises:
        PlanError: the file is missing or not a plan of this version.
    """
    try:
        value = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"the plan {str(path)!r} was asked for, but it cannot be read ({error.strerror or error}): write one with "
            "`ttpu plan CHECKPOINT --save PLAN.json`."
        ) from error
    except ValueError as error:
        raise PlanError(
            f"the plan {str(path)!r} was asked for, but it is not valid JSON ({error}): write one with "
            "`ttpu plan CHECKPOINT --save PLAN.json`."
        ) from error
    return Plan.from_json(value, f"the plan {str(path)!r}")


def fingerprint_of(spec: ArchitectureSpec) -> str:
    """A hash of the names and shapes of a model's parameters, in sixteen characters."""
    text = repr([(path, parameter.shape) for path, parameter in spec.parameters.items()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    step = workload.pop("step", None)
    workload["step"] = None if step is None else StepSize(**step)
    return ProgramEstimate(Workload(**workload), MemoryEstimate(**memory), TimeEstimate(**seconds))


def _sizes(value: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, Mapping) or not all(
        axis in MESH_AXES and type(size) is int and size >= 1  # JSON's true is an int to Python
        for axis, size in value.items()
    ):
        raise ValueError(f"{value} are no sizes of {', '.join(MESH_AXES)}")
    return tuple((axis, value[axis]) for axis in MESH_AXES if axis in value)


__all__ = ["HEADROOM", "VERSION", "Plan", "ProgramEstimate", "check_plan_file", "fingerprint_of", "load_plan"]
