"""The sampling that a checkpoint's generation_config.json asks for, which requests that say nothing of it get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.execution.sampling_level import level_of
from ttpu_serve.runner import SAMPLING_LEVELS

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling(checkpoint: str, revision: str | None = None) -> dict[str, Any]:
    """Return fields of `SamplingParams`; none where the checkpoint does not sample.

    Args:
        checkpoint: directory or Hub id.
        revision: its branch, tag or commit on the Hub.
    """
    config = open_checkpoint(checkpoint, revision=revision).generation_config
    if config.get("do_sample") is False:
        return {}
    return {key: config[key] for key in SAMPLED if config.get(key) is not None}


def within(defaults: Mapping[str, Any], *, penalties: bool, sampling_level: str) -> dict[str, Any]:
    """Return those of `default_sampling` that an engine can do: nobody asked for them, so that nothing is refused.

    Args:
        defaults: fields of `SamplingParams`.
        penalties: whether the engine supports them.
        sampling_level: the engine's, one of `SAMPLING_LEVELS`.
    """
    most = SAMPLING_LEVELS.index(sampling_level)
    kept = dict(defaults)
    if not penalties or level_of(SamplingParams(**kept)) > most:
        kept.pop("repetition_penalty", None)
    return kept if level_of(SamplingParams(**kept)) <= most else {}
