"""A request while the engine serves it: its parameters, its tokens so far, and the scheduler's state."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Literal

from ttpu_core.generation.sampling_params import SamplingParams

Pooling = Literal["last", "mean", "cls"]
"""Which hidden states make a prompt's embedding: that of its last token, the mean of all, or that of its first one."""

AskedPooling = Pooling | Literal["auto"]
"""What a request may ask for; auto: what the checkpoint declares."""


class Status(enum.Enum):
    """The state of a request."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


Key = tuple[float, int]
"""A request's place in the order: less is sooner."""


@dataclass(slots=True, eq=False)
class SchedulingState:
    """The scheduler's state of a request.

    key: position in the order of service. looks_up: whether the request uses the prefix cache and offers its pages to
    it.
    hashes: hashes of its first full pages, as far as computed.
    short_of: available pages per group when the request last lacked pages.
    """

    key: Key
    looks_up: bool
    hashes: list[bytes] = field(default_factory=list)
    short_of: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the one sequence that continues it.

    The scheduler owns the fields below `# scheduler`; `SequenceOutput` holds the text.

    priority: lower values are served sooner; equal ones in order of arrival.
    adapter: number of a loaded LoRA adapter, 0 for none. salt: separates prefixes of equal tokens (adapters, users).
    findable: whether the request uses the prefix cache; False if all prompt tokens have to be computed.
    pooling: the request wants the prompt's embedding and no tokens.
    output: generated tokens that the host knows; `pending` more are sampled by dispatched steps.
    computed: tokens whose keys and values are cached once the dispatched steps have finished.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    adapter: int = 0
    salt: bytes = b""
    findable: bool = True
    pooling: Pooling | None = None
    stop_ids: frozenset[int] = frozenset()
    max_output: int = 16  # params.max_tokens cut to the context
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    # scheduler
    status: Status = Status.WAITING
    pending: int = 0
    computed: int = 0
    cached: int = 0  # prompt tokens found in the prefix cache when it was admitted first
    slot: int = -1  # row of the scheduler's and the runner's per-request arrays while it runs
    preemptions: int = 0
    draft: list[int] = field(default_factory=list)  # tokens that a proposer expects next; at most one step old
    scheduling: SchedulingState | None = None  # from the time it is added

    @property
    def known(self) -> int:
        """Tokens of prompt and output that the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def total(self) -> int:
        """Tokens of prompt and output, including those in flight."""
        return len(self.prompt) + len(self.output) + self.pending

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens from position `start` up to `end`."""
        prompt = len(self.prompt)
        if end <= prompt:
            return self.prompt[start:end]
        if start >= prompt:
            return self.output[start - prompt : end - prompt]
        return self.prompt[start:] + self.output[: end - prompt]
