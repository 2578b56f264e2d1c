"""The events of generation on every backend: one event per token, and timings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
