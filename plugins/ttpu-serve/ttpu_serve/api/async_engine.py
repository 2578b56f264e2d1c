"""An engine for asyncio programs such as servers. Any number of tasks submit prompts and receive a stream of deltas for
each, while one thread steps the engine core."""

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
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.prompt import Prompt as ReadPrompt
from ttpu_core.generation.ranges import short
from ttpu_core.generation.sampling_params import GuidedDecoding, SamplingParams
from ttpu_serve.api.guide_queue import GuideQueue
from ttpu_serve.api.output_queue import (
    EngineClosingError,
    EngineDeadError,
    RequestFailedError,
    RequestTimeoutError,
    Stream,
)
from ttpu_serve.api.outputs import EmbeddingOutput, OutputDelta
from ttpu_serve.scheduling.request import AskedPooling

if TYPE_CHECKING:
    from ttpu_serve.execution.engine_core import EngineCore
    from ttpu_serve.execution.stats import EngineStats

LOG = logging.getLogger(__name__)
MOST_FAILURES = 3
"""Steps that may fail one after another. The first is tried again; then the requests of each end."""
GUIDES_SECONDS = 2.0
"""For which requests that have no guide yet are waited for when the engine drains."""
LEAVING = "the server shuts down and could not wait any longer: ask again."
T = TypeVar("T")
Prompt = str | list[int]


@dataclass
class _Call:
    """A function to call between two steps, and the future that receives its result."""

    work: Callable[[], Any]
    future: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)


