"""The sampling that a checkpoint's generation_config.json asks for, which requests that say nothing of it get."""

from __future__ import annotations

from typing import Any

from ttpu_core.checkpoint import open_checkpoint

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
