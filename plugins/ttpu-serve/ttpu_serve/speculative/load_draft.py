"""Loads an engine's draft model on the devices of the larger model and makes a runner with the same limits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.loading import open_model
from ttpu_core.registry import default_registry
from ttpu_serve.runner import SAMPLING_LEVELS, ModelRunner, OnProgress, RunnerLimits, ServedModel, ServingBackend
from ttpu_serve.speculative.config import SpeculativeConfig

if TYPE_CHECKING:
    from ttpu_serve.api.engine_config import EngineConfig


def load_draft(
    speculation: SpeculativeConfig,
    model: ServedModel,
    config: EngineConfig,
    limits: RunnerLimits,
    backend: ServingBackend,
) -> ModelRunner:
    """Load the draft model and return its runner, without pages and programs.

    Args:
        speculation: settings that name the draft model's checkpoint.
        model: the larger model.
        config: the engine's settings.
        limits: the limits of the larger model's runner.
        backend: the backend of both models.

    Raises:
        RequestError: the vocabularies differ.
        UnsupportedError: the draft model has recurrent states, which cannot be rolled back, or no plugin describes it.
        TTPUError: the draft model cannot be loaded.
    """
    assert speculation.model
    options = backend.options_beside(model)
    checkpoint = open_checkpoint(speculation.model, revision=options.revision)
    model_type = checkpoint.config.model_type
    if not default_registry().is_described(model_type) and default_registry().fallback(backend.name) is not None:
        raise UnsupportedError(
            f"{speculation.model!r} was asked for as a draft model, but no plugin describes its type {model_type!r}, "
            "and transformers' own code, which runs without one, cannot take back guesses: use a draft model that a "
            "plugin describes."
        )
    opened = open_model(checkpoint, options, backend=backend.name)
    draft = cast(ServedModel, opened)
    _check_vocabulary(draft, model)
    own = replace(
        config,
        max_model_len=min(limits.max_model_len, draft.spec.context),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        page_size=limits.page_size,
        num_pages=None,
        speculative=None,
        adapters=None,
        max_adapters=None,
        # Guesses do without penalties, biases and log-probabilities.
        sampling_level=min(limits.sampling_level, "draw", key=SAMPLING_LEVELS.index),
        prompt_logprobs=False,
    )
    runner = backend.model_runner(draft, own)
    if runner.limits.recurrent:
        raise UnsupportedError(
            f"{draft.name!r} was asked for as a draft model, but its layers have recurrent states, which cannot take "
            "back guesses: use one with attention alone."
        )
    return runner


def prepare_draft(draft: ModelRunner, num_pages: int, progress: OnProgress | None = None) -> None:
    """Allocate the runner's pages, as many per group as the larger model's largest group has, and compile its
    programs."""
    draft.allocate([num_pages] * len(draft.page_groups))
    draft.compile(progress)


def _check_vocabulary(draft: ServedModel, model: ServedModel) -> None:
    """Refuse a different tokenizer. Vocabulary sizes may differ, because checkpoints of one family are padded
    differently."""
    if draft.tokenizer is not None and model.tokenizer is not None:
        same = draft.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    else:
        same = draft.spec.vocab_size == model.spec.vocab_size
    if not same:
        raise RequestError(
            f"{draft.name!r} was asked for as a draft model, but its tokens are not those of {model.name!r}: use a "
            "smaller model of the same family."
        )
