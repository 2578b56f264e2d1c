"""Compiles an engine's programs for a TPU slice, for `ttpu compile --topology`. It uses the mesh that loading the
checkpoint on the slice would choose, and stores the programs for a machine that has such a slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ttpu_core.architecture import Architecture
from ttpu_core.errors import UnsupportedError
from ttpu_core.quantization import QuantizationConfig, quantize_architecture
from ttpu_core.registry import default_registry
from ttpu_core.services import Planner
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.parallelism import AUTO, Parallelism, Rules, resolve_parallelism, strategy_with
from ttpu_core.sharding.request import the_one_given
from ttpu_jax.aot.topology import tpu_topology
from ttpu_jax.ops.matmul.rings import StreamForm
from ttpu_jax.parallel import planned
from ttpu_jax.runner.ahead import Ahead, compile_ahead
from ttpu_jax.runner.page_count import remember_pages

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig


def compile_slice(
    architecture: Architecture,
    topology: str,
    config: EngineConfig,
    *,
    dtype: str,
    parallelism_strategy: str | None = None,
    sharding_rules: Rules | None = None,
    plan: Any = None,
    attn_implementation: str = "auto",
    quantization: Any = None,
    residual_stream: StreamForm = "auto",
    progress: Callable[[str, float, float], None] | None = None,
) -> Ahead:
    """Compile an engine's programs for a slice, and store them.

    Args:
        architecture: the model.
        topology: the slice, as in v5e:2x4.
        config: the engine's settings.
        dtype: of weights, activations and cache.
        parallelism_strategy: how the model is sharded; None shards every layer over all devices.
        sharding_rules: logical axis → mesh axes, in place of the usual ones.
        plan: a plan, or its file, in place of a strategy and rules.
        attn_implementation: as for loading.
        quantization: of the weights, as for loading.
        residual_stream: as for loading.
        progress: called as progress("compile", programs done, all programs).

    Raises:
        UnsupportedError: no such slice or mesh, several machines, or a program does not fit.
        RequestError: settings that contradict the model or each other.
        MissingDependencyError: libtpu is not installed.
    """
    hosts = parse_topology(topology).num_hosts
    if hosts > 1:
        raise UnsupportedError(
            f"programs for {topology} were asked for, which is {hosts} machines, but the engine serves from one: take "
            "a slice that one machine holds, as in v5e:2x4."
        )
    devices = tpu_topology(topology).devices  # says what to install, or that there is no such slice, before all else
    asked = None if quantization is None else QuantizationConfig.read(quantization)
    architecture = quantize_architecture(architecture, asked)
    parallelism = _parallelism(architecture, devices, parallelism_strategy, sharding_rules, plan, dtype, asked)
    on_compile = None if progress is None else (lambda _, done, total: progress("compile", done, total))
    found = compile_ahead(
        architecture,
        topology,
        config,
        dtype=dtype,
        mesh=dict(parallelism.mesh) or None,
        strategy=parallelism.strategy,
        attn_implementation=attn_implementation,
        use_pallas="auto" if asked is None else asked.use_pallas,
        residual_stream=residual_stream,
        progress=on_compile,
        store=True,
    )
    if found.config.kv_cache_memory is None and found.num_pages:
        remember_pages(found.num_pages, found.runner, found.page_bytes)
    return found


def _parallelism(
    architecture: Architecture,
    devices: Sequence[Any],
    asked: str | None,
    rules: Rules | None,
    plan: Any,
    dtype: str,
    quantization: QuantizationConfig | None,
) -> Parallelism:
    """As loading the checkpoint there would resolve it, but that nothing said means all devices."""
    the_one_given(rules if asked or plan else None, parallelism_strategy=asked, plan=plan)
    if plan is not None:
        planner: Planner = default_registry().service("planner")
        text = None if quantization is None else str(quantization)
        return planner.plan_for(
            plan, architecture.spec, dtype=dtype, quantization=text, purpose="serve", backend="JAX"
        )
    if asked is None:
        return Parallelism((("tensor", len(devices)),), strategy=strategy_with(rules))
    if asked.strip().lower() == AUTO:
        return planned(architecture.spec, list(devices), strategy_with(rules), dtype, "serve")
    return resolve_parallelism(asked, len(devices), rules)
