"""Matchers in processes of their own, for grammars of strangers. A grammar is first compiled by a process that does
nothing else, with little stack and memory and a deadline; one that survives there is given to the process that computes
masks. Where that one ends all the same, it is started again, and every output but the one that ended it goes on."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.errors import MissingDependencyError, RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.guided.grammar import key_of, refusal
from ttpu_serve.guided.matchers import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

MIB = 2**20
TRIALS = 2
"""Processes that compile strangers' grammars; further ones wait."""


@dataclass(frozen=True)
class Bounds:
    """What a process may take.

    Attributes:
        stack: bytes of each thread's stack. llguidance recurses along the references of a grammar.
        address_space: bytes.
        memory: bytes after which it is replaced.
        seconds: that one compilation may take.
        niceness: added to that of this process, which others come before.
    """

    stack: int
    address_space: int
    memory: int
    seconds: float
    niceness: int = 0


TRIAL = Bounds(stack=4 * MIB, address_space=4096 * MIB, memory=128 * MIB, seconds=4.0, niceness=10)
MASKS = Bounds(stack=64 * MIB, address_space=16384 * MIB, memory=384 * MIB, seconds=10.0)
GRAMMAR_BYTES = 256 * MIB
"""That one grammar may take."""
MASK_SECONDS = 0.5
"""That one mask may take, for which all outputs wait. Most take less than a millisecond."""
TRIED_SECONDS = 0.05
"""That each of the first masks of a grammar may take when it is tried out."""
IDLE_MEMORY, IDLE_SECONDS = 64 * MIB, 10.0
"""Of the process of masks, beside what it has without grammars: where it holds more, and no output has a guide, another
one takes over. And how often that is looked at."""
START_SECONDS = 60.0
"""That a process may take to start and to read the vocabulary."""


class GuideProcessError(Exception):
    """The process ended, or overran its time and was ended."""


class GuideProcess:
    """A `ttpu_serve.guided.worker`."""

    def __init__(self, vocabulary: Vocabulary, bounds: Bounds) -> None:
        """
        Args:
            vocabulary: of the model.
            bounds: what it may take.

        Raises:
            GuideProcessError: it does not start.
            MissingDependencyError: llguidance is not installed.
        """
        self.bounds = bounds
        self._locks = (threading.Lock(), threading.Lock())
        pipes = [Pipe(), Pipe()]
        self._channels = tuple(own for own, _ in pipes)
        theirs = [other.fileno() for _, other in pipes]
        command = [*theirs, bounds.stack, bounds.address_space]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ttpu_serve.guided.worker", *map(str, command)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _, other in pipes:
            other.close()
        with suppress(OSError):  # it ended at once
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0) + bounds.niceness)
        self.held = self._call(0, START_SECONDS, "vocabulary", vocabulary)

    def compile(self, key: bytes, guided: GuidedDecoding) -> str:
        """Compile a grammar; return why it is refused, or nothing.

        Raises:
            GuideProcessError: the process ended, or was ended, also because the grammar takes too much.
        """
        return self._compile("compile", key, guided)

    def try_out(self, key: bytes, guided: GuidedDecoding) -> str:
        """Compile a grammar, follow it for a few tokens, and forget it; return why it is refused, or nothing.

        Raises:
            GuideProcessError: the process ended, or was ended, also because the grammar takes too much.
        """
        return self._compile("try_out", key, guided, TRIED_SECONDS)

    def _compile(self, *request: Any) -> str:
        before = self.held
        reason, self.held = self._call(0, self.bounds.seconds, *request)
        if self.held - before > GRAMMAR_BYTES:
            self.kill()
            raise GuideProcessError("it takes too much memory")
        return str(reason)

    def on_matcher(self, name: str, *arguments: Any) -> Any:
        """Call a method of `ttpu_serve.guided.worker.Work` that concerns a matcher.

        Raises:
            GuideProcessError: the process ended, or was ended.
        """
        return self._call(1, MASK_SECONDS, name, *arguments)

    @property
    def full(self) -> bool:
        """Whether it holds more than it should."""
        return self.held > self.bounds.memory

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _call(self, channel: int, seconds: float, *request: Any) -> Any:
        connection: Connection = self._channels[channel]
        with self._locks[channel]:
            try:
                connection.send(request)
                if not connection.poll(seconds):
                    self.kill()
                    raise GuideProcessError(f"it takes longer than {seconds:g} seconds")
                done, result = connection.recv()
            except (EOFError, OSError) as error:
                self.kill()
                raise GuideProcessError("it takes too much stack or memory") from error
        if not done and request[0] == "vocabulary":
            raise MissingDependencyError(str(result))
        if not done:
            raise GuideProcessError(str(result))
        return result


