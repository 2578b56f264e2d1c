"""Makes the proposer of a speculative decoding method."""

from __future__ import annotations

from ttpu_core.errors import RequestError
from ttpu_serve.runner import ModelRunner
from ttpu_serve.speculative.config import DRAFT_MODEL, SpeculativeConfig
from ttpu_serve.speculative.draft_model import DraftModelProposer
from ttpu_serve.speculative.ngram import NgramProposer
from ttpu_serve.speculative.proposer import Proposer


def make_proposer(
    config: SpeculativeConfig, draft: ModelRunner | None = None, vocab_size: int | None = None
) -> Proposer:
    """Make the proposer. `draft` is the draft model's runner (`load_draft`); `vocab_size` is the larger model's.

    Raises:
        RequestError: the method needs a draft model, but there is no runner.
    """
    if config.method == DRAFT_MODEL:
        if draft is None:
            raise RequestError("a draft model was asked for, but not loaded: build the engine with build_engine.")
        return DraftModelProposer(draft, vocab_size)
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
