"""Per-token rules of one request (`logit_bias`, `min_tokens`, `allowed_token_ids`) as small arrays for the sampler:
token ids with the values added to their logits, and a bit mask of allowed tokens."""

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
    """Return the number of 32-bit words of a mask over `rows` logits."""
    return -(-rows // 32)


def mask_of(tokens: Iterable[int], rows: int) -> np.ndarray:
    """Return the mask uint32 [words] in which exactly `tokens` are set: bit i % 32 of word i // 32 stands for token
    i."""
    mask = np.zeros(mask_words(rows), np.uint32)
    ids = np.fromiter(tokens, np.int64)
    np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return mask


@dataclass(frozen=True)
class Rules:
    """The rules of one request.

    mask: uint32 [words], or None if every token is allowed. always: the bias of `logit_bias`. early: the bias during
    the first `min_tokens` tokens, which also forbids tokens that would end the request.
    """

    mask: np.ndarray | None
    always: Bias | None
    early: Bias | None
    min_tokens: int = 0

    @classmethod
    def for_request(cls, request: Request, vocab_size: int, rows: int) -> Rules:
        """Make the rules of `request`, whose `stop_ids` are known, for logits [rows]; the first `vocab_size` rows are
        tokens.

        For guided requests `GuideState` forbids early stop tokens, because a grammar may allow no other token.

        Raises:
            RequestError: a token is outside the vocabulary, too many tokens have a bias, or no token remains allowed.
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
                f"allowed_token_ids names only tokens that end the output, but min_tokens is {min_tokens}: allow "
                "others too, or leave min_tokens out."
            )
        ids = {int(token): float(value) for token, value in params.logit_bias.items() if value}
        early = {**ids, **dict.fromkeys(stops, -np.inf)} if min_tokens else ids
        if len(early) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias names {len(ids)} tokens and min_tokens forbids {len(stops)} that end the output, but at "
                f"most {MAX_LOGIT_BIAS} are allowed together: name fewer."
            )
        return cls(
            mask=None if allowed is None else mask_of(allowed, rows),
            always=_arrays(ids),
            early=_arrays(early),
            min_tokens=min_tokens,
        )

    def bias(self, step_index: int) -> Bias | None:
        """Return the bias for the logits of output token `step_index`, which counts from 0."""
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
