"""The planner. It takes an architecture, TPU slices and a purpose, and returns plans, the fastest that fit first. It
also finds the smallest slice of each TPU generation that holds a model, and what would make a model fit. It compiles
nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.services import Quantization
from ttpu_core.sharding.hardware import CHIPS, Chip, Topology, slice_sizes
from ttpu_core.sharding.links import slice_axes
from ttpu_core.sharding.padding import pad_architecture
from ttpu_core.sharding.parallelism import strategy_with
from ttpu_core.sharding.serving import StepSize
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, MESH_AXES, Strategy, usual_strategy
from ttpu_core.sharding.training_state import ELEMENTWISE, REMATS, WITH_MOMENTUM, UpdateSettings
from ttpu_core.spec import ArchitectureSpec, AttentionSpec, MoESpec, axes
from ttpu_core.spec.context import USUAL_CONTEXT, check_context, usual_context
from ttpu_core.spec.parameters import stacked_parameters
from ttpu_plan.cost import estimate_time
from ttpu_plan.memory import estimate_memory
from ttpu_plan.plan import ENGINE_AXES, HEADROOM, REPLICAS, Plan, ProgramEstimate, fingerprint_of, replica_mesh
from ttpu_plan.served import limits_for, planning_backend, served_workloads, shapes_for
from ttpu_plan.shards import admissible, shard_model
from ttpu_plan.workload import Workload
from ttpu_plan.zero import batch_axes, weight_strategy

Purpose = Literal["inference", "generation", "training"]
Mesh = dict[str, int]

ROWS = 32
"""What is served where nothing else is asked for; training takes one row a device."""

SHORTEST_PART = 512
"""Tokens of a row that a device must keep for the sequence to be sharded: with fewer, exchanging keys costs more than
it saves."""


@dataclass(frozen=True, slots=True)
class Request:
    """The purpose of a plan.

    Args:
        purpose: "inference" is a serving engine's steps, in replicas that know nothing of each other; "generation" is
            `generate`'s decode step and prefill over contiguous caches; "training" is a training step.
        batch: rows of the decode or training step, over all replicas; None is 32, and to train one a device in each
            part of an update.
        context: slots of each row's cache, and tokens of a prompt or of a row to train on; None is 2,048, or the
            model's context if that is shorter.
        strategy: which mesh axes shard which logical axes; None is the usual one of the purpose.
        one_replica: to serve, propose one engine over all devices alone.
        kv_cache: to serve, quantize keys and values, to int8 or fp8.
        update: to train, how; None is AdamW on whole batches. With remat="auto" the least is computed again that fits.
        new_tokens: to generate, tokens of each answer, by which plans are ranked; meshes that shard a prompt's tokens
            are then considered too. None is as many as a prompt has.
    """

    purpose: Purpose = "inference"
    batch: int | None = None
    context: int | None = None
    dtype: str = "bfloat16"
    quantization: Quantization | None = None
    strategy: Strategy | None = None
    one_replica: bool = False
    kv_cache: str | None = None
    update: UpdateSettings | None = None
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the values before meshes are enumerated.

        Raises:
            RequestError: an unknown purpose, sizes that no workload can have, or a momentum that has no effect.
        """
        if self.purpose not in get_args(Purpose):
            raise RequestError(
                f"a plan for {self.purpose!r} was asked for, but there is only {', '.join(get_args(Purpose))}: write "
                "one of them."
            )
        if self.new_tokens is not None and (self.purpose != "generation" or self.new_tokens < 1):
            raise RequestError(
                f"new_tokens={self.new_tokens} was asked for in a plan for {self.purpose}, but it is the number of "
                "tokens of an answer in a plan for generation: leave it out, or let it be 1 or more."
            )
        (first, *_) = self.workloads(1, {})
        step = StepSize(1, 1, 1) if self.purpose == "inference" else None
        replace(first, step=step, kv_cache=self.kv_cache)
        if self.update is not None and self.update.momentum > 0 and self.update.optim not in WITH_MOMENTUM:
            raise RequestError(
                f"momentum={self.update.momentum:g} was given with optim={self.update.optim}, but it has no effect "
                f"without optim: {' or '.join(WITH_MOMENTUM)}: take one of these, or leave momentum out."
            )

    def rows(self, num_devices: int) -> int:
        """The number of rows of the decode or training step."""
        if self.batch is not None:
            return self.batch
        return num_devices * self.parts if self.purpose == "training" else ROWS

    @property
    def tokens(self) -> int:
        """The context, of models that have as many positions as are usual."""
        return USUAL_CONTEXT if self.context is None else self.context

    @property
    def sharding(self) -> Strategy:
        """The strategy that was asked for, or the usual one of the purpose."""
        return self.strategy or usual_strategy(trains=self.purpose == "training")

    @property
    def parts(self) -> int:
        """Parts that an update is computed in."""
        return 1 if self.update is None else self.update.gradient_accumulation_steps

    @property
    def zero_stage(self) -> int | None:
        """The stage of ZeRO; None leaves it to the mesh."""
        return None if self.update is None else self.update.zero_stage

    def workloads(self, num_devices: int, mesh: Mapping[str, int]) -> tuple[Workload, ...]:
        """Return `generate`'s programs, decode and prefill, where each group of devices reads a prompt of its own; or a
        training step."""
        rows = self.rows(num_devices)
        if self.purpose == "training":
            step = Workload("train", rows, self.tokens, self.dtype, "scan", quantization=self.quantization)
            return (replace(step, update=self.update or UpdateSettings()),)
        decode = Workload("decode", rows, self.tokens, self.dtype, quantization=self.quantization)
        decode = replace(decode, update=self.update)  # which is refused
        groups = prod(mesh.get(axis, 1) for axis in dict(self.sharding.rules).get("batch", ()))
        return decode, replace(decode, task="prefill", batch=min(rows, groups))


