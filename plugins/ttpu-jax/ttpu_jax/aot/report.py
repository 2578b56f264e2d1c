"""Compiles a model's decode step, prefill or training step for a TPU slice and reports the compiler's results:
memory, collectives, predicted time. Nothing runs, and neither weights nor a TPU are needed."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from math import prod
from typing import Any, Literal, Protocol, runtime_checkable

import jax

from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.errors import RequestError
from ttpu_core.quantization import QuantizationConfig, quantize_architecture
from ttpu_core.quantization.report import stored_formats
from ttpu_core.sharding.strategy import Strategy, usual_strategy
from ttpu_core.sharding.training_state import Recomputation
from ttpu_core.spec import ArchitectureSpec, MoESpec, axes
from ttpu_core.spec.arithmetic import expert_shares, product_flops
from ttpu_core.spec.context import check_context, usual_context
from ttpu_core.spec.parameters import GROUPS, LAYERS, SHARED
from ttpu_jax.aot.compile import CompiledProgram, compile_for
from ttpu_jax.aot.schedule import Breakdown, PartCost
from ttpu_jax.aot.steps import AbstractProgram, Task, inference_step, train_step
from ttpu_jax.aot.topology import TpuTopology, make_mesh, tpu_topology
from ttpu_jax.compiler_flags import program_options, training_options
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.model.support import check_supported
from ttpu_jax.ops.attention import attention_choice
from ttpu_jax.ops.fetched import FETCH_BEGIN
from ttpu_jax.ops.few_tokens import ExpertsForm
from ttpu_jax.ops.matmul.rings import StreamForm, stream_form
from ttpu_jax.optimizations import Optimization, left_out_by
from ttpu_jax.params.dtypes import model_dtype
from ttpu_jax.params.placement import Placement, device_bytes

Layers = Literal["unrolled", "scan"]


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """All executions of one kind of collective in one run of the program."""

    op: str
    count: int
    result_bytes: int  # on one device, summed over the executions
    in_background: int  # number of executions that overlap with computation


@dataclass(frozen=True, slots=True)
class UnmodelledTotal:
    """Work that counts as zero seconds in the predicted time. `roofline_seconds` is the least time of all executions of
    a kernel that states its FLOPs and bytes, see `ttpu_jax.aot.schedule.Unmodelled`."""

    name: str
    count: int
    roofline_seconds: float | None


@runtime_checkable
class ReportsWithoutPlugin(Protocol):
    """A fallback of this backend that compiles models which no plugin describes for slices that are not there."""

    def program_report(
        self,
        config: ModelConfig,
        topology_name: str,
        *,
        task: Task,
        batch: int,
        context: int,
        dtype: Any,
        mesh: Mapping[str, int] | None,
    ) -> ProgramReport:
        """As `compile_report`, for a decode step or a prefill.

        Args:
            config: of the model.
            topology_name: a name such as "v5e:2x4".
            task: decode or prefill.
            batch: number of rows.
            context: cache slots per row, and for a prefill tokens per row.
            dtype: of weights and cache.
            mesh: mesh axis → devices along it; None leaves it to the fallback.

        Raises:
            UnsupportedError: the model cannot be traced, there is no such slice or mesh, or it does not fit.
            RequestError: a task, batch, context or dtype that it does not compile.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """The compiler's results for one program. Sizes are bytes on one device, times are seconds of one run."""

    model_type: str
    num_parameters: int
    task: Task
    topology: str
    num_devices: int
    mesh: tuple[tuple[str, int], ...]
    layers: Layers | Literal["loop"]  # loop: as `scan`, of equal layers of a prompt, in a program of unrolled ones
    dtype: str
    kernel_formats: tuple[tuple[str, int], ...]  # of quantized kernels, in words, with the number of kernels
    batch: int
    context: int  # cache slots per row
    tokens: int  # tokens per row in one run: 1 for decode, the whole context for prefill and training

    peak_bytes: int  # peak HBM
    hbm_bytes: int  # HBM that one program may use
    argument_bytes: int
    temp_bytes: int
    cache_bytes: int  # donated arguments: keys and values, or weights and optimizer
    aliased_bytes: int  # results stored in donated arguments

    collectives: tuple[CollectiveTotal, ...]
    predicted_seconds: float  # without kernels
    total_seconds: float  # see `ttpu_jax.aot.schedule.ScheduleEstimate`, as the next one
    seconds_with_kernels: float  # see `ttpu_jax.aot.schedule.ScheduleEstimate`
    hbm_seconds: float  # what its traffic with HBM takes, see `ttpu_jax.aot.schedule.ScheduleEstimate`
    roofline_seconds: float  # lower bound of any program, see `_roofline_seconds`
    breakdown: Breakdown
    parts: tuple[PartCost, ...]  # of the model, costliest first
    unmodelled: tuple[UnmodelledTotal, ...]
    loops_without_trip_count: int

    compile_seconds: float
    compile_cpu_seconds: float  # of this process
    jax_version: str
    libtpu_version: str
    without: tuple[str, ...] = ()  # optimizations that were left out

    @property
    def cache_in_place(self) -> bool:
        """Whether the updated cache reuses the memory of the donated one, so that only one copy exists."""
        return self.aliased_bytes >= self.cache_bytes

    @property
    def kernel_seconds(self) -> float:
        """The least time of the kernels that state their cost, which `predicted_seconds` leaves out."""
        return sum(one.roofline_seconds or 0.0 for one in self.unmodelled)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows, generated (decode) or read (prefill), divided by `total_seconds`."""
        return self.batch * self.tokens / self.total_seconds


def compile_report(
    architecture: Architecture,
    topology_name: str,
    *,
    task: Task = "decode",
    batch: int = 32,
    context: int | None = None,
    dtype: Any = "bfloat16",
    mesh: Mapping[str, int] | None = None,
    slices: Mapping[str, int] | None = None,
    strategy: Strategy | None = None,
    layers: Layers = "unrolled",
    attn_implementation: str = "auto",
    attention_config: Mapping[str, Any] | None = None,
    experts: ExpertsForm = "auto",
    quantization: Any = None,
    residual_stream: StreamForm = "auto",
    remat: Recomputation = "full",
    without: Collection[str] = (),
) -> ProgramReport:
    """Compile one program of a model for a TPU slice and report the compiler's results.

    `decode` and `prefill` take weights, tokens and a donated cache of `context` slots per row; they return each
    row's likeliest next token and the cache. `decode` takes one token per row, `prefill` takes `context` tokens into
    an empty cache. `train` is one step of AdamW on `batch` rows of `context` tokens (see `ttpu_jax.aot.steps`).

    Args:
        architecture: the model.
        topology_name: a name such as "v5e:2x4", see `ttpu_jax.aot.topology.tpu_topology`.
        task: decode, prefill or train.
        batch: number of rows.
        context: cache slots per row, or tokens per row; None is 2,048, or the model's context if that is shorter.
            Training with a longer one than the model's is warned of.
        dtype: dtype of weights and cache, see `ttpu_jax.params.dtypes.model_dtype`.
        mesh: mesh axis → devices along it; None shards every layer over all devices (`tensor`; `fsdp` for training).
        slices: mesh axis → slices along it for several slices; None puts them on the first axes that they divide.
        strategy: which mesh axes shard which logical axes; None is the usual one of the task.
        layers: "unrolled" compiles each layer with its own cache array; "scan" compiles one layer and loops.
        attn_implementation: as in from_pretrained().
        attention_config: as in from_pretrained().
        experts: how experts are computed, see `ttpu_jax.ops.few_tokens`.
        quantization: of the weights, as in from_pretrained().
        residual_stream: "auto" cuts the residual stream of inference where that is faster, "whole" never does.
        remat: what the backward pass of a training step computes again.
        without: names of optimizations that are left out, see `ttpu_jax.optimizations`.

    Raises:
        UnsupportedError: no such slice or mesh; or the model cannot be sharded this way, does not fit, or is not
            supported by this backend.
        RequestError: an unknown task; a batch, context or dtype out of range, or a context that is longer than the
            model's; an optimization that programs of this
            task do not have.
        MissingDependencyError: libtpu is not installed.
    """
    if context is None:
        context = usual_context(architecture.spec)
    if batch < 1 or context < 1:
        raise RequestError(
            f"a {task} program for a batch of {batch} with {context} slots was asked for, but both must be at least 1: "
            "raise them."
        )
    check_context(architecture.spec, context, trains=task == "train")
    left_out = left_out_by([task], without)[task]
    stream = stream_form(residual_stream)
    config = None if quantization is None else QuantizationConfig.read(quantization)
    spec = quantize_architecture(architecture, config).spec
    check_supported(spec)
    if task == "train" and spec.kernel_formats:
        raise RequestError(
            f"a training step of {spec.model_type} with quantized weights was asked for, but they are not trained: "
            "leave the quantization out, or take a checkpoint that is not quantized."
        )
    if experts != "auto" and not any(isinstance(layer.mlp, MoESpec) for layer in spec.layers):
        raise RequestError(
            f"experts {experts!r} was asked for, but no layer of {spec.model_type} has experts: leave it out."
        )
    kind = model_dtype(dtype, platform="tpu")
    topology = tpu_topology(topology_name)
    axis = "fsdp" if task == "train" else "tensor"
    strategy = strategy or usual_strategy(trains=task == "train")
    by_links = Optimization.MESH_ORDER not in left_out
    devices = make_mesh(topology, mesh or {axis: len(topology.devices)}, slices, by_links=by_links)
    placement = Placement(devices, strategy)
    attention = attention_choice(
        spec, attn_implementation, placement.platform, attention_config, placement.axes_of(axes.SEQUENCE)
    )
    pallas = "auto" if config is None else config.use_pallas
    ropes = different_ropes(spec.layers)
    runtime = Runtime(
        placement,
        attention.name,
        ropes,
        attention.options,
        use_pallas=pallas,
        dtype=kind,
        experts=experts,
        stream="whole" if task == "train" else stream,
        without=left_out,
    )
    stacked, tokens = layers == "scan", 1 if task == "decode" else context
    if task == "train":
        step = train_step(spec, runtime, kind, batch=batch, tokens=context, stacked=stacked, remat=remat)
        shards = prod(devices.shape[axis] for axis in placement.axes_of(axes.BATCH))
        options = training_options("tpu", topology.chip, batch * context // shards)
    else:
        step = inference_step(spec, runtime, kind, batch=batch, tokens=tokens, context=context, stacked=stacked)
        options = program_options("tpu", topology.chip)
    step.function.__name__ = f"{task} of {spec.model_type}"  # how an error names the program
    program = compile_for(
        topology,
        step.function,
        *step.arguments,
        donate_argnums=step.donated,
        compiler_options=options,
    )
    return reported(
        program,
        topology,
        placement,
        model_type=spec.model_type,
        num_parameters=spec.num_parameters,
        without=tuple(sorted(left_out)),
        task=task,
        layers="loop" if FETCH_BEGIN in program.hlo_text else layers,
        dtype=kind.name,
        kernel_formats=tuple(stored_formats(spec).items()),
        batch=batch,
        context=context,
        tokens=tokens,
        cache_bytes=device_bytes(step.held),
        roofline_seconds=_roofline_seconds(step.spec, topology, step, batch, tokens, task),
    )


def reported(
    program: CompiledProgram, topology: TpuTopology, placement: Placement, *, task: Task, **known: Any
) -> ProgramReport:
    """The report of a compiled program; `known` are the fields that it does not say itself."""
    return ProgramReport(
        **known,
        task=task,
        topology=topology.name,
        num_devices=len(topology.devices),
        mesh=tuple(placement.mesh.shape.items()) if placement.mesh else (),
        peak_bytes=program.peak_bytes,
        hbm_bytes=topology.chip.hbm_bytes,
        argument_bytes=program.argument_bytes,
        temp_bytes=program.temp_bytes,
        aliased_bytes=program.alias_bytes,
        collectives=_collective_totals(program),
        predicted_seconds=program.estimate.seconds,
        total_seconds=program.estimate.total_seconds,
        seconds_with_kernels=program.estimate.seconds_with_kernels,
        hbm_seconds=program.estimate.hbm_seconds,
        breakdown=program.estimate.breakdown,
        parts=program.estimate.parts,
        unmodelled=_unmodelled_totals(program),
        loops_without_trip_count=len(program.estimate.loops_without_trip_count),
        compile_seconds=program.compile_seconds,
        compile_cpu_seconds=program.compile_cpu_seconds,
        jax_version=jax.__version__,
        libtpu_version=metadata.version("libtpu"),
    )


def _roofline_seconds(
    spec: ArchitectureSpec, topology: TpuTopology, step: AbstractProgram, batch: int, tokens: int, task: Task
) -> float:
    """Lower bound from the chip's peak rates: the larger of the time to read the weights (and for decode the cache)
    from HBM once, and the time of the layers' matrix products in bfloat16, three times as many for training.
    Experts that the batch can reach are read, and each token multiplies only its own experts. Attention's
    products and collectives are not included."""
    rows, params = batch * tokens, step.arguments[0]
    read, multiplied = 0.0, 0.0
    for path, array in params.items():
        used, active = _expert_shares(spec, path, rows)
        if path.startswith((LAYERS, GROUPS, SHARED)):
            uses = max(1, len(spec.layers_of(path)))
            read += used * device_bytes(array)
            multiplied += uses * product_flops(active * prod(array.shape), rows) * path.endswith("kernel")
    read += device_bytes(params["embed.embedding" if spec.head.tied else "head.kernel"])
    read += device_bytes(step.held) if task == "decode" else 0
    return max(
        read / topology.chip.hbm_bytes_per_second,
        (3 if task == "train" else 1) * multiplied / len(topology.devices) / topology.chip.bf16_flops,
    )


def _expert_shares(spec: ArchitectureSpec, path: str, rows: int) -> tuple[float, float]:
    """`expert_shares` of the parameter at a path, stacked or not."""
    if ".moe.experts." not in path:
        return 1.0, 1.0
    if path.startswith(GROUPS):
        _, group, place, *_ = path.split(".")
        return expert_shares(spec.groups()[int(group)].unit[int(place)].mlp, rows)
    return expert_shares(spec.layers_of(path)[0].mlp, rows)


def _collective_totals(program: CompiledProgram) -> tuple[CollectiveTotal, ...]:
    totals: dict[str, CollectiveTotal] = {}
    for one in program.collectives:
        so_far = totals.get(one.op, CollectiveTotal(one.op, 0, 0, 0))
        totals[one.op] = CollectiveTotal(
            one.op,
            so_far.count + one.count,
            so_far.result_bytes + one.count * one.result_bytes,
            so_far.in_background + one.count * one.is_async,
        )
    return tuple(totals.values())


def _unmodelled_totals(program: CompiledProgram) -> tuple[UnmodelledTotal, ...]:
    """Totals by the compiler's names without their unique suffixes: `scatter_fusion.3` → `scatter_fusion`."""
    counts: Counter[str] = Counter()
    least: defaultdict[str, float] = defaultdict(float)
    for one in program.estimate.unmodelled:
        name = re.sub(r"(\.\d+|\.clone)+$", "", one.name).replace("-", "_")
        counts[name] += one.count
        if one.roofline_seconds is not None:
            least[name] += one.count * one.roofline_seconds
    return tuple(UnmodelledTotal(name, count, least.get(name)) for name, count in counts.most_common())