@dataclass
class _Running:
    """Compilations in progress by their key, so that one can be interrupted."""

    processes: dict[bytes, GuideProcess] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class IsolatedMatchers:
    """Makes matchers in other processes, which are started when the first grammar comes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """
        Args:
            vocabulary: called once, when it is needed.
        """
        self._read_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._trials: queue.LifoQueue[GuideProcess | None] = queue.LifoQueue()
        for _ in range(TRIALS):
            self._trials.put(None)
        self._running = _Running()
        self._masks: GuideProcess | None = None
        self._spare: Future[GuideProcess] | None = None  # takes over when that one ends
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="ttpu-guide-spare")
        self._known: set[bytes] = set()
        self._masks_lock = threading.RLock()
        self._closed = False
        self._closing = threading.Event()
        self._watching, self._empty = False, 0
        self.opened: set[int] = set()  # numbers of the matchers of outputs
        self.numbers = itertools.count()
        self.dropped: deque[int] = deque()  # of matchers that are gone; a collector may append in any thread

    # -- compilations --

    def start(self, guided: GuidedDecoding) -> RemoteMatcher:
        """See `ttpu_serve.guided.matchers.Matchers`.

        Raises:
            RequestError: the grammar is malformed, unsupported, too large or unmatchable.
            MissingDependencyError: llguidance is not installed.
        """
        key = key_of(guided)
        with self._trial(key) as process:
            try:
                reason = process.try_out(key, guided)
            except GuideProcessError as error:
                raise refusal(guided, str(error)) from error
            except RecursionError as error:
                raise refusal(guided, "it is nested too deeply") from error
        if reason:
            raise RequestError(reason)
        try:
            self.masks_for(key, guided)
        except GuideProcessError as error:
            raise refusal(guided, str(error)) from error
        return RemoteMatcher(self, key, guided)

    def interrupt(self, guided: GuidedDecoding) -> None:
        """End the compilation of a grammar, if there is one."""
        with self._running.lock:
            process = self._running.processes.get(key_of(guided))
        if process is not None:
            process.kill()

    @contextmanager
    def _trial(self, key: bytes) -> Iterator[GuideProcess]:
        """A process that may end, for one grammar; waits for one."""
        process = self._trials.get()
        try:
            if process is None:
                process = self._started(TRIAL)
            with self._running.lock:
                self._running.processes[key] = process
            yield process
            if process.full:
                process.kill()
                process = None
        except RequestError:
            process = None if process is None or process._process.poll() is not None else process
            raise
        except BaseException:
            if process is not None:
                process.kill()
            process = None
            raise
        finally:
            with self._running.lock:
                self._running.processes.pop(key, None)
            self._trials.put(process)

    # -- masks --

    def masks_for(self, key: bytes, guided: GuidedDecoding) -> GuideProcess:
        """The process that computes masks, which knows the grammar then.

        Raises:
            GuideProcessError: it cannot compile a grammar that another process could.
        """
        with self._masks_lock:
            if self._masks is not None and (self._masks.full or self._masks._process.poll() is not None):
                self.replace(self._masks)
            if self._masks is None:
                spare, self._spare = self._spare, None
                self._masks, self._known = self._started(MASKS) if spare is None else spare.result(), set()
                self._empty = self._masks.held
                if not self._watching:
                    self._watching = True
                    threading.Thread(target=self._watch, name="ttpu-guide-watch", daemon=True).start()
            if self._spare is None:
                self._spare = self._starter.submit(self._started, MASKS)
            process = self._masks
            if key in self._known:
                return process
        # Not in the lock: masks of other outputs go on meanwhile.
        try:
            reason = process.compile(key, guided)
        except GuideProcessError:
            self.replace(process)
            raise
        if reason:
            raise GuideProcessError(reason)
        with self._masks_lock:
            if self._masks is process:
                self._known.add(key)
        return process

    def replace(self, process: GuideProcess) -> None:
        """End a process that computes masks; the next mask starts another."""
        with self._masks_lock:
            process.kill()
            if self._masks is process:
                self._masks = None
                log.warning("the process that computes guides' masks was replaced; outputs go on")

    def _watch(self) -> None:
        """Give memory back when no output has a guide."""
        while not self._closing.wait(IDLE_SECONDS):
            with self._masks_lock:
                process = self._masks
                if process is not None and not self.opened and process.held > self._empty + IDLE_MEMORY:
                    process.kill()
                    self._masks = None

    def _started(self, bounds: Bounds) -> GuideProcess:
        if self._closed:
            raise RequestError("a guide was asked for, but the engine is closed: open another one.")
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        return GuideProcess(self._vocabulary, bounds)

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        self._closing.set()
        self._starter.shutdown(wait=True, cancel_futures=True)
        with self._running.lock:
            busy = list(self._running.processes.values())
        with self._masks_lock:
            busy += [] if self._masks is None else [self._masks]
            if self._spare is not None and not self._spare.cancelled() and self._spare.exception() is None:
                busy.append(self._spare.result())
            self._masks = self._spare = None
        with suppress(queue.Empty):
            while True:
                idle = self._trials.get_nowait()
                busy += [] if idle is None else [idle]
        for process in busy:
            process.kill()
        for _ in range(TRIALS):
            self._trials.put(None)


class RemoteMatcher:
    """A matcher of another process. It keeps its tokens, so that a new process can take it over."""

    def __init__(self, owner: IsolatedMatchers, key: bytes, guided: GuidedDecoding) -> None:
        self._owner, self._key, self._guided = owner, key, guided
        self._tokens: list[int] = []
        self._process: GuideProcess | None = None
        self._number = -1
        self._error = ""
        self._stopped = self._accepting = False

    def deep_copy(self) -> RemoteMatcher:
        """Another matcher at the same position."""
        copy = RemoteMatcher(self._owner, self._key, self._guided)
        copy._tokens = list(self._tokens)
        copy._error, copy._stopped, copy._accepting = self._error, self._stopped, self._accepting
        return copy

    def mask_into(self, buffer: np.ndarray) -> None:
        """Fill `buffer`, uint32 [words], with the allowed next tokens."""
        found = self._call("mask")
        if found is not None:
            buffer[:] = np.frombuffer(found, np.uint32)[: len(buffer)]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume tokens until one is not allowed; return how many were."""
        count = int(self._call("consume", tokens) or 0)
        self._tokens += tokens[:count]
        return count

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        self._call("rollback", num_tokens)
        del self._tokens[len(self._tokens) - num_tokens :]

    def is_error(self) -> bool:
        """Whether it cannot go on."""
        return bool(self._error)

    def get_error(self) -> str:
        """Why."""
        return self._error

    def is_stopped(self) -> bool:
        """Whether nothing but the end of sequence can follow."""
        return self._stopped

    def is_accepting(self) -> bool:
        """Whether the output is a match."""
        self._ensure()
        return self._accepting

    def _ensure(self) -> GuideProcess | None:
        """The process, in which this matcher is open."""
        if self._error:
            return None
        try:
            process = self._owner.masks_for(self._key, self._guided)
            if process is not self._process:
                self._owner.opened.discard(self._number)
                self._number = next(self._owner.numbers)
                dropped = [self._owner.dropped.popleft() for _ in range(len(self._owner.dropped))]
                state = process.on_matcher("open", self._number, self._key, self._tokens, dropped)
                self._process = process
                self._owner.opened.add(self._number)
                self._take(state)
            return process
        except GuideProcessError as error:
            self._fail(error)
            return None

    def _call(self, name: str, *arguments: Any) -> Any:
        process = self._ensure()
        if process is None:
            return None
        try:
            return self._take(process.on_matcher(name, self._number, *arguments))
        except GuideProcessError as error:
            self._owner.replace(process)
            self._fail(error)
            return None

    def _take(self, state: tuple[Any, ...]) -> Any:
        value, self._error, self._stopped, self._accepting = state
        return value

    def _fail(self, error: GuideProcessError) -> None:
        self._error, self._stopped = f"its guide cannot be followed ({error})", True

    def __del__(self) -> None:
        if self._process is not None:
            self._owner.opened.discard(self._number)
            self._owner.dropped.append(self._number)
