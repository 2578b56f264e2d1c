"""Converts the engine's log-probabilities and token counts to the JSON forms of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ttpu_serve.api.outputs import Logprob
from ttpu_serve.server.tokens import Tokens

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have: what OpenAI's API and vLLM report."""

TokenLogprobs = dict[int, Logprob]


@dataclass
class Usage:
    """Token counts of all prompts and sequences of one request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def likeliest(token: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` most likely of the reported tokens; the chosen token may not be among them."""
    return sorted(token.items(), key=lambda item: -finite(item[1].logprob))[:count]


def chat_logprobs(
    logprobs: Sequence[TokenLogprobs] | None, count: int, tokens: Tokens, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """Return `choices[].logprobs` of a chat completion: each token and `count` alternatives. `as_ids`: tokens are named
    by their ids."""
    if logprobs is None:
        return None

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        written = tokens.bytes_of(token)
        return {
            "token": as_id(token) if as_ids else written.decode(errors="replace"),
            "logprob": finite(logprob.logprob),
            "bytes": list(written),
        }

    content = []
    for one in logprobs:
        chosen, logprob = next(iter(one.items()))
        content.append({**entry(chosen, logprob), "top_logprobs": [entry(*item) for item in likeliest(one, count)]})
    return {"content": content, "refusal": None}


def as_id(token: int) -> str:
    """Return a token's name in log-probabilities that name tokens by their ids, which tell apart tokens of one text."""
    return f"token_id:{token}"


def _utf8() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


@dataclass
class CompletionLogprobs:
    """`choices[].logprobs` of a text completion. Text offsets continue from one chunk of a stream to the next.
    `specials`: whether the output's text includes special tokens. `as_ids`: tokens are named by their ids."""

    tokens: Tokens
    count: int
    specials: bool = False
    as_ids: bool = False
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(default_factory=_utf8)

    def of(
        self, logprobs: Sequence[TokenLogprobs | None], ids: Sequence[int], *, echoed: str | None = None
    ) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens. `echoed`: the prompt's text, if they are the prompt's
        tokens."""
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, one in zip(ids, logprobs, strict=False):
            text = self.tokens.text_of(token)
            self.offset += self._lost(token)
            told["tokens"].append(self._name(token))
            told["text_offset"].append(self.offset)
            told["token_logprobs"].append(None if one is None else finite(one[token].logprob))
            top = None if one is None else {self._name(i): finite(lp.logprob) for i, lp in self._top(one)}
            told["top_logprobs"].append(top)
            self.offset += self._characters(token, text, echoed)
        if echoed is not None:
            self.offset, self._decoder = len(echoed), _utf8()
        return told

    def _name(self, token: int) -> str:
        return as_id(token) if self.as_ids else self.tokens.text_of(token)

    def _lost(self, token: int) -> int:
        """Return the number of characters U+FFFD that earlier bytes turn out to be, which wait for more of their
        character, and which this token does not go on with."""
        held, following = self._decoder.getstate()[0], self.tokens.bytes_of(token)[:1]
        if not held or not following or self.tokens.ends(token):
            return 0
        try:
            codecs.getincrementaldecoder("utf-8")("strict").decode(held + following)
        except UnicodeDecodeError:
            self._decoder = _utf8()
            return len(held.decode(errors="replace"))
        return 0

    def _characters(self, token: int, text: str, echoed: str | None) -> int:
        """Return the number of characters that a token adds to the text; 0 while its last character is incomplete."""
        if self.tokens.ends(token):
            shown = self.specials if echoed is None else echoed.startswith(text, self.offset)
            return len(text) if shown else 0
        added = self._decoder.decode(self.tokens.bytes_of(token))
        # Some tokenizers put a space before the first word, which the text that was sent does not have.
        invented = echoed is not None and self.offset == 0 and added.startswith(" ") and not echoed.startswith(" ")
        return len(added) - invented

    def _top(self, one: TokenLogprobs) -> list[tuple[int, Logprob]]:
        """Return the most likely tokens, and the chosen one if it is not among them, as OpenAI documents."""
        top = likeliest(one, self.count)
        chosen = next(iter(one.items()))
        return top if not self.count or any(token == chosen[0] for token, _ in top) else [*top, chosen]


def joined(told: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Join results of `CompletionLogprobs.of`."""
    return {key: [value for piece in told for value in piece[key]] for key in told[0]}


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs | None] | None, count: int, tokens: Tokens
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's `prompt_logprobs`: for each prompt token but the first, id → log-probability, rank and text, of the
    token itself and of the `count` most likely ones. The engine may have reported more."""
    if logprobs is None:
        return None
    return [
        None
        if one is None
        else {
            str(token): {"logprob": finite(lp.logprob), "rank": lp.rank, "decoded_token": tokens.text_of(token)}
            for place, (token, lp) in enumerate(one.items())
            if place == 0 or (lp.rank is not None and lp.rank <= count)
        }
        for one in logprobs
    ]
