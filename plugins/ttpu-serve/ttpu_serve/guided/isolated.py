"""Matchers in processes of their own, for grammars of strangers. A grammar is first compiled by a process that does
nothing else, with little stack and memory and a deadline; one that survives there is given to the process that computes
masks, and to another one, which takes over where that one ends. Then every output but the one that ended it goes on."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.guided.grammar import key_of, refusal
from ttpu_serve.guided.mask_server import MaskServer
from ttpu_serve.guided.matchers import CompilationEndedError, SlowGrammarError, Vocabulary
from ttpu_serve.guided.process import GRAMMAR_BYTES, MASKS, MIB, TRIAL, Bounds, GuideProcess, GuideProcessError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

TRIALS = 2
"""Processes that compile strangers' grammars; further ones wait."""
TAKEOVER_SECONDS, LOOK_SECONDS = 10.0, 0.02
"""That a new grammar waits where the process of masks is full, until another one knows all grammars and takes over; and
between two looks at that."""
PROMISED_SECONDS = 10.0 + TAKEOVER_SECONDS
"""Within which an output begins whose grammar was compiled."""
MOST_UNFIT = 4096
"""Grammars of which it is kept that they end processes."""
IDLE_MEMORY, IDLE_SECONDS = 64 * MIB, 10.0
"""Of the process of masks, beside what it has without grammars: where it holds more, and no output has a guide, another
one takes over. And how often that is looked at."""


