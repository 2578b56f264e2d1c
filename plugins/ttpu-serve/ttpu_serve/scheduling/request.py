"""One request while the engine serves it: what was asked, the tokens so far, and where the scheduler keeps it."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Literal

from ttpu_core.generation.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]
"""Which hidden states make a prompt's embedding: that of its last token, or the mean of all."""


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


Key = tuple[float, int]
"""A request's place in the order: less is sooner."""


@dataclass(slots=True, eq=False)
class SchedulingState:
    """The scheduler's notes on a request.

    key: its place in the order. looks_up: whether its prefix may be taken from the cache, and its pages by others.
    hashes: of its first full pages, as far as they were asked for.
    short_of: pages that were available per group when they were too few for it.
    """

    key: Key
    looks_up: bool
    hashes: list[bytes] = field(default_factory=list)
    short_of: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and the one sequence that follows it.

    The scheduler owns what is below `# scheduler`; its text is in its `SequenceOutput`.

    priority: lower is served sooner; equal ones in order of arrival.
    adapter: index of a loaded LoRA adapter, 0 for none. salt: makes prefixes of equal tokens differ (adapters, users).
    findable: its pages may be found by others, and those of others by it; not so where all of the prompt has to pass.
    pooling: the request wants the prompt's embedding and no tokens.
    output: tokens generated and known to the host; `pending` more were sampled, or will be, in dispatched steps.
    computed: tokens whose keys and values are in the cache, or will be after the dispatched steps.
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
        """Tokens of prompt and answer that the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def total(self) -> int:
        """Tokens of prompt and answer, those in flight included."""
        return len(self.prompt) + len(self.output) + self.pending

    def tokens(self, start: int, end: int) -> list[int]:
        """The known tokens from position `start` up to `end`."""
        prompt = len(self.prompt)
        if end <= prompt:
            return self.prompt[start:end]
        if start >= prompt:
            return self.output[start - prompt : end - prompt]
        return self.prompt[start:] + self.output[: end - prompt]
