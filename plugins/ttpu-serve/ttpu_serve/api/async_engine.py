"""The engine for programs that run on asyncio, such as servers. In: prompts, from any number of tasks; out: a stream of
deltas for each, while one thread of its own steps the core."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from ttpu_core.generation.sampling_params import SamplingParams
from ttpu_serve.api.output_queue import EngineClosingError, EngineDeadError, RequestFailedError, Stream
from ttpu_serve.api.outputs import EmbeddingOutput, OutputDelta

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Prompt = str | list[int]
Pooling = Literal["last", "mean"]


@dataclass
class _Call:
    """Something to do between two steps, and who waits for it."""

    work: Callable[[], Any]
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)


class AsyncEngine:
    """Serves requests of many asyncio tasks with one core: an `EngineCore`, or whatever has its `add`, `abort`, `step`,
    `has_work`, `token_ids`, `stats` and `close`.

    The core is touched by the engine's own thread alone: between steps it does what tasks asked for. All methods but
    `start` and `close` are called in an event loop."""

    def __init__(self, core: Any) -> None:
        self.core: Any = core
        self.error: str | None = None  # why it is dead
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        # Whose requests the core's ids are; of the engine's thread alone.
        self._owners: WeakValueDictionary[str, Stream] = WeakValueDictionary()
        self._closing = False
        self._stopped = False
        self._stats: Any = None
        self._thread = threading.Thread(target=self._run, name="ttpu-engine", daemon=True)

    @classmethod
    def from_pretrained(
        cls, model: Any, *, backend: str | None = None, progress: Any = True, **options: Any
    ) -> AsyncEngine:
        """An engine over a checkpoint's directory or Hub id, or over a loaded model; `options` are those of `LLM`.

        Raises:
            TTPUError: the checkpoint, its plugin, a setting or the memory does not do, and why.
        """
        from ttpu_serve.api.open_engine import open_engine, read_options

        load, config = read_options(model, options, backend)
        return cls(open_engine(model, load, config, backend=backend, progress=progress))

    # -- life -----------------------------------------------------------------------------------------------

    def start(self) -> AsyncEngine:
        """Begin to step; once."""
        self._thread.start()
        return self

    async def __aenter__(self) -> AsyncEngine:
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def alive(self) -> bool:
        """Whether it serves what it has."""
        return self.error is None and not self._stopped and self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        """Whether it takes new requests."""
        return self.alive and not self._closing

    async def drain(self, timeout: float | None = None) -> bool:
        """Take nothing new and wait until nothing runs; False if that took longer than `timeout` seconds, and what
        was left then is aborted."""
        self._closing = True
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while self._streams:
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                for stream in list(self._streams.values()):
                    self._abort(stream)
                    stream.fail(EngineClosingError("the server shuts down and could not wait any longer: ask again."))
                return False
            await asyncio.sleep(0.02)
        return True

    async def shutdown(self, timeout: float | None = 0) -> None:
        """Drain, then stop the thread and close the core."""
        await self.drain(timeout)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop at once; from any thread."""
        self._closing = True
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # -- requests -------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        pooling: Pooling | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> Stream:
        """A stream of deltas, once the core has taken the request; `timeout` in seconds aborts it.

        Raises:
            RequestError: the core refuses it (QueueFullError: for now).
            EngineDeadError, EngineClosingError: it takes nothing.
        """
        (stream,) = await self.submit_all(
            [prompt],
            params,
            request_ids=None if request_id is None else [request_id],
            priority=priority,
            adapter=adapter,
            pooling=pooling,
            cache_salt=cache_salt,
            timeout=timeout,
        )
        return stream

    async def submit_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_ids: Sequence[str] | None = None,
        priority: int = 0,
        adapter: str | None = None,
        pooling: Pooling | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> list[Stream]:
        """As `submit`, of several prompts between the same two steps: all of them are taken, or none."""
        self.check_accepting()
        names = request_ids or [uuid.uuid4().hex for _ in prompts]
        streams = [Stream(name, 1 if pooling else params.n, self._abort, self._forget) for name in names]
        options: dict[str, Any] = {"priority": priority, "adapter": adapter}
        if pooling is not None:
            options["pooling"] = pooling
        if cache_salt is not None:
            options["cache_salt"] = cache_salt

        guides = getattr(self.core, "guides", None)
        if (
            params.guided is not None and guides is not None
        ):  # a large schema takes a second, which steps do not wait for
            await asyncio.to_thread(guides.compile, params.guided)

        def add() -> None:
            taken: list[str] = []
            try:
                for name, prompt in zip(names, prompts, strict=True):
                    self.core.add(name, prompt, params, **options)
                    taken.append(name)
            except BaseException:
                for name in taken:
                    self.core.abort(name)
                raise
            for name, stream in zip(names, streams, strict=True):
                self._streams[name] = self._owners[name] = stream

        try:
            await self.call(add)
        except asyncio.CancelledError:
            for stream in streams:
                self._abort(stream)
            raise
        for stream in streams:
            if timeout is not None and not stream.finished:
                stream.expire_after(timeout)
        return streams

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[OutputDelta]:
        """The deltas of `submit`'s stream, with its arguments. Leaving the loop over them aborts the request."""
        stream = await self.submit(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            adapter=adapter,
            cache_salt=cache_salt,
            timeout=timeout,
        )
        async for delta in stream:
            yield delta

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling = "last",
        *,
        priority: int = 0,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> EmbeddingOutput:
        """A prompt's embedding; arguments are those of `submit`."""
        self.check_accepting()
        ids: list[int] = await self.call(lambda: self.core.token_ids(prompt))
        stream = await self.submit(
            ids, SamplingParams(max_tokens=1), priority=priority, adapter=adapter, pooling=pooling, timeout=timeout
        )
        embedding: np.ndarray | None = None
        async for delta in stream:
            embedding = delta.embedding if delta.embedding is not None else embedding
        if embedding is None:
            raise RequestFailedError("an embedding was asked for, but the engine gave none: use a model that has one.")
        return EmbeddingOutput(stream.request_id, ids, embedding)

    def abort(self, request_id: str) -> None:
        """End a request, at any time; an unknown one is no error. What it said until then is delivered, and answers
        that were not done end with the finish reason abort."""

        def work() -> None:
            self.core.abort(request_id)
            stream = self._streams.get(request_id)
            if stream is not None:
                with suppress(RuntimeError):  # the loop is closed, so that nobody listens
                    stream.loop.call_soon_threadsafe(stream.end, "abort")

        self._calls.put(_Call(work))

    def _abort(self, stream: Stream) -> None:
        """Have the core forget a stream's request, but not another one of its name."""

        def work() -> None:
            if self._owners.get(stream.request_id) is stream:
                self.core.abort(stream.request_id)
            self._forget(stream)

        self._calls.put(_Call(work))

    def _forget(self, stream: Stream) -> None:
        """A stream is done."""
        if self._streams.get(stream.request_id) is stream:
            self._streams.pop(stream.request_id, None)  # which the engine's thread may do, too

    # -- everything else --------------------------------------------------------------------------------------

    async def call(self, work: Callable[[], T]) -> T:
        """What `work` returns, which the engine's thread does between two steps: the way to sleep, wake up, load an
        adapter or change weights.

        Raises:
            EngineDeadError: it is dead, or dies before; otherwise what `work` raises.
        """
        self.check_alive()
        call = _Call(work)
        self._calls.put(call)
        if self._stopped:  # after the check, when it had read its queue to the end
            self._refuse_calls()
        result: T = await asyncio.wrap_future(call.future)
        return result

    async def stats(self, patience: float = 1.0) -> Any:
        """The core's counters; those of last time where the core is busy for longer than `patience` seconds."""
        if self.alive:
            with suppress(asyncio.TimeoutError, EngineDeadError):
                self._stats = await asyncio.wait_for(self.call(self.core.stats), patience)
        return self._stats if self._stats is not None else self.core.stats()

    def check_alive(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine failed and serves nothing any more ({self.error}): start it again.")
        if self._stopped or not self._thread.is_alive():
            raise EngineDeadError("the engine was asked to work, but it is not running: call start().")

    def check_accepting(self) -> None:
        self.check_alive()
        if self._closing:
            raise EngineClosingError("the server is shutting down and takes no new requests: ask another one.")

    # -- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._do_calls():
                if self.core.has_work:
                    self._deliver(self.core.step())
        except BaseException as error:  # whatever it is, nobody is there to catch it, and everybody waits
            LOG.exception("the engine failed")
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        finally:
            self._stopped = True
            self._refuse_calls()
            self._end_streams()
            with suppress(Exception):
                self.core.close()

    def _do_calls(self) -> bool:
        """What was asked for meanwhile; waits for it where there is nothing else to do. False: stop."""
        while True:
            try:
                call = self._calls.get(block=not self.core.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            if not call.future.set_running_or_notify_cancel():
                continue
            try:
                call.future.set_result(call.work())
            except Exception as error:
                call.future.set_exception(error)

    def _deliver(self, deltas: Sequence[OutputDelta]) -> None:
        """Hand deltas to their streams: one wake-up of a loop for all of a step's."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Stream, OutputDelta]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                loops.setdefault(stream.loop, []).append((stream, delta))
        for loop, pairs in loops.items():
            with suppress(RuntimeError):  # the loop is closed, so that nobody listens
                loop.call_soon_threadsafe(_put_all, pairs)

    def _refuse_calls(self) -> None:
        reason = EngineDeadError(f"the engine stopped ({self.error or 'it was shut down'}): start it again.")
        with suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and call.future.set_running_or_notify_cancel():
                    call.future.set_exception(reason)

    def _end_streams(self) -> None:
        reason = EngineDeadError(f"the engine stopped ({self.error or 'it was shut down'}): ask again later.")
        for stream in list(self._streams.values()):
            with suppress(RuntimeError):
                stream.loop.call_soon_threadsafe(stream.fail, reason)


def _put_all(pairs: Sequence[tuple[Stream, OutputDelta]]) -> None:
    for stream, delta in pairs:
        stream.put(delta)