class IsolatedMatchers:
    """Makes matchers in other processes, which are started when the first grammar comes."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """
        Args:
            vocabulary: called once, when it is needed.
        """
        self._read_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._trials: queue.LifoQueue[GuideProcess | None] = queue.LifoQueue()
        for _ in range(TRIALS):
            self._trials.put(None)
        self._running: dict[bytes, GuideProcess] = {}  # compilations, by their grammar
        self._interrupted: set[bytes] = set()
        self._running_lock = threading.Lock()
        self._masks: MaskServer | None = None
        self._standby: MaskServer | None = None  # takes over when that one ends
        self._retired: list[MaskServer] = []
        self._in_use: dict[bytes, tuple[int, GuidedDecoding]] = {}  # grammars, and how many outputs follow each
        self._promised: dict[bytes, tuple[float, GuidedDecoding]] = {}  # whose outputs begin by then
        self._unfit: set[bytes] = set()  # grammars that ended a process that stood by
        self._masks_lock = threading.RLock()
        self._closed = False
        self._closing = threading.Event()
        self._watching = False
        self.numbers = itertools.count()
        # Of matchers that are gone, their numbers and their grammars. A collector may append in any thread.
        self.dropped: deque[int] = deque()
        self.left: deque[bytes] = deque()

    # -- compilations --

    def start(self, guided: GuidedDecoding, seconds: float | None = None) -> RemoteMatcher:
        """See `ttpu_serve.guided.matchers.Matchers`.

        Raises:
            RequestError: the grammar is malformed, unsupported, too large or unmatchable.
            SlowGrammarError: it takes longer than `seconds`.
            CompilationEndedError: it was interrupted.
            MissingDependencyError: llguidance is not installed.
        """
        key = key_of(guided)
        with self._trial(key) as process:
            try:
                reason = process.try_out(key, guided, seconds)
            except GuideProcessError as error:
                if key in self._interrupted:
                    raise CompilationEndedError from error
                if error.overran and seconds is not None:
                    raise SlowGrammarError from error
                raise refusal(guided, str(error)) from error
            except RecursionError as error:
                raise refusal(guided, "it is nested too deeply") from error
        if reason:
            raise RequestError(reason)
        self.make_ready(guided)
        return RemoteMatcher(self, key, guided)

    def is_ready(self, guided: GuidedDecoding) -> bool:
        """See `ttpu_serve.guided.matchers.Matchers`. Another process of masks may have taken over since."""
        key = key_of(guided)
        with self._masks_lock:
            ready = self._masks is not None and self._masks.started and self._masks.knows(key)
            if ready:
                self._promise(key, guided)
        return ready

    def make_ready(self, guided: GuidedDecoding) -> None:
        """See `ttpu_serve.guided.matchers.Matchers`.

        Raises:
            RequestError: the grammar takes too much after all.
            MissingDependencyError: llguidance is not installed.
        """
        key = key_of(guided)
        try:
            self._into_masks(key, guided)
        except GuideProcessError:  # perhaps another grammar ended the process
            try:
                self._into_masks(key, guided)
            except GuideProcessError as error:
                raise refusal(guided, str(error)) from error

    def interrupt(self, guided: GuidedDecoding) -> None:
        """End the compilation of a grammar, if there is one."""
        key = key_of(guided)
        with self._running_lock:
            process = self._running.get(key)
            if process is not None:
                self._interrupted.add(key)
        if process is not None:
            process.kill()

    @contextmanager
    def _trial(self, key: bytes) -> Iterator[GuideProcess]:
        """A process that may end, for one grammar; waits for one."""
        process = self._trials.get()
        try:
            if process is None or not process.alive:
                process = self._started(TRIAL)
            with self._running_lock:
                self._running[key] = process
            yield process
            if process.full:
                process.kill()
        finally:
            with self._running_lock:
                self._running.pop(key, None)
                self._interrupted.discard(key)
            self._trials.put(process if process is not None and process.alive else None)

    # -- masks --

    def server(self, key: bytes, guided: GuidedDecoding) -> MaskServer:
        """The process that computes masks for a grammar, and how to give it grammars. One that is full is left when
        the process that stands by knows all grammars that outputs follow, and this one."""
        with self._masks_lock:
            self._count_left()
            masks, standby = self._masks, self._standby
            if masks is not None and not masks.alive:
                log.warning("the process that computes guides' masks ended; another one takes over")
                masks = self._masks = None
            if masks is not None and masks.full and standby is not None:
                self._give(key, guided)
                ready = standby.started and all(map(standby.knows, {key, *self._needed()} - self._unfit))
                if ready or masks.process.held > masks.process.bounds.memory + GRAMMAR_BYTES:
                    self._retired.append(masks)  # which may be computing a mask
                    masks = self._masks = None
            if masks is None:
                masks = self._masks = standby if standby is not None and standby.alive else self._new_server()
                self._standby = None
            if self._standby is None or not self._standby.alive:
                self._stand_by()
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="ttpu-guide-watch", daemon=True).start()
            return masks

    def opened(self, key: bytes, guided: GuidedDecoding) -> None:
        """Note that an output follows a grammar, which the process that stands by is given."""
        with self._masks_lock:
            count, _ = self._in_use.get(key, (0, guided))
            self._in_use[key] = count + 1, guided
            self._promised.pop(key, None)
            if not count:
                self._give(key, guided)

    def bury(self) -> list[int]:
        """End processes that others took over from; return the numbers of matchers that are gone since the last
        call."""
        with self._masks_lock:
            retired, self._retired = self._retired, []
            dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        for server in retired:  # a large one takes a while to end, for which outputs must not wait
            threading.Thread(target=server.retire, name="ttpu-guide-retire", daemon=True).start()
        return dropped

    def _count_left(self) -> None:
        for _ in range(len(self.left)):
            key = self.left.popleft()
            count, guided = self._in_use.pop(key)
            if count > 1:
                self._in_use[key] = count - 1, guided

    def _into_masks(self, key: bytes, guided: GuidedDecoding) -> None:
        """Give a grammar to the process that computes masks, before an output follows it."""
        with self._masks_lock:
            self._promise(key, guided)
        server, until = self.server(key, guided), time.monotonic() + TAKEOVER_SECONDS
        while server.full and not server.knows(key) and time.monotonic() < until:
            if self._closing.wait(LOOK_SECONDS):
                break
            server = self.server(key, guided)
        server.compile(key, guided)

    def _promise(self, key: bytes, guided: GuidedDecoding) -> None:
        """Have a process that takes over know a grammar whose outputs begin soon."""
        self._promised[key] = time.monotonic() + PROMISED_SECONDS, guided

    def _needed(self) -> dict[bytes, GuidedDecoding]:
        """The grammars that outputs follow, or will soon."""
        now = time.monotonic()
        for key in [key for key, (until, _) in self._promised.items() if until < now]:
            del self._promised[key]
        used = {key: guided for key, (_, guided) in self._in_use.items()}
        return used | {key: guided for key, (_, guided) in self._promised.items()}

    def _stand_by(self) -> None:
        """Start another process that may take over."""
        self._standby = self._new_server()
        for key, guided in self._needed().items():
            self._give(key, guided)

    def _give(self, key: bytes, guided: GuidedDecoding) -> None:
        """Give a grammar to the process that stands by."""
        standby = self._standby
        if standby is None or key in self._unfit:
            return

        def note(done: Any) -> None:
            if not done.cancelled() and isinstance(done.exception(), GuideProcessError):
                if len(self._unfit) >= MOST_UNFIT:
                    self._unfit.clear()
                self._unfit.add(key)

        standby.give(key, guided).add_done_callback(note)

    def _new_server(self) -> MaskServer:
        return MaskServer(lambda: self._started(MASKS))

    def _watch(self) -> None:
        """Give memory back when no output has a guide, and when the process that stands by holds too much."""
        while not self._closing.wait(IDLE_SECONDS):
            self.bury()
            with self._masks_lock:
                self._count_left()
                masks, standby, idle = self._masks, self._standby, not self._needed()
                if idle and masks is not None and masks.swollen(IDLE_MEMORY):
                    self._retired.append(masks)
                    self._masks = None
                elif standby is not None and (standby.full or (idle and standby.swollen(IDLE_MEMORY))):
                    self._retired.append(standby)
                    self._stand_by()

    def _started(self, bounds: Bounds) -> GuideProcess:
        if self._closed:
            raise RequestError("a guide was asked for, but the engine is closed: open another one.")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        process = GuideProcess(self._vocabulary, bounds)
        if self._closed:
            process.kill()
        return process

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        self._closing.set()
        with self._running_lock:
            busy = list(self._running.values())
        with suppress(queue.Empty):
            while True:
                idle = self._trials.get_nowait()
                busy += [] if idle is None else [idle]
        for process in busy:
            process.kill()
        with self._masks_lock:
            servers = [self._masks, self._standby, *self._retired]
            self._masks = self._standby = None
            self._retired = []
        for server in servers:
            if server is not None:
                server.kill()
        for _ in range(TRIALS):
            self._trials.put(None)


class RemoteMatcher:
    """A matcher of another process. It keeps its tokens, so that a new process can take it over."""

    def __init__(self, owner: IsolatedMatchers, key: bytes, guided: GuidedDecoding) -> None:
        self._owner, self._key, self._guided = owner, key, guided
        self._tokens: list[int] = []
        self._server: MaskServer | None = None
        self._number = -1
        self._lost = False  # a process in the middle of a call
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
        if self._server is None:
            self._call("consume", [])
        return self._accepting

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method of `ttpu_serve.guided.worker.Work` with this matcher's number."""
        while not self._error:
            server = self._owner.server(self._key, self._guided)
            try:
                if server is not self._server:
                    self._open(server)
                value = self._take(server.process.on_matcher(name, self._number, *arguments))
                self._lost = False
                return value
            except GuideProcessError as error:
                self._server = None
                if error.overran or self._lost or server.alive:
                    self._error, self._stopped = f"its guide cannot be followed ({error})", True
                self._lost = True  # once, for it may have been another grammar that ended the process
        return None

    def _open(self, server: MaskServer) -> None:
        """Open this matcher in another process."""
        server.wait_for(self._key, self._guided)
        dropped = self._owner.bury()
        if self._number < 0:
            self._owner.opened(self._key, self._guided)
        self._number = next(self._owner.numbers)
        self._take(server.process.on_matcher("open", self._number, self._key, self._tokens, dropped))
        self._server = server

    def _take(self, state: tuple[Any, ...]) -> Any:
        value, self._error, self._stopped, self._accepting = state
        return value

    def __del__(self) -> None:
        if self._number >= 0:
            self._owner.dropped.append(self._number)
            self._owner.left.append(self._key)