SERVING = Request()


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes a model fit, and the resulting plan."""

    change: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class NoFit:
    """Why no mesh of some slices holds a model. `closest` is the plan that takes the least memory."""

    closest: Plan
    remedies: tuple[Remedy, ...]

    @property
    def missing_bytes(self) -> int:
        """The bytes on each device by which the closest plan exceeds its limit."""
        return round(self.closest.memory.total - HEADROOM * self.closest.hbm_bytes)

    def __str__(self) -> str:
        plan, gib = self.closest, 2.0**30
        needed, there = plan.memory.total / gib, HEADROOM * plan.hbm_bytes / gib
        text = f"{plan.model_type} needs {needed:.1f} GiB on each device of {plan.topology} at best "
        text += f"({plan.layout}), where a plan may take {there:.1f} GiB"
        ways = "; ".join(one.change for one in self.remedies)
        return f"{text}: {ways or 'no smaller batch, context or weights make it fit, so take another chip'}."


def plans(spec: ArchitectureSpec, topology: Topology, request: Request = SERVING) -> list[Plan]:
    """Return every plan for some slices: first those that fit, the fastest first; then those that do not, the smallest
    first.

    Raises:
        UnsupportedError: no mesh divides the model at all.
        RequestError: quantized weights were to be trained.
    """
    if request.purpose == "training" and spec.kernel_formats:
        raise RequestError(
            f"training a {spec.model_type} whose weights are quantized was asked for, but the weights that a training "
            "step updates are float32: take the original weights."
        )
    request = _with_context(spec, request)
    fingerprint = fingerprint_of(spec)
    found = [
        _plan(spec, fingerprint, topology, mesh, replace(request, strategy=strategy))
        for mesh in meshes(spec, topology, request)
        for strategy in strategies(spec, topology, mesh, request)
    ]
    if not found:
        served = request.purpose == "inference"
        raise UnsupportedError(
            f"a plan of {spec.model_type} for {topology.name} was asked for, but no mesh of its {topology.num_devices} "
            f"devices divides the model and {request.rows(topology.num_devices)} rows"
            f"{', where each replica has the devices of one host' if served else ''}: take another slice, or a batch "
            "that is a multiple of the devices."
        )
    return sorted(found, key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.memory.total))


def plan_of_mesh(spec: ArchitectureSpec, topology: Topology, mesh: Mesh, request: Request) -> Plan:
    """Return the plan for one mesh of some slices.

    Raises:
        UnsupportedError: a parameter that the mesh cannot divide.
    """
    return _plan(spec, fingerprint_of(spec), topology, mesh, _with_context(spec, request))


def meshes(spec: ArchitectureSpec, topology: Topology, request: Request) -> Iterator[Mesh]:
    """Return the meshes that a slice's devices and the model's sizes allow: the product of the axes is the number of
    devices.

    Rows are sharded evenly; experts are whole; heads are padded, but there is at least one for each device of `tensor`;
    a device keeps at least 512 tokens of a sharded sequence. Weights that no device has whole are for training: to
    generate, gathering them for every token would take longer than to read them. To serve, `data` are replicas, and the
    devices of a replica belong to one host.
    """
    request = _with_context(spec, request)
    devices = topology.num_devices
    trains, serves = request.purpose == "training", request.purpose == "inference"
    rows = request.rows(devices) // request.parts
    heads = max((_heads(layer.mixer) for layer in spec.layers), default=1)
    experts = [mixture.num_experts for mixture in _mixtures(spec)]
    shards_sequence = trains or request.new_tokens is not None
    most_sequence = max(1, request.tokens // SHORTEST_PART) if shards_sequence else 1
    allowed = {
        "stage": [1],
        "data": [n for n in _divisors(devices) if rows % n == 0],
        "fsdp": [n for n in _divisors(devices) if rows % n == 0] if trains else [1],
        "expert": [n for n in _divisors(devices) if experts and all(count % n == 0 for count in experts)] or [1],
        "sequence": [n for n in _divisors(devices) if n <= most_sequence and request.tokens % n == 0],
        "tensor": [n for n in _divisors(topology.devices_per_slice) if n <= heads],
    }
    if serves:
        taken = {REPLICAS, *ENGINE_AXES}
        allowed = {axis: sizes if axis in taken else [1] for axis, sizes in allowed.items()}
    for sizes in _products(devices, [allowed[axis] for axis in MESH_AXES]):
        mesh = {axis: size for axis, size in zip(MESH_AXES, sizes, strict=True) if size > 1}
        row_shards = prod(mesh[axis] for axis in batch_axes(mesh, request.sharding))
        if serves and not _serves_well(mesh, topology, request):
            continue
        if request.zero_stage and row_shards == 1:  # nothing that the stage divides
            continue
        if rows % row_shards or not _crosses_well(mesh, topology) or not _updates_on(spec, mesh, request):
            continue
        if admissible(spec, mesh, _of(request, mesh)):
            yield mesh


def strategies(spec: ArchitectureSpec, topology: Topology, mesh: Mesh, request: Request) -> Iterator[Strategy]:
    """Return the strategies that are considered on a mesh: the request's, and to serve and to generate one that shards
    a mixture's experts over the devices of `tensor`, and to generate over those of `data` too. Devices then gather
    their tokens for experts, and not the experts, and of a prompt's tokens each gathers the rows of its own experts
    only. An engine's replicas exchange nothing, slices would exchange the tokens of each layer, and a rule for experts
    that is not the usual one is the user's.
    """
    yield request.sharding
    rules, usual = dict(request.sharding.rules), dict(DEFAULT_STRATEGY.rules)
    if request.purpose == "training" or topology.slices > 1 or rules.get(axes.EXPERT) != usual[axes.EXPERT]:
        return
    dividing = ("tensor",) if request.purpose == "inference" else ("data", "tensor")
    over = tuple(axis for axis in dividing if mesh.get(axis, 1) > 1)
    if not over or mesh.get("expert", 1) > 1 or not _mixtures(spec):
        return
    strategy = strategy_with({axes.EXPERT: over}, request.sharding)
    if admissible(spec, mesh, strategy):
        yield strategy


def smallest_slices(
    spec: ArchitectureSpec, request: Request = SERVING, chips: tuple[Chip, ...] = tuple(CHIPS.values())
) -> dict[str, Plan | None]:
    """Return the fastest plan for the smallest slice of each chip that holds the model; None where 256 chips do not."""
    return {chip.name: _smallest(spec, chip, request) for chip in chips}


def best_plan(spec: ArchitectureSpec, topology: Topology, request: Request = SERVING) -> Plan:
    """Return the fastest plan that fits. Warns of rows to train on that are longer than the model's context.

    Raises:
        RequestError: a context that is longer than the model's.
        UnsupportedError: none does; the message says by how much, and what would.
    """
    if request.context is not None:
        check_context(spec, request.context, trains=request.purpose == "training")
    found = plans(spec, topology, request)
    if not found[0].fits:
        raise UnsupportedError(str(why_nothing_fits(spec, topology, request, found)))
    return found[0]


def why_nothing_fits(
    spec: ArchitectureSpec, topology: Topology, request: Request, found: list[Plan] | None = None
) -> NoFit:
    """Return by how much a model does not fit, and which single changes would make it fit: fewer rows, a shorter
    context, quantized weights, more chips."""
    request = _with_context(spec, request)
    closest = min(found or plans(spec, topology, request), key=lambda plan: plan.memory.total)
    remedies: list[Remedy] = []
    rows = request.rows(topology.num_devices)
    for batch in (one for one in _halves(rows) if one % request.parts == 0):
        if plan := _fitting(spec, topology, replace(request, batch=batch)):
            remedies.append(Remedy(f"a batch of {batch} instead of {rows} would fit", plan))
            break
    for context in _halves(request.tokens):
        if plan := _fitting(spec, topology, replace(request, context=context)):
            remedies.append(Remedy(f"a context of {context} instead of {request.tokens} would fit", plan))
            break
    dense = request.quantization is None and not spec.kernel_formats
    for name in ("int8", "int4") if request.purpose != "training" and dense else ():
        if plan := _fitting(spec, topology, replace(request, quantization=name)):
            remedies.append(Remedy(f"{name} weights would fit", plan))
            break
    if plan := _smallest(spec, topology.chip, request, topology.num_chips):
        remedies.append(Remedy(f"{plan.slices.num_chips} chips ({plan.topology}) would fit", plan))
    return NoFit(closest, tuple(remedies))


def why_nothing_serves(
    spec: ArchitectureSpec, request: Request, chips: tuple[Chip, ...] = tuple(CHIPS.values())
) -> NoFit:
    """Return why no slice of any TPU generation holds a model. The answer describes the slice with the most memory
    among those whose devices can share the model and the rows.

    Raises:
        UnsupportedError: there is none of those either.
    """
    slices = [Topology(chip, size) for chip in chips for size in slice_sizes(chip)]
    slices.sort(key=lambda one: one.num_devices * one.chip.hbm_bytes)
    while True:
        topology = slices.pop()
        try:
            return why_nothing_fits(spec, topology, request)
        except UnsupportedError:
            if not slices:
                raise


def _plan(spec: ArchitectureSpec, fingerprint: str, topology: Topology, mesh: Mesh, request: Request) -> Plan:
    dcn, strategy = slice_axes(mesh, topology.slices), request.sharding
    shapes, workloads = None, request.workloads(topology.num_devices, mesh)
    if request.purpose == "inference":
        limits = limits_for(request.rows(topology.num_devices), request.tokens, mesh, request.kv_cache)
        model = shard_model(spec, replica_mesh(mesh), strategy)
        shapes = shapes_for(planning_backend(), model, limits, request.dtype)
        workloads = served_workloads(shapes, limits, request.dtype, request.quantization)
    if request.update is not None and request.update.remat == "auto":
        workloads = tuple(_with_least_remat(spec, mesh, one, topology.chip, strategy) for one in workloads)
    programs = tuple(
        ProgramEstimate(
            workload,
            estimate_memory(spec, mesh, workload, strategy, topology.chip, shapes),
            estimate_time(spec, mesh, topology, workload, _of(request, mesh), dcn),
        )
        for workload in workloads
    )
    axes_of_mesh, across = tuple(mesh.items()), tuple(dcn.items())
    return Plan(
        spec.model_type, fingerprint, topology.name, axes_of_mesh, across, strategy, programs, request.new_tokens
    )


def _with_least_remat(
    spec: ArchitectureSpec, mesh: Mesh, workload: Workload, chip: Chip, strategy: Strategy
) -> Workload:
    """A training step that computes no more again than is needed to fit; all if it does not fit."""
    for remat in reversed(REMATS):
        tried = replace(workload, update=replace(workload.settings, remat=remat))
        if estimate_memory(spec, mesh, tried, strategy, chip).total <= HEADROOM * chip.hbm_bytes:
            break
    return tried


def _of(request: Request, mesh: Mapping[str, int]) -> Strategy:
    """How a mesh divides the weights that a program computes with."""
    if request.purpose != "training":
        return request.sharding
    return weight_strategy(mesh, request.sharding, request.zero_stage)


def _smallest(spec: ArchitectureSpec, chip: Chip, request: Request, beyond: int = 0) -> Plan | None:
    for size in slice_sizes(chip):
        topology = Topology(chip, size)
        if topology.num_chips > beyond and (plan := _fitting(spec, topology, request)):
            return plan
    return None


def _fitting(spec: ArchitectureSpec, topology: Topology, request: Request) -> Plan | None:
    try:
        best = plans(spec, topology, request)[0]
    except UnsupportedError:
        return None
    return best if best.fits else None


def _crosses_well(mesh: Mesh, topology: Topology) -> bool:
    """Whether slices lie along axes that talk little: what is gathered or summed for each layer stays in a slice."""
    along = slice_axes(mesh, topology.slices)
    return prod(along.values()) == topology.slices and not set(along) & {"expert", "sequence", "tensor"}


def _updates_on(spec: ArchitectureSpec, mesh: Mesh, request: Request) -> bool:
    """Whether the optimizer runs on a mesh: on one that pads parameters only those that update each number by itself
    do, with their state on the devices, and state on the host needs several devices. A mesh that pads layers of
    different sizes to one size is refused in training, because checkpoints stack layers of one size."""
    if request.purpose != "training":
        return True
    padded, paddings = pad_architecture(spec, mesh, request.sharding)
    if paddings and list(stacked_parameters(padded)) != list(stacked_parameters(spec)):
        return False
    settings = request.update
    if settings is None or (settings.optim in ELEMENTWISE and not settings.offload_optimizer):
        return True
    return not paddings and (bool(mesh) or not settings.offload_optimizer)


def _serves_well(mesh: Mesh, topology: Topology, request: Request) -> bool:
    """Whether each replica is one process: it has whole chips, all of them of one host."""
    if request.one_replica:
        return REPLICAS not in mesh
    devices = prod(replica_mesh(mesh).values())
    in_host = topology.num_devices // topology.num_hosts
    return devices % topology.chip.devices_per_chip == 0 and in_host % devices == 0


def _with_context(spec: ArchitectureSpec, request: Request) -> Request:
    """The request with the usual context of a model where none is named."""
    return request if request.context is not None else replace(request, context=usual_context(spec))


def _mixtures(spec: ArchitectureSpec) -> list[MoESpec]:
    return [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]


def _heads(mixer: object) -> int:
    if isinstance(mixer, AttentionSpec):
        return mixer.num_heads
    options = dict(getattr(mixer, "options", ()))
    return int(options.get("num_heads") or 2**10)  # another mixer's own axes have the last word


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _products(total: int, choices: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """One number of each list, whose product is `total`."""
    if len(choices) == 1:
        if total in choices[0]:
            yield (total,)
        return
    for size in choices[0]:
        if total % size == 0:
            yield from ((size, *rest) for rest in _products(total // size, choices[1:]))
