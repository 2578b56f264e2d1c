"""What the engine expects of whoever guesses tokens. In: requests whose next token is due; out: drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ttpu_serve.scheduling.request import Request


class Proposer(Protocol):
    """Guesses the next tokens of requests.

    Nothing of a draft's right or wrong shows in answers, only in speed, so a proposer may guess badly, or not at all.

    wants_hidden: the engine keeps each step's hidden states and calls `observe` with them before `propose`, for heads
        that read the model's own stream (EAGLE, multi-token prediction); no proposer here does.
    """

    wants_hidden: bool

    def propose(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """For each request, whose tokens are all known, up to `k` tokens that may follow; [] for no idea.

        Requests come back in any order, and may stay away for a while (preempted)."""
        ...

    def on_finish(self, request: Request) -> None:
        """The request is over, or aborted; it may never have been seen here."""
        ...

    def observe(self, requests: Sequence[Request], hidden: np.ndarray) -> None:
        """The stream [requests, hidden], after the final norm, from which each one's newest token was drawn; only
        called if `wants_hidden`, after every step and before `propose`."""
        ...

    def sleep(self) -> None:
        """Give back what is held on devices, if anything; `wake_up` undoes it, and drafts may start over."""
        ...

    def wake_up(self) -> None:
        """Undo `sleep`."""
        ...

    def close(self) -> None:
        """Give back everything."""
        ...
