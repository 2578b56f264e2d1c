"""Answers the lines of many batches with one engine, so many at once, while batches of different clients take turns.
`ttpu serve` and `ttpu batch` share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from ttpu_core.errors import TTPUError
from ttpu_serve.api.output_queue import EngineClosingError, EngineDeadError
from ttpu_serve.server.batches.answers import Answer, answer_line
from ttpu_serve.server.batches.lines import Line, RawLine
from ttpu_serve.server.batches.room import Room
from ttpu_serve.server.batches.slots import FairSlots
from ttpu_serve.server.body import LONG
from ttpu_serve.server.service import Service

T = TypeVar("T")


class Work(Protocol):
    """Lines to answer. `next` and `done` run in the thread for files.

    owner: whose turn it is.
    """

    owner: str

    def next(self) -> RawLine | None:
        """Return the next line, or None when all were returned."""
        ...

    def read(self, raw: RawLine) -> Line:
        """Return a line's request. It may be called in any thread."""
        ...

    def done(self, line: Line, answer: Answer) -> None:
        """Write an answer."""
        ...


class LineExecutor:
    """Answers lines, of which at most `at_once` are worked on, with as many sequences."""

    def __init__(self, service: Service, at_once: int) -> None:
        self._service = service
        self._slots, self._room = FairSlots(at_once), Room(at_once)
        self._files = ThreadPoolExecutor(1, thread_name_prefix="ttpu-batches")
        service.metrics.batch_lines_running.set_function(lambda: self._slots.taken)

    async def in_files_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread for files, one after another, and return its result. Errors of `work` propagate."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    async def run(self, work: Work) -> None:
        """Answer all lines of a piece of work. If it is cancelled, the lines that run are aborted.

        Raises:
            EngineClosingError, EngineDeadError: the engine takes no more. The lines that ran have ended.
            Exception: of the work's own methods. The lines that ran are aborted.
        """
        refusals: list[TTPUError] = []
        tasks: set[asyncio.Task[None]] = set()
        try:
            while not refusals:
                await self._slots.take(work.owner)
                try:
                    raw = await self.in_files_thread(work.next)
                except BaseException:
                    self._slots.give_back()
                    raise
                if raw is None:
                    self._slots.give_back()
                    break
                task = asyncio.create_task(self._one(work, raw, refusals))
                task.add_done_callback(lambda _: self._slots.give_back())
                tasks.add(task)
                for ended in [one for one in tasks if one.done()]:
                    tasks.discard(ended)
                    ended.result()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if refusals:
            raise refusals[0]

    async def _one(self, work: Work, raw: RawLine, refusals: list[TTPUError]) -> None:
        """Answer one line, or add to `refusals` why it is not answered."""
        client = f"batches of {work.owner}"
        try:
            if len(raw.content) < LONG:
                line = work.read(raw)
            else:
                line = await asyncio.wrap_future(self._service.bodies.submit(client, partial(work.read, raw)))
            answer = await answer_line(self._service, line, self._room, client)
        except (EngineClosingError, EngineDeadError) as error:
            refusals.append(error)
            return
        await self.in_files_thread(partial(work.done, line, answer))
        self._service.metrics.batch_line(answer.succeeded)

    def close(self) -> None:
        """Stop the thread for files."""
        self._files.shutdown(wait=True)
