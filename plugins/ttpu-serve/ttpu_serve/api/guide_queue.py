"""Compiles the guides of an engine's requests beside its steps. Clients take turns, short grammars come before long
ones, and those that take long let others go first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ttpu_core.errors import TTPUError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.api.client_pace import ProcessorPace
from ttpu_serve.api.fair_executor import FairExecutor
from ttpu_serve.guided.grammar import WrittenGuide, written
from ttpu_serve.guided.matchers import SlowGrammarError

QUICK_SECONDS = 0.3
"""Of the processor, in which most grammars are compiled. One that takes longer begins again, behind others that do."""


class Guides(Protocol):
    """What compiles guides; see `ttpu_serve.guided.guides.GuideFactory`."""

    def compile(self, guided: GuidedDecoding, seconds: float | None = None) -> Any:
        """Compile a guide."""
        ...

    def is_compiled(self, guided: GuidedDecoding) -> bool:
        """Whether `compile` would return, or refuse, at once."""
        ...

    def interrupt(self, guided: GuidedDecoding) -> None:
        """End the compilation of a guide."""
        ...


@dataclass
class _Compilation:
    """One grammar in progress, and how many requests wait for it."""

    task: asyncio.Task[None]
    waiting: int = 0


class GuideQueue:
    """Compiles each grammar once, however many requests wait for it, and ends it when none does any more. All methods
    but `close` must be called in the same event loop."""

    def __init__(self, guides: Guides) -> None:
        """
        Args:
            guides: what compiles them.
        """
        self._guides = guides
        pace = ProcessorPace()
        self._quick, self._slow = FairExecutor("ttpu-guides", pace), FairExecutor("ttpu-guides-slow", pace)
        self._running: dict[bytes, _Compilation] = {}
        self._refusal: TTPUError | None = None

    async def compile(self, guided: GuidedDecoding, client: str = "") -> None:
        """Compile a guide, unless it is compiled.

        Args:
            guided: the grammar.
            client: who asks for it; clients take turns.

        Raises:
            RequestError: the grammar is wrong, or takes too much.
            TTPUError: that of `refuse`.
        """
        text = written(guided)
        if self._guides.is_compiled(text):
            return
        if self._refusal is not None:
            raise self._refusal
        key = text.key
        found = self._running.get(key)
        if found is None:
            task = asyncio.ensure_future(self._compile(text, client))
            found = self._running[key] = _Compilation(task)
            task.add_done_callback(lambda done: self._forget(key, done))
        found.waiting += 1
        try:
            await asyncio.wait([found.task])
        finally:
            found.waiting -= 1
            if not found.waiting and not found.task.done():
                self._running.pop(key, None)
                found.task.cancel()
        if found.task.cancelled() and self._refusal is not None:
            raise self._refusal
        found.task.result()

    def refuse(self, error: TTPUError) -> None:
        """End all compilations, and refuse further ones, with an error."""
        self._refusal = error
        for compilation in list(self._running.values()):
            compilation.task.cancel()

    def close(self) -> None:
        """Compile nothing more."""
        self._quick.close()
        self._slow.close()

    async def _compile(self, guided: WrittenGuide, client: str) -> None:
        try:
            await self._in(self._quick, guided, client, QUICK_SECONDS)
        except SlowGrammarError:
            await self._in(self._slow, guided, client, None)

    async def _in(self, lane: FairExecutor, guided: WrittenGuide, client: str, seconds: float | None) -> None:
        work = partial(self._guides.compile, guided, seconds)
        compilation = lane.submit(client, work, guided.length)
        try:
            await asyncio.wrap_future(compilation)
        except asyncio.CancelledError:
            if compilation.running():
                await asyncio.to_thread(self._guides.interrupt, guided)
            raise

    def _forget(self, key: bytes, done: asyncio.Task[None]) -> None:
        if (found := self._running.get(key)) is not None and found.task is done:
            del self._running[key]
        if not done.cancelled():
            done.exception()  # which nobody may be there to take