class AsyncEngine:
    """Serves requests of many asyncio tasks with one core.

    Only the engine's own thread touches the core: between two steps it runs the calls that tasks queued. All methods
    except `start` and `close` must be called in an event loop.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.error: str | None = None  # why it is dead
        self.on_death: Callable[[], None] | None = None  # called in its thread
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        # Whose requests the core's ids are; of the engine's thread alone.
        self._owners: WeakValueDictionary[str, Stream] = WeakValueDictionary()
        self.ongoing: set[object] = set()
        """Work that submits one request after another, such as beam searches: `drain` waits for it."""
        self._closing = False
        self._drained = False  # what goes on is refused, too
        self._stopped = False
        self._stats: EngineStats | None = None
        self._guides = GuideQueue(core.guides)
        self._thread = threading.Thread(target=self._run, name="ttpu-engine", daemon=True)

    @classmethod
    def from_pretrained(
        cls, model: Any, *, backend: str | None = None, progress: Any = True, **options: Any
    ) -> AsyncEngine:
        """Open an engine over a checkpoint's directory, a Hub id, or a loaded model. `backend` and `progress` are those
        of `open_engine`; `options` are options of loading and fields of `EngineConfig`.

        Raises:
            TTPUError: the checkpoint, its plugin or a setting is invalid, or memory does not suffice.
        """
        from ttpu_serve.api.open_engine import open_engine, read_options

        load, config = read_options(model, options, backend)
        return cls(open_engine(model, load, config, backend=backend, progress=progress))

    # -- life -----------------------------------------------------------------------------------------------

    def start(self) -> AsyncEngine:
        """Start the engine's thread. Call it once."""
        self._thread.start()
        return self

    async def __aenter__(self) -> AsyncEngine:
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and has not failed."""
        return self.error is None and not self._stopped and self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        """Whether the engine takes new requests."""
        return self.alive and not self._closing

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until none is running. After `timeout` seconds, abort the remaining requests and
        return False."""
        self._closing = True
        loop, refusal = asyncio.get_running_loop(), EngineClosingError(LEAVING)
        began = loop.time()
        while self._streams or self.ongoing:
            passed = loop.time() - began
            if passed >= GUIDES_SECONDS:
                self._guides.refuse(refusal)
            if timeout is not None and passed >= timeout:
                self._drained = True
                self._guides.refuse(refusal)
                for stream in list(self._streams.values()):
                    self._abort(stream)
                    stream.fail(refusal)
                return False
            await asyncio.sleep(0.02)
        return True

    async def shutdown(self, timeout: float | None = 0) -> None:
        """Drain, then stop the thread and close the core."""
        await self.drain(timeout)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop at once. May be called from any thread."""
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
        pooling: AskedPooling | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> Stream:
        """Add a request, wait until the core has accepted it, and return its stream of deltas.

        Args:
            prompt: a text or token ids.
            params: sampling parameters.
            request_id: the request's id; by default a random one.
            priority: requests with lower values run first.
            adapter: name of a loaded LoRA adapter; None uses the base model.
            pooling: asks for the prompt's embedding instead of generated tokens.
            cache_salt: only requests with the same salt share cached prefixes.
            timeout: seconds after which the request is aborted; None never aborts it.

        Raises:
            RequestError: the core refuses the request; QueueFullError if it may succeed later.
            EngineDeadError: the engine failed or does not run.
            EngineClosingError: the engine takes no new requests.
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

    def check_places(self, sequences: int) -> None:
        """Refuse a request that would find the queue full however often it is sent.

        Raises:
            RequestError: it has more sequences than run and wait at once.
        """
        config = self.core.scheduler.config
        if config.max_waiting is not None and sequences > config.max_num_seqs + config.max_waiting:
            raise RequestError(
                f"the request has {sequences:,} sequences, but at most {config.max_num_seqs:,} run at once "
                f"(max_num_seqs) and {config.max_waiting:,} wait (max_waiting): ask for fewer, or raise these."
            )

    async def submit_all(
        self,
        prompts: Sequence[Prompt | ReadPrompt],
        params: SamplingParams,
        *,
        request_ids: Sequence[str] | None = None,
        priority: int = 0,
        adapter: str | None = None,
        pooling: AskedPooling | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
        goes_on: bool = False,
        client: str = "",
    ) -> list[Stream]:
        """Add several requests between the same two steps and return their streams. Either all of them are accepted or
        none.

        Args:
            prompts: texts, token ids, or what the core read of them.
            params: sampling parameters of every prompt.
            request_ids: one id per prompt; by default random ones.
            priority: requests with lower values run first.
            adapter: name of a loaded LoRA adapter; None uses the base model.
            pooling: asks for embeddings instead of generated tokens.
            cache_salt: only requests with the same salt share cached prefixes.
            timeout: seconds after which unfinished requests are aborted; None never aborts them.
            goes_on: the requests belong to `ongoing` work, which goes on while the engine drains.
            client: who asks; clients take turns at compiling guides.

        Raises:
            RequestError: the core refuses a request; QueueFullError if it may succeed later.
            RequestTimeoutError: its guide was not compiled in time.
            EngineDeadError: the engine failed or does not run.
            EngineClosingError: the engine takes no new requests.
        """
        self.check_accepting(goes_on=goes_on)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {short(params)}, but SamplingParams are needed: pass SamplingParams(...).")
        self.check_places(len(prompts) * (1 if pooling else params.n))
        names = request_ids or [uuid.uuid4().hex for _ in prompts]
        streams = [Stream(name, 1 if pooling else params.n, self._abort, self._forget) for name in names]
        if params.guided is not None:
            timeout = await self._compiled(params.guided, client, timeout)

        def add() -> None:
            taken: list[str] = []
            try:
                for name, prompt in zip(names, prompts, strict=True):
                    self.core.add(
                        name,
                        prompt,
                        params,
                        priority=priority,
                        adapter=adapter,
                        pooling=pooling,
                        cache_salt=cache_salt,
                    )
                    taken.append(name)
            except BaseException:
                for name in taken:
                    self.core.take_back(name)
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

    async def compile_guide(self, guided: GuidedDecoding, client: str = "") -> None:
        """Compile a guide, unless it is compiled. That may take seconds, for which neither steps nor other clients
        wait. Where the caller leaves, the compilation is ended.

        Args:
            guided: the grammar.
            client: who asks for it; clients take turns.

        Raises:
            RequestError: the grammar is wrong, or takes too much.
            EngineClosingError: the engine has shut down.
        """
        self.ongoing.add(waits := object())
        try:
            await self._guides.compile(guided, client)
        finally:
            self.ongoing.discard(waits)

    async def _compiled(self, guided: GuidedDecoding, client: str, timeout: float | None) -> float | None:
        """Compile a guide within a request's time; return the seconds that are left of it."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout):
                await self.compile_guide(guided, client)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"the request waited for {timeout:g} s for its guide, which is as long as one may take: try again when "
                "there is less to do."
            ) from error
        return None if timeout is None else max(timeout - (asyncio.get_running_loop().time() - began), 0.001)

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
        """Submit a prompt and yield its deltas. Leaving the loop aborts the request.

        Args:
            prompt: a text or token ids.
            params: sampling parameters.
            request_id: the request's id; by default a random one.
            priority: requests with lower values run first.
            adapter: name of a loaded LoRA adapter; None uses the base model.
            cache_salt: only requests with the same salt share cached prefixes.
            timeout: seconds after which the request is aborted; None never aborts it.
        """
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
        pooling: AskedPooling = "auto",
        *,
        priority: int = 0,
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> EmbeddingOutput:
        """Return a prompt's embedding.

        Args:
            prompt: a text or token ids.
            pooling: which hidden states are pooled: of the last token, the mean of all, or of the first (cls). "auto"
                is what the checkpoint's files declare, else the last token's.
            priority: requests with lower values run first.
            adapter: name of a loaded LoRA adapter; None uses the base model.
            timeout: seconds after which the request is aborted; None never aborts it.

        Raises:
            RequestError: the prompt cannot be served.
            RequestFailedError: the engine returned no embedding.
            EngineDeadError: the engine failed or does not run.
            EngineClosingError: the engine takes no new requests.
        """
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
        """End a request at any time; unknown ids are ignored. Text generated so far is delivered, and unfinished
        sequences end with the finish reason abort."""

        def work() -> None:
            self.core.abort(request_id)
            stream = self._streams.get(request_id)
            if stream is not None:
                with suppress(RuntimeError):  # the loop is closed, so that nobody listens
                    stream.loop.call_soon_threadsafe(stream.end, "abort")

        self._calls.put(_Call(work))

    def _abort(self, stream: Stream) -> None:
        """Abort a stream's request in the core, unless another stream has taken over its id."""

        def work() -> None:
            if self._owners.get(stream.request_id) is stream:
                self.core.abort(stream.request_id)
            self._forget(stream)

        self._calls.put(_Call(work))

    def _forget(self, stream: Stream) -> None:
        """Drop a finished stream."""
        if self._streams.get(stream.request_id) is stream:
            self._streams.pop(stream.request_id, None)  # which the engine's thread may do, too

    # -- everything else --------------------------------------------------------------------------------------

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread between two steps and return its result. Use it to sleep, wake up, load an
        adapter or change weights. Errors of `work` propagate.

        Raises:
            EngineDeadError: the engine is dead, or dies before the call runs.
        """
        self.check_alive()
        call = _Call(work)
        self._calls.put(call)
        if self._stopped:  # after the check, when it had read its queue to the end
            self._refuse_calls()
        result: T = await asyncio.wrap_future(call.future)
        return result

    async def stats(self, patience: float = 1.0) -> EngineStats:
        """Return the core's counters. If the core is busy for longer than `patience` seconds, return the previous
        ones."""
        if self.alive:
            with suppress(asyncio.TimeoutError, EngineDeadError):
                self._stats = await asyncio.wait_for(self.call(self.core.stats), patience)
        return self._stats if self._stats is not None else self.core.stats()

    def check_alive(self) -> None:
        """Check that the engine can work.

        Raises:
            EngineDeadError: the engine failed or does not run.
        """
        if self.error is not None:
            raise EngineDeadError(f"the engine failed and serves nothing any more ({self.error}): start it again.")
        running = self._thread.is_alive() and not self._stopped
        if not running and self._closing:
            raise EngineDeadError("the engine was asked to work, but it was shut down for good: make another one.")
        if not running:
            raise EngineDeadError("the engine was asked to work, but it is not running: call start().")

    def check_accepting(self, *, goes_on: bool = False) -> None:
        """Check that the engine takes new requests.

        Args:
            goes_on: the requests belong to `ongoing` work.

        Raises:
            EngineDeadError: the engine failed or does not run.
            EngineClosingError: the engine is shutting down.
        """
        self.check_alive()
        if self._drained or (self._closing and not goes_on):
            raise EngineClosingError("the server is shutting down and takes no new requests: ask another one.")

    # -- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            failures = 0
            while self._do_calls():
                if not self.core.has_work:
                    continue
                try:
                    self._deliver(self.core.step())
                    failures = 0
                except Exception as error:
                    failures += 1
                    if failures > MOST_FAILURES:
                        raise
                    LOG.exception("a step failed")
                    if failures > 1:  # not by chance
                        self.core.end_failed(error)
        except BaseException as error:  # whatever it is, nobody is there to catch it, and everybody waits
            LOG.exception("the engine failed")
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        finally:
            self._stopped = True
            self._refuse_calls()
            self._end_streams()
            if self.error is not None and self.on_death is not None:
                self.on_death()
            self._guides.close()
            with suppress(Exception):
                self.core.close()

    def _do_calls(self) -> bool:
        """Run the queued calls; wait for one if the core has no work. Return False if the engine has to stop."""
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
        """Hand deltas to their streams, waking each event loop once per step."""
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
