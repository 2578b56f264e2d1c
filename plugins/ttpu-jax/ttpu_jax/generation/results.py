"""The results of generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttpu_core.generation.events import FinishReason, Timings

HiddenStates = tuple[tuple[np.ndarray, ...], ...]
"""Of each step, of each layer, float32 [rows, tokens, hidden]; the first step reads the prompts, the others a token."""


@dataclass
class Completion:
    """One finished sequence. `token_ids` are the new ones, without the stop token, which is `stop_id` where one ended
    the sequence; `text` is None where the checkpoint has no tokenizer."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason = "length"
    stop_id: int | None = None

    @property
    def all_ids(self) -> list[int]:
        """The new ids, with the one that ended the sequence."""
        return self.token_ids if self.stop_id is None else [*self.token_ids, self.stop_id]


@dataclass(frozen=True)
class GenerateOutput:
    """The result of `generate(..., return_dict_in_generate=True)`.

    Attributes:
        sequences: [sequences, length], padded as transformers pads them.
        completions: one per sequence.
        timings: of the call.
        scores: of each step, float32 [rows, vocab], with output_scores; undefined after a row's end.
        logits: of each step, float32 [rows, vocab], with output_logits.
        hidden_states: of each step and layer, float32 [rows, tokens, hidden], with output_hidden_states; undefined at
            padding and after a row's end.
        sequences_scores: float32 [sequences], of beam search: the sum of log-probabilities by length.
        beam_indices: int32 [sequences, new tokens], of beam search: the row of `scores` that chose each token, then -1.
    """

    sequences: np.ndarray
    completions: list[Completion]
    timings: Timings
    scores: tuple[np.ndarray, ...] | None = None
    logits: tuple[np.ndarray, ...] | None = None
    hidden_states: HiddenStates | None = None
    sequences_scores: np.ndarray | None = None
    beam_indices: np.ndarray | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class CausalLMOutput:
    """The result of calling a model: float32 `logits` [batch, seq, vocab]."""

    logits: Any
