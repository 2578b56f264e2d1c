"""A process that compiles grammars and computes masks, and what it may take. One that overruns is ended."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ttpu_core.errors import MissingDependencyError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.guided.matchers import Vocabulary

MIB = 2**20


@dataclass(frozen=True)
class Bounds:
    """What a process may take.

    Attributes:
        stack: bytes of each thread's stack. llguidance recurses along the references of a grammar.
        address_space: bytes.
        memory: bytes after which it is replaced.
        seconds: of the processor, that one compilation may take.
        compilers: grammars that it compiles at once.
        niceness: added to that of this process, which others come before.
        compiling_niceness: added to that in the threads that compile, which masks come before.
    """

    stack: int
    address_space: int
    memory: int
    seconds: float
    compilers: int = 1
    niceness: int = 0
    compiling_niceness: int = 0


TRIAL = Bounds(stack=4 * MIB, address_space=4096 * MIB, memory=128 * MIB, seconds=4.0, niceness=19)
MASKS = Bounds(
    stack=64 * MIB, address_space=16384 * MIB, memory=384 * MIB, seconds=10.0, compilers=3, compiling_niceness=19
)
GRAMMAR_BYTES = 256 * MIB
"""That one grammar may take."""
MASK_SECONDS = 0.5
"""Of the processor, that one mask may take, for which all outputs wait. Most take less than a millisecond."""
TRIED_SECONDS = 0.05
"""That each of the first tokens of an output may take when a grammar is tried out."""
START_SECONDS = 60.0
"""That a process may take to start and to read the vocabulary."""
PATIENCE = 5
"""Times its seconds that a call may last, where others leave the process little of the processor."""
EXTRA_SECONDS = 0.1
"""Of the processor, that a mask may take after its seconds have passed on the clock."""
LOOK_SECONDS = 0.05
"""Between two looks at what a call has taken."""


class GuideProcessError(Exception):
    """The process ended, or overran its time and was ended.

    Attributes:
        overran: it was ended because this call took too long.
    """

    def __init__(self, reason: str, *, overran: bool = False) -> None:
        super().__init__(reason)
        self.overran = overran


class GuideProcess:
    """A `ttpu_serve.guided.worker`.

    Attributes:
        bounds: what it may take.
        held: bytes of memory that it holds, as it told last.
    """

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
        pipes = [Pipe() for _ in range(bounds.compilers + 1)]
        self._masks = bounds.compilers  # the number of the channel of masks, behind those of compilations
        self._channels = tuple(own for own, _ in pipes)
        self._locks = tuple(threading.Lock() for _ in pipes)
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()  # channels of compilations
        for number in range(bounds.compilers):
            self._idle.put(number)
        theirs = [other.fileno() for _, other in pipes]
        numbers = (bounds.stack, bounds.address_space, *theirs)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ttpu_serve.guided.worker", *map(str, numbers)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _, other in pipes:
            other.close()
        _make_nicer(self._process.pid, bounds.niceness)
        self._threads: tuple[int, ...] = ()
        self._threads = tuple(self._call(number, START_SECONDS, "thread") for number in range(len(pipes)))
        for thread in self._threads[: bounds.compilers]:
            _make_nicer(thread, bounds.niceness + bounds.compiling_niceness)
        self.held = self._call(0, START_SECONDS, "vocabulary", vocabulary)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def full(self) -> bool:
        """Whether it holds more than it should."""
        return self.held > self.bounds.memory

    def compile(self, key: bytes, guided: GuidedDecoding) -> str:
        """Compile a grammar; return why it is refused, or nothing.

        Raises:
            GuideProcessError: the process ended, or was ended, also because the grammar takes too much.
        """
        return self._compile(self.bounds.seconds, "compile", key, guided)

    def try_out(self, key: bytes, guided: GuidedDecoding, seconds: float | None = None) -> str:
        """Compile a grammar, follow it for a few tokens, and forget it; return why it is refused, or nothing.

        Args:
            key: of the grammar.
            guided: the grammar.
            seconds: of the processor, that it may take; None takes the bounds'.

        Raises:
            GuideProcessError: the process ended, or was ended, also because the grammar takes too much.
        """
        return self._compile(seconds or self.bounds.seconds, "try_out", key, guided, TRIED_SECONDS)

    def on_matcher(self, name: str, *arguments: Any) -> Any:
        """Call a method of `ttpu_serve.guided.worker.Work` that concerns a matcher.

        Raises:
            GuideProcessError: the process ended, or was ended.
        """
        return self._call(self._masks, MASK_SECONDS, name, *arguments)

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def retire(self) -> None:
        """End it when no mask is being computed."""
        with self._locks[self._masks]:
            self.kill()

    def _compile(self, seconds: float, *request: Any) -> str:
        number, before = self._idle.get(), self.held
        try:
            reason, self.held = self._call(number, seconds, *request)
        finally:
            self._idle.put(number)
        if self.held - before > GRAMMAR_BYTES:
            self.kill()
            raise GuideProcessError("it takes too much memory")
        return str(reason)

    def _call(self, number: int, seconds: float, *request: Any) -> Any:
        channel: Connection = self._channels[number]
        with self._locks[number]:
            try:
                channel.send(request)
                self._wait(number, seconds)
                done, result = channel.recv()
            except (EOFError, OSError) as error:
                self.kill()
                raise GuideProcessError("it takes too much stack or memory") from error
        if not done and request[0] == "vocabulary":
            raise MissingDependencyError(str(result))
        if not done:
            raise GuideProcessError(str(result))
        return result

    def _wait(self, number: int, seconds: float) -> None:
        """Wait for an answer.

        Raises:
            GuideProcessError: it took too long, and the process was ended.
        """
        channel, began = self._channels[number], time.monotonic()
        before = None if number == self._masks else self._taken(number)  # masks come often, and seldom take long
        if channel.poll(seconds):
            return
        if before is None:
            before = self._taken(number) - seconds + EXTRA_SECONDS
        while not channel.poll(LOOK_SECONDS):
            if self._taken(number) - before > seconds or time.monotonic() - began > PATIENCE * seconds:
                self.kill()
                raise GuideProcessError(f"it takes longer than {seconds:g} seconds", overran=True)

    def _taken(self, number: int) -> float:
        """Seconds of the processor that the thread of a channel has taken."""
        if not self._threads:
            return 0.0
        try:
            stat = Path(f"/proc/{self._process.pid}/task/{self._threads[number]}/stat").read_text(encoding="ascii")
        except OSError:  # it ended
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _make_nicer(number: int, niceness: int) -> None:
    """Let others come before a process or a thread, by more than they come before this process."""
    with suppress(OSError):  # it ended at once
        os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
