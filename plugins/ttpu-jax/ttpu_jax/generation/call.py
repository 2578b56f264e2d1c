"""One call of `generate`: what is continued, how, and what is reported beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ttpu_core.generation.options import GenerationOptions
from ttpu_core.generation.prompt import Prompt
from ttpu_jax.generation.host_calls import HostCalls


@dataclass(frozen=True)
class Call:
    """The prompts and options of one call.

    Attributes:
        prompts: to continue.
        options: of the call.
        stop_ids: tokens that end a sequence and are not part of it.
        tokenizer: decodes tokens to text; None for no text.
        context: the most tokens that a sequence may have.
        heads: int64 [sequences, length], the prompts with padding, as the caller's code sees them.
        pad: the token of padding.
        calls: the caller's code.
        assistant: a smaller model that guesses tokens, or None.
    """

    prompts: tuple[Prompt, ...]
    options: GenerationOptions
    stop_ids: frozenset[int]
    tokenizer: Any
    context: int
    heads: np.ndarray
    pad: int
    calls: HostCalls = field(default_factory=HostCalls)
    assistant: Any = None

    @property
    def sequences(self) -> list[Prompt]:
        """The prompt of each sequence that is asked for: those of a prompt follow each other."""
        return [prompt for prompt in self.prompts for _ in range(self.options.num_return_sequences)]

    @property
    def guesses(self) -> bool:
        """Whether tokens are guessed, and several checked at once."""
        return self.assistant is not None or self.options.prompt_lookup_num_tokens is not None


@dataclass
class Reports:
    """What a call reports beside its tokens: float32 [rows, vocab] of each step, in order, where asked for."""

    scores: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)

    def take(self, scores: Any, logits: Any, vocab: int) -> None:
        """Add those of one step: arrays [rows, columns], of which the first `vocab` are tokens, or None."""
        if scores is not None:
            self.scores.append(np.asarray(scores)[:, :vocab])
        if logits is not None:
            self.logits.append(np.asarray(logits)[:, :vocab])
