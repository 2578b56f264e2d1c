"""The protocol of proposers, which draft tokens for speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ttpu_serve.scheduling.request import Request


class Proposer(Protocol):
    """Drafts the next tokens of requests.

    The quality of drafts affects speed and never the output, so a proposer may draft badly or not at all.

    wants_hidden: the engine keeps each step's hidden states and passes them to `observe` before `propose`, for heads
    that read the model's residual stream (EAGLE, multi-token prediction). No proposer here uses it.
    """

    wants_hidden: bool

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """Return up to `k` draft tokens per request, [] for none. All tokens of the requests are known.

        Requests come in any order and may be absent for a while (preempted).
        """
        ...

    def on_finish(self, request: Request) -> None:
        """Forget a finished or aborted request, which may be unknown here."""
        ...

    def observe(self, requests: Sequence[Request], hidden: np.ndarray) -> None:
        """Take the final residual stream `hidden`, [requests, hidden], after the last norm, from which each request's
        newest token was drawn. Called only if `wants_hidden`, after every step and before `propose`."""
        ...

    def sleep(self) -> None:
        """Free device memory. `wake_up` undoes it; state of drafts may be lost."""
        ...

    def wake_up(self) -> None:
        """Undo `sleep`."""
        ...

    def close(self) -> None:
        """Free all memory."""
        ...
