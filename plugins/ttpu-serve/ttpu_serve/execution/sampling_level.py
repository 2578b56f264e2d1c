"""Determines the sampling level that a request needs."""

from __future__ import annotations

from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.runner import SAMPLING_LEVELS

GREEDY, DRAW, ALL = range(len(SAMPLING_LEVELS))


def level_of(params: SamplingParams) -> int:
    """Return the lowest level that serves a request, as an index into `SAMPLING_LEVELS`."""
    special = (
        params.has_penalties
        or params.logprobs is not None
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.guided is not None
        or params.min_tokens > 0
    )
    if special:
        return ALL
    return GREEDY if params.is_greedy else DRAW
