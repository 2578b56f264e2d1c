"""Follows guides beside the engine's steps: it tells a guide the token that was sampled and computes the mask of the
next one, while steps of other outputs run. An output whose guide is not done sits out."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ttpu_serve.execution.sequence_output import SequenceOutput
from ttpu_serve.guided.guides import GuidePlace

PATIENCE = 0.5
"""Share of a step's time that a step is delayed for guides that are not done."""
IDLE_PATIENCE = 2.0
"""The same where nothing else can run: outputs that shared a step then go on sharing one."""
LEAST_SECONDS = 1e-3
"""That are waited for guides where nothing else can run."""


class GuideFollower:
    """The outputs whose guides are being told their newest token. The engine's thread alone calls it."""

    def __init__(self, place: GuidePlace) -> None:
        """
        Args:
            place: where masks are computed. Those of this process are no work for a thread: they hold the interpreter.
        """
        self.beside = place == "isolated"
        self._thread: ThreadPoolExecutor | None = None
        self._followed: dict[str, tuple[SequenceOutput, Future[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._followed)

    def follow(self, output: SequenceOutput) -> None:
        """Tell the guide of an output its newest token."""
        assert output.guide is not None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ttpu-guide-follow")
        self._followed[output.request.id] = output, output.guide.follow(output.request.output[-1], self._thread)

    def done(self, step_seconds: float, *, idle: bool = False) -> list[SequenceOutput]:
        """Return the outputs whose guides are done, after waiting a little for all of them.

        Args:
            step_seconds: that a step takes.
            idle: nothing else can run meanwhile.
        """
        patience = max(IDLE_PATIENCE * step_seconds, LEAST_SECONDS) if idle else PATIENCE * step_seconds
        wait([future for _, future in self._followed.values()], patience)
        found = [output for output, future in self._followed.values() if future.done()]
        for output in found:
            del self._followed[output.request.id]
        return found

    def forget(self, name: str) -> None:
        """Wait no more for the output of a request."""
        self._followed.pop(name, None)

    def close(self) -> None:
        """End the thread after the guide that it follows."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
