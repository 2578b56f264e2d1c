"""Outputs of the engine: plain dataclasses with vLLM's names, so that callers need not change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

ErrorKind = Literal["engine", "request"]
"""Whose fault an error is: the engine's own, or the request's, which would fail again in the same way."""


@dataclass(frozen=True)
class Logprob:
    """A token's natural log-probability under the model's own distribution (before temperature and filters), its rank
    (1 is the most likely; None if it is not among the reported tokens) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds of `time.monotonic`; None for events that have not happened yet."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class CompletionOutput:
    """One generated sequence. `token_ids` includes a stop token that ended it; `text` includes neither a stop token nor
    a stop string.

    logprobs: for each token, token id → Logprob, the chosen token first. finish_reason: None while the sequence grows,
    then stop, length, abort or error. stop_reason: the token id or text that ended the sequence; None for an
    end-of-sequence token. error: one sentence that says why the engine failed at this sequence; finish_reason is then
    "error", and the other fields have what was generated before.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the sequence is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its generated sequences. `num_cached_tokens` counts the prompt tokens found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """A prompt's embedding: float32 [hidden], of unit length."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: np.ndarray
    finished: bool = True

    @property
    def data(self) -> np.ndarray:
        """The embedding, float32 [hidden], under the name that vLLM's `encode` has for it."""
        return self.embedding

    @property
    def outputs(self) -> EmbeddingOutput:
        """Itself: vLLM's callers read `output.outputs.embedding`."""
        return self


@dataclass(frozen=True)
class ScoreOutput:
    """How alike two texts are: the cosine of their embeddings, from -1 to 1."""

    request_id: str
    score: float

    @property
    def outputs(self) -> ScoreOutput:
        """Itself: vLLM's callers read `output.outputs.score`."""
        return self


@dataclass(frozen=True)
class OutputDelta:
    """The output that one engine step added to one sequence. Servers stream these deltas.

    `text` and `token_ids` are new since the last delta. Text is held back while it may begin a stop string or ends
    within a character; token ids are never held back.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # in all so far
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # with the first delta, where they were asked for
    embedding: np.ndarray | None = None
    error: str | None = None  # one sentence, where the request failed in the engine; finish_reason is then "error"
    error_kind: ErrorKind = "engine"  # whose fault that is
