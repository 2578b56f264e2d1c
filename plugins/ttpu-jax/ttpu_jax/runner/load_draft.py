"""The draft model's side of building an engine. In: which checkpoint, and the engine it is to help; out: a `Runner` for
it, on the same devices, of the same sequences and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ttpu_core.auto import AutoModelForTPU
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_jax.model.paged import group_page_bytes
from ttpu_jax.runner.build import runner_for
from ttpu_jax.runner.runner import Runner
from ttpu_jax.runner.sampler import Level
from ttpu_serve.api.engine_config import EngineConfig
from ttpu_serve.speculative.config import SpeculativeConfig

if TYPE_CHECKING:
    from ttpu_jax.causal_lm import JaxCausalLM
    from ttpu_jax.runner.compilation import OnProgress


def load_draft(speculation: SpeculativeConfig, model: JaxCausalLM, config: EngineConfig) -> Runner:
    """A runner, as yet without caches and programs, for the draft model of an engine whose `config` is filled in.

    Raises:
        RequestError: another vocabulary than the model's.
        UnsupportedError: recurrent states, which cannot take back guesses.
        TTPUError: it cannot be loaded.
    """
    placement = model.programs.runtime.placement
    assert speculation.model
    draft = AutoModelForTPU.from_pretrained(
        speculation.model, backend="jax", dtype=model.dtype.name, mesh=placement.mesh
    )
    _check_vocabulary(draft, model)
    spec = draft.programs.spec
    assert config.max_model_len
    own = replace(
        config,
        max_model_len=min(config.max_model_len, spec.context),
        num_pages=None,
        speculative=None,
        adapters=None,
        max_adapters=None,
        penalties=False,
        prompt_logprobs=False,
    )
    runner = runner_for(spec, spec.parameters, draft.programs.runtime, draft.params, own, draft.dtype)
    if runner.layout.recurrent:
        raise UnsupportedError(
            f"{draft.name!r} was asked for as a draft model, but its layers have recurrent states, which cannot take "
            "back guesses: use one with attention alone."
        )
    return runner


def draft_page_bytes(draft: Runner) -> int:
    """Bytes on one device of a page in every group of the draft model."""
    size = draft.config.page_size or 1
    return sum(group_page_bytes(draft.spec, draft.layout, size, draft.runtime.placement, draft.cache_dtype))


def prepare_draft(draft: Runner, num_pages: int, progress: OnProgress | None = None) -> None:
    """Its caches, with as many pages in each group as the model has at most, and its programs."""
    draft.allocate([num_pages] * len(draft.layout.groups))
    needed = [program for program in draft.programs() if not _asks_for_all(program.key)]
    draft.pool.compile(needed, progress)
    draft.pool.serving = True


def _asks_for_all(key: Any) -> bool:
    """Samplers that know penalties, biases and log-probabilities: guesses do without."""
    return isinstance(key, tuple) and key[0] == "sample" and key[2] is Level.ALL


def _check_vocabulary(draft: JaxCausalLM, model: JaxCausalLM) -> None:
    """Refuse a tokenizer that differs. Sizes may: checkpoints of one family are padded differently."""
    if draft.tokenizer is not None and model.tokenizer is not None:
        same = draft.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    else:
        same = draft.spec.vocab_size == model.spec.vocab_size
    if not same:
        raise RequestError(
            f"{draft.name!r} was asked for as a draft model, but its tokens are not those of {model.name!r}: use a "
            "smaller model of the same family."
        )
