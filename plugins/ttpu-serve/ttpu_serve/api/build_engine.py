"""Builds an engine for a loaded model: the model's backend makes a runner, whose pages fill the free memory and whose
programs are compiled; scheduler, proposer and core are made to the runner's limits."""

from __future__ import annotations

from typing import cast

from ttpu_core.backend import Serves
from ttpu_core.errors import UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_serve.adapters.files import read_adapter
from ttpu_serve.api.engine_config import EngineConfig
from ttpu_serve.execution.declared_pooling import LAST, MEAN, declared_pooling
from ttpu_serve.execution.engine_core import EngineCore
from ttpu_serve.execution.speculation import Speculation
from ttpu_serve.execution.utilization import StepCosts
from ttpu_serve.runner import ModelRunner, OnProgress, ServedModel, ServingBackend
from ttpu_serve.scheduling.block_table import page_groups
from ttpu_serve.scheduling.scheduler import Scheduler
from ttpu_serve.scheduling.scheduler_output import SchedulerConfig
from ttpu_serve.speculative.load_draft import load_draft, prepare_draft
from ttpu_serve.speculative.make import make_proposer


def serving_backend(name: str | None) -> ServingBackend:
    """Return the backend with the given name (None: the default one), checked to support serving.

    Raises:
        MissingDependencyError, PluginError: the backend is not installed or cannot be used.
        UnsupportedError: the backend makes no model runners.
    """
    backend = default_registry().backend(name)
    if not isinstance(backend, Serves):
        raise UnsupportedError(
            f"an engine for a model of the backend {backend.name!r} was asked for, but that backend makes no runners "
            "for engines: install and name one that does (`ttpu list-plugins`)."
        )
    return cast(ServingBackend, backend)


def build_engine(
    model: ServedModel, config: EngineConfig | None = None, progress: OnProgress | None = None, *, name: str = ""
) -> EngineCore:
    """Build an engine for a loaded model.

    Args:
        config: settings; None uses the defaults.
        progress: called as progress("compile", programs done, programs in all).
        name: the model's name in responses; by default the name of the checkpoint's directory.

    Raises:
        UnsupportedError: the engine cannot serve the model or its mesh.
        RequestError: settings contradict the model or each other, or memory does not suffice.
        CheckpointError, MappingError: an adapter cannot be used.
    """
    config = config or EngineConfig()
    backend = serving_backend(model.backend)
    speculation = config.speculation
    adapters = {adapter: read_adapter(directory) for adapter, directory in (config.adapters or {}).items()}
    runner = backend.model_runner(model, config, adapters)
    draft = None
    if speculation is not None and speculation.model is not None:
        draft = load_draft(speculation, model, config, runner.limits, backend)
    runner.allocate(draft=draft)
    runner.compile(progress)
    if draft is not None:
        prepare_draft(draft, max(runner.num_pages), progress)
    proposer = None
    if speculation is not None:
        proposer = make_proposer(speculation, draft, runner.limits.vocab_size)
    return EngineCore(
        runner,
        scheduler_for(runner, config),
        model.tokenizer,
        model_name=name or model.name,
        stop_ids=model.stop_ids,
        costs=_costs(runner),
        model=model,
        speculation=Speculation(proposer, runner.limits.draft_tokens),
        overlap=config.overlap,
        guides=config.guides,
        pooling=declared_pooling(getattr(model, "files", None), LAST if runner.limits.generates else MEAN),
    )


def scheduler_for(runner: ModelRunner, config: EngineConfig) -> Scheduler:
    """Make a scheduler with the limits of a runner whose pages are allocated."""
    limits = runner.limits
    settings = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill and not limits.whole_prompts,
        max_waiting=config.max_waiting,
        max_prefills=limits.max_prefills,
        recurrent=limits.recurrent,
        lookahead=limits.draft_tokens,
    )
    return Scheduler(settings, page_groups(runner))


def _costs(runner: ModelRunner) -> StepCosts | None:
    """Return the FLOP and byte counter of a model; None if the runner has no architecture description."""
    if runner.spec is None:
        return None
    memory, devices = runner.memory_stats(), runner.devices
    return StepCosts(runner.spec, memory.weight_bytes, memory.kv_itemsize, devices.count, devices.kind)
