"""A plan: the layout of a model on TPU slices, and its predicted memory and time. The planner makes plans,
saves them and reads them; backends take them in place of a parallelism strategy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ttpu_core.errors import PlanError
from ttpu_core.sharding.hardware import Topology, parse_topology
from ttpu_core.sharding.parallelism import Parallelism, rules_text
from ttpu_core.sharding.strategy import Strategy, usual_strategy
from ttpu_core.spec import ArchitectureSpec
from ttpu_plan.estimate import MemoryEstimate, TimeEstimate
from ttpu_plan.workload import Workload

REPLICAS = "data"
"""The mesh axis along which a plan to serve has replicas: servers that know nothing of each other."""

ENGINE_AXES = ("expert", "tensor")
"""The mesh axes that one engine shards a model along."""

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
        new_tokens: to generate, tokens of each answer; None is as many as a prompt has.
    """

    model_type: str
    fingerprint: str
    topology: str
    mesh: tuple[tuple[str, int], ...]
    dcn: tuple[tuple[str, int], ...]
    strategy: Strategy
    programs: tuple[ProgramEstimate, ...]
    new_tokens: int | None = None

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
        """The mesh in words, with rules that are not the usual ones: "tensor=8", "data=2,tensor=4; expert=data+tensor",
        and of a plan to serve "2 replicas × tensor=4"."""
        mesh = str(self.parallelism) if self.replicas == 1 else f"{self.replicas} replicas × {self.replica}"
        return f"{mesh}; {self.rules}" if self.rules else mesh

    @property
    def rules(self) -> str:
        """The rules that are not the usual ones, as `ttpu_core.sharding.parallelism.parse_rules` reads them."""
        return rules_text(self.strategy, usual_strategy(trains=self.program("train") is not None))

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
        with its share of the prefill of a prompt; or the mean time of the `new_tokens` of an answer."""
        decode, prefill, mixed = self.program("decode"), self.program("prefill"), self.program("mixed")
        if decode is not None and mixed is not None:
            return seconds["decode"] + seconds["mixed"] * decode.workload.batch / mixed.workload.tokens
        if decode is None or prefill is None:
            return sum(seconds.values())
        prompts = decode.workload.batch / prefill.workload.batch
        if self.new_tokens is None:
            return seconds["decode"] + seconds["prefill"] * prompts / prefill.workload.context
        steps = self.new_tokens - 1  # the prefill gives the first token
        return (steps * seconds["decode"] + prompts * seconds["prefill"]) / self.new_tokens

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


def replica_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh of one replica of a plan to serve."""
    return {axis: size for axis, size in mesh.items() if axis != REPLICAS and size > 1}


def fingerprint_of(spec: ArchitectureSpec) -> str:
    """A hash of the names and shapes of a model's parameters, and of the dtype, groups, zero points and quantization of
    inputs of quantized ones, in sixteen characters. The dtype of scales and an order of inputs do not count: only a
    checkpoint's files say them for sure, and a plan that was made of its config.json is to suit it."""
    text = repr([(path, parameter.shape) for path, parameter in spec.parameters.items()])
    if spec.kernel_formats:
        known = [
            (path, form.dtype, form.group_size, form.symmetric, form.activation) for path, form in spec.kernel_formats
        ]
        text += repr(known)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

