"""Output queues between the engine's thread and asyncio tasks: each request's deltas become an asynchronous iterator
that ends with the request or with its error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from ttpu_core.errors import RequestError, TTPUError
from ttpu_serve.api.outputs import Logprob, OutputDelta


class EngineDeadError(TTPUError):
    """The engine failed or was shut down and serves no requests."""


class EngineClosingError(TTPUError):
    """The engine finishes its running requests and takes no new ones."""


class RequestFailedError(TTPUError):
    """One request failed within the engine; others continue."""


class RequestTimeoutError(TTPUError):
    """A request exceeded its time limit; its output until then was delivered."""


class Stream:
    """The output queue of one request. Iterate over it once, in the event loop where it was made.

    Deltas that the consumer has not taken are merged per sequence, so that a slow consumer does not grow the queue.
    `abort` is called to stop the request in the engine, `forget` when no more deltas follow. If one sequence fails, the
    request's other sequences are aborted.
    """

    def __init__(
        self, request_id: str, sequences: int, abort: Callable[[Stream], None], forget: Callable[[Stream], None]
    ) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self._abort, self._forget = abort, forget
        self._running = set(range(sequences))
        self._last: dict[int, OutputDelta] = {}
        self._waiting: dict[int, list[OutputDelta]] = {}
        self._ready = asyncio.Event()
        self._error: TTPUError | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        """Whether the engine sends no more deltas."""
        return not self._running or self._error is not None

    def put(self, delta: OutputDelta) -> None:
        """Add a delta from the engine. Call it in the event loop."""
        if self.finished:
            return
        if delta.error is not None:
            if len(self._running) > 1:
                self._abort(self)
            self.fail((RequestError if delta.error_kind == "request" else RequestFailedError)(delta.error))
            return
        self._waiting.setdefault(delta.index, []).append(delta)
        self._last[delta.index] = delta
        if delta.finish_reason is not None:
            self._running.discard(delta.index)
        if not self._running:
            self._done()
        self._ready.set()

    def end(self, reason: str) -> None:
        """End unfinished sequences with a finish reason, after their output so far. Call it in the event loop."""
        for index in sorted(self._running):
            last = self._last.get(index) or OutputDelta(self.request_id, index, "", [], None, None)
            logprobs: list[dict[int, Logprob]] | None = None if last.logprobs is None else []
            self.put(
                replace(last, text="", token_ids=[], logprobs=logprobs, prompt_logprobs=None, finish_reason=reason)
            )

    def fail(self, error: TTPUError) -> None:
        """End the stream with an error, after the output so far. Call it in the event loop."""
        if not self.finished:
            self._error = error
            self._done()
            self._ready.set()

    def expire_after(self, seconds: float) -> None:
        """Abort the request after `seconds`, unless it has finished."""

        def expired() -> None:
            self._abort(self)
            self.fail(
                RequestTimeoutError(
                    f"the request ran for {seconds:g} s, which is as long as one may: ask for fewer tokens, or try "
                    "again when there is less to do."
                )
            )

        self._deadline = self.loop.call_later(seconds, expired)

    def close(self) -> None:
        """Abort the request, unless it has finished."""
        if not self.finished:
            self._abort(self)
            self.fail(EngineClosingError("the stream was closed before its output was done: ask again."))

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                waiting, self._waiting = self._waiting, {}
                for deltas in waiting.values():
                    yield merged(deltas)
                if self.finished and not self._waiting:
                    break
            if self._error is not None:
                raise self._error
        finally:
            self.close()

    def _done(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._forget(self)


def merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Merge successive deltas of one sequence."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    logprobs: list[dict[int, Logprob]] | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [token for delta in deltas for token in delta.logprobs or ()]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )
