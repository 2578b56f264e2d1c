"""Makes the runner of a loaded model for an engine: fills in the settings that depend on the platform, and chooses step
sizes. Caches and programs are made later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import UnsupportedError
from ttpu_core.mapping import pad_mapping
from ttpu_core.sharding.serving import BATCHED_TOKENS, PAGE_SIZE
from ttpu_core.spec import ArchitectureSpec, axes
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime
from ttpu_jax.model.paged import paged_layout
from ttpu_jax.platform import multiplies_bfloat16
from ttpu_jax.runner.adapter_slots import LoadedAdapters
from ttpu_jax.runner.buckets import buckets_for
from ttpu_jax.runner.compilation_cache import keep_compiled
from ttpu_jax.runner.executable_cache import ExecutableCache
from ttpu_jax.runner.lora import load_adapters
from ttpu_jax.runner.runner import Runner
from ttpu_jax.runner.weights import ServedWeights

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_serve.api.engine_config import EngineConfig
    from ttpu_serve.runner import AdapterWeights

WIDEN_ROWS = 192
"""Rows from which XLA:CPU is faster, by a quarter, where bfloat16 is made float32 before a product, on processors
without instructions for bfloat16. With them (measured with AMX) a product of 512 rows takes a quarter of the time as
it is."""
RECURRENT_PREFILLS = 2
"""Prompts per step where layers carry recurrent states: each takes a row as long as the step."""
PAGE_SIZES = {"cpu": 32, "tpu": PAGE_SIZE}
"""Tokens per page by platform: what attention reads fastest."""
OTHER_PAGE_SIZE = 16


def model_runner(
    model: JaxCausalLM, config: EngineConfig, adapters: Mapping[str, AdapterWeights] | None = None
) -> Runner:
    """Make a runner for a loaded model, without compiling programs or making caches.

    Args:
        config: the engine's settings, as the caller gave them.
        adapters: name → LoRA adapter.

    Raises:
        UnsupportedError: a model, or a mesh, that the engine cannot serve.
        RequestError: settings that contradict the model or each other.
        MappingError: an adapter of another model.
    """
    spec, runtime = model.programs.spec, model.programs.runtime
    placement = runtime.placement
    refuse_idle_devices(placement)
    keep_compiled()
    config = filled(config, spec, placement.platform)
    params: Mapping[str, Any] = model.params
    loaded = None
    if adapters or config.max_adapters:
        params, loaded = load_adapters(model, config, adapters or {})
    runner = runner_for(spec, runtime, params, config, model.dtype)
    runner.pool.store = ExecutableCache(placement.devices)
    runner.served = ServedWeights(pad_mapping(model.architecture.mapping, model.paddings), model.params)
    runner.adapters = None if loaded is None else LoadedAdapters(loaded, runner.params)
    return runner


def filled(config: EngineConfig, spec: ArchitectureSpec, platform: str) -> EngineConfig:
    """Return the settings with every choice made that does not depend on free memory.

    Raises:
        RequestError: they contradict the model or each other.
    """
    on_cpu = platform == "cpu"
    return config.filled(
        spec.context,
        max_num_seqs=64 if on_cpu else 256,
        max_num_batched_tokens=512 if on_cpu else BATCHED_TOKENS,
        page_size=PAGE_SIZES.get(platform, OTHER_PAGE_SIZE),
    )


def runner_for(
    spec: ArchitectureSpec,
    runtime: Runtime,
    params: Mapping[str, Any],
    config: EngineConfig,
    held: np.dtype[Any],
    *,
    kind: type[Runner] = Runner,
    slices: bool = False,
) -> Runner:
    """Make a runner without compiling programs or making caches; weights may be only shapes.

    Args:
        params: Flax path → kernel or other array, on devices or only shapes.
        config: as `EngineConfig.filled` gives it.
        held: what weights are held in, and keys and values unless `config` says otherwise.
        kind: the runner's class.
        slices: equal layers are stacked in `params`.

    Raises:
        UnsupportedError: a model that the engine cannot serve, or not with speculation.
    """
    assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
    on_cpu = runtime.placement.platform == "cpu"
    runtime = replace(runtime, widen_rows=WIDEN_ROWS if on_cpu and not multiplies_bfloat16() else None)
    layout = paged_layout(spec, config.max_model_len)
    speculation = config.speculation
    if speculation is not None and layout.recurrent:
        raise UnsupportedError(
            f"speculative decoding was asked for, but this {spec.model_type!r} model has layers with a recurrent "
            "state, which cannot take back tokens that are not accepted: leave it out."
        )
    buckets = buckets_for(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        draft=speculation.num_speculative_tokens if speculation else 0,
        max_prefills=RECURRENT_PREFILLS if layout.recurrent else None,
        sequences=config.sequence_buckets,
        tokens=config.token_buckets,
        factor=8 if on_cpu else 4,
    )
    asked = config.kv_dtype
    pages = held if asked is None else jnp.dtype(asked)
    return kind(causal_model(spec, runtime, slices=slices), params, config, layout, buckets, pages, held)


def refuse_idle_devices(placement: Any) -> None:
    """Refuse meshes whose devices would repeat each other's work.

    Raises:
        UnsupportedError: an axis shards requests, the sequence or layers but nothing that an engine computes, or there
            are several processes.
    """
    if placement.mesh is None:
        return
    logical = (axes.Q_HEADS, axes.MLP, axes.EMBED, axes.EXPERT)
    weights = {mesh_axis for axis in logical for mesh_axis in placement.axes_of(axis)}
    for axis, what in ((axes.BATCH, "requests"), (axes.SEQUENCE, "the sequence"), (axes.LAYERS, "layers")):
        idle = [a for a in placement.axes_of(axis) if a not in weights]
        if idle:
            mesh = ",".join(f"{name}={size}" for name, size in placement.mesh.shape.items())
            raise UnsupportedError(
                f"the engine was asked to serve over {mesh}, but it does not shard {what} over "
                f"{', '.join(idle)}, whose devices would all do the same: use tensor (and expert) axes alone (`ttpu "
                "plan` makes such plans), and start one server per replica."
            )
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"the engine was started in {jax.process_count()} processes, but it serves from one: use the devices of "
            "one host, or start one server per host."
        )
