"""From a loaded model to an engine that serves it. In: weights on devices and an `EngineConfig`; out: an `EngineCore`
whose programs are compiled and whose pages fill the memory that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ttpu_core.errors import UnsupportedError
from ttpu_core.spec import ArchitectureSpec, Parameter, axes
from ttpu_jax.model.causal_model import causal_model
from ttpu_jax.model.modules import Runtime
from ttpu_jax.model.paged import group_page_bytes, paged_layout
from ttpu_jax.runner.buckets import buckets_for
from ttpu_jax.runner.compilation import OnProgress, Program
from ttpu_jax.runner.compilation_cache import keep_compiled
from ttpu_jax.runner.executable_cache import ProgramStore
from ttpu_jax.runner.memory import free_bytes, pages_per_group
from ttpu_jax.runner.page_count import steady_pages
from ttpu_jax.runner.reserve import reserved_bytes
from ttpu_jax.runner.runner import Runner
from ttpu_serve.api.engine_config import KV_CACHE_DTYPES, EngineConfig
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.execution.utilization import StepCosts
from ttpu_serve.scheduling.block_table import PageGroup
from ttpu_serve.scheduling.scheduler import Scheduler
from ttpu_serve.scheduling.scheduler_output import SchedulerConfig

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM

WIDEN_ROWS = 192
"""Rows from which XLA:CPU is faster, by a quarter, where bfloat16 is made float32 before a product."""
RECURRENT_PREFILLS = 2
"""Prompts per step where layers carry recurrent states: each takes a row as long as the step."""


def build_engine(
    model: JaxCausalLM, config: EngineConfig | None = None, progress: OnProgress | None = None, *, name: str = ""
) -> EngineCore:
    """An engine for a loaded model.

    Args:
        progress: called as progress("compile", programs done, programs in all).
        name: the model's name in answers; the checkpoint's directory name otherwise.

    Raises:
        UnsupportedError: a model, or a mesh, that the engine cannot serve.
        RequestError: settings that contradict the model or each other, or too little memory.
    """
    programs = model.programs
    spec, runtime = programs.spec, programs.runtime
    placement = runtime.placement
    refuse_idle_devices(placement)
    keep_compiled()
    platform = placement.platform
    config = (config or EngineConfig()).filled(spec, platform)
    assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens and config.page_size
    params: Mapping[str, Any] = model.params
    table = spec.parameters
    adapters = None
    if config.adapters or config.max_adapters:
        from ttpu_jax.runner.lora import load_adapters

        params, table, adapters = load_adapters(model, config)
    runner = runner_for(spec, table, runtime, params, config, model.dtype)
    runner.pool.store = ProgramStore(placement.devices)
    layout, cache_dtype = runner.layout, runner.cache_dtype
    page_bytes = group_page_bytes(spec, layout, config.page_size, placement, cache_dtype)
    drafter, speculation = None, _speculation(config)
    if speculation is not None and speculation.method == "draft_model":
        from ttpu_jax.runner.load_draft import draft_page_bytes, load_draft, prepare_draft

        # Its pages are counted with those of the largest group: the two follow the same tokens.
        drafter = load_draft(speculation, model, config)
        page_bytes = (page_bytes[0] + draft_page_bytes(drafter), *page_bytes[1:])
    runner.allocate(_num_pages(runner, page_bytes, drafter))
    runner.compile(progress)
    if drafter is not None:
        prepare_draft(drafter, max(runner.num_pages), progress)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            page_size=config.page_size,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            max_waiting=config.max_waiting,
            max_prefills=runner.buckets.max_prefills,
            recurrent=layout.recurrent,
            lookahead=runner.buckets.draft,
        ),
        tuple(
            PageGroup(group.name, pages, group.window, group.chunk)
            for group, pages in zip(layout.groups, runner.num_pages, strict=True)
        ),
    )
    proposer = None
    if speculation is not None:
        from ttpu_serve.speculative import make_proposer

        proposer = make_proposer(speculation, drafter, spec.vocab_size)
    device = _device(placement)
    weight_bytes = sum(value.nbytes for value in params.values())
    runner.pool.serving = True
    return EngineCore(
        runner,
        scheduler,
        model.tokenizer,
        model_name=name or model.name,
        stop_ids=model.stop_ids,
        costs=StepCosts(spec, weight_bytes, cache_dtype.itemsize, _devices(placement), device.device_kind),
        adapters=adapters,
        model=model,
        proposer=proposer,
        draft_tokens=runner.buckets.draft,
        overlap=config.overlap,
    )


def runner_for(
    spec: ArchitectureSpec,
    table: Mapping[str, Parameter],
    runtime: Runtime,
    params: Mapping[str, Any],
    config: EngineConfig,
    held: np.dtype[Any],
) -> Runner:
    """A runner whose programs are not compiled and whose caches are not made; weights may be only shapes.

    Args:
        table: the parameters, adapters included.
        config: as `EngineConfig.filled` gives it.
        held: what weights are held in, and keys and values unless `config` says otherwise.

    Raises:
        UnsupportedError: a model that the engine cannot serve, or not with speculation.
    """
    assert config.max_model_len and config.max_num_seqs and config.max_num_batched_tokens
    on_cpu = runtime.placement.platform == "cpu"
    runtime = replace(runtime, widen_rows=WIDEN_ROWS if on_cpu else None)
    layout = paged_layout(spec, config.max_model_len)
    speculation = _speculation(config)
    if speculation is not None and layout.recurrent:
        raise UnsupportedError(
            f"speculative decoding was asked for, but this {spec.model_type!r} model has layers with a recurrent "
            "state, which cannot take back tokens that are not accepted: leave it out."
        )
    buckets = buckets_for(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        draft=speculation.num_speculative_tokens if speculation else 0,
        max_prefills=RECURRENT_PREFILLS if layout.recurrent else None,
        sequences=config.sequence_buckets,
        tokens=config.token_buckets,
        factor=8 if on_cpu else 4,
    )
    asked = KV_CACHE_DTYPES[config.kv_cache_dtype]
    pages = held if asked is None else jnp.dtype(asked)
    adapters = table is not spec.parameters
    model = causal_model(spec, runtime, table=table)
    return Runner(model, params, config, layout, buckets, pages, held, adapters=adapters)


def _speculation(config: EngineConfig) -> Any:
    """The settings of speculative decoding, None without."""
    if config.speculative is None:
        return None
    from ttpu_serve.speculative import speculative_config

    return speculative_config(config.speculative)


def _num_pages(runner: Runner, page_bytes: tuple[int, ...], drafter: Runner | None) -> tuple[int, ...]:
    """Pages per group: what was asked for, or what is free beside weights and what `reserved_bytes` counts."""
    config, placement = runner.config, runner.runtime.placement
    if config.num_pages is not None or not page_bytes:
        return pages_per_group(config, runner.layout, page_bytes, None)
    if config.kv_cache_memory is not None:
        return pages_per_group(config, runner.layout, page_bytes, config.kv_cache_memory)
    assert config.max_num_seqs is not None
    device = _device(placement)
    reserved = 0
    if device.platform != "cpu":

        def temporaries(program: Program) -> int:
            if program.key[0] == "step":  # type: ignore[index]
                compiled = runner.pool.build(program)  # not to keep: the number of pages will be another
            else:
                runner.pool.compile([program])
                compiled = runner.pool.executable(program.key)
            return int(compiled.memory_analysis().temp_size_in_bytes)

        few = replace(config, num_pages=config.max_num_seqs + 2)
        runner.num_pages = pages_per_group(few, runner.layout, page_bytes, None)
        reserved = reserved_bytes(runner, temporaries)
        if drafter is not None:  # the smaller of two models that take turns
            drafter.num_pages = (2,) * len(drafter.layout.groups)
            reserved += reserved_bytes(drafter, lambda program: 0)
    free = free_bytes(device, reserved)
    return steady_pages(pages_per_group(config, runner.layout, page_bytes, free), runner, page_bytes)


def refuse_idle_devices(placement: Any) -> None:
    """Refuse meshes whose devices would repeat each other's work."""
    if placement.mesh is None:
        return
    logical = (axes.Q_HEADS, axes.MLP, axes.EMBED, axes.EXPERT)
    weights = {mesh_axis for axis in logical for mesh_axis in placement.axes_of(axis)}
    for axis, what in ((axes.BATCH, "requests"), (axes.SEQUENCE, "the sequence")):
        idle = [a for a in placement.axes_of(axis) if a not in weights]
        if idle:
            mesh = ",".join(f"{name}={size}" for name, size in placement.mesh.shape.items())
            raise UnsupportedError(
                f"the engine was asked to serve over {mesh}, but it does not cut {what} over {', '.join(idle)}, whose "
                "devices would all do the same: use tensor (and expert) axes alone (`ttpu plan --batch 1` makes such "
                "plans), and start one server per replica."
            )
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"the engine was started in {jax.process_count()} processes, but it serves from one: use the devices of "
            "one host, or start one server per host."
        )


def _device(placement: Any) -> jax.Device:
    device: jax.Device = jax.local_devices()[0] if placement.mesh is None else placement.mesh.devices.flat[0]
    return device


def _devices(placement: Any) -> int:
    return 1 if placement.mesh is None else int(np.prod(placement.mesh.devices.shape))
