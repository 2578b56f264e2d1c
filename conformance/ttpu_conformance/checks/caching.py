"""Checks of the cache: however a sequence is split into steps, the logits equal those of the whole sequence."""

from __future__ import annotations

from dataclasses import replace

from ttpu_conformance.case import Case
from ttpu_conformance.check import check
from ttpu_conformance.errors import NotApplicable
from ttpu_conformance.measure import FLOAT32, Measured, hold, relative_error
from ttpu_conformance.rope_length import depends_on_length
from ttpu_conformance.tiny import SEQUENCE
from ttpu_core.errors import UnsupportedError

CHUNK = 8

# Tokens beyond a prompt turn such a rope further than the whole sequence had it turned for those before them, in
# transformers too. Parts of a prompt are turned by the length of the whole.
AS_A_PROMPT = (
    "read as parts of one prompt, since the rope depends on the sequence's length: greedy_tokens holds tokens beyond a "
    "prompt against transformers"
)


@check("numerics", quick="base")
def check_cached_decode(case: Case) -> Measured:
    """A prefill followed by single tokens gives the logits of the whole sequence."""
    begin = CHUNK
    return _in_parts(case, [begin] + [1] * (SEQUENCE - begin), "token by token")


@check("numerics", scope="heavy")
def check_chunked_prefill(case: Case) -> Measured:
    """A prefill in chunks gives the logits of the whole sequence."""
    return _in_parts(case, [CHUNK] * (SEQUENCE // CHUNK), "in chunks")


def _in_parts(case: Case, lengths: list[int], how: str) -> Measured:
    try:
        ours = case.model.logits_in_parts(case.reference.token_ids, lengths)
    except UnsupportedError as refused:
        raise NotApplicable(str(refused)) from refused
    error = relative_error(ours, case.logits)
    measured = hold(error, FLOAT32, f"{how} the logits differ from those of the whole sequence")
    return replace(measured, note=AS_A_PROMPT) if depends_on_length(case.architecture.spec) else measured
