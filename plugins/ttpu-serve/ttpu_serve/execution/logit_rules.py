"""What one request says about single tokens' logits. In: its `logit_bias`, `min_tokens` and `allowed_token_ids`; out:
small arrays for the sampler: token ids with what is added to their logits, and a bit mask of the tokens allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import MAX_LOGIT_BIAS
from ttpu_serve.scheduling.request import Request

Bias = tuple[np.ndarray, np.ndarray]
"""Token ids int32 [n], each once and ascending, and what is added to their logits, float32 [n]."""


def mask_words(rows: int) -> int:
    """Words of 32 bits in a mask over `rows` logits."""
    return -(-rows // 32)


def mask_of(tokens: Iterable[int], rows: int) -> np.ndarray:
    """The mask uint32 [words] that holds just `tokens`: bit i % 32 of word i // 32 is token i's."""
    mask = np.zeros(mask_words(rows), np.uint32)
    ids = np.fromiter(tokens, np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask


@dataclass(frozen=True)
class Rules:
    """One request's rules.

    mask: uint32 [words], or None where every token is allowed. always: the bias of `logit_bias`. early: the bias of the
    first `min_tokens` tokens, which also forbids the tokens that would end the request.
    """

    mask: np.ndarray | None
    always: Bias | None
    early: Bias | None
    min_tokens: int = 0

    @classmethod
    def for_request(cls, request: Request, vocab_size: int, rows: int) -> Rules:
        """The rules of `request`, whose `stop_ids` are known, for logits [rows] of which `vocab_size` are tokens.

        A guided request's mask forbids its stop tokens by itself (`GuideState`), since its grammar may allow no other.

        Raises RequestError for tokens outside the vocabulary, too many of them, or rules that leave none.
        """
        params = request.params
        _inside("logit_bias", params.logit_bias, vocab_size)
        _inside("stop_token_ids", params.stop_token_ids, vocab_size)
        allowed = params.allowed_token_ids
        stops = frozenset(token for token in request.stop_ids if token < vocab_size) | {*params.stop_token_ids}
        min_tokens = params.min_tokens if params.guided is None and stops else 0
        if allowed is not None:
            _inside("allowed_token_ids", allowed, vocab_size)
        if min_tokens and allowed is not None and stops.issuperset(allowed):
            raise RequestError(
                f"allowed_token_ids names only tokens that end the answer, but min_tokens is {min_tokens}: allow "
                "others too, or leave min_tokens out."
            )
        ids = {int(token): float(value) for token, value in params.logit_bias.items() if value}
        early = {**ids, **dict.fromkeys(stops, -np.inf)} if min_tokens else ids
        if len(early) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias names {len(ids)} tokens and min_tokens forbids {len(stops)} that end the answer, but at "
                f"most {MAX_LOGIT_BIAS} are allowed together: name fewer."
            )
        return cls(
            mask=None if allowed is None else mask_of(allowed, rows),
            always=_arrays(ids),
            early=_arrays(early),
            min_tokens=min_tokens,
        )

    def bias(self, step_index: int) -> Bias | None:
        """What to add to the logits from which the answer's token `step_index`, the first being 0, is chosen."""
        return self.early if step_index < self.min_tokens else self.always


def _arrays(ids: dict[int, float]) -> Bias | None:
    if not ids:
        return None
    tokens = sorted(ids)
    return np.array(tokens, np.int32), np.array([ids[token] for token in tokens], np.float32)


def _inside(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} names token {token}, but the model's tokens run from 0 to {vocab_size - 1}: correct it."
            )
