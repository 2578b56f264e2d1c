"""What generation hands back: events while it runs, completions and timings when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class StreamEvent:
    """One new token of one sequence. `text` is what became certain with it, and may be empty. `logprob` and
    `top_logprobs` (token id → value, natural logarithm) are of the model's raw distribution. The last event of a
    sequence carries its `finish_reason`."""

    text: str
    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] | None = None
    finish_reason: FinishReason | None = None
    index: int = 0


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


@dataclass
class Timings:
    """Seconds of wall-clock time and tokens. `prefill_tokens` counts prompt tokens of the whole batch without padding;
    `decode_tokens` counts tokens after each sequence's first, which prefill gives."""

    load_seconds: float = 0.0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """None before anything ran."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """None where no token was decoded."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 and self.decode_tokens else None


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate(..., return_dict_in_generate=True)` returns: `sequences` [batch, length] as transformers pads
    them, one `Completion` per prompt, and the timings."""

    sequences: np.ndarray
    completions: list[Completion]
    timings: Timings

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class CausalLMOutput:
    """What calling a model returns: float32 `logits` [batch, seq, vocab]."""

    logits: Any
