"""Compiles one step of a serving plan for TPUs that need not be there, exactly as the engine compiles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ttpu_core.architecture import Architecture
from ttpu_core.errors import PlanError
from ttpu_core.registry import default_registry
from ttpu_core.sharding.serving import ServingLimits
from ttpu_core.sharding.strategy import Strategy
from ttpu_jax.aot.compile import compile_lowered
from ttpu_jax.aot.topology import tpu_topology
from ttpu_jax.runner.ahead import ProgramFigures, abstract_runner, lower, name_of
from ttpu_jax.runner.memory import pages_per_group
from ttpu_jax.runner.planned import step_size

if TYPE_CHECKING:
    from ttpu_plan.workload import Workload


def compile_planned_step(
    architecture: Architecture, topology_name: str, mesh: Mapping[str, int], strategy: Strategy, workload: Workload
) -> ProgramFigures:
    """Compile an engine's step, with pages for all of its sequences at their longest, and return the compiler's
    figures.

    Args:
        topology_name: a slice that has the devices of one replica.
        mesh: of one replica.

    Raises:
        MissingDependencyError: libtpu, or the serving engine, is not installed.
        PlanError: the engine has no step of such sizes.
        UnsupportedError: the engine does not serve the model, or the step does not fit.
    """
    topology = tpu_topology(topology_name)
    limits = ServingLimits.of(workload.batch, workload.context)
    settings = default_registry().service("engine").config({
        "max_num_seqs": limits.max_num_seqs,
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "page_size": limits.page_size,
        "kv_cache_dtype": workload.kv_cache or "auto",
    })
    runner = abstract_runner(architecture, topology, settings, workload.dtype, mesh or {"tensor": 1}, strategy)
    pages = limits.max_num_seqs * -(-limits.max_model_len // limits.page_size) + 1  # and the null page
    runner.num_pages = pages_per_group(replace(runner.config, num_pages=pages), runner.layout, (), None)
    shape = next((one for one in runner.buckets.all() if step_size(one) == workload.step), None)
    if shape is None:
        raise PlanError(
            f"the plan has a step of {workload.step}, but this engine compiles none of these sizes: make the plan "
            "again with `ttpu plan CHECKPOINT --save PLAN.json`."
        )
    program = next(one for one in runner.programs() if one.key == ("step", shape))
    return ProgramFigures.of(compile_lowered(topology, lower(topology, program), name_of(program.key)))
