"""Compiles the update of a training run for a TPU slice that need not be there, and says what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import jax

from ttpu_core.architecture import Architecture
from ttpu_core.sharding.parallelism import Parallelism, resolve_parallelism
from ttpu_core.sharding.strategy import TRAINING_STRATEGY
from ttpu_core.spec import axes
from ttpu_jax.aot.compile import compile_for
from ttpu_jax.aot.steps import run_step
from ttpu_jax.aot.topology import make_mesh, tpu_topology
from ttpu_jax.compiler_flags import training_options
from ttpu_jax.model.modules import Runtime, different_ropes
from ttpu_jax.model.support import check_supported
from ttpu_jax.ops.attention import attention_choice
from ttpu_jax.params.placement import Placement
from ttpu_jax.train.offload import HOST

if TYPE_CHECKING:
    from ttpu_train.runner import StepSettings


@dataclass(frozen=True)
class CompiledUpdate:
    """The compiler's figures; see `ttpu_train.runner.CompiledTraining`."""

    topology: str
    devices: int
    mesh: str
    rows: int
    length: int
    peak_bytes: int
    hbm_bytes: int
    held_bytes: int
    seconds: float
    kernel_seconds: float
    dcn_seconds: float
    host_seconds: float
    peak_flops: float
    compile_seconds: float


def compile_update(
    architecture: Architecture,
    topology_name: str,
    settings: StepSettings,
    *,
    rows: int,
    length: int,
    packed: bool = False,
    parallelism_strategy: str | None = None,
    attn_implementation: str = "auto",
) -> CompiledUpdate:
    """Compile the update of a run.

    Args:
        architecture: the model.
        topology_name: the slice, as in v5e:4x4.
        settings: of the run; remat="auto" compiles "full".
        rows: that a device computes at once, of the devices that rows are divided over.
        length: tokens of a row.
        packed: rows hold several sequences.
        parallelism_strategy: how the model is sharded; None is fsdp over all devices.
        attn_implementation: as for loading.

    Raises:
        UnsupportedError: no such slice or mesh, or the update does not fit.
        RequestError: settings that contradict the model or each other.
        MissingDependencyError: libtpu is not installed.
    """
    spec = architecture.spec
    check_supported(spec)
    topology = tpu_topology(topology_name)
    found = resolve_parallelism(parallelism_strategy or "fsdp", len(topology.devices), usual=TRAINING_STRATEGY)
    placement = _placement(topology, found)
    attention = attention_choice(
        spec, attn_implementation, placement.platform, None, placement.axes_of(axes.SEQUENCE)
    )
    runtime = Runtime(placement, attention.name, different_ropes(spec.layers), attention.options)
    shards = prod(placement.mesh.shape[axis] for axis in placement.axes_of(axes.BATCH)) if placement.mesh else 1
    batch = rows * shards * settings.accumulation
    step = run_step(architecture, runtime, settings, batch=batch, tokens=length, packed=packed)
    step.function.__name__ = f"update of {spec.model_type}"  # how an error names the program
    program = compile_for(
        topology,
        step.function,
        *step.arguments,
        donate_argnums=step.donated,
        compiler_options=training_options("tpu", topology.chip, rows * length),
    )
    return CompiledUpdate(
        topology=topology.name,
        devices=len(topology.devices),
        mesh=str(found),
        rows=batch,
        length=length,
        peak_bytes=program.peak_bytes,
        hbm_bytes=topology.chip.hbm_bytes,
        held_bytes=_device_bytes(step.held),
        seconds=program.estimate.total_seconds,
        kernel_seconds=program.estimate.kernel_seconds,
        dcn_seconds=program.estimate.breakdown.dcn_in_background,
        host_seconds=program.estimate.breakdown.host_in_background,
        peak_flops=topology.chip.bf16_flops,
        compile_seconds=program.compile_seconds,
    )


def _placement(topology: Any, found: Parallelism) -> Placement:
    mesh = make_mesh(topology, dict(found.mesh) or {"data": len(topology.devices)}, dict(found.dcn) or None)
    return Placement(mesh, found.strategy)


def _device_bytes(arrays: Any) -> int:
    """Bytes of abstract arrays on one device, without the padding of tiles and without what lies on the host."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if leaf.sharding.memory_kind != HOST]
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
