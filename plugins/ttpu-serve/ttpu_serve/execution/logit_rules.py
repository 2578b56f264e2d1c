"""Per-token rules of one request (`logit_bias`, `min_tokens`, `allowed_token_ids`, `bad_words`) as small arrays for the
sampler: token ids with the values added to their logits, and bit masks of allowed tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import MAX_LOGIT_BIAS
from ttpu_serve.execution.bad_words import BadWords
from ttpu_serve.scheduling.request import Request

Bias = tuple[np.ndarray, np.ndarray]
"""Token ids int32 [n], each once and ascending, and what is added to their logits, float32 [n]."""
NO_WORDS = BadWords(())


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


def mask_of_first(count: int, rows: int) -> np.ndarray:
    """Return the mask uint32 [words] of the tokens below `count`."""
    bits = np.zeros(32 * mask_words(rows), np.uint8)
    bits[:count] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


@dataclass(frozen=True)
class Rules:
    """The rules of one request.

    mask: uint32 [words], the tokens that are ever allowed, or None if every token is. always: the bias of `logit_bias`.
    early: the bias during the first `min_tokens` tokens, which also forbids tokens that would end the request.
    bad_words: those of several tokens hold beyond the mask. every: the mask of all tokens, if there are any of those.
    """

    mask: np.ndarray | None
    always: Bias | None
    early: Bias | None
    min_tokens: int = 0
    bad_words: BadWords = NO_WORDS
    every: np.ndarray | None = None

    @classmethod
    def for_request(cls, request: Request, vocab_size: int, rows: int, bad_words: BadWords = NO_WORDS) -> Rules:
        """Make the rules of `request`, whose `stop_ids` are known, for logits [rows]; the first `vocab_size` rows are
        tokens. `bad_words`: those of the request.

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
        _inside("bad_words", (bad_words.highest,) if bad_words.highest >= 0 else (), vocab_size)
        mask = None if allowed is None else mask_of(allowed, rows)
        every = mask_of_first(vocab_size, rows) if bad_words.highest >= 0 else None
        if bad_words.alone:
            mask = (every if mask is None else mask) & ~mask_of(bad_words.alone, rows)
            if not mask.any():
                raise RequestError(
                    "bad_words forbids every token, or every one of allowed_token_ids: leave some of them out."
                )
        return cls(mask, _arrays(ids), _arrays(early), min_tokens, bad_words, every)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.mask is not None or self.always is not None or self.early is not None or self.follows_output

    @property
    def follows_output(self) -> bool:
        """Whether they depend on the output's tokens, which must be known before the next one is sampled."""
        return self.bad_words.reach > 0

    def masks(self, output: Sequence[int], drafts: Sequence[int] = ()) -> list[np.ndarray | None]:
        """Return masks uint32 [words] for positions 0 to len(drafts), the tokens that these rules allow after `output`
        and the first i drafts; None allows every token.

        Args:
            output: the tokens generated so far.
            drafts: tokens that are expected next.
        """
        if not self.follows_output:
            return [self.mask] * (len(drafts) + 1)
        tokens = [*output[max(len(output) - self.bad_words.reach, 0) :], *drafts]
        known = len(tokens) - len(drafts)
        return [self._without(self.bad_words.completing(tokens[: known + place])) for place in range(len(drafts) + 1)]

    def bias(self, step_index: int) -> Bias | None:
        """Return the bias for the logits of output token `step_index`, which counts from 0."""
        return self.early if step_index < self.min_tokens else self.always

    def _without(self, tokens: set[int]) -> np.ndarray | None:
        mask = self.every if self.mask is None else self.mask
        if not tokens or mask is None:
            return self.mask
        return mask & ~mask_of(tokens, 32 * len(mask))


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
